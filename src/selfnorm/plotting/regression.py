"""Figures of predictive densities and of their calibration; needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from selfnorm.datasets import toy1d
from selfnorm.evaluation import calibration
from selfnorm.plotting.densities import new_figure, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot_predictive", "plot_reliability", "plot_toy1d", "toy1d_grid"]


def toy1d_grid(data: toy1d.Toy1d, n_points: int = 200) -> tuple[Tensor, Tensor]:
    """Inputs ``(n, 1)`` and labels ``(n, n, 1)`` at which the figure shows a law."""
    x, y = data.train.x[:, 0], data.train.y[:, 0]
    margin = 0.05 * float(y.max() - y.min())
    xs = torch.linspace(float(x.min()), float(x.max()), n_points)[:, None]
    ys = torch.linspace(float(y.min()) - margin, float(y.max()) + margin, n_points)
    return xs, ys.view(-1, 1, 1).expand(-1, n_points, 1)


def plot_toy1d(
    data: toy1d.Toy1d,
    models: Sequence[tuple[str, Callable[[Tensor, Tensor], Tensor]]],
    path: str | Path | None = None,
    *,
    n_points: int = 200,
) -> Figure:
    """The data, the true conditional density and learned ones side by side.

    Args:
        data: one of the 1-D regression sets.
        models: names and functions ``(x (n, 1), y (g, n, 1)) -> log p (g, n)``.
        path: file to write.
        n_points: grid points along each axis.
    """
    figure, axes = new_figure(1, 2 + len(models), figsize=(3.2 * (2 + len(models)), 3.2))
    x, y = data.train.x[:, 0], data.train.y[:, 0]
    axes[0].scatter(x, y, s=2, color="black", linewidths=0)
    axes[0].set_title("data")
    xs, grid = toy1d_grid(data, n_points)
    ys = grid[:, 0, 0]
    truth = toy1d.conditional_log_prob(data.name, xs.double(), grid.double())
    panels: list[tuple[str, Tensor]] = [("truth", truth)]
    panels += [(name, log_density(xs, grid)) for name, log_density in models]
    top = float(truth.exp().quantile(0.99))
    for panel, (name, log_density) in zip(axes[1:], panels, strict=True):
        panel.pcolormesh(
            xs[:, 0].numpy(), ys.numpy(), log_density.exp().numpy(), vmin=0.0, vmax=top
        )
        panel.set_title(name, fontsize=9)
    for panel in axes:
        panel.set_xlabel("x")
        panel.set_ylim(float(ys[0]), float(ys[-1]))
    axes[0].set_ylabel("y")
    return save(figure, path)


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


def plot_reliability(pits: dict[str, ArrayLike], path: str | Path | None = None) -> Figure:
    """Observed against nominal levels (left) and PIT histograms (right) of one or more models."""
    figure, (left, right) = new_figure(1, 2, figsize=(7.0, 3.2))
    left.plot([0, 1], [0, 1], color="black", linewidth=0.8)
    for name, pit in pits.items():
        nominal, observed = calibration.reliability(pit)
        left.plot(nominal, observed, marker=".", label=name)
        right.hist(
            np.asarray(pit), bins=20, range=(0, 1), density=True, histtype="step", label=name
        )
    left.set_xlabel("nominal level")
    left.set_ylabel("share of labels below")
    right.set_xlabel("PIT")
    right.axhline(1.0, color="black", linewidth=0.8)
    left.legend(fontsize=8)
    return save(figure, path)
