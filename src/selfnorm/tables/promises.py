"""What may be promised of anomalies by scores of normal rows: p-values, false discoveries."""

from __future__ import annotations

import numpy as np


def conformal(
    calibration: np.ndarray,
    scores: np.ndarray,
    ties: np.ndarray,
    weights: tuple[np.ndarray, np.ndarray] | None = None,
) -> np.ndarray:
    r"""p-values ``(m,)`` of scores, by those ``(n,)`` of normal rows that nothing was fitted to.

    ``p = (sum_i w_i 1[s_i > s] + u (w + sum_i w_i 1[s_i = s])) / (sum_i w_i + w)``: a normal row
    and those of calibration can change places, so that ``P(p <= a) = a`` where ties are broken by
    uniform numbers ``u``, and ``P(p <= a) <= a`` with ``u = 1``.

    Example:
        >>> conformal(np.arange(9.0), np.array([10.0, 4.0, -1.0]), np.ones(3))
        array([0.1, 0.6, 1. ])
    """
    order = np.argsort(calibration)
    seen = calibration[order]
    of_seen, own = (np.ones(len(seen)), np.ones(len(scores))) if weights is None else weights
    below = np.concatenate([[0.0], np.cumsum(of_seen[order])])
    as_low, lower = (below[np.searchsorted(seen, scores, side)] for side in ("right", "left"))
    above, equal = below[-1] - as_low, as_low - lower
    return np.asarray((above + ties * (own + equal)) / (below[-1] + own))


def benjamini_hochberg(p: np.ndarray, fdr: float) -> np.ndarray:
    """``(m,)`` of truth values: which hypotheses are rejected at a false discovery rate.

    Example:
        >>> benjamini_hochberg(np.array([0.01, 0.9, 0.03, 0.2]), 0.1)
        array([ True, False,  True, False])
    """
    order = np.argsort(p, kind="stable")
    low = np.flatnonzero(p[order] <= fdr * np.arange(1, len(p) + 1) / len(p))
    rejected = np.zeros(len(p), dtype=bool)
    rejected[order[: low[-1] + 1 if len(low) else 0]] = True
    return rejected
