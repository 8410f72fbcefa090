"""Simple models that a model must beat, in the measure of the model's own log-likelihoods."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from scipy.special import log_ndtr
from sklearn.linear_model import RidgeCV

from selfnorm.columns import CodedColumns, Part, knots_for
from selfnorm.distributions import TableMixture

N_FOLDS = 5

LogDensity = Callable[[np.ndarray], np.ndarray]


def cross_fitted(
    fit: Callable[[np.ndarray], LogDensity], rows: np.ndarray, seed: int
) -> np.ndarray:
    """Log-likelihoods ``(n,)`` of rows under distributions that were fitted to the other folds."""
    fold = np.random.default_rng(seed).permutation(len(rows)) % min(N_FOLDS, len(rows))
    out = np.zeros(len(rows))
    for k in np.unique(fold):
        out[fold == k] = fit(rows[fold != k])(rows[fold == k])
    return out


def gaussian(parts: tuple[Part, ...], coded: np.ndarray) -> LogDensity:
    """A Gaussian of the numbers in coded rows ``(n, p, 2)``, categories and point masses apart.

    Of a number with cells it gives the mass of the cell: the measure is the model's.
    """
    x = torch.from_numpy(coded)
    density = TableMixture(parts).double()
    packed, _ = density.columns.fit(x, straight=True).pack(x)
    return _log_density_of(density.fit(packed, torch.ones(len(x), 1, dtype=torch.float64)))


def independent_columns(parts: tuple[Part, ...], coded: np.ndarray) -> LogDensity:
    """The product of the marginals of coded rows ``(n, p, 2)``: see :func:`marginals`."""
    return marginals(
        CodedColumns(parts, knots_for(len(coded))).double().fit(torch.from_numpy(coded))
    )


def marginals(columns: CodedColumns) -> LogDensity:
    """The product of the marginals that columns were fitted to, of any kind; gaps are left out.

    Levels and point masses have their frequencies; numbers a density that is linear in normal
    scores between quantiles, or the masses of their cells under it.
    """
    density = TableMixture(columns.parts, n_knots=columns.n_knots).double()
    density.columns.load_state_dict(columns.state_dict())
    shares = columns.log_share[density.finite].double()
    density.log_codes[0] = shares[:, : density.log_codes.shape[-1]].where(
        density.log_codes[0].isfinite(), -torch.inf
    )
    return _log_density_of(density)


def _log_density_of(density: TableMixture) -> LogDensity:
    def log_density(rows: np.ndarray) -> np.ndarray:
        packed, slope = density.columns.pack(torch.from_numpy(rows))
        log_p: np.ndarray = (density.log_prob(packed) + slope.sum(-1)).numpy()
        return log_p

    return log_density


def gaussian_target(rows: np.ndarray, step: float) -> LogDensity:
    """A Gaussian of the targets, which are the last column, whatever the inputs."""
    y = rows[:, -1]
    return _around(lambda x: np.full(len(x), y.mean()), float(y.std()), step)


def linear_regression(rows: np.ndarray, step: float) -> LogDensity:
    """A Gaussian around a linear function of the inputs ``rows[:, :-1]``."""
    X, y = rows[:, :-1], rows[:, -1]
    mean, scale = X.mean(0), np.where(X.std(0) > 0, X.std(0), 1.0)
    line = RidgeCV(np.logspace(-3, 4, 15)).fit((X - mean) / scale, y)
    residual = y - line.predict((X - mean) / scale)
    left = max(len(y) - X.shape[1] - 1, len(y) / 4)  # degrees of freedom
    spread = math.sqrt(float((residual**2).sum()) / left)
    return _around(lambda x: line.predict((x - mean) / scale), spread, step)


def _around(centre: LogDensity, spread: float, step: float) -> LogDensity:
    """Log-density around a centre; of whole numbers the log-mass of their steps."""
    spread = max(spread, 1e-12)

    def log_density(rows: np.ndarray) -> np.ndarray:
        z = (rows[:, -1] - centre(rows[:, :-1])) / spread
        if step == 0:
            log_p: np.ndarray = -0.5 * z**2 - math.log(spread) - 0.5 * math.log(2 * math.pi)
            return log_p
        half = 0.5 * step / spread
        z = -np.abs(z)  # the lower tail has the digits
        upper, lower = log_ndtr(z + half), log_ndtr(z - half)
        mass: np.ndarray = upper + np.log1p(-np.exp(np.minimum(lower - upper, -1e-12)))
        return mass

    return log_density
