"""Piecewise linear features."""

from __future__ import annotations

import numpy as np
import torch

from selfnorm import EnergyRegressor
from selfnorm.networks import Bins, bins, quantile_edges


def test_features_are_bounded_monotone_and_reach_one_after_the_bin() -> None:
    edges = torch.tensor([[-1.0, 0.0, 0.5, 2.0], [0.0, 0.0, 1.0, 3.0]])
    values = torch.linspace(-3, 4, 101)[:, None].expand(-1, 2)
    found = Bins(edges)(values)
    assert found.shape == (101, 2, 3)
    assert (found.diff(dim=0) >= 0).all()
    assert (found[0] == 0).all()
    assert (found[-1] == 1).all()
    at = Bins(edges)(torch.tensor([[0.25, 1.5]]))[0]
    torch.testing.assert_close(at, torch.tensor([[1.0, 0.5, 0.0], [1.0, 1.0, 0.25]]))


def test_edges_hold_equal_numbers_and_the_range(monkeypatch) -> None:
    values = torch.randn(4001, 2, generator=torch.Generator().manual_seed(0)).exp()
    edges = quantile_edges(values, 8)
    for column in range(2):
        counts = torch.histogram(values[:, column], edges[column]).hist
        assert (counts - 500).abs().max() <= 2
    monkeypatch.setattr(bins, "_MAX_ROWS", 500)
    thinned = quantile_edges(values, 8)
    assert torch.equal(thinned[:, [0, -1]], edges[:, [0, -1]])
    assert ((thinned - edges).abs() / edges).max() < 0.2


def test_jittered_edges_differ_between_members_and_keep_their_order() -> None:
    values = torch.randn(3000, 2, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    edges = quantile_edges(values, 10, members=4, jitter=1.0)
    assert edges.shape == (4, 1, 2, 11)
    assert (edges.diff(dim=-1) >= 0).all()
    even = quantile_edges(values, 10)
    assert torch.equal(edges[..., [0, -1]], even[:, [0, -1]].expand(4, 1, 2, 2))
    assert (edges[0] != edges[1])[..., 1:-1].all()
    # No edge leaves the half bins on either side of its even place.
    ranks = torch.stack([(values[:, k] < edges[..., k, :, None]).float().mean(-1) for k in (0, 1)])
    assert (10 * ranks - torch.arange(11)).abs().max() <= 0.51
    # One value for all members, or one for each: every member sees its own bins.
    features = Bins(edges)
    x = values[:7]
    apart = torch.stack([Bins(own[0])(x) for own in edges])
    torch.testing.assert_close(features(x), apart)
    torch.testing.assert_close(features(x.expand(3, 4, 7, 2)), apart.expand(3, -1, -1, -1, -1))


def test_members_with_bins_of_their_own_make_a_normalised_law(tmp_path) -> None:
    rng = np.random.default_rng(0)
    X = rng.uniform(size=(300, 2))
    y = X[:, 0] + 0.1 * rng.exponential(size=300)
    options = {"n_members": 3, "hidden": 16, "max_epochs": 10, "energy_epochs": 5, "label_bins": 8}
    model = EnergyRegressor(random_state=0, bin_jitter=1.0, **options).fit(X, y)
    edges = model._predictive.model.label_features.bins.edges
    assert edges.shape == (3, 1, 1, 9)
    grid = np.linspace(-30, 30, 60_001)
    mass = np.trapezoid(model.pdf(X[:3], grid), grid, axis=1)
    np.testing.assert_allclose(mass, 1.0, atol=1e-3)
    model.save(tmp_path / "model")
    again = EnergyRegressor.load(tmp_path / "model")
    np.testing.assert_array_equal(again.log_prob(X, y), model.log_prob(X, y))
    two = EnergyRegressor(random_state=0, bin_jitter=0.5, **options).fit(X, np.c_[y, X[:, 1] + y])
    assert two.sample(X[:4], 3, random_state=0).shape == (4, 3, 2)


def test_jumps_along_the_input_are_learned_and_the_law_stays_normalised(tmp_path) -> None:
    rng = np.random.default_rng(0)
    X = rng.uniform(size=(1200, 1))
    y = np.sign(np.sin(10 * np.pi * X[:, 0])) + 0.2 * rng.uniform(size=1200)
    options = {"n_members": 2, "hidden": 32, "max_epochs": 60, "energy_epochs": 1}
    scores = []
    for extra in ({"input_bins": 0}, {"input_bins": 40, "label_bins": 10}):
        model = EnergyRegressor(random_state=0, **options, **extra).fit(X[:1000], y[:1000])
        scores.append(model.score(X[1000:], y[1000:]))
    assert scores[1] > scores[0] + 0.2
    grid = np.linspace(-30, 30, 60_001)
    mass = np.trapezoid(model.pdf(X[:3], grid), grid, axis=1)
    np.testing.assert_allclose(mass, 1.0, atol=1e-3)
    model.save(tmp_path / "model")
    again = EnergyRegressor.load(tmp_path / "model")
    np.testing.assert_array_equal(again.log_prob(X[:5], y[:5]), model.log_prob(X[:5], y[:5]))
