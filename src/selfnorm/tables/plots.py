"""Figures of a fitted table model: marginals, training curves, diagnostics (needs matplotlib)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from selfnorm._context import seeded
from selfnorm.chain import row_bounds
from selfnorm.density import EBM
from selfnorm.evaluation import draw_log_weights
from selfnorm.plotting import new_figure, plot_history, plot_reliability, save

if TYPE_CHECKING:
    from selfnorm.tables.density import EnergyDensity
    from selfnorm.tables.regressor import EnergyRegressor

MAX_COLUMNS = 6
MAX_POINTS = 2000
MODEL, DATA = "#c44e52", "#4c72b0"


def plot_density_model(
    estimator: EnergyDensity,
    folder: Path,
    X: np.ndarray | None,
    names: Sequence[str],
    seed: int | None = 0,
) -> list[Path]:
    """Write ``marginals.png``, ``training.png`` and ``diagnostics.png``; return their paths."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    drawn = estimator.sample(MAX_POINTS, random_state=seed)
    X = None if X is None else X[:: max(1, len(X) // MAX_POINTS)]
    paths = [folder / f"{name}.png" for name in ("marginals", "training", "diagnostics")]
    _marginals(drawn, X, names, paths[0])
    plot_history(estimator.history_, paths[1])
    _diagnostics(estimator, drawn, X, paths[2])
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


def _marginals(drawn: np.ndarray, X: np.ndarray | None, names: Sequence[str], path: Path) -> None:
    d = min(drawn.shape[1], MAX_COLUMNS)
    figure, axes = new_figure(d, d, figsize=(2.1 * d + 1, 2.1 * d + 1))
    axes = np.array(axes).reshape(d, d)
    for i in range(d):
        for j in range(d):
            ax = axes[i, j]
            if j > i:
                ax.set_axis_off()
                continue
            everything = drawn if X is None else np.concatenate([drawn, X])
            low, high = np.quantile(everything[:, [j, i]], [0.005, 0.995], axis=0)
            if i == j:
                edges = np.linspace(low[0], high[0], 41) if high[0] > low[0] else 40
                if X is not None:
                    ax.hist(X[:, i], edges, density=True, color=DATA, alpha=0.4, label="data")
                ax.hist(
                    drawn[:, i], edges, density=True, histtype="step", color=MODEL, label="model"
                )
                if i == 0:
                    ax.legend(fontsize=7)
            else:
                if X is not None:
                    ax.plot(X[:, j], X[:, i], ".", ms=1.5, color=DATA, alpha=0.4)
                ax.plot(drawn[:, j], drawn[:, i], ".", ms=1.5, color=MODEL, alpha=0.4)
                ax.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]))
            if i == d - 1:
                ax.set_xlabel(names[j])
            if j == 0:
                ax.set_ylabel(names[i])
            ax.tick_params(labelsize=6)
    save(figure, path)


def _diagnostics(
    estimator: EnergyDensity, drawn: np.ndarray, X: np.ndarray | None, path: Path
) -> None:
    """Log-densities of model samples and data, and the log-weights behind ``log Z``."""
    figure, axes = new_figure(1, 2, figsize=(9, 3.6))
    of_model = {"density": True, "histtype": "step", "color": MODEL}
    axes[0].hist(estimator.score_samples(drawn), 60, label="model samples", **of_model)
    if X is not None:
        axes[0].hist(
            estimator.score_samples(X), 60, density=True, color=DATA, alpha=0.4, label="data"
        )
    axes[0].axvline(estimator.offset_, color="0.4", ls=":", label="outlier threshold")
    axes[0].set(xlabel="log-density", title="a good model gives both the same")
    axes[0].legend(fontsize=7)
    with seeded(0):
        at_samples, at_rows = _log_weights(estimator, X)
    axes[1].hist(at_samples, 60, label="at proposal", **of_model)
    if at_rows is not None:
        axes[1].hist(at_rows, 60, density=True, color=DATA, alpha=0.4, label="at data")
    axes[1].set(xlabel="log-weight - log Z", title="data beyond the samples: do not trust log Z")
    axes[1].legend(fontsize=7)
    save(figure, path)


def _log_weights(
    estimator: EnergyDensity, X: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray | None]:
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
