"""How the rows of a table are run: side by side, in processes that end with their parent.

The processes train, the caller writes: a row is given out once and comes back once, so two of them
never write one row, and a killed call leaves the rows that had come back.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, ProcessPoolExecutor, wait
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import islice
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import TypeVar

import torch

from selfnorm.errors import SelfnormError
from selfnorm.paper.report import ResultTable, Row, Run, check_choices

Job = TypeVar("Job")
Result = TypeVar("Result")
Extra = TypeVar("Extra")

_GRACE = 10.0  # seconds a process has to end when asked to: several leave one busy GPU


@dataclass(frozen=True)
class Settings:
    """The options that all tables share.

    Attributes:
        recipe: which set-up; ``"paper"`` pins the paper's, ``"best"`` is ours.
        out: directory of the result files; finished rows found there are kept.
        device: torch device.
        progress: print how far it is.
        data_dir: where data files are, if not in ``$SELFNORM_DATA`` or the cache.
        jobs: rows to run side by side, in processes of one thread.
    """

    recipe: str = "paper"
    out: str | Path = "out"
    device: str = "cpu"
    progress: bool = True
    data_dir: str | Path | None = None
    jobs: int = 1

    @property
    def bars(self) -> bool:
        """Whether every row shows a bar of its own: there is one at a time."""
        return self.progress and self.jobs == 1

    def table(self, name: str, recipes: Sequence[str] = ("paper", "best")) -> ResultTable:
        """The table of this name, with the rows that are there already."""
        check_choices("recipe", [self.recipe], recipes)
        return ResultTable(name, self.recipe, Path(self.out), device=self.device)

    def rows(
        self, table: ResultTable, work: Callable[[Run], tuple[Row, Extra]], runs: Sequence[Run]
    ) -> Iterator[tuple[Run, Extra]]:
        """Run what the table lacks, and add rows as they finish."""
        yield from self.keep(table, run_side_by_side(work, table.missing(runs), self.jobs))

    def keep(
        self, table: ResultTable, finished: Generator[tuple[Run, tuple[Row, Extra]], None, None]
    ) -> Iterator[tuple[Run, Extra]]:
        """Add rows to the table as they come; yields each run with what its work gave besides."""
        with closing(finished):  # when a row cannot be written, no process is left training
            for run, (row, extra) in finished:
                table.add(row)
                if self.progress:
                    named = ", ".join(str(v) for v in run.keys().values() if v is not None)
                    present = [k for k in ("exact", "lower", "upper") if row.get(k) is not None]
                    figures = ", ".join(f"{name} {row[name]:.3f}" for name in present)
                    print(f"{named}: {figures} nats", flush=True)
                yield run, extra


def run_side_by_side(
    work: Callable[[Job], Result], jobs: Iterable[Job], n_processes: int = 1
) -> Generator[tuple[Job, Result], None, None]:
    """Yield ``(job, work(job))`` as they finish; in this very process for ``n_processes=1``.

    ``work`` must be a module-level function, and jobs and results must pickle. ``jobs`` is read as
    processes become free. An error of one job is raised when those under way have ended; whatever
    else ends this generator ends its processes.

    Args:
        work: what to do with a job.
        jobs: in the order in which to begin them.
        n_processes: how many at once, each of one thread.

    Example:
        >>> list(run_side_by_side(abs, [-1, 2]))
        [(-1, 1), (2, 2)]
    """
    if n_processes <= 1:
        for job in jobs:
            yield job, work(job)
        return
    running: dict[Future[bytes], Job] = {}
    failed: Exception | None = None
    others = multiprocessing.active_children()
    # Spawned, not forked: a forked child inherits torch's threads in an unusable state, and CUDA
    # does not survive a fork.
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(n_processes, mp_context=spawn, initializer=_begin)
    try:
        coming = iter(jobs)
        while True:
            free = 0 if failed else n_processes - len(running)
            for job in islice(coming, free):
                running[pool.submit(_attempt, pickle.dumps((work, job)))] = job
            if not running:
                break
            ended = wait(running, return_when=FIRST_COMPLETED).done
            # Of several, one that has a result: it is not lost if another has taken the pool down.
            future = min(ended, key=lambda one: one.exception() is not None)
            result, error = pickle.loads(future.result())
            job = running.pop(future)
            if error is None:
                yield job, result
            failed = failed or error
    except BrokenExecutor as broken:
        lost = ", ".join(repr(job) for job in running.values())
        raise SelfnormError(f"a process ended by itself (no memory?); lost are {lost}") from broken
    finally:
        if running:
            _stop([one for one in multiprocessing.active_children() if one not in others])
        pool.shutdown(cancel_futures=True)
    if failed is not None:
        raise failed


def refuse_cut_short(stopped: str) -> None:
    """A run that Ctrl-C has cut short is no row: the interrupt goes on to the table."""
    if stopped == "interrupted":
        raise KeyboardInterrupt


def _stop(processes: list[BaseProcess]) -> None:
    """Ask all to end, wait for them, and kill those that do not."""
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(_GRACE)
        process.kill()


def _begin() -> None:
    """How a process begins."""
    # Ctrl-C is for the one who started it: a training run would take it for an order to finish.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _settle_and_end)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)


def _settle_and_end(number: int, _frame: FrameType | None) -> None:
    """End when the GPU has: under NVIDIA's multi-process service others could go down too."""
    with suppress(RuntimeError):  # it ends anyway
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    os._exit(128 + number)


def _end_with_parent() -> None:
    """End after a kill of the parent: two processes must not write one table."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_GRACE)
        os._exit(1)


def _attempt(packed: bytes) -> bytes:
    """What a job has given, or why it has failed.

    Plain pickle, not the one of processes: tensors travel as values, so that they outlive the
    process they come from.
    """
    work, job = pickle.loads(packed)
    try:
        return pickle.dumps((work(job), None))
    except Exception as error:
        traceback.print_exc()  # for the log: the message alone travels
        if not isinstance(error, SelfnormError):  # another class may not be made anew there
            error = SelfnormError(f"{type(error).__name__}: {error}")
        return pickle.dumps((None, error))
