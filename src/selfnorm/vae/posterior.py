"""Gaussian posteriors of a batch, and their mixture: the aggregate posterior."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from selfnorm.distributions import Proposal
from selfnorm.errors import DataError

__all__ = ["AggregatePosterior", "BaseAndAggregate", "GaussianPosterior"]

_LOG_2PI = math.log(2 * math.pi)
# Points times rows handled at once: on a CPU what fits its cache, on a GPU what fills it.
_PAIRS_AT_ONCE = {"cpu": 2**19, "cuda": 2**24}
_LIMITS = (-7.0, 5.0)  # of log sd: a posterior outside is a number gone wrong, not a fact


@dataclass(frozen=True)
class GaussianPosterior:
    """``q(z|x) = N(mean, diag(exp(log_sd))^2)`` for each row: ``mean``, ``log_sd`` ``(n, d)``."""

    mean: Tensor
    log_sd: Tensor

    @classmethod
    def from_output(cls, output: Tensor | Sequence[Tensor]) -> GaussianPosterior:
        """From an encoder's mean and log-variance: a pair, or one tensor ``(n, 2 d)``."""
        pair = output.chunk(2, -1) if isinstance(output, Tensor) else output
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            found = f"{len(pair)} parts" if isinstance(pair, tuple | list) else type(pair).__name__
            raise DataError(
                "the encoder must give a mean and a log-variance: a pair of (n, d), or one tensor "
                f"(n, 2 d); it gives {found}"
            )
        mean, log_variance = pair
        return cls(mean, (0.5 * log_variance).clamp(*_LIMITS))

    def sample(self, n: int = 1) -> Tensor:
        """``(n, batch, d)`` reparametrised samples: gradients reach mean and scale."""
        noise = torch.randn((n, *self.mean.shape), dtype=self.mean.dtype, device=self.mean.device)
        return self.mean + self.log_sd.exp() * noise

    def log_prob(self, z: Tensor) -> Tensor:
        """``log q(z|x)``: ``(..., batch, d) -> (..., batch)``."""
        e = (z - self.mean) * torch.exp(-self.log_sd)
        return (-0.5 * e.square() - self.log_sd - 0.5 * _LOG_2PI).sum(-1)

    def entropy(self) -> Tensor:
        """``(batch,)``, in closed form."""
        return (self.log_sd + 0.5 * (1 + _LOG_2PI)).sum(-1)

    def detach(self) -> GaussianPosterior:
        """The same law, cut from the graph."""
        return GaussianPosterior(self.mean.detach(), self.log_sd.detach())

    def aggregate(self, widen: float = 1.0) -> AggregatePosterior:
        """The equal mixture of the batch's posteriors, without gradient."""
        return AggregatePosterior(self.mean.detach(), self.log_sd.detach() + math.log(widen))


class AggregatePosterior(Proposal):
    """``(1/n) sum_i q(z|x_i)``: where an encoder puts a data set.

    ``log_prob`` costs ``n`` Gaussians a point, and works through the points in chunks.

    Example:
        >>> agg = AggregatePosterior(torch.zeros(4, 2), torch.zeros(4, 2))
        >>> bool((agg.log_prob(torch.zeros(3, 2)) + 1.8379).abs().max() < 1e-3)
        True
    """

    mean: Tensor
    log_sd: Tensor

    def __init__(self, mean: Tensor, log_sd: Tensor) -> None:
        super().__init__()
        self.dim = mean.shape[1]
        self.register_buffer("mean", mean)
        self.register_buffer("log_sd", log_sd)

    def sample(self, shape: Sequence[int] = ()) -> Tensor:
        """``(*shape, d)``, each from the posterior of a random row."""
        row = torch.randint(len(self.mean), tuple(shape), device=self.mean.device)
        mean = self.mean[row]
        return mean + self.log_sd[row].exp() * torch.randn_like(mean)

    def log_prob(self, x: Tensor) -> Tensor:
        """Log-density of the mixture."""
        # |(z - m)/s|^2 = z^2/s^2 - 2 z m/s^2 + m^2/s^2: two matrix products instead of an
        # (points, rows, d) tensor. Float64, because the terms cancel where a scale is small.
        mean, log_sd = self.mean.double(), self.log_sd.double()
        precision = torch.exp(-2 * log_sd)
        scaled = mean * precision
        constant = torch.addcmul(log_sd, mean, scaled, value=0.5).sum(-1).neg_()
        constant -= 0.5 * self.dim * _LOG_2PI + math.log(len(mean))
        flat = x.reshape(-1, self.dim).double()
        pairs = _PAIRS_AT_ONCE.get(x.device.type, 2**19)
        size = max(1, pairs // len(self.mean))
        parts = [
            torch.logsumexp(
                torch.addmm(constant, z, scaled.T).addmm_(z.square(), precision.T, alpha=-0.5), -1
            )
            for z in flat.split(size)
        ]
        return torch.cat(parts).reshape(x.shape[:-1]).to(x.dtype)


class BaseAndAggregate(Proposal):
    """``share * base + (1 - share) * aggregate posterior``: sees what an energy prior sees.

    Base samples alone miss the places where posteriors sit; posteriors alone miss where the prior
    has mass and no data. Weights are bounded by those against either part.
    """

    def __init__(self, base: Proposal, aggregate: AggregatePosterior, share: float = 0.5) -> None:
        super().__init__()
        self.dim, self.share = base.dim, share
        self.base, self.aggregate = base, aggregate

    def sample(self, shape: Sequence[int] = ()) -> Tensor:
        """Stratified: the first ``share`` of the rows come from the base."""
        n = math.prod(shape)
        from_base = round(self.share * n)
        z = torch.cat([self.base.sample((from_base,)), self.aggregate.sample((n - from_base,))])
        return z.reshape(*shape, self.dim)

    def log_prob(self, x: Tensor) -> Tensor:
        """Log-density of the mixture."""
        return torch.logaddexp(
            self.base.log_prob(x) + math.log(self.share),
            self.aggregate.log_prob(x) + math.log1p(-self.share),
        )
