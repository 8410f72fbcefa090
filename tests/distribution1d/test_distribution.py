"""One normalised density, however it is given: answers agree with those of known distributions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from selfnorm.distribution1d import Distribution1d, legendre

MEANS = np.array([-0.5, 1.0])
NORMAL = stats.norm(MEANS[:, None])
POINTS = torch.linspace(-4.0, 5.0, 31, dtype=torch.float64).expand(2, -1)


def of_cells():
    edges = torch.linspace(-9.0, 9.0, 4001, dtype=torch.float64)
    middle = 0.5 * (edges[1:] + edges[:-1])
    log_p = -0.5 * (middle - torch.from_numpy(MEANS)[:, None]) ** 2 + 3.0
    return Distribution1d.from_cells(log_p, edges)


def of_nodes():
    ends = torch.linspace(-9.0, 9.0, 61, dtype=torch.float64)
    half = 0.5 * ends.diff()
    nodes = (0.5 * (ends[1:] + ends[:-1]))[:, None] + half[:, None] * legendre(6)[0]
    log_p = -0.5 * (nodes - torch.from_numpy(MEANS)[:, None, None]) ** 2 + 3.0
    return Distribution1d.from_nodes(log_p, nodes.expand(2, -1, -1), half.expand(2, -1))


@pytest.mark.parametrize("make", [of_cells, of_nodes])
def test_answers_are_those_of_the_normal_distribution(make) -> None:
    normal = make()
    np.testing.assert_allclose(normal.log_norm, 3.0 + 0.5 * np.log(2 * np.pi), atol=1e-6)
    np.testing.assert_allclose(normal.mean, MEANS, atol=1e-6)
    np.testing.assert_allclose(normal.mode(), MEANS, atol=0.1)
    np.testing.assert_allclose(normal.pdf_at(POINTS), NORMAL.pdf(POINTS), atol=2e-3)
    np.testing.assert_allclose(normal.cdf_at(POINTS), NORMAL.cdf(POINTS), atol=1e-4)
    levels = torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64)
    np.testing.assert_allclose(normal.quantile(levels), NORMAL.ppf(levels), atol=2e-3)
    ends = np.concatenate([NORMAL.ppf(0.1), NORMAL.ppf(0.9)], axis=1)
    np.testing.assert_allclose(normal.shortest_interval(0.8), ends, atol=0.02)
    for (region,), own in zip(normal.highest_density_regions(0.8), ends, strict=True):
        np.testing.assert_allclose(region, own, atol=0.1)
    # of a standard normal at its mean: (sqrt 2 - 1) / sqrt pi
    score = normal.crps(torch.from_numpy(MEANS))
    np.testing.assert_allclose(score, (2**0.5 - 1) / np.pi**0.5, atol=1e-4)


@pytest.mark.parametrize("make", [of_cells, of_nodes])
def test_draws_follow_the_distribution(make) -> None:
    normal = make()
    drawn = normal.sample(4000)
    assert drawn.shape == (2, 4000)
    for row, mean in zip(drawn, MEANS, strict=True):
        assert stats.kstest(row, stats.norm(mean).cdf).pvalue > 0.001


def test_there_is_nothing_beyond_the_ends() -> None:
    flat = Distribution1d.from_cells(torch.zeros(1, 4), torch.linspace(0, 2, 5))
    outside = torch.tensor([[-1.0, 3.0]])
    assert flat.pdf_at(outside).tolist() == [[0.0, 0.0]]
    assert flat.cdf_at(outside).tolist() == [[0.0, 1.0]]
