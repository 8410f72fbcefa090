"""Sets of images in their official files; faults name the file.

Those of regression are split as in the paper:

=================  ======================================================  ================
set                file                                                    label
=================  ======================================================  ================
``steering_angle`` ``SteeringAngle_64x64.h5`` (``images``, ``labels``)     degrees
``cell_count``     ``Cell200_64x64.h5`` (``IMGs_grey``, ``CellCounts``)    count, 1 to 200
``utkface``        ``UTKFace_64x64.h5``, or the folder or zip of jpgs      age, 1 to 60
``biwi``           ``BIWI_train.npz``, ``BIWI_test.npz`` (``image, pose``) yaw, pitch, roll
``cells``          VGG cells: zip or folder of ``NNNcell.png, NNNdots.png`` dots in a crop
``driving``        zip or folder with ``driving_log.csv``                  steering, -1 to 1
=================  ======================================================  ================
"""

from __future__ import annotations

import csv
import gzip
import io
import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from selfnorm.datasets.directory import check_name, find_set, optional
from selfnorm.errors import DataError
from selfnorm.images import Augmentation

_CROP = 64
_CROPS_PER_IMAGE = 64
_BLOCK = 50  # consecutive frames that stay on one side of the split
Pair = tuple[np.ndarray, np.ndarray]
Place = tuple[int, int, int]  # picture, top, left


@dataclass(frozen=True)
class ImageData:
    """A set, split: images ``(n, c, h, w)`` bytes and labels ``(n, d)`` as recorded.

    Attributes:
        name: of the set.
        train, val, test: pairs of images and labels.
        label_step: distance of neighbouring labels (0: continuous).
        label_range: labels that can occur.
        augmentation: what may be done to its images while training.
        test_groups: ``(n_test,)`` numbers; test images with the same number (frames of one stretch,
            tiles of one picture) are not independent of each other. ``None``: all are.
    """

    name: str
    train: Pair
    val: Pair
    test: Pair
    label_step: float
    label_range: tuple[float, float]
    augmentation: Augmentation
    test_groups: np.ndarray | None = None


def locate(name: str, data_dir: str | Path | None = None) -> list[Path]:
    """Where the files of a set are, or an error that says where to get them."""
    check_name(name, DATASETS, "image set")
    return find_set(name, data_dir)


def load(name: str, *, seed: int = 0, data_dir: str | Path | None = None) -> ImageData:
    """Read a set and split it under ``seed``."""
    paths = locate(name, data_dir)
    return _LOADERS[name](*paths, np.random.default_rng(seed))


def _steering_angle(path: Path, rng: np.random.Generator) -> ImageData:
    parts = _random(_pairs(path, "images", "labels", 180.0, low=-180.0), (0.7, 0.1), rng)
    # Mirrored roads are left out: the recording drives on one side.
    return ImageData("steering_angle", *parts, 0.0, (-180.0, 180.0), Augmentation(shift=2))


def _cell_count(path: Path, rng: np.random.Generator) -> ImageData:
    # The paper's 10,000 / 2,000 / 10,000, in these shares of however many there are.
    parts = _random(_pairs(path, "IMGs_grey", "CellCounts", 200.0), (10 / 22, 2 / 22), rng)
    return ImageData("cell_count", *parts, 1.0, (0.0, 200.0), Augmentation(dihedral=True))


def _utkface(path: Path, rng: np.random.Generator) -> ImageData:
    if path.suffix == ".h5":
        images, labels = _pairs(path, "images", "labels", 120.0)
        kept = (labels[:, 0] >= 1) & (labels[:, 0] <= 60)
        images, labels = images[kept], labels[kept]
    else:
        images, labels = _faces(path)
    parts = _random((images, labels), (0.6, 0.2), rng)
    return ImageData("utkface", *parts, 1.0, (1.0, 60.0), Augmentation(flip=True, shift=3))


def _faces(path: Path) -> Pair:
    """Faces whose file name starts with an age from 1 to 60: ``AGE_...jpg``."""
    folder = ImageFolder(path)
    ages: dict[str, int] = {}
    for name in folder.names(".jpg", ".jpeg", ".png"):
        start = re.match(r"(\d+)_", name)
        if start is None or int(start[1]) > 120:
            raise DataError(
                f"{folder.shown(name)}: the name does not start with an age of 0 to 120 "
                "(AGE_GENDER_...jpg)"
            )
        if 1 <= int(start[1]) <= 60:
            ages[name] = int(start[1])
    if not ages:
        raise DataError(f"{path} holds no jpg of a face aged 1 to 60")
    return _stack(folder, list(ages)), np.array([*ages.values()], dtype=np.float64)[:, None]


def _biwi(for_training: Path, for_testing: Path, rng: np.random.Generator) -> ImageData:
    parts = []
    for path in (for_training, for_testing):
        images, poses = _pairs(path, "image", "pose", 180.0, low=-180.0)
        if poses.shape[1] != 3:
            raise DataError(f"{path}: expected yaw, pitch and roll, got poses {poses.shape}")
        # Stored by OpenCV: blue, green, red.
        parts.append((np.ascontiguousarray(images[:, ::-1]), poses))
    train, val, _ = _random(parts[0], (0.8, 0.2), rng)
    how = Augmentation(flip=True, flip_signs=(-1.0, 1.0, -1.0), shift=4)
    return ImageData("biwi", train, val, parts[1], 0.0, (-180.0, 180.0), how)


def _cells(path: Path, rng: np.random.Generator) -> ImageData:
    folder = ImageFolder(path)
    cells = folder.names("cell.png")
    if not cells:
        raise DataError(f"{path} holds no NNNcell.png")
    images, dots = [], []
    for name in cells:
        if not name.removesuffix("cell.png").isdigit():
            raise DataError(f"{folder.shown(name)}: expected a name like 001cell.png")
        images.append(folder.image(name)[..., 2])  # the stain is blue
        dots.append(folder.image(name.replace("cell.png", "dots.png"))[..., 0] > 100)
        if images[-1].shape != dots[-1].shape or min(images[-1].shape) < _CROP:
            raise DataError(f"{folder.shown(name)}: image and dot map differ in size, or too small")
    parts = _held_out(len(cells), 0.3, 0.15, rng)
    # Held-out images are cut into tiles that do not overlap: their errors are independent.
    tiles = _tiles(images, parts[2])
    test, val = _cut(images, dots, tiles), _cut(images, dots, _tiles(images, parts[1]))
    train = _cut(images, dots, _crops(images, parts[0], rng))
    # A quarter more than was ever seen, without a look at the test images.
    high = float(np.ceil(1.25 * max(part[1].max() for part in (train, val))))
    if test[1].max() > high:
        raise DataError(f"{path}: a test tile holds {test[1].max():g} dots, more than {high:g}")
    groups = np.array([picture for picture, _, _ in tiles])
    how = Augmentation(dihedral=True)
    return ImageData("cells", train, val, test, 1.0, (0.0, high), how, groups)


def _crops(images: list[np.ndarray], which: np.ndarray, rng: np.random.Generator) -> list[Place]:
    places: list[Place] = []
    for i in which:
        height, width = images[i].shape
        tops = rng.integers(0, height - _CROP + 1, _CROPS_PER_IMAGE)
        lefts = rng.integers(0, width - _CROP + 1, _CROPS_PER_IMAGE)
        places += [(i, a, b) for a, b in zip(tops, lefts, strict=True)]
    return places


def _tiles(images: list[np.ndarray], which: np.ndarray) -> list[Place]:
    return [
        (i, a, b)
        for i in which
        for a in range(0, images[i].shape[0] - _CROP + 1, _CROP)
        for b in range(0, images[i].shape[1] - _CROP + 1, _CROP)
    ]


def _cut(images: list[np.ndarray], dots: list[np.ndarray], places: list[Place]) -> Pair:
    cut = [images[i][a : a + _CROP, b : b + _CROP] for i, a, b in places]
    counts = [dots[i][a : a + _CROP, b : b + _CROP].sum() for i, a, b in places]
    return np.stack(cut)[:, None], np.asarray(counts, dtype=np.float64)[:, None]


def _driving(path: Path, rng: np.random.Generator) -> ImageData:
    folder = ImageFolder(path)
    names, angles = _driving_log(folder)
    labels = _checked(np.asarray(angles), -1.0, 1.0, folder.shown("driving_log.csv"))
    images = _stack(folder, names)
    # Neighbouring frames are almost the same picture: whole stretches go to one side.
    block = np.arange(len(names)) // _BLOCK
    chosen = [np.isin(block, part) for part in _held_out(block[-1] + 1, 0.2, 0.1, rng)]
    train, val, test = ((images[rows], labels[rows]) for rows in chosen)
    # The arrow keys turn the wheel in steps of 0.05; released, it returns in between.
    how = Augmentation(flip=True, flip_signs=(-1.0,), shift=2)
    return ImageData("driving", train, val, test, 0.05, (-1.0, 1.0), how, block[chosen[2]])


def _driving_log(folder: ImageFolder) -> tuple[list[str], list[float]]:
    """Centre images and angles; with a header, or as the simulator writes it, without."""
    text = folder.read("driving_log.csv").decode("utf-8", "replace")
    rows = [row for row in csv.reader(io.StringIO(text)) if row]
    header = [cell.strip().lower() for cell in rows[0]] if rows else []
    if "steering" in header:
        at = header.index("steering")
        image = header.index("image") if "image" in header else header.index("center")
        rows = rows[1:]
        first_line = 2
    else:
        at, image, first_line = 3, 0, 1  # center, left, right, steering, throttle, brake, speed
    if not rows:
        raise DataError(f"{folder.shown('driving_log.csv')} holds no frames")
    names, angles = [], []
    try:
        for line, row in enumerate(rows, first_line):  # noqa: B007 named in the error
            angles.append(float(row[at]))
            names.append(row[image].strip().replace("\\", "/").split("/")[-1])
    except (IndexError, ValueError):
        raise DataError(
            f"{folder.shown('driving_log.csv')}, line {line}: no image name and angle in "
            f"{','.join(row)[:80]!r}"
        ) from None
    return names, angles


def _stack(folder: ImageFolder, names: list[str]) -> np.ndarray:
    """The images of these names, ``(n, 3, h, w)``."""
    images: list[np.ndarray] = []
    for name in names:
        images.append(folder.image(name))
        if images[-1].shape != images[0].shape:
            raise DataError(
                f"{folder.shown(name)}: size {images[-1].shape[:2]} differs from the first "
                f"image's {images[0].shape[:2]}"
            )
    return np.ascontiguousarray(np.stack(images).transpose(0, 3, 1, 2))


def _random(
    pair: Pair, shares: tuple[float, float], rng: np.random.Generator
) -> tuple[Pair, Pair, Pair]:
    """Random parts: these shares to train and to validate, the rest to test."""
    images, labels = pair
    order = rng.permutation(len(images))
    first, second = (round(share * len(order)) for share in shares)
    parts = order[:first], order[first : first + second], order[first + second :]
    train, val, test = ((images[part], labels[part]) for part in parts)
    return train, val, test


def _held_out(n: int, test: float, val: float, rng: np.random.Generator) -> list[np.ndarray]:
    """Which of ``n`` groups are to train, to validate and to test: one at least is held out."""
    order = rng.permutation(n)
    n_test, n_val = max(1, round(test * n)), max(1, round(val * n))
    return [order[n_test + n_val :], order[n_test : n_test + n_val], order[:n_test]]


class ImageFolder:
    """The files of a folder or a zip, by name (without the folders above them).

    >>> import tempfile, pathlib
    >>> place = pathlib.Path(tempfile.mkdtemp()); _ = (place / "1_0.jpg").write_bytes(b"x")
    >>> ImageFolder(place).names(".jpg")
    ['1_0.jpg']
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        readers: dict[str, Callable[[], bytes]]
        if path.is_dir():
            readers = {str(p): p.read_bytes for p in sorted(path.rglob("*")) if p.is_file()}
        else:
            try:
                archive = zipfile.ZipFile(path)
            except (zipfile.BadZipFile, OSError) as error:
                raise DataError(f"{path} is neither a folder nor a zip: {error}") from error
            files = [n for n in archive.namelist() if not n.endswith("/") and "__MACOSX" not in n]
            readers = {n: partial(archive.read, n) for n in files}
        self._readers: dict[str, Callable[[], bytes]] = {}
        for place, reader in readers.items():
            name = Path(place).name
            if name in self._readers:  # one would hide the other
                raise DataError(f"{self.shown(name)} is there twice, the second time as {place}")
            if not name.startswith("."):
                self._readers[name] = reader

    def names(self, *suffixes: str) -> list[str]:
        """File names with one of these endings, in order."""
        return sorted(n for n in self._readers if n.lower().endswith(suffixes))

    def shown(self, name: str) -> str:
        """How to call a file in a message."""
        return f"{self.path}: {name}"

    def read(self, name: str) -> bytes:
        """The bytes of a file."""
        if name not in self._readers:
            raise DataError(f"{self.shown(name)} is missing")
        try:
            return self._readers[name]()
        except (zipfile.BadZipFile, OSError, EOFError) as error:
            raise DataError(f"{self.shown(name)} cannot be read: {error}") from error

    def image(self, name: str) -> np.ndarray:
        """The jpg or png of that name, ``(h, w, 3)`` bytes."""
        pillow, content = optional("PIL.Image", "pillow"), io.BytesIO(self.read(name))
        try:
            with pillow.open(content) as image:
                return np.asarray(image.convert("RGB"))
        except (OSError, SyntaxError, ValueError) as error:
            raise DataError(f"{self.shown(name)} is not a readable image: {error}") from error


def read_arrays(path: Path, *keys: str) -> list[np.ndarray]:
    """Arrays of an h5 or npz file by their names; nothing in it is ever unpickled."""
    h5py = optional("h5py", "h5py") if path.suffix == ".h5" else None
    try:
        with h5py.File(path, "r") if h5py else np.load(path, allow_pickle=False) as file:
            held = sorted(file)
            if set(keys) <= set(held):
                return [np.asarray(file[key]) for key in keys]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    missing = next(key for key in keys if key not in held)
    raise DataError(f"{path} has no {missing!r}; it holds {held}")


def _pairs(path: Path, image: str, label: str, high: float, *, low: float = 0.0) -> Pair:
    """Images ``(n, c, h, w)`` bytes and as many labels ``(n, d)`` within ``[low, high]``."""
    images, labels = read_arrays(path, image, label)
    labels = _checked(labels, low, high, str(path))
    if images.ndim != 4 or images.dtype != np.uint8 or len(images) != len(labels):
        raise DataError(
            f"{path}: expected bytes of shape (n, c, h, w) and n labels, got {images.dtype} "
            f"{images.shape} and {len(labels)} labels"
        )
    if images.shape[1] not in (1, 3) and images.shape[-1] in (1, 3):
        images = images.transpose(0, 3, 1, 2)
    if images.shape[1] not in (1, 3):
        raise DataError(f"{path}: images must have 1 or 3 channels, got shape {images.shape}")
    return np.ascontiguousarray(images), labels


def _checked(labels: np.ndarray, low: float, high: float, source: str) -> np.ndarray:
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


def read_amat(path: str | Path, width: int = 784) -> Tensor:
    """Rows of zeros and ones from text: ``0 1 0 ...``, one image a line.

    Example:
        >>> import tempfile, pathlib
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "two.amat"
        >>> _ = file.write_text("0 1 1\\n1 0 0\\n")
        >>> read_amat(file, width=3)
        tensor([[0., 1., 1.],
                [1., 0., 0.]])
    """
    try:
        with gzip.open(path) if Path(path).suffix == ".gz" else open(path, "rb") as file:
            text = np.frombuffer(file.read(), dtype=np.uint8)
    except (OSError, EOFError) as error:
        raise DataError(f"{path} cannot be read ({error}); copy the file again") from error
    digits = text[(text != 32) & (text != 10) & (text != 13)]  # blanks and line ends
    wrong = (digits != 48) & (digits != 49)
    if wrong.any():
        raise DataError(
            f"{path} holds characters other than 0 and 1 (first: {chr(int(digits[wrong][0]))!r}); "
            "it is not a binarised image file"
        )
    if len(digits) == 0 or len(digits) % width:
        raise DataError(f"{path} holds {len(digits)} pixels, not a multiple of {width}: cut short?")
    return torch.from_numpy((digits - 48).reshape(-1, width).astype(np.float32))


def load_binarized(data_dir: str | Path | None = None) -> list[Tensor]:
    """The 50,000 training, 10,000 validation and 10,000 test digits, rows ``(n, 784)`` of 0, 1."""
    return [read_amat(path) for path in find_set("binarized_mnist", data_dir)]


_LOADERS: dict[str, Callable[..., ImageData]] = {  # of the set's files and the split's draws
    "utkface": _utkface,
    "cells": _cells,
    "driving": _driving,
    "steering_angle": _steering_angle,
    "cell_count": _cell_count,
    "biwi": _biwi,
}
DATASETS = tuple(_LOADERS)
