"""All tables in one go: the same rows side by side, resumed after a kill, failures said."""

import json
from functools import partial

import pytest

import selfnorm as sn
from selfnorm.errors import SelfnormError
from selfnorm.paper import everything
from selfnorm.paper.everything import PIECES, Piece, chosen

TINY = tuple(Piece("tiny", recipe, module="tests.paper.tiny_table") for recipe in "ab")


def run(out, **changes):
    return everything.run(**{"out": out, "progress": False, "pieces": TINY, **changes}).read_text()


def rows(out, recipe):
    return json.loads((out / "tiny" / recipe / "tiny.json").read_text())["rows"]


def trained(out, recipe):
    return (out / "tiny" / recipe / "trained.txt").read_text().split()


def test_a_real_table_runs_once_and_says_what_is_missing(tmp_path, monkeypatch, capsys):
    calls = []
    fit = sn.fit

    def three_steps(*given, **options):
        calls.append(options["seed"])
        return fit(*given, **{**options, "max_steps": 3})

    monkeypatch.setattr(sn, "fit", three_steps)
    coarse = partial(sn.exact_log_norm, n_points=129)
    monkeypatch.setattr(sn, "exact_log_norm", lambda *a, **k: coarse(*a, support=k["support"]))
    monkeypatch.setenv("SELFNORM_DATA", str(tmp_path / "nothing"))
    small = {"datasets": ("four_circles",), "bases": ("standard_normal",)}
    pieces = (Piece("toy2d", "paper"), Piece("uci", "paper"))
    again = partial(run, tmp_path / "out", pieces=pieces, options={"toy2d": small}, progress=True)
    page = again(seeds=1)
    assert "| toy2d/paper | complete | 2 of 2 rows |" in page
    assert "| uci/paper | no data |" in page
    assert "four_circles" in page
    assert "-1.914" in page  # the paper's number, beside ours
    assert "power" in page  # the missing files are named
    assert "toy2d/paper: done, 2 of 2 rows" in capsys.readouterr().out
    again(seeds=1)
    assert calls == [0, 0]
    again(seeds=2)  # more seeds are not taken for finished
    assert calls == [0, 0, 1, 1]


def test_pieces_of_an_earlier_call_stay_on_the_page(tmp_path):
    run(tmp_path, only=["tiny/a"])
    page = run(tmp_path, only=["tiny/b"])
    assert [len(rows(tmp_path, recipe)) for recipe in "ab"] == [3, 2]
    assert "| tiny/a | complete | 3 of 3 rows |" in page
    assert "| tiny/b | complete | 2 of 2 rows |" in page
    assert "Tiny, recipe b" in page
    assert "run them by `--only images/paper --only mnist/paper`" in page


def test_a_failing_piece_is_said_and_costs_the_others_nothing(tmp_path, capfd):
    broken = {"tiny": {"fail_at": ("a", 1)}}
    with pytest.raises(SelfnormError, match="tiny/a: a broken file"):
        run(tmp_path, options=broken)
    page = (tmp_path / "all.md").read_text()
    assert "| tiny/a | partly done, failed | 1 of 3 rows |" in page
    assert "| tiny/b | complete | 2 of 2 rows |" in page
    assert "DataError: a broken file" in capfd.readouterr().err
    run(tmp_path)  # and without the fault it goes on
    assert trained(tmp_path, "a") == ["0", "1", "2"]


def test_interrupted_in_the_middle_it_leaves_a_page_and_goes_on(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, options={"tiny": {"stop_at": ("b", 1)}})
    assert "| tiny/b | partly done | 1 of 2 rows |" in (tmp_path / "all.md").read_text()
    assert "2 of 2 pieces complete" in run(tmp_path)
    # A row that was written is not made again.
    assert trained(tmp_path, "a") == ["0", "1", "2"]
    assert trained(tmp_path, "b") == ["0", "1"]


def test_pieces_are_chosen_by_name_and_what_takes_hours_in_full():
    assert not any(piece.long for piece in chosen(None))
    assert [p.name for p in chosen(["mnist/paper", "toy2d"])] == [
        *("toy2d/paper", "toy2d/best", "mnist/paper")
    ]
    assert [p.name for p in PIECES if p.long] == ["images/paper", "mnist/paper"]
    with pytest.raises(SelfnormError, match="no piece 'toy3d'; choose from toy2d/paper"):
        chosen(["toy3d"])
