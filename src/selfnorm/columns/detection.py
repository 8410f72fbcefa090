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
from collections.abc import Collection, Hashable, Sequence
from dataclasses import replace
from typing import Any
from uuid import UUID

import numpy as np

from selfnorm.columns.cells import Cells
from selfnorm.columns.kinds.base import (
    KINDS,
    Column,
    Draft,
    Part,
    Support,
    kept_for_unseen,
    label_text,
)
from selfnorm.columns.kinds.date import as_dates, date_template
from selfnorm.columns.kinds.number import (
    check_numbers,
    first_of,
    number_part,
    numbers_in,
    recorded_decimals,
    snap,
)
from selfnorm.columns.kinds.sum import MAX_ROWS, base_of, left_over, sums_among
from selfnorm.columns.text import is_gap, marks_of, numbers_from, unmarked
from selfnorm.errors import DataError

MAX_COLUMNS = 100
MOST_GAPS = 0.5  # of a column that is looked at for sums
_GROUPED = re.compile(r"[+-]?[1-9]\d{0,2},\d{3}")  # 0,123 can only be decimals
_COMMA = re.compile(r"[+-]?[\d.]*\d,\d+")
IDENTIFIER_ROWS = 20  # too few rows do not show an identifier
_USUAL = {"number": "continuous", "date": "date", "label": "category"}  # kinds by their cells


class Detection:
    """Columns, parts, notes and problems, added to by each column.

    Attributes:
        columns: all columns, those set aside included.
        parts: of the columns that are modelled.
        cells: of those columns, by index: text has been read as numbers and dates.
        notes: findings that a user should know of.
        slips: cells that are not read as what their column seems to hold.
    """

    def __init__(self, missing: frozenset[str], model_gaps: bool = False) -> None:
        self.missing = missing
        self.model_gaps = model_gaps
        self.columns: list[Column] = []
        self.parts: list[Part] = []
        self.cells: dict[int, Cells] = {}
        self.notes: list[str] = []
        self.slips: list[str] = []
        self._contents: dict[Any, int] = {}
        self._earlier: dict[int, tuple[Column, Cells]] = {}  # those that have parts

    def add(
        self,
        name: Hashable,
        cells: Cells,
        stated: str | None,
        support: Support | None,
        weights: np.ndarray | None = None,
    ) -> None:
        """The next column: what it is by the rules, or as ``stated``, or else refused.

        ``weights``: how many rows of a larger table each row stands for.
        """
        if stated == "ignore":
            self.columns.append(Column(name, "ignored", form=cells.form))
            return
        written, cells = cells, interpreted(cells, self.missing, stated)
        odd = cells.form.pop("odd", ())
        if odd:
            self.slips.append(
                f"{name!r} holds numbers but for {_in_rows(written, odd)}: taken as gaps"
            )
        check_numbers(name, cells)
        _check_stated(name, cells, stated)
        _check_support(name, cells, support)
        if cells.form.get("finer"):
            self.notes.append(f"{name!r} is kept to the second; what is finer is left out")
        if stated is None and not cells.declared and len(marks := _mixed_marks(cells)) > 1:
            self.slips.append(
                f"{name!r} holds numbers marked {' and '.join(marks)}: text, unless all are alike"
            )
        if stated is None and not cells.declared and (ways := _ways_of_dates(cells)):
            self.notes.append(f"{name!r} holds {ways}: write all in one way to have dates")
        slips = tuple(written.labels[k] for k in odd)
        gaps = float(cells.missing.mean())
        column = Column(name, "", gaps=gaps, slips=slips, form=cells.form)
        values, counts = _counted(cells, weights)
        if cells.kind == "number":
            decimals = recorded_decimals(values)
            column = replace(column, numeric=True, decimals=decimals)
            if decimals is not None:
                cells = replace(cells, values=snap(cells.values, decimals))
                values, counts = _counted(cells, weights)
        place, notes = len(self.cells), self.notes
        earlier = self._earlier
        draft = Draft(column, cells, values, counts, stated, support, place, earlier, notes)
        column, parts = self._read(draft)
        if weights is not None and (weights > 1).any():  # parts of dates know only their rows
            unseen = kept_for_unseen(int(counts.sum()))
            parts = [replace(part, unseen=unseen) if part.unseen else part for part in parts]
        if self.model_gaps and column.gaps > 0:
            parts = [replace(part, n_codes=part.n_codes + 1, gap=True) for part in parts]
        if column.modelled:
            self.cells[len(self.columns)] = cells
            self._earlier[len(self.columns)] = column, cells
        self.columns.append(column)
        self.parts += parts

    def _read(self, draft: Draft) -> tuple[Column, list[Part]]:
        """The column of a draft and its parts: set aside, or by its kind."""
        column, cells = draft.column, draft.cells
        if len(draft.values) + (self.model_gaps and column.gaps > 0) <= 1:
            return self._constant(column, cells, draft.labels), []
        content = _content(cells)
        if content in self._contents and draft.stated is None:
            twin = self.columns[self._contents[content]]
            self.notes.append(f"{column.name!r} repeats {twin.name!r}: kept as a copy of it")
            column = replace(column, kind="duplicate", base=self._contents[content])
            return replace(column, resolution=twin.resolution, summary=f"same as {twin.name}"), []
        why = None if draft.stated is not None else _identifier(draft)
        if why is not None:
            self.notes.append(f"{column.name!r} is an identifier ({why}): set aside")
            return replace(column, kind="identifier", summary=why), []
        self._contents.setdefault(content, len(self.columns))
        return KINDS[draft.stated or _USUAL[cells.kind]].detect(draft)

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

    def tie(self, kept: Collection[Hashable]) -> None:
        """Note which columns follow from others; those that are sums but for few amounts, and that
        ``kept`` does not name, become what the sum leaves.

        The distribution of that, given the terms, is that of the column: nothing is forced.
        """
        modelled = [(j, self.columns[j]) for j in self.cells]
        numbers = [j for j, c in modelled if c.numeric and KINDS[c.kind].adds]
        # rows that have them all tell of sums
        numbers = [j for j in numbers if self.columns[j].gaps <= MOST_GAPS][:MAX_COLUMNS]
        totals = sums_among([self.columns[j] for j in numbers], [self.cells[j] for j in numbers])
        for y, used, words in totals:
            terms = tuple((numbers[i], factor) for i, factor in used)
            free = self.columns[numbers[y]].name not in kept
            free = free and not any(self.columns[i].gaps for i, _ in terms)
            tied = free and self._tied(numbers[y], terms)
            self.notes.append(f"{words}: kept so" if tied else words)
        modelled = [(j, self.columns[j]) for j in self.cells]
        finite = [j for j, c in modelled if c.kind == "category" and not c.tail][:MAX_COLUMNS]
        names = [self.columns[j].name for j in finite]
        self.notes += _functions(names, [self.cells[j] for j in finite])

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
        summary = f"sum of {', '.join(names)}; and {first_of(part.values)}"
        self.columns[j], self.parts[k] = replace(column, summary=summary), part
        for i in column.counted_from:
            seen = self.cells[i].seen
            self.columns[i] = replace(self.columns[i], ends=(float(seen.min()), float(seen.max())))
        return True


def _counted(cells: Cells, weights: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Distinct values, ascending, and how often they come."""
    if weights is None:
        return np.unique(cells.seen, return_counts=True)
    values, places = np.unique(cells.seen, return_inverse=True)
    counts = np.bincount(places, weights[~cells.missing], minlength=len(values))
    return values, np.rint(counts).astype(np.int64)


def _check_stated(name: Hashable, cells: Cells, stated: str | None) -> None:
    kind = cells.kind if stated is None else KINDS[stated].holds or cells.kind
    if stated == "category" and cells.kind == "date":
        raise DataError(f"column {name!r} is to be a category, but holds dates; make them text")
    if kind != cells.kind:
        what = "not all of its cells are dates" if kind == "date" else "does not hold numbers"
        if kind == "number" and cells.kind == "label":
            what += _almost_numbers(cells)
        raise DataError(f"column {name!r} is to be {stated}, but {what}")


def _check_support(name: Hashable, cells: Cells, support: Support | None) -> None:
    if support is None:
        return
    if cells.kind != "number":
        raise DataError(f"support names the column {name!r}, which does not hold numbers")
    low = -np.inf if support[0] is None else support[0]
    high = np.inf if support[1] is None else support[1]
    if low >= high:
        raise DataError(f"support of {name!r} needs low < high, not {support}")
    outside = cells.seen[(cells.seen < low) | (cells.seen > high)]
    if len(outside):
        raise DataError(
            f"column {name!r} holds {len(outside)} values outside the stated support, the first "
            f"{outside[0]:g}; widen it"
        )


def _content(cells: Cells) -> Hashable:
    """Equal for columns that hold the same in every row."""
    values, labels = cells.values, cells.labels
    if cells.kind == "label":  # the same labels may come in another order
        order = sorted(range(len(labels)), key=lambda i: repr(labels[i]))
        values = np.append(np.argsort(order), -1)[values]
        labels = [labels[i] for i in order]
    values = np.where(cells.missing, 0, values)
    digest = hashlib.sha256(values.tobytes() + cells.missing.tobytes()).hexdigest()
    return cells.kind, repr(labels), digest


def _identifier(draft: Draft) -> str | None:
    """Why a column names the rows rather than telling of them; ``None`` if it does not.

    Text, or whole numbers too long for a float, of which over half are distinct; or whole numbers
    of which none comes twice where chance would repeat nine: an index, or any part of its rows.
    """
    cells, values, n = draft.cells, draft.values, int(draft.counts.sum())
    if n < IDENTIFIER_ROWS or cells.declared or cells.kind == "date":
        return None
    if cells.kind == "label":
        labels = draft.labels
        if any(isinstance(v, str | int | bytes | UUID) for v in labels) and 2 * len(labels) > n:
            return f"{len(labels)} distinct in {n} rows{_almost_numbers(cells)}"
        return None
    index = len(values) == n and not (values != np.round(values)).any()
    if index and n * (n - 1) / 2 > 9 * (values[-1] - values[0] + 1):
        return "whole numbers, none twice"
    return None


def _almost_numbers(cells: Cells) -> str:
    """What keeps texts from being numbers, where most of them look like such; else empty."""
    seen = list(dict.fromkeys(cells.seen.tolist()))
    texts, _ = unmarked([str(cells.labels[k]).strip() for k in seen])
    read = dict(zip(seen, texts, strict=True))
    odd = {k: text for k, text in read.items() if numbers_from([text], names=True) is None}
    numbers = [text for k, text in read.items() if k not in odd]
    if len(odd) < len(numbers) and numbers_from(numbers) is not None:
        where = _in_rows(cells, list(odd))
        return f", all numbers but for {where}: empty these cells to have numbers"
    if texts and all(_GROUPED.fullmatch(text) for text in texts):
        thousand, point = (texts[0].replace(",", mark) for mark in ("", "."))
        words = f"; the comma of {texts[0]} may stand for thousands or for decimals: "
        return words + f"write {thousand} or {point} to have numbers"
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


def _functions(names: Sequence[Hashable], cells: Sequence[Cells]) -> list[str]:
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


def interpreted(cells: Cells, missing: Collection[str], stated: str | None = None) -> Cells:
    """Text as what it says: gaps, numbers, dates; cells of other kinds as they are.

    What the table itself declares a category, or a user ``stated`` to be one, stays text.
    """
    if cells.texts is None and (cells.kind != "label" or {*map(type, cells.labels)} != {str}):
        return cells
    if stated == "category" or cells.declared:
        return cells.without_gaps(missing)
    numbers = numbers_in(cells, names=stated is not None and stated != "date")
    if numbers is not None:
        return numbers
    template = date_template([t for t in cells.labels if not is_gap(t)])
    return cells.without_gaps(missing) if template is None else as_dates(cells, template)
