"""What a table is: the kind of every column, coded rows of it, and the same table back."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from selfnorm.columns.detection import (
    IDENTIFIER_ROWS,
    MAX_CODES,
    Part,
    decode_numbers,
    encode_numbers,
    is_identifier,
    number_part,
    recorded_decimals,
    snap,
)
from selfnorm.columns.frames import Cells, plain, read, unplain, write
from selfnorm.columns.text import (
    MISSING,
    date_template,
    dates_as_text,
    dates_from,
    is_gap,
    numbers_as_text,
    numbers_from,
    template_offset,
    text_decimals,
)
from selfnorm.errors import DataError, SelfnormWarning

KINDS = ("continuous", "cells", "category", "date", "ignore")
_HUGE = 1e150  # squares of larger numbers are beyond double precision
_DAY, _HOUR = 86_400, 3_600
_MONDAY = 3  # 1970-01-01 was a Thursday: weeks begin three days earlier


@dataclass(frozen=True)
class Column:
    """What a schema knows of one column.

    Attributes:
        name: as the table has it.
        kind: ``"continuous"``, ``"cells"``, ``"category"`` or ``"date"``; or, for those set aside,
            ``"identifier"``, ``"constant"``, ``"duplicate"`` or ``"ignored"``.
        summary: a few words on its values.
        gaps: share of rows without a value.
        numeric: whether its cells are numbers.
        levels: labels or numbers of its codes; the one value of a constant.
        tail: levels that share the last code, and ``tail_shares`` their frequencies within it.
        decimals: recorded decimals of numbers, ``None`` for all that doubles have.
        resolution: of dates: ``"month"``, ``"day"``, ``"hour"`` or ``"second"``.
        offset: of dates: seconds from UTC to the clock whose days and hours are modelled.
        base: index of the column that this one repeats, or from which a date is counted.
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
    base: int | None = None
    form: dict[str, Any] = field(default_factory=dict)

    @property
    def modelled(self) -> bool:
        """Whether the column has parts of its own."""
        return self.kind in KINDS

    @property
    def dtype(self) -> str:
        """The type of the column in its table."""
        return str(self.form["dtype"])


class Schema:
    """The columns of a table, the measure of its rows, and the map to *coded rows* and back.

    :meth:`detect` reads it off a table: pandas or polars DataFrame, Arrow table, array ``(n, d)``
    or dict of columns. A row has ``p`` parts (:class:`Part`), one for a column, up to four for a
    date. Coded rows ``x (n, p, 2)`` hold a code and a number: codes below ``n_codes`` are levels
    and point masses, ``n_codes`` says that the number tells the value, ``-1`` is a gap, ``-2`` a
    value never seen.

    A week and a weekday, and where times are recorded an hour and the seconds within it, are the
    parts of a date: exact, and with the law of the calendar in plain sight. Dates in a time zone
    are taken by the clock that most of them show, without its summer time. A date that follows an
    earlier column closely (drop-off after pick-up) is the time between the two.

    Probabilities are with respect to the measure that :attr:`fingerprint` names: counting measure
    on codes and cells, Lebesgue measure on continuous numbers. Each finite part reserves
    ``1 / (n + 2)`` for what was never seen.

    Example:
        >>> table = {"size": [0.5, 1.25, 2.0] * 10, "colour": ["red", "blue", "red"] * 10}
        >>> schema = Schema.detect(table)
        >>> [column.kind for column in schema.columns]
        ['cells', 'category']
        >>> x, extra = schema.encode(table)
        >>> x.shape, extra.shape
        ((30, 2, 2), (30, 2))
        >>> schema.decode(x) == table
        True
    """

    def __init__(
        self,
        columns: Sequence[Column],
        parts: Sequence[Part],
        frame: str = "dict",
        notes: Sequence[str] = (),
        missing: Collection[str] = (),
    ) -> None:
        self.columns = tuple(columns)
        self.parts = tuple(parts)
        self.frame = frame
        self.notes = list(notes)
        self.missing = frozenset(missing)

    @classmethod
    def detect(
        cls,
        frame: Any,
        kinds: Mapping[Any, str] | None = None,
        *,
        support: Mapping[Any, tuple[float | None, float | None]] | None = None,
        missing: Collection[str] | bool = (),
    ) -> Schema:
        """Read the schema off a table.

        Args:
            frame: pandas or polars DataFrame, Arrow table, array ``(n, d)`` or dict of columns.
            kinds: what a column is, by name, where the rules would say otherwise:
                ``"continuous"``, ``"cells"``, ``"category"``, ``"date"`` or ``"ignore"``.
            support: limits of columns of numbers, by name: ``(low, high)``, ``None`` for no limit.
            missing: texts that stand for a gap in columns of text, whatever their case; ``True``
                for those usual in files (empty, NA, ?, ...). Among numbers and dates written as
                text these are gaps in any case.
        """
        missing = MISSING if missing is True else frozenset(t.lower() for t in missing or ())
        kind, cells = read(frame)
        kinds, support = dict(kinds or {}), dict(support or {})
        problems = [
            f"{what} names the column {name!r}, which the table does not have"
            for what, names in (("kinds", kinds), ("support", support))
            for name in names
            if name not in cells
        ]
        problems += [
            f"kinds: {name!r} is {asked!r}; use one of {', '.join(KINDS)}"
            for name, asked in kinds.items()
            if asked not in KINDS
        ]
        refuse(problems)
        found = _Detection(missing)
        for name, column in cells.items():
            found.add(name, column, kinds.get(name), support.get(name))
        refuse(found.problems)
        if not found.parts:
            raise DataError(
                "no column is left to model: "
                + "; ".join(found.notes or ["all are ignored"])
                + "; say what they are with kinds={name: kind}"
            )
        if found.aside:
            warnings.warn(
                f"set aside as identifiers: {', '.join(map(repr, found.aside))}; to keep one, say "
                "what it is with kinds={name: kind}",
                SelfnormWarning,
                stacklevel=2,
            )
        return cls(found.columns, found.parts, kind, found.notes, missing)

    @property
    def modelled(self) -> tuple[Column, ...]:
        """The columns that have parts, in the order that :attr:`Part.column` counts."""
        return tuple(column for column in self.columns if column.modelled)

    def parts_of(self, names: Sequence[Any]) -> list[int]:
        """Indices of the parts of named columns.

        Example:
            >>> schema = Schema.detect({"a": [1.0, 2.5, 4.75], "b": ["x", "y", "x"]})
            >>> schema.parts_of(["b"])
            [1]
        """
        modelled = [column.name for column in self.modelled]
        refuse([f"no column {name!r} in {modelled}" for name in names if name not in modelled])
        return [j for j, part in enumerate(self.parts) if modelled[part.column] in names]

    @property
    def fingerprint(self) -> str:
        """Names the measure: kinds, levels, point masses, steps and reserved masses.

        Log-likelihoods of rows can be compared between schemas of one fingerprint only.
        """
        measure = [
            [
                column.name,
                column.kind,
                column.levels,
                column.tail,
                column.tail_shares,
                column.resolution,
                [(q.n_codes, q.rest, q.step, q.origin, q.unseen, q.values) for q in parts],
            ]
            for column, parts in self._with_parts()
        ]
        text = json.dumps(measure, default=plain)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def _with_parts(self) -> list[tuple[Column, list[Part]]]:
        modelled = self.modelled
        return [
            (column, [part for part in self.parts if part.column == i])
            for i, column in enumerate(modelled)
        ]

    def encode(self, frame: Any, *, partial: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Coded rows ``x (n, p, 2)``, and ``(n, p)`` the log-probability that a code leaves open.

        Columns are found by name, those of an array by position. What was never seen is coded and
        told of in one warning. The second array holds the log-frequency of a level within the tail,
        the log-density of a number never seen in a finite column, and 0 elsewhere: added to the
        log-likelihood of the codes it makes that of the rows.

        Args:
            frame: a table of any kind.
            partial: columns that the table does not have are gaps, rather than an error.
        """
        cells = self._matched(frame, partial)
        n = len(next(iter(cells.values())))
        x, extra = np.zeros((n, len(self.parts), 2)), np.zeros((n, len(self.parts)))
        x[..., 0] = -1
        problems: list[str] = []
        surprises: list[str] = []
        read_columns: dict[int, Cells] = {}
        for j, column in enumerate(self.columns):
            if column.name not in cells or column.kind in ("identifier", "ignored"):
                continue
            given = as_column(column, cells[column.name], self.missing, problems)
            if given is None:
                continue
            read_columns[j] = given
            if not column.modelled:
                surprises += _set_aside_surprises(column, given, read_columns)
                continue
            places = self.parts_of([column.name])
            parts = [self.parts[i] for i in places]
            coded = encode_column(column, parts, given, surprises)
            for i, (codes, numbers, open_) in zip(places, coded, strict=True):
                x[:, i, 0], x[:, i, 1], extra[:, i] = codes, numbers, open_
        refuse(problems)
        if surprises:
            warnings.warn("; ".join(surprises), SelfnormWarning, stacklevel=2)
        return x, extra

    def _matched(self, frame: Any, partial: bool) -> dict[Any, Cells]:
        kind, cells = read(frame)
        names = [column.name for column in self.columns]
        needed = [c.name for c in self.columns if c.kind not in ("identifier", "ignored")]
        if "array" in (kind, self.frame) and not set(needed) <= set(cells):
            if len(cells) != len(names):
                raise DataError(f"the table has {len(cells)} columns, expected {len(names)}")
            return dict(zip(names, cells.values(), strict=True))
        absent = [name for name in needed if name not in cells]
        if absent and (not partial or len(absent) == len(needed)):
            raise DataError(
                f"the table has no column {', '.join(map(repr, absent))}; it has {list(cells)}"
            )
        unknown = [name for name in cells if name not in names]
        if unknown:
            warnings.warn(
                f"columns that the schema does not know are left out: {unknown}",
                SelfnormWarning,
                stacklevel=3,
            )
        return {name: column for name, column in cells.items() if name in names}

    def decode(self, x: Any, rng: np.random.Generator | int | None = 0) -> Any:
        """The table of coded rows ``(n, p, 2)``: the names, types and kind of the one detected.

        A code ``-1`` or ``-2`` becomes a gap. A level of the tail is drawn by its frequency, with
        ``rng``; nothing else is random. Identifiers are left out, and are gaps in an array.
        """
        x = np.asarray(x, dtype=np.float64)
        if x.ndim != 3 or x.shape[1:] != (len(self.parts), 2):
            raise DataError(f"coded rows must have shape (n, {len(self.parts)}, 2), got {x.shape}")
        rng = np.random.default_rng(rng)
        made: dict[int, Cells] = {}
        for j, column in enumerate(self.columns):
            if column.kind == "duplicate" and column.base is not None:
                made[j] = replace(made[column.base], form=column.form)
            elif column.modelled:
                places = self.parts_of([column.name])
                parts = [self.parts[i] for i in places]
                made[j] = decode_column(column, parts, x[:, places], rng)
            elif column.kind == "constant" or self.frame == "array":
                made[j] = _constant(column, len(x))
        stored = {
            self.columns[j].name: _as_stored(self.columns[j], cells) for j, cells in made.items()
        }
        return write(self.frame, stored)

    def to_dict(self) -> dict[str, Any]:
        """The schema as plain JSON.

        Example:
            >>> schema = Schema.detect({"a": [1.0, 2.5, 4.75], "b": ["x", "y", "x"]})
            >>> again = Schema.from_dict(json.loads(json.dumps(schema.to_dict())))
            >>> again.fingerprint == schema.fingerprint
            True
        """
        columns = [asdict(column) for column in self.columns]
        for column in columns:
            column["name"] = plain(column["name"])
            for key in ("levels", "tail"):
                column[key] = [plain(level) for level in column[key]]
        return {
            "frame": self.frame,
            "columns": columns,
            "parts": [asdict(part) for part in self.parts],
            "notes": list(self.notes),
            "missing": sorted(self.missing),
        }

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Schema:
        """The schema that :meth:`to_dict` wrote."""
        columns = [
            Column(
                **{
                    **column,
                    "name": unplain(column["name"]),
                    "levels": tuple(unplain(level) for level in column["levels"]),
                    "tail": tuple(unplain(level) for level in column["tail"]),
                    "tail_shares": tuple(column["tail_shares"]),
                }
            )
            for column in saved["columns"]
        ]
        parts = [Part(**{**part, "values": tuple(part["values"])}) for part in saved["parts"]]
        return cls(columns, parts, saved["frame"], saved["notes"], saved["missing"])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schema) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        rows = [
            (str(c.name), c.kind, c.dtype, c.summary, f"{100 * c.gaps:.3g} %" if c.gaps else "")
            for c in self.columns
        ]
        rows = [("column", "kind", "type", "values", "gaps"), *rows]
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        lines = [
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def __repr__(self) -> str:
        return f"<Schema of {len(self.columns)} columns, measure {self.fingerprint}>"


def refuse(problems: Sequence[str]) -> None:
    """Raise what is wrong, all of it at once."""
    if len(problems) == 1:
        raise DataError(problems[0])
    if problems:
        shown = [f"- {problem}" for problem in problems[:20]]
        if len(problems) > 20:
            shown.append(f"- and {len(problems) - 20} more")
        raise DataError("\n".join([f"{len(problems)} problems:", *shown]))


# Reading a table for the first time


class _Detection:
    """Columns, parts, notes and problems as they are found, column by column."""

    def __init__(self, missing: frozenset[str]) -> None:
        self.missing = missing
        self.columns: list[Column] = []
        self.parts: list[Part] = []
        self.notes: list[str] = []
        self.problems: list[str] = []
        self.aside: list[Any] = []
        self.contents: dict[Any, int] = {}

    def add(
        self,
        name: Any,
        cells: Cells,
        asked: str | None,
        support: tuple[float | None, float | None] | None,
    ) -> None:
        if asked == "ignore":
            self.columns.append(Column(name, "ignored", form=cells.form))
            return
        cells = interpreted(cells, self.missing, asked)
        problem = unusable(name, cells)
        if cells.kind != "number" and asked in ("continuous", "cells"):
            problem = f"column {name!r} is to be {asked}, but does not hold numbers"
        if cells.kind != "date" and asked == "date":
            problem = f"column {name!r} is to be a date, but not all of its cells are dates"
        if support is not None and problem is None:
            problem = self._outside(name, cells, support)
        if problem is not None:
            self.problems.append(problem)
            return
        if cells.form.get("finer"):
            self.notes.append(f"{name!r} is kept to the second; what is finer is left out")
        if "as_text" in cells.form:
            kinds = ", ".join(cells.form["as_text"])
            self.notes.append(f"{name!r} holds {kinds} objects, which are known by their text")
        column, parts = self._described(name, cells, asked, support or (None, None))
        self.columns.append(column)
        self.parts += parts

    def _outside(
        self, name: Any, cells: Cells, support: tuple[float | None, float | None]
    ) -> str | None:
        low, high = support
        if cells.kind != "number":
            return f"support names the column {name!r}, which does not hold numbers"
        if low is not None and high is not None and low >= high:
            return f"support of {name!r} needs low < high, not {support}"
        values = cells.seen
        outside = np.zeros(len(values), dtype=bool)
        if low is not None:
            outside |= values < low
        if high is not None:
            outside |= values > high
        if outside.any():
            return (
                f"column {name!r} holds {int(outside.sum())} values outside the stated support, "
                f"the first {values[outside][0]:g}; widen it"
            )
        return None

    def _described(
        self,
        name: Any,
        cells: Cells,
        asked: str | None,
        support: tuple[float | None, float | None],
    ) -> tuple[Column, list[Part]]:
        n = int((~cells.missing).sum())
        column = Column(
            name,
            "category",
            gaps=float(cells.missing.mean()),
            numeric=cells.kind == "number",
            form=cells.form,
        )
        if cells.kind == "number":
            distinct = np.unique(cells.seen)
            column = replace(column, decimals=recorded_decimals(distinct))
            cells = replace(cells, values=snap(cells.values, column.decimals))
        if cells.kind == "label":
            counts = np.bincount(cells.seen, minlength=len(cells.labels))
            n_distinct = int((counts > 0).sum())
        else:
            n_distinct = len(np.unique(cells.seen))
        if n_distinct <= 1:
            return self._constant(column, cells), []
        twin = self._twin_of(cells)
        if twin is not None:
            self.notes.append(f"{name!r} repeats {self.columns[twin].name!r}: kept as a copy of it")
            summary = f"same as {self.columns[twin].name}"
            return replace(column, kind="duplicate", base=twin, summary=summary), []
        place = len([c for c in self.columns if c.modelled])
        if cells.kind == "number" and asked != "category":
            if asked is None and is_identifier(np.unique(cells.seen), n):
                return self._identifier(column, "numbers every row"), []
            part = number_part(
                place, str(name), cells.seen, column.decimals, kind=asked, support=support
            )
            if asked == "cells" and part.step == 0:
                self.problems.append(f"column {name!r} is to have cells, but lies on no grid")
            kind = "category" if not part.rest else ("cells" if part.step > 0 else "continuous")
            levels = () if part.rest else part.values
            summary = _number_summary(part, column.decimals, cells.seen)
            return replace(column, kind=kind, levels=levels, summary=summary), [part]
        if cells.kind == "date":
            return self._date(column, cells, place)
        if cells.kind == "number":
            distinct, places = np.unique(cells.seen, return_inverse=True)
            labels, counts = distinct.tolist(), np.bincount(places)
        else:
            labels = cells.labels
            text = any(isinstance(label, str) for label in labels)
            unique = (text or isinstance(labels[0], int)) and 2 * n_distinct > n
            if unique and asked is None and n >= IDENTIFIER_ROWS and not _declared(cells):
                return self._identifier(column, f"{n_distinct} texts in {n} rows"), []
        return _category(column, labels, counts, place)

    def _constant(self, column: Column, cells: Cells) -> Column:
        values: list[Any]
        if cells.kind == "label":
            values = [cells.labels[i] for i in np.unique(cells.seen)]
        else:
            values = np.unique(cells.seen).tolist()
        if values:
            self.notes.append(f"{column.name!r} is always {values[0]!r}: kept as that")
        else:
            self.notes.append(f"{column.name!r} has no value at all")
        summary = f"always {values[0]}" if values else "empty"
        return replace(column, kind="constant", levels=tuple(values), summary=summary)

    def _identifier(self, column: Column, why: str) -> Column:
        self.notes.append(f"{column.name!r} is an identifier ({why}): set aside")
        self.aside.append(column.name)
        return replace(column, kind="identifier", summary=why)

    def _twin_of(self, cells: Cells) -> int | None:
        """The earlier column with the same content, if any."""
        values, labels = cells.values, cells.labels
        if cells.kind == "label":  # places differ where labels come in another order
            order = sorted(range(len(labels)), key=lambda i: repr(labels[i]))
            values = np.append(np.argsort(order), -1)[values]
            labels = [labels[i] for i in order]
        content = hashlib.sha256(np.ascontiguousarray(values).tobytes())
        content.update(cells.missing.tobytes())
        key = (cells.kind, repr(labels), content.hexdigest())
        twin = self.contents.setdefault(key, len(self.columns))
        return twin if twin < len(self.columns) else None

    def _date(self, column: Column, cells: Cells, place: int) -> tuple[Column, list[Part]]:
        offset = cells.form.get("offset", 0)
        local = cells.seen + offset
        if not (local % _DAY).any():
            first = (local // _DAY).astype("datetime64[D]")
            monthly = (first == first.astype("datetime64[M]")).all() and len(first) >= 10
            resolution = "month" if monthly else "day"
        else:
            resolution = "second" if (local % _HOUR).any() else "hour"
        column = replace(column, kind="date", resolution=resolution, offset=offset)
        column = replace(column, summary=f"{resolution}s, " + _span(local, resolution))
        parts = []
        for what, values in calendar(local, resolution).items():
            name = f"{column.name} ({what})"
            if what in ("weekday", "hour"):
                levels = tuple(float(v) for v in range(7 if what == "weekday" else 24))
                parts.append(Part(place, name, len(levels), values=levels))
                continue
            limits = (0.0, _HOUR - 1.0) if what == "second" else (None, None)
            finite = number_part(place, name, values, 0)
            exact = number_part(place, name, values, 0, kind="cells", support=limits)
            parts.append(exact if finite.rest else finite)
        return column, parts


def interpreted(cells: Cells, missing: Collection[str], asked: str | None = None) -> Cells:
    """Text as what it says: gaps, numbers, dates; cells of other kinds as they are."""
    texts = cells.labels
    if cells.kind != "label" or not texts or not all(isinstance(t, str) for t in texts):
        return cells
    if asked == "category" or _declared(cells):
        return _without_gaps(cells, missing)
    numbers = numbers_from(texts, names=asked in ("continuous", "cells"))
    if numbers is not None:
        cells = _without_gaps(cells, MISSING)
        form = cells.form | {"text": True, "text_decimals": text_decimals(texts)}
        values = np.append(numbers, np.nan)[cells.values]
        return Cells("number", values, cells.missing, [], form)
    dates = [t for t in texts if not is_gap(t)]
    template = date_template(dates)
    if template is not None:
        cells = _without_gaps(cells, MISSING)
        moments = dict(zip(dates, dates_from(dates, template).tolist(), strict=True))  # type: ignore[union-attr]
        values = np.array([*(moments.get(t, 0) for t in texts), 0])[cells.values]
        form = cells.form | {"template": template, "offset": template_offset(template)}
        if "f" in template and any(t.strip("0") for t in _fractions(dates, template)):
            form["finer"] = True
        return Cells("date", values, cells.missing, [], form)
    return _without_gaps(cells, missing)


def _fractions(dates: list[str], template: str) -> list[str]:
    start, end = template.index("f"), template.rindex("f") + 1
    return [t[start:end] for t in dates]


def _declared(cells: Cells) -> bool:
    """Whether the table itself says that the column is a category."""
    return cells.form.get("dtype") == "category" or "ordered" in cells.form


def _without_gaps(cells: Cells, missing: Collection[str]) -> Cells:
    """The same cells with texts that stand for a gap taken as one."""
    gaps = np.array([is_gap(label, missing) for label in cells.labels] + [True])
    if not gaps[:-1].any():
        return cells
    counts = np.bincount(cells.values[~cells.missing], minlength=len(cells.labels))
    usual = max(np.flatnonzero(gaps[:-1]), key=lambda i: counts[i])
    written = {} if cells.missing.any() else {"gap": cells.labels[usual]}
    gone = gaps[cells.values]
    values = np.where(gone, -1, cells.values)
    return replace(cells, values=values, missing=cells.missing | gone, form=cells.form | written)


def unusable(name: Any, cells: Cells) -> str | None:
    """What is wrong with numbers that no model can hold."""
    if cells.kind != "number":
        return None
    bad = ~cells.missing & ~(np.abs(cells.values) <= _HUGE)
    if not bad.any():
        return None
    row = int(bad.argmax())
    value = cells.values[row]
    what = (
        f"an infinite value ({value})" if np.isinf(value) else f"a number as large as {value:.0e}"
    )
    cure = "remove the row or leave the cell empty" if np.isinf(value) else "give it in other units"
    return f"column {name!r} holds {what} in row {row} ({int(bad.sum())} such cells); {cure}"


def _category(
    column: Column, labels: list[Any], counts: np.ndarray, place: int
) -> tuple[Column, list[Part]]:
    """Levels that were seen: numbers and ordered categories in their order, others by frequency."""
    order = np.argsort(-counts, kind="stable")[: int((counts > 0).sum())]
    own, tail = order, order[:0]
    if len(order) > MAX_CODES:
        own, tail = order[: MAX_CODES - 1], order[MAX_CODES - 1 :]
    if column.numeric or column.form.get("ordered") or isinstance(labels[0], bool):
        own = np.sort(own)
    n = int(counts.sum())
    part = Part(place, str(column.name), len(own) + (len(tail) > 0), unseen=1 / (n + 2))
    summary = f"{len(order)} levels" + (f", {len(tail)} in a shared tail" if len(tail) else "")
    if len(order) <= 4:
        summary += ": " + ", ".join(str(labels[i])[:20] for i in own)
    column = replace(
        column,
        kind="category",
        levels=tuple(labels[i] for i in own),
        tail=tuple(labels[i] for i in tail),
        tail_shares=tuple((counts[tail] / counts[tail].sum()).tolist()),
        summary=summary,
    )
    return column, [part]


def _number_summary(part: Part, decimals: int | None, values: np.ndarray) -> str:
    span = f"{values.min():.6g} to {values.max():.6g}"
    if not part.rest:
        return f"{part.n_codes} values, {span}"
    if part.step > 0:
        what = "whole numbers" if part.step == 1 else f"steps of {part.step:g}"
    else:
        what = f"{decimals} decimals" if decimals else "whole numbers" if decimals == 0 else "any"
    if part.n_codes:
        share = np.isin(values, part.values).mean()
        shown = ", ".join(f"{v:g}" for v in part.values[:3])
        more = f" and {part.n_codes - 3} more" if part.n_codes > 3 else ""
        span += f"; {100 * share:.3g} % at {shown}{more}"
    return f"{what}, {span}"


# Dates


def calendar(local: np.ndarray, resolution: str) -> dict[str, np.ndarray]:
    """The parts of moments (seconds on the clock modelled), each a whole number.

    Example:
        >>> {name: int(v[0]) for name, v in calendar(np.array([12 * 3600 + 5]), "second").items()}
        {'week': 0, 'weekday': 3, 'hour': 12, 'second': 5}
    """
    days = local // _DAY
    if resolution == "month":
        return {"month": days.astype("datetime64[D]").astype("datetime64[M]").astype(np.float64)}
    parts = {"week": (days + _MONDAY) // 7, "weekday": (days + _MONDAY) % 7}
    if resolution in ("hour", "second"):
        parts["hour"] = local % _DAY // _HOUR
    if resolution == "second":
        parts["second"] = local % _HOUR
    return {name: values.astype(np.float64) for name, values in parts.items()}


def from_calendar(parts: Sequence[np.ndarray], resolution: str) -> np.ndarray:
    """Seconds on the clock modelled, the inverse of :func:`calendar`."""
    whole = [np.round(values).astype(np.int64) for values in parts]
    if resolution == "month":
        return whole[0].astype("datetime64[M]").astype("datetime64[D]").astype(np.int64) * _DAY
    seconds = (7 * whole[0] + whole[1] - _MONDAY) * _DAY
    for values, unit in zip(whole[2:], (_HOUR, 1), strict=False):
        seconds = seconds + values * unit
    return seconds


def _span(local: np.ndarray, resolution: str) -> str:
    unit = {"month": "M", "day": "D", "hour": "h", "second": "s"}[resolution]
    ends = np.array([local.min(), local.max()]).astype("datetime64[s]")
    return " to ".join(str(end).replace("T", " ") for end in ends.astype(f"datetime64[{unit}]"))


# Coding


def as_column(
    column: Column, cells: Cells, missing: Collection[str], problems: list[str]
) -> Cells | None:
    """Cells as the column has them, whatever type they came in; ``None`` after a problem."""
    form = cells.form
    date = column.resolution != ""
    if column.numeric:
        if cells.kind == "label":
            labels = ["" if v is None else str(v) for v in map(_as_number_text, cells.labels)]
            numbers = numbers_from(labels, names=True) if labels else np.zeros(0)
            if numbers is None and not all(map(is_gap, labels)):
                wrong = next(t for t in labels if numbers_from([t], names=True) is None)
                problems.append(
                    f"column {column.name!r} holds numbers, but here text ({wrong[:40]!r})"
                )
                return None
            values = np.append(np.full(len(labels), np.nan) if numbers is None else numbers, np.nan)
            cells = Cells("number", values[cells.values], np.isnan(values)[cells.values], [], form)
        elif cells.kind == "date":
            problems.append(f"column {column.name!r} holds numbers, but here dates")
            return None
        problem = unusable(column.name, cells)
        if problem is not None:
            problems.append(problem)
            return None
        return replace(cells, values=snap(cells.values, column.decimals))
    if date:
        cells = interpreted(cells, missing) if cells.kind == "label" else cells
        if cells.kind != "date" and not cells.missing.all():
            problems.append(f"column {column.name!r} holds dates, but here {_sample(cells)}")
            return None
        return replace(cells, kind="date")
    if cells.kind == "number":
        distinct, places = np.unique(cells.values, return_inverse=True)
        places = np.where(cells.missing, -1, places)
        return Cells("label", places, cells.missing, distinct.tolist(), form)
    if cells.kind == "date":
        distinct, places = np.unique(cells.values, return_inverse=True)
        labels = [str(v).replace("T", " ") for v in distinct.astype("datetime64[s]")]
        return Cells("label", np.where(cells.missing, -1, places), cells.missing, labels, form)
    return _without_gaps(cells, missing)


def _as_number_text(label: Any) -> Any:
    return int(label) if isinstance(label, bool) else label


def _sample(cells: Cells) -> str:
    seen = cells.seen[0]
    return f"{cells.labels[seen]!r}" if cells.kind == "label" else f"{seen:g}"


Coded = tuple[np.ndarray, np.ndarray, np.ndarray]


def encode_column(
    column: Column,
    parts: Sequence[Part],
    cells: Cells,
    surprises: list[str],
) -> list[Coded]:
    """Codes, numbers and log-probabilities left open, for each part of a column."""
    if column.resolution:
        local = cells.values + column.offset
        numbers = list(calendar(local, column.resolution).values())
        if (
            from_calendar(numbers, column.resolution)[~cells.missing] != local[~cells.missing]
        ).any():
            surprises.append(f"{column.name!r} is taken to the {column.resolution}")
        coded = [encode_numbers(p, v, cells.missing) for p, v in zip(parts, numbers, strict=True)]
    elif column.numeric and (parts[0].rest or parts[0].values):
        coded = [encode_numbers(parts[0], cells.values, cells.missing)]
        codes, numbers_, _ = coded[0]
        moved = (codes == parts[0].n_codes) & (
            np.abs(numbers_ - cells.values) > 1e-3 * parts[0].step
        )
        if parts[0].step > 0 and moved.any():
            surprises.append(
                f"{column.name!r} is rounded to steps of {parts[0].step:g} "
                f"({cells.values[moved][0]:g}, {int(moved.sum())} rows)"
            )
        if column.decimals is not None and parts[0].step > 0:
            coded[0] = (codes, np.round(numbers_, column.decimals), coded[0][2])
    else:
        if column.numeric:
            distinct, places = np.unique(cells.values, return_inverse=True)
            labels = distinct.tolist()
        else:
            labels, places = cells.labels, cells.values
        code_of = _lookup(column)
        found = [code_of(label) for label in labels]
        codes = np.array([*(c for c, _ in found), -1], dtype=np.float64)[places]
        extra = np.array([*(e for _, e in found), 0.0])[places]
        codes[cells.missing], extra[cells.missing] = -1, 0.0
        coded = [(codes, np.zeros(len(codes)), extra)]
    for part, (codes, _, _) in zip(parts, coded, strict=True):
        unseen = np.flatnonzero(codes == -2)
        if len(unseen):
            shown = _shown(column, cells, int(unseen[0]))
            surprises.append(f"{part.name!r} was never seen as {shown} ({len(unseen)} rows)")
    return coded


def _shown(column: Column, cells: Cells, row: int) -> str:
    value = cells.values[row]
    if cells.kind == "label":
        return repr(cells.labels[value])
    if column.resolution:
        return str((value + column.offset).astype("datetime64[s]"))
    return f"{value:g}"


def _lookup(column: Column) -> Callable[[Any], tuple[int, float]]:
    """Code and log-frequency of a label: by its type and value, its value, or its text."""
    levels = [(label, code, 0.0) for code, label in enumerate(column.levels)]
    shares = np.log(column.tail_shares)
    levels += [(v, len(column.levels), float(s)) for v, s in zip(column.tail, shares, strict=True)]
    keys: list[Callable[[Any], Any]] = [lambda v: (type(v), v), lambda v: v, _label_text]
    tables = [{key(label): (code, s) for label, code, s in reversed(levels)} for key in keys]

    def code_of(label: Any) -> tuple[int, float]:
        for key, table in zip(keys, tables, strict=True):
            found = table.get(key(label))
            if found is not None:
                return found
        return -2, 0.0

    return code_of


def _label_text(label: Any) -> str:
    if isinstance(label, float) and label.is_integer():
        return f"{label:.0f}"
    return str(label)


def _set_aside_surprises(column: Column, cells: Cells, others: Mapping[int, Cells]) -> list[str]:
    """What a constant or a copy would not give back."""
    if column.kind == "constant" and len(column.levels) == 1 and not cells.missing.all():
        known = column.levels[0]
        if cells.kind == "label":
            wrong = [cells.labels[i] for i in np.unique(cells.seen) if cells.labels[i] != known]
        else:
            wrong = np.setdiff1d(cells.seen, [known]).tolist()
        if wrong:
            return [f"{column.name!r} was always {known!r}, never {wrong[0]!r}"]
    if column.kind == "duplicate" and column.base is not None and column.base in others:
        base = others[column.base]
        same = _comparable(base) == _comparable(cells)
        if not same.all():
            return [f"{column.name!r} no longer repeats its twin ({int((~same).sum())} rows)"]
    return []


def _comparable(cells: Cells) -> np.ndarray:
    if cells.kind != "label":
        return np.where(cells.missing, 0, cells.values)
    labels = np.empty(len(cells.labels) + 1, dtype=object)
    labels[:-1] = cells.labels
    return labels[cells.values]


def decode_column(
    column: Column,
    parts: Sequence[Part],
    x: np.ndarray,
    rng: np.random.Generator,
) -> Cells:
    """The cells of one column from the coded rows ``(n, k, 2)`` of its parts."""
    codes, numbers = x[..., 0], x[..., 1]
    if column.resolution or parts[0].rest or parts[0].values:
        values = [decode_numbers(p, codes[:, i], numbers[:, i]) for i, p in enumerate(parts)]
        missing = np.isnan(np.stack(values)).any(0)
        if not column.resolution:
            kept = values[0] if column.decimals is None else np.round(values[0], column.decimals)
            return Cells("number", kept, missing, [], column.form)
        whole = [np.where(missing, 0.0, v) for v in values]
        moments = from_calendar(whole, column.resolution) - column.offset
        return Cells("date", moments, missing, [], column.form)
    labels = [*column.levels, *column.tail]
    places = codes[:, 0].astype(np.int64)
    if column.tail:
        rare = np.flatnonzero(places == len(column.levels))
        places[rare] += rng.choice(len(column.tail), len(rare), p=column.tail_shares)
    missing = places < 0
    if column.numeric:
        return Cells("number", np.array([*labels, np.nan])[places], missing, [], column.form)
    return Cells("label", np.where(missing, -1, places), missing, labels, column.form)


def _constant(column: Column, n: int) -> Cells:
    """The one value of a column in every row; gaps where there is none."""
    missing = np.full(n, not column.levels)
    if not column.levels or not (column.numeric or isinstance(column.levels[0], int)):
        return Cells("label", np.where(missing, -1, 0), missing, list(column.levels), column.form)
    return Cells("number", np.full(n, column.levels[0]), missing, [], column.form)


def _as_stored(column: Column, cells: Cells) -> Cells:
    """Numbers and dates that the table keeps as text, as text again; gaps as it writes them."""
    form = column.form
    if cells.kind != "label" and ("text" in form or "template" in form):
        distinct, places = np.unique(cells.values, return_inverse=True)
        if "text" in form:
            labels = numbers_as_text(np.nan_to_num(distinct), form["text_decimals"])
        else:
            labels = dates_as_text(distinct, form["template"])
        cells = Cells("label", np.where(cells.missing, -1, places), cells.missing, labels, form)
    if cells.kind == "label" and "gap" in form and cells.missing.any():
        places = np.where(cells.missing, len(cells.labels), cells.values)
        none = np.zeros(len(cells), dtype=bool)
        return Cells("label", places, none, [*cells.labels, form["gap"]], form)
    return cells
