"""A table in files as training sees it: rows that stand for all, and all of them in a file."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from selfnorm._files import atomic
from selfnorm.columns import CodedColumns, Scan, Schema, Shards, hashed
from selfnorm.density import Ranks
from selfnorm.errors import DataError
from selfnorm.tables.streaming import warnings_at_end
from selfnorm.training import StoredRows

PREVIEWED = 10_000  # rows for checks and the closing step
BYTES_PER_PART = 16  # of a packed row


@dataclass(frozen=True)
class Streamed:
    """All rows of a table, of which a scan kept some.

    Attributes:
        shards: where they are.
        schema: what they are.
        scan: those that were kept.
        verbose: whether to say where the packed rows are.
    """

    shards: Shards
    schema: Schema
    scan: Scan
    verbose: bool = False

    def __len__(self) -> int:
        return self.scan.n_rows

    def held_out(self, share: float) -> Tensor:
        """Which of the rows that were kept are held out: a share of all, by their numbers."""
        return torch.from_numpy(hashed(self.scan.numbers) < share)

    @property
    def fingerprint(self) -> str:
        """Of files and schema."""
        stamps = [shard.stamp for shard in self.shards.shards]
        text = json.dumps([stamps, self.schema.to_dict()], default=repr)
        return hashlib.sha256(text.encode()).hexdigest()

    @contextmanager
    def stored(
        self,
        columns: CodedColumns,
        share: float,
        preview: Tensor,
        checkpoint: Any,
        ranks: Ranks | None = None,
    ) -> Iterator[StoredRows]:
        """All rows that are not held out, packed, in a file; it is removed afterwards.

        Beside a ``checkpoint`` it stays until the run is done, and a run that goes on finds it
        there; else it is in a temporary folder. Of several ranks the first one writes it, on a
        disk that all of them read.
        """
        first = ranks is None or ranks.fabric.is_global_zero
        name = f"{self.fingerprint} {share}"
        shape = columns.dim, 4
        with tempfile.TemporaryDirectory(prefix="selfnorm-") as folder:
            path = Path(folder) / "rows"
            if checkpoint is not None:
                short = hashlib.sha256(name.encode()).hexdigest()[:12]
                path = Path(f"{os.fspath(checkpoint)}.{short}.rows")
                path.parent.mkdir(parents=True, exist_ok=True)
            path = path if ranks is None else ranks.fabric.broadcast(path)
            if first and not path.exists():
                self._write(path, columns, share)
            if ranks is not None:
                ranks.fabric.barrier()
            source = StoredRows(path, shape, name, (preview[:PREVIEWED],))
            try:
                yield source
            finally:
                source.close()
            if ranks is not None:
                ranks.fabric.barrier()
        if first:
            path.unlink(missing_ok=True)

    def _write(self, path: Path, columns: CodedColumns, share: float) -> None:
        """Code and pack all rows but those held out, some at a time."""
        import pyarrow as pa

        need, free = len(self) * columns.dim * BYTES_PER_PART, shutil.disk_usage(path.parent).free
        where = f"{path.parent} (a folder for temporary files: set TMPDIR, or name a checkpoint)"
        if need > free:
            raise DataError(
                f"the packed rows take {need / 2**30:.3g} GiB of disk, and {free / 2**30:.3g} GiB "
                f"are free in {where}"
            )
        if self.verbose:
            print(f"packed rows: {need / 2**30:.3g} GiB in {path.parent}, removed after the fit")
        first = 0
        try:
            with warnings_at_end(), atomic(path) as part, part.open("wb") as handle:
                for batch in self.shards.batches():
                    kept = hashed(np.arange(first, first + batch.num_rows)) >= share
                    first += batch.num_rows
                    x, _ = self.schema.encode(pa.Table.from_batches([batch]))
                    packed, _ = columns.pack(torch.from_numpy(x[kept]))
                    handle.write(packed.float().numpy().tobytes())
        except OSError as error:
            raise DataError(f"cannot write to {where}: {error.strerror}") from error
