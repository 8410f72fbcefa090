"""Adam for large networks on a GPU: all its multiprocessors at work on one update."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from selfnorm.training.fused_adam import FusedKernel
from selfnorm.training.side_stream import SideStream

__all__ = ["WideAdam"]

_PIECES = 36  # tensors that torch's kernel takes in one launch
_FIRST_BRANCH = 8  # other branches of a step have lower numbers


class WideAdam(FusedKernel):
    """``torch.optim.Adam`` or ``AdamW``, fused, on pieces of the parameters side by side.

    Torch's kernel gives each 65,536 numbers of a tensor to one block of threads, which goes through
    them in turn: for some ten million numbers most of a large GPU idles, and the update takes twice
    the time that the memory needs. Here tensors go in as pieces, and the launches are branches of
    the graph that is captured. Numbers and state are the same. ``grad_scale`` and ``found_inf`` set
    as attributes divide the gradients, and skip the update where ``found_inf`` is 1.

    Args:
        params: parameters or groups, as for torch's optimisers.
        decoupled: AdamW if true, Adam (decay added to the gradient) otherwise.
        piece: most numbers of a piece.

    Example:
        >>> p = torch.nn.Parameter(torch.ones(5))
        >>> optimizer = WideAdam([{"params": [p], "lr": 0.1}], decoupled=True, piece=2)
        >>> p.grad = torch.tensor([1.0, -2.0, 1.0, 1.0, 1.0])
        >>> optimizer.step()
        >>> p.data
        tensor([0.9000, 1.1000, 0.9000, 0.9000, 0.9000])
    """

    def __init__(self, params: Any, *, decoupled: bool, piece: int = 2**15) -> None:
        super().__init__(params, decoupled=decoupled)
        self.piece = piece

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """One update of the parameters that have a gradient."""
        counts = [
            (self.state[p] or self._begin(p))["step"]
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        if not counts:
            return
        torch._foreach_add_(counts, 1)
        branches: list[SideStream] = []
        for group, pieces in self._launches():
            params, *others = (list(column) for column in zip(*pieces, strict=True))
            branches.append(SideStream(params[0].device, _FIRST_BRANCH + len(branches)))
            with branches[-1].branch():
                self._launch(group, params, *others)
        for branch in branches:
            branch.join()
        if self.found_inf is not None:  # a skipped step is none
            torch._foreach_sub_(counts, [self.found_inf] * len(counts))

    def _launches(self) -> Iterator[tuple[dict[str, Any], list[tuple[Tensor, ...]]]]:
        """Pieces of parameter, gradient and moments with the step count, so many at a time."""
        for group in self.param_groups:
            alike: dict[tuple[torch.dtype, torch.device], list[tuple[Tensor, ...]]] = {}
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                whole = (p, _laid_out_as(p, p.grad), state["exp_avg"], state["exp_avg_sq"])
                rows = alike.setdefault((p.dtype, p.device), [])
                if not _without_gaps(p):
                    rows.append((*whole, state["step"]))
                    continue
                cut = zip(*(_in_line(t).split(self.piece) for t in whole), strict=True)
                rows += [(*pieces, state["step"]) for pieces in cut]
            for rows in alike.values():
                for start in range(0, len(rows), _PIECES):
                    yield group, rows[start : start + _PIECES]


def _without_gaps(p: Tensor) -> bool:
    last = p.ndim == 4 and p.is_contiguous(memory_format=torch.channels_last)
    return last or p.is_contiguous()


def _in_line(t: Tensor) -> Tensor:
    """The numbers in the order of memory."""
    return t.as_strided((t.numel(),), (1,))


def _laid_out_as(p: Tensor, t: Tensor) -> Tensor:
    """``t``, copied where its numbers do not lie in the order of those of ``p``."""
    strides = zip(p.shape, p.stride(), t.stride(), strict=True)
    if all(size == 1 or mine == other for size, mine, other in strides):
        return t
    return torch.empty_like(p).copy_(t)
