"""Numbers: continuous, or in cells of a grid, with point masses beside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np

from selfnorm.columns.cells import Cells
from selfnorm.columns.kinds.base import (
    Coded,
    Column,
    Draft,
    Kind,
    Part,
    Support,
    kept_for_unseen,
    register,
    rows_in_words,
)
from selfnorm.columns.text import (
    FEWEST_NUMBERS,
    are_slips,
    holds_names,
    marks_of,
    numbers_from,
    text_decimals,
    unmarked,
    without_slips,
)
from selfnorm.columns.values import PartValues, Values
from selfnorm.errors import DataError, shortened

MAX_CODES = 256
MASS_SHARE, MASS_ROWS = 0.002, 10
_HUGE = 1e150  # squares of larger numbers are beyond double precision


@register("continuous", "cells")
class Number(Kind):
    """Numbers with a density, or with cells, and point masses beside them."""

    holds: ClassVar[str | None] = "number"

    @classmethod
    def detect(cls, draft: Draft) -> tuple[Column, list[Part]]:
        """The column and its parts, as read off a draft."""
        column, cells = draft.column, draft.cells
        part = number_part(
            draft.place,
            str(column.name),
            cells.seen,
            column.decimals,
            kind=draft.stated,
            support=draft.support or (None, None),
            counted=(draft.values, draft.counts),
        )
        if draft.stated == "cells" and part.step == 0:
            raise DataError(f"column {column.name!r} is to have cells, but lies on no grid")
        if draft.support is not None and not part.rest:
            draft.notes.append(f"{column.name!r} takes {part.n_codes} values: limits do not matter")
        summary = _summary(part, column.decimals, cells.seen)
        if not part.rest:
            return replace(column, kind="category", levels=part.values, summary=summary), [part]
        kind = "cells" if part.step > 0 else "continuous"
        return replace(column, kind=kind, levels=(), summary=summary), [part]

    def encode(self, cells: Cells) -> list[Coded]:
        """Codes, and numbers beside them."""
        (part,) = self.parts
        coded = encode_numbers(part, cells.values, cells.missing)
        moved = (coded.code == part.n_codes) & (coded.number != cells.values) & (part.step > 0)
        moved[moved] = np.abs(coded.number - cells.values)[moved] > 1e-3 * part.step
        if moved.any():
            self.surprises.append(
                f"{self.column.name!r} is rounded to steps of {part.step:g} "
                f"({cells.values[moved][0]:g}, {rows_in_words(int(moved.sum()))})"
            )
        return [replace(coded, number=snap(coded.number, self.column.decimals))]

    def decode(self, coded: Sequence[Coded]) -> Cells:
        """Cells of codes and numbers."""
        column = self.column
        values = decode_numbers(self.parts[0], coded[0])
        kept = values if column.decimals is None else np.round(values, column.decimals)
        return Cells("number", kept, np.isnan(values), [], column.form)

    def within(self, values: Values) -> tuple[list[PartValues], bool]:
        """Codes of the values, and the cells of their numbers."""
        return [numbers_within(self.parts[0], values, self.column.decimals)], True


# Cells of text as numbers


def numbers_in(cells: Cells, names: bool) -> Cells | None:
    """Texts as numbers, without their marks; ``None`` if they are something else.

    A few cells that are none among many numbers are slips of a pen: gaps, in ``form["odd"]``.
    """
    if cells.numbers is not None:
        texts = cells.texts or []
        if cells.missing.any():
            texts = [text for text in texts if text is not None]
        if names or not holds_names(texts, cells.numbers[~cells.missing]):
            missing = np.isnan(cells.numbers)
            form = cells.form | {"text": True, "text_decimals": text_decimals(texts)}
            if missing.any() and not cells.missing.any():
                gaps = Counter(texts[i] for i in np.flatnonzero(missing).tolist())
                form["gap"] = gaps.most_common(1)[0][0]
            return Cells("number", cells.numbers, missing, [], form)
    texts, memo = unmarked(cells.labels)
    texts, odd = without_slips(texts)
    rows = int(np.isin(cells.values, odd).sum())
    if not are_slips(rows, len(cells)) or (odd and len(texts) - len(odd) < FEWEST_NUMBERS):
        return None
    memo |= {"odd": odd} if odd else {}
    numbers = numbers_from(texts, names=names)
    if numbers is None:
        return None
    empty = np.isnan(numbers)
    empty[odd] = False
    form = cells.form_with_gap(empty) | {"text": True, "text_decimals": text_decimals(texts)} | memo
    values = np.append(numbers, np.nan)[cells.values]
    return Cells("number", values, np.isnan(values), [], form)


def read_numbers(column: Column, cells: Cells, surprises: list[str]) -> Cells:
    """Cells of any kind but dates as those of a column of numbers."""
    if cells.kind == "date":
        raise DataError(f"column {column.name!r} holds numbers, but here dates")
    if cells.kind == "number":
        return cells
    if cells.numbers is not None:
        return Cells("number", cells.numbers, np.isnan(cells.numbers), [], cells.form)
    written = [str(+v) if type(v) is bool else str(v) for v in cells.labels]
    numbers = numbers_from(written, names=True)
    if numbers is None:
        numbers = _marked_numbers(column, cells, written, surprises)
    values = np.append(numbers, np.nan)[cells.values]
    return Cells("number", values, np.isnan(values), [], cells.form)


def _marked_numbers(
    column: Column, cells: Cells, written: list[str], surprises: list[str]
) -> np.ndarray:
    """The numbers of labels as ``written``, without marks; NaN for gaps and slips."""
    labels, _ = unmarked(written, grouped=column.form.get("grouped", False), alike=False)
    own = "".join(column.form.get("marks", ())).strip()
    strange = sorted({before + after for before, after in marks_of(written)} - {"", own})
    if strange:
        fitted, other = f"marked {own!r}" if own else "not marked", ", ".join(map(repr, strange))
        surprises.append(f"column {column.name!r} holds numbers {fitted}, but here {other}")
    labels, wrong = without_slips(labels)
    odd = np.isin(cells.values, wrong)
    if odd.any():
        row = int(odd.argmax())
        text = written[cells.values[row]][:40]
        words = f"column {column.name!r} holds numbers, but here text ({text!r} in row {row})"
        if 2 * odd.sum() > (~cells.missing).sum():
            raise DataError(words)
        usual = {written[k] for k in cells.values[odd]} <= {*column.slips}
        if not (usual and are_slips(int(odd.sum()), len(odd))):  # named when they were detected
            surprises.append(f"{words}: taken as gaps, {odd.sum()} of {len(odd)} cells")
    numbers = numbers_from(labels, names=True)
    return np.full(len(labels), np.nan) if numbers is None else numbers


def check_numbers(name: Hashable, cells: Cells) -> None:
    """Refuse numbers that no model can hold."""
    if cells.kind != "number":
        return
    bad = ~cells.missing & ~(np.abs(cells.values) <= _HUGE)
    if not bad.any():
        return
    row = int(bad.argmax())
    value = cells.values[row]
    bad &= np.isinf(cells.values) == np.isinf(value)
    what, cure = f"a number as large as {value:.0e}", "give it in other units"
    if np.isinf(value):
        what, cure = f"an infinite value ({value})", "remove the row or leave the cell empty"
    raise DataError(
        f"column {name!r} holds {what} in row {row} ({int(bad.sum())} such cells); {cure}"
    )


def snap(values: np.ndarray, decimals: int | None) -> np.ndarray:
    """Numbers all but equal to one of so many decimals made equal to it: 0.1 + 0.2 is 0.3."""
    if decimals is None:
        return values
    near = np.round(values, decimals)
    return np.where(np.abs(values - near) <= 0.005 * 10.0**-decimals, near, values)


def encode_numbers(part: Part, values: np.ndarray, missing: np.ndarray) -> Coded:
    """Codes, numbers and the log-density of what is left open, for numbers of one part.

    A number never seen in a finite part is open: its density is Cauchy's around the median of the
    part's values with their range as scale, one where it has a single value.

    Example:
        >>> part = Part(0, "a", 1, rest=True, values=(0.0,))
        >>> coded = encode_numbers(part, np.array([0.0, 2.5]), np.zeros(2, bool))
        >>> coded.code.tolist(), coded.number.tolist()
        ([0.0, 1.0], [0.0, 2.5])
    """
    masses = np.array([*part.values, np.inf])
    safe = np.where(missing, 0.0, values)
    place = np.searchsorted(masses[:-1], safe) if part.values else np.zeros(len(safe), np.int64)
    hit = masses[place] == safe
    codes = np.where(hit, place, part.n_codes if part.rest else -2).astype(np.float64)
    extra = np.zeros(len(values))
    numbers = np.zeros(len(values))
    open_ = ~hit & ~missing
    if part.rest:
        numbers[open_] = to_cells(part, safe[open_])
    elif open_.any():
        scale = masses[-2] - masses[0] or 1.0
        z = (safe[open_] - np.median(masses[:-1])) / scale
        extra[open_] = -np.log(np.pi * scale) - np.log1p(z**2)
    codes[missing] = part.gap_code
    return Coded(codes, numbers, extra)


def numbers_within(part: Part, values: Values, decimals: int | None) -> PartValues:
    """What values leave of a part; a number is rounded to ``decimals`` when it is decoded.

    Example:
        >>> age = Part(0, "age", 0, rest=True, step=1.0)
        >>> numbers_within(age, Values.of([(18.0, 67.5)]), 0).intervals
        ((17.5, 67.5),)
    """
    codes = values.hold(np.array(part.values))
    codes = np.append(codes, values.gap) if part.gap else codes
    width = part.step or part.resolution
    if not part.rest:
        return PartValues(codes, ())
    if width == 0:
        return PartValues(codes, tuple((a, b) for a, b in values.intervals if a < b))
    origin = part.origin if part.step else 0.0

    def edge(end: float, side: int) -> float:
        """Outer edge of the last cell whose centre, as decoded, is not beyond an end."""
        if np.isinf(end):
            return end
        place = np.round((end - origin) / width)
        centre = origin + place * width
        centre = centre if decimals is None else np.round(centre, decimals)
        inside = side * centre <= side * end
        return float(origin + (place - side * (not inside) + side * 0.5) * width)

    cells = [(edge(low, -1), edge(high, 1)) for low, high in values.intervals]
    return PartValues(codes, tuple((a, b) for a, b in cells if a < b - width / 2))


def to_cells(part: Part, numbers: np.ndarray) -> np.ndarray:
    """The centres of the cells that numbers of the rest lie in; the same numbers without cells."""
    if part.step == 0:
        return numbers
    return part.origin + np.round((numbers - part.origin) / part.step) * part.step


def decode_numbers(part: Part, coded: Coded) -> np.ndarray:
    """The numbers of a part; NaN for gaps and for what was never seen."""
    inside = 0.5 * (1 - 1e-9) * part.step  # an edge is rounded into its own cell
    low = -np.inf if part.low is None else part.low + inside
    high = np.inf if part.high is None else part.high - inside
    rest = to_cells(part, np.clip(coded.number, low, high)) if part.rest else coded.number
    return part.numbers(coded.code, rest)


def _summary(part: Part, decimals: int | None, values: np.ndarray) -> str:
    span = f"{values.min():.6g} to {values.max():.6g}"
    if not part.rest:
        return f"{part.n_codes} values, {span}"
    if part.step > 0:
        what = "whole numbers, " if part.step == 1 else f"steps of {part.step:g}, "
    else:
        what = {None: "", 0: "whole numbers, "}.get(decimals, f"{decimals} decimals, ")
    if part.n_codes:
        share = np.isin(values, part.values).mean()
        span += f"; {100 * share:.3g} % at {first_of(part.values)}"
    return what + span


def first_of(values: Sequence[float]) -> str:
    """The first three of some numbers in words."""
    return shortened([f"{v:g}" for v in values], 3)


# Recorded digits, grids, point masses


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


def detect_step(values: np.ndarray) -> float:
    """The step of the grid a column lies on; 0 where there is none worth the name.

    Example:
        >>> detect_step(np.array([1.0, 3.0, 2.0, 7.0, 3.0, 2.0, 2.0, 5.0]))
        1.0
        >>> detect_step(np.random.default_rng(0).normal(size=500))
        0.0
    """
    distinct, counts = np.unique(values, return_counts=True)
    if len(distinct) < 2 or counts.max() == 1:
        return 0.0
    return _step_of(distinct, float(values.std()))


def _step_of(distinct: np.ndarray, sd: float) -> float:
    """The step of the grid that distinct numbers, ascending, of some deviation lie on; or 0."""
    gaps = np.diff(distinct)
    # Float32 storage moves grid points: gaps this small beside the values themselves (not beside a
    # far-out one, 999999 for unknown) are rounding, not structure. Far from zero (years in seconds,
    # coordinates in metres) that bound may exceed the step; the one by sd does not.
    sizes = np.maximum(np.abs(distinct[1:]), np.abs(distinct[:-1]))
    gaps = gaps[gaps > np.minimum(1e-6 * sizes, 0.25e-3 * sd)]
    if len(gaps) > 0:  # 0 and 1e-17, where nothing is large beside the values
        gaps = gaps[gaps > 1e-6 * np.median(gaps)]
    if len(gaps) == 0 or gaps.min() < 0.5e-3 * sd:
        return 0.0
    step = float(np.median(gaps[gaps < 1.5 * gaps.min()]))
    for _ in range(3):  # large gaps tell the step more precisely than the smallest one does
        step = float(gaps.sum() / np.round(gaps / step).sum())
    off_grid = np.abs(gaps / step - np.round(gaps / step))
    if np.quantile(off_grid, 0.99) > 0.1 or step < 1e-3 * sd:
        return 0.0
    return float(f"{step:.12g}")  # significant digits: a step may be 1e-13


def _grid(distinct: np.ndarray, decimals: int | None) -> tuple[float, float]:
    """Step and origin of the coarsest grid all values lie on; step 0 where there is none."""
    enough = len(distinct) >= 10  # few values may lie on a grid by chance
    if decimals is None:
        step = _step_of(distinct, float(distinct.std())) if enough else 0.0
        place = (distinct - distinct[0]) / (step or 1.0)
        if step > 0 and np.abs(place - np.round(place)).max() < 1e-6:
            return step, float(distinct[0] % step)
        return 0.0, 0.0
    units = np.round(distinct * 10.0**decimals).astype(np.int64)
    factor = int(np.gcd.reduce(np.diff(units))) if enough else 1
    unit = 10.0**-decimals
    return (
        float(np.round(max(factor, 1) * unit, decimals)),
        float(np.round((int(units[0]) % max(factor, 1)) * unit, decimals)),
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
    support: Support = (None, None),
    counted: tuple[np.ndarray, np.ndarray] | None = None,
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
        counted: distinct numbers and their counts, if they are at hand.

    Example:
        >>> part = number_part(0, "age", np.arange(18.0, 90.0), 0)
        >>> part.rest, part.step, part.n_codes
        (True, 1.0, 0)
    """
    distinct, counts = counted or np.unique(values, return_counts=True)
    n = int(counts.sum())
    few = len(distinct) <= min(MAX_CODES, n / 20) or (len(distinct) == 2 and n >= 10)
    step, origin = _grid(distinct, decimals)
    masses = point_masses(distinct, counts, step)
    rest = values[~np.isin(values, masses)]
    if kind in (None, "whole") and (few or len(rest) == 0):
        levels = tuple(distinct.tolist())
        return Part(column, name, len(levels), unseen=kept_for_unseen(n), values=levels)
    if kind == "continuous" or (kind is None and step < 1e-3 * rest.std()):
        step, origin = 0.0, 0.0
    if step == 0:  # a density between limits has no place for numbers at them
        at_limits = np.isin(distinct, [limit for limit in support if limit is not None])
        masses = np.union1d(masses, distinct[at_limits])
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
