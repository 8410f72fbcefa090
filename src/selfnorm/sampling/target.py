"""What the samplers share: the density they sample, states of chains, the Metropolis decision.

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


def value_and_gradient(log_density: LogDensity, positions: Tensor) -> tuple[Tensor, Tensor]:
    """``log p`` and its gradient at ``positions (n, d)``; a non-finite gradient counts as zero.

    With a zero gradient the move is a random walk, and the Metropolis step still makes it exact.
    """
    # Also where the caller works in inference mode, whose tensors ask for no gradient.
    with torch.inference_mode(False), torch.enable_grad():
        x = (positions.clone() if positions.is_inference() else positions.detach()).requires_grad_()
        value = log_density(x)
        # rows that are -inf have no useful gradient, and would poison the sum with nan
        total = torch.where(torch.isfinite(value), value, torch.zeros_like(value)).sum()
        (gradient,) = torch.autograd.grad(total, x)
    return value.detach(), torch.nan_to_num(gradient, nan=0.0, posinf=0.0, neginf=0.0)


class WeightedState(NamedTuple):
    """``positions (n, d)``, each with its ``log_weights (n,)``."""

    positions: Tensor
    log_weights: Tensor


def init_weighted(log_density: LogDensity, proposal: Any, n: int) -> WeightedState:
    """``n`` plain proposal samples with their weights (not yet samples of the target)."""
    positions = proposal.sample((n,))
    return WeightedState(positions, log_density(positions) - proposal.log_prob(positions))


class GradientState(NamedTuple):
    """``positions (n, d)``, ``log_density (n,)`` and its ``gradient (n, d)`` there."""

    positions: Tensor
    log_density: Tensor
    gradient: Tensor


def init_with_gradient(log_density: LogDensity, positions: Tensor) -> GradientState:
    """Chains at ``positions (n, d)``."""
    positions = positions.detach().clone()
    return GradientState(positions, *value_and_gradient(log_density, positions))


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
