"""Adam and AdamW as torch's fused kernels, without what torch's own class does around them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["FusedAdam", "FusedKernel"]


class FusedKernel(torch.optim.Adam):
    """State and kernel of torch's fused Adam and AdamW; subclasses say which tensors go together.

    ``grad_scale`` and ``found_inf`` set as attributes divide the gradients, and skip the update
    where ``found_inf`` is 1; the step counts are the subclass's.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(self, params: Any, *, decoupled: bool) -> None:
        super().__init__(params, lr=0.0, fused=True)
        self._update = torch._fused_adamw_ if decoupled else torch._fused_adam_

    def _begin(self, p: Tensor) -> dict[str, Tensor]:
        state = self.state[p]
        state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
        state["exp_avg"] = torch.zeros_like(p, requires_grad=False)
        state["exp_avg_sq"] = torch.zeros_like(p, requires_grad=False)
        return state

    def _launch(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        first: list[Tensor],
        second: list[Tensor],
        counts: list[Tensor],
    ) -> None:
        beta1, beta2 = group["betas"]
        self._update(
            params,
            grads,
            first,
            second,
            [],
            counts,
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


class FusedAdam(FusedKernel):
    """``torch.optim.Adam`` or ``AdamW`` with ``fused=True``: same numbers, same state, less around.

    For a small network torch's bookkeeping takes longer than the update. Here a step is one call
    per group, and one for all step counts. ``grad_scale`` and ``found_inf`` set
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

    _plan: _Plan | None = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """One update of the parameters that have a gradient."""
        if self._plan is None:
            self._plan = self._make_plan()
        if all(p.grad is not None for call in self._plan.calls for p in call.params):
            self._plan.counts.add_(1)
            for call in self._plan.calls:
                self._call(call)
            if self.found_inf is not None:  # a skipped step is none
                self._plan.counts.sub_(self.found_inf)
            return
        for call in self._plan.calls:
            for part in call.parts():
                if part.params[0].grad is not None:
                    part.counts[0].add_(1)
                    self._call(part)
                    if self.found_inf is not None:
                        part.counts[0].sub_(self.found_inf)

    def _call(self, call: _Call) -> None:
        grads = [p.grad for p in call.params if p.grad is not None]  # all have one
        self._launch(call.group, call.params, grads, call.first, call.second, call.counts)

    def _make_plan(self) -> _Plan:
        """The lists that every step hands to the kernel, and all step counts in one vector."""
        everyone = [p for group in self.param_groups for p in group["params"]]
        begun = [float(self.state[p]["step"]) if self.state[p] else 0.0 for p in everyone]
        counts = torch.tensor(begun, dtype=torch.float32, device=everyone[0].device)
        for p, count in zip(everyone, counts, strict=True):
            state = self.state[p] or self._begin(p)
            state["step"] = count  # a view
        calls: list[_Call] = []
        for group in self.param_groups:
            # The kernel takes tensors of one kind at a time.
            alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
            for p in group["params"]:
                alike.setdefault((p.dtype, p.device), []).append(p)
            for params in alike.values():
                states = [self.state[p] for p in params]
                lists = [[s[name] for s in states] for name in ("exp_avg", "exp_avg_sq", "step")]
                calls.append(_Call(group, params, *lists))
        return _Plan(calls, counts)

    def load_state_dict(self, state_dict: Any) -> None:
        """As torch's; what was planned for the old state is forgotten."""
        self._plan = None
        super().load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's."""
        self._plan = None
        super().add_param_group(param_group)


class _Call(NamedTuple):
    """What one call of the kernel is given."""

    group: dict[str, Any]
    params: list[Tensor]
    first: list[Tensor]
    second: list[Tensor]
    counts: list[Tensor]

    def parts(self) -> Iterator[_Call]:
        """The same for one parameter at a time."""
        for p, first, second, count in zip(*self[1:], strict=True):
            yield _Call(self.group, [p], [first], [second], [count])


class _Plan(NamedTuple):
    calls: list[_Call]
    counts: Tensor
