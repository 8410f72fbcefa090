"""One energy over one or two columns: exactly normalised, sampled from its own density, mixed."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.special import logsumexp

import selfnorm as sn
from selfnorm import EnergyDensity
from selfnorm.columns import GAP, CodedColumns, Part
from selfnorm.errors import DataError
from selfnorm.tables.energy_distribution import EnergyDistribution, grid_of
from selfnorm.tables.members import Kind, Member, simple_density
from selfnorm.tables.members import log_density as log_density_of
from tests.contract.test_densities import axis, distance

QUICK = {"method": "joint", "random_state": 0, "max_steps": 30}
LAWS = {
    "log-normal": stats.lognorm(1.5, scale=np.e),
    "Cauchy": stats.cauchy(),
    "uniform": stats.uniform(-1, 2),
}


@pytest.mark.parametrize("name", LAWS)
def test_one_column_integrates_to_one_and_samples_follow_the_density(name):
    x, new = (LAWS[name].rvs((400, 1), random_state=seed) for seed in (0, 1))
    model = EnergyDensity(**QUICK).fit(x)
    at, widths = axis(x, 80_001)
    mass = np.exp(model.score_samples(at[:, None])) * widths
    assert mass.sum() == pytest.approx(1, abs=1e-3)
    drawn = model.sample(2000, random_state=0)[:, 0]
    assert distance(drawn, at, mass) < 1
    beyond = ((of < x.min()) | (of > x.max()) for of in (drawn, at))
    assert next(beyond).mean() == pytest.approx(mass[next(beyond)].sum(), abs=0.01)
    bounds = model.bounds(new, random_state=0)
    assert bounds.reliable
    assert bounds.lower == pytest.approx(model.score(new), abs=0.02)
    assert LAWS[name].logpdf(new).mean() - model.score(new) < 0.1


def two_humps(x):
    """Two normal densities, one of them a hundred deviations off."""
    return torch.distributions.Normal(torch.tensor([0.0, 100.0]), 1.0).log_prob(x).logsumexp(-1)


def test_the_grid_reaches_the_rows_that_are_furthest_out():
    frame = sn.StudentT(5.0, torch.zeros(1), 1.0)
    proposal = sn.Defensive(frame, frame)
    grid = grid_of(two_humps, proposal, torch.tensor([[-3.0, 103.0]]))
    assert grid.log_norm == pytest.approx(math.log(2), abs=1e-3)


def test_a_chain_of_one_column_with_a_narrow_group_in_a_wide_one_integrates_to_one():
    rng = np.random.default_rng(1000)
    x = np.where(rng.random((300, 1)) < 0.5, 0.01, 1.0) * rng.normal(size=(300, 1))
    model = EnergyDensity(method="autoregressive", random_state=0).fit(x)
    beyond, inner = np.geomspace(6, 1e6, 201), np.linspace(-0.03, 0.03, 3001)
    at = np.unique(np.r_[inner, 10 * inner, np.linspace(-6, 6, 1501), beyond, -beyond])
    assert np.trapezoid(np.exp(model.score_samples(at[:, None])), at) == pytest.approx(1, abs=1e-3)


def test_a_simple_density_that_knows_more_takes_the_weight_of_the_energy():
    x = np.random.default_rng(0).normal(size=(1000, 1))
    model = EnergyDensity(**QUICK).fit(x)
    weights = {member.name: member.weight for member in model.members_}
    assert next(iter(weights)) == "energy"
    assert weights["energy"] < 0.5
    new = np.random.default_rng(1).normal(size=(4000, 1))
    assert abs(stats.norm.logpdf(new).mean() - model.score(new)) < 0.01


def test_one_row_far_from_all_others_leaves_them_apart():
    x = np.r_[stats.norm().rvs((100, 1), random_state=0), [[1e20]]]
    model = EnergyDensity(**QUICK).fit(x)
    assert model.score_samples(x[:100]).mean() > -2


def test_three_columns_of_one_energy_are_scored_sampled_and_bounded():
    x = stats.multivariate_normal(np.zeros(3)).rvs(200, random_state=0)
    model = EnergyDensity(**QUICK, validation_fraction=0.0).fit(x)
    bounds = model.bounds(x, n_samples=2000, random_state=0)
    assert bounds.lower - 0.1 < model.score(x) < bounds.upper + 0.1
    drawn = model.sample(4000, random_state=0)
    assert (x.min(0) - 1e-9 <= drawn.min(0)).all()
    assert (drawn.max(0) <= x.max(0) + 1e-9).all()
    assert isinstance(model.model_, sn.EBM)


# what one column is, given the other

COVARIANCE = np.array([[1.0, 1.9], [1.9, 4.0]])  # a correlation of 0.95


def log_normal(x):
    return torch.distributions.MultivariateNormal(
        torch.zeros(2), torch.tensor(COVARIANCE)
    ).log_prob(x)


def log_banana(x):
    along, across = x[..., 0], x[..., 1] - x[..., 0] ** 2
    return -0.5 * (along**2 + (across / 0.3) ** 2) - math.log(2 * math.pi * 0.3)


DENSITIES = {"normal": log_normal, "banana": log_banana}


def rows_of(name, n):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, 2))
    if name == "normal":
        return x @ np.linalg.cholesky(COVARIANCE).T
    return np.stack([x[:, 0], x[:, 0] ** 2 + 0.3 * x[:, 1]], 1)


def coded_of(x):
    coded = torch.zeros(len(x), 2, 2, dtype=torch.float64)
    coded[..., 1] = torch.as_tensor(x)
    coded[..., 0] = coded[..., 1].isnan().to(coded) * GAP
    return coded.nan_to_num()


@pytest.fixture(scope="module", params=DENSITIES)
def exact(request):
    """The density itself as a distribution of coded rows, and some rows of it."""
    log_density, x = DENSITIES[request.param], rows_of(request.param, 2000)
    parts = [Part(j, f"x{j}", 0, rest=True) for j in range(2)]
    columns = CodedColumns(parts, 2).double().fit(coded_of(x), straight=True)
    z = columns.pack(coded_of(x))[0][..., 1]
    slope = columns.pack(coded_of(x))[1][0].sum()
    model = sn.EBM(lambda z: -log_density(columns.from_scores(z)), log_norm=float(slope))
    proposal = sn.Defensive.fit_to(z, n_components=5).double()
    alone = [Member("energy", 1.0, 0.0)]
    return EnergyDistribution(model.double(), alone, [], proposal, columns), log_density, x


def along(log_density, x, part):
    """Points, log-densities of rows along one column, and the log of the integral of each."""
    at = np.linspace(-30, 60, 60_001)
    rows = np.repeat(x[:, None], len(at), 1)
    rows[..., part] = at
    log_p = log_density(torch.from_numpy(rows)).numpy()
    return at, log_p, logsumexp(log_p, axis=1) + math.log(at[1] - at[0])


@pytest.mark.parametrize("part", [0, 1])
def test_marginals_and_conditionals_of_one_energy_are_those_of_the_density(exact, part):
    distribution, log_density, x = exact
    x = x[:20]
    coded, gaps = coded_of(x), coded_of(x)
    gaps[:, part, 0] = GAP
    _, _, marginal = along(log_density, x, part)
    joint = log_density(torch.from_numpy(x)).numpy()
    assert distribution.log_prob(coded).numpy() == pytest.approx(joint, abs=1e-6)
    assert distribution.log_prob(gaps).numpy() == pytest.approx(marginal, abs=1e-4)
    given = torch.arange(2) != part
    found = distribution.conditional(coded, given)[0].numpy()
    assert found == pytest.approx(joint - marginal, abs=1e-4)
    both = distribution.conditional(coded, torch.zeros(2, dtype=torch.bool))[0].numpy()
    assert both == pytest.approx(joint, abs=1e-6)
    nothing = torch.full_like(gaps, GAP)
    assert distribution.log_prob(nothing).tolist() == [0.0] * len(x)


@pytest.mark.parametrize("part", [0, 1])
def test_draws_of_one_column_given_the_other_follow_the_conditional(exact, part):
    distribution, log_density, x = exact
    for row in x[:3]:
        gaps = coded_of(row[None]).repeat(2000, 1, 1)
        gaps[:, part, 0] = GAP
        drawn = distribution.complete(gaps, gaps[..., 0] != GAP, seed=1)
        assert (drawn[:, 1 - part, 1] == row[1 - part]).all()
        at, log_p, total = along(log_density, row[None], part)
        mass = np.exp(log_p[0] - total) * (at[1] - at[0])
        assert distance(drawn[:, part, 1], at, mass) < 1


@pytest.mark.parametrize("part", [0, 1])
def test_tails_of_one_energy_are_the_mass_of_what_is_less_likely(exact, part):
    distribution, log_density, x = exact
    _, log_p, _ = along(log_density, x[:20], part)
    own = log_density(torch.from_numpy(x[:20])).numpy()
    less = np.where(log_p <= own[:, None], np.exp(log_p - logsumexp(log_p, axis=1)[:, None]), 0)
    tails = distribution.explain(coded_of(x[:20]))
    assert tails[:, part] == pytest.approx(less.sum(1), abs=0.02)
    far = x[:1].copy()
    far[0, part] = 50.0
    assert distribution.explain(coded_of(far))[0, part] < 1e-12


def test_a_mixture_with_one_energy_is_that_of_its_members(exact):
    distribution, _, x = exact
    coded = coded_of(x)
    kind = Kind(1, straight=True)
    weights = torch.ones(len(x), dtype=torch.float64)
    simple = simple_density(kind, distribution.columns, coded, weights, 0)
    weighed = [Member("energy", 0.3, 0.0), Member(kind.name, 0.7, 0.0)]
    mixture = dataclasses.replace(distribution, members=weighed, simple=[simple])
    gaps = coded[:20].clone()
    gaps[:, 1, 0] = GAP
    expected = torch.stack([distribution.log_prob(gaps), log_density_of(simple, gaps)]).exp()
    found = mixture.log_prob(gaps).exp()
    assert torch.allclose(found, 0.3 * expected[0] + 0.7 * expected[1], rtol=1e-4)


def test_an_estimator_of_one_energy_answers_what_a_chain_answers():
    x = rows_of("normal", 1200)
    density = EnergyDensity(random_state=0, max_steps=60).fit(x)
    assert density.method_ == "joint"
    means = x[:60, 0] * 1.9
    gaps = np.where(np.arange(2) == 1, np.nan, x[:60])
    draws = np.stack(density.impute(gaps, 20, random_state=0))
    assert np.array_equal(draws[..., 0], np.broadcast_to(x[:60, 0], (20, 60)))
    assert np.abs(draws[..., 1] - means).mean() < 0.7  # 0.5 of the truth
    truth = stats.norm.logpdf(x[:60, 1], means, math.sqrt(4 - 1.9**2))
    assert density.log_prob(x[:60], given=["x0"]) == pytest.approx(truth, abs=0.5)
    marginal = density.marginal(["x0"])
    expected = stats.norm.logpdf(x[:60, 0])
    assert marginal.score_samples(x[:60]) == pytest.approx(expected, abs=0.3)
    assert np.array_equal(marginal.score_samples(x[:60]), density.score_samples(gaps))
    drawn = density.sample(500, given={"x0": 1.0}, random_state=0)
    assert (drawn[:, 0] == 1.0).all()
    assert drawn[:, 1].mean() == pytest.approx(1.9, abs=0.2)
    odd = np.array([[1.5, -3.0], [1.5, 3.0]])
    assert density.explain(odd)[0].max() < 0.01 < density.explain(odd)[1].min()
    alone = density.explain(np.array([[3.0, np.nan]]))[0]
    assert alone[0] == pytest.approx(2 * stats.norm.sf(3), abs=0.01)
    assert np.isnan(alone[1])
    whole = density.impute(np.full((50, 2), np.nan), random_state=0)
    assert np.isfinite(whole).all()
    assert density.decision_function(gaps).mean() == pytest.approx(
        density.decision_function(x[:60]).mean(), abs=0.5
    )
    bounds = density.bounds(gaps, n_samples=2000, random_state=0)
    assert bounds.lower == pytest.approx(density.score(gaps), abs=0.05)


def test_one_missing_cell_of_three_is_integrated_out():
    x = np.random.default_rng(0).normal(size=(300, 3)) @ np.diag([1.0, 2.0, 0.1])
    density = EnergyDensity(**QUICK).fit(x)
    gaps = np.where(np.arange(3) == 1, np.nan, x[:5])
    truth = stats.norm.logpdf(gaps[:, [0, 2]], scale=[1.0, 0.1]).sum(1)
    assert density.score_samples(gaps) == pytest.approx(truth, abs=1.0)
    assert np.isfinite(density.impute(gaps, random_state=0)).all()
    with pytest.raises(DataError, match="one missing column of a row"):
        density.score_samples(np.where(np.arange(3) > 0, np.nan, x[:5]))
