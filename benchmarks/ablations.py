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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tabular
from aem import sampled_score
from measuring import Row, commit, in_processes, mean_and_sd, need, now, rows_in, write
from selfnorm.chain.task import AutoregressiveTask
from selfnorm.functional import importance_ml, log_mean_exp, nce, ranking_nce, snl
from selfnorm.paper.report import markdown_table

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


# -- the plane -----------------------------------------------------------------------------------


def plane_groups(seeds: list[int]) -> Iterator[list[Row]]:
    """Runs of one call of ``fit_many``: all of a set and seed that draw as many samples."""
    from selfnorm.datasets import toy2d

    groups: list[list[Row]] = [
        [
            {"part": "objectives", "objective": o, "n_samples": n, "choice": f"{o}, {n}"}
            for o in OBJECTIVES
        ]
        for n in PLANE_SAMPLES
    ]
    common = {"part": "defensive", "objective": "snl", "n_samples": PLANE_SAMPLES[-1]}
    groups.append([common | {"share": share, "choice": f"{share:g}"} for share in SHARES])
    for seed in seeds:
        for group in groups:
            for name in toy2d.NAMES:
                yield [{"dataset": name, "seed": seed} | choice for choice in group]


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
    began = now(device)
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
    seconds = (now(device) - began) / len(jobs)
    rows = []
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
        rows.append(row)
    return rows


# -- the chain -----------------------------------------------------------------------------------


class ChainTask(AutoregressiveTask):
    """The training of a chain by another objective, factor by factor; without energy: ``None``."""

    def __init__(self, model: Any, objective: str | None, **options: Any) -> None:
        super().__init__(model, **options)
        self.of_factors = objective

    def loss(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:
        """Minus the log-likelihood of the proposals and the objective, a row."""
        terms = self.module.at_batch(batch, self.n_samples)
        f, log_w, log_norm = terms.minus_energy, terms.log_w, self.module.log_norm
        if self.of_factors is None:
            value = 0.0 * f.sum()
        elif self.of_factors == "snl":
            value = snl(f, log_w, log_norm(terms.factors), reduction="none").sum(-1).mean()
        elif self.of_factors == "nce":
            value = nce(f, log_w, log_norm(terms.factors)) * f.shape[-1]
        elif self.of_factors == "ranking_nce":
            value = ranking_nce(f, log_w) * f.shape[-1]
        else:
            value = importance_ml(f, log_w, reduction="none").sum(-1).mean()
        loss = -(terms.log_q.sum(-1).mean() + value)
        return loss, {"objective": -loss.detach()}

    def validate(self, data: tuple[Tensor, ...]) -> dict[str, float]:
        """Held-out log-likelihood by sampled normalisers: two objectives train no ``b``."""
        return {"score": sampled_score(self.module, data, self.validation_samples)}


def chain_jobs(seeds: list[int]) -> list[Row]:
    """Every run once; what several tables show is trained for the first."""
    choices: list[Row] = [
        {"objective": objective, "n_samples": n, "choice": f"{objective}, {n}"}
        for n in CHAIN_SAMPLES
        for objective in OBJECTIVES
    ]
    choices += [{"orderings": n, "choice": f"orders, {n}"} for n in ORDERS[1:]]
    alone = {"objective": None}
    choices += [alone | {"components": n, "choice": f"mixture alone, {n}"} for n in COMPONENTS]
    return [
        {"part": "chain", "dataset": name, "seed": seed} | choice
        for name in CHAIN_SETS
        for choice in choices
        for seed in seeds
    ]


def train_chain(job: Row, data: str, device: str, max_steps: int | None) -> Row:
    """One choice of a chain on a real table."""
    from selfnorm.chain import AutoregressiveEBM
    from selfnorm.training import TrainingOptions, run

    torch.set_num_threads(1)
    table = tabular.load(job["dataset"], data)
    sizes = SIZES | {k: job[k] for k in ("orderings", "components") if k in job}
    torch.manual_seed(job["seed"])
    model = AutoregressiveEBM(table.dim, **sizes).to(device)
    options = {"n_samples": job.get("n_samples", 8), "polish_steps": 100}
    task = ChainTask(model, job.get("objective", "snl"), **options)
    loop = LOOP | ({} if max_steps is None else {"max_steps": max_steps})
    began = now(device)
    history = run(
        task,
        (table.train_values.to(device),),
        val_data=(table.val_values.to(device),),
        options=TrainingOptions(**loop, seed=job["seed"]),
    )
    row = {k: job[k] for k in KEYS} | {"seconds": round(now(device) - began, 2)}
    row |= {"n_steps": history.n_steps, "best_step": history.best_step, "stopped": history.stopped}
    return row | judged_chain(model.eval(), table.test.to(device)[:4000], device)


def judged_chain(model: Any, test: Tensor, device: str) -> Row:
    """Exact log-likelihood, what other normalisers are off by and cost, bounds."""
    from selfnorm.chain import row_bounds

    exact = model.log_prob(test, normalizer="quadrature", n_nodes=1024).double()
    figures_of_chain: Row = {"exact": float(exact.mean()), "ways": []}
    for nodes in (0, *NODES):  # 0: the learned b
        how = {"normalizer": "quadrature", "n_nodes": nodes} if nodes else {}
        model.log_prob(test, **how)
        start = now(device)
        off = model.log_prob(test, **how).double() - exact
        took = 1e6 * (now(device) - start) / len(test)
        error = {"rms": float(off.square().mean().sqrt()), "mean": float(off.mean())}
        figures_of_chain["ways"].append({"nodes": nodes, "us_a_row": round(took, 2)} | error)
    torch.manual_seed(0)
    figures = row_bounds(model, test[:1000], n_samples=200)
    with torch.no_grad():
        terms = model.at_rows(test)
    proposal = (terms.log_q.sum(-1) + terms.log_det).double()
    return figures_of_chain | {
        "proposal": float(log_mean_exp(proposal).mean()),
        "ess": float(figures["ess"].mean()),
        "learned_gap": float((figures["upper"] - figures["learned_lower"]).double().mean()),
    }


# -- pages ---------------------------------------------------------------------------------------


def pick(rows: list[Row], key: str, **keys: Any) -> list[float]:
    return [r[key] for r in rows if all(r[k] == v for k, v in keys.items())]


def page(rows: list[Row]) -> str:
    """All tables in Markdown."""
    sections = ["# Ablations", "Mean ± standard deviation over seeds (no deviation: one seed)."]

    def table(title: str, note: str, header: list[str], body: list[list[str]]) -> None:
        body = [line for line in body if any(cell != "–" for cell in line[1:])]
        if body:
            sections.extend([f"## {title}", note, markdown_table(header, body)])

    plane = [r for r in rows if r["part"] in ("objectives", "defensive")]
    sets = list(dict.fromkeys(r["dataset"] for r in plane))

    def below(part: str, choice: str) -> list[str]:
        at = {"part": part, "choice": choice}
        return [mean_and_sd(pick(plane, "gap_to_limit", dataset=s, **at)) for s in sets]

    table(
        "Objectives on 2-D sets: nats below the limit",
        "Lower is better. Steps, batches, networks and proposal are the same; exact normaliser.",
        ["objective, samples", *sets],
        [
            [f"{LABELS[o]}, {n:,}", *below("objectives", f"{o}, {n}")]
            for o in OBJECTIVES
            for n in PLANE_SAMPLES
        ],
    )
    table(
        "Share of the heavy-tailed part in the proposal: nats below the limit",
        "SNL, 256 samples. 0: a mixture of 40 Gaussians alone; 1: the Student-t base alone.",
        ["share", *sets],
        [[f"{share:g}", *below("defensive", f"{share:g}")] for share in SHARES],
    )
    chain = [r for r in rows if r["part"] == "chain"]

    def of(choice: str, key: str = "exact") -> list[str]:
        return [mean_and_sd(pick(chain, key, dataset=s, choice=choice)) for s in CHAIN_SETS]

    table(
        "Objectives and samples in a chain: test log-likelihood",
        "Samples for each factor of each row in a step. Exact normaliser.",
        ["objective, samples", *CHAIN_SETS],
        [[f"{LABELS[o]}, {n}", *of(f"{o}, {n}")] for o in OBJECTIVES for n in CHAIN_SAMPLES],
    )
    table(
        "Orders averaged: test log-likelihood",
        "SNL, 8 samples.",
        ["orders", *CHAIN_SETS],
        [["1", *of("snl, 8")], *([str(n), *of(f"orders, {n}")] for n in ORDERS[1:])],
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
    )

    def normaliser(dataset: str, nodes: int) -> str:
        runs = [r for r in chain if (r["dataset"], r["choice"]) == (dataset, "snl, 8")]
        ways = [way for r in runs for way in r["ways"] if way["nodes"] == nodes]
        if not ways:
            return "–"
        rms, us = (statistics.fmean(way[k] for way in ways) for k in ("rms", "us_a_row"))
        return f"{rms:.4f}, {us:.1f}"

    table(
        "Learned b against quadrature: error of log p(x) in nats (rms over rows), µs a row",
        "Of one trained chain (SNL, 8 samples); against 1,024 nodes.",
        ["normaliser", *CHAIN_SETS],
        [
            [f"quadrature, {nodes} nodes" if nodes else "learned b"]
            + [normaliser(name, nodes) for name in CHAIN_SETS]
            for nodes in (0, *NODES)
        ],
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
        left = map(missing, plane_groups(args.seeds))
        calls = [(group, args.device, args.max_steps) for group in left if group]
        for group in in_processes(train_plane, calls, args.jobs):
            for row in group:
                add(row)
    if "chain" in args.parts:
        how = (args.data, args.device, args.max_steps)
        calls = [(job, *how) for job in missing(chain_jobs(args.seeds))]
        for row in in_processes(train_chain, calls, args.jobs):
            add(row)
    print(path.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
