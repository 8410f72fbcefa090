"""Reading images: from a folder or a zip, from h5 and npz; every failure names the file."""

from __future__ import annotations

import importlib
import io
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from selfnorm.errors import DataError, MissingDataError

__all__ = ["ImageFolder", "check_images", "check_labels", "decode", "read_h5", "read_npz"]


class ImageFolder:
    """The files of a folder or a zip, by name (without the folders above them).

    >>> import tempfile, pathlib
    >>> place = pathlib.Path(tempfile.mkdtemp()); _ = (place / "1_0.jpg").write_bytes(b"x")
    >>> ImageFolder(place).names(".jpg")
    ['1_0.jpg']
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._zip: zipfile.ZipFile | None = None
        if self.path.is_dir():
            found = [(p.name, p) for p in sorted(self.path.rglob("*")) if p.is_file()]
            self._where: dict[str, Any] = self._by_name(found)
            return
        if not self.path.exists():
            raise MissingDataError(f"{self.path} does not exist")
        try:
            self._zip = zipfile.ZipFile(self.path)
        except (zipfile.BadZipFile, OSError) as error:
            raise DataError(f"{self.path} is neither a folder nor a zip: {error}") from error
        names = [n for n in self._zip.namelist() if not n.endswith("/")]
        self._where = self._by_name([(Path(n).name, n) for n in names if "__MACOSX" not in n])

    def _by_name(self, found: list[tuple[str, Any]]) -> dict[str, Any]:
        """Hidden files are left out; a name in two folders would hide one of the images."""
        where: dict[str, Any] = {}
        for name, place in found:
            if name.startswith("."):
                continue
            if name in where:
                raise DataError(f"{self.shown(name)} is there twice: {where[name]} and {place}")
            where[name] = place
        return where

    def names(self, *suffixes: str) -> list[str]:
        """File names with one of these endings, in order."""
        return sorted(n for n in self._where if n.lower().endswith(suffixes))

    def shown(self, name: str) -> str:
        """How to call a file in a message."""
        return f"{self.path}: {name}"

    def read(self, name: str) -> bytes:
        """The bytes of a file."""
        if name not in self._where:
            raise DataError(f"{self.shown(name)} is missing")
        try:
            if self._zip is not None:
                return self._zip.read(self._where[name])
            return Path(self._where[name]).read_bytes()
        except (zipfile.BadZipFile, OSError, EOFError) as error:
            raise DataError(f"{self.shown(name)} cannot be read: {error}") from error

    def image(self, name: str) -> np.ndarray:
        """The image of that name, ``(h, w, 3)`` bytes."""
        return decode(self.read(name), self.shown(name))


def decode(content: bytes, name: str) -> np.ndarray:
    """A jpg or png as ``(h, w, 3)`` bytes, by pillow, or by torchvision where that is missing."""
    pillow = _optional("PIL.Image")
    if pillow is not None:
        try:
            with pillow.open(io.BytesIO(content)) as image:
                return np.asarray(image.convert("RGB"))
        except (OSError, SyntaxError, ValueError) as error:
            raise DataError(f"{name} is not a readable image: {error}") from error
    vision = _optional("torchvision.io")
    if vision is None:
        raise DataError("reading images needs pillow: pip install 'selfnorm[data]'")
    import torch

    try:
        raw = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        return vision.decode_image(raw, mode="RGB").permute(1, 2, 0).numpy()
    except (RuntimeError, ValueError) as error:
        raise DataError(f"{name} is not a readable image: {error}") from error


def _optional(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except (ImportError, RuntimeError, OSError):
        return None


def read_h5(path: Path, *keys: str) -> list[np.ndarray]:
    """Arrays of an h5 file by their names."""
    h5py = _optional("h5py")
    if h5py is None:
        raise DataError("reading h5 files needs h5py: pip install 'selfnorm[data]'")
    with _named(path), h5py.File(path, "r") as file:
        missing = [k for k in keys if k not in file]
        if missing:
            raise DataError(f"{path} has no {missing[0]!r}; it holds {sorted(file)}")
        return [np.asarray(file[k]) for k in keys]


def read_npz(path: Path, *keys: str) -> list[np.ndarray]:
    """Arrays of an npz file by their names; nothing in it is ever unpickled."""
    with _named(path), np.load(path, allow_pickle=False) as file:
        missing = [k for k in keys if k not in file]
        if missing:
            raise DataError(f"{path} has no {missing[0]!r}; it holds {sorted(file)}")
        return [file[k] for k in keys]


@contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except DataError:
        raise
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def check_images(images: np.ndarray, labels: np.ndarray, source: str) -> np.ndarray:
    """Images as ``(n, c, h, w)`` bytes, as many as there are labels."""
    if images.ndim != 4 or images.dtype != np.uint8 or len(images) != len(labels):
        raise DataError(
            f"{source}: expected bytes of shape (n, c, h, w) and n labels, got {images.dtype} "
            f"{images.shape} and {len(labels)} labels"
        )
    if images.shape[1] not in (1, 3) and images.shape[-1] in (1, 3):
        images = images.transpose(0, 3, 1, 2)
    if images.shape[1] not in (1, 3):
        raise DataError(f"{source}: images must have 1 or 3 channels, got shape {images.shape}")
    return np.ascontiguousarray(images)


def check_labels(labels: np.ndarray, low: float, high: float, source: str) -> np.ndarray:
    """Labels ``(n, d)`` within ``[low, high]``; ``source`` names where they come from."""
    labels = np.asarray(labels, dtype=np.float64)
    labels = labels[:, None] if labels.ndim == 1 else labels
    bad = ~(np.isfinite(labels) & (labels >= low) & (labels <= high)).all(1)
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        raise DataError(
            f"{source}: the label of image {row} is {labels[row].tolist()}, outside "
            f"[{low:g}, {high:g}]"
        )
    return labels
