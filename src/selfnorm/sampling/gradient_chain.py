"""What MALA and HMC share: chains that remember their gradient, and the Metropolis decision."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from selfnorm.sampling.target import LogDensity, value_and_gradient


class State(NamedTuple):
    """``positions (n, d)``, ``log_density (n,)`` and its ``gradient (n, d)`` there."""

    positions: Tensor
    log_density: Tensor
    gradient: Tensor


def init(log_density: LogDensity, positions: Tensor) -> State:
    """Chains at ``positions (n, d)``."""
    positions = positions.detach().clone()
    return State(positions, *value_and_gradient(log_density, positions))


def accept_or_stay(old: State, new: State, log_ratio: Tensor) -> tuple[State, Tensor, Tensor]:
    """Move each chain with probability ``min(1, exp(log_ratio))``; a NaN ratio stays.

    Returns the chains, the acceptance probabilities and who moved.
    """
    log_ratio = torch.nan_to_num(log_ratio, nan=-torch.inf, neginf=-torch.inf)
    accepted = torch.rand_like(log_ratio).log() < log_ratio
    moved = accepted.unsqueeze(-1)
    state = State(
        torch.where(moved, new.positions, old.positions),
        torch.where(accepted, new.log_density, old.log_density),
        torch.where(moved, new.gradient, old.gradient),
    )
    return state, log_ratio.clamp_max(0.0).exp(), accepted
