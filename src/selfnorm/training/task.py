"""What a run is given: a :class:`Task`, the :class:`Source` of its rows, and its options.

The engine knows rows by their numbers. It asks a :class:`Source` for the order of an epoch, for the
row numbers of its mini-batches and for the rows themselves. Tensors in memory are a
:class:`TensorSource`; models that train side by side go through rows of their own, which is a
:class:`MemberSource`; data larger than memory need a source of three methods:

>>> class Squares(Source):
...     def __len__(self) -> int:
...         return 4
...     def take(self, rows: Tensor) -> tuple[Tensor, ...]:
...         return (rows.square(),)
...     def fingerprint(self) -> str:
...         return "squares"
>>> source = Squares()
>>> epoch = torch.tensor([2, 0, 3, 1])
>>> [source.take(rows)[0].tolist() for rows in source.batches(epoch, 2)]
[[4, 0], [9, 1]]
"""

from __future__ import annotations

import hashlib
import math
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, fields, replace
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from selfnorm._inputs import as_tensors

if TYPE_CHECKING:
    from selfnorm.training.loop import Stepper

ParameterGroup = dict[str, Any]  # of an optimiser
State = dict[str, Any]  # values and tensors by name, as a checkpoint stores them
T = TypeVar("T")
TaskOptions = dict[str, Any]  # what a model's own task takes, by name

_PREVIEW = 10_000  # rows that a task sees of data that are not in memory
_SCHEDULES = ("one_cycle", "cosine", "linear", "constant", "exponential")
_STEPPING, _LOOK_EVERY = 0.93, 0.02  # shares of max_time: for steps, and between validations,
_STEPS_PER_LOOK = 5  # between which at least this many times as long is spent as on one
_UNITS = {"": 1.0, "s": 1.0, "sec": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0}


class Task:
    """What is trained: a module, its loss, its validation. All but :meth:`loss` have defaults.

    Attributes:
        module: everything that is trained and checkpointed.
        capturable: a step asks nothing of the host, and may be captured as a CUDA graph.
        rank, world: number of this process among those that train together, and how many there
            are: each takes its share of a batch, and the first one writes the checkpoints.
    """

    module: nn.Module
    capturable: bool = False
    rank: int = 0
    world: int = 1

    def parameter_groups(self) -> list[ParameterGroup]:
        """Optimiser groups: ``params``, optional ``lr_scale`` and ``weight_decay``."""
        return [{"params": list(self.module.parameters())}]

    def start(self, data: tuple[Tensor, ...]) -> None:
        """Check the inputs and set initial values; called once, under the run's seed."""

    def loss(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:
        """Scalar loss and detached metrics, without waiting for the device."""
        raise NotImplementedError(f"{type(self).__name__} has no loss on {len(batch)} tensors")

    def validate(self, data: tuple[Tensor, ...]) -> dict[str, float]:  # noqa: ARG002
        """Figures on held-out data; ``score`` (higher is better) chooses the best state."""
        return {}

    def finish(self, data: tuple[Tensor, ...]) -> dict[str, float]:  # noqa: ARG002
        """Closing step on the chosen state, e.g. ``b <- log Z_hat``."""
        return {}

    def make_optimizer(self, options: TrainingOptions) -> torch.optim.Optimizer:
        """Adam or AdamW over the parameter groups; fused, capturable on CUDA."""
        groups: list[ParameterGroup] = []
        for group in self.parameter_groups():
            params = [p for p in group["params"] if p.requires_grad]
            how = {"weight_decay": options.weight_decay, **group, "params": []}
            alike = [other for other in groups if {**other, "params": []} == how]
            if alike:
                alike[0]["params"] += params  # one update for both
            elif params:
                groups.append({**how, "params": params})
        if not groups:
            raise ValueError("nothing to train: no parameter of the model asks for a gradient")
        device = groups[0]["params"][0].device
        on_cuda = device.type == "cuda"
        kind = torch.optim.AdamW if options.optimizer == "adamw" else torch.optim.Adam
        lr = torch.zeros((), device=device) if on_cuda else 0.0
        return kind(groups, lr=lr, fused=True, capturable=on_cuda)

    def condition_gradients(self, params: Sequence[Tensor], clip_norm: float | None) -> Tensor:
        """Norm of the gradient, which is shortened to ``clip_norm`` where it is longer.

        In double precision: where ``log Z - b`` is over 43 the gradient's square is beyond single
        precision, and a step that would have mended the model was lost, as were all after it.
        """
        grads = [p.grad for p in params if p.grad is not None]
        if clip_norm is None or not grads:  # the optimiser squares gradients, too
            return torch.nn.utils.clip_grad_norm_(params, math.inf)
        norm = torch.stack(torch._foreach_norm(grads, 2, torch.float64)).norm()  # noqa: SLF001
        scale = (clip_norm / (norm + 1e-6)).clamp_max(1.0)
        torch._foreach_mul_(grads, scale.to(grads[0].dtype))
        return norm.to(torch.promote_types(grads[0].dtype, torch.float32))

    def guard(self, stepper: Stepper, *, looking: bool) -> str | None:  # noqa: ARG002
        """A reason to stop, ``""`` to go on; ``None`` leaves the care for bad steps to the loop.

        Called after every step (on CUDA now and then); ``looking`` before a validation.
        """
        return None

    def settings(self) -> State:
        """Plain values that a resumed run must share with the one it continues."""
        return {}

    def witness(self, data: tuple[Tensor, ...]) -> Tensor | None:  # noqa: ARG002
        """Log-densities at a few rows, by which a checkpoint of another network is told apart."""
        return None

    def agreed(self, value: T) -> T:
        """What all processes that train together take for a value that each has its own of."""
        return value

    def own_state(self) -> State | None:
        """What a run remembers outside the module; goes into checkpoints."""
        return None

    def load_own_state(self, state: State) -> None:
        """Go on with what :meth:`own_state` gave."""


class MembersTask(Task):
    """A task of members that train side by side, of which each keeps its own best state.

    Attributes:
        keeper: the best states.
    """

    keeper: Keeper

    def own_state(self) -> State:
        """The members' best states."""
        return self.keeper.state_dict()

    def load_own_state(self, state: State) -> None:
        """Go on with the best states of a checkpoint."""
        self.keeper.load_state_dict(state)


class Source(ABC):
    """Rows by their numbers, ``0`` to ``len(source) - 1``.

    Attributes:
        capturable: :meth:`take` asks nothing of the host, so that a step may be captured as a CUDA
            graph.
    """

    capturable: bool = False

    @abstractmethod
    def __len__(self) -> int:
        """Number of rows."""

    @abstractmethod
    def take(self, rows: Tensor) -> tuple[Tensor, ...]:
        """A mini-batch: the rows of these numbers ``(B,)``, on the device of the numbers."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Hash of the data: a run is resumed only on the data it began with."""

    def preview(self, device: torch.device) -> tuple[Tensor, ...]:
        """Rows for a task's checks, validation and closing step: all of those in memory."""
        return self.take(torch.arange(min(len(self), _PREVIEW), device=device))

    def epoch(self, device: torch.device) -> Tensor:
        """Row numbers in the order of a new epoch, from torch's global generator.

        Checkpoints store them.
        """
        return torch.randperm(len(self), device=device)

    def batches(
        self, epoch: Tensor, size: int, rank: int = 0, world: int = 1
    ) -> Tensor | Sequence[Tensor]:
        """Row numbers ``(steps, size / world)`` of the mini-batches that one of ``world`` ranks
        takes; rows at the end of an epoch that fill no batch are left out.
        """
        steps = max(1, len(epoch) // size)
        return epoch[: steps * size].view(steps, -1)[:, rank::world]


class TensorSource(Source):
    """Tensors with one first dimension, on the device of the model."""

    capturable = True

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.tensors[0])

    def take(self, rows: Tensor) -> tuple[Tensor, ...]:
        """These rows of every tensor."""
        return tuple(tensor.index_select(0, rows) for tensor in self.tensors)

    def fingerprint(self) -> str:
        """Of the tensors."""
        return fingerprint(self.tensors)

    def preview(self, device: torch.device) -> tuple[Tensor, ...]:
        """All rows."""
        return tuple(tensor.to(device) for tensor in self.tensors)


class MemberSource(Source):
    """Rows for members that train side by side: each goes through rows and in an order of its own.

    Args:
        tensors: ``(n, ...)`` that the members share, or ``(K, n, ...)``, a table for each of them.
        rows: ``(len, K)``; column ``k`` are the row numbers that member ``k`` goes through.
        shared: whether the tables are shared.
    """

    capturable = True

    def __init__(self, tensors: tuple[Tensor, ...], rows: Tensor, *, shared: bool = True) -> None:
        self.tensors, self.rows, self.shared = tensors, rows, shared
        self._member = torch.arange(rows.shape[1], device=rows.device)[:, None]

    def __len__(self) -> int:
        """Length of the members' lists."""
        return len(self.rows)

    def take(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Rows ``(K, B, ...)`` at places ``(B,)`` of the members' lists."""
        numbers = self.rows.index_select(0, rows).T
        if self.shared:
            return tuple(tensor[numbers] for tensor in self.tensors)
        return tuple(tensor[self._member, numbers] for tensor in self.tensors)

    def fingerprint(self) -> str:
        """Of the tables and of the members' rows."""
        return fingerprint((self.rows, *self.tensors))


def as_source(data: Source | Sequence[Tensor], name: str, device: torch.device) -> Source:
    """Data as a source; tensors and arrays are moved to the device."""
    return data if isinstance(data, Source) else TensorSource(as_tensors(tuple(data), name, device))


def fingerprint(tensors: Sequence[Tensor]) -> str:
    """Hash of shapes, types and numbers of tensors."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(str((tuple(tensor.shape), tensor.dtype)).encode())
        numbers = tensor.detach().cpu().contiguous().reshape(-1)  # of a single number, too
        digest.update(numbers.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


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


@torch.no_grad()
def copy_rows(which: Tensor, sources: Iterable[Tensor], targets: Iterable[Tensor]) -> None:
    """Copy chosen members' rows of tensors ``(K, ...)`` into others, as far as there are both."""
    for source, target in zip(sources, targets, strict=False):
        chosen = which.view(-1, *[1] * (target.dim() - 1))
        target.copy_(torch.where(chosen, source, target))


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
            copy_rows(better, state.values(), [self.state[name] for name in state])
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
