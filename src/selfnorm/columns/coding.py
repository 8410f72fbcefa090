"""One column of a schema and its parts: what they are, cells as codes and numbers, and back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from selfnorm.columns.cells import Cells, ahead_of_utc
from selfnorm.columns.interpret import as_dates, interpreted, without_gaps
from selfnorm.columns.text import (
    are_slips,
    dates_from,
    marks_of,
    numbers_from,
    unmarked,
    without_slips,
)
from selfnorm.errors import DataError

KINDS = ("continuous", "cells", "category", "date")
DAY, HOUR = 86_400, 3_600
_MONDAY = 3  # 1970-01-01 was a Thursday: its week began three days earlier
_NANOSECONDS = (-9_223_372_036, 9_223_372_036)  # 1677 to 2262, counted in 64 bits
_YEARS = (-62_135_596_800, 253_402_300_799)  # 1 to 9999
_HUGE = 1e150  # squares of larger numbers are beyond double precision


@dataclass(frozen=True)
class Column:
    """What a schema knows of one column.

    Attributes:
        name: as the table has it.
        kind: ``"continuous"``, ``"cells"``, ``"category"``, ``"date"`` or ``"sum"``; or, for those
            set aside, ``"identifier"``, ``"constant"``, ``"duplicate"`` or ``"ignored"``.
        summary: a few words on its values.
        gaps: share of rows without a value.
        numeric: whether its cells are numbers.
        levels: labels or numbers of its codes; the one value of a constant.
        tail: levels that share the last code, and ``tail_shares`` their frequencies within it.
        decimals: recorded decimals of numbers, ``None`` for all that doubles have.
        resolution: of dates: ``"month"``, ``"day"``, ``"hour"`` or ``"second"``.
        offset: of dates: seconds from UTC to the clock whose hours are modelled, and its days
            where the time zone is not known.
        ends: of dates and of terms of sums: the first and the last value seen.
        base: index of the column that this one repeats, or from which a date is counted.
        terms: of sums: columns, by index, and their factors; its part is what the sum leaves.
        slips: texts that were taken as gaps among its numbers.
        form: how the table stores it.
    """

    name: Any
    kind: str
    summary: str = ""
    gaps: float = 0.0
    numeric: bool = False
    levels: tuple[Any, ...] = ()
    tail: tuple[Any, ...] = ()
    tail_shares: tuple[float, ...] = ()
    decimals: int | None = None
    resolution: str = ""
    offset: int = 0
    ends: tuple[float, ...] = ()
    base: int | None = None
    terms: tuple[tuple[int, float], ...] = ()
    slips: tuple[str, ...] = ()
    form: dict[str, Any] = field(default_factory=dict)

    @property
    def modelled(self) -> bool:
        """Whether the column has parts of its own."""
        return self.kind in (*KINDS, "sum")

    @property
    def counted_from(self) -> tuple[int, ...]:
        """Indices of the columns without which the parts do not tell the value."""
        own = () if self.base is None else (self.base,)
        return tuple(j for j, _ in self.terms) or own

    @property
    def dtype(self) -> str:
        """The type of the column in its table."""
        return str(self.form["dtype"])


@dataclass(frozen=True)
class Part:
    """One factor of a table's distribution: finite codes, and perhaps numbers beside them.

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
        gap: whether the last code says that there is no value: a gap is an outcome then.
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
    gap: bool = False

    @property
    def certain(self) -> bool:
        """Whether it has but one outcome, as what an exact sum leaves."""
        return self.n_codes == 1 and not self.rest

    @property
    def gap_code(self) -> int:
        """The code of a gap: its own, or -1, which says that nothing is known."""
        return self.n_codes - 1 if self.gap else -1


def calendar(local: np.ndarray, resolution: str) -> dict[str, np.ndarray]:
    """The parts of moments (seconds on the clock modelled), each a whole number.

    Example:
        >>> {name: int(v[0]) for name, v in calendar(np.array([12 * 3600 + 5]), "second").items()}
        {'week': 0, 'weekday': 3, 'hour': 12, 'second': 5}
    """
    days = local // DAY
    if resolution == "month":
        return {"month": days.astype("datetime64[D]").astype("datetime64[M]").astype(np.float64)}
    parts = {"week": (days + _MONDAY) // 7, "weekday": (days + _MONDAY) % 7}
    if resolution in ("hour", "second"):
        parts["hour"] = local % DAY // HOUR
    if resolution == "second":
        parts["second"] = local % HOUR
    return {name: values.astype(np.float64) for name, values in parts.items()}


def from_calendar(parts: Sequence[np.ndarray], resolution: str) -> np.ndarray:
    """Seconds on the clock modelled, the inverse of :func:`calendar`."""
    whole = [np.round(values).astype(np.int64) for values in parts]
    if resolution == "month":
        return whole[0].astype("datetime64[M]").astype("datetime64[D]").astype(np.int64) * DAY
    seconds = (7 * whole[0] + whole[1] - _MONDAY) * DAY
    for values, unit in zip(whole[2:], (HOUR, 1), strict=False):
        seconds = seconds + values * unit
    return seconds


def tie_unit(resolution: str) -> int:
    """Seconds in which the time between two dates is counted."""
    return DAY if resolution == "day" else 1


def to_clock(column: Column, moments: np.ndarray) -> np.ndarray:
    """Moments (UTC) on the clock modelled: that of the time zone for days, else one for all."""
    if column.resolution not in ("day", "month") or "zone" not in column.form:
        return moments + column.offset
    return moments + ahead_of_utc(moments, column.form)


def from_clock(column: Column, local: np.ndarray) -> np.ndarray:
    """Moments (UTC) from those on the clock modelled, the inverse of :func:`to_clock`."""
    about = local - column.offset
    return local - (to_clock(column, about) - about)


def check_numbers(name: Any, cells: Cells) -> None:
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


# Another table's cells as those of the column


def as_column(
    column: Column, cells: Cells, missing: Collection[str], surprises: list[str]
) -> Cells:
    """Cells as the column has them, whatever type they came in; gaps where that is a surprise."""
    if column.numeric:
        cells = _as_numbers(column, cells, surprises)
        check_numbers(column.name, cells)
        return replace(cells, values=snap(cells.values, column.decimals))
    if column.resolution:
        if "template" in column.form and cells.kind == "label":
            cells = as_dates(cells, column.form["template"])  # 01/02/2020 alone could be either
        cells = interpreted(cells, missing)
        if cells.kind == "date" or cells.missing.all():
            return replace(cells, kind="date")
        wrong: Any = cells.seen[0]
        if cells.kind == "label":
            seen = list(dict.fromkeys(cells.seen.tolist()))
            template = column.form.get("template", "")
            odd = (k for k in seen if dates_from([cells.labels[k]], template) is None)
            wrong = next(odd, seen[0])
        row = int((~cells.missing & (cells.values == wrong)).argmax())
        shown = cells.labels[wrong] if cells.kind == "label" else wrong
        raise DataError(f"column {column.name!r} holds dates, but here {shown!r} in row {row}")
    if cells.kind == "label":
        return without_gaps(cells, missing)
    distinct, places = np.unique(cells.values, return_inverse=True)
    labels = distinct.tolist()
    if cells.kind == "date":
        labels = [str(v).replace("T", " ") for v in distinct.astype("datetime64[s]")]
    return Cells("label", np.where(cells.missing, -1, places), cells.missing, labels, cells.form)


def _as_numbers(column: Column, cells: Cells, surprises: list[str]) -> Cells:
    if cells.kind == "date":
        raise DataError(f"column {column.name!r} holds numbers, but here dates")
    if cells.kind == "number":
        return cells
    if cells.numbers is not None:
        return Cells("number", cells.numbers, np.isnan(cells.numbers), [], cells.form)
    written = [v if type(v) is str else str(+v if type(v) is bool else v) for v in cells.labels]
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
        fitted, here = f"marked {own!r}" if own else "not marked", ", ".join(map(repr, strange))
        surprises.append(f"column {column.name!r} holds numbers {fitted}, but here {here}")
    labels, wrong = without_slips(labels)
    odd = np.isin(cells.values, wrong)
    if odd.any():
        row = int(odd.argmax())
        text = written[cells.values[row]][:40]
        told = f"column {column.name!r} holds numbers, but here text ({text!r} in row {row})"
        if 2 * odd.sum() > (~cells.missing).sum():
            raise DataError(told)
        known = {written[k] for k in cells.values[odd]} <= {*column.slips}
        if not (known and are_slips(int(odd.sum()), len(odd))):  # told of when they were found
            surprises.append(f"{told}: taken as gaps, {odd.sum()} of {len(odd)} cells")
    numbers = numbers_from(labels, names=True)
    return np.full(len(labels), np.nan) if numbers is None else numbers


# Codes


def snap(values: np.ndarray, decimals: int | None) -> np.ndarray:
    """Numbers all but equal to one of so many decimals made equal to it: 0.1 + 0.2 is 0.3."""
    if decimals is None:
        return values
    near = np.round(values, decimals)
    return np.where(np.abs(values - near) <= 0.005 * 10.0**-decimals, near, values)


def encode_numbers(
    part: Part, values: np.ndarray, missing: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, numbers and the log-density of what is left open, for numbers of one part.

    A number never seen in a finite part is open: its density is Cauchy's around the median of the
    part's values with their range as scale, one where it has a single value.

    Example:
        >>> part = Part(0, "a", 1, rest=True, values=(0.0,))
        >>> codes, numbers, _ = encode_numbers(part, np.array([0.0, 2.5]), np.zeros(2, bool))
        >>> codes.tolist(), numbers.tolist()
        ([0.0, 1.0], [0.0, 2.5])
    """
    known = np.array([*part.values, np.inf])
    safe = np.where(missing, 0.0, values)
    place = np.searchsorted(known[:-1], safe) if part.values else np.zeros(len(safe), np.int64)
    hit = known[place] == safe
    codes = np.where(hit, place, part.n_codes if part.rest else -2).astype(np.float64)
    extra = np.zeros(len(values))
    numbers = np.zeros(len(values))
    open_ = ~hit & ~missing
    if part.rest:
        numbers[open_] = to_cells(part, safe[open_])
    elif open_.any():
        scale = known[-2] - known[0] or 1.0
        z = (safe[open_] - np.median(known[:-1])) / scale
        extra[open_] = -np.log(np.pi * scale) - np.log1p(z**2)
    codes[missing] = part.gap_code
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


def base_of(column: Column, cells: Mapping[int, Cells]) -> Cells | None:
    """What a column is counted from: another date, or the sum of its terms."""
    if not column.terms:
        return None if column.base is None else cells[column.base]
    missing = np.any([cells[j].missing for j in column.counted_from], axis=0)
    total = np.where(missing, 0.0, sum(factor * cells[j].values for j, factor in column.terms))
    # rounded beforehand, or what is left would depend on how halves are rounded
    total = total if column.decimals is None else np.round(total, column.decimals)
    return Cells("number", total, missing, [], column.form)


def left_over(cells: Cells, base: Cells, resolution: float) -> Cells:
    """What numbers are beyond a sum, by the digits that were recorded."""
    rest = np.round(cells.values - base.values, -round(np.log10(resolution))) + 0.0  # no -0
    return replace(cells, values=rest, missing=cells.missing | base.missing)


Coded = tuple[np.ndarray, np.ndarray, np.ndarray]


def encode_column(
    column: Column,
    parts: Sequence[Part],
    cells: Cells,
    base: Cells | None,
    surprises: list[str],
) -> list[Coded]:
    """Codes, numbers and log-probabilities left open, for each part of a column.

    ``base`` holds the cells that this column is counted from.
    """
    lost = np.zeros(len(cells), bool) if base is None else base.missing & ~cells.missing
    if lost.any():
        told = f"{column.name!r} is a gap where what it is counted from is"
        surprises.append(f"{told} ({lost.sum()})")
    if base is not None and column.terms:
        cells = left_over(cells, base, parts[0].resolution)
    if column.resolution:
        coded = _encode_dates(column, parts, cells, base, surprises)
    elif parts[0].rest or parts[0].values:
        codes, numbers, extra = encode_numbers(parts[0], cells.values, cells.missing)
        moved = (codes == parts[0].n_codes) & (numbers != cells.values) & (parts[0].step > 0)
        moved[moved] = np.abs(numbers - cells.values)[moved] > 1e-3 * parts[0].step
        if moved.any():
            surprises.append(
                f"{column.name!r} is rounded to steps of {parts[0].step:g} "
                f"({cells.values[moved][0]:g}, {_rows(int(moved.sum()))})"
            )
        coded = [(codes, snap(numbers, column.decimals), extra)]
    else:
        coded = [_encode_labels(column, parts[0], cells)]
    for part, (codes, _, _) in zip(parts, coded, strict=True):
        unseen = np.flatnonzero(codes == -2)
        if len(unseen):
            shown = _shown(column, cells, int(unseen[0]))
            surprises.append(f"{part.name!r} was never seen as {shown} ({_rows(len(unseen))})")
    # unknown, which is not the outcome that there is no value
    return [(np.where(lost, -1, codes), numbers, extra) for codes, numbers, extra in coded]


def _rows(n: int) -> str:
    return "1 row" if n == 1 else f"{n} rows"


def _shown(column: Column, cells: Cells, row: int) -> str:
    value = cells.values[row]
    if cells.kind == "label":
        return repr(cells.labels[value])
    if column.resolution:
        return str(to_clock(column, value).astype("datetime64[s]")).replace("T", " ")
    return f"{value:g}"


def _encode_labels(column: Column, part: Part, cells: Cells) -> Coded:
    labels, places = cells.labels, cells.values
    if cells.kind == "number":
        distinct, places = np.unique(cells.values, return_inverse=True)
        labels = distinct.tolist()
    code_of = _lookup(column)
    found = [code_of(label) for label in labels]
    codes = np.array([*(code for code, _ in found), -1], dtype=np.float64)[places]
    extra = np.array([*(share for _, share in found), 0.0])[places]
    codes[cells.missing], extra[cells.missing] = part.gap_code, 0.0
    return codes, np.zeros(len(codes)), extra


def _plain_text(label: Any) -> str:
    """The text of a label; one of truth values however they are written."""
    text = label_text(label)
    return text.lower() if text.lower() in ("true", "false") else text


def _lookup(column: Column) -> Callable[[Any], tuple[int, float]]:
    """Code and log-frequency of a label: by its type and value, its value, or its text."""
    levels = [(label, code, 0.0) for code, label in enumerate(column.levels)]
    shares = np.log(column.tail_shares).tolist()
    levels += [(v, len(column.levels), s) for v, s in zip(column.tail, shares, strict=True)]
    keys: list[Callable[[Any], Any]] = [lambda v: (type(v), v), lambda v: v, _plain_text]
    tables = [{key(label): (code, s) for label, code, s in reversed(levels)} for key in keys]

    def code_of(label: Any) -> tuple[int, float]:
        for key, table in zip(keys, tables, strict=True):
            found = table.get(key(label))
            if found is not None:
                return found
        return -2, 0.0

    return code_of


def label_text(label: Any) -> str:
    """A label as text; whole floats as whole numbers, so that 1 and 1.0 are the same."""
    return f"{label:.0f}" if isinstance(label, float) and label.is_integer() else str(label)


def _encode_dates(
    column: Column,
    parts: Sequence[Part],
    cells: Cells,
    base: Cells | None,
    surprises: list[str],
) -> list[Coded]:
    zoned, here = column.form.get("offset"), cells.form.get("offset")
    if (zoned is None) != (here is None) and not cells.missing.all():
        what = "no time zone" if here is None else "a time zone"
        surprises.append(f"{column.name!r} has {what} here: taken as UTC")
    if base is None:
        local = to_clock(column, cells.values)
        numbers = list(calendar(local, column.resolution).values())
        coarse = from_calendar(numbers, column.resolution) != local
        if (coarse & ~cells.missing).any():
            surprises.append(f"{column.name!r} is taken to the {column.resolution}")
        return [encode_numbers(p, v, cells.missing) for p, v in zip(parts, numbers, strict=True)]
    apart = to_clock(column, cells.values) - to_clock(column, base.values)
    between = apart / tie_unit(column.resolution)
    return [encode_numbers(parts[0], between, cells.missing | base.missing)]


def decode_column(
    column: Column,
    parts: Sequence[Part],
    x: np.ndarray,
    base: Cells | None,
    rng: np.random.Generator,
) -> Cells:
    """The cells of one column from the coded rows ``(n, k, 2)`` of its parts."""
    codes, numbers = x[..., 0], x[..., 1]
    if column.resolution or parts[0].rest or parts[0].values:
        values = [decode_numbers(p, codes[:, i], numbers[:, i]) for i, p in enumerate(parts)]
        missing = np.isnan(np.stack(values)).any(0)
        if not column.resolution:
            if base is not None:
                values, missing = [values[0] + base.values], missing | base.missing
            kept = values[0] if column.decimals is None else np.round(values[0], column.decimals)
            return Cells("number", kept, missing, [], column.form)
        values = [np.where(missing, 0.0, v) for v in values]
        if base is None:
            local = from_calendar(values, column.resolution)
        else:
            between = np.round(values[0] * tie_unit(column.resolution)).astype(np.int64)
            missing, local = missing | base.missing, to_clock(column, base.values) + between
        # a draw from a wide law of weeks is kept within what the type can hold
        ends = _NANOSECONDS if "[ns" in column.dtype or "zone" in column.form else _YEARS
        return Cells("date", np.clip(from_clock(column, local), *ends), missing, [], column.form)
    labels = [*column.levels, *column.tail]
    places = np.where(codes[:, 0] == parts[0].gap_code, -1, codes[:, 0]).astype(np.int64)
    if column.tail:
        rare = np.flatnonzero(places == len(column.levels))
        places[rare] += rng.choice(len(column.tail), len(rare), p=column.tail_shares)
    missing = places < 0
    if column.numeric:
        return Cells("number", np.array([*labels, np.nan])[places], missing, [], column.form)
    return Cells("label", np.where(missing, -1, places), missing, labels, column.form)


def constant_cells(column: Column, n: int) -> Cells:
    """The one value of a column in every row; gaps where there is none."""
    missing = np.full(n, not column.levels)
    value = column.levels[0] if column.levels else 0
    if column.numeric or column.resolution:
        kind = "number" if column.numeric else "date"
        return Cells(kind, np.full(n, value), missing, [], column.form)
    return Cells("label", np.where(missing, -1, 0), missing, list(column.levels), column.form)


def broken_promise(column: Column, cells: Cells, others: Mapping[int, Cells]) -> list[str]:
    """What a constant or a copy, set aside, would not give back."""
    if column.kind == "constant" and column.levels:
        known = constant_cells(column, len(cells))
        same = cells.missing | (_comparable(cells) == _comparable(known))
        told = f"{column.name!r} was always {label_text(column.levels[0])} and is kept as that"
    elif column.kind == "duplicate" and column.base is not None and column.base in others:
        same = _comparable(cells) == _comparable(others[column.base])
        told = f"{column.name!r} is kept as a copy, which it no longer is"
    else:
        return []
    return [] if same.all() else [f"{told} ({int((~same).sum())} rows differ)"]


def _comparable(cells: Cells) -> np.ndarray:
    if cells.kind != "label":
        return np.where(cells.missing, 0, cells.values)
    return np.array([*map(label_text, cells.labels), ""], dtype=object)[cells.values]
