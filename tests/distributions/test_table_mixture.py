"""Mixtures of Gaussians over coded rows are exactly normalised, whatever the columns are."""

import numpy as np
import pytest
import torch

from selfnorm.columns import Part
from selfnorm.distributions import TableMixture, ridge_lines
from selfnorm.distributions.table_mixture import MOST_LEVERAGE, STRENGTHS

PARTS = (
    Part(0, "kind", 2),
    Part(1, "count", 1, rest=True, step=1.0, values=(0.0,)),
    Part(2, "size", 0, rest=True),
)


def rows(n, seed=0):
    """Coded rows of a category, whole numbers with a point mass at 0, and a continuous number."""
    rng = np.random.default_rng(seed)
    kind = rng.integers(0, 2, n)
    count = np.round(rng.normal(3 + kind, 2, n))
    mass = rng.random(n) < 0.3
    size = 0.5 * count + rng.normal(size=n)
    code = np.stack([kind, np.where(mass | (count == 0), 0, 1), np.zeros(n)], 1)
    number = np.stack([np.zeros(n), np.where(code[:, 1] == 1, count, 0), size], 1)
    return torch.from_numpy(np.stack([code, number], -1).astype(np.float64))


@pytest.fixture(scope="module")
def law():
    x = rows(300)
    mixture = TableMixture(PARTS, components=2).double()
    packed, _ = mixture.columns.fit(x, straight=True).pack(x)
    shares = torch.rand(300, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return mixture.fit(packed, shares)


def test_sums_and_integrals_over_all_rows_are_one(law):
    size = torch.linspace(-12, 16, 561, dtype=torch.float64)
    counts = torch.arange(-12.0, 20.0, dtype=torch.float64)
    total = 0.0
    for kind in (0.0, 1.0):
        for count in counts:
            x = torch.zeros(len(size), 3, 2, dtype=torch.float64)
            x[:, 0, 0], x[:, 1, 0], x[:, 1, 1] = kind, float(count != 0), count
            x[:, 2, 1] = size
            packed, slope = law.columns.pack(x)
            density = (law.log_prob(packed) + slope.sum(-1)).exp()
            total += float(torch.trapezoid(density, size))
    assert total == pytest.approx(1.0, abs=2e-3)


def test_a_gap_is_integrated_out(law):
    x = rows(5, seed=1)
    x[:, 2, 0] = -1
    packed, _ = law.columns.pack(x)
    size = torch.linspace(-30, 30, 3001, dtype=torch.float64)
    whole = x[:1].repeat(len(size), 1, 1)
    whole[:, 2, 0], whole[:, 2, 1] = 0, size
    of_all, slope = law.columns.pack(whole)
    density = (law.log_prob(of_all) + slope.sum(-1)).exp()
    alone = float(law.log_prob(packed[:1]).exp())
    assert float(torch.trapezoid(density, size)) == pytest.approx(alone, rel=1e-3)


def test_what_is_not_given_is_drawn_from_its_conditional(law):
    x = rows(1, seed=2).repeat(20_000, 1, 1)
    x[:, :2, 0] = -1
    packed, _ = law.columns.pack(x)
    drawn = law.sample(len(x), packed, seed=0)
    assert torch.equal(drawn[:, 2], packed[:, 2])
    alone = float(law.log_prob(packed[:1]))
    for kind in (0.0, 1.0):
        whole = x[:1].clone()
        whole[:, 0, 0] = kind
        share = float((law.log_prob(law.columns.pack(whole)[0]) - alone).exp())
        found = float((drawn[:, 0, 0] == kind).double().mean())
        assert found == pytest.approx(share, abs=0.02)
    # a number, whatever the category: by a grid of them
    count = torch.arange(-20.0, 26.0, dtype=torch.float64)
    whole = x[: len(count)].clone()
    whole[:, 1, 0], whole[:, 1, 1] = 1, count
    log_p = law.log_prob(law.columns.pack(whole[count != 0])[0]) - alone
    mean = float((log_p.exp() * count[count != 0]).sum() / log_p.exp().sum())
    numbers = law.columns.unpack(drawn[..., 0], drawn[..., 1])[drawn[:, 1, 0] == 1, 1, 1]
    numbers = numbers[numbers.round() != 0]  # where the point mass stands
    assert float(numbers.mean()) == pytest.approx(mean, abs=0.1)


def test_kernels_follow_two_far_groups():
    parts = [Part(0, "a", 0, rest=True)]
    centre = np.repeat([-4.0, 4.0], 100)
    x = torch.from_numpy(centre + 0.3 * np.random.default_rng(0).normal(size=200))
    coded = torch.stack([torch.zeros_like(x), x], -1).unsqueeze(1)
    law = TableMixture(parts, components=200, shared=True).double()
    packed, slope = law.columns.fit(coded, straight=True).pack(coded)
    law.fit_kernels(packed, torch.ones(200, dtype=torch.float64))
    truth = np.log(
        0.5 * np.exp(-0.5 * ((x.numpy() - centre) / 0.3) ** 2) / (0.3 * np.sqrt(2 * np.pi))
    )
    score = float((law.log_prob(packed) + slope.sum(-1)).mean())
    assert score == pytest.approx(float(truth.mean()), abs=0.15)


@pytest.mark.parametrize(("n", "d"), [(40, 6), (12, 20)])
def test_lines_are_the_ridges_that_foretell_rows_left_out_best(n, d):
    """Each by its own normal equations and leverages."""
    rng = np.random.default_rng(n)
    z, order = rng.normal(size=(n, 3)) @ rng.normal(size=(3, d)) + 0.3, rng.permutation(d)
    z += 0.3 * rng.normal(size=(n, d))
    weights = rng.random(n) * (np.arange(n) > 2)
    slopes, spread, left = ridge_lines(z, order, weights)
    share = weights[3:] / weights.sum()
    for place, i in list(enumerate(order))[1:]:
        x, y, tried = z[3:, order[:place]], z[3:, i], []
        for strength in STRENGTHS:
            inverse = np.linalg.inv((share[:, None] * x).T @ x + strength * np.eye(place))
            line = inverse @ (x.T @ (share * y))
            leverage = share * np.einsum("ni,ij,nj->n", x, inverse, x) + share
            out = (y - x @ line) / np.clip(1 - leverage, 1e-3, None)
            if leverage.mean() <= MOST_LEVERAGE or strength == STRENGTHS[-1]:
                tried.append((share @ out**2, line, out))
        best = min(tried, key=lambda one: one[0])
        assert spread[i] == pytest.approx(np.sqrt(best[0]), rel=1e-8)
        assert slopes[i, order[:place]] == pytest.approx(best[1], rel=1e-8, abs=1e-8)
        assert left[3:, i] == pytest.approx(best[2], rel=1e-8, abs=1e-8)
        assert left[:3, i] == pytest.approx(z[:3, i] - z[:3, order[:place]] @ best[1], abs=1e-8)


def test_rows_of_no_account_do_not_make_up_for_those_a_component_lacks():
    """Nor do their roots, which underflow, spoil its lines."""
    rng = np.random.default_rng(0)
    parts = [Part(j, str(j), 0, rest=True) for j in range(40)]
    x = torch.from_numpy(rng.normal(size=(60, 40)))
    coded = torch.stack([torch.zeros_like(x), x], -1)
    law = TableMixture(parts).double()
    packed, _ = law.columns.fit(coded, straight=True).pack(coded)
    shares = torch.from_numpy(np.where(np.arange(60) < 10, 1.0, 1e-297)).unsqueeze(1)
    assert law.fit(packed, shares).spread.min() > 0.3


def test_lines_of_more_columns_than_rows_foretell_no_more_than_there_is():
    z = np.random.default_rng(0).normal(size=(20, 60))
    slopes, spread, _ = ridge_lines(z, np.arange(60), np.ones(20))
    assert spread.min() > 0.5
    new = np.random.default_rng(1).normal(size=(500, 60))
    assert np.std(new - new @ slopes.T) < 1.3


@pytest.mark.parametrize("slope", [1, 2])
def test_samples_of_cells_have_their_masses(slope):
    """A column close to a multiple of another follows the cell that was drawn there."""
    first = np.random.default_rng(0).normal(0, 5, 400).round()
    second = slope * first + (np.arange(400) % 40 == 0)
    parts = [Part(j, name, 0, rest=True, step=1.0) for j, name in enumerate("ab")]
    x = torch.from_numpy(np.stack([first, second], 1))
    x = torch.stack([torch.zeros_like(x), x], -1)
    law = TableMixture(parts).double()
    packed, _ = law.columns.fit(x, straight=True).pack(x)
    law.fit(packed, torch.ones(400, 1))
    every = torch.arange(-40.0, 41.0, dtype=torch.float64)
    every = torch.stack([every, slope * every], 1)
    mass = law.log_prob(law.columns.pack(torch.stack([torch.zeros_like(every), every], -1))[0])
    given = packed.repeat(50, 1, 1)
    given[:, 1, 0] = -1
    for drawn in (law.sample(20_000, seed=0), law.sample(20_000, given, seed=0)):
        numbers = law.columns.unpack(drawn[..., 0], drawn[..., 1])[..., 1]
        share = (numbers[:, 1] == slope * numbers[:, 0]).double().mean()
        assert float(share) == pytest.approx(float(mass.exp().sum()), abs=0.02)


def test_a_table_without_numbers_is_drawn():
    drawn = TableMixture([Part(0, "kind", 3, unseen=0.1)]).double().sample(300, seed=0)
    assert set(drawn[:, 0, 0].tolist()) == {0.0, 1.0, 2.0}
