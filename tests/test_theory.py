"""The paper's theory, each statement with the corrected signs, of the library's objective."""

import math

import pytest
import torch
from torch.autograd.functional import hessian

from selfnorm import functional as F

GRID = torch.linspace(-14, 14, 8001, dtype=torch.float64)
STEP = float(GRID[1] - GRID[0])


def integral(values):
    return values.sum() * STEP


def double_well(theta, x):
    """An asymmetric energy with three parameters."""
    return theta[0] * x + theta[1].exp() * (x - 1) ** 2 + theta[2] * torch.sin(2 * x) + 0.01 * x**4


def log_z(theta):
    return integral(torch.exp(-double_well(theta, GRID))).log()


def likelihood(theta, x):
    return -double_well(theta, x).mean() - log_z(theta)


def exact_snl(theta, b, x):
    """The library's objective with a single weight, that of the whole integral."""
    return F.snl(-double_well(theta, x), log_z(theta)[None], b)


THETA = torch.tensor([0.4, -0.8, 0.7], dtype=torch.float64)
DATA = torch.tensor([-1.3, 0.2, 0.9, 2.4, 1.7], dtype=torch.float64)


def test_gradient_identity():
    """grad l_SNL = grad l + grad log Z (1 - exp(log Z - b))."""
    theta = THETA.clone().requires_grad_()
    for b in (-1.0, float(log_z(THETA)), 4.0):
        (snl_grad,) = torch.autograd.grad(exact_snl(theta, torch.tensor(b), DATA), theta)
        (ll_grad,) = torch.autograd.grad(likelihood(theta, DATA), theta)
        lz = log_z(theta)
        (lz_grad,) = torch.autograd.grad(lz, theta)
        expected = ll_grad + lz_grad * (1 - torch.exp(lz.detach() - b))
        torch.testing.assert_close(snl_grad, expected)


def test_gradient_estimates_are_unbiased_for_a_crude_proposal():
    """The average stochastic gradient is the exact one, although q is far from the model."""
    theta = THETA.clone().requires_grad_()
    b = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    exact = torch.cat(
        [g.reshape(-1) for g in torch.autograd.grad(exact_snl(theta, b, DATA), (theta, b))]
    )
    q = torch.distributions.StudentT(
        torch.tensor(3.0, dtype=torch.float64), loc=-0.5, scale=torch.tensor(2.0)
    )
    torch.manual_seed(4)
    estimates = []
    for _ in range(300):
        samples = q.sample((400,))
        log_w = -double_well(theta, samples) - q.log_prob(samples)
        value = F.snl(-double_well(theta, DATA), log_w, b)
        estimates.append(torch.cat([g.reshape(-1) for g in torch.autograd.grad(value, (theta, b))]))
    stacked = torch.stack(estimates)
    error = stacked.std(0) / math.sqrt(len(estimates))
    assert ((stacked.mean(0) - exact).abs() < 4 * error + 1e-9).all()


def test_sandwich_in_expectation():
    """E[l_SNL estimate] = l_SNL <= l <= E[l_IS estimate], strictly for few samples."""
    q = torch.distributions.Normal(torch.tensor(0.0, dtype=torch.float64), 3.0)
    b = log_z(THETA) + 0.2
    torch.manual_seed(5)
    samples = q.sample((8, 20_000))
    log_w = -double_well(THETA, samples) - q.log_prob(samples)
    log_p = -double_well(THETA, DATA).mean().expand(20_000)
    lower = F.snl(log_p, log_w, b, reduction="none")
    upper = F.importance_ml(log_p, log_w, reduction="none")
    truth = likelihood(THETA, DATA)
    se = lambda v: float(v.std() / math.sqrt(len(v)))  # noqa: E731
    assert abs(float(lower.mean() - exact_snl(THETA, b, DATA))) < 4 * se(lower)
    assert float(lower.mean()) + 4 * se(lower) < float(truth)
    assert float(upper.mean()) - 4 * se(upper) > float(truth)


def _family(statistics, base):
    """Exact SNL of an exponential family on the grid, as a function of (theta, b) in one vector."""

    def value(point, data):
        theta, b = point[:-1], point[-1]
        z = integral(base * torch.exp(statistics(GRID) @ theta))
        return F.snl(statistics(data) @ theta, z.log()[None], b)

    return value


GAUSS = torch.exp(-0.5 * GRID**2) / math.sqrt(2 * math.pi)


@pytest.mark.parametrize("seed", range(6))
def test_joint_concavity_for_exponential_families(seed):
    """The Hessian in (theta, b) is negative semi-definite wherever one looks."""
    snl = _family(lambda x: torch.stack([x, torch.sin(x), torch.tanh(3 * x)], -1), GAUSS)
    g = torch.Generator().manual_seed(seed)
    point = torch.randn(4, generator=g, dtype=torch.float64) * 1.5
    curvature = torch.linalg.eigvalsh(hessian(lambda p: snl(p, DATA), point))
    assert float(curvature.max()) < 1e-8
    assert float(curvature.min()) < -1e-3


def test_gaussian_mean_optimum():
    """Standard Gaussian base, E = -theta x: the optimum is (xbar, xbar^2 / 2)."""
    snl = _family(lambda x: x[..., None], GAUSS)
    xbar = DATA.mean()
    optimum = torch.stack([xbar, xbar**2 / 2]).requires_grad_()
    (slope,) = torch.autograd.grad(snl(optimum, DATA), optimum)
    assert float(slope.abs().max()) < 1e-6


def test_bernoulli_optimum_with_the_counting_measure():
    """Z = 1 + exp(theta): optimum (logit xbar, log(1 + exp theta)). Uniform measure: wrong b."""
    x = torch.tensor([1.0, 1, 0, 1, 0, 1, 1, 0, 1, 1], dtype=torch.float64)
    theta = torch.logit(x.mean()).requires_grad_()
    b = torch.nn.functional.softplus(theta.detach()).requires_grad_()

    def snl(measure):
        states = torch.tensor([0.0, 1.0], dtype=torch.float64)
        z = (measure * torch.exp(theta * states)).sum()
        return F.snl(theta * x, z.log()[None], b)

    counting = torch.autograd.grad(snl(1.0), (theta, b))
    assert max(abs(float(g)) for g in counting) < 1e-12
    uniform = torch.autograd.grad(snl(0.5), (theta, b))
    assert abs(float(uniform[1])) > 0.4


def test_the_generalised_divergence_is_minus_snl_and_the_normalised_one_its_minimum():
    """KL(p || c e^-E) = -l_SNL(b = -log c) - H(p), smallest in c where c e^-E is normalised."""
    p = torch.exp(-0.5 * ((GRID - 0.7) / 0.8) ** 2) / (0.8 * math.sqrt(2 * math.pi))
    energy, lz = double_well(THETA, GRID), log_z(THETA)

    def generalised(b):
        f = torch.exp(-b - energy)
        return float(integral(p * (p / f).log()) + integral(f) - 1)

    minus_entropy = integral(p * p.log())
    for b in (-0.7, 0.0, 1.2):  # the erratum: b is not +log c
        snl = F.snl(-integral(energy * p)[None], lz[None], b)
        assert generalised(b) == pytest.approx(float(minus_entropy - snl), abs=1e-6)
        assert generalised(b) > 0
    normalised = float(integral(p * (p.log() + energy)) + lz)
    assert generalised(lz) == pytest.approx(normalised, abs=1e-6)
    assert min(generalised(lz + 0.3), generalised(lz - 0.3)) > normalised
