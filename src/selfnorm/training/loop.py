"""The one training loop. It knows nothing of energies: a :class:`Task` says what a loss is.

It owns mini-batches, schedules, validation and the best state, early stopping, the guard against
non-finite steps, checkpoints, Ctrl-C and the progress bar.
"""

from __future__ import annotations

import math
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from selfnorm._context import seeded
from selfnorm._inputs import as_tensors
from selfnorm.errors import CheckpointError, DataError, SelfnormWarning
from selfnorm.training.checkpoint import (
    all_finite,
    check_same_run,
    copied,
    copy_into,
    entries_of_task,
    fingerprint,
    floats,
    load_checkpoint,
    restore_task,
    save_checkpoint,
)
from selfnorm.training.history import History
from selfnorm.training.overlapped import make_stepper
from selfnorm.training.schedules import lr_factor
from selfnorm.training.step import Stepper, make_optimizer
from selfnorm.training.task import LoopOptions, Task

__all__ = ["LoopOptions", "Task", "run"]

_MAX_BAD_STREAK = 5  # bad steps in a row before going back to the last good state
_MAX_ROLLBACKS = 8  # roll-backs (each halves the learning rate) before giving up
_CUDA_READ_EVERY = 50  # steps between looks at the device-side counters, about
_MAX_LOST = 0.2  # share of captured steps that may be lost before the graph is given up


def run(
    task: Task,
    data: tuple[Tensor, ...],
    *,
    val_data: tuple[Tensor, ...] | None = None,
    options: LoopOptions,
) -> History:
    """Train ``task`` on ``data`` (tensors with one first dimension) and return the record.

    The task's module ends in its best state (by validation score; the last state without
    validation), also after Ctrl-C or divergence.
    """
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
        training = _Run(task, data, val_data, options, device)
        try:
            return training.execute()
        finally:
            training.release()


class _Run:
    """State of one run in progress."""

    def __init__(
        self,
        task: Task,
        data: tuple[Tensor, ...],
        val_data: tuple[Tensor, ...] | None,
        options: LoopOptions,
        device: torch.device,
    ) -> None:
        self.task, self.data, self.val_data = task, data, val_data
        self.options, self.device = options, device
        self.n_rows = data[0].shape[0]
        self.batch = min(options.batch_size, self.n_rows)
        self.steps_per_epoch = max(1, self.n_rows // self.batch)
        self.total = self.steps_per_epoch * options.max_epochs
        if options.max_steps is not None:
            self.total = min(self.total, options.max_steps)
        # Tiny data sets have epochs of one or two steps: validating each of them would dominate.
        self.validate_every = options.validate_every or max(
            self.steps_per_epoch, math.ceil(self.total / 100)
        )
        self.checkpoint_every = options.checkpoint_every or self.validate_every
        stops = [self.validate_every] + [self.checkpoint_every] * bool(options.checkpoint)
        self.at_once = max(1, int(options.cuda_graph))
        self.read_every = max(1, _CUDA_READ_EVERY // self.at_once) * self.at_once
        self.stops = [*stops, self.read_every, self.total]
        self.history = History()
        self.step = 0
        self.order = torch.empty(0, dtype=torch.long)
        self.lr_scale = 1.0
        self.stale = 0
        self.best: dict[str, Tensor] | None = None
        self.good: dict[str, Any] | None = None
        self.seen = (0, 0)  # steps taken and lost, as of the last look
        self.began = time.perf_counter()
        self.seconds_before = 0.0

    def execute(self) -> History:
        options, history = self.options, self.history
        self.task.module.eval()
        self.task.start(self.data)
        self.task.module.train()
        self.optimizer = make_optimizer(self.task, options.optimizer, options.weight_decay)
        self.stepper = make_stepper(
            self.task,
            self.optimizer,
            self.data,
            clip_norm=options.clip_norm,
            ema=options.ema,
            capture=bool(options.cuda_graph),
            compiled=options.compile_step,
            steps_per_graph=self.at_once,
        )
        self.first = self._training_state()
        self.watched = [k for k, v in floats(self.task.module).items() if all_finite([v])]
        path = Path(options.checkpoint) if options.checkpoint else None
        if path is not None and options.resume and path.exists():
            self._restore(load_checkpoint(path), path)
            if self.history.stopped:
                return self.history
            history = self.history
        bar = tqdm(
            total=self.total,
            initial=self.step,
            disable=not options.progress,
            desc="fit",
            unit="step",
            dynamic_ncols=True,
        )
        try:
            while self.step < self.total and not history.stopped:
                bar.update(self._take_steps())
                due = self.step % self.validate_every == 0 or self.step == self.total
                if due:
                    self._look(bar)
                elif self.device.type != "cuda" or self.step % self.read_every == 0:
                    self._guard()
                if path is not None and self.step % self.checkpoint_every == 0:
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
        history.stopped = history.stopped or "max_epochs"
        self.stepper.settle()
        self.stepper.skipped = int(self.stepper.counters.skipped)  # also those since the last look
        self._adopt_best()
        self.task.module.eval()
        history.final = self.task.finish(self.data)
        history.n_steps = self.step
        history.skipped_steps = self.stepper.skipped
        history.seconds = self.seconds_before + time.perf_counter() - self.began
        if path is not None and history.stopped != "interrupted":
            self._save(path)
        return history

    def release(self) -> None:
        """Let go of what a run holds on the device, whichever way it ended."""
        # None if the task refused to start.
        stepper: Stepper | None = getattr(self, "stepper", None)
        if stepper is not None:
            stepper.release()

    def _save(self, path: Path) -> None:
        """Write a checkpoint; a full disk is reported, and does not cost the run."""
        if not getattr(self.task, "writes_checkpoints", True):  # rank 0 does, for all
            return
        try:
            save_checkpoint(path, self._state())
        except CheckpointError as error:
            warnings.warn(f"{error}; training goes on without it", SelfnormWarning, stacklevel=4)

    def _take_steps(self) -> int:
        """One step, or several by one launch where nothing is due before; returns how many."""
        count = self.stepper.steps_at_once
        if any(count > stop - self.step % stop for stop in self.stops):
            count = 1
        rows: list[Tensor] = []
        rates: list[float] = []
        for step in range(self.step, self.step + count):
            position = step % self.steps_per_epoch
            if position == 0:
                self.order = torch.randperm(self.n_rows, device=self.device)
            rows.append(self.order[position * self.batch : (position + 1) * self.batch])
            factor = lr_factor(self.options.schedule, step, self.total, self.options.warmup)
            rates.append(self.options.lr * factor * self.lr_scale)
        if count == 1:
            self.stepper.step(rows[0], rates[0], self.step)
        else:
            self.stepper.steps(torch.cat(rows), rates, self.step)
        self.step += count
        return count

    def _guard(self, means: dict[str, float] | None = None) -> bool:
        """Go back to the last good state after several bad steps in a row. True if all is well."""
        own: Any = getattr(self.task, "guard", None)
        if own is not None:  # e.g. models trained together: the task guards each of them
            self.history.stopped = own(self.stepper, looking=means is not None)
            return not self.history.stopped
        if means is None:
            # On the CPU reading the counter is free; on CUDA this is one small copy.
            self.stepper.bad_streak = int(self.stepper.counters.streak)
        steps, lost = self.step - self.seen[0], self.stepper.skipped - self.seen[1]
        lossy = means is not None and lost > max(_MAX_BAD_STREAK, _MAX_LOST * steps)
        bad = self.stepper.bad_streak >= _MAX_BAD_STREAK or (lossy and self.stepper.captured)
        # Running averages of a layer take in a bad step even where the parameters do not.
        broken = (bad or means is not None) and not self._sound()
        if means is not None:
            self.seen = (self.step, self.stepper.skipped)
        if not bad and not broken:
            return True
        if self.stepper.give_up_graph():
            # What was captured may be at fault, not the learning rate: the same again without.
            self._go_back(broken)
            return False
        self.history.rollbacks += 1
        if self.history.rollbacks > _MAX_ROLLBACKS:
            self.history.stopped = "diverged"
            warnings.warn(
                f"training stopped at step {self.step}: loss or gradient stayed non-finite after "
                f"{_MAX_ROLLBACKS} roll-backs; the best state so far is kept. Try a smaller lr, a "
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
        self.stepper.reset_streak()

    def _sound(self) -> bool:
        """Whether all numbers of the module that were finite at the start still are."""
        self.stepper.settle()
        now = floats(self.task.module)
        return all_finite([now[name] for name in self.watched])

    def _look(self, bar: Any) -> None:
        """Read metrics, validate, keep the best state, decide whether to go on."""
        means = self.stepper.read()
        if not self._guard(means):
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
                    self.best = copied(self.task.module.state_dict())
                    self.stale = 0
                else:
                    self.stale += 1
            self.task.module.train()
            record.update({f"val_{k}": v for k, v in figures.items()})
            if self.options.patience is not None and self.stale >= self.options.patience:
                self.history.stopped = "patience"
        record["seconds"] = self.seconds_before + time.perf_counter() - self.began
        self.history.records.append(record)
        shown = {
            k: f"{record[f'val_{k}' if f'val_{k}' in record else k]:.3f}"
            for k in ("lower", "upper", "ess")
            if k in record or f"val_{k}" in record
        }
        bar.set_postfix(shown or {"loss": f"{record.get('loss', math.nan):.3f}"})

    def _adopt_best(self) -> None:
        if self.best is not None:
            self.task.module.load_state_dict(self.best)
            return
        if not hasattr(self.task, "guard"):
            self._refuse_broken()
        self.history.best_step = self.step
        if self.options.ema is not None:
            with torch.no_grad():
                torch._foreach_copy_(self.stepper.params, self.stepper.average)

    def _refuse_broken(self) -> None:
        """Nothing was judged well: end in a sound state, and say what became of the run."""
        broken = not self._sound()
        if broken or self.history.stopped == "diverged":
            self._go_back(broken)
        lost = self.stepper.skipped
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

    def _training_state(self) -> dict[str, Any]:
        self.stepper.settle()
        return {
            "module": copied(self.task.module.state_dict()),
            "optimizer": copied(self.optimizer.state_dict()),
            "average": copied(self.stepper.average),
        }

    def _load_training_state(self, state: dict[str, Any]) -> None:
        self.task.module.load_state_dict(state["module"])
        # In place, because a captured graph holds the addresses of these very tensors.
        if self.stepper.captured:
            copy_into(self.optimizer.state_dict()["state"], state["optimizer"]["state"])
        else:
            self.optimizer.load_state_dict(copied(state["optimizer"]))
        with torch.no_grad():
            for mine, saved in zip(self.stepper.average, state["average"], strict=True):
                mine.copy_(saved)

    def _state(self) -> dict[str, Any]:
        history = self.history.to_dict()
        history["skipped_steps"] = self.stepper.skipped
        counters = self.stepper.counters
        return {
            "training": self._training_state(),
            "best": self.best,
            "good": self.good,
            "step": self.step,
            "order": self.order,
            "lr_scale": self.lr_scale,
            "stale": self.stale,
            "counters": [counters.good, counters.streak, counters.skipped],
            "metrics": (list(counters.names), counters.totals),
            "history": history,
            "seconds": self.seconds_before + time.perf_counter() - self.began,
            "random": torch.get_rng_state(),
            "random_cuda": torch.cuda.get_rng_state(self.device)
            if self.device.type == "cuda"
            else None,
            "options": self.options.of_the_run(),
            "data": fingerprint(self.data),
            **entries_of_task(self.task, self.data),
        }

    def _restore(self, state: dict[str, Any], path: Path) -> None:
        check_same_run(path, state, self.task, self.options.of_the_run(), fingerprint(self.data))
        try:
            self._load_training_state(state["training"])
        except (RuntimeError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"{path} belongs to another model ({error}); use another checkpoint path, or "
                "resume=False"
            ) from error
        try:
            restore_task(path, state, self.task, self.data)
        except CheckpointError:
            self._load_training_state(self.first)
            raise
        self.best, self.good = state["best"], state["good"]
        self.step, self.order = state["step"], state["order"].to(self.device)
        self.lr_scale, self.stale = state["lr_scale"], state["stale"]
        self.history = History.from_dict(state["history"])
        self.stepper.skipped = self.history.skipped_steps
        names, totals = state["metrics"]
        self.stepper.counters.restore(state["counters"], tuple(names), totals)
        self.seconds_before = state["seconds"]
        torch.set_rng_state(state["random"])
        if state["random_cuda"] is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(state["random_cuda"], self.device)
