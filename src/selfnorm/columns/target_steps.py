"""Targets that repeat values: how far apart, so that they can be spread into a density."""

from __future__ import annotations

import numpy as np

__all__ = ["label_step"]


def label_step(y: np.ndarray) -> float:
    """Width over which the values of a target should be spread: 0 for a continuous one.

    At most a hundred distinct values, each ten times on average, are steps of their smallest gap.
    Values that differ by rounding alone (0.3 and 0.1 + 0.2) are one. A value that is a twentieth of
    all (zeros, a cap) is spread by a hundredth of the deviation, that of the middle half of the
    other values if it is smaller: long tails do not widen it.

    >>> label_step(np.repeat([3.0, 4.0, 5.0], 100)), label_step(np.linspace(0, 1, 300))
    (1.0, 0.0)
    """
    values, counts = np.unique(y, return_counts=True)
    # far from zero the first bound may exceed the step, the second does not
    rounding = min(1e-9 * np.abs(values).max(), 1e-6 * y.std())
    distinct = np.r_[True, np.diff(values) > rounding]
    values, counts = values[distinct], np.add.reduceat(counts, np.flatnonzero(distinct))
    if len(values) < 2:
        return 0.0
    if len(values) <= min(100, len(y) / 10):
        return float(np.diff(values).min())
    if counts.max() >= max(10, 0.05 * len(y)):
        others = y[np.abs(y - values[counts.argmax()]) > rounding]
        low, high = np.percentile(others, [25, 75])
        return float(0.01 * min(y.std(), (high - low) / 1.349 or y.std()))
    return 0.0
