"""Small real tables (``.npz`` with an array ``X``), split, scaled and dequantised one way for all.

Rows are shuffled by ``RandomState(42)``, the last 10 % are for testing, the last 10 % of the rest
for validation; columns get zero mean and unit deviation by the training rows. Values on a grid and
repeated values are spread out by the convention of :mod:`selfnorm.columns.columns`: once, with a
fixed seed, for validation and test, so that every method is scored on the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from selfnorm._context import seeded
from selfnorm.columns import Columns
from selfnorm.datasets import find_file, maf_benchmark
from selfnorm.errors import DataError

SOURCES = {
    "california": "scikit-learn, fetch_california_housing",
    "magic.gamma": "UCI, MAGIC gamma telescope",
    "shuttle": "ODDS, Shuttle",
    "mammography": "ODDS, Mammography",
}
NAMES = tuple(SOURCES)


@dataclass(frozen=True)
class TableSplits:
    """One table in three parts, float32, in units of the training rows' deviations.

    Attributes:
        train, val, test: dequantised rows.
        train_values, val_values: the same rows with the values as recorded, for methods that draw
            fresh noise at every step; equal to ``train`` and ``val`` for continuous tables.
        columns: grids and atoms found, in the scaled units.
        mean, sd: of the training rows, in the table's own units.
    """

    name: str
    train: Tensor
    val: Tensor
    test: Tensor
    train_values: Tensor
    val_values: Tensor
    columns: Columns
    mean: Tensor
    sd: Tensor

    @property
    def dim(self) -> int:
        """Number of columns."""
        return self.train.shape[1]


def read_table(path: str | Path) -> np.ndarray:
    """The array ``X`` of an ``.npz`` file as float64 ``(n, d)``."""
    with np.load(path) as file:
        if "X" not in file:
            raise DataError(f"{path} has no array 'X' (it holds {sorted(file)})")
        x = np.asarray(file["X"], dtype=np.float64)
    if x.ndim != 2:
        raise DataError(f"'X' of {path} must be a table, got shape {x.shape}")
    return x


def split_table(name: str, x: np.ndarray) -> TableSplits:
    """Split, scale and dequantise a table by the rules above.

    Example:
        >>> table = np.random.default_rng(0).normal(size=(200, 2)).round(1)
        >>> parts = split_table("demo", table)
        >>> len(parts.train), len(parts.val), len(parts.test)
        (162, 18, 20)
        >>> bool((parts.columns.step > 0).all())
        True
    """
    shuffled = x[np.random.RandomState(42).permutation(len(x))]
    train, val, test = maf_benchmark.split_by_order(shuffled)
    mean, sd = train.mean(0), train.std(0)
    sd = np.where(sd > 0, sd, 1.0)
    scaled = [torch.from_numpy((part - mean) / sd) for part in (train, val, test)]
    # The grid is a property of the table: all rows tell it.
    columns = Columns(x.shape[1]).double().fit(torch.from_numpy((x - mean) / sd))
    with seeded(7):
        noisy_val, noisy_test, noisy_train = (
            columns.dequantise(part).float() for part in (scaled[1], scaled[2], scaled[0])
        )
    return TableSplits(
        name,
        noisy_train,
        noisy_val,
        noisy_test,
        scaled[0].float(),
        scaled[1].float(),
        columns.float(),
        torch.from_numpy(mean),
        torch.from_numpy(sd),
    )


def load(name: str, data_dir: str | Path | None = None) -> TableSplits:
    """A table of :data:`NAMES`, or POWER or BSDS300 in the same form (nothing to dequantise there).

    Example:
        >>> from selfnorm.errors import MissingDataError
        >>> try:
        ...     load("shuttle", "/nonexistent")
        ... except MissingDataError as error:
        ...     print("shuttle.npz" in str(error))
        True
    """
    if name in NAMES:
        return split_table(
            name, read_table(find_file(f"tabular/{name}.npz", data_dir, SOURCES[name]))
        )
    parts = maf_benchmark.load(name, data_dir)
    columns = Columns(parts.dim, discrete=None).fit(parts.train)
    unit, zero = torch.ones(parts.dim), torch.zeros(parts.dim)
    return TableSplits(
        name, parts.train, parts.val, parts.test, parts.train, parts.val, columns, zero, unit
    )
