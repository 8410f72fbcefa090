"""All tables in one go: resumed without repeating, missing data said, one page."""

import json

import pytest

from selfnorm.errors import DataError, SelfnormError
from selfnorm.paper import everything, toy2d, uci
from selfnorm.paper.everything import Piece

PIECES = (Piece("toy2d", "paper", 1), Piece("uci", "paper", 1))
OPTIONS = {
    "toy2d": {"datasets": ("four_circles",), "bases": ("standard_normal",), "figures": False}
}


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """The real 2-D table with three steps a run, and an empty data directory."""
    calls = []

    def train(config):
        calls.append(config)
        return toy2d_runs_train_one(config, max_steps=3)

    from selfnorm.paper.toy2d_runs import train_one as toy2d_runs_train_one

    monkeypatch.setattr(toy2d, "train_one", train)
    monkeypatch.setenv("SELFNORM_DATA", str(tmp_path / "nothing"))
    return calls


def run(out, **changes):
    options = {"progress": False, "pieces": PIECES, "options": OPTIONS}
    return everything.run(out=out, **{**options, **changes})


def test_everything_runs_once_and_says_what_is_missing(quick, tmp_path):
    page = run(tmp_path / "out").read_text()
    assert len(quick) == 2
    assert "| toy2d/paper | complete | 2 of 2 rows |" in page
    assert "| uci/paper | no data |" in page
    assert "four_circles" in page
    assert "-1.914" in page  # the paper's number, beside ours
    assert "power" in page  # the missing files are named
    run(tmp_path / "out")
    assert len(quick) == 2


def test_killed_in_the_middle_it_goes_on(quick, tmp_path, monkeypatch):
    class KilledError(Exception):
        pass

    judged = []
    row = toy2d._row

    def row_then_kill(*arguments):
        if judged:
            raise KilledError
        judged.append(row(*arguments))
        return judged[0]

    monkeypatch.setattr(toy2d, "_row", row_then_kill)
    with pytest.raises(KilledError):
        run(tmp_path)
    monkeypatch.setattr(toy2d, "_row", row)
    run(tmp_path)
    # The first run was trained once, the second one twice: it had not been written.
    assert [c.objective for c in quick] == ["snl", "nce", "nce"]
    rows = json.loads((tmp_path / "toy2d/paper/toy2d.json").read_text())["rows"]
    assert [r["objective"] for r in rows] == ["snl", "nce"]


def test_more_seeds_are_not_taken_for_finished(quick, tmp_path):
    run(tmp_path)
    run(tmp_path, seeds=2)
    assert [c.seed for c in quick] == [0, 0, 1, 1]


def test_other_errors_are_told_when_the_others_have_had_their_turn(quick, tmp_path, monkeypatch):
    def broken(**options):
        raise DataError("broken file")

    monkeypatch.setattr(uci, "run", broken)
    with pytest.raises(SelfnormError, match="uci/paper: broken file"):
        run(tmp_path, pieces=PIECES[::-1])
    assert "| toy2d/paper | complete |" in (tmp_path / "all.md").read_text()


@pytest.mark.parametrize("option", [{"jobs": 0}, {"side_by_side": -1}], ids=str)
def test_a_budget_with_which_nothing_would_begin_is_refused(option, tmp_path):
    with pytest.raises(ValueError, match="must be at least 1"):
        everything.run(out=tmp_path / "out", progress=False, **option)
    assert not (tmp_path / "out").exists()
