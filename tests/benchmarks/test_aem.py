"""Peers that the benchmarks build are densities: normalised, and learnt where they are known."""

import math

import pytest
import torch

import aem
from selfnorm.distributions import Flow
from selfnorm.training import TrainingOptions, run

SMALL = {"hidden": 32, "blocks": 1, "context": 8, "energy_hidden": 32, "energy_blocks": 1}


def rows(n, seed):
    """A first column of two narrow normals, a second around a line with a first-dependent sign."""
    generator = torch.Generator().manual_seed(seed)
    side = torch.randint(0, 2, (n,), generator=generator) * 2.0 - 1
    a = side + 0.3 * torch.randn(n, generator=generator)
    b = a.abs() + 0.5 * torch.randn(n, generator=generator)
    return torch.stack([a, b], 1)


def log_density(x):
    def normal(z, sd):
        return -0.5 * (z / sd).square() - math.log(sd) - 0.5 * math.log(2 * math.pi)

    a, b = x.unbind(1)
    first = torch.logaddexp(normal(a - 1, 0.3), normal(a + 1, 0.3)) - math.log(2)
    return first + normal(b - a.abs(), 0.5)


def test_an_energy_machine_learns_a_known_density_and_is_normalised():
    torch.manual_seed(0)
    model = aem.EnergyMachine(2, drop=0.0, **SMALL)
    task = model.training_task(n_samples=20, validation_samples=20)
    loop = {"max_steps": 150, "validate_every": 50, "lr": 6e-3, "progress": False, "seed": 0}
    how = TrainingOptions(batch_size=96, **loop)
    history = run(task, (rows(4000, 0),), val_data=(rows(300, 1),), options=how)
    assert task.validate((rows(300, 1),))["score"] == pytest.approx(history.best_score, abs=0.02)
    model.eval()
    test = rows(500, 2)
    exact = model.log_prob(test, normalizer="quadrature", n_nodes=512)
    distance = log_density(test) - exact
    assert -0.03 < float(distance.mean()) < 0.15
    sampled = model.log_prob(test[:100], n_samples=4000)
    assert float((sampled - exact[:100]).abs().max()) < 0.2
    side = torch.linspace(-6, 6, 61)
    grid = torch.cartesian_prod(side, side)
    mass = model.log_prob(grid, normalizer="quadrature", n_nodes=256).double().exp().sum()
    assert float(mass) * 0.2**2 == pytest.approx(1.0, abs=0.03)


def test_a_squashed_flow_is_normalised_far_out_and_spares_far_rows():
    pytest.importorskip("zuko")
    from flow_tails import SquashedFlow

    heavy = 3.0 + 0.5 * torch.tan(torch.pi * (torch.rand(2000, 1) - 0.5))  # Cauchy
    torch.manual_seed(0)
    model = SquashedFlow(1, kind="nsf", transforms=2, hidden=(8,)).set_scaling(heavy)
    far = torch.logspace(-4, 9, 40_000)
    grid = torch.cat([-far.flip(0), far]) + 3.0
    with torch.no_grad():
        density = model.log_prob(grid.unsqueeze(-1)).double().exp()
    assert abs(float(torch.trapezoid(density, grid.double())) - 1) < 2e-3
    below = grid <= model.sample((20_000,)).median()  # half of the density
    half = torch.trapezoid(density[below], grid[below].double())
    assert abs(float(half) - 0.5) < 0.015
    x, row = torch.randn(2000, 2), torch.tensor([[0.0, 60.0]])
    costs = [
        -float(kind(2, transforms=1, hidden=(8,)).set_scaling(x).log_prob(row).detach())
        for kind in (Flow, SquashedFlow)
    ]
    assert costs[0] > 1000 > 60 > costs[1]
