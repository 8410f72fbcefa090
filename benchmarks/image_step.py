"""Step time of an energy on images against its ResNet's forward and backward pass alone.

Run on a quiet GPU: ``python benchmarks/image_step.py --out results/speed``. Batch 32 of 64x64
images, ``M`` of 64 and 1,024 label samples, bfloat16 and channels-last, everything captured as CUDA
graphs; the variants take turns, and medians of rounds are compared.

* ``resnet``: normalise, ResNet-18 forward and backward, nothing else; everything else is compared
  with this.
* ``loss``: the same with all heads, ``M`` labels sampled, SNL and its gradient.
* ``step``: the whole training step as ``ImageRegressor.fit`` takes it: batch lookup, loss,
  gradient, clipping, check for non-finite values, AdamW, moving average, metrics; the call itself.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch

from measuring import Work, captured, in_turn, need, ratio, write
from selfnorm.images import IMAGE_OPTIONS, EnergyHead, ImageRegressor
from selfnorm.training import Stepper


def build(
    proposal: str, n_samples: int, batch: int, device: str, anchors: int = 0
) -> tuple[Any, tuple[Any, Any]]:
    """The task of a model by our recipe in training mode, and resident data."""
    torch.manual_seed(0)
    images = torch.randint(0, 256, (4 * batch, 3, 64, 64), dtype=torch.uint8)
    y = torch.randint(1, 61, (4 * batch, 1)).double()
    head = EnergyHead(anchors=anchors)
    model = ImageRegressor("snl", proposal, n_samples=n_samples, energy=head, device=device)
    model.prepare(images, y)
    data = images.to(device), model.space_.standardise(y).float().to(device)
    task = model.task()
    task.module.train()
    return task, data


def forward_backward(batch: int, device: str) -> Work:
    """The ResNet alone."""
    task, data = build("uniform", 1, batch, device)
    features = task.module.features

    def work() -> None:
        features.zero_grad(set_to_none=True)
        features(data[0][:batch]).square().mean().backward()

    return captured(work, device)


def loss_and_gradient(task: Any, data: Any, batch: int, device: str) -> Work:
    """The objective with all heads, and its gradient."""

    def work() -> None:
        task.module.zero_grad(set_to_none=True)
        task.loss((data[0][:batch], data[1][:batch]))[0].backward()

    return captured(work, device)


def whole_step(task: Any, data: Any, batch: int, device: str) -> Work:
    """A step of the training loop, as the loop calls it."""
    stepper = Stepper(task, data, IMAGE_OPTIONS)
    rows = torch.arange(batch, device=device)
    return lambda: stepper.step(rows, 1e-4, 6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results/speed"))
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--samples", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--anchors", type=int, default=51)
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    need(given.device)
    torch.backends.cudnn.benchmark = True
    cases = [(name, size, 0) for name in ("uniform", "mdn-4") for size in given.samples]
    cases += [("uniform", given.samples[0], given.anchors)]
    batch, device = given.batch, given.device
    works = {"resnet": forward_backward(batch, device)}
    for proposal, size, anchors in cases:
        task, data = build(proposal, size, batch, device, anchors)
        case = f"{proposal} M={size}" + (f" anchors={anchors}" if anchors else "")
        works[f"loss {case}"] = loss_and_gradient(task, data, batch, device)
        works[f"step {case}"] = whole_step(task, data, batch, device)
    times = in_turn(works, given.rounds, given.repeats, device)
    rows = []
    for name, values in times.items():
        share, value = ratio(values, times["resnet"]), statistics.median(values)
        rows.append({"what": name, "milliseconds": value, "ratio": share})
        print(f"{name:38s} {value:7.3f} ms  {share:.3f} x", flush=True)
    write(given.out / "image_step.json", rows, device, batch=batch)


if __name__ == "__main__":
    main()
