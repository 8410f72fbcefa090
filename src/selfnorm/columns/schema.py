"""What a table is: the kind of every column, coded rows of it, and the same table back."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from selfnorm._saved import saved
from selfnorm.columns.cells import Cells, Form, plain, unplain
from selfnorm.columns.detection import Detection, interpreted
from selfnorm.columns.frames import BY_PLACE, FRAMES, Table, TableLike, write
from selfnorm.columns.kinds import KINDS, Coded, Column, Part
from selfnorm.columns.kinds.aside import constant_cells
from selfnorm.columns.kinds.base import label_text, rows_in_words
from selfnorm.columns.kinds.date import as_dates, dates_as_text, dates_from, from_clock, to_clock
from selfnorm.columns.kinds.number import check_numbers, read_numbers, snap
from selfnorm.columns.kinds.sum import base_of, left_over
from selfnorm.columns.scan import Scan
from selfnorm.columns.shards import Shards, SourceLike
from selfnorm.columns.text import MISSING, marked, numbers_as_text, numbers_from
from selfnorm.errors import DataError, SelfnormWarning

SAY = "say what it is: kinds={name: kind}, --kinds name=kind at the command line"


@saved(
    arguments=lambda value: {"values": value.to_dict()},
    build=lambda kind, values: kind.from_dict(values),
)
class Schema:
    """The columns of a table, the measure of its rows, and the map to *coded rows* and back.

    :meth:`detect` reads it off a table: pandas or polars DataFrame, Arrow table, array ``(n, d)``
    or dict of columns. A row has ``p`` parts (:class:`Part`), one for a column, up to four for a
    date. Coded rows ``x (n, p, 2)`` hold a code and a number: codes below ``n_codes`` are levels
    and point masses, ``n_codes`` says that the number tells the value, ``-1`` is a gap, ``-2`` a
    value never seen.

    A week and a weekday, and where times are recorded an hour and the seconds within it, are the
    parts of a date: exact, and with the rules of the calendar in plain sight. Dates in a time zone
    are taken by its clocks where all are midnights, else by the one that most of them show, without
    its summer time. A date that follows an earlier column closely (drop-off after pick-up) is the
    time between the two.

    Probabilities are with respect to the measure that :attr:`fingerprint` names: counting measure
    on codes and cells, Lebesgue measure on continuous numbers. Each finite part reserves
    ``1 / (n + 2)`` for what was never seen.

    Example:
        >>> table = {"size": [0.5, 1.25, 2.0, None], "colour": ["red", "blue", "red", "red"]}
        >>> schema = Schema.detect(table)
        >>> [column.kind for column in schema.columns]
        ['cells', 'category']
        >>> x, extra = schema.encode(table)
        >>> x[:, 0].tolist()
        [[0.0, 0.5], [0.0, 1.25], [0.0, 2.0], [-1.0, 0.0]]
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
        frame: TableLike,
        kinds: Mapping[Any, str] | None = None,
        *,
        support: Mapping[Any, tuple[float | None, float | None]] | None = None,
        missing: Collection[str] | bool = (),
        model_gaps: bool = False,
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
            model_gaps: whether a gap is an outcome with a probability of its own, in columns that
                have any. Otherwise cells are missing at random, and gaps are left out of scores.
        """
        return cls._detected(Table.of(frame), kinds, support, missing, model_gaps)

    @classmethod
    def scan(
        cls,
        source: SourceLike | Shards | Scan,
        kinds: Mapping[Any, str] | None = None,
        *,
        support: Mapping[Any, tuple[float | None, float | None]] | None = None,
        missing: Collection[str] | bool = (),
        model_gaps: bool = False,
    ) -> Schema:
        """Read the schema off a table of any number of rows in files, in one pass.

        Of up to 262,144 rows it is that of :meth:`detect`. Of more, values of columns that take up
        to 16,384 of them are counted exactly; those of others, quantiles and relations between
        columns are read off a sample of as many rows.

        Args:
            source: Parquet or Arrow files: one, a list, a folder, or a glob; or a
                ``pyarrow.dataset.Dataset``.
            kinds, support, missing, model_gaps: as of :meth:`detect`.

        Example:
            >>> import pathlib, tempfile
            >>> import pyarrow as pa, pyarrow.parquet as pq
            >>> rows = pa.table({"size": [0.5, 1.25, 2.0, None], "colour": ["red", "blue"] * 2})
            >>> path = pathlib.Path(tempfile.mkdtemp()) / "rows.parquet"
            >>> pq.write_table(rows, path)
            >>> Schema.scan(path).fingerprint == Schema.detect(rows).fingerprint
            True
        """
        scan = source if isinstance(source, Scan) else Scan.of(Shards.of(source))
        table = Table.of(scan.table)
        return cls._detected(table, kinds, support, missing, model_gaps, scan.weights)

    @classmethod
    def _detected(
        cls,
        table: Table,
        kinds: Mapping[Any, str] | None,
        support: Mapping[Any, tuple[float | None, float | None]] | None,
        missing: Collection[str] | bool,
        model_gaps: bool,
        weights: Mapping[str, np.ndarray] | None = None,
    ) -> Schema:
        """The schema of a table, whose rows may stand for more."""
        texts = [missing] if isinstance(missing, str) else missing or ()
        gaps = MISSING if texts is True else frozenset(t.strip().lower() for t in texts)
        kinds, support = dict(kinds or {}), dict(support or {})
        choices = [*(name for name, kind in KINDS.items() if kind.stateable), "ignore"]
        _refuse(
            [
                f"{what} names the column {name!r}, which the table does not have"
                for what, names in (("kinds", kinds), ("support", support))
                for name in names
                if name not in table.columns
            ]
            + [
                f"kinds: {name!r} is {stated!r}; use one of {', '.join(choices)}"
                for name, stated in kinds.items()
                if stated not in choices
            ]
        )
        detection, problems = Detection(gaps, model_gaps), []
        for name in table.columns:
            stated = kinds.get(name)
            try:
                weight = (weights or {}).get(name)
                detection.add(name, table.cells(name), stated, support.get(name), weight)
            except DataError as error:
                if stated == "ignore":  # whatever it holds
                    detection.columns.append(Column(name, "ignored", form={"dtype": "unknown"}))
                else:
                    problems.append(str(error))
        _refuse(problems)
        if not detection.parts:
            raise DataError(
                "no column is left to model: "
                + "; ".join(detection.notes or ["all are ignored"])
                + f"; {SAY}"
            )
        aside = [repr(c.name) for c in detection.columns if c.kind == "identifier"]
        detection.tie({*kinds, *support})
        slips = list(detection.slips)
        if aside:
            slips.append(f"set aside as identifiers: {', '.join(aside)}; to keep one, {SAY}")
        for words in slips:
            warnings.warn(words, SelfnormWarning, stacklevel=3)
        return cls(detection.columns, detection.parts, table.kind, detection.notes, gaps)

    @cached_property
    def modelled(self) -> tuple[Column, ...]:
        """The columns that have parts, in the order that :attr:`Part.column` counts."""
        return tuple(column for column in self.columns if column.modelled)

    def parts_of(self, names: Sequence[Hashable], *, alone: bool = False) -> list[int]:
        """Indices of the parts of named columns.

        If they are to tell the values ``alone``, a column counted from others needs those as well.

        Example:
            >>> schema = Schema.detect({"a": [1.0, 2.5, 4.75], "b": ["x", "y", "x"]})
            >>> schema.parts_of(["b"])
            [1]
        """
        places = self._places
        _refuse([f"no column {name!r} in {list(places)}" for name in names if name not in places])
        for name in names if alone else ():
            column = next(column for column in self.modelled if column.name == name)
            needed = [self.columns[j].name for j in column.counted_from]
            if not {*needed} <= {*names}:
                words = f"{name!r} is counted from {', '.join(map(repr, needed))}"
                free = f", or fit with schema={{{name!r}: 'continuous'}}"
                raise DataError(f"{words}: name these as well{free if column.terms else ''}")
        return sorted(j for name in {*names} for j in places[name])

    @cached_property
    def _places(self) -> dict[Hashable, list[int]]:
        """Indices of the parts of each column that is modelled."""
        places: list[list[int]] = [[] for _ in self.modelled]
        for j, part in enumerate(self.parts):
            places[part.column].append(j)
        return {column.name: at for column, at in zip(self.modelled, places, strict=True)}

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
                column.terms or column.base,
                [(q.n_codes, q.rest, q.step, q.origin, q.unseen, q.values) for q in parts],
            ]
            for column in self.modelled
            for parts in [[self.parts[j] for j in self._places[column.name]]]
        ]
        text = json.dumps(measure, default=plain)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def is_gap(self, x: np.ndarray) -> np.ndarray:
        """``(n, p)``: where coded rows have no value, unknown or known to be a gap."""
        codes = np.array([part.gap_code for part in self.parts])
        return (x[..., 0] == -1) | (x[..., 0] == codes)

    def encode(self, frame: TableLike, *, partial: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Coded rows ``x (n, p, 2)``, and ``(n, p)`` the log-probability that a code leaves open.

        Columns are matched by name, those of an array by position. One warning names all that was
        never seen. The second array holds the log-frequency of a level within the tail,
        the log-density of a number never seen in a finite column, and 0 elsewhere: added to the
        log-likelihood of the codes it makes that of the rows.

        Args:
            frame: a table of any kind.
            partial: columns that the table does not have are gaps, rather than an error.
        """
        (rows,) = self.pieces(frame, None, partial=partial)
        return rows

    def pieces(
        self, frame: TableLike, n_rows: int | None, *, partial: bool = False
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The same as :meth:`encode`, ``n_rows`` rows at a time, and all where ``None``.

        Codes take three times the memory of the numbers that they stand for.
        """
        table, _, given, surprises = self._given(frame, partial)
        n = table.n_rows
        for start in range(0, n, n_rows or n):
            which = slice(start, min(n, start + (n_rows or n)))
            yield self._coded(given, which, surprises)
        if surprises:
            warnings.warn("; ".join(dict.fromkeys(surprises)), SelfnormWarning, stacklevel=3)

    def cells(self, frame: Any, *, partial: bool = False) -> dict[Hashable, Cells]:
        """The cells of a table by column, read as :meth:`encode` reads them; see there."""
        _, _, given, _ = self._given(frame, partial)
        return {self.columns[j].name: cells for j, cells in given.items()}

    def _given(
        self, frame: TableLike, partial: bool
    ) -> tuple[Table, dict[Hashable, Hashable], dict[int, Cells], list[str]]:
        """A table, its names of columns by ours, cells by the place of their column; surprises."""
        table = Table.of(frame)
        names, surprises = self._matched(table, partial)
        problems: list[str] = []
        given: dict[int, Cells] = {}
        for j, column in enumerate(self.columns):
            if column.name not in names or column.kind in ("identifier", "ignored"):
                continue
            try:
                cells = table.cells(names[column.name])
                given[j] = _as_column(column, cells, self.missing, surprises)
            except DataError as error:
                problems.append(str(error))
                continue
            base = None if column.base is None else given.get(column.base)
            if broken := KINDS[column.kind](column, base=base).broken(given[j]):
                surprises.append(broken)
        _refuse(problems)
        return table, names, given, surprises

    def _coded(
        self, given: dict[int, Cells], which: slice, surprises: list[str]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Codes and open log-probabilities of some rows."""
        shape = which.stop - which.start, len(self.parts)
        x, extra = np.zeros((*shape, 2)), np.zeros(shape)
        x[..., 0] = -1
        for j, cells in given.items():
            column = self.columns[j]
            if not column.modelled:
                continue
            if any(i not in given for i in column.counted_from):
                surprises.append(f"{column.name!r} is left out: what it is counted from is")
                continue
            base = base_of(column, {i: given[i].rows(which) for i in column.counted_from})
            coded = self._encoded_column(column, cells.rows(which), base, surprises)
            for i, of_part in zip(self._places[column.name], coded, strict=True):
                x[:, i, 0], x[:, i, 1], extra[:, i] = of_part.code, of_part.number, of_part.open
        return x, extra

    def _encoded_column(
        self, column: Column, cells: Cells, base: Cells | None, surprises: list[str]
    ) -> list[Coded]:
        """Codes and numbers of cells, for each part; ``base``: what they are counted from."""
        lost = np.zeros(len(cells), bool) if base is None else base.missing & ~cells.missing
        if lost.any():
            words = f"{column.name!r} is a gap where what it is counted from is"
            surprises.append(f"{words} ({lost.sum()})")
        parts = [self.parts[i] for i in self._places[column.name]]
        coded = KINDS[column.kind](column, parts, base, surprises).encode(cells)
        for part, of_part in zip(parts, coded, strict=True):
            unseen = np.flatnonzero(of_part.code == -2)
            if len(unseen):
                if column.terms and base is not None:
                    cells = left_over(cells, base, part.resolution)
                shown = _shown(column, cells, int(unseen[0]))
                rows = rows_in_words(len(unseen))
                surprises.append(f"{part.name!r} was never seen as {shown} ({rows})")
        # unknown, which is not the outcome that there is no value
        return [replace(of_part, code=np.where(lost, -1, of_part.code)) for of_part in coded]

    def _matched(self, table: Table, partial: bool) -> tuple[dict[Hashable, Hashable], list[str]]:
        """The names of the table's columns by the schema's, and what to warn of."""
        names = [column.name for column in self.columns]
        needed = [column.name for column in self.modelled]
        by_name = partial and table.kind not in BY_PLACE
        by_name = by_name and not set(names).isdisjoint(table.columns)
        nameless = table.kind in BY_PLACE or self.frame in BY_PLACE
        if nameless and not (by_name or set(needed) <= set(table.columns)):
            if len(table.columns) != len(names):
                raise DataError(
                    f"the table has {len(table.columns)} columns, expected {len(names)}"
                )
            return dict(zip(names, table.columns, strict=True)), []
        absent = [name for name in needed if name not in table.columns]
        if absent and (not partial or len(absent) == len(needed)):
            raise DataError(
                f"the table has no column {', '.join(map(repr, absent))}; it has "
                f"{list(table.columns)}"
            )
        own = {name: name for name in names if name in table.columns}
        other = [name for name in table.columns if name not in own]
        return own, [f"columns that were never seen are left out: {other}"] if other else []

    def within_seen(self, x: np.ndarray, given: np.ndarray | None = None) -> np.ndarray:
        """Drawn rows ``(n, p, 2)``, dates beyond those seen moved to the first or last of them.

        A week that was seen has days that were not. Parts ``given (n, p)`` stay as they are.
        """
        x = x.copy()
        for column in self.modelled:
            if column.holds != "date" or column.base is not None or not column.ends:
                continue
            places = self._places[column.name]
            ends = Cells("date", np.array(column.ends), np.zeros(2, bool), [], column.form)
            coded = self._encoded_column(column, ends, None, [])
            moments = self._decoded_column(column, x, None, np.random.default_rng(0))
            free = ~moments.missing if given is None else ~(moments.missing | given[:, places[0]])
            low, high = column.ends
            for k, beyond in enumerate((moments.values < low, moments.values > high)):
                for i, of_part in zip(places, coded, strict=True):
                    x[free & beyond, i] = of_part.code[k], of_part.number[k]
        return x

    def decode(
        self,
        x: ArrayLike,
        rng: np.random.Generator | int | None = 0,
        *,
        columns: Collection[Hashable] | None = None,
    ) -> Any:
        """The table of coded rows ``(n, p, 2)``: the names, types and kind of the one detected.

        A code ``-1`` or ``-2`` becomes a gap. A level of the tail is drawn by its frequency, with
        ``rng``; nothing else is random. Identifiers are left out, and are gaps in an array.

        Args:
            x: coded rows.
            rng: for the levels of tails.
            columns: names of those wanted; all by default.
        """
        return self.written(self.decoded(x, rng), columns)

    def written(
        self, made: Mapping[Hashable, Cells], columns: Collection[Hashable] | None = None
    ) -> Any:
        """The table of cells of columns, or of those that are named."""
        stored = _as_read if self.frame == "file" else _as_written
        wanted = made if columns is None else columns
        cells = {name: stored(cells) for name, cells in made.items() if name in wanted}
        return write(self.frame, cells)

    def fill(
        self, frame: TableLike, x: ArrayLike, rng: np.random.Generator | int | None = 0
    ) -> Any:
        """The same table, its gaps filled from coded rows ``(n, p, 2)``; all else as it was.

        Example:
            >>> table = {"a": [1.5, 2.25, None], "b": ["x", None, "y"]}
            >>> schema = Schema.detect(table)
            >>> x, _ = schema.encode(table)
            >>> x[1, 1], x[2, 0] = (0, 0), (0, 4.75)
            >>> schema.fill(table, x)
            {'a': [1.5, 2.25, 4.75], 'b': ['x', 'x', 'y']}
        """
        table, names, given, _ = self._given(frame, partial=False)
        place_of = {column.name: j for j, column in enumerate(self.columns)}
        draws = {}
        for name, new in self.decoded(x, rng, given).items():
            if name not in names:
                continue
            j, old = place_of[name], table.cells(names[name])
            gaps = given.get(j, old).missing & ~new.missing  # texts may stand for gaps
            if gaps.any():
                draws[names[name]] = gaps, self._like(old, self.columns[j], new, table.kind)
        return table.filled(draws)

    def _like(self, old: Cells, column: Column, new: Cells, kind: str) -> Cells:
        """Cells of a column of the schema as another table of some kind keeps them."""
        if not len(old.seen):  # of a file gaps alone say nothing of text
            new = _as_read(new) if self.frame == "file" else _as_written(new)
            if new.kind == old.kind and old.form["dtype"] != "object":
                return replace(new, form=old.form)
            return new if kind == self.frame else replace(new, form=_common_form(new))
        if old.kind != "label":
            new = _as_read(new)
            numbers = numbers_from([str(v) for v in new.labels], names=True)
            if new.kind == "label" and old.kind == "number" and numbers is not None:
                values = np.append(numbers, np.nan)[new.values]
                new = Cells("number", values, np.isnan(values), [])
        elif all(isinstance(label, str) for label in old.labels):
            style: dict[str, Any] = {"text": True, "text_decimals": column.decimals}
            style = {"template": "YYYY-MM-DD hh:mm:ss"} if new.kind == "date" else style
            new = _as_written(replace(new, form=style | new.form))
        elif new.kind == "number" and {*map(type, old.labels)} == {bool}:
            new = Cells("label", (new.values != 0).astype(np.int64), new.missing, [False, True])
        if new.kind != old.kind:
            kinds = {"number": "numbers", "date": "dates", "label": "labels"}
            raise DataError(
                f"column {column.name!r} holds {kinds[old.kind]}, but its gaps are to be filled "
                f"with {kinds[new.kind]}; give it the type that it had in training"
            )
        own = {label_text(label): label for label in old.labels}  # 1 for "1"
        labels = [own.get(label_text(label), label) for label in new.labels]
        return replace(new, labels=labels, form=old.form)

    def decoded(
        self,
        x: ArrayLike,
        rng: np.random.Generator | int | None = 0,
        given: Mapping[int, Cells] | None = None,
    ) -> dict[Hashable, Cells]:
        """The cells of all columns that coded rows tell; what is ``given`` comes first."""
        x = np.asarray(x, dtype=np.float64)
        if x.ndim != 3 or x.shape[1:] != (len(self.parts), 2):
            raise DataError(f"coded rows must have shape (n, {len(self.parts)}, 2), got {x.shape}")
        rng = np.random.default_rng(rng)
        made: dict[int, Cells] = {}

        def drawn(j: int) -> Cells:
            column = self.columns[j]
            return self._decoded_column(column, x, base_of(column, made), rng)

        def depth(j: int) -> int:
            return max((1 + depth(i) for i in self.columns[j].counted_from), default=0)

        modelled = [j for j, column in enumerate(self.columns) if column.modelled]
        modelled.sort(key=depth)  # a sum comes after its terms
        for j in modelled:
            made[j] = drawn(j)
        if given is not None:
            self._fit_to(given, made, drawn)
        for j, column in enumerate(self.columns):
            if column.kind == "duplicate" and column.base is not None:
                made[j] = replace(made[column.base], form=column.form)
            elif column.kind == "constant" or (self.frame in BY_PLACE and not column.modelled):
                made[j] = constant_cells(column, len(x))
        return {column.name: made[j] for j, column in enumerate(self.columns) if j in made}

    def _fit_to(
        self, given: Mapping[int, Cells], made: dict[int, Cells], drawn: Callable[[int], Cells]
    ) -> None:
        """Change cells ``made`` of columns counted from others so that they agree with those given.

        ``drawn``: the cells of a column by those that it is counted from.
        """
        counted = [j for j in made if self.columns[j].counted_from]
        fixed = {}
        for i in {i for j in counted for i in (j, *self.columns[j].counted_from)}:
            fixed[i] = ~given[i].missing
            made[i] = _where(fixed[i], given[i], made[i])
        while any(self._settle(j, drawn(j), made, fixed) for j in counted):
            pass
        for j in counted:
            made[j] = _where(fixed[j], made[j], drawn(j))

    def _decoded_column(
        self, column: Column, x: np.ndarray, base: Cells | None, rng: np.random.Generator
    ) -> Cells:
        """The cells of a column; ``base``: what it is counted from."""
        places = self._places[column.name]
        coded = [Coded(x[:, i, 0], x[:, i, 1], np.zeros(len(x))) for i in places]
        parts = [self.parts[i] for i in places]
        return KINDS[column.kind](column, parts, base, rng=rng).decode(coded)

    def _settle(
        self, j: int, drawn: Cells, made: dict[int, Cells], fixed: dict[int, np.ndarray]
    ) -> bool:
        """Of a column and what it is counted from, the only one not fixed becomes what fits.

        ``drawn`` are its cells by those it is counted from, and by the draw of what a sum leaves,
        or of how far dates are apart. Changes cells ``made`` and where they are ``fixed``, given or
        by what is; says whether anything followed.
        """
        column = self.columns[j]
        part = self.parts[self._places[column.name][0]]
        settled = False
        for i, factor in ((j, 1.0), *(column.terms or ((column.counted_from[0], 1.0),))):
            others = [fixed[k] for k in (j, *column.counted_from) if k != i]
            rows = np.all([~fixed[i], ~drawn.missing, *others], axis=0)
            if not rows.any():
                continue
            fit, of = drawn, self.columns[i]
            if i != j and of.numeric:
                values = made[i].values + (made[j].values - drawn.values) / factor
                values = values if of.decimals is None else np.round(values, of.decimals)
                if not (len(part.values) == 1 or of.counted_from):  # an exact sum leaves no choice
                    values = self._nearest(i, values)
                fit = replace(made[i], values=values)
            elif i != j:  # on the clock: days of a zone differ in length
                later = to_clock(column, made[j].values) - to_clock(column, drawn.values)
                fit = replace(made[i], values=from_clock(of, to_clock(of, made[i].values) + later))
            made[i], fixed[i] = _where(rows, fit, made[i]), fixed[i] | rows
            settled = True
        return settled

    def _nearest(self, j: int, numbers: np.ndarray) -> np.ndarray:
        """The possible values of a term that are closest to numbers ``(n,)``."""
        column = self.columns[j]
        if column.kind != "category":
            low, high = column.ends
            return np.clip(numbers, low, high)
        levels = np.unique([*column.levels, *column.tail])
        return np.asarray(levels[np.searchsorted((levels[1:] + levels[:-1]) / 2, numbers)])

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
        if saved["frame"] not in FRAMES:
            raise DataError(f"{saved['frame']!r} is no kind of table; known are {FRAMES}")
        columns = []
        for column in saved["columns"]:
            fields = _with_tuples(column) | {"name": unplain(column["name"])}
            fields |= {key: tuple(map(unplain, fields[key])) for key in ("levels", "tail")}
            columns.append(Column(**fields | {"terms": tuple(map(tuple, fields["terms"]))}))
        parts = [Part(**_with_tuples(part)) for part in saved["parts"]]
        return cls(columns, parts, saved["frame"], saved["notes"], saved["missing"])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schema) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        header = ["column", "kind", "type", "values", "gaps"]
        rows = [
            [str(c.name), c.kind, c.dtype, c.summary, f"{100 * c.gaps:.3g} %" if c.gaps else ""]
            for c in self.columns
        ]
        columns = [[name, *cells] for name, *cells in zip(header, *rows, strict=True)]
        if self.frame == "file":  # where all are texts
            del columns[2]
        wide = [[cell.ljust(max(map(len, column))) for cell in column] for column in columns]
        lines = ["  ".join(row).rstrip() for row in zip(*wide, strict=True)]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def __repr__(self) -> str:
        return f"<Schema of {len(self.columns)} columns, measure {self.fingerprint}>"


def _with_tuples(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a dataclass, of which JSON made lists."""
    return {key: tuple(v) if isinstance(v, list) else v for key, v in saved.items()}


def _shown(column: Column, cells: Cells, row: int) -> str:
    value = cells.values[row]
    if cells.kind == "label":
        return repr(cells.labels[value])
    if column.holds == "date":
        return str(to_clock(column, value).astype("datetime64[s]")).replace("T", " ")
    return f"{value:g}"


def _as_column(
    column: Column, cells: Cells, missing: Collection[str], surprises: list[str]
) -> Cells:
    """Cells as the column has them, whatever type they came in; gaps where that is a surprise."""
    if column.holds == "number":
        cells = read_numbers(column, cells, surprises)
        check_numbers(column.name, cells)
        return replace(cells, values=snap(cells.values, column.decimals))
    if column.holds == "date":
        return _as_dates(column, cells, missing)
    if cells.kind == "label":
        return cells.without_gaps(missing)
    distinct, places = np.unique(cells.values, return_inverse=True)
    labels = distinct.tolist()
    if cells.kind == "date":
        labels = [str(v).replace("T", " ") for v in distinct.astype("datetime64[s]")]
    return Cells("label", np.where(cells.missing, -1, places), cells.missing, labels, cells.form)


def _as_dates(column: Column, cells: Cells, missing: Collection[str]) -> Cells:
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


def _as_read(cells: Cells) -> Cells:
    """Numbers and dates that the table keeps as text, of the types that they are."""
    form = cells.form
    if cells.kind == "number" and "text" in form:
        return replace(cells, form={"dtype": "int64" if form["text_decimals"] == 0 else "float64"})
    if cells.kind == "date" and "template" in form:
        return replace(cells, form={"dtype": "datetime64[s]"})
    return cells


def _as_written(cells: Cells) -> Cells:
    """Numbers and dates that the table keeps as text, as text again; gaps as it writes them."""
    form = cells.form
    if cells.kind != "label" and ("text" in form or "template" in form):
        distinct, places = np.unique(cells.values, return_inverse=True)
        if "text" in form:
            labels = numbers_as_text(np.nan_to_num(distinct), form["text_decimals"])
            labels = [marked(label, form) for label in labels]
        else:
            labels = dates_as_text(distinct, form["template"])
        cells = Cells("label", np.where(cells.missing, -1, places), cells.missing, labels, form)
    if cells.kind == "label" and "gap" in form and cells.missing.any():
        places = np.where(cells.missing, len(cells.labels), cells.values)
        none = np.zeros(len(cells), dtype=bool)
        return Cells("label", places, none, [*cells.labels, form["gap"]], form)
    return cells


def _common_form(cells: Cells) -> Form:
    """A form for tables of every kind."""
    if cells.kind == "label":
        return {"dtype": "object"}
    if cells.kind == "date":
        return {"dtype": "datetime64[s]"}
    integers = (cells.seen == np.round(cells.seen)).all()
    return {"dtype": "int64" if integers and not cells.missing.any() else "float64"}


def _where(rows: np.ndarray, cells: Cells, others: Cells) -> Cells:
    """Numbers or dates: cells in the rows of a mask, others elsewhere."""
    values = np.where(rows, cells.values, others.values)
    return replace(others, values=values, missing=np.where(rows, cells.missing, others.missing))


def _refuse(problems: Sequence[str]) -> None:
    """Raise what is wrong, all of it at once."""
    if problems:
        raise DataError.of(problems)
