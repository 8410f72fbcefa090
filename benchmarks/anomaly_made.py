"""Tables with anomalies on which the outlier detector was chosen: none of those it is reported on.

    python benchmarks/anomaly_made.py --data-dir DATA --out out/made
    python benchmarks/anomaly.py --data out/made --out out/made/results

Of tables without anomalies four kinds are made: ``local`` (drawn around rows, five times as widely
as a mixture of Gaussians says), ``global`` (uniform in a box a tenth wider than the data),
``cluster`` (a small cloud far from the others) and ``dependency`` (every column from a row of its
own). Of tables with classes a class that is rare, or made rare, counts as anomalous. Files are
``NAME_KIND.npz`` with ``X`` and ``y``, as those of ADBench.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from sklearn.datasets import load_iris
from sklearn.mixture import GaussianMixture

ROWS = 700  # of a table at most
SHARES = (0.02, 0.05, 0.1, 0.2)  # of anomalies, in turn
PLAIN = ("concrete", "energy", "kin8nm", "power-plant", "protein-tertiary-structure")
PLAIN = (*PLAIN, "wine-quality-red", "bostonHousing", "naval-propulsion-plant")
KINDS = ("local", "global", "cluster", "dependency")
Made = tuple[str, np.ndarray, np.ndarray]


def anomalies(kind: str, X: np.ndarray, n: int, rng: np.random.Generator) -> np.ndarray:
    """``(n, d)`` rows of one kind beside ``X``."""
    low, high, sd = X.min(0), X.max(0), X.std(0)
    if kind == "global":
        wider = 0.1 * (high - low)
        return rng.uniform(low - wider, high + wider, (n, X.shape[1]))
    if kind == "dependency":
        return np.stack([rng.choice(column, n) for column in X.T], 1)
    if kind == "cluster":
        centre = X.mean(0) + rng.choice([-3.0, 3.0], X.shape[1]) * sd
        return centre + 0.1 * sd * rng.normal(size=(n, X.shape[1]))
    mixture = GaussianMixture(5, random_state=0, reg_covar=1e-6).fit((X - X.mean(0)) / sd)
    mixture.covariances_ *= 5
    return X.mean(0) + sd * mixture.sample(n)[0]


def plain(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Tables of numbers."""
    with np.load(folder / "tabular" / "california.npz") as content:
        yield "california", content["X"]
    for name in PLAIN:
        yield name, np.loadtxt(folder / "uci_regression" / name / "data" / "data.txt")


def _cells(file: Path, *, header: bool = False) -> list[list[str]]:
    with file.open() as text:
        return [row for row in csv.reader(text) if row][int(header) :]


def _numbers(rows: list[list[str]]) -> np.ndarray:
    """Columns of numbers as they are, others by a code."""

    def number(column: tuple[str, ...]) -> np.ndarray:
        try:
            return np.array(column, dtype=float)
        except ValueError:
            return np.unique(column, return_inverse=True)[1].astype(float)

    return np.stack([number(column) for column in zip(*rows, strict=True)], 1)


def classes(folder: Path) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Tables whose last column, or another, is a class; and whether a row is of the odd one."""
    small, mixed = folder / "small", folder / "mixed"
    for name, odd in (
        ("glass", ("5", "6", "7")),
        ("ecoli", ("om", "omL", "imL", "imS", "pp")),
        ("wheat-seeds", ("3",)),
        ("banknote_authentication", ("1",)),
        ("new-thyroid", ("2",)),
        ("new-thyroid", ("3",)),
    ):
        cells = _cells(small / f"{name}.csv")
        odd_ones = np.array([row[-1].strip() in odd for row in cells])
        yield f"{name}-{odd[0]}", _numbers([row[:-1] for row in cells]), odd_ones
    flowers = load_iris()
    for which in (1, 2):
        yield f"iris-{which}", flowers.data, flowers.target == which
    cells = _cells(mixed / "german.csv")
    yield "german", _numbers([row[:-1] for row in cells]), np.array([r[-1] == "2" for r in cells])
    cells = _cells(mixed / "online_shoppers_intention.csv", header=True)
    buys = np.array([row[-1] == "TRUE" for row in cells])
    yield "shoppers", _numbers([row[:-1] for row in cells]), buys
    cells = [row for row in _cells(mixed / "adult.data", header=True) if "?" not in "".join(row)]
    rich = np.array([">" in row[-1] for row in cells])
    yield "adult", _numbers([row[:-1] for row in cells]), rich
    cells = [row for row in _cells(mixed / "penguins.csv", header=True) if all(row[2:6])]
    numbers = _numbers([row[2:6] for row in cells])
    yield "penguins", numbers, np.array([row[0] == "Chinstrap" for row in cells])
    cells = _cells(mixed / "diamonds.csv", header=True)
    odd_ones = np.array([row[1] == "Fair" for row in cells])
    yield "diamonds", _numbers([[row[0], *row[4:]] for row in cells]), odd_ones


def made(folder: Path) -> Iterator[Made]:
    """Every table."""
    turn = 0
    for name, X in plain(folder):
        for kind in KINDS:
            rng = np.random.default_rng(turn)
            n = round(ROWS * SHARES[(turn + turn // 4) % 4])  # each kind with every share
            X_usual = X[rng.permutation(len(X))[: ROWS - n]]
            X_usual = X_usual[:, X_usual.std(0) > 0]
            rows = np.concatenate([X_usual, anomalies(kind, X_usual, n, rng)])
            yield f"{name}_{kind}", rows, np.arange(len(rows)) >= len(X_usual)
            turn += 1
    for name, X, odd in classes(folder):
        rng = np.random.default_rng(turn)
        usual, strange = (rng.permutation(np.flatnonzero(odd == which)) for which in (0, 1))
        usual = usual[: ROWS - 100]
        most = max(5, round(len(usual) * SHARES[turn % 4] * 1.5))
        rows = np.concatenate([usual, strange[:most]])
        yield f"{name}_class", X[rows], odd[rows]
        turn += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for number, (name, X, y) in enumerate(made(args.data_dir)):
        order = np.random.default_rng(number).permutation(len(y))
        np.savez_compressed(args.out / f"{number}_{name}.npz", X=X[order], y=y[order].astype(int))


if __name__ == "__main__":
    main()
