"""Work beside the main line of a CUDA graph.

The kernels of a small network leave most of a GPU idle, and a captured graph runs what does not
depend on one another at the same time. While a graph is captured, :class:`SideStream` puts work on
a branch of it; everywhere else (CPU, steps that are not captured) the work runs in line.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["SideStream"]

_STREAMS: dict[tuple[int, int], torch.cuda.Stream] = {}  # one of each number per device


class SideStream:
    """A branch of the graph that is being captured, or nothing.

    What is used on the branch must be kept alive until :meth:`join`: the allocator knows of the
    main line alone.

    Args:
        device: where the work runs.
        number: branches of different numbers run at the same time.

    Example:
        >>> side = SideStream(torch.device("cpu"))
        >>> with side.branch():     # starts after all that was launched before
        ...     total = torch.ones(3).sum()
        >>> side.join()             # from here on the result may be used
        >>> float(total)
        3.0
    """

    def __init__(self, device: torch.device, number: int = 0) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._forked = False
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            key = (torch.cuda.current_device() if device.index is None else device.index, number)
            if key not in _STREAMS:
                _STREAMS[key] = torch.cuda.Stream(device)
            self._stream = _STREAMS[key]

    @contextmanager
    def branch(self, *kept: Tensor) -> Iterator[None]:
        """Launch the block beside what follows, after what the main line has launched so far.

        The memory of ``kept`` is given to no one else while the graph is captured. Needed for what
        the block reads where its gradient runs on the branch as well, after :meth:`join`.
        """
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        self._forked = True
        for tensor in kept:
            tensor.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Let the main line wait for the branch."""
        if self._stream is not None and self._forked:
            torch.cuda.current_stream().wait_stream(self._stream)
            self._forked = False
