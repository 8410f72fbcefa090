"""A million rows within a given time: does the default keep it, its memory, and a mixture behind?

    python benchmarks/million.py --rows 1000000 --columns 10 --max-time 5min
    python benchmarks/million.py --rows 20000 --columns 200 --max-time 5min

The table is that of ``default_times.py``. Memory is the peak of the process during the fit beyond
what it had with the table made. The peer is a mixture of 32 Gaussians, fitted to all rows or to
``--mixture-rows`` of them. Needs nothing but the library.
"""

from __future__ import annotations

import argparse
import resource
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.mixture import GaussianMixture

from default_times import table
from measuring import write
from selfnorm import EnergyDensity
from selfnorm.training import seconds

MIB = 2**20


def resident() -> int:
    """Bytes of this process that are in memory now."""
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * resource.getpagesize()


class Peak:
    """The most memory that the process had while a block ran, looked at twenty times a second."""

    def __enter__(self) -> Peak:
        self.before = self.most = resident()
        self._over = threading.Event()
        self._watch = threading.Thread(target=self._look, daemon=True)
        self._watch.start()
        return self

    def _look(self) -> None:
        while not self._over.wait(0.05):
            self.most = max(self.most, resident())

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._watch.join()
        self.most = max(self.most, resident())

    @property
    def beyond(self) -> float:
        """MiB beyond what there was before."""
        return (self.most - self.before) / MIB


def main() -> None:
    """Fit, measure, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--columns", type=int, default=10)
    parser.add_argument("--max-time", default="5min")
    parser.add_argument("--mixture-rows", type=int, default=None)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("results/defaults"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = table(args.rows + 20_000, args.columns)
    train, test = rows[: args.rows], rows[args.rows :]
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])  # what torch loads for its first one
    began = time.perf_counter()
    with Peak() as peak:
        model = EnergyDensity(random_state=0, max_time=args.max_time).fit(train)
    row: dict[str, Any] = {
        "rows": args.rows, "columns": args.columns, "max_time": seconds(args.max_time),
        "seconds": round(time.perf_counter() - began, 2), "steps": model.n_iter_,
        "data_mib": round(train.nbytes / MIB), "beyond_mib": round(peak.beyond),
        "judgement": str(model.judgement_), "test": float(np.mean(model.score_samples(test))),
        "threads": args.threads,
    }  # fmt: skip
    print(row, flush=True)
    some = np.random.default_rng(0).permutation(args.rows)[: args.mixture_rows or args.rows]
    mixture = GaussianMixture(32, reg_covar=1e-4, random_state=0).fit(train[np.sort(some)])
    row |= {"mixture_rows": len(some), "mixture_test": float(mixture.score(test))}
    print(row)
    write(args.out / f"rows_{args.rows}x{args.columns}.json", [row])


if __name__ == "__main__":
    main()
