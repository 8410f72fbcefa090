"""What an estimate of ``log Z`` needs of its weights, gathered chunk by chunk.

The mean needs one running sum, the effective sample size two, Pareto k only the ``3 sqrt(M)``
largest weights: memory does not grow with ``M`` beyond that.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from selfnorm import functional as F

__all__ = ["WeightStream"]

_ALWAYS_KEPT = 500  # the narrow reading of the tail index looks at so many


class WeightStream:
    """Running summary of ``n_total`` log-weights.

    Weights that are NaN or infinite count as zero, and set :attr:`broken`.

    Example:
        >>> stream = WeightStream(6)
        >>> stream.update(torch.tensor([0.0, 1.0, 2.0]))
        >>> stream.update(torch.tensor([-1.0, 0.5, -math.inf]))
        >>> log_w = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5, -math.inf])
        >>> abs(stream.log_mean - float(F.log_mean_exp(log_w))) < 1e-6
        True
    """

    def __init__(self, n_total: int) -> None:
        self.n_total = n_total
        tail = min(n_total // 5, math.ceil(3 * math.sqrt(n_total)))
        self._n_kept = min(n_total, max(tail + 1, _ALWAYS_KEPT))
        self.n = 0
        self.top = torch.empty(0, dtype=torch.float64)
        self._log_sum = torch.tensor(-math.inf, dtype=torch.float64)
        self._log_sum_squares = self._log_sum
        self._n_broken = torch.zeros((), dtype=torch.long)

    @classmethod
    def of(cls, log_w: Tensor | WeightStream) -> WeightStream:
        """The summary of weights at hand; a summary passes through."""
        if isinstance(log_w, WeightStream):
            return log_w
        stream = cls(log_w.numel())
        stream.update(log_w)
        return stream

    def update(self, log_w: Tensor) -> None:
        """Take in a chunk of log-weights."""
        log_w = log_w.detach().flatten().double()
        if self.n == 0:
            device = log_w.device
            self.top, self._n_broken = self.top.to(device), self._n_broken.to(device)
            self._log_sum = self._log_sum_squares = self._log_sum.to(device)
        self.n += log_w.numel()
        broken = torch.isnan(log_w) | torch.isposinf(log_w)
        self._n_broken = self._n_broken + broken.sum()
        log_w = log_w.masked_fill(broken, -math.inf)
        self._log_sum = torch.logaddexp(self._log_sum, torch.logsumexp(log_w, 0))
        squares = torch.logsumexp(2 * log_w, 0)
        self._log_sum_squares = torch.logaddexp(self._log_sum_squares, squares)
        best = torch.topk(log_w, min(self._n_kept, log_w.numel())).values
        self.top = torch.cat([self.top, best]).sort(descending=True).values[: self._n_kept]

    @property
    def broken(self) -> bool:
        """Whether a weight was NaN or infinite."""
        return bool(self._n_broken > 0)

    @property
    def largest(self) -> float:
        """The largest finite log-weight, ``-inf`` if there is none."""
        return float(self.top[0]) if self.n else -math.inf

    @property
    def log_mean(self) -> float:
        """``log mean(w)``."""
        return float(self._log_sum) - math.log(max(self.n, 1))

    @property
    def ess(self) -> float:
        """Effective sample size as a fraction of the samples."""
        if math.isinf(self.largest):
            return 0.0
        log_ess = 2 * self._log_sum - self._log_sum_squares
        return min(float(torch.exp(log_ess)) / self.n, 1.0)  # equal weights round to above 1

    def pareto_k(self) -> float:
        """Pareto k of all weights; see :func:`selfnorm.functional.pareto_k`."""
        return float(F.pareto_k(self.top, n_total=self.n))
