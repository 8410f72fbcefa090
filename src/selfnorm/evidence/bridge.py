r"""Bridge sampling between draws of ``p`` and samples of ``q``, in log space.

With ``l = log p~ - log q``, ``s1`` and ``s2 = 1 - s1`` the shares of (effective) draws and of
samples, the optimal bridge of Meng & Wong (1996) solves

.. math:: Z = \frac{E_q[w / (s_1 w + s_2 Z)]}{E_p[1 / (s_1 w + s_2 Z)]}, \quad w = e^l.

Both terms are bounded, so tails of ``p`` heavier or lighter than those of ``q`` do no harm as long
as the two overlap.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from scipy.special import logsumexp

from selfnorm.errors import DataError
from selfnorm.evaluation import data_side_check, tail_index
from selfnorm.evidence.draws import effective_draws

TOO_FEW = 50  # effective draws or samples in the overlap
LEAN = math.log(16)  # of the two bridges that must agree


@dataclass(frozen=True)
class Side:
    """What one ``q``, fitted to one part of the draws, says with the other part.

    ``log_weights_draws (chains, n)`` and ``log_weights (m,)`` are ``log p~ - log q`` at held-out
    draws and at samples of ``q``; ``-inf`` where a sample is outside the support of ``p``.
    """

    log_weights_draws: np.ndarray
    log_weights: np.ndarray
    log_z: float
    variance_draws: float  # what the draws and the samples put into the variance of log_z
    variance_samples: float
    effective_draws: float
    overlap: float  # 1 where p and q are the same
    pareto_k_draws: float  # of q / p~ at the draws
    pareto_k_samples: float  # of p~ / q at the samples
    share_beyond: float  # of the draws whose weight is above every sample's
    drift: float  # what log_z changes by from a bridge near the draws to one near the samples
    drift_se: float

    @property
    def support_share(self) -> float:
        """Share of ``q``'s samples inside the support of ``p``."""
        return float(np.isfinite(self.log_weights).mean())

    def lower(self) -> tuple[float, float]:
        """``E_q[log p~ - log q] <= log Z`` for ``q`` cut to the support, and its standard error."""
        inside = self.log_weights[np.isfinite(self.log_weights)]
        share = self.support_share
        variance = inside.var() / len(inside) + (1 - share) / (share * len(self.log_weights))
        return float(inside.mean() + math.log(share)), math.sqrt(variance)

    def upper(self) -> tuple[float, float]:
        """``E_p[log p~ - log q] >= log Z`` for ``q`` cut to the support, and its standard error."""
        values, share = self.log_weights_draws, self.support_share
        variance = values.var() / effective_draws(values)
        variance += (1 - share) / (share * len(self.log_weights))
        return float(values.mean() + math.log(share)), math.sqrt(variance)

    def importance(self) -> float:
        """``log mean_q(p~ / q)``, the ``b`` that maximises the self-normalised likelihood."""
        return float(logsumexp(self.log_weights) - math.log(len(self.log_weights)))

    def reciprocal(self) -> float:
        """``-log mean_p(q / p~)``, corrected for the share of ``q`` inside the support."""
        return reciprocal(self.log_weights_draws)[0] + math.log(self.support_share)


def reciprocal(log_weights_draws: np.ndarray) -> tuple[float, float]:
    """``-log mean_p(q / p~)`` of draws ``(chains, n)`` and its standard error."""
    inverse = -log_weights_draws
    log_mean = float(logsumexp(inverse) - math.log(inverse.size))
    terms = np.exp(inverse - log_mean)
    return -log_mean, math.sqrt(terms.var() / effective_draws(terms))


def bridge(log_weights_draws: np.ndarray, log_weights: np.ndarray) -> Side:
    """Solve for ``Z`` by the fixed-point iteration; standard error by the delta method."""
    l1, l2 = log_weights_draws, log_weights
    if not np.isfinite(l2).any():
        raise DataError(
            "log_density is -inf (or NaN) at every sample drawn close to the draws: draws and "
            "density do not belong together; check the order of the columns and the support"
        )
    n_effective = effective_draws(l1)
    m = len(l2)
    log_s1 = math.log(n_effective / (n_effective + m))
    log_s2 = math.log(m / (n_effective + m))
    log_z = float(np.median(l1))

    def terms(log_z: float) -> tuple[np.ndarray, np.ndarray]:
        of_samples = l2 - np.logaddexp(log_s1 + l2, log_s2 + log_z)
        of_draws = log_z - np.logaddexp(log_s1 + l1, log_s2 + log_z)
        return of_draws, of_samples

    for _ in range(5000):
        of_draws, of_samples = terms(log_z)
        step = logsumexp(of_samples) - math.log(m) - logsumexp(of_draws) + math.log(l1.size)
        log_z += float(step)
        if abs(step) < 1e-9:
            break
    of_draws, of_samples = terms(log_z)
    f1, f2 = np.exp(of_draws), np.exp(of_samples)
    drift, drift_se = _drift(l1 - log_z, l2 - log_z, log_s1, log_s2)
    variance_draws = f1.var() / f1.mean() ** 2 / effective_draws(f1)
    variance_samples = f2.var() / f2.mean() ** 2 / m
    draws, samples = (torch.from_numpy(t.ravel().copy()) for t in (l1, l2))
    return Side(
        log_weights_draws=l1,
        log_weights=l2,
        log_z=log_z,
        variance_draws=float(variance_draws),
        variance_samples=float(variance_samples),
        effective_draws=n_effective,
        overlap=float(min(1.0, f1.mean())),
        pareto_k_draws=tail_index(-draws),
        pareto_k_samples=tail_index(samples),
        share_beyond=data_side_check(draws, samples).share,
        drift=drift,
        drift_se=drift_se,
    )


def _drift(l1: np.ndarray, l2: np.ndarray, log_s1: float, log_s2: float) -> tuple[float, float]:
    """``log Z`` of a bridge leaning on the samples minus that of one leaning on the draws; its se.

    ``Z = E_q[w h] / E_p[h]`` for every ``h``. If the draws have another density than ``p``, and
    ``q`` follows them, both bounds may agree and be wrong; then ``Z`` changes with ``h``.
    """

    def relative_terms(log_h: np.ndarray) -> tuple[np.ndarray, float]:
        log_mean = float(logsumexp(log_h) - math.log(log_h.size))
        return np.exp(log_h - log_mean), log_mean

    value, differences = 0.0, [np.zeros_like(l2), np.zeros_like(l1)]
    for sign in (1, -1):
        at_samples = relative_terms(l2 - np.logaddexp(log_s1 + l2, log_s2 + sign * LEAN))
        at_draws = relative_terms(-np.logaddexp(log_s1 + l1, log_s2 + sign * LEAN))
        value += sign * (at_samples[1] - at_draws[1])
        differences[0] += sign * at_samples[0]
        differences[1] += sign * at_draws[0]
    variance = differences[0].var() / l2.size + differences[1].var() / effective_draws(
        differences[1]
    )
    return value, math.sqrt(variance)
