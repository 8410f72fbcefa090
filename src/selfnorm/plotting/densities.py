"""Figures of densities, training, calibration and theory.

They need matplotlib: ``pip install selfnorm[plot]``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from selfnorm import functional as F
from selfnorm.errors import SelfnormError, optional

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Parameters = ParamSpec("Parameters")
Drawn = TypeVar("Drawn")
STYLE = Path(__file__).with_name("selfnorm.mplstyle")


def need_matplotlib() -> None:
    """Refuse where matplotlib is not there: before the work, not after it."""
    words = "figures need matplotlib: pip install 'selfnorm[plot]' (or pip install matplotlib)"
    optional("matplotlib.figure", words, SelfnormError)


def styled(function: Callable[Parameters, Drawn]) -> Callable[Parameters, Drawn]:
    """A function that draws in the style of :data:`STYLE`, whatever style is set elsewhere."""

    @functools.wraps(function)
    def draw(*args: Parameters.args, **options: Parameters.kwargs) -> Drawn:
        need_matplotlib()
        from matplotlib import style

        with style.context(STYLE):
            return function(*args, **options)

    return draw


def new_figure(n_rows: int = 1, n_columns: int = 1, **options: Any) -> tuple[Figure, Any]:
    """A figure that needs no screen, in the style of :data:`STYLE`, and its axes."""
    need_matplotlib()
    from matplotlib import style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shared = {key: options.pop(key) for key in ("sharex", "sharey") if key in options}
    with style.context(STYLE):
        figure = Figure(**{"layout": "constrained", **options})
        FigureCanvasAgg(figure)
        return figure, figure.subplots(n_rows, n_columns, **shared)


def on_axes(axes: Axes | None, **options: Any) -> tuple[Figure, Axes]:
    """The axes given and their figure; where none are given, a new figure and its axes."""
    figure, (first,) = on_row(axes, 1, **options)
    return figure, first


def on_row(
    axes: Sequence[Axes] | Axes | None, n: int, **options: Any
) -> tuple[Figure, Sequence[Axes]]:
    """The same for up to ``n`` axes side by side."""
    if axes is None:
        _, axes = new_figure(1, n, **{"figsize": (3.0 * n, 2.4), **options})
    row = list(np.ravel(np.asarray(axes, dtype=object)))
    return row[0].figure, row


def save(figure: Figure, path: str | Path | None) -> Figure:
    """Write the figure if a path is given, and return it."""
    if path is not None:
        from matplotlib import style

        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with style.context(STYLE):
            figure.savefig(path, dpi=110)
    return figure


def literal(text: str) -> str:
    r"""A text as figures show it literally: dollar signs begin no mathematics.

    >>> print(literal("$0-$50"))
    \$0-\$50
    """
    return text.replace("$", r"\$")


@styled
def plot_densities(
    rows: Sequence[tuple[str, Tensor, Sequence[tuple[str, Callable[[Tensor], Tensor]]]]],
    path: str | Path | None = None,
) -> Figure:
    """One row per data set: the data, then a heat map of each model's density.

    Args:
        rows: ``(name, data (n, 2), [(title, log_density), ...])``.
        path: where to save the figure.
    """
    n_columns = 1 + max(len(models) for _, _, models in rows)
    figure, axes = new_figure(len(rows), n_columns, figsize=(2.6 * n_columns, 2.7 * len(rows)))
    grid = axes.reshape(len(rows), n_columns)
    ends = (-2.5, 2.5)
    line = torch.linspace(*ends, 200)
    for cells, (name, data, models) in zip(grid, rows, strict=True):
        cells[0].hist2d(*data.T.numpy(), bins=100, range=[ends, ends], cmap="magma")
        cells[0].set_title(literal(f"{name}: data"), fontsize=10)
        for cell, (title, log_density) in zip(cells[1:], models, strict=False):
            with torch.no_grad():
                values = log_density(torch.cartesian_prod(line, line)).exp().cpu()
            cell.imshow(
                values.reshape(200, 200).T.numpy(),
                origin="lower",
                extent=(*ends, *ends),
                cmap="magma",
                vmin=0,
                # A few spikes must not turn the rest black.
                vmax=float(torch.quantile(values, 0.998)) or 1.0,
                aspect="auto",
            )
            cell.set_title(literal(title), fontsize=10)
        for cell in cells:
            cell.set_xticks([])
            cell.set_yticks([])
    return save(figure, path)


def plot_samples(images: Tensor, path: str | Path, *, columns: int = 8) -> Path:
    """Write square images ``(n, side^2)`` with values in [0, 1] as one sheet."""
    from matplotlib.image import imsave

    side = round(images.shape[1] ** 0.5)
    if side * side != images.shape[1]:
        raise ValueError(f"rows of {images.shape[1]} values are no square images")
    lines = -(-len(images) // columns)
    sheet = images.new_zeros(lines * columns, side, side)
    sheet[: len(images)] = images.reshape(-1, side, side)
    sheet = sheet.reshape(lines, columns, side, side).transpose(1, 2).reshape(lines * side, -1)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    imsave(path, 1 - sheet.numpy(), cmap="gray", vmin=0, vmax=1)
    return path


class Curves(Protocol):
    """What is drawn of a training."""

    best_step: int

    def curve(self, key: str) -> tuple[list[float], list[float]]:
        """Steps and values of a figure."""
        ...


@styled
def plot_history(
    history: Curves, path: str | Path | None = None, *, axes: Sequence[Axes] | Axes | None = None
) -> Figure:
    """The two bounds closing in on each other, and the effective sample size (or the loss).

    ``axes`` are two; of one alone the bounds are drawn.
    """
    figure, row = on_row(axes, 2, figsize=(9, 3.2))
    for ax, draw in zip(row, (_bound_curves, _sample_size_curve), strict=False):
        draw(ax, history)
        ax.set_xlabel("step")
    return save(figure, path)


def _bound_curves(axes: Axes, history: Curves) -> None:
    held_out = bool(history.curve("val_lower")[0])
    prefix = "val_" if held_out else ""
    lower, upper = (history.curve(f"{prefix}{bound}") for bound in ("lower", "upper"))
    axes.plot(*lower, label="lower bound (SNL)", color="C0")
    if upper[0]:
        axes.plot(*upper, label="upper bound (IS)", color="C1", ls="--")
    # Early steps are far below, and a run that explodes leaves infinities: show the middle.
    settled = sorted(v for v in lower[1] if math.isfinite(v))
    settled = settled[len(settled) // 4 :]
    tops = [v for v in upper[1][len(upper[1]) // 4 :] if math.isfinite(v)]
    if lower[0] and lower[0] == upper[0]:
        axes.fill_between(lower[0], lower[1], upper[1], alpha=0.2, color="#888888")
    if settled:
        ends = settled[0], max([*tops, settled[-1]])
        margin = 0.05 * (ends[1] - ends[0]) + 0.02
        axes.set_ylim(ends[0] - margin, ends[1] + margin)
    axes.axvline(history.best_step, color="#888888", ls=":", label="kept state")
    axes.set_ylabel("nats per row" + (", held out" if held_out else ", training"))
    axes.set_title("bounds of the log-likelihood")
    axes.legend()


def _sample_size_curve(axes: Axes, history: Curves) -> None:
    steps, values = history.curve("val_ess")
    if steps:
        axes.set(title="effective samples of the proposal", ylabel="share", ylim=(0, 1.02))
    else:
        steps, values = history.curve("loss")
        axes.set(title="training loss", ylabel="loss")
    axes.plot(steps, values, color="C2")


@styled
def plot_reliability(
    pits: dict[str, ArrayLike],
    path: str | Path | None = None,
    *,
    axes: Sequence[Axes] | None = None,
) -> Figure:
    """Observed against nominal levels (left) and PIT histograms (right) of one or more models.

    Args:
        pits: by name, ``F(y|x)`` of held-out labels; a calibrated model lies on the diagonal.
        path: where to save the figure.
        axes: two to draw on.
    """
    figure, (left, right) = on_row(axes, 2, figsize=(6.4, 2.9))
    left.plot([0, 1], [0, 1], color="#888888", linewidth=0.8)
    nominal = np.linspace(0.05, 0.95, 19)
    for name, values in zip(map(literal, pits), pits.values(), strict=True):
        pit = np.asarray(values, dtype=float)
        observed = (pit <= nominal[:, None]).mean(axis=1)
        left.plot(nominal, observed, marker=".", label=name)
        bins = int(np.clip(len(pit) // 25, 5, 20))
        right.hist(pit, bins=bins, range=(0, 1), density=True, histtype="step", label=name)
    left.set(xlabel="nominal level", ylabel="share of labels below", title="reliability")
    right.set(xlabel="F(y | x) of the label (PIT)", ylabel="density", title="PIT histogram")
    right.axhline(1.0, color="#888888", linewidth=0.8)
    right.set_ylim(0, None)
    if len(pits) > 1:
        left.legend()
    return save(figure, path)


@styled
def plot_snl_surface(path: str | Path | None = None, mean: float = 1.0) -> Figure:
    """The SNL of a Gaussian with unknown mean, its ridge ``b = log Z`` and its optimum.

    With a standard Gaussian base, ``E = -theta x`` and ``log Z = theta^2 / 2``; for data of mean
    ``xbar`` the optimum is ``(xbar, xbar^2 / 2)`` (the paper's figure 1).
    """
    theta = torch.linspace(mean - 2.5, mean + 2.5, 241)
    b = torch.linspace(-1.5, 4.0, 241)
    grid_theta, grid_b = torch.meshgrid(theta, b, indexing="xy")
    log_z = (grid_theta**2 / 2).unsqueeze(0)
    surface = F.snl(mean * grid_theta, log_z, grid_b, reduction="none")
    figure, axes = new_figure(figsize=(5.2, 4.2))
    levels = [-8, -6, -4.5, -3.5, -2.5, -1.75, -1.2, -0.8, -0.5, -0.25, 0.0, 0.2, 0.35, 0.45]
    filled = axes.contourf(
        grid_theta.numpy(),
        grid_b.numpy(),
        surface.clamp_min(-8).numpy(),
        levels=sorted(level - 0.5 + mean**2 / 2 for level in levels),
        cmap="viridis",
        extend="both",
    )
    figure.colorbar(filled, ax=axes, label="SNL (nats)")
    axes.plot(theta, theta**2 / 2, color="black", lw=2, label="ridge: b = log Z")
    axes.plot(mean, mean**2 / 2, "*", color="red", ms=15, label="maximum likelihood")
    axes.set_xlabel("theta")
    axes.set_ylabel("b")
    axes.set_ylim(float(b[0]), float(b[-1]))
    axes.legend(loc="lower left", fontsize=8)
    axes.set_title("SNL of a Gaussian mean", fontsize=10)
    return save(figure, path)
