"""Cost of one training step, of ``log_prob`` and of ``log Z`` against the number of columns.

    python benchmarks/scaling.py --device cuda --out results/density
    python benchmarks/scaling.py --device cuda --batches 512 2048 8192 --out results/density

Fixed width, batch 512, one ordering. ``log_z_ms``: ``log Z`` of all factors of 512 rows.
On CUDA times are taken around synchronised regions, memory is the peak over the step.

``--batches``: steps of many rows at 200 columns, the table of a large company.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from measuring import now, write
from selfnorm.chain import AutoregressiveEBM
from selfnorm.training import Stepper, TensorSource, TrainingOptions

OPTIONS = TrainingOptions(weight_decay=1e-2, clip_norm=5.0, ema=0.998)
SIZES: dict[str, Any] = {
    "hidden": 512,
    "blocks": 2,
    "components": 10,
    "context": 64,
    "energy_hidden": 64,
}


def median_ms(call: Any, device: torch.device, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        began = now(device)
        call()
        times.append(1e3 * (now(device) - began))
    return sorted(times)[len(times) // 2]


def chain_and_stepper(d: int, batch: int, device: torch.device) -> tuple[Any, Tensor, Any]:
    """A fresh chain, rows and a step of training that is ready, captured where it can be."""
    torch.manual_seed(0)
    x = torch.randn(max(4096, batch), d, device=device) @ (torch.eye(d, device=device) + 0.1)
    model = AutoregressiveEBM(d, discrete=None, **SIZES).to(device)
    task = model.training_task(n_samples=12)
    task.start((x,))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    stepper = Stepper(task, TensorSource((x,)), OPTIONS)
    rows = torch.arange(batch, device=device)
    for i in range(5):
        stepper.step(rows, 1e-4, i)
    return model, x, lambda: stepper.step(rows, 1e-4, 10)


def measure(d: int, device: torch.device, repeats: int) -> dict[str, Any]:
    model, x, step = chain_and_stepper(d, 512, device)
    row: dict[str, Any] = {"d": d}
    row["step_ms"] = median_ms(step, device, repeats)
    if device.type == "cuda":
        row["peak_mib"] = torch.cuda.max_memory_allocated(device) / 2**20
    model.eval()
    batch = x[:512]
    row["log_prob_ms"] = median_ms(lambda: model.log_prob(batch), device, repeats)
    row["log_z_ms"] = median_ms(
        lambda: model.log_prob(batch, normalizer="quadrature", n_nodes=512),
        device,
        max(1, repeats // 4),
    )
    row["sample_ms"] = median_ms(lambda: model.sample(512, seed=0), device, max(1, repeats // 8))
    return row


def many_rows_a_step(d: int, batch: int, device: torch.device, repeats: int) -> dict[str, Any]:
    """A step of ``batch`` rows: rows a second, and the bytes that ranks would exchange."""
    model, _, step = chain_and_stepper(d, batch, device)
    ms = median_ms(step, device, repeats)
    row: dict[str, Any] = {"d": d, "batch": batch, "step_ms": ms, "rows_a_second": 1e3 * batch / ms}
    row["gradient_mib"] = 4 * sum(p.numel() for p in model.parameters()) / 2**20
    if device.type == "cuda":
        row["peak_mib"] = torch.cuda.max_memory_allocated(device) / 2**20
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("results/density"))
    parser.add_argument("--dims", nargs="+", type=int, default=[2, 4, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--batches", nargs="+", type=int, help="rows a step to compare")
    args = parser.parse_args()
    device = torch.device(args.device)
    torch.set_float32_matmul_precision("high")
    if args.batches:
        steps = [many_rows_a_step(200, batch, device, args.repeats) for batch in args.batches]
        write(args.out / "scaling_rows.json", steps, device, table="scaling over rows")
        return
    rows = []
    for d in args.dims:
        rows.append(measure(d, device, args.repeats))
        print(rows[-1], flush=True)
    by_d = {row["d"]: row for row in rows}
    more: dict[str, Any] = {"sizes": SIZES}
    if 8 in by_d and 256 in by_d:
        more["step_time_ratio_256_over_8"] = by_d[256]["step_ms"] / by_d[8]["step_ms"]
        if "peak_mib" in by_d[8]:
            more["memory_ratio_256_over_8"] = by_d[256]["peak_mib"] / by_d[8]["peak_mib"]
    print(more, flush=True)
    write(args.out / f"scaling_{device.type}.json", rows, device, table="scaling", **more)


if __name__ == "__main__":
    main()
