"""What a training step costs beyond the network itself.

One SNL step (proposal samples, their log-density, loss, gradient, clipping, finite-check, Adam,
counters) against one forward + backward pass of the same network on the same number of points, in
the same run. Batch 256, 1,024 proposal samples, the paper's 2-D network, CPU; with the paper's
proposal (the base itself), another Gaussian, and a defensive mixture of 21 components; two of them
also with ``compile_step=True``.

    python benchmarks/step_overhead.py [--out results/speed]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

import selfnorm as sn
from selfnorm.density.fit import DensityTask
from selfnorm.paper.report import Table
from selfnorm.training import Stepper, TrainingOptions

BATCH, N_SAMPLES = 256, 1024


def paper_energy() -> sn.MLP:
    torch.manual_seed(0)
    return sn.MLP(2, hidden=(200, 100, 50, 50), activation="relu")


def forward_backward() -> Callable[[], None]:
    energy = paper_energy()
    points = torch.randn(BATCH + N_SAMPLES, 2)

    def step() -> None:
        for p in energy.parameters():
            p.grad = None
        energy(points).mean().backward()

    return step


def training_step(
    base: sn.Gaussian, proposal: sn.Gaussian | sn.Defensive, *, compiled: bool = False
) -> Callable[[], None]:
    task = DensityTask(sn.EBM(paper_energy(), base=base), proposal, n_samples=N_SAMPLES)
    data = torch.randn(7000, 2)
    stepper = Stepper(task, (data,), TrainingOptions(compile_step=compiled))
    order, count = torch.randperm(len(data)), 0

    def step() -> None:
        nonlocal count
        start = count % (len(data) // BATCH) * BATCH
        stepper.step(order[start : start + BATCH], 1e-3, count)
        count += 1

    return step


def time_in_turn(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds per call; the variants take turns, so that a busy machine slows all alike."""
    for step in steps.values():
        for _ in range(20):
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            began = time.perf_counter()
            for _ in range(10):
                step()
            times[name].append(100 * (time.perf_counter() - began))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/speed"))
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    base = sn.Gaussian(torch.zeros(2), scale=1.0)
    mixture = sn.Defensive.fit_to(torch.randn(2000, 2), n_components=20)
    steps = {
        "forward_backward": forward_backward(),
        "snl_proposal_is_base": training_step(base, base),
        "snl_another_gaussian": training_step(base, sn.Gaussian(torch.zeros(2), scale=1.1)),
        "snl_defensive_mixture_of_20": training_step(base, mixture),
        "snl_proposal_is_base_compiled": training_step(base, base, compiled=True),
        "snl_defensive_mixture_of_20_compiled": training_step(base, mixture, compiled=True),
    }
    times = time_in_turn(steps, options.rounds)
    (options.out / "step_overhead.json").unlink(missing_ok=True)
    table = Table("step_overhead", "cpu", options.out)
    floor = times["forward_backward"]
    for name, values in times.items():
        ratio = statistics.median(v / f for v, f in zip(values, floor, strict=True))
        table.add(
            {
                "variant": name,
                "batch": BATCH,
                "n_samples": N_SAMPLES,
                "milliseconds": statistics.median(values),
                "ratio_to_forward_backward": ratio,
            }
        )
        print(f"{name:38s} {statistics.median(values):7.3f} ms   {ratio:5.2f} x")


if __name__ == "__main__":
    main()
