"""The one training loop. It knows nothing of energies: a :class:`Task` says what a loss is.

It goes through the batches of a source, guards against non-finite steps, saves its progress, ends
well after Ctrl-C and shows how far it is.

Nothing in a step waits for the host: a non-finite step is skipped *on the device* (the fused
optimiser's ``found_inf``), metrics are summed there and read back now and then. So on CUDA the
whole step is captured as a graph, where the task allows it.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from tqdm.auto import tqdm

from selfnorm._context import seeded
from selfnorm.errors import CheckpointError, DataError, SelfnormWarning
from selfnorm.training.checkpoint import (
    AFRESH,
    check_same_run,
    entries_of_task,
    load_checkpoint,
    restore_task,
    save_checkpoint,
)
from selfnorm.training.history import History
from selfnorm.training.task import (
    Budget,
    Keeper,
    Schedule,
    Source,
    State,
    Task,
    TrainingOptions,
    as_source,
)

MAX_BAD_STREAK = 5  # bad steps in a row before going back to the last good state
MAX_LOST = 0.02  # share of steps that may be lost to non-finite values without a word
MAX_ROLLBACKS = 8  # roll-backs (each halves the learning rate) before giving up
_CUDA_READ_EVERY = 50  # steps between looks at the device-side counters
_WARMUP_STEPS = 3  # eager steps before capture: the optimiser and cuBLAS allocate lazily

Data = Source | tuple[Tensor, ...]


def split_rows(rows: Tensor, fraction: float) -> tuple[Tensor, Tensor | None]:
    """Rows to train on and rows to choose the best state by; none are spared of a tiny table."""
    held_out = int(fraction * len(rows))
    if held_out < 20:
        return rows, None
    order = torch.randperm(len(rows))
    return rows[order[held_out:]], rows[order[:held_out]]


def run(
    task: Task, data: Data, *, val_data: Data | None = None, options: TrainingOptions
) -> History:
    """Train ``task`` on ``data`` and return the record.

    Data are a :class:`~selfnorm.training.Source`, or tensors with one first dimension. The task's
    module ends in its best state (by validation score; the last state without validation), also
    after Ctrl-C or divergence.
    """
    options = options.filled()
    if options.patience is not None and val_data is None:
        raise DataError(
            "early stopping (patience) needs held-out data: pass val_data, or leave patience=None"
        )
    device = next(task.module.parameters()).device
    source = as_source(data, "the training data", device)
    held_out = None if val_data is None else as_source(val_data, "val_data", device)
    # Training needs gradients, also where the caller has switched them off.
    with seeded(options.seed, device), torch.inference_mode(False), torch.enable_grad():
        try:
            return _Run(task, source, held_out, options, device).execute()
        except torch.cuda.OutOfMemoryError as error:
            raise torch.cuda.OutOfMemoryError(
                f"training does not fit into the memory of {device}: lower n_samples or "
                "batch_size, or train an EBM with task_options={'max_memory': 0.5}, in chunks "
                f"({str(error).splitlines()[0]})"
            ) from error


class Counters:
    """Counts of steps and sums of metrics, kept on the device.

    Attributes:
        counts: of which ``taken``, steps since the last :meth:`clear`, ``skipped``, steps lost in
            all, and ``streak``, lost in a row up to now, are views.
        names: the metrics, in the order of their sums; known from the first step on.
        sums: of the metrics over the steps taken since the last :meth:`clear`.
    """

    def __init__(self, device: torch.device) -> None:
        kind: Any = {"device": device, "dtype": torch.float32}  # which the fused optimiser asks for
        self.counts = torch.zeros(3, **kind)
        self.taken, self.skipped, self.streak = self.counts.unbind()
        self.names: tuple[str, ...] = ()
        self.sums = torch.zeros(0, **kind)

    def observe(self, loss: Tensor, norm: Tensor, metrics: Mapping[str, Tensor]) -> Tensor:
        """Count a step; returns 1 if loss or gradient norm is not finite, else 0."""
        # Loss and norm come first and are ours, whatever an objective calls its metrics.
        own = {"loss": loss, "grad_norm": norm}
        seen = {**own, **metrics, **own}
        if not self.names:
            self.restore(self.counts, tuple(seen), self.sums.new_zeros(len(seen)))
        values = torch.stack([seen[name].detach().to(self.sums) for name in self.names])
        total = values[:2].sum()
        bad = (total - total).ne(0)  # what is not finite has no difference to itself but NaN
        lost = bad.to(values)
        self.taken.add_(1 - lost)
        self.skipped.add_(lost)
        self.streak.add_(lost).mul_(lost)
        self.sums.add_(values.masked_fill(bad, 0.0))
        return lost

    def clear(self) -> None:
        """Begin the means anew; the count of lost steps goes on."""
        self.taken.zero_()
        self.sums.zero_()

    def restore(self, counts: Tensor, names: tuple[str, ...], sums: Tensor) -> None:
        """Go on from saved counts and sums."""
        self.counts.copy_(counts)
        self.names, self.sums = names, sums.to(self.sums)


class Stepper:
    """Runs training steps of a task on the rows of a source.

    Attributes:
        counters: of the steps taken and lost.
        average: moving average of the parameters; empty without one.
    """

    def __init__(self, task: Task, source: Source, options: TrainingOptions) -> None:
        self.task, self.source, self.options = task, source, options
        self.optimizer = task.make_optimizer(options)
        groups = self.optimizer.param_groups
        self.params: list[Tensor] = [p for group in groups for p in group["params"]]
        self.device = self.params[0].device
        self.average = [] if options.ema is None else [p.detach().clone() for p in self.params]
        self._gain = torch.ones((), device=self.device)  # share of the parameters in the average
        on_cuda = self.device.type == "cuda"
        # On CUDA learning rates are tensors, which a captured graph reads anew in every step.
        scales = [float(group.get("lr_scale", 1.0)) for group in groups]
        self._lr_scales = torch.tensor(scales, device=self.device) if on_cuda else None
        self._rates = torch.zeros(len(scales), device=self.device)
        self.capture = on_cuda and task.capturable and source.capturable
        self._graph: torch.cuda.CUDAGraph | None = None
        self._static_rows: Tensor | None = None
        self._n_eager = 0
        self.counters = Counters(self.device)

    def step(self, rows: Tensor, lr: float, n_done: int) -> None:
        """Take one step on rows of the source, by their numbers."""
        self._set_rates(lr)
        if self.options.ema is not None:
            # A young average forgets faster, so that it does not drag the initialisation along.
            self._gain.fill_(1 - min(self.options.ema, (1 + n_done) / (10 + n_done)))
        if self._graph is None and self.capture and self._n_eager >= _WARMUP_STEPS:
            self._try_capture(rows)
        if self._graph is not None and self._static_rows is not None:
            self._static_rows.copy_(rows)
            self._graph.replay()
            return
        self._n_eager += 1
        if self.capture:
            # Warm-up off the default stream, as capture requires.
            side = torch.cuda.Stream(self.device)
            side.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(side):
                self._step_once(rows)
            torch.cuda.current_stream(self.device).wait_stream(side)
        else:
            self._step_once(rows)

    def read(self) -> dict[str, float]:
        """Means of the metrics since the last read."""
        counters = self.counters
        taken = max(float(counters.taken), 1.0)
        sums = zip(counters.names, counters.sums.tolist(), strict=True)
        means = {name: total / taken for name, total in sums}
        counters.clear()
        return means

    @property
    def captured(self) -> bool:
        """Whether steps are replays of a captured graph."""
        return self._graph is not None

    def give_up_graph(self) -> bool:
        """Go on step by step after captured steps were lost; false where nothing was captured."""
        if not self.captured:
            return False
        warnings.warn(
            "captured training steps were not finite; going on without the CUDA graph, which is "
            "slower",
            SelfnormWarning,
            stacklevel=2,
        )
        self.release()
        self.capture = False
        return True

    def release(self) -> None:
        """Give the captured graph's memory back; the next steps warm up for another one.

        Left to the garbage collector, a graph may go while another one is being captured, which
        CUDA does not survive.
        """
        if self._graph is not None:
            torch.cuda.synchronize(self.device)
            self._graph.reset()
            self._graph = self._static_rows = None
            self._n_eager = 0

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the moving average in place of the parameters for the duration of a block."""
        if not self.average:
            yield
            return
        saved = [p.detach().clone() for p in self.params]
        self.adopt(self.average)
        try:
            yield
        finally:
            self.adopt(saved)

    @torch.no_grad()
    def adopt(self, values: list[Tensor]) -> None:
        """Copy values into the parameters."""
        for p, value in zip(self.params, values, strict=True):
            p.copy_(value)

    def _step_once(self, rows: Tensor) -> None:
        batch = self.source.take(rows)
        for p in self.params:
            p.grad = None
        loss, metrics = self.task.loss(batch)
        loss.backward()
        norm = self.task.condition_gradients(self.params, self.options.clip_norm)
        # The fused optimiser skips the update itself where found_inf is 1.
        lost = self.counters.observe(loss, norm, metrics)
        self.optimizer.found_inf = lost  # type: ignore[attr-defined]
        self.optimizer.step()
        if self.average:
            with torch.no_grad():
                for mean, p in zip(self.average, self.params, strict=True):
                    mean.lerp_(p, self._gain.to(mean.dtype))

    def _set_rates(self, lr: float) -> None:
        groups = self.optimizer.param_groups
        if self._lr_scales is None:
            for group in groups:
                group["lr"] = lr * group.get("lr_scale", 1.0)
            return
        torch.mul(self._lr_scales, lr, out=self._rates)
        # Put in again at every step, since loading a state replaces them.
        for group, rate in zip(groups, self._rates.unbind(), strict=True):
            group["lr"] = rate

    def _try_capture(self, rows: Tensor) -> None:
        self._static_rows = rows.clone()
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may score on the device meanwhile; by default that breaks the capture.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._step_once(self._static_rows)
        except RuntimeError as error:
            self.capture = False
            warnings.warn(
                f"the training step could not be captured as a CUDA graph ({error}); going on "
                "step by step, which is slower",
                SelfnormWarning,
                stacklevel=2,
            )
            torch.cuda.synchronize(self.device)
            return
        self._graph = graph


def _figures(record: dict[str, float]) -> dict[str, str]:
    """What a progress bar has room for."""
    return {name: f"{record[name]:.3f}" for name in ("lower", "upper", "ess") if name in record}


class _Run:
    """State of one run in progress."""

    def __init__(
        self,
        task: Task,
        source: Source,
        held_out: Source | None,
        options: TrainingOptions,
        device: torch.device,
    ) -> None:
        self.task, self.source, self.held_out = task, source, held_out
        self.options, self.device = options, device
        self.batch = min(options.batch_size, len(source))
        self.steps_per_epoch = max(1, len(source) // self.batch)
        self.total = self.steps_per_epoch * (options.max_epochs or 0)  # filled by now
        if options.max_steps is not None:
            self.total = min(self.total, options.max_steps)
        self.schedule = Schedule(options.lr or 0.0, options.shape, self.total)
        # Tiny data sets have epochs of one or two steps: validating each of them would dominate.
        self.validate_every = options.validate_every or max(
            self.steps_per_epoch, math.ceil(self.total / 100)
        )
        self.budget = Budget(options.max_time)
        self.keeper = Keeper(torch.tensor(-math.inf, dtype=torch.float64))
        self.good: State | None = None
        self.history = History()
        self.step = 0
        self.epoch = torch.empty(0, dtype=torch.long)
        self.batches: Tensor | Sequence[Tensor] = self.epoch
        self.shown: dict[str, str] = {}

    @cached_property
    def fingerprint(self) -> str:
        """Of the data; only runs that are saved need it."""
        return self.source.fingerprint()

    @property
    def rows(self) -> tuple[Tensor, ...]:
        """The rows that the task sees outside of steps."""
        return self.source.preview(self.device)

    def execute(self) -> History:
        """Begin or go on, take the steps, end in the best state."""
        self.task.module.eval()
        self.task.start(self.rows)
        self.task.module.train()
        self.stepper = Stepper(self.task, self.source, self.options)
        self.optimizer = self.stepper.optimizer
        self.first = self._training_state()
        numbers = self.task.module.state_dict().items()
        self.watched = [k for k, v in numbers if v.is_floating_point() and v.isfinite().all()]
        saving = self.options.saving
        path = None if saving is None else Path(saving.path)
        if saving is not None and path is not None and saving.resume and path.exists():
            self._restore(load_checkpoint(path), path)
            if self.history.stopped:
                return self.history
        history = self.history
        try:
            self._take_steps(path, (saving and saving.every) or self.validate_every)
        except KeyboardInterrupt:
            history.stopped = "interrupted"
            warnings.warn(
                f"training interrupted at step {self.step}; the best state so far is kept",
                SelfnormWarning,
                stacklevel=3,
            )
        finally:
            self.stepper.release()
        history.stopped = history.stopped or "max_epochs"
        self._adopt_best()
        self.task.module.eval()
        history.final = self.task.finish(self.rows)
        history.n_steps = self.step
        history.skipped_steps = int(self.stepper.counters.skipped)
        self._report_losses()
        history.seconds = self.budget.elapsed
        if path is not None and history.stopped != "interrupted":
            self._save(path)
        return history

    def _take_steps(self, path: Path | None, save_every: int) -> None:
        """Steps, looks and checkpoints until there is a reason to stop."""
        with tqdm(
            total=self.total,
            initial=self.step,
            disable=None if self.options.progress else True,  # None: in terminals and notebooks
            desc="fit",
            unit="step",
            dynamic_ncols=True,
        ) as bar:
            while self.step < self.total and not self.history.stopped:
                self._take_step()
                bar.update()
                due = self._look_is_due()
                if due:
                    self._look(bar)
                elif self.device.type != "cuda" or self.step % _CUDA_READ_EVERY == 0:
                    self._guard()
                save = (due and self.budget.limited) or self.step % save_every == 0
                # a run that has just stopped is saved when its best state has been adopted
                if path is not None and save and not self.history.stopped:
                    self._save(path)

    def _look_is_due(self) -> bool:
        """Whether to look now; the last time before the run's time is over."""
        if not self.budget.limited:
            return self.step % self.validate_every == 0 or self.step == self.total
        over, due = self.task.agreed((self.budget.over, self.budget.due))
        if over:
            self.history.stopped = "max_time"
        return bool(self.history.stopped) or due or self.step == self.total

    def _save(self, path: Path) -> None:
        """Write a checkpoint; a full disk is reported, and does not cost the run."""
        if self.task.rank != 0:
            return
        try:
            save_checkpoint(path, self._state())
        except CheckpointError as error:
            warnings.warn(f"{error}; training goes on without it", SelfnormWarning, stacklevel=5)

    def _take_step(self) -> None:
        position = self.step % self.steps_per_epoch
        if position == 0:
            self._begin(self.source.epoch(self.device))
        share = self.task.agreed(self.budget.share) if self.budget.limited else 0.0
        rate = self.schedule.rate(self.step, share)
        self.stepper.step(self.batches[position], rate, self.step)
        self.step += 1

    def _begin(self, epoch: Tensor) -> None:
        """Go through the rows in this order."""
        self.epoch = epoch
        self.batches = self.source.batches(epoch, self.batch, self.task.rank, self.task.world)

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
                stacklevel=5,
            )
            return False
        self._go_back(broken)
        self.schedule.scale *= 0.5
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

    def _look(self, bar: tqdm[NoReturn]) -> None:
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
        if self.held_out is not None:
            figures = self._validate(self.held_out)
            record.update({f"val_{name}": value for name, value in figures.items()})
        record["seconds"] = self.budget.elapsed
        self.history.records.append(record)
        # With validation the bar shows the state that is kept, not the latest one.
        bar.set_postfix(
            self.shown or _figures(record) or {"loss": f"{record.get('loss', math.nan):.3f}"}
        )
        self.budget.looked_since(began)

    def _validate(self, held_out: Source) -> dict[str, float]:
        """The task's figures on held-out rows; a better state is kept, patience may end."""
        history, module = self.history, self.task.module
        module.eval()
        with self.stepper.averaged(), torch.no_grad():
            figures = self.task.validate(held_out.preview(self.device))
            score = figures.get("score", -math.inf)
            if self.keeper.offer(torch.tensor(score, dtype=torch.float64), module.state_dict()):
                history.best_score, history.best_step = score, self.step
                self.shown = _figures(figures) | {"kept": f"step {self.step}"}
        module.train()
        if self.options.patience is not None and self.keeper.stale >= self.options.patience:
            history.stopped = "patience"
        return figures

    def _adopt_best(self) -> None:
        if self.keeper.state is not None:
            self.task.module.load_state_dict(self.keeper.state)
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
        judged = self.held_out is not None
        if (judged or lost >= self.step > 0) and self.history.stopped != "interrupted":
            warnings.warn(
                f"no {'validation score' if judged else 'loss or gradient'} was finite in "
                f"{self.step} steps, {lost} of which were lost: the model is in its last sound "
                "state, or as it began, and is no result. Look at the scale of the inputs, or try "
                "a smaller lr",
                SelfnormWarning,
                stacklevel=5,
            )

    def _report_losses(self) -> None:
        """Say of a run that ended well that many of its steps taught nothing."""
        history, lost = self.history, self.history.skipped_steps
        nothing_kept = self.keeper.state is None
        reported = nothing_kept and (self.held_out is not None or lost >= self.step)
        if lost > max(5, MAX_LOST * self.step) and not reported and history.stopped != "diverged":
            warnings.warn(
                f"{lost} of {self.step} steps were lost, for their loss or gradient was not "
                "finite: the rows in them taught nothing. Look for rows where the gradient is "
                "not a number (a square root, norm or logarithm at zero), or try a smaller lr; on "
                "a GPU a task with capturable = False takes no CUDA graph",
                SelfnormWarning,
                stacklevel=4,
            )

    def _training_state(self) -> State:
        return {
            "module": deepcopy(self.task.module.state_dict()),
            "optimizer": deepcopy(self.optimizer.state_dict()),
            "average": deepcopy(self.stepper.average),
        }

    def _load_training_state(self, state: State) -> None:
        self.task.module.load_state_dict(state["module"])
        self.stepper.release()  # a captured graph holds the addresses of what is replaced here
        self.optimizer.load_state_dict(deepcopy(state["optimizer"]))
        with torch.no_grad():
            for mine, saved in zip(self.stepper.average, state["average"], strict=True):
                mine.copy_(saved)

    def _state(self) -> State:
        counters = self.stepper.counters
        history = self.history.to_dict() | {"skipped_steps": int(counters.skipped)}
        on_cuda = self.device.type == "cuda"
        return {
            "training": self._training_state(),
            "keeper": self.keeper.state_dict(),
            "good": self.good,
            "step": self.step,
            "order": self.epoch,
            "lr_scale": self.schedule.scale,
            "counters": (counters.counts, list(counters.names), counters.sums),
            "history": history,
            "seconds": self.budget.elapsed,
            "random": torch.get_rng_state(),
            "random_cuda": torch.cuda.get_rng_state(self.device) if on_cuda else None,
            "options": self.options.of_the_run(),
            "data": self.fingerprint,
            **entries_of_task(self.task, self.rows),
        }

    def _restore(self, state: State, path: Path) -> None:
        try:
            check_same_run(path, state, self.task, self.options.of_the_run(), self.fingerprint)
            if state["step"] > self.total:
                raise CheckpointError(
                    f"{path} was trained for {state['step']} steps, and {self.total} are asked "
                    f"for; ask for as many, or {AFRESH}"
                )
            for earlier in (state["keeper"]["state"], state["good"] and state["good"]["module"]):
                if earlier is not None:
                    self.task.module.load_state_dict(earlier)
            self._load_training_state(state["training"])
            restore_task(path, state, self.task, self.rows)
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
        self.keeper.load_state_dict(state["keeper"])
        self.good, self.step = state["good"], state["step"]
        self._begin(state["order"].to(self.device))
        self.schedule.scale = state["lr_scale"]
        self.budget.before = state["seconds"]
        if self.history.stopped == "max_epochs" and self.step < self.total:
            self.history.stopped = ""  # it is to go on for longer
        if state["random_cuda"] is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(state["random_cuda"], self.device)
