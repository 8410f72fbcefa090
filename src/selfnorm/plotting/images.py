"""Figures of image regression: images with their predictive densities, and the ablation over M."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from selfnorm.plotting.densities import new_figure, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class ImageDensities(Protocol):
    """A model of the labels of images."""

    def density(self, image: np.ndarray, /) -> tuple[np.ndarray, np.ndarray]:
        """Labels on a grid, and their density given one image."""
        ...

    def predict_interval(self, images: np.ndarray, /) -> np.ndarray:
        """``(n, 2)`` ends of the 90 % intervals."""
        ...


def density_panels(
    model: ImageDensities, images: ArrayLike, y: ArrayLike, *, n: int = 12
) -> dict[str, np.ndarray]:
    """What a grid of ``n`` images with their densities shows, as arrays.

    The images are spread evenly over the labels, so that all parts of the range are seen.
    """
    images = np.asarray(images)
    labels = np.asarray(y, dtype=float).reshape(len(images), -1)[:, 0]
    order = np.argsort(labels, kind="stable")
    chosen = order[np.linspace(0, len(order) - 1, min(n, len(order))).round().astype(int)]
    shown = images[chosen]
    drawn = [model.density(image) for image in shown]
    return {
        "images": shown,
        "grid": drawn[0][0],
        "density": np.stack([density for _, density in drawn]),
        "interval": model.predict_interval(shown),
        "label": labels[chosen],
    }


def plot_panels(panels: dict[str, np.ndarray], path: str | Path | None = None) -> Figure:
    """Images, each above its predictive density, 90 % interval and, as a line, its label."""
    n = len(panels["images"])
    columns = min(6, n)
    rows = -(-n // columns)
    figure, axes = new_figure(2 * rows, columns, figsize=(1.7 * columns, 2.9 * rows))
    axes = np.asarray(axes).reshape(2 * rows, columns)
    for panel in axes.flat:
        panel.set_axis_off()
    grid = panels["grid"]
    for k in range(n):
        above, below = axes[2 * (k // columns) : 2 * (k // columns) + 2, k % columns]
        picture = panels["images"][k].transpose(1, 2, 0)
        above.imshow(picture if picture.shape[-1] == 3 else picture[..., 0], cmap="gray")
        density, (low, high) = panels["density"][k], panels["interval"][k]
        seen = density > 1e-4 * density.max()
        below.set_axis_on()
        below.plot(grid[seen], density[seen], linewidth=1)
        inside = (grid >= low) & (grid <= high)
        below.fill_between(grid[inside], density[inside], alpha=0.3)
        below.axvline(panels["label"][k], color="black", linewidth=1)
        below.set_yticks([])
        below.tick_params(labelsize=6)
    return save(figure, path)


def plot_ablation(rows: Sequence[Mapping[str, Any]], path: str | Path | None = None) -> Figure:
    """Exact test log-likelihood against ``M``, mean and standard deviation over seeds, by set.

    ``rows`` are those of the result file: ``dataset, objective, n_samples, exact``.
    """
    sets = list(dict.fromkeys(row["dataset"] for row in rows))
    figure, axes = new_figure(1, len(sets), figsize=(3.6 * len(sets), 3.0))
    for name, panel in zip(sets, np.atleast_1d(axes), strict=True):
        of_set = [{"exact": r.get("upper"), **r} for r in rows if r["dataset"] == name]
        of_set = [r for r in of_set if r["exact"] is not None]
        for objective in dict.fromkeys(row["objective"] for row in of_set):
            own = [r for r in of_set if r["objective"] == objective]
            sizes = sorted({r["n_samples"] for r in own})
            values = [[r["exact"] for r in own if r["n_samples"] == m] for m in sizes]
            spread = [np.std(v, ddof=1) if len(v) > 1 else 0.0 for v in values]
            means = [np.mean(v) for v in values]
            panel.errorbar(sizes, means, yerr=spread, marker=".", capsize=2, label=objective)
        panel.set_xscale("log", base=2)
        panel.set_xlabel("M")
        panel.set_title(name, fontsize=9)
    np.atleast_1d(axes)[0].set_ylabel("test log-likelihood")
    np.atleast_1d(axes)[0].legend(fontsize=7)
    return save(figure, path)
