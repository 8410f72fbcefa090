"""Eight models trained as one batch against the same eight one after another.

The paper's 2-D network on a standard Gaussian base; training steps of the library's own engine on
both sides (samples, loss, gradient, clipping, finite-check, Adam). The two take turns in slices of
a few steps, so that a busy machine slows both; the ratio is the median over slices.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/many.py [--threads 2]

(PASSIVE because on a busy machine threads that spin at barriers only get in their own way.)
"""

from __future__ import annotations

import argparse
import os
import statistics
from pathlib import Path
from typing import Any

import torch

from measuring import Work, in_turn, ratio, write
from paper_steps import many_step, models, single_step
from selfnorm.training import TrainingOptions

SIZES = ((128, 1024), (256, 256), (128, 128))  # batch, proposal samples; the first is the recipe's


def one_after_another(members: int, batch: int, n: int, options: TrainingOptions) -> Work:
    steps = [single_step(model, batch, n, options) for model in models(members)]

    def step() -> None:
        for one in steps:
            one()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path("results/speed"))
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    rows = []
    for batch, n_samples in SIZES:
        size = (given.members, batch, n_samples, TrainingOptions())
        steps = {"one_after_another": one_after_another(*size), "batched": many_step(*size)}
        times = in_turn(steps, given.rounds, each=2)
        row: dict[str, Any] = {
            "members": given.members,
            "threads": given.threads,
            "batch": batch,
            "n_samples": n_samples,
            "load_average": os.getloadavg()[0],
        }
        for variant, values in times.items():
            row[f"milliseconds_{variant}"] = statistics.median(values)
            row[f"fastest_{variant}"] = min(values)
            row[f"times_faster_{variant}"] = ratio(times["one_after_another"], values)
        rows.append(row)
        write(given.out / f"many_{given.threads}threads.json", rows)
        figures = ", ".join(
            f"{variant} {row[f'milliseconds_{variant}']:.1f} ms "
            f"({row[f'times_faster_{variant}']:.2f} x)"
            for variant in times
        )
        print(f"batch {batch}, M {n_samples}: {figures}; load {row['load_average']:.1f}")


if __name__ == "__main__":
    main()
