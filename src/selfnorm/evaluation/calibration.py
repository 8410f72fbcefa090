"""Are predictive laws honest, and are they sharp: PIT, coverage, CRPS, interval width.

Everything here takes plain arrays, so that any model can be judged by it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from selfnorm.errors import DataError
from selfnorm.plotting import new_figure, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "Calibration",
    "assess",
    "central_coverage",
    "crps_from_cdf",
    "crps_from_samples",
    "interval_coverage",
    "pit_distance",
    "plot_reliability",
    "reliability",
    "sharpness",
]


def central_coverage(pit: ArrayLike, coverage: float = 0.9) -> float:
    """Share of labels inside their central interval, from ``pit = F(y|x)``.

    >>> central_coverage([0.01, 0.2, 0.5, 0.97], 0.9)
    0.5
    """
    pit = _column(pit, "pit")
    tail = 0.5 * (1 - _level(coverage))
    return float(np.mean((pit >= tail) & (pit <= 1 - tail)))


def interval_coverage(y: ArrayLike, intervals: ArrayLike) -> float:
    """Share of labels ``(n,)`` inside intervals ``(n, 2)``.

    >>> interval_coverage([1.0, 5.0], [[0.0, 2.0], [0.0, 2.0]])
    0.5
    """
    y, intervals = _column(y, "y"), np.asarray(intervals, dtype=np.float64)
    if intervals.shape != (len(y), 2):
        raise DataError(f"expected intervals of shape ({len(y)}, 2), got {intervals.shape}")
    return float(np.mean((y >= intervals[:, 0]) & (y <= intervals[:, 1])))


def sharpness(intervals: ArrayLike) -> float:
    """Mean width of intervals ``(n, 2)``: narrower is better, at equal coverage.

    >>> sharpness([[0.0, 1.0], [0.0, 3.0]])
    2.0
    """
    intervals = np.asarray(intervals, dtype=np.float64)
    return float(np.mean(intervals[:, 1] - intervals[:, 0]))


def reliability(pit: ArrayLike, levels: ArrayLike | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Nominal levels and the share of labels below each: the diagonal for a calibrated model.

    >>> nominal, observed = reliability([0.1, 0.4, 0.6, 0.9], [0.5])
    >>> observed
    array([0.5])
    """
    pit = _column(pit, "pit")
    nominal = np.linspace(0.05, 0.95, 19) if levels is None else np.asarray(levels, dtype=float)
    return nominal, (pit[None, :] <= nominal[:, None]).mean(axis=1)


def pit_distance(pit: ArrayLike) -> float:
    """Kolmogorov distance of the PIT values from the uniform law: 0 for a calibrated model.

    >>> round(pit_distance([0.25, 0.75]), 3)
    0.25
    """
    pit = np.sort(_column(pit, "pit"))
    n = len(pit)
    steps = np.arange(n + 1) / n
    return float(max(np.max(steps[1:] - pit), np.max(pit - steps[:-1])))


def crps_from_samples(y: ArrayLike, samples: ArrayLike) -> np.ndarray:
    """Fair CRPS ``E|Y - y| - E|Y - Y'| / 2`` from samples ``(n, m)`` of each law, ``(n,)``.

    Lower is better; in the units of ``y``. Unbiased for every ``m >= 2``.

    >>> crps_from_samples([0.0], [[1.0, 3.0]])
    array([1.])
    """
    y = _column(y, "y")
    samples = np.sort(np.asarray(samples, dtype=np.float64), axis=-1)
    if samples.ndim != 2 or len(samples) != len(y) or samples.shape[1] < 2:
        raise DataError(f"expected samples ({len(y)}, m >= 2), got shape {samples.shape}")
    m = samples.shape[1]
    error = np.abs(samples - y[:, None]).mean(axis=1)
    # Sorted samples: sum over pairs |a - b| = 2 sum_i (2i - m + 1) a_i.
    weights = 2 * np.arange(m) - m + 1
    spread = 2 * (samples * weights).sum(axis=1) / (m * (m - 1))
    return error - 0.5 * spread


def crps_from_cdf(y: ArrayLike, grid: ArrayLike, cdf: ArrayLike) -> np.ndarray:
    """``integral (F(t) - [t >= y])^2 dt`` from ``cdf (n, g)`` on a grid ``(g,)`` or ``(n, g)``.

    ``F`` is linear between grid points, 0 before them and 1 behind; the jump at ``y`` is put
    between them exactly. Labels beyond the grid pay for the way to it.

    >>> grid = np.linspace(-8, 8, 4001)
    >>> float(crps_from_cdf([0.5], grid, (grid > 0.0)[None].astype(float))[0].round(2))
    0.5
    """
    y, cdf = _column(y, "y"), np.asarray(cdf, dtype=np.float64)
    grid = np.asarray(grid, dtype=np.float64)
    if cdf.ndim != 2 or len(cdf) != len(y) or grid.shape not in (cdf.shape, cdf.shape[1:]):
        raise DataError(
            f"expected cdf ({len(y)}, g) and a grid (g,) or ({len(y)}, g), got {cdf.shape} and "
            f"{grid.shape}"
        )
    grid = np.broadcast_to(grid, cdf.shape)
    rows = zip(y, grid, cdf, strict=True)
    at = np.array([np.interp(label, x, f, left=0.0, right=1.0) for label, x, f in rows])
    # The label becomes a point of the grid, so that each cell lies on one side of it.
    order = np.argsort(np.c_[grid, y], axis=1, kind="stable")
    points = np.take_along_axis(np.c_[grid, y], order, axis=1)
    f = np.take_along_axis(np.c_[cdf, at], order, axis=1)
    # On a cell F is linear: the integral of its square is w (f0^2 + f0 f1 + f1^2) / 3.
    above = points[:, :-1] >= y[:, None]
    a, b = (np.where(above, 1 - ends, ends) for ends in (f[:, :-1], f[:, 1:]))
    return (np.diff(points, axis=1) * (a * a + a * b + b * b) / 3).sum(1)


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

    def to_dict(self) -> dict[str, Any]:
        """All fields as a plain dict."""
        return asdict(self)


def assess(model: Any, X: ArrayLike, y: ArrayLike, *, level: float = 0.9) -> Calibration:
    """All of the above for an :class:`~selfnorm.EnergyRegressor` and held-out pairs."""
    pit, scores = model.pit_and_crps(X, y)
    return Calibration(
        log_prob=float(np.mean(model.log_prob(X, y))),
        crps=float(np.mean(scores)),
        coverage=central_coverage(pit, level),
        width=sharpness(model.predict_interval(X, level)),
        pit_distance=pit_distance(pit),
        level=level,
        n=len(pit),
    )


def _column(values: ArrayLike, name: str) -> np.ndarray:
    column = np.asarray(values, dtype=np.float64)
    if column.ndim != 1 or not len(column) or not np.isfinite(column).all():
        raise DataError(f"{name} must be a column of finite numbers, got shape {column.shape}")
    return column


def _level(coverage: float) -> float:
    if not 0.0 < coverage < 1.0:
        raise DataError(f"coverage must lie between 0 and 1, got {coverage}")
    return coverage


def plot_reliability(pits: dict[str, ArrayLike], path: str | Path | None = None) -> Figure:
    """Observed against nominal levels (left) and PIT histograms (right) of one or more models."""
    figure, (left, right) = new_figure(1, 2, figsize=(7.0, 3.2))
    left.plot([0, 1], [0, 1], color="black", linewidth=0.8)
    for name, pit in pits.items():
        nominal, observed = reliability(pit)
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
