"""Columns of numbers: recorded digits, grids, point masses, and their codes.

The rules, for every column of numbers:

* **finite**: at most ``min(256, n / 20)`` distinct values (or two, in ten rows or more).
* **point mass**: a value that 0.2 % of the rows and ten at least share, and clearly more of them
  than the values around it would lead one to expect; a thousand rows of whole numbers repeat
  themselves without one.
* **cells**: what is left lies on a regular grid whose step is at least a thousandth of its standard
  deviation. Otherwise it is continuous, and its recorded digits are remembered.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from selfnorm.columns.columns import detect_step

MAX_CODES = 256
MASS_SHARE, MASS_ROWS = 0.002, 10


@dataclass(frozen=True)
class Part:
    """One factor of a table's law: finite codes, and perhaps numbers beside them.

    Attributes:
        column: index into the schema's modelled columns.
        name: what to call it.
        n_codes: codes ``0 .. n_codes - 1``: levels of a category (the last one perhaps the tail
            that rare levels share), or point masses.
        rest: whether values outside the codes are possible: code ``n_codes``, a number beside it.
        step: width of the cells of the rest (whole numbers 1, cents 0.01); 0: continuous.
        origin: a cell's centre is ``origin + k * step``.
        low: where the rest begins, an edge of a cell if it has cells; ``None``: no limit.
        high: where the rest ends.
        unseen: probability reserved for what was never seen; positive only without a rest.
        values: the numbers that the codes stand for, ascending; empty for labels.
        resolution: step by which the numbers of the rest were recorded, also where it is too fine
            for cells; 0: all digits that doubles have.
    """

    column: int
    name: str
    n_codes: int
    rest: bool = False
    step: float = 0.0
    origin: float = 0.0
    low: float | None = None
    high: float | None = None
    unseen: float = 0.0
    values: tuple[float, ...] = ()
    resolution: float = 0.0


def recorded_decimals(distinct: np.ndarray) -> int | None:
    """How many decimals numbers were recorded with; ``None`` if they use all that doubles have.

    Example:
        >>> recorded_decimals(np.array([1.25, 0.1 + 0.2])), recorded_decimals(np.array([np.pi]))
        (2, None)
    """
    few = distinct[:: len(distinct) // 100 + 1]  # enough to refuse most
    rounding = np.spacing(np.abs(distinct).max(initial=0.0))
    for decimals in range(13):
        if 10.0**-decimals < 1000 * rounding:
            break
        if all((np.abs(v - np.round(v, decimals)) <= 4 * rounding).all() for v in (few, distinct)):
            return decimals
    return None


def snap(values: np.ndarray, decimals: int | None) -> np.ndarray:
    """Numbers all but equal to one of so many decimals made equal to it: 0.1 + 0.2 is 0.3."""
    if decimals is None:
        return values
    near = np.round(values, decimals)
    return np.where(np.abs(values - near) <= 0.005 * 10.0**-decimals, near, values)


def _grid(distinct: np.ndarray, decimals: int | None) -> tuple[float, float]:
    """Step and origin of the coarsest grid all values lie on; step 0 where there is none."""
    enough = len(distinct) >= 10  # few values may lie on a grid by chance
    if decimals is None:
        step = detect_step(distinct.repeat(2)) if enough else 0.0
        place = (distinct - distinct[0]) / (step or 1.0)
        if step > 0 and np.abs(place - np.round(place)).max() < 1e-6:
            return step, float(distinct[0] % step)
        return 0.0, 0.0
    whole = np.round(distinct * 10.0**decimals).astype(np.int64)
    factor = int(np.gcd.reduce(np.diff(whole))) if enough else 1
    unit = 10.0**-decimals
    return (
        float(np.round(max(factor, 1) * unit, decimals)),
        float(np.round((int(whole[0]) % max(factor, 1)) * unit, decimals)),
    )


def point_masses(distinct: np.ndarray, counts: np.ndarray, unit: float) -> np.ndarray:
    """Values that stand out from the numbers around them, ascending.

    The ten cells and hundred rows on either side of a value tell how many rows it would have as
    one of them; without a unit (``0``) that is none. Far more rows make it a point mass.

    Example:
        >>> values = np.r_[np.zeros(50), np.random.default_rng(0).normal(size=450)]
        >>> point_masses(*np.unique(values, return_counts=True), unit=0.0)
        array([0.])
    """
    n = counts.sum()
    often = np.flatnonzero(counts >= max(MASS_ROWS, MASS_SHARE * n))
    before = np.cumsum(counts) - counts
    masses = []
    for i in often:
        expected = 0.0
        if unit > 0 and len(distinct) > 1:
            # rows at the ends of the window, by count and by cells, whichever is further
            left = np.searchsorted(before, before[i] - 100, "right") - 1
            left = min(max(left, 0), np.searchsorted(distinct, distinct[i] - 10.5 * unit))
            right = np.searchsorted(before, before[i] + counts[i] + 100)
            right = max(right, np.searchsorted(distinct, distinct[i] + 10.5 * unit)) - 1
            right = min(max(right, 0), len(distinct) - 1)
            others = before[right] + counts[right] - before[left] - counts[i]
            cells = round((distinct[right] - distinct[left]) / unit)
            expected = others / max(cells, 1)
        if counts[i] > 3 * expected + 5 * np.sqrt(expected):
            masses.append(i)
    if len(masses) >= MAX_CODES:
        masses = sorted(masses, key=lambda i: -counts[i])[: MAX_CODES - 1]
    return distinct[np.sort(np.array(masses, dtype=np.int64))]


def number_part(
    column: int,
    name: str,
    values: np.ndarray,
    decimals: int | None,
    *,
    kind: str | None = None,
    support: tuple[float | None, float | None] = (None, None),
) -> Part:
    """The part of a column of numbers.

    Args:
        column: index into the schema's modelled columns.
        name: of the part.
        values: the numbers, without gaps.
        decimals: with which they were recorded.
        kind: ``None`` goes by the rules; ``"continuous"`` and ``"cells"`` are as asked for;
            ``"whole"`` is finite or has cells, however small: parts of a date are exact.
        support: limits of the rest.

    Example:
        >>> part = number_part(0, "age", np.arange(18.0, 90.0), 0)
        >>> part.rest, part.step, part.n_codes
        (True, 1.0, 0)
    """
    distinct, counts = np.unique(values, return_counts=True)
    n = len(values)
    few = len(distinct) <= min(MAX_CODES, n / 20) or (len(distinct) == 2 and n >= 10)
    step, origin = _grid(distinct, decimals)
    masses = point_masses(distinct, counts, step)
    rest = values[~np.isin(values, masses)]
    if kind in (None, "whole") and (few or len(rest) == 0):
        levels = tuple(distinct.tolist())
        return Part(column, name, len(levels), unseen=1 / (n + 2), values=levels)
    if kind == "continuous" or (kind is None and step < 1e-3 * rest.std()):
        step, origin = 0.0, 0.0
    low, high = support
    return Part(
        column,
        name,
        len(masses),
        rest=True,
        step=step,
        origin=origin,
        low=_edge(low, step, origin, -1),
        high=_edge(high, step, origin, 1),
        values=tuple(masses.tolist()),
        resolution=0.0 if decimals is None else 10.0**-decimals,
    )


def _edge(limit: float | None, step: float, origin: float, side: int) -> float | None:
    """A limit, or the outer edge of the last cell whose centre is within it."""
    if limit is None or step == 0:
        return None if limit is None else float(limit)
    last = np.floor(side * (limit - origin) / step + 1e-9)
    return float(origin + side * (last + 0.5) * step)


def encode_numbers(
    part: Part, values: np.ndarray, missing: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, numbers and the log-density of what is left open, for numbers of one part.

    A number never seen in a finite part is open: its law is a Cauchy law around the median of the
    part's values with their range as scale.

    Example:
        >>> part = Part(0, "a", 1, rest=True, values=(0.0,))
        >>> codes, numbers, _ = encode_numbers(part, np.array([0.0, 2.5]), np.zeros(2, bool))
        >>> codes.tolist(), numbers.tolist()
        ([0.0, 1.0], [0.0, 2.5])
    """
    known = np.array([*part.values, np.inf])
    safe = np.where(missing, 0.0, values)
    place = np.searchsorted(known[:-1], safe)
    hit = known[place] == safe
    codes = np.where(hit, place, part.n_codes if part.rest else -2).astype(np.float64)
    extra = np.zeros(len(values))
    numbers = np.zeros(len(values))
    open_ = ~hit & ~missing
    if part.rest:
        numbers[open_] = to_cells(part, safe[open_])
    elif open_.any():
        scale = known[-2] - known[0]
        z = (safe[open_] - np.median(known[:-1])) / scale
        extra[open_] = -np.log(np.pi * scale) - np.log1p(z**2)
    codes[missing] = -1
    return codes, numbers, extra


def to_cells(part: Part, numbers: np.ndarray) -> np.ndarray:
    """The centres of the cells that numbers of the rest lie in; the same numbers without cells."""
    if part.step == 0:
        return numbers
    return part.origin + np.round((numbers - part.origin) / part.step) * part.step


def decode_numbers(part: Part, codes: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """The numbers of a part; NaN for gaps and for what was never seen."""
    inside = 0.5 * (1 - 1e-9) * part.step  # an edge is rounded into its own cell
    low = -np.inf if part.low is None else part.low + inside
    high = np.inf if part.high is None else part.high - inside
    rest = to_cells(part, np.clip(numbers, low, high)) if part.rest else np.nan
    known = np.array([*part.values, np.nan])
    coded = known[np.where((codes >= 0) & (codes < part.n_codes), codes, -1).astype(np.int64)]
    return np.where(part.rest & (codes == part.n_codes), rest, coded)
