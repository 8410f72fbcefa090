"""Statically binarised MNIST: ``.amat`` text, plain or gzipped."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from selfnorm.datasets.directory import find_set
from selfnorm.errors import DataError


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
