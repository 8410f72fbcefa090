"""Conditionals, marginals and imputations of tables of numbers: of small ones, the mixture's."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal

from selfnorm import EnergyDensity
from selfnorm.distributions import TableMixture
from selfnorm.tables import members
from selfnorm.tables.chain_distribution import ChainDistribution

NAMES = [f"x{j}" for j in range(4)]
ROOT = np.array([[1.0, 0, 0, 0], [0.9, 0.3, 0, 0], [-0.4, 0.5, 0.6, 0], [0.2, 0.1, -0.8, 0.4]])
COVARIANCE = ROOT @ ROOT.T


@pytest.fixture(scope="module")
def fitted() -> tuple[EnergyDensity, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(900, 4)) @ ROOT.T
    density = EnergyDensity(random_state=0).fit(x[:600])
    return density, x[600:]


KIND = members.Kind(1, straight=True)


def normal_law(density: EnergyDensity, coded: torch.Tensor) -> TableMixture:
    """A normal distribution of coded rows."""
    columns = members.columns_of(density.schema_.parts, coded, straight=True)
    return members.simple_density(KIND, columns, coded, torch.ones(len(coded)).double(), 0)


def mixture_of(density: EnergyDensity, weighed: list, simple: list) -> ChainDistribution:
    """Its chain, mixed with others."""
    return dataclasses.replace(density.distribution_, members=weighed, simple=simple)


def law_of(given: list[int], x: np.ndarray) -> tuple[list[int], np.ndarray, np.ndarray]:
    """The other columns, their means and covariance, given some of a normal distribution."""
    others = [j for j in range(4) if j not in given]
    gain = np.linalg.solve(COVARIANCE[np.ix_(given, given)], COVARIANCE[np.ix_(given, others)])
    left = COVARIANCE[np.ix_(others, others)] - COVARIANCE[np.ix_(others, given)] @ gain
    return others, x[:, given] @ gain, left


@pytest.mark.parametrize("given", [[0], [3, 1], [0, 1, 2]])
def test_conditionals_are_near_those_of_the_truth(fitted, given):
    density, x = fitted[0], fitted[1][:60]
    others, means, left = law_of(given, x)
    truth = multivariate_normal(np.zeros(len(others)), left).logpdf(x[:, others] - means)
    found = density.log_prob(x, given=[NAMES[j] for j in given])
    assert np.mean(truth - found) < 0.1
    assert np.abs(truth - found).mean() < 0.3


def test_conditionals_are_normalised(fitted):
    density, x = fitted
    grid = np.linspace(-8, 8, 1601)
    rows = np.repeat(x[:1], len(grid), 0)
    rows[:, 2] = grid
    found = np.exp(density.log_prob(rows, given=["x0", "x1", "x3"]))
    assert np.trapezoid(found, grid) == pytest.approx(1, abs=2e-3)


def test_imputations_are_near_those_of_the_truth(fitted):
    density, x = fitted
    others, means, left = law_of([0, 3], x)
    gaps = x.copy()
    gaps[:, others] = np.nan
    draws = np.stack(density.impute(gaps, 40, random_state=0))
    assert np.array_equal(draws[..., [0, 3]], np.broadcast_to(x[:, [0, 3]], (40, len(x), 2)))
    off = draws[..., others] - means
    assert np.abs(off.mean((0, 1))).max() < 0.1
    assert np.cov(off.reshape(-1, 2).T) == pytest.approx(left, rel=0.2, abs=0.05)


def test_imputations_of_a_larger_table_spread_as_the_truth_does():
    """Simple densities have the conditionals of near-normal rows, which a chain learns last."""
    x = np.random.default_rng(0).normal(size=(2600, 4)) @ ROOT.T
    density = EnergyDensity(random_state=0, max_steps=30).fit(x)
    _, means, left = law_of([0, 1, 2], x[:300])
    gaps = x[:300].copy()
    gaps[:, 3] = np.nan
    draws = np.stack(density.impute(gaps, 20, random_state=0))[..., 3]
    assert np.std(draws, 0).mean() == pytest.approx(np.sqrt(left[0, 0]), rel=0.15)
    assert np.abs(draws.mean(0) - means[:, 0]).mean() < 0.5 * np.sqrt(left[0, 0])


def test_members_count_by_what_is_given(fitted):
    """``log p(x_T | x_S)`` of a mixture of two members, written out."""
    density, x = fitted
    rows = density.schema_.encode(x[:50])[0]
    coded = torch.from_numpy(rows)
    simple = normal_law(density, coded)
    two = [members.Member("chain", 0.3, 0.0), members.Member(KIND.name, 0.7, 0.0)]
    mixture = mixture_of(density, two, [simple])
    chain = mixture_of(density, [members.Member("chain", 1.0, 0.0)], [])
    given = torch.tensor([True, False, True, False])
    alone = coded.clone()
    alone[:, ~given, 0] = -1
    of_chain, _ = chain.conditional(coded, given, None)
    before = [0.3 * chain.log_prob(alone).exp(), 0.7 * members.log_density(simple, alone).exp()]
    whole = before[0] * of_chain.exp() + 0.7 * members.log_density(simple, coded).exp()
    by_network, _ = mixture.conditional(coded, given, None)
    assert torch.allclose(by_network, (whole / sum(before)).log())
    off = mixture.log_prob(alone) + by_network - mixture.log_prob(coded)
    assert mixture.consistency(coded, 0)["conditionals"] < 0.5
    assert float(off.abs().median()) < 0.5


def test_who_draws_does_not_tell_what_is_drawn(fitted):
    """One row at a time, by many seeds, and all at once: the same law."""
    density, x = fitted
    coded = torch.from_numpy(density.schema_.encode(x)[0])
    simple = normal_law(density, coded)
    far = normal_law(density, coded)
    far.means[:, 1] += 8
    mixture = mixture_of(
        density,
        [members.Member("chain", 0.0, 0.0), *(members.Member(KIND.name, 0.5, 0.0) for _ in "ab")],
        [simple, far],
    )
    row = coded[:1].clone()
    row[:, 1, 0] = -1
    seen = row[..., 0] != -1
    drawn = np.array([mixture.complete(row, seen, seed)[0, 1, 1] for seed in range(300)])
    many = mixture.complete(row.repeat(5000, 1, 1), seen.repeat(5000, 1), 0)[:, 1, 1]
    for centre in np.quantile(many, [0.25, 0.5, 0.75]):
        assert np.mean(drawn < centre) == pytest.approx(np.mean(many < centre), abs=0.09)


def test_an_exact_sum_leaves_a_small_table_what_it_is():
    x = np.random.default_rng(0).normal(size=(150, 2)).round(3) @ np.array([[1, 0.5], [0, 1]])
    x = x.round(3)
    table = {"a": x[:, 0], "b": x[:, 1]}
    alone = EnergyDensity(random_state=0, method="autoregressive").fit(table)
    whole = EnergyDensity(random_state=0).fit(table | {"sum": (x[:, 0] + x[:, 1]).round(3)})
    assert [member.name for member in whole.members_] == [m.name for m in alone.members_]
    assert whole.judgement_.score == pytest.approx(alone.judgement_.score, abs=0.05)


def test_members_do_not_repeat_each_other(fitted):
    density, x = fitted
    coded = torch.from_numpy(density.schema_.encode(x)[0])
    simple = normal_law(density, coded)
    weighed = [members.Member("chain", 0.0, 0.0), *[members.Member(KIND.name, 0.5, 0.0)] * 2]
    mixture = mixture_of(density, weighed, [simple, simple])
    gaps = coded[:1].repeat(1000, 1, 1)
    gaps[:, 1:, 0] = -1
    for drawn in (mixture.sample(1000, 0), mixture.complete(gaps, gaps[..., 0] != -1, 0)):
        assert len(np.unique(drawn[:, 1, 1])) == 1000
