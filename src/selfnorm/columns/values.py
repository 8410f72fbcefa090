"""Sets of values of a column: unions of intervals, with or without the gap."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

Interval = tuple[float, float]
LINE = ((-np.inf, np.inf),)


@dataclass(frozen=True)
class Values:
    """Numbers within disjoint closed intervals, ascending, and perhaps the gap.

    Dates are seconds since 1970 and labels their places among the levels of their column. An open
    end of an interval is the next double within it.

    Example:
        >>> working = Values.of([(18.0, 67.0)])
        >>> (working & Values.of([(60.0, np.inf)])).intervals
        ((60.0, 67.0),)
        >>> working.hold(np.array([17.0, 30.0, np.nan]))
        array([False,  True, False])
    """

    intervals: tuple[Interval, ...] = LINE
    gap: bool = False

    @classmethod
    def of(cls, intervals: Iterable[Interval], gap: bool = False) -> Values:
        """Values of any intervals; empty ones hold nothing, and those that overlap are joined."""
        joined: list[Interval] = []
        for low, high in sorted((low, high) for low, high in intervals if low <= high):
            if joined and low <= np.nextafter(joined[-1][1], np.inf):
                low, high = joined[-1][0], max(joined.pop()[1], high)
            joined.append((low, high))
        return cls(tuple(joined), gap)

    def __and__(self, other: Values) -> Values:
        pairs = [(a, b) for a in self.intervals for b in other.intervals]
        both = ((max(a[0], b[0]), min(a[1], b[1])) for a, b in pairs)
        return Values.of(both, self.gap and other.gap)

    def __or__(self, other: Values) -> Values:
        return Values.of(self.intervals + other.intervals, self.gap or other.gap)

    def __invert__(self) -> Values:
        """All other numbers; the gap is in neither."""
        starts = [-np.inf, *(np.nextafter(high, np.inf) for _, high in self.intervals)]
        ends = [*(np.nextafter(low, -np.inf) for low, _ in self.intervals), np.inf]
        pairs = zip(starts, ends, strict=True)
        return Values.of((a, b) for a, b in pairs if a < np.inf and b > -np.inf)

    @property
    def empty(self) -> bool:
        """Whether it holds nothing."""
        return not (self.intervals or self.gap)

    def hold(self, numbers: np.ndarray) -> np.ndarray:
        """Which of some numbers it holds; NaN is the gap."""
        ends = np.array(self.intervals).reshape(-1)
        within = np.searchsorted(ends, numbers, "right") % 2 == 1
        within |= np.isin(numbers, ends[1::2])
        return np.where(np.isnan(numbers), self.gap, within)


@dataclass(frozen=True)
class PartValues:
    """The same of a part: which of its codes, and of its numbers, as coded rows have them.

    Attributes:
        codes: ``(n_codes,)``, which codes it holds.
        intervals: of the numbers of the rest: whole cells, where these have cells.
    """

    codes: np.ndarray
    intervals: tuple[Interval, ...]
