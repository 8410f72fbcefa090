"""Every density there is: it integrates or sums to one, and what it samples follows it."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import distributions as D

import selfnorm as sn
from selfnorm._context import seeded
from selfnorm.distributions import DefensiveLabels, Mixture1d
from selfnorm.vae import MixturePrior
from selfnorm.vae.model import as_likelihood
from selfnorm.vae.priors import GaussianPosterior
from tests.contract.specimens import SPECIMENS
from tests.golden import cases

SKEW = torch.tensor([[1.0, 0.7], [0.7, 2.0]])
N_SAMPLES = 4000


class Density(NamedTuple):
    """Rows ``(n, d)`` to log-densities ``(n,)``, and ``n`` samples ``(n, d)``."""

    log_prob: Callable[[Any], Any]
    sample: Callable[[int], Any]
    tolerance: float = 2e-3
    n_points: int = 301  # of the grid, along each column; of one column 4001
    line: float = 1.0  # how far samples that are resampled may be from the density


def mixture():
    return sn.GaussianMixture(
        torch.tensor([0.3, 0.7]),
        torch.tensor([[-2.0, 1.0], [1.5, -0.5]]),
        torch.stack([SKEW * 0.3, torch.eye(2) * 0.5]),
    )


def banana(n):
    a = torch.randn(n)
    return torch.stack([50 + 10 * a, a**2 + 0.5 * torch.randn(n)], 1)


def flow(kind):
    return sn.Flow(2, kind=kind, transforms=2, hidden=(16, 16), bins=4).set_scaling(banana(500))


def ensemble():
    """N(m, 1) tilted by exp(theta x) is N(m + theta, 1): the members are normalised."""
    parts = []
    for mean, theta in ((-2.0, 0.5), (3.0, -0.25)):
        energy = sn.ExponentialFamily(lambda v: v, 1, theta=torch.tensor([theta]))
        base = sn.Gaussian(torch.tensor([mean]), scale=1.0)
        parts.append(sn.EBM(energy, base=base, log_norm=mean * theta + theta**2 / 2))
    return sn.Ensemble(parts)


def posterior():
    return GaussianPosterior(torch.randn(6, 2), torch.randn(6, 2) * 0.3 - 0.5)


PROPOSALS = {
    "gaussian": lambda: sn.Gaussian(torch.tensor([1.0, -1.0]), scale=torch.tensor([0.5, 3.0])),
    "gaussian full": lambda: sn.Gaussian(torch.tensor([1.0, -1.0]), covariance=SKEW),
    "student": lambda: sn.StudentT(4.0, torch.tensor([0.5, 0.0]), covariance=SKEW),
    "uniform": lambda: sn.Uniform(torch.tensor([-1.0, 0.0]), torch.tensor([2.0, 0.5])),
    "mixture": mixture,
    "defensive": lambda: sn.Defensive(mixture(), weight=0.3),
    "stratified": lambda: sn.Defensive(
        mixture(), sn.StudentT(4.0, torch.zeros(2), covariance=SKEW), weight=0.3, stratified=True
    ),
    "defensive of torch": lambda: sn.Defensive(mixture(), D.StudentT(3.0, torch.zeros(2), 2.0)),
    "torch": lambda: sn.as_proposal(D.Gamma(torch.tensor([2.0, 3.0]), torch.tensor([1.0, 2.0]))),
    "flow nsf": partial(flow, "nsf"),
    "flow maf": partial(flow, "maf"),
    "mixture prior": lambda: MixturePrior(2, 4),
    "aggregate posterior": lambda: posterior().aggregate(),
    "posteriors beside a prior": lambda: cases.EnergyPrior(dim=2).beside_posteriors(posterior()),
}
CUT = ("uniform", "torch")  # edges within cells of a grid


def of_proposal(name):
    q = PROPOSALS[name]()
    fine = (0.03, 1201) if name in CUT else ()
    return Density(q.log_prob, lambda n: q.sample((n,)), *fine)


def label_laws():
    h, y = torch.randn(1, 4), torch.randn(200, 1) * 2 + 1
    mdn = sn.MDN(4, components=3, hidden=(8,))
    return {
        "mdn": mdn(h),
        "label gaussian": sn.Gaussian.fit_to(y)(h),
        "label uniform": sn.Uniform.fit_to(y)(h),
        "defensive labels": DefensiveLabels(mdn, sn.Gaussian.fit_to(y), weight=0.2)(h),
    }


def of_labels(name):
    law = label_laws()[name]
    return Density(lambda y: law.log_prob(y[:, None])[:, 0], lambda n: law.sample((n,))[:, 0])


def one_dimensional(family, stratified):
    """Three components of very different widths, far from symmetric, and the tail."""
    numbers = [0.2, -0.5, 1.0, -2.0, -2.0, 0.5, 3.0, 1.0, -0.5, -3.0, 0.3, 0.5]
    q = Mixture1d.from_raw(torch.tensor(numbers, dtype=torch.float64), 4, family=family)
    return Density(
        lambda y: q.log_prob(y[:, 0]), lambda n: q.sample(n, stratified=stratified)[:, None]
    )


def chain(dim, **options):
    """A chain of random energies and a ``b`` that is wrong, by quadrature."""
    sizes = {"hidden": 24, "blocks": 1, "components": 3, "context": 8, "energy_hidden": 16}
    model = sn.AutoregressiveEBM(dim, **sizes, energy_blocks=1, discrete=None, **options)
    for layer in (model.energy.last, model.energy.norm_last):
        torch.nn.init.normal_(layer.weight, std=0.4)
    model.set_scaling(banana(500)[:, -dim:]).eval()
    log_prob = partial(model.log_prob, normalizer="quadrature", n_nodes=128)
    return Density(log_prob, partial(model.sample, seed=0, n_candidates=256), 0.04, 101, 1.5)


def table(scale):
    rows = np.random.default_rng(0).gumbel(size=(400, len(scale))) * scale
    model = sn.EnergyDensity(method="joint", max_steps=20, hidden=8, random_state=0).fit(rows)
    return Density(model.score_samples, partial(model.sample, random_state=0), 0.01, 151)


def beside_a_line():
    """Two columns that are nearly one, in the coordinates in which they are independent."""
    mixing = np.array([[1.0, 0.999], [0.0, 0.045]])
    rows = np.random.default_rng(0).gumbel(size=(400, 2)) @ mixing
    model = sn.EnergyDensity(method="joint", max_steps=20, hidden=8, random_state=0).fit(rows)
    return Density(
        lambda x: model.score_samples(x @ mixing) + np.log(np.linalg.det(mixing)),
        lambda n: model.sample(n, random_state=0) @ np.linalg.inv(mixing),
        0.01,
        151,
    )


def regressor():
    model, x = SPECIMENS["regressor/numbers"].make(), np.array([[0.3, 1.0]])
    return Density(
        lambda y: np.log(model.pdf(x, y[:, 0])[0]),
        lambda n: model.sample(x, n, random_state=0).T,
    )


DENSITIES = {
    **{name: partial(of_proposal, name) for name in PROPOSALS},
    **{name: partial(of_labels, name) for name in label_laws()},
    **{
        f"{family} {'in strata' * stratified}": partial(one_dimensional, family, stratified)
        for family in ("logistic", "gaussian")
        for stratified in (False, True)
    },
    "ensemble": lambda: Density(*(getattr(ensemble(), name) for name in ("log_prob", "sample"))),
    "chain": partial(chain, 2, orderings=2),
    "gaussian chain": partial(chain, 2, family="gaussian"),
    "chain of one": partial(chain, 1),
    **{f"table {scale}": partial(table, scale) for scale in ([1e-6], [1e6], [1e-6, 1e6])},
    "table beside a line": beside_a_line,
    "regressor": regressor,
}


def axis(x, n):
    """Points and widths on the whole line, closest to each other where the samples are."""
    low, middle, high = np.quantile(x, [0.25, 0.5, 0.75])
    t = np.linspace(-11, 11, n)
    at = middle + (high - low) * np.sinh(t)
    return at, (high - low) * np.cosh(t) * (t[1] - t[0])


def distance(drawn, at, mass):
    """Kolmogorov-Smirnov distance of samples from masses at points, in units of its 99.9 % line."""
    ordered = np.sort(drawn)
    below = np.interp(ordered, at, mass.cumsum() - mass / 2)
    empirical = (np.arange(len(drawn)) + 0.5) / len(drawn)
    return np.abs(below - empirical).max() * np.sqrt(len(drawn)) / 1.95


@pytest.mark.parametrize("name", DENSITIES)
def test_it_integrates_to_one_and_samples_follow_it(name):
    with seeded(0), torch.no_grad():
        density = DENSITIES[name]()
        drawn = density.sample(N_SAMPLES)
        n_points = 4001 if drawn.shape[1] == 1 else density.n_points
        axes = [axis(np.asarray(column, dtype=np.float64), n_points) for column in drawn.T]
        rows = np.stack(np.meshgrid(*(at for at, _ in axes), indexing="ij"), -1)
        rows = rows.reshape(-1, len(axes))
        if isinstance(drawn, torch.Tensor):
            rows = torch.from_numpy(rows).to(drawn)
        log_p = np.asarray(density.log_prob(rows), dtype=np.float64)
    mass = np.exp(log_p).reshape([len(at) for at, _ in axes])
    for place, (_, widths) in enumerate(axes):
        mass = mass * np.expand_dims(widths, [k for k in range(len(axes)) if k != place])
    assert mass.sum() == pytest.approx(1.0, abs=density.tolerance)
    for place, (at, _) in enumerate(axes):
        others = tuple(k for k in range(len(axes)) if k != place)
        assert distance(np.asarray(drawn[:, place]), at, mass.sum(others)) < density.line, place


@pytest.mark.parametrize("name", PROPOSALS)
def test_shapes_of_a_proposal(name):
    q = PROPOSALS[name]()
    x = q.sample((3, 5))
    assert x.shape == (3, 5, 2)
    assert q.log_prob(x).shape == (3, 5)
    assert q.event_shape == (2,)


def outcomes(likelihood, n):
    levels = 2 if likelihood == "bernoulli" else 3
    return torch.tensor(list(itertools.product(range(levels), repeat=n)), dtype=torch.float32)


@pytest.mark.parametrize("name", ["bernoulli", "categorical:3"])
def test_a_likelihood_of_levels_sums_to_one_and_samples_follow_it(name):
    with seeded(0):
        law, rows = as_likelihood(name), outcomes(name, 2)
        output = torch.randn(1, 2 * law.n_parameters)
        mass = law.log_prob(output, rows).exp()
        drawn = law.sample(output.expand(20_000, -1))
    law.check(drawn)
    assert float(mass.sum()) == pytest.approx(1)
    share = torch.stack([(drawn == row).all(-1).float().mean() for row in rows])
    assert torch.allclose(share, mass, atol=0.02)


def test_gaussian_noise_integrates_to_one_and_samples_follow_it():
    law, output = as_likelihood("gaussian"), torch.tensor([[0.3]])
    y = torch.linspace(-40, 40, 20_001)
    density = law.log_prob(output, y[:, None]).exp().detach()
    assert float(torch.trapezoid(density, y)) == pytest.approx(1, abs=1e-4)
    with seeded(0):
        drawn = law.sample(output.expand(N_SAMPLES, 1))[:, 0].detach()
    assert distance(drawn.numpy(), y.numpy(), (density * (y[1] - y[0])).numpy()) < 1
