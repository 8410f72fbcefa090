"""Calibration measures against closed forms and against scoringrules."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from selfnorm.errors import DataError
from selfnorm.evaluation import calibration
from selfnorm.plotting import plot_reliability


@pytest.mark.parametrize("per_row", [False, True])
def test_crps_from_cdf_matches_the_closed_form_of_a_normal(per_row) -> None:
    y = torch.tensor([-1.7, 0.0, 0.4, 3.0, -14.0, 13.0]).double()  # the last two beyond the grid
    grid = torch.linspace(-12, 12, 6001).double()
    law = torch.distributions.Normal(0.3, 1.4)
    z = (y - 0.3) / 1.4
    unit = torch.distributions.Normal(0.0, 1.0)
    closed = 1.4 * (z * (2 * unit.cdf(z) - 1) + 2 * unit.log_prob(z).exp() - np.pi**-0.5)
    cdf = law.cdf(grid).expand(6, -1)
    found = calibration.crps_from_cdf(y, grid.expand(6, -1) if per_row else grid, cdf)
    torch.testing.assert_close(found, closed, atol=1e-5, rtol=0)


def test_crps_from_cdf_is_that_of_samples_of_a_skewed_law(rng) -> None:
    scoringrules = pytest.importorskip("scoringrules")
    y = np.array([0.2, 1.5, 6.0])
    samples = rng.gamma(2.0, 1.0, (3, 40_000))
    grid = np.linspace(0, 40, 8001)
    cdf = np.broadcast_to(stats.gamma.cdf(grid, 2.0), (3, 8001)).copy()
    exact = calibration.crps_from_cdf(*(torch.from_numpy(v) for v in (y, grid, cdf)))
    expected = scoringrules.crps_ensemble(y, samples, estimator="qd")
    np.testing.assert_allclose(exact, expected, atol=0.02)


def test_uniform_pit_is_calibrated_and_a_shifted_one_is_not() -> None:
    pit = (np.arange(1000) + 0.5) / 1000
    assert calibration.central_coverage(pit, 0.9) == pytest.approx(0.9)
    assert calibration.pit_distance(pit) < 1e-3
    assert calibration.pit_distance(pit**2) == pytest.approx(0.25, abs=0.01)
    curve = plot_reliability({"model": pit}).axes[0].lines[1]
    np.testing.assert_allclose(*curve.get_data(), atol=1e-3)


@pytest.mark.parametrize(
    ("pit", "level"), [([], 0.9), ([np.nan], 0.9), ([[0.1, 0.2]], 0.9), ([0.5], 90)]
)
def test_bad_columns_and_levels_are_refused(pit, level) -> None:
    with pytest.raises(DataError, match=r"finite numbers|between 0 and 1"):
        calibration.central_coverage(pit, level)
