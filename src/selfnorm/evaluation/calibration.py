"""Are predictive distributions honest, and are they sharp: PIT, coverage, CRPS, interval width.

Everything here takes plain numbers, so that any model can be judged by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy.stats import kstest
from torch import Tensor

from selfnorm.errors import DataError


def check_coverage(coverage: float) -> float:
    """A share of the mass strictly between 0 and 1, or an error."""
    if not 0.0 < coverage < 1.0:
        raise DataError(f"coverage must lie between 0 and 1, got {coverage}")
    return coverage


def central_coverage(pit: ArrayLike, coverage: float = 0.9) -> float:
    """Share of labels inside their central interval, from ``pit = F(y|x)``."""
    pit, tail = _column(pit, "pit"), 0.5 * (1 - check_coverage(coverage))
    return float(np.mean((pit >= tail) & (pit <= 1 - tail)))


def pit_distance(pit: ArrayLike) -> float:
    """Kolmogorov distance of the PIT values from uniform ones: 0 for a calibrated model."""
    return float(kstest(_column(pit, "pit"), "uniform").statistic)


def crps_from_cdf(y: Tensor, grid: Tensor, cdf: Tensor) -> Tensor:
    """``integral (F(t) - [t >= y])^2 dt`` of each distribution at its label, in the units of ``y``.

    ``F`` is linear between grid points, 0 before the first and 1 behind the last; lower is better.

    Args:
        y: ``(n,)`` labels.
        grid: ``(g,)`` or ``(n, g)`` points in ascending order.
        cdf: ``(n, g)`` distribution functions there.
    """
    grid, label = grid.expand_as(cdf), y.unsqueeze(-1)
    left, right, f_left, f_right = grid[:, :-1], grid[:, 1:], cdf[:, :-1], cdf[:, 1:]
    # The label splits its cell in two, and leaves one part of every other cell empty.
    split = torch.minimum(torch.maximum(label, left), right)
    share = (split - left) / (right - left).clamp_min(torch.finfo(grid.dtype).tiny)
    f_split = f_left + share * (f_right - f_left)
    below = (split - left) * _mean_square(f_left, f_split)
    above = (right - split) * _mean_square(1 - f_split, 1 - f_right)
    outside = (grid[:, :1] - label).clamp_min(0) + (label - grid[:, -1:]).clamp_min(0)
    return (below + above).sum(-1) + outside.squeeze(-1)


def _mean_square(a: Tensor, b: Tensor) -> Tensor:
    """Mean square of a linear function that goes from ``a`` to ``b``."""
    return (a * a + a * b + b * b) / 3


@dataclass(frozen=True)
class Calibration:
    """How honest and how sharp a regressor is on held-out pairs.

    Attributes:
        log_prob: mean log-density in nats (higher is better).
        crps: mean CRPS in the units of ``y`` (lower is better).
        coverage: share of labels inside their central intervals of the given ``level``.
        width: mean width of those intervals.
        pit_distance: Kolmogorov distance of the PIT values from uniform.
        level: nominal coverage.
        n: number of pairs.
    """

    log_prob: float
    crps: float
    coverage: float
    width: float
    pit_distance: float
    level: float
    n: int


def assess(model: Any, X: ArrayLike, y: ArrayLike, *, level: float = 0.9) -> Calibration:
    """All of the above for an :class:`~selfnorm.EnergyRegressor` and held-out pairs."""
    pit, scores = model.pit_and_crps(X, y)
    intervals = np.asarray(model.predict_interval(X, level), dtype=np.float64)
    return Calibration(
        log_prob=float(np.mean(model.log_prob(X, y))),
        crps=float(np.mean(scores)),
        coverage=central_coverage(pit, level),
        width=float(np.mean(intervals[:, 1] - intervals[:, 0])),
        pit_distance=pit_distance(pit),
        level=level,
        n=len(pit),
    )


def _column(values: ArrayLike, name: str) -> np.ndarray:
    column = np.asarray(values, dtype=np.float64)
    if column.ndim != 1 or not len(column) or not np.isfinite(column).all():
        raise DataError(f"{name} must be a column of finite numbers, got shape {column.shape}")
    return column
