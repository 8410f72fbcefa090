"""Eight models trained as one batch against the same eight one after another.

The paper's 2-D network on a standard Gaussian base; training steps of the library's own engine on
both sides (samples, loss, gradient, clipping, finite-check, Adam). The two take turns in slices of
a few steps, so that a busy machine slows both; the ratio is the median over slices.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/many.py [--threads 2] [--compile-both]

(PASSIVE because on a busy machine threads that spin at barriers only get in their own way.)
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from selfnorm.density.many_task import ManyTask, MemberData

import selfnorm as sn
from selfnorm.density import objectives
from selfnorm.density.fit import DensityTask
from selfnorm.paper.report import Table
from selfnorm.training import Stepper, Task, TrainingOptions

SIZES = ((128, 1024), (256, 256), (128, 128))  # batch, proposal samples; the first is the recipe's


def models(members: int) -> list[sn.EBM]:
    torch.manual_seed(0)
    base = sn.Gaussian(torch.zeros(2), scale=1.0)
    return [
        sn.EBM(sn.MLP(2, hidden=(200, 100, 50, 50), activation="relu"), base=base)
        for _ in range(members)
    ]


def stepper_of(task: Task, data: torch.Tensor, *, compiled: bool) -> Stepper:
    return Stepper(task, (data,), TrainingOptions(cuda_graph=False, compile_step=compiled))


def one_after_another(
    members: int, x: torch.Tensor, batch: int, n: int, *, compiled: bool = False
) -> Callable[[], None]:
    tasks = [DensityTask(model, model.base, n_samples=n) for model in models(members)]
    steppers = [stepper_of(task, x, compiled=compiled) for task in tasks]

    def step() -> None:
        for stepper in steppers:
            stepper.step(torch.randint(len(x), (batch,)), 1e-3, 0)

    return step


def batched(
    members: int, x: torch.Tensor, batch: int, n: int, *, compiled: bool = False
) -> Callable[[], None]:
    together = models(members)
    ones = [1.0] * members
    task = ManyTask(
        together,
        [model.base for model in together if model.base is not None],
        MemberData([x] * members),
        None,
        objective_list=[objectives.get("snl")] * members,
        n_samples=n,
        lr_factors=ones,
        log_norm_factors=[10.0] * members,
        weight_decays=[0.0] * members,
    )
    orders = torch.stack([torch.randperm(len(x)) for _ in range(members)], dim=1)
    stepper = stepper_of(task, orders, compiled=compiled)
    return lambda: stepper.step(torch.randint(len(x), (batch,)), 1e-3, 0)


def in_turn(steps: dict[str, Callable[[], None]], rounds: int, each: int) -> dict[str, list[float]]:
    for step in steps.values():
        for _ in range(3):
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            began = time.perf_counter()
            for _ in range(each):
                step()
            times[name].append(1000 * (time.perf_counter() - began) / each)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--compile-both", action="store_true", help="also compile single runs")
    parser.add_argument("--out", type=Path, default=Path("results/speed"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    name = f"many_{options.threads}threads"
    (options.out / f"{name}.json").unlink(missing_ok=True)
    table = Table(name, "cpu", options.out)
    x = torch.randn(7000, 2)
    for batch, n_samples in SIZES:
        size = (options.members, x, batch, n_samples)
        steps = {
            "one_after_another": one_after_another(*size),
            "batched": batched(*size),
            "batched_compiled": batched(*size, compiled=True),
        }
        if options.compile_both:
            steps["one_after_another_compiled"] = one_after_another(*size, compiled=True)
        times = in_turn(steps, options.rounds, each=2)
        single = times["one_after_another"]
        row = {
            "members": options.members,
            "threads": options.threads,
            "batch": batch,
            "n_samples": n_samples,
            "load_average": os.getloadavg()[0],
        }
        for variant, values in times.items():
            row[f"milliseconds_{variant}"] = statistics.median(values)
            row[f"fastest_{variant}"] = min(values)
            row[f"times_faster_{variant}"] = statistics.median(
                s / t for s, t in zip(single, values, strict=True)
            )
        table.add(row)
        figures = ", ".join(
            f"{variant} {row[f'milliseconds_{variant}']:.1f} ms "
            f"({row[f'times_faster_{variant}']:.2f} x)"
            for variant in times
        )
        print(f"batch {batch}, M {n_samples}: {figures}; load {row['load_average']:.1f}")


if __name__ == "__main__":
    main()
