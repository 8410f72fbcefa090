"""Simple laws that a model must beat, in the measure of the model's own log-likelihoods."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from scipy.special import log_ndtr, ndtr
from sklearn.linear_model import RidgeCV

from selfnorm.columns import GAP, UNSEEN, CodedColumns, Part, knots_for

N_FOLDS = 5
_LEAST = 1e-300  # mass of a cell that no digit is left of

LogLaw = Callable[[np.ndarray], np.ndarray]


def cross_fitted(fit: Callable[[np.ndarray], LogLaw], rows: np.ndarray, seed: int) -> np.ndarray:
    """Log-likelihoods ``(n,)`` of rows under laws that were fitted to the other folds."""
    fold = np.random.default_rng(seed).permutation(len(rows)) % min(N_FOLDS, len(rows))
    out = np.zeros(len(rows))
    for k in np.unique(fold):
        out[fold == k] = fit(rows[fold != k])(rows[fold == k])
    return out


def continuous(parts: tuple[Part, ...], coded: np.ndarray) -> bool:
    """Whether rows hold a continuous number in every column: a Gaussian has the same measure."""
    numbers = all(part.rest and part.n_codes == 0 and part.step == 0 for part in parts)
    return numbers and bool((coded[..., 0] == 0).all())


def gaussian(coded: np.ndarray) -> LogLaw:
    """A Gaussian fitted to coded rows ``(n, p, 2)`` of continuous numbers."""
    x = coded[..., 1]
    mean, scale = x.mean(0), np.where(x.std(0) > 0, x.std(0), 1.0)
    z = (x - mean) / scale
    d = x.shape[1]
    # as much weight on independence as d rows have: few rows would give a singular matrix
    covariance = (z.T @ z + d * np.eye(d)) / (len(z) + d)
    root = np.linalg.cholesky(covariance)
    constant = -np.log(scale).sum() - np.log(np.diag(root)).sum() - d / 2 * math.log(2 * math.pi)

    def log_law(rows: np.ndarray) -> np.ndarray:
        white = np.linalg.solve(root, ((rows[..., 1] - mean) / scale).T)
        found: np.ndarray = constant - 0.5 * (white**2).sum(0)
        return found

    return log_law


def independent_columns(parts: tuple[Part, ...], coded: np.ndarray) -> LogLaw:
    """The product of the marginals of coded rows ``(n, p, 2)``: see :func:`marginals`."""
    return marginals(
        CodedColumns(parts, knots_for(len(coded))).double().fit(torch.from_numpy(coded))
    )


def marginals(columns: CodedColumns) -> LogLaw:
    """The product of the marginals that columns were fitted to, of any kind; gaps are left out.

    Levels and point masses have their frequencies; numbers a density that is linear in normal
    scores between quantiles, or the masses of their cells under it.
    """
    parts = columns.parts
    share = columns.log_share.numpy()
    n_codes = np.array([part.n_codes for part in parts])
    n_values = n_codes - np.array([part.gap for part in parts])
    has_rest = np.array([part.rest for part in parts])
    unseen = np.array([part.unseen for part in parts])
    step = np.array([part.step for part in parts])

    def log_law(rows: np.ndarray) -> np.ndarray:
        packed, slope = columns.pack(torch.from_numpy(rows))
        code, z, left, right = np.moveaxis(packed.numpy(), -1, 0)
        upper = left > 0  # where the other tail has the digits
        ends = np.where(upper, -right, left), np.where(upper, -left, right)
        mass = np.maximum(ndtr(ends[1]) - ndtr(ends[0]), _LEAST)
        density = slope.numpy() - 0.5 * z**2 - 0.5 * math.log(2 * math.pi)
        number = share[np.arange(len(parts)), n_codes] + np.where(step > 0, np.log(mass), density)
        places = np.clip(code, 0, n_codes).astype(int)
        known = share[np.arange(len(parts)), places] + np.log1p(-unseen)
        # the cell of numbers at the place of a point mass counts for it, too
        shared = (step > 0) & (code >= 0) & (code < n_values) & has_rest
        known = np.where(shared, np.logaddexp(known, number), known)
        out = np.where(code == n_codes, number, known)
        out = np.where(code == UNSEEN, np.log(np.where(unseen > 0, unseen, 1.0)), out)
        total: np.ndarray = np.where(code == GAP, 0.0, out).sum(-1)
        return total

    return log_law


def gaussian_target(rows: np.ndarray, step: float) -> LogLaw:
    """A Gaussian of the targets, which are the last column, whatever the inputs."""
    y = rows[:, -1]
    return _around(lambda x: np.full(len(x), y.mean()), float(y.std()), step)


def linear_regression(rows: np.ndarray, step: float) -> LogLaw:
    """A Gaussian around a linear function of the inputs ``rows[:, :-1]``."""
    X, y = rows[:, :-1], rows[:, -1]
    mean, scale = X.mean(0), np.where(X.std(0) > 0, X.std(0), 1.0)
    line = RidgeCV(np.logspace(-3, 4, 15)).fit((X - mean) / scale, y)
    residual = y - line.predict((X - mean) / scale)
    left = max(len(y) - X.shape[1] - 1, len(y) / 4)  # degrees of freedom
    spread = math.sqrt(float((residual**2).sum()) / left)
    return _around(lambda x: line.predict((x - mean) / scale), spread, step)


def _around(centre: LogLaw, spread: float, step: float) -> LogLaw:
    """Log-density around a centre; of whole numbers the log-mass of their steps."""
    spread = max(spread, 1e-12)

    def log_law(rows: np.ndarray) -> np.ndarray:
        z = (rows[:, -1] - centre(rows[:, :-1])) / spread
        if step == 0:
            found: np.ndarray = -0.5 * z**2 - math.log(spread) - 0.5 * math.log(2 * math.pi)
            return found
        half = 0.5 * step / spread
        z = -np.abs(z)  # the lower tail has the digits
        upper, lower = log_ndtr(z + half), log_ndtr(z - half)
        mass: np.ndarray = upper + np.log1p(-np.exp(np.minimum(lower - upper, -1e-12)))
        return mass

    return log_law
