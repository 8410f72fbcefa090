"""Several training steps as one CUDA graph.

Between two launches of a graph a GPU idles for some microseconds, which for a small network is a
part of the step. Several steps in one graph pay it once; the points of the next step are drawn
while the present one runs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from selfnorm.training.side_stream import SideStream

__all__ = ["StepGraph"]


class StepGraph:
    """``n`` steps captured at once; :meth:`replay` takes them on new rows and learning rates.

    Args:
        rows: ``(n * batch,)`` row numbers of the steps, one step after another.
        n_steps: ``n``.
        n_controls: numbers each step is told, e.g. learning rates.
        draw: what of a step needs its rows alone; runs beside the step before.
        take: the rest of the step: of what was drawn, and its controls ``(n_controls,)``.

    Raises:
        RuntimeError: if a step cannot be captured.
    """

    def __init__(
        self,
        rows: Tensor,
        n_steps: int,
        n_controls: int,
        draw: Callable[[Tensor], tuple[Tensor, ...]],
        take: Callable[[tuple[Tensor, ...], Tensor], None],
    ) -> None:
        self.n_steps = n_steps
        self.rows = rows.clone()
        self.controls = torch.zeros(n_steps, n_controls, device=rows.device)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            run_ahead(self.rows.view(n_steps, -1), self.controls, draw, take)

    def replay(self, rows: Tensor, controls: Tensor) -> None:
        """Take the steps; ``controls`` ``(n, n_controls)`` come from the host."""
        self.rows.copy_(rows)
        # The driver has read the host's numbers when the call returns: nobody waits.
        self.controls.copy_(controls, non_blocking=True)
        self._graph.replay()

    def release(self) -> None:
        """Give the memory back."""
        self._graph.reset()


def run_ahead(
    rows: Tensor,
    controls: Tensor,
    draw: Callable[[Tensor], tuple[Tensor, ...]],
    take: Callable[[tuple[Tensor, ...], Tensor], None],
) -> None:
    """Steps one after another, each drawn before the one in front of it is taken.

    Example:
        >>> told = []
        >>> run_ahead(torch.tensor([[1], [2]]), torch.zeros(2, 1),
        ...           lambda row: told.append(f"draw {int(row)}") or (row,),
        ...           lambda drawn, _: told.append(f"take {int(drawn[0])}"))
        >>> told
        ['draw 1', 'draw 2', 'take 1', 'take 2']
    """
    side = SideStream(rows.device, number=2)
    with side.branch():
        following = draw(rows[0])
    for number in range(len(rows)):
        # Only now: the branch that draws the next points does not wait for this step.
        side.join()
        drawn = following
        if number + 1 < len(rows):
            with side.branch():
                following = draw(rows[number + 1])
        take(drawn, controls[number])
