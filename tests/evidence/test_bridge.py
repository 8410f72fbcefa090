import numpy as np
import pytest

from selfnorm.errors import DataError
from selfnorm.evidence.bridge import bridge, reciprocal


def weights(rng, mean, scale, n=3000, m=3000):
    """p = N(mean, scale), q = N(0, 1), Z = e^2."""
    x = mean + scale * rng.normal(size=(1, n))
    y = rng.normal(size=m)
    ratio = lambda x: 2.0 - 0.5 * ((x - mean) / scale) ** 2 - np.log(scale) + 0.5 * x**2  # noqa: E731
    return ratio(x), ratio(y)


@pytest.mark.parametrize(("mean", "scale"), [(0.0, 1.0), (0.7, 0.6), (-1.0, 1.6), (3.0, 1.0)])
def test_value_within_its_error_and_between_the_bounds(mean, scale, rng):
    side = bridge(*weights(rng, mean, scale))
    error = np.sqrt(side.variance_draws + side.variance_samples)
    assert abs(side.log_z - 2.0) <= 3.5 * error + 1e-9
    assert side.lower()[0] <= 2.0 + 3 * side.lower()[1]
    assert side.upper()[0] >= 2.0 - 3 * side.upper()[1]
    assert abs(side.drift) <= 4 * side.drift_se + 1e-9


def test_errors_are_those_of_repeated_experiments(rng):
    sides = [bridge(*weights(rng, 0.8, 1.3, n=400, m=900)) for _ in range(200)]
    spread = np.std([side.log_z for side in sides])
    stated = np.sqrt(np.mean([side.variance_draws + side.variance_samples for side in sides]))
    assert stated == pytest.approx(spread, rel=0.15)
    z = [side.drift / side.drift_se for side in sides]
    assert np.std(z) == pytest.approx(1.0, abs=0.2)


def test_draws_of_another_law_show_as_drift_even_where_bounds_agree(rng):
    """q follows the draws, not p: both bounds are the same wrong number."""
    x, y = 0.8 * rng.normal(size=(1, 3000)), 0.8 * rng.normal(size=3000)
    ratio = lambda x: -0.5 * x**2 + 0.5 * (x / 0.8) ** 2 + np.log(0.8)  # noqa: E731
    side = bridge(ratio(x), ratio(y))
    assert abs(side.lower()[0] - side.upper()[0]) < 0.02
    assert abs(side.drift) > 8 * side.drift_se


def test_mass_of_q_outside_the_support_is_accounted_for(rng):
    """p is the half-normal, q the normal: half of q's samples have density zero."""
    x, y = np.abs(rng.normal(size=(1, 4000))), rng.normal(size=4000)
    side = bridge(np.zeros_like(x), np.where(y > 0, 0.0, -np.inf))  # p~ = q on its support
    exact = np.log(0.5)
    assert side.support_share == pytest.approx(0.5, abs=0.03)
    for value in (side.log_z, side.importance(), side.reciprocal(), side.lower()[0]):
        assert value == pytest.approx(exact, abs=0.06)
    assert side.upper()[0] == pytest.approx(exact, abs=0.06)


def test_no_overlap_is_an_error_or_shows(rng):
    far, _ = weights(rng, 0.0, 1.0, n=200)
    with pytest.raises(DataError, match="do not belong together"):
        bridge(far, np.full(200, -np.inf))
    side = bridge(*weights(rng, 9.0, 1.0))
    assert side.overlap < 0.01
    assert side.share_beyond > 0.5


def test_reciprocal(rng):
    ratio, _ = weights(rng, 0.3, 0.7, n=20_000)
    value, error = reciprocal(ratio)
    assert abs(value - 2.0) < 4 * error + 1e-3
