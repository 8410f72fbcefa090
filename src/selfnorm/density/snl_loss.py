"""SNL of one mini-batch with its gradient written out: the training step's inner part.

Value and gradient are those of :func:`selfnorm.functional.snl` up to rounding. Left to autograd the
same formula is some fifty operations on single numbers, each of which a GPU launches by itself; for
a small network they cost more than the network. Second derivatives go through that formula.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from selfnorm import functional as F
from selfnorm.training import SideStream

__all__ = ["MAX_EXPONENT", "gradients_with_graph", "snl_loss", "snl_losses"]

MAX_EXPONENT = 80.0  # as in functional.snl


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


def snl_losses(terms: Tensor, n_data: int, log_norms: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`snl_loss` of several models at once: ``(K, n + M)`` and ``(K,)`` to two of ``(K,)``.

    Example:
        >>> terms = torch.tensor([[199.0, 200.0, 200.0], [0.0, 0.0, 0.0]])
        >>> snl_losses(terms, 1, torch.tensor([200.0, 0.0]))
        (tensor([1., 0.]), tensor([-1.,  0.]))
    """
    values, upper = _SnlLosses.apply(terms, log_norms, n_data)
    return values, upper


class _SnlLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, terms: Tensor, b: Tensor, n_data: int) -> tuple[Tensor, Tensor]:
        n_samples = terms.shape[1] - n_data
        data = terms[:, :n_data].mean(1)
        # Where every weight is zero the finite numbers here stand for -inf: slope and ratio are 0.
        log_w = terms[:, n_data:].clamp_min(torch.finfo(terms.dtype).min)
        top = log_w.amax(1, keepdim=True)
        gradient = torch.empty_like(terms)
        gradient[:, :n_data] = -1 / n_data
        scaled = torch.sub(log_w, top, out=gradient[:, n_data:]).exp_()
        total = scaled.sum(1)
        log_z = total.log() + top[:, 0] - math.log(n_samples)
        log_ratio = log_z - b
        ratio, slope = capped_exp_and_slope(log_ratio)
        losses = ratio + b - data - 1
        scaled.mul_((slope / total).unsqueeze(1))
        ctx.save_for_backward(gradient, slope, terms, b)
        ctx.n_data = n_data
        upper = data - log_z
        ctx.mark_non_differentiable(upper)
        ctx.set_materialize_grads(False)
        return losses, upper

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> Any:
        gradient, slope, terms, b = ctx.saved_tensors
        slopes = upstream[0]
        if slopes is None:
            return None, None, None
        if torch.is_grad_enabled():
            # Somebody will differentiate the gradient (create_graph): it must not be a constant.
            n = ctx.n_data
            pairs = zip(terms, b, strict=True)
            losses = torch.stack([-F.snl(row[:n], row[n:], norm) for row, norm in pairs])
            return *gradients_with_graph(losses, (terms, b), slopes), None
        return gradient * slopes.unsqueeze(1), (1 - slope) * slopes, None


class _SnlLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, terms: Tensor, b: Tensor, constant: Tensor | None, n_data: int
    ) -> tuple[Tensor, Tensor]:
        compiling = torch.compiler.is_compiling()
        way = _on_host if terms.device.type == "cpu" and not compiling else _on_device
        loss, upper, gradient, slope = way(terms, b, constant, n_data)
        ctx.save_for_backward(gradient, slope, terms, b)
        ctx.n_data = n_data
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
            return *gradients_with_graph(loss, (terms, b), upstream[0]), None, None
        return gradient * upstream[0], (1 - slope) * upstream[0], None, None


Pieces = tuple[Tensor, Tensor, Tensor, Tensor]  # loss, upper bound, gradient, d ratio / d log Z


def _on_device(terms: Tensor, b: Tensor, constant: Tensor | None, n_data: int) -> Pieces:
    """Without asking the host. The value is computed beside the gradient, which others wait for."""
    side = None if torch.compiler.is_compiling() else SideStream(terms.device)

    def beside() -> AbstractContextManager[None]:
        return nullcontext() if side is None else side.branch()

    n_samples = len(terms) - n_data
    with beside():
        data = terms[:n_data].mean()
        if constant is not None:
            data = data + constant
        rest = b - data - 1
        shift = b + math.log(n_samples)
    # Where every weight is zero the finite numbers here stand for -inf: slope and ratio are 0.
    log_w = terms[n_data:].clamp_min(torch.finfo(terms.dtype).min)
    top = log_w.amax()
    scaled = (log_w - top).exp_()
    total = scaled.sum()
    log_sum = total.log()
    if side is not None:
        side.join()
    log_ratio = log_sum + (top - shift)
    # As in capped_exp_and_slope, in two parts: the gradient waits for the slope alone.
    below = log_ratio.clamp_max(MAX_EXPONENT)
    slope = below.exp()
    with beside():
        loss = torch.addcmul(slope, slope, log_ratio - below) + rest
        upper = data - (log_ratio + b)
    share = scaled * (slope / total)
    gradient = torch.cat([terms.new_full((n_data,), -1 / n_data), share])
    if side is not None:
        side.join()
    return loss, upper, gradient, slope


def _on_host(terms: Tensor, b: Tensor, constant: Tensor | None, n_data: int) -> Pieces:
    """The same where reading a number is cheap (CPU): plain arithmetic, no small tensors."""
    n_samples = len(terms) - n_data
    norm = b.item()
    data = terms[:n_data].sum().item() / n_data + (0.0 if constant is None else constant.item())
    log_w = terms[n_data:]
    top = max(log_w.amax().item(), torch.finfo(terms.dtype).min)
    share = (log_w - top).exp_()
    mean = max(share.sum().item() / n_samples, 0.5 / n_samples)
    log_z = math.log(mean) + top if mean < math.inf else mean
    log_ratio = log_z - norm
    slope = math.exp(min(log_ratio, MAX_EXPONENT))
    ratio = slope * (1 + max(log_ratio - MAX_EXPONENT, 0.0))
    share.mul_(slope / mean / n_samples)
    gradient = torch.cat([terms.new_full((n_data,), -1 / n_data), share])
    # Each in memory of its own: what is returned may be changed in place.
    loss, upper, slope_found = map(terms.new_tensor, (norm - data + ratio - 1, data - log_z, slope))
    return loss, upper, gradient, slope_found


def capped_exp_and_slope(u: Tensor) -> tuple[Tensor, Tensor]:
    """``functional.capped_exp`` at ``MAX_EXPONENT`` and its derivative, element by element.

    Example:
        >>> capped_exp_and_slope(torch.tensor([0.0]))
        (tensor([1.]), tensor([1.]))
    """
    below = u.clamp_max(MAX_EXPONENT)
    slope = below.exp()
    return torch.addcmul(slope, slope, u - below), slope


def gradients_with_graph(
    loss: Tensor, inputs: tuple[Tensor, ...], upstream: Tensor
) -> list[Tensor | None]:
    """Gradients with a graph of their own, ``None`` for inputs that need none."""
    wanted = [value for value in inputs if value.requires_grad]
    found = iter(torch.autograd.grad(loss, wanted, upstream, create_graph=True))
    return [next(found) if value.requires_grad else None for value in inputs]
