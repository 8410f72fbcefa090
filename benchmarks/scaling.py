"""Cost of one training step, of ``log_prob`` and of ``log Z`` against the number of columns.

    python benchmarks/scaling.py --device cuda --out results/density

Fixed width, batch 512, one ordering. ``log_z_ms``: ``log Z`` of all factors of 512 rows.
On CUDA times are taken around synchronised regions, memory is the peak over the step.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from measuring import synchronise, write
from selfnorm.chain import AutoregressiveEBM, default_options
from selfnorm.training import Stepper, TrainingOptions

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
        synchronise(device)
        began = time.perf_counter()
        call()
        synchronise(device)
        times.append(1e3 * (time.perf_counter() - began))
    return sorted(times)[len(times) // 2]


def measure(d: int, device: torch.device, repeats: int) -> dict[str, Any]:
    torch.manual_seed(0)
    x = torch.randn(4096, d, device=device) @ (torch.eye(d, device=device) + 0.1)
    model = AutoregressiveEBM(d, discrete=None, **SIZES).to(device)
    task = model.training_task(n_samples=12)
    task.start((x,))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    options = TrainingOptions(weight_decay=1e-2, clip_norm=5.0, ema=0.998)
    stepper = Stepper(task, (x,), options)
    rows = torch.arange(512, device=device)
    for i in range(5):
        stepper.step(rows, 1e-4, i)
    row: dict[str, Any] = {"d": d}
    row["step_ms"] = median_ms(lambda: stepper.step(rows, 1e-4, 10), device, repeats)
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


def many_rows(device: torch.device, n: int) -> dict[str, Any]:
    """``log_prob`` of ``n`` rows at d = 63 with the sizes recommended for such a table."""
    torch.manual_seed(0)
    sizes = default_options(60_000, 63, device).model
    x = torch.randn(n, 63, device=device)
    model = AutoregressiveEBM(63, discrete=None, **sizes).to(device).set_scaling(x[:5000]).eval()
    model.log_prob(x[:2000])
    return {"rows": n, "d": 63, "seconds": median_ms(lambda: model.log_prob(x), device, 3) / 1e3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("results/density"))
    parser.add_argument("--dims", nargs="+", type=int, default=[2, 4, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--rows", type=int, default=100_000)
    args = parser.parse_args()
    device = torch.device(args.device)
    torch.set_float32_matmul_precision("high")
    rows = []
    for d in args.dims:
        rows.append(measure(d, device, args.repeats))
        print(rows[-1], flush=True)
    by_d = {row["d"]: row for row in rows}
    more: dict[str, Any] = {"sizes": SIZES, "log_prob_many_rows": many_rows(device, args.rows)}
    if 8 in by_d and 256 in by_d:
        more["step_time_ratio_256_over_8"] = by_d[256]["step_ms"] / by_d[8]["step_ms"]
        if "peak_mib" in by_d[8]:
            more["memory_ratio_256_over_8"] = by_d[256]["peak_mib"] / by_d[8]["peak_mib"]
    print(more, flush=True)
    write(args.out / f"scaling_{device.type}.json", rows, device, table="scaling", **more)


if __name__ == "__main__":
    main()
