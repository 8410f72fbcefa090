"""What is no table, or no column that comes back as it was, is refused with its name."""

import datetime as dt
import json
from array import array
from collections import deque

import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch

from selfnorm.columns import Schema
from selfnorm.columns.kinds import KINDS
from selfnorm.errors import DataError
from tests.columns.catalogue import REFUSED, N, X, objects


class OwnFrame(pd.DataFrame):
    @property
    def _constructor(self):
        return OwnFrame


@pytest.mark.parametrize(("table", "message"), REFUSED)
def test_what_cannot_be_read_or_given_back_is_refused_with_a_sentence(table, message):
    with pytest.raises(DataError, match=message):
        Schema.detect(table)


def test_all_columns_that_cannot_be_read_are_named_at_once_and_may_be_ignored():
    frame = pd.concat([objects([1]), objects({2}).rename(columns={"w": "v"})], axis=1).assign(x=X)
    with pytest.raises(DataError, match=r"(?s)column 'w'.*column 'v'"):
        Schema.detect(frame)
    schema = Schema.detect(frame, {"w": "ignore", "v": "ignore"})
    assert [column.name for column in schema.modelled] == ["x"]
    pd.testing.assert_frame_equal(schema.fill(frame, schema.encode(frame)[0]), frame)


def test_a_subclass_of_a_frame_keeps_its_names_and_class():
    frame = OwnFrame({"a": X, "b": ["x", "y", None] * 10})
    schema = Schema.detect(frame)
    assert schema.frame == "pandas"
    assert type(schema.fill(frame, schema.encode(frame)[0])) is OwnFrame


def test_names_of_every_kind_are_saved_and_found_again():
    names = ["a", 1, 2.5, None, b"b", "d", ("c", 2), dt.date(2020, 1, 1), pd.Timestamp("2020-01")]
    table = pd.DataFrame({}, index=range(N)).assign(**{str(k): X + k * X**2 for k in range(9)})
    table.columns = pd.Index(names, dtype=object, tupleize_cols=False)
    schema = Schema.from_dict(json.loads(json.dumps(Schema.detect(table).to_dict())))
    assert [column.name for column in schema.columns] == names
    assert schema.encode(table)[0].shape == (N, 9, 2)


def test_a_time_of_day_is_a_number_of_seconds():
    rng = np.random.default_rng(0)
    times = [dt.time(int(s) // 3600, int(s) // 60 % 60) for s in rng.integers(0, 86_400, 300)]
    schema = Schema.detect({"t": times})
    assert schema.columns[0].kind in ("cells", "continuous")
    x, _ = schema.encode({"t": times})
    assert schema.decode(x) == {"t": times}
    x[:2, 0] = [schema.parts[0].n_codes, -50.0], [schema.parts[0].n_codes, 1e6]
    ends = schema.decode(x[:2])["t"]
    assert [t.hour for t in ends] == [0, 23]


def test_a_draw_that_is_no_whole_number_is_not_rounded_among_python_numbers():
    schema = Schema.detect({"a": X.tolist()})
    x, _ = schema.encode({"a": [1, None]})
    x[1, 0] = x[0, 0] + [0, 0.25]
    assert schema.fill({"a": [1, None]}, x) == {"a": [1, 1.25]}


def test_gaps_take_the_type_of_the_cells_beside_them():
    kinds = {"n": "category", "t": "continuous", "d": "date"}
    fitted = {
        "n": ["1", "2", "3"] * 10,
        "t": np.round(X, 2),
        "d": np.datetime64("2020-01-01") + np.arange(N),
    }
    schema = Schema.detect(fitted, kinds)
    asked = {"n": np.array([1.0, np.nan]), "t": ["0.25", None], "d": ["2020-01-05", None]}
    x, _ = schema.encode(asked)
    x[1] = x[0]
    filled = schema.fill(asked, x)
    assert filled["n"].tolist() == [1.0, 1.0]
    assert filled["t"] == ["0.25", "0.25"]
    assert filled["d"] == ["2020-01-05", "2020-01-05 00:00:00"]


def test_a_level_that_a_category_lacks_is_added_or_refused():
    schema = Schema.detect({"a": ["x", "y"] * 15})
    x, _ = schema.encode({"a": ["x", "y"]})
    asked = pd.DataFrame({"a": pd.Categorical(["x", None])})
    assert schema.fill(asked, x)["a"].tolist() == ["x", "y"]
    asked = pl.DataFrame({"a": pl.Series(["x", None], dtype=pl.Enum(["x"]))})
    with pytest.raises(DataError, match="column 'a' cannot hold"):
        schema.fill(asked, x)


def test_a_filled_dict_shares_no_memory_with_the_one_that_came():
    table = {"a": X.copy(), "b": X.tolist(), "t": torch.from_numpy(X.copy())}
    schema = Schema.detect(table)
    filled = schema.fill(table, schema.encode(table)[0])
    for name in table:
        filled[name][0] = 7.0
        assert table[name][0] == X[0]


@pytest.mark.parametrize("column", [range(N), deque(range(N)), array("i", range(N))])
def test_cells_of_other_sequences_keep_their_type(column):
    table = {"a": column, "x": X}
    schema = Schema.detect(table, {"a": "cells"})
    filled = schema.fill(table, schema.encode(table)[0])["a"]
    assert filled == list(range(N))
    assert {type(cell) for cell in filled} == {int}


def test_memory_of_numbers_comes_back_as_an_array_of_its_type():
    table = {"a": memoryview(X.astype(np.float16))}  # cells that a memory view itself cannot give
    schema = Schema.detect(table)
    filled = schema.fill(table, schema.encode(table)[0])["a"]
    assert filled.dtype == np.float16
    assert bytes(filled) == bytes(table["a"])


def test_all_columns_are_told_of_the_earlier_ones_by_one_mapping(monkeypatch):
    told, detect = [], KINDS["continuous"].detect
    monkeypatch.setattr(KINDS["continuous"], "detect", lambda d: told.append(d) or detect(d))
    Schema.detect(X[:, None] ** [1, 3, 5])
    assert len({id(draft.earlier) for draft in told}) == 1
