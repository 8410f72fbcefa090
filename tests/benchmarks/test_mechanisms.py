"""Mechanisms of table chains are switched off where the library has them."""

import numpy as np

import mechanisms
from selfnorm import EnergyDensity

MIXING = np.array([[1, 0.9, 0], [0, 0.3, 0.5], [0, 0, 1]])
ROWS = np.random.default_rng(0).normal(size=(60, 3)) @ MIXING


def fitted():
    return EnergyDensity(max_steps=3, hidden=8, random_state=0).fit(ROWS)


def test_every_switch_works_and_is_put_back():
    default = fitted()
    for name, (applies, switch) in mechanisms.MECHANISMS.items():
        with switch():
            without = fitted()
        assert np.isfinite(without.score_samples(ROWS)).all(), name
        if name in ("straight columns", "folds"):
            assert applies(default), name
            assert not applies(without), name
    assert np.array_equal(fitted().score_samples(ROWS), default.score_samples(ROWS))
