"""``sn.evidence`` on densities with a known log Z, beside other people's methods.

    python benchmarks/evidence.py --method ours --seeds 0 1 2 3 4
    python benchmarks/evidence.py --method ours --draws mcmc
    python benchmarks/evidence.py --method ours --draws ensemble --n 5000 --seeds {0..39}
    python benchmarks/evidence.py --method gaussian_bridge
    out/peers/harmonic/bin/python benchmarks/evidence.py --method harmonic --seeds 0 1 2
    python docs/generate.py

Peers stand in environments of their own (``pip install -r benchmarks/peers/NAME.txt``). A second
call adds what is missing; where a peer failed or took more than ``--limit`` seconds of a core with
one seed, it is not asked for others. Every method works in unconstrained coordinates and is
charged for each evaluation of the density:

- *ours*: 4,000 draws; as many samples of ``q``, 8,003 evaluations at most.
- *gaussian_bridge*: half of the draws fit a Gaussian, which costs no evaluation; the other half and
  6,003 samples of it are bridged, which makes as many evaluations as ours.
- *harmonic* (learnt harmonic mean, spline flow): 8,008 draws, half of them to train the flow.
- *dynesty*, *nautilus*: nested sampling in the box of 20,000 exact draws, widened by a half.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
from scipy.special import logsumexp

from evidence_targets import (
    FOR_ENSEMBLES,
    TARGETS,
    Target,
    ensemble_draws,
    exact_draws,
    free,
    mcmc_draws,
)
from measuring import Results, Row, Stopwatch, in_processes, provenance, time_limit

N_DRAWS = 4000


def ours(target: Target, draws: np.ndarray, seed: int) -> Row:
    import torch

    import selfnorm as sn

    torch.set_num_threads(1)
    estimate = sn.evidence(target.log_density, draws, support=target.support, seed=seed)
    figures = ("lower", "upper", "importance", "reciprocal", "overlap", "r_hat", "support_share")
    figures += ("pareto_k_draws", "pareto_k_samples", "effective_draws")
    return {
        "log_z": estimate.log_z,
        "se": estimate.se,
        "evaluations": estimate.n_evaluations,
        "reliable": estimate.reliable,
        "reasons": list(estimate.reasons),
        **{name: getattr(estimate, name) for name in figures},
    }


def gaussian_bridge(target: Target, draws: np.ndarray, seed: int) -> Row:
    """Meng & Wong's bridge with a Gaussian fitted to the first half of the draws."""
    log_density, to_free, d = free(target)
    y = to_free(draws.reshape(-1, target.dim))
    half = len(y) // 2
    fit, held = y[:half], y[half:]
    mean, root = fit.mean(0), np.linalg.cholesky(np.cov(fit.T).reshape(d, d))
    samples = mean + np.random.default_rng(seed).normal(size=(3 * half + 3, d)) @ root.T

    def log_ratio(y: np.ndarray) -> np.ndarray:
        z = np.linalg.solve(root, (y - mean).T)
        log_q = -0.5 * (z**2).sum(0) - d / 2 * math.log(2 * math.pi) - np.log(np.diag(root)).sum()
        return log_density(y) - log_q

    l1, l2 = log_ratio(held), log_ratio(samples)
    n, m = len(l1), len(l2)
    log_s1, log_s2 = math.log(n / (n + m)), math.log(m / (n + m))
    log_z = float(np.median(l1))
    for _ in range(10_000):
        of_samples = l2 - np.logaddexp(log_s1 + l2, log_s2 + log_z)
        of_draws = -np.logaddexp(log_s1 + l1, log_s2 + log_z)
        last, log_z = log_z, float(logsumexp(of_samples) - logsumexp(of_draws)) - math.log(m / n)
        if abs(log_z - last) < 1e-9:
            break
    f1, f2 = np.exp(of_samples - logsumexp(of_samples)), np.exp(of_draws - logsumexp(of_draws))
    variance = sum(float((f**2).sum() - 1 / len(f)) for f in (f1, f2))
    return {"log_z": log_z, "se": math.sqrt(max(variance, 0)), "evaluations": len(l1) + len(l2)}


def harmonic(target: Target, draws: np.ndarray, seed: int) -> Row:
    import harmonic as hm

    log_density, to_free, d = free(target)
    more = exact_draws(target, len(draws.reshape(-1, target.dim)) + 8, 500 + seed)
    y = to_free(np.concatenate([draws.reshape(-1, target.dim), more]))
    log_p = log_density(y)
    chains = hm.Chains(d)
    chains.add_chains_3d(y.reshape(8, -1, d), log_p.reshape(8, -1))
    train, test = hm.utils.split_data(chains, training_proportion=0.5)
    model = hm.model.RQSplineModel(d, standardize=True, temperature=0.9)
    model.fit(train.samples, epochs=30, verbose=False)
    evidence = hm.Evidence(test.nchains, model)
    evidence.add_chains(test)
    low_high = evidence.compute_ln_inv_evidence_errors()
    log_z = -float(evidence.ln_evidence_inv)
    return {"log_z": log_z, "se": float(np.abs(low_high).mean()), "evaluations": len(y)}


def _box(target: Target) -> tuple[np.ndarray, np.ndarray]:
    y = free(target)[1](exact_draws(target, 20_000, 99))
    low, high = y.min(0), y.max(0)
    return low - (high - low) / 4, high + (high - low) / 4


def dynesty(target: Target, draws: np.ndarray, seed: int) -> Row:  # noqa: ARG001
    import dynesty as peer

    log_density, _, d = free(target)
    low, high = _box(target)
    sampler = peer.NestedSampler(
        lambda y: float(np.maximum(log_density(y[None])[0], -1e300)),
        lambda u: low + (high - low) * u,
        d,
        rstate=np.random.default_rng(seed),
    )
    sampler.run_nested(print_progress=False)
    results = sampler.results
    volume = np.log(high - low).sum()
    return {
        "log_z": float(results.logz[-1] + volume),
        "se": float(results.logzerr[-1]),
        "evaluations": int(np.sum(results.ncall)),
    }


def nautilus(target: Target, draws: np.ndarray, seed: int) -> Row:  # noqa: ARG001
    from nautilus import Prior, Sampler

    log_density, _, d = free(target)
    low, high = _box(target)
    prior = Prior()
    for j in range(d):
        prior.add_parameter(f"y{j}", dist=(low[j], high[j]))
    sampler = Sampler(
        prior,
        lambda y: np.maximum(log_density(np.atleast_2d(y)), -1e300),
        pass_dict=False,
        vectorized=True,
        seed=seed,
    )
    sampler.run(verbose=False)
    log_z = float(sampler.log_z + np.log(high - low).sum())
    se = 1 / math.sqrt(max(float(sampler.n_eff), 1.0))
    return {"log_z": log_z, "se": se, "evaluations": int(sampler.n_like)}


DRAWS = {"exact": exact_draws, "mcmc": mcmc_draws, "ensemble": ensemble_draws}
METHODS = {f.__name__: f for f in (ours, gaussian_bridge, harmonic, dynesty, nautilus)}


def one(method: str, keys: Row, limit: float | None) -> Row:
    """One row: a method on a target."""
    target = TARGETS[keys["target"]]
    draws = DRAWS[keys["draws"]](target, keys["n"], keys["seed"])
    clock = Stopwatch()
    try:
        with time_limit(limit):
            row = METHODS[method](target, draws, keys["seed"])
        row["error"] = row["log_z"] - target.log_z
    except Exception as error:  # a method that fails is a result
        row = {"failed": f"{type(error).__name__}: {error}"[:300]}
    return {"method": method, **keys, **row, "dim": target.dim, **clock()}


def run(args: argparse.Namespace) -> None:
    results = Results(args.out / f"{args.method}.json", provenance())
    ensembles = args.draws == "ensemble"
    others = [name for name in TARGETS if name not in FOR_ENSEMBLES]
    targets = args.targets or (FOR_ENSEMBLES if ensembles else others)
    names = sorted(targets, key=lambda name: TARGETS[name].dim)
    shape = {"draws": args.draws, "n": args.n}
    wanted = [{"target": name, **shape, "seed": seed} for seed in args.seeds for name in names]
    failed = {row["target"] for row in results.rows if "failed" in row}
    wanted = [k for k in wanted if k["target"] not in failed and not results.has(k)]
    calls = [(args.method, keys, args.limit) for keys in wanted]
    for row in in_processes(one, calls, args.jobs):
        results.add(row)
        print(_line(row["target"], row), flush=True)
    for name in names if args.method == "ours" else ():
        rows = [r for r in results.rows if r["target"] == name and r["draws"] == args.draws]
        z = np.array([r["error"] / r["se"] for r in rows if r["n"] == args.n and "error" in r])
        print(f"{name:24s} error / se of {len(z)}: mean {z.mean():+.2f}, deviation {z.std():.2f}")


def _line(name: str, row: Row) -> str:
    if "failed" in row:
        return f"{name:24s} {row['failed']}"
    doubts = "" if row.get("reliable", True) else f"  {' '.join(row['reasons'])[:90]}"
    return (
        f"{name:24s} error {row['error']:+.4f} se {row['se']:.4f}  {row['evaluations']:6d} "
        f"evaluations {row['seconds']:6.1f} s ({row['cpu_seconds']:.1f} of a core){doubts}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--method", choices=METHODS, default="ours")
    parser.add_argument("--draws", choices=DRAWS, default="exact")
    parser.add_argument("--targets", nargs="*", choices=TARGETS)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    parser.add_argument("--n", type=int, default=N_DRAWS)
    parser.add_argument("--jobs", type=int, default=1, help="rows at once, a process each")
    parser.add_argument("--limit", type=float, help="seconds of a core for a row")
    parser.add_argument("--out", type=Path, default=Path("results/evidence"))
    run(parser.parse_args())


if __name__ == "__main__":
    main()
