"""One optimiser step: loss, gradient, clipping, finite-check, update, moving average.

Nothing in a step waits for the host: a non-finite step is skipped *on the device* (the fused
optimiser's ``found_inf``), metrics are summed there and read back now and then. So on CUDA the
whole step is captured as a graph, where the task allows it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from selfnorm.errors import SelfnormWarning

if TYPE_CHECKING:
    from selfnorm.training.options import TrainingOptions
    from selfnorm.training.task import Source, Task

_WARMUP_STEPS = 3  # eager steps before capture: the optimiser and cuBLAS allocate lazily


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
