"""The course of a run: its learning rate, time and patience; the best state, with which it ends."""

from __future__ import annotations

import math
import re
import time
from copy import deepcopy
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from selfnorm.training.task import State

_STEPPING, _LOOK_EVERY = 0.93, 0.02  # shares of max_time: for steps, and between validations,
_STEPS_PER_LOOK = 5  # between which at least this many times as long is spent as on one
_UNITS = {"": 1.0, "s": 1.0, "sec": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0}


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


def seconds(time_: float | str) -> float:
    """A length of time in seconds: a number of them, or a text.

    Example:
        >>> seconds("2min"), seconds("1.5 h"), seconds(90)
        (120.0, 5400.0, 90.0)
        >>> seconds("soon")
        Traceback (most recent call last):
        ValueError: max_time must be seconds, or a text such as '90s', '5min', '2h'; got 'soon'
    """
    match = re.fullmatch(r"\s*([0-9.]+)\s*([a-z]*)\s*", str(time_).lower())
    try:
        if match is not None and (length := float(match[1]) * _UNITS[match[2]]) > 0:
            return length
    except (ValueError, KeyError):
        pass
    raise ValueError(
        f"max_time must be seconds, or a text such as '90s', '5min', '2h'; got {time_!r}"
    )


class Clock:
    """The time of a fit, all of which counts against ``max_time``."""

    def __init__(self, max_time: float | str | None) -> None:
        self.began = time.perf_counter()
        self.total = math.inf if max_time is None else seconds(max_time)

    @property
    def gone(self) -> float:
        """Seconds since the beginning."""
        return time.perf_counter() - self.began

    @property
    def left(self) -> float:
        """Seconds until the end."""
        return self.total - self.gone

    def run_for(self, share: float = 1.0, spared: float = 0.0) -> State:
        """The option that gives a training run a share of the seconds left but those spared."""
        if math.isinf(self.total):
            return {}
        return {"max_time": max(0.05, share * (self.left - spared))}


class Budget(Clock):
    """The time of one run: when it looks at held-out rows, and when it stops taking steps.

    A share of the time is left to the closing step and a last validation.
    """

    def __init__(self, max_time: float | str | None) -> None:
        super().__init__(max_time)
        self.before = 0.0  # seconds of the run before it was resumed
        self.stepping = _STEPPING * self.total
        self.limited = math.isfinite(self.stepping)
        self.next_look = _LOOK_EVERY * self.stepping
        self.look_seconds = 0.0

    @property
    def elapsed(self) -> float:
        """Seconds of the run, those before it was resumed included."""
        return self.before + self.gone

    @property
    def share(self) -> float:
        """Share of the time for steps that has passed; 0 where time is not limited."""
        return min(self.elapsed / self.stepping, 1.0) if self.limited else 0.0

    @property
    def over(self) -> bool:
        """Whether a look that begins now is the last one before the time is over."""
        return self.elapsed + 1.2 * self.look_seconds >= self.stepping

    @property
    def due(self) -> bool:
        """Whether it is time to look."""
        return self.elapsed >= self.next_look

    def looked_since(self, began: float) -> None:
        """Book a look that began at a time of ``time.perf_counter``."""
        self.look_seconds = max(self.look_seconds, time.perf_counter() - began)
        between = max(_LOOK_EVERY * self.stepping, _STEPS_PER_LOOK * self.look_seconds)
        self.next_look = self.elapsed + between


class Keeper:
    """The best state by its score, and for how many looks there was no better one.

    Scores are one number, or one for each of ``K`` members ``(K,)``: the tensors of the state then
    begin with a dimension of members, and every member keeps its own.

    Attributes:
        score, stale: best score so far (``-inf``: none), and looks since then.
        state: the state with it, by name; ``None`` before there is one.

    Example:
        >>> keeper = Keeper(torch.full((2,), -torch.inf))
        >>> state = {"table": torch.tensor([1.0, 2.0])}
        >>> keeper.offer(torch.tensor([0.5, torch.nan]), state)
        tensor([ True, False])
        >>> state["table"] += 10
        >>> _ = keeper.offer(torch.tensor([0.4, 0.1]), state)
        >>> keeper.state["table"], keeper.stale
        (tensor([ 1., 12.]), tensor([1., 0.]))
    """

    def __init__(self, score: Tensor, state: dict[str, Tensor] | None = None) -> None:
        self.score, self.stale = score, torch.zeros_like(score)
        self.state = deepcopy(state)

    @torch.no_grad()
    def offer(self, score: Tensor, state: dict[str, Tensor], among: Tensor | bool = True) -> Tensor:
        """Keep the state where its score is better, ``among`` some of the members; where it is."""
        better = score.isfinite() & (score > self.score) & among
        if self.state is None or better.dim() == 0:
            self.state = deepcopy(state) if bool(better.any()) else self.state
        else:
            for name, tensor in state.items():
                chosen = better.view(-1, *[1] * (tensor.dim() - 1))
                self.state[name].copy_(torch.where(chosen, tensor, self.state[name]))
        self.score = torch.where(better, score, self.score)
        self.stale = torch.where(better, 0.0, self.stale + 1)
        return better

    def state_dict(self) -> State:
        """What a checkpoint stores."""
        return {"score": self.score, "stale": self.stale, "state": self.state}

    def load_state_dict(self, saved: State) -> None:
        """Go on with what :meth:`state_dict` gave."""
        self.score, self.stale = (saved[name].to(self.score) for name in ("score", "stale"))
        self.state = saved["state"]
        if self.state is not None and self.score.dim():
            self.state = {name: kept.to(self.score.device) for name, kept in self.state.items()}
