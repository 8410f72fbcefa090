"""Arrow tables in, Arrow tables out: more rows than memory, one file of results for each of input.

A file of results appears whole, under its own name, when all of its rows are there. It says which
model, input and options made it, so that the same call goes on after a kill with the files that
are missing, and refuses those that something else made.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from tqdm.auto import tqdm

from selfnorm._files import atomic
from selfnorm.columns import FORMATS, Shards, SourceLike, Table
from selfnorm.errors import DataError, SelfnormWarning

if TYPE_CHECKING:
    import pyarrow as pa

# a folder, a file of Parquet, or what takes one Arrow table after the other
Sink: TypeAlias = "str | Path | Callable[[pa.Table], object]"
MADE_BY = b"selfnorm"  # of the metadata of a file of results
SHOWN = 5  # warnings of batches, at the end
DRAWN_ROWS, SAMPLES_PER_FILE = 2**15, 2**20  # at a time, and in a file


@dataclass(frozen=True)
class Piece:
    """What one file of results is made of.

    Attributes:
        name: of the file, without a folder.
        n_rows: how many there will be.
        key: by which it is known again, plain JSON.
        tables: its rows, some at a time, when they are needed.
    """

    name: str
    n_rows: int
    key: dict[str, Any]
    tables: Callable[[], Iterable[pa.Table]]


def pieces_of(
    source: SourceLike, key: dict[str, Any], function: Callable[[pa.Table, int], pa.Table]
) -> Iterator[Piece]:
    """A piece for each shard: ``function`` of its rows, and of the number of its first row."""
    import pyarrow as pa

    shards, first = Shards.of(source), 0
    names: dict[str, str] = {}
    for shard in shards.shards:
        stem = Path(shard.name).name
        stem = Path(stem).stem if Path(stem).suffix.lower() in FORMATS else stem
        if shard.n_rows == 0:  # as engines write them: of no results
            continue
        if stem in names:
            raise DataError(f"{names[stem]} and {shard.name} would be one file of results")
        names[stem] = shard.name

        def tables(shard: Any = shard, first: int = first) -> Iterator[pa.Table]:
            for batch in shard.batches():
                yield function(pa.Table.from_batches([batch]), first)
                first += batch.num_rows

        yield Piece(f"{stem}.parquet", shard.n_rows, key | {"input": list(shard.stamp)}, tables)
        first += shard.n_rows


def write(pieces: Iterable[Piece], sink: Sink, progress: bool) -> dict[str, Any]:
    """Write pieces that are not there yet: numbers of ``rows`` and of ``files`` that were written,
    and of those ``kept``.
    """
    pieces = list(pieces)
    report: dict[str, Any] = {"rows": sum(piece.n_rows for piece in pieces), "files": 0, "kept": 0}
    one_file = isinstance(sink, str | Path) and Path(sink).suffix.lower() in FORMATS
    if isinstance(sink, str | Path):
        if one_file and len(pieces) > 1:
            raise DataError(f"{sink} is one file, and there are {len(pieces)}: name a folder")
        folder = Path(sink).parent if one_file else Path(sink)
        if folder.exists() and not folder.is_dir():
            raise DataError(f"{folder} is a file; name a folder")
        folder.mkdir(parents=True, exist_ok=True)
    bar = tqdm(
        total=report["rows"], disable=None if progress else True, unit="row", unit_scale=True
    )
    with bar, warnings_at_end():
        for piece in pieces:
            if not isinstance(sink, str | Path):
                for table in piece.tables():
                    sink(table)
                    bar.update(table.num_rows)
                continue
            path = Path(sink) if one_file else folder / piece.name
            if _is_made(path, piece.key):
                report["kept"] += 1
                bar.update(piece.n_rows)
                continue
            _write_piece(piece, path, bar.update)
            report["files"] += 1
    return report


def _is_made(path: Path, key: dict[str, Any]) -> bool:
    """Whether a file of results is there; one that something else made is refused."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    if not path.exists():
        return False
    try:
        made_by = json.loads((parquet.read_schema(path).metadata or {})[MADE_BY])
    except (pa.ArrowException, OSError, KeyError, ValueError):
        made_by = None
    if made_by != key:
        raise DataError(
            f"{path} is of another input, model or options; name another folder, or delete it"
        )
    return True


def _write_piece(piece: Piece, path: Path, count: Callable[[int], object]) -> None:
    """Write one file, whole or not at all."""
    import pyarrow.parquet as parquet

    writer = None
    try:
        with atomic(path) as part:
            try:
                for table in piece.tables():
                    if writer is None:
                        metadata = (table.schema.metadata or {}) | {MADE_BY: json.dumps(piece.key)}
                        schema = table.schema.with_metadata(metadata)
                        writer = parquet.ParquetWriter(part, schema)
                    writer.write_table(table.cast(schema))
                    count(table.num_rows)
            finally:
                if writer is not None:
                    writer.close()
    except OSError as error:
        raise DataError(
            f"cannot write {path}: {error.strerror or error}; what is finished is kept, and the "
            "same call goes on from there"
        ) from error


@contextmanager
def warnings_at_end() -> Iterator[None]:
    """The first few warnings of many batches, when all are done."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SelfnormWarning)
        yield
    words = list(dict.fromkeys(str(w.message) for w in caught))
    for text in words[:SHOWN]:
        warnings.warn(text, SelfnormWarning, stacklevel=4)
    if len(words) > SHOWN:
        warnings.warn(f"and {len(words) - SHOWN} more like these", SelfnormWarning, stacklevel=4)


def arrow_table(frame: Any) -> pa.Table:
    """Any table as an Arrow table."""
    import pyarrow as pa

    table = Table.of(frame)
    if table.kind == "arrow":
        return table.frame if isinstance(table.frame, pa.Table) else pa.table(table.frame)
    if table.kind == "pandas":
        return pa.Table.from_pandas(table.frame, preserve_index=False)
    if table.kind == "polars":
        return table.frame.to_arrow()
    columns = {str(name): np.asarray(column) for name, column in table.columns.items()}
    return pa.table({n: pa.array(column, from_pandas=True) for n, column in columns.items()})


def with_columns(table: pa.Table, columns: dict[str, np.ndarray]) -> pa.Table:
    """An Arrow table with further columns."""
    for name, column in columns.items():
        if name in table.column_names:
            raise DataError(f"there is a column {name!r} already; rename it first")
        table = table.append_column(name, [column])
    return table
