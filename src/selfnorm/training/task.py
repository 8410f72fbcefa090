"""What the training loop is given: a task to train, and options."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from numbers import Integral
from typing import Any, Protocol

import numpy as np
from torch import Tensor, nn

from selfnorm.training.schedules import SCHEDULES

__all__ = ["LoopOptions", "Task", "refuse_unknown", "whole_number"]


def whole_number(name: str, value: Any) -> int:
    """A count of one or more, or an error that names it.

    Example:
        >>> whole_number("n_samples", 1e4)
        Traceback (most recent call last):
        ValueError: n_samples must be a whole number, got 10000.0: write int(10000.0)
    """
    if not isinstance(value, Integral):
        raise ValueError(f"{name} must be a whole number, got {value!r}: write int({value!r})")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    return int(value)


class Task(Protocol):
    """What is trained: a module, its loss, its validation.

    A task may also define ``data_columns(data)``: further tensors with one entry per row, computed
    once, which come to :meth:`loss` behind those of the data. And ``draws_ahead`` with
    ``draw(batch)`` and ``loss_of_drawn(drawn)``, the two halves of :meth:`loss`, where the first
    depends on nothing that is trained. And, for checkpoints, ``settings()``: plain values a resumed
    run must share; ``witness(data)``: log-densities at a few rows, by which a checkpoint of another
    network is known; ``own_state()`` with ``load_own_state(state)``: what a run remembers outside
    the module. And ``large_network = True``, for large networks: see
    :func:`selfnorm.training.overlapped.make_stepper`.
    """

    @property
    def module(self) -> nn.Module:
        """Everything that is trained and checkpointed."""
        ...

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Optimiser groups: ``params``, optional ``lr_scale`` and ``weight_decay``."""
        ...

    def start(self, data: tuple[Tensor, ...]) -> None:
        """Check the inputs and set initial values; called once, under the run's seed."""
        ...

    def loss(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:
        """Scalar loss and detached metrics, without waiting for the device."""
        ...

    def validate(self, data: tuple[Tensor, ...]) -> dict[str, float]:
        """Figures on held-out data; ``score`` (higher is better) chooses the best state."""
        ...

    def finish(self, data: tuple[Tensor, ...]) -> dict[str, float]:
        """Closing step on the chosen state, e.g. ``b <- log Z_hat``."""
        ...


@dataclass(frozen=True)
class LoopOptions:
    """Options of the loop; see :func:`selfnorm.fit` for their meaning."""

    batch_size: int = 256
    max_epochs: int = 25
    max_steps: int | None = None
    lr: float = 1e-3
    optimizer: str = "adamw"
    weight_decay: float = 0.0
    schedule: str = "one_cycle"
    warmup: float = 0.1
    clip_norm: float | None = 10.0
    ema: float | None = None
    patience: int | None = None
    validate_every: int | None = None
    seed: int | None = None
    progress: bool = True
    checkpoint: str | None = None
    checkpoint_every: int | None = None
    resume: bool = True
    cuda_graph: bool | int = True
    compile_step: bool = False

    def __post_init__(self) -> None:
        for each in fields(self):  # plain numbers: a checkpoint holds nothing else
            value = getattr(self, each.name)
            if isinstance(value, np.generic | Tensor):
                object.__setattr__(self, each.name, value.item())
        if self.optimizer not in ("adam", "adamw"):
            raise ValueError(f"optimizer must be 'adam' or 'adamw', not {self.optimizer!r}")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule must be one of {SCHEDULES}, not {self.schedule!r}")
        counts = ("batch_size", "max_epochs", "max_steps", "patience")
        for name in (*counts, "validate_every", "checkpoint_every"):
            value = getattr(self, name)
            if value is not None:
                whole_number(name, value)
        for name in ("lr", "clip_norm"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive, got {value}")
        if not isinstance(self.cuda_graph, Integral) or self.cuda_graph < 0:
            told = repr(self.cuda_graph)
            raise ValueError(f"cuda_graph must be true, false or a number of steps, not {told}")
        if not self.weight_decay >= 0:
            raise ValueError(f"weight_decay must not be negative, got {self.weight_decay}")
        if not 0 <= self.warmup <= 1:
            raise ValueError(f"warmup is a share of the run, from 0 to 1; got {self.warmup}")
        if self.ema is not None and not 0 < self.ema < 1:
            raise ValueError(f"ema must lie between 0 and 1, got {self.ema}")

    def of_the_run(self) -> dict[str, Any]:
        """The options a resumed run must share with the one it continues."""
        where_and_how = {"progress", "checkpoint", "checkpoint_every", "resume"}
        where_and_how |= {"cuda_graph", "compile_step"}
        return {k: v for k, v in asdict(self).items() if k not in where_and_how}


def refuse_unknown(options: dict[str, Any], caller: str) -> None:
    """Name the options that are none of the training loop's, as those of the one who asked.

    Example:
        >>> refuse_unknown({"lr": 1e-3, "epochs": 3}, "fit_many")
        Traceback (most recent call last):
        TypeError: fit_many() does not take epochs
    """
    unknown = sorted(set(options) - {each.name for each in fields(LoopOptions)})
    if unknown:
        raise TypeError(f"{caller}() does not take {', '.join(unknown)}")
