"""Tables in files: CSV, Parquet, NPY, NPZ; errors name the cell.

A :class:`Table` keeps every column as it came, so that an identifier column can travel from the
input to the scored output; its ``frame`` is what a :class:`~selfnorm.Schema` reads.
:func:`numeric` makes a float matrix of it and refuses missing cells, text and infinities by row and
column. Output is written whole or not at all.
"""

from __future__ import annotations

import csv
import math
import os
import re
import struct
import tokenize
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from selfnorm._files import atomic
from selfnorm.cli.csv_text import LazyColumns, is_missing, is_number, listed, read_csv, with_commas
from selfnorm.columns import Cells, Schema, numbers_from, unmarked
from selfnorm.columns import Table as Frame
from selfnorm.columns.text import numbers_as_text
from selfnorm.errors import DataError, SelfnormWarning

TEXT = (".csv", ".tsv", ".txt")
SUFFIXES = (*TEXT, ".parquet", ".pq", ".npy", ".npz")


@dataclass(frozen=True)
class Table:
    """Named columns of equal length, as they were read.

    ``lines`` holds the line of each row in the file, where there are lines, so that an error can
    name the line an editor shows. ``named`` is false where the names were made up. ``arrow`` is the
    whole table, where it came from Parquet. ``style`` is what stands between cells and before
    decimals where it is written as CSV. ``numbers`` holds columns of text that are numbers.
    """

    cells: Mapping[str, np.ndarray]
    source: str = "table"
    lines: np.ndarray | None = None
    named: bool = True
    arrow: Any = None
    style: tuple[str, str] = (",", ".")
    numbers: Mapping[str, Cells] = field(default_factory=dict)

    @cached_property
    def columns(self) -> Mapping[str, np.ndarray]:
        """Columns as float64 (missing = nan) or text; each is parsed when it is first read."""
        return LazyColumns(self.cells, self._parsed)

    def _parsed(self, name: str) -> np.ndarray:
        numbers = self.numbers[name].numbers if name in self.numbers else None
        if numbers is not None:
            return numbers
        cells = self.cells[name]
        text = self.arrow is None and cells.dtype.kind in "OU"
        return _parsed(cells) if text else _column_of(cells)

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

    def read(self, names: Sequence[str]) -> Frame:
        """The same, with columns that are read once."""
        if self.arrow is None and self.numbers.keys() >= {*names}:
            read = {name: self.numbers[name] for name in names}
            return Frame("dict", self.cells, read, len(self), read)
        return Frame.of(self.frame(names))

    def without_gaps(self, names: Sequence[str]) -> Any:
        """The same with texts that stand for a gap left out."""
        frame = self.frame(names)
        if not isinstance(frame, dict):
            return frame
        return {
            name: [None if is_missing(cell) else cell for cell in column.tolist()]
            for name, column in frame.items()
        }

    def added(self, columns: dict[str, np.ndarray]) -> Table:
        """The same table with further columns."""
        twice = [name for name in columns if name in self.cells]
        if twice:
            raise DataError(f"{self.source} has a column {twice[0]!r} already; rename it first")
        arrow = self.arrow
        for name, column in columns.items() if arrow is not None else ():
            arrow = arrow.append_column(name, [column])
        return replace(self, cells={**self.cells, **columns}, arrow=arrow, numbers={})

    def __len__(self) -> int:
        if self.lines is not None:
            return len(self.lines)
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
        cells = dict(zip(columns, table.cells.values(), strict=True))
        table = replace(table, cells=cells, numbers={})
    absent = [name for name in columns if name not in table.cells]
    if absent:
        raise DataError(f"{table.source}: {missing(absent)}; the table has {listed(table.names)}")
    numbers = {name: _amounts(table.columns[name]) for name in columns}
    problems = [_no_numbers(table, name, column) for name, column in numbers.items()]
    if any(problems):
        raise DataError(f"{table.source}: {DataError.of([words for words in problems if words])}")
    return np.column_stack([numbers[name] for name in columns])


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
            table = _read_text(path, "\t" if suffix == ".tsv" else None, header)
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


def table_of(frame: Any, source: str = "table") -> Table:
    """A table of columns, of an Arrow table, a data frame or an array that a model gave."""
    held = Frame.of(frame)
    if held.kind == "array":
        return _from_array(held.frame, source, None)
    if held.kind in ("arrow", "polars"):
        return _from_arrow(frame if held.kind == "arrow" else frame.to_arrow(), source)
    return Table({str(n): np.asarray(frame[n]).astype(object) for n in frame}, source)


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


def _read_text(path: Path, delimiter: str | None, header: bool | None) -> Table:
    content = read_csv(path, delimiter, header)
    table = Table(
        content.cells,
        str(path),
        content.lines,
        named=content.named,
        style=content.style,
        numbers=content.numbers,
    )
    if content.problems:  # all of the cells are named with them
        problems = [table.by_line(problem) for problem in _problems_of(content.cells)]
        raise DataError(f"{path}: {DataError.of([*content.problems, *problems])}")
    return table


def _problems_of(cells: Mapping[str, np.ndarray]) -> tuple[str, ...]:
    """What a schema refuses in columns, the first thousand where there are more."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SelfnormWarning)
            Schema.detect(dict(islice(cells.items(), 1000)), missing=True)
    except DataError as error:
        return error.problems
    return ()


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
    columns = array.T if array.dtype.kind in "iu" else [_column_of(column) for column in array.T]
    return Table(dict(zip(called, columns, strict=True)), source, named=named)


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
                cells[name] = _column_of(np.array(column.to_pylist(), dtype=object))
            except (LookupError, ValueError, OverflowError) as error:
                raise DataError(
                    f"{source}: column {name!r} of type {kind} cannot be read "
                    f"({type(error).__name__}: {error}); write it as another type"
                ) from None
    return Table(cells, source, arrow=frame)


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
        columns = [_texts(cells) for cells in table.cells.values()]
        if decimal != ".":
            columns = [
                [text.replace(".", decimal) for text in texts]
                if table.columns[name].dtype.kind == "f"
                else with_commas(texts)
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
    for name, column in table.columns.items():
        cells = table.cells[name].tolist()
        if column.dtype.kind == "f" and numbers_from([_text(cell) for cell in cells]) is not None:
            columns[name] = column
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


def _parsed(cells: np.ndarray) -> np.ndarray:
    """Floats where every cell is a number or missing, else the text as it stands."""
    with suppress(ValueError, TypeError):
        return cells.astype(np.float64)
    with suppress(ValueError, TypeError):
        return np.where([is_missing(cell) for cell in cells], np.nan, cells).astype(np.float64)
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
    words = [isinstance(cell, str) and not is_missing(cell) for cell in cells]
    return cells if values.dtype.kind == "O" and all(words) else _parsed(cells)


def _refuse_repeated(names: Sequence[str], path: str | Path, what: str = "column") -> None:
    for name, times in Counter(names).items():
        if times > 1:
            raise DataError(f"{path}: {what} {name!r} appears twice; rename one")


def _place(table: Table, row: int) -> str:
    place = f"row {row + 1}"
    return place if table.lines is None else f"{place} (line {int(table.lines[row])})"


def _no_numbers(table: Table, name: str, column: np.ndarray) -> str:
    """What keeps a column from being finite numbers; empty where nothing does."""
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
        if not is_missing(cell) and not is_number(cell):
            cure = "drop the column or turn it into numbers"
            if "," in str(cell) and is_number(str(cell).replace(".", "").replace(",", "")):
                cure = "write numbers with a decimal point and without separators of thousands"
            return (
                f"column {name!r} holds text ({str(cell)[:40]!r} in {_place(table, row)}); {cure}"
            )
    return f"column {name!r} holds no numbers; drop the column"
