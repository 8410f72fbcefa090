"""Pieces of the paper side by side: the same rows, resumed after a kill, failures said."""

import io
import itertools
import json
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from selfnorm.errors import SelfnormError
from selfnorm.paper import everything, piece_shares
from selfnorm.paper.piece_processes import run_in_processes
from selfnorm.paper.pieces import PIECES, Outcome, Piece, Settings, chosen
from selfnorm.paper.pieces_page import View
from tests.paper.process_ends import gone

TINY = tuple(
    Piece("tiny", name, seeds, "tests.paper.tiny_table") for name, seeds in (("a", 3), ("b", 2))
)


def rows(out, recipe):
    return json.loads((out / "tiny" / recipe / "tiny.json").read_text())["rows"]


def trained(out, recipe):
    return (out / "tiny" / recipe / "trained.txt").read_text().split()


def run(out, **changes):
    return everything.run(**{"out": out, "progress": False, "pieces": TINY, **changes})


def test_side_by_side_is_one_after_the_other(tmp_path):
    page = run(tmp_path / "two", side_by_side=2).read_text()
    run(tmp_path / "one")
    for recipe in ("a", "b"):
        assert rows(tmp_path / "two", recipe) == rows(tmp_path / "one", recipe)
    assert "2 of 2 pieces complete" in page
    assert "| tiny/a | complete | 3 of 3 rows |" in page
    assert "Tiny, recipe b" in page


def test_pieces_of_an_earlier_call_stay_on_the_page(tmp_path):
    run(tmp_path, only=["tiny/a"])
    page = run(tmp_path, only=["tiny/b"]).read_text()
    assert "| tiny/a | complete | 3 of 3 rows |" in page
    assert "| tiny/b | complete | 2 of 2 rows |" in page


def test_a_failing_piece_is_said_and_costs_the_others_nothing(tmp_path, capfd):
    broken = {"tiny": {"fail_at": ("a", 1)}}
    with pytest.raises(SelfnormError, match="tiny/a: a broken file"):
        run(tmp_path, side_by_side=2, options=broken)
    page = (tmp_path / "all.md").read_text()
    assert "| tiny/a | partly done, failed | 1 of 3 rows |" in page
    assert "| tiny/b | complete | 2 of 2 rows |" in page
    assert "DataError: a broken file" in (tmp_path / "tiny/a/log.txt").read_text()
    run(tmp_path)  # and without the fault it goes on
    assert trained(tmp_path, "a") == ["0", "1", "2"]


CALL = """
import sys
from selfnorm.paper import everything
from tests.paper.test_pieces import TINY
if __name__ == "__main__":
    options = {"tiny": {sys.argv[2]: ("a", 2)}} if len(sys.argv) > 2 else {}
    everything.run(out=sys.argv[1], progress=False, pieces=TINY, side_by_side=2, options=options)
"""


@pytest.fixture
def call(tmp_path, pytestconfig, monkeypatch):
    """A call in a process of its own, which an option makes one of its pieces kill."""
    monkeypatch.setenv("PYTHONPATH", str(pytestconfig.rootpath))
    script = tmp_path / "call.py"
    script.write_text(CALL)

    def begin(*mode):
        command = [sys.executable, script, tmp_path / "out", *mode]
        return subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True)

    return begin


def test_killed_in_the_middle_it_redoes_nothing_finished(call, tmp_path):
    out = tmp_path / "out"
    assert call("kill_parent_at").returncode == -signal.SIGKILL
    assert trained(out, "a") == ["0", "1"]
    assert (out / "all.md").exists()
    assert call().returncode == 0
    assert trained(out, "a") == ["0", "1", "2"]
    # Wherever the kill met the other piece: a row that was written is not made again.
    assert [row["seed"] for row in rows(out, "a")] == [0, 1, 2]
    assert [row["seed"] for row in rows(out, "b")] == [0, 1]
    assert "2 of 2 pieces complete" in (out / "all.md").read_text()


def test_ctrl_c_ends_all_pieces(call, tmp_path):
    ended = call("interrupt_at")
    assert ended.returncode != 0
    assert "KeyboardInterrupt" in ended.stderr
    assert gone(int((tmp_path / "out/tiny/a/pid.txt").read_text()))
    assert "| tiny/a | partly done | 2 of 3 rows |" in (tmp_path / "out/all.md").read_text()


def test_a_long_piece_begins_when_the_others_have_ended(tmp_path):
    pieces = [replace(TINY[0], seeds=1, long=True), replace(TINY[1], seeds=1)]
    seen = []
    results = run_in_processes(pieces, tmp_path, Settings(), 2, lambda on: seen.append(sorted(on)))
    assert [(piece.name, outcome.state) for piece, outcome in results] == [
        ("tiny/b", "done"),
        ("tiny/a", "done"),
    ]
    assert ["tiny/a", "tiny/b"] not in seen


def test_pieces_are_chosen_by_name_and_the_long_ones_come_last():
    assert [p.name for p in chosen(["mnist/paper", "toy2d"])] == [
        *("toy2d/paper", "toy2d/best", "mnist/paper")
    ]
    assert [p.name for p in PIECES if p.long] == ["images/paper", "mnist/paper"]
    with pytest.raises(SelfnormError, match="no piece 'toy3d'; choose from toy2d/paper"):
        chosen(["toy3d"])


def test_the_view_prints_a_line_when_it_changes(tmp_path):
    stream = io.StringIO()
    view = View(tmp_path, TINY, enabled=True, stream=stream)
    view.show({"tiny/a"}, {})
    view.show({"tiny/a"}, {})
    view.show({"tiny/b"}, {"tiny/a": Outcome("failed", "a broken file", 3.0)})
    lines = [line.split() for line in stream.getvalue().splitlines()]
    assert [line[:2] for line in lines] == [
        ["tiny/a", "running"],
        ["tiny/b", "waiting"],
        ["tiny/a", "failed"],
        ["tiny/b", "running"],
    ]
    assert lines[2][-3:] == ["a", "broken", "file"]


def on_h200(monkeypatch, tmp_path, pieces, jobs=8, rows_of=None):
    """What begins first on a machine of sixteen cores with a GPU, and with how many processes."""
    monkeypatch.setattr(piece_shares.os, "cpu_count", lambda: 16)
    for name, (there, asked) in (rows_of or {}).items():
        (tmp_path / name).mkdir(parents=True)
        content = {"rows": [{}] * there, "asked_rows": asked, "seconds": 1.0}
        (tmp_path / name / f"{name.split('/')[0]}.json").write_text(json.dumps(content))
    waiting, running = list(pieces), {}
    settings = Settings("cuda", jobs=jobs)
    while found := piece_shares.begin_next(waiting, running, settings, tmp_path, len(pieces)):
        waiting.remove(found[0])
        running[found[0]] = found[1]
    return {piece.name: (own.device, own.jobs) for piece, own in running.items()}


def test_pieces_share_one_budget_and_the_longest_begin_first(tmp_path, monkeypatch):
    begun = on_h200(monkeypatch, tmp_path, chosen(None))
    assert list(begun) == ["toy1d/paper", "mnist/best", "images/best", "toy1d/best", "uci/paper"]
    assert begun.pop("toy1d/paper") == ("cpu", 6)  # the cores left over, nothing of the GPU
    assert begun == {
        "mnist/best": ("cuda", 3),
        "images/best": ("cuda", 2),
        "toy1d/best": ("cuda", 2),  # with one, its long rows were the last to end
        "uci/paper": ("cuda", 1),
    }


def test_a_share_goes_by_what_is_left(tmp_path, monkeypatch):
    pieces = chosen(["mnist", "images"])
    begun = on_h200(monkeypatch, tmp_path, pieces, rows_of={"mnist/best": (9, 12)})
    assert begun == {"images/best": ("cuda", 5), "mnist/best": ("cuda", 3)}


@pytest.mark.parametrize("jobs", [1, 2, 3, 5, 8])
def test_no_other_shares_end_earlier(jobs):
    minutes = {Piece("toy1d", str(m), 1): m for m in (48.0, 29.0, 20.0)}
    given = piece_shares.shares(minutes, jobs)
    assert sum(given.values()) == jobs
    others = (s for s in itertools.product(range(1, jobs + 1), repeat=len(given)) if sum(s) == jobs)
    end = max(minutes[piece] / own for piece, own in given.items())
    assert end <= min(max(minutes[p] / s for p, s in zip(given, o, strict=True)) for o in others)


def test_many_equal_pieces_use_the_whole_budget():
    minutes = {Piece("toy1d", str(i), 1): 1.0 for i in range(9)}
    assert sum(piece_shares.shares(minutes, 2).values()) == 2
    assert list(piece_shares.shares(minutes, 9).values()) == [1] * 9


def test_without_cores_to_spare_all_pieces_are_the_gpus(tmp_path, monkeypatch):
    begun = on_h200(monkeypatch, tmp_path, chosen(["toy1d"]), jobs=12)
    assert {device for device, _ in begun.values()} == {"cuda"}
    assert sum(jobs for _, jobs in begun.values()) == 12


def test_what_takes_hours_runs_when_named(tmp_path):
    assert not any(piece.long for piece in chosen(None))
    assert [piece.name for piece in chosen(["images/paper"])] == ["images/paper"]
    page = run(tmp_path).read_text()
    assert "run them by `--only images/paper --only mnist/paper`" in page


def test_sigterm_ends_all_pieces_and_leaves_a_page(call, tmp_path):
    ended = call("terminate_at")
    assert ended.returncode == 128 + signal.SIGTERM
    assert gone(int((tmp_path / "out/tiny/a/pid.txt").read_text()))
    assert "| tiny/a | partly done | 2 of 3 rows |" in (tmp_path / "out/all.md").read_text()
