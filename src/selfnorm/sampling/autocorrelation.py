"""Effective sample size and R-hat of Markov chains."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def chain_ess(draws: Tensor) -> float:
    r"""Effective number of independent draws in ``draws (steps, chains, d)``, worst coordinate.

    ``ESS = steps * chains / (1 + 2 sum_t rho_t)`` with the autocorrelations of all chains combined
    and Geyer's initial monotone sequence as cut-off (Vehtari et al. 2021).

    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> 45_000 < chain_ess(torch.randn(1000, 50, 1)) < 55_000
    True
    """
    steps, chains, d = draws.shape
    if steps < 4:
        return float(steps * chains)
    return min(_ess_of(draws[..., i].double()) for i in range(d))


def r_hat(draws: Tensor) -> float:
    """Gelman-Rubin statistic of split chains ``(steps, chains, d)``, worst coordinate; 1 is good.

    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> r_hat(torch.randn(250, 4, 1)) < 1.02
    True
    """
    half = draws.shape[0] // 2
    split = torch.cat([draws[:half], draws[half : 2 * half]], 1).double()
    within = split.var(0).mean(0)
    between = split.mean(0).var(0)
    total = (half - 1) / half * within + between
    return float((total / within.clamp_min(1e-300)).sqrt().max())


def _ess_of(x: Tensor) -> float:
    steps, chains = x.shape
    centered = x - x.mean(0)
    size = 2 ** (2 * steps - 1).bit_length()
    spectrum = torch.fft.rfft(centered, n=size, dim=0).abs() ** 2
    autocovariance = (torch.fft.irfft(spectrum, n=size, dim=0)[:steps] / steps).mean(1)
    within = float(autocovariance[0]) * steps / (steps - 1)
    total = within * (steps - 1) / steps
    if chains > 1:
        total += float(x.mean(0).var())
    if total <= 0.0:  # chains that never moved
        return 1.0
    rho = 1.0 - (within - autocovariance * steps / (steps - 1)) / total
    rho[0] = 1.0
    pairs = rho[: 2 * (steps // 2)].reshape(-1, 2).sum(1)
    negative = (pairs < 0).nonzero()
    end = int(negative[0]) if len(negative) else len(pairs)
    time = -1.0 + 2.0 * float(torch.cummin(pairs[: max(end, 1)], 0).values.sum())
    # antithetic chains can have a time below 1; the cap keeps one lucky estimate from a wild value
    return steps * chains / max(time, 1.0 / max(math.log10(steps * chains), 1.0))
