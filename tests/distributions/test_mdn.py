"""Label proposals: densities integrate to one, samples follow them, supports are honest."""

from __future__ import annotations

import math

import pytest
import torch

from selfnorm import Uniform
from selfnorm.distributions import MDN, DefensiveLabels, MixtureLabels
from selfnorm.errors import DataError, ProposalError


def skewed(batch: int = 3) -> MixtureLabels:
    """An asymmetric mixture with a narrow and a wide part."""
    log_weights = torch.tensor([0.7, 0.3]).log().expand(batch, 2)
    means = torch.tensor([[-1.0], [2.0]]).expand(batch, 2, 1)
    scales = torch.tensor([[0.2], [1.0]]).expand(batch, 2, 1)
    return MixtureLabels(log_weights, means, scales)


@torch.no_grad()
def test_moments_and_cdf_of_the_mixture() -> None:
    q = skewed()
    assert float(q.mean[0, 0]) == pytest.approx(-0.1)
    assert float(q.stddev[0, 0]) == pytest.approx(math.sqrt(0.7 * (0.04 + 0.81) + 0.3 * (1 + 4.41)))
    grid = torch.linspace(-3, 1, 8001)
    density = q.log_prob(grid.view(-1, 1, 1).expand(-1, 3, 1)).exp()[:, 0]
    at = q.cdf(torch.ones(3, 1))[0, 0] - q.cdf(torch.full((3, 1), -3.0))[0, 0]
    assert float(torch.trapezoid(density, grid)) == pytest.approx(float(at), abs=1e-4)


@torch.no_grad()
def test_stratified_samples_are_unbiased_with_less_variance() -> None:
    q = skewed(4000)
    torch.manual_seed(0)
    plain = q.sample((16,)).exp().clamp_max(50).mean(0)
    layered = q.stratified_sample(16).exp().clamp_max(50).mean(0)
    assert float(layered.mean()) == pytest.approx(float(plain.mean()), rel=0.05)
    assert float(layered.var()) < 0.4 * float(plain.var())
    torch.testing.assert_close(q.midpoints(4000).mean(0)[0], q.mean[0], atol=5e-3, rtol=0)


@torch.no_grad()
def test_two_dimensional_samples_have_independent_coordinates_within_a_component() -> None:
    q = MixtureLabels(torch.zeros(1, 1), torch.zeros(1, 1, 2), torch.tensor([[[1.0, 3.0]]]))
    torch.manual_seed(0)
    y = q.stratified_sample(20_000)[:, 0]
    covariance = torch.cov(y.T)
    expected = torch.tensor([[1.0, 0.0], [0.0, 9.0]])
    torch.testing.assert_close(covariance, expected, atol=0.2, rtol=0)


def test_bad_weights_are_refused() -> None:
    with pytest.raises(ProposalError, match="weight"):
        DefensiveLabels(MDN(1), MDN(1), weight=1.0)


def test_labels_without_their_last_dimension_are_refused_not_broadcast() -> None:
    h, y = torch.zeros(6, 2), torch.linspace(-1, 1, 6)
    mixture = MDN(2, components=3)(h)
    assert mixture.log_prob(y[:, None]).shape == (6,)
    for law in (mixture, Uniform(torch.zeros(1), torch.ones(1))(h)):
        with pytest.raises(DataError, match=r"got shape \(6,\); use y\[:, None\]"):
            law.log_prob(y)
    with pytest.raises(DataError, match="labels must have 1 number"):
        mixture.cdf(y)
    with pytest.raises(DataError, match="labels must have 2 number"):
        MDN(2, dim=2)(h).log_prob(y[:, None])
