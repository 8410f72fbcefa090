"""How long until a chain of EBMs is as good as the best flow ever gets? POWER, one device, one run.

The flows of the density benchmark (zuko NSF and MAF at the sizes of their authors, as they are and
with squashed columns) train to convergence with early stopping on held-out rows; the best held-out
score of the best one is the goal. The chain then trains with short budgets of optimiser steps until
one reaches the goal, and with that budget from every seed. Clocks run from the first step, and
include validation and, on a GPU, the capture of the step; what a process loads once is not counted.

    python benchmarks/time_to_quality.py --data DIR [--device cuda] [--out results/speed]
    python benchmarks/time_to_quality.py --data DIR --flows "nsf asinh"
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

import tabular
from density import flow_jobs
from density_runs import FLOW_LOOP, make_flow
from measuring import need, write
from selfnorm.chain import AutoregressiveEBM, default_options
from selfnorm.training import History, TrainingOptions, run

SET = "power"
FLOWS = {f"{job['method']} {job['config']}": job for job in flow_jobs(SET)}


def train_flow(name: str, table: Any, device: str, seed: int) -> History:
    torch.manual_seed(seed)
    flow = make_flow(table.dim, FLOWS[name]["model"], device)
    loop: dict[str, Any] = {**FLOW_LOOP, **FLOWS[name]["loop"], "seed": seed}
    loop["validate_every"] = max(1, loop["max_steps"] // 40)
    return run(
        flow.training_task(columns=None),
        (table.train_values.to(device),),
        val_data=(table.val.to(device),),
        options=TrainingOptions(**loop),
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
        options=TrainingOptions(**{**loop, "progress": False, "seed": seed}),
    )


def row_of(method: str, seed: int, history: History, goal: float | None) -> dict[str, Any]:
    curve = [[round(r["seconds"], 3), r["val_score"]] for r in history.records]
    best = max(score for _, score in curve)
    goal = best - 0.005 if goal is None else goal  # a flow: within 0.005 nats of its own best
    return {
        "method": method,
        "seed": seed,
        "steps": history.n_steps,
        "best_step": history.best_step,
        "best": best,
        "seconds": history.seconds,
        "goal": goal,
        "seconds_to_goal": next((s for s, score in curve if score >= goal), None),
        "curve": curve,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, help="directory with the POWER file")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path("results/speed"))
    parser.add_argument("--flows", nargs="+", choices=list(FLOWS), default=list(FLOWS))
    parser.add_argument("--chain-steps", type=int, nargs="+", default=[300, 1000, 3000])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the chain")
    args = parser.parse_args()
    need(args.device)
    import torch._dynamo  # the first optimiser of a process loads it; the first flow must not pay

    torch.set_float32_matmul_precision("high")  # as the density benchmark, for both
    table = tabular.load(SET, args.data)
    rows: list[dict[str, Any]] = []

    def keep(row: dict[str, Any]) -> dict[str, Any]:
        rows.append(row)
        write(args.out / "time_to_quality.json", rows, args.device)
        print({k: v for k, v in row.items() if k != "curve"}, flush=True)
        return row

    def chain(steps: int, seed: int, flow: dict[str, Any]) -> dict[str, Any]:
        history = train_chain(table, args.device, steps, seed)
        row = row_of("chain", seed, history, flow["best"])
        if row["seconds_to_goal"] is not None:
            row["times_faster"] = flow["seconds_to_goal"] / row["seconds_to_goal"]
        return keep({**row, "against": flow["method"]})

    first, *others = args.seeds
    flows = []
    for name in args.flows:
        history = train_flow(name, table, args.device, first)
        flows.append(keep(row_of(name, first, history, None)))
    best = max(flows, key=lambda row: row["best"])
    for steps in args.chain_steps:
        if chain(steps, first, best)["seconds_to_goal"] is not None:
            for seed in others:
                chain(steps, seed, best)
            break


if __name__ == "__main__":
    main()
