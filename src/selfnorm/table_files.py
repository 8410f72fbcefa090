"""Tables in files: CSV, Parquet, NPY, NPZ; clear errors, output written whole or not at all."""

from __future__ import annotations

import csv
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from selfnorm.errors import DataError
from selfnorm.tables import (
    Table,
    column_of,
    from_frame,
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
    named = any(not is_number(cell) for cell in header)
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
    columns = {
        name: parse_cells(np.array(cells, dtype=object))
        for name, cells in zip(names, zip(*body, strict=True), strict=True)
    }
    return Table(columns, str(path), np.array(body_lines), named)


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
    key = "X" if "X" in arrays else next(iter(arrays))
    table = from_frame(arrays[key], f"{path}[{key}]")
    names = arrays.get("columns")
    if names is not None and len(names) == len(table.columns):
        columns = dict(zip(map(str, names), table.columns.values(), strict=True))
        return Table(columns, table.source)
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
    columns = {}
    for name in names:
        column = frame.column(name)
        kind = column.type
        if (
            pyarrow.types.is_integer(kind)
            or pyarrow.types.is_floating(kind)
            or pyarrow.types.is_boolean(kind)
        ):
            column = column.cast(pyarrow.float64(), safe=False)
            columns[name] = column_of(column.to_numpy(zero_copy_only=False))
        else:
            columns[name] = column_of(np.array(column.to_pylist(), dtype=object))
    return Table(columns, str(path))


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
        writer.writerows(zip(*(_cells(column) for column in table.columns.values()), strict=True))


def _write_parquet(table: Table, path: Path) -> None:
    pyarrow = _pyarrow()
    import pyarrow.parquet as parquet

    columns = {
        name: column if column.dtype.kind == "f" else [_text(cell) for cell in column]
        for name, column in table.columns.items()
    }
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
    counts = {mark: line.count(mark) for mark in (",", ";", "\t")}
    best = max(counts, key=lambda mark: counts[mark])
    return best if counts[best] else ","
