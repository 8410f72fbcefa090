"""Ensemble: a normalised mixture of its members."""

import math

import pytest
import torch

import selfnorm as sn
from selfnorm.errors import DataError


def gaussian_members():
    """Two EBMs with a known normaliser: N(m, 1) tilted by exp(theta x) is N(m + theta, 1)."""
    parts = []
    for mean, theta in ((-2.0, 0.5), (3.0, -0.25)):
        energy = sn.ExponentialFamily(lambda v: v, 1, theta=torch.tensor([theta]))
        base = sn.Gaussian(torch.tensor([mean]), scale=1.0)
        parts.append(sn.EBM(energy, base=base, log_norm=mean * theta + theta**2 / 2))
    return parts


def test_density_integrates_to_one_and_is_the_mixture():
    mixture = sn.Ensemble(gaussian_members())
    log_z, _ = sn.exact_log_norm(mixture, 1, n_points=4097)
    assert log_z == pytest.approx(0.0, abs=1e-4)
    x = torch.linspace(-5, 6, 23)[:, None]
    normal = torch.distributions.Normal(torch.tensor([-1.5, 2.75]), 1.0)
    expected = torch.logsumexp(normal.log_prob(x), 1) - math.log(2)
    torch.testing.assert_close(mixture.log_prob(x).detach(), expected, atol=1e-5, rtol=1e-5)


def test_bounds_and_jensen():
    parts = gaussian_members()
    mixture = sn.Ensemble(parts)
    x = torch.cat([torch.randn(300, 1) - 1.5, torch.randn(300, 1) + 2.75])
    q = sn.Defensive(sn.Gaussian.fit_to(x))
    bounds = sn.evaluate(mixture, x, proposal=q, n_samples=40_000, seed=0)
    exact = float(mixture.log_prob(x).detach().mean())
    assert bounds.reliable
    assert bounds.lower <= exact + 3 * bounds.log_norm_se
    assert bounds.upper == pytest.approx(exact, abs=4 * bounds.log_norm_se)
    assert exact > float(torch.stack([m.log_prob(x).detach().mean() for m in parts]).mean())


def test_samples_come_from_all_members():
    mixture = sn.Ensemble(gaussian_members())
    x = mixture.sample(4000, seed=0)
    assert x.shape == (4000, 1)
    assert float((x > 0.6).float().mean()) == pytest.approx(0.5, abs=0.05)
    assert float(x.mean()) == pytest.approx(0.625, abs=0.15)
    # Rows come in no order: the halves look alike.
    assert float(x[:2000].mean()) == pytest.approx(float(x[2000:].mean()), abs=0.3)


def test_an_empty_ensemble_is_refused():
    with pytest.raises(DataError, match="at least one"):
        sn.Ensemble([])
