"""Sheets of small grey images."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

__all__ = ["plot_samples"]


def plot_samples(images: Tensor, path: str | Path, *, columns: int = 8) -> Path:
    """Write square images ``(n, side^2)`` with values in [0, 1] as one sheet."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    side = round(images.shape[1] ** 0.5)
    if side * side != images.shape[1]:
        raise ValueError(f"rows of {images.shape[1]} values are no square images")
    lines = -(-len(images) // columns)
    sheet = images.new_zeros(lines * columns, side, side)
    sheet[: len(images)] = images.reshape(-1, side, side)
    sheet = sheet.reshape(lines, columns, side, side).transpose(1, 2).reshape(lines * side, -1)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    plt.imsave(path, 1 - sheet.numpy(), cmap="gray", vmin=0, vmax=1)
    return path
