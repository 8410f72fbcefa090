"""Tables as people keep them, column by column, and back: pandas, polars, Arrow, arrays, dicts.

A :class:`Table` holds the columns of a frame as they are. One is read into
:class:`~selfnorm.columns.cells.Cells` when it is asked for: numbers, moments (seconds since 1970,
UTC) or places in a list of labels, with a mask of gaps and a memo ``form``, plain JSON, of how the
column was stored. :func:`write` makes the same kind of table of the same types from cells and
memos; :meth:`Table.filled` replaces gaps alone. polars goes through Arrow, whose types say all that
polars needs.
"""

from __future__ import annotations

import base64
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from selfnorm.columns.cells import (
    Cells,
    Form,
    array_of,
    as_integers,
    as_objects,
    cells_of_array,
    natural,
    objects_of,
    plain,
    unplain,
)
from selfnorm.errors import DataError, optional

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl
    import pyarrow as pa
    from torch import Tensor

# what people keep tables in
TableLike: TypeAlias = (
    "Table | pd.DataFrame | pl.DataFrame | pl.LazyFrame | pa.Table | pa.RecordBatch "
    "| Mapping[Any, Any] | np.ndarray | Tensor | Sequence[Any]"
)
# the last: a dict of its texts
FRAMES = ("pandas", "polars", "arrow", "dict", "array", "tensor", "file")
BY_PLACE = ("array", "tensor")  # whose columns have no names


def _is(value: object, module: str, *names: str) -> bool:
    """Whether a value is of a class of a library, which is imported then."""
    library = sys.modules.get(module)
    classes = (getattr(library, name, None) for name in names)
    return isinstance(value, tuple(kind for kind in classes if isinstance(kind, type)))


@dataclass(frozen=True)
class Holder:
    """How one library holds a column.

    Attributes:
        classes: its module and the names of its classes.
        read: the cells of a column.
        write: a column of cells, by their form.
        pick: rows of a column and, if any, of one below it, by their numbers; a new column.
    """

    classes: tuple[str, ...]
    read: Callable[[Any], Cells]
    write: Callable[[Cells], Any]
    pick: Callable[[Any, Any, np.ndarray], Any]


@dataclass(frozen=True)
class Table:
    """A table as it came.

    Attributes:
        kind: one of :data:`FRAMES`.
        frame: all of it.
        columns: its columns by name; ``x0``, ``x1``, ... where they have none.
        n_rows: their length.

    Example:
        >>> table = Table.of({"a": [1, 2, None], "b": ["x", "y", "x"]})
        >>> table.kind, table.cells("a").values, table.cells("b").labels
        ('dict', array([ 1.,  2., nan]), ['x', 'y'])
    """

    kind: str
    frame: Any
    columns: dict[Any, Any]
    n_rows: int
    _read: dict[Any, Cells] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, frame: TableLike) -> Table:
        """Look at what came, without reading it; a table stays what it is."""
        if isinstance(frame, Table):
            return frame
        kind, frame, names, columns = _taken_apart(frame)
        _check_names(names)
        rows = [c.num_rows if _is(c, "pyarrow", "Table") else len(c) for c in columns]
        lengths = dict(zip(names, rows, strict=True))
        if len(set(lengths.values())) > 1:
            raise DataError(f"the columns have different numbers of rows: {lengths}")
        n_rows = max(lengths.values(), default=0)
        if not n_rows:
            raise DataError("the table has no rows" if lengths else "the table has no columns")
        return cls(kind, frame, dict(zip(names, columns, strict=True)), n_rows)

    def cells(self, name: Hashable) -> Cells:
        """The cells of a column, which is read once."""
        if name not in self._read:
            self._read[name] = self._cells(name)
        return self._read[name]

    def _cells(self, name: Hashable) -> Cells:
        column = self.columns[name]
        held, holder = _holder(column)
        try:
            cells = holder.read(column)
        except DataError as error:
            raise DataError(f"column {name!r}: {error}") from None
        except (TypeError, ValueError, ArithmeticError, LookupError, NotImplementedError) as error:
            raise DataError(
                f"column {name!r} cannot be read ({type(error).__name__}: {error}); turn it into "
                "numbers, dates or text"
            ) from error
        if self.kind == "dict":
            cells.form.setdefault("held", held)
        return cells

    def rows(self, places: np.ndarray) -> Any:
        """Some rows, as a frame of the same kind.

        Example:
            >>> Table.of({"a": [1, 2, 3], "b": ["x", "y", "z"]}).rows(np.array([2, 0]))
            {'a': [3, 1], 'b': ['z', 'x']}
        """
        if self.kind == "dict":
            return self._picked(places)
        if self.kind == "arrow":
            return self.frame.take(places.tolist())
        return self.frame.iloc[places] if self.kind == "pandas" else self.frame[places]

    def _picked(self, places: np.ndarray) -> dict[Hashable, Any]:
        columns = self.columns.items()
        return {name: _holder(column)[1].pick(column, None, places) for name, column in columns}

    def filled(self, draws: Mapping[Hashable, tuple[np.ndarray, Cells]]) -> Any:
        """The frame again, with cells in place of gaps: for a column where, and one for each row.

        Example:
            >>> table = Table.of({"a": ["x", None, "y"]})
            >>> cells = Table.of({"a": ["v", "x", "w"]}).cells("a")
            >>> table.filled({"a": (np.array([False, True, False]), cells)})
            {'a': ['x', 'x', 'y']}
        """
        made: dict[Hashable, Any] = {}
        for name, (gaps, cells) in draws.items():
            column, rows = self.columns[name], np.flatnonzero(gaps)
            holder, places = _holder(column)[1], np.arange(self.n_rows)
            places[gaps] = self.n_rows + np.arange(len(rows))
            chosen = replace(cells, values=cells.values[rows], missing=cells.missing[rows])
            try:
                made[name] = holder.pick(column, holder.write(chosen), places)
            except (TypeError, ValueError, OverflowError) as error:
                raise DataError(
                    f"column {name!r} cannot hold what its gaps are filled with "
                    f"({type(error).__name__}: {error}); give it the type of the fit"
                ) from error
        if self.kind == "pandas":
            frame = self.frame.copy()
            for j, name in enumerate(self.columns):
                if name in made:
                    frame.isetitem(j, made[name])
            return frame
        if self.kind == "polars":
            return self.frame.with_columns(*(made[name].alias(name) for name in made))
        if self.kind == "arrow":
            table = _joined(self.columns | made, self.frame.schema.metadata)
            batch = _is(self.frame, "pyarrow", "RecordBatch")
            return table.combine_chunks().to_batches()[0] if batch else table
        columns = self._picked(np.arange(self.n_rows)) | made  # copies, which are the caller's own
        return columns if self.kind == "dict" else _stacked(list(columns.values()))


def _taken_apart(frame: Any) -> tuple[str, Any, list[Hashable], list[Any]]:
    """The kind of a table, the table itself, the names of its columns, and these."""
    if _is(frame, "polars", "LazyFrame"):
        frame = frame.collect()
    if _is(frame, "pandas", "Series") or _is(frame, "polars", "Series"):
        raise DataError("give a DataFrame, not a Series: series.to_frame()")
    reader = _is(frame, "pyarrow", "RecordBatchReader")
    if reader or _is(frame, "pyarrow.dataset", "Dataset", "Scanner"):
        cure = "read_all" if reader else "to_table"
        raise DataError(f"this {type(frame).__name__} is no table yet: give x.{cure}()")
    if _is(frame, "pandas", "DataFrame"):
        names = list(frame.columns)
        return "pandas", frame, names, [frame.iloc[:, j] for j in range(len(names))]
    if _is(frame, "polars", "DataFrame"):
        return "polars", frame, frame.columns, frame.get_columns()
    if _is(frame, "pyarrow", "Table", "RecordBatch"):
        batch = _is(frame, "pyarrow", "RecordBatch")
        table = _pyarrow().Table.from_batches([frame]) if batch else frame
        names = table.schema.names
        return "arrow", frame, names, [table.select([j]) for j in range(len(names))]
    if isinstance(frame, Mapping):
        return "dict", frame, list(frame), [_column(name, frame[name]) for name in frame]
    kind = "tensor" if _is(frame, "torch", "Tensor") else "array"
    if kind == "array" and not np.ma.isMA(frame):
        frame = np.asarray(frame)
    if frame.ndim != 2:
        raise DataError(
            f"the table must have rows and columns, got shape {tuple(frame.shape)}; a single "
            "column needs x[:, None]"
        )
    columns = list(frame.T)
    return kind, frame, [f"x{j}" for j in range(len(columns))], columns


def write(kind: str, columns: Mapping[Hashable, Cells]) -> Any:
    """A table of the given kind; each column is stored as the ``form`` of its cells says."""
    if kind in ("dict", "file"):
        holders = {n: HOLDERS[cells.form.get("held", "array")] for n, cells in columns.items()}
        return {name: holders[name].write(cells) for name, cells in columns.items()}
    made = [HOLDERS[kind].write(cells) for cells in columns.values()]
    names = list(columns)
    if kind == "pandas":
        import pandas as pd

        frame = pd.concat(made, axis=1)
        several = all(isinstance(name, tuple) for name in names)
        frame.columns = pd.MultiIndex.from_tuples(names) if several else pd.Index(names)
        return frame
    if kind == "polars":
        import polars as pl

        return pl.DataFrame(dict(zip(names, made, strict=True)))  # a name may be empty
    return _joined(dict(zip(names, made, strict=True)), None) if kind == "arrow" else _stacked(made)


def numbers_like(frame: Any, columns: Mapping[Hashable, np.ndarray]) -> Any:
    """Columns of numbers as the same kind of table as another one, row by row (pandas: its index).

    Example:
        >>> numbers_like([[1, 2], [3, 4]], {"a": np.zeros(2), "b": np.ones(2)})
        array([[0., 1.],
               [0., 1.]])
    """
    if _is(frame, "pandas", "DataFrame"):
        import pandas as pd

        return pd.DataFrame(dict(columns), index=frame.index)
    if _is(frame, "polars", "DataFrame", "LazyFrame"):
        import polars as pl

        return pl.DataFrame({str(name): column for name, column in columns.items()})
    if _is(frame, "pyarrow", "Table", "RecordBatch"):
        return type(frame).from_pydict({str(name): column for name, column in columns.items()})
    if isinstance(frame, Mapping):
        return dict(columns)
    stacked = np.column_stack(list(columns.values()))
    return sys.modules["torch"].from_numpy(stacked) if _is(frame, "torch", "Tensor") else stacked


def _check_names(names: list[Hashable]) -> None:
    repeated = [name for name, times in Counter(names).items() if times > 1]
    if repeated:
        raise DataError(f"the table: column {repeated[0]!r} appears twice; rename or drop one")
    for name in names:
        try:
            str(name).encode()
            same = unplain(plain(name)) == name
        except (DataError, UnicodeEncodeError):
            same = False
        if not same:
            raise DataError(
                f"a column has the name {name!r}, which cannot be saved and found again; rename it"
            )


def _column(name: Hashable, column: Any) -> Any:
    """A column of a dict; what is of no class that is known becomes a list or an array."""
    if _holder(column)[0] == "array" and not isinstance(column, np.ndarray):
        if isinstance(column, str | bytes | Mapping) or not isinstance(column, Sized):
            raise DataError(
                f"column {name!r} is of type {type(column).__name__}; give a list or an array with "
                "a cell for each row"
            )
        if _is(column, "pandas", "Index") or _is(column, "pandas.api.extensions", "ExtensionArray"):
            return sys.modules["pandas"].Series(column)
        if isinstance(column, Sequence) and not isinstance(column, memoryview):
            return list(column)
        column = np.asarray(column)
    if not getattr(column, "shape", (0,)):
        raise DataError(f"column {name!r} is a single value; give one for each row")
    return column


# pandas


def _read_pandas(series: pd.Series) -> Cells:
    import pandas as pd

    dtype = series.dtype
    if isinstance(dtype, pd.ArrowDtype):
        cells = _read_arrow(_pyarrow().table({"": series.array}))
        cells.form["dtype"] = str(dtype)
        return cells
    missing = series.isna().to_numpy(dtype=bool)
    form: dict[str, Any] = {"dtype": str(dtype)}
    if isinstance(dtype, pd.CategoricalDtype):
        labels = dtype.categories.tolist()
        form |= {
            "categories": [plain(label) for label in labels],
            "of": str(dtype.categories.dtype),
            "ordered": bool(dtype.ordered),
        }
        return Cells("label", series.cat.codes.to_numpy().astype(np.int64), missing, labels, form)
    if isinstance(dtype, pd.StringDtype) and str(dtype) == "string":
        form["dtype"] = f"string[{dtype.storage}]"
    if isinstance(dtype, pd.SparseDtype):
        form |= {"of": str(dtype.subtype), "sparse": plain(dtype.fill_value)}
        series = series.sparse.to_dense()
    if isinstance(dtype, pd.DatetimeTZDtype):
        moments = series.dt.tz_convert(None).to_numpy()
        form["offset"] = _usual_offset(series.dt.tz_localize(None).to_numpy(), moments)
        form["zone"] = str(dtype.tz)
        return cells_of_array(moments, missing, form)
    plain_type = getattr(dtype, "numpy_dtype", None)  # of Int64, Float32, boolean, ...
    if plain_type is not None and plain_type.kind in "biuf":
        return cells_of_array(series.to_numpy(dtype=plain_type, na_value=0), missing, form)
    return cells_of_array(series.to_numpy(), missing, form)


def _usual_offset(local: np.ndarray, utc: np.ndarray) -> int:
    """The commonest difference to UTC, in seconds."""
    apart = (local - utc)[~np.isnat(utc)].astype("timedelta64[s]").astype(np.int64)
    offsets, counts = np.unique(apart, return_counts=True)
    return int(offsets[counts.argmax()]) if len(offsets) else 0


def _write_pandas(cells: Cells) -> pd.Series:
    import pandas as pd

    form, name, gaps = cells.form, cells.form["dtype"], bool(cells.missing.any())
    if "arrow" in form:
        return pd.Series(pd.arrays.ArrowExtensionArray(_write_arrow(cells).column(0)))
    if "sparse" in form:
        dense = {key: value for key, value in form.items() if key != "sparse"}
        series = _write_pandas(replace(cells, form=dense | {"dtype": form["of"]}))
        return series.astype(pd.SparseDtype(form["of"], unplain(form["sparse"])))
    if cells.declared:
        values, codes = _codes(cells)
        try:
            categories = pd.Index(as_objects(values), dtype=form["of"], tupleize_cols=False)
        except (TypeError, ValueError):  # one that is new is of another type
            categories = pd.Index(as_objects(values), dtype=object, tupleize_cols=False)
        dtype = pd.CategoricalDtype(categories, form["ordered"])
        return pd.Series(pd.Categorical.from_codes(codes, dtype=dtype))
    array = natural(cells)
    if gaps and name in ("bool", "int64", "uint64"):
        name = {"bool": "boolean", "int64": "Int64", "uint64": "UInt64"}[name]
    if array.dtype.kind == "f" and "int" in name.lower():
        if gaps and name.islower():
            name = name.replace("int", "Int").replace("uI", "UI")
        numbers = pd.array(as_integers(array, np.dtype(name.lower())), dtype=name)
        if gaps:
            numbers[cells.missing] = pd.NA
        return pd.Series(numbers)
    series = pd.Series(array, dtype=object if array.dtype.kind == "O" else None)
    if array.dtype.kind == "M" and form.get("offset") is not None:
        series = series.dt.tz_localize("UTC")
    return series.astype(name)


def _codes(cells: Cells) -> tuple[list[object], np.ndarray]:
    """Categories, after those of the form labels that are none of them; and codes, -1 for gaps."""
    labels = [unplain(label) for label in cells.form["categories"]]
    seen = [cells.labels[k] for k in np.unique(cells.seen)]
    labels += [label for label in seen if label not in {*labels}]
    code_of = {label: code for code, label in enumerate(labels)}
    codes = np.array([*(code_of.get(label, -1) for label in cells.labels), -1])
    return labels, codes[np.where(cells.missing, -1, cells.values)]


def _pick_pandas(series: pd.Series, more: pd.Series | None, places: np.ndarray) -> pd.Series:
    import pandas as pd

    if more is None:
        return series.iloc[places]
    if len(more) == len(places):
        return more.set_axis(series.index).rename(series.name)
    if isinstance(series.dtype, pd.CategoricalDtype):
        new = [label for label in more.cat.categories if label not in {*series.cat.categories}]
        series = series.cat.add_categories(new)
        more = more.astype(series.dtype)
    values = pd.concat([series, more]).take(places).array
    return pd.Series(values, series.index, series.dtype, series.name)


# Arrow: a column is a table of one, whose field says more than its type


def _read_arrow(table: pa.Table) -> Cells:
    import pyarrow as pa
    import pyarrow.compute as pc

    of, column, types = table.schema.field(0), table.column(0), pa.types
    kind = of.type
    memo = base64.b64encode(pa.schema([of]).serialize()).decode()
    form: dict[str, Any] = {"dtype": str(kind), "arrow": memo}
    if isinstance(kind, pa.BaseExtensionType):
        stored = pa.chunked_array([c.storage for c in column.chunks], kind.storage_type)
        cells = _read_arrow(pa.table({"": stored}))
        cells.form |= form
        return cells
    if types.is_dictionary(kind):
        column = column.unify_dictionaries()
    elif types.is_nested(kind):
        raise DataError(
            f"values of type {kind} cannot be modelled; turn them into columns of numbers, dates "
            "or text"
        )
    column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], type=kind)
    missing = np.asarray(column.is_null())
    if types.is_dictionary(kind):
        labels = column.dictionary.to_pylist()
        places = column.indices.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
        form |= {"categories": [plain(label) for label in labels], "ordered": bool(kind.ordered)}
        return Cells("label", np.where(missing, -1, places), missing, labels, form)
    if types.is_timestamp(kind) and kind.tz is not None:
        local = pc.local_timestamp(column).to_numpy(zero_copy_only=False)
        form["offset"] = _usual_offset(local, column.to_numpy(zero_copy_only=False))
        form["zone"] = str(kind.tz)
    if types.is_time(kind):
        units = column.cast(pa.int32() if types.is_time32(kind) else pa.int64()).cast(pa.float64())
        per_second = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[kind.unit]
        seconds = units.to_numpy(zero_copy_only=False) / per_second
        return cells_of_array(seconds, missing, form | {"store": "time"})
    if types.is_boolean(kind) or types.is_integer(kind):
        column = column.fill_null(0 if types.is_integer(kind) else False)
    elif not (types.is_floating(kind) or types.is_temporal(kind)):
        return cells_of_array(as_objects(column.to_pylist()), missing, form)
    return cells_of_array(column.to_numpy(zero_copy_only=False), missing, form)


def _write_arrow(cells: Cells) -> pa.Table:
    pa = _pyarrow()
    if "arrow" not in cells.form:
        return pa.table({"": pa.array(objects_of(cells), from_pandas=True)})
    of = _field_of(cells.form)
    if cells.missing.any():
        of = of.with_nullable(True)
    if isinstance(of.type, pa.BaseExtensionType):
        made = of.type.wrap_array(_arrow_array(cells, of.type.storage_type))
    else:
        made = _arrow_array(cells, of.type)
    return pa.Table.from_arrays([made], schema=pa.schema([of]))


def _field_of(form: Form) -> pa.Field:
    pa = _pyarrow()
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(form["arrow"]))).field(0)


def _arrow_array(cells: Cells, kind: pa.DataType) -> pa.Array:
    import pyarrow as pa

    gaps = cells.missing
    if cells.declared:
        labels, codes = _codes(cells)
        return pa.DictionaryArray.from_arrays(
            pa.array(np.where(gaps, 0, codes), type=kind.index_type, mask=gaps),
            pa.array(labels, type=kind.value_type),
            ordered=kind.ordered,
        )
    array = natural(cells)
    if array.dtype.kind == "f" and pa.types.is_integer(kind):
        array = as_integers(array, np.dtype(kind.to_pandas_dtype()))
    if array.dtype.kind == "O":
        return pa.array(array, type=kind)
    made = pa.array(array, mask=gaps)
    if pa.types.is_timestamp(kind):
        made = made.cast(pa.timestamp("us", tz=kind.tz))
    return made.cast(kind, safe=False)


def _pick_arrow(table: pa.Table, more: pa.Table | None, places: np.ndarray) -> pa.Table:
    import pyarrow as pa

    if more is not None and more.num_rows == len(places):
        return more
    of, below = table.schema.field(0), [] if more is None else more.column(0).chunks
    joined = pa.chunked_array([*table.column(0).chunks, *below], of.type)
    try:
        picked = joined.unify_dictionaries().take(pa.array(places))
    except NotImplementedError:  # views of text
        values = joined.to_pylist()
        picked = pa.array([values[place] for place in places.tolist()], of.type)
    return pa.table([picked], schema=pa.schema([of]))


def _pick_chunks(
    column: pa.ChunkedArray, more: pa.ChunkedArray | None, places: np.ndarray
) -> pa.ChunkedArray:
    table, below = (None if c is None else _pyarrow().table({"": c}) for c in (column, more))
    return _pick_arrow(table, below, places).column(0)


def _joined(columns: Mapping[Hashable, pa.Table], metadata: object) -> pa.Table:
    """A table of tables of one column."""
    pa = _pyarrow()
    fields = [table.schema.field(0).with_name(name) for name, table in columns.items()]
    schema = pa.schema(fields, metadata)
    return pa.Table.from_arrays([table.column(0) for table in columns.values()], schema=schema)


def _pyarrow() -> ModuleType:
    words = 'Arrow and polars tables need pyarrow: pip install "selfnorm[frames]"'
    return optional("pyarrow", words)


# polars


def _read_polars(series: pl.Series) -> Cells:
    import polars as pl

    if series.dtype == pl.Object or "128" in str(series.dtype):
        raise DataError(
            f"values of type {series.dtype} cannot be modelled; cast them to numbers or text"
        )
    _pyarrow()
    return _read_arrow(series.to_frame("").to_arrow())


def _write_polars(cells: Cells) -> pl.Series:
    import polars as pl

    series: Any = pl.from_arrow(_write_arrow(cells)).to_series()  # type: ignore[union-attr]
    if series.null_count() > cells.missing.sum():  # polars reads it so
        raise ValueError("a level is none of those of the Enum")
    return series


def _pick_polars(series: pl.Series, more: pl.Series | None, places: np.ndarray) -> pl.Series:
    import polars as pl

    if more is None:
        return series.gather(places)
    if len(more) == len(places):
        return more.alias(series.name)
    return pl.concat([series, more.alias(series.name).cast(series.dtype)]).gather(places)


# Arrays, lists, tensors


def _read_array(column: ArrayLike) -> Cells:
    column = column if isinstance(column, np.ndarray) else np.asarray(column)
    form = {"dtype": str(column.dtype)}
    return cells_of_array(np.ma.getdata(column), np.ma.getmaskarray(column), form)


def _pick_array(column: np.ndarray, more: np.ndarray | None, places: np.ndarray) -> np.ndarray:
    if more is None or len(more) == len(places):
        return column[places] if more is None else more
    join = np.ma.concatenate if np.ma.isMA(column) else np.concatenate
    return join([column, more])[places]


def _read_tensor(tensor: Tensor) -> Cells:
    dtype = str(tensor.dtype).removeprefix("torch.")
    cells = _read_array((tensor.float() if dtype == "bfloat16" else tensor).numpy(force=True))
    cells.form["tensor"] = dtype
    return cells


def _write_tensor(cells: Cells) -> Tensor:
    import torch

    tensor = torch.from_numpy(array_of(cells))
    wanted = getattr(torch, cells.form.get("tensor", "float64"))
    return tensor if cells.missing.any() and not wanted.is_floating_point else tensor.to(wanted)


def _pick_tensor(tensor: Tensor, more: Tensor | None, places: np.ndarray) -> Tensor:
    import torch

    tensor = tensor.detach()
    if more is not None and len(more) == len(places):
        return more.to(tensor.device)
    both = tensor if more is None else torch.cat([tensor, more.to(tensor)])
    return both[torch.from_numpy(places).to(tensor.device)]


def _stacked(columns: Sequence[Any]) -> Any:
    """Columns side by side."""
    if _is(columns[0], "torch", "Tensor"):
        return sys.modules["torch"].stack(columns, 1)
    if any(np.ma.isMA(column) for column in columns):
        return np.ma.stack(columns, 1)
    if any(array.dtype.kind == "O" for array in columns):
        columns = [array.astype(object) for array in columns]
    return np.stack(columns, 1)


def _pick_list(
    column: Sequence[object], more: Sequence[object] | None, places: np.ndarray
) -> Sequence[object]:
    both = [*column, *(more or ())]
    chosen = [both[place] for place in places.tolist()]
    return tuple(chosen) if isinstance(column, tuple) else chosen


def _of_lists(kind: type[list[object]] | type[tuple[object, ...]]) -> Holder:
    return Holder(
        ("builtins", kind.__name__),
        lambda column: _read_array(as_objects(list(column))),
        lambda cells: kind(array_of(cells).tolist()),
        _pick_list,
    )


def _of_arrow(name: str, finished: Callable[[pa.ChunkedArray], object]) -> Holder:
    return Holder(
        ("pyarrow", name),
        lambda column: _read_arrow(_pyarrow().table({"": column})),
        lambda cells: finished(_write_arrow(cells).column(0)),
        lambda *of: finished(_pick_chunks(*of)),
    )


HOLDERS = {
    "pandas": Holder(("pandas", "Series"), _read_pandas, _write_pandas, _pick_pandas),
    "polars": Holder(("polars", "Series"), _read_polars, _write_polars, _pick_polars),
    "arrow": Holder(("pyarrow", "Table"), _read_arrow, _write_arrow, _pick_arrow),
    "tensor": Holder(("torch", "Tensor"), _read_tensor, _write_tensor, _pick_tensor),
    "list": _of_lists(list),
    "tuple": _of_lists(tuple),
    "chunked array": _of_arrow("ChunkedArray", lambda column: column),
    "arrow array": _of_arrow("Array", lambda column: column.combine_chunks()),
    "cells": Holder(
        ("selfnorm.columns.cells", "Cells"),
        lambda column: column,
        array_of,
        lambda column, *of: _pick_array(objects_of(column), *of),
    ),
    "array": Holder((), _read_array, array_of, _pick_array),
}


def _holder(column: object) -> tuple[str, Holder]:
    """How a column is held; what is neither of these is taken as an array."""
    for held, holder in HOLDERS.items():
        if holder.classes and _is(column, *holder.classes):
            return held, holder
    return "array", HOLDERS["array"]
