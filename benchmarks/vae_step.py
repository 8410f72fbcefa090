"""Step time of a VAE with energy priors against the plain VAE, in one process.

Paper's encoder and decoder, batch 256, one posterior sample, M = 1024, captured CUDA graphs.
The variants are timed in turns, so that a change of the machine's speed meets all of them alike.
``--compile`` adds the plain VAE and two energy priors with ``compile_step=True``; the file is
written before them and again after.

    python benchmarks/vae_step.py --compile --out results/speed/vae_step.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from selfnorm.paper.report import hardware, versions
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


COMPILED = ("vae_ar_ebm", "vae", "vae_ebm_mixture")


def make_stepper(prior: LatentPrior, x: torch.Tensor, device: str, compiled: bool) -> Stepper:
    """A stepper as the loop builds it."""
    torch.manual_seed(0)
    vae = EnergyVAE(ConvEncoder(), ConvDecoder(), prior).to(device)
    task = vae.training_task(n_samples=1024)
    task.start((x,))
    task.module.train()
    return Stepper(task, (x,), TrainingOptions(weight_decay=1e-2, compile_step=compiled))


def steps(stepper: Stepper, order: torch.Tensor, n: int, batch: int) -> float:
    """Milliseconds a step."""
    if stepper.device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for i in range(n):
        start = (i * batch) % (len(order) - batch)
        stepper.step(order[start : start + batch], 1e-4, i)
    if stepper.device.type == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began) / n


def measure(
    steppers: dict[str, Stepper], order: torch.Tensor, given: argparse.Namespace
) -> dict[str, list[float]]:
    """Times of every stepper, in turns."""
    for stepper in steppers.values():  # warms up, compiles and captures
        steps(stepper, order, min(10, given.steps), given.batch)
    times: dict[str, list[float]] = {name: [] for name in steppers}
    for _ in range(given.rounds):
        for name, stepper in steppers.items():
            times[name].append(steps(stepper, order, given.steps, given.batch))
    return times


def write(
    times: dict[str, list[float]], steppers: dict[str, Stepper], given: argparse.Namespace
) -> None:
    """Write and print the figures."""
    device = next(iter(steppers.values())).device.type
    plain = statistics.median(times["vae"])
    rows: list[dict[str, Any]] = [
        {
            "model": name,
            "step_ms": statistics.median(values),
            "ratio_to_vae": statistics.median(values) / plain,
            "captured": steppers[name].captured,
            "all_ms": values,
        }
        for name, values in times.items()
    ]
    result = {
        "command": f"python benchmarks/vae_step.py --rounds {given.rounds} --steps {given.steps}"
        + (" --compile" if given.compile else ""),
        "batch": given.batch,
        "versions": versions(),
        "hardware": hardware(device),
        "rows": rows,
    }
    path = Path(given.out)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    for row in rows:
        print(f"{row['model']:<24} {row['step_ms']:.3f} ms  x{row['ratio_to_vae']:.2f}", flush=True)


def main() -> None:
    """Time all variants and write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="vae_step.json")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--compile", action="store_true")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = (torch.rand(8192, 784, device=device) < 0.13).float()
    order = torch.randperm(len(x), device=device)
    # Held for the whole run: a captured graph reads the memory of its stepper's tensors.
    steppers = {name: make_stepper(prior, x, device, False) for name, prior in priors().items()}
    times = measure(steppers, order, given)
    write(times, steppers, given)
    if not given.compile:
        return
    for name in COMPILED:
        compiled = f"{name}_compiled"
        stepper = make_stepper(priors()[name], x, device, True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            steps(stepper, order, min(10, given.steps), given.batch)
        if any("could not be compiled" in str(w.message) for w in caught):
            print(compiled, *(w.message for w in caught))
            continue
        steppers[compiled] = stepper
        times = measure(steppers, order, given)
        write(times, steppers, given)


if __name__ == "__main__":
    main()
