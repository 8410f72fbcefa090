"""The 2-D table: rows, resumption, Markdown, figures (a few steps each, for speed)."""

import json
from dataclasses import replace

import pytest

import selfnorm as sn
from selfnorm.errors import SelfnormError
from selfnorm.paper import toy2d
from selfnorm.paper.report import ResultTable

CONTRACT = {"dataset", "objective", "base", "proposal", "exact", "limit", "log_norm"}
CONTRACT |= {"log_norm_exact", "seed", "seconds", "lower", "upper", "ess", "pareto_k", "diverged"}


@pytest.fixture
def short_runs(monkeypatch, few_closing_samples):
    """The same code with three steps a run: what is tested is the table, not the training."""

    def short(fit):
        return lambda *a, **k: fit(*a, **{**k, "options": replace(k["options"], max_steps=3)})

    for name in ("fit", "fit_many"):
        monkeypatch.setattr(sn, name, short(getattr(sn, name)))
    exact = sn.exact_log_norm
    monkeypatch.setattr(sn, "exact_log_norm", lambda *a, **k: exact(*a, **{**k, "n_points": 257}))
    monkeypatch.setattr(toy2d, "_N_EXACT", 3000)


def test_paper_table_is_written_and_resumed(tmp_path, short_runs):
    options = {"seeds": 1, "out": tmp_path, "progress": False, "datasets": ("checkerboard",)}
    toy2d.run(recipe="paper", **options)
    written = json.loads((tmp_path / "toy2d.json").read_text())
    assert {"table", "recipe", "command", "versions", "hardware", "seconds"} <= set(written)
    assert len(written["rows"]) == 4
    for row in written["rows"]:
        assert set(row) >= CONTRACT
        # Three steps leave the model near its start: the exact value is a real log-likelihood.
        assert -8 < row["exact"] < row["limit"]
        if row["base"] == "standard_normal":
            assert row["log_norm"] == pytest.approx(row["log_norm_exact"], abs=0.02)
    text = (tmp_path / "toy2d.md").read_text()
    assert "-1.902 ± 0.012" in text  # the paper's number stands beside ours
    assert (tmp_path / "toy2d_densities.png").stat().st_size > 10_000
    assert (tmp_path / "snl_surface.png").exists()
    seconds = [row["seconds"] for row in written["rows"]]
    again = toy2d.run(recipe="paper", **options)
    assert [row["seconds"] for row in again.rows] == seconds


def test_best_recipe_row(tmp_path, short_runs):
    table = toy2d.run(recipe="best", seeds=1, out=tmp_path, progress=False, datasets=("funnel",))
    assert len(table.rows) == 1
    assert table.rows[0]["n_test"] == 3000


def test_other_recipe_in_the_same_place_is_refused(tmp_path):
    ResultTable("toy2d", "paper", tmp_path).add({"seed": 0})
    with pytest.raises(SelfnormError, match="another --out"):
        toy2d.run(recipe="best", out=tmp_path)
    (tmp_path / "toy2d.json").write_text("{broken")
    with pytest.raises(SelfnormError, match="not a result file"):
        ResultTable("toy2d", "paper", tmp_path)


def test_a_run_cut_short_is_no_row(tmp_path, monkeypatch):
    cut_short = sn.History(stopped="interrupted")
    monkeypatch.setattr(sn, "fit", lambda *_args, **_options: cut_short)
    with pytest.raises(KeyboardInterrupt):
        toy2d.run(seeds=1, out=tmp_path, progress=False)
    assert not (tmp_path / "toy2d.json").exists()


def test_runs_of_all_kinds_train_as_one_batch(tmp_path, short_runs, monkeypatch):
    options = {"seeds": 1, "datasets": ("checkerboard",), "progress": False, "together": True}
    table = toy2d.run(recipe="paper", out=tmp_path / "paper", **options)
    assert [row["runs_together"] for row in table.rows] == [4] * 4
    assert {(row["objective"], row["base"]) for row in table.rows} == {
        *((objective, base) for objective in ("snl", "nce") for base in ("standard_normal", "none"))
    }
    for row in table.rows:
        assert row["n_steps"] == 3
        assert row["seconds"] <= row["seconds_together"]
        if row["base"] != "none":
            assert row["log_norm"] == pytest.approx(row["log_norm_exact"], abs=0.02)
            assert -4 < row["exact"] < row["limit"]
    # A second call finds every row done and trains nothing.
    monkeypatch.setattr(sn, "fit_many", None)
    assert toy2d.run(recipe="paper", out=tmp_path / "paper", **options).rows == table.rows
