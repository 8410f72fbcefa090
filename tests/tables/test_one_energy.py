"""One energy over one or two columns: exactly normalised, sampled from its own density, mixed."""

import numpy as np
import pytest
from scipy import stats

import selfnorm as sn
from selfnorm import EnergyDensity

QUICK = {"method": "joint", "random_state": 0, "max_steps": 30}
LAWS = {
    "log-normal": stats.lognorm(1.5, scale=np.e),
    "Cauchy": stats.cauchy(),
    "uniform": stats.uniform(-1, 2),
}


def axis(x, n):
    """Points and widths on the whole line, closest to each other where the rows are."""
    low, middle, high = np.quantile(x, [0.25, 0.5, 0.75])
    t = np.linspace(-12, 12, n)
    at = middle + (high - low) * np.sinh(t)
    return at, (high - low) * np.cosh(t) * (t[1] - t[0])


def distance(drawn, at, mass):
    """Kolmogorov-Smirnov distance of samples from masses at points, in units of its 99 % line."""
    ordered = np.sort(drawn)
    below = np.interp(ordered, at, mass.cumsum() - mass / 2)
    empirical = (np.arange(len(drawn)) + 0.5) / len(drawn)
    return np.abs(below - empirical).max() * np.sqrt(len(drawn)) / 1.63


@pytest.mark.parametrize("name", LAWS)
def test_one_column_integrates_to_one_and_samples_follow_the_density(name, tmp_path):
    x, new = (LAWS[name].rvs((400, 1), random_state=seed) for seed in (0, 1))
    model = EnergyDensity(**QUICK).fit(x)
    at, widths = axis(x, 80_001)
    mass = np.exp(model.score_samples(at[:, None])) * widths
    assert mass.sum() == pytest.approx(1, abs=1e-3)
    assert distance(model.sample(2000, random_state=0)[:, 0], at, mass) < 1
    bounds = model.bounds(new, random_state=0)
    assert bounds.reliable
    assert bounds.lower == pytest.approx(model.score(new), abs=0.02)
    assert LAWS[name].logpdf(new).mean() - model.score(new) < 0.1
    model.save(tmp_path)
    again = EnergyDensity.load(tmp_path)
    assert np.array_equal(again.score_samples(new), model.score_samples(new))
    assert np.array_equal(again.sample(5, random_state=1), model.sample(5, random_state=1))


def test_a_simple_density_that_knows_more_takes_the_weight_of_the_energy():
    x = np.random.default_rng(0).normal(size=(1000, 1))
    model = EnergyDensity(**QUICK).fit(x)
    weights = {member.name: member.weight for member in model.members_}
    assert next(iter(weights)) == "energy"
    assert weights["energy"] < 0.5
    new = np.random.default_rng(1).normal(size=(4000, 1))
    assert abs(stats.norm.logpdf(new).mean() - model.score(new)) < 0.01


def test_the_samples_of_one_energy_lie_within_the_range_of_the_rows():
    x = stats.cauchy().rvs((300, 1), random_state=0)
    drawn = EnergyDensity(**QUICK).fit(x).sample(4000, random_state=0)
    assert x.min() <= drawn.min() <= drawn.max() <= x.max()


def test_three_columns_of_one_energy_are_scored_sampled_and_bounded():
    x = stats.multivariate_normal(np.zeros(3)).rvs(200, random_state=0)
    model = EnergyDensity(**QUICK, validation_fraction=0.0).fit(x)
    bounds = model.bounds(x, n_samples=2000, random_state=0)
    assert bounds.lower - 0.1 < model.score(x) < bounds.upper + 0.1
    assert model.sample(50, random_state=0).shape == (50, 3)
    assert isinstance(model.model_, sn.EBM)
