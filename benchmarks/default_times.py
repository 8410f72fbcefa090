"""How long do the defaults take? Fits of tables of each size on two threads, one after another.

    python benchmarks/default_times.py --out results/defaults/times.json
    python benchmarks/default_times.py --out out/t.json --cases 800x30 50000x10 --max-time 30
    python benchmarks/default_times.py --cases 1000000x10 --max-time 300 --mixture-rows 1000000 \\
        --out results/defaults/rows_1000000x10.json
    python benchmarks/default_times.py --cases {independent,correlated}\\ {200x500,1000x300} \\
        --out results/defaults/wide.json

Tables are made here: groups of rows, curved dependence, heavy tails and spreads that vary, in any
number of columns; ``independent`` normal columns, or ``correlated`` ones: a fifth as many normal
numbers mixed, and noise. Memory is the peak of the process during the fit beyond what it had with
the table made. ``--mixture-rows``: the peer, a mixture of 32 Gaussians fitted to so many of the
rows. Needs nothing but the library. Runs that the file has are not repeated.
"""

from __future__ import annotations

import argparse
import json
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.mixture import GaussianMixture

from measuring import Row, Stopwatch, commit, rows_in, write
from selfnorm import EnergyDensity, EnergyRegressor, training

LIMITS = {  # seconds on two quiet cores
    "200x5": 15, "200x30": 15, "398x30": 15, "800x5": 15, "800x30": 15, "960x4": 15,
    "2000x5": 15, "20000x10": 100, "16000x17": 180, "50000x10": 150, "3000x50": 90,
    "regression 50000x10": 120,
}  # fmt: skip
TEST_ROWS, WIDE_TEST_ROWS = 2000, 200
MIB = 2**20


def table(n: int, d: int, seed: int = 0) -> np.ndarray:
    """Rows ``(n, d)``: three groups, each column curved in two before it, heavy-tailed noise."""
    rng = np.random.default_rng([n, d, seed])
    group = rng.integers(3, size=n)
    x = rng.standard_t(4, size=(n, d))
    x[:, 0] = 2 * (group - 1) + 0.5 * x[:, 0]
    for j in range(1, d):
        first, second = x[:, rng.integers(j)], x[:, rng.integers(j)]
        bend = np.sin(1.5 * first) + 0.5 * np.tanh(second) * (group - 1)
        x[:, j] = bend + 0.3 * first + (0.2 + 0.4 / (1 + np.exp(-second))) * x[:, j]
    positive = np.arange(d) % 4 == 3
    x[:, positive] = np.exp(0.7 * x[:, positive])
    return x


def wide_table(kind: str, n: int, d: int, seed: int = 0) -> np.ndarray:
    """Rows ``(n, d)`` of ``independent`` or ``correlated`` normal columns."""
    rng = np.random.default_rng([n, d, seed])
    if kind == "independent":
        return rng.normal(size=(n, d))
    few = d // 5
    return rng.normal(size=(n, few)) @ rng.normal(size=(few, d)) + 0.5 * rng.normal(size=(n, d))


@contextmanager
def first_step() -> Iterator[dict[str, float]]:
    """CPU seconds of the process when the first training run begins, and those of all runs."""
    execute, at = training.loop._Run.execute, {"steps": 0.0}

    def timed(run: Any) -> Any:
        began = time.process_time()
        at.setdefault("cpu", began)
        history = execute(run)
        at["steps"] += time.process_time() - began
        return history

    training.loop._Run.execute = timed
    try:
        yield at
    finally:
        training.loop._Run.execute = execute


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


def measure(
    case: str, max_time: float | None, mixture_rows: int, max_steps: int | None = None
) -> Row:
    """Fit one case; time, memory and log-likelihood of rows not seen."""
    *kind, size = case.split()
    n, d = (int(part) for part in size.split("x"))
    regression = kind == ["regression"]
    if kind and not regression:
        rows = wide_table(kind[0], n + WIDE_TEST_ROWS, d)
    else:
        rows = table(n + TEST_ROWS, d + regression)
    train, test = rows[:n], rows[n:]
    clock, began = Stopwatch(), time.process_time()
    with Peak() as peak, first_step() as at:
        if regression:
            regressor = EnergyRegressor(random_state=0, max_time=max_time)
            model = regressor.fit(train[:, :-1], train[:, -1])
        else:
            limits = {"max_time": max_time, "max_steps": max_steps}
            model = EnergyDensity(random_state=0, **limits).fit(train)
    took = clock()
    log_p = model.log_prob(test[:, :-1], test[:, -1]) if regression else model.score_samples(test)
    row = {
        "case": case, "max_time": max_time, "limit": max_time or LIMITS.get(case), **took,
        "beyond_mib": round((peak.most - peak.before) / MIB), "data_mib": round(train.nbytes / MIB),
        "cpu_before_steps": round(at["cpu"] - began, 2), "cpu_of_steps": round(at["steps"], 2),
        "steps": model.n_iter_, "max_steps": max_steps,
        "test": float(np.mean(np.asarray(log_p))), "finite": bool(np.isfinite(log_p).all()),
        "threads": torch.get_num_threads(), "commit": commit(Path(__file__).parent),
    }  # fmt: skip
    if mixture_rows:
        chosen = np.sort(np.random.default_rng(0).permutation(n)[:mixture_rows])
        mixture = GaussianMixture(32, reg_covar=1e-4, random_state=0).fit(train[chosen])
        row |= {"mixture_rows": len(chosen), "mixture_test": float(mixture.score(test))}
    return row


def main() -> None:
    """Measure what is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results/defaults/times.json"))
    parser.add_argument("--cases", nargs="*", default=list(LIMITS))
    parser.add_argument("--max-time", type=float, default=None)
    parser.add_argument("--max-steps", type=int, default=None)
    parser.add_argument("--mixture-rows", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    EnergyDensity(random_state=0, max_steps=1).fit(table(100, 3))  # what is loaded once
    rows = rows_in(args.out)
    done = {(row["case"], row["max_time"]) for row in rows}
    for case in args.cases:
        if (case, args.max_time) not in done:
            rows.append(measure(case, args.max_time, args.mixture_rows, args.max_steps))
            print(json.dumps(rows[-1]), flush=True)
            write(args.out, rows)


if __name__ == "__main__":
    main()
