"""Angles: numbers on a circle, such as a direction of the wind or an hour of the day.

A turn is cut where fewest rows are and laid out as a line from 0 to its length. The density of the
line, which integrates to 1 between these limits, is that of the circle in the units of the column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np

from selfnorm.columns.cells import Cells
from selfnorm.columns.kinds.base import Coded, Column, Draft, Part, register
from selfnorm.columns.kinds.number import (
    Number,
    decode_numbers,
    encode_numbers,
    number_part,
    numbers_within,
)
from selfnorm.columns.values import PartValues, Values

DEGREES, DAY = 360.0, 86_400.0
NEAR = 1 / 72  # of a turn on either side of a cut, in which rows are counted


@register("angle")
class Angle(Number):
    """Numbers of which the last is followed by the first; :attr:`Column.ends` are those of a turn,
    with the cut between them.

    A turn is as long as the ``support`` of the column says, a day for times of day, else 360.
    """

    adds: ClassVar[bool] = False

    @classmethod
    def detect(cls, draft: Draft) -> tuple[Column, list[Part]]:
        """One part: the turn laid out, in cells if the numbers lie on a grid that divides it."""
        column, seen = draft.column, draft.cells.seen
        start, end = _ends(draft)
        cut = _emptiest(start + (seen - start) % (end - start), end - start)
        unit = 0.0 if column.decimals is None else 10.0**-column.decimals
        if unit:  # between two of the numbers that could be recorded
            cut = float(np.floor(cut / unit) * unit + unit / 2)
        column = replace(column, kind="angle", ends=(start, cut, end))
        laid, limits = cls(column).laid_out(seen), (0.0, end - start)
        name, digits = str(column.name), None if not unit else (column.decimals or 0) + 1
        part = number_part(draft.place, name, laid, digits, kind="cells", support=limits)
        turns = (end - start) / (part.step or np.inf)
        if part.step < 1e-3 * seen.std() or abs(turns - round(turns)) > 1e-9 * turns:
            part = number_part(draft.place, name, laid, digits, kind="continuous", support=limits)
        summary = f"a turn of {end - start:g}, {seen.min():.6g} to {seen.max():.6g}"
        return replace(column, summary=summary), [replace(part, resolution=unit)]

    def laid_out(self, values: np.ndarray) -> np.ndarray:
        """Numbers as the way from the cut."""
        start, cut, end = self.column.ends
        way = (values - cut) % (end - start)
        digits = 12 if self.column.decimals is None else self.column.decimals + 1
        return np.clip(np.round(way, digits), 1e-9 * (end - start), (1 - 1e-9) * (end - start))

    def encode(self, cells: Cells) -> list[Coded]:
        """Codes, and the way from the cut beside them."""
        return [encode_numbers(self.parts[0], self.laid_out(cells.values), cells.missing)]

    def decode(self, coded: Sequence[Coded]) -> Cells:
        """Numbers within the turn."""
        values = self.coordinate([decode_numbers(self.parts[0], coded[0])])
        return Cells("number", values, np.isnan(values), [], self.column.form)

    def within(self, values: Values) -> tuple[list[PartValues], bool]:
        """The ways from the cut, up to a cell wider: the first number follows the last."""
        start, cut, end = self.column.ends
        turn, wider, ways = end - start, max(self.parts[0].step, self.parts[0].resolution), []
        for low, high in (values & Values.of([(start, end)])).intervals:
            first, length = (low - wider - cut) % turn, high - low + 2 * wider
            ways += [(first, first + length), (first - turn, first - turn + length)]
        within = Values.of(ways, values.gap) & Values.of([(0.0, turn)], gap=True)
        return [numbers_within(self.parts[0], within, None)], False

    def coordinate(self, numbers: Sequence[np.ndarray]) -> np.ndarray:
        """Numbers of the turn at ways from the cut."""
        start, cut, end = self.column.ends
        values = start + (numbers[0] + cut - start) % (end - start)
        if self.column.decimals is not None:
            values = np.round(values, self.column.decimals)
        return np.where(values >= end, start, values)


def _ends(draft: Draft) -> tuple[float, float]:
    """Where a turn begins and ends."""
    low, high = draft.support or (None, None)
    if low is not None and high is not None:
        return float(low), float(high)
    turn = DAY if draft.cells.form.get("store") == "time" else DEGREES
    start = 0.0 if draft.values[0] >= 0 else -turn / 2
    return (start if low is None else float(low)), (start if low is None else float(low)) + turn


def _emptiest(values: np.ndarray, turn: float) -> float:
    """The middle of two neighbouring values around which fewest rows are."""
    ordered = np.sort(values)
    around = np.concatenate([ordered - turn, ordered, ordered + turn])
    distinct = np.unique(ordered)
    gaps = np.diff(distinct, append=distinct[0] + turn)
    middles = distinct + gaps / 2
    ends = np.searchsorted(around, [middles - NEAR * turn, middles + NEAR * turn])
    best = np.lexsort([-gaps, ends[1] - ends[0]])[0]
    return float(middles[best])
