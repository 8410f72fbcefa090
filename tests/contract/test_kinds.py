"""Every kind of column: a table of it comes back from its coded rows, and its schema from JSON."""

import json
from functools import partial

import numpy as np
import pandas as pd
import pytest

from selfnorm.columns import Schema
from selfnorm.columns.kinds import KINDS
from tests.contract.specimens import cells, dates, frame, gaps


def set_aside(n):
    """Columns that are counted from others, or not modelled."""
    rng = np.random.default_rng(0)
    fare, tip = np.round(rng.gamma(3, 5, (2, n)), 2)
    table = pd.DataFrame({"fare": fare, "tip": tip, "total": (fare + tip).round(2)})
    return table.assign(one=5, copy=fare, id=[f"k{i}" for i in range(n)], note=rng.normal(size=n))


def angles(n):
    return pd.DataFrame({"wind": np.random.default_rng(0).integers(0, 360, n)})


TABLES = {
    **{make.__name__: partial(make, 200) for make in (frame, gaps, dates)},
    "cells": lambda: pd.DataFrame(cells(200)),
    "set_aside": partial(set_aside, 200),
    "angles": partial(angles, 200),
}


STATED = {"note": "ignore", "wind": "angle"}  # what no cells show


def detected(name):
    table = TABLES[name]()
    stated = {column: kind for column, kind in STATED.items() if column in table}
    return table, Schema.detect(table, stated)


@pytest.mark.filterwarnings("ignore::selfnorm.SelfnormWarning")
def test_every_kind_that_is_registered_is_in_a_table():
    kinds = {column.kind for name in TABLES for column in detected(name)[1].columns}
    assert kinds == set(KINDS)


@pytest.mark.filterwarnings("ignore::selfnorm.SelfnormWarning")
@pytest.mark.parametrize("name", TABLES)
def test_tables_and_schemas_come_back(name):
    table, schema = detected(name)
    again = Schema.from_dict(json.loads(json.dumps(schema.to_dict())))
    assert again == schema
    assert again.fingerprint == schema.fingerprint
    rows, _ = schema.encode(table)
    decoded = again.decode(again.encode(table)[0])
    pd.testing.assert_frame_equal(decoded, table[list(decoded)])
    assert np.array_equal(again.encode(table)[0], rows, equal_nan=True)
    left_out = set(table) - set(decoded)
    kinds = {column.name: column.kind for column in schema.columns}
    assert {kinds[column] for column in left_out} <= {"identifier", "ignored"}
