r"""Sampling-importance-resampling: draw from the proposal, resample by weight.

``x_m ~ q``, ``w_m = p~(x_m) / q(x_m)``, keep ``n`` of the ``M`` candidates with probability
``w_m / sum(w)``. No gradients, no burn-in; exact as ``M`` grows (bias of order ``1 / ESS``).
The same weights give ``log Z`` and the diagnostics.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from selfnorm.functional import ess, log_mean_exp, pareto_k
from selfnorm.sampling.resampling import systematic
from selfnorm.sampling.target import LogDensity


class State(NamedTuple):
    """``positions (n, d)``, each with its ``log_weights (n,)``."""

    positions: Tensor
    log_weights: Tensor


class Info(NamedTuple):
    """Health of one resampling: ``ess`` is a fraction of the candidates, ``log_norm`` is log Z."""

    ess: Tensor
    pareto_k: Tensor
    log_norm: Tensor
    unique: Tensor


def init(log_density: LogDensity, proposal: Any, n: int) -> State:
    """``n`` plain proposal samples with their weights (not yet samples of the target)."""
    positions = proposal.sample((n,))
    return State(positions, log_density(positions) - proposal.log_prob(positions))


def step(
    state: State,
    log_density: LogDensity,
    proposal: Any,
    *,
    n_candidates: int | None = None,
    chunk_size: int = 65_536,
) -> tuple[State, Info]:
    """Draw fresh candidates and resample ``len(state.positions)`` of them.

    ``n_candidates`` defaults to ten per sample (at least 10,000); they are scored in chunks, and
    only a chunk's activations are alive at a time.
    """
    n = len(state.positions)
    n_candidates = max(10 * n, 10_000) if n_candidates is None else n_candidates
    positions, log_weights = [], []
    for begin in range(0, n_candidates, chunk_size):
        x = proposal.sample((min(chunk_size, n_candidates - begin),))
        positions.append(x)
        log_weights.append(log_density(x) - proposal.log_prob(x))
    candidates, log_w = torch.cat(positions), torch.cat(log_weights)
    index = systematic(log_w, n)
    unique = torch.as_tensor(index.unique().numel() / n)
    index = index[torch.randperm(n, device=index.device)]
    info = Info(ess(log_w), pareto_k(log_w), log_mean_exp(log_w), unique)
    return State(candidates[index], log_w[index]), info
