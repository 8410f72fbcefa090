"""Tables of more rows than memory: Parquet and Arrow files, a file or some rows at a time.

A :class:`Shards` is what a path, a glob, a folder or a ``pyarrow.dataset.Dataset`` names. Its
shards, one for each file, have the same columns of the same types, which is checked before rows
are read.
"""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, TypeAlias

from selfnorm.errors import DataError, listed, optional

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.dataset as ds

# what names a table that is not in memory
SourceLike: TypeAlias = "str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | ds.Dataset"
ROWS = 2**15  # read at a time
FORMATS = {".parquet": "parquet", ".pq": "parquet"}
FORMATS |= dict.fromkeys((".arrow", ".feather", ".ipc"), "ipc")


@dataclass(frozen=True)
class Shard:
    """One file of a table, or a part of a data set.

    Attributes:
        name: its path, or what an error calls it.
        fragment: of a data set.
        n_rows: their number.
    """

    name: str
    fragment: ds.Fragment
    n_rows: int

    def batches(self, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Its rows, some at a time, in their order."""
        columns = None if columns is None else list(columns)
        batches = self.fragment.to_batches(
            columns=columns, batch_size=ROWS, batch_readahead=1, fragment_readahead=1
        )
        n = 0
        with _named(self.name):
            for batch in batches:
                n += batch.num_rows
                if batch.num_rows:
                    yield batch
        if n != self.n_rows:
            raise DataError(f"{self.name} has {n} rows, not the {self.n_rows} that it began with")

    @property
    def stamp(self) -> tuple[str, int, int, int]:
        """Name, rows, size and time of change: by which a file is known again."""
        path = Path(self.name)
        status = path.stat() if path.is_file() else None
        size, time = (0, 0) if status is None else (status.st_size, status.st_mtime_ns)
        return path.name, self.n_rows, size, time


@dataclass(frozen=True)
class Shards:
    """A table in shards of equal columns.

    Example:
        >>> import tempfile
        >>> import pyarrow as pa, pyarrow.parquet as pq
        >>> folder = Path(tempfile.mkdtemp())
        >>> for k in range(2):
        ...     pq.write_table(pa.table({"a": [k, 2.5]}), folder / f"{k}.parquet")
        >>> shards = Shards.of(folder / "*.parquet")
        >>> shards.n_rows, [batch.num_rows for batch in shards.batches()]
        (4, [2, 2])
    """

    shards: tuple[Shard, ...]
    schema: pa.Schema

    @classmethod
    def of(cls, source: SourceLike | Shards) -> Shards:
        """Look at all files, without reading rows; what does not fit is refused by its name."""
        if isinstance(source, Shards):
            return source
        arrow = _dataset_module()
        if isinstance(source, arrow.Dataset):
            fragments = [(_name_of(f, k), f) for k, f in enumerate(source.get_fragments())]
        else:
            fragments = [(str(path), _opened(arrow, path)) for path in files_of(source)]
        shards, schema, first = [], None, ""
        for name, fragment in fragments:
            with _named(name):
                own, n_rows = fragment.physical_schema, fragment.count_rows()
            if schema is None:
                schema, first = own, name
            _check_alike(name, own, first, schema)
            shards.append(Shard(name, fragment, n_rows))
        if schema is None or not any(shard.n_rows for shard in shards):
            raise DataError(f"{_shown(source)}: there are no rows")
        return cls(tuple(shards), schema)

    @cached_property
    def n_rows(self) -> int:
        """Of all shards."""
        return sum(shard.n_rows for shard in self.shards)

    @property
    def names(self) -> list[str]:
        """Of the columns."""
        return list(self.schema.names)

    def select(self, names: Sequence[str]) -> Shards:
        """The same rows with some of the columns."""
        import pyarrow as pa

        schema = pa.schema([self.schema.field(name) for name in names])
        return Shards(self.shards, schema)

    def table(self) -> pa.Table:
        """All rows at once."""
        import pyarrow as pa

        return pa.Table.from_batches(self.batches())

    def batches(self) -> Iterator[pa.RecordBatch]:
        """All rows, some at a time, in their order."""
        for shard in self.shards:
            yield from shard.batches(self.names)


def is_source(value: object) -> bool:
    """Whether a value names a table that is not in memory, as :meth:`Shards.of` takes it."""
    if isinstance(value, str | os.PathLike | Shards):
        return True
    if isinstance(value, list | tuple) and value:
        return all(isinstance(item, str | os.PathLike) for item in value)
    return type(value).__module__.startswith("pyarrow._dataset")


def files_of(source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[Path]:
    """The files of a path, a folder or a glob, in the order of their names; or of several."""
    if isinstance(source, list | tuple):
        files = [path for one in source for path in files_of(one)]
        twice = [str(path) for path, count in Counter(files).items() if count > 1]
        if twice:
            raise DataError(f"{listed(twice)} would be read twice: name it once")
        return files
    assert isinstance(source, str | os.PathLike)
    path, text = Path(source), os.fspath(source)
    if path.is_dir():
        inside = sorted(p for p in path.iterdir() if p.suffix.lower() in FORMATS)
        inside = [p for p in inside if not p.name.startswith((".", "_"))]
        if not inside:
            raise DataError(f"{path}: the folder holds no file of {listed(FORMATS)}")
        return inside
    if not path.exists() and glob.has_magic(text):
        matches = sorted(map(Path, glob.glob(text, recursive=True)))
        matches = [p for p in matches if p.is_file()]
        if not matches:
            raise DataError(f"{text}: no file has such a name")
        return matches
    if not path.exists():
        raise DataError(f"{path}: no such file")
    return [path]


def _opened(arrow: ModuleType, path: Path) -> ds.Fragment:
    """The one fragment of a file."""
    if path.suffix.lower() not in FORMATS:
        raise DataError(
            f"{path}: tables of more rows than memory are read from files of {listed(FORMATS)}; "
            "turn text into Parquet once: polars.scan_csv('t.csv').sink_parquet('t.parquet')"
        )
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty: it holds no table")
    with _named(str(path)):
        dataset = arrow.dataset(path, format=FORMATS[path.suffix.lower()])
        (fragment,) = dataset.get_fragments()
    return fragment


def _name_of(fragment: ds.Fragment, place: int) -> str:
    """The path of a fragment of a data set, or its place."""
    return str(getattr(fragment, "path", "") or f"part {place}")


def _check_alike(name: str, own: pa.Schema, first: str, schema: pa.Schema) -> None:
    """Refuse columns that are not those of the first file."""
    if own.names != schema.names:
        odd = [n for n in own.names if n not in schema.names]
        odd += [n for n in schema.names if n not in own.names]
        what = f"differ in {listed(odd)}" if odd else "come in another order"
        raise DataError(f"{name}: its columns {what} from those of {first}; write them alike")
    for ours, theirs in zip(own, schema, strict=True):
        if ours.type != theirs.type:
            raise DataError(
                f"{name}: column {ours.name!r} is {ours.type}, in {first} it is {theirs.type}; "
                "write it as one type"
            )


@contextmanager
def _named(name: str) -> Iterator[None]:
    """What Arrow says of a file that cannot be read, with the name of the file."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise DataError(f"{name} cannot be read: {first}") from error


def _shown(source: object) -> str:
    return str(source) if isinstance(source, str | os.PathLike) else "the source"


def _dataset_module() -> ModuleType:
    words = 'Parquet and Arrow files need pyarrow: pip install "selfnorm[frames]"'
    return optional("pyarrow.dataset", words)
