"""Learning-rate schedules as pure functions of the step: nothing to save, nothing to resume."""

from __future__ import annotations

import math

__all__ = ["SCHEDULES", "lr_factor"]

SCHEDULES = ("one_cycle", "cosine", "constant", "exponential")


def lr_factor(schedule: str, step: int, total: int, warmup: float = 0.1) -> float:
    """Multiplier of the learning rate before step ``step`` of ``total``.

    ``one_cycle`` rises over the first ``warmup`` share of the steps and falls to zero along a
    cosine; ``cosine`` only falls; ``constant`` is 1; ``exponential`` falls to ``1/e``.

    Example:
        >>> [round(lr_factor("one_cycle", s, 100), 2) for s in (0, 10, 55, 99)]
        [0.04, 1.0, 0.5, 0.0]
    """
    if schedule == "constant":
        return 1.0
    if schedule == "exponential":
        return math.exp(-step / max(total, 1))
    if schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * step / max(total, 1)))
    n_warm = max(1, round(warmup * total))
    if step < n_warm:
        return 0.04 + 0.96 * 0.5 * (1 - math.cos(math.pi * step / n_warm))
    done = (step - n_warm) / max(1, total - n_warm)
    return 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
