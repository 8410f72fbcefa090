"""Panels: what a plot shows, drawn and in words; together in a file, or one by one on a page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from selfnorm.plotting import (
    Scale,
    new_figure,
    plot_dependence,
    plot_marginal,
    plot_pair,
    plot_shares,
    save,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_NAMES = 25  # of a table of dependence
N_PAIRS = 6


@dataclass(frozen=True)
class Panel:
    """A plot and its words.

    Attributes:
        draw: a function of ``axes``, one or, of ``n_axes``, as many.
        words: what it shows, for those who cannot see it.
        title: above it, if it has none of its own.
        size: in inches.
    """

    draw: Callable[..., object]
    words: str = ""
    title: str = ""
    size: tuple[float, float] = (3.1, 2.4)
    n_axes: int = 1


def together(panels: Sequence[Panel], columns: int = 1, *, one_legend: bool = False) -> Figure:
    """A figure of panels side by side; with ``one_legend`` the first has the legend of all."""
    columns, n_axes = min(columns, len(panels)), panels[0].n_axes
    rows = -(-len(panels) // columns)
    width, height = panels[0].size
    figure, axes = new_figure(rows, columns * n_axes, figsize=(width * columns, height * rows))
    cells = np.reshape(axes, (-1, n_axes))
    for ax in cells[len(panels) :].ravel():
        ax.set_axis_off()
    for k, (panel, own) in enumerate(zip(panels, cells, strict=False)):
        panel.draw(axes=own if n_axes > 1 else own[0])
        if panel.title:
            own[0].set_title(panel.title)
        legend = own[0].get_legend()
        if one_legend and k > 0 and legend is not None:
            legend.remove()
    return figure


def write_panels(
    folder: Path, name: str, panels: Sequence[Panel], columns: int = 1, *, one_legend: bool = False
) -> Path:
    """Write a file of panels; return its path."""
    path = folder / f"{name}.png"
    save(together(panels, columns, one_legend=one_legend), path)
    return path


def column_panels(
    scales: Sequence[Scale], of_model: np.ndarray, of_data: np.ndarray | None
) -> list[Panel]:
    """Columns one by one, rows of the model and of the data."""
    panels = []
    for j, scale in enumerate(scales):
        model, data = of_model[:, j], None if of_data is None else of_data[:, j]
        rows = {"model": model} if data is None else {"data": data, "model": model}
        words = "; ".join(f"{name} {_in_words(scale, values)}" for name, values in rows.items())
        panels.append(Panel(partial(plot_marginal, scale, model, data), f"{scale.name}: {words}"))
    return panels


def _in_words(scale: Scale, values: np.ndarray) -> str:
    """The commonest of values, or their quartiles."""
    values = values[~np.isnan(values)]
    if len(values) == 0:
        return "has no values"
    if scale.labels:
        counts = np.bincount(values.astype(int), minlength=len(scale.labels)) / len(values)
        often = np.argsort(-counts, kind="stable")[:3]
        return ", ".join(f"{scale.labels[int(i)]} {100 * counts[i]:.0f} %" for i in often)
    quartiles = np.quantile(values, [0.25, 0.5, 0.75])
    if scale.dates:
        low, middle, high = quartiles.astype("datetime64[D]")
        return f"median {middle}, quartiles {low} and {high}"
    low, middle, high = quartiles
    return f"median {middle:.4g}, quartiles {low:.4g} and {high:.4g}"


def pair_panels(
    scales: Sequence[Scale],
    of_model: np.ndarray,
    of_data: np.ndarray | None,
    strength: tuple[np.ndarray, np.ndarray],
) -> list[Panel]:
    """The pairs of columns that depend most on each other, by their strength in data and model."""
    in_data, in_model = strength
    i, j = np.triu_indices(len(in_data), 1)
    order = np.argsort(-in_data[i, j], kind="stable")[:N_PAIRS]
    n_axes, panels = 1 if of_data is None else 2, []
    for pair in zip(i[order].tolist(), j[order].tolist(), strict=True):
        one, other = (scales[k] for k in pair)
        data = None if of_data is None else of_data[:, pair]
        words = (
            f"{one.name} and {other.name}: strength of dependence {in_data[pair]:.2f} in the data, "
            f"{in_model[pair]:.2f} in the model"
        )
        draw = partial(plot_pair, (one, other), of_model[:, pair], data)
        panels.append(Panel(draw, words, size=(2.4 * n_axes, 2.3), n_axes=n_axes))
    return panels


def dependence_panel(scales: Sequence[Scale], strength: tuple[np.ndarray, np.ndarray]) -> Panel:
    """The table of dependence, of the columns that depend most where there are many."""
    in_data, in_model = strength
    apart = np.abs(in_data - in_model)[np.triu_indices(len(scales), 1)]
    words = (
        f"Strength of dependence of {len(apart):,} pairs of columns: data and model differ by "
        f"{np.median(apart):.2f} in the median and by {apart.max():.2f} at most"
    )
    often = np.sort(np.argsort(-(in_data.sum(0)), kind="stable")[:MAX_NAMES])
    names, both = [scales[i].name for i in often], np.ix_(often, often)
    size = 2.4 + 0.2 * len(often)
    draw = partial(plot_dependence, names, in_data[both], in_model[both])
    return Panel(draw, words, size=(size + 0.8, size))


def gap_panels(scales: Sequence[Scale], shares: np.ndarray) -> list[Panel]:
    """The shares of gaps ``(columns,)`` of those columns that have any."""
    names = [scale.name for scale, share in zip(scales, shares, strict=True) if share > 0]
    shares = shares[shares > 0]
    if not names:
        return []
    words = ", ".join(f"{n} {100 * share:.3g} %" for n, share in zip(names, shares, strict=True))
    draw = partial(plot_shares, names, shares, "share of rows without a value")
    size = (5, 0.25 * len(names) + 0.9)
    return [Panel(draw, f"Rows without a value: {words}", size=size)]
