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


def test_unknown_recipes_and_sets_are_refused(data_dir, tmp_path):
    with pytest.raises(ValueError, match="recipe"):
        uci.run(recipe="other", out=tmp_path)
    with pytest.raises(ValueError, match="nope"):
        uci.run(seeds=1, out=tmp_path / "out", progress=False, data_dir=data_dir, datasets=["nope"])


def test_rows_side_by_side_are_the_rows_one_by_one(data_dir, tmp_path):
    """Recipe ``best`` is the chain alone."""
    options = {"recipe": "best", "seeds": 2, "progress": False, "data_dir": data_dir}
    found = {}
    for jobs in (1, 2):
        table = uci.run(**options, out=tmp_path / str(jobs), max_steps=5, jobs=jobs)
        assert [row["model"] for row in table.rows] == ["chain", "chain"]
        found[jobs] = {row["seed"]: row["lower"] for row in table.rows}
    assert found[2] == pytest.approx(found[1], rel=1e-4)
