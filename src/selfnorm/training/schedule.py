"""The learning rate over a run."""

from __future__ import annotations

import math


def lr_factor(schedule: str, step: int, total: int, warmup: float = 0.1) -> float:
    """Multiplier of the learning rate before step ``step`` of ``total``.

    ``one_cycle`` rises over the first ``warmup`` share of the steps and falls to zero along a
    cosine; ``cosine`` only falls; ``linear`` falls along a line; ``constant`` is 1; ``exponential``
    falls to ``1/e``.

    Example:
        >>> [round(lr_factor("one_cycle", s, 100), 2) for s in (0, 10, 55, 99)]
        [0.04, 1.0, 0.5, 0.0]
    """
    if schedule == "constant":
        return 1.0
    if schedule == "linear":
        return 1 - step / max(total, 1)
    if schedule == "exponential":
        return math.exp(-step / max(total, 1))
    if schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * step / max(total, 1)))
    n_warm = max(1, round(warmup * total))
    if step < n_warm:
        return 0.04 + 0.96 * 0.5 * (1 - math.cos(math.pi * step / n_warm))
    progress = (step - n_warm) / max(1, total - n_warm)
    return 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


class Schedule:
    """The learning rate of a run of ``total`` steps.

    Attributes:
        scale: factor of all rates, halved at every roll-back.
    """

    def __init__(self, peak: float, shape: tuple[str, float], total: int) -> None:
        self.peak, self.total = peak, total
        self.kind, self.warmup = shape
        self.scale = 1.0

    def rate(self, step: int, time_share: float) -> float:
        """The rate of a step; the share of the time that has passed moves it, too."""
        place = max(step, int(time_share * self.total))
        return self.peak * lr_factor(self.kind, place, self.total, self.warmup) * self.scale
