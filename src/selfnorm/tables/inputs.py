"""Inputs of every kind as columns of numbers, for a network that reads numbers."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

from selfnorm._saved import saved
from selfnorm.columns import GAP, Schema, Table, TableLike
from selfnorm.errors import SelfnormWarning

MAX_LEVELS = 32  # with a column of their own; the rarer share none


def only_lacks_asides(frame: Any, schema: Schema) -> bool:
    """Whether columns of the schema are missing from a frame, but none that is modelled."""
    absent = {column.name for column in schema.columns} - {*frame.columns}
    return bool(absent) and absent.isdisjoint(column.name for column in schema.modelled)


@saved()
@dataclass(frozen=True)
class TableInputs:
    """A table's rows as numbers: a column for each frequent level, one for numbers, one for gaps.

    A number that is not there is the median of those that are. Levels that are rare or were never
    seen have zeros everywhere. A last column marks rows with gaps. Those that training makes in
    others (:meth:`blank`) are not marked: a gap may tell something of its row, or be by chance.

    Attributes:
        schema: what the columns are.
        levels: for each part the codes that have a column.
        fill: for each part the number in place of none.
        gaps: for each part whether gaps have a column.
        mark: what the last column has in rows with gaps, 0 where these are by chance; ``None``:
            there is no such column.

    Example:
        >>> inputs = TableInputs.of({"a": [1.5, None, 2.25], "b": ["x", "y", "x"]})
        >>> inputs.rows({"a": [None], "b": ["x"]})
        array([[1.875, 1.   , 1.   , 0.   , 1.   ]])
    """

    schema: Schema
    levels: tuple[tuple[int, ...], ...]
    fill: tuple[float, ...]
    gaps: tuple[bool, ...]
    mark: int | None

    @classmethod
    def of(cls, frame: TableLike, schema: Schema | None = None) -> TableInputs:
        """Read off the rows of a training table; the schema, too, unless it is given."""
        frame = Table.of(frame)
        schema = Schema.detect(frame) if schema is None else schema
        x, _ = schema.encode(frame)
        levels, fill, gaps = [], [], []
        for j, part in enumerate(schema.parts):
            code, number = x[:, j, 0], x[:, j, 1]
            counts = np.bincount(code[code >= 0].astype(int), minlength=part.n_codes + 1)
            often = np.argsort(-counts[: part.n_codes], kind="stable")[:MAX_LEVELS]
            levels.append(tuple(sorted(int(i) for i in often if counts[i] > 0)))
            numbers = number[code == part.n_codes] if part.rest else number[:0]
            fill.append(float(np.median(numbers)) if len(numbers) else 0.0)
            gaps.append(bool((code == GAP).any()))
        return cls(schema, tuple(levels), tuple(fill), tuple(gaps), 1 if any(gaps) else None)

    def rows(self, frame: TableLike) -> np.ndarray:
        """``(n, columns)`` of float64."""
        x, _ = self.schema.encode(frame)
        columns, filled = [], []
        for j, part in enumerate(self.schema.parts):
            code, number = x[:, j, 0], x[:, j, 1]
            if not self.gaps[j] and (code == GAP).any():
                filled.append(part.name)
            if part.rest:
                columns.append(np.where(code == part.n_codes, number, self.fill[j]))
            if self.gaps[j]:
                columns.append((code == GAP).astype(np.float64))
            columns += [(code == level).astype(np.float64) for level in self.levels[j]]
        if filled:
            warnings.warn(
                f"gaps in {filled}, where the training rows had none: a number is taken for its "
                "median and a level for none, so answers for these rows are too sure; fit to rows "
                "that have such gaps, or impute them",
                SelfnormWarning,
                stacklevel=4,
            )
        if self.mark is not None:
            columns.append(self.mark * (x[:, np.array(self.gaps), 0] == GAP).any(1))
        return np.stack(columns, 1)

    def blank(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which cells of :meth:`rows` stand for a gap ``(n, columns)``, and what stands there."""
        cells, value = np.zeros(rows.shape, dtype=bool), np.zeros(rows.shape[1])
        end = 0
        for part, codes, fill, gaps in zip(
            self.schema.parts, self.levels, self.fill, self.gaps, strict=True
        ):
            start, end = end, end + part.rest + gaps + len(codes)
            if part.rest:
                value[start] = fill
            if gaps:
                value[start + part.rest] = 1.0
                cells[:, start:end] = rows[:, [start + part.rest]] == 1.0
        return cells, value
