r"""Sampling-importance-resampling: draw from the proposal, resample by weight.

``x_m ~ q``, ``w_m = p~(x_m) / q(x_m)``, keep ``n`` of the ``M`` candidates with probability
``w_m / sum(w)``. No gradients, no burn-in; exact as ``M`` grows (bias of order ``1 / ESS``).
The same weights give ``log Z`` and the diagnostics.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from selfnorm.errors import ProposalError
from selfnorm.functional import ess, log_mean_exp, pareto_k
from selfnorm.sampling.target import LogDensity
from selfnorm.sampling.target import WeightedState as State
from selfnorm.sampling.target import init_weighted as init

__all__ = ["Info", "State", "init", "step", "systematic"]


class Info(NamedTuple):
    """Health of one resampling: ``ess`` is a fraction of the candidates, ``log_norm`` is log Z."""

    ess: Tensor
    pareto_k: Tensor
    log_norm: Tensor


def step(
    state: State,
    log_density: LogDensity,
    proposal: Any,
    *,
    n_candidates: int,
    chunk_size: int = 65_536,
) -> tuple[State, Info]:
    """Draw fresh candidates and resample ``len(state.positions)`` of them.

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
    info = Info(ess(log_w), pareto_k(log_w), log_mean_exp(log_w))
    return State(candidates[index], log_w[index]), info


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
