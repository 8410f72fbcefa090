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


def init(step_size: float) -> State:
    """Start from a guess of the step; a large one is shrunk quickly.

    >>> round(math.exp(init(0.5).log_step), 6)
    0.5
    """
    log_step = math.log(step_size)
    return State(log_step, log_step, 0.0, math.log(10.0) + log_step, 0)


def step(state: State, acceptance: float, *, target: float) -> State:
    """Shrink the step after low acceptance, grow it after high acceptance."""
    count = state.n_steps + 1
    weight = 1.0 / (count + 10.0)
    error_average = (1 - weight) * state.error_average + weight * (target - acceptance)
    log_step = state.center - math.sqrt(count) / 0.05 * error_average
    log_step = min(max(log_step, -30.0), 10.0)
    keep = count**-0.75
    average = keep * log_step + (1 - keep) * state.log_step_average
    return State(log_step, average, error_average, state.center, count)
