"""Figures of a fitted table model: marginals, training curves, diagnostics (needs matplotlib)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from selfnorm._context import seeded
from selfnorm.chain import row_bounds
from selfnorm.columns import Column, Schema
from selfnorm.density import EBM
from selfnorm.evaluation import draw_log_weights
from selfnorm.plotting import new_figure, plot_history, plot_reliability, save

if TYPE_CHECKING:
    from selfnorm.tables.density import EnergyDensity
    from selfnorm.tables.regressor import EnergyRegressor

MAX_COLUMNS = 6
MAX_POINTS = 2000
MAX_BARS = 12
MODEL, DATA = "#c44e52", "#4c72b0"


def plot_density_model(
    estimator: EnergyDensity, folder: Path, X: Any = None, seed: int | None = 0
) -> list[Path]:
    """Write ``marginals.png``, ``training.png`` and ``diagnostics.png``; return their paths.

    With a table ``X`` the model is compared with it; if that has gaps, ``gaps.png`` shows where.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    drawn = estimator.sample(MAX_POINTS, random_state=seed)
    paths = [folder / f"{name}.png" for name in ("marginals", "training", "diagnostics")]
    columns = estimator.schema_.modelled
    X = None if X is None else _some_rows(X)
    of_model = _coordinates(estimator.schema_, drawn)
    of_data = None if X is None else _coordinates(estimator.schema_, X)
    _marginals(columns, of_model, of_data, paths[0])
    plot_history(estimator.history_, paths[1])
    _diagnostics(estimator, drawn, X, paths[2])
    if of_data is not None and np.isnan(of_data).any():
        paths.append(folder / "gaps.png")
        _gaps(columns, np.isnan(of_data).mean(0), paths[-1])
    return paths


def plot_regressor(
    estimator: EnergyRegressor, folder: Path, X: np.ndarray | None, y: np.ndarray | None
) -> list[Path]:
    """Write the training curves and, where data are given, ``calibration.png``."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for stage, history in enumerate(estimator.history_, start=1):
        paths.append(folder / f"training_{stage}.png")
        plot_history(history, paths[-1])
    if X is not None and y is not None:
        pit, _ = estimator.pit_and_crps(X[:MAX_POINTS], y[:MAX_POINTS])
        paths.append(folder / "calibration.png")
        plot_reliability({"model": pit}, paths[-1])
    return paths


def _some_rows(frame: Any) -> Any:
    """Rows from all over a table, no more than are drawn."""
    if isinstance(frame, dict):
        return {name: _some_rows(np.asarray(column)) for name, column in frame.items()}
    n = frame.num_rows if hasattr(frame, "num_rows") else len(frame)
    every = max(1, n // MAX_POINTS)
    return frame.take(list(range(0, n, every))) if hasattr(frame, "num_rows") else frame[::every]


def _coordinates(schema: Schema, frame: Any) -> np.ndarray:
    """``(n, columns)``: numbers, places of levels, days of dates; NaN where there is a gap."""
    x, _ = schema.encode(frame)
    found = []
    for column in schema.modelled:
        places = schema.parts_of([column.name])
        numbers = []
        for j in places:
            part, code, number = schema.parts[j], x[:, j, 0].astype(int), x[:, j, 1]
            known = np.array([*(part.values or range(part.n_codes - part.gap)), np.nan])
            coded = known[np.where((code >= 0) & (code < part.n_codes), code, -1)]
            numbers.append(np.where((code == part.n_codes) & part.rest, number, coded))
        whole = numbers[0]
        if len(numbers) > 1:  # week and weekday
            whole = 7 * numbers[0] + numbers[1]
        found.append(whole)
    return np.stack(found, 1)


def _marginals(
    columns: Sequence[Column], drawn: np.ndarray, X: np.ndarray | None, path: Path
) -> None:
    d = min(drawn.shape[1], MAX_COLUMNS)
    figure, axes = new_figure(d, d, figsize=(2.1 * d + 1, 2.1 * d + 1))
    axes = np.array(axes).reshape(d, d)
    rng = np.random.default_rng(0)

    def spread(values: np.ndarray, column: Column) -> np.ndarray:
        """Levels a little apart, so that their points do not hide each other."""
        wide = 0.3 if column.levels and not column.numeric else 0.0
        return values + rng.uniform(-wide, wide, len(values))

    for i in range(d):
        for j in range(d):
            ax = axes[i, j]
            if j > i:
                ax.set_axis_off()
                continue
            if i == j:
                _one_column(ax, columns[i], drawn[:, i], None if X is None else X[:, i])
                if i == 0:
                    ax.legend(fontsize=7)
            else:
                for rows, color in ((X, DATA), (drawn, MODEL)):
                    if rows is not None:
                        pair = (spread(rows[:, j], columns[j]), spread(rows[:, i], columns[i]))
                        ax.plot(*pair, ".", ms=1.5, color=color, alpha=0.4)
                both = drawn if X is None else np.concatenate([drawn, X])
                (left, bottom), (right, top) = np.nanquantile(
                    both[:, [j, i]], [0.005, 0.995], axis=0
                ) + np.array([[-0.5], [0.5]]) * [bool(columns[j].levels), bool(columns[i].levels)]
                if right > left and top > bottom:
                    ax.set(xlim=(left, right), ylim=(bottom, top))
            if i == d - 1:
                ax.set_xlabel(str(columns[j].name))
            if j == 0:
                ax.set_ylabel(str(columns[i].name))
            ax.tick_params(labelsize=6)
    save(figure, path)


def _one_column(ax: Any, column: Column, drawn: np.ndarray, X: np.ndarray | None) -> None:
    """Histograms of numbers, bars of levels: data filled, model outlined."""
    both = drawn if X is None else np.concatenate([drawn, X])
    both = both[~np.isnan(both)]
    if column.levels:
        at, places = np.unique(both, return_inverse=True)
        often = np.sort(np.argsort(-np.bincount(places))[:MAX_BARS])
        at = at[often]
        for rows, look in ((X, {"color": DATA, "alpha": 0.4}), (drawn, {"fill": False})):
            if rows is not None:
                seen = rows[~np.isnan(rows)]
                height = [(seen == value).mean() for value in at]
                edge = {} if rows is not drawn else {"edgecolor": MODEL}
                name = "model" if rows is drawn else "data"
                ax.bar(range(len(at)), height, label=name, **look, **edge)
        levels = [*column.levels, *(["rare"] if column.tail else [])]
        names = [f"{v:g}" if column.numeric else str(levels[int(v)])[:12] for v in at]
        ax.set_xticks(range(len(at)), names, rotation=90 if len(at) > 4 else 0)
        return
    low, high = np.quantile(both, [0.005, 0.995])
    edges = np.linspace(low, high, 41) if high > low else 40
    if X is not None:
        ax.hist(X[~np.isnan(X)], edges, density=True, color=DATA, alpha=0.4, label="data")
    ax.hist(drawn, edges, density=True, histtype="step", color=MODEL, label="model")


def _gaps(columns: Sequence[Column], share: np.ndarray, path: Path) -> None:
    figure, ax = new_figure(1, 1, figsize=(6, 0.3 * len(columns) + 1))
    ax.barh(range(len(columns)), share, color=DATA)
    ax.set_yticks(range(len(columns)), [str(column.name) for column in columns], fontsize=7)
    ax.invert_yaxis()
    ax.set(xlabel="share of rows without a value", xlim=(0, 1))
    save(figure, path)


def _diagnostics(estimator: EnergyDensity, drawn: Any, X: Any, path: Path) -> None:
    """Log-densities of model samples and data, and the log-weights behind ``log Z``."""
    figure, axes = new_figure(1, 2, figsize=(9, 3.6))
    of_model = {"density": True, "histtype": "step", "color": MODEL}
    axes[0].hist(estimator.score_samples(drawn), 60, label="model samples", **of_model)
    if X is not None:
        axes[0].hist(
            estimator.score_samples(X), 60, density=True, color=DATA, alpha=0.4, label="data"
        )
    axes[0].axvline(estimator.offset_, color="0.4", ls=":", label="outlier threshold")
    axes[0].set(xlabel="log-likelihood", title="a good model gives both the same")
    axes[0].legend(fontsize=7)
    with seeded(0):
        at_samples, at_rows = _log_weights(estimator, X)
    if len(at_samples) == 0:  # all columns are finite
        axes[1].set_axis_off()
        save(figure, path)
        return
    axes[1].hist(at_samples, 60, label="at proposal", **of_model)
    if at_rows is not None:
        axes[1].hist(at_rows, 60, density=True, color=DATA, alpha=0.4, label="at data")
    axes[1].set(xlabel="log-weight - log Z", title="data beyond the samples: do not trust log Z")
    axes[1].legend(fontsize=7)
    save(figure, path)


def _log_weights(estimator: EnergyDensity, X: Any) -> tuple[np.ndarray, np.ndarray | None]:
    model, q = estimator.model_, estimator.proposal_
    rows = None if X is None else estimator.standardise(X)
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
    at_data = None if X is None else pooled["log_weights_data"].numpy()
    return pooled["log_weights"].numpy(), at_data
