"""The baseline: normalised, trained towards a law that is known."""

import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import aem
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


def test_it_learns_a_law_that_is_known_and_is_normalised():
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
