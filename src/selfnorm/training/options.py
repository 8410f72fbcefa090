"""How a run trains: its options, and where it saves its progress."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
from torch import Tensor

from selfnorm.training.schedule import seconds

if TYPE_CHECKING:
    from selfnorm.training.task import State

_SCHEDULES = ("one_cycle", "cosine", "linear", "constant", "exponential")


@dataclass(frozen=True)
class Checkpoint:
    """Where a run saves its progress.

    Args:
        path: the file.
        every: steps between two savings, those between validations by default.
        resume: go on from an existing file of the same run, for longer where more steps or epochs
            are asked for; false starts afresh.

    Example:
        >>> options = TrainingOptions(checkpoint=Checkpoint("run.ckpt", every=100))
        >>> options.checkpoint.resume
        True
    """

    path: str | Path
    every: int | None = None
    resume: bool = True

    def __post_init__(self) -> None:
        if self.every is not None:
            whole_number("every", self.every)


@dataclass(frozen=True)
class TrainingOptions:
    """How a model is trained; every training function takes these.

    Args:
        batch_size, max_epochs, max_steps: size of the run, whichever ends first.
        max_time: seconds that the run may take, or a text such as ``"90s"``, ``"5min"``, ``"2h"``:
            validations and the closing step included. The learning rate falls with the time, too;
            how far a run comes depends on the machine, so its numbers are not those of another.
        lr: peak learning rate.
        optimizer: ``"adamw"`` or ``"adam"``, with ``weight_decay``.
        schedule: ``"one_cycle"`` (rise over a tenth of the run, then cosine; a pair
            ``("one_cycle", 0.05)`` says over what share), ``"cosine"``, ``"linear"``,
            ``"constant"``, ``"exponential"`` (falls to ``1/e``).
        clip_norm: gradient norm limit, ``None`` for none.
        ema: decay of a moving average of the parameters, e.g. 0.999; it is what is validated
            and kept; 0 for none.
        patience: stop after so many validations without a better score; 0 for never.
        validate_every: steps between validations (an epoch, or a hundredth of the run).
        seed: same seed, same bits on CPU; the caller's random state is left alone.
        progress: show a progress bar with both bounds, in a terminal or a notebook.
        checkpoint: file to save progress to, or a :class:`Checkpoint` that says more; an existing
            one of the same run is resumed. On CPU a resumed run ends with the same bits as one
            never stopped.

    ``max_epochs``, ``lr``, ``ema`` and ``patience`` that are ``None`` are chosen by what is
    trained; where it has no wish they are 25, 0.001, none and never.

    Example:
        >>> TrainingOptions(ema=0.999).given(lr=3e-3, patience=None).lr
        0.003
    """

    batch_size: int = 256
    max_epochs: int | None = None
    max_steps: int | None = None
    max_time: float | str | None = None
    lr: float | None = None
    optimizer: str = "adamw"
    weight_decay: float = 0.0
    schedule: str | tuple[str, float] = "one_cycle"
    clip_norm: float | None = 10.0
    ema: float | None = None
    patience: int | None = None
    validate_every: int | None = None
    seed: int | None = None
    progress: bool = True
    checkpoint: str | Path | Checkpoint | None = None

    def __post_init__(self) -> None:
        for option in fields(self):  # plain numbers: a checkpoint holds nothing else
            value = getattr(self, option.name)
            if isinstance(value, np.generic | Tensor):
                object.__setattr__(self, option.name, value.item())
        if self.optimizer not in ("adam", "adamw"):
            raise ValueError(f"optimizer must be 'adam' or 'adamw', not {self.optimizer!r}")
        if self.max_time is not None:
            object.__setattr__(self, "max_time", seconds(self.max_time))
        if isinstance(self.schedule, list):  # as JSON has it
            object.__setattr__(self, "schedule", tuple(self.schedule))
        kind, warmup = self.shape
        if kind not in _SCHEDULES:
            raise ValueError(f"schedule must be one of {_SCHEDULES}, not {kind!r}")
        for name in ("batch_size", "max_epochs", "max_steps", "patience", "validate_every"):
            value = getattr(self, name)
            if value is not None and not (name == "patience" and value == 0):
                whole_number(name, value)
        for name in ("lr", "clip_norm"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive, got {value}")
        if not self.weight_decay >= 0:
            raise ValueError(f"weight_decay must not be negative, got {self.weight_decay}")
        if not 0 <= warmup <= 1:
            raise ValueError(f"the rise is a share of the run, from 0 to 1; got {warmup}")
        if self.ema is not None and not 0 <= self.ema < 1:
            raise ValueError(f"ema must lie between 0 and 1, got {self.ema}")

    @property
    def shape(self) -> tuple[str, float]:
        """Kind of schedule, and the share of the run over which the learning rate rises."""
        return (self.schedule, 0.1) if isinstance(self.schedule, str) else self.schedule

    @property
    def saving(self) -> Checkpoint | None:
        """The checkpoint, however it was given."""
        saved = self.checkpoint or None
        return saved if isinstance(saved, Checkpoint | None) else Checkpoint(saved)

    def given(self, **options: Any) -> TrainingOptions:
        """The same with those options that are not ``None`` in place of these."""
        names = [field.name for field in fields(self)]
        if unexpected := sorted(options.keys() - set(names)):
            raise TypeError(f"{unexpected} are no options of training; these are: {names}")
        return replace(self, **{k: v for k, v in options.items() if v is not None})

    def filled(self, **wishes: Any) -> TrainingOptions:
        """The same with ``wishes``, then the usual values, in place of those that are ``None``.

        Example:
            >>> options = TrainingOptions(ema=0).filled(lr=0.01, ema=0.99)
            >>> options.lr, options.max_epochs, options.ema
            (0.01, 25, None)
        """
        wishes = {"max_epochs": 25, "lr": 1e-3, **wishes}
        filled = self.given(**{k: v for k, v in wishes.items() if getattr(self, k) is None})
        return replace(filled, ema=filled.ema or None, patience=filled.patience or None)

    def of_the_run(self) -> State:
        """The options a resumed run must share with the one it continues: all but its length."""
        free = ("progress", "checkpoint", "max_epochs", "max_steps", "max_time")
        return {k: v for k, v in asdict(self).items() if k not in free}


class Options(TypedDict, total=False):
    """The same by name, as the functions that train take them."""

    batch_size: int | None
    max_epochs: int | None
    max_steps: int | None
    max_time: float | str | None
    lr: float | None
    optimizer: str
    weight_decay: float
    schedule: str | tuple[str, float]
    clip_norm: float | None
    ema: float | None
    patience: int | None
    validate_every: int | None
    seed: int | None
    progress: bool | None
    checkpoint: str | Path | Checkpoint | None


def whole_number(name: str, value: object) -> int:
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
