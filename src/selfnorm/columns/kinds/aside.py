"""Columns without parts: identifiers, constants, copies of other columns, those left out."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from selfnorm.columns.cells import Cells
from selfnorm.columns.kinds.base import Column, Kind, label_text, register


@register("identifier", "ignored")
class Aside(Kind):
    """Set aside: no model sees it, and no table gets it back."""

    modelled: ClassVar[bool] = False
    stateable: ClassVar[bool] = False


@register("constant")
class Constant(Aside):
    """One value in every row, or none at all."""

    def broken(self, cells: Cells) -> str:
        """Other values."""
        column = self.column
        if not column.levels:
            return ""
        usual = constant_cells(column, len(cells))
        same = cells.missing | (_comparable(cells) == _comparable(usual))
        words = f"{column.name!r} was always {label_text(column.levels[0])} and is kept as that"
        return _in_words(words, same)


@register("duplicate")
class Duplicate(Aside):
    """The same as another column in every row."""

    def broken(self, cells: Cells) -> str:
        """Rows that differ."""
        if self.base is None:
            return ""
        same = _comparable(cells) == _comparable(self.base)
        return _in_words(f"{self.column.name!r} is kept as a copy, which it no longer is", same)


def _in_words(words: str, same: np.ndarray) -> str:
    return "" if same.all() else f"{words} ({int((~same).sum())} rows differ)"


def constant_cells(column: Column, n: int) -> Cells:
    """The one value of a column in every row; gaps where there is none."""
    missing = np.full(n, not column.levels)
    value = column.levels[0] if column.levels else 0
    if column.numeric or column.resolution:
        kind = "number" if column.numeric else "date"
        return Cells(kind, np.full(n, value), missing, [], column.form)
    return Cells("label", np.where(missing, -1, 0), missing, list(column.levels), column.form)


def _comparable(cells: Cells) -> np.ndarray:
    if cells.kind != "label":
        return np.where(cells.missing, 0, cells.values)
    return np.array([*map(label_text, cells.labels), ""], dtype=object)[cells.values]
