"""Statically binarised MNIST: ``.amat`` text, plain or gzipped."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from selfnorm.datasets.directory import find_set
from selfnorm.errors import DataError

__all__ = ["Digits", "load_binarized", "read_amat"]


@dataclass(frozen=True)
class Digits:
    """Float rows ``(n, 784)`` in [0, 1]: training, validation and test part."""

    train: Tensor
    valid: Tensor
    test: Tensor


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


def load_binarized(data_dir: str | Path | None = None) -> Digits:
    """The 50,000 / 10,000 / 10,000 statically binarised digits."""
    return Digits(*(read_amat(path) for path in find_set("binarized_mnist", data_dir)))
