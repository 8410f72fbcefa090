"""Figures of a fitted model of tables, as arrays to draw and as files (needs matplotlib)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from selfnorm._context import seeded
from selfnorm.chain import row_bounds
from selfnorm.columns import KINDS, Column, Schema
from selfnorm.density import EBM
from selfnorm.distributions import draw_log_weights
from selfnorm.plotting import (
    Scale,
    new_figure,
    plot_dependence,
    plot_history,
    plot_log_densities,
    plot_log_weights,
    plot_marginal,
    plot_pair,
    plot_predictive,
    plot_reliability,
    plot_shares,
    save,
    styled,
)

MAX_POINTS = 2000
N_DRAWN = 1000  # rows at least, for histograms: chance is then that of the data
PANELS = 12  # on one page
N_PAIRS = 6
MAX_NAMES = 25  # of a table of dependence
N_EXAMPLES = 9
_BINS = 8


@styled
def plot_density_model(
    estimator: Any, folder: Path, X: Any = None, seed: int | None = 0
) -> list[Path]:
    """Write the figures of an :class:`~selfnorm.EnergyDensity`; return their paths.

    ``marginals.png`` (with ``marginals_2.png``, ... where there are many columns), ``pairs.png``
    and ``dependence.png`` (of two columns and more), ``training.png`` and ``diagnostics.png``. With
    a table ``X`` the model is compared with it; if that has gaps, ``gaps.png`` shows where.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    schema = estimator.schema_
    X = None if X is None else rows_of(X, some_rows(n_rows(X), MAX_POINTS))
    n_drawn = MAX_POINTS if X is None else max(n_rows(X), N_DRAWN)
    drawn = estimator.sample(n_drawn, random_state=seed)
    of_model = coordinates(schema, schema.encode(drawn)[0])
    coded = None if X is None else schema.encode(X)[0]
    of_data = None if coded is None else coordinates(schema, coded)
    scales = scales_of(schema)
    paths = _marginal_pages(scales, of_model, of_data, folder)
    if len(scales) > 1:
        paths += _pair_pages(scales, of_model[: None if X is None else n_rows(X)], of_data, folder)
    paths.append(folder / "training.png")
    plot_history(estimator.history_, paths[-1])
    paths.append(folder / "diagnostics.png")
    figure, axes = new_figure(1, 2, figsize=(9, 3.2))
    scores = None if X is None else estimator.score_samples(X)
    of_samples = estimator.score_samples(drawn)
    plot_log_densities(of_samples, scores, threshold=estimator.offset_, axes=axes[0])
    axes[0].set_title("log-likelihood of rows")
    weights = log_weights(estimator, X)
    if weights is None:
        axes[1].set_axis_off()
    else:
        plot_log_weights(*weights, axes=axes[1])
        axes[1].set_title("weights behind log Z")
    save(figure, paths[-1])
    gaps = np.zeros(1) if coded is None else gap_shares(schema, coded)
    if gaps.any():
        paths.append(folder / "gaps.png")
        names = [scale.name for scale in scales]
        save(plot_shares(names, gaps, "share of rows without a value"), paths[-1])
    return paths


@styled
def plot_regressor(estimator: Any, folder: Path, X: Any, y: Any, name: str = "y") -> list[Path]:
    """Write the training curves and, where data are given, ``calibration`` and ``predictive``.

    ``name`` is that of the target.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for stage, history in enumerate(estimator.history_, start=1):
        paths.append(folder / f"training_{stage}.png")
        plot_history(history, paths[-1])
    if X is None or y is None:
        return paths
    some = some_rows(len(y), MAX_POINTS)
    X, y = rows_of(X, some), np.asarray(y, dtype=float)[some]
    pit, _ = estimator.pit_and_crps(X, y)
    paths.append(folder / "calibration.png")
    plot_reliability({"model": pit}, paths[-1])
    examples = predictive_examples(estimator, X, y)
    columns = 3
    figure, axes = new_figure(-(-len(examples) // columns), columns, figsize=(9, 6))
    for ax in np.ravel(axes):
        ax.set_axis_off()
    for ax, (_, example) in zip(np.ravel(axes), examples, strict=False):
        ax.set_axis_on()
        plot_predictive(**example, name=name, axes=ax)
    np.ravel(axes)[0].legend()
    paths.append(folder / "predictive.png")
    save(figure, paths[-1])
    return paths


def predictive_examples(estimator: Any, X: Any, y: np.ndarray) -> list[tuple[int, dict[str, Any]]]:
    """Rows spread over the range of predictions, and what their predictive densities are."""
    y = np.asarray(y, dtype=float).ravel()
    order = np.argsort(np.asarray(estimator.predict(X)).ravel(), kind="stable")
    chosen = np.unique(np.linspace(0, len(order) - 1, N_EXAMPLES).round().astype(int))
    rows = order[chosen]
    some = rows_of(X, rows)
    ends = estimator.predict_quantiles(some, [0.002, 0.05, 0.95, 0.998])
    low, high = np.minimum(ends[:, 0], y[rows]), np.maximum(ends[:, 3], y[rows])
    margin = 0.04 * (high - low)
    grids = np.linspace(low - margin, high + margin, 241).T
    densities = estimator.pdf(some, grids)
    return [
        (int(row), {"grid": g, "density": p, "label": float(y[row]), "interval": (e[1], e[2])})
        for row, g, p, e in zip(rows, grids, densities, ends, strict=True)
    ]


def n_rows(frame: Any) -> int:
    """Rows of a table of any kind."""
    if isinstance(frame, dict):
        return max((len(column) for column in frame.values()), default=0)
    return int(frame.num_rows) if hasattr(frame, "num_rows") else len(frame)


def rows_of(frame: Any, rows: np.ndarray) -> Any:
    """Some rows of a table of any kind, of the same kind."""
    if isinstance(frame, dict):
        return {name: rows_of(column, rows) for name, column in frame.items()}
    if hasattr(frame, "iloc"):
        return frame.iloc[rows]
    if hasattr(frame, "num_rows"):
        return frame.take(rows.tolist())
    if isinstance(frame, list | tuple):
        return [frame[i] for i in rows]
    return frame[rows]


def some_rows(n: int, most: int, seed: int = 0) -> np.ndarray:
    """All of ``n`` rows, or ``most`` of them drawn at random, in their order."""
    if n <= most:
        return np.arange(n)
    return np.sort(np.random.default_rng(seed).permutation(n)[:most])


def scales_of(schema: Schema) -> list[Scale]:
    """How to draw the modelled columns of a schema."""
    return [_scale(schema, column) for column in schema.modelled]


def _scale(schema: Schema, column: Column) -> Scale:
    part = schema.parts[schema.parts_of([column.name])[0]]
    name = part.name if column.terms else str(column.name)
    if column.resolution and column.base is not None:
        unit = "days" if column.resolution == "day" else "s"
        return Scale(f"{name}, {unit} after {schema.columns[column.base].name}")
    if column.resolution:
        return Scale(name, dates=True, step=0.0 if column.resolution == "second" else 1.0)
    if _named_levels(column):
        levels = [f"{v:g}" if column.numeric else str(v) for v in column.levels]
        return Scale(name, labels=(*levels, *(["rare"] if column.tail else [])))
    step = _level_step(column.levels) if column.levels and not part.rest else part.step
    return Scale(name, step=step)


def _named_levels(column: Column) -> bool:
    """Whether levels have places of their own, rather than those of numbers."""
    if not column.levels or column.resolution:
        return False
    if not column.numeric:
        return True
    return column.kind == "category" and len(column.levels) <= 12 and not _level_step(column.levels)


def _level_step(levels: Sequence[Any]) -> float:
    """The step of few numbers on a grid, the commonest one of many; 0 for others."""
    gaps = np.diff(np.sort(np.asarray(levels, dtype=float))).round(9)
    if len(gaps) == 0:
        return 1.0
    if len(gaps) == 1 and gaps[0] != 1:
        return 0.0  # two numbers are names rather than a grid
    if len(levels) > 12:
        steps, counts = np.unique(gaps, return_counts=True)
        return float(steps[counts.argmax()])
    whole = np.allclose(gaps / gaps.min(), np.round(gaps / gaps.min())) and gaps.min() > 0
    return float(gaps.min()) if whole and gaps.sum() / gaps.min() <= 40 else 0.0


def coordinates(schema: Schema, x: np.ndarray) -> np.ndarray:
    """``(n, columns)`` of coded rows: numbers, places of levels, days of dates; NaN for gaps."""
    found = []
    for column in schema.modelled:
        numbers = []
        for j in schema.parts_of([column.name]):
            part, code, number = schema.parts[j], x[:, j, 0].astype(int), x[:, j, 1]
            known = np.array([*(part.values or range(part.n_codes - part.gap)), np.nan])
            coded = known[np.where((code >= 0) & (code < part.n_codes - part.gap), code, -1)]
            numbers.append(np.where((code == part.n_codes) & part.rest, number, coded))
        values = KINDS[column.kind](column).coordinate(numbers)
        if _named_levels(column) and column.numeric:
            levels = np.asarray(column.levels, dtype=float)
            order = np.argsort(levels)
            places = order[np.searchsorted(levels[order], values).clip(max=len(levels) - 1)]
            values = np.where(np.isnan(values), np.nan, places)
        found.append(values)
    return np.stack(found, 1)


def gap_shares(schema: Schema, x: np.ndarray) -> np.ndarray:
    """``(columns,)``: share of coded rows without a value."""
    places = [schema.parts_of([column.name])[0] for column in schema.modelled]
    return np.array([(x[:, j, 0] == schema.parts[j].gap_code).mean() for j in places])


def dependence(
    scales: Sequence[Scale], of_data: np.ndarray, of_model: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Cramér's V ``(d, d)`` of all pairs of columns, of data and of model rows.

    Numbers are cut at the quantiles of the data; it is 0 for independent columns and 1 where one
    tells the other, whatever their kinds, and corrected for what chance alone would show.
    """
    bins: dict[str, list[np.ndarray]] = {"data": [], "model": []}
    for j, scale in enumerate(scales):
        seen = of_data[~np.isnan(of_data[:, j]), j]
        inner: Any = (
            np.unique(np.quantile(seen, np.linspace(0, 1, _BINS + 1)[1:-1])) if len(seen) else []
        )
        for name, rows in (("data", of_data), ("model", of_model)):
            values = rows[:, j]
            codes = values if scale.labels else np.searchsorted(inner, values, side="right")
            bins[name].append(np.where(np.isnan(values), -1, codes).astype(int))
    return _all_pairs(bins["data"]), _all_pairs(bins["model"])


def _all_pairs(columns: list[np.ndarray]) -> np.ndarray:
    d = len(columns)
    out = np.eye(d)
    for i in range(d):
        for j in range(i):
            out[i, j] = out[j, i] = _cramers_v(columns[i], columns[j])
    return out


def _cramers_v(a: np.ndarray, b: np.ndarray) -> float:
    both = (a >= 0) & (b >= 0)
    n = int(both.sum())
    if n < 5:
        return 0.0
    (_, a), (_, b) = (np.unique(v[both], return_inverse=True) for v in (a, b))
    table = np.bincount(a * (b.max() + 1) + b, minlength=(a.max() + 1) * (b.max() + 1))
    table = table.reshape(a.max() + 1, b.max() + 1).astype(float)
    expected = np.outer(table.sum(1), table.sum(0)) / n
    square = float((((table - expected) ** 2) / expected).sum()) / n
    r, c = table.shape
    square = max(0.0, square - (r - 1) * (c - 1) / (n - 1))
    least = min(r - (r - 1) ** 2 / (n - 1), c - (c - 1) ** 2 / (n - 1)) - 1
    return float(np.sqrt(min(1.0, square / least))) if least > 0 else 0.0


def strongest_pairs(strength: np.ndarray, most: int = N_PAIRS) -> list[tuple[int, int]]:
    """The pairs ``(i, j)``, ``i < j``, that depend most on each other."""
    i, j = np.triu_indices(len(strength), 1)
    order = np.argsort(-strength[i, j], kind="stable")[:most]
    return [(int(i[k]), int(j[k])) for k in order]


def dependence_figure(scales: Sequence[Scale], of_data: np.ndarray, of_model: np.ndarray) -> Any:
    """The table of dependence, of the columns that depend most where there are many."""
    often = np.argsort(-(of_data.sum(0)), kind="stable")[:MAX_NAMES]
    often = np.sort(often)
    size = 2.4 + 0.2 * len(often)
    figure, axes = new_figure(figsize=(size + 0.8, size))
    names = [scales[i].name for i in often]
    plot_dependence(names, of_data[np.ix_(often, often)], of_model[np.ix_(often, often)], axes=axes)
    return figure


def _marginal_pages(
    scales: Sequence[Scale], of_model: np.ndarray, of_data: np.ndarray | None, folder: Path
) -> list[Path]:
    paths = []
    for page, start in enumerate(range(0, len(scales), PANELS), start=1):
        here = range(start, min(start + PANELS, len(scales)))
        columns = min(4, len(here))
        rows = -(-len(here) // columns)
        figure, axes = new_figure(rows, columns, figsize=(2.9 * columns, 2.3 * rows))
        for ax in np.ravel(axes)[len(here) :]:
            ax.set_axis_off()
        for ax, j in zip(np.ravel(axes), here, strict=False):
            data = None if of_data is None else of_data[:, j]
            plot_marginal(scales[j], of_model[:, j], data, axes=ax)
            if data is not None and j > start:
                ax.get_legend().remove()
        paths.append(folder / (f"marginals_{page}.png" if page > 1 else "marginals.png"))
        save(figure, paths[-1])
    return paths


def _pair_pages(
    scales: Sequence[Scale], of_model: np.ndarray, of_data: np.ndarray | None, folder: Path
) -> list[Path]:
    strength = dependence(scales, of_model if of_data is None else of_data, of_model)
    pairs = strongest_pairs(strength[0])
    each = 1 if of_data is None else 2
    columns = min(2, len(pairs))
    rows = -(-len(pairs) // columns)
    figure, axes = new_figure(rows, columns * each, figsize=(2.4 * columns * each, 2.3 * rows))
    cells = np.reshape(axes, (-1, each))
    for own in cells[len(pairs) :].ravel():
        own.set_axis_off()
    for own, (i, j) in zip(cells, pairs, strict=False):
        data = None if of_data is None else of_data[:, [i, j]]
        plot_pair((scales[i], scales[j]), of_model[:, [i, j]], data, axes=own)
    save(figure, folder / "pairs.png")
    save(dependence_figure(scales, *strength), folder / "dependence.png")
    return [folder / "pairs.png", folder / "dependence.png"]


def log_weights(estimator: Any, X: Any) -> tuple[np.ndarray, np.ndarray | None] | None:
    """Log-weights less ``log Z`` at samples and at rows; ``None`` where all columns are finite."""
    model, q = estimator.model_, estimator.proposal_
    rows = None if X is None else estimator.standardise(X)
    with seeded(0):
        if isinstance(model, EBM):
            at_samples = draw_log_weights(model, q, 5000) - float(model.log_norm.detach())
            if rows is None:
                return at_samples.numpy(), None
            with torch.no_grad():
                return at_samples.numpy(), (model.log_prob(rows) - q.log_prob(rows)).numpy()
        # of the chain's one-dimensional factors, pooled
        if rows is None:
            rows = estimator.standardise(estimator.sample(200, random_state=0))
        pooled = row_bounds(model, rows[:200], n_samples=64)
    if len(pooled["log_weights"]) == 0:
        return None
    at_data = None if X is None else pooled["log_weights_data"].numpy()
    return pooled["log_weights"].numpy(), at_data
