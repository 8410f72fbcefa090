"""Are the defaults good where people start? ``EnergyDensity()`` on small tables against its peers.

    python benchmarks/defaults.py --data DIR --out results/defaults            # the tables reported
    python benchmarks/defaults.py --data DIR --out out/chosen --choosing       # those chosen on

Five splits of 70/30. One measure for all: columns of numbers with ten values and more, a column
with equal values spread by its step (a fiftieth of its deviation at least), all of them densities
in units of the training rows' deviations. Peers are chosen by five folds: mixtures of Gaussians
(components, floor of the variances), kernels (bandwidth), and a shrunk Gaussian (Ledoit-Wolf);
``--flows`` adds zuko's neural spline flow with early stopping. Runs that the file has are not
repeated. The recipe of the defaults was chosen on ``CHOOSING`` and ``DRAWN_WHILE_CHOOSING`` alone.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn import datasets
from sklearn.covariance import LedoitWolf
from sklearn.mixture import GaussianMixture
from sklearn.model_selection import GridSearchCV
from sklearn.neighbors import KernelDensity

import tabular
from measuring import Stopwatch, peer, rows_in, write
from selfnorm import EnergyDensity, Schema

SPLITS = 5
PENGUINS = ("bill_length_mm", "bill_depth_mm", "flipper_length_mm", "body_mass_g")
LARGE = ("california", "magic.gamma", "mammography", "shuttle", "power", "bsds300")
REPORTED = (
    "iris", "wine", "breast_cancer", "diabetes", "glass", "ecoli", "wheat-seeds", "new-thyroid",
    "banknote_authentication", "penguins", *(f"{name}, 100 rows" for name in LARGE),
)  # fmt: skip
CHOOSING = (
    "39_vertebral", "37_Stamps", "46_WPBC", "29_Pima", "40_vowels", "47_yeast", "18_Ionosphere",
    "yacht", "bostonHousing", "concrete", "wine-quality-red",
)  # fmt: skip
# looked at while choosing, too, by draws of some hundred rows
DRAWN_WHILE_CHOOSING = (
    "10_cover", "31_satimage-2", "38_thyroid", "41_Waveform", "kin8nm",
    "protein-tertiary-structure",
)  # fmt: skip


def rows_of(name: str, data: Path) -> np.ndarray:
    """The columns of numbers of a table."""
    if name in ("iris", "wine", "breast_cancer", "diabetes"):
        return np.asarray(getattr(datasets, f"load_{name}")().data)
    if name.endswith(", 100 rows"):
        loaded = tabular.load(name.removesuffix(", 100 rows"), data)
        x = loaded.train.double().numpy()
        return x[np.random.default_rng(0).permutation(len(x))[:100]]
    if name == "penguins":
        with (data / "mixed" / "penguins.csv").open() as file:
            cells = [[row[column] for column in PENGUINS] for row in csv.DictReader(file)]
        return np.array([row for row in cells if all(row)], dtype=float)
    if (data / "small" / f"{name}.csv").exists():
        text = np.loadtxt(data / "small" / f"{name}.csv", delimiter=",", dtype=str)
        return text[:, :-1].astype(float)
    if (data / "adbench" / f"{name}.npz").exists():
        return np.load(data / "adbench" / f"{name}.npz", allow_pickle=True)["X"].astype(float)
    return np.loadtxt(data / "uci_regression" / name / "data" / "data.txt")


def spread(x: np.ndarray) -> np.ndarray:
    """Columns of ten values and more, without equal values."""
    rng = np.random.default_rng(0)
    x = x[:, [len(np.unique(column)) >= 10 for column in x.T]].copy()
    for j, column in enumerate(x.T.copy()):
        values = np.unique(column)
        if len(values) < len(column):
            width = max(np.diff(values).min(), 0.02 * column.std())
            x[:, j] = column + width * rng.uniform(-0.5, 0.5, len(column))
    return x


def ours(train: np.ndarray, test: np.ndarray, seed: int) -> tuple[np.ndarray, dict[str, Any]]:
    """The default, told that columns are continuous."""
    names = [column.name for column in Schema.detect(train).columns]
    schema = Schema.detect(train, dict.fromkeys(names, "continuous"))
    model = EnergyDensity(schema=schema, random_state=seed).fit(train)
    kept = {m.name: round(m.weight, 3) for m in model.members_ if m.weight > 0}
    facts = {"members": kept, "cross_validated": model.judgement_.score}
    return model.score_samples(test), facts | {"verdict": model.judgement_.verdict}


def gaussian(train: np.ndarray, test: np.ndarray, seed: int) -> tuple[np.ndarray, dict[str, Any]]:
    """A Gaussian with the covariance of Ledoit and Wolf."""
    del seed
    fitted = LedoitWolf().fit(train)
    log_det = np.linalg.slogdet(fitted.covariance_)[1]
    return -0.5 * (fitted.mahalanobis(test) + log_det + test.shape[1] * math.log(2 * math.pi)), {}


def mixture(train: np.ndarray, test: np.ndarray, seed: int) -> tuple[np.ndarray, dict[str, Any]]:
    """A mixture of Gaussians."""
    grid = {"n_components": [1, 2, 3, 4, 6, 8, 12], "reg_covar": [1e-6, 1e-4, 1e-2]}
    if len(train) < 75:
        grid["n_components"] = [1, 2, 3, 4]
    search = GridSearchCV(GaussianMixture(random_state=seed, n_init=2), grid, cv=5).fit(train)
    return search.best_estimator_.score_samples(test), search.best_params_


def kernels(train: np.ndarray, test: np.ndarray, seed: int) -> tuple[np.ndarray, dict[str, Any]]:
    """A Gaussian kernel density."""
    del seed
    grid = {"bandwidth": np.geomspace(0.05, 1.5, 20)}
    search = GridSearchCV(KernelDensity(), grid, cv=5).fit(train)
    return search.best_estimator_.score_samples(test), search.best_params_


def spline_flow(
    train: np.ndarray, test: np.ndarray, seed: int
) -> tuple[np.ndarray, dict[str, Any]]:
    """zuko's neural spline flow: Adam, best state by a fifth held out, patience of 30 epochs."""
    zuko = peer("zuko")
    torch.manual_seed(seed)
    rows = torch.as_tensor(train, dtype=torch.float32)[torch.randperm(len(train))]
    held, rows = rows[: len(rows) // 5], rows[len(rows) // 5 :]
    flow = zuko.flows.NSF(train.shape[1], transforms=3, hidden_features=(64, 64))
    optimizer = torch.optim.Adam(flow.parameters(), lr=1e-3, weight_decay=1e-4)
    best, state, stale = -math.inf, flow.state_dict(), 0
    while stale < 30:
        for batch in rows[torch.randperm(len(rows))].split(64):
            optimizer.zero_grad()
            (-flow().log_prob(batch).mean()).backward()
            optimizer.step()
        with torch.no_grad():
            score = float(flow().log_prob(held).mean())
        stale += 1
        if score > best:
            best, stale = score, 0
            state = {k: v.clone() for k, v in flow.state_dict().items()}
    flow.load_state_dict(state)
    with torch.no_grad():
        return flow().log_prob(torch.as_tensor(test, dtype=torch.float32)).double().numpy(), {}


Method = Callable[[np.ndarray, np.ndarray, int], tuple[np.ndarray, dict[str, Any]]]
METHODS: dict[str, Method] = {
    "EnergyDensity": ours, "Gaussian": gaussian, "mixture": mixture, "kernels": kernels,
    "spline flow": spline_flow,
}  # fmt: skip


def measure(name: str, split: int, method: str, data: Path) -> dict[str, Any]:
    """One fit; log-likelihood of the test rows in units of the training rows' deviations."""
    x = spread(rows_of(name, data))
    x = x[np.random.default_rng(split).permutation(len(x))]
    train, test = x[: int(0.7 * len(x))], x[int(0.7 * len(x)) :]
    center, unit = train.mean(0), train.std(0)
    train, test = (train - center) / unit, (test - center) / unit
    clock = Stopwatch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scores, facts = METHODS[method](train, test, split)
    took = clock()
    return {
        "table": name, "rows": len(train), "columns": x.shape[1], "split": split, "method": method,
        "test": float(scores.mean()), **took, **facts,
    }  # fmt: skip


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each table: means over the splits, and ours against the best peer, paired by split."""
    lines = []
    for name in dict.fromkeys(row["table"] for row in rows):
        of = [row for row in rows if row["table"] == name]
        by = {m: {r["split"]: r["test"] for r in of if r["method"] == m} for m in METHODS}
        own = by.pop("EnergyDensity")
        peers = {m: scores for m, scores in by.items() if len(scores) >= len(own) > 0}
        if not peers:
            continue
        means = {m: float(np.mean([scores[s] for s in own])) for m, scores in peers.items()}
        best = max(means, key=lambda m: means[m])
        ahead = np.array([own[s] - peers[best][s] for s in own])
        error = float(ahead.std(ddof=1) / math.sqrt(len(ahead))) if len(ahead) > 1 else math.nan
        seconds = [r["cpu_seconds"] for r in of if r["method"] == "EnergyDensity"]
        lines.append(
            {
                "table": name, "rows": of[0]["rows"], "columns": of[0]["columns"],
                "splits": len(own), "EnergyDensity": float(np.mean(list(own.values()))), **means,
                "best peer": best, "ahead": float(ahead.mean()), "error": error,
                "cpu_seconds": float(np.median(seconds)),
            }
        )  # fmt: skip
    return lines


def main() -> None:
    """Measure what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("results/defaults"))
    parser.add_argument("--choosing", action="store_true")
    parser.add_argument("--flows", action="store_true")
    parser.add_argument("--methods", nargs="*", choices=METHODS, help="those given alone")
    parser.add_argument("--splits", type=int, default=SPLITS)
    parser.add_argument("--tables", nargs="*", default=[])
    args = parser.parse_args()
    path = args.out / ("choosing.json" if args.choosing else "small.json")
    rows = rows_in(path)
    done = {(row["table"], row["split"], row["method"]) for row in rows}
    methods = args.methods or [m for m in METHODS if args.flows or m != "spline flow"]
    for split in range(args.splits):
        for name in args.tables or (CHOOSING if args.choosing else REPORTED):
            for method in methods:
                if (name, split, method) not in done:
                    rows.append(measure(name, split, method, args.data))
                    print(json.dumps(rows[-1]), flush=True)
            chosen_on = [*CHOOSING, *(f"draws of {name}" for name in DRAWN_WHILE_CHOOSING)]
            tables = {"reported": REPORTED, "choosing": chosen_on}
            write(path, rows, tables=tables, summary=summary(rows))
    for row in summary(rows):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
