"""Work as a CUDA graph that keeps alive what it reads and writes: a graph holds addresses only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Captured:
    """A CUDA graph and everything its kernels read and write, which must outlive it."""

    def __init__(self, graph: torch.cuda.CUDAGraph, *owners: Any) -> None:
        self.graph, self.owners = graph, owners

    def __call__(self) -> None:
        self.graph.replay()


def captured(work: Callable[[], None], *owners: Any) -> Captured:
    """``work`` as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(4):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return Captured(graph, work, *owners)
