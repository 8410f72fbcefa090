"""Tables in files: CSV, Parquet, NPY, NPZ; clear errors, output written whole or not at all."""

from __future__ import annotations

import csv
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from selfnorm.errors import DataError
from selfnorm.tables.table import (
    MISSING,
    Table,
    column_of,
    from_frame,
    is_identifier,
    is_number,
    numeric,
    parse_cells,
    repeated_name,
)

__all__ = ["atomic_output", "check_output", "read_table", "write_table"]

SUFFIXES = (".csv", ".tsv", ".txt", ".parquet", ".pq", ".npy", ".npz")


def read_table(path: str | os.PathLike[str]) -> Table:
    """Read a table; the format follows from the suffix.

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
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise DataError(
            f"{path}: unknown kind of table {suffix!r}; use one of {', '.join(SUFFIXES)}"
        )
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty: it needs a header line and rows of numbers")
    try:
        if suffix in (".npy", ".npz"):
            table = _read_numpy(path)
        elif suffix in (".parquet", ".pq"):
            table = _read_parquet(path)
        else:
            table = _read_csv(path, delimiter="\t" if suffix == ".tsv" else None)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    if len(table) == 0:
        raise DataError(f"{path} has no rows: it needs at least one row of numbers")
    return table


def write_table(table: Table, path: str | os.PathLike[str]) -> None:
    """Write a table whole or not at all; the format follows from the suffix."""
    path = check_output(path)
    suffix = path.suffix.lower()
    writers: dict[str, Callable[[Table, Path], None]] = {
        ".csv": _write_csv,
        ".tsv": _write_csv,
        ".txt": _write_csv,
        ".parquet": _write_parquet,
        ".pq": _write_parquet,
        ".npy": _write_npy,
        ".npz": _write_npz,
    }
    with atomic_output(path) as temporary:
        writers[suffix](table, temporary)


def check_output(path: str | os.PathLike[str]) -> Path:
    """Refuse an output that could not be written, before the work is done."""
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise DataError(f"{path}: cannot write {path.suffix!r}; use one of {', '.join(SUFFIXES)}")
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


def _read_csv(path: Path, delimiter: str | None) -> Table:
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            head = stream.read(65_536)
            stream.seek(0)
            if not head.strip():
                raise DataError(f"{path} is empty: it needs a header line and rows of numbers")
            if "\0" in head:
                raise DataError(f"{path} is not a text table (it holds zero bytes)")
            reader = csv.reader(
                stream, delimiter=delimiter or _delimiter(head), skipinitialspace=True
            )
            rows, lines = [], []
            for row in reader:
                if row and (len(row) > 1 or row[0].strip()):  # blank lines are no rows
                    rows.append(row)
                    lines.append(reader.line_num)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start})"
        ) from None
    except csv.Error as error:
        raise DataError(f"{path}: cannot be read as CSV: {error}") from None
    header = rows[0]
    named = _has_names(rows)
    names = [cell.strip() for cell in header] if named else [f"x{i}" for i in range(len(header))]
    body = rows[1:] if named else rows
    body_lines = lines[1:] if named else lines
    if not body:
        raise DataError(f"{path} has a header but no rows: it needs at least one row of numbers")
    if len(set(names)) != len(names):
        raise DataError(f"{path}: column {repeated_name(names)!r} appears twice; rename one")
    if "" in names:
        raise DataError(f"{path}: column {names.index('') + 1} has no name in the header")
    for row, line in zip(body, body_lines, strict=True):
        if len(row) != len(names):
            raise DataError(
                f"{path}: line {line} has {len(row)} cells, the header has {len(names)}"
            )
    cells = {
        name: np.array(column, dtype=object)
        for name, column in zip(names, zip(*body, strict=True), strict=True)
    }
    columns = {name: parse_cells(column) for name, column in cells.items()}
    return Table(columns, str(path), np.array(body_lines), named, cells)


def _has_names(rows: list[list[str]]) -> bool:
    """Whether the first line holds names: words, or the 0, 1, 2, ... of a frame without names."""
    first = [cell.strip() for cell in rows[0]]
    numbers = [is_number(cell) for cell in first]
    if not all(numbers):
        # numbers beside missing cells (NA, ?) are a row of data; a cell left empty has no name
        words = [cell for cell in first if not is_number(cell)]
        return not any(numbers) or any(word == "" or word.lower() not in MISSING for word in words)
    if first != [str(i) for i in range(len(first))] or len(rows) == 1:
        return False
    # whole numbers above a column whose numbers all have a point: no measurement of the same kind
    others = [row for row in rows[1:] if len(row) == len(first)]
    return any(all("." in row[i] for row in others) for i in range(len(first)))


def _read_numpy(path: Path) -> Table:
    try:
        # pickled objects in a .npy could run code; they are never loaded
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return from_frame(loaded, str(path))
        with loaded:
            arrays = {key: loaded[key] for key in loaded.files}
    except (ValueError, OSError, EOFError, KeyError, NotImplementedError) as error:
        raise DataError(f"{path} cannot be read as a numpy file: {error}") from None
    if not arrays:
        raise DataError(f"{path} holds no array")
    tables = [key for key in arrays if key != "columns"]
    if "X" not in arrays and len(tables) != 1:
        raise DataError(f"{path} holds the arrays {tables}: name the one that is the table X")
    key = "X" if "X" in arrays else tables[0]
    table = from_frame(arrays[key], f"{path}[{key}]")
    names = arrays.get("columns")
    if names is not None and len(names) == len(table.columns):
        renamed = dict(zip(table.columns, map(str, names), strict=True))
        columns = {renamed[name]: column for name, column in table.columns.items()}
        cells = {renamed[name]: column for name, column in table.cells.items()}
        return Table(columns, table.source, cells=cells)
    return table


def _read_parquet(path: Path) -> Table:
    pyarrow = _pyarrow()
    import pyarrow.parquet as parquet

    try:
        frame = parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as Parquet: {error}") from None
    names = frame.column_names
    if len(set(names)) != len(names):
        raise DataError(f"{path}: column {repeated_name(names)!r} appears twice; rename one")
    columns, cells = {}, {}
    for name in names:
        column = frame.column(name)
        kind = column.type
        if (
            pyarrow.types.is_integer(kind)
            or pyarrow.types.is_floating(kind)
            or pyarrow.types.is_boolean(kind)
        ):
            numbers = column.cast(pyarrow.float64(), safe=False)
            columns[name] = column_of(numbers.to_numpy(zero_copy_only=False))
            if np.nanmax(np.abs(columns[name]), initial=0.0) >= 2**53:
                cells[name] = np.array(column.to_pylist(), dtype=object)
        elif pyarrow.types.is_nested(kind):  # lists of one length would become several columns
            columns[name] = np.array([_text(cell) for cell in column.to_pylist()], dtype=object)
        else:
            columns[name] = column_of(np.array(column.to_pylist(), dtype=object))
    return Table(columns, str(path), cells=cells)


def _pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError:
        raise DataError(
            'reading or writing Parquet needs pyarrow: pip install "selfnorm[frames]"'
        ) from None
    return pyarrow


def _write_csv(table: Table, path: Path) -> None:
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, delimiter=delimiter, lineterminator="\n")
        writer.writerow(table.names)
        columns = [
            [_text(cell) for cell in table.cells[name].tolist()]
            if name in table.cells
            else _cells(column)
            for name, column in table.columns.items()
        ]
        writer.writerows(zip(*columns, strict=True))


def _write_parquet(table: Table, path: Path) -> None:
    pyarrow = _pyarrow()
    import pyarrow.parquet as parquet

    columns: dict[str, Any] = {}
    for name, column in table.columns.items():
        cells = table.cells.get(name, column).tolist()
        if column.dtype.kind == "f" and not is_identifier(table.cells.get(name, column), column):
            columns[name] = column
        elif all(isinstance(cell, float | int | None) for cell in cells):
            columns[name] = pyarrow.array(cells)
        else:
            columns[name] = [_text(cell) for cell in cells]
    parquet.write_table(pyarrow.table(columns), path)


def _write_npy(table: Table, path: Path) -> None:
    np.save(path, numeric(table))


def _write_npz(table: Table, path: Path) -> None:
    np.savez(path, X=numeric(table), columns=np.array(table.names))


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
    counts = {mark: bare.count(mark) for mark in (",", ";", "\t")}
    best = max(counts, key=lambda mark: counts[mark])
    return best if counts[best] else ","
