"""The 1-D regression sets: densities integrate to one, generators follow them, limits agree."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from selfnorm.datasets import toy1d
from selfnorm.errors import DataError, MissingDataError

INPUTS = {"dataset1": (-2.5, -0.4, 0.7, 2.9), "dataset2": (0.3, 0.41, 0.5, 0.6, 0.9)}


@pytest.mark.parametrize("name", toy1d.DATASETS)
def test_density_integrates_to_one(name: str) -> None:
    y = torch.linspace(-14, 14, 280_001, dtype=torch.float64)
    for x in INPUTS[name]:
        density = toy1d.conditional_log_prob(name, torch.tensor(x, dtype=torch.float64), y).exp()
        assert float(torch.trapezoid(density, y)) == pytest.approx(1.0, abs=2e-4)


def test_beta_zone_has_its_mass() -> None:
    # 1 / (2 sqrt u) is infinite at the edge: integrate in u = v^2, where the density is flat.
    v = torch.linspace(0.001, 1.0, 1001, dtype=torch.float64)
    y = 0.5 + 5 * v**2
    density = toy1d.conditional_log_prob("dataset2", torch.tensor(0.1, dtype=torch.float64), y)
    assert float(torch.trapezoid(density.exp() * 10 * v, v)) == pytest.approx(0.999, abs=1e-3)


@pytest.mark.parametrize("name", toy1d.DATASETS)
def test_draws_follow_the_density(name: str) -> None:
    split = toy1d.sample(name, 40_000, generator=torch.Generator().manual_seed(3))
    log_p = toy1d.conditional_log_prob(name, split.x, split.y)
    assert torch.isfinite(log_p).all()
    assert float(log_p.mean()) == pytest.approx(toy1d.LIMITS[name], abs=0.02)


def test_limit_of_dataset1_by_quadrature() -> None:
    x = (torch.arange(300, dtype=torch.float64) + 0.5) / 300 * 6 - 3
    y = torch.linspace(-3, 4, 14_001, dtype=torch.float64)
    log_p = toy1d.conditional_log_prob("dataset1", x[:, None], y[None])
    inner = torch.where(log_p.isinf(), 0.0, log_p.exp() * log_p)
    assert float(torch.trapezoid(inner, y).mean()) == pytest.approx(
        toy1d.LIMITS["dataset1"], abs=5e-4
    )


def test_asymmetry_is_the_right_way_round() -> None:
    x = torch.tensor([-1.0, -1.0])
    log_p = toy1d.conditional_log_prob("dataset1", x, torch.sin(x) * torch.tensor([1.0, -1.0]))
    assert float(log_p[0] - log_p[1]) == pytest.approx(np.log(4.0), abs=1e-4)


def test_files_are_read_and_missing_ones_named(tmp_path) -> None:
    for part in ("train", "val", "test"):
        (tmp_path / f"dataset2_{part}.csv").write_text("x,y\n0.5,1.0\n0.25,-2.0\n")
    toy = toy1d.load("dataset2", data_dir=tmp_path)
    assert toy.train.x.flatten().tolist() == [0.5, 0.25]
    assert toy.test.y.shape == (2, 1)
    with pytest.raises(MissingDataError, match=r"dataset1_train\.csv"):
        toy1d.load("dataset1", data_dir=tmp_path)
    (tmp_path / "dataset2_val.csv").write_text("x,y\n0.5,nan\n")
    with pytest.raises(DataError, match=r"dataset2_val\.csv must hold two finite numbers"):
        toy1d.load("dataset2", data_dir=tmp_path)


def test_same_seed_same_draw() -> None:
    first, second = toy1d.load("dataset1", seed=2), toy1d.load("dataset1", seed=2)
    assert torch.equal(first.test.y, second.test.y)
    assert not torch.equal(first.test.y, toy1d.load("dataset1", seed=3).test.y)
