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
import struct
import tempfile
import tokenize
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from io import BytesIO, TextIOWrapper
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from selfnorm.columns import MISSING, Schema, numbers_from, unmarked
from selfnorm.errors import DataError, SelfnormWarning

TEXT = (".csv", ".tsv", ".txt")
SUFFIXES = (*TEXT, ".parquet", ".pq", ".npy", ".npz")


@dataclass(frozen=True)
class Table:
    """Named columns of equal length; a column is float64 (missing = nan) or text.

    ``lines`` holds the line of each row in the file, where there are lines, so that an error can
    name the line an editor shows. ``named`` is false where the names were made up. ``cells`` holds
    columns as they were read, where a float might say less (007, 2**60 + 1): for passing them on;
    ``arrow`` the whole table, where it came from Parquet. ``style`` is what stands between cells
    and before decimals where it is written as CSV.
    """

    columns: Mapping[str, np.ndarray]
    source: str = "table"
    lines: np.ndarray | None = None
    named: bool = True
    cells: dict[str, np.ndarray] = field(default_factory=dict)
    arrow: Any = None
    style: tuple[str, str] = (",", ".")

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
        return {name: self.as_read(name) for name in names}

    def as_read(self, name: str) -> np.ndarray:
        """The cells of a column as they were read."""
        return self.cells[name] if name in self.cells else self.columns[name]

    def without_gaps(self, names: Sequence[str]) -> Any:
        """The same with texts that stand for a gap left out."""
        frame = self.frame(names)
        if not isinstance(frame, dict):
            return frame
        return {
            name: [None if _is_missing(cell) else cell for cell in column.tolist()]
            for name, column in frame.items()
        }

    def added(self, columns: dict[str, np.ndarray]) -> Table:
        """The same table with further columns."""
        twice = [name for name in columns if name in self.columns]
        if twice:
            raise DataError(f"{self.source} has a column {twice[0]!r} already; rename it first")
        arrow = self.arrow
        for name, column in columns.items() if arrow is not None else ():
            arrow = arrow.append_column(name, [column])
        return replace(self, columns={**self.columns, **columns}, arrow=arrow)

    def __len__(self) -> int:
        return len(next(iter((self.cells or self.columns).values()), ()))

    @property
    def names(self) -> list[str]:
        """Column names in order."""
        return list(self.columns)


def numeric(table: Table, columns: Sequence[str] | None = None) -> np.ndarray:
    """The ``(n, d)`` float64 matrix of the named columns (default: all), or a :class:`DataError`.

    The error names all columns that are absent, or those that hold text and the first row of each
    with a missing or infinite cell. Columns come in the order asked for, whatever their order in
    the file. A table without names (an array) is taken by position.
    """
    if columns is None:
        columns = table.names
    elif not table.named and len(table.columns) == len(columns):
        renamed = dict(zip(columns, table.columns.values(), strict=True))
        table = Table(renamed, table.source, table.lines)
    absent = [name for name in columns if name not in table.columns]
    if absent:
        raise DataError(f"{table.source}: {missing(absent)}; the table has {listed(table.names)}")
    table = replace(table, columns={name: _amounts(table.columns[name]) for name in columns})
    found = [_no_numbers(table, name) for name in columns]
    problems = [problem for problem in found if problem]
    if problems:
        raise DataError(f"{table.source}: {DataError.of(problems)}")
    return np.column_stack([table.columns[name] for name in columns])


def missing(names: Sequence[str]) -> str:
    """Words on columns that are not there.

    >>> missing(["a"]), missing(["a", "b"])
    ("column 'a' is missing", "columns 'a', 'b' are missing")
    """
    are = "column {} is missing" if len(names) == 1 else "columns {} are missing"
    return are.format(listed(names))


def listed(names: Sequence[str], most: int = 12) -> str:
    """The first of some names.

    >>> listed(["a", "b", "c"], most=2)
    "'a', 'b' and 1 more"
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more


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


def _opened(path: Path) -> IO[bytes]:
    """A file of text, unpacked where it is packed; what a pipe gives, which it does only once."""
    if path.suffix.lower() == ".gz":
        return cast(IO[bytes], gzip.open(path))
    return path.open("rb") if path.is_file() else BytesIO(path.read_bytes())


def table_of(frame: Any, source: str = "table") -> Table:
    """A table of columns, of an Arrow table, a data frame or an array that a model gave."""
    if hasattr(frame, "to_arrow"):
        frame = frame.to_arrow()
    if isinstance(frame, np.ndarray):
        return _from_array(frame, source, None)
    if hasattr(frame, "column_names"):
        return _from_arrow(frame, source)
    cells = {str(name): np.asarray(frame[name]) for name in frame}
    columns = {n: _parsed(c) if c.dtype.kind in "OU" else _column_of(c) for n, c in cells.items()}
    return Table(columns, source, cells=cells)


def write_table(table: Table, path: str | os.PathLike[str]) -> None:
    """Write a table whole or not at all; the format follows from the suffix."""
    path = check_output(path)
    writers: dict[str, Callable[[Table, Path], None]] = {
        ".csv": _write_csv,
        ".tsv": _write_csv,
        ".txt": _write_csv,
        ".parquet": _write_parquet,
        ".pq": _write_parquet,
        ".npy": lambda table, to: np.save(to, numeric(table)),
        ".npz": lambda table, to: np.savez(to, X=numeric(table), columns=np.array(table.names)),
    }
    with atomic_output(path) as temporary:
        writers[path.suffix.lower()](table, temporary)


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


@contextmanager
def atomic_output(path: Path) -> Iterator[Path]:
    """A temporary path beside ``path`` that takes its place only if the block succeeds."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".selfnorm-", suffix=path.suffix)
    except OSError as error:
        raise DataError(f"cannot write to {path.parent}: {error.strerror}") from error
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        # mkstemp makes the file private; the output should have the permissions of any new file
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


_END = "\x1a"  # below the last line: part of a cell where a quote is open
_NOT_CLOSED = "a quote opened in line {} is not closed"


def _read_csv(path: Path, delimiter: str | None, has_names: bool | None) -> Table:
    try:
        with _opened(path) as content:
            # spreadsheets write "Unicode text" so, with a mark
            utf16 = content.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
            content.seek(0)
            stream = TextIOWrapper(content, "utf-16" if utf16 else "utf-8-sig", newline="")
            head = stream.read(65_536)
            stream.seek(0)
            if not head.strip():
                raise DataError(f"{path} is empty: it needs a header line and rows of numbers")
            if "\0" in head:
                raise DataError(f"{path} is not a text table (it holds zero bytes)")
            mark = delimiter or _delimiter(head)
            reader = csv.reader(chain(stream, [_END]), delimiter=mark, skipinitialspace=True)
            rows, lines, first = [], [], 1
            quoted = {}  # rows of several lines: where the quote was opened
            for row in reader:
                if row and (len(row) > 1 or row[0].strip()):  # blank lines are no rows
                    rows.append(row)
                    lines.append(reader.line_num)
                    if reader.line_num > first:
                        quoted[reader.line_num] = first
                first = reader.line_num + 1
    except UnicodeDecodeError as error:
        name, to = shlex.quote(path.name), shlex.quote(f"utf8_{path.name}")
        raise DataError(
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8, "
            f"for example: iconv -f latin1 -t utf-8 {name} > {to}"
        ) from None
    except csv.Error as error:
        if reader.line_num > first:
            raise DataError(f"{path}: {_NOT_CLOSED.format(first)}") from None
        raise DataError(f"{path}: cannot be read as CSV: {error}") from None
    if rows.pop() != [_END]:
        raise DataError(f"{path}: {_NOT_CLOSED.format(quoted[lines[-1]])}")
    lines.pop()
    while len(rows) > 1 and not any(cell.strip() for cell in rows[-1]):  # spreadsheets leave some
        rows.pop()
        lines.pop()
    header = rows[0]
    named = _has_names(rows) if has_names is None else has_names
    names = [cell.strip() for cell in header] if named else [f"x{i}" for i in range(len(header))]
    if not names[0] and any(names):  # of the rows, as data frames are written
        names[0] = "Unnamed: 0"  # as pandas reads it
        warnings.warn(f"{path}: column 1 has no name: called {names[0]!r}", SelfnormWarning, 3)
    if has_names is None and (not named or any(map(_is_amount, names))):
        taken = (
            f"{path}: line {lines[0]} is taken as names, of which some are numbers; --no-header "
            "takes it as data, --header is sure of the names"
            if named
            else f"{path} seems to have no header: line {lines[0]} is data, and the columns are "
            f"called {listed(names, most=2)}; --header takes it as names, --no-header is sure of it"
        )
        warnings.warn(taken, SelfnormWarning, stacklevel=3)
    body = rows[1:] if named else rows
    body_lines = lines[1:] if named else lines
    repeated = named and not all(map(_is_amount, names))  # numbers may be data as well
    again = [line for row, line in zip(body, body_lines, strict=True) if repeated and row == header]
    if again:  # tables put one below the other
        shown = ", ".join(map(str, again[:3])) + (", ..." if len(again) > 3 else "")
        warnings.warn(
            f"{path}: the header stands again in line {shown}; left out",
            SelfnormWarning,
            stacklevel=3,
        )
        kept = [(r, n) for r, n in zip(body, body_lines, strict=True) if r != header]
        body, body_lines = [r for r, _ in kept], [n for _, n in kept]
    if not body:
        raise DataError(f"{path} has a header but no rows: it needs at least one row of numbers")
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
    problems += [
        f"line {line} has {len(row)} cells, the header has {len(names)}"
        + (f": it seems that {_NOT_CLOSED.format(quoted[line])}" if line in quoted else "")
        for row, line in zip(body, body_lines, strict=True)
        if len(row) != len(names)
    ]
    width = len(names)
    whole = [row[:width] + [""] * (width - len(row)) for row in body] if problems else body
    cells = {
        name: np.array(column, dtype=object)
        for name, column in zip(names, zip(*whole, strict=True), strict=True)
    }
    pointed = _with_points(cells) if mark == ";" else None
    style = (mark if delimiter is None else ",", "." if pointed is None else ",")
    cells = cells if pointed is None else pointed
    table = Table(_Parsed(cells), str(path), np.array(body_lines), named, cells, style=style)
    if problems:  # what is wrong with the cells is told with them, not after they are mended
        problems += [table.by_line(problem) for problem in _problems_of(cells)]
        raise DataError(f"{path}: {DataError.of(problems)}")
    return table


def _problems_of(cells: dict[str, np.ndarray]) -> tuple[str, ...]:
    """What a schema refuses in columns, the first thousand where there are more."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SelfnormWarning)
            Schema.detect(dict(islice(cells.items(), 1000)), missing=True)
    except DataError as error:
        return error.problems
    return ()


_COMMA = re.compile(r"\s*[+-]?(\d+|\d{1,3}(\.\d{3})+)(,\d+)?([eE][+-]?\d+)?\s*")
_POINT = re.compile(r"\s*[+-]?(\d+|\d{1,3}(,\d{3})+)(\.\d+)?\s*")
_SYMBOL = re.compile(r"\s?[$€£¥₹%]\s?")  # of an amount or a share
_SWAPPED = str.maketrans(".,", ",.")


def _with_points(cells: dict[str, np.ndarray]) -> dict[str, np.ndarray] | None:
    """Decimal commas made points; ``None`` where there are none, or points beside them.

    A column of them may hold a few cells of something else, which stay as they are.

    >>> cells = {"a": np.array(["1.234,5", "", "2", "3,4x", "5"], dtype=object)}
    >>> _with_points(cells)["a"].tolist()
    ['1234.5', '', '2', '3,4x', '5']
    """
    seen = {name: [c for c in column if not _is_missing(c)] for name, column in cells.items()}
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
    made = dict(cells)
    for name in commas:
        made[name] = np.array([_with_point(cell) for cell in cells[name]], dtype=object)
    return made


def _has_comma(cell: str) -> bool:
    """Whether a cell is a number whose decimals follow a comma, or has none; with marks or not."""
    return _COMMA.fullmatch(_SYMBOL.sub("", cell)) is not None


def _has_point(cell: str) -> bool:
    """The same of a point."""
    return _POINT.fullmatch(_SYMBOL.sub("", cell)) is not None


def _is_amount(cell: str) -> bool:
    """Whether a cell is a number, however its decimals, thousands and marks are written."""
    return _is_number(cell) or _has_comma(cell) or _has_point(cell)


def _with_point(cell: str) -> str:
    if not _has_comma(cell):
        return cell
    if _SYMBOL.search(cell):  # an amount keeps what parts its thousands
        return cell.translate(_SWAPPED)
    return cell.replace(".", "").replace(",", ".")


def _with_comma(cells: list[str]) -> list[str]:
    """Amounts and shares as a file of decimal commas has them; other texts as they are."""
    if not any(_SYMBOL.search(cell) for cell in cells):
        return cells
    fit = [_has_point(cell) for cell in cells]
    if 2 * sum(fit) <= sum(not _is_missing(cell) for cell in cells):
        return cells
    return [c.translate(_SWAPPED) if ok else c for c, ok in zip(cells, fit, strict=True)]


def _has_names(rows: list[list[str]]) -> bool:
    """A guess whether the first line holds names: text unlike the other cells of its column.

    Digits do not matter: a date, an amount or a code is like the others. Numbers and gaps are no
    names, unless they count the columns, as pandas does where it knows no names.

    >>> _has_names([["5.1", "red"], ["4.9", "blue"], ["?", "red"]])
    False
    >>> _has_names([["town", "2019"], ["Rome", "4.5"]]), _has_names([["2019", "2020"], ["1", "7"]])
    (True, False)
    """
    first = [cell.strip() for cell in rows[0]]
    filled = [cell for cell in first if cell]
    if len(first) > 2 and filled == [str(i) for i in range(len(filled))]:
        return True
    others = [row for row in rows[1:] if row != rows[0]]  # a header may stand again

    def stands_again(i: int) -> bool:
        cells = {row[i].strip() for row in others if i < len(row)}
        like = re.compile(re.sub(r"\d+", r"\\d+", re.escape(first[i])))
        return any(map(like.fullmatch, cells))

    words = [i for i, cell in enumerate(first) if not (_is_amount(cell) or _is_missing(cell))]
    return all(map(_is_missing, first)) or not all(map(stands_again, words))


# What NumPy, zipfile and zlib raise on damaged files; a header may ask for any amount of memory.
_UNREADABLE = (
    *(ValueError, TypeError, OSError, EOFError, LookupError, SyntaxError, RuntimeError),
    *(tokenize.TokenError, zipfile.BadZipFile, zlib.error, struct.error),
    *(MemoryError, OverflowError, RecursionError),
)


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
    except _UNREADABLE as error:
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
    raw = dict(zip(called, array.T, strict=True))
    columns = {name: _column_of(column) for name, column in raw.items()}
    return Table(columns, source, named=named, cells=raw if array.dtype.kind in "iu" else {})


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
    columns, cells = {}, {}
    for name in frame.column_names:
        column = frame.column(name)
        kind = column.type
        if (
            pyarrow.types.is_integer(kind)
            or pyarrow.types.is_floating(kind)
            or pyarrow.types.is_boolean(kind)
        ):
            numbers = column.cast(pyarrow.float64(), safe=False)
            columns[name] = _column_of(numbers.to_numpy(zero_copy_only=False))
            if np.nanmax(np.abs(columns[name]), initial=0.0) >= 2**53:
                cells[name] = np.array(column.to_pylist(), dtype=object)
        elif pyarrow.types.is_nested(kind):  # lists of one length would become several columns
            columns[name] = np.array([_text(cell) for cell in column.to_pylist()], dtype=object)
        else:
            try:
                columns[name] = _column_of(np.array(column.to_pylist(), dtype=object))
            except (LookupError, ValueError, OverflowError) as error:
                raise DataError(
                    f"{source}: column {name!r} of type {kind} cannot be read "
                    f"({type(error).__name__}: {error}); write it as another type"
                ) from None
    return Table(columns, source, cells=cells, arrow=frame)


def _pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError:
        raise DataError(
            'reading or writing Parquet needs pyarrow: pip install "selfnorm[frames]"'
        ) from None
    return pyarrow


def _write_csv(table: Table, path: Path) -> None:
    delimiter, decimal = table.style
    delimiter = "\t" if path.suffix.lower() == ".tsv" else delimiter
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, delimiter=delimiter, lineterminator="\n")
        writer.writerow(table.names)
        columns = [
            [_text(cell) for cell in table.cells[name].tolist()]
            if name in table.cells
            else _cells(column)
            for name, column in table.columns.items()
        ]
        if decimal != ".":
            columns = [
                [cell.replace(".", decimal) for cell in cells]
                if column.dtype.kind == "f"
                else _with_comma(cells)
                for cells, column in zip(columns, table.columns.values(), strict=True)
            ]
        writer.writerows(zip(*columns, strict=True))


def _write_parquet(table: Table, path: Path) -> None:
    pyarrow = _pyarrow()
    import pyarrow.parquet as parquet

    if table.arrow is not None:
        parquet.write_table(table.arrow, path)
        return
    columns: dict[str, Any] = {}
    for name, column in table.columns.items():
        cells = table.as_read(name).tolist()
        if column.dtype.kind == "f" and numbers_from([_text(cell) for cell in cells]) is not None:
            columns[name] = column
        elif all(isinstance(cell, float | int | None) for cell in cells):
            columns[name] = pyarrow.array(cells)
        else:
            columns[name] = [_text(cell) for cell in cells]
    parquet.write_table(pyarrow.table(columns), path)


def _cells(column: np.ndarray) -> list[str]:
    if column.dtype.kind != "f":
        return [_text(cell) for cell in column]
    # repr is the shortest text that reads back as the same float; whole numbers without ".0"
    return [
        "" if math.isnan(v) else (f"{v:.0f}" if v.is_integer() and abs(v) < 1e15 else repr(v))
        for v in column.tolist()
    ]


def _text(cell: Any) -> str:
    return "" if cell is None else str(cell)


def _delimiter(head: str) -> str:
    line = head.lstrip("\n\r").split("\n", 1)[0]
    bare = re.sub(r'"[^"]*"', "", line)  # a mark within quotes is part of a name
    if ";" in bare and all(_COMMA.fullmatch(cell) for cell in bare.split(";")):
        return ";"  # numbers with decimal commas, and no names above them
    counts = {mark: bare.count(mark) for mark in (",", ";", "\t")}
    best = max(counts, key=lambda mark: counts[mark])
    return best if counts[best] else ","


class _Parsed(Mapping[str, np.ndarray]):
    """Columns of text, each parsed when it is first read: a density needs the text alone."""

    def __init__(self, cells: dict[str, np.ndarray]) -> None:
        self._cells = cells
        self._columns: dict[str, np.ndarray] = {}

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._columns:
            self._columns[name] = _parsed(self._cells[name])
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._cells)

    def __len__(self) -> int:
        return len(self._cells)


def _parsed(cells: np.ndarray) -> np.ndarray:
    """Floats where every cell is a number or missing, else the text as it stands."""
    with suppress(ValueError, TypeError):
        return cells.astype(np.float64)
    with suppress(ValueError, TypeError):
        return np.where([_is_missing(cell) for cell in cells], np.nan, cells).astype(np.float64)
    return cells


def _amounts(column: np.ndarray) -> np.ndarray:
    """Numbers written with marks (``$1,250.50``, ``12 %``) without them, or the text as it stands.

    >>> _amounts(np.array(["$1,250.50", "$20.00"], dtype=object)).tolist()
    [1250.5, 20.0]
    """
    if column.dtype.kind == "f":
        return column
    return _parsed(np.array(unmarked([str(cell) for cell in column])[0], dtype=object))


def _column_of(values: np.ndarray) -> np.ndarray:
    """A float column from any numeric kind, a parsed one from text and objects."""
    if values.dtype.kind in "fiub":
        return values.astype(np.float64)
    if values.dtype.kind not in "USO":
        return np.array([str(cell) for cell in values], dtype=object)
    cells = np.array(["" if cell is None else cell for cell in values.tolist()], dtype=object)
    words = [isinstance(cell, str) and not _is_missing(cell) for cell in cells]
    return cells if values.dtype.kind == "O" and all(words) else _parsed(cells)


def _is_number(cell: Any) -> bool:
    try:
        float(cell)
    except (TypeError, ValueError):
        return False
    return True


def _is_missing(cell: Any) -> bool:
    return str(cell).strip().lower() in MISSING


def _refuse_repeated(names: Sequence[str], path: str | Path, what: str = "column") -> None:
    for name, times in Counter(names).items():
        if times > 1:
            raise DataError(f"{path}: {what} {name!r} appears twice; rename one")


def _place(table: Table, row: int) -> str:
    place = f"row {row + 1}"
    return place if table.lines is None else f"{place} (line {int(table.lines[row])})"


def _no_numbers(table: Table, name: str) -> str:
    """What keeps a column from being finite numbers; empty where nothing does."""
    column = table.columns[name]
    if column.dtype.kind == "f":
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
    for row, cell in enumerate(column):
        if not _is_missing(cell) and not _is_number(cell):
            cure = "drop the column or turn it into numbers"
            if "," in str(cell) and _is_number(str(cell).replace(".", "").replace(",", "")):
                cure = "write numbers with a decimal point and without separators of thousands"
            return (
                f"column {name!r} holds text ({str(cell)[:40]!r} in {_place(table, row)}); {cure}"
            )
    return f"column {name!r} holds no numbers; drop the column"
