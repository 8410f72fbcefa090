"""Small tables, split, scaled and dequantised one way for all."""

import numpy as np
import pytest
import torch

import tabular
from selfnorm.errors import DataError


def test_tables_are_split_scaled_and_dequantised_alike_every_time(tmp_path, rng):
    x = np.c_[rng.integers(0, 9, 500), rng.normal(3, 2, 500)]
    (tmp_path / "tabular").mkdir()
    np.savez(tmp_path / "tabular" / "shuttle.npz", X=x, y=np.zeros(500))
    one, two = (tabular.load("shuttle", tmp_path) for _ in range(2))
    assert torch.equal(one.test, two.test)
    assert torch.equal(one.train, two.train)
    assert (len(one.train), len(one.val), len(one.test)) == (405, 45, 50)
    assert torch.allclose(one.train_values.mean(0), torch.zeros(2), atol=1e-5)
    back = one.train.double() * one.sd + one.mean
    values = one.train_values.double() * one.sd + one.mean
    assert torch.allclose(back[:, 0].round(), values[:, 0], atol=1e-4)
    assert torch.allclose(back[:, 1], values[:, 1], atol=1e-4)
    assert float((back[:, 0] - values[:, 0]).abs().max()) > 0.4


def test_power_in_the_same_form_has_nothing_to_dequantise(tmp_path, rng):
    (tmp_path / "power").mkdir()
    np.save(tmp_path / "power" / "data.npy", rng.normal(size=(100, 8)))
    data = tabular.load("power", tmp_path)
    assert data.train is data.train_values
    assert data.dim == 6


def test_a_file_without_the_array_is_refused(tmp_path):
    (tmp_path / "tabular").mkdir()
    np.savez(tmp_path / "tabular" / "shuttle.npz", Y=np.zeros(3))
    with pytest.raises(DataError, match="no array 'X'"):
        tabular.load("shuttle", tmp_path)
