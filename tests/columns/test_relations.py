"""Columns that others determine."""

import numpy as np
import pandas as pd

from selfnorm.columns import Schema

RNG = np.random.default_rng(0)
N = 500


def test_sums_are_named_once():
    fare, tip = np.round(RNG.gamma(3, 5, (2, N)), 2)
    frame = pd.DataFrame({"fare": fare, "tip": tip, "noise": RNG.normal(size=N)})
    frame["total"] = fare + tip + 3.5
    frame["inches"] = np.round(fare / 2.54, 4)
    notes = Schema.detect(frame[["fare", "tip", "noise", "total"]]).notes
    assert notes == ["'total' is 'fare' + 'tip', up to a constant and rounding"]
    (note,) = Schema.detect(frame[["fare", "inches"]]).notes
    assert note == "'fare' is 2.54 'inches', up to a constant and rounding"
    frame["total"] += RNG.choice([0, 0.5, 2.5], N)
    notes = Schema.detect(frame[["fare", "tip", "noise", "total"]]).notes
    assert notes == ["'total' is 'fare' + 'tip' but for a few amounts"]


def test_related_columns_are_no_sums():
    x = RNG.normal(size=N)
    frame = {"x": x, "y": 2 * x + 0.05 * RNG.normal(size=N), "z": RNG.integers(0, 2, N)}
    assert Schema.detect(frame).notes == []


def test_categories_that_determine_others():
    zone = RNG.integers(0, 12, N)
    frame = pd.DataFrame({"zone": zone, "town": zone // 4, "letter": zone}).astype(str)
    frame["letter"] = frame["letter"].map({str(i): chr(97 + i) for i in range(12)})
    frame["free"] = RNG.choice(["x", "y"], N)
    frame.loc[::50, "town"] = None
    assert Schema.detect(frame.map(lambda v: v and f"<{v}>")).notes == [
        "'zone' determines 'town'",
        "'zone' and 'letter' determine each other",
        "'letter' determines 'town'",
    ]


def test_few_rows_determine_nothing():
    frame = {"a": [f"n{i}" for i in range(15)], "b": ["x"] * 14 + ["y"]}
    assert Schema.detect(frame).notes == []
