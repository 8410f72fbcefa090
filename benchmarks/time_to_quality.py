"""How long until a chain of EBMs is as good as the best flow ever gets? POWER, one device, one run.

The flows (zuko NSF and MAF at the sizes of their authors) train to convergence with early stopping
on held-out rows; the best held-out score of the better one is the goal. The chain then trains with
short budgets of optimiser steps until one reaches the goal. Clocks run from the first step, and
include validation and, on a GPU, the capture of the step.

    python benchmarks/time_to_quality.py --data DIR [--device cuda] [--out results/speed]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from density_runs import FLOW_LOOP
from selfnorm.autoregressive import AutoregressiveEBM
from selfnorm.autoregressive_training import default_options
from selfnorm.data import tabular
from selfnorm.experiments.report import Table
from selfnorm.flows import Flow
from selfnorm.history import History
from selfnorm.loop import LoopOptions, run

FLOWS: dict[str, dict[str, Any]] = {
    "nsf": {"kind": "nsf", "transforms": 10, "hidden": (256, 256)},
    "maf": {"kind": "maf", "transforms": 10, "hidden": (256, 256)},
}


def train_flow(name: str, table: Any, device: str, steps: int, seed: int) -> History:
    torch.distributions.Distribution.set_default_validate_args(False)  # it waits for the GPU
    torch.manual_seed(seed)
    flow = Flow(table.dim, **FLOWS[name]).to(device)
    loop = {**FLOW_LOOP, "max_steps": steps, "validate_every": max(1, steps // 40), "seed": seed}
    return run(
        flow.training_task(columns=None),
        (table.train_values.to(device),),
        val_data=(table.val.to(device),),
        options=LoopOptions(**loop),
    )


def train_chain(table: Any, device: str, steps: int, seed: int) -> History:
    defaults = default_options(len(table.train), table.dim, device)
    torch.manual_seed(seed)
    model = AutoregressiveEBM(table.dim, **{**defaults.model, "discrete": None}).to(device)
    loop = {**defaults.fit, "max_steps": steps, "validate_every": max(1, steps // 20)}
    task = {**defaults.task, "polish_steps": steps // 8}
    return run(
        model.training_task(**task),
        (table.train_values.to(device),),
        val_data=(table.val_values.to(device),),
        options=LoopOptions(**{**loop, "progress": False, "seed": seed}),
    )


def row_of(method: str, steps: int, seed: int, history: History, goal: float | None) -> dict:
    curve = [[round(r["seconds"], 3), r["val_score"]] for r in history.records]
    best = max(score for _, score in curve)
    goal = best - 0.005 if goal is None else goal  # a flow: within 0.005 nats of its own best
    return {
        "method": method,
        "seed": seed,
        "steps": steps,
        "best_step": history.best_step,
        "best": best,
        "seconds": history.seconds,
        "goal": goal,
        "seconds_to_goal": next((s for s, score in curve if score >= goal), None),
        "curve": curve,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path("results/speed"))
    parser.add_argument("--flow-steps", type=int, default=8000)
    parser.add_argument("--chain-steps", type=int, nargs="+", default=[300, 1000, 3000])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    table = tabular.load("power", args.data)
    (args.out / "time_to_quality.json").unlink(missing_ok=True)
    results = Table("time_to_quality", args.device, args.out, device=args.device)
    flows = []
    for name in FLOWS:
        history = train_flow(name, table, args.device, args.flow_steps, args.seed)
        flows.append(row_of(name, args.flow_steps, args.seed, history, None))
        results.add(flows[-1])
        print({k: v for k, v in flows[-1].items() if k != "curve"}, flush=True)
    best = max(flows, key=lambda row: row["best"])
    for steps in args.chain_steps:
        history = train_chain(table, args.device, steps, args.seed)
        row = row_of("chain", steps, args.seed, history, best["best"])
        if row["seconds_to_goal"] is not None:
            row["times_faster"] = best["seconds_to_goal"] / row["seconds_to_goal"]
        results.add(row)
        print({k: v for k, v in row.items() if k != "curve"}, flush=True)
        if row["seconds_to_goal"] is not None:
            break


if __name__ == "__main__":
    main()
