"""How processes end: with the one that started them, and gently when asked to.

A process that shares a GPU through NVIDIA's multi-process service must not vanish while its kernels
run: that can take the other clients along. So a request to end (SIGTERM) becomes an exception, and
the GPU's work is waited for on the way out.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from types import FrameType

import torch

__all__ = ["GRACE", "end_when_asked", "end_with_parent", "settle"]

GRACE = 20.0  # seconds a process has to end when asked to: several leave one busy GPU
_ORPHAN_GRACE = 5.0  # seconds of one whose parent was killed


@contextmanager
def end_when_asked() -> Iterator[None]:
    """Within, SIGTERM raises ``SystemExit``, so that ``finally`` clauses run.

    Unlike Ctrl-C it is no order to a training run to finish early. Signals are the main thread's;
    in any other nothing changes.

    Example:
        >>> try:
        ...     with end_when_asked():
        ...         os.kill(os.getpid(), signal.SIGTERM)
        ...         time.sleep(5)
        ... except SystemExit as ended:
        ...     print(ended.code)
        143
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _leave(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second one would interrupt the cleaning up
    raise SystemExit(128 + number)


def settle() -> None:
    """Wait for the GPU's work of this process, if there is any."""
    if torch.cuda.is_initialized():
        with suppress(RuntimeError):  # it ends anyway
            torch.cuda.synchronize()


def end_with_parent(group: bool = False) -> None:
    """Watch the process that started this one, and end (``group``: with its group) after it.

    Two processes must not write one table: nobody goes on after a kill of the parent.
    """
    threading.Thread(target=_watch, args=(group,), daemon=True).start()


def _watch(group: bool) -> None:
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    wait([parent.sentinel])
    _signal(signal.SIGTERM, group)
    time.sleep(_ORPHAN_GRACE)
    if hasattr(signal, "SIGKILL"):
        _signal(signal.SIGKILL, group)
    os._exit(1)


def _signal(number: int, group: bool) -> None:
    if group and hasattr(os, "killpg"):
        os.killpg(os.getpgrp(), number)
    else:
        os.kill(os.getpid(), number)
