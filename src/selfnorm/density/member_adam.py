"""Adam for stacked parameters: every member its own learning rate, weight decay and step count."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["MemberAdam"]


class _Members(Protocol):
    updating: Tensor
    lr_factor: Tensor
    weight_decay: Tensor
    log_norm_factor: Tensor


class MemberAdam(torch.optim.Optimizer):
    r"""Adam or AdamW over tensors whose first dimension counts members.

    Adam is elementwise, so the update of member ``k`` is *exactly* that of an optimiser of its own
    with ``lr_k`` and ``weight_decay_k``. A member with ``updating[k] = 0`` (a non-finite step, or a
    member that has stopped) keeps parameters, moments and step count.

    Args:
        params: parameter groups; ``log_norm=True`` marks the group of ``b``.
        members: holds the ``(K,)`` tensors ``updating`` (0 or 1), ``lr_factor``, ``weight_decay``
            and ``log_norm_factor`` (learning rate of ``b`` over that of the energy).
        decoupled: AdamW if true, Adam (decay added to the gradient) otherwise.
    """

    def __init__(self, params: Any, members: _Members, *, decoupled: bool) -> None:
        self.members = members
        self.decoupled = decoupled
        device = members.updating.device
        lr = torch.zeros((), device=device) if device.type == "cuda" else 0.0
        defaults = {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "log_norm": False}
        # Tells torch to keep the step counts on the parameters' device when a state is loaded.
        super().__init__(params, {**defaults, "capturable": True})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {
                    "step": torch.zeros(len(p), device=p.device),
                    "exp_avg": torch.zeros_like(p),
                    "exp_avg_sq": torch.zeros_like(p),
                }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """One update of all members that are updating."""
        if self.members.updating.device.type == "cpu":
            self._step_on_host()
        else:
            self._step_on_device()

    def _step_on_device(self) -> None:
        """Without asking the host who is updating."""
        members = self.members
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            rate = group["lr"] * members.lr_factor
            if group["log_norm"]:
                rate = rate * members.log_norm_factor
            for p in group["params"]:
                if p.grad is None:
                    continue
                shape = (-1,) + (1,) * (p.dim() - 1)
                updating, grad = members.updating.view(shape), p.grad
                state = self.state[p]
                state["step"].add_(members.updating)
                if not group["log_norm"]:
                    if self.decoupled:
                        shrink = 1 - rate * members.weight_decay * members.updating
                        p.mul_(shrink.view(shape))
                    else:
                        grad = grad.addcmul(members.weight_decay.view(shape), p)
                state["exp_avg"].lerp_(grad, (1 - beta1) * updating.expand_as(grad))
                state["exp_avg_sq"].lerp_(grad.square(), (1 - beta2) * updating.expand_as(grad))
                # In double: 1 - 0.999 loses four digits in single precision.
                count = state["step"].double().clamp_min(1)
                correction1 = 1 - torch.pow(beta1, count)
                correction2 = (1 - torch.pow(beta2, count)).sqrt()
                size = (members.updating * rate / correction1).to(p.dtype).view(shape)
                root = state["exp_avg_sq"].sqrt().div_(correction2.to(p.dtype).view(shape))
                p.sub_(size * state["exp_avg"] / root.add_(group["eps"]))

    def _step_on_host(self) -> None:
        """The same by torch's fused kernel, which goes through memory once; where the host may ask
        who is updating. Members with one learning rate and weight decay share a call."""
        members = self.members
        settings = (members.updating, members.lr_factor, members.log_norm_factor)
        updating, factors, factors_b = (values.tolist() for values in settings)
        decays = members.weight_decay.tolist()
        update = torch._fused_adamw_ if self.decoupled else torch._fused_adam_
        for group in self.param_groups:
            alike: dict[tuple[float, float], list[int]] = {}
            for k, taken in enumerate(updating):
                if taken:
                    rate = float(group["lr"]) * factors[k]
                    own = (rate * factors_b[k], 0.0) if group["log_norm"] else (rate, decays[k])
                    alike.setdefault(own, []).append(k)
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["step"].add_(members.updating)
                tables = (p, p.grad, state["exp_avg"], state["exp_avg_sq"], state["step"])
                rows = [table.unbind() for table in tables]
                for (rate, decay), which in alike.items():
                    params, grads, means, squares, counts = (
                        [row[k] for k in which] for row in rows
                    )
                    update(
                        params,
                        grads,
                        means,
                        squares,
                        [],
                        counts,
                        lr=rate,
                        beta1=group["betas"][0],
                        beta2=group["betas"][1],
                        weight_decay=decay,
                        eps=group["eps"],
                        amsgrad=False,
                        maximize=False,
                    )
