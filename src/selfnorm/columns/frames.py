"""Tables as people keep them, column by column, and back: pandas, polars, Arrow, arrays, dicts.

A column is read into :class:`Cells`: numbers (float64), moments (seconds since 1970, UTC) or places
in a list of labels, with a mask of gaps and a memo ``form``, plain JSON, of how the column was
stored. :func:`write` makes the same kind of table of the same types from cells and memos. polars
goes through Arrow, whose types say all that polars needs.
"""

from __future__ import annotations

import base64
import datetime as dt
import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any

import numpy as np

from selfnorm.errors import DataError

FRAMES = ("pandas", "polars", "arrow", "dict", "array", "file")  # the last: a dict of its texts
EXACT = 2**53  # whole numbers beyond are not all held by a float
_EPOCH = dt.datetime(1970, 1, 1)
_PLAIN = (str, bool, int, float, dt.date, Decimal)  # labels that JSON can hold


@dataclass
class Cells:
    """The cells of one column.

    Attributes:
        kind: ``"number"``, ``"date"`` or ``"label"``.
        values: float64 numbers, int64 seconds since 1970 (UTC), or int64 places in ``labels``.
        missing: where there is a gap.
        labels: distinct labels, as Python values; empty for numbers and dates.
        form: how the column was stored, plain JSON; ``form["dtype"]`` is what a user calls it.
    """

    kind: str
    values: np.ndarray
    missing: np.ndarray
    labels: list[Any] = field(default_factory=list)
    form: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.values)

    def rows(self, which: slice) -> Cells:
        """Some of the rows; labels stay, whether they are among them or not."""
        return replace(self, values=self.values[which], missing=self.missing[which])

    @property
    def seen(self) -> np.ndarray:
        """The values without gaps."""
        return self.values[~self.missing]

    @property
    def declared(self) -> bool:
        """Whether the table itself says that the column is a category."""
        return "categories" in self.form


def read(frame: Any) -> tuple[str, dict[Any, Cells]]:
    """The kind of a table and the cells of its columns by name (``x0``, ``x1``, ... of an array).

    Example:
        >>> kind, columns = read({"a": [1, 2, None], "b": ["x", "y", "x"]})
        >>> kind, columns["a"].values, columns["b"].labels
        ('dict', array([ 1.,  2., nan]), ['x', 'y'])
    """
    module = type(frame).__module__.split(".")[0]
    reader: Callable[[Any], Cells]
    if module == "pandas":
        if not hasattr(frame, "columns"):
            raise DataError("give a DataFrame, not a Series: series.to_frame()")
        kind, names, reader = "pandas", list(frame.columns), _read_pandas
        columns = [frame.iloc[:, j] for j in range(len(names))]
    elif module in ("polars", "pyarrow"):
        _pyarrow()
        frame = frame.collect() if hasattr(frame, "collect") else frame
        kind, table = ("polars", frame.to_arrow()) if module == "polars" else ("arrow", frame)
        names, reader = list(table.schema.names), lambda pair: _read_arrow(*pair)
        columns = [(table.column(j), table.schema.field(j)) for j in range(len(names))]
    elif isinstance(frame, dict):
        kind, names, columns, reader = "dict", list(frame), list(frame.values()), _read_dict
    else:
        array = frame if isinstance(frame, np.ma.MaskedArray) else np.asarray(frame)
        if array.ndim != 2:
            raise DataError(
                f"the table must have rows and columns, got shape {array.shape}; a single column "
                "needs x[:, None]"
            )
        kind, columns, reader = "array", list(array.T), _read_array
        names = [f"x{j}" for j in range(len(columns))]
    repeated = [name for name, times in Counter(names).items() if times > 1]
    if repeated:
        raise DataError(f"the table: column {repeated[0]!r} appears twice; rename or drop one")
    cells = {n: _read_named(reader, n, c) for n, c in zip(names, columns, strict=True)}
    lengths = {name: len(column) for name, column in cells.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"the columns have different numbers of rows: {lengths}")
    if not cells or not max(lengths.values()):
        raise DataError("the table has no rows" if cells else "the table has no columns")
    return kind, cells


def write(kind: str, columns: dict[Any, Cells]) -> Any:
    """A table of the given kind; each column is stored as the ``form`` of its cells says."""
    names = list(columns)
    if kind == "pandas":
        import pandas as pd

        frame = pd.concat([_write_pandas(cells) for cells in columns.values()], axis=1)
        several = all(isinstance(name, tuple) for name in names)
        frame.columns = pd.MultiIndex.from_tuples(names) if several else pd.Index(names)
        return frame
    if kind in ("polars", "arrow"):
        pa = _pyarrow()
        pairs = [_write_arrow(cells) for cells in columns.values()]
        schema = pa.schema([f.with_name(name) for (_, f), name in zip(pairs, names, strict=True)])
        table = pa.Table.from_arrays([array for array, _ in pairs], schema=schema)
        if kind == "arrow":
            return table
        import polars as pl

        return pl.from_arrow(table)
    arrays = {name: _write_array(cells) for name, cells in columns.items()}
    if kind in ("dict", "file"):
        lists = {name: columns[name].form.get("list") for name in columns}
        return {name: a.tolist() if lists[name] else a for name, a in arrays.items()}
    if any(array.dtype.kind == "O" for array in arrays.values()):
        return np.stack([array.astype(object) for array in arrays.values()], 1)
    return np.column_stack(list(arrays.values()))


def numbers_like(frame: Any, columns: Mapping[Any, np.ndarray]) -> Any:
    """Columns of numbers as the same kind of table as another one, row by row (pandas: its index).

    Example:
        >>> numbers_like([[1, 2], [3, 4]], {"a": np.zeros(2), "b": np.ones(2)})
        array([[0., 1.],
               [0., 1.]])
    """
    module = type(frame).__module__.split(".")[0]
    if module == "pandas":
        import pandas as pd

        return pd.DataFrame(dict(columns), index=frame.index)
    if module in ("polars", "pyarrow"):
        table = _pyarrow().table({str(name): column for name, column in columns.items()})
        if module == "pyarrow":
            return table
        import polars as pl

        return pl.from_arrow(table)
    return dict(columns) if isinstance(frame, dict) else np.column_stack(list(columns.values()))


def filled(old: Cells, new: Cells, gap: np.ndarray) -> Cells:
    """Cells with those at ``gap`` taken from others, which may be of another kind only if all are.

    Example:
        >>> old = _read_dict(["a", None, "b"])
        >>> new = _read_dict(["c", "a", "a"])
        >>> _write_array(filled(old, new, old.missing)).tolist()
        ['a', 'a', 'b']
    """
    if not gap.any():
        return old
    if old.kind != new.kind or gap.all():
        return new
    places, labels = new.values, old.labels
    if old.kind == "label":
        place_of = {(type(label), label): i for i, label in enumerate(labels)}
        added = [label for label in new.labels if (type(label), label) not in place_of]
        labels = [*labels, *added]
        place_of |= {(type(v), v): i for i, v in enumerate(added, len(old.labels))}
        places = np.array([*(place_of[type(v), v] for v in new.labels), -1])[new.values]
    values = np.where(gap, places, old.values)
    return Cells(old.kind, values, np.where(gap, new.missing, old.missing), labels, old.form)


# Reading


def _read_named(reader: Callable[[Any], Cells], name: Any, column: Any) -> Cells:
    try:
        return reader(column)
    except DataError as error:
        raise DataError(f"column {name!r}: {error}") from None


def _read_pandas(series: Any) -> Cells:
    import pandas as pd

    dtype = series.dtype
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
    if isinstance(dtype, pd.ArrowDtype):
        pa = _pyarrow()
        table = pa.table({"": series.array})
        column = _read_arrow(table.column(0), table.schema.field(0))
        column.form["dtype"] = str(dtype)
        return column
    if isinstance(dtype, pd.StringDtype) and str(dtype) == "string":
        form["dtype"] = f"string[{dtype.storage}]"
    if isinstance(dtype, pd.SparseDtype):
        series = series.sparse.to_dense()
    if isinstance(dtype, pd.DatetimeTZDtype):
        moments = series.dt.tz_convert(None).to_numpy()
        form["offset"] = _usual_offset(series.dt.tz_localize(None).to_numpy(), moments)
        form["zone"] = str(dtype.tz)
        return _of_array(moments, missing, form)
    plain_type = getattr(dtype, "numpy_dtype", None)  # of Int64, Float32, boolean, ...
    if plain_type is not None and plain_type.kind in "biuf":
        return _of_array(series.to_numpy(dtype=plain_type, na_value=0), missing, form)
    return _of_array(series.to_numpy(), missing, form)


def _usual_offset(local: np.ndarray, utc: np.ndarray) -> int:
    """The commonest difference to UTC, in seconds."""
    apart = (local - utc)[~np.isnat(utc)].astype("timedelta64[s]").astype(np.int64)
    offsets, counts = np.unique(apart, return_counts=True)
    return int(offsets[counts.argmax()]) if len(offsets) else 0


def _read_arrow(column: Any, of: Any) -> Cells:
    import pyarrow as pa
    import pyarrow.compute as pc

    kind, types = of.type, pa.types
    if types.is_dictionary(kind):
        column = column.unify_dictionaries()
    column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], type=kind)
    memo = base64.b64encode(pa.schema([of]).serialize())
    form: dict[str, Any] = {"dtype": str(kind), "arrow": memo.decode()}
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
    if types.is_boolean(kind) or types.is_integer(kind):
        column = column.fill_null(0 if types.is_integer(kind) else False)
    elif not (types.is_floating(kind) or types.is_temporal(kind)) or types.is_time(kind):
        return _of_array(_as_object(column.to_pylist()), missing, form)
    return _of_array(column.to_numpy(zero_copy_only=False), missing, form)


def _read_dict(cells: Any) -> Cells:
    if isinstance(cells, list | tuple):
        column = _read_array(_as_object(list(cells)))
        column.form["list"] = True
        return column
    if type(cells).__module__.split(".")[0] in ("pandas", "polars", "pyarrow"):
        cells = cells.to_numpy()
    return _read_array(cells if isinstance(cells, np.ndarray) else np.asarray(cells))


def _read_array(column: np.ndarray) -> Cells:
    form = {"dtype": str(column.dtype)}
    return _of_array(np.ma.getdata(column), np.ma.getmaskarray(column), form)


def _of_array(column: np.ndarray, missing: np.ndarray, form: dict[str, Any]) -> Cells:
    """Cells of an array of any type, whatever stands where there is a gap."""
    kind = column.dtype.kind
    if column.ndim != 1:
        raise DataError(f"expected one cell per row, got an array of shape {column.shape}")
    if kind == "b":
        places = np.where(missing, -1, column.astype(np.int64))
        return Cells("label", places, missing, [False, True], form)
    if kind in "iu" and len(column) and max(-int(column.min()), int(column.max())) >= EXACT:
        return _of_objects(column.tolist(), missing, form)
    if kind in "iuf":
        wide = column.astype(np.float64)
        if column.dtype in (np.float16, np.float32):
            wide = _shortest(wide, column.dtype)
        values = np.where(missing, np.nan, wide)
        return Cells("number", values, np.isnan(values), [], form)
    if kind == "M":
        moments = column.astype("datetime64[us]")
        missing = missing | np.isnat(moments)
        micro = np.where(missing, 0, moments.astype(np.int64))
        if (micro % 10**6).any():
            form = form | {"finer": True}  # than a second: left out
        return Cells("date", micro // 10**6, missing, [], form)
    if kind == "m":
        spans = column.astype("timedelta64[us]")
        missing = missing | np.isnat(spans)
        seconds = np.where(missing, np.nan, spans.astype(np.int64) / 1e6)
        return Cells("number", seconds, missing, [], form | {"store": "duration"})
    if kind not in "UOT":
        raise DataError(f"values of type {column.dtype} cannot be modelled; turn them into numbers")
    pandas = sys.modules.get("pandas")
    if kind == "O" and pandas is not None:  # knows pd.NA, which cannot be compared
        missing = missing | pandas.isna(column)
    elif kind == "O":
        missing = missing | [value is None or value != value for value in column.tolist()]
    return _of_objects(column.tolist(), missing, form)


def _of_objects(values: list[Any], missing: np.ndarray, form: dict[str, Any]) -> Cells:
    """Cells of Python objects: numbers, dates or labels by what they all are."""
    if missing.any():
        if type(values[int(missing.argmax())]) is float:
            form = form | {"nan": True}  # how gaps are written among objects; None otherwise
        values = [None if gap else v for v, gap in zip(values, missing.tolist(), strict=True)]
    types = set(map(type, values)) - {type(None)}
    if any(issubclass(t, np.generic) for t in types):
        values = [v.item() if isinstance(v, np.generic) else v for v in values]
        types = set(map(type, values)) - {type(None)}
    if types and types <= {int, float} and not _beyond_floats(values):
        form = form | {"store": "int" if types == {int} else "float"}
        return Cells("number", _floats(values), missing, [], form)
    if types == {Decimal}:
        decimals = max(-v.as_tuple().exponent for v in values if v is not None)
        form = form | {"store": "decimal", "decimals": max(decimals, 0)}
        return Cells("number", _floats(values), missing, [], form)
    if types == {dt.date}:
        days = np.array(values, dtype="datetime64[D]")
        return _of_array(days, missing, form | {"store": "date"})
    if types and all(issubclass(t, dt.datetime) for t in types):
        return _datetimes(values, missing, form | {"store": "datetime"})
    if types and all(issubclass(t, dt.timedelta) for t in types):
        return _of_array(np.array(values, dtype="timedelta64[us]"), missing, form)
    strange = {t for t in types if not issubclass(t, _PLAIN) and t.__name__ != "Interval"}
    if strange:  # periods, times of day, lists: known by their text
        form = form | {"as_text": sorted(t.__name__ for t in strange)}
        values = [str(v) if type(v) in strange else v for v in values]
    # 1, 1.0 and True are equal as keys: labels of several types are told apart by type as well
    mixed = len(types) > 1
    keys, gap = [(type(v), v) for v in values] if mixed else values, (type(None), None)
    distinct = dict.fromkeys(keys)
    distinct.pop(gap if mixed else None, None)
    places = dict(zip(distinct, range(len(distinct)), strict=True))
    places[gap if mixed else None] = -1
    codes = np.fromiter(map(places.__getitem__, keys), np.int64, len(keys))
    labels = [key[1] for key in distinct] if mixed else list(distinct)
    return Cells("label", codes, missing, labels, form)


def _as_object(values: list[Any]) -> np.ndarray:
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


def _beyond_floats(values: list[Any]) -> bool:
    return any(type(v) is int and abs(v) >= EXACT for v in values)


def _floats(values: list[Any]) -> np.ndarray:
    return np.array([np.nan if v is None else float(v) for v in values], dtype=np.float64)


def _datetimes(values: list[Any], missing: np.ndarray, form: dict[str, Any]) -> Cells:
    """Datetime objects, naive or of a time zone."""
    zones = {v.tzinfo for v in values if v is not None}
    if zones != {None}:
        offsets = [v.utcoffset() or dt.timedelta(0) for v in values if v is not None]
        usual = max(set(offsets), key=offsets.count)
        zone = str(next(iter(zones))) if len(zones) == 1 else "UTC"
        form = form | {"offset": int(usual.total_seconds()), "zone": zone}
        values = [v and v.astimezone(dt.timezone.utc).replace(tzinfo=None) for v in values]
    return _of_array(np.array(values, dtype="datetime64[us]"), missing, form)


def _shortest(wide: np.ndarray, single: np.dtype) -> np.ndarray:
    """The doubles of fewest digits that are the same in lower precision: 0.1, not 0.10000000149."""
    size = np.where(np.isfinite(wide) & (wide != 0), np.abs(wide), 1.0)
    exponent = np.floor(np.log10(size))
    shortest = wide
    for digits in (4, 3) if single == np.float16 else (8, 7, 6):
        unit = 10.0 ** np.clip(exponent - digits + 1, -300, 300)
        # 10^-3 is not exact, 10^3 is: divide by whole numbers where that can be
        inverse = 10.0 ** np.clip(digits - 1 - exponent, -300, 300)
        short = np.where(unit < 1, np.round(wide * inverse) / inverse, np.round(wide / unit) * unit)
        with np.errstate(over="ignore"):
            same = short.astype(single) == wide.astype(single)
        shortest = np.where(same, short, shortest)
    return shortest


# Writing


def _objects(cells: Cells) -> np.ndarray:
    """Cells as Python objects, ``None`` (NaN if it was so) for a gap."""
    form, store = cells.form, cells.form.get("store")
    gap = np.nan if form.get("nan") else None
    if cells.kind == "label":
        labels = _as_object([*cells.labels, gap])
        return labels[np.where(cells.missing, len(cells.labels), cells.values)]
    column: list[Any] = np.nan_to_num(cells.values).tolist()
    if cells.kind == "date":
        column = [_EPOCH + dt.timedelta(seconds=s) for s in column]
        if store == "date":
            column = [moment.date() for moment in column]
        elif "zone" in form:
            zone = _zone(form["zone"], form["offset"])
            column = [m.replace(tzinfo=dt.timezone.utc).astimezone(zone) for m in column]
    elif store == "decimal":
        column = [Decimal(f"{v:.{form['decimals']}f}") for v in column]
    elif store == "duration":
        column = [dt.timedelta(seconds=s) for s in column]
    elif store == "int":
        column = [round(v) for v in column]
    objects = _as_object(column)
    objects[cells.missing] = gap
    return objects


def _zone(name: str, offset: int) -> dt.tzinfo:
    import zoneinfo

    try:
        return dt.timezone.utc if name == "UTC" else zoneinfo.ZoneInfo(name)
    except (ValueError, zoneinfo.ZoneInfoNotFoundError):  # an offset rather than a place
        return dt.timezone(dt.timedelta(seconds=offset))


def ahead_of_utc(moments: np.ndarray, form: Mapping[str, Any]) -> np.ndarray:
    """Seconds by which the clocks of a column's time zone are ahead of UTC at moments (UTC).

    Example:
        >>> winter, summer = 1_704_067_200, 1_719_792_000
        >>> ahead_of_utc(np.array([winter, summer]), {"zone": "Europe/Berlin", "offset": 3600})
        array([3600, 7200])
    """
    zone, first = _zone(form["zone"], form["offset"]), _EPOCH.replace(tzinfo=dt.timezone.utc)
    half_hours = np.clip(moments // 1800, -(10**7), 10**7)  # at which clocks are set; 1400 to 2540
    distinct, places = np.unique(half_hours, return_inverse=True)
    there = [(first + dt.timedelta(seconds=1800 * k)).astimezone(zone) for k in distinct.tolist()]
    ahead = [(moment.utcoffset() or dt.timedelta(0)).total_seconds() for moment in there]
    return np.array(ahead, dtype=np.int64)[places].reshape(np.shape(moments))


def _array(cells: Cells) -> np.ndarray:
    """Moments, durations and plain numbers as NumPy's types (NaT, NaN for gaps), else objects."""
    if cells.kind == "date" and "store" not in cells.form:
        moments = cells.values.astype("datetime64[s]").astype("datetime64[us]")
        return np.where(cells.missing, np.datetime64("NaT"), moments)
    if cells.form.get("store") == "duration" and cells.form["dtype"] != "object":
        spans = np.round(np.nan_to_num(cells.values) * 1e6).astype("timedelta64[us]")
        return np.where(cells.missing, np.timedelta64("NaT"), spans)
    if cells.kind == "number" and "store" not in cells.form:
        return np.where(cells.missing, np.nan, cells.values)
    return _objects(cells)


def _whole(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Numbers within the range of a type of whole numbers, 0 for gaps."""
    ends = np.iinfo(dtype)
    low, high = max(int(ends.min), -EXACT), min(int(ends.max), EXACT)
    return np.clip(np.round(np.nan_to_num(values)), low, high).astype(dtype)


def _write_pandas(cells: Cells) -> Any:
    import pandas as pd

    form, name, gaps = cells.form, cells.form["dtype"], bool(cells.missing.any())
    if "arrow" in form:
        array, of = _write_arrow(cells)
        return pd.Series(array, dtype=pd.ArrowDtype(of.type))
    if cells.declared:
        values = [unplain(label) for label in form["categories"]]
        dtype = pd.CategoricalDtype(pd.Index(values, dtype=form["of"]), form["ordered"])
        return pd.Series(pd.Categorical(_objects(cells), dtype=dtype))
    array = _array(cells)
    if gaps and name in ("bool", "int64", "uint64"):
        name = {"bool": "boolean", "int64": "Int64", "uint64": "UInt64"}[name]
    if array.dtype.kind == "f" and "int" in name.lower():
        if gaps and name.islower():
            name = name.replace("int", "Int").replace("uI", "UI")
        numbers = pd.array(_whole(array, np.dtype(name.lower())), dtype=name)
        if gaps:
            numbers[cells.missing] = pd.NA
        return pd.Series(numbers)
    series = pd.Series(array)
    if array.dtype.kind == "M" and form.get("offset") is not None:
        series = series.dt.tz_localize("UTC")
    try:
        return series.astype(name)
    except (TypeError, ValueError):
        if "as_text" in form:  # of which only the text is known
            return series
        raise


def _write_arrow(cells: Cells) -> tuple[Any, Any]:
    import pyarrow as pa

    of = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(cells.form["arrow"]))).field(0)
    gaps = cells.missing
    if gaps.any():
        of = of.with_nullable(True)
    if "as_text" in cells.form:
        return pa.array(_objects(cells), type=pa.string()), of.with_type(pa.string())
    if cells.declared:
        labels = [unplain(label) for label in cells.form["categories"]]
        place = {label: i for i, label in enumerate(labels)}
        places = np.array([*(place[label] for label in cells.labels), 0])[cells.values]
        array = pa.DictionaryArray.from_arrays(
            pa.array(places, type=of.type.index_type, mask=gaps),
            pa.array(labels, type=of.type.value_type),
            ordered=of.type.ordered,
        )
        return array, of
    array = _array(cells)
    if array.dtype.kind == "f" and pa.types.is_integer(of.type):
        array = _whole(array, np.dtype(of.type.to_pandas_dtype()))
    if array.dtype.kind == "O":
        return pa.array(array, type=of.type), of
    made = pa.array(array, mask=gaps)
    if pa.types.is_timestamp(of.type):
        made = made.cast(pa.timestamp("us", tz=of.type.tz))
    return made.cast(of.type, safe=False), of


def _write_array(cells: Cells) -> np.ndarray:
    dtype = np.dtype(cells.form["dtype"])
    array, gaps = _array(cells), bool(cells.missing.any())
    if array.dtype.kind == "f" and dtype.kind in "iu" and not gaps:
        return _whole(array, dtype)
    if dtype.kind == "U" and not gaps:
        text = array.astype(str)  # a longer text than any before must not be cut
        return text.astype(max(text.dtype, dtype))
    if gaps and dtype.kind in "iu":
        return array.astype(np.float64)
    return array if gaps and dtype.kind in "bU" else array.astype(dtype)


def _pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError:
        raise DataError(
            'Arrow and polars tables need pyarrow: pip install "selfnorm[frames]"'
        ) from None
    return pyarrow


# Labels as JSON


def plain(label: Any) -> Any:
    """A label as JSON holds it; :func:`unplain` is its inverse.

    Example:
        >>> unplain(plain(dt.date(2020, 2, 29)))
        datetime.date(2020, 2, 29)
    """
    if label is None or isinstance(label, str | bool | int):
        return label
    if isinstance(label, float):
        return label if math.isfinite(label) else {"float": str(label)}
    if isinstance(label, dt.datetime):
        return {"datetime": label.isoformat()}
    if isinstance(label, dt.date):
        return {"date": label.isoformat()}
    if isinstance(label, Decimal):
        return {"decimal": str(label)}
    if isinstance(label, tuple):
        return {"tuple": [plain(item) for item in label]}
    if type(label).__name__ == "Interval":
        return {"interval": [plain(label.left), plain(label.right), label.closed]}
    if isinstance(label, np.generic):
        return plain(label.item())
    return str(label)


def unplain(label: Any) -> Any:
    """The label that :func:`plain` wrote."""
    if not isinstance(label, dict):
        return label
    ((what, value),) = label.items()
    if what == "interval":
        import pandas as pd

        return pd.Interval(unplain(value[0]), unplain(value[1]), closed=value[2])
    readers: dict[str, Any] = {
        "float": float,
        "datetime": dt.datetime.fromisoformat,
        "date": dt.date.fromisoformat,
        "decimal": Decimal,
        "tuple": lambda items: tuple(unplain(item) for item in items),
    }
    return readers[what](value)
