"""A table in miniature, whose rows are kept at once; jobs, and whether their processes have ended.

Processes import this module for their jobs: it needs little.
"""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from selfnorm.errors import DataError
from selfnorm.paper.report import ResultTable
from selfnorm.paper.runner import run_side_by_side


@dataclass
class Seed:
    seed: int

    def keys(self):
        return {"seed": self.seed}


def run(*, recipe, out, seeds=None, fail_at=None, stop_at=None, **_):
    """One row a seed; for the tests, one fails, or is interrupted."""
    table = ResultTable("tiny", recipe, Path(out))
    seeds = seeds or {"a": 3, "b": 2}[recipe]
    table.directory.mkdir(parents=True, exist_ok=True)
    for seed in (run.seed for run in table.missing([Seed(seed) for seed in range(seeds)])):
        if (recipe, seed) == fail_at:
            raise DataError("a broken file")
        if (recipe, seed) == stop_at:
            raise KeyboardInterrupt
        with (table.directory / "trained.txt").open("a") as file:
            file.write(f"{seed}\n")
        table.add({"seed": seed, "square": seed**2})
    table.write_page(f"# Tiny, recipe {recipe}", f"{len(table.rows)} rows")
    return table


def gone(pid):
    """Whether a process has ended, within a while."""
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


@dataclass(frozen=True)
class Job:
    number: int
    folder: str
    mode: str = ""


class UnreadableError(RuntimeError):
    """One that pickle cannot make anew: its message is not what it is made of."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def work(job):
    """Say when it began and ended; for the tests, fail or vanish."""
    with open(f"{job.folder}/{job.number}.txt", "a") as file:
        file.write(f"{os.getpid()}\n")
    if job.mode == "fail":
        raise DataError("a broken row")
    if job.mode == "unreadable":
        raise UnreadableError("this", "that")
    if job.mode == "vanish":
        os._exit(7)
    if job.mode == "slow":
        time.sleep(0.3)
    if job.mode.startswith("SIG"):
        while len(ResultTable("rows", "tiny", job.folder).rows) < 2:
            time.sleep(0.05)
        os.kill(os.getppid(), signal.Signals[job.mode])
    if job.mode == "forever" or job.mode.startswith("SIG"):
        time.sleep(60)
    return job.number**2


def begun(folder):
    return {path.stem: path.read_text().split() for path in folder.glob("*.txt")}


def fill(table, modes, n):
    modes = enumerate(["", "", *modes])
    jobs = [Job(k, str(table.directory), m) for k, m in modes if not table.has(k=k)]
    for job, value in run_side_by_side(work, jobs, n):
        table.add({"k": job.number, "value": value})
