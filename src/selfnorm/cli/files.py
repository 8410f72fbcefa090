"""Tables in files: CSV, Parquet, NPY, NPZ; errors name the cell.

A :class:`Table` keeps every column as it came, so that an identifier column can travel from the
input to the scored output; its ``frame`` is what a :class:`~selfnorm.Schema` reads.
:func:`numeric` makes a float matrix of it and refuses missing cells, text and infinities by row and
column. Output is written whole or not at all.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import math
import os
import re
import shlex
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from io import StringIO
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from selfnorm._files import atomic
from selfnorm.columns import Cells, Schema, TableLike, numbers_from, unmarked
from selfnorm.columns import Table as Frame
from selfnorm.columns.text import is_gap, numbers_as_text
from selfnorm.errors import DataError, SelfnormWarning, listed, optional

TEXT = (".csv", ".tsv", ".txt")
SUFFIXES = (*TEXT, ".parquet", ".pq", ".npy", ".npz")


@dataclass(frozen=True)
class Table:
    """Named columns of equal length, as they were read.

    ``lines`` holds the line of each row in the file, where there are lines, so that an error can
    name the line an editor shows. ``named`` is false where the names were made up. ``arrow`` is the
    whole table, where it came from Parquet. ``style`` is what stands between cells and before
    decimals where it is written as CSV. Columns of text files are :class:`Cells`.
    """

    cells: Mapping[str, np.ndarray | Cells]
    source: str = "table"
    lines: np.ndarray | None = None
    named: bool = True
    arrow: Any = None
    style: tuple[str, str] = (",", ".")

    def array(self, name: str) -> np.ndarray:
        """A column as it was read: numbers, or an array of texts and other objects."""
        column = self.cells[name]
        if isinstance(column, Cells):
            return np.array(list(column.texts or ()), dtype=object)
        return column

    def numbers(self, name: str, *, marked: bool = False) -> np.ndarray | None:
        """The numbers of a column, NaN for gaps; ``None`` where it holds anything else.

        ``marked``: those with marks count as well (``$1,250.50``, ``12 %``).

        >>> Table({"a": np.array(["$1,250.50", "$20.00"])}).numbers("a", marked=True).tolist()
        [1250.5, 20.0]
        """
        column = self.cells[name]
        if isinstance(column, Cells) and column.numbers is not None:
            return column.numbers
        cells = self.array(name)
        if cells.dtype.kind in "biuf":
            return cells.astype(np.float64)
        texts = [_text(cell) for cell in cells.tolist()]
        if all(map(is_gap, texts)):
            return np.full(len(texts), np.nan)
        return numbers_from(unmarked(texts)[0] if marked else texts, names=True)

    def by_line(self, text: str) -> str:
        """Words of a schema, which counts rows from 0, with the line that an editor shows."""
        lines = self.lines
        if lines is None:
            return text
        return re.sub(r"\bin row (\d+)", lambda row: f"in line {lines[int(row[1])]}", text)

    def frame(self, names: Sequence[str] | None = None) -> Any:
        """The columns as they were read: an Arrow table, or a dict."""
        names = self.names if names is None else list(names)
        if self.arrow is not None:
            return self.arrow.select(names)
        return {name: self.cells[name] for name in names}

    def without_gaps(self, names: Sequence[str]) -> Any:
        """The same with texts that stand for a gap left out."""
        if self.arrow is not None:
            return self.frame(names)
        return {name: [None if is_gap(v) else v for v in self.array(name)] for name in names}

    def renamed(self, names: Sequence[str]) -> Table:
        """The same columns under other names, in their order."""
        arrow = None if self.arrow is None else self.arrow.rename_columns(list(names))
        return replace(self, cells=dict(zip(names, self.cells.values(), strict=True)), arrow=arrow)

    def added(self, columns: dict[str, np.ndarray]) -> Table:
        """The same table with further columns."""
        twice = [name for name in columns if name in self.cells]
        if twice:
            raise DataError(f"{self.source} has a column {twice[0]!r} already; rename it first")
        arrow = self.arrow
        for name, column in columns.items() if arrow is not None else ():
            arrow = arrow.append_column(name, [column])
        return replace(self, cells={**self.cells, **columns}, arrow=arrow)

    def __len__(self) -> int:
        return len(next(iter(self.cells.values()), ()))

    @property
    def names(self) -> list[str]:
        """Column names in order."""
        return list(self.cells)


def numeric(table: Table, columns: Sequence[str] | None = None) -> np.ndarray:
    """The ``(n, d)`` float64 matrix of the named columns (default: all), or a :class:`DataError`.

    The error names all columns that are absent, or those that hold text and the first row of each
    with a missing or infinite cell. Columns come in the order asked for, whatever their order in
    the file. A table without names (an array) is taken by position.
    """
    if columns is None:
        columns = table.names
    elif not table.named and len(table.cells) == len(columns):
        table = table.renamed(columns)
    absent = [name for name in columns if name not in table.cells]
    if absent:
        raise DataError(f"{table.source}: {missing(absent)}; the table has {listed(table.names)}")
    numbers = {name: table.numbers(name, marked=True) for name in columns}
    problems = [_no_numbers(table, name, column) for name, column in numbers.items()]
    if any(problems):
        raise DataError(f"{table.source}: {DataError.of([words for words in problems if words])}")
    return np.column_stack([column for column in numbers.values() if column is not None])


def missing(names: Sequence[str]) -> str:
    """Words on columns that are not there.

    >>> missing(["a"]), missing(["a", "b"])
    ("column 'a' is missing", "columns 'a', 'b' are missing")
    """
    are = "column {} is missing" if len(names) == 1 else "columns {} are missing"
    return are.format(listed(names))


def read_table(path: str | os.PathLike[str], header: bool | None = None) -> Table:
    """Read a table; the format follows from the suffix.

    ``header``: whether the first line of a text file holds names; ``None``: it is guessed.

    >>> import pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "t.csv"
    >>> _ = path.write_text("a,b\\n1,2\\n3,4\\n")
    >>> numeric(read_table(path)).tolist()
    [[1.0, 2.0], [3.0, 4.0]]
    """
    path = Path(path)
    if not path.exists():
        raise DataError(f"{path}: no such file")
    if path.is_dir():
        raise DataError(f"{path} is a folder, not a table ({', '.join(SUFFIXES)})")
    suffix = kind_of(path)
    if suffix not in SUFFIXES:
        raise DataError(
            f"{path}: unknown kind of table {suffix!r}; use one of {', '.join(SUFFIXES)}"
        )
    if path.is_file() and path.stat().st_size == 0:
        raise DataError(f"{path} is empty: it needs a header line and rows of numbers")
    if header is not None and suffix not in TEXT:
        raise DataError(f"{path}: --header and --no-header are for text, such as CSV")
    try:
        if suffix in (".npy", ".npz"):
            table = _read_numpy(path)
        elif suffix in (".parquet", ".pq"):
            table = _read_parquet(path)
        else:
            table = _read_csv(path, "\t" if suffix == ".tsv" else None, header)
    except (OSError, EOFError, zlib.error) as error:
        why = getattr(error, "strerror", None) or error
        raise DataError(f"cannot read {path}: {why}") from error
    if len(table) == 0:
        raise DataError(f"{path} has no rows: it needs at least one row of numbers")
    return table


def kind_of(path: Path) -> str:
    """The suffix of a table; that of text within ``.gz``, and ``.csv`` of a pipe without one.

    >>> kind_of(Path("a.CSV")), kind_of(Path("a.tsv.gz")), kind_of(Path("a.npy.gz"))
    ('.csv', '.tsv', '.gz')
    """
    suffix = path.suffix.lower()
    if suffix == ".gz" and Path(path.stem).suffix.lower() in TEXT:
        return Path(path.stem).suffix.lower()
    return ".csv" if not suffix and path.is_fifo() else suffix


def table_of(frame: TableLike, source: str = "table") -> Table:
    """A table of columns, of an Arrow table, a data frame or an array that a model gave."""
    held = Frame.of(frame)
    if held.kind == "array":
        return _from_array(held.frame, source, None)
    if held.kind == "arrow":
        return _from_arrow(held.frame, source)
    columns = {str(name): np.asarray(column) for name, column in held.columns.items()}
    for name, column in columns.items():  # NumPy would give nanoseconds as numbers
        moments = column.astype("datetime64[us]") if column.dtype.kind == "M" else column
        columns[name] = moments.astype(object)
    return Table(columns, source)


def write_table(table: Table, path: str | os.PathLike[str]) -> None:
    """Write a table whole or not at all; the format follows from the suffix."""
    path = check_output(path)
    writers: dict[str, Callable[[Table, Path], None]] = {
        **dict.fromkeys(TEXT, _write_csv),
        **dict.fromkeys((".parquet", ".pq"), _write_parquet),
        ".npy": lambda table, to: np.save(to, numeric(table)),
        ".npz": lambda table, to: np.savez(to, X=numeric(table), columns=np.array(table.names)),
    }
    try:
        with atomic(path) as part:
            writers[path.suffix.lower()](table, part)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}") from error


def check_output(
    path: str | os.PathLike[str], suffixes: Sequence[str] = SUFFIXES, source: Path | None = None
) -> Path:
    """Refuse an output that could not be written, or is the table read, before the work is done."""
    path = Path(path)
    if source is not None and path.exists() and source.exists() and path.samefile(source):
        raise DataError(f"{path} is the table that is read; name another file to write")
    if path.suffix.lower() not in suffixes:
        raise DataError(f"{path}: cannot write {path.suffix!r}; use one of {', '.join(suffixes)}")
    if path.is_dir():
        raise DataError(f"{path} is a folder; name a file to write")
    if not path.parent.is_dir():
        raise DataError(f"{path.parent}: no such folder; create it first")
    return path


# Text


_HEAD = 65_536  # characters by which a file is judged
_END = "\x1a"  # below the last line: part of a cell where a quote is open
_NOT_CLOSED = "a quote opened in line {} is not closed"
_COMMA = re.compile(r"\s*[+-]?(\d+|\d{1,3}(\.\d{3})+)(,\d+)?([eE][+-]?\d+)?\s*")
_POINT = re.compile(r"\s*[+-]?(\d+|\d{1,3}(,\d{3})+)(\.\d+)?\s*")
_SYMBOL = re.compile(r"\s?[$€£¥₹%]\s?")  # of an amount or a share
_SWAPPED = str.maketrans(".,", ",.")


@dataclass
class _Lines:
    """Lines of ``width`` cells with a mark between them, split when all are first needed."""

    rows: list[str]
    mark: str
    width: int

    @cached_property
    def cells(self) -> list[str]:
        return self.mark.join(self.rows).split(self.mark)


@dataclass
class _Texts(Sequence[str]):
    """The texts of one column."""

    lines: _Lines
    place: int

    def __len__(self) -> int:
        return len(self.lines.rows)

    def __getitem__(self, row: Any) -> Any:
        return self.lines.rows[row].split(self.lines.mark)[self.place]

    def __iter__(self) -> Iterator[str]:
        return iter(self.lines.cells[self.place :: self.lines.width])


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


def _cells(texts: Sequence[str], numbers: np.ndarray | None = None) -> Cells:
    """A column of texts, which hold these numbers where they are known."""
    form = {"dtype": "object", "held": "array"}
    return Cells.of_texts(texts, np.zeros(len(texts), dtype=bool), form, numbers)


def _read_csv(path: Path, delimiter: str | None, header: bool | None) -> Table:
    """Read a text file; what is ``None`` is guessed."""
    text = _decoded(path)
    mark = delimiter or _delimiter(text[:_HEAD])
    written = mark if delimiter is None else ","
    plain = _plain(text, mark)
    first, *others = [""] if plain is None else plain.split("\n")
    if others and header is not False and _are_names(first.split(mark)):
        with suppress(ValueError):  # not all of the cells are numbers
            numbers = np.loadtxt(others, delimiter=mark, comments=None, ndmin=2)
            body = _Lines(others, mark, first.count(mark) + 1)
            if numbers.shape == (len(others), body.width) and not np.isnan(numbers).any():
                names, _ = _names(path, _Rows([[cell] for cell in first.split(mark)], [1]), header)
                columns = enumerate(zip(names, numbers.T, strict=True))
                cells = {n: _cells(_Texts(body, j), column.copy()) for j, (n, column) in columns}
                return Table(cells, str(path), np.arange(2, len(others) + 2), style=(written, "."))
    try:
        rows = _parsed_rows(text, mark)
    except csv.Error as error:
        raise DataError(f"{path}: cannot be read as CSV: {error}") from None
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    names, named = _names(path, rows, header)
    if named:
        _drop_headers(path, rows, names)
    if not rows.lines:
        raise DataError(f"{path} has a header but no rows: it needs at least one row of numbers")
    texts = dict(zip(names, rows.columns, strict=True))
    pointed = _with_points(texts) if mark == ";" else None
    cells = {name: _cells(column) for name, column in (pointed or texts).items()}
    style = (written, "." if pointed is None else ",")
    table = Table(cells, str(path), np.array(rows.lines), named, style=style)
    if problems := _problems(rows, names):  # all of the cells are named with them
        problems += [table.by_line(problem) for problem in _problems_of(cells)]
        raise DataError(f"{path}: {DataError.of(problems)}")
    return table


def _problems_of(cells: Mapping[str, Cells]) -> tuple[str, ...]:
    """What a schema refuses in columns, the first thousand where there are more."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SelfnormWarning)
            Schema.detect(dict(islice(cells.items(), 1000)), missing=True)
    except DataError as error:
        return error.problems
    return ()


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
    return once and not all(is_gap(name) or _is_amount(name) for name in names)


def _parsed_rows(text: str, mark: str) -> _Rows:
    """The rows of a text, cut or filled to the width of the first one."""
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
    for column in (*rows.columns, rows.lines):
        for k in reversed([0, *again]):
            del column[k]  # type: ignore[attr-defined]


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

    words = [i for i, cell in enumerate(first) if not (_is_amount(cell) or is_gap(cell))]
    return all(map(is_gap, first)) or not all(map(stands_again, words))


def _warn(words: str) -> None:
    warnings.warn(words, SelfnormWarning, stacklevel=6)


def _is_number(cell: str) -> bool:
    """Whether Python reads a cell as a number."""
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _with_points(cells: dict[str, list[str]]) -> dict[str, list[str]] | None:
    """Decimal commas made points; ``None`` where there are none, or points beside them.

    A column of them may hold a few cells of something else, which stay as they are.

    >>> _with_points({"a": ["1.234,5", "", "2", "3,4x", "5"]})
    {'a': ['1234.5', '', '2', '3,4x', '5']}
    """
    seen = {name: [c for c in column if not is_gap(c)] for name, column in cells.items()}
    fitting = {name: [c for c in column if _has_comma(c)] for name, column in seen.items()}
    commas = {
        name
        for name, column in fitting.items()
        if any("," in c for c in column) and 2 * len(column) > len(seen[name])
    }
    points = any(
        any("." in c for c in column) and all(_is_number(c) for c in column)
        for name, column in seen.items()
        if name not in commas
    )
    if not commas or points:
        return None
    return cells | {name: list(map(_with_point, cells[name])) for name in commas}


def _with_commas(cells: list[str]) -> list[str]:
    """Amounts and shares as a file of decimal commas has them; other texts as they are."""
    if not any(_SYMBOL.search(cell) for cell in cells):
        return cells
    fit = [_POINT.fullmatch(_SYMBOL.sub("", cell)) is not None for cell in cells]
    if 2 * sum(fit) <= sum(not is_gap(cell) for cell in cells):
        return cells
    return [c.translate(_SWAPPED) if ok else c for c, ok in zip(cells, fit, strict=True)]


def _has_comma(cell: str) -> bool:
    """Whether a cell is a number whose decimals follow a comma, or has none; with marks or not."""
    return _COMMA.fullmatch(_SYMBOL.sub("", cell)) is not None


def _is_amount(cell: str) -> bool:
    """Whether a cell is a number, however its decimals, thousands and marks are written."""
    bare = _SYMBOL.sub("", cell)
    return _is_number(cell) or any(form.fullmatch(bare) for form in (_COMMA, _POINT))


def _with_point(cell: str) -> str:
    if not _has_comma(cell):
        return cell
    if _SYMBOL.search(cell):  # an amount keeps what parts its thousands
        return cell.translate(_SWAPPED)
    return cell.replace(".", "").replace(",", ".")


# Arrays and Parquet


def _read_numpy(path: Path) -> Table:
    try:
        with path.open("rb") as stream:  # np.load leaves a damaged archive open
            # pickled objects in a .npy could run code; they are never loaded
            loaded = np.load(stream, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                return _from_array(loaded, str(path), None)
            _refuse_repeated(loaded.files, path, "array")
            members = {key: loaded[key] for key in loaded.files}
            arrays = {k: a for k, a in members.items() if isinstance(a, np.ndarray)}
    except Exception as error:  # of NumPy, zipfile and zlib; a header may ask for any memory
        detail = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise DataError(f"{path} cannot be read as a numpy file: {detail}") from None
    if not arrays:
        raise DataError(f"{path} holds no array")
    tables = [key for key in arrays if key != "columns"]
    if "X" not in arrays and len(tables) != 1:
        raise DataError(f"{path} holds the arrays {tables}: name the one that is the table X")
    key = "X" if "X" in arrays else tables[0]
    return _from_array(arrays[key], f"{path}[{key}]", arrays.get("columns"))


def _from_array(array: np.ndarray, source: str, names: np.ndarray | None) -> Table:
    """The columns of an array ``(n, d)`` or ``(n,)``; made-up names where none fit."""
    array = array[:, None] if array.ndim == 1 else array
    if array.ndim != 2:
        raise DataError(f"{source}: expected rows and columns, got an array of shape {array.shape}")
    called, named = [f"x{i}" for i in range(array.shape[1])], False
    if names is not None and names.shape == array.shape[1:]:
        called, named = [str(name) for name in names], True
        _refuse_repeated(called, source)
    array = array.astype(np.float64) if array.dtype.kind in "bf" else array
    return Table(dict(zip(called, array.T, strict=True)), source, named=named)


def _read_parquet(path: Path) -> Table:
    pyarrow = _pyarrow()
    import pyarrow.parquet as parquet

    try:
        frame = parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as Parquet: {error}") from None
    _refuse_repeated(frame.column_names, path)
    return _from_arrow(frame, str(path))


def _from_arrow(frame: Any, source: str) -> Table:
    pyarrow = _pyarrow()
    types, cells = pyarrow.types, {}
    for name in frame.column_names:
        column = frame.column(name)
        kind = column.type
        if types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind):
            numbers = column.cast(pyarrow.float64(), safe=False).to_numpy(zero_copy_only=False)
            long = np.nanmax(np.abs(numbers), initial=0.0) >= 2**53
            cells[name] = np.array(column.to_pylist(), dtype=object) if long else numbers
        elif types.is_nested(kind):  # lists of one length would become several columns
            cells[name] = np.array([_text(cell) for cell in column.to_pylist()], dtype=object)
        else:
            try:
                cells[name] = np.array(column.to_pylist(), dtype=object)
            except (LookupError, ValueError, OverflowError) as error:
                raise DataError(
                    f"{source}: column {name!r} of type {kind} cannot be read "
                    f"({type(error).__name__}: {error}); write it as another type"
                ) from None
    return Table(cells, source, arrow=frame)


def _pyarrow() -> Any:
    words = 'reading or writing Parquet needs pyarrow: pip install "selfnorm[frames]"'
    return optional("pyarrow", words)


# Writing


def _write_csv(table: Table, path: Path) -> None:
    delimiter, decimal = table.style
    delimiter = "\t" if path.suffix.lower() == ".tsv" else delimiter
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, delimiter=delimiter, lineterminator="\n")
        writer.writerow(table.names)
        columns = [_texts(table.array(name)) for name in table.names]
        if decimal != ".":
            columns = [
                _with_commas(texts)
                if table.numbers(name) is None
                else [text.replace(".", decimal) for text in texts]
                for name, texts in zip(table.names, columns, strict=True)
            ]
        writer.writerows(zip(*columns, strict=True))


def _write_parquet(table: Table, path: Path) -> None:
    pyarrow = _pyarrow()
    import pyarrow.parquet as parquet

    if table.arrow is not None:
        parquet.write_table(table.arrow, path)
        return
    columns: dict[str, Any] = {}
    for name in table.names:
        cells, numbers = table.array(name).tolist(), table.numbers(name)
        if numbers is not None and numbers_from([_text(cell) for cell in cells]) is not None:
            columns[name] = numbers
        elif all(isinstance(cell, float | int | None) for cell in cells):
            columns[name] = pyarrow.array(cells)
        else:
            columns[name] = [_text(cell) for cell in cells]
    parquet.write_table(pyarrow.table(columns), path)


def _texts(cells: np.ndarray) -> list[str]:
    if cells.dtype.kind != "f":
        return [_text(cell) for cell in cells.tolist()]
    return ["" if text == "nan" else text for text in numbers_as_text(cells, None)]


def _text(cell: object) -> str:
    return "" if cell is None else str(cell)


def _refuse_repeated(names: Sequence[str], path: str | Path, what: str = "column") -> None:
    for name, times in Counter(names).items():
        if times > 1:
            raise DataError(f"{path}: {what} {name!r} appears twice; rename one")


def _place(table: Table, row: int) -> str:
    place = f"row {row + 1}"
    return place if table.lines is None else f"{place} (line {int(table.lines[row])})"


def _no_numbers(table: Table, name: str, column: np.ndarray | None) -> str:
    """What keeps a column from being finite numbers; empty where nothing does."""
    if column is not None:
        bad = ~np.isfinite(column)
        if not bad.any():
            return ""
        row = int(bad.argmax())
        bad &= np.isinf(column) == np.isinf(column[row])
        what = "missing value" if math.isnan(column[row]) else f"infinite value ({column[row]})"
        return (
            f"{what} in {_place(table, row)}, column {name!r}"
            f" ({int(bad.sum())} such cell(s)); remove the row or fill the cell in"
        )
    texts, _ = unmarked([_text(cell) for cell in table.array(name).tolist()])
    for row, text in enumerate(texts):
        if not is_gap(text) and not _is_number(text):
            cure = "drop the column or turn it into numbers"
            if "," in text and _is_number(text.replace(".", "").replace(",", "")):
                cure = "write numbers with a decimal point and without separators of thousands"
            return f"column {name!r} holds text ({text[:40]!r} in {_place(table, row)}); {cure}"
    return f"column {name!r} holds no numbers; drop the column"
