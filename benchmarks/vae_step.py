"""Step time of a VAE with energy priors against the plain VAE, in one process.

Paper's encoder and decoder, batch 256, one posterior sample, M = 1024, captured CUDA graphs.
The variants are timed in turns, so that a change of the machine's speed meets all of them alike.

    python benchmarks/vae_step.py --out results/speed
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch

from measuring import Work, in_turn, need, ratio, write
from selfnorm.training import Stepper, TrainingOptions
from selfnorm.vae import (
    AutoregressivePrior,
    ConvDecoder,
    ConvEncoder,
    EnergyPrior,
    EnergyVAE,
    LatentPrior,
    MixturePrior,
    StandardNormal,
)

CHAIN: dict[str, Any] = {
    "hidden": 128,
    "components": 8,
    "context": 16,
    "energy_hidden": 32,
    "n_samples": 8,
}


def priors() -> dict[str, LatentPrior]:
    """The priors compared."""
    return {
        "vae": StandardNormal(16),
        "vae_mog": MixturePrior(16, 10),
        "vae_ebm_base": EnergyPrior(dim=16, proposal="base"),
        "vae_ebm_mixture": EnergyPrior(dim=16, proposal="mixture", bound=10.0),
        "vae_ar_ebm": AutoregressivePrior(16, **CHAIN),
    }


def make_stepper(prior: LatentPrior, x: torch.Tensor) -> Stepper:
    """A stepper as the loop builds it."""
    torch.manual_seed(0)
    vae = EnergyVAE(ConvEncoder(), ConvDecoder(), prior).to(x.device)
    task = vae.training_task(n_samples=1024)
    task.start((x,))
    task.module.train()
    return Stepper(task, (x,), TrainingOptions(weight_decay=1e-2))


def steps_of(stepper: Stepper, order: torch.Tensor, batch: int) -> Work:
    """Steps through the rows, a batch at a time."""
    count = 0

    def step() -> None:
        nonlocal count
        start = (count * batch) % (len(order) - batch)
        stepper.step(order[start : start + batch], 1e-4, count)
        count += 1

    return step


def main() -> None:
    """Time all variants and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/speed"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    need(given.device)
    x = (torch.rand(8192, 784, device=given.device) < 0.13).float()
    order = torch.randperm(len(x), device=given.device)
    steppers = {name: make_stepper(prior, x) for name, prior in priors().items()}
    works = {name: steps_of(stepper, order, given.batch) for name, stepper in steppers.items()}
    times = in_turn(works, given.rounds, given.steps, given.device)
    rows = []
    for name, values in times.items():
        row = {
            "model": name,
            "step_ms": statistics.median(values),
            "ratio_to_vae": ratio(values, times["vae"]),
            "captured": steppers[name].captured,
            "all_ms": values,
        }
        rows.append(row)
        print(f"{name:<24} {row['step_ms']:.3f} ms  x{row['ratio_to_vae']:.2f}", flush=True)
    write(given.out / "vae_step.json", rows, given.device, batch=given.batch)


if __name__ == "__main__":
    main()
