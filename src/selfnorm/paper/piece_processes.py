"""Pieces side by side, each in a process of its own that ends with the one that started it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

import torch

from selfnorm.paper.lifetime import GRACE, end_when_asked, end_with_parent, settle
from selfnorm.paper.piece_shares import begin_next
from selfnorm.paper.pieces import Outcome, Piece, Settings, run_piece

__all__ = ["LOG", "run_in_processes"]

LOG = "log.txt"  # in the piece's folder: warnings, and the traceback of a failure
_LOOK_EVERY = 2.0  # seconds


def run_in_processes(
    pieces: Sequence[Piece],
    directory: Path,
    settings: Settings,
    side_by_side: int,
    look: Callable[[set[str]], None],
) -> Generator[tuple[Piece, Outcome], None, None]:
    """Yield every piece with its outcome as it ends; ``look`` is told now and then which are on.

    ``settings.jobs`` is the budget of all pieces together. Whatever ends this generator early
    (Ctrl-C, SIGTERM, an error, ``close``) ends all pieces: what they have finished is on disk, and
    the next call goes on from there.
    """
    waiting = list(pieces)
    running: dict[Piece, _Running] = {}
    threads = max(1, (os.cpu_count() or 1) // max(side_by_side, settings.jobs))
    threads = min(torch.get_num_threads(), threads)

    def begin() -> bool:
        given = {piece: one.settings for piece, one in running.items()}
        found = begin_next(waiting, given, settings, directory, side_by_side)
        if found is not None:
            piece, own = found
            waiting.remove(piece)
            running[piece] = _Running(piece, directory, own, threads)
        return found is not None

    try:
        while waiting or running:
            while begin():
                pass
            look({piece.name for piece in running})
            wait([one.process.sentinel for one in running.values()], timeout=_LOOK_EVERY)
            for piece in [piece for piece, one in running.items() if not one.process.is_alive()]:
                yield piece, running.pop(piece).outcome()
    finally:
        _stop(list(running.values()))


def _stop(running: list[_Running]) -> None:
    """End these processes and those they have started: all are asked, then waited for."""
    for one in running:
        _signal_group(one.process, signal.SIGTERM)
    until = time.monotonic() + GRACE
    for one in running:
        one.process.join(max(0.0, until - time.monotonic()))
        if one.process.is_alive():
            _signal_group(one.process, getattr(signal, "SIGKILL", signal.SIGTERM))
            one.process.join()


class _Running:
    """A piece in progress."""

    def __init__(self, piece: Piece, directory: Path, settings: Settings, threads: int) -> None:
        self.settings = settings
        self.began = time.perf_counter()
        self.log = directory / piece.name / LOG
        self.log.parent.mkdir(parents=True, exist_ok=True)
        # Spawned, not forked: CUDA does not survive a fork.
        context = multiprocessing.get_context("spawn")
        self._receiving, sending = context.Pipe(duplex=False)
        arguments = (piece, directory, settings, threads, self.log, sending)
        self.process: SpawnProcess = context.Process(target=_work, args=arguments, name=piece.name)
        self.process.start()
        sending.close()

    def outcome(self) -> Outcome:
        """What the ended process told; one that told nothing has failed."""
        self.process.join()
        with suppress(EOFError):
            if self._receiving.poll():
                told: Outcome = self._receiving.recv()
                return told
        note = f"its process ended with code {self.process.exitcode}; see {self.log}"
        return Outcome("failed", note, time.perf_counter() - self.began)


def _signal_group(process: SpawnProcess, number: int) -> None:
    pid = process.pid
    if pid is None:
        return
    with suppress(ProcessLookupError):
        # Not yet its own group: it has only just begun, and has started nobody.
        alone = not hasattr(os, "killpg") or os.getpgid(pid) != pid
        os.kill(pid, number) if alone else os.killpg(pid, number)


def _work(
    piece: Piece, directory: Path, settings: Settings, threads: int, log: Path, told: Connection
) -> None:
    """The process of one piece."""
    if hasattr(os, "setpgid"):
        # A group of its own: Ctrl-C reaches the one who started it alone, who then ends the group.
        # (A training run would take the interrupt for an order to finish early.)
        os.setpgid(0, 0)
    end_with_parent(group=hasattr(os, "setpgid"))
    torch.set_num_threads(threads)
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    with end_when_asked():
        try:
            told.send(run_piece(piece, directory, settings))
        finally:
            settle()
