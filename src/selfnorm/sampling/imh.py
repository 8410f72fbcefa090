r"""Independent Metropolis-Hastings: the proposal proposes, the ratio of weights decides.

From ``x`` propose ``y ~ q`` and accept with probability ``min(1, w(y) / w(x))``,
``w = p~ / q``. The target is invariant for any number of steps; chains mix at the rate
``1 - Z / max(w)``, so a proposal with lighter tails than the target gets stuck in them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from selfnorm.sampling.target import LogDensity, accept_or_stay


class State(NamedTuple):
    """``positions (n, d)`` of the chains and their ``log_weights (n,)``."""

    positions: Tensor
    log_weights: Tensor


class Info(NamedTuple):
    """Per chain: the acceptance probability and whether the proposal was accepted."""

    acceptance: Tensor
    accepted: Tensor


def init(log_density: LogDensity, proposal: Any, n: int) -> State:
    """``n`` chains started at proposal samples."""
    positions = proposal.sample((n,))
    return State(positions, log_density(positions) - proposal.log_prob(positions))


def step(state: State, log_density: LogDensity, proposal: Any) -> tuple[State, Info]:
    """One proposal per chain."""
    candidates = proposal.sample((len(state.positions),))
    log_weights = log_density(candidates) - proposal.log_prob(candidates)
    log_ratio = log_weights - state.log_weights
    # a chain that starts outside the support (-inf) leaves it at once: -inf - -inf is no verdict
    log_ratio = torch.where(
        torch.isneginf(state.log_weights), torch.zeros_like(log_ratio), log_ratio
    )
    new_state, acceptance, accepted = accept_or_stay(
        state, State(candidates, log_weights), log_ratio
    )
    return new_state, Info(acceptance, accepted)
