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
from collections.abc import Hashable
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import numpy as np

from selfnorm._inputs import refuse_repeated_names
from selfnorm.errors import DataError

EXACT = 2**53  # whole numbers beyond are not all held by a float
_EPOCH = dt.datetime(1970, 1, 1)


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

    @property
    def seen(self) -> np.ndarray:
        """The values without gaps."""
        return self.values[~self.missing]


def read(frame: Any) -> tuple[str, dict[Any, Cells]]:
    """The kind of a table and the cells of its columns by name (``x0``, ``x1``, ... of an array).

    Example:
        >>> kind, columns = read({"a": [1, 2, None], "b": ["x", "y", "x"]})
        >>> kind, columns["a"].values, columns["b"].labels
        ('dict', array([ 1.,  2., nan]), ['x', 'y'])
    """
    module = type(frame).__module__.split(".")[0]
    if module == "pandas":
        if not hasattr(frame, "columns"):
            raise DataError("give a DataFrame, not a Series: series.to_frame()")
        refuse_repeated_names(frame, "the table")
        names = list(frame.columns)
        columns = [_read_pandas(frame.iloc[:, j]) for j in range(len(names))]
        kind = "pandas"
    elif module in ("polars", "pyarrow"):
        _pyarrow()
        if hasattr(frame, "collect"):
            frame = frame.collect()
        kind = "polars" if module == "polars" else "arrow"
        table = frame.to_arrow() if module == "polars" else frame
        names = list(table.schema.names)
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise DataError(f"the table: column {repeated[0]!r} appears twice; rename one")
        columns = [_read_arrow(table.column(j), table.schema.field(j)) for j in range(len(names))]
    elif isinstance(frame, dict):
        kind, names = "dict", list(frame)
        columns = [_read_dict(cells) for cells in frame.values()]
        if len({len(c) for c in columns}) > 1:
            raise DataError(
                "the columns have different numbers of rows: "
                + ", ".join(f"{name!r} {len(c)}" for name, c in zip(names, columns, strict=True))
            )
    else:
        kind = "array"
        array = frame if isinstance(frame, np.ma.MaskedArray) else np.asarray(frame)
        if array.ndim != 2:
            raise DataError(
                f"the table must have rows and columns, got shape {array.shape}; a single column "
                "needs x[:, None]"
            )
        names = [f"x{j}" for j in range(array.shape[1])]
        columns = [_read_array(array[:, j]) for j in range(array.shape[1])]
    if not columns:
        raise DataError("the table has no columns")
    if len(columns[0]) == 0:
        raise DataError("the table has no rows")
    return kind, dict(zip(names, columns, strict=True))


def write(kind: str, columns: dict[Any, Cells]) -> Any:
    """A table of the given kind; each column is stored as the ``form`` of its cells says."""
    if kind == "pandas":
        import pandas as pd

        series = [_write_pandas(cells) for cells in columns.values()]
        frame = pd.concat(series, axis=1) if series else pd.DataFrame()
        names = list(columns)
        several = bool(names) and all(isinstance(name, tuple) for name in names)
        frame.columns = pd.MultiIndex.from_tuples(names) if several else pd.Index(names)
        return frame
    if kind in ("polars", "arrow"):
        pa = _pyarrow()
        pairs = [_write_arrow(cells) for cells in columns.values()]
        schema = pa.schema([f.with_name(name) for (_, f), name in zip(pairs, columns, strict=True)])
        table = pa.Table.from_arrays([array for array, _ in pairs], schema=schema)
        if kind == "arrow":
            return table
        import polars as pl

        return pl.from_arrow(table)
    arrays = {name: _write_array(cells) for name, cells in columns.items()}
    if kind == "dict":
        lists = {name: columns[name].form.get("list") for name in columns}
        return {name: a.tolist() if lists[name] else a for name, a in arrays.items()}
    if any(array.dtype.kind == "O" for array in arrays.values()):
        stacked = np.empty((len(next(iter(arrays.values()))), len(arrays)), dtype=object)
        for j, array in enumerate(arrays.values()):
            stacked[:, j] = array
        return stacked
    return np.column_stack(list(arrays.values()))


# Reading


def _read_pandas(series: Any) -> Cells:
    import pandas as pd
    from pandas.api import types

    dtype = series.dtype
    name = str(dtype)
    if name == "string":
        name = f"string[{dtype.storage}]"
    form: dict[str, Any] = {"dtype": name}
    missing = series.isna().to_numpy(dtype=bool)
    if isinstance(dtype, pd.CategoricalDtype):
        labels = dtype.categories.tolist()
        form |= {
            "dtype": "category",
            "categories": [plain(label) for label in labels],
            "of": str(dtype.categories.dtype),
            "ordered": bool(dtype.ordered),
        }
        return Cells("label", series.cat.codes.to_numpy().astype(np.int64), missing, labels, form)
    if isinstance(dtype, pd.SparseDtype):
        return _read_pandas(series.sparse.to_dense())
    if types.is_bool_dtype(dtype) and not types.is_object_dtype(dtype):
        return _booleans(series.to_numpy(dtype=bool, na_value=False), missing, form)
    if types.is_complex_dtype(dtype):
        raise DataError(f"column {series.name!r} holds complex numbers; give two real columns")
    if types.is_integer_dtype(dtype):
        whole = series[~missing].to_numpy()
        if len(whole) and max(-int(whole.min()), int(whole.max())) >= EXACT:
            return _of_objects(series.to_list(), missing, form)
    if types.is_numeric_dtype(dtype):
        values = series.to_numpy(dtype=np.float64, na_value=np.nan)
        if str(dtype).lower().startswith("float32"):
            values = _shortest(values, np.float32)
        return Cells("number", values, missing, [], form)
    if types.is_datetime64_any_dtype(dtype):
        zone = getattr(dtype, "tz", None) or getattr(getattr(dtype, "pyarrow_dtype", 0), "tz", None)
        if zone is not None:
            form["offset"] = _usual_offset(series[~missing].dt.tz_localize(None), series[~missing])
            series = series.dt.tz_convert("UTC").dt.tz_localize(None)
        moments = series.to_numpy(dtype="datetime64[us]", na_value=np.datetime64("NaT"))
        return _moments(moments, form)
    if types.is_timedelta64_dtype(dtype):
        return _durations(series.to_numpy(dtype="timedelta64[us]"), form)
    return _of_objects(series.to_list(), missing, form)


def _usual_offset(local: Any, zoned: Any) -> int:
    """The commonest difference to UTC, in seconds."""
    if len(local) == 0:
        return 0
    apart = local - zoned.dt.tz_convert("UTC").dt.tz_localize(None)
    return int(apart.dt.total_seconds().mode().iloc[0])


def _read_arrow(column: Any, of: Any) -> Cells:
    import pyarrow as pa
    import pyarrow.compute as pc

    column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(column, pa.ChunkedArray):  # no chunks
        column = pa.array([], type=column.type)
    kind = column.type
    memo = base64.b64encode(pa.schema([of]).serialize())
    form: dict[str, Any] = {"dtype": str(kind), "arrow": memo.decode()}
    missing = np.asarray(column.is_null(nan_is_null=True))
    if pa.types.is_dictionary(kind):
        labels = column.dictionary.to_pylist()
        places = column.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
        form["ordered"] = bool(kind.ordered)
        return Cells("label", places, missing, labels, form)
    if pa.types.is_boolean(kind):
        return _booleans(column.fill_null(False).to_numpy(zero_copy_only=False), missing, form)
    whole = pa.types.is_integer(kind)
    if whole and len(column) > column.null_count:
        ends = pc.min_max(column).as_py()
        if max(-ends["min"], ends["max"]) >= EXACT:
            return _of_objects(column.to_pylist(), missing, form)
    if whole or pa.types.is_floating(kind):
        values = column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
        if pa.types.is_float32(kind):
            values = _shortest(values, np.float32)
        return Cells("number", np.array(values), missing, [], form)
    if pa.types.is_timestamp(kind):
        if kind.tz is not None and len(column) > column.null_count:
            local = pc.local_timestamp(column)
            apart = pc.subtract(local, column.cast(local.type, safe=False))
            usual = pc.mode(apart.cast(pa.int64()).drop_null())[0]["mode"].as_py()
            form["offset"] = usual * {"s": 10**6, "ms": 10**3, "us": 1, "ns": 10**-3}[kind.unit]
            form["offset"] = int(form["offset"] // 10**6)
        moments = column.cast(pa.timestamp("us", tz=kind.tz), safe=False)
        return _moments(moments.to_numpy(zero_copy_only=False), form)
    if pa.types.is_date(kind):
        return _moments(np.array(column.cast(pa.date32())).astype("datetime64[us]"), form)
    if pa.types.is_duration(kind):
        spans = column.cast(pa.duration("us"), safe=False)
        return _durations(spans.to_numpy(zero_copy_only=False), form)
    return _of_objects(column.to_pylist(), missing, form)


def _read_dict(cells: Any) -> Cells:
    if isinstance(cells, list | tuple):
        column = _read_array(np.array(_as_object(list(cells)), dtype=object))
        column.form["list"] = True
        return column
    if type(cells).__module__.split(".")[0] in ("pandas", "polars", "pyarrow"):
        cells = cells.to_numpy()
    return _read_array(cells if isinstance(cells, np.ndarray) else np.asarray(cells))


def _as_object(values: list[Any]) -> np.ndarray:
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


def _read_array(column: np.ndarray) -> Cells:
    if column.ndim != 1:
        raise DataError(f"a column must hold one cell per row, got shape {column.shape}")
    mask = np.ma.getmaskarray(column)
    column = np.ma.getdata(column)
    form: dict[str, Any] = {"dtype": str(column.dtype)}
    kind = column.dtype.kind
    if kind == "b":
        return _booleans(column, mask, form)
    if kind in "iu" and len(column) and max(-int(column.min()), int(column.max())) >= EXACT:
        return _of_objects(column.tolist(), mask, form)
    if kind in "iuf":
        values = np.where(mask, np.nan, column.astype(np.float64))
        if column.dtype in (np.float16, np.float32):
            values = _shortest(values, column.dtype.type)
        return Cells("number", values, np.isnan(values), [], form)
    if kind == "M":
        moments = column.astype("datetime64[us]")
        moments[mask] = np.datetime64("NaT")
        return _moments(moments, form)
    if kind == "m":
        return _durations(np.where(mask, np.timedelta64("NaT"), column), form)
    if kind in "UOT":
        values = column.tolist()
        return _of_objects(values, mask | _object_gaps(column, values), form)
    raise DataError(f"columns of type {column.dtype} cannot be modelled; turn them into numbers")


def _object_gaps(column: np.ndarray, values: list[Any]) -> np.ndarray:
    if column.dtype.kind != "O":
        return np.zeros(len(values), dtype=bool)
    if "pandas" in sys.modules:  # knows pd.NA, which cannot be compared
        return np.asarray(sys.modules["pandas"].isna(column), dtype=bool)
    return np.array([value is None or value != value for value in values], dtype=bool)


def _booleans(values: np.ndarray, missing: np.ndarray, form: dict[str, Any]) -> Cells:
    places = np.where(missing, -1, values.astype(np.int64))
    return Cells("label", places, missing, [False, True], form)


def _moments(moments: np.ndarray, form: dict[str, Any]) -> Cells:
    moments = moments.astype("datetime64[us]")
    missing = np.isnat(moments)
    micro = np.where(missing, 0, moments.astype(np.int64))
    if (micro % 10**6).any():
        form["finer"] = True  # than a second: left out
    return Cells("date", micro // 10**6, missing, [], form)


def _durations(spans: np.ndarray, form: dict[str, Any]) -> Cells:
    micro = spans.astype("timedelta64[us]")
    missing = np.isnat(micro)
    seconds = np.where(missing, np.nan, micro.astype(np.int64) / 1e6)
    return Cells("number", seconds, missing, [], form | {"store": "duration"})


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
    if not types:
        return Cells("label", np.full(len(values), -1), np.ones(len(values), bool), [], form)
    if types <= {int, float} and not _beyond_floats(values, types):
        store = "int" if types == {int} else "float"
        return Cells("number", _floats(values), missing, [], form | {"store": store})
    if types == {Decimal}:
        decimals = max(0, *(-v.as_tuple().exponent for v in values if v is not None))
        form = form | {"store": "decimal", "decimals": decimals}
        return Cells("number", _floats(values), missing, [], form)
    if types == {dt.date}:
        days = np.array(values, dtype="datetime64[D]")
        return _moments(days.astype("datetime64[us]"), form | {"store": "date"})
    if all(issubclass(t, dt.datetime) for t in types):
        return _datetimes(values, form)
    if all(issubclass(t, dt.timedelta) for t in types):
        return _durations(np.array(values, dtype="timedelta64[us]"), form)
    strange = [t for t in types if not issubclass(t, Hashable) or not _is_plain(t)]
    if strange:  # intervals, periods, times of day: known by their text
        form = form | {"as_text": sorted(t.__name__ for t in strange)}
        values = [str(v) if type(v) in strange else v for v in values]
    # 1, 1.0 and True are equal as keys: labels of several types are told apart by type as well
    mixed = len(types) > 1
    places: dict[Any, int] = {(type(None), None) if mixed else None: -1}
    codes = [places.setdefault((type(v), v) if mixed else v, len(places) - 1) for v in values]
    labels = [key[1] if mixed else key for key in list(places)[1:]]
    return Cells("label", np.array(codes, dtype=np.int64), missing, labels, form)


def _is_plain(t: type) -> bool:
    return t.__name__ == "Interval" or issubclass(t, str | bool | int | float | dt.date | Decimal)


def _beyond_floats(values: list[Any], types: set[type]) -> bool:
    return int in types and any(type(v) is int and abs(v) >= EXACT for v in values)


def _floats(values: list[Any]) -> np.ndarray:
    return np.array([np.nan if v is None else float(v) for v in values], dtype=np.float64)


def _datetimes(values: list[Any], form: dict[str, Any]) -> Cells:
    """Datetime objects, naive or of one time zone."""
    zones = {v.tzinfo for v in values if v is not None}
    form = form | {"store": "datetime"}
    if zones != {None}:
        offsets = [v.utcoffset() for v in values if v is not None]
        usual = max(set(offsets), key=offsets.count)
        form |= {"offset": int(usual.total_seconds()) if usual else 0}
        form["zone"] = str(next(iter(zones))) if len(zones) == 1 else "UTC"
        values = [
            v if v is None else v.astimezone(dt.timezone.utc).replace(tzinfo=None) for v in values
        ]
    return _moments(np.array(values, dtype="datetime64[us]"), form)


def _shortest(values: np.ndarray, single: Any) -> np.ndarray:
    """Doubles with the fewest digits that are the same number in lower precision: 0.1, not
    0.10000000149."""
    wide = values.astype(np.float64)
    size = np.abs(wide)
    with np.errstate(all="ignore"):
        exponent = np.floor(np.log10(np.where((size > 0) & np.isfinite(size), size, 1.0)))
        for digits in (4, 3) if single is np.float16 else (8, 7, 6):
            place = np.clip(digits - 1 - exponent, -30, 30)
            short = np.where(
                place >= 0,
                np.round(wide * 10.0**place) / 10.0**place,
                np.round(wide / 10.0**-place) * 10.0**-place,
            )
            wide = np.where(short.astype(single) == values.astype(single), short, wide)
    return wide


# Writing


def _objects(cells: Cells) -> np.ndarray:
    """Cells as Python objects, ``None`` (NaN if it was so) for a gap."""
    store = cells.form.get("store")
    gap = np.nan if cells.form.get("nan") else None
    if cells.kind == "label":
        labels = _as_object([*cells.labels, gap])
        return labels[np.where(cells.missing, len(cells.labels), cells.values)]
    column: list[Any]
    if cells.kind == "date":
        column = [_EPOCH + dt.timedelta(seconds=s) for s in cells.values.tolist()]
        if store == "date":
            column = [moment.date() for moment in column]
        elif "zone" in cells.form:
            zone = _zone(cells.form["zone"], cells.form["offset"])
            column = [m.replace(tzinfo=dt.timezone.utc).astimezone(zone) for m in column]
    elif store == "decimal":
        places = cells.form["decimals"]
        column = [Decimal(f"{v:.{places}f}") for v in np.nan_to_num(cells.values).tolist()]
    elif store == "duration":
        column = [dt.timedelta(seconds=s) for s in np.nan_to_num(cells.values).tolist()]
    else:
        column = cells.values.tolist()
        if store == "int":
            column = [0 if math.isnan(v) else round(v) for v in column]
    objects = _as_object(column)
    objects[cells.missing] = gap
    return objects


def _zone(name: str, offset: int) -> dt.tzinfo:
    import zoneinfo

    try:
        return dt.timezone.utc if name == "UTC" else zoneinfo.ZoneInfo(name)
    except (ValueError, zoneinfo.ZoneInfoNotFoundError):
        return dt.timezone(dt.timedelta(seconds=offset))


def _bounded(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Numbers within the range of a whole-number type."""
    ends = np.iinfo(dtype)
    high = min(int(ends.max), EXACT)
    return np.clip(np.round(np.nan_to_num(values)), max(int(ends.min), -EXACT), high).astype(dtype)


def _datetime64(cells: Cells) -> np.ndarray:
    moments = cells.values.astype("datetime64[s]")
    moments[cells.missing] = np.datetime64("NaT")
    return moments


def _timedelta64(cells: Cells) -> np.ndarray:
    spans = np.round(np.nan_to_num(cells.values) * 1e6).astype("timedelta64[us]")
    spans[cells.missing] = np.timedelta64("NaT")
    return spans


def _write_pandas(cells: Cells) -> Any:
    import pandas as pd

    name, gaps = cells.form["dtype"], bool(cells.missing.any())
    if name == "category":
        values = [unplain(label) for label in cells.form["categories"]]
        dtype = pd.CategoricalDtype(pd.Index(values, dtype=cells.form["of"]), cells.form["ordered"])
        return pd.Series(pd.Categorical(_objects(cells), dtype=dtype))
    if cells.kind == "date" and name != "object" and "template" not in cells.form:
        series = pd.Series(_datetime64(cells).astype("datetime64[us]"))
        zoned = cells.form.get("offset") is not None
        return (series.dt.tz_localize("UTC") if zoned else series).astype(name)
    if cells.form.get("store") == "duration" and name != "object":
        return pd.Series(_timedelta64(cells)).astype(name)
    if cells.kind == "number" and "store" not in cells.form:
        if name[:3] in ("int", "uin") and "[" not in name:
            if not gaps:
                return pd.Series(_bounded(cells.values, np.dtype(name)))
            name = name.replace("int", "Int").replace("uI", "UI")
        if "nt" in name:
            values = pd.array(_bounded(cells.values, np.dtype("int64")), dtype="Int64")
            values[cells.missing] = pd.NA
            return pd.Series(values).astype(name)
        return pd.Series(np.where(cells.missing, np.nan, cells.values)).astype(name)
    if name == "bool" and gaps:
        name = "boolean"
    if name in ("int64", "uint64") and gaps:
        name = name.replace("int", "Int").replace("uI", "UI")
    return pd.Series(_objects(cells), dtype=object).astype(name)


def _write_arrow(cells: Cells) -> tuple[Any, Any]:
    import pyarrow as pa

    memo = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(cells.form["arrow"])))
    of = memo.field(0)
    gaps = cells.missing
    if gaps.any():
        of = of.with_nullable(True)
    if pa.types.is_dictionary(of.type):
        labels = pa.array(_objects(cells), type=of.type.value_type)
        return labels.dictionary_encode().cast(of.type), of
    if cells.kind == "date" and "template" not in cells.form:
        moments = pa.array(_datetime64(cells))
        if pa.types.is_timestamp(of.type):
            return moments.cast(pa.timestamp("s", tz=of.type.tz)).cast(of.type), of
        return moments.cast(of.type), of
    if cells.form.get("store") == "duration":
        return pa.array(_timedelta64(cells)).cast(of.type), of
    if cells.kind == "number" and "store" not in cells.form:
        if pa.types.is_integer(of.type):
            whole = _bounded(cells.values, np.dtype(of.type.to_pandas_dtype()))
            return pa.array(whole, type=of.type, mask=gaps), of
        return pa.array(cells.values, mask=gaps).cast(of.type, safe=False), of
    return pa.array(_objects(cells), type=of.type), of


def _write_array(cells: Cells) -> np.ndarray:
    dtype = np.dtype(cells.form["dtype"])
    gaps = bool(cells.missing.any())
    if dtype.kind in "M":
        return _datetime64(cells).astype(dtype)
    if dtype.kind == "m":
        return _timedelta64(cells).astype(dtype)
    if cells.kind == "number" and dtype.kind in "iuf":
        if dtype.kind == "f" or gaps:
            values = np.where(cells.missing, np.nan, cells.values)
            return values.astype(dtype if dtype.kind == "f" else np.float64)
        return _bounded(cells.values, dtype)
    objects = _objects(cells)
    if dtype.kind == "U" and not gaps:
        text = objects.astype(str)  # a longer text than any before must not be cut
        return text.astype(max(text.dtype, dtype))
    return objects if gaps else objects.astype(dtype)


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
