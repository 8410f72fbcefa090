r"""Metropolis-adjusted Langevin: one gradient step with noise, then accept or reject.

``y = x + (eps^2 / 2) S^2 grad log p(x) + eps S xi``, ``xi ~ N(0, I)``, ``S = diag(scale)``,
accepted with the Metropolis-Hastings ratio of the two Gaussian moves. The factor 1/2 and the
unit noise make ``p`` itself (not a tempered ``p``) the invariant law.
"""

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


class Info(NamedTuple):
    """Per chain: the acceptance probability and whether the move was accepted."""

    acceptance: Tensor
    accepted: Tensor


def init(log_density: LogDensity, positions: Tensor) -> State:
    """Chains at ``positions (n, d)``."""
    positions = positions.detach().clone()
    return State(positions, *value_and_gradient(log_density, positions))


def step(
    state: State,
    log_density: LogDensity,
    *,
    step_size: float | Tensor,
    scale: float | Tensor = 1.0,
) -> tuple[State, Info]:
    """One move of every chain with step ``step_size`` and per-coordinate ``scale``."""
    spread = step_size * torch.as_tensor(scale, device=state.positions.device)
    mean = state.positions + 0.5 * spread**2 * state.gradient
    candidates = mean + spread * torch.randn_like(state.positions)
    value, gradient = value_and_gradient(log_density, candidates)
    back = candidates + 0.5 * spread**2 * gradient

    def log_move(to: Tensor, center: Tensor) -> Tensor:
        return -0.5 * (((to - center) / spread) ** 2).sum(-1)

    log_ratio = value - state.log_density
    log_ratio = log_ratio + log_move(state.positions, back) - log_move(candidates, mean)
    log_ratio = torch.nan_to_num(log_ratio, nan=-torch.inf, neginf=-torch.inf)
    accepted = torch.rand_like(log_ratio).log() < log_ratio
    moved = accepted.unsqueeze(-1)
    new_state = State(
        torch.where(moved, candidates, state.positions),
        torch.where(accepted, value, state.log_density),
        torch.where(moved, gradient, state.gradient),
    )
    return new_state, Info(log_ratio.clamp_max(0.0).exp(), accepted)
