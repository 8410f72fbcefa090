"""Text of CSV files: what stands between its cells, its rows with their lines, and its names."""

from __future__ import annotations

import codecs
import csv
import gzip
import re
import shlex
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from io import StringIO
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from selfnorm.columns import MISSING, Cells
from selfnorm.errors import DataError, SelfnormWarning

_HEAD = 65_536  # characters by which a file is judged
_END = "\x1a"  # below the last line: part of a cell where a quote is open
_NOT_CLOSED = "a quote opened in line {} is not closed"
_COMMA = re.compile(r"\s*[+-]?(\d+|\d{1,3}(\.\d{3})+)(,\d+)?([eE][+-]?\d+)?\s*")
_POINT = re.compile(r"\s*[+-]?(\d+|\d{1,3}(,\d{3})+)(\.\d+)?\s*")
_SYMBOL = re.compile(r"\s?[$€£¥₹%]\s?")  # of an amount or a share
_SWAPPED = str.maketrans(".,", ",.")


@dataclass(frozen=True)
class Content:
    """What a text file holds.

    Attributes:
        cells: columns of text by name.
        numbers: the same, of a file of numbers alone.
        lines: the line of each row.
        named: whether the first line holds the names.
        style: what stands between cells, and before decimals.
        problems: what is wrong with its names and lines.
    """

    cells: Mapping[str, np.ndarray]
    numbers: dict[str, Cells]
    lines: np.ndarray
    named: bool
    style: tuple[str, str]
    problems: list[str]


class _NumberRows:
    """Rows of numbers, whose texts are split when they are first needed.

    Args:
        rows: lines of numbers.
        mark: what stands between cells.
        width: number of cells of each row.
    """

    def __init__(self, rows: list[str], mark: str, width: int) -> None:
        self.rows, self.mark = rows, mark
        self.numbers = np.loadtxt(rows, delimiter=mark, comments=None, ndmin=2)
        if self.numbers.shape != (len(rows), width) or np.isnan(self.numbers).any():
            raise ValueError("a line of another width")

    @cached_property
    def columns(self) -> list[list[str]]:
        cells = self.mark.join(self.rows).split(self.mark)
        width = self.numbers.shape[1]
        return [cells[j::width] for j in range(width)]

    def cells(self, j: int) -> Cells:
        missing = np.zeros(len(self.rows), dtype=bool)
        form = {"dtype": "object", "held": "array"}
        return Cells.of_texts(_Texts(self, j), missing, form, self.numbers[:, j].copy())


class _Texts(Sequence[str]):
    """The texts of one column of numbers."""

    def __init__(self, source: _NumberRows, j: int) -> None:
        self.source, self.j = source, j

    def __len__(self) -> int:
        return len(self.source.rows)

    def __getitem__(self, row: Any) -> Any:
        return self.source.rows[row].split(self.source.mark)[self.j]

    def __iter__(self) -> Iterator[str]:
        return iter(self.source.columns[self.j])


class LazyColumns(Mapping[str, np.ndarray]):
    """Columns by name, each made when it is first read."""

    def __init__(self, names: Iterable[str], make: Callable[[str], np.ndarray]) -> None:
        self._columns: dict[str, np.ndarray | None] = dict.fromkeys(names)
        self._make = make

    def __getitem__(self, name: str) -> np.ndarray:
        column = self._columns[name]
        if column is None:
            column = self._columns[name] = self._make(name)
        return column

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)


@dataclass
class _Rows:
    """Rows by column, cut or filled to the width of the first one.

    Attributes:
        columns: cells of the columns.
        lines: the line of each row.
        widths: number of cells of rows that have another one, by line.
        opened: of rows of several lines: where the quote was opened, by line.
    """

    columns: list[list[str]]
    lines: list[int]
    widths: dict[int, int] = field(default_factory=dict)
    opened: dict[int, int] = field(default_factory=dict)

    @property
    def first(self) -> list[str]:
        """Cells of the first row."""
        return [column[0] for column in self.columns]

    def like_first(self, k: int) -> bool:
        """Whether a row is the first one again."""
        same = all(column[k] == column[0] for column in self.columns)
        return same and self.lines[k] not in self.widths

    def without(self, rows: Sequence[int]) -> None:
        """Leave out rows."""
        for column in (*self.columns, self.lines):
            for k in reversed(rows):
                del column[k]  # type: ignore[attr-defined]


def read_csv(path: Path, delimiter: str | None, header: bool | None) -> Content:
    """Read a text file.

    Args:
        path: the file; packed where its name ends in ``.gz``.
        delimiter: what stands between cells; ``None``: it is guessed.
        header: whether the first line holds names; ``None``: it is guessed.
    """
    text = _decoded(path)
    mark = delimiter or _delimiter(text[:_HEAD])
    style = mark if delimiter is None else ","
    plain = _plain(text, mark)
    first, *others = [""] if plain is None else plain.split("\n")
    if others and header is not False and _are_names(first.split(mark)):
        with suppress(ValueError):  # not all of the cells are numbers
            body = _NumberRows(others, mark, first.count(mark) + 1)
            names, _ = _names(path, _Rows([[cell] for cell in first.split(mark)], [1]), header)
            numbers = {name: body.cells(j) for j, name in enumerate(names)}
            lines = np.arange(2, len(body.rows) + 2)
            texts = LazyColumns(names, lambda name: as_array(numbers[name].texts))
            return Content(texts, numbers, lines, True, (style, "."), [])
    try:
        rows = _parsed_rows(text, mark) if plain is None else _split(plain, mark)
    except csv.Error as error:
        raise DataError(f"{path}: cannot be read as CSV: {error}") from None
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    names, named = _names(path, rows, header)
    if named:
        _drop_headers(path, rows, names)
    if not rows.lines:
        raise DataError(f"{path} has a header but no rows: it needs at least one row of numbers")
    cells = dict(zip(names, map(as_array, rows.columns), strict=True))
    pointed = with_points(cells) if mark == ";" else None
    decimal = "." if pointed is None else ","
    lines, problems = np.array(rows.lines), _problems(rows, names)
    return Content(pointed or cells, {}, lines, named, (style, decimal), problems)


def as_array(texts: Iterable[str] | None) -> np.ndarray:
    """An array of texts."""
    return np.array(list(texts or ()), dtype=object)


def _decoded(path: Path) -> str:
    content = path.read_bytes()
    if path.suffix.lower() == ".gz":
        content = gzip.decompress(content)
    # spreadsheets write "Unicode text" so, with a mark
    utf16 = content[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    try:
        text = content.decode("utf-16" if utf16 else "utf-8-sig")
    except UnicodeDecodeError as error:
        name, to = shlex.quote(path.name), shlex.quote(f"utf8_{path.name}")
        raise DataError(
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8, "
            f"for example: iconv -f latin1 -t utf-8 {name} > {to}"
        ) from None
    if not text[:_HEAD].strip():
        raise DataError(f"{path} is empty: it needs a header line and rows of numbers")
    if "\0" in text[:_HEAD]:
        raise DataError(f"{path} is not a text table (it holds zero bytes)")
    return text


def _delimiter(head: str) -> str:
    line = head.lstrip("\n\r").split("\n", 1)[0]
    bare = re.sub(r'"[^"]*"', "", line)  # a mark within quotes is part of a name
    if ";" in bare and all(_COMMA.fullmatch(cell) for cell in bare.split(";")):
        return ";"  # numbers with decimal commas, and no names above them
    counts = {mark: bare.count(mark) for mark in (",", ";", "\t")}
    best = max(counts, key=lambda mark: counts[mark])
    return best if counts[best] else ","


def _plain(text: str, mark: str) -> str | None:
    """A text without carriage returns, if it has no quotes, and no blanks before cells."""
    before = (f"{mark} ", "\n ", "\r ")
    if '"' in text or (" " in text and (text[0] == " " or any(b in text for b in before))):
        return None
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text.rstrip("\n")


def _are_names(cells: list[str]) -> bool:
    """Whether cells can only be names: of text, each once."""
    names = [cell.strip() for cell in cells]
    once = len({*names}) == len(names) and all(names[1:])
    return once and not all(is_missing(name) or _is_amount(name) for name in names)


def _split(text: str, mark: str) -> _Rows:
    """The rows of a plain text."""
    lines = text.split("\n")
    kept = [k for k, row in enumerate(lines) if mark in row or row.strip()]
    return _columns([lines[k].split(mark) for k in kept], [k + 1 for k in kept], {})


def _parsed_rows(text: str, mark: str) -> _Rows:
    """The rows of any text."""
    stream = chain(StringIO(text, newline=""), [_END])
    reader = csv.reader(stream, delimiter=mark, skipinitialspace=True)
    rows, lines, first = [], [], 1
    opened = {}
    try:
        for row in reader:
            if row and (len(row) > 1 or row[0].strip()):  # blank lines are no rows
                rows.append(row)
                lines.append(reader.line_num)
                if reader.line_num > first:
                    opened[reader.line_num] = first
            first = reader.line_num + 1
    except csv.Error:
        if reader.line_num > first:
            raise DataError(_NOT_CLOSED.format(first)) from None
        raise
    if rows.pop() != [_END]:
        raise DataError(_NOT_CLOSED.format(opened[lines[-1]]))
    lines.pop()
    return _columns(rows, lines, opened)


def _columns(rows: list[list[str]], lines: list[int], opened: dict[int, int]) -> _Rows:
    while len(rows) > 1 and not any(cell.strip() for cell in rows[-1]):  # spreadsheets leave some
        rows.pop()
        lines.pop()
    width = len(rows[0])
    widths = {k: len(row) for k, row in zip(lines, rows, strict=True) if len(row) != width}
    if widths:
        rows = [row[:width] + [""] * (width - len(row)) for row in rows]
    return _Rows([list(column) for column in zip(*rows, strict=True)], lines, widths, opened)


def _names(path: Path, rows: _Rows, header: bool | None) -> tuple[list[str], bool]:
    """The names of the columns, and whether they stand in the first line."""
    named = _has_names(rows) if header is None else header
    names = [f"x{i}" for i in range(len(rows.columns))]
    if named:
        names = [cell.strip() for cell in rows.first]
    if not names[0] and any(names):  # of the rows, as data frames are written
        names[0] = "Unnamed: 0"  # as pandas reads it
        _warn(f"{path}: column 1 has no name: called {names[0]!r}")
    line = rows.lines[0]
    if header is None and not named:
        _warn(
            f"{path} seems to have no header: line {line} is data, and the columns are called "
            f"{listed(names, most=2)}; --header takes it as names, --no-header is sure of it"
        )
    elif header is None and any(map(_is_amount, names)):
        _warn(
            f"{path}: line {line} is taken as names, of which some are numbers; --no-header takes "
            "it as data, --header is sure of the names"
        )
    return names, named


def _drop_headers(path: Path, rows: _Rows, names: list[str]) -> None:
    """Leave out the line of the names, and where it stands again."""
    again: list[int] = []
    repeated = not all(map(_is_amount, names))  # numbers may be data as well
    if repeated and rows.columns[0].count(rows.columns[0][0]) > 1:
        again = [k for k in range(1, len(rows.lines)) if rows.like_first(k)]
    if again:  # tables put one below the other
        shown = ", ".join(str(rows.lines[k]) for k in again[:3]) + ", ..." * (len(again) > 3)
        _warn(f"{path}: the header stands again in line {shown}; left out")
    rows.without([0, *again])


def _problems(rows: _Rows, names: list[str]) -> list[str]:
    """What is wrong with the names and the lines."""
    places: dict[str, int] = {}
    problems = [
        f"column {name!r} appears twice; rename one"
        for i, name in enumerate(names)
        if name and places.setdefault(name, i) < i
    ]
    problems += [
        f"column {i} has no name in the header; give it one"
        for i, name in enumerate(names, 1)
        if not name
    ]
    for line in rows.lines if rows.widths else ():
        if line in rows.widths:
            open_ = _NOT_CLOSED.format(rows.opened.get(line))
            why = f": it seems that {open_}" if line in rows.opened else ""
            n = rows.widths[line]
            problems.append(f"line {line} has {n} cells, the header has {len(names)}{why}")
    return problems


def _has_names(rows: _Rows) -> bool:
    """A guess whether the first line holds names: text unlike the other cells of its column.

    Digits do not matter: a date, an amount or a code is like the others. Numbers and gaps are no
    names, unless they count the columns, as pandas does where it knows no names.

    >>> _has_names(_Rows([["5.1", "4.9", "?"], ["red", "blue", "red"]], [1, 2, 3]))
    False
    >>> _has_names(_Rows([["town", "Rome"], ["2019", "4.5"]], [1, 2]))
    True
    """
    first = [cell.strip() for cell in rows.first]
    filled = [cell for cell in first if cell]
    if len(first) > 2 and filled == [str(i) for i in range(len(filled))]:
        return True

    def stands_again(i: int) -> bool:
        like = re.compile(re.sub(r"\d+", r"\\d+", re.escape(first[i])))
        literal = max(re.split(r"\d+", first[i]), key=len)
        near = [k for k, cell in enumerate(rows.columns[i]) if literal in cell]
        alike = (k for k in near if like.fullmatch(rows.columns[i][k].strip()))
        return any(not rows.like_first(k) for k in alike)  # a header may stand again

    words = [i for i, cell in enumerate(first) if not (_is_amount(cell) or is_missing(cell))]
    return all(map(is_missing, first)) or not all(map(stands_again, words))


def _warn(words: str) -> None:
    warnings.warn(words, SelfnormWarning, stacklevel=6)


# Cells


def is_missing(cell: object) -> bool:
    """Whether a cell is empty, or a text that stands for a gap."""
    return str(cell).strip().lower() in MISSING


def is_number(cell: Any) -> bool:
    """Whether Python reads a cell as a number."""
    try:
        float(cell)
    except (TypeError, ValueError):
        return False
    return True


def listed(names: Sequence[str], most: int = 12) -> str:
    """The first of some names.

    >>> listed(["a", "b", "c"], most=2)
    "'a', 'b' and 1 more"
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more


def with_points(cells: dict[str, np.ndarray]) -> dict[str, np.ndarray] | None:
    """Decimal commas made points; ``None`` where there are none, or points beside them.

    A column of them may hold a few cells of something else, which stay as they are.

    >>> cells = {"a": np.array(["1.234,5", "", "2", "3,4x", "5"], dtype=object)}
    >>> with_points(cells)["a"].tolist()
    ['1234.5', '', '2', '3,4x', '5']
    """
    seen = {name: [c for c in column if not is_missing(c)] for name, column in cells.items()}
    fitting = {name: [c for c in column if _has_comma(c)] for name, column in seen.items()}
    commas = {
        name
        for name, column in fitting.items()
        if any("," in c for c in column) and 2 * len(column) > len(seen[name])
    }
    points = any(
        any("." in c for c in column) and all(is_number(c) for c in column)
        for name, column in seen.items()
        if name not in commas
    )
    if not commas or points:
        return None
    made = dict(cells)
    for name in commas:
        made[name] = np.array([_with_point(cell) for cell in cells[name]], dtype=object)
    return made


def with_commas(cells: list[str]) -> list[str]:
    """Amounts and shares as a file of decimal commas has them; other texts as they are."""
    if not any(_SYMBOL.search(cell) for cell in cells):
        return cells
    fit = [_POINT.fullmatch(_SYMBOL.sub("", cell)) is not None for cell in cells]
    if 2 * sum(fit) <= sum(not is_missing(cell) for cell in cells):
        return cells
    return [c.translate(_SWAPPED) if ok else c for c, ok in zip(cells, fit, strict=True)]


def _has_comma(cell: str) -> bool:
    """Whether a cell is a number whose decimals follow a comma, or has none; with marks or not."""
    return _COMMA.fullmatch(_SYMBOL.sub("", cell)) is not None


def _is_amount(cell: str) -> bool:
    """Whether a cell is a number, however its decimals, thousands and marks are written."""
    bare = _SYMBOL.sub("", cell)
    return is_number(cell) or any(form.fullmatch(bare) for form in (_COMMA, _POINT))


def _with_point(cell: str) -> str:
    if not _has_comma(cell):
        return cell
    if _SYMBOL.search(cell):  # an amount keeps what parts its thousands
        return cell.translate(_SWAPPED)
    return cell.replace(".", "").replace(",", ".")
