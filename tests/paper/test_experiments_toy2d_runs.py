"""The 2-D table as one batch: same start and same kind of result as run by run."""

import math
from functools import partial

import pytest
import torch

import selfnorm as sn
from selfnorm.paper import toy2d
from selfnorm.paper.toy2d_runs import train_together


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
    with pytest.raises(ValueError, match="one recipe"):
        train_together(mixed)


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
