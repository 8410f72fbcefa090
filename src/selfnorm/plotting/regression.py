"""Figures of predictive densities and of their calibration; needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from selfnorm.plotting.densities import new_figure, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot_predictive"]


def plot_predictive(
    model: Any, X: ArrayLike, y: ArrayLike | None = None, path: str | Path | None = None
) -> Figure:
    """Predictive densities of up to six inputs, with their 90 % intervals and labels if given."""
    rows = np.asarray(X)[:6]
    figure, axes = new_figure(1, len(rows), figsize=(2.6 * len(rows), 2.6))
    quantiles = model.predict_quantiles(rows, [0.001, 0.05, 0.95, 0.999])
    for i, panel in enumerate(np.atleast_1d(axes)):
        low, left, right, high = quantiles[i]
        grid = np.linspace(low - 0.1 * (high - low), high + 0.1 * (high - low), 400)
        density = model.pdf(rows[i : i + 1], grid)[0]
        panel.plot(grid, density)
        inside = (grid >= left) & (grid <= right)
        panel.fill_between(grid[inside], density[inside], alpha=0.3)
        if y is not None:
            panel.axvline(float(np.asarray(y)[i]), color="black", linewidth=1)
        panel.set_title(f"row {i}", fontsize=9)
        panel.set_xlabel("y")
    return save(figure, path)
