"""Rows of a table side by side, in processes that end with the one that started them.

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
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager, suppress
from itertools import islice
from multiprocessing import connection
from types import FrameType
from typing import Any, TypeVar

import torch

from selfnorm.errors import SelfnormError

__all__ = ["end_when_asked", "refuse_cut_short", "run_side_by_side"]

Job = TypeVar("Job")
Result = TypeVar("Result")

_GRACE = 10.0  # seconds a process has to end when asked to: several leave one busy GPU


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


def _stop(processes: list[Any]) -> None:
    """All are asked to end, then waited for; who does not is killed."""
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
    """Nobody goes on after a kill of the parent: two processes must not write one table."""
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
        try:
            told = pickle.dumps((None, error))
            pickle.loads(told)
        except Exception:  # its class cannot be made anew on the other side
            told = pickle.dumps((None, SelfnormError(f"{type(error).__name__}: {error}")))
        return told


@contextmanager
def end_when_asked() -> Iterator[None]:
    """Within, SIGTERM raises ``SystemExit``, so that ``finally`` clauses run.

    Unlike Ctrl-C it is no order to a training run to finish early.

    Example:
        >>> try:
        ...     with end_when_asked():
        ...         os.kill(os.getpid(), signal.SIGTERM)
        ...         time.sleep(5)
        ... except SystemExit as ended:
        ...     print(ended.code)
        143
    """
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _leave(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second one would interrupt the cleaning up
    raise SystemExit(128 + number)
