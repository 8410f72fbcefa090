"""SNL of one mini-batch with its gradient written out: the training step's inner part.

Value and gradient are those of :func:`selfnorm.functional.snl` up to rounding. Left to autograd the
same formula is some fifty operations on single numbers, each of which a GPU launches by itself; for
a small network they cost more than the network. Second derivatives go through that formula.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from selfnorm import functional as F

__all__ = ["snl_loss"]

_MAX_EXPONENT = 80.0  # as in functional.snl


def snl_loss(
    terms: Tensor, n_data: int, log_norm: Tensor, constant: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    r"""``-l_SNL`` to minimise, and the upper bound ``l_IS`` (without gradient).

    Args:
        terms: ``(n + M,)``: ``log p~(x_i)`` of the ``n_data`` data rows, then the log-weights of
            the ``M`` samples, as they come out of one pass through the network.
        n_data: ``n``.
        log_norm: ``b``, a scalar.
        constant: added to the mean of ``log p~(x_i)``, e.g. the base density's part of it.

    Example:
        >>> terms = torch.tensor([199.0, 200.0, 200.0], requires_grad=True)
        >>> loss, upper = snl_loss(terms, 1, torch.tensor(200.0))
        >>> loss.backward()
        >>> float(loss.detach()), float(upper), terms.grad
        (1.0, -1.0, tensor([-1.0000,  0.5000,  0.5000]))
    """
    value, upper = _SnlLoss.apply(terms, log_norm, constant, n_data)
    return value, upper


class _SnlLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, terms: Tensor, b: Tensor, constant: Tensor | None, n_data: int
    ) -> tuple[Tensor, Tensor]:
        data, log_w = terms[:n_data].mean(), terms[n_data:]
        if constant is not None:
            data = data + constant
        n_samples = len(log_w)
        # Where every weight is zero the finite numbers below stand for -inf: slope and ratio are 0.
        top = log_w.amax().clamp_min(torch.finfo(terms.dtype).min)
        scaled = torch.exp(log_w - top)
        mean = scaled.mean().clamp_min(0.5 / n_samples)
        log_z = mean.log() + top
        log_ratio = log_z - b
        # exp up to the cap, continued linearly: functional.capped_exp and its derivative.
        below = log_ratio.clamp_max(_MAX_EXPONENT)
        slope = below.exp()
        ratio = torch.addcmul(slope, slope, log_ratio - below)
        loss = b - data + ratio - 1
        share = scaled * (slope / mean * (1 / n_samples))
        gradient = torch.cat([terms.new_full((n_data,), -1 / n_data), share])
        ctx.save_for_backward(gradient, slope, terms, b)
        ctx.n_data = n_data
        upper = data - log_z
        ctx.mark_non_differentiable(upper)
        ctx.set_materialize_grads(False)
        return loss, upper

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> Any:
        gradient, slope, terms, b = ctx.saved_tensors
        if upstream[0] is None:
            return None, None, None, None
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            # Somebody will differentiate the gradient (create_graph): it must not be a constant.
            loss = -F.snl(terms[: ctx.n_data], terms[ctx.n_data :], b)
            return *_gradients(loss, (terms, b), upstream[0]), None, None
        return gradient * upstream[0], (1 - slope) * upstream[0], None, None


def _gradients(loss: Tensor, inputs: tuple[Tensor, ...], upstream: Tensor) -> list[Tensor | None]:
    """Gradients with a graph of their own, ``None`` for inputs that need none."""
    wanted = [value for value in inputs if value.requires_grad]
    found = iter(torch.autograd.grad(loss, wanted, upstream, create_graph=True))
    return [next(found) if value.requires_grad else None for value in inputs]
