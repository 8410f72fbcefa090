r"""Rejection sampling: exact, where ``sup_x p~(x) / q(x)`` is known.

Accept ``x ~ q`` with probability ``w(x) / W``, ``W >= sup w``. The samples are independent and
exact; on average ``W / Z`` proposals are spent per sample. A weight above ``W`` proves the bound
wrong: ``Info.exceeded`` counts such weights, and the driver refuses to return the samples.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from selfnorm.sampling.target import LogDensity


class State(NamedTuple):
    """``positions (n, d)``; ``done (n,)`` marks the rows that hold an accepted sample."""

    positions: Tensor
    done: Tensor


class Info(NamedTuple):
    """Of this step's candidates: share accepted, number of weights above the bound."""

    acceptance: Tensor
    exceeded: Tensor


def init(log_density: LogDensity, proposal: Any, n: int) -> State:  # noqa: ARG001 common signature
    """``n`` empty places."""
    positions = proposal.sample((n,))
    return State(positions, torch.zeros(n, dtype=torch.bool, device=positions.device))


def step(
    state: State, log_density: LogDensity, proposal: Any, *, log_bound: float
) -> tuple[State, Info]:
    """One candidate for every place; the accepted ones fill the places that are still empty."""
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
    return State(positions, done), Info(accepted.double().mean(), exceeded)
