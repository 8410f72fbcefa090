"""SNL of a mini-batch in which every row has its own samples, with its gradient written out.

Value and gradient are those of :func:`selfnorm.functional.snl` up to rounding. Left to autograd,
value, gradient and bounds are some sixty operations on few numbers, each of which a GPU launches by
itself; here they are eighteen. Second derivatives go through that formula.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from selfnorm import functional as F
from selfnorm.density import capped_exp_and_slope, gradients_with_graph

__all__ = ["row_snl_loss"]


def row_snl_loss(log_p: Tensor, log_w: Tensor, log_norm: Tensor) -> tuple[Tensor, Tensor]:
    r"""``-l_SNL`` to minimise, and the upper bound ``l_IS`` (without gradient), means over rows.

    ``-log p~_i + b_i + e^{-b_i} (1/M) sum_m w_mi - 1``.

    Args:
        log_p: ``(*batch,)``: ``log p~(y_i|x_i)``.
        log_w: ``(M, *batch)`` log-weights.
        log_norm: ``b``, ``(*batch,)``.

    Example:
        >>> log_w = torch.tensor([[200.0, 3.0], [200.0, 3.0]], requires_grad=True)
        >>> b = torch.tensor([200.0, 3.0])
        >>> loss, upper = row_snl_loss(torch.tensor([199.0, 5.0]), log_w, b)
        >>> loss.backward()
        >>> float(loss.detach()), float(upper), log_w.grad[:, 0]
        (-0.5, 0.5, tensor([0.2500, 0.2500]))
    """
    loss, upper = _RowSnl.apply(log_p, log_w, log_norm)
    return loss, upper


class _RowSnl(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, log_p: Tensor, log_w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        n_samples, n_rows = len(log_w), log_p.numel()
        # Where every weight is zero the finite numbers below stand for -inf: slope and ratio are 0.
        top = log_w.amax(0).clamp_min_(torch.finfo(log_w.dtype).min)
        scaled = (log_w - top).exp_()
        mean = scaled.mean(0).clamp_min_(0.5 / n_samples)
        log_z = mean.log().add_(top)
        log_ratio = log_z - b
        ratio, slope = capped_exp_and_slope(log_ratio)
        data = log_p - b
        loss = ratio.sub_(data).mean().sub_(1)
        upper = data.sub_(log_ratio).mean()
        share = scaled.mul_((slope / mean).mul_(1 / (n_samples * n_rows)))
        excess = (1 - slope).mul_(1 / n_rows)
        ctx.save_for_backward(share, excess, log_p, log_w, b)
        ctx.mark_non_differentiable(upper)
        ctx.set_materialize_grads(False)
        return loss, upper

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> Any:
        share, excess, log_p, log_w, b = ctx.saved_tensors
        if upstream[0] is None:
            return None, None, None
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            # Somebody will differentiate the gradient (create_graph): it must not be a constant.
            loss = -F.snl(log_p, log_w, b)
            return tuple(gradients_with_graph(loss, (log_p, log_w, b), upstream[0]))
        at_data = (upstream[0] * (-1 / log_p.numel())).expand_as(log_p)
        return at_data, share * upstream[0], excess * upstream[0]
