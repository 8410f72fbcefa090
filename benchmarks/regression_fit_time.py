"""Fit time of the regressor with its defaults (five members) beside NGBoost's 500 rounds.

    python benchmarks/regression_fit_time.py --rows 10000 --features 10

A synthetic table; both fits run one after the other, each with all the threads it can use, and both
are judged on fresh rows: a fast fit that has learned nothing would show.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from measuring import peer, write
from selfnorm import EnergyRegressor


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
    parser.add_argument("--rounds", type=int, default=500, help="of NGBoost")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("results/speed"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    ngboost = peer("ngboost")
    X, y = table_of(options.rows, options.features, 0)
    X_new, y_new = table_of(2000, options.features, 1)
    size = {"rows": options.rows, "features": options.features, "threads": options.threads}

    def timed(name: str, fit: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
        began, cpu = time.perf_counter(), time.process_time()
        model = fit()
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        return model, {"model": name, **size, "seconds": seconds, "cpu_seconds": cpu}

    ours = EnergyRegressor(random_state=0, verbose=True)
    model, row = timed("EnergyRegressor(), 5 members", lambda: ours.fit(X, y))
    rows = [{**row, "steps": model.n_iter_, "test_nll": -model.score(X_new, y_new)}]
    theirs = ngboost.NGBRegressor(n_estimators=options.rounds, random_state=0, verbose=False)
    other, row = timed(f"NGBoost, {options.rounds} rounds", lambda: theirs.fit(X, y))
    nll = -float(other.pred_dist(X_new).logpdf(y_new).mean())
    rows.append({**row, "steps": options.rounds, "test_nll": nll})
    write(options.out / "regression_fit_time.json", rows)
    seconds = [row["seconds"] for row in rows]
    print(f"ours {seconds[0]:.1f} s, NGBoost {seconds[1]:.1f} s: {seconds[0] / seconds[1]:.2f} x")


if __name__ == "__main__":
    main()
