"""What each piece is worth: one small table for every question a reviewer asks.

    python benchmarks/ablations.py --data DIR --device cuda --jobs 4 --out results/ablations

``plane``: the four two-dimensional sets, whose limits are known, by the library's own recipe.
Objectives (SNL, NCE, ranking NCE, IS-ML) at 16 to 256 samples a step, equal steps otherwise, and
the share of the heavy-tailed part in the proposal. ``chain``: three real tables by one small chain
(one order, width 128, 1,000 steps unless stated): objectives, samples, orders averaged, with and
without energy. Every model is normalised by quadrature, whatever it was trained with; ``b`` is
judged apart. Three seeds. Rows are written as they come; a second call adds what is missing.
"""

from __future__ import annotations

import argparse
import copy
import functools
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tabular
from measuring import commit, need, rows_in, synchronise, write
from seeds import ChainSeeds, SeedsTask, sampled_scores
from selfnorm.chain.task import AutoregressiveTask
from selfnorm.functional import importance_ml, log_mean_exp, nce, ranking_nce, snl
from selfnorm.paper.report import markdown_table
from table_frames import in_processes

OBJECTIVES = ("snl", "nce", "ranking_nce", "importance_ml")
LABELS = {"snl": "SNL", "nce": "NCE", "ranking_nce": "ranking NCE", "importance_ml": "IS-ML"}
PLANE_SAMPLES = (16, 64, 256)
SHARES = (0.0, 0.02, 0.1, 0.2, 0.5, 1.0)  # of the heavy-tailed part of a proposal
CHAIN_SETS = ("mammography", "california", "magic.gamma")
CHAIN_SAMPLES = (1, 8)
ORDERS = (1, 2, 4, 8)
COMPONENTS = (10, 30)  # of a mixture without energy
NODES = (8, 16, 64, 256)  # of a quadrature that takes the place of b
SIZES: dict[str, Any] = {
    "hidden": 128,
    "blocks": 2,
    "components": 10,
    "context": 32,
    "energy_hidden": 32,
    "energy_blocks": 1,
    "drop": 0.1,
    "encoding": "quantiles",
}
LOOP: dict[str, Any] = {
    "batch_size": 256,
    "max_epochs": 10**6,
    "max_steps": 1000,
    "lr": 2e-3,
    "weight_decay": 1e-2,
    "clip_norm": 5.0,
    "ema": 0.995,
    "validate_every": 100,
    "progress": False,
}
KEYS = ("part", "dataset", "choice", "seed")
Row = dict[str, Any]


# -- the plane -----------------------------------------------------------------------------------


def plane_groups(seeds: list[int], *, apart: bool) -> Iterator[list[Row]]:
    """Runs of one call of ``fit_many``: all that draw as many samples, or set and seed apart."""
    from selfnorm.datasets import toy2d

    if apart:  # for a CPU, where one batched model of all gains nothing
        for each in ([seed] for seed in seeds):
            for group in plane_groups(each, apart=False):
                for name in toy2d.NAMES:
                    yield [run for run in group if run["dataset"] == name]
        return

    def runs(choices: list[Row]) -> list[Row]:
        return [{"dataset": s, "seed": k} | c for k in seeds for s in toy2d.NAMES for c in choices]

    for n in PLANE_SAMPLES:
        of = [{"part": "objectives", "objective": o, "n_samples": n} for o in OBJECTIVES]
        yield runs([c | {"choice": f"{c['objective']}, {n}"} for c in of])
    shares = [{"part": "defensive", "share": s, "choice": f"{s:g}"} for s in SHARES]
    yield runs([c | {"objective": "snl", "n_samples": PLANE_SAMPLES[-1]} for c in shares])


@functools.cache
def prepared(dataset: str, seed: int) -> tuple[Any, Any]:
    """A set and the recipe for it, not trained."""
    from selfnorm.datasets import toy2d
    from selfnorm.density import joint_density

    split = toy2d.load(dataset, seed=seed)
    torch.manual_seed(seed)
    return split, joint_density(split.train)


def train_plane(jobs: list[Row], device: str, max_steps: int | None) -> list[Row]:
    """All runs of a group as one batched model."""
    import selfnorm as sn

    torch.set_num_threads(1)

    made = []
    for job in jobs:
        split, recipe = prepared(job["dataset"], job["seed"])
        recipe = copy.deepcopy(recipe)
        proposal = recipe.proposal
        share = job.get("share", proposal.weight)
        if share in (0.0, 1.0):
            proposal = proposal.heavy if share else proposal.sharp
        else:
            proposal = sn.Defensive(proposal.sharp, proposal.heavy, weight=share)
        made.append((recipe.model.to(device), proposal.to(device), split, recipe.options))
    steps = {} if max_steps is None else {"max_steps": max_steps}
    began = time.perf_counter()
    histories = sn.fit_many(
        [model for model, *_ in made],
        [split.train for _, _, split, _ in made],
        proposal=[proposal for _, proposal, *_ in made],
        objective=[job["objective"] for job in jobs],
        n_samples=jobs[0]["n_samples"],
        val_data=[split.val for _, _, split, _ in made],
        seed=0,
        progress=False,
        options=made[0][3].given(**steps),
    )
    synchronise(device)
    seconds = (time.perf_counter() - began) / len(jobs)
    found = []
    for job, (model, proposal, split, _), history in zip(jobs, made, histories, strict=True):
        with torch.no_grad():
            test = split.draw(20_000, seed=10_000 + job["seed"]).to(device)
            bounds = sn.evaluate(model, test, proposal=proposal, n_samples=20_000, seed=0)
            log_norm, _ = sn.exact_log_norm(model, 2, n_points=1025)
            exact = float(model.log_unnormalized(test).double().mean()) - log_norm
        row = {key: job[key] for key in (*KEYS, "n_samples")} | {
            "gap_to_limit": float(split.log_density(test.cpu()).double().mean()) - exact,
            "exact": exact,
            "b_off": float(model.log_norm.detach()) - log_norm,
            "ess": bounds.ess,
            "pareto_k": bounds.pareto_k,
            "reliable": bounds.reliable,
            "diverged": history.stopped == "diverged",
            "n_steps": history.n_steps,
            "seconds": round(seconds, 3),
        }
        found.append(row)
    return found


# -- the chain -----------------------------------------------------------------------------------


class ChainTask(SeedsTask, AutoregressiveTask):
    """The training of chains by another objective, factor by factor; without energy: ``None``.

    The seeds of one choice are trained together.
    """

    def __init__(self, model: ChainSeeds, objective: str | None, **options: Any) -> None:
        super().__init__(model, **options)
        self.of_factors = objective

    def loss(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:
        """Minus the log-likelihood of the proposals and the objective, a row; summed over seeds."""
        at, log_q, f, log_w, _ = self.module.at_batch(batch, self.n_samples)
        if self.of_factors is None:
            value = 0.0 * f.sum()
        elif self.of_factors == "snl":
            value = snl(f, log_w, self.module.log_norm(at), reduction="none").sum(-1).mean()
        elif self.of_factors == "nce":
            value = nce(f, log_w, self.module.log_norm(at)) * f.shape[-1]
        elif self.of_factors == "ranking_nce":
            value = ranking_nce(f, log_w) * f.shape[-1]
        else:
            value = importance_ml(f, log_w, reduction="none").sum(-1).mean()
        loss = -(log_q.sum(-1).mean() + value)
        return loss * self.module.n_seeds, {"objective": -loss.detach()}

    def scores_of(self, data: tuple[Tensor, ...]) -> Tensor:
        """Held-out log-likelihood ``(S,)`` by sampled normalisers: two objectives train no b."""
        return sampled_scores(self.module, data, self.validation_samples)


def chain_groups(seeds: list[int]) -> Iterator[list[Row]]:
    """Every run once, the seeds of a choice together: what several tables show is trained for the
    first.
    """
    choices: list[Row] = [
        {"objective": objective, "n_samples": n, "choice": f"{objective}, {n}"}
        for n in CHAIN_SAMPLES
        for objective in OBJECTIVES
    ]
    choices += [{"orderings": n, "choice": f"orders, {n}"} for n in ORDERS[1:]]
    alone = {"objective": None}
    choices += [alone | {"components": n, "choice": f"mixture alone, {n}"} for n in COMPONENTS]
    for name in CHAIN_SETS:
        for choice in choices:
            yield [{"part": "chain", "dataset": name, "seed": seed} | choice for seed in seeds]


def train_chains(jobs: list[Row], data: str, device: str, max_steps: int | None) -> list[Row]:
    """One choice of a chain on a real table, all seeds as one model."""
    from selfnorm.chain import AutoregressiveEBM
    from selfnorm.training import TrainingOptions, run

    torch.set_num_threads(1)
    job = jobs[0]
    table = tabular.load(job["dataset"], data)
    sizes = SIZES | {k: job[k] for k in ("orderings", "components") if k in job}
    chains = []
    for each in jobs:
        torch.manual_seed(each["seed"])
        chains.append(AutoregressiveEBM(table.dim, **sizes).to(device))
    model = ChainSeeds(chains, **sizes).to(device)
    objective = job.get("objective", "snl")
    task = ChainTask(model, objective, n_samples=job.get("n_samples", 8), polish_steps=100)
    loop = LOOP | ({} if max_steps is None else {"max_steps": max_steps})
    loop |= {"batch_size": len(jobs) * loop["batch_size"], "seed": job["seed"]}
    synchronise(device)
    began = time.perf_counter()
    history = run(
        task,
        (table.train_values.to(device),),
        val_data=(table.val_values.to(device),),
        options=TrainingOptions(**loop),
    )
    synchronise(device)
    told = {"n_steps": history.n_steps, "stopped": history.stopped}
    told |= {"seconds": round((time.perf_counter() - began) / len(jobs), 2)}
    told["trained_together"] = len(jobs)
    test = table.test.to(device)[:4000]
    found = []
    for i, (each, chain) in enumerate(zip(jobs, model.split(), strict=True)):
        scores = [at[i] for at in task.scores]
        best = {"best_step": (1 + scores.index(max(scores))) * loop["validate_every"]}
        keys = {k: each[k] for k in KEYS}
        found.append(keys | judged_chain(chain.eval(), test, device) | best | told)
    return found


def judged_chain(model: Any, test: Tensor, device: str) -> Row:
    """Exact log-likelihood, what other normalisers are off by and cost, bounds."""
    from selfnorm.chain import row_bounds

    exact = model.log_prob(test, normalizer="quadrature", n_nodes=1024).double()
    found: Row = {"exact": float(exact.mean()), "ways": []}
    for nodes in (0, *NODES):  # 0: the learned b
        how = {"normalizer": "quadrature", "n_nodes": nodes} if nodes else {}
        model.log_prob(test, **how)
        synchronise(device)
        start = time.perf_counter()
        off = model.log_prob(test, **how).double() - exact
        synchronise(device)
        took = 1e6 * (time.perf_counter() - start) / len(test)
        error = {"rms": float(off.square().mean().sqrt()), "mean": float(off.mean())}
        found["ways"].append({"nodes": nodes, "us_a_row": round(took, 2)} | error)
    torch.manual_seed(0)
    figures = row_bounds(model, test[:1000], n_samples=200)
    with torch.no_grad():
        at = model.at_rows(test)
    proposal = (at[1].sum(-1) + at[4]).double()
    return found | {
        "proposal": float(log_mean_exp(proposal).mean()),
        "ess": float(figures["ess"].mean()),
        "learned_gap": float((figures["upper"] - figures["learned_lower"]).double().mean()),
    }


# -- pages ---------------------------------------------------------------------------------------


def spread(values: list[float], digits: int = 3) -> str:
    if not values:
        return "–"
    sd = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{sd}"


def pick(rows: list[Row], key: str, **keys: Any) -> list[float]:
    return [r[key] for r in rows if all(r[k] == v for k, v in keys.items())]


def compared(found: dict[tuple[str, int], float | None]) -> str:
    """What follows for objectives at numbers of samples; larger is better."""
    counts = sorted({n for (_, n), v in found.items() if v is not None})
    told = []
    for n in dict.fromkeys([*counts[:1], *counts[-1:]]):
        known = {o: v for (o, m), v in found.items() if m == n and v is not None}
        order = sorted(known, key=lambda o: -known[o])
        behind = ", ".join(f"{LABELS[o]} {known[o] - known[order[0]]:+.3f}" for o in order[1:])
        samples = f"{n:,} sample" + "s" * (n > 1)
        told.append(f"with {samples} {LABELS[order[0]]} is first ({behind})")
    return f"What follows, by the means of the sets: {'; '.join(told)}." if told else ""


def page(rows: list[Row]) -> str:
    """All tables in Markdown, each with what follows from it."""
    seeds = {p: len({r["seed"] for r in rows if (r["part"] == "chain") == (p == "chains")})
             for p in ("2-D sets", "chains")}  # fmt: skip
    told = ", ".join(f"{n} of {part}" for part, n in seeds.items() if n)
    sections = [
        "# Ablations",
        f"Mean ± standard deviation over seeds (up to {told}; no deviation: one seed).",
    ]

    def table(
        title: str, note: str, header: list[str], body: list[list[str]], follows: str = ""
    ) -> None:
        body = [line for line in body if any(cell != "–" for cell in line[1:])]
        if body:
            parts = [f"## {title}", note, markdown_table(header, body), follows]
            sections.extend(part for part in parts if part)

    def over_sets(found: list[list[float]]) -> float | None:
        """Mean of the means of the sets, if all have one."""
        return statistics.fmean(map(statistics.fmean, found)) if all(found) and found else None

    def difference(one: float | None, other: float | None, digits: int = 3) -> str:
        return "–" if one is None or other is None else f"{one - other:+.{digits}f}"

    plane = [r for r in rows if r["part"] in ("objectives", "defensive")]
    sets = list(dict.fromkeys(r["dataset"] for r in plane))

    def below(choice: str, part: str) -> float | None:
        return over_sets(
            [pick(plane, "gap_to_limit", part=part, dataset=s, choice=choice) for s in sets]
        )

    table(
        "Objectives on 2-D sets: nats below the limit",
        "Lower is better. Steps, batches, networks and proposal are the same; exact normaliser.",
        ["objective, samples", *sets],
        [
            [f"{LABELS[o]}, {n:,}"]
            + [
                spread(
                    pick(plane, "gap_to_limit", part="objectives", dataset=s, choice=f"{o}, {n}")
                )
                for s in sets
            ]
            for o in OBJECTIVES
            for n in PLANE_SAMPLES
        ],
        compared(
            {
                (o, n): None if (mean := below(f"{o}, {n}", "objectives")) is None else -mean
                for o in OBJECTIVES
                for n in PLANE_SAMPLES
            }
        ),
    )
    shares = {share: below(f"{share:g}", "defensive") for share in SHARES}
    known = {share: v for share, v in shares.items() if v is not None}
    best = min(known, key=lambda share: known[share]) if known else 0.0
    table(
        "Share of the heavy-tailed part in the proposal: nats below the limit (ESS)",
        "SNL, 256 samples. 0: a mixture of 40 Gaussians alone; 1: the Student-t base alone.",
        ["share", *sets],
        [
            [f"{share:g}"]
            + [
                (
                    spread(pick(plane, "gap_to_limit", part="defensive", **at))
                    + f" ({spread(pick(plane, 'ess', part='defensive', **at), 2).split(' ')[0]})"
                ).replace("– (–)", "–")
                for at in ({"dataset": s, "choice": f"{share:g}"} for s in sets)
            ]
            for share in SHARES
        ],
        f"What follows, by the means of the sets: a share of {best:g} is best; none at all costs "
        f"{difference(shares[0.0], shares.get(best))} nats, the base alone "
        f"{difference(shares[1.0], shares.get(best))}, our default of 0.2 "
        f"{difference(shares[0.2], shares.get(best))}.",
    )
    chain = [r for r in rows if r["part"] == "chain"]

    def of(choice: str, key: str = "exact", digits: int = 3) -> list[str]:
        return [spread(pick(chain, key, dataset=s, choice=choice), digits) for s in CHAIN_SETS]

    def mean_of(choice: str, key: str = "exact") -> float | None:
        return over_sets([pick(chain, key, dataset=s, choice=choice) for s in CHAIN_SETS])

    table(
        "Objectives and samples in a chain: test log-likelihood",
        "Samples for each factor of each row in a step. Exact normaliser.",
        ["objective, samples", *CHAIN_SETS],
        [[f"{LABELS[o]}, {n}", *of(f"{o}, {n}")] for o in OBJECTIVES for n in CHAIN_SAMPLES],
        compared({(o, n): mean_of(f"{o}, {n}") for o in OBJECTIVES for n in CHAIN_SAMPLES}),
    )
    one = mean_of("snl, 8")
    table(
        "Orders averaged: test log-likelihood",
        "SNL, 8 samples.",
        ["orders", *CHAIN_SETS],
        [["1", *of("snl, 8")], *([str(n), *of(f"orders, {n}")] for n in ORDERS[1:])],
        "What follows: over one order "
        + ", ".join(f"{n} bring {difference(mean_of(f'orders, {n}'), one)}" for n in ORDERS[1:])
        + " nats (means of the sets), at as many times the cost.",
    )
    table(
        "With and without energy: test log-likelihood",
        "The mixture alone is trained by its likelihood, with the network and steps of the chain.",
        ["model", *CHAIN_SETS],
        [
            *([f"mixture alone, {n} components", *of(f"mixture alone, {n}")] for n in COMPONENTS),
            ["mixture inside the chain", *of("snl, 8", "proposal")],
            ["mixture of 10 with energy", *of("snl, 8")],
        ],
        "What follows: the energy adds "
        + ", ".join(
            f"{difference(one, mean_of(f'mixture alone, {n}'))} nats to a mixture of {n}"
            for n in COMPONENTS
        )
        + f", {difference(one, mean_of('snl, 8', 'proposal'))} to the mixture it tilts "
        "(means of the sets).",
    )
    body, nearer = [], {}
    for nodes in (0, *NODES):
        cells = []
        for s in CHAIN_SETS:
            ways = [
                w
                for r in chain
                if (r["dataset"], r["choice"]) == (s, "snl, 8")
                for w in r["ways"]
                if w["nodes"] == nodes
            ]
            if ways:
                rms, us = (statistics.fmean(w[k] for w in ways) for k in ("rms", "us_a_row"))
                cells.append(f"{rms:.4f}, {us:.1f}")
                nearer.setdefault(nodes, []).append((rms, us))
            else:
                cells.append("–")
        body.append([f"quadrature, {nodes} nodes" if nodes else "learned b", *cells])
    table(
        "Learned b against quadrature: error of log p(x) in nats (rms over rows), µs a row",
        "Of one trained chain (SNL, 8 samples); against 1,024 nodes.",
        ["normaliser", *CHAIN_SETS],
        body,
        "What follows, by the means of the sets: "
        + "; ".join(
            f"{f'{nodes} nodes' if nodes else 'one pass by b'}: off by "
            f"{statistics.fmean(r for r, _ in found):.4f} nats, "
            f"{statistics.fmean(t for _, t in found):.1f} µs"
            for nodes, found in nearer.items()
        )
        + ".",
    )
    return "\n\n".join(sections) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="folder with tabular/*.npz, for the chain")
    parser.add_argument("--out", type=Path, default=Path("results/ablations"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--parts", nargs="+", default=["plane", "chain"])
    parser.add_argument("--choices", nargs="+", help="these alone, such as 'snl, 8' or '0.2'")
    parser.add_argument("--max-steps", type=int, help="for a quick look")
    args = parser.parse_args()
    need(args.device)

    path = args.out / "ablations.json"
    rows = {tuple(r[k] for k in KEYS): r for r in rows_in(path)}
    made_at = {"commit": commit(), "device": args.device}

    def add(row: Row) -> None:
        rows[tuple(row[k] for k in KEYS)] = row | made_at
        shown = {k: round(row[k], 4) for k in ("gap_to_limit", "exact", "seconds") if k in row}
        print(*(row[k] for k in KEYS), shown, flush=True)
        write(path, [*rows.values()], args.device)
        path.with_suffix(".md").write_text(page([*rows.values()]))

    def missing(jobs: list[Row]) -> list[Row]:
        wanted = [job for job in jobs if not args.choices or job["choice"] in args.choices]
        return [job for job in wanted if tuple(job[k] for k in KEYS) not in rows]

    if "plane" in args.parts:
        left = map(missing, plane_groups(args.seeds, apart=args.jobs > 1 or args.device == "cpu"))
        calls = [(group, args.device, args.max_steps) for group in left if group]
        for found in in_processes(train_plane, calls, args.jobs):
            for row in found:
                add(row)
    if "chain" in args.parts:
        how = (args.data, args.device, args.max_steps)
        left = map(missing, chain_groups(args.seeds))
        for found in in_processes(train_chains, [(g, *how) for g in left if g], args.jobs):
            for row in found:
                add(row)
    print(path.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
