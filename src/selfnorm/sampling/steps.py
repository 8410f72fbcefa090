"""One step of each sampler but SMC, as pure functions: a state goes in, a new one comes out.

SIR and independent Metropolis-Hastings look at the weights ``w = p~ / q`` of proposal samples; MALA
and HMC follow the gradient. The density is one function ``x (n, d) -> log density (n,)``,
normalised or not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from selfnorm._inputs import one_per_row
from selfnorm.errors import ProposalError
from selfnorm.functional import ess, log_mean_exp, pareto_k

LogDensity = Callable[[Tensor], Tensor]
State = TypeVar("State", "WeightedState", "GradientState")


class ProposalLike(Protocol):
    """What samplers need of a proposal."""

    def sample(self, shape: tuple[int, ...], /) -> Tensor:
        """``(*shape, d)`` samples."""
        ...

    def log_prob(self, x: Tensor, /) -> Tensor:
        """Log-density ``(n,)`` of rows ``(n, d)``."""
        ...


def as_log_density(target: object) -> LogDensity:
    """Return ``log p(x)`` up to a constant for a model, a distribution or a plain function.

    ``log_unnormalized`` is preferred to ``log_prob`` (no sampler needs the normaliser); a ``nan``
    becomes ``-inf``, so that a point where the energy is undefined is never accepted.
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
        rows = x.shape[:-1] if x.dim() > 1 else x.shape
        value = one_per_row(function(x), rows, "the log-density to sample from")
        return torch.where(torch.isnan(value), torch.full_like(value, -torch.inf), value)

    return log_density


class MoveInfo(NamedTuple):
    """The acceptance probability of each chain."""

    acceptance: Tensor


def accept_or_stay(old: State, new: State, log_ratio: Tensor) -> tuple[State, MoveInfo]:
    """Move each chain with probability ``min(1, exp(log_ratio))``; a NaN ratio stays.

    A state is a named tuple of tensors with one row per chain.
    """
    log_ratio = torch.nan_to_num(log_ratio, nan=-torch.inf, neginf=-torch.inf)
    accepted = torch.rand_like(log_ratio).log() < log_ratio
    kept = [
        torch.where(accepted.view(-1, *[1] * (after.dim() - 1)), after, before)
        for before, after in zip(old, new, strict=True)
    ]
    return type(old)(*kept), MoveInfo(log_ratio.clamp_max(0.0).exp())


class WeightedState(NamedTuple):
    """``positions (n, d)``, each with its ``log_weights (n,)``."""

    positions: Tensor
    log_weights: Tensor


def weighted_init(log_density: LogDensity, proposal: ProposalLike, n: int) -> WeightedState:
    """``n`` plain proposal samples with their weights (not yet samples of the target)."""
    positions = proposal.sample((n,))
    return WeightedState(positions, log_density(positions) - proposal.log_prob(positions))


class Resampling(NamedTuple):
    """Health of one resampling: ``ess`` is a fraction of the candidates, ``log_norm`` is log Z."""

    ess: Tensor
    pareto_k: Tensor
    log_norm: Tensor


def sir_step(
    state: WeightedState,
    log_density: LogDensity,
    proposal: ProposalLike,
    *,
    n_candidates: int,
    chunk_size: int = 65_536,
) -> tuple[WeightedState, Resampling]:
    """Sampling-importance-resampling: draw from the proposal, resample by weight.

    ``x_m ~ q``, ``w_m = p~(x_m) / q(x_m)``, keep ``len(state.positions)`` of the ``n_candidates``
    with probability ``w_m / sum(w)``: exact as candidates grow (bias of order ``1 / ESS``). The
    same weights give ``log Z`` and the diagnostics.

    Candidates are scored in chunks, and only a chunk's activations are alive at a time.
    """
    n = len(state.positions)
    positions, log_weights = [], []
    for begin in range(0, n_candidates, chunk_size):
        x = proposal.sample((min(chunk_size, n_candidates - begin),))
        positions.append(x)
        log_weights.append(log_density(x) - proposal.log_prob(x))
    candidates, log_w = torch.cat(positions), torch.cat(log_weights)
    index = systematic(log_w, n)
    index = index[torch.randperm(n, device=index.device)]
    info = Resampling(ess(log_w), pareto_k(log_w), log_mean_exp(log_w))
    return WeightedState(candidates[index], log_w[index]), info


def systematic(log_weights: Tensor, n: int) -> Tensor:
    """Systematic resampling: ``n`` indices, index ``m`` drawn ``n w_m`` times up to rounding.

    Expected counts are those of multinomial resampling with less noise. Neighbours in the result
    are equal, so a caller that needs exchangeable rows shuffles them. An error where no weight is
    usable.

    >>> systematic(torch.tensor([0.0, -torch.inf]), 3).tolist()
    [0, 0, 0]
    """
    log_weights = torch.nan_to_num(
        log_weights.double(), nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf
    )
    if torch.isinf(log_weights.max()):
        raise ProposalError(
            "no proposal sample has a finite positive weight: the proposal does not overlap with "
            "the model. Fit the proposal to the data (Defensive.fit_to(x)) and check the energy"
        )
    cumulative = torch.softmax(log_weights, dim=0).cumsum(0)
    offset = torch.rand((), dtype=torch.float64, device=log_weights.device)
    points = (torch.arange(n, dtype=torch.float64, device=log_weights.device) + offset) / n
    # the last cumulative sum can round below 1: without the clamp a point above it has no index
    return torch.searchsorted(cumulative, points * cumulative[-1]).clamp_max(len(cumulative) - 1)


def imh_step(
    state: WeightedState, log_density: LogDensity, proposal: ProposalLike
) -> tuple[WeightedState, MoveInfo]:
    r"""Independent Metropolis-Hastings, one proposal per chain: the ratio of weights decides.

    From ``x`` propose ``y ~ q`` and accept with probability ``min(1, w(y) / w(x))``,
    ``w = p~ / q``. The target is invariant for any number of steps; chains mix at the rate
    ``1 - Z / max(w)``, so a proposal with lighter tails than the target gets stuck in them.
    """
    candidates = proposal.sample((len(state.positions),))
    log_weights = log_density(candidates) - proposal.log_prob(candidates)
    log_ratio = log_weights - state.log_weights
    # a chain that starts outside the support (-inf) leaves it at once: -inf - -inf is no verdict
    log_ratio = torch.where(torch.isneginf(state.log_weights), 0.0, log_ratio)
    return accept_or_stay(state, WeightedState(candidates, log_weights), log_ratio)


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
    factor 1/2 and the unit noise make ``p`` itself (not a tempered ``p``) invariant.
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
        """Begin with a guess of the step; a large one is shrunk quickly."""
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
