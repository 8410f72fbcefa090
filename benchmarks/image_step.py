"""Step time of an energy on images against its ResNet's forward and backward pass alone.

Run on a quiet GPU: ``python benchmarks/image_step.py --out results/speed``. Batch 32 of 64x64
images, ``M`` of 64 and 1,024 label samples, bfloat16 and channels-last, everything captured as CUDA
graphs and timed by device events; the variants take turns, and medians of rounds are compared.

* ``resnet``: normalise, ResNet-18 forward and backward, nothing else, as torch does it under
  autocast; everything else is compared with this.
* ``resnet, rounded together``: the same by the library, which rounds all weights by one launch.
* ``loss``: the same with all heads, ``M`` labels sampled, SNL and its gradient.
* ``step``: the whole training step as ``ImageRegressor.fit`` takes it: batch lookup, loss,
  gradient, clipping, check for non-finite values, AdamW, moving average, metrics; the call itself.

First with the heads fused by ``torch.compile`` (which needs half a minute), then as it comes, with
``--float32`` in single precision too. ``--warm`` only fills the compiler's cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cuda_graphs import Captured, captured
from selfnorm.images import ImageRegressor
from selfnorm.paper.report import hardware, versions
from selfnorm.training import Stepper, TrainingOptions


def build(
    proposal: str, n_samples: int, batch: int, device: str, **options: Any
) -> tuple[Any, tuple[Any, Any]]:
    """A model of our recipe in training mode, its task, and resident data."""
    torch.manual_seed(0)
    images = torch.randint(0, 256, (4 * batch, 3, 64, 64), dtype=torch.uint8)
    y = torch.randint(1, 61, (4 * batch, 1)).double()
    model = ImageRegressor("snl", proposal, n_samples=n_samples, device=device, **options)
    model.prepare(images, y)
    data = images.to(device), model.space_.standardise(y).float().to(device)
    task = model.task()
    task.module.train()
    return task, data


def forward_backward(batch: int, device: str, bf16: bool, together: bool = False) -> Captured:
    """The ResNet alone; its weights rounded one by one, as autocast does it, or together."""
    task, data = build("uniform", 1, batch, device, bf16=bf16)
    features: nn.Module = task.module.features
    if not together:
        features._rounded_weights = lambda: {}  # type: ignore[assignment]  # none beforehand

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
    stepper = Stepper(task, data, TrainingOptions(weight_decay=0.05, ema=0.998))
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
    parser.add_argument("--float32", action="store_true")
    parser.add_argument("--warm", action="store_true")
    arguments = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    if arguments.warm:
        for size in arguments.samples:
            options = {"compile_heads": True, "anchors": arguments.anchors}
            task, data = build("uniform", size, arguments.batch, "cuda", **options)
            task.loss(tuple(t[: arguments.batch] for t in data))[0].backward()
        return
    rows: list[dict[str, Any]] = []
    for size in arguments.samples:
        measure(arguments, rows, [("uniform", size, 0)], bf16=True, compiled=True)
    plain = [(name, size, 0) for name in ("uniform", "mdn-4") for size in arguments.samples]
    plain += [("uniform", arguments.samples[0], arguments.anchors)]
    measure(arguments, rows, plain, bf16=True, compiled=False)
    measure(arguments, rows, plain[-1:], bf16=True, compiled=True)
    if arguments.float32:
        measure(arguments, rows, plain, bf16=False, compiled=False)


def measure(
    arguments: argparse.Namespace,
    rows: list[dict[str, Any]],
    cases: list[tuple[str, int, int]],
    *,
    bf16: bool,
    compiled: bool,
) -> None:
    """Time the ResNet and the given proposals and sizes side by side; add rows and write them.

    A case is a proposal, a number of samples and a number of anchors.
    """
    batch, device = arguments.batch, "cuda"
    works: dict[str, Callable[[], None]] = {"resnet": forward_backward(batch, device, bf16)}
    if bf16:
        works["resnet, rounded together"] = forward_backward(batch, device, bf16, together=True)
    for proposal, size, anchors in cases:
        options = {"bf16": bf16, "compile_heads": compiled, "anchors": anchors}
        task, data = build(proposal, size, batch, device, **options)
        case = f"{proposal} M={size}" + (f" anchors={anchors}" if anchors else "")
        works[f"loss {case}"] = loss_and_gradient(task, data, batch)
        works[f"step {case}"] = whole_step(task, data, batch, device)
    found = timed(works, arguments.rounds, arguments.repeats)
    for name, value in found.items():
        row = {
            "precision": "bfloat16" if bf16 else "float32",
            "compiled_heads": compiled,
            "what": name,
            "milliseconds": value,
            "ratio": value / found["resnet"],
        }
        rows.append(row)
        label = f"{row['precision']}{', compiled heads' if compiled else ''}"
        print(f"{label:26s} {name:38s} {value:7.3f} ms  {row['ratio']:.3f} x", flush=True)
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
