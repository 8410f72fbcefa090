"""A column of a schema, its parts, and what every kind of column says of itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import numpy as np

from selfnorm._saved import saved
from selfnorm.columns.cells import Cells
from selfnorm.columns.values import LINE, PartValues, Values
from selfnorm.errors import DataError

Support = tuple[float | None, float | None]


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

    name: Hashable
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

    def __post_init__(self) -> None:
        if re.match(r"[<>|]?[SU]\d{7}", self.form.get("dtype", "")):  # of a stranger's file, say
            raise DataError(f"column {self.name!r}: cells of type {self.dtype} are too wide")

    @property
    def modelled(self) -> bool:
        """Whether the column has parts of its own."""
        return KINDS[self.kind].modelled

    @property
    def holds(self) -> str:
        """What its cells are: ``"number"``, ``"date"`` or ``"label"``."""
        if self.numeric:
            return "number"
        return "date" if self.resolution else "label"

    @property
    def counted_from(self) -> tuple[int, ...]:
        """Indices of the columns without which the parts do not tell the value."""
        own = () if self.base is None else (self.base,)
        return tuple(j for j, _ in self.terms) or own

    @property
    def dtype(self) -> str:
        """The type of the column in its table."""
        return str(self.form["dtype"])


@saved()
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

    def numbers(self, code: np.ndarray, number: np.ndarray) -> np.ndarray:
        """The numbers that codes, and those beside them, stand for; NaN where there is none.

        Example:
            >>> part = Part(0, "a", 1, rest=True, values=(5.0,))
            >>> part.numbers(np.array([0.0, 1.0, -1.0]), np.array([0.0, 2.5, 0.0]))
            array([5. , 2.5, nan])
        """
        values = np.array([*self.values, np.nan])
        places = np.where((code >= 0) & (code < len(self.values)), code, -1).astype(np.int64)
        return np.where(self.rest & (code == self.n_codes), number, values[places])

    @property
    def gap_code(self) -> int:
        """The code of a gap: its own, or -1, which says that nothing is known."""
        return self.n_codes - 1 if self.gap else -1


@dataclass(frozen=True)
class Coded:
    """The cells of one part.

    Attributes:
        code: codes of :class:`Part`, -1 for a gap, -2 for a value never seen.
        number: the numbers beside them, 0 where there is none.
        open: log-probabilities that the codes leave open.
    """

    code: np.ndarray
    number: np.ndarray
    open: np.ndarray


@dataclass
class Draft:
    """A column whose kind is being read off.

    Attributes:
        column: what is known so far.
        cells: its cells.
        values: its distinct values, ascending.
        counts: how often each of them comes.
        stated: the kind that a user says; ``None``: by the rules.
        support: limits that a user states.
        place: index among the modelled columns.
        earlier: columns before it that are modelled, by index, and their cells.
        notes: findings that a user should know of.
    """

    column: Column
    cells: Cells
    values: np.ndarray
    counts: np.ndarray
    stated: str | None
    support: Support | None
    place: int
    earlier: Mapping[int, tuple[Column, Cells]]
    notes: list[str]

    @property
    def labels(self) -> list[Any]:
        """The distinct values as Python objects."""
        if self.cells.kind == "label":
            return [self.cells.labels[i] for i in self.values]
        return list(self.values.tolist())


@dataclass
class Kind:
    """What a column can be: how it is read off, and its cells coded and decoded.

    Attributes:
        column: the column.
        parts: what it is modelled by.
        base: cells of what it is counted from.
        surprises: what a user should be warned of, added to by :meth:`encode`.
        rng: for what :meth:`decode` draws.
        modelled: whether it has parts.
        stateable: whether a user may say that a column is of this kind.
        adds: whether its numbers may be terms of a sum.
        holds: the kind of cells that a user who states it must give; ``None``: any but dates.
    """

    column: Column
    parts: Sequence[Part] = ()
    base: Cells | None = None
    surprises: list[str] = field(default_factory=list)
    rng: np.random.Generator = field(default_factory=np.random.default_rng)

    modelled: ClassVar[bool] = True
    stateable: ClassVar[bool] = True
    adds: ClassVar[bool] = True
    holds: ClassVar[str | None] = None

    @classmethod
    def detect(cls, draft: Draft) -> tuple[Column, list[Part]]:
        """The column and its parts, as read off a draft."""
        raise NotImplementedError

    def encode(self, cells: Cells) -> list[Coded]:
        """Cells as codes and numbers, for each part."""
        raise NotImplementedError

    def decode(self, coded: Sequence[Coded]) -> Cells:
        """Cells of the codes and numbers of all parts."""
        raise NotImplementedError

    def numbers(self, cells: Cells) -> np.ndarray:
        """Cells as the numbers that :class:`Values` are of; NaN at gaps."""
        return np.where(cells.missing, np.nan, cells.values)

    def within(self, values: Values) -> tuple[list[PartValues], bool]:
        """What :class:`Values` leave of each part, and whether they leave nothing but themselves.

        Without an answer of its own, a kind leaves all of it.
        """
        every = [PartValues(np.ones(p.n_codes, bool), LINE if p.rest else ()) for p in self.parts]
        return every, values == Values(LINE, gap=True)

    def coordinate(self, numbers: Sequence[np.ndarray]) -> np.ndarray:
        """One number a row for figures, of those of all parts."""
        return numbers[0]

    def broken(self, cells: Cells) -> str:  # noqa: ARG002
        """What a column without parts would not give back of cells; empty if it is nothing."""
        return ""


KINDS: dict[str, type[Kind]] = {}
C = TypeVar("C", bound=type[Kind])


def register(*names: str) -> Callable[[C], C]:
    """A class of columns under the names that :attr:`Column.kind` has for it."""

    def added(kind: C) -> C:
        KINDS.update(dict.fromkeys(names, kind))
        return kind

    return added


def rows_in_words(n: int) -> str:
    """A number of rows in words."""
    return "1 row" if n == 1 else f"{n} rows"


def label_text(label: object) -> str:
    """A label as text; whole floats as whole numbers, so that 1 and 1.0 are the same."""
    return f"{label:.0f}" if isinstance(label, float) and label.is_integer() else str(label)


def kept_for_unseen(n: int) -> float:
    """Probability that the next of ``n + 1`` cells is something new, by Laplace's rule."""
    return 1 / (n + 2)
