"""A table of named columns, and the float matrix a model needs, with errors that name the cell.

A :class:`Table` keeps every column as it came (numbers or text), so that an identifier column can
travel from the input to the scored output; :func:`numeric` makes the float matrix and refuses
missing cells, text and infinities by row and column. Files: :mod:`selfnorm.tables.files`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from selfnorm.errors import DataError

__all__ = ["Table", "from_frame", "numeric", "refuse_constant"]

MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?", "-"})


@dataclass(frozen=True)
class Table:
    """Named columns of equal length; a column is float64 (missing = nan) or text.

    ``lines`` holds the line of each row in the file, where there are lines, so that an error can
    name the line an editor shows. ``named`` is false where the names were made up. ``cells`` holds
    columns as they were read, where a float might say less (007, 2**60 + 1): for passing them on.
    """

    columns: dict[str, np.ndarray]
    source: str = "table"
    lines: np.ndarray | None = None
    named: bool = True
    cells: dict[str, np.ndarray] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()))) if self.columns else 0

    @property
    def names(self) -> list[str]:
        """Column names in order."""
        return list(self.columns)


def from_frame(data: Any, source: str = "table") -> Table:
    """A :class:`Table` from a pandas or polars frame, a mapping of columns or a 2-d array.

    >>> from_frame({"a": [1, 2], "b": ["x", "y"]}).names
    ['a', 'b']
    """
    if isinstance(data, Table):
        return data
    if isinstance(data, dict):
        return Table({str(k): column_of(np.asarray(v)) for k, v in data.items()}, source)
    if hasattr(data, "columns") and hasattr(data, "__getitem__"):
        names = [str(name) for name in data.columns]
        if len(set(names)) != len(names):
            raise DataError(f"{source}: column {repeated_name(names)!r} appears twice; rename one")
        columns = {str(name): column_of(_values(data[name])) for name in data.columns}
        return Table(columns, source)
    array = np.asarray(data)
    if array.ndim == 1:
        array = array[:, None]
    if array.ndim != 2:
        raise DataError(f"{source}: expected rows and columns, got an array of shape {array.shape}")
    raw = {f"x{i}": column for i, column in enumerate(array.T)}
    columns = {name: column_of(column) for name, column in raw.items()}
    kept = {name: column for name, column in raw.items() if array.dtype.kind in "iu"}
    return Table(columns, source, named=False, cells=kept)


def numeric(table: Table, columns: Sequence[str] | None = None) -> np.ndarray:
    """The ``(n, d)`` float64 matrix of the named columns (default: all), or a :class:`DataError`.

    The error names the column that is absent or holds text, or the first row and column with a
    missing or infinite cell. Columns come in the order asked for, whatever their order in the file.
    A table without names (an array) is taken by position.
    """
    if columns is None:
        columns = table.names
    elif not table.named and len(table.columns) == len(columns):
        table = Table(
            dict(zip(columns, table.columns.values(), strict=True)),
            table.source,
            table.lines,
        )
    absent = [name for name in columns if name not in table.columns]
    if absent:
        raise DataError(
            f"{table.source}: column {absent[0]!r} is missing"
            + (f" (and {len(absent) - 1} more)" if len(absent) > 1 else "")
            + f"; the model needs {list(columns)}, the table has {table.names}"
        )
    for name in columns:
        if table.columns[name].dtype.kind != "f":
            _refuse_text(table, name)
    matrix = np.column_stack([table.columns[name] for name in columns])
    bad = ~np.isfinite(matrix)
    if bad.any():
        row, column = (int(i) for i in np.argwhere(bad)[0])
        value = matrix[row, column]
        what = "missing value" if math.isnan(value) else f"infinite value ({value})"
        raise DataError(
            f"{table.source}: {what} in {_place(table, row)}, column {columns[column]!r}"
            f" ({int(bad.sum())} such cell(s)); remove the row or fill the cell in"
        )
    return matrix


def refuse_constant(x: np.ndarray, names: Sequence[Any], source: str = "X") -> None:
    """An error that names the columns of ``x (n, d)`` which hold one value only.

    >>> import numpy as np
    >>> refuse_constant(np.array([[1.0, 2.0], [1.0, 3.0]]), ["a", "b"])
    Traceback (most recent call last):
    selfnorm.errors.DataError: X: column 'a' is constant: a constant has no density; drop it
    """
    # a spread of rounding size is no spread: a column of 0.1 may vary in its last digit
    flat = np.flatnonzero(np.ptp(x, axis=0) <= 1e-12 * np.abs(x).max(axis=0))
    if len(flat):
        shown = ", ".join(repr(names[j]) for j in flat[:5])
        if len(flat) == 1:
            what, cure = f"column {shown} is", "drop it"
        else:
            what, cure = f"columns {shown} are", "drop them"
        raise DataError(f"{source}: {what} constant: a constant has no density; {cure}")


def parse_cells(cells: np.ndarray) -> np.ndarray:
    """Floats where every cell is a number or missing, else the text as it stands."""
    try:
        return cells.astype(np.float64)
    except (ValueError, TypeError):
        pass
    values = np.empty(len(cells))
    for i, cell in enumerate(cells):
        if str(cell).strip().lower() in MISSING:
            values[i] = np.nan
        elif is_number(cell):
            values[i] = float(cell)
        else:
            return cells
    return values


def is_identifier(cells: np.ndarray, values: np.ndarray) -> bool:
    """Whether cells that read as the floats ``values`` are names rather than amounts.

    Whole numbers with leading zeros, or too long for a float to hold.

    >>> cells = np.array(["007", "012"], dtype=object)
    >>> is_identifier(cells, parse_cells(cells))
    True
    """
    finite = values[np.isfinite(values)]
    if not (finite == np.round(finite)).all():
        return False
    return any(_is_name(str(cell).strip().lstrip("-")) for cell in cells.tolist())


def _is_name(text: str) -> bool:
    return "_" in text or (text.isdigit() and (len(text) > 15 or (text[0] == "0" and text != "0")))


def column_of(values: np.ndarray) -> np.ndarray:
    """A float column from any numeric kind, a parsed one from objects."""
    if values.dtype.kind in "fiub":
        return values.astype(np.float64)
    if values.dtype.kind in "USO":
        cells = np.array(["" if cell is None else cell for cell in values.tolist()], dtype=object)
        if values.dtype.kind == "O" and all(
            isinstance(cell, str) and cell.strip().lower() not in MISSING for cell in cells
        ):
            return cells
        return parse_cells(cells)
    return np.array([str(cell) for cell in values], dtype=object)


def is_number(cell: Any) -> bool:
    """Whether a cell reads as a float."""
    try:
        float(cell)
    except (TypeError, ValueError):
        return False
    return True


def _values(series: Any) -> np.ndarray:
    """A frame's column as an array; missing cells of pandas' own types become ``None``."""
    if hasattr(series.dtype, "na_value"):
        return np.asarray(series.to_numpy(dtype=object, na_value=None))
    return np.asarray(series.to_numpy())


def repeated_name(names: Sequence[str]) -> str:
    """The first name that occurs twice."""
    return next(name for name in names if list(names).count(name) > 1)


def _place(table: Table, row: int) -> str:
    place = f"row {row + 1}"
    return place if table.lines is None else f"{place} (line {int(table.lines[row])})"


def _refuse_text(table: Table, name: str) -> None:
    for row, cell in enumerate(table.columns[name]):
        if str(cell).strip().lower() not in MISSING and not is_number(cell):
            cure = "drop the column or turn it into numbers"
            if "," in str(cell) and is_number(str(cell).replace(".", "").replace(",", "")):
                cure = "write numbers with a decimal point and without separators of thousands"
            raise DataError(
                f"{table.source}: column {name!r} holds text ({str(cell)[:40]!r} in "
                f"{_place(table, row)}); {cure}"
            )
    raise DataError(f"{table.source}: column {name!r} holds no numbers; drop the column")
