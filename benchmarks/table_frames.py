"""Tables of mixed columns for ``tables.py``: nothing here needs more than NumPy.

The parts of that benchmark run in environments of their own and on machines without pandas, so a
table is a dictionary of columns: float64 (gap: NaN), int64, bool, datetime64 (gap: NaT) or object
(text, or booleans with gaps; gap: None). Files are ``.npz`` without pickles. The same rows go to
every method: a digest of them stands in each result.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Frame = dict[str, np.ndarray]


@dataclass(frozen=True)
class TableSet:
    """A table: its file, what it holds beyond what the types of its columns say.

    Attributes:
        file: below the data directory.
        codes: columns whose numbers name a class and measure nothing; text and truth values are
            categories anyway.
        target: the class that a classifier learns, where there is one.
    """

    file: str
    codes: tuple[str, ...] = ()
    target: str | None = None


SETS = {
    "adult": TableSet("mixed/adult.data", target="income"),
    "shoppers": TableSet(
        "mixed/online_shoppers_intention.csv",
        codes=("OperatingSystems", "Browser", "Region", "TrafficType"),
        target="Revenue",
    ),
    "magic": TableSet("mixed/magic04.data", codes=("class",), target="class"),
    "penguins": TableSet("mixed/penguins.csv", target="species"),
    "diamonds": TableSet("mixed/diamonds.csv"),
    "german": TableSet("mixed/german.csv", codes=("c20",), target="c20"),
    "california": TableSet("tabular/california.npz"),
    "power": TableSet("power/household_power_consumption.txt"),
}
MAGIC = ("fLength", "fWidth", "fSize", "fConc", "fConc1", "fAsym", "fM3Long", "fM3Trans")
MAGIC += ("fAlpha", "fDist", "class")
CALIFORNIA = ("MedInc", "HouseAge", "AveRooms", "AveBedrms", "Population", "AveOccup")
CALIFORNIA += ("Latitude", "Longitude", "MedHouseVal")


# Files


def read_raw(name: str, data_dir: Path) -> Frame:
    """A table from its official file; needs pandas for all but california."""
    path = data_dir / SETS[name].file
    if name == "california":
        with np.load(path) as file:
            columns = [*file["X"].T, file["y"]]
        # the file holds float32: 34.12 is meant where it says 34.11999893
        return {
            c: v.astype(str).astype(np.float64) for c, v in zip(CALIFORNIA, columns, strict=True)
        }
    import pandas as pd

    if name == "adult":
        # `?` is a category here, and the labels of the test file end in a dot
        parts = [pd.read_csv(p, na_filter=False) for p in (path, path.with_suffix(".test"))]
        table = pd.concat(parts, ignore_index=True)
        table["income"] = table["income"].str.rstrip(".")
    elif name == "magic":
        table = pd.read_csv(path, sep="\t", header=None, names=MAGIC)
    elif name == "power":
        table = pd.read_csv(path, sep=";", na_values="?").drop(columns=["Date", "Time"]).dropna()
    elif name == "german":
        table = pd.read_csv(path, header=None, na_values="?")
        table.columns = [f"c{i}" for i in range(table.shape[1])]
    else:
        table = pd.read_csv(path)
    return from_pandas(table)


def save_frame(path: Path, frame: Frame) -> None:
    """Write columns as ``c0, c1, ...``, where there are objects also which of them are gaps."""
    arrays: dict[str, np.ndarray] = {}
    kinds = []
    for j, column in enumerate(frame.values()):
        kind = column.dtype.kind
        if kind == "O":
            gaps = is_gap(column)
            truth = all(isinstance(v, bool | np.bool_) for v in column[~gaps])
            kind = "truth" if truth and not gaps.all() else "text"
            filled = column.copy()
            filled[gaps] = False if kind == "truth" else ""
            arrays[f"g{j}"] = gaps
            column = filled.astype(bool if kind == "truth" else str)
        kinds.append(kind)
        arrays[f"c{j}"] = column
    arrays["columns"] = np.array(json.dumps([list(frame), kinds]))
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part.npz")
    np.savez_compressed(part, **arrays)
    os.replace(part, path)  # whole whenever the benchmark is killed


def load_frame(path: Path) -> Frame:
    """What :func:`save_frame` wrote."""
    if not path.exists():
        sys.exit(f"{path} is not there: run `tables.py data` (tables) or `tables.py fit` (samples)")
    frame = {}
    with np.load(path, allow_pickle=False) as file:
        names, kinds = json.loads(str(file["columns"]))
        for j, (name, kind) in enumerate(zip(names, kinds, strict=True)):
            column = file[f"c{j}"]
            if kind in ("truth", "text"):
                column = column.astype(object)
                column[file[f"g{j}"]] = None
            frame[name] = column
    return frame


def from_pandas(table: Any) -> Frame:
    """Columns of a pandas frame."""
    frame = {}
    for name in table.columns:
        column = table[name]
        values = column.to_numpy()
        if values.dtype.kind == "O" or str(column.dtype) in ("category", "string", "str"):
            gone = column.isna().to_numpy()
            values = column.astype(object).to_numpy(copy=True)
            values[gone] = None
        elif values.dtype.kind == "M":
            values = values.astype("datetime64[s]")
        frame[str(name)] = plain(values)
    return frame


def to_pandas(frame: Frame) -> Any:
    """A pandas frame of the same types, gaps as pandas has them."""
    import pandas as pd

    table = {}
    for name, column in frame.items():
        if column.dtype.kind == "M":
            column = column.astype("datetime64[ns]")
        table[name] = pd.Series(column, dtype=column.dtype)
    return pd.DataFrame(table)


def plain(column: np.ndarray) -> np.ndarray:
    """A column in one of the types above."""
    kinds = {"i": np.int64, "u": np.int64, "f": np.float64}
    if column.dtype.kind in kinds:
        return column.astype(kinds[column.dtype.kind])
    return column.astype(object) if column.dtype.kind == "U" else column


def like(table: Any, train: Frame) -> Frame:
    """A frame that a method returned, with the columns and the types of its training rows."""
    columns = table if isinstance(table, dict) else from_pandas(table)
    out = {}
    for name, wanted in train.items():
        column, kind = np.asarray(columns[name]), wanted.dtype.kind
        gaps = is_gap(column)
        if kind == "i" and not gaps.any():
            column = np.round(column.astype(np.float64)).astype(np.int64)
        elif kind in "if":
            column = np.where(gaps, np.nan, column).astype(np.float64)
        elif kind == "b" and not gaps.any():
            column = np.array([str(v) in ("True", "1", "1.0") for v in column])
        elif kind == "M":
            column = column.astype("datetime64[s]")
        else:
            truth = {"True": True, "False": False} if is_truth(wanted) else {}
            values = np.empty(len(column), dtype=object)
            values[:] = [
                None if g else truth.get(str(v), str(v)) for v, g in zip(column, gaps, strict=True)
            ]
            column = values
        out[name] = column
    return out


# Rows and cells


def is_gap(column: np.ndarray) -> np.ndarray:
    """Which cells are missing."""
    if column.dtype.kind == "f":
        return np.isnan(column)
    if column.dtype.kind == "M":
        return np.isnat(column)
    if column.dtype.kind == "O":
        return np.array([v is None or v != v for v in column], dtype=bool)
    return np.zeros(len(column), dtype=bool)


def is_truth(column: np.ndarray) -> bool:
    """Whether a column holds truth values."""
    if column.dtype.kind == "O":
        return all(v is None or isinstance(v, bool | np.bool_) for v in column)
    return column.dtype.kind == "b"


def n_rows(frame: Frame) -> int:
    """Number of rows."""
    return len(next(iter(frame.values())))


def take(frame: Frame, rows: np.ndarray) -> Frame:
    """Some rows."""
    return {name: column[rows] for name, column in frame.items()}


def shuffled(n: int, seed: int) -> np.ndarray:
    """The rows of a table in random order."""
    return np.random.default_rng(seed).permutation(n)


def split(frame: Frame, seed: int) -> tuple[Frame, Frame]:
    """Nine tenths to train, one tenth to test."""
    order, n_test = shuffled(n_rows(frame), seed), n_rows(frame) // 10
    return take(frame, order[n_test:]), take(frame, order[:n_test])


def at_most(frame: Frame, rows: int | None, seed: int) -> Frame:
    """A random part of a table that is too long."""
    if rows is None or n_rows(frame) <= rows:
        return frame
    return take(frame, shuffled(n_rows(frame), seed)[:rows])


def complete(frame: Frame) -> Frame:
    """The rows without gaps."""
    return take(frame, ~np.any([is_gap(c) for c in frame.values()], axis=0))


def remove_cells(frame: Frame, gone: np.ndarray) -> Frame:
    """The table with gaps where ``gone (n, columns)``; whole numbers become float, as in pandas."""
    out = {}
    for j, (name, column) in enumerate(frame.items()):
        kind = column.dtype.kind
        copy = column.astype({"i": np.float64, "b": object}.get(kind, column.dtype), copy=True)
        copy[gone[:, j]] = {"M": np.datetime64("NaT"), "i": np.nan, "f": np.nan}.get(kind)
        out[name] = copy
    return out


def random_gaps(frame: Frame, share: float, seed: int) -> np.ndarray:
    """Cells ``(n, columns)`` to remove, each with the same probability."""
    rng = np.random.default_rng([seed, 1])
    gone = rng.random((n_rows(frame), len(frame))) < share
    kept = rng.integers(len(frame), size=n_rows(frame))  # nobody can do anything with an empty row
    empty = gone.all(axis=1)
    gone[empty, kept[empty]] = False
    return gone


def categories(name: str, frame: Frame) -> list[str]:
    """The columns of a table that hold categories."""
    return [c for c, values in frame.items() if values.dtype.kind in "Ob" or c in SETS[name].codes]


def digest(frame: Frame) -> str:
    """A short name of these very rows."""
    content = hashlib.sha256(json.dumps(list(frame)).encode())
    for column in frame.values():
        kind = column.dtype.kind
        same = column.astype("datetime64[s]").astype(np.int64) if kind == "M" else column
        text = kind in "Ob"
        content.update(repr(same.tolist()).encode() if text else same.astype("<f8").tobytes())
    return content.hexdigest()[:12]


class Coding:
    """Mixed columns as numbers and back: numbers as they are, categories as one column a level.

    Attributes:
        owner: for each column of the matrix the frame's column that it belongs to.
        levels: of each category.
    """

    def __init__(self, frame: Frame, categorical: list[str]) -> None:
        self.names = list(frame)
        self.types = {name: column.dtype for name, column in frame.items()}
        self.truth = {name for name in categorical if is_truth(frame[name])}
        self.levels: dict[str, list[Any]] = {}
        self.values: dict[str, np.ndarray] = {}
        owner = []
        for j, (name, column) in enumerate(frame.items()):
            seen = column[~is_gap(column)]
            if name in categorical:
                self.levels[name] = sorted(set(seen.tolist()), key=str)
            else:
                self.values[name] = np.unique(as_float(seen))
            owner += [j] * len(self.levels.get(name, [0]))
        self.owner = np.array(owner)

    def codes(self, frame: Frame, name: str) -> np.ndarray:
        """Whole numbers of a category; -1: a gap or a level that was not seen."""
        index = {level: k for k, level in enumerate(self.levels[name])}
        return np.array([index.get(v, -1) for v in frame[name].tolist()])

    def matrix(self, frame: Frame) -> np.ndarray:
        """Rows of numbers ``(n, p)``; NaN in gaps, zeros for a level that was not seen."""
        parts = []
        for name in self.names:
            gaps = is_gap(frame[name])
            if name in self.levels:
                part = (
                    self.codes(frame, name)[:, None] == np.arange(len(self.levels[name]))
                ).astype(np.float64)
            else:
                part = as_float(frame[name])[:, None].copy()
            part[gaps] = np.nan
            parts.append(part)
        return np.hstack(parts)

    def frame(self, matrix: np.ndarray) -> Frame:
        """Rows in the columns' own types: the likeliest level, the nearest number that was seen."""
        out = {}
        for j, name in enumerate(self.names):
            part = matrix[:, self.owner == j]
            if name in self.levels:
                out[name] = self.of_codes(name, part.argmax(axis=1))
            else:
                out[name] = of_float(nearest(part[:, 0], self.values[name]), self.types[name])
        return out

    def of_codes(self, name: str, codes: np.ndarray) -> np.ndarray:
        """The levels with these numbers."""
        levels = np.empty(len(self.levels[name]), dtype=object)
        levels[:] = self.levels[name]
        values = levels[codes]
        kind = self.types[name].kind
        return values if kind == "O" else values.astype(self.types[name])


def as_float(column: np.ndarray) -> np.ndarray:
    """Numbers of a column of numbers or dates (seconds)."""
    if column.dtype.kind == "M":
        seconds = column.astype("datetime64[s]").astype(np.int64).astype(np.float64)
        return np.where(np.isnat(column), np.nan, seconds)
    return column.astype(np.float64)


def of_float(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The reverse."""
    if dtype.kind == "M":
        return np.round(values).astype(np.int64).astype("datetime64[s]")
    return np.round(values).astype(np.int64) if dtype.kind == "i" else values


def nearest(x: np.ndarray, values: np.ndarray) -> np.ndarray:
    """For each number the closest of sorted ``values``."""
    right = np.clip(np.searchsorted(values, x), 1, max(len(values) - 1, 1))
    if len(values) == 1:
        return np.full_like(x, values[0])
    left = values[right - 1]
    return np.where(x - left <= values[right] - x, left, values[right])
