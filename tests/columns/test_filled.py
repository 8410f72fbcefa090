"""Tables of every type come back as they were, and are filled where they have gaps."""

import json
import sys

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from selfnorm import EnergyDensity
from selfnorm.columns import Schema
from tests.columns.catalogue import TABLES
from tests.columns.cells import cells_of, columns_of, equal, is_gap
from tests.contract.specimens import dates, frame


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
                assert equal(was, now)


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
    rounded = "decimal" in name or name == "array of objects"  # of more digits than floats have
    rounded |= any("what is finer is left out" in note for note in schema.notes)
    for old, new, column in zip(columns_of(table), columns_of(sampled), again.columns, strict=True):
        if column.modelled:
            (kind, before), (same, after) = cells_of(old), cells_of(new)
            assert same == kind or np.ma.isMA(old)
            assert rounded or all(map(is_same, before, after))


def is_same(was, now):
    return (is_gap(was) and is_gap(now)) or was == now


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


def test_the_kind_of_table_is_not_part_of_the_measure():
    table = frame(90)[["kind", "flag", "size"]].assign(start=dates(90)["start"])
    tables = table, pl.from_pandas(table), pa.Table.from_pandas(table, preserve_index=False)
    assert len({Schema.detect(t).fingerprint for t in tables}) == 1


@pytest.mark.parametrize("dtype", [float, np.float32, np.uint8, int, object, "U12"])
def test_arrays_come_back_where_there_is_no_pandas(dtype, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    array = np.random.default_rng(0).integers(0, 90, (200, 3)).astype(dtype)
    schema = Schema.detect(array)
    again = schema.decode(schema.encode(array)[0])
    assert again.dtype == array.dtype
    np.testing.assert_array_equal(again, array)


def test_a_gap_where_there_was_none_has_a_place():
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"whole": rng.integers(0, 90, 90), "yes": rng.random(90) < 0.5})
    schema = Schema.detect(table)
    x, _ = schema.encode(table)
    x[0, :, 0] = -1
    again = schema.decode(x)
    assert again.dtypes.astype(str).tolist() == ["Int64", "boolean"]
    assert again.iloc[0].isna().all()
    assert again["whole"][1:].tolist() == table["whole"][1:].tolist()
