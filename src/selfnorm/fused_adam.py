"""Adam and AdamW as torch's fused kernels, without what torch's own class does around them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["FusedAdam"]


class FusedAdam(torch.optim.Adam):
    """``torch.optim.Adam`` or ``AdamW`` with ``fused=True``: same numbers, same state, less around.

    For a small network torch's bookkeeping takes longer than the update. Here a step is one call
    per group and two for all step counts. ``grad_scale`` and ``found_inf`` set
    as attributes divide the gradients, and skip the update where ``found_inf`` is 1.

    Args:
        params: parameters or groups, as for torch's optimisers.
        decoupled: AdamW if true, Adam (decay added to the gradient) otherwise.

    Example:
        >>> p = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = FusedAdam([{"params": [p], "lr": 0.1}], decoupled=True)
        >>> p.grad = torch.tensor([1.0, -2.0])
        >>> optimizer.step()
        >>> p.data
        tensor([0.9000, 1.1000])
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(self, params: Any, *, decoupled: bool) -> None:
        super().__init__(params, lr=0.0, fused=True)
        self._update = torch._fused_adamw_ if decoupled else torch._fused_adam_

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """One update of the parameters that have a gradient."""
        counts: list[Tensor] = []
        calls: list[tuple[dict[str, Any], list[Tensor]]] = []
        for group in self.param_groups:
            # The kernel takes tensors of one kind at a time.
            alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    alike.setdefault((p.dtype, p.device), []).append(p)
                    counts.append((self.state[p] or self._begin(p))["step"])
            calls += [(group, params) for params in alike.values()]
        if not counts:
            return
        torch._foreach_add_(counts, 1)
        for group, params in calls:
            states = [self.state[p] for p in params]
            beta1, beta2 = group["betas"]
            self._update(
                params,
                [p.grad for p in params if p.grad is not None],  # all have one
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [state["step"] for state in states],
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
                grad_scale=self.grad_scale,
                found_inf=self.found_inf,
            )
        if self.found_inf is not None:  # a skipped step is none
            torch._foreach_sub_(counts, [self.found_inf] * len(counts))

    def _begin(self, p: Tensor) -> dict[str, Tensor]:
        state = self.state[p]
        state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
        state["exp_avg"] = torch.zeros_like(p)
        state["exp_avg_sq"] = torch.zeros_like(p)
        return state
