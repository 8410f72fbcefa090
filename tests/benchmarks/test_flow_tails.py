"""A flow of squashed columns is a density of the columns themselves, far out too."""

import pytest
import torch

pytest.importorskip("zuko")

from flow_tails import SquashedFlow
from selfnorm.distributions import Flow


def heavy(n, dim, seed=0):
    u = torch.rand(n, dim, generator=torch.Generator().manual_seed(seed))
    return 3.0 + 0.5 * torch.tan(torch.pi * (u - 0.5))  # Cauchy, neither centred nor of unit scale


def flow(dim, seed=0):
    torch.manual_seed(seed)
    return SquashedFlow(dim, kind="nsf", transforms=2, hidden=(8,)).set_scaling(heavy(2000, dim))


def test_density_integrates_to_one():
    grid = torch.cat([-torch.logspace(-4, 9, 40_000).flip(0), torch.logspace(-4, 9, 40_000)]) + 3.0
    with torch.no_grad():
        density = flow(1).log_prob(grid.unsqueeze(-1)).double().exp()
    assert abs(float(torch.trapezoid(density, grid.double())) - 1) < 2e-3


def test_a_far_row_costs_tens_of_nats_not_hundreds():
    x = torch.randn(2000, 2, generator=torch.Generator().manual_seed(0))
    far = torch.tensor([[0.0, 60.0]])
    costs = []
    for kind in (Flow, SquashedFlow):
        torch.manual_seed(0)
        made = kind(2, transforms=1, hidden=(8,)).set_scaling(x)
        costs.append(-float(made.log_prob(far).detach()))
    assert costs[0] > 1000
    assert costs[1] < 60


def test_samples_follow_the_density():
    """Half of the density lies below the median of the samples."""
    model = flow(1)
    torch.manual_seed(0)
    middle = model.sample((20_000,)).median()
    grid = middle + torch.sinh(torch.linspace(-16, 0, 20_001))
    with torch.no_grad():
        density = model.log_prob(grid.unsqueeze(-1)).double().exp()
    assert abs(float(torch.trapezoid(density, grid.double())) - 0.5) < 0.015


def test_a_column_of_mostly_one_value_gets_a_scale():
    x = torch.zeros(1000, 1)
    x[:20, 0] = torch.arange(1.0, 21.0)
    model = SquashedFlow(1, transforms=1, hidden=(4,)).set_scaling(x)
    assert torch.isfinite(model.log_prob(x)).all()
