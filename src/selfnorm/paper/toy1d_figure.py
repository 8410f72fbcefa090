"""The figure of the 1-D regression sets: data, truth and learned conditional densities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from selfnorm.datasets import toy1d
from selfnorm.plotting import new_figure, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot_toy1d", "toy1d_grid"]


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
