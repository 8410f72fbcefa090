"""Step time of a VAE with energy priors against the plain VAE, in one process.

Paper's encoder and decoder, batch 256, one posterior sample, M = 1024, captured CUDA graphs.
The variants are timed in turns, so that a change of the machine's speed meets all of them alike.

    python benchmarks/vae_step.py --out results/vae_step.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from selfnorm.experiments.report import hardware, versions
from selfnorm.loop import LoopOptions
from selfnorm.stepper import Stepper, make_optimizer
from selfnorm.vae import EnergyVAE
from selfnorm.vae_energy_prior import EnergyPrior
from selfnorm.vae_networks import ConvDecoder, ConvEncoder
from selfnorm.vae_priors import AutoregressivePrior, LatentPrior, MixturePrior, StandardNormal

CHAIN = {"hidden": 128, "components": 8, "context": 16, "energy_hidden": 32, "n_samples": 8}


def priors() -> dict[str, LatentPrior]:
    """The priors compared."""
    return {
        "vae": StandardNormal(16),
        "vae_mog": MixturePrior(16, 10),
        "vae_ebm_base": EnergyPrior(dim=16, proposal="base"),
        "vae_ebm_mixture": EnergyPrior(dim=16, proposal="mixture", bound=10.0),
        "vae_ar_ebm": AutoregressivePrior(16, **CHAIN),
    }


def make_stepper(prior: LatentPrior, x: torch.Tensor, device: str, ema: float | None) -> Stepper:
    """A stepper as the loop builds it."""
    torch.manual_seed(0)
    vae = EnergyVAE(ConvEncoder(), ConvDecoder(), prior).to(device)
    task = vae.training_task(n_samples=1024)
    task.start((x,))
    task.module.train()
    options = LoopOptions(lr=1e-3)
    optimizer = make_optimizer(task, options.optimizer, 1e-2)
    return Stepper(task, optimizer, (x,), clip_norm=options.clip_norm, ema=ema, capture=True)


def main() -> None:
    """Time all variants and write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="vae_step.json")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=256)
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = (torch.rand(8192, 784, device=device) < 0.13).float()
    # Held for the whole run: a captured graph reads the memory of its stepper's tensors.
    steppers = {name: make_stepper(prior, x, device, None) for name, prior in priors().items()}
    times: dict[str, list[float]] = {name: [] for name in steppers}
    order = torch.randperm(len(x), device=device)
    for round_ in range(given.rounds + 1):
        for name, stepper in steppers.items():
            if device == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter()
            for i in range(given.steps):
                start = (i * given.batch) % (len(x) - given.batch)
                stepper.step(order[start : start + given.batch], 1e-4, i)
            if device == "cuda":
                torch.cuda.synchronize()
            if round_:  # the first round warms up and captures
                times[name].append(1e3 * (time.perf_counter() - began) / given.steps)
    plain = statistics.median(times["vae"])
    rows: list[dict[str, Any]] = [
        {
            "model": name,
            "step_ms": statistics.median(values),
            "ratio_to_vae": statistics.median(values) / plain,
            "captured": steppers[name]._graph is not None,
            "all_ms": values,
        }
        for name, values in times.items()
    ]
    result = {
        "command": f"python benchmarks/vae_step.py --rounds {given.rounds} --steps {given.steps}",
        "batch": given.batch,
        "versions": versions(),
        "hardware": hardware(device),
        "rows": rows,
    }
    path = Path(given.out)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    for row in rows:
        print(f"{row['model']:<16} {row['step_ms']:.3f} ms  x{row['ratio_to_vae']:.2f}")


if __name__ == "__main__":
    main()
