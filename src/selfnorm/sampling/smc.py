r"""Tempered sequential Monte Carlo: from the proposal to the target in adaptive steps.

``log p_t = (1 - t) log q + t log p~``, ``t: 0 -> 1``. Each step raises ``t`` until the effective
sample size falls to a set share, resamples, and moves the particles by Metropolis steps that
leave ``p_t`` invariant. The product of the mean incremental weights is a consistent estimate of
``Z = integral of p~``, independent of the one-step estimate of SIR: a second opinion on log Z.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from selfnorm.functional import ess, log_mean_exp
from selfnorm.sampling.steps import LogDensity, ProposalLike, systematic

_TARGET_ACCEPTANCE = 0.3  # of the local moves


class State(NamedTuple):
    """Particles with both log-densities, the temperature and the running ``log Z``."""

    positions: Tensor
    log_target: Tensor
    log_proposal: Tensor
    temperature: float
    log_norm: Tensor
    move_scale: float


class Info(NamedTuple):
    """Of one step: the mean acceptance of its last move."""

    acceptance: Tensor


def init(log_density: LogDensity, proposal: ProposalLike, n: int) -> State:
    """``n`` proposal samples at temperature 0, where ``Z = 1``."""
    positions = proposal.sample((n,))
    log_proposal = proposal.log_prob(positions)
    zero = torch.zeros((), dtype=torch.float64, device=positions.device)
    return State(positions, log_density(positions), log_proposal, 0.0, zero, 1.0)


def step(
    state: State,
    log_density: LogDensity,
    proposal: ProposalLike,
    *,
    ess_target: float = 0.7,
    n_moves: int = 12,
) -> tuple[State, Info]:
    """Raise the temperature, resample, move. At temperature 1 only the move remains."""
    log_ratio = (state.log_target - state.log_proposal).double()
    increment = _next_increment(log_ratio, 1.0 - state.temperature, ess_target)
    log_increment = increment * torch.nan_to_num(log_ratio, nan=-torch.inf, neginf=-torch.inf)
    if increment == 0.0:
        log_increment = torch.zeros_like(log_ratio)
    log_norm = state.log_norm + log_mean_exp(log_increment)
    temperature = state.temperature + increment
    index = systematic(log_increment, len(log_ratio))
    state = state._replace(
        positions=state.positions[index],
        log_target=state.log_target[index],
        log_proposal=state.log_proposal[index],
        temperature=1.0 if temperature > 1.0 - 1e-9 else temperature,
        log_norm=log_norm,
    )
    acceptance = torch.zeros(())
    for _ in range(n_moves):
        state, acceptance = _move(state, log_density, proposal)
    return state, Info(acceptance)


def _move(state: State, log_density: LogDensity, proposal: ProposalLike) -> tuple[State, Tensor]:
    """Random-walk Metropolis: each half of the particles moves along differences of the other.

    Differences of particles follow the covariance of ``p_t`` and jump between its modes, without
    a gradient of the proposal (which a user's own object need not have). A half never uses itself:
    a step drawn from the moving particles would not be symmetric.
    """
    n = len(state.positions)
    order = torch.randperm(n, device=state.positions.device)
    halves = order[: n // 2], order[n // 2 :]
    rates = []
    for moving, other in (halves, halves[::-1]):
        state, rate = _move_half(state, moving, other, log_density, proposal)
        rates.append(rate)
    return state, torch.stack(rates).mean()


def _move_half(
    state: State, moving: Tensor, other: Tensor, log_density: LogDensity, proposal: ProposalLike
) -> tuple[State, Tensor]:
    start = state.positions[moving]
    n, d = start.shape
    pool = state.positions[other]
    first, second = (torch.randint(len(pool), (n,), device=pool.device) for _ in range(2))
    direction = pool[first] - pool[second]
    # scale 1 now and then: a full difference carries a particle from one mode to another
    full = torch.rand((n, 1), device=pool.device) < 0.2
    local_scale = state.move_scale * d**-0.5
    length = torch.where(full, 1.0, local_scale)
    noise = 0.1 * local_scale * pool.std(0) * torch.randn_like(direction)
    candidates = start + length * direction + noise
    log_target, log_proposal = log_density(candidates), proposal.log_prob(candidates)
    tempered = _tempered(log_target, log_proposal, state.temperature)
    now = _tempered(state.log_target[moving], state.log_proposal[moving], state.temperature)
    log_accept = torch.nan_to_num(tempered - now, nan=-torch.inf, neginf=-torch.inf)
    accepted = torch.rand_like(log_accept).log() < log_accept
    taken, local = moving[accepted], accepted[~full.squeeze(-1)]
    rate = float(local.double().mean()) if len(local) else _TARGET_ACCEPTANCE
    scale = state.move_scale * (1.0 + 0.5 * (rate - _TARGET_ACCEPTANCE))
    new_state = state._replace(
        positions=state.positions.index_copy(0, taken, candidates[accepted]),
        log_target=state.log_target.index_copy(0, taken, log_target[accepted]),
        log_proposal=state.log_proposal.index_copy(0, taken, log_proposal[accepted]),
        move_scale=min(max(scale, 1e-3), 3.0),
    )
    return new_state, accepted.double().mean()


def _tempered(log_target: Tensor, log_proposal: Tensor, temperature: float) -> Tensor:
    """``(1 - t) log q + t log p~`` with ``0 * -inf = 0`` at both ends."""
    if temperature >= 1.0:
        return log_target
    if temperature <= 0.0:
        return log_proposal
    return (1.0 - temperature) * log_proposal + temperature * log_target


def _next_increment(log_ratio: Tensor, room: float, ess_target: float) -> float:
    """Largest increment whose weights keep the ESS at ``ess_target`` (bisection)."""
    usable = torch.nan_to_num(log_ratio, nan=-torch.inf, neginf=-torch.inf)
    if room <= 0.0 or ess(room * usable) >= ess_target:
        return max(room, 0.0)
    low, high = 0.0, room
    for _ in range(40):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if ess(middle * usable) >= ess_target else (low, middle)
    # a share of -inf weights keeps the ESS below the target however small the step is
    return max(low, 1e-4 * room)
