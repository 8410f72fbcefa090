"""The one training loop. It knows nothing of energies: a :class:`Task` says what a loss is.

It owns mini-batches, schedules, validation and the best state, early stopping, the guard against
non-finite steps, checkpoints, Ctrl-C and the progress bar.
"""

from __future__ import annotations

import math
import re
import time
import warnings
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, fields, replace
from numbers import Integral
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from selfnorm._context import seeded
from selfnorm._inputs import as_tensors
from selfnorm.errors import CheckpointError, DataError, SelfnormWarning
from selfnorm.training.checkpoint import (
    AFRESH,
    check_same_run,
    entries_of_task,
    fingerprint,
    load_checkpoint,
    restore_task,
    save_checkpoint,
)
from selfnorm.training.history import History
from selfnorm.training.step import Stepper

_SCHEDULES = ("one_cycle", "cosine", "constant", "exponential")
MAX_BAD_STREAK = 5  # bad steps in a row before going back to the last good state
MAX_LOST = 0.02  # share of steps that may be lost to non-finite values without a word
MAX_ROLLBACKS = 8  # roll-backs (each halves the learning rate) before giving up
_STEPPING, _LOOK_EVERY = 0.93, 0.02  # shares of max_time: for steps, and between validations,
_STEPS_PER_LOOK = 5  # between which at least this many times as long is spent as on one
_CUDA_READ_EVERY = 50  # steps between looks at the device-side counters


class Task:
    """What is trained: a module, its loss, its validation. All but :meth:`loss` have defaults.

    Attributes:
        module: everything that is trained and checkpointed.
        capturable: a step asks nothing of the host, and may be captured as a CUDA graph.
        writes_checkpoints: false where another process writes them.
    """

    module: nn.Module
    capturable: bool = False
    writes_checkpoints: bool = True

    def parameter_groups(self) -> list[dict[str, Any]]:
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
        groups: list[dict[str, Any]] = []
        for group in self.parameter_groups():
            params = [p for p in group["params"] if p.requires_grad]
            how = {"weight_decay": options.weight_decay, **group, "params": []}
            alike = [known for known in groups if {**known, "params": []} == how]
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

    def settings(self) -> dict[str, Any]:
        """Plain values that a resumed run must share with the one it continues."""
        return {}

    def witness(self, data: tuple[Tensor, ...]) -> Tensor | None:  # noqa: ARG002
        """Log-densities at a few rows, by which a checkpoint of another network is known."""
        return None

    def own_state(self) -> Any:
        """What a run remembers outside the module; goes into checkpoints."""
        return None

    def load_own_state(self, state: Any) -> None:
        """Go on with what :meth:`own_state` gave."""


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
            ``("one_cycle", 0.05)`` says over what share), ``"cosine"``, ``"constant"``,
            ``"exponential"`` (falls to ``1/e``).
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
        for each in fields(self):  # plain numbers: a checkpoint holds nothing else
            value = getattr(self, each.name)
            if isinstance(value, np.generic | Tensor):
                object.__setattr__(self, each.name, value.item())
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
        found = self.given(**{k: v for k, v in wishes.items() if getattr(self, k) is None})
        return replace(found, ema=found.ema or None, patience=found.patience or None)

    def of_the_run(self) -> dict[str, Any]:
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


_UNITS = {"": 1.0, "s": 1.0, "sec": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0}


def seconds(time_: float | str) -> float:
    """A length of time in seconds: a number of them, or a text.

    Example:
        >>> seconds("2min"), seconds("1.5 h"), seconds(90)
        (120.0, 5400.0, 90.0)
        >>> seconds("soon")
        Traceback (most recent call last):
        ValueError: max_time must be seconds, or a text such as '90s', '5min', '2h'; got 'soon'
    """
    found = re.fullmatch(r"\s*([0-9.]+)\s*([a-z]*)\s*", str(time_).lower())
    try:
        if found is not None and (length := float(found[1]) * _UNITS[found[2]]) > 0:
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

    def run_for(self, share: float = 1.0, spared: float = 0.0) -> dict[str, Any]:
        """The option that gives a training run a share of the seconds left but those spared."""
        if math.isinf(self.total):
            return {}
        return {"max_time": max(0.05, share * (self.left - spared))}


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


def split_rows(rows: Tensor, fraction: float) -> tuple[Tensor, Tensor | None]:
    """Rows to train on and rows to choose the best state by; none are spared of a tiny table."""
    held_out = int(fraction * len(rows))
    if held_out < 20:
        return rows, None
    order = torch.randperm(len(rows))
    return rows[order[held_out:]], rows[order[:held_out]]


def run(
    task: Task,
    data: tuple[Tensor, ...],
    *,
    val_data: tuple[Tensor, ...] | None = None,
    options: TrainingOptions,
) -> History:
    """Train ``task`` on ``data`` (tensors with one first dimension) and return the record.

    The task's module ends in its best state (by validation score; the last state without
    validation), also after Ctrl-C or divergence.
    """
    options = options.filled()
    if options.patience is not None and val_data is None:
        raise DataError(
            "early stopping (patience) needs held-out data: pass val_data, or leave patience=None"
        )
    device = next(task.module.parameters()).device
    data = as_tensors(data, "the training data", device)
    if val_data is not None:
        val_data = as_tensors(val_data, "val_data", device)
    # Training needs gradients, also where the caller has switched them off.
    with seeded(options.seed, device), torch.inference_mode(False), torch.enable_grad():
        try:
            return _Run(task, data, val_data, options, device).execute()
        except torch.cuda.OutOfMemoryError as error:
            raise torch.cuda.OutOfMemoryError(
                f"training does not fit into the memory of {device}: lower n_samples or "
                "batch_size, or train an EBM with task_options={'max_memory': 0.5}, in chunks "
                f"({str(error).splitlines()[0]})"
            ) from error


def _figures(record: dict[str, float]) -> dict[str, str]:
    """What a progress bar has room for."""
    return {name: f"{record[name]:.3f}" for name in ("lower", "upper", "ess") if name in record}


class _Run:
    """State of one run in progress."""

    def __init__(
        self,
        task: Task,
        data: tuple[Tensor, ...],
        val_data: tuple[Tensor, ...] | None,
        options: TrainingOptions,
        device: torch.device,
    ) -> None:
        self.task, self.data, self.val_data = task, data, val_data
        self.options, self.device = options, device
        self.n_rows = data[0].shape[0]
        self.batch = min(options.batch_size, self.n_rows)
        self.steps_per_epoch = max(1, self.n_rows // self.batch)
        self.total = self.steps_per_epoch * (options.max_epochs or 0)  # filled by now
        self.peak = options.lr or 0.0
        if options.max_steps is not None:
            self.total = min(self.total, options.max_steps)
        # Tiny data sets have epochs of one or two steps: validating each of them would dominate.
        self.validate_every = options.validate_every or max(
            self.steps_per_epoch, math.ceil(self.total / 100)
        )
        self.history = History()
        self.step = 0
        self.order = torch.empty(0, dtype=torch.long)
        self.lr_scale = 1.0
        self.stale = 0
        self.best: dict[str, Tensor] | None = None
        self.good: dict[str, Any] | None = None
        self.shown: dict[str, str] = {}
        self.began = time.perf_counter()
        self.seconds_before = 0.0
        # Of the time that may be taken a share is left to the closing step and a last validation.
        given = options.max_time
        self.time_to_step = math.inf if given is None else _STEPPING * seconds(given)
        self.next_look = _LOOK_EVERY * self.time_to_step
        self.look_seconds = 0.0

    def execute(self) -> History:
        options, history = self.options, self.history
        self.task.module.eval()
        self.task.start(self.data)
        self.task.module.train()
        self.stepper = Stepper(self.task, self.data, options)
        self.optimizer = self.stepper.optimizer
        self.first = self._training_state()
        numbers = self.task.module.state_dict().items()
        self.watched = [k for k, v in numbers if v.is_floating_point() and v.isfinite().all()]
        kept = options.saving
        path = None if kept is None else Path(kept.path)
        save_every = (kept and kept.every) or self.validate_every
        if kept is not None and path is not None and kept.resume and path.exists():
            self._restore(load_checkpoint(path), path)
            if self.history.stopped:
                return self.history
            history = self.history
        bar = tqdm(
            total=self.total,
            initial=self.step,
            disable=None if options.progress else True,  # None: shown in terminals and notebooks
            desc="fit",
            unit="step",
            dynamic_ncols=True,
        )
        try:
            while self.step < self.total and not history.stopped:
                self._take_step()
                bar.update()
                due = self.step % self.validate_every == 0 or self.step == self.total
                if math.isfinite(self.time_to_step):
                    due = self._due_by_time()
                if due:
                    self._look(bar)
                elif self.device.type != "cuda" or self.step % _CUDA_READ_EVERY == 0:
                    self._guard()
                timed = due and math.isfinite(self.time_to_step)  # an epoch may be long
                now = timed or self.step % save_every == 0
                # a run that has just stopped is saved when its best state has been adopted
                if path is not None and now and not history.stopped:
                    self._save(path)
        except KeyboardInterrupt:
            history.stopped = "interrupted"
            warnings.warn(
                f"training interrupted at step {self.step}; the best state so far is kept",
                SelfnormWarning,
                stacklevel=3,
            )
        finally:
            bar.close()
            self.stepper.release()
        history.stopped = history.stopped or "max_epochs"
        self._adopt_best()
        self.task.module.eval()
        history.final = self.task.finish(self.data)
        history.n_steps = self.step
        history.skipped_steps = int(self.stepper.counters.skipped)
        self._tell_losses()
        history.seconds = self.elapsed
        if path is not None and history.stopped != "interrupted":
            self._save(path)
        return history

    @property
    def elapsed(self) -> float:
        """Seconds of this run, those before it was resumed included."""
        return self.seconds_before + time.perf_counter() - self.began

    def _due_by_time(self) -> bool:
        """Whether to look now; the last time before the run's time is over."""
        if self.elapsed + 1.2 * self.look_seconds >= self.time_to_step:
            self.history.stopped = "max_time"
        due = bool(self.history.stopped) or self.elapsed >= self.next_look
        return due or self.step == self.total

    def _save(self, path: Path) -> None:
        """Write a checkpoint; a full disk is reported, and does not cost the run."""
        if not self.task.writes_checkpoints:
            return
        try:
            save_checkpoint(path, self._state())
        except CheckpointError as error:
            warnings.warn(f"{error}; training goes on without it", SelfnormWarning, stacklevel=4)

    def _take_step(self) -> None:
        position = self.step % self.steps_per_epoch
        if position == 0:
            self.order = torch.randperm(self.n_rows, device=self.device)
        rows = self.order[position * self.batch : (position + 1) * self.batch]
        # Where time ends the run before the steps do, its share that is gone moves the schedule.
        place = self.step
        if math.isfinite(self.time_to_step):
            gone = min(self.elapsed / self.time_to_step, 1.0)
            place = max(place, int(gone * self.total))
        kind, warmup = self.options.shape
        factor = lr_factor(kind, place, self.total, warmup)
        self.stepper.step(rows, self.peak * factor * self.lr_scale, self.step)
        self.step += 1

    def _guard(self, *, looking: bool = False) -> bool:
        """Go back to the last good state after several bad steps in a row. True if all is well."""
        reason = self.task.guard(self.stepper, looking=looking)
        if reason is not None:  # e.g. models trained together: the task guards each of them
            self.history.stopped = reason
            return not reason
        # On the CPU reading the counter is free; on CUDA this is one small copy.
        bad = int(self.stepper.counters.streak) >= MAX_BAD_STREAK
        # Running averages of a layer take in a bad step even where the parameters do not.
        broken = (bad or looking) and not self._sound()
        if not bad and not broken:
            return True
        if self.stepper.give_up_graph():
            # What was captured may be at fault, not the learning rate: the same again without.
            self._go_back(broken)
            return False
        self.history.rollbacks += 1
        if self.history.rollbacks > MAX_ROLLBACKS:
            self.history.stopped = "diverged"
            warnings.warn(
                f"training stopped at step {self.step}: loss or gradient stayed non-finite after "
                f"{MAX_ROLLBACKS} roll-backs; the best state so far is kept. Try a smaller lr, a "
                "heavier-tailed proposal (Defensive) or a base density",
                SelfnormWarning,
                stacklevel=4,
            )
            return False
        self._go_back(broken)
        self.lr_scale *= 0.5
        return False

    def _go_back(self, broken: bool) -> None:
        """To the last good state; before there is one, to the start if the present is broken."""
        back_to = self.good or (self.first if broken else None)
        if back_to is not None:
            self._load_training_state(back_to)
        self.stepper.counters.streak.zero_()

    def _sound(self) -> bool:
        """Whether all numbers of the module that were finite at the start still are."""
        now = self.task.module.state_dict()
        finite = [now[name].isfinite().all() for name in self.watched]
        return not finite or bool(torch.stack(finite).all())  # one question to the device

    def _look(self, bar: Any) -> None:
        """Read metrics, validate, keep the best state, decide whether to go on."""
        began = time.perf_counter()
        means = self.stepper.read()
        if not self._guard(looking=True):
            return
        self.good = self._training_state()
        record: dict[str, float] = {
            "step": self.step,
            "epoch": self.step / self.steps_per_epoch,
            **means,
            "lr": float(self.optimizer.param_groups[0]["lr"]),
        }
        if self.val_data is not None:
            self.task.module.eval()
            with self.stepper.averaged(), torch.no_grad():
                figures = self.task.validate(self.val_data)
                score = figures.get("score", -math.inf)
                best = self.history.best_score
                if math.isfinite(score) and (best is None or score > best):
                    self.history.best_score, self.history.best_step = score, self.step
                    self.best = deepcopy(self.task.module.state_dict())
                    self.stale, self.shown = 0, _figures(figures) | {"kept": f"step {self.step}"}
                else:
                    self.stale += 1
            self.task.module.train()
            record.update({f"val_{k}": v for k, v in figures.items()})
            if self.options.patience is not None and self.stale >= self.options.patience:
                self.history.stopped = "patience"
        record["seconds"] = self.elapsed
        self.history.records.append(record)
        # With validation the bar shows the state that is kept, not the latest one.
        bar.set_postfix(
            self.shown or _figures(record) or {"loss": f"{record.get('loss', math.nan):.3f}"}
        )
        self.look_seconds = max(self.look_seconds, time.perf_counter() - began)
        between = max(_LOOK_EVERY * self.time_to_step, _STEPS_PER_LOOK * self.look_seconds)
        self.next_look = self.elapsed + between

    def _adopt_best(self) -> None:
        if self.best is not None:
            self.task.module.load_state_dict(self.best)
            return
        if self.task.guard(self.stepper, looking=False) is None:
            self._refuse_broken()
        self.history.best_step = self.step
        if self.stepper.average:
            self.stepper.adopt(self.stepper.average)

    def _refuse_broken(self) -> None:
        """Nothing was judged well: end in a sound state, and say what became of the run."""
        broken = not self._sound()
        if broken or self.history.stopped == "diverged":
            self._go_back(broken)
        lost = int(self.stepper.counters.skipped)
        judged = self.val_data is not None
        if (judged or lost >= self.step > 0) and self.history.stopped != "interrupted":
            warnings.warn(
                f"no {'validation score' if judged else 'loss or gradient'} was finite in "
                f"{self.step} steps, {lost} of which were lost: the model is in its last sound "
                "state, or as it began, and is no result. Look at the scale of the inputs, or try "
                "a smaller lr",
                SelfnormWarning,
                stacklevel=5,
            )

    def _tell_losses(self) -> None:
        """Say of a run that ended well that many of its steps taught nothing."""
        history, lost = self.history, self.history.skipped_steps
        told = self.best is None and (self.val_data is not None or lost >= self.step)
        if lost > max(5, MAX_LOST * self.step) and not told and history.stopped != "diverged":
            warnings.warn(
                f"{lost} of {self.step} steps were lost, for their loss or gradient was not "
                "finite: the rows in them taught nothing. Look for rows where the gradient is "
                "not a number (a square root, norm or logarithm at zero), or try a smaller lr; on "
                "a GPU a task with capturable = False takes no CUDA graph",
                SelfnormWarning,
                stacklevel=4,
            )

    def _training_state(self) -> dict[str, Any]:
        return {
            "module": deepcopy(self.task.module.state_dict()),
            "optimizer": deepcopy(self.optimizer.state_dict()),
            "average": deepcopy(self.stepper.average),
        }

    def _load_training_state(self, state: dict[str, Any]) -> None:
        self.task.module.load_state_dict(state["module"])
        self.stepper.release()  # a captured graph holds the addresses of what is replaced here
        self.optimizer.load_state_dict(deepcopy(state["optimizer"]))
        with torch.no_grad():
            for mine, saved in zip(self.stepper.average, state["average"], strict=True):
                mine.copy_(saved)

    def _state(self) -> dict[str, Any]:
        history = self.history.to_dict()
        history["skipped_steps"] = int(self.stepper.counters.skipped)
        counters = self.stepper.counters
        return {
            "training": self._training_state(),
            "best": self.best,
            "good": self.good,
            "step": self.step,
            "order": self.order,
            "lr_scale": self.lr_scale,
            "stale": self.stale,
            "counters": (counters.counts, list(counters.names), counters.sums),
            "history": history,
            "seconds": self.elapsed,
            "random": torch.get_rng_state(),
            "random_cuda": torch.cuda.get_rng_state(self.device)
            if self.device.type == "cuda"
            else None,
            "options": self.options.of_the_run(),
            "data": fingerprint(self.data),
            **entries_of_task(self.task, self.data),
        }

    def _restore(self, state: dict[str, Any], path: Path) -> None:
        try:
            check_same_run(
                path, state, self.task, self.options.of_the_run(), fingerprint(self.data)
            )
            if state["step"] > self.total:
                raise CheckpointError(
                    f"{path} was trained for {state['step']} steps, and {self.total} are asked "
                    f"for; ask for as many, or {AFRESH}"
                )
            for earlier in (state["best"], state["good"] and state["good"]["module"]):
                if earlier is not None:
                    self.task.module.load_state_dict(earlier)
            self._load_training_state(state["training"])
            restore_task(path, state, self.task, self.data)
            self.history = History.from_dict(state["history"])
            counts, names, sums = state["counters"]
            self.stepper.counters.restore(counts, tuple(names), sums)
            torch.set_rng_state(state["random"])
        except CheckpointError:
            self._load_training_state(self.first)
            raise
        except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
            self._load_training_state(self.first)
            raise CheckpointError(f"{path} belongs to another model ({error}); {AFRESH}") from error
        self.best, self.good = state["best"], state["good"]
        self.step, self.order = state["step"], state["order"].to(self.device)
        self.lr_scale, self.stale = state["lr_scale"], state["stale"]
        self.seconds_before = state["seconds"]
        if self.history.stopped == "max_epochs" and self.step < self.total:
            self.history.stopped = ""  # it is to go on for longer
        if state["random_cuda"] is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(state["random_cuda"], self.device)
