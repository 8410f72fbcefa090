"""Fit time of the regressor with its defaults (five members) beside NGBoost's 500 rounds.

    python benchmarks/regression_fit_time.py --rows 10000 --features 10

A synthetic table; both fits run one after the other, each with all the threads it can use, and both
are judged on fresh rows: a fast fit that has learned nothing would show.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch

from selfnorm import EnergyRegressor
from selfnorm.paper.report import Table


def table_of(rows: int, features: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A skewed target whose spread depends on one of the columns."""
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((rows, features))
    noise = rng.gamma(2.0, 0.5, rows) - 1.0
    mean = X[:, 0] + np.sin(3 * X[:, 1]) * X[:, 2]
    return X, mean + np.exp(0.5 * X[:, 3]) * noise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--features", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("results/speed"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    from ngboost import NGBRegressor

    X, y = table_of(options.rows, options.features, 0)
    X_new, y_new = table_of(2000, options.features, 1)
    (options.out / "regression_fit_time.json").unlink(missing_ok=True)
    table = Table("regression_fit_time", "cpu", options.out)

    began, cpu = time.perf_counter(), time.process_time()
    model = EnergyRegressor(random_state=0, verbose=True).fit(X, y)
    ours, cpu = time.perf_counter() - began, time.process_time() - cpu
    size = {"rows": options.rows, "features": options.features, "threads": options.threads}
    table.add(
        {
            "model": "EnergyRegressor(), 5 members",
            **size,
            "seconds": ours,
            "cpu_seconds": cpu,
            "steps": model.n_iter_,
            "test_nll": -model.score(X_new, y_new),
        }
    )
    began, cpu = time.perf_counter(), time.process_time()
    other = NGBRegressor(n_estimators=500, random_state=0, verbose=False).fit(X, y)
    theirs, cpu = time.perf_counter() - began, time.process_time() - cpu
    table.add(
        {
            "model": "NGBoost, 500 rounds",
            **size,
            "seconds": theirs,
            "cpu_seconds": cpu,
            "steps": 500,
            "test_nll": -float(other.pred_dist(X_new).logpdf(y_new).mean()),
        }
    )
    print(f"ours {ours:.1f} s, NGBoost {theirs:.1f} s: {ours / theirs:.2f} x")


if __name__ == "__main__":
    main()
