"""The UCI table on small files: both models, the missing sets named, nothing silently compared."""

import json

import numpy as np
import pytest

from selfnorm.paper import uci


@pytest.fixture
def data_dir(tmp_path):
    rng = np.random.default_rng(0)
    (tmp_path / "miniboone").mkdir()
    table = rng.normal(size=(300, 3)) @ np.array([[1, 0.5, 0], [0, 1, 0.3], [0, 0, 0.2]])
    np.save(tmp_path / "miniboone" / "data.npy", np.exp(table))
    return tmp_path


def test_both_models_run_and_missing_files_are_named(data_dir, tmp_path):
    table = uci.run(seeds=1, out=tmp_path / "out", progress=False, data_dir=data_dir, max_steps=12)
    assert {row["model"] for row in table.rows} == {"joint", "chain"}
    for row in table.rows:
        assert row["lower"] <= row["upper"] + 1e-6
        assert row["n_test"] == 30
        assert not row["full"]
    written = json.loads((tmp_path / "out" / "uci.json").read_text())
    assert len(written["rows"]) == 2
    text = (tmp_path / "out" / "uci.md").read_text()
    assert "not comparable" in text
    assert "-9.22" in text  # a published row beside ours
    for name in ("power", "gas", "hepmass", "bsds300"):
        assert f"- {name}: data file not found" in text
    again = uci.run(seeds=1, out=tmp_path / "out", progress=False, data_dir=data_dir, max_steps=12)
    assert len(again.rows) == 2  # finished rows are kept
