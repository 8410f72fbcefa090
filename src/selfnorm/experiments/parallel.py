"""Run the rows of a table side by side in processes of one thread each."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TypeVar

import torch

__all__ = ["run_side_by_side"]

Job = TypeVar("Job")
Result = TypeVar("Result")


def _one_thread() -> None:
    torch.set_num_threads(1)


def run_side_by_side(
    work: Callable[[Job], Result], jobs: Iterable[Job], n_processes: int = 1
) -> Iterator[tuple[Job, Result]]:
    """Yield ``(job, work(job))`` as they finish; in this very process for ``n_processes=1``.

    ``work`` must be a module-level function, and jobs and results must pickle.
    """
    if n_processes <= 1:
        for job in jobs:
            yield job, work(job)
        return
    # Spawned, not forked: a forked child inherits torch's thread pool in an unusable state.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(n_processes, mp_context=context, initializer=_one_thread) as pool:
        waiting = {pool.submit(work, job): job for job in jobs}
        try:
            for done in as_completed(waiting):
                yield waiting[done], done.result()
        finally:
            for future in waiting:
                future.cancel()
