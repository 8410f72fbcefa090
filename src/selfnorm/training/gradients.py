"""A scalar that carries a gradient found earlier: accumulation without touching ``.grad``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["accumulate", "with_gradients"]


class _Known(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, grads: Sequence[Tensor | None], *params: Tensor) -> Tensor:  # noqa: ARG004
        ctx.grads = grads
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        found = [None if g is None else upstream[0] * g for g in ctx.grads]
        return (None, None, *found)


def with_gradients(
    value: Tensor, params: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> Tensor:
    """``value`` as a function of ``params`` with the given gradient.

    Example:
        >>> p = torch.zeros(2, requires_grad=True)
        >>> with_gradients(torch.tensor(3.0), [p], [torch.tensor([1.0, -1.0])]).backward()
        >>> p.grad
        tensor([ 1., -1.])
    """
    result: Tensor = _Known.apply(value.detach(), list(grads), *params)
    return result


def accumulate(
    parts: Sequence[Callable[[], tuple[Tensor, dict[str, Tensor]]]], params: Sequence[Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean loss and metrics of several parts, of which one at a time is in memory.

    Example:
        >>> p = torch.tensor(2.0, requires_grad=True)
        >>> loss, _ = accumulate([lambda k=k: (k * p, {}) for k in (1.0, 3.0)], [p])
        >>> loss.backward()
        >>> float(loss.detach()), float(p.grad)
        (4.0, 2.0)
    """
    if len(parts) == 1:
        return parts[0]()
    total: list[Tensor | None] = [None] * len(params)
    value: Tensor | None = None
    means: dict[str, Tensor] = {}
    share = 1 / len(parts)
    for part in parts:
        loss, metrics = part()
        found = torch.autograd.grad(loss * share, list(params), allow_unused=True)
        for k, grad in enumerate(found):
            old = total[k]
            if grad is not None:
                total[k] = grad if old is None else old.add_(grad)
        value = loss.detach() * share + (0 if value is None else value)
        for name, metric in metrics.items():
            means[name] = metric.detach() * share + means.get(name, torch.zeros_like(metric))
    assert value is not None
    return with_gradients(value, params, total), means
