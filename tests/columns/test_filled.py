"""Tables of every type are filled where they have gaps; no cell that was seen changes."""

import json

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch

from selfnorm import EnergyDensity
from selfnorm.columns import Schema
from tests.columns.catalogue import TABLES


def columns_of(table):
    if isinstance(table, pd.DataFrame):
        return [table.iloc[:, j] for j in range(table.shape[1])]
    if isinstance(table, pl.DataFrame):
        return table.get_columns()
    if isinstance(table, pa.Table):
        return table.columns
    return list(table.values()) if isinstance(table, dict) else list(table.T)


def cells_of(column):
    """Type of the column, and its cells as objects that tell all of their values."""
    if isinstance(column, pa.Array | pa.ChunkedArray):
        array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
        nanoseconds = pa.types.is_time(array.type) or pa.types.is_duration(array.type)
        whole = pa.int32() if str(array.type)[:6] == "time32" else pa.int64()
        return array.type, (array.cast(whole) if nanoseconds else array).to_pylist()
    if isinstance(column, pl.Series):
        temporal = column.dtype.is_temporal()
        return column.dtype, (column.to_physical() if temporal else column).to_list()
    if isinstance(column, pd.Series):
        return column.dtype, list(column)
    if isinstance(column, np.ndarray | torch.Tensor):
        return column.dtype, list(column)
    return type(column), list(column)


def is_gap(value):
    if value is None or value is pd.NA or value is np.ma.masked or isinstance(value, type(pd.NaT)):
        return True
    return bool(np.isnat(value)) if isinstance(value, np.datetime64) else value != value


def draws(schema, table):
    """Coded rows, whose gaps are as the first row that has none there."""
    x, _ = schema.encode(table)
    gaps = schema.is_gap(x)
    for j in range(x.shape[1]):
        x[gaps[:, j], j] = x[(~gaps[:, j]).argmax(), j]
    return x


def check(table, filled):
    assert type(filled) is type(table)
    for old, new in zip(columns_of(table), columns_of(filled), strict=True):
        (kind, before), (same, after) = cells_of(old), cells_of(new)
        assert same == kind
        assert type(new) is type(old)
        if isinstance(old, pd.Series):
            assert new.index.equals(old.index)
            assert new.name == old.name
        for was, now in zip(before, after, strict=True):
            if is_gap(was):
                assert not is_gap(now) or all(map(is_gap, before))
            else:
                assert type(now) is type(was)
                assert now == was


@pytest.mark.filterwarnings("ignore::selfnorm.SelfnormWarning")
@pytest.mark.parametrize("name", TABLES)
def test_what_was_seen_stays_in_value_and_type_and_gaps_are_filled(name):
    table = TABLES[name]
    schema = Schema.detect(table)
    again = Schema.from_dict(json.loads(json.dumps(schema.to_dict())))
    assert again == schema
    assert again.fingerprint == schema.fingerprint
    check(table, again.fill(table, draws(again, table)))
    sampled = again.decode(again.encode(table)[0])
    assert type(sampled) is (np.ndarray if np.ma.isMA(table) else type(table))
    for old, new, column in zip(columns_of(table), columns_of(sampled), again.columns, strict=True):
        if column.modelled and not np.ma.isMA(old):
            assert cells_of(new)[0] == cells_of(old)[0]


@pytest.mark.filterwarnings("ignore::selfnorm.SelfnormWarning")
@pytest.mark.parametrize("kind", ["pandas", "dict"])
def test_a_fitted_density_fills_columns_of_every_type_when_saved_and_loaded(kind, tmp_path):
    names = [name for name in TABLES if name.startswith(kind)][::6]
    columns = {name: columns_of(TABLES[name])[0] for name in names}
    table = pd.DataFrame(columns) if kind == "pandas" else columns
    EnergyDensity(max_steps=1, random_state=0, method="autoregressive").fit(table).save(tmp_path)
    density = EnergyDensity.load(tmp_path)
    check(table, density.impute(table, random_state=0))
    drawn = density.sample(2, random_state=0)
    for name in drawn:
        assert cells_of(drawn[name])[0] == cells_of(columns[name])[0]
