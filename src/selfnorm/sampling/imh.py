r"""Independent Metropolis-Hastings: the proposal proposes, the ratio of weights decides.

From ``x`` propose ``y ~ q`` and accept with probability ``min(1, w(y) / w(x))``,
``w = p~ / q``. The target is invariant for any number of steps; chains mix at the rate
``1 - Z / max(w)``, so a proposal with lighter tails than the target gets stuck in them.
"""

from __future__ import annotations

from typing import Any

import torch

from selfnorm.sampling.target import LogDensity, accept_or_stay
from selfnorm.sampling.target import MoveInfo as Info
from selfnorm.sampling.target import WeightedState as State
from selfnorm.sampling.target import init_weighted as init

__all__ = ["Info", "State", "init", "step"]


def step(state: State, log_density: LogDensity, proposal: Any) -> tuple[State, Info]:
    """One proposal per chain."""
    candidates = proposal.sample((len(state.positions),))
    log_weights = log_density(candidates) - proposal.log_prob(candidates)
    log_ratio = log_weights - state.log_weights
    # a chain that starts outside the support (-inf) leaves it at once: -inf - -inf is no verdict
    log_ratio = torch.where(torch.isneginf(state.log_weights), 0.0, log_ratio)
    return accept_or_stay(state, State(candidates, log_weights), log_ratio)
