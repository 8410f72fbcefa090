r"""Step-size adaptation by dual averaging (Nesterov; Hoffman and Gelman 2014).

``log eps`` is steered so that the mean acceptance over all chains meets a target. The schedule
forgets, so adaptation ends after warm-up and the sampling phase uses one fixed step.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class State(NamedTuple):
    """Running values of dual averaging; ``log_step_average`` is the one to keep afterwards."""

    log_step: float
    log_step_average: float
    error_average: float
    center: float
    n_steps: int


class Info(NamedTuple):
    """``error`` = target minus the acceptance seen in this step."""

    error: float


def init(step_size: float) -> State:
    """Start from a guess of the step; a large one is shrunk quickly.

    >>> round(math.exp(init(0.5).log_step), 6)
    0.5
    """
    log_step = math.log(step_size)
    return State(log_step, log_step, 0.0, math.log(10.0) + log_step, 0)


def step(
    state: State,
    acceptance: float,
    *,
    target: float,
    gamma: float = 0.05,
    offset: float = 10.0,
    decay: float = 0.75,
) -> tuple[State, Info]:
    """Shrink the step after low acceptance, grow it after high acceptance."""
    count = state.n_steps + 1
    error = target - acceptance
    weight = 1.0 / (count + offset)
    error_average = (1 - weight) * state.error_average + weight * error
    log_step = state.center - math.sqrt(count) / gamma * error_average
    log_step = min(max(log_step, -30.0), 10.0)
    keep = count**-decay
    average = keep * log_step + (1 - keep) * state.log_step_average
    return State(log_step, average, error_average, state.center, count), Info(error)
