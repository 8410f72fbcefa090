"""Is ``EnergyDensity`` a distribution in one and two dimensions? Integral, samples, truth.

    python benchmarks/small_dimensions.py --out results/small_dimensions.json --jobs 2

Each fit by default settings is looked at from outside, in the units of its table. The density is
summed by Gauss-Legendre on panels between quantiles of the rows and, ever wider, on both sides of
them; ``integral`` is to be 1. ``ks`` is the distance of the distribution function of 5,000 samples
from that of the density (in two dimensions the larger one of both marginals), ``ks_line`` its 99 %
line. ``kl`` is the distance of the fit from the truth in nats, by 20,000 draws of the truth. Runs
that the file has are not repeated.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import stats
from scipy.special import logsumexp

from measuring import rows_in, write
from selfnorm import EnergyDensity
from selfnorm.datasets.toy2d import DENSITIES

SIZES, DRAWN, TRUE_ROWS = (300, 1000, 5000), 5000, 20_000
LINE = {1: 1.628, 2: 1.731}  # 99 % of the Kolmogorov-Smirnov statistic, of the larger one of two
PANELS, NODES, OCTAVES = (1600, 110), (8, 4), 60


class Truth(NamedTuple):
    """A known distribution: rows ``(n, d)`` from a generator, and their log-density."""

    draw: Callable[[int, np.random.Generator], np.ndarray]
    log_density: Callable[[np.ndarray], np.ndarray]


def line(distribution: Any) -> Truth:
    """One dimension, by scipy."""
    return Truth(
        lambda n, rng: distribution.rvs(size=(n, 1), random_state=rng),
        lambda x: distribution.logpdf(x[:, 0]),
    )


def normals(means: Any, covariances: Any, shares: Any = None) -> Truth:
    """A mixture of normal distributions ``(K, d)``, ``(K, d, d)``."""
    means = np.asarray(means, dtype=float)
    roots = np.linalg.cholesky(np.broadcast_to(covariances, (*means.shape, means.shape[1])))
    shares = np.full(len(means), 1 / len(means)) if shares is None else np.asarray(shares)

    def draw(n: int, rng: np.random.Generator) -> np.ndarray:
        k = rng.choice(len(means), n, p=shares)
        noise = rng.normal(size=(n, means.shape[1]))
        return means[k] + np.einsum("nij,nj->ni", roots[k], noise)

    def log_density(x: np.ndarray) -> np.ndarray:
        of = [
            math.log(w) + stats.multivariate_normal.logpdf(x, m, r @ r.T).reshape(len(x))
            for w, m, r in zip(shares, means, roots, strict=True)
        ]
        return np.asarray(logsumexp(of, axis=0))

    return Truth(draw, log_density)


def two_moons() -> Truth:
    """Two half circles of a hundred points each, blurred."""
    angle = np.linspace(0, np.pi, 100)
    upper = np.stack([np.cos(angle), np.sin(angle)], 1)
    return normals(np.concatenate([upper, [1.0, 0.5] - upper]), 0.01 * np.eye(2))


def banana() -> Truth:
    """A parabola with noise around it."""

    def draw(n: int, rng: np.random.Generator) -> np.ndarray:
        first = rng.normal(size=n)
        return np.stack([first, first**2 + 0.3 * rng.normal(size=n)], 1)

    def log_density(x: np.ndarray) -> np.ndarray:
        of_first = stats.norm.logpdf(x[:, 0])
        return np.asarray(of_first + stats.norm.logpdf(x[:, 1], x[:, 0] ** 2, 0.3))

    return Truth(draw, log_density)


def plane(name: str) -> Truth:
    """One of the library's own sets."""
    density = DENSITIES[name]
    return Truth(
        lambda n, rng: density.sample(n, rng).numpy(),
        lambda x: density.log_density(torch.from_numpy(x)).numpy(),
    )


TRUTHS: dict[str, Callable[[], Truth]] = {
    "normal": lambda: line(stats.norm(3, 2)),
    "log-normal .5": lambda: line(stats.lognorm(0.5, scale=math.e)),
    "log-normal 1": lambda: line(stats.lognorm(1.0, scale=math.e)),
    "log-normal 1.5": lambda: line(stats.lognorm(1.5, scale=math.e)),
    "Student t2": lambda: line(stats.t(2)),
    "Cauchy": lambda: line(stats.cauchy()),
    "exponential": lambda: line(stats.expon()),
    "gamma .5": lambda: line(stats.gamma(0.5, scale=3)),
    "beta .5 .5": lambda: line(stats.beta(0.5, 0.5)),
    "uniform": lambda: line(stats.uniform(-1, 2)),
    "two near": lambda: normals([[-1.5], [1.5]], np.eye(1)),
    "two far": lambda: normals([[-10.0], [10.0]], np.eye(1), [0.3, 0.7]),
    "Laplace": lambda: line(stats.laplace()),
    "Gumbel": lambda: line(stats.gumbel_r()),
    "Pareto 1.5": lambda: line(stats.pareto(1.5)),
    "skew-normal": lambda: line(stats.skewnorm(5)),
    "triangular": lambda: line(stats.triang(0.3)),
    "Weibull .7": lambda: line(stats.weibull_min(0.7)),
    "chi-squared 1": lambda: line(stats.chi2(1)),
    "beta .8 .3": lambda: line(stats.beta(0.8, 0.3)),
    "narrow and wide": lambda: normals([[0.0], [0.0]], [[[1e-4]], [[1.0]]]),
    "pinwheel": lambda: plane("pinwheel"),
    "two moons": two_moons,
    "checkerboard": lambda: plane("checkerboard"),
    "funnel": lambda: plane("funnel"),
    "banana": banana,
    "correlated .999": lambda: normals([[0.0, 0.0]], [[[1.0, 0.999], [0.999, 1.0]]]),
}


def axis(x: np.ndarray, n_panels: int, n_nodes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Edges of panels on the whole line, nodes and weights of Gauss-Legendre in each.

    Half of the inner panels lie between quantiles of ``x``, half are even; those beyond double.
    """
    low, high = x.min(), x.max()
    inner = np.r_[
        np.quantile(x, np.linspace(0, 1, n_panels // 2)),
        np.linspace(low, high, n_panels // 2),
        np.quantile(x, [0.01, 0.99]),
    ]
    if n_panels > 200:  # a component may be as narrow as this around a row far out
        ordered, near = np.sort(x), x.std() * np.outer([-1, 1], [3e-2, 3e-3, 1e-3, 3e-4]).ravel()
        inner = np.r_[inner, np.add.outer(ordered[[*range(8), *range(-8, 0)]], near).ravel()]
        # and rows may crowd at an end: panels that double from far less than their distances there
        wide = 2.0 ** np.arange(-10, 11)
        inner = np.r_[inner, low - wide * (ordered[8] - low), high + wide * (high - ordered[-9])]
        inner = np.r_[inner, ordered[:60], ordered[-60:]]
        low, high = inner.min(), inner.max()
    beyond = (high - low) / n_panels * (2.0 ** np.arange(OCTAVES // 2) - 0.999)
    edges = np.unique(np.r_[low - beyond, inner, high + beyond])
    node, weight = np.polynomial.legendre.leggauss(n_nodes)
    half = np.diff(edges)[:, None] / 2
    return edges, (edges[:-1, None] + half * (1 + node)).ravel(), (half * weight).ravel()


def looked_at(model: Any, x: np.ndarray, drawn: np.ndarray) -> dict[str, Any]:
    """Integral of a density over everything, and how far its samples ``(m, d)`` are from it."""
    d = x.shape[1]
    axes = [axis(column, PANELS[d - 1], NODES[d - 1]) for column in x.T]
    nodes = np.stack(np.meshgrid(*(a[1] for a in axes), indexing="ij"), -1).reshape(-1, d)
    parts = np.array_split(nodes, max(1, len(nodes) // 20_000))
    p = np.exp(np.concatenate([model.score_samples(part) for part in parts]))
    p = p.reshape([len(a[1]) for a in axes])
    for j, (_, _, weights) in enumerate(axes):
        p = p * weights.reshape([-1 if i == j else 1 for i in range(d)])
    distances = []
    for j, (edges, _, _) in enumerate(axes):
        mass = p.sum(tuple(i for i in range(d) if i != j)).reshape(len(edges) - 1, -1).sum(1)
        ordered = np.sort(drawn[:, j])
        below = np.interp(ordered, edges, np.r_[0, mass.cumsum()])
        place = np.arange(len(ordered))
        off = np.maximum(below - place / len(ordered), (place + 1) / len(ordered) - below)
        distances.append(float(off.max()))
    return {
        "integral": float(p.sum()),
        "ks": max(distances),
        "ks_line": LINE[d] / math.sqrt(len(drawn)),
    }


def one_fit(name: str, n: int, seed: int) -> dict[str, Any]:
    """A fit of ``n`` rows of a distribution, and what it is worth."""
    torch.set_num_threads(1)
    truth, rng = TRUTHS[name](), np.random.default_rng(1000 + seed)
    x, other = truth.draw(n, rng), truth.draw(TRUE_ROWS, rng)
    began = time.process_time()
    model = EnergyDensity(random_state=seed).fit(x)
    seconds = time.process_time() - began
    log_p = model.score_samples(other)
    off = truth.log_density(other) - log_p
    bounds = model.bounds(other[:5000], random_state=0)
    return {
        "distribution": name,
        "n": n,
        "seed": seed,
        "columns": x.shape[1],
        "method": model.method_,
        "members": {m.name: round(m.weight, 4) for m in model.members_ if m.weight > 0},
        "scores": {m.name: round(m.score, 4) for m in model.members_},
        **looked_at(model, x, model.sample(DRAWN, random_state=seed + 1)),
        "kl": float(off.mean()),
        "kl_se": float(off.std() / math.sqrt(len(off))),
        "held_out": model.judgement_.score,
        "lower": bounds.lower,
        "upper": bounds.upper,
        "reliable": bounds.reliable,
        "cpu_seconds": round(seconds, 2),
    }


def main() -> None:
    """Run all fits that the file lacks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results/small_dimensions.json"))
    parser.add_argument("--only", nargs="+", default=list(TRUTHS), choices=list(TRUTHS))
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    began, rows = time.perf_counter(), rows_in(options.out)
    done = {(row["distribution"], row["n"], row["seed"]) for row in rows}
    runs = [
        run
        for n in options.sizes
        for run in ((name, n, seed) for seed in range(options.seeds) for name in options.only)
        if run not in done
    ]
    with ProcessPoolExecutor(options.jobs) as pool:
        for future in as_completed([pool.submit(partial(one_fit, *run)) for run in runs]):
            rows.append(row := future.result())
            print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()})
            order = list(TRUTHS)
            rows.sort(key=lambda r: (r["n"], order.index(r["distribution"]), r["seed"]))
            write(options.out, rows, seconds=round(time.perf_counter() - began, 1))


if __name__ == "__main__":
    main()
