"""Tables of every kind come back as they were: names, types, categories, zones, gaps."""

import datetime as dt
import json
import sys
from decimal import Decimal

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from selfnorm.columns import Schema
from selfnorm.errors import DataError

N = 90


def gapped(values):
    return [None if i % 9 == 3 else value for i, value in enumerate(values)]


def moments(seed, zone=None):
    seconds = np.random.default_rng(seed).integers(0, 10**8, N)
    first = dt.datetime(2020, 1, 1, tzinfo=zone)
    return [first + dt.timedelta(seconds=int(s)) for s in seconds]


def arrow_table():
    rng = np.random.default_rng(0)
    whole = rng.integers(0, 100, N).tolist()
    text = rng.choice(["a", "b", "c"], N).tolist()
    columns = {
        "int8": pa.array(gapped(whole), pa.int8()),
        "uint64": pa.array(gapped(rng.permutation(whole).tolist()), pa.uint64()),
        "beyond floats": pa.array(gapped([v % 3 + 2**60 for v in whole]), pa.int64()),
        "float32": pa.array(gapped(np.round(rng.normal(size=N), 3).tolist()), pa.float32()),
        "float64": pa.array(gapped(rng.normal(size=N).tolist()), pa.float64()),
        "decimal": pa.array(
            gapped([Decimal(int(v)).scaleb(-2) for v in rng.integers(0, 10**4, N)]),
            pa.decimal128(9, 2),
        ),
        "string": pa.array(gapped(text), pa.string()),
        "bool": pa.array(gapped([v == "a" for v in text]), pa.bool_()),
        "date": pa.array(gapped([moment.date() for moment in moments(1)]), pa.date32()),
        "stamp": pa.array(gapped(moments(2)), pa.timestamp("us")),
        "zoned": pa.array(
            gapped(moments(3, dt.timezone.utc)), pa.timestamp("ms", tz="America/New_York")
        ),
        "span": pa.array(
            gapped([dt.timedelta(seconds=int(v)) for v in rng.integers(0, 10**4, N)]),
            pa.duration("ms"),
        ),
        "category": pa.DictionaryArray.from_arrays(
            pa.array(gapped(rng.integers(0, 2, N).tolist()), pa.int8()), ["low", "high", "unused"]
        ),
        "number": pa.array(gapped([f"{v:.2f}" for v in rng.gamma(2, 3, N) + 0.01]), pa.string()),
    }
    return pa.table(columns)


def polars_frame():
    levels = pl.Enum(["c", "b", "unused", "a"])
    return pl.from_arrow(arrow_table()).with_columns(
        pl.col("string").reverse().cast(levels).alias("enum"),
        pl.col("string").shift(1).cast(pl.Categorical).alias("categorical"),
    )


def pandas_frame(backend):
    table = arrow_table().drop(["category", "beyond floats"])
    frame = table.to_pandas().convert_dtypes(dtype_backend=backend)
    frame["cut"] = pd.cut(frame["float64"].astype(float), 4)
    frame["mixed"] = pd.Series(gapped([1, "a", True, 2.5] * 25)[:N], dtype=object)
    frame["days"] = pd.Series(gapped([m.date() for m in moments(4)]), dtype=object)
    zone = dt.timezone(dt.timedelta(hours=2))
    frame["objects"] = pd.Series(moments(5, zone), dtype=object)
    frame["paris"] = pd.to_datetime(moments(6)).tz_localize("UTC").tz_convert("Europe/Paris")
    frame["ordered"] = pd.Categorical(gapped([3, 1, 2] * 30), [3, 2, 1, 0], ordered=True)
    frame["nan text"] = pd.Series(["x", np.nan, "y"] * 30, dtype=object)
    frame[7] = np.random.default_rng(1).normal(size=N)
    return frame


def there_and_back(table):
    schema = Schema.detect(table)
    again = Schema.from_dict(json.loads(json.dumps(schema.to_dict())))
    assert again == schema
    assert all(column.modelled for column in schema.columns), str(schema)
    return again.decode(again.encode(table)[0])


def test_arrow():
    table = arrow_table()
    again = there_and_back(table)
    assert again.schema.equals(table.schema)
    assert again.equals(table)


def test_polars():
    frame = polars_frame()
    again = there_and_back(frame)
    assert again.schema == frame.schema
    assert again.equals(frame)


@pytest.mark.parametrize("backend", ["numpy_nullable", "pyarrow"])
def test_pandas(backend):
    frame = pandas_frame(backend)
    pd.testing.assert_frame_equal(there_and_back(frame), frame)


def test_the_kind_of_table_is_not_part_of_the_measure():
    frame = pl.from_arrow(arrow_table().drop(["category", "beyond floats"]))
    prints = {Schema.detect(t).fingerprint for t in (frame, frame.to_arrow(), frame.to_pandas())}
    assert len(prints) == 1


def test_dict_of_lists_and_arrays():
    rng = np.random.default_rng(0)
    table = {
        "list": gapped([1, 2, 3] * 30),
        "array": rng.normal(size=N),
        "day": np.datetime64("2020-01-01") + rng.integers(0, 900, N),
    }
    again = there_and_back(table)
    assert again["list"] == table["list"]
    np.testing.assert_array_equal(again["array"], table["array"])
    assert again["day"].dtype == table["day"].dtype
    np.testing.assert_array_equal(again["day"], table["day"])


@pytest.mark.parametrize("dtype", [float, np.float32, np.uint8, int, object, "U12"])
@pytest.mark.parametrize("pandas", [True, False])
def test_arrays(dtype, pandas, monkeypatch):
    if not pandas:
        monkeypatch.setitem(sys.modules, "pandas", None)
    array = np.random.default_rng(0).integers(0, 90, (200, 3)).astype(dtype)
    again = there_and_back(array)
    assert isinstance(again, np.ndarray)
    assert again.dtype == array.dtype
    np.testing.assert_array_equal(again, array)


def test_gaps_of_arrays():
    rng = np.random.default_rng(0)
    masked = np.ma.masked_array(rng.integers(0, 50, (60, 2)), rng.random((60, 2)) < 0.2)
    np.testing.assert_array_equal(there_and_back(masked), masked.astype(float).filled(np.nan))
    objects = np.empty((60, 2), dtype=object)
    objects[:, 0] = ["a", None, "b"] * 20
    objects[:, 1] = [1.5, 2.25, np.nan] * 20
    again = there_and_back(objects)
    assert again[:, 0].tolist() == objects[:, 0].tolist()
    np.testing.assert_array_equal(again[:, 1].astype(float), objects[:, 1].astype(float))


def test_a_gap_where_there_was_none_has_a_place():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"whole": rng.integers(0, 90, N), "yes": rng.random(N) < 0.5})
    schema = Schema.detect(frame)
    x, _ = schema.encode(frame)
    x[0, :, 0] = -1
    again = schema.decode(x)
    assert again.dtypes.astype(str).tolist() == ["Int64", "boolean"]
    assert again.iloc[0].isna().all()
    assert again["whole"][1:].tolist() == frame["whole"][1:].tolist()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (pd.DataFrame({"a": []}), "no rows"),
        ({}, "no columns"),
        ({"a": [1, 2], "b": [1]}, "different numbers of rows"),
        (pd.DataFrame(np.ones((3, 2)), columns=["a", "a"]), "'a' appears twice"),
        (np.ones(3), "rows and columns"),
        (np.ones((3, 2), dtype=complex), "'x0'.*complex"),
        (pd.Series([1, 2]), "to_frame"),
    ],
)
def test_what_is_no_table_is_refused(table, message):
    with pytest.raises(DataError, match=message):
        Schema.detect(table)
