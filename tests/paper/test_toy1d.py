"""The 1-D table: rows, result files, resumption, figures."""

from __future__ import annotations

import json

import pytest
import torch

import selfnorm as sn
from selfnorm.datasets.toy1d import Toy1d, sample
from selfnorm.paper import toy1d
from selfnorm.tables import RegressorNetwork


def small_set(name: str, **_: object) -> Toy1d:
    parts = [sample(name, 100, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    return Toy1d(name, *parts)


def test_a_short_run_writes_rows_and_tables_and_resumes(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(toy1d, "_N_SAMPLES", 100)
    monkeypatch.setattr(toy1d, "_GRID_POINTS", 129)
    monkeypatch.setattr(toy1d.toy1d, "load", small_set)
    fit = sn.fit
    monkeypatch.setattr(sn, "fit", lambda *a, **k: fit(*a, **{**k, "max_epochs": 1}))
    options = {"seeds": 1, "out": tmp_path, "progress": False}
    toy1d.run(datasets=("dataset2",), objectives=("snl",), **options)
    content = json.loads((tmp_path / "toy1d.json").read_text())
    assert content["table"] == "toy1d"
    assert len(content["rows"]) == 6
    for row in content["rows"]:
        assert {"exact", "limit", "lower", "upper", "ess", "pareto_k", "seconds"} <= set(row)
        assert row["lower"] <= row["upper"] + 1e-9
    assert "-1.468 ± 0.014" in (tmp_path / "toy1d.md").read_text()
    assert (tmp_path / "toy1d_dataset2.png").exists()
    before = (tmp_path / "toy1d_dataset2.png").read_bytes()
    (tmp_path / "toy1d_dataset2.png").unlink()
    again = toy1d.run(datasets=("dataset2",), objectives=("snl",), **options)
    assert len(again.rows) == 6
    assert (tmp_path / "toy1d_dataset2.png").read_bytes() == before  # drawn without training


def test_best_recipe_reports_exact_value_and_gap(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(toy1d, "_N_TEST_BEST", 200)
    small = {"n_members": 2, "hidden": 16, "n_components": 3, "max_epochs": 2}
    small["network"] = RegressorNetwork(energy_epochs=2)
    monkeypatch.setitem(toy1d.BEST, "dataset1", small)
    table = toy1d.run(recipe="best", seeds=1, out=tmp_path, progress=False, datasets=("dataset1",))
    row = table.rows[0]
    assert row["gap"] == pytest.approx(row["upper"] - row["lower"])
    assert row["n_test"] == 200
    assert "limit" in (tmp_path / "toy1d.md").read_text()


@pytest.mark.parametrize("name", toy1d.DATASETS)
def test_the_regressor_takes_the_best_recipe_as_it_stands(name) -> None:
    sn.EnergyRegressor(**toy1d.BEST[name])
