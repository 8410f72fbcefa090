"""How far the bounds of a chain close in 63 columns: with the learned ``b`` and with quadrature's.

    python benchmarks/bounds_dimension.py --data DIR --out results/density

A *small* chain (CPU-sized: two orderings, width 128, a few hundred steps on 20,000 rows of the BSDS
patches) is trained once; its bounds on held-out rows are then measured with more and more samples a
factor, the lower bound once by the learned ``b_i`` and once by ``b_i`` from quadrature nodes. The
errors of 63 learned ``b_i`` add up and no number of samples removes them; the gap with quadrature's
is the variance of the samples, which falls as one over their number.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

import tabular
from measuring import write
from selfnorm.chain import N_NODES, AutoregressiveEBM, default_options
from selfnorm.training import TrainingOptions, run

SAMPLES = (30, 100, 300, 1000)


def train(args: argparse.Namespace) -> tuple[AutoregressiveEBM, torch.Tensor, dict[str, Any]]:
    """A small chain on the first rows of the patches, the held-out rows, and the record."""
    table = tabular.load("bsds300", args.data)
    rows = table.train_values[: args.train_rows]
    defaults = default_options(len(rows), table.dim)
    sizes = {**defaults.model, "orderings": args.orderings, "hidden": args.hidden, "discrete": None}
    loop = {**defaults.fit, "max_steps": args.steps, "validate_every": args.steps // 4}
    torch.manual_seed(args.seed)
    model = AutoregressiveEBM(table.dim, **sizes)
    began = time.process_time()
    history = run(
        model.training_task(**defaults.task),
        (rows,),
        val_data=(table.val_values[:1000],),
        options=TrainingOptions(**loop, seed=args.seed, progress=False),
    )
    record = {"n_train": len(rows), "n_steps": history.n_steps, "model": sizes, "loop": loop}
    record |= {"task": defaults.task, "train_cpu_seconds": time.process_time() - began}
    return model.eval(), table.test[: args.rows], record


def measure(model: AutoregressiveEBM, x: torch.Tensor, n_samples: int, seed: int) -> dict[str, Any]:
    """Both gaps at one number of samples, and how far samples and quadrature are apart."""
    began = time.process_time()
    bounds = model.bounds(x, n_samples=n_samples, seed=seed)
    return {
        "n_nodes": N_NODES,
        "n_rows": len(x),
        **bounds.to_dict(),
        "disagreement_in_se": bounds.disagreement / bounds.log_norm_se,
        "bounds_cpu_seconds": time.process_time() - began,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path, default=Path("results/density"))
    parser.add_argument("--train-rows", type=int, default=20_000)
    parser.add_argument("--rows", type=int, default=200, help="held-out rows that are bounded")
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--orderings", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    model, test, record = train(args)
    rows = []
    for n_samples in SAMPLES:
        rows.append({"dataset": "bsds300", "d": model.dim, "seed": args.seed, **record})
        rows[-1] |= measure(model, test, n_samples, args.seed)
        figures = ("gap", "learned_gap", "learned_error", "learned_rms")
        print(n_samples, *(f"{name} {rows[-1][name]:.4f}" for name in figures), flush=True)
    recipe = "a small chain, trained for minutes on a CPU"
    write(args.out / "bounds_dimension.json", rows, recipe=recipe)


if __name__ == "__main__":
    main()
