"""What the columns of a table are, read off it one after the other; and which follow from others.

The rules, for every column of numbers:

* **finite**: at most ``min(256, n / 20)`` distinct values (or two, in ten rows or more).
* **point mass**: a value that 0.2 % of the rows and ten at least share, and clearly more of them
  than the values around it would lead one to expect; a thousand rows of whole numbers repeat
  themselves without one. Of continuous numbers, also one at a stated limit.
* **cells**: what is left lies on a regular grid whose step is at least a thousandth of its standard
  deviation. Otherwise it is continuous, and its recorded digits are remembered.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any
from uuid import UUID

import numpy as np

from selfnorm.columns.cells import Cells
from selfnorm.columns.coding import (
    DAY,
    HOUR,
    Column,
    Part,
    base_of,
    calendar,
    check_numbers,
    label_text,
    left_over,
    snap,
    tie_unit,
    to_clock,
)
from selfnorm.columns.interpret import interpreted
from selfnorm.columns.text import (
    date_template,
    is_gap,
    marks_of,
    numbers_from,
    unmarked,
)
from selfnorm.errors import DataError

Support = tuple[float | None, float | None]
MAX_CODES = 256
MASS_SHARE, MASS_ROWS = 0.002, 10
MAX_ROWS = 20_000  # of which relations between columns are read off
MAX_COLUMNS = 100
MOST_GAPS = 0.5  # of a column that is looked at for sums
_GROUPED = re.compile(r"[+-]?[1-9]\d{0,2},\d{3}")  # 0,123 can only be decimals
_COMMA = re.compile(r"[+-]?[\d.]*\d,\d+")
IDENTIFIER_ROWS = 20  # fewer rows tell no identifier from a category


class Detection:
    """Columns, parts, notes and problems as they are found.

    Attributes:
        columns: all columns, those set aside included.
        parts: of the columns that are modelled.
        cells: of those columns, by index: text has been read as numbers and dates.
        notes: findings that a user should know of.
        slips: cells that are not read as what their column seems to hold.
        problems: what makes the table unusable.
    """

    def __init__(self, missing: frozenset[str], model_gaps: bool = False) -> None:
        self.missing = missing
        self.model_gaps = model_gaps
        self.columns: list[Column] = []
        self.parts: list[Part] = []
        self.cells: dict[int, Cells] = {}
        self.notes: list[str] = []
        self.slips: list[str] = []
        self.problems: list[str] = []
        self._contents: dict[Any, int] = {}

    def add(self, name: Any, cells: Cells, asked: str | None, support: Support | None) -> None:
        """The next column: what it is by the rules, or as ``asked``."""
        if asked == "ignore":
            self.columns.append(Column(name, "ignored", form=cells.form))
            return
        written, cells = cells, interpreted(cells, self.missing, asked)
        odd = cells.form.pop("odd", ())
        if odd:
            self.slips.append(
                f"{name!r} holds numbers but for {_in_rows(written, odd)}: taken as gaps"
            )
        try:
            check_numbers(name, cells)
            _check_asked(name, cells, asked)
            _check_support(name, cells, support)
        except DataError as error:
            self.problems.append(str(error))
            return
        if cells.form.get("finer"):
            self.notes.append(f"{name!r} is kept to the second; what is finer is left out")
        if asked is None and not cells.declared and len(marks := _mixed_marks(cells)) > 1:
            self.slips.append(
                f"{name!r} holds numbers marked {' and '.join(marks)}: text, unless all are alike"
            )
        if asked is None and not cells.declared and (ways := _ways_of_dates(cells)):
            self.notes.append(f"{name!r} holds {ways}: write all in one way to have dates")
        slips = tuple(written.labels[k] for k in odd)
        gaps = float(cells.missing.mean())
        column = Column(name, "", gaps=gaps, slips=slips, form=cells.form)
        values, counts = np.unique(cells.seen, return_counts=True)
        if cells.kind == "number":
            decimals = recorded_decimals(values)
            column = replace(column, numeric=True, decimals=decimals)
            if decimals is not None:
                cells = replace(cells, values=snap(cells.values, decimals))
                values, counts = np.unique(cells.seen, return_counts=True)
        column, parts = self._described(column, cells, values, counts, asked, support)
        if self.model_gaps and column.gaps > 0:
            parts = [replace(part, n_codes=part.n_codes + 1, gap=True) for part in parts]
        if column.modelled:
            self.cells[len(self.columns)] = cells
        self.columns.append(column)
        self.parts += parts

    def _described(
        self,
        column: Column,
        cells: Cells,
        values: np.ndarray,
        counts: np.ndarray,
        asked: str | None,
        support: Support | None,
    ) -> tuple[Column, list[Part]]:
        labels = [cells.labels[i] for i in values] if cells.kind == "label" else []
        if len(values) + (self.model_gaps and column.gaps > 0) <= 1:
            return self._constant(column, cells, labels or values.tolist()), []
        content = _content(cells)
        if content in self._contents and asked is None:
            twin = self.columns[self._contents[content]]
            self.notes.append(f"{column.name!r} repeats {twin.name!r}: kept as a copy of it")
            column = replace(column, kind="duplicate", base=self._contents[content])
            return replace(column, resolution=twin.resolution, summary=f"same as {twin.name}"), []
        why = None if asked is not None else _identifier(cells, labels, values, int(counts.sum()))
        if why is not None:
            self.notes.append(f"{column.name!r} is an identifier ({why}): set aside")
            return replace(column, kind="identifier", summary=why), []
        self._contents.setdefault(content, len(self.columns))
        place = len(self.cells)
        if cells.kind == "date":
            return self._date(column, cells, place)
        if cells.kind == "label" or asked == "category":
            return _category(column, labels or values.tolist(), counts, place)
        limits = support or (None, None)
        part = number_part(
            place,
            str(column.name),
            cells.seen,
            column.decimals,
            kind=asked,
            support=limits,
            counted=(values, counts),
        )
        if asked == "cells" and part.step == 0:
            self.problems.append(f"column {column.name!r} is to have cells, but lies on no grid")
        if support is not None and not part.rest:
            self.notes.append(f"{column.name!r} takes {part.n_codes} values: limits do not matter")
        kind = "category" if not part.rest else ("cells" if part.step > 0 else "continuous")
        summary = _number_summary(part, column.decimals, cells.seen)
        levels = () if part.rest else part.values
        return replace(column, kind=kind, levels=levels, summary=summary), [part]

    def _constant(self, column: Column, cells: Cells, labels: list[Any]) -> Column:
        column = replace(column, kind="constant", levels=tuple(labels), summary="empty")
        if not labels:
            self.notes.append(f"{column.name!r} has no value at all")
            return column
        if cells.kind == "date":
            column = replace(column, resolution="second")
            labels = [np.int64(labels[0]).astype("datetime64[s]")]
        value = label_text(labels[0])
        self.notes.append(f"{column.name!r} is always {value}: kept as that")
        return replace(column, summary=f"always {value}")

    def _date(self, column: Column, cells: Cells, place: int) -> tuple[Column, list[Part]]:
        offset = cells.form.get("offset", 0)
        seen = int(cells.seen.min()), int(cells.seen.max())
        column = replace(column, kind="date", resolution="day", offset=offset, ends=seen)
        resolution = _resolution(to_clock(column, cells.seen), cells.seen + offset)
        column = replace(column, resolution=resolution)
        local = to_clock(column, cells.seen)
        unit = {"month": "M", "day": "D", "hour": "h", "second": "s"}[resolution]
        ends = np.array([local.min(), local.max()]).astype("datetime64[s]")
        span = " to ".join(str(e).replace("T", " ") for e in ends.astype(f"datetime64[{unit}]"))
        base = self._base_of(cells, resolution)
        if base is not None:
            other = self.columns[base].name
            both = ~(cells.missing | self.cells[base].missing)
            begun = to_clock(column, self.cells[base].values[both])
            between = (to_clock(column, cells.values[both]) - begun) / tie_unit(resolution)
            part = number_part(place, f"{column.name} - {other}", between, 0)
            words = "days" if resolution == "day" else "seconds"
            summary = f"{words} from {other}, {between.min():g} to {between.max():g}"
            self.notes.append(
                f"{column.name!r} is counted from {other!r}, which it follows closely"
            )
            return replace(column, base=base, summary=summary), [part]
        parts = []
        for what, values in calendar(local, resolution).items():
            name = f"{column.name} ({what})"
            if what in ("weekday", "hour"):
                levels = tuple(float(v) for v in range(7 if what == "weekday" else 24))
                parts.append(Part(place, name, len(levels), values=levels))
            else:
                limits: Support = (0.0, HOUR - 1.0) if what == "second" else (None, None)
                parts.append(number_part(place, name, values, 0, kind="whole", support=limits))
        return replace(column, summary=f"{resolution}s, {span}"), parts

    def tie(self, kept: Collection[Any]) -> None:
        """Note which columns follow from others; those that are sums but for few amounts, and that
        ``kept`` does not name, become what the sum leaves.

        The law of that, given the terms, is the law of the column: nothing is forced.
        """
        numbers = [j for j, cells in self.cells.items() if cells.kind == "number"]
        # rows that have them all tell of sums
        numbers = [j for j in numbers if self.columns[j].gaps <= MOST_GAPS][:MAX_COLUMNS]
        for y, used, factors, told in _sums(
            [self.columns[j] for j in numbers], [self.cells[j] for j in numbers]
        ):
            terms = tuple(zip((numbers[i] for i in used), factors, strict=True))
            free = self.columns[numbers[y]].name not in kept
            free = free and not any(self.columns[i].gaps for i, _ in terms)
            tied = free and self._tied(numbers[y], terms)
            self.notes.append(f"{told}: kept so" if tied else told)
        finite = [j for j in self.cells if self.columns[j].kind == "category"]
        finite = [j for j in finite if not self.columns[j].tail][:MAX_COLUMNS]
        self.notes += _functions(
            [self.columns[j].name for j in finite], [self.cells[j] for j in finite]
        )

    def _tied(self, j: int, terms: tuple[tuple[int, float], ...]) -> bool:
        """Make a column a sum, if what this leaves takes few values."""
        cells, column = self.cells[j], replace(self.columns[j], kind="sum", levels=(), terms=terms)
        place = list(self.cells).index(j)
        k = next(k for k, part in enumerate(self.parts) if part.column == place)
        if not self.parts[k].rest and min(factor for _, factor in terms) < 0:
            return False  # one of few values, 0 and 1 of a category's level, stays one of them
        base = base_of(column, self.cells)
        assert base is not None
        digits = column.decimals
        if digits is None:  # nine of the largest number, beyond which sums of doubles may differ
            digits = 8 - int(np.floor(np.log10(np.abs(cells.seen).max())))
        rest = left_over(cells, base, 10.0**-digits)
        names = [str(self.columns[i].name) for i in column.counted_from]
        name = " - ".join([str(column.name), *names])
        part = number_part(place, name, rest.seen, digits)
        if part.rest:
            return False
        part = replace(part, resolution=10.0**-digits)
        if self.parts[k].gap:
            part = replace(part, n_codes=part.n_codes + 1, gap=True)
        summary = f"sum of {', '.join(names)}; and {_first_of(part.values)}"
        self.columns[j], self.parts[k] = replace(column, summary=summary), part
        for i in column.counted_from:
            seen = self.cells[i].seen
            self.columns[i] = replace(self.columns[i], ends=(float(seen.min()), float(seen.max())))
        return True

    def _base_of(self, cells: Cells, resolution: str) -> int | None:
        """The earlier date that this one follows: their differences spread less than a tenth."""
        best, closest = None, 0.1 * cells.seen.std()
        for j, other in self.cells.items():
            column = self.columns[j]
            if column.resolution != resolution or column.base is not None or resolution == "month":
                continue
            both = ~(cells.missing | other.missing)
            if both.sum() < max(10, 0.99 * len(cells.seen)):
                continue
            spread = (cells.values - other.values)[both].std()
            if 0 < spread < closest:
                best, closest = j, spread
        return best


def _check_asked(name: Any, cells: Cells, asked: str | None) -> None:
    kind = {"continuous": "number", "cells": "number", "date": "date"}.get(asked or "", cells.kind)
    if asked == "category" and cells.kind == "date":
        raise DataError(f"column {name!r} is to be a category, but holds dates; make them text")
    if kind != cells.kind:
        what = "not all of its cells are dates" if kind == "date" else "does not hold numbers"
        if kind == "number" and cells.kind == "label":
            what += _almost_numbers(cells)
        raise DataError(f"column {name!r} is to be {asked}, but {what}")


def _check_support(name: Any, cells: Cells, support: Support | None) -> None:
    if support is None:
        return
    if cells.kind != "number":
        raise DataError(f"support names the column {name!r}, which does not hold numbers")
    low, high = (-np.inf if support[0] is None else support[0], support[1])
    high = np.inf if high is None else high
    if low >= high:
        raise DataError(f"support of {name!r} needs low < high, not {support}")
    outside = cells.seen[(cells.seen < low) | (cells.seen > high)]
    if len(outside):
        raise DataError(
            f"column {name!r} holds {len(outside)} values outside the stated support, the first "
            f"{outside[0]:g}; widen it"
        )


def _content(cells: Cells) -> Any:
    """Equal for columns that hold the same in every row."""
    values, labels = cells.values, cells.labels
    if cells.kind == "label":  # the same labels may come in another order
        order = sorted(range(len(labels)), key=lambda i: repr(labels[i]))
        values = np.append(np.argsort(order), -1)[values]
        labels = [labels[i] for i in order]
    values = np.where(cells.missing, 0, values)
    digest = hashlib.sha256(values.tobytes() + cells.missing.tobytes()).hexdigest()
    return cells.kind, repr(labels), digest


def _identifier(cells: Cells, labels: list[Any], values: np.ndarray, n: int) -> str | None:
    """Why a column names the rows rather than telling of them; ``None`` if it does not.

    Text, or whole numbers too long for a float, of which over half are distinct; or whole numbers
    of which none comes twice where chance would repeat nine: an index, or any part of its rows.
    """
    if n < IDENTIFIER_ROWS or cells.declared or cells.kind == "date":
        return None
    if cells.kind == "label":
        if any(isinstance(v, str | int | bytes | UUID) for v in labels) and 2 * len(labels) > n:
            return f"{len(labels)} distinct in {n} rows{_almost_numbers(cells)}"
        return None
    whole = len(values) == n and not (values != np.round(values)).any()
    if whole and n * (n - 1) / 2 > 9 * (values[-1] - values[0] + 1):
        return "whole numbers, none twice"
    return None


def _almost_numbers(cells: Cells) -> str:
    """What keeps texts from being numbers, where most of them look like such; else empty."""
    known = list(dict.fromkeys(cells.seen.tolist()))
    texts, _ = unmarked([str(cells.labels[k]).strip() for k in known])
    read = dict(zip(known, texts, strict=True))
    odd = {k: text for k, text in read.items() if numbers_from([text], names=True) is None}
    numbers = [text for k, text in read.items() if k not in odd]
    if len(odd) < len(numbers) and numbers_from(numbers) is not None:
        where = _in_rows(cells, list(odd))
        return f", all numbers but for {where}: empty these cells to have numbers"
    if texts and all(_GROUPED.fullmatch(text) for text in texts):
        whole, point = (texts[0].replace(",", mark) for mark in ("", "."))
        told = f"; the comma of {texts[0]} may stand for thousands or for decimals: "
        return told + f"write {whole} or {point} to have numbers"
    if texts and all(_COMMA.fullmatch(text) for text in texts):
        return ", written with decimal commas: use points to have numbers"
    return ""


def _mixed_marks(cells: Cells) -> list[str]:
    """The marks of numbers written as text, where all but gaps are such: $, €, none."""
    texts = [text for text in cells.labels if not is_gap(text)]
    if not all(isinstance(text, str) and marks_of([text]) for text in texts):
        return []
    return [repr(before + after or "none") for before, after in sorted(marks_of(texts))]


def _ways_of_dates(cells: Cells) -> str:
    """The two ways in which nine in ten texts are dates; empty where there are none."""
    alike: dict[str, list[str]] = {}
    for text in cells.labels:
        if isinstance(text, str) and not is_gap(text):
            alike.setdefault(re.sub(r"\d+", "#", text), []).append(text)
    most = sorted(alike.values(), key=len)[-2:]
    if sum(map(len, most)) < 0.9 * sum(map(len, alike.values())):
        return ""
    ways = [template for texts in most if (template := date_template(texts)) is not None]
    return f"dates as {' and '.join(sorted(ways))}" if len(ways) == 2 else ""


def _in_rows(cells: Cells, labels: Sequence[int]) -> str:
    """How many labels, the first of them, and where they stand."""
    row_of = {k: int((cells.values == k).argmax()) for k in labels[:3]}
    shown = ", ".join(f"{str(cells.labels[k])[:20]!r} in row {r}" for k, r in row_of.items())
    return f"{len(labels)} ({shown})"


def _resolution(local: np.ndarray, steady: np.ndarray) -> str:
    """Of moments by the clocks of their time zone; below days by one that is never set."""
    if (local % DAY).any():
        return "second" if (steady % HOUR).any() else "hour"
    days = (local // DAY).astype("datetime64[D]")
    first = len(days) >= 10 and (days == days.astype("datetime64[M]")).all()
    return "month" if first else "day"


def _category(
    column: Column, labels: list[Any], counts: np.ndarray, place: int
) -> tuple[Column, list[Part]]:
    """Numbers, booleans and ordered categories in their order, other levels by frequency."""
    order = sorted(range(len(labels)), key=lambda i: (-counts[i], str(labels[i])))
    own, tail = order, []
    if len(order) > MAX_CODES:
        own, tail = order[: MAX_CODES - 1], order[MAX_CODES - 1 :]
    if column.numeric or column.form.get("ordered"):
        own = sorted(own)
    elif all(isinstance(label, bool) for label in labels):
        own = sorted(own, key=lambda i: bool(labels[i]))
    unseen = _kept_for_unseen(int(counts.sum()))
    part = Part(place, str(column.name), len(own) + (len(tail) > 0), unseen=unseen)
    summary = f"{len(order)} levels" + (f", {len(tail)} in a shared tail" if tail else "")
    if len(order) <= 4:
        summary += ": " + ", ".join(" ".join(label_text(labels[i]).split())[:20] for i in own)
    column = replace(
        column,
        kind="category",
        levels=tuple(labels[i] for i in own),
        tail=tuple(labels[i] for i in tail),
        tail_shares=tuple((counts[tail] / counts[tail].sum()).tolist()) if tail else (),
        summary=summary,
    )
    return column, [part]


def _kept_for_unseen(n: int) -> float:
    """Probability that the next of ``n + 1`` cells is something new, by Laplace's rule."""
    return 1 / (n + 2)


def _number_summary(part: Part, decimals: int | None, values: np.ndarray) -> str:
    span = f"{values.min():.6g} to {values.max():.6g}"
    if not part.rest:
        return f"{part.n_codes} values, {span}"
    if part.step > 0:
        what = "whole numbers, " if part.step == 1 else f"steps of {part.step:g}, "
    else:
        what = {None: "", 0: "whole numbers, "}.get(decimals, f"{decimals} decimals, ")
    if part.n_codes:
        share = np.isin(values, part.values).mean()
        span += f"; {100 * share:.3g} % at {_first_of(part.values)}"
    return what + span


def _first_of(values: Sequence[float]) -> str:
    more = f" and {len(values) - 3} more" if len(values) > 3 else ""
    return ", ".join(f"{v:g}" for v in values[:3]) + more


# Numbers: recorded digits, grids, point masses


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
    n = len(values)
    few = len(distinct) <= min(MAX_CODES, n / 20) or (len(distinct) == 2 and n >= 10)
    step, origin = _grid(distinct, decimals)
    masses = point_masses(distinct, counts, step)
    rest = values[~np.isin(values, masses)]
    if kind in (None, "whole") and (few or len(rest) == 0):
        levels = tuple(distinct.tolist())
        return Part(column, name, len(levels), unseen=_kept_for_unseen(n), values=levels)
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


# Columns that others determine: a total of amounts, the borough of a zone


Sum = tuple[int, list[int], list[float], str]


def _sums(columns: Sequence[Column], cells: Sequence[Cells]) -> list[Sum]:
    """Columns that are a sum of multiples of others, exactly or but for a few amounts.

    Each with its terms, their factors, and words for it.
    """
    if len(cells) < 2:
        return []
    table = np.stack([np.where(c.missing, np.nan, c.values) for c in cells], 1)
    table = table[~np.isnan(table).any(1)]
    table = table[:: len(table) // MAX_ROWS + 1]
    if len(table) < max(30, 5 * table.shape[1]):
        return []
    sd = table.std(0)
    sd[sd == 0] = 1.0
    z = (table - table.mean(0)) / sd
    # 1 - R^2 of each column given all others; the widest column is the sum
    left_over = 1 / np.diag(np.linalg.inv(z.T @ z / len(z) + 1e-9 * np.eye(len(cells))))
    found: list[Sum] = []
    for j in sorted(np.flatnonzero(left_over < 0.05).tolist(), key=lambda j: -sd[j]):
        others = [i for i in range(len(cells)) if i not in (j, *(made[0] for made in found))]
        shares = np.linalg.lstsq(z[:, others], z[:, j], rcond=1e-8)[0]
        used = [i for i, share in zip(others, shares, strict=True) if abs(share) > 0.01]
        if used:
            made = _sum([columns[i] for i in used], table[:, used], columns[j], table[:, j])
            if made is not None:
                own = [i for i, factor in zip(used, made[0], strict=True) if factor]
                found.append((j, own, [factor for factor in made[0] if factor], made[1]))
    return found


def _sum(
    terms: Sequence[Column], x: np.ndarray, column: Column, y: np.ndarray
) -> tuple[list[float], str] | None:
    """Factors of the columns of ``x`` that make ``y``, and words for it, if they do."""
    fitted = np.linalg.lstsq(np.column_stack([x, np.ones(len(x))]), y, rcond=None)[0][:-1]
    fitted = np.array([float(f"{factor:.12g}") for factor in fitted])
    whole = np.round(fitted)
    unit = max(0.0 if c.decimals is None else 0.51 * 10.0**-c.decimals for c in (*terms, column))
    for weights in (whole, fitted):
        rest = y - x @ weights
        rest = rest - np.median(rest)
        slack = unit * (1 + np.abs(weights).sum())
        if slack > 0.02 * y.std():  # numbers so coarse that rounding explains anything
            slack = 0.0
        if np.abs(rest).max() <= slack + 1e-9 * np.abs(y).max():
            told = f"{column.name!r} is {_written(weights, terms)}, up to a constant and rounding"
            return weights.tolist(), told
    rest = np.round(y - x @ whole, 6 if column.decimals is None else column.decimals)
    counts = np.sort(np.unique(rest, return_counts=True)[1])
    few = counts[-20:].sum() > 0.9 * len(rest) and rest.var() < 0.05 * y.var()
    if few and len(terms) > 1 and (np.abs(fitted - whole) < 0.25).all() and whole.all():
        told = f"{column.name!r} is {_written(whole, terms)} but for a few amounts"
        return whole.tolist(), told
    return None


def _written(weights: np.ndarray, terms: Sequence[Column]) -> str:
    pairs = [(w, c) for w, c in zip(weights.tolist(), terms, strict=True) if w]
    return " + ".join((f"{w:.4g} " if w != 1 else "") + repr(c.name) for w, c in pairs)


def _functions(names: Sequence[Any], cells: Sequence[Cells]) -> list[str]:
    """Categories that others determine, where that is no accident of few rows."""
    codes = [
        np.where(column.missing, -1, np.unique(column.values, return_inverse=True)[1])
        for column in cells
    ]
    notes = []
    for i in range(len(codes)):
        for j in range(len(codes)):
            if i != j and _determines(codes[i], codes[j]):
                mutual = _determines(codes[j], codes[i])
                if mutual and i < j:
                    notes.append(f"{names[i]!r} and {names[j]!r} determine each other")
                elif not mutual:
                    notes.append(f"{names[i]!r} determines {names[j]!r}")
    return notes


def _determines(a: np.ndarray, b: np.ndarray) -> bool:
    few = slice(None, None, len(a) // 1000 + 1)  # refuses most pairs at once
    for rows in (few, slice(None, None, len(a) // MAX_ROWS + 1), slice(None)):
        both = (a[rows] >= 0) & (b[rows] >= 0)
        x, y = a[rows][both], b[rows][both]
        if len(x) == 0:
            return False
        pairs = np.unique(x * (y.max() + 1) + y)
        if len(pairs) > len(np.unique(x)):
            return False
    # how likely the rows of each group of ``a`` would agree in ``b`` by chance
    levels = pairs % (y.max() + 1)
    sizes = np.bincount(np.unique(x, return_inverse=True)[1])
    shares = np.bincount(y) / len(y)
    return bool(((sizes - 1) * np.log(shares[levels])).sum() < -20)
