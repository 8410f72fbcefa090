"""Pieces side by side, each in a process of its own that ends with the one that started it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

import torch

from selfnorm.experiments.pieces import Outcome, Piece, Settings, run_piece

__all__ = ["LOG", "run_in_processes"]

LOG = "log.txt"  # in the piece's folder: warnings, and the traceback of a failure
_LOOK_EVERY = 2.0  # seconds
_GRACE = 5.0  # seconds a process has to end when asked to


def run_in_processes(
    pieces: Sequence[Piece],
    directory: Path,
    settings: Settings,
    side_by_side: int,
    look: Callable[[set[str]], None],
) -> Generator[tuple[Piece, Outcome], None, None]:
    """Yield every piece with its outcome as it ends; ``look`` is told now and then which are on.

    Whatever ends this generator early (Ctrl-C, an error, ``close``) ends all pieces: what they have
    finished is on disk, and the next call goes on from there.
    """
    waiting = sorted(pieces, key=lambda piece: piece.long)
    running: list[_Running] = []
    threads = max(1, min(torch.get_num_threads(), (os.cpu_count() or 1) // side_by_side))
    try:
        while waiting or running:
            while waiting and len(running) < side_by_side:
                if waiting[0].long and any(not one.piece.long for one in running):
                    break
                running.append(_Running(waiting.pop(0), directory, settings, threads))
            look({one.piece.name for one in running})
            wait([one.process.sentinel for one in running], timeout=_LOOK_EVERY)
            for one in [one for one in running if not one.process.is_alive()]:
                running.remove(one)
                yield one.piece, one.outcome()
    finally:
        for one in running:
            one.stop()


class _Running:
    """A piece in progress."""

    def __init__(self, piece: Piece, directory: Path, settings: Settings, threads: int) -> None:
        self.piece = piece
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

    def stop(self) -> None:
        """End the process and those it has started."""
        _signal_group(self.process, signal.SIGTERM)
        self.process.join(_GRACE)
        if self.process.is_alive():
            _signal_group(self.process, getattr(signal, "SIGKILL", signal.SIGTERM))
            self.process.join()


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
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    told.send(run_piece(piece, directory, settings))


def _end_with_parent() -> None:
    """Two processes must not write one table: nobody goes on after a kill of the parent."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    wait([parent.sentinel])
    if hasattr(os, "killpg"):
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)
