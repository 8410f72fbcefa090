"""Rows in a file of numbers, for training on more of them than memory holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from io import FileIO
from pathlib import Path
from typing import overload

import numpy as np
import torch
from torch import Tensor

from selfnorm._context import seeded
from selfnorm.training.task import Source

BLOCK = 256  # rows that lie and are read together
BUFFER = 2**25  # bytes of the blocks whose rows are shuffled together


class StoredRows(Source):
    """Rows ``(n, *shape)`` of float32 in a file, read in blocks.

    An epoch is a random order of the blocks. Those of a buffer, some hundreds one after the other
    in that order, have their rows shuffled. So an epoch is a few numbers, which a checkpoint
    stores, and any place of it is found without going through what comes before.

    Args:
        path: the file.
        shape: of a row.
        name: what tells these rows from others, for checkpoints.
        sample: rows that stand for all, for checks and the closing step.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "rows"
        >>> np.arange(2048, dtype=np.float32).tofile(path)
        >>> source = StoredRows(path, (2,), "even and odd", (torch.zeros(5, 2),))
        >>> batches = source.batches(source.epoch(torch.device("cpu")), 64)
        >>> rows = torch.cat([source.take(batches[k])[0] for k in range(16)])
        >>> rows.shape, len(rows.unique())
        (torch.Size([1024, 2]), 2048)
    """

    def __init__(
        self, path: Path, shape: Sequence[int], name: str, sample: tuple[Tensor, ...]
    ) -> None:
        self.path, self.name, self.sample = path, name, sample
        width = int(np.prod(shape))
        self._row_bytes = 4 * width
        self.n_rows = path.stat().st_size // self._row_bytes
        self.block = min(BLOCK, self.n_rows)
        self.n_blocks = -(-self.n_rows // self.block)
        self.in_buffer = max(1, BUFFER // (self.block * self._row_bytes))
        slots = min(self.n_blocks, 2 * self.in_buffer + 2)
        self._blocks = torch.empty(slots, self.block, *shape)
        self._slot_of = np.full(self.n_blocks, -1)
        self._block_in = np.full(slots, -1)
        self._next = 0
        self._handle: FileIO | None = None

    def __len__(self) -> int:
        """Number of rows."""
        return self.n_rows

    def start_of(self, block: Tensor | np.ndarray) -> Tensor | np.ndarray:
        """Number of the first row of a block; the last one shares some with the one before it."""
        return (block * self.block).clip(max=self.n_rows - self.block)

    def take(self, rows: Tensor) -> tuple[Tensor, ...]:
        """These rows; blocks that are not in memory are read."""
        numbers = rows.cpu().numpy()
        block = np.minimum(numbers // self.block, self.n_blocks - 1)
        needed = np.unique(block)
        if len(needed) > len(self._block_in):
            return (torch.cat([self.take(half)[0] for half in rows.chunk(2)]),)
        for missing in needed[self._slot_of[needed] < 0].tolist():
            self._read(missing, needed)
        slots = torch.from_numpy(self._slot_of[block])
        within = torch.from_numpy(numbers - self.start_of(block))
        return (self._blocks[slots, within].to(rows.device),)

    def _read(self, block: int, needed: np.ndarray) -> None:
        """Put a block in place of the one that was read first, of those not needed."""
        while self._block_in[self._next] in needed:
            self._next = (self._next + 1) % len(self._block_in)
        slot, self._next = self._next, (self._next + 1) % len(self._block_in)
        if self._block_in[slot] >= 0:
            self._slot_of[self._block_in[slot]] = -1
        if self._handle is None:
            self._handle = FileIO(self.path)
        self._handle.seek(int(self.start_of(np.array(block))) * self._row_bytes)
        self._handle.readinto(self._blocks[slot].numpy().view(np.uint8).data)
        self._block_in[slot], self._slot_of[block] = block, slot

    def close(self) -> None:
        """Let go of the file."""
        if self._handle is not None:
            self._handle.close()
            self._handle = None

    def fingerprint(self) -> str:
        """The name, and the number of rows."""
        return f"{self.name} {self.n_rows}"

    def preview(self, device: torch.device) -> tuple[Tensor, ...]:
        """The sample."""
        return tuple(rows.to(device) for rows in self.sample)

    def epoch(self, device: torch.device) -> Tensor:
        """The order of the blocks, and a seed for the shuffles of the buffers."""
        order = torch.randperm(self.n_blocks)
        return torch.cat([order, torch.randint(2**62, (1,))]).to(device)

    def batches(self, epoch: Tensor, size: int, rank: int = 0, world: int = 1) -> Sequence[Tensor]:
        """Row numbers of the mini-batches, made when they are asked for."""
        return _Batches(self, epoch, size, rank, world)


class _Batches(Sequence[Tensor]):
    """The batches of an epoch of stored rows, by their place."""

    def __init__(self, source: StoredRows, epoch: Tensor, size: int, rank: int, world: int) -> None:
        self.source, self.device, self.size = source, epoch.device, size
        self.order, self.seed = epoch[:-1].cpu(), int(epoch[-1])
        self.rank, self.world = rank, world
        self._shuffled: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return max(1, len(self.source) // self.size)

    def __iter__(self) -> Iterator[Tensor]:
        return (self[k] for k in range(len(self)))

    @overload
    def __getitem__(self, k: int) -> Tensor: ...
    @overload
    def __getitem__(self, k: slice) -> Sequence[Tensor]: ...
    def __getitem__(self, k: int | slice) -> Tensor | Sequence[Tensor]:
        if isinstance(k, slice):
            return [self[j] for j in range(len(self))[k]]
        places = torch.arange(k * self.size, (k + 1) * self.size)[self.rank :: self.world]
        in_buffer = self.source.in_buffer * self.source.block
        buffers = places // in_buffer
        pieces = [
            self._rows_of(int(buffer))[places[buffers == buffer] % in_buffer]
            for buffer in buffers.unique()
        ]
        return torch.cat(pieces).to(self.device)

    def _rows_of(self, buffer: int) -> Tensor:
        """Row numbers of a buffer, shuffled; those of two are kept."""
        if buffer not in self._shuffled:
            while len(self._shuffled) > 1:
                del self._shuffled[next(iter(self._shuffled))]
            n = self.source.in_buffer
            first = self.source.start_of(self.order[buffer * n : (buffer + 1) * n])
            rows = (torch.as_tensor(first)[:, None] + torch.arange(self.source.block)).flatten()
            with seeded((self.seed + buffer) % 2**62):
                self._shuffled[buffer] = rows[torch.randperm(len(rows))]
        return self._shuffled[buffer]
