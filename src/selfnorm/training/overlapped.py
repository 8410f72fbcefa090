"""Training steps whose moving average runs beside the next step's forward and backward pass.

The average of a large network takes three passes over all its numbers, as long as the optimiser;
nothing in a training step needs it. So the average after step ``k`` is the first thing that step
``k + 1`` launches, on a branch of the captured graph that ends before the parameters change again.
The numbers are those of the plain step; :meth:`OverlappedStepper.settle` applies what is
outstanding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from selfnorm.training.side_stream import SideStream
from selfnorm.training.step import Stepper
from selfnorm.training.task import Task

__all__ = ["OverlappedStepper", "make_stepper"]

_BRANCH = 4  # other branches of a step have other numbers


def make_stepper(
    task: Task, optimizer: torch.optim.Optimizer, data: tuple[Tensor, ...], **options: Any
) -> Stepper:
    """An :class:`OverlappedStepper` for large networks with an average whose steps are captured.

    Args:
        task: says by an attribute ``large_network = True`` that its network is large.
        optimizer, data, options: as for :class:`~selfnorm.training.step.Stepper`.
    """
    wanted = getattr(task, "large_network", False) and options["ema"] is not None
    if wanted and options["capture"] and data[0].is_cuda:
        return OverlappedStepper(task, optimizer, data, **options)
    return Stepper(task, optimizer, data, **options)


class OverlappedStepper(Stepper):
    """A :class:`~selfnorm.training.step.Stepper` that averages a step's parameters in the next one.

    Only a captured graph has a branch; elsewhere the same work runs in line.
    """

    def __init__(
        self,
        task: Task,
        optimizer: torch.optim.Optimizer,
        data: tuple[Tensor, ...],
        **options: Any,
    ) -> None:
        super().__init__(task, optimizer, data, **options)
        # What the average keeps of itself when the outstanding parameters come in; 1: none are.
        self._due_keep = torch.ones_like(self._keep)
        self._outstanding = False
        self._side: SideStream | None = None

    def step(self, rows: Tensor, lr: float, n_done: int) -> None:
        """Take one step; its average is left for later."""
        super().step(rows, lr, n_done)
        self._outstanding = True

    def settle(self) -> None:
        """Average the parameters as they are, if that is outstanding."""
        if self._outstanding:
            super()._move_average(self._due_keep)
            self._due_keep.fill_(1.0)
            self._outstanding = False

    def _step_once(self, rows: Tensor) -> None:
        self._side = SideStream(self.device, _BRANCH)
        with self._side.branch(), torch.no_grad():
            super()._move_average(self._due_keep)
            self._due_keep.copy_(self._keep)
        super()._step_once(rows)

    def _clip(self, grads: list[Tensor]) -> Tensor:
        if self._side is not None:  # next the parameters change
            self._side.join()
        return super()._clip(grads)

    def _move_average(self, keep: Tensor) -> None:
        """Left to the next step."""
