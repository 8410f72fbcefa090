r"""Events: what is asked of rows, as text, a dict of values or a function of tables.

The text has the grammar of Python's comparisons; it is parsed and never run::

    age > 50 and sex == 'F'                 18 <= age < 65 or state not in ['NY', 'CA']
    income - cost > 0                       end - start > 30 and start >= '2024-01-31'
    paid is missing                         not (`hours-per-week` > 40)

A name in backticks may hold any sign. Text in quotes is a level or a date; a difference of dates is
a number of days. A comparison with a gap is false, also within ``not``, as in SQL.
"""

from __future__ import annotations

import ast
import datetime as dt
import operator
import re
import warnings
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import reduce
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from selfnorm.columns import KINDS, LINE, Cells, Column, PartValues, Schema, Values
from selfnorm.errors import DataError, SelfnormWarning

MAX_LENGTH, MAX_DEPTH = 4000, 60
DAY = 86_400.0
CellsOf: TypeAlias = Mapping[Hashable, Cells]
Asked: TypeAlias = "str | Mapping[Any, Any] | Callable[[Any], Any] | Event | None"

_OPPOSITE: dict[type, type] = {ast.Lt: ast.GtE, ast.Gt: ast.LtE, ast.Eq: ast.NotEq}
_OPPOSITE |= {ast.In: ast.NotIn, ast.Is: ast.IsNot}
_OPPOSITE |= {second: first for first, second in _OPPOSITE.items()}
_MIRRORED: dict[type, type] = {ast.Lt: ast.Gt, ast.Gt: ast.Lt, ast.LtE: ast.GtE, ast.GtE: ast.LtE}
_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    **{ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge},
    **{ast.Eq: operator.eq, ast.NotEq: operator.ne},
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: np.divide},
}
_CURES = {
    "Attribute": "a name with a dot goes in `backticks`",
    "BitAnd": "write 'and'",
    "BitOr": "write 'or'",
    "Call": "nothing can be called",
    "Constant": "of a gap write 'is missing'",
    "Invert": "write 'not'",
}
_PIECES = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|`[^`]*`|\#""")


@dataclass(frozen=True)
class Event:
    """What rows obey or not.

    Attributes:
        holds: which rows do ``(n,)``, by the cells of their columns.
        box: values of single columns, without which no row obeys.
        exact: whether all rows within the box obey.
        stated: the column and its value, where that is all.
        parts: events all of which make it up.
        columns: those that its text names.

    Example:
        >>> schema = Schema.detect({"age": [20, 30, 45], "sex": ["F", "M", "F"]})
        >>> event = Event.of(schema, "age > 25 and sex == 'F'")
        >>> event.holds(schema.cells({"age": [50, 50], "sex": ["M", "F"]})).tolist()
        [False, True]
        >>> Event.of(schema, "agee > 25")
        Traceback (most recent call last):
        selfnorm.errors.DataError: there is no column 'agee' (character 1 of 'agee > 25'): 'age'?
    """

    holds: Callable[[CellsOf], np.ndarray]
    box: Mapping[Hashable, Values] = field(default_factory=dict)
    exact: bool = False
    stated: tuple[Hashable, Any] | None = None
    parts: tuple[Event, ...] = ()
    columns: frozenset[Hashable] = frozenset()

    @classmethod
    def of(cls, schema: Schema, asked: Asked) -> Event:
        """An event of a text, a function of tables, or a dict of columns: a value, a list of them,
        or a range ``(low, high)`` whose ends may be ``None``. ``None`` is any row."""
        if isinstance(asked, Event):
            return asked
        if isinstance(asked, Mapping):
            asked = " and ".join(in_words(name, value) for name, value in asked.items()) or None
        if isinstance(asked, str):
            return _Reader(schema, asked).event()
        if asked is None:
            return cls.every(())
        if not callable(asked):
            raise DataError(f"an event is text, a dict or a function, not {type(asked).__name__}")
        function = asked

        def holds(cells: CellsOf) -> np.ndarray:
            result = np.asarray(function(schema.written(cells)))
            if result.shape != (_rows(cells),) or result.dtype != bool:
                raise DataError(
                    f"an event must return {_rows(cells)} truth values, one for each row, not an "
                    f"array of shape {result.shape} and type {result.dtype}"
                )
            return result

        return cls(holds)

    @classmethod
    def every(cls, events: Sequence[Event]) -> Event:
        """All of some events."""
        box: dict[Hashable, Values] = {}
        for event in events:
            for name, values in event.box.items():
                box[name] = box.get(name, Values(LINE, gap=True)) & values
        parts = tuple(part for event in events for part in event.parts or (event,))
        return cls(
            lambda cells: np.all(
                [np.ones(_rows(cells), bool), *(e.holds(cells) for e in events)], 0
            ),
            box,
            all(event.exact for event in events),
            parts=parts,
        )

    @classmethod
    def either(cls, events: Sequence[Event]) -> Event:
        """One of some events, or more: within the values of the columns that all restrict."""
        shared = set(events[0].box).intersection(*(event.box for event in events))
        box = {name: reduce(operator.or_, (e.box[name] for e in events)) for name in shared}
        of_one = all(event.exact and len(event.box) == len(box) == 1 for event in events)
        return cls(lambda cells: np.any([e.holds(cells) for e in events], 0), box, of_one)

    @classmethod
    def within(cls, column: Column, values: Values, stated: Any = None) -> Event:
        """The value of a column is one of some."""
        kind = KINDS[column.kind](column)
        return cls(
            lambda cells: values.hold(kind.numbers(cells[column.name])),
            {column.name: values},
            True,
            None if stated is None else (column.name, stated),
        )

    def evidence(self) -> tuple[dict[Hashable, list[Any]], Event]:
        """Columns whose value is stated, as a table of one row; and the rest of the event."""
        stated, rest = {}, []
        for part in self.parts or (self,):
            if part.stated is None or part.stated[0] in stated:
                rest.append(part)
            else:
                stated[part.stated[0]] = [part.stated[1]]
        return stated, Event.every(rest)

    def coded(self, schema: Schema) -> tuple[list[PartValues | None], bool]:
        """What it leaves of each part, ``None`` for all; and whether that is the event itself."""
        parts: list[PartValues | None] = [None] * len(schema.parts)
        exact = self.exact
        for column in schema.modelled:
            if column.name in self.box:
                places = schema.parts_of([column.name])
                kind = KINDS[column.kind](column, [schema.parts[j] for j in places])
                within, fits = kind.within(self.box[column.name])
                exact = exact and fits
                for j, values in zip(places, within, strict=True):
                    parts[j] = values
        return parts, exact


def _rows(cells: CellsOf) -> int:
    return len(next(iter(cells.values())))


def in_words(name: Hashable, value: Any) -> str:
    """The text of a column and its value, several, or a range.

    >>> in_words("age", (50, None)), in_words("home town", ["Rome", "Oslo"])
    ('`age` >= 50', "`home town` in ['Rome', 'Oslo']")
    """
    if isinstance(value, tuple) and len(value) == 2:
        low, high = ("" if end is None else _constant(end) for end in value)
        words = [f"`{name}` >= {low}"] * bool(low) + [f"`{name}` <= {high}"] * bool(high)
        return " and ".join(words) or f"`{name}` is not missing"
    if isinstance(value, Collection) and not isinstance(value, str | bytes):
        return f"`{name}` in [{', '.join(map(_constant, value))}]"
    gap = value is None or value != value
    return f"`{name}` is missing" if gap else f"`{name}` == {_constant(value)}"


def _constant(value: Any) -> str:
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, bool | int | float):
        return repr(value)
    return repr(str(value).replace("T", " ") if isinstance(value, dt.date) else str(value))


class _Term(NamedTuple):
    """A column, a constant, or arithmetic of these.

    Attributes:
        kind: ``"number"``, ``"date"`` (in seconds), ``"label"``; or ``"text"``, of a constant.
        of: values ``(n,)`` by the cells of columns; NaN at gaps.
        columns: those it depends on; none where it is constant.
        alone: whether it is a column and no more.
    """

    kind: str
    of: Callable[[CellsOf], Any]
    columns: tuple[Column, ...] = ()
    alone: bool = False


class _Reader:
    """The text of an event, read."""

    def __init__(self, schema: Schema, text: str) -> None:
        self.schema = schema
        self.columns = {str(column.name): column for column in schema.columns}
        self.named: set[Hashable] = set()
        if len(text) > MAX_LENGTH:
            raise DataError(f"the event has {len(text):,} characters; {MAX_LENGTH:,} are the most")
        self.text = re.sub(r"[\t\r\n\f]", " ", text).strip()
        self.shown = repr(self.text if len(self.text) < 100 else self.text[:97] + "...")
        # what stands in backticks is a name of as many characters, so that places stay
        self.plain = _PIECES.sub(self._plain, self.text)

    def _plain(self, piece: re.Match[str]) -> str:
        if piece[0] == "#":
            raise DataError(
                f"'#' (character {piece.start() + 1} of {self.shown}) is no sign of events"
            )
        return "_" * len(piece[0]) if piece[0][0] == "`" else piece[0]

    def event(self) -> Event:
        """The event."""
        try:
            root = ast.parse(self.plain, mode="eval").body
        except SyntaxError as error:
            place = f"character {error.offset or 1} of {self.shown}"
            cure = "names with other signs, or that are words of Python, go in `backticks`"
            words = f"the event cannot be read: {error.msg} ({place}); {cure}"
            raise DataError(words) from None
        except (ValueError, RecursionError, MemoryError):
            raise DataError(f"the event {self.shown} cannot be read") from None
        nodes: list[ast.AST] = [root]
        for _ in range(MAX_DEPTH):
            nodes = [inner for node in nodes for inner in ast.iter_child_nodes(node)]
        if nodes:
            raise DataError(f"the event {self.shown} is nested more than {MAX_DEPTH} deep")
        event = self._event(root, negated=False)
        return replace(event, columns=frozenset(self.named))

    def _place(self, offset: int) -> int:
        """Which character a byte belongs to."""
        return len(self.plain.encode()[:offset].decode())

    def _refused(self, node: ast.expr, words: str, cure: str = "") -> DataError:
        place = self._place(node.col_offset) + 1
        return DataError(f"{words} (character {place} of {self.shown}){cure and ': '}{cure}")

    # -- events ---------------------------------------------------------------------------------

    def _event(self, node: ast.expr, negated: bool) -> Event:
        """The event of a node, or its opposite: ``not`` is moved to the comparisons."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return self._event(node.operand, not negated)
        if isinstance(node, ast.BoolOp):
            events = [self._event(value, negated) for value in node.values]
            return (Event.either, Event.every)[isinstance(node.op, ast.And) != negated](events)
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            pairs = zip(sides, map(type, node.ops), sides[1:], strict=False)
            events = [self._compared(a, _OPPOSITE[o] if negated else o, b) for a, o, b in pairs]
            joined = Event.either if negated else Event.every
            return joined(events) if len(events) > 1 else events[0]
        term = self._term(node)
        truths = term.alone and {*map(str, term.columns[0].levels)} <= {"False", "True"}
        if truths and term.kind == "label":
            return self._single(node, term.columns[0], ast.NotEq if negated else ast.Eq, True)
        raise self._refused(node, "a comparison is missing")

    def _compared(self, left: ast.expr, op: type, right: ast.expr) -> Event:
        """The event of one comparison."""
        if op in (ast.Is, ast.IsNot):
            if not (isinstance(right, ast.Name) and right.id == "missing"):
                raise self._refused(
                    right, "'is' goes with 'missing' or 'not missing'", "else write '=='"
                )
            return Event.within(*self._gaps(left, op is ast.Is))
        if op in (ast.In, ast.NotIn):
            items = right.elts if isinstance(right, ast.List | ast.Tuple | ast.Set) else None
            terms = [self._term(item) for item in items or []]
            if items is None or any(term.columns for term in terms):
                raise self._refused(right, "'in' goes with a list of constants such as ['a', 'b']")
            return self._single(left, self._column(left), op, *(term.of({}) for term in terms))
        first, second = self._term(left), self._term(right)
        if not first.columns:
            (left, first), (right, second), op = (
                (right, second),
                (left, first),
                _MIRRORED.get(op, op),
            )
        if not first.columns:
            raise self._refused(left, "two constants are compared")
        if first.alone and not second.columns:
            return self._single(left, first.columns[0], op, second.of({}))
        kinds = {first.kind, second.kind}
        if kinds == {"date", "text"} and second.kind == "text":
            (moment,) = self._numbers(left, first.columns[0], [second.of({})])
            second, kinds = _Term("date", lambda _: moment), {"date"}
        if len(kinds) > 1:
            raise self._refused(left, f"a {first.kind} is compared with a {second.kind}")
        if kinds == {"label"} and op not in (ast.Eq, ast.NotEq):
            raise self._refused(left, "labels have no order", "compare them by '==' or '!='")

        def holds(cells: CellsOf) -> np.ndarray:
            with np.errstate(all="ignore"):
                a, b = np.asarray(first.of(cells)), np.asarray(second.of(cells))
                return np.asarray(_OPERATORS[op](a, b)).astype(bool) & (a == a) & (b == b)

        return Event(holds)

    def _single(self, node: ast.expr, column: Column, op: type, *constants: Any) -> Event:
        """A column beside constants."""
        equal = op in (ast.Eq, ast.NotEq, ast.In, ast.NotIn)
        if column.holds == "label" and not equal:
            raise self._refused(
                node, f"{column.name!r} holds labels", "compare them by '==' or 'in'"
            )
        numbers = self._numbers(node, column, constants)
        if equal:
            values = Values.of((number, number) for number in numbers)
            alone = constants[0] if op is ast.Eq else None
            return Event.within(column, ~values if op in (ast.NotEq, ast.NotIn) else values, alone)
        (end,) = numbers
        if op in (ast.Lt, ast.LtE):
            ends = -np.inf, end if op is ast.LtE else float(np.nextafter(end, -np.inf))
        else:
            ends = end if op is ast.GtE else float(np.nextafter(end, np.inf)), np.inf
        return Event.within(column, Values.of([ends]))

    # -- terms ----------------------------------------------------------------------------------

    def _term(self, node: ast.expr) -> _Term:
        """A term of a comparison."""
        op = getattr(node, "op", None)
        if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float):
            value = node.value
            if isinstance(value, str):
                return _Term("text", lambda _: value)
            if not abs(value) <= 1e300:
                raise self._refused(node, "a number is too large")
            return _Term("number", lambda _: value)
        if isinstance(node, ast.Name):
            column = self._column(node)
            return _Term(column.holds, lambda cells: _values(cells[column.name]), (column,), True)
        if isinstance(node, ast.UnaryOp) and isinstance(op, ast.USub | ast.UAdd):
            zero = _Term("number", lambda _: 0.0)
            of = operator.sub if isinstance(op, ast.USub) else operator.add
            return self._arithmetic(node, zero, of, self._term(node.operand))
        if isinstance(node, ast.BinOp) and type(op) in _OPERATORS:
            of = _OPERATORS[type(op)]
            return self._arithmetic(node, self._term(node.left), of, self._term(node.right))
        name = type(node if op is None else op).__name__
        raise self._refused(
            node, f"{name} is no part of the language of events", _CURES.get(name, "")
        )

    def _arithmetic(
        self, node: ast.expr, left: _Term, of: Callable[[Any, Any], Any], right: _Term
    ) -> _Term:
        """Of numbers, and of dates and days."""
        kinds, columns = (left.kind, right.kind), left.columns + right.columns
        if kinds == ("number", "number"):
            return _Term("number", lambda cells: of(left.of(cells), right.of(cells)), columns)
        if kinds == ("date", "date") and of is operator.sub:
            return _Term("number", lambda cells: of(left.of(cells), right.of(cells)) / DAY, columns)
        if kinds == ("date", "number") and of in (operator.add, operator.sub):
            return _Term("date", lambda cells: of(left.of(cells), DAY * right.of(cells)), columns)
        raise self._refused(node, f"a {left.kind} and a {right.kind} cannot be reckoned with so")

    def _column(self, node: ast.expr) -> Column:
        """The column that a node names."""
        if not isinstance(node, ast.Name):
            raise self._refused(node, "the name of a column is expected")
        ends = node.col_offset, node.end_col_offset or 0
        name = self.text[slice(*map(self._place, ends))].strip("`")
        column = self.columns.get(name)
        if column is None:
            begin = [other for other in self.columns if other.startswith(f"{name}-")]
            close = get_close_matches(name, self.columns, 3, 0.5) or begin or [*self.columns][:12]
            shown = [repr(n) if n.isidentifier() else f"`{n}`" for n in close]
            raise self._refused(node, f"there is no column {name!r}", f"{', '.join(shown)}?")
        if not column.modelled:
            raise self._refused(
                node, f"{name!r} is no part of the model", f"it is of kind {column.kind!r}"
            )
        self.named.add(column.name)
        return column

    def _gaps(self, node: ast.expr, gap: bool) -> tuple[Column, Values]:
        """A column and its gaps, or all of its values."""
        column = self._column(node)
        parts = [self.schema.parts[j] for j in self.schema.parts_of([column.name])]
        if gap and not any(part.gap for part in parts):
            cure = "fit it with schema=Schema.detect(table, model_gaps=True)"
            raise self._refused(
                node, f"the model does not know where {column.name!r} has gaps", cure
            )
        return column, Values((), gap=True) if gap else Values(LINE)

    def _numbers(self, node: ast.expr, column: Column, constants: Sequence[Any]) -> list[float]:
        """Constants as the numbers of a column; a level that was never seen has none."""
        what = {"number": "numbers", "date": "dates such as '2024-01-31'"}.get(
            column.holds, "labels"
        )
        if not constants:
            return []
        kind, table = KINDS[column.kind](column), {column.name: list(constants)}
        try:
            numbers = kind.numbers(self.schema.cells(table, partial=True)[column.name])
        except DataError:
            numbers = np.array([np.nan])
        if np.isnan(numbers).any():
            shown = ", ".join(map(repr, constants))[:60]
            raise self._refused(node, f"{column.name!r} holds {what}", f"{shown} is none")
        levels = [*map(str, (*column.levels, *column.tail))] if column.holds == "label" else []
        strange = [
            c for c, n in zip(constants, numbers, strict=True) if levels and n == len(levels)
        ]
        if strange:
            close = get_close_matches(str(strange[0]), levels, 3, 0.5) or levels[:3]
            words = f"{column.name!r} was never {strange[0]!r} in training; there is"
            warnings.warn(f"{words} {', '.join(map(repr, close))}", SelfnormWarning, stacklevel=2)
        return [float(n) for n in numbers if not levels or n < len(levels)]


def _values(cells: Cells) -> np.ndarray:
    """Numbers, seconds, or texts of labels; NaN at gaps."""
    if cells.kind != "label":
        return np.where(cells.missing, np.nan, cells.values)
    texts = np.array([*map(str, cells.labels), np.nan], dtype=object)
    return texts[np.where(cells.missing, -1, cells.values)]
