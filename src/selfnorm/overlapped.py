"""Training steps whose parameter update runs beside the next step's forward pass.

A large network on a small batch is a long chain of short kernels that leave most of a GPU idle,
while the optimiser moves megabytes. Its turn comes last, since clipping needs the norm of the
*whole* gradient; but the next forward pass needs the last layers late. So here the update of step
``k`` is the first thing that step ``k + 1`` launches, on a branch of the captured graph, layer by
layer in the order of their use; the forward pass waits for each stage only where it is used. In the
backward pass, gradients are set aside and their norms taken on that branch as well.

The numbers are those of the plain step: same gradients, clipping, skipping of non-finite steps,
learning rates and averages, applied before anything reads the parameters. Between steps one update
is outstanding; :meth:`OverlappedStepper.settle` applies it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from selfnorm.stepper import Stepper
from selfnorm.task import Task

__all__ = ["OverlappedStepper", "make_stepper"]


def make_stepper(
    task: Task, optimizer: torch.optim.Optimizer, data: tuple[Tensor, ...], **options: Any
) -> Stepper:
    """An :class:`OverlappedStepper` where the task has stages and steps are captured.

    Args:
        task: may define ``stages()``: modules in the order of their use, each called once in a
            step. Those within another come after it; what belongs to none of them is used after the
            last has begun.
        optimizer, data, options: as for :class:`~selfnorm.stepper.Stepper`.
    """
    stages: Any = getattr(task, "stages", None)
    captured = data[0].is_cuda and options["capture"] and getattr(task, "capturable", False)
    fused = all(group.get("fused") for group in optimizer.param_groups)
    if not (stages and captured and fused) or options.get("compiled"):
        return Stepper(task, optimizer, data, **options)
    modules: list[nn.Module] = stages()
    if not modules:
        return Stepper(task, optimizer, data, **options)
    return OverlappedStepper(task, optimizer, data, modules, **options)


class OverlappedStepper(Stepper):
    """A :class:`~selfnorm.stepper.Stepper` that applies a step's gradient in the next one.

    Only a captured graph has a branch; elsewhere the same work runs in line.

    Args:
        modules: the stages, see :func:`make_stepper`.
    """

    def __init__(
        self,
        task: Task,
        optimizer: torch.optim.Optimizer,
        data: tuple[Tensor, ...],
        modules: list[nn.Module],
        **options: Any,
    ) -> None:
        super().__init__(task, optimizer, data, **{**options, "steps_per_graph": 1})
        self._waits = False
        self._modules = modules
        last = len(modules) - 1
        self._stage_of = {id(p): last for p in self.params}
        for k, module in enumerate(modules):  # a later one lies within an earlier one, or beside it
            self._stage_of |= {id(p): k for p in module.parameters() if id(p) in self._stage_of}
        stages = list(self._stage_of.values())
        self._expected = [stages.count(k) for k in range(len(modules))]
        # What is outstanding, at addresses of its own: gradients, their norms, loss and metrics,
        # learning rates, the average's memory.
        self._grads: dict[int, Tensor] = {}
        self._norms = torch.zeros(len(self.params), device=self.device, dtype=self.params[0].dtype)
        self._names: tuple[str, ...] = ()
        self._values = torch.zeros(0, device=self.device)
        self._due_rates = torch.zeros_like(self._rates)
        self._places = self._due_rates.unbind()
        for group, place in zip(optimizer.param_groups, self._places, strict=True):
            group["lr"] = place
        self._due_keep = torch.zeros_like(self._keep)
        self._due = False
        self._plain = False
        self._first: torch.cuda.CUDAGraph | None = None  # a step with nothing outstanding
        self._begin_collecting()
        self._branch = torch.cuda.Stream(self.device) if self.on_cuda else None
        self._main: torch.cuda.Stream | None = None  # while a graph is captured
        self._ready: list[torch.cuda.Event | None] = [None] * len(modules)

    def settle(self) -> None:
        """Apply the outstanding update."""
        if self._due:
            self._apply()
            self._due = False

    def release(self) -> None:
        """Give the memory of both captured graphs back."""
        super().release()
        if self._first is not None:
            self._first.reset()
            self._first = None

    def give_up_graph(self) -> bool:
        """Go on with plain steps after captured ones were lost."""
        gave_up = super().give_up_graph()
        self._plain = self._plain or gave_up
        return gave_up

    def _step_once(self, rows: Tensor) -> None:
        if self._plain:
            self._due_rates.copy_(self._rates)
            super()._step_once(rows)
            return
        self._main = _capturing_stream(self.device)
        with self._beside():
            if self._due:
                self._apply()
            self._due_rates.copy_(self._rates)
            self._due_keep.copy_(self._keep)
        self._begin_collecting()
        for p in self.params:
            p.grad = None
        held: list[Tensor] = []  # what the branch reads, until it has done so
        with self._hooks(held):
            loss, metrics = self._loss(self._drawn(rows))
            loss.backward(self._one.to(loss.dtype).expand_as(loss))
        for k in range(len(self._modules)):  # gradients that did not come as the last time
            self._collect(k, held)
        self._note(loss, metrics)
        self._expected = [len(params) for params in self._arrived]
        if self._main is not None and self._branch is not None:
            self._main.wait_stream(self._branch)
        self._main, self._ready = None, [None] * len(self._modules)
        self._due = True

    @torch.no_grad()
    def _apply(self) -> None:
        """Count and check the outstanding step, and update the parameters stage by stage."""
        norm = torch.linalg.vector_norm(self._norms[: self._n_norms])
        if self.clip_norm is not None:
            self._let_scale(norm, self.clip_norm)
        metrics = dict(zip(self._names, self._values[1:], strict=True))
        bad = self.counters.observe(self._values[0], norm, metrics)
        self.optimizer.found_inf = bad.float()  # type: ignore[attr-defined]
        for p in self.params:
            p.grad = None
        for k, params in enumerate(self._arrived):
            for p in params:
                p.grad = self._grads[id(p)]
            self.optimizer.step()
            for p in params:  # the optimiser passes over parameters without a gradient
                p.grad = None
            if self._main is not None:
                self._ready[k] = torch.cuda.Event()
                self._ready[k].record(self._branch)  # type: ignore[union-attr]
        if self.ema is not None:
            self._move_average(self._due_keep)

    def _begin_collecting(self) -> None:
        self._arrived: list[list[Tensor]] = [[] for _ in self._modules]
        self._waiting: list[list[Tensor]] = [[] for _ in self._modules]
        self._n_norms = 0

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Launch on the branch what may start now; in line where there is none."""
        if self._main is None or self._branch is None:
            yield
            return
        self._branch.wait_stream(self._main)
        with torch.cuda.stream(self._branch):
            yield

    @contextmanager
    def _hooks(self, held: list[Tensor]) -> Iterator[None]:
        """Within the block modules wait for their parameters, and gradients are collected."""

        def arrived(p: Tensor) -> None:
            k = self._stage_of[id(p)]
            self._waiting[k].append(p)
            if len(self._waiting[k]) == self._expected[k]:
                self._collect(k, held)

        with ExitStack() as stack:
            for k, module in enumerate(self._modules):
                stack.callback(module.register_forward_pre_hook(self._waiter(k)).remove)
            for p in self.params:
                stack.callback(p.register_post_accumulate_grad_hook(arrived).remove)
            yield

    def _waiter(self, k: int) -> Callable[..., None]:
        def wait(*_: Any) -> None:
            event = self._ready[k]
            if event is not None and self._main is not None:
                self._main.wait_event(event)

        return wait

    @torch.no_grad()
    def _collect(self, k: int, held: list[Tensor]) -> None:
        """Set the gradients of a stage aside, and take their norms."""
        params, self._waiting[k] = self._waiting[k], []
        if not params:
            return
        grads: list[Tensor] = [p.grad for p in params]  # type: ignore[misc]
        held += grads
        for p in params:
            p.grad = None
            if id(p) not in self._grads:
                self._grads[id(p)] = torch.empty_like(p, memory_format=torch.preserve_format)
        start, self._n_norms = self._n_norms, self._n_norms + len(params)
        self._arrived[k] += params
        with self._beside():
            torch._foreach_copy_([self._grads[id(p)] for p in params], grads)
            norms = torch._foreach_norm(grads)
            torch.stack(norms, out=self._norms[start : self._n_norms])

    def _note(self, loss: Tensor, metrics: dict[str, Tensor]) -> None:
        """Keep loss and metrics for the count in the next step."""
        values = [loss, *metrics.values()]
        if len(self._values) != len(values):
            self._names = tuple(metrics)
            self._values = torch.zeros(len(values), device=self.device, dtype=loss.dtype)
        torch.stack([v.detach().reshape(()) for v in values], out=self._values)

    def _replay(self) -> None:
        graph = self._graph if self._due or self._plain else self._first
        assert graph is not None
        graph.replay()
        self._due = not self._plain

    def _try_capture(self, rows: Tensor) -> None:
        outstanding = self._arrived, self._n_norms, self._due
        super()._try_capture(rows)
        self._arrived, self._n_norms, self._due = outstanding
        if self._graph is None and not self._plain:  # another attempt, without the branch
            self._main, self._ready = None, [None] * len(self._modules)
            self.settle()
            self._plain = self.capture = True

    def _capture_into(self, graph: torch.cuda.CUDAGraph, rows: Tensor) -> None:
        if self._plain:
            super()._capture_into(graph, rows)
            return
        self._due = True
        super()._capture_into(graph, rows)
        first = torch.cuda.CUDAGraph()
        self._due = False
        with torch.cuda.graph(first, pool=graph.pool()):
            self._step_once(rows)
        self._first = first


def _capturing_stream(device: torch.device) -> torch.cuda.Stream | None:
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return None
    return torch.cuda.current_stream(device)
