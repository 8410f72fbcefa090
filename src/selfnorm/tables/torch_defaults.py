"""Shield the library from torch's global defaults."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

__all__ = ["float32_on_cpu", "one_thread"]


@contextmanager
def float32_on_cpu() -> Iterator[None]:
    """Build modules in float32 on the CPU, whatever the caller's default dtype and device are.

    A model loaded by a program that works in float64, or on a GPU by default, must be the model
    that was saved.

    >>> torch.set_default_dtype(torch.float64)
    >>> with float32_on_cpu():
    ...     torch.zeros(1).dtype
    torch.float32
    >>> torch.get_default_dtype()
    torch.float64
    >>> torch.set_default_dtype(torch.float32)
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        # only where needed: a device context makes every torch call slower
        with nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread for torch's own work within the block.

    Steps on small matrices gain nothing by a second thread, and lose a great deal on a busy machine
    where threads wait for one another.

    >>> before = torch.get_num_threads()
    >>> with one_thread():
    ...     torch.get_num_threads()
    1
    >>> torch.get_num_threads() == before
    True
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
