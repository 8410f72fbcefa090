import numpy as np
import pytest

import selfnorm as sn
from selfnorm.columns import Schema
from selfnorm.errors import DataError

RNG = np.random.default_rng(0)
WIND = np.round((350 + 40 * RNG.normal(size=600)) % 360, 4)  # across 0


def fitted(table, **options):
    return sn.EnergyDensity(max_steps=60, random_state=0, **options).fit(table)


@pytest.mark.parametrize(
    "values",
    [
        WIND,
        np.floor(WIND),
        10 * np.floor(WIND / 10),
        np.floor(WIND * 100) / 100,
        (WIND + 180) % 360 - 180,
        RNG.uniform(0, 360, 500),
        np.where(RNG.random(600) < 0.1, np.nan, WIND),
    ],
    ids=["numbers", "degrees", "tens", "hundredths", "around zero", "everywhere", "gaps"],
)
def test_an_angle_is_coded_and_comes_back(values):
    table = {"dir": values}
    schema = Schema.detect(table, {"dir": "angle"})
    assert schema.columns[0].kind == "angle"
    back = schema.decode(schema.encode(table)[0])["dir"]
    assert np.allclose(back, values, rtol=0, atol=1e-6, equal_nan=True)
    whole_turns = {"dir": values + 720}
    assert np.allclose(schema.encode(whole_turns)[0], schema.encode(table)[0], atol=1e-6)


def test_a_turn_is_cut_where_fewest_rows_are():
    schema = Schema.detect({"dir": WIND}, {"dir": "angle"})
    start, cut, end = schema.columns[0].ends
    assert (start, end) == (0.0, 360.0)
    assert 120 < cut < 230
    assert (schema.parts[0].low, schema.parts[0].high) == (0.0, 360.0)


def test_a_turn_is_what_the_support_says():
    hours = np.floor(RNG.normal(23, 3, 300) % 24)
    limits = {"support": {"hour": (0, 24)}}
    schema = Schema.detect({"hour": hours}, {"hour": "angle"}, **limits)
    near = schema.encode({"hour": [22.0, 23.0, 0.0, 1.0]})[0][:, 0]
    assert schema.parts[0].rest
    assert np.diff(near[:, 1]).tolist() == [1.0, 1.0, 1.0]
    with pytest.raises(DataError, match="outside the stated support"):
        Schema.detect({"hour": hours + 2}, {"hour": "angle"}, **limits)


def test_the_density_of_a_turn_integrates_to_one_and_samples_are_within():
    speed = np.exp(np.cos(np.deg2rad(WIND)) + 0.3 * RNG.normal(size=len(WIND)))
    model = fitted({"dir": WIND, "speed": speed}, schema={"dir": "angle"})
    grid = (np.arange(720) + 0.5) / 2
    for given in (0.5, 2.0):
        table = {"dir": grid, "speed": np.full(len(grid), given)}
        density = np.exp(model.log_prob(table, given=["speed"]))
        assert density.sum() / 2 == pytest.approx(1, abs=0.02)
    draws = model.sample(500, random_state=0)["dir"]
    assert draws.min() >= 0
    assert draws.max() < 360
    likely = model.score_samples({"dir": [350.0, 180.0], "speed": [2.0, 2.0]})
    assert likely[0] > likely[1]
