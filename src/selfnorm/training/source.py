"""Where the rows of a run come from.

The engine knows rows by their numbers. It asks a :class:`Source` for the order of an epoch, for the
row numbers of its mini-batches and for the rows themselves. Tensors in memory are a
:class:`TensorSource`; models that train side by side go through rows of their own, which is a
:class:`MemberSource`; data larger than memory need a source of three methods:

>>> class Squares(Source):
...     def __len__(self) -> int:
...         return 4
...     def take(self, rows: Tensor) -> tuple[Tensor, ...]:
...         return (rows.square(),)
...     def fingerprint(self) -> str:
...         return "squares"
>>> source = Squares()
>>> epoch = torch.tensor([2, 0, 3, 1])
>>> [source.take(rows)[0].tolist() for rows in source.batches(epoch, 2)]
[[4, 0], [9, 1]]
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from selfnorm._inputs import as_tensors

_PREVIEW = 10_000  # rows that a task sees of data that are not in memory


class Source(ABC):
    """Rows by their numbers, ``0`` to ``len(source) - 1``.

    Attributes:
        capturable: :meth:`take` asks nothing of the host, so that a step may be captured as a CUDA
            graph.
    """

    capturable: bool = False

    @abstractmethod
    def __len__(self) -> int:
        """Number of rows."""

    @abstractmethod
    def take(self, rows: Tensor) -> tuple[Tensor, ...]:
        """A mini-batch: the rows of these numbers ``(B,)``, on the device of the numbers."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Hash of the data: a run is resumed only on the data it began with."""

    def preview(self, device: torch.device) -> tuple[Tensor, ...]:
        """Rows for a task's checks, validation and closing step: all of those in memory."""
        return self.take(torch.arange(min(len(self), _PREVIEW), device=device))

    def epoch(self, device: torch.device) -> Tensor:
        """Row numbers in the order of a new epoch, from torch's global generator.

        Checkpoints store them.
        """
        return torch.randperm(len(self), device=device)

    def batches(self, epoch: Tensor, size: int, rank: int = 0, world: int = 1) -> Tensor:
        """Row numbers ``(steps, size / world)`` of the mini-batches that one of ``world`` ranks
        takes; rows at the end of an epoch that fill no batch are left out.
        """
        steps = max(1, len(epoch) // size)
        return epoch[: steps * size].view(steps, -1)[:, rank::world]


class TensorSource(Source):
    """Tensors with one first dimension, on the device of the model."""

    capturable = True

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.tensors[0])

    def take(self, rows: Tensor) -> tuple[Tensor, ...]:
        """These rows of every tensor."""
        return tuple(tensor.index_select(0, rows) for tensor in self.tensors)

    def fingerprint(self) -> str:
        """Of the tensors."""
        return fingerprint(self.tensors)

    def preview(self, device: torch.device) -> tuple[Tensor, ...]:
        """All rows."""
        return tuple(tensor.to(device) for tensor in self.tensors)


class MemberSource(Source):
    """Rows for members that train side by side: each goes through rows and in an order of its own.

    Args:
        tensors: ``(n, ...)`` that the members share, or ``(K, n, ...)``, a table for each of them.
        rows: ``(len, K)``; column ``k`` are the row numbers that member ``k`` goes through.
        shared: whether the tables are shared.
    """

    capturable = True

    def __init__(self, tensors: tuple[Tensor, ...], rows: Tensor, *, shared: bool = True) -> None:
        self.tensors, self.rows, self.shared = tensors, rows, shared
        self._member = torch.arange(rows.shape[1], device=rows.device)[:, None]

    def __len__(self) -> int:
        """Length of the members' lists."""
        return len(self.rows)

    def take(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Rows ``(K, B, ...)`` at places ``(B,)`` of the members' lists."""
        numbers = self.rows.index_select(0, rows).T
        if self.shared:
            return tuple(tensor[numbers] for tensor in self.tensors)
        return tuple(tensor[self._member, numbers] for tensor in self.tensors)

    def fingerprint(self) -> str:
        """Of the tables and of the members' rows."""
        return fingerprint((self.rows, *self.tensors))


def as_source(data: Source | Sequence[Tensor], name: str, device: torch.device) -> Source:
    """Data as a source; tensors and arrays are moved to the device."""
    return data if isinstance(data, Source) else TensorSource(as_tensors(tuple(data), name, device))


def fingerprint(tensors: Sequence[Tensor]) -> str:
    """Hash of shapes, types and numbers of tensors."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(str((tuple(tensor.shape), tensor.dtype)).encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
