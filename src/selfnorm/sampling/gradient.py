"""Samplers that follow the gradient, MALA and HMC, and the adaptation of their step."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from selfnorm.sampling.target import LogDensity, MoveInfo, accept_or_stay


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


class GradientState(NamedTuple):
    """``positions (n, d)``, ``log_density (n,)`` and its ``gradient (n, d)`` there."""

    positions: Tensor
    log_density: Tensor
    gradient: Tensor


def gradient_init(log_density: LogDensity, positions: Tensor) -> GradientState:
    """Chains at ``positions (n, d)``."""
    positions = positions.detach().clone()
    return GradientState(positions, *value_and_gradient(log_density, positions))


def mala_step(
    state: GradientState,
    log_density: LogDensity,
    *,
    step_size: float | Tensor,
    scale: float | Tensor = 1.0,
) -> tuple[GradientState, MoveInfo]:
    r"""Metropolis-adjusted Langevin: one gradient step with noise, then accept or reject.

    ``y = x + (eps^2 / 2) S^2 grad log p(x) + eps S xi``, ``xi ~ N(0, I)``, ``eps = step_size``,
    ``S = diag(scale)``, accepted with the Metropolis-Hastings ratio of the two Gaussian moves. The
    factor 1/2 and the unit noise make ``p`` itself (not a tempered ``p``) the invariant law.
    """
    spread = step_size * torch.as_tensor(scale, device=state.positions.device)
    mean = state.positions + 0.5 * spread**2 * state.gradient
    candidates = mean + spread * torch.randn_like(state.positions)
    value, gradient = value_and_gradient(log_density, candidates)
    back = candidates + 0.5 * spread**2 * gradient

    def log_move(to: Tensor, center: Tensor) -> Tensor:
        return -0.5 * (((to - center) / spread) ** 2).sum(-1)

    log_ratio = value - state.log_density
    log_ratio = log_ratio + log_move(state.positions, back) - log_move(candidates, mean)
    return accept_or_stay(state, GradientState(candidates, value, gradient), log_ratio)


def hmc_step(
    state: GradientState,
    log_density: LogDensity,
    *,
    step_size: float | Tensor,
    scale: float | Tensor = 1.0,
    n_leapfrog: int = 8,
) -> tuple[GradientState, MoveInfo]:
    r"""Hamiltonian Monte Carlo: ``n_leapfrog`` gradient steps along one momentum, then accept.

    ``H(x, v) = -log p(x) + |v|^2 / 2`` in coordinates scaled by ``scale``; leapfrog keeps volume
    and is reversible, so ``min(1, exp(H - H'))`` leaves ``p`` invariant. The step is jittered by
    up to 20 % (the same for all chains), which breaks resonances with a period of the target.
    """
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
    return accept_or_stay(state, GradientState(positions, value, gradient), log_ratio)


class StepSize(NamedTuple):
    """Adaptation by dual averaging (Nesterov; Hoffman and Gelman 2014).

    ``log eps`` is steered so that the mean acceptance over all chains meets a target. The schedule
    forgets, so adaptation ends after warm-up; ``log_step_average`` is the one to keep.
    """

    log_step: float
    log_step_average: float
    error_average: float
    center: float
    n_steps: int

    @classmethod
    def start(cls, step_size: float) -> StepSize:
        """Begin with a guess of the step; a large one is shrunk quickly.

        >>> round(math.exp(StepSize.start(0.5).log_step), 6)
        0.5
        """
        log_step = math.log(step_size)
        return cls(log_step, log_step, 0.0, math.log(10.0) + log_step, 0)

    def after(self, acceptance: float, *, target: float) -> StepSize:
        """Shrink the step after low acceptance, grow it after high acceptance."""
        count = self.n_steps + 1
        weight = 1.0 / (count + 10.0)
        error_average = (1 - weight) * self.error_average + weight * (target - acceptance)
        log_step = self.center - math.sqrt(count) / 0.05 * error_average
        log_step = min(max(log_step, -30.0), 10.0)
        keep = count**-0.75
        average = keep * log_step + (1 - keep) * self.log_step_average
        return StepSize(log_step, average, error_average, self.center, count)
