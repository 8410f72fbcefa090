"""What the columns of a table are, read off it one after the other."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np

from selfnorm.columns.coding import (
    DAY,
    HOUR,
    Column,
    calendar,
    check_numbers,
    label_text,
    tie_unit,
)
from selfnorm.columns.frames import Cells
from selfnorm.columns.numbers import MAX_CODES, Part, number_part, recorded_decimals, snap
from selfnorm.columns.text import interpreted
from selfnorm.errors import DataError

Support = tuple[float | None, float | None]
IDENTIFIER_ROWS = 20  # fewer rows tell no identifier from a category


class Detection:
    """Columns, parts, notes and problems as they are found.

    Attributes:
        columns: all columns, those set aside included.
        parts: of the columns that are modelled.
        cells: of those columns, by index: text has been read as numbers and dates.
        notes: findings that a user should know of.
        problems: what makes the table unusable.
    """

    def __init__(self, missing: frozenset[str]) -> None:
        self.missing = missing
        self.columns: list[Column] = []
        self.parts: list[Part] = []
        self.cells: dict[int, Cells] = {}
        self.notes: list[str] = []
        self.problems: list[str] = []
        self._contents: dict[Any, int] = {}

    def add(self, name: Any, cells: Cells, asked: str | None, support: Support | None) -> None:
        """The next column: what it is by the rules, or as ``asked``."""
        if asked == "ignore":
            self.columns.append(Column(name, "ignored", form=cells.form))
            return
        cells = interpreted(cells, self.missing, asked)
        try:
            check_numbers(name, cells)
            _check_asked(name, cells, asked)
            _check_support(name, cells, support)
        except DataError as error:
            self.problems.append(str(error))
            return
        if cells.form.get("finer"):
            self.notes.append(f"{name!r} is kept to the second; what is finer is left out")
        if "as_text" in cells.form:
            kinds = ", ".join(cells.form["as_text"])
            self.notes.append(f"{name!r} holds {kinds} objects, which are known by their text")
        column = Column(name, "", gaps=float(cells.missing.mean()), form=cells.form)
        if cells.kind == "number":
            decimals = recorded_decimals(np.unique(cells.seen))
            column = replace(column, numeric=True, decimals=decimals)
            cells = replace(cells, values=snap(cells.values, decimals))
        values, counts = np.unique(cells.seen, return_counts=True)
        column, parts = self._described(column, cells, values, counts, asked, support)
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
        labels = [cells.labels[i] for i in values] if cells.kind == "label" else values.tolist()
        if len(labels) <= 1:
            return self._constant(column, cells, labels), []
        twin = self._contents.setdefault(_content(cells), len(self.columns))
        if twin < len(self.columns) and asked is None:
            other = self.columns[twin].name
            self.notes.append(f"{column.name!r} repeats {other!r}: kept as a copy of it")
            column = replace(column, resolution=self.columns[twin].resolution)
            return replace(column, kind="duplicate", base=twin, summary=f"same as {other}"), []
        why = None if asked is not None else _identifier(cells, labels, values, int(counts.sum()))
        if why is not None:
            self.notes.append(f"{column.name!r} is an identifier ({why}): set aside")
            return replace(column, kind="identifier", summary=why), []
        place = len(self.cells)
        if cells.kind == "date":
            return self._date(column, cells, place)
        if cells.kind == "label" or asked == "category":
            return _category(column, labels, counts, place)
        limits = support or (None, None)
        part = number_part(
            place, str(column.name), cells.seen, column.decimals, kind=asked, support=limits
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
        local = cells.seen + offset
        resolution = _resolution(local)
        column = replace(column, kind="date", resolution=resolution, offset=offset)
        unit = {"month": "M", "day": "D", "hour": "h", "second": "s"}[resolution]
        ends = np.array([local.min(), local.max()]).astype("datetime64[s]")
        span = " to ".join(str(e).replace("T", " ") for e in ends.astype(f"datetime64[{unit}]"))
        base = self._base_of(cells, resolution)
        if base is not None:
            other = self.columns[base].name
            both = ~(cells.missing | self.cells[base].missing)
            between = (cells.values - self.cells[base].values)[both] / tie_unit(resolution)
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
        if any(isinstance(v, str | int) for v in labels) and 2 * len(labels) > n:
            return f"{len(labels)} distinct in {n} rows"
        return None
    whole = len(values) == n and not (values != np.round(values)).any()
    if whole and n * (n - 1) / 2 > 9 * (values[-1] - values[0] + 1):
        return "whole numbers, none twice"
    return None


def _resolution(local: np.ndarray) -> str:
    if (local % DAY).any():
        return "second" if (local % HOUR).any() else "hour"
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
    part = Part(
        place, str(column.name), len(own) + (len(tail) > 0), unseen=1 / (int(counts.sum()) + 2)
    )
    summary = f"{len(order)} levels" + (f", {len(tail)} in a shared tail" if tail else "")
    if len(order) <= 4:
        summary += ": " + ", ".join(label_text(labels[i])[:20] for i in own)
    column = replace(
        column,
        kind="category",
        levels=tuple(labels[i] for i in own),
        tail=tuple(labels[i] for i in tail),
        tail_shares=tuple((counts[tail] / counts[tail].sum()).tolist()) if tail else (),
        summary=summary,
    )
    return column, [part]


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
        shown = ", ".join(f"{v:g}" for v in part.values[:3])
        more = f" and {part.n_codes - 3} more" if part.n_codes > 3 else ""
        span += f"; {100 * share:.3g} % at {shown}{more}"
    return what + span
