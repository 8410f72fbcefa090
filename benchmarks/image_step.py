"""Step time of an energy on images against its ResNet's forward and backward pass alone.

Run on a quiet GPU: ``python benchmarks/image_step.py --out results/speed``. Batch 32 of 64x64
images, ``M`` of 64 and 1,024 label samples, bfloat16 and channels-last, everything captured as CUDA
graphs and timed by device events; the variants take turns, and medians of rounds are compared.

* ``resnet``: normalise, ResNet-18 forward and backward, nothing else; everything else is compared
  with this.
* ``loss``: the same with all heads, ``M`` labels sampled, SNL and its gradient.
* ``step``: the whole training step as ``ImageRegressor.fit`` takes it: batch lookup, loss,
  gradient, clipping, check for non-finite values, AdamW, moving average, metrics; the call itself.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from cuda_graphs import Captured, captured
from selfnorm.images import IMAGE_OPTIONS, EnergyHead, ImageRegressor
from selfnorm.paper.report import hardware, versions
from selfnorm.training import Stepper


def build(
    proposal: str, n_samples: int, batch: int, device: str, anchors: int = 0
) -> tuple[Any, tuple[Any, Any]]:
    """A model of our recipe in training mode, its task, and resident data."""
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


def forward_backward(batch: int, device: str) -> Captured:
    """The ResNet alone."""
    task, data = build("uniform", 1, batch, device)
    features = task.module.features

    def work() -> None:
        features.zero_grad(set_to_none=True)
        features(data[0][:batch]).square().mean().backward()

    return captured(work, task, data)


def loss_and_gradient(task: Any, data: Any, batch: int) -> Captured:
    """The objective with all heads, and its gradient."""

    def work() -> None:
        task.module.zero_grad(set_to_none=True)
        task.loss((data[0][:batch], data[1][:batch]))[0].backward()

    return captured(work, task, data)


def whole_step(task: Any, data: Any, batch: int, device: str) -> Callable[[], None]:
    """A step of the training loop, as the loop calls it."""
    stepper = Stepper(task, data, IMAGE_OPTIONS)
    rows = torch.arange(batch, device=device)
    for k in range(6):
        stepper.step(rows, 1e-4, k)
    assert stepper.captured, "the step was not captured"
    return lambda: stepper.step(rows, 1e-4, 6)


def timed(works: dict[str, Callable[[], None]], rounds: int, repeats: int) -> dict[str, float]:
    """Median milliseconds of each, in turns."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            work()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(repeats):
                work()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) / repeats)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results/speed"))
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--samples", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--anchors", type=int, default=51)
    arguments = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    cases = [(name, size, 0) for name in ("uniform", "mdn-4") for size in arguments.samples]
    cases += [("uniform", arguments.samples[0], arguments.anchors)]
    batch, device = arguments.batch, "cuda"
    works: dict[str, Callable[[], None]] = {"resnet": forward_backward(batch, device)}
    for proposal, size, anchors in cases:
        task, data = build(proposal, size, batch, device, anchors)
        case = f"{proposal} M={size}" + (f" anchors={anchors}" if anchors else "")
        works[f"loss {case}"] = loss_and_gradient(task, data, batch)
        works[f"step {case}"] = whole_step(task, data, batch, device)
    found = timed(works, arguments.rounds, arguments.repeats)
    rows = []
    for name, value in found.items():
        ratio = value / found["resnet"]
        rows.append({"what": name, "milliseconds": value, "ratio": ratio})
        print(f"{name:38s} {value:7.3f} ms  {ratio:.3f} x", flush=True)
    write(arguments, rows)


def write(arguments: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """The result file."""
    arguments.out.mkdir(parents=True, exist_ok=True)
    content = {
        "table": "image_step",
        "command": f"python benchmarks/image_step.py --batch {arguments.batch}",
        "batch": arguments.batch,
        "versions": versions(),
        "hardware": hardware("cuda"),
        "rows": rows,
    }
    (arguments.out / "image_step.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
