"""Anomaly detection by density: EnergyDensity, IsolationForest, GaussianMixture, KernelDensity.

    python benchmarks/anomaly.py --data-dir DATA --out results/anomaly

For each set and split: train on a random half of the inliers, score the other half and all
anomalies, report the AUROC of minus the score. No labels are used to choose anything: the number of
mixture components and the kernel bandwidth are those with the best likelihood on a tenth of the
training rows, and the peers see columns standardised by the training rows. One JSON row per model
and split is written as soon as it is there; a second call adds what is missing.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.ensemble import IsolationForest
from sklearn.metrics import roc_auc_score
from sklearn.mixture import GaussianMixture
from sklearn.neighbors import KernelDensity
from sklearn.preprocessing import StandardScaler

from selfnorm import EnergyDensity
from selfnorm.errors import MissingDataError
from selfnorm.paper.report import Table, markdown_table, mean_sd

SETS = ("shuttle", "mammography", "magic.gamma")
COMPONENTS = (1, 5, 10, 20, 50)
BANDWIDTHS = (0.05, 0.1, 0.2, 0.4, 0.8)
KERNEL_ROWS = 5_000  # scoring takes rows x kernels: more would take longer than all the rest
Scorer = Callable[[np.ndarray], np.ndarray]


def load(directory: Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    path = directory / f"{name}.npz"
    if not path.exists():
        raise MissingDataError(f"{path}: no such file; it holds arrays X and y (1 = anomaly)")
    with np.load(path, allow_pickle=False) as arrays:
        return arrays["X"].astype(np.float64), arrays["y"].astype(int).ravel()


def split(X: np.ndarray, y: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    inliers = np.random.default_rng(seed).permutation(np.flatnonzero(y == 0))
    half = len(inliers) // 2
    test = np.concatenate([inliers[half:], np.flatnonzero(y == 1)])
    return X[inliers[:half]], X[test], y[test]


def isolation_forest(train: np.ndarray, seed: int) -> tuple[Scorer, dict[str, Any]]:
    return IsolationForest(random_state=seed).fit(train).score_samples, {}


def gaussian_mixture(train: np.ndarray, seed: int) -> tuple[Scorer, dict[str, Any]]:
    held_out, rest = train[: len(train) // 10], train[len(train) // 10 :]

    def fitted(k: int, rows: np.ndarray) -> GaussianMixture:
        return GaussianMixture(k, random_state=seed, reg_covar=1e-6).fit(rows)

    best = max(COMPONENTS, key=lambda k: fitted(k, rest).score(held_out))
    return fitted(best, train).score_samples, {"n_components": best}


def kernel_density(train: np.ndarray, _seed: int) -> tuple[Scorer, dict[str, Any]]:
    train = train[:KERNEL_ROWS]
    held_out, rest = train[: len(train) // 10], train[len(train) // 10 :]

    def fitted(h: float, rows: np.ndarray) -> KernelDensity:
        # rtol: scores to a thousandth of the density, many times faster
        return KernelDensity(bandwidth=h, rtol=1e-3).fit(rows)

    best = max(BANDWIDTHS, key=lambda h: fitted(h, rest).score(held_out))
    return fitted(best, train).score_samples, {"bandwidth": best}


PEERS = {
    "isolation_forest": isolation_forest,
    "gaussian_mixture": gaussian_mixture,
    "kernel_density": kernel_density,
}


def run_one(
    model: str, parts: tuple[np.ndarray, ...], seed: int, steps: int | None
) -> dict[str, Any]:
    train, test, labels = parts
    began, cpu = time.perf_counter(), time.process_time()
    if model == "energy_density":
        density = EnergyDensity(random_state=seed, max_steps=steps).fit(train)
        scores = density.score_samples(test)
        found: dict[str, Any] = {"steps": density.n_iter_, "method": density.method_}
    else:
        scaler = StandardScaler().fit(train)
        score, found = PEERS[model](scaler.transform(train), seed)
        scores = score(scaler.transform(test))
    return {
        "auroc": float(roc_auc_score(labels, -scores)),
        "n_train": len(train),
        "n_test": len(test),
        "seconds": round(time.perf_counter() - began, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
        **found,
    }


def summary(table: Table) -> str:
    groups = table.groups("dataset", "model")
    models = ["energy_density", *PEERS]
    n_splits = max(len(rows) for rows in groups.values())
    body = []
    for name in SETS:
        cells = []
        for m in models:
            rows = groups.get((name, m), [])
            short = f" ({len(rows)} splits)" if len(rows) < n_splits else ""
            cells.append(mean_sd(rows, "auroc", 4) + short)
        body.append([name, *cells])
    means = []
    for m in models:
        per_set = [
            statistics.fmean(r["auroc"] for r in groups[(name, m)])
            for name in SETS
            if (name, m) in groups
        ]
        means.append(f"{statistics.fmean(per_set):.4f}" if len(per_set) == len(SETS) else "–")
    body.append(["mean", *means])
    title = f"# Anomaly detection: AUROC, mean and sd over {n_splits} random splits"
    return f"{title}\n\n{markdown_table(['set', *models], body)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, required=True, help="folder with the .npz files")
    parser.add_argument("--out", type=Path, default=Path("results/anomaly"))
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--steps", type=int, default=None, help="training steps of EnergyDensity")
    parser.add_argument("--models", default=",".join(["energy_density", *PEERS]))
    parser.add_argument("--sets", default=",".join(SETS))
    arguments = parser.parse_args()
    recipe = f"steps={arguments.steps or 'default'}"
    command = "python benchmarks/anomaly.py --data-dir DATA --out results/anomaly"
    if arguments.steps is not None:
        command += f" --steps {arguments.steps}"
    table = Table("anomaly", recipe, arguments.out, command=command)
    for seed in range(arguments.splits):
        for name in arguments.sets.split(","):
            parts = split(*load(arguments.data_dir, name), seed)
            for model in arguments.models.split(","):
                keys = {"dataset": name, "model": model, "seed": seed}
                if not table.has(**keys):
                    table.add({**keys, **run_one(model, parts, seed, arguments.steps)})
                    print(table.rows[-1], flush=True)
    table.write_page(summary(table))
    print(summary(table))


if __name__ == "__main__":
    main()
