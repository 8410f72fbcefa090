"""Piecewise linear features."""

from __future__ import annotations

import numpy as np
import torch

from selfnorm import EnergyRegressor, bins
from selfnorm.bins import Bins, quantile_edges


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
