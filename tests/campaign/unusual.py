"""Tables of types, names and holders that are seldom met, from a seed; cells of any table."""

import datetime as dt
import enum
import uuid
from collections import OrderedDict
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import torch

from tests.campaign.tables import WORDS

UTC = dt.timezone.utc
Color = enum.Enum("Color", "red green blue ocher grey")

# Five values of each type.
OBJECTS = {
    "bytes": lambda k: b"a%d\xff" % k,
    "uuid": lambda k: uuid.UUID(int=k + 1),
    "enum": lambda k: list(Color)[k],
    "fraction": lambda k: Fraction(k + 1, 3),
    "decimal": lambda k: Decimal(k) / 4,
    "long decimal": lambda k: Decimal(2**60 + k),
    "huge decimal": lambda k: Decimal(10) ** (30 + k),
    "infinite decimal": lambda k: Decimal("Infinity" if k == 4 else k),
    "no decimal": lambda k: Decimal("sNaN" if k == 4 else k),
    "complex": lambda k: complex(k, 1),
    "time": lambda k: dt.time(k, 30),
    "span": lambda k: dt.timedelta(days=k, microseconds=k),
    "moment": lambda k: dt.datetime(2020, 1, 1 + k, 1, 2, 3, 456_789),
    "aware at times": lambda k: dt.datetime(2020, 1, 1 + k, tzinfo=UTC if k % 2 else None),
    "tuple": lambda k: (k, "x"),
    "set": lambda k: frozenset({k}),
    "list": lambda k: [k],
    "dict": lambda k: {"a": k},
    "array": lambda k: np.array([k]),
    "function": lambda k: (len, max, min, int, str)[k],
    "digits": lambda k: "٠١٢٣٤"[k],
    "price": lambda k: f"${k}0_to_${k + 1}0",
    "mark-up": lambda k: f"<b>{k}</b>",
    "surrogate": lambda k: f"\ud800{k}",
}
ARROW = {
    "dictionary": (lambda k: f"a{k}", pa.dictionary(pa.int8(), pa.string())),
    "binary": (OBJECTS["bytes"], pa.binary()),
    "float16": (np.float16, pa.float16()),
    "int64": (lambda k: 2**60 + k, pa.int64()),
    "decimal128": (lambda k: Decimal(2**60 + k), pa.decimal128(38, 3)),
    "decimal256": (lambda k: Decimal(10**45 + k), pa.decimal256(60, 3)),
    "seconds": (lambda k: dt.time(k, 30), pa.time32("s")),
    "time": (lambda k: dt.time(k, 30, 1, 7), pa.time64("us")),
    "ns": (lambda k: 1_577_836_800_123_456_789 + k * 10**13, pa.timestamp("ns")),
    "us": (OBJECTS["moment"], pa.timestamp("us", tz="Europe/Paris")),
    "span": (lambda k: 86_400_000_000_123 * k, pa.duration("ns")),
    "months": (lambda k: pa.MonthDayNano([k, 1, 0]), pa.month_day_nano_interval()),
    "list": (OBJECTS["list"], pa.list_(pa.int64())),
    "struct": (OBJECTS["dict"], pa.struct({"a": pa.int64()})),
    "map": (lambda k: [("a", k)], pa.map_(pa.string(), pa.int64())),
    "uuid": (lambda k: uuid.UUID(int=k + 1).bytes, pa.uuid()),
    "bool8": (lambda k: k % 2, pa.bool8()),
    "nothing": (lambda k: None, pa.null()),
}
POLARS = {
    "object": (OBJECTS["uuid"], pl.Object),
    "time": (OBJECTS["time"], pl.Time),
    "int128": (lambda k: k, pl.Int128),
    "long int128": (lambda k: 2**100 + k, pl.Int128),
    "decimal": (OBJECTS["decimal"], pl.Decimal(20, 2)),
    "ns": (OBJECTS["moment"], pl.Datetime("ns")),
    "enum": (lambda k: f"a{k}", pl.Enum([f"a{k}" for k in range(6)])),
    "list": (OBJECTS["list"], pl.List(pl.Int64)),
    "array": (OBJECTS["list"], pl.Array(pl.Int64, 1)),
    "struct": (OBJECTS["dict"], pl.Struct({"a": pl.Int64})),
}
DAYS, SPANS = pd.Timestamp("2020-01-01"), pd.Timedelta("1D1us")
# From five whole numbers ``k``, and the same as floats ``x`` that may have gaps.
PANDAS = {
    "ns": lambda k, x: DAYS + pd.to_timedelta(k * 86_400_000_000_789, "ns"),
    "span": lambda k, x: pd.to_timedelta(x * 1e9 + 7, "ns"),
    "long span": lambda k, x: pd.to_timedelta(2**62 + k, "ns"),
    "interval": lambda k, x: pd.cut(x, 3),
    "interval of days": lambda k, x: pd.cut(pd.Series(DAYS + pd.to_timedelta(k, "D")), 3),
    "interval of spans": lambda k, x: pd.cut(pd.Series(pd.to_timedelta(k, "h")), 3),
    "period": lambda k, x: pd.period_range("2020", periods=5, freq="M")[k],
    "sparse": lambda k, x: pd.arrays.SparseArray(k, fill_value=0),
    "dummy": lambda k, x: pd.get_dummies(pd.Series(k), sparse=True, dtype="uint8")[0],
    "Int8": lambda k, x: pd.array(x, dtype="Int8"),
    "boolean": lambda k, x: pd.array(np.where(np.isnan(x), None, x > 1), dtype="boolean"),
    "categories of tuples": lambda k, x: pd.Categorical([(int(v), "x") for v in k]),
}
HELD = {
    "masked": lambda k, x: np.ma.masked_invalid(x),
    "StringDType": lambda k, x: k.astype(str).astype(np.dtypes.StringDType()),
    "uint64": lambda k, x: k.astype(np.uint64) + np.uint64(2**63),
    "datetime64[ns]": lambda k, x: np.datetime64("2020-01-01", "ns") + k * 86_400_000_000_789,
    "tensor": lambda k, x: torch.tensor(x),
    "gradient": lambda k, x: torch.tensor(x, requires_grad=True),
    "bfloat16": lambda k, x: torch.tensor(x).bfloat16(),
    "pandas": lambda k, x: pd.Series(k.astype(str), index=k),
    "arrow": lambda k, x: pa.array(k.astype(str)),
    "chunks": lambda k, x: pa.chunked_array([pa.array(x[:5]), pa.array(x[5:])]),
    "generator": lambda k, x: (v for v in x),
    "scalar": lambda k, x: 1.5,
}
NAMES = (*WORDS, "\ud800", None, float("nan"), b"a", 7, ("a", "b"), frozenset("a"), DAYS)


TYPES = {
    "pandas": (PANDAS, ARROW, OBJECTS),
    "polars": (POLARS,),
    "arrow": (ARROW,),
    "dict": (HELD, OBJECTS),
}


class Own(pd.DataFrame):
    """A table of a class of one's own."""

    @property
    def _constructor(self):
        return Own


def unusual(rng):
    """A table with a column of a rare type, at times of a rare name or holder; what it is."""
    n, holder = int(rng.integers(12, 60)), str(rng.choice(list(TYPES)))
    types = TYPES[holder][rng.integers(len(TYPES[holder]))]
    kind = str(rng.choice(list(types)))
    k, gaps = rng.integers(5, size=n), rng.random(n) < 0.15 * (rng.random() < 0.5)
    if types is PANDAS or types is HELD:
        column = types[kind](k, np.where(gaps, np.nan, k))
    else:
        value, *dtype = types[kind] if types is not OBJECTS else [types[kind]]
        column = [None if gap else value(int(v)) for v, gap in zip(k, gaps, strict=True)]
        column = arrow(column, *dtype) if types is ARROW else column
        column = pl.Series(column, dtype=dtype[0]) if types is POLARS else column
    if holder == "pandas":
        column = pd.arrays.ArrowExtensionArray(column) if types is ARROW else column
        column = pd.Series(column, dtype=object if types is OBJECTS else None)
        column = column.reset_index(drop=True)
    name = "w"
    if rng.random() < 0.25:
        rare = NAMES if holder in ("pandas", "dict") else WORDS
        name = rare[rng.integers(len(rare))]
    other = {"x": rng.normal(size=n), "y": np.where(k > 1, "b", "a")}
    columns = {name: column, **other} if rng.random() < 0.5 else {**other, name: column}
    rare = rng.random() < 0.15
    told = f"{n} rows of {holder}: {kind} as {name!r}{', rare holder' * rare}, {gaps.sum()} gaps"
    if holder == "pandas":
        table = pd.DataFrame(dict(enumerate(columns.values())))
        table.columns = pd.Index(list(columns), dtype=object, tupleize_cols=False)
        return (Own(table) if rare else table), told
    if holder == "polars":
        table = pl.DataFrame([pl.Series(key, values) for key, values in columns.items()])
        return (table.lazy() if rare else table), told
    if holder == "arrow":
        arrays = [pa.array(values) for values in columns.values()]
        return (pa.RecordBatch if rare else pa.Table).from_arrays(arrays, names=list(columns)), told
    return (OrderedDict if rare else dict)(columns), told


def arrow(cells, dtype):
    if isinstance(dtype, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(dtype, pa.array(cells, dtype.storage_type))
    if isinstance(dtype, pa.DictionaryType):
        return pa.array(cells, dtype.value_type).dictionary_encode().cast(dtype)
    return pa.array(cells, dtype)


def is_gap(cell):
    if isinstance(cell, Decimal):
        return not cell.is_finite()
    if isinstance(cell, float | np.floating):
        return not np.isfinite(cell)
    moments = (type(pd.NaT), np.datetime64, np.timedelta64)
    return cell is None or cell is pd.NA or (isinstance(cell, moments) and cell != cell)


def cells_of(table):
    """The cells of each column as Python's values, none of them rounded."""
    if isinstance(table, pd.DataFrame):
        columns = [table.iloc[:, j] for j in range(table.shape[1])]
    elif isinstance(table, pl.LazyFrame | pl.DataFrame):
        columns = table.lazy().collect().get_columns()
        columns = [c.to_physical() if c.dtype.is_temporal() else c for c in columns]
    elif isinstance(table, pa.Table | pa.RecordBatch):
        columns = table.columns
    else:
        columns = table.T if isinstance(table, np.ndarray) else table.values()
    names = ("to_list", "to_pylist", "tolist", "__iter__")
    methods = [next(getattr(column, n) for n in names if hasattr(column, n)) for column in columns]
    return [list(method()) for method in methods]


def types_of(table):
    """The types of the columns of a table, where it has any."""
    if isinstance(table, pa.Table | pa.RecordBatch):
        return [str(dtype) for dtype in table.schema.types]
    table = table.collect() if isinstance(table, pl.LazyFrame) else table
    return [str(dtype) for dtype in getattr(table, "dtypes", ())]


def equal(one, other):
    """Whether two cells are the same value of the same type; all gaps are."""
    same = type(one) is type(other)
    return same and ((is_gap(one) and is_gap(other)) or bool(np.all(one == other)))
