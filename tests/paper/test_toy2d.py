"""The 2-D table: rows, resumption, Markdown, figures (a few steps each, for speed)."""

import json
import math
from functools import partial

import pytest
import torch

import selfnorm as sn
from selfnorm.errors import SelfnormError
from selfnorm.paper import toy2d
from selfnorm.paper.report import Table, paper_numbers
from selfnorm.paper.toy2d import train_together

CONTRACT = {"dataset", "objective", "base", "proposal", "exact", "limit", "log_norm"}
CONTRACT |= {"log_norm_exact", "seed", "seconds", "lower", "upper", "ess", "pareto_k", "diverged"}


@pytest.fixture
def short_runs(monkeypatch):
    """The same code with three steps a run: what is tested is the table, not the training."""
    plain_fit = sn.fit
    monkeypatch.setattr(
        sn, "fit", lambda *a, **k: plain_fit(*a, **{**k, "max_epochs": 1, "max_steps": 3})
    )


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
    table = toy2d.run(
        recipe="best", seeds=1, out=tmp_path, progress=False, datasets=("funnel",), figures=False
    )
    assert len(table.rows) == 1
    assert table.rows[0]["n_test"] == 50_000


def test_other_recipe_in_the_same_place_is_refused(tmp_path):
    Table("toy2d", "paper", tmp_path).add({"seed": 0})
    with pytest.raises(SelfnormError, match="another --out"):
        toy2d.run(recipe="best", out=tmp_path)
    with pytest.raises(ValueError, match="recipe"):
        toy2d.run(recipe="typo", out=tmp_path)
    (tmp_path / "toy2d.json").write_text("{broken")
    with pytest.raises(SelfnormError, match="not a result file"):
        Table("toy2d", "paper", tmp_path)


@pytest.mark.parametrize("spent", [0.504, 2.504])
def test_a_table_and_its_file_agree_on_the_time(tmp_path, monkeypatch, spent):
    """Else a page made from the file tells another whole second than the one of the run."""
    clock = iter([0.0, spent])
    monkeypatch.setattr("selfnorm.paper.report.time.perf_counter", lambda: next(clock))
    table = Table("toy2d", "paper", tmp_path)
    table.add({"seed": 0})
    written = json.loads(table.path.read_text())["seconds"]
    assert written == pytest.approx(spent, abs=0.006)
    assert f"{table.seconds:.0f}" == f"{written:.0f}"


def test_paper_numbers_hold_every_table():
    numbers = paper_numbers()
    assert len(numbers["toy2d"]) == 4
    assert numbers["mnist"]["vae_ebm"] == -87.09


def configs(recipe, pairs, datasets=("checkerboard", "funnel"), device="cpu"):
    return [
        toy2d.Config(recipe, dataset, objective, base, 0, device, "train", False)
        for dataset in datasets
        for base, objective in pairs
    ]


def test_paper_runs_of_all_kinds_train_as_one_batch():
    rows = configs(
        "paper",
        [("standard_normal", "snl"), ("none", "snl"), ("standard_normal", "nce")],
        ("checkerboard",),
    )
    fitted, seconds = train_together(rows, progress=False, max_steps=8, max_epochs=1)
    assert seconds > 0
    assert len(fitted) == len(rows)
    for config, one in zip(rows, fitted, strict=True):
        assert one.history.n_steps == 8
        assert (one.model.base is None) == (config.base == "none")
        if one.model.base is not None:
            log_z, _ = sn.exact_log_norm(one.model, 2, n_points=257)
            assert float(one.model.log_norm.detach()) == pytest.approx(log_z, abs=0.02)
            assert -4 < one.history.best_score < one.split.limit


def test_best_recipe_with_a_proposal_for_each_run():
    rows = configs("best", [("student_t", "snl")])
    fitted, _ = train_together(rows, progress=False, max_steps=4, validate_every=4)
    for one in fitted:
        bounds = sn.evaluate(
            one.model, one.split.test.float(), proposal=one.proposal, n_samples=4000, seed=0
        )
        assert math.isfinite(bounds.upper)
        assert bounds.gap < 0.02
    assert not torch.equal(fitted[0].proposal.sharp.means, fitted[1].proposal.sharp.means)


def test_mixed_recipes_are_refused():
    mixed = [*configs("paper", [("none", "snl")]), *configs("best", [("student_t", "snl")])]
    with pytest.raises(ValueError, match="different training options"):
        train_together(mixed)


def test_a_run_cut_short_is_no_row(tmp_path, monkeypatch):
    cut_short = sn.History(stopped="interrupted")
    monkeypatch.setattr(sn, "fit", lambda *_args, **_options: cut_short)
    with pytest.raises(KeyboardInterrupt):
        toy2d.run(seeds=1, out=tmp_path, progress=False)
    assert not (tmp_path / "toy2d.json").exists()


def test_table_of_runs_trained_together_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(toy2d, "train_together", partial(train_together, max_steps=3, max_epochs=1))
    options = {
        "seeds": 1,
        "out": tmp_path,
        "datasets": ("four_circles",),
        "bases": ("standard_normal",),
        "figures": False,
        "progress": False,
        "together": True,
    }
    table = toy2d.run(recipe="paper", **options)
    assert [row["runs_together"] for row in table.rows] == [2, 2]
    assert table.rows[0]["seconds"] <= table.rows[0]["seconds_together"]
    assert {row["objective"] for row in table.rows} == {"snl", "nce"}
    assert all(row["n_steps"] == 3 for row in table.rows)
    # A second call finds every row done and trains nothing.
    monkeypatch.setattr(toy2d, "train_together", None)
    assert len(toy2d.run(recipe="paper", **options).rows) == 2
