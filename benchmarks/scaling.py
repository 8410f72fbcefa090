"""Cost of one training step, of ``log_prob`` and of ``log Z`` against the number of columns.

    python benchmarks/scaling.py --device cuda --out results/density
    python benchmarks/scaling.py --device cuda --batches 512 2048 8192 --out results/density
    python benchmarks/scaling.py --ranks 1 2 4 --out results/density

Fixed width, batch 512, one ordering. ``log_z_ms``: ``log Z`` of all factors of 512 rows.
On CUDA times are taken around synchronised regions, memory is the peak over the step.

``--batches``: steps of many rows at 200 columns, the table of a large company.

``--ranks``: steps of ``fit_distributed`` over so many processes of one thread each, joined by gloo;
each with as many rows (``a rank``), and with a share of as many rows (``in all``).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from measuring import synchronise, write
from selfnorm.chain import AutoregressiveEBM, default_options
from selfnorm.training import Stepper, TrainingOptions

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
        synchronise(device)
        began = time.perf_counter()
        call()
        synchronise(device)
        times.append(1e3 * (time.perf_counter() - began))
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
    stepper = Stepper(task, (x,), OPTIONS)
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


def many_rows(device: torch.device, n: int) -> dict[str, Any]:
    """``log_prob`` of ``n`` rows at d = 63 with the sizes recommended for such a table."""
    torch.manual_seed(0)
    sizes = default_options(60_000, 63, device).model
    x = torch.randn(n, 63, device=device)
    model = AutoregressiveEBM(63, discrete=None, **sizes).to(device).set_scaling(x[:5000]).eval()
    model.log_prob(x[:2000])
    return {"rows": n, "d": 63, "seconds": median_ms(lambda: model.log_prob(x), device, 3) / 1e3}


def many_rows_a_step(d: int, batch: int, device: torch.device, repeats: int) -> dict[str, Any]:
    """A step of ``batch`` rows: rows a second, and the bytes that ranks would exchange."""
    model, _, step = chain_and_stepper(d, batch, device)
    ms = median_ms(step, device, repeats)
    row: dict[str, Any] = {"d": d, "batch": batch, "step_ms": ms, "rows_a_second": 1e3 * batch / ms}
    row["gradient_mib"] = 4 * sum(p.numel() for p in model.parameters()) / 2**20
    if device.type == "cuda":
        row["peak_mib"] = torch.cuda.max_memory_allocated(device) / 2**20
    return row


def as_rank(path: Path, d: int, batch: int, steps: int) -> None:
    """One of several processes: a short run of ``fit_distributed``; the first writes its time."""
    from lightning_fabric import Fabric

    import selfnorm as sn
    from selfnorm.training import TrainingOptions

    torch.set_num_threads(1)
    fabric = Fabric(accelerator="cpu", devices="auto", strategy="auto")
    fabric.launch()
    torch.manual_seed(0)
    x = torch.randn(8 * batch, d)
    model = AutoregressiveEBM(d, discrete=None, **SIZES | {"hidden": 256, "energy_hidden": 32})
    times = []
    for n in (2, steps):  # the first run pays for what happens once
        how = TrainingOptions(
            batch_size=batch, max_steps=n, max_epochs=10**6, progress=False, seed=0
        )
        fabric.barrier()
        began = time.perf_counter()
        sn.fit_distributed(
            model, x, fabric=fabric, n_samples=8, options=how, task_options={"polish_steps": 0}
        )
        times.append(time.perf_counter() - began)
    if fabric.is_global_zero:
        size = 4 * sum(p.numel() for p in model.parameters()) / 2**20
        found = {"step_ms": 1e3 * (times[1] - times[0]) / (steps - 2), "gradient_mib": size}
        path.write_text(json.dumps(found))
    if torch.distributed.is_initialized():
        fabric.barrier()
        torch.distributed.destroy_process_group()


def over_ranks(ranks: list[int], d: int, rows: int, steps: int) -> list[dict[str, Any]]:
    """Milliseconds a step by the number of processes, and the share of the ideal."""
    out: list[dict[str, Any]] = []
    for kind in ("a rank", "in all"):
        for n in ranks:
            batch = rows * n if kind == "a rank" else rows * max(ranks)
            with tempfile.TemporaryDirectory() as folder:
                result = Path(folder) / "time.json"
                words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
                words += [f"--nproc_per_node={n}", __file__, "--as-rank", str(result)]
                words += [str(d), str(batch), str(steps)]
                subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
                found = json.loads(result.read_text())
            row = {"rows": kind, "ranks": n, "d": d, "batch": batch} | found
            first = next((r for r in out if r["rows"] == kind), row)
            speed = row["batch"] / row["step_ms"] / (first["batch"] / first["step_ms"])
            row["efficiency"] = speed * first["ranks"] / n
            out.append(row)
            print(row, flush=True)
    return out


def main() -> None:
    if "--as-rank" in sys.argv:
        path, *numbers = sys.argv[sys.argv.index("--as-rank") + 1 :]
        as_rank(Path(path), *map(int, numbers))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("results/density"))
    parser.add_argument("--dims", nargs="+", type=int, default=[2, 4, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--batches", nargs="+", type=int, help="rows a step to compare")
    parser.add_argument("--ranks", nargs="+", type=int, help="processes to compare, on the CPU")
    parser.add_argument("--rank-rows", type=int, default=256, help="rows a step for each rank")
    args = parser.parse_args()
    if args.ranks:
        found = over_ranks(args.ranks, 50, args.rank_rows, 12)
        write(args.out / "scaling_ranks.json", found, "cpu", table="scaling over ranks")
        return
    device = torch.device(args.device)
    torch.set_float32_matmul_precision("high")
    if args.batches:
        found = [many_rows_a_step(200, batch, device, args.repeats) for batch in args.batches]
        write(args.out / "scaling_rows.json", found, device, table="scaling over rows")
        return
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
