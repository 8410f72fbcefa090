"""Figures of a fitted model of tables, as arrays to draw and as files (needs matplotlib)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from selfnorm._context import on_cpu
from selfnorm.columns import KINDS, Column, Schema, Table, TableLike
from selfnorm.plotting import (
    Scale,
    plot_history,
    plot_log_densities,
    plot_predictive,
    plot_reliability,
    styled,
)
from selfnorm.report.panels import (
    Panel,
    column_panels,
    dependence_panel,
    gap_panels,
    pair_panels,
    write_panels,
)

MAX_POINTS = 2000
N_DRAWN = 1000  # rows at least, for histograms: chance is then that of the data
PANELS = 12  # on one page
N_EXAMPLES = 9
_BINS = 8


@dataclass(frozen=True)
class Rows:
    """Rows as figures have them: numbers, places of levels, days of dates; NaN for gaps.

    Attributes:
        scales: how the columns are drawn.
        of_model: rows ``(n, columns)`` drawn from a model.
        of_data: rows of a table, if there is one.
        gaps: shares of its rows without a value ``(columns,)``.
    """

    scales: list[Scale]
    of_model: np.ndarray
    of_data: np.ndarray | None
    gaps: np.ndarray

    @classmethod
    def of(cls, schema: Schema, drawn: np.ndarray, coded: np.ndarray | None, seed: int = 0) -> Rows:
        """Of coded rows ``(n, p, 2)``; of those of a table as many as a figure can show."""
        scales = [_scale(schema, column) for column in schema.modelled]
        of_model = coordinates(schema, drawn)
        if coded is None:
            return cls(scales, of_model, None, np.zeros(len(scales)))
        shown = chosen_rows(len(coded), MAX_POINTS, seed)
        places = [schema.parts_of([column.name])[0] for column in schema.modelled]
        gaps = schema.is_gap(coded)[:, places].mean(0)
        return cls(scales, of_model, coordinates(schema, coded)[shown], gaps)

    def pairs(self) -> tuple[list[Panel], Panel]:
        """Panels of the pairs that depend most on each other, and of the dependence of all."""
        of_data, of_model = self.of_data, self.of_model
        if of_data is not None:
            of_model = of_model[: len(of_data)]  # chance makes few rows depend more
        strength = dependence(self.scales, of_model if of_data is None else of_data, of_model)
        pairs = pair_panels(self.scales, of_model, of_data, strength)
        return pairs, dependence_panel(self.scales, strength)


@styled
@on_cpu()
def plot_density_model(
    estimator: Any, folder: Path, X: TableLike | None = None, seed: int | None = 0
) -> list[Path]:
    """Write the figures of an :class:`~selfnorm.EnergyDensity`; return their paths.

    ``marginals.png`` (with ``marginals_2.png``, ... where there are many columns), ``pairs.png``
    and ``dependence.png`` (of two columns and more), ``training.png`` and ``diagnostics.png``. With
    a table ``X`` the model is compared with it; if that has gaps, ``gaps.png`` shows where.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    schema = estimator.schema_
    if X is not None:
        table = Table.of(X)
        X = table.rows(chosen_rows(table.n_rows, MAX_POINTS))
    coded = None if X is None else schema.encode(X)[0]
    n_drawn = MAX_POINTS if coded is None else max(len(coded), N_DRAWN)
    drawn = estimator.sample(n_drawn, random_state=seed)
    rows = Rows.of(schema, schema.encode(drawn)[0], coded)
    write = partial(write_panels, folder)
    panels, paths = column_panels(rows.scales, rows.of_model, rows.of_data), []
    for page, start in enumerate(range(0, len(panels), PANELS), start=1):
        name = f"marginals_{page}" if page > 1 else "marginals"
        paths.append(write(name, panels[start : start + PANELS], 4, one_legend=X is not None))
    if len(rows.scales) > 1:
        pairs, strengths = rows.pairs()
        paths += [write("pairs", pairs, 2), write("dependence", [strengths])]
    paths.append(folder / "training.png")
    plot_history(estimator.history_, paths[-1])
    scores = None if X is None else estimator.score_samples(X)
    draw = partial(plot_log_densities, estimator.score_samples(drawn), scores)
    draw = partial(draw, threshold=estimator.offset_)
    panels = [Panel(draw, title="log-likelihood of rows", size=(4.5, 3.2))]
    at_rows = None if coded is None else torch.from_numpy(coded)
    weights = estimator.distribution_.log_weights(at_rows)
    if weights is not None:
        names = "at the data", "at the proposal's samples"
        draw = partial(plot_log_densities, *weights, names=names)
        draw = partial(draw, xlabel="log-weight less log Z (nats)", ylabel="share")
        panels.append(Panel(draw, title="weights behind log Z"))
    paths.append(write("diagnostics", panels, 2))
    gaps = gap_panels(rows.scales, rows.gaps)
    return paths + ([write("gaps", gaps)] if gaps else [])


@styled
def plot_regressor(
    estimator: Any, folder: Path, X: TableLike | None, y: ArrayLike | None, name: str = "y"
) -> list[Path]:
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
    chosen = chosen_rows(Table.of(X).n_rows, MAX_POINTS)
    table, labels = Table.of(X).rows(chosen), np.asarray(y, dtype=float)[chosen]
    pit, _ = estimator.pit_and_crps(table, labels)
    paths.append(folder / "calibration.png")
    plot_reliability({"model": pit}, paths[-1])
    panels = [
        Panel(partial(plot_predictive, **example, name=name), size=(3.0, 2.0))
        for _, example in predictive_examples(estimator, table, labels)
    ]
    paths.append(write_panels(folder, "predictive", panels, 3))
    return paths


def predictive_examples(
    estimator: Any, X: TableLike, y: np.ndarray
) -> list[tuple[int, dict[str, Any]]]:
    """Rows spread over the range of predictions, and what their predictive densities are."""
    y = np.asarray(y, dtype=float).ravel()
    order = np.argsort(np.asarray(estimator.predict(X)).ravel(), kind="stable")
    chosen = np.unique(np.linspace(0, len(order) - 1, N_EXAMPLES).round().astype(int))
    rows = order[chosen]
    inputs = Table.of(X).rows(rows)
    ends = estimator.predict_quantiles(inputs, [0.002, 0.05, 0.95, 0.998])
    low, high = np.minimum(ends[:, 0], y[rows]), np.maximum(ends[:, 3], y[rows])
    margin = 0.04 * (high - low)
    grids = np.linspace(low - margin, high + margin, 241).T
    densities = estimator.pdf(inputs, grids)
    return [
        (int(row), {"grid": g, "density": p, "label": float(y[row]), "interval": (e[1], e[2])})
        for row, g, p, e in zip(rows, grids, densities, ends, strict=True)
    ]


def chosen_rows(n: int, most: int, seed: int = 0) -> np.ndarray:
    """All of ``n`` rows, or ``most`` of them drawn at random, in their order."""
    if n <= most:
        return np.arange(n)
    return np.sort(np.random.default_rng(seed).permutation(n)[:most])


def _scale(schema: Schema, column: Column) -> Scale:
    """How to draw a modelled column of a schema."""
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
    on_grid = np.allclose(gaps / gaps.min(), np.round(gaps / gaps.min())) and gaps.min() > 0
    return float(gaps.min()) if on_grid and gaps.sum() / gaps.min() <= 40 else 0.0


def coordinates(schema: Schema, x: np.ndarray) -> np.ndarray:
    """``(n, columns)`` of coded rows: numbers, places of levels, days of dates; NaN for gaps."""
    columns = []
    for column in schema.modelled:
        numbers = []
        for j in schema.parts_of([column.name]):
            part, code, number = schema.parts[j], x[:, j, 0], x[:, j, 1]
            levels = np.where((code >= 0) & (code < part.n_codes - part.gap), code, np.nan)
            numeric = part.values or part.rest
            numbers.append(part.numbers(code, number) if numeric else levels)
        values = KINDS[column.kind](column).coordinate(numbers)
        if _named_levels(column) and column.numeric:
            levels = np.asarray(column.levels, dtype=float)
            order = np.argsort(levels)
            places = order[np.searchsorted(levels[order], values).clip(max=len(levels) - 1)]
            values = np.where(np.isnan(values), np.nan, places)
        columns.append(values)
    return np.stack(columns, 1)


def dependence(
    scales: Sequence[Scale], of_data: np.ndarray, of_model: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Cramér's V ``(d, d)`` of all pairs of columns, of data and of model rows.

    Numbers are cut at the quantiles of the data; it is 0 for independent columns and 1 where one
    tells the other, whatever their kinds, and corrected for what chance alone would show.
    """
    d = len(scales)
    strength = np.eye(d), np.eye(d)
    levels = np.linspace(0, 1, _BINS + 1)[1:-1]
    seen = [values[~np.isnan(values)] for values in of_data.T]
    inner = [np.unique(np.quantile(v, levels)) if len(v) else v for v in seen]
    for out, rows in zip(strength, (of_data, of_model), strict=True):
        codes = []
        for scale, ends, values in zip(scales, inner, rows.T, strict=True):
            bins = values if scale.labels else np.searchsorted(ends, values, side="right")
            codes.append(np.where(np.isnan(values), -1, bins).astype(int))
        for i, j in itertools.combinations(range(d), 2):
            out[i, j] = out[j, i] = _cramers_v(codes[j], codes[i])
    return strength


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
