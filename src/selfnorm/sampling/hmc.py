r"""Hamiltonian Monte Carlo: ``n_leapfrog`` gradient steps along one momentum, then accept.

``H(x, v) = -log p(x) + |v|^2 / 2`` in coordinates scaled by ``scale``; leapfrog keeps volume and
is reversible, so ``min(1, exp(H - H'))`` leaves ``p`` invariant. The step is jittered by up to
20 % (the same for all chains), which breaks resonances with a period of the target.
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
    n_leapfrog: int = 8,
) -> tuple[State, Info]:
    """One trajectory of every chain."""
    jitter = 0.8 + 0.4 * torch.rand((), device=state.positions.device)
    epsilon = torch.as_tensor(step_size, device=state.positions.device) * jitter
    scale = torch.as_tensor(scale, device=state.positions.device, dtype=state.positions.dtype)
    momentum = torch.randn_like(state.positions)
    kinetic = 0.5 * (momentum**2).sum(-1)
    positions, value, gradient = state.positions, state.log_density, state.gradient
    for _ in range(n_leapfrog):
        momentum = momentum + 0.5 * epsilon * scale * gradient
        positions = positions + epsilon * scale * momentum
        value, gradient = value_and_gradient(log_density, positions)
        momentum = momentum + 0.5 * epsilon * scale * gradient
    log_ratio = value - state.log_density + kinetic - 0.5 * (momentum**2).sum(-1)
    return accept_or_stay(state, State(positions, value, gradient), log_ratio)
