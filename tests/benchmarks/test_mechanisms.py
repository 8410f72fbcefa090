"""Mechanisms of table chains are switched off where the library has them."""

import numpy as np
import pytest

import mechanisms
from selfnorm import EnergyDensity


def rows(n=60):
    x = np.random.default_rng(0).normal(size=(n, 3))
    return x @ np.array([[1, 0.9, 0], [0, 0.3, 0.5], [0, 0, 1]])


def fitted():
    return EnergyDensity(max_steps=3, hidden=8, random_state=0).fit(rows())


@pytest.fixture(scope="module")
def default():
    return fitted()


@pytest.mark.parametrize("name", mechanisms.MECHANISMS)
def test_a_switch_works_and_is_put_back(name, default):
    applies, switch = mechanisms.MECHANISMS[name]
    with switch():
        without = fitted()
    assert np.isfinite(without.score_samples(rows())).all()
    if name in ("lines", "conditioned lines", "straight columns", "folds"):
        assert applies(default)
        assert not applies(without)
    again = fitted()
    assert np.array_equal(again.score_samples(rows()), default.score_samples(rows()))
