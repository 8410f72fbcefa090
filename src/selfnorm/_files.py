"""Files: read where their size is known beforehand, replaced whole or not at all."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import BinaryIO

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


@contextmanager
def atomic(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A path beside ``path``: the file that the block writes there takes the place of the old one.

    The content is on disk before the rename. A kill or a full disk at any moment leaves the old
    file or the new one, and an exception in the block leaves the old one. Processes that write to
    one folder wait for one another.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "figures.txt"
        >>> with atomic(file) as part:
        ...     _ = part.write_text("1 2 3")
        >>> file.read_text(), [inside.name for inside in file.parent.iterdir()]
        ('1 2 3', ['figures.txt'])
    """
    path = Path(path)
    part = path.with_name(f".part-{path.name[-200:]}")
    with _only_writer(path.parent):
        try:
            yield part
            with part.open("rb+") as handle:
                os.fsync(handle.fileno())
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


@contextmanager
def _only_writer(path: Path) -> Iterator[None]:
    """Wait until nobody else writes to the folder, where the system has such locks."""
    if fcntl is None:
        yield
        return
    folder = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network disks have no locks
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
        with suppress(OSError):  # some folders cannot be flushed
            os.fsync(folder)
    finally:
        os.close(folder)


@contextmanager
def open_file(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """A file to read and its size; an ``OSError`` if it is a pipe or device, which may not end."""

    def opened(name: str, flags: int) -> int:
        return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))  # a pipe would be waited for

    with open(path, "rb", opener=opened) as handle:
        status = os.fstat(handle.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        yield handle, status.st_size
