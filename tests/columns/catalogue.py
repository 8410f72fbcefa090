"""Columns of every type that a table may have, by the table that has them; 30 rows, some gaps.

``TABLES`` are taken, ``REFUSED`` are not, each with the words that say why.
"""

import datetime as dt
import enum
import uuid
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset
import torch

N = 30
HOLES = [3, 12, 21]
WHERE = np.isin(np.arange(N), HOLES)
CODES = np.array([0, 1, 2] * (N // 3))
RNG = np.random.default_rng(0)
NUMBERS = np.round(RNG.gamma(2, 3, N), 3)
WHOLE = RNG.integers(0, 9, N)
STAMPS = np.datetime64("2020-01-01T00:00:00.123456789") + RNG.integers(0, 10**15, N).astype(
    "m8[ns]"
)
TIMES = [dt.time(9 + int(c), 5, 7, 250) for c in CODES]
LABELS = {
    "text": ["a", "b", "c"],
    "bytes": [b"a", b"\xff", b""],
    "uuid": [uuid.UUID(int=k) for k in (1, 2, 3)],
    "fraction": [Fraction(1, 3), Fraction(2, 3), Fraction(5)],
    "tuple": [(1, "x"), (2, "x"), (2, "y")],
    "int beyond floats": [2**60, 2**60 + 1, 2**60 + 2],
    "mixed": [1, "a", True],
    "bool": [True, False, True],
    "arabic digits": ["١", "٢", "٣"],
    "date and number": [dt.date(2020, 1, 1), 7.5, dt.timedelta(days=1, microseconds=1)],
}
OBJECTS = {
    "int": [int(v) for v in WHOLE],
    "float": NUMBERS.tolist(),
    "number as text": [f"{v:.2f}" for v in NUMBERS + 0.01],
    "decimal": [Decimal(int(v)) + Decimal("0.12345678901234567890") for v in WHOLE],
    "huge decimal": [Decimal(10) ** 30 + int(v) for v in WHOLE],
    "date": [dt.date(2020, 1, 1) + dt.timedelta(days=int(v)) for v in WHOLE],
    "datetime": [v.astype("M8[us]").item() for v in STAMPS],
    "aware": [v.astype("M8[us]").item().replace(tzinfo=dt.timezone.utc) for v in STAMPS],
    "offset": [
        v.astype("M8[s]").item().replace(tzinfo=dt.timezone(dt.timedelta(hours=2))) for v in STAMPS
    ],
    "timestamp": [pd.Timestamp(v) for v in STAMPS],
    "timedelta": [dt.timedelta(microseconds=int(v) + 10**15) for v in WHOLE],
    "pandas timedelta": [pd.Timedelta(int(v) + 10**15, "ns") for v in WHOLE],
    "time": TIMES,
    "interval": [pd.Interval(int(c), int(c) + 1) for c in CODES],
    "period": [pd.Period("2020-01", "M") + int(c) for c in CODES],
    **{name: [labels[c] for c in CODES] for name, labels in LABELS.items()},
}


def holed(values, gap=None):
    return [gap if hole else value for hole, value in zip(WHERE, values, strict=True)]


def pandas_columns():
    for name, values in OBJECTS.items():
        yield f"object {name}", pd.Series(holed(values), dtype=object)
    numbers = pd.Series(NUMBERS).mask(WHERE)
    whole, text = pd.Series(WHOLE), pd.Series(holed(OBJECTS["text"]))
    for dtype in ("float64", "float32", "Float64", "Float32"):
        yield dtype, numbers.astype(dtype)
    for dtype in ("Int8", "UInt64", "int64[pyarrow]"):
        yield dtype, whole.astype(dtype).mask(WHERE)
    yield "int16", whole.astype("int16")
    yield "bool", whole > 4
    yield "boolean", pd.Series(holed(CODES > 0), dtype="boolean")
    for dtype in ("string", "string[pyarrow]", "category"):
        yield dtype, text.astype(dtype)
    for unit in ("s", "ms", "us", "ns"):
        yield f"datetime {unit}", pd.Series(STAMPS.astype(f"M8[{unit}]")).mask(WHERE)
    stamps = pd.Series(STAMPS).mask(WHERE)
    yield "zoned", stamps.dt.tz_localize("UTC").dt.tz_convert("Europe/Berlin")
    yield "zoned seconds", stamps.dt.floor("s").dt.tz_localize("UTC").dt.tz_convert("Asia/Tokyo")
    yield "arrow stamp", stamps.astype("timestamp[ns][pyarrow]")
    spans = pd.Series(pd.to_timedelta(WHOLE + 10**15, "ns")).mask(WHERE)
    yield "timedelta", spans
    yield "period", pd.Series(pd.PeriodIndex(OBJECTS["period"])).mask(WHERE)
    yield "interval", pd.Series(pd.arrays.IntervalArray(OBJECTS["interval"])).mask(WHERE)
    yield "cut", pd.cut(numbers, 3)
    yield "cut of stamps", pd.cut(stamps, 3)
    yield "cut of zoned stamps", pd.cut(stamps.dt.tz_localize("Europe/Berlin"), 3)
    yield "cut of spans", pd.cut(spans, 3)
    yield "ordered", pd.Series(pd.Categorical(holed(CODES + 1), [3, 2, 1], ordered=True))
    yield "tuples", pd.Series(pd.Categorical(holed(OBJECTS["tuple"])))
    yield "stamps", stamps.dt.floor("200D").astype("category")
    yield "sparse whole", pd.Series(pd.arrays.SparseArray(CODES, fill_value=0))
    yield "sparse uint8", pd.Series(CODES).astype(pd.SparseDtype("uint8", 1))
    yield "sparse bool", pd.Series(CODES > 1).astype(pd.SparseDtype(bool, False))
    yield "sparse float", numbers.astype(pd.SparseDtype("float64"))
    dictionary = pa.array(holed(OBJECTS["text"])).dictionary_encode()
    yield "text or NaN", pd.Series(holed(OBJECTS["text"], np.nan), dtype=object)
    yield "arrow dictionary", pd.Series(pd.arrays.ArrowExtensionArray(dictionary))
    yield "arrow time", pd.Series(holed(TIMES), dtype=pd.ArrowDtype(pa.time64("us")))
    yield "arrow binary", pd.Series(holed(OBJECTS["bytes"]), dtype=pd.ArrowDtype(pa.binary()))


def arrow_columns():
    stamps = pa.array(pd.Series(STAMPS).mask(WHERE))
    for kind in (pa.int8(), pa.uint64(), pa.float16(), pa.float32(), pa.float64()):
        yield str(kind), pa.array(holed(WHOLE.astype(np.float16).tolist()), pa.float64()).cast(kind)
    for kind in (pa.decimal128(30, 20), pa.decimal256(60, 20)):
        yield str(kind), pa.array(holed(OBJECTS["decimal"]), kind)
    for kind in (pa.string(), pa.large_string(), pa.string_view()):
        yield str(kind), pa.array(holed(OBJECTS["text"]), kind)
    for kind in (pa.binary(), pa.large_binary(), pa.binary_view()):
        yield str(kind), pa.array(holed(OBJECTS["bytes"]), kind)
    yield "fixed binary", pa.array(holed([b"%d" % c for c in CODES]), pa.binary(1))
    yield "bool", pa.array(holed(OBJECTS["bool"]))
    yield "bool8", pa.ExtensionArray.from_storage(pa.bool8(), pa.array(holed(CODES > 1), pa.int8()))
    ids = pa.array(holed([v.bytes for v in OBJECTS["uuid"]]), pa.binary(16))
    yield "uuid", pa.ExtensionArray.from_storage(pa.uuid(), ids)
    for unit in ("s", "ms", "us", "ns"):
        yield f"stamp {unit}", stamps.cast(pa.timestamp(unit), safe=False)
    yield "zoned", stamps.cast(pa.timestamp("ns", "America/New_York"))
    yield "zoned seconds", stamps.cast(pa.timestamp("s", "America/New_York"), safe=False)
    yield "beyond floats", pa.array(holed(OBJECTS["int beyond floats"]), pa.int64())
    for kind in (pa.date32(), pa.date64()):
        yield str(kind), pa.array(holed(OBJECTS["date"]), kind)
    for kind in (pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns")):
        yield str(kind), pa.array(holed(TIMES), pa.time64("us")).cast(kind, safe=False)
    yield "duration", pa.array(holed((WHOLE + 10**15).tolist()), pa.int64()).cast(pa.duration("ns"))
    codes = pa.array(holed(CODES.tolist()), pa.int8())
    yield "dictionary", pa.DictionaryArray.from_arrays(codes, ["low", "high", "c", "unused"])
    yield "null", pa.nulls(N)


def polars_columns():
    for name, array in arrow_columns():
        if not isinstance(array.type, pa.BaseExtensionType) and name[:10] != "decimal256":
            yield name, pl.Series(name, array)
    text = pl.Series(holed(OBJECTS["text"]))
    yield "enum", text.cast(pl.Enum(["c", "b", "unused", "a"]))
    yield "categorical", text.cast(pl.Categorical)


def dict_columns():
    text, numbers = holed(OBJECTS["text"]), np.where(WHERE, np.nan, NUMBERS)
    for name, values in OBJECTS.items():
        yield f"list of {name}", holed(values)
    yield "tuple of floats", tuple(holed(NUMBERS.tolist()))
    yield "float32", numbers.astype(np.float32)
    yield "stamps", np.where(WHERE, np.datetime64("NaT"), STAMPS)
    yield "masked", np.ma.masked_array(WHOLE, WHERE)
    yield "bytes array", np.array(OBJECTS["bytes"])
    if hasattr(np.dtypes, "StringDType"):
        yield "strings", np.array(text, dtype=np.dtypes.StringDType(na_object=None))
        yield "strings without gaps", np.array(OBJECTS["text"], dtype=np.dtypes.StringDType())
    yield "series", pd.Series(numbers, index=np.arange(N)[::-1] / 2, name="b")
    yield "category", pd.Series(text, dtype="category")
    yield "polars", pl.Series("c", text)
    yield "arrow text", pa.array(text)
    yield "chunked", pa.chunked_array([pa.array(numbers, from_pandas=True)])
    yield "arrow dictionary", pa.array(text).dictionary_encode()
    yield "tensor", torch.tensor(numbers, requires_grad=True)
    yield "bfloat16", torch.tensor(numbers).bfloat16()
    yield "whole tensor", torch.tensor(WHOLE)


def arrays():
    table = np.stack([NUMBERS, RNG.normal(size=N)], 1)
    holes = np.where(WHERE[:, None], np.nan, table)
    objects = np.empty((N, 2), dtype=object)
    objects[:, 0], objects[:, 1] = holed(OBJECTS["uuid"]), holed(OBJECTS["decimal"])
    yield "array", holes
    yield "float32 array", holes.astype(np.float32)
    yield "array of whole numbers", np.stack([WHOLE, CODES], 1)
    yield "array of text", np.stack([OBJECTS["text"], OBJECTS["arabic digits"]], 1)
    yield "array of objects", objects
    yield "masked array", np.ma.masked_array(table, np.isnan(holes))
    gaps = WHERE[:, None] & [True, False]
    yield "masked array of whole numbers", np.ma.masked_array(np.stack([WHOLE, CODES], 1), gaps)
    yield "tensor", torch.tensor(holes, requires_grad=True)
    yield "float32 tensor", torch.tensor(holes, dtype=torch.float32)
    yield "negative view", torch.complex(torch.tensor(holes), torch.tensor(holes)).conj().imag


def tables():
    """Tables of one column and one of numbers, by name."""
    beside = RNG.normal(size=N)
    beside[5] = np.nan
    of_polars = pl.Series(beside, nan_to_null=True)
    for name, column in pandas_columns():
        yield f"pandas: {name}", pd.DataFrame({"w": column, "x": beside})
    for name, column in arrow_columns():
        yield f"arrow: {name}", pa.table({"w": column, "x": pa.array(beside)})
    for name, column in polars_columns():
        yield f"polars: {name}", pl.DataFrame({"w": column, "x": of_polars})
    for name, column in dict_columns():
        yield f"dict: {name}", {"w": column, "x": beside}
    yield from arrays()


TABLES = dict(tables())


# what no table can be read from, or no sample could be written as


class Colour(enum.Enum):
    red = 1


class Size(enum.IntEnum):
    small = 1


def objects(*values):
    column = [values[i % len(values)] for i in range(N)]
    return pd.DataFrame({"w": pd.Series(column, dtype=object)})


X = RNG.normal(size=N)
UTC = dt.timezone.utc
NO_VALUE = "column 'w': values of type .* cannot be modelled"
ITEMS = [[1], {1}, {"a": 1}, frozenset([1]), np.zeros(2), len, int, Colour.red, Size.small]
NESTED = {"list": pa.list_(pa.int64()), "struct": pa.struct({"a": pa.int64()})}
NESTED |= {"map": pa.map_(pa.string(), pa.int64()), "months": pa.month_day_nano_interval()}
CELLS = {"list": [1], "struct": {"a": 1}, "map": [("a", 1)], "months": (1, 2, 3)}
REFUSED = [
    *((objects(item), NO_VALUE) for item in (*ITEMS, (1, [2]))),
    *((pa.table({"w": pa.array([CELLS[k]] * N, kind)}), NO_VALUE) for k, kind in NESTED.items()),
    (pa.table({"w": X}).to_reader(), "RecordBatchReader .*read_all"),
    (pyarrow.dataset.dataset(pa.table({"w": X})), "Dataset .*to_table"),
    (objects(Decimal("Infinity"), Decimal(1)), "column 'w' holds an infinite value"),
    (objects(Decimal("sNaN"), Decimal(1)), "column 'w' cannot be read .*InvalidOperation"),
    (objects(dt.time(1, tzinfo=UTC)), "column 'w'.*time zone"),
    (
        objects(dt.datetime(2020, 1, 1), dt.datetime(2020, 1, 1, tzinfo=UTC)),
        "column 'w': moments with and without a time zone",
    ),
    ({"w": (v for v in X)}, "column 'w' is of type generator"),
    ({"w": 3, "x": X}, "column 'w' is of type int"),
    ({"w": "abc"}, "column 'w' is of type str"),
    ({"w": np.array(3.0), "x": X}, "column 'w' is a single value"),
    ({"a": [1, 2], "b": [1]}, "different numbers of rows"),
    ({}, "no columns"),
    (pl.DataFrame({"w": pl.Series([len] * N, dtype=pl.Object)}), "column 'w'.*Object"),
    (pl.DataFrame({"w": pl.Series(range(N), dtype=pl.Int128)}), "column 'w'.*Int128"),
    ({"w": np.arange(N).astype("m8")}, NO_VALUE),  # of no unit
    ({"w": np.arange(9990, 9990 + N).astype("M8[Y]") - 1970}, "column 'w': dates .*after 9999"),
    ({"w": np.arange(N).astype("M8[D]") - 719_700}, "column 'w': dates before the year 1"),
    (pl.Series(X), "to_frame"),
    (pd.Series(X), "to_frame"),
    (
        pa.table({"w": pa.array(range(N)).cast(pa.timestamp("s", "Not/A_Zone"))}),
        "column 'w' cannot be read .*Not/A_Zone",
    ),
    (pd.DataFrame({"a": []}), "no rows"),
    (pd.DataFrame(np.ones((3, 2)), columns=["a", "a"]), "'a' appears twice"),
    (pd.DataFrame({np.nan: X}), "name nan.*rename"),
    ({"\ud800": X}, "name '.ud800'.*rename"),
    (pd.DataFrame({frozenset([1]): X}), "name frozenset.*rename"),
    (np.ones(3), "rows and columns"),
    (np.ones((3, 2), dtype=complex), "'x0'.*complex"),
]
