"""Schemas of tables: what columns are, coded rows, and the same table back."""

import json

import numpy as np
import pandas as pd
import pytest

from selfnorm.columns import Schema
from selfnorm.errors import DataError, SelfnormWarning

RNG = np.random.default_rng(0)
N = 400


def messy() -> pd.DataFrame:
    """One column of every kind, with gaps."""
    rng = np.random.default_rng(1)
    income = np.where(rng.random(N) < 0.3, 0.0, rng.lognormal(8, 1, N))
    frame = pd.DataFrame(
        {
            "length": rng.normal(size=N),
            "age": rng.integers(18, 90, N),
            "rooms": rng.integers(1, 5, N),
            "price": np.round(rng.gamma(2, 3, N), 2),
            "income": income,
            "town": rng.choice(["Bath", "Oxford", "York"], N),
            "owner": rng.random(N) < 0.4,
            "size": pd.Categorical(rng.choice(["S", "L"], N), ["S", "M", "L"], ordered=True),
            "count": pd.array(rng.poisson(300, N), dtype="Int64"),
            "agreed": pd.array(rng.random(N) < 0.5, dtype="boolean"),
            "note": pd.array(rng.choice(["a", "b"], N), dtype="string"),
            "when": pd.Timestamp("2020-01-01") + pd.to_timedelta(rng.integers(0, 10**8, N), "s"),
            "seen": pd.Timestamp("2020-01-01", tz="Europe/Berlin")
            + pd.to_timedelta(rng.integers(0, 10**4, N), "h"),
            "day": [f"{d}" for d in np.datetime64("2021-01-01") + rng.integers(0, 300, N)],
            "single": rng.normal(size=N).astype(np.float32),
            "tiny": rng.integers(0, 200, N).astype(np.uint8),
        }
    )
    for j, name in enumerate(frame.columns):
        if name not in ("age", "rooms", "owner", "tiny"):
            frame.loc[frame.index[j::37], name] = None
    return frame


def test_every_type_of_a_frame_comes_back():
    frame = messy()
    schema = Schema.detect(frame)
    x, extra = schema.encode(frame)
    assert x.shape == (N, len(schema.parts), 2)
    assert not extra.any()
    pd.testing.assert_frame_equal(schema.decode(x), frame)
    again = Schema.from_dict(json.loads(json.dumps(schema.to_dict())))
    assert again == schema
    assert again.fingerprint == schema.fingerprint
    pd.testing.assert_frame_equal(again.decode(x), frame)


def test_kinds_are_detected():
    schema = Schema.detect(messy())
    kinds = {column.name: column.kind for column in schema.columns}
    assert kinds == {
        "length": "continuous",
        "age": "cells",
        "rooms": "category",
        "price": "cells",
        "income": "continuous",
        "town": "category",
        "owner": "category",
        "size": "category",
        "count": "cells",
        "agreed": "category",
        "note": "category",
        "when": "date",
        "seen": "date",
        "day": "date",
        "single": "continuous",
        "tiny": "cells",
    }
    (income,) = (schema.parts[i] for i in schema.parts_of(["income"]))
    assert (income.values, income.rest, income.step) == ((0.0,), True, 0.0)
    (rooms,) = (schema.parts[i] for i in schema.parts_of(["rooms"]))
    assert (rooms.n_codes, rooms.rest, rooms.unseen) == (4, False, 1 / (N + 2))
    assert len(schema.parts_of(["when"])) == 4
    assert len(schema.parts_of(["day"])) == 2


@pytest.mark.parametrize("dtype", [float, np.float32, int, object, "U12"])
def test_arrays_come_back(dtype):
    array = RNG.integers(0, 90, (200, 3)).astype(dtype)
    schema = Schema.detect(array)
    again = schema.decode(schema.encode(array)[0])
    assert isinstance(again, np.ndarray)
    assert again.dtype == array.dtype
    np.testing.assert_array_equal(again, array)


def test_unseen_values_are_coded_with_one_warning():
    frame = pd.DataFrame({"town": ["Bath", "York"] * 30, "rooms": [1, 2, 4] * 20})
    schema = Schema.detect(frame)
    with pytest.warns(SelfnormWarning, match=r"'town'.*'Rome'.*'rooms'.* 3 ") as caught:
        x, extra = schema.encode(pd.DataFrame({"town": ["Rome", "Bath"], "rooms": [3, 1]}))
    assert len(caught) == 1
    assert x[0, :, 0].tolist() == [-2, -2]
    assert extra[0, 0] == 0
    assert extra[0, 1] == pytest.approx(-np.log(np.pi * 3) - np.log1p((1 / 3) ** 2))
    assert not extra[1].any()


def test_all_problems_at_once():
    frame = {"a": [1.0, np.inf, 2.0], "b": [1e200, 1.0, 2.0], "c": ["x", "y", "z"]}
    with pytest.raises(DataError, match=r"(?s)'a'.*infinite.*row 1.*'b'.*1e\+200"):
        Schema.detect(frame)
    with pytest.raises(DataError, match=r"(?s)'nope'.*'strange'"):
        Schema.detect(frame, {"nope": "date", "c": "strange"})
