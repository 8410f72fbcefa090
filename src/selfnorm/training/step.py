"""One optimiser step: loss, gradient, clipping, finite-check, update, moving average.

On CUDA nothing in a step waits for the host: a non-finite step is skipped *on the device* (the
fused optimiser's ``found_inf``), metrics are summed there and read back now and then, and the whole
step is captured as a CUDA graph where the task allows it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from selfnorm.errors import SelfnormWarning
from selfnorm.training.compiled_loss import Loss, compiled_loss
from selfnorm.training.counters import Counters
from selfnorm.training.fused_adam import FusedAdam
from selfnorm.training.side_stream import SideStream
from selfnorm.training.step_graph import StepGraph
from selfnorm.training.task import Task
from selfnorm.training.wide_adam import WideAdam

__all__ = ["Stepper", "make_optimizer"]

_WARMUP_STEPS = 3  # eager steps before capture: the optimiser and cuBLAS allocate lazily
_FLAT = 2**20  # numbers in all gradients up to which a copy in one piece is the quicker norm


def make_optimizer(task: Task, name: str, weight_decay: float) -> torch.optim.Optimizer:
    """Adam or AdamW over the task's parameter groups; fused, capturable on CUDA.

    A task that defines ``make_optimizer(name, weight_decay)`` brings its own.
    """
    own: Any = getattr(task, "make_optimizer", None)
    if own is not None:
        brought: torch.optim.Optimizer = own(name, weight_decay)
        return brought
    groups: list[dict[str, Any]] = []
    for given in task.parameter_groups():
        group = dict(given)
        group["params"] = [p for p in group["params"] if p.requires_grad]
        group.setdefault("lr_scale", 1.0)
        group.setdefault("weight_decay", weight_decay)
        if group["params"]:
            groups.append(group)
    if not groups:
        raise ValueError("nothing to train: no parameter of the model asks for a gradient")
    device = groups[0]["params"][0].device
    on_cuda = device.type == "cuda"
    if on_cuda:
        for group in groups:
            group["lr"] = torch.zeros((), device=device)
    fused = device.type in ("cpu", "cuda") and all(
        p.is_floating_point() for g in groups for p in g["params"]
    )
    if fused and not on_cuda:  # in a captured graph torch's bookkeeping costs nothing
        return FusedAdam(groups, decoupled=name == "adamw")
    if fused and getattr(task, "large_network", False):
        return WideAdam(groups, decoupled=name == "adamw")
    cls = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name]
    return cls(groups, lr=0.0, fused=fused, capturable=on_cuda)


class Stepper:
    """Runs training steps of a task on device-resident data.

    Attributes:
        skipped: steps left out so far because loss or gradient was not finite.
        bad_streak: how many of them in a row, as of the last :meth:`read`.
    """

    def __init__(
        self,
        task: Task,
        optimizer: torch.optim.Optimizer,
        data: tuple[Tensor, ...],
        *,
        clip_norm: float | None,
        ema: float | None,
        capture: bool,
        compiled: bool = False,
        steps_per_graph: int = 1,
    ) -> None:
        self.task = task
        self.optimizer = optimizer
        columns: Any = getattr(task, "data_columns", None)
        self.data = data if columns is None else (*data, *columns(data))
        self.clip_norm = clip_norm
        self.ema = ema
        self.device = data[0].device
        self.params = [p for g in optimizer.param_groups for p in g["params"]]
        self.average = [p.detach().clone() for p in self.params] if ema is not None else []
        self.on_cuda = self.device.type == "cuda"
        ahead: Any = task if self.on_cuda and getattr(task, "draws_ahead", False) else None
        self._draw = (lambda batch: batch) if ahead is None else ahead.draw
        plain: Loss = task.loss if ahead is None else ahead.loss_of_drawn
        self._loss = compiled_loss(plain) if compiled else plain
        self._waits = not self.on_cuda  # the host decides on each step, where asking it is cheap
        groups = optimizer.param_groups
        self._scales_itself = all(group.get("fused") for group in groups)
        scales = [float(group.get("lr_scale", 1.0)) for group in groups]
        self._lr_scales = torch.tensor(scales, device=self.device)
        self._rates = torch.zeros_like(self._lr_scales)
        self._places = self._rates.unbind()
        self._epsilon = torch.full((), 1e-6 / (clip_norm or 1.0), device=self.device)
        self.capture = capture and self.on_cuda and getattr(task, "capturable", False)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._several: StepGraph | None = None
        alone = type(self) is Stepper  # another kind of step may not end where it began
        self._n_several = steps_per_graph if self.capture and alone else 1
        self._scales_on_host = torch.tensor(scales)
        self._static_rows: Tensor | None = None
        self._n_eager = 0
        self._one = torch.ones((), device=self.device)
        self.counters = Counters(self.device)
        self._keep = torch.full((), ema if ema is not None else 0.0, device=self.device)
        self.skipped = 0
        self.bad_streak = 0

    def step(self, rows: Tensor, lr: float, n_done: int) -> None:
        """Take one step on the given rows of the data."""
        self._set_rates(lr)
        if self.ema is not None:
            self._keep.fill_(self._kept_share(n_done))
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

    def settle(self) -> None:
        """Bring parameters and counters up to date, where steps leave something for later."""

    @property
    def steps_at_once(self) -> int:
        """How many steps :meth:`steps` can take by one launch, at present."""
        return self._n_several if self._n_eager >= _WARMUP_STEPS else 1

    def steps(self, rows: Tensor, rates: list[float], n_done: int) -> None:
        """Take several steps on ``(n * batch,)`` rows, with a learning rate for each."""
        if self._several is None and len(rates) == self.steps_at_once > 1:
            self._capture_several(rows)
        if self._several is None or len(rates) != self._several.n_steps:
            for number, (part, lr) in enumerate(zip(rows.chunk(len(rates)), rates, strict=True)):
                self.step(part, lr, n_done + number)
            return
        told = torch.outer(torch.tensor(rates), self._scales_on_host)
        kept = [self._kept_share(n_done + number) for number in range(len(rates))]
        self._several.replay(rows, torch.cat([told, torch.tensor(kept)[:, None]], 1))
        self._put_rates(self._several.controls[-1].unbind())

    def _kept_share(self, n_done: int) -> float:
        # A young average forgets faster, so that it does not drag the initialisation along.
        return 0.0 if self.ema is None else min(self.ema, (1 + n_done) / (10 + n_done))

    def read(self) -> dict[str, float]:
        """Means of the metrics since the last read; also updates the counters."""
        self.settle()
        counters = self.counters
        good = max(float(counters.good), 1.0)
        sums = zip(counters.names, counters.totals.tolist(), strict=True)
        means = {name: total / good for name, total in sums}
        self.skipped = int(counters.skipped)
        self.bad_streak = int(counters.streak)
        counters.clear()
        return means

    def reset_streak(self) -> None:
        """Forget the current run of bad steps (after a roll-back)."""
        self.counters.streak.zero_()
        self.bad_streak = 0

    @property
    def captured(self) -> bool:
        """Whether steps are replays of a captured graph."""
        return self._graph is not None or self._several is not None

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
        self.settle()
        self.release()
        self.capture = False
        return True

    def release(self) -> None:
        """Give the captured graph's memory back, once nothing runs on it any more.

        Left to the garbage collector, a graph may go while another one is being captured, which
        CUDA does not survive.
        """
        if self.captured:
            torch.cuda.synchronize(self.device)
        if self._graph is not None:
            self._graph.reset()
            self._graph = self._static_rows = None
        if self._several is not None:
            self._several.release()
            self._several = None
        self._n_several = 1

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the moving average in place of the parameters for the duration of a block."""
        self.settle()
        if self.ema is None:
            yield
            return
        saved = [p.detach().clone() for p in self.params]
        with torch.no_grad():
            torch._foreach_copy_(self.params, self.average)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self.params, saved)

    def _step_once(self, rows: Tensor) -> None:
        self._step_on(self._drawn(rows))

    def _drawn(self, rows: Tensor) -> tuple[Tensor, ...]:
        batch: tuple[Tensor, ...] = self._draw(tuple(t.index_select(0, rows) for t in self.data))
        return batch

    def _step_on(self, drawn: tuple[Tensor, ...]) -> None:
        for p in self.params:  # what zero_grad does, without its bookkeeping
            p.grad = None
        loss, metrics = self._loss(drawn)
        loss.backward(self._one.to(loss.dtype).expand_as(loss))
        own: Any = getattr(self.task, "condition_gradients", None)
        if own is not None:  # e.g. models trained together, clipped and skipped one by one
            norm = own(self.clip_norm)
        else:
            norm = self._clip([p.grad for p in self.params if p.grad is not None])
        if not self._waits:
            # The fused optimiser skips the update itself where found_inf is 1.
            side = SideStream(self.device)
            bad = self.counters.observe(loss, norm, metrics, side)
            self.optimizer.found_inf = bad.float()  # type: ignore[attr-defined]
            self.optimizer.step()
            side.join()
        elif not self.counters.observe_on_host(loss, norm, metrics):
            self.optimizer.step()
        if self.ema is not None:
            self._move_average(self._keep)

    @torch.no_grad()
    def _move_average(self, keep: Tensor) -> None:
        torch._foreach_sub_(self.average, self.params)
        torch._foreach_mul_(self.average, keep)
        torch._foreach_add_(self.average, self.params)

    def _clip(self, grads: list[Tensor]) -> Tensor:
        """Norm of the gradient, which is shortened to ``clip_norm`` where it is longer."""
        small = sum(g.numel() for g in grads) <= _FLAT and all(g.is_contiguous() for g in grads)
        if small:
            norm = torch.linalg.vector_norm(torch.cat([g.reshape(-1) for g in grads]))
        else:
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        if self.clip_norm is None:
            return norm
        if self._waits:
            if float(norm) > self.clip_norm:
                torch._foreach_mul_(grads, self.clip_norm / (norm + 1e-6))
        elif self._scales_itself:
            # (norm + 1e-6) / clip_norm, by which the fused optimiser divides on its way.
            longer = torch.add(self._epsilon, norm, alpha=1 / self.clip_norm)
            self.optimizer.grad_scale = longer.clamp_min(1.0).float()  # type: ignore[attr-defined]
        else:
            torch._foreach_mul_(grads, (self.clip_norm / (norm + 1e-6)).clamp_max(1.0))
        return norm

    def _set_rates(self, lr: float) -> None:
        groups = self.optimizer.param_groups
        if not isinstance(groups[0]["lr"], Tensor):
            for group in groups:
                group["lr"] = lr * group["lr_scale"]
            return
        # All groups in one launch. The places are put in again, since loading a state replaces
        # them; a captured graph reads and keeps the very same ones.
        torch.mul(self._lr_scales, lr, out=self._rates)
        self._put_rates(self._places)

    def _put_rates(self, rates: tuple[Tensor, ...]) -> None:
        for group, place in zip(self.optimizer.param_groups, rates, strict=False):
            group["lr"] = place

    def _capture_several(self, rows: Tensor) -> None:
        """Capture several steps; where that fails, steps go one by one."""
        keep = self._keep

        def take(drawn: tuple[Tensor, ...], controls: Tensor) -> None:
            self._put_rates(controls.unbind())
            self._keep = controls[-1]
            self._step_on(drawn)

        n_controls = len(self._lr_scales) + 1
        try:
            self._several = StepGraph(rows, self._n_several, n_controls, self._drawn, take)
        except RuntimeError:  # a single step, which is tried next, says why it cannot be captured
            torch.cuda.synchronize(self.device)
            self._n_several = 1
        finally:
            self._keep = keep

    def _try_capture(self, rows: Tensor) -> None:
        self._static_rows = rows.clone()
        self.optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
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
