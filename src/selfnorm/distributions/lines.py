"""Linear regressions of columns on those before them: where the factors of a chain begin."""

from __future__ import annotations

import numpy as np

STRENGTHS = 10.0 ** np.arange(-6.0, 2.1, 0.5)  # of the ridge, per row
LEAST_SPREAD = 1e-4  # of what is left, in units of the columns


def ridge_lines(
    z: np.ndarray, order: np.ndarray, weights: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ridge regressions of each column of ``z (n, d)`` on those before it in ``order``.

    The strength of each ridge is the one under which rows left out are foretold best (the residual
    of a row left out is its own residual over one minus its leverage), and so is the spread.

    Args:
        z: rows in units of about one.
        order: the columns, first to last.
        weights: ``(n,)`` how much a row counts; 0: not at all.

    Returns:
        Slopes ``(d, d)``, spread ``(d,)`` and residuals ``(n,)`` of all rows, those that
        count as if they had been left out.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> a, b = rng.normal(size=(2, 500))
        >>> slopes, spread, _ = ridge_lines(np.c_[a, a + 0.1 * b], np.array([0, 1]), np.ones(500))
        >>> slopes.round(2)[1].tolist(), spread.round(1).tolist()
        ([1.0, 0.0], [1.0, 0.1])
    """
    d = z.shape[1]
    root = np.sqrt(weights / weights.sum())[:, None]  # squares add to one
    slopes, spread, left = np.zeros((d, d)), np.ones(d), z.copy()
    rows = root * z[:, order]
    counted = root[:, 0] > 0
    # the columns before a place are the first of an orthogonal basis, turned by a small matrix
    basis, upper = np.linalg.qr(rows[counted])
    for place, i in enumerate(order):
        y = rows[counted, place]
        if place == 0 or basis.shape[1] == 0:
            spread[i] = np.sqrt((y**2).sum())
            continue
        before = order[:place]
        turn, s, vt = np.linalg.svd(upper[:place, :place], full_matrices=False)
        u = basis[:, : len(turn)] @ turn
        toward = u.T @ y
        kept = (s**2 / (s**2 + STRENGTHS[:, None])).T  # (place, strengths)
        leverage = u**2 @ kept + root[counted] ** 2
        out = (y[:, None] - u @ (kept * toward[:, None])) / np.clip(1 - leverage, 1e-3, None)
        squares = (out**2).sum(0)
        best = int(squares.argmin())
        slopes[i, before] = vt.T @ (s / (s**2 + STRENGTHS[best]) * toward)
        spread[i] = np.sqrt(squares[best])
        left[:, i] = z[:, i] - z[:, before] @ slopes[i, before]
        left[counted, i] = out[:, best] / root[counted, 0]
    return slopes, np.maximum(spread, LEAST_SPREAD), left
