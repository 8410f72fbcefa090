"""Host memory of evaluation with ten million samples, and of training steps with more and more.

Every case runs in a process of its own; what counts is the growth of its peak resident memory above
that of the loaded library with the model and a warm-up call on a few samples.

    python benchmarks/memory.py [--samples 10000000] [--out results/speed]
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

import selfnorm as sn
from measuring import write
from selfnorm.density.model import Chunked

DIM, BUDGET = 63, 64 * 2**20


def peak() -> int:
    """Peak resident memory of this process, in bytes (Linux counts in kilobytes)."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def setting() -> tuple[sn.EBM, sn.StudentT, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(1000, DIM)
    q = sn.StudentT(30.0, torch.zeros(DIM), scale=1.0)
    base = sn.Gaussian(torch.zeros(DIM), scale=1.0)
    return sn.EBM(sn.MLP(DIM, hidden=(64, 64), zero_init=True), base=base), q, x


def evaluate(n_samples: int) -> dict[str, Any]:
    model, q, x = setting()
    sn.evaluate(model, x, proposal=q, n_samples=2000, seed=0)
    before, began = peak(), time.perf_counter()
    bounds = sn.evaluate(model, x, proposal=q, n_samples=n_samples, seed=0, max_memory=BUDGET)
    # The energy is zero and the base normalised: log Z is 0.
    return {
        "case": "evaluate",
        "n_samples": n_samples,
        "dim": DIM,
        "peak_bytes": peak() - before,
        "seconds": time.perf_counter() - began,
        "log_norm": bounds.log_norm,
        "log_norm_se": bounds.log_norm_se,
    }


def train(n_samples: int, chunked: bool) -> dict[str, Any]:
    model, q, x = setting()
    options: dict[str, Any] = {"proposal": q, "batch_size": 256, "progress": False, "seed": 0}
    sn.fit(model, x, n_samples=256, max_steps=2, **options)
    objective: Any = Chunked("snl", max_memory=BUDGET) if chunked else "snl"
    before, began = peak(), time.perf_counter()
    sn.fit(model, x, objective=objective, n_samples=n_samples, max_steps=2, **options)
    return {
        "case": "train_chunked" if chunked else "train_plain",
        "n_samples": n_samples,
        "dim": DIM,
        "peak_bytes": peak() - before,
        "seconds": time.perf_counter() - began,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=10_000_000)
    parser.add_argument("--out", type=Path, default=Path("results/speed"))
    parser.add_argument("--case", help="run one case in this process and print its JSON")
    options = parser.parse_args()
    if options.case:
        kind, count = options.case.split(":")
        row = evaluate(int(count)) if kind == "evaluate" else train(int(count), kind == "chunked")
        print(json.dumps(row))
        return
    rows = []
    cases = [f"evaluate:{n}" for n in (options.samples // 100, options.samples)]
    cases += [f"{kind}:{n}" for n in (16_384, 262_144) for kind in ("plain", "chunked")]
    for case in cases:
        command = [sys.executable, __file__, "--case", case]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        row = {**json.loads(done.stdout.splitlines()[-1]), "budget_bytes": BUDGET}
        rows.append(row)
        write(options.out / "memory.json", rows)
        print(
            f"{case:22s} {row['peak_bytes'] / 2**20:8.1f} MiB, {row['seconds']:.1f} s", flush=True
        )


if __name__ == "__main__":
    main()
