"""What the members of an ensemble see of inputs and labels, and their joint distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from selfnorm.distributions import MixtureLabels
from selfnorm.tables import _ensemble
from selfnorm.tables._ensemble import Bins, LabelWaves, build_ensemble, quantile_edges
from selfnorm.tables._predictive import PredictiveModel


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
    monkeypatch.setattr(_ensemble, "_MAX_QUANTILE_ROWS", 500)
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


@pytest.mark.parametrize("n_frequencies", [3, 6])
@torch.no_grad()
def test_quadrature_follows_the_fastest_wave(n_frequencies: int) -> None:
    torch.manual_seed(0)
    waves = [2.0**j for j in range(n_frequencies)]
    model = build_ensemble(1, 1, members=5, components=3, frequencies=waves)
    model.energy.joint[-1].weight.normal_(0.0, 0.6)  # an energy that wiggles
    ends = (torch.tensor([-1.0]), torch.tensor([1.0]), torch.tensor([-2.0]), torch.tensor([2.5]))
    predictive = PredictiveModel(model, *ends)
    z = torch.linspace(-1, 1, 5, dtype=torch.float64)[:, None]
    ((_, h, q, _),) = predictive.parts(z, 1)
    log_z = predictive.member_distributions(h, q).log_norm
    predictive.nodes_per_panel = 24
    finer = predictive.member_distributions(h, q).log_norm
    torch.testing.assert_close(log_z, finer, atol=1e-4, rtol=0)


@torch.no_grad()
def test_no_mass_escapes_along_a_wide_component() -> None:
    # A component of weight 1e-9 and scale 300: an energy linear in y would move all the mass there,
    # unseen by any sample of the proposal.
    weights = torch.tensor([[1.0, 1e-9]])
    q = MixtureLabels(
        weights.log(), torch.tensor([[[0.0], [0.0]]]), torch.tensor([[[1.0], [300.0]]])
    )
    seen = LabelWaves()(torch.tensor([-1e6, -50.0, 50.0, 1e6]).view(4, 1, 1), q)
    assert seen.abs().max() <= 3.0
    # A slope of 1 in what the energy sees is worth at most 2 * 3 nats between the two ends.
    tilt = seen[:, 0, 0].exp()
    assert float(tilt.max() / tilt.min()) <= np.exp(6.0) + 1e-3
