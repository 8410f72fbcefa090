"""Where rows of a table are: coordinates in which they are near each other or far."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from scipy.special import ndtri
from torch import Tensor

from selfnorm.columns import GAP, Part, Schema, Table, TableLike

MOST_LEVELS = 200  # of a column of labels that distances see


class Places:
    """Where rows are: numbers, and a number for each level, on scales of the training rows."""

    def __init__(self, parts: Sequence[Part], rows: Tensor) -> None:
        self.parts = parts
        numeric = [part.rest or bool(part.values) for part in parts]
        counts = [
            1 if is_one else part.n_codes for is_one, part in zip(numeric, parts, strict=True)
        ]
        self.of_part = np.repeat(np.arange(len(parts)), counts)
        self.of_level = np.where(np.array(numeric)[self.of_part], -1, self.of_part)
        self._scale(self.numbers(rows))

    def _scale(self, places: np.ndarray) -> None:
        """Read the scales off the training rows."""
        self.mean = np.nan_to_num(np.nanmean(places, 0))
        spread = np.nanstd(places, 0)
        for which in np.unique(self.of_level[self.of_level >= 0]):
            own = self.of_level == which  # the columns of one category share a unit
            spread[own] = np.sqrt(max(np.square(spread[own]).sum(), 1e-12))
        self.unit = np.where(spread > 0, spread, 1.0)
        self.sorted = [np.sort(place[~np.isnan(place)]) for place in places.T]

    def numbers(self, rows: Tensor) -> np.ndarray:
        """``(n, D)``: a column for each number and each level."""
        numbers = []
        for j, part in enumerate(self.parts):
            code, number = rows[:, j].numpy().T
            if part.rest or part.values:
                numbers.append(part.numbers(code, number))
            else:
                levels = range(part.n_codes)
                numbers += [np.where(code == GAP, np.nan, code == level) for level in levels]
        return np.stack(numbers, 1).astype(np.float64)

    def deviations(self, numbers: np.ndarray) -> np.ndarray:
        """In deviations from the mean.

        Two levels of a category are as far apart as two rows of a number are on average; what is
        missing is at the mean.
        """
        return np.nan_to_num((numbers - self.mean) / self.unit)

    def normal_scores(self, numbers: np.ndarray) -> np.ndarray:
        """The same, but for numbers: normal quantiles of the share of training rows below."""
        out = self.deviations(numbers)
        for j in np.flatnonzero(self.of_level < 0):
            seen, n = self.sorted[j], len(self.sorted[j])
            below = np.searchsorted(seen, numbers[:, j]) + np.searchsorted(
                seen, numbers[:, j], "right"
            )
            share = np.clip((below + 1) / (2 * n + 2), 0.5 / (n + 1), 1 - 0.5 / (n + 1))
            out[:, j] = np.where(np.isnan(numbers[:, j]), 0.0, ndtri(share))
        return out


class CellPlaces(Places):
    """The same of the cells of a table as they are, not of its parts.

    A part holds what a column does not follow from others by; a distance sees every column, those
    too that repeat another or that nothing is learned of. Labels of many levels are left out.
    """

    def __init__(self, schema: Schema, X: TableLike) -> None:
        table = Table.of(X)
        self.levels: dict[Hashable, list[Any]] = {}
        for column in schema.columns:
            cells = table.cells(column.name)
            levels = list(cells.labels) if cells.kind == "label" else []
            if len(levels) <= MOST_LEVELS:
                self.levels[column.name] = levels
        sizes = [max(1, len(levels)) for levels in self.levels.values()]
        is_label = [bool(levels) for levels in self.levels.values()]
        self.of_part = np.repeat(np.arange(len(sizes)), sizes)
        self.of_level = np.where(np.array(is_label)[self.of_part], self.of_part, -1)
        self._scale(self.numbers_of(table))

    def numbers_of(self, X: TableLike | Table) -> np.ndarray:
        """``(n, D)``: a column for each number and each level."""
        table, numbers = X if isinstance(X, Table) else Table.of(X), []
        for name, levels in self.levels.items():
            cells = table.cells(name)
            if not levels:
                values = np.full(table.n_rows, np.nan) if cells.kind == "label" else cells.values
                numbers.append(np.where(cells.missing, np.nan, values))
                continue
            of_row = np.array(cells.labels, dtype=object)[cells.values] if cells.labels else None
            for level in levels:
                same = np.zeros(table.n_rows) if of_row is None else of_row == level
                numbers.append(np.where(cells.missing, np.nan, same))
        return np.stack(numbers, 1).astype(np.float64)
