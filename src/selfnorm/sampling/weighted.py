"""Samplers that need a proposal and no gradient: SIR, independent Metropolis-Hastings, rejection.

All of them look at the weights ``w = p~ / q`` of proposal samples.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from selfnorm.errors import ProposalError
from selfnorm.functional import ess, log_mean_exp, pareto_k
from selfnorm.sampling.target import LogDensity, MoveInfo, accept_or_stay


class WeightedState(NamedTuple):
    """``positions (n, d)``, each with its ``log_weights (n,)``."""

    positions: Tensor
    log_weights: Tensor


def weighted_init(log_density: LogDensity, proposal: Any, n: int) -> WeightedState:
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
    proposal: Any,
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
    state: WeightedState, log_density: LogDensity, proposal: Any
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


class Places(NamedTuple):
    """``positions (n, d)``; ``done (n,)`` marks the rows that hold an accepted sample."""

    positions: Tensor
    done: Tensor


class Acceptance(NamedTuple):
    """Of this step's candidates: share accepted, number of weights above the bound."""

    acceptance: Tensor
    exceeded: Tensor


def rejection_init(proposal: Any, n: int) -> Places:
    """``n`` empty places."""
    positions = proposal.sample((n,))
    return Places(positions, torch.zeros(n, dtype=torch.bool, device=positions.device))


def rejection_step(
    state: Places, log_density: LogDensity, proposal: Any, *, log_bound: float
) -> tuple[Places, Acceptance]:
    """Rejection sampling: exact, where ``log_bound >= sup_x log p~(x) - log q(x)`` is known.

    One candidate ``x ~ q`` for every place is accepted with probability ``w(x) / W``, ``W`` the
    bound; the accepted ones fill the places that are still empty. The samples are independent; on
    average ``W / Z`` proposals are spent per sample. A weight above ``W`` proves the bound wrong.
    """
    candidates = proposal.sample((len(state.positions),))
    log_ratio = log_density(candidates) - proposal.log_prob(candidates) - log_bound
    log_ratio = torch.nan_to_num(log_ratio, nan=-torch.inf, neginf=-torch.inf)
    accepted = torch.rand_like(log_ratio).log() < log_ratio
    # Accepted candidates fill empty places in order, not only the place they were drawn for:
    # otherwise the candidates of the places already filled are wasted.
    empty = (~state.done).nonzero().squeeze(-1)
    found = candidates[accepted][: len(empty)]
    positions, done = state.positions.clone(), state.done.clone()
    positions[empty[: len(found)]] = found
    done[empty[: len(found)]] = True
    # rounding: a weight equal to the bound may come out a hair above it
    exceeded = (log_ratio > 1e-5 * (1 + abs(log_bound))).sum()
    return Places(positions, done), Acceptance(accepted.double().mean(), exceeded)
