"""Figures of the columns of tables, of log-densities and of predictive densities.

Every function draws on ``axes`` where they are given, else on a figure of its own, which it
returns. Data are filled blue, the model is an orange line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from selfnorm.plotting.densities import literal, on_axes, on_row, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import XAxis, YAxis
    from matplotlib.figure import Figure

DATA, MODEL = "C0", "C1"
MAX_BARS = 12
MAX_BINS = 40
FEW_STEPS = 25  # have a bin each, however few the rows are
_MIDDLE = (0.005, 0.995)  # what is further out is left out, not piled up at the ends


@dataclass(frozen=True)
class Scale:
    """How the values of a column are drawn.

    Attributes:
        name: of the column.
        labels: names of the places 0, 1, ... of a column of categories; empty for numbers.
        step: distance of neighbouring values (whole numbers 1); 0: continuous.
        dates: whether the numbers are days since 1970.
    """

    name: str
    labels: tuple[str, ...] = ()
    step: float = 0.0
    dates: bool = False


@styled
def plot_marginal(
    scale: Scale,
    model: ArrayLike | None,
    data: ArrayLike | None = None,
    *,
    axes: Axes | None = None,
) -> Figure:
    """One column: bars of categories, histograms of numbers; shares of the rows that have a value.

    Args:
        scale: what the values are.
        model: values drawn from a model, NaN for none; ``None`` leaves it out.
        data: the same of the data.
        axes: where to draw.

    Example:
        >>> figure = plot_marginal(Scale("eyes", step=1.0), [1, 2, 2, 6], [1, 1, 2, 5])
        >>> figure.axes[0].get_title()
        'eyes'
    """
    figure, axes = on_axes(axes)
    named = {"data": data, "model": model}
    rows = {k: np.asarray(v, dtype=float) for k, v in named.items() if v is not None}
    rows = {name: values[~np.isnan(values)] for name, values in rows.items()}
    if scale.labels:
        _bars(axes, scale, rows)
        axes.set_xlabel("share of rows")
    else:
        _histograms(axes, scale, rows)
        log = axes.get_yscale() == "log"
        axes.set_ylabel("share of rows" + (", log scale" if log else ""))
    axes.set_title(literal(scale.name))
    if len(rows) > 1:
        axes.legend()
    return figure


@styled
def plot_pair(
    scales: Sequence[Scale],
    model: ArrayLike | None,
    data: ArrayLike | None = None,
    *,
    axes: Sequence[Axes] | Axes | None = None,
) -> Figure:
    """Two columns: points ``(n, 2)`` of the data beside as many of the model, on one scale.

    ``axes`` are two where both are given. The outermost half per cent on each side is left out;
    categories and whole numbers are spread a little, so that their points do not hide each other.
    """
    named = {"data": data, "model": model}
    rows = {k: np.asarray(v, dtype=float).reshape(-1, 2) for k, v in named.items() if v is not None}
    n = min(len(points) for points in rows.values())
    figure, row = on_row(axes, len(rows), sharex=True, sharey=True)
    rng = np.random.default_rng(0)
    both = np.concatenate(list(rows.values()))
    spread = np.array([0.3 if s.labels else 0.4 * s.step for s in scales])
    limits = [_limits(scale, both[:, i]) for i, scale in enumerate(scales)]
    size = float(np.clip(3000 / max(n, 1), 1, 12))
    for ax, (name, points) in zip(row, rows.items(), strict=True):
        shown = points[rng.permutation(len(points))[:n]]
        shown = shown + spread * rng.uniform(-1, 1, shown.shape)
        color = DATA if name == "data" else MODEL
        ax.scatter(
            shown[:, 0], shown[:, 1], s=size, color=color, alpha=0.6, linewidths=0, rasterized=True
        )
        ax.set(title=name, xlim=limits[0], ylim=limits[1], xlabel=literal(scales[0].name))
        both_axes: list[XAxis | YAxis] = [ax.xaxis, ax.yaxis]
        for axis, scale, values in zip(both_axes, scales, both.T, strict=True):
            _ticks(axis, scale, crowded=True, magnitudes=_by_magnitude(scale, values))
    row[0].set_ylabel(literal(scales[1].name))
    return figure


@styled
def plot_dependence(
    names: Sequence[str], data: np.ndarray, model: np.ndarray, *, axes: Axes | None = None
) -> Figure:
    """Strengths of dependence ``(d, d)`` of all pairs: data below the diagonal, model above."""
    figure, axes = on_axes(axes)
    d = len(names)
    shown = np.where(np.tri(d, k=-1, dtype=bool), data, model)
    shown = np.where(np.eye(d, dtype=bool), np.nan, shown)
    image = axes.imshow(shown, vmin=0, vmax=1, cmap="cividis")
    short = [_short(name, 16) for name in names]
    axes.set_xticks(range(d), short, rotation=90)
    axes.set_yticks(range(d), short)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title("data below the diagonal, model above")
    axes.figure.colorbar(image, ax=axes, label="0: independent, 1: determined", shrink=0.8)
    return figure


@styled
def plot_log_densities(
    model: ArrayLike,
    data: ArrayLike | None = None,
    *,
    threshold: float | None = None,
    axes: Axes | None = None,
    xlabel: str = "log-likelihood (nats)",
    ylabel: str = "share of rows",
    names: tuple[str, str] = ("data", "drawn from the model"),
) -> Figure:
    """Log-likelihoods of rows drawn from a model and of data rows: alike where the model fits.

    So are log-weights, less ``log Z``, of proposal samples and of data rows. Weights of the data
    beyond those of all samples are a sign of mass that the samples miss: ``evaluate`` judges that.
    ``names`` are those of data and model.
    """
    figure, axes = on_axes(axes)
    rows = {} if data is None else {names[0]: np.asarray(data, dtype=float)}
    rows[names[1]] = np.asarray(model, dtype=float)
    _histograms(axes, Scale(xlabel), rows, grouped=False)
    if threshold is not None and axes.get_xlim()[0] < threshold < axes.get_xlim()[1]:
        axes.axvline(threshold, color="#888888", ls=":", label="outlier threshold")
    axes.set(xlabel=literal(xlabel), ylabel=ylabel)
    axes.legend()
    return figure


@styled
def plot_shares(
    names: Sequence[str], shares: ArrayLike, xlabel: str, *, axes: Axes | None = None
) -> Figure:
    """Bars of a share for each of some names, the largest at the top."""
    figure, axes = on_axes(axes, figsize=(5, 0.25 * len(names) + 0.9))
    values = np.asarray(shares, dtype=float)
    order = np.argsort(values, kind="stable")
    axes.barh(range(len(values)), values[order], color=DATA)
    axes.set_yticks(range(len(values)), [literal(names[i]) for i in order])
    axes.set(xlabel=literal(xlabel), xlim=(0, min(1.0, 1.2 * max(values.max(initial=0.0), 0.01))))
    return figure


@styled
def plot_predictive(
    grid: ArrayLike,
    density: ArrayLike,
    *,
    label: float | None = None,
    interval: Sequence[float] | None = None,
    name: str = "y",
    axes: Axes | None = None,
) -> Figure:
    """The predictive density of one input on a grid, its interval shaded, the label as a line.

    Example:
        >>> grid = np.linspace(-3, 3, 61)
        >>> figure = plot_predictive(grid, np.exp(-grid**2 / 2), label=0.5, interval=(-1.6, 1.6))
        >>> len(figure.axes[0].lines)
        2
    """
    figure, axes = on_axes(axes)
    x, y = np.asarray(grid, dtype=float), np.asarray(density, dtype=float)
    axes.plot(x, y, color=MODEL, label="p(y | x)")
    if interval is not None:
        inside = (x >= interval[0]) & (x <= interval[1])
        axes.fill_between(x[inside], y[inside], color=MODEL, alpha=0.25, lw=0, label="90 %")
    if label is not None:
        axes.axvline(label, color=DATA, ls="--", label="observed")
    axes.set(xlabel=literal(name), ylim=(0, None))
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    return figure


def _short(name: str, most: int) -> str:
    """The first letters of a name, as figures take them."""
    return literal(name if len(name) < most else f"{name[: most - 2]}…")


def _bars(axes: Axes, scale: Scale, rows: dict[str, np.ndarray]) -> None:
    counts = {
        name: np.bincount(values.astype(int), minlength=len(scale.labels)) / max(len(values), 1)
        for name, values in rows.items()
    }
    often = np.sort(np.argsort(-sum(counts.values()), kind="stable")[:MAX_BARS])
    names = [_short(scale.labels[i], 18) for i in often]
    for name, shares in counts.items():
        look: dict[str, Any] = {"color": DATA, "alpha": 0.45}
        if name == "model":
            look = {"facecolor": "none", "edgecolor": MODEL, "linewidth": 1.4}
        axes.barh(range(len(often)), shares[often], label=name, **look)
    axes.set_yticks(range(len(often)), names)
    axes.invert_yaxis()
    if len(scale.labels) > len(often):
        axes.set_ylabel(f"the {len(often)} commonest of {len(scale.labels)}")


def _histograms(
    axes: Axes, scale: Scale, rows: dict[str, np.ndarray], grouped: bool = True
) -> None:
    """Shares of the rows in each bin: of all rows, also those out of sight."""
    from matplotlib import ticker

    finite = {name: values[np.isfinite(values)] for name, values in rows.items()}
    both = np.concatenate(list(finite.values()))
    if len(both) == 0:
        return
    edges = _edges(scale, both, min(len(values) for values in finite.values()))
    if grouped and _by_magnitude(scale, both):
        edges = np.geomspace(edges[0], edges[-1], len(edges))
    highest = 0.0
    for name, values in finite.items():
        shares = np.histogram(values, edges)[0] / max(len(values), 1)
        highest = max(highest, shares.max())
        look: dict[str, Any] = {"color": MODEL, "lw": 1.4}
        if name in ("data", "at the data"):
            look = {"color": DATA, "alpha": 0.45, "fill": True, "lw": 0}
        axes.stairs(shares, edges, label=name, **look)
    if highest > 0.6 and grouped and len(edges) > 5:  # one value that most rows have
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 3.0), numticks=8))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_locator(ticker.NullLocator())
    axes.set_xlim(edges[0], edges[-1])
    _ticks(axes.xaxis, scale, magnitudes=grouped and _by_magnitude(scale, both))


def _edges(scale: Scale, values: np.ndarray, n: int) -> np.ndarray:
    """Ends of bins: whole steps where values have steps, one for each step where these are few."""
    low, high = np.quantile(values, _MIDDLE)
    bins = int(np.clip(2 * n ** (1 / 2.5), 8, MAX_BINS))
    if scale.step > 0:
        steps = max(round((high - low) / scale.step) + 1, 1)
        width = scale.step * (1 if steps <= FEW_STEPS else -(-steps // bins))
        count = -(-steps * scale.step // width)
        return low - scale.step / 2 + width * np.arange(round(count) + 1)
    if high <= low:
        half = max(abs(low) * 1e-3, 1e-9)
        return np.array([low - half, low + half])
    return np.linspace(low, high, bins + 1)


def _by_magnitude(scale: Scale, values: np.ndarray) -> bool:
    """Whether all but a few positive numbers would lie in the first bin."""
    values = values[np.isfinite(values)]
    if scale.labels or scale.dates or scale.step > 0 or len(values) == 0:
        return False
    low, middle, high = np.quantile(values, [_MIDDLE[0], 0.5, _MIDDLE[1]])
    return bool(low > 0 and high > 100 * middle)


def _limits(scale: Scale, values: np.ndarray) -> tuple[float, float]:
    values = values[np.isfinite(values)]
    if scale.labels:
        return -0.6, len(scale.labels) - 0.4
    if len(values) == 0:
        return 0.0, 1.0
    low, high = np.quantile(values, _MIDDLE)
    if _by_magnitude(scale, values):
        margin = (high / low) ** 0.05
        return low / margin, high * margin
    margin = max(0.05 * (high - low), 0.6 * scale.step, abs(low) * 1e-6, 1e-9)
    return low - margin, high + margin


def _ticks(
    axis: XAxis | YAxis, scale: Scale, crowded: bool = False, magnitudes: bool = False
) -> None:
    """Few ticks, whole ones for whole numbers, names for categories, dates for dates."""
    from matplotlib import dates, ticker

    if magnitudes:
        {"x": axis.axes.set_xscale, "y": axis.axes.set_yscale}[axis.axis_name]("log")
        axis.set_major_locator(ticker.LogLocator(numticks=5))
        axis.set_minor_locator(ticker.NullLocator())
    elif scale.labels:
        every = max(1, len(scale.labels) // 8)
        names = [_short(name, 12) for name in scale.labels]
        places = range(0, len(names), every)
        axis.set_ticks(list(places), [names[i] for i in places])
        if crowded and axis.axis_name == "x":
            axis.set_tick_params(rotation=90)
    elif scale.dates:
        locator = dates.AutoDateLocator(minticks=3, maxticks=7)
        axis.set_major_locator(locator)
        axis.set_major_formatter(dates.ConciseDateFormatter(locator))
    else:
        axis.set_major_locator(ticker.MaxNLocator(4, integer=scale.step >= 1))
        form = ticker.ScalarFormatter(useOffset=False)
        form.set_powerlimits((-3, 5))
        axis.set_major_formatter(form)
