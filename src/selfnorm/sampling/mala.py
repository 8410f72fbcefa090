r"""Metropolis-adjusted Langevin: one gradient step with noise, then accept or reject.

``y = x + (eps^2 / 2) S^2 grad log p(x) + eps S xi``, ``xi ~ N(0, I)``, ``S = diag(scale)``,
accepted with the Metropolis-Hastings ratio of the two Gaussian moves. The factor 1/2 and the
unit noise make ``p`` itself (not a tempered ``p``) the invariant law.
"""

from __future__ import annotations

import torch
from torch import Tensor

from selfnorm.sampling.target import GradientState as State
from selfnorm.sampling.target import LogDensity, accept_or_stay, value_and_gradient
from selfnorm.sampling.target import MoveInfo as Info
from selfnorm.sampling.target import init_with_gradient as init

__all__ = ["Info", "State", "init", "step"]


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
    return accept_or_stay(state, State(candidates, value, gradient), log_ratio)
