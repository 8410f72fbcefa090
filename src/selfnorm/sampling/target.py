"""What the samplers share: the density they sample and the Metropolis decision.

The density is one function ``x (n, d) -> log density (n,)``, normalised or not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

LogDensity = Callable[[Tensor], Tensor]


def as_log_density(target: Any) -> LogDensity:
    """Return ``log p(x)`` up to a constant for a model, a distribution or a plain function.

    ``log_unnormalized`` is preferred to ``log_prob`` (no sampler needs the normaliser); a ``nan``
    becomes ``-inf``, so that a point where the energy is undefined is never accepted.

    >>> log_density = as_log_density(torch.distributions.Normal(0.0, 1.0))
    >>> log_density(torch.zeros(1)).shape
    torch.Size([1])
    """
    for name in ("log_unnormalized", "log_prob"):
        method = getattr(target, name, None)
        if callable(method):
            return _without_nan(method)
    if callable(target):
        return _without_nan(target)
    raise TypeError(
        f"cannot sample from {type(target).__name__}: give an object with log_unnormalized(x) or "
        "log_prob(x), or a function from (n, d) to (n,)"
    )


def _without_nan(function: Callable[[Tensor], Tensor]) -> LogDensity:
    def log_density(x: Tensor) -> Tensor:
        value = function(x)
        return torch.where(torch.isnan(value), torch.full_like(value, -torch.inf), value)

    return log_density


class MoveInfo(NamedTuple):
    """Per chain: the acceptance probability and whether the move was accepted."""

    acceptance: Tensor
    accepted: Tensor


def accept_or_stay(old: Any, new: Any, log_ratio: Tensor) -> tuple[Any, MoveInfo]:
    """Move each chain with probability ``min(1, exp(log_ratio))``; a NaN ratio stays.

    ``old`` and ``new`` are states: named tuples of tensors with one row per chain.
    """
    log_ratio = torch.nan_to_num(log_ratio, nan=-torch.inf, neginf=-torch.inf)
    accepted = torch.rand_like(log_ratio).log() < log_ratio
    kept = [
        torch.where(accepted.view(-1, *[1] * (there.dim() - 1)), there, here)
        for here, there in zip(old, new, strict=True)
    ]
    return type(old)(*kept), MoveInfo(log_ratio.clamp_max(0.0).exp(), accepted)
