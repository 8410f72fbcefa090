"""MNIST: statically binarised (``.amat`` text) and raw (idx), plain or gzipped."""

from __future__ import annotations

import gzip
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from selfnorm.datasets.directory import find_file
from selfnorm.errors import DataError

__all__ = ["Binarizer", "Digits", "load_binarized", "load_raw", "read_amat", "read_idx"]

_SOURCE = "Larochelle's statically binarised MNIST (binarized_mnist_{train,valid,test}.amat)"
_RAW_SOURCE = "LeCun's MNIST (train-images-idx3-ubyte, t10k-images-idx3-ubyte)"


@dataclass(frozen=True)
class Digits:
    """Float rows ``(n, 784)`` in [0, 1]: training, validation and test part."""

    train: Tensor
    valid: Tensor
    test: Tensor


def _content(path: Path) -> bytes:
    try:
        if path.suffix == ".gz":
            with gzip.open(path) as file:
                return file.read()
        return path.read_bytes()
    except (OSError, EOFError) as error:
        raise DataError(f"{path} cannot be read ({error}); copy the file again") from error


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
    text = np.frombuffer(_content(Path(path)), dtype=np.uint8)
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


def read_idx(path: str | Path) -> Tensor:
    """The array of an idx file of unsigned bytes, ``(n, ...)`` uint8."""
    content = _content(Path(path))
    if len(content) < 4 or content[:3] != b"\x00\x00\x08":
        raise DataError(f"{path} is not an idx file of unsigned bytes")
    n_dims = content[3]
    if n_dims < 1 or len(content) < 4 + 4 * n_dims:
        raise DataError(f"{path} has a broken idx header")
    shape = struct.unpack(f">{n_dims}I", content[4 : 4 + 4 * n_dims])
    values = np.frombuffer(content, dtype=np.uint8, offset=4 + 4 * n_dims)
    if len(values) != int(np.prod(shape)):
        raise DataError(f"{path} holds {len(values)} bytes, its header says {shape}: cut short?")
    return torch.from_numpy(values.reshape(shape).copy())


def load_binarized(data_dir: str | Path | None = None) -> Digits:
    """The 50,000 / 10,000 / 10,000 statically binarised digits."""
    parts = {}
    for part in ("train", "valid", "test"):
        name = f"binarized_mnist_{part}.amat"
        paths = [
            f"{folder}{name}{end}" for folder in ("binarized_mnist/", "") for end in ("", ".gz")
        ]
        parts[part] = read_amat(find_file(paths, data_dir, _SOURCE))
    return Digits(**parts)


def load_raw(
    data_dir: str | Path | None = None, *, binarize: bool = False, seed: int = 0
) -> Digits:
    """Grey values of raw MNIST in [0, 1], the last 10,000 training images as validation part.

    With ``binarize`` validation and test part are drawn once, by ``seed``; the training part stays
    grey, for a :class:`Binarizer` to draw afresh at every step (*dynamic* binarisation).
    """
    images = {}
    for part, name in (("train", "train-images-idx3-ubyte"), ("test", "t10k-images-idx3-ubyte")):
        paths = [f"{folder}{name}{end}" for folder in ("mnist/", "") for end in ("", ".gz")]
        images[part] = read_idx(find_file(paths, data_dir, _RAW_SOURCE)).flatten(1).float() / 255
    held = min(10_000, len(images["train"]) // 6)
    train, valid = images["train"][:-held], images["train"][-held:]
    test = images["test"]
    if binarize:
        generator = torch.Generator().manual_seed(seed)
        valid = torch.bernoulli(valid, generator=generator)
        test = torch.bernoulli(test, generator=generator)
    return Digits(train, valid, test)


class Binarizer:
    """Grey values to fresh binary pixels at every call: the dynamic binarisation of a batch.

    Example:
        >>> Binarizer()(torch.tensor([[0.0, 1.0]]))
        tensor([[0., 1.]])
    """

    def __call__(self, x: Tensor) -> Tensor:
        """Draw ``x ~ Bernoulli(grey value)``."""
        return (torch.rand_like(x) < x).to(x.dtype)
