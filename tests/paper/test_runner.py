"""Rows side by side: each once, in their order, errors told, nobody left behind."""

import os
import signal
import subprocess
import sys

import pytest

from selfnorm.errors import DataError, SelfnormError
from selfnorm.paper import images, mnist, toy1d, toy2d, uci
from selfnorm.paper.report import ResultTable
from selfnorm.paper.runner import run_side_by_side
from tests.paper.tiny_table import Job, begun, fill, gone, work


@pytest.mark.parametrize("n", [1, 2])
def test_every_job_is_done_once(tmp_path, n):
    jobs = [Job(0, str(tmp_path), mode="slow"), *(Job(k, str(tmp_path)) for k in range(1, 6))]
    found = run_side_by_side(work, jobs, n)
    assert sorted((job.number, value) for job, value in found) == [(k, k * k) for k in range(6)]
    processes = begun(tmp_path)
    assert all(len(pids) == 1 for pids in processes.values())
    assert len({pids[0] for pids in processes.values()}) <= n
    assert (str(os.getpid()) in processes["0"]) == (n == 1)


def test_an_error_is_raised_when_those_under_way_have_been_told(tmp_path):
    jobs = [Job(0, str(tmp_path), mode="slow"), Job(1, str(tmp_path), mode="fail")]
    jobs += [Job(k, str(tmp_path), mode="slow") for k in (2, 3, 4, 5)]
    told = []

    def read():
        for job, _ in run_side_by_side(work, jobs, 2):
            told.append(job.number)

    with pytest.raises(DataError, match="a broken row"):
        read()
    assert told  # what was done is not lost
    assert sorted([*told, 1]) == sorted(int(name) for name in begun(tmp_path))
    assert len(begun(tmp_path)) < 6  # and nothing more was begun


@pytest.mark.parametrize(
    ("mode", "message"),
    [("vanish", r"ended by itself.*number=1"), ("unreadable", "UnreadableError: this and that")],
)
def test_what_cannot_come_back_is_an_error(tmp_path, mode, message):
    with pytest.raises(SelfnormError, match=message):
        list(run_side_by_side(work, [Job(1, str(tmp_path), mode=mode)], 2))


def test_whoever_stops_early_ends_the_processes(tmp_path):
    jobs = [Job(0, str(tmp_path)), Job(1, str(tmp_path), mode="forever")]
    results = run_side_by_side(work, jobs, 2)
    next(results)
    results.close()
    assert all(gone(int(pid)) for pids in begun(tmp_path).values() for pid in pids)


@pytest.mark.parametrize(
    ("table", "asked", "told"),
    [
        *((table, {"recipe": "fast"}, "recipe") for table in (toy1d, toy2d, uci, images, mnist)),
        (toy1d, {"objectives": ["nope"]}, "objective"),
        (toy2d, {"bases": ["nope"]}, "base"),
        (uci, {"datasets": ["nope"]}, "set"),
        (images, {"objectives": ["nope"]}, "objective"),
        (images, {"proposals": ["nope"]}, "proposal"),
        (mnist, {"models": ["nope"]}, "model"),
    ],
)
def test_what_a_table_does_not_have_is_refused_before_anything_is_written(
    table, asked, told, tmp_path
):
    with pytest.raises(ValueError, match=f"unknown {told} '(nope|fast)'; choose from "):
        table.run(**asked, out=tmp_path)
    assert list(tmp_path.iterdir()) == []


CALL = """
import sys
from selfnorm.paper.report import ResultTable
from tests.paper.tiny_table import fill
if __name__ == "__main__":
    fill(ResultTable("rows", "tiny", sys.argv[1]), ["forever", "SIGKILL"], 2)
"""


def test_killed_in_the_middle_nobody_is_left_and_nothing_is_done_twice(tmp_path, pytestconfig):
    script = tmp_path / "call.py"
    script.write_text(CALL)
    path = os.pathsep.join([str(pytestconfig.rootpath), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    ended = subprocess.run([sys.executable, script, tmp_path], env=environment, check=False)
    assert ended.returncode == -signal.SIGKILL
    table = ResultTable("rows", "tiny", tmp_path)
    assert sorted(row["k"] for row in table.rows) == [0, 1]
    assert all(gone(int(pid)) for pids in begun(tmp_path).values() for pid in pids)
    fill(table, ["", ""], 1)
    assert sorted(row["k"] for row in table.rows) == [0, 1, 2, 3]
    times = {name: len(pids) for name, pids in begun(tmp_path).items()}
    assert times == {"0": 1, "1": 1, "2": 2, "3": 2}  # those under way, and no other
