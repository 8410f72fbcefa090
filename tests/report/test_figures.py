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
        plot_density_model(density, tmp_path, rows)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]  # noqa: NPY002


def test_categories_dates_and_gaps_are_drawn(tmp_path):
    rng = np.random.default_rng(0)
    day = np.datetime64("2021-01-01") + rng.integers(0, 300, 80)
    size = np.where(rng.random(80) < 0.2, np.nan, rng.normal(size=80))
    table = {"kind": rng.choice(["a", "b", "c"], 80), "size": size, "day": day}
    density = EnergyDensity(max_steps=3, random_state=0).fit(table)
    written = plot_density_model(density, tmp_path, table)
    assert [path.stem for path in written] == [
        *("marginals", "pairs", "dependence", "training", "diagnostics", "gaps")
    ]
    finite = {"kind": table["kind"], "other": rng.choice(["x", "y"], 80)}
    finite_model = EnergyDensity(max_steps=3, random_state=0).fit(finite)
    assert len(plot_density_model(finite_model, tmp_path / "finite", finite)) == 5
