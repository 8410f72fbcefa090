import numpy as np
import pytest
import torch

from selfnorm import EnergyDensity
from selfnorm.tables import plot_density_model


@pytest.mark.parametrize("d", [2, 3])
def test_figures_cost_the_caller_no_random_numbers(d, tmp_path):
    X = np.random.default_rng(0).normal(size=(60, d))
    density = EnergyDensity(max_steps=3, random_state=0).fit(X)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()  # noqa: NPY002
    for rows in (None, X)[: 1 + (d == 2)]:
        plot_density_model(density, tmp_path, rows, list("abc")[:d])
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]  # noqa: NPY002
