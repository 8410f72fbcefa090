"""Calibration measures against closed forms and against scoringrules."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from selfnorm.errors import DataError
from selfnorm.evaluation import calibration

rng = np.random.default_rng(0)


def test_crps_from_cdf_matches_the_closed_form_of_a_normal() -> None:
    y = np.array([-1.7, 0.0, 0.4, 3.0])
    grid = np.linspace(-12, 12, 6001)
    cdf = np.broadcast_to(stats.norm.cdf(grid, 0.3, 1.4), (4, 6001))
    z = (y - 0.3) / 1.4
    closed = 1.4 * (z * (2 * stats.norm.cdf(z) - 1) + 2 * stats.norm.pdf(z) - np.pi**-0.5)
    np.testing.assert_allclose(calibration.crps_from_cdf(y, grid, cdf), closed, atol=1e-5)


def test_crps_from_samples_matches_scoringrules() -> None:
    scoringrules = pytest.importorskip("scoringrules")
    samples = rng.gamma(2.0, 1.0, (20, 60))
    y = rng.gamma(2.0, 1.0, 20)
    expected = scoringrules.crps_ensemble(y, samples, estimator="fair")
    np.testing.assert_allclose(calibration.crps_from_samples(y, samples), expected, rtol=1e-6)


def test_sample_and_cdf_forms_agree_for_a_skewed_law() -> None:
    y = np.array([0.2, 1.5, 6.0])
    samples = rng.gamma(2.0, 1.0, (3, 40_000))
    grid = np.linspace(0, 40, 8001)
    cdf = np.broadcast_to(stats.gamma.cdf(grid, 2.0), (3, 8001))
    exact = calibration.crps_from_cdf(y, grid, cdf)
    np.testing.assert_allclose(calibration.crps_from_samples(y, samples), exact, atol=0.02)


def test_uniform_pit_is_calibrated_and_a_shifted_one_is_not() -> None:
    pit = (np.arange(1000) + 0.5) / 1000
    assert calibration.central_coverage(pit, 0.9) == pytest.approx(0.9)
    assert calibration.pit_distance(pit) < 1e-3
    assert calibration.pit_distance(pit**2) == pytest.approx(0.25, abs=0.01)
    nominal, observed = calibration.reliability(pit)
    np.testing.assert_allclose(nominal, observed, atol=1e-3)


def test_interval_coverage_and_sharpness() -> None:
    y = rng.standard_normal(4000)
    intervals = np.broadcast_to(stats.norm.ppf([0.05, 0.95]), (4000, 2))
    assert calibration.interval_coverage(y, intervals) == pytest.approx(0.9, abs=0.02)
    assert calibration.sharpness(intervals) == pytest.approx(2 * stats.norm.ppf(0.95))


@pytest.mark.parametrize("bad", [[], [np.nan], [[0.1, 0.2]]])
def test_bad_columns_are_refused(bad) -> None:
    with pytest.raises(DataError):
        calibration.central_coverage(bad)


def test_bad_level_is_refused() -> None:
    with pytest.raises(DataError, match="between 0 and 1"):
        calibration.central_coverage([0.5], 90)
