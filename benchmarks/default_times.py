"""How long do the defaults take? Fits of tables of each size on two threads, one after another.

    python benchmarks/default_times.py --out results/defaults/times.json
    python benchmarks/default_times.py --out out/t.json --cases 800x30 50000x10 --max-time 30

Tables are made here: groups of rows, curved dependence, heavy tails and spreads that vary, in any
number of columns. Needs nothing but the library. Runs that the file has are not repeated. On a
machine of many cores several fits may run side by side, each bound to two of them: ``--beside``
tells how many others did.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from measuring import rows_in, write
from selfnorm import EnergyDensity, EnergyRegressor
from selfnorm.paper.commit import commit

LIMITS = {  # seconds on two quiet cores
    "200x5": 15, "200x30": 15, "398x30": 15, "800x5": 15, "800x30": 15, "960x4": 15,
    "2000x5": 15, "20000x10": 100, "16000x17": 180, "50000x10": 150, "3000x50": 90,
    "regression 50000x10": 120,
}  # fmt: skip


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


def measure(case: str, max_time: float | None, beside: int = 0) -> dict[str, Any]:
    """Fit one case; time and log-likelihood of rows not seen."""
    *kind, size = case.split()
    n, d = (int(part) for part in size.split("x"))
    rows = table(n + 2000, d + bool(kind))
    train, test = rows[:n], rows[n:]
    began, worked = time.perf_counter(), time.process_time()
    if kind:
        model: Any = EnergyRegressor(random_state=0, max_time=max_time)
        model.fit(train[:, :-1], train[:, -1])
    else:
        model = EnergyDensity(random_state=0, max_time=max_time).fit(train)
    seconds, worked = time.perf_counter() - began, time.process_time() - worked
    log_p = model.log_prob(test[:, :-1], test[:, -1]) if kind else model.score_samples(test)
    return {
        "case": case, "max_time": max_time, "limit": max_time or LIMITS.get(case),
        "seconds": round(seconds, 2), "cpu_seconds": round(worked, 2), "steps": model.n_iter_,
        "test": float(np.mean(np.asarray(log_p))), "threads": torch.get_num_threads(),
        "beside": beside, "commit": commit(Path(__file__).parent),
    }  # fmt: skip


def main() -> None:
    """Measure what is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results/defaults/times.json"))
    parser.add_argument("--cases", nargs="*", default=list(LIMITS))
    parser.add_argument("--max-time", type=float, default=None)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--beside", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    EnergyDensity(random_state=0, max_steps=1).fit(table(100, 3))  # what is loaded once
    rows = rows_in(args.out)
    done = {(row["case"], row["max_time"]) for row in rows}
    for case in args.cases:
        if (case, args.max_time) not in done:
            rows.append(measure(case, args.max_time, args.beside))
            print(json.dumps(rows[-1]), flush=True)
            write(args.out, rows)


if __name__ == "__main__":
    main()
