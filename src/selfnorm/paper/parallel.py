"""Run the rows of a table side by side in processes of one thread each.

The processes train, the caller writes: a row is given out once and comes back once, so two of them
never write one row, and a killed call leaves the rows that had come back.
"""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

import torch

from selfnorm.errors import SelfnormError
from selfnorm.paper.lifetime import GRACE, end_when_asked, end_with_parent, settle

__all__ = ["run_side_by_side"]

Job = TypeVar("Job")
Result = TypeVar("Result")


def run_side_by_side(
    work: Callable[[Job], Result],
    jobs: Iterable[Job],
    n_processes: int = 1,
    *,
    after: Callable[[Job], Job | None] = lambda _: None,
) -> Iterator[tuple[Job, Result]]:
    """Yield ``(job, work(job))`` as they finish; in this very process for ``n_processes=1``.

    ``work`` must be a module-level function, and jobs and results must pickle. ``jobs`` is read as
    processes become free. An error of one job is raised when those under way have ended; whatever
    else ends this generator ends its processes.

    Args:
        work: what to do with a job.
        jobs: in the order in which to begin them.
        n_processes: how many at once.
        after: the job that must have ended before this one begins, one earlier in ``jobs``.
    """
    if n_processes <= 1:
        for job in jobs:
            yield job, work(job)
        return
    queue = _Queue(jobs, after)
    idle: list[_Worker[Job, Result]] = []
    busy: dict[Connection, _Worker[Job, Result]] = {}
    failed: BaseException | None = None
    try:
        while True:
            while failed is None and len(busy) < n_processes:
                found = queue.take([worker.job for worker in busy.values()])
                if found is None:
                    break
                worker = idle.pop() if idle else _Worker(work)
                worker.begin(found)
                busy[worker.connection] = worker
            if not busy:
                break
            ended: Any = wait(list(busy))[0]
            worker = busy.pop(ended)
            result, error = worker.result()
            if error is not None:
                failed = failed or error
                _Worker.stop([worker])
                continue
            idle.append(worker)
            yield worker.job, result  # type: ignore[misc]
    finally:
        _Worker.stop([*idle, *busy.values()])
    if failed is not None:
        raise failed


class _Queue(Generic[Job]):
    """Jobs in order, but for those that must wait for another one."""

    def __init__(self, jobs: Iterable[Job], after: Callable[[Job], Job | None]) -> None:
        self._coming, self._after = iter(jobs), after
        self._waiting: list[Job] = []

    def take(self, running: list[Job]) -> Job | None:
        """The first job that can begin while these are running; ``None`` if there is none."""
        for place, job in enumerate(self._waiting):
            if self._after(job) not in (*running, *self._waiting):
                return self._waiting.pop(place)
        for job in self._coming:
            if self._after(job) not in (*running, *self._waiting):
                return job
            self._waiting.append(job)
        return None


class _Worker(Generic[Job, Result]):
    """A process that does one job after the other."""

    job: Job

    def __init__(self, work: Callable[[Job], Result]) -> None:
        # Spawned, not forked: a forked child inherits torch's threads in an unusable state, and
        # CUDA does not survive a fork.
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(work, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self._busy = False

    def begin(self, job: Job) -> None:
        """Hand it a job."""
        self.job, self._busy = job, True
        with suppress(ConnectionError):  # it has died meanwhile: its result says so
            self.connection.send_bytes(pickle.dumps(job))

    def result(self) -> tuple[Result | None, BaseException | None]:
        """What its job has given, or why it has failed."""
        self._busy = False
        try:
            result, error = pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionError):  # the latter if it has not even read its job
            self.process.join(GRACE)
            note = f"the process of {self.job!r} ended with code {self.process.exitcode}"
            return None, SelfnormError(note)
        return result, error

    @staticmethod
    def stop(workers: list[_Worker[Job, Result]]) -> None:
        """End these processes: idle ones have nothing more to read, the others are asked to."""
        for worker in workers:
            worker.connection.close()
            if worker._busy:
                worker.process.terminate()
        until = time.monotonic() + GRACE
        for worker in workers:
            worker.process.join(max(0.0, until - time.monotonic()))
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()


def _serve(work: Callable[[Any], Any], connection: Connection) -> None:
    """The process of a worker."""
    # Ctrl-C is for the one who started it: a training run would take it for an order to finish.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    torch.set_num_threads(1)
    with end_when_asked():
        try:
            while (message := _received(connection)) is not None:
                # Plain pickle, not the one of processes: tensors travel as values, so that they
                # outlive the process they come from.
                connection.send_bytes(pickle.dumps(_attempt(work, pickle.loads(message))))
        finally:
            settle()


def _received(connection: Connection) -> bytes | None:
    """The next message; ``None`` when the other end is closed."""
    try:
        return connection.recv_bytes()
    except EOFError:
        return None


def _attempt(work: Callable[[Any], Any], job: Any) -> tuple[Any, BaseException | None]:
    try:
        return work(job), None
    except (SelfnormError, ValueError, RuntimeError, OSError) as error:
        traceback.print_exc()  # for the log: the message alone travels
        return None, _that_travels(error)


def _that_travels(error: Exception) -> Exception:
    """The error, or its text where its class cannot be made anew on the other side."""
    try:
        pickle.loads(pickle.dumps(error))
    except (TypeError, AttributeError, pickle.PickleError):
        return SelfnormError(f"{type(error).__name__}: {error}")
    return error
