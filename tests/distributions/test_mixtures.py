"""One-dimensional mixtures: density, samples and quadrature agree with each other."""

import pytest
import torch

from selfnorm.distributions import Mixture1d

FAMILIES = ["logistic", "gaussian"]


def skewed(family, batch=()):
    """Three components of very different widths, far from symmetric, and the tail."""
    logits = torch.tensor([0.2, -0.5, 1.0, -2.0], dtype=torch.float64)
    loc = torch.tensor([-2.0, 0.5, 3.0, 1.0], dtype=torch.float64)
    raw = torch.tensor([-0.5, -3.0, 0.3, 0.5], dtype=torch.float64)
    numbers = torch.cat([logits, loc, raw]).expand(*batch, 12)
    return Mixture1d.from_raw(numbers, 4, family=family)


@pytest.mark.parametrize("family", FAMILIES)
def test_density_integrates_to_one_and_to_its_distribution_function(family):
    q = skewed(family)
    y = torch.cat([torch.linspace(-3e3, -20, 200_001), torch.linspace(-20, 20, 400_001)]).double()
    p = q.log_prob(y).exp()
    mass = torch.cumulative_trapezoid(p, y)
    total = mass[-1] + (1 - q.cdf(torch.tensor(20.0).double()))
    assert abs(float(total) - 1) < 1e-5
    assert torch.allclose(mass[::5000], q.cdf(y)[1::5000] - q.cdf(y[0]), atol=1e-5)


def test_stratified_samples_average_far_better_than_independent_ones():
    q = skewed("logistic", batch=(2000,))
    w = [torch.sin(q.sample(16, stratified=s)).mean(0).std() for s in (True, False)]
    assert w[0] < 0.5 * w[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_quadrature_nodes_integrate_smooth_and_wavy_functions(family):
    q = skewed(family, batch=(2,))
    y, log_weight = q.nodes(512)
    assert y.shape == log_weight.shape == (512, 2)
    assert torch.allclose(log_weight.exp().sum(0), torch.ones(2).double(), atol=1e-9)
    fine = torch.linspace(-400, 400, 400_001).double()
    for w in (torch.sin, lambda t: torch.exp(torch.tanh(t - 1)), lambda t: torch.cos(5 * t)):
        exact = torch.trapezoid(w(fine) * skewed(family).log_prob(fine).exp(), fine)
        rule = (log_weight.exp() * w(y)).sum(0)
        assert torch.allclose(rule, exact.expand(2), atol=2e-3), (rule, exact)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("side", [-1.0, 1.0])
@pytest.mark.parametrize("n", [64, 2048])
def test_quadrature_in_single_precision_knows_both_tails(family, side, n):
    q = skewed(family)
    mean, variance = q.moments()
    q = q.moved(-mean * variance.rsqrt(), variance.rsqrt())
    found = []
    for each in (q, q.to(torch.float32)):
        y, log_weight = each.nodes(n)
        tilt = 8 * torch.sigmoid(2 * (side * y - 4))  # where one in some ten thousand is
        found.append(float(torch.logsumexp(log_weight + tilt, 0)))
    assert found[1] == pytest.approx(found[0], abs=2e-5)


def test_a_narrow_component_between_two_nodes_keeps_its_mass():
    logits = torch.tensor([0.0, -6.0, -8.0])
    raw = torch.cat([logits, torch.tensor([0.0, 2.0, 0.0]), torch.tensor([0.0, -7.0, 0.0])])
    q = Mixture1d.from_raw(raw.double(), 3)
    y, log_weight = q.nodes(64)
    near = (y - 2).abs() < 0.3
    share = float(q.cdf(torch.tensor(2.3).double()) - q.cdf(torch.tensor(1.7).double()))
    assert abs(float(log_weight.exp()[near].sum()) - share) < 0.03
    assert abs(float(log_weight.exp().sum()) - 1) < 1e-9


@pytest.mark.parametrize("family", FAMILIES)
def test_moments_are_those_of_the_body(family):
    q = skewed(family)
    body = Mixture1d(
        torch.cat([torch.log_softmax(q.log_pi[:-1], -1), torch.tensor([-60.0]).double()]),
        q.loc,
        q.log_scale,
        family,
    )
    mean, variance = q.moments()
    y = body.sample(200_000)
    assert abs(float(y.mean() - mean)) < 0.01
    assert abs(float(y.std() / variance.sqrt()) - 1) < 0.01


def test_extreme_parameters_stay_finite():
    raw = torch.tensor([1e3, -1e3, 0.0, 1e4, -1e4, 0.0, 1e3, -1e3, 50.0])
    q = Mixture1d.from_raw(raw, 3)
    assert torch.isfinite(torch.stack(q.moments())).all()
    assert torch.isfinite(q.log_prob(torch.tensor([-1e6, 0.0, 1e6]))).all()
    assert torch.isfinite(q.sample(100)).all()
