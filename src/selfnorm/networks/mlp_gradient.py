"""The energy of a plain network in a training step, with its gradient written out.

Value and gradient are those of :class:`selfnorm.MLP` up to rounding. Autograd keeps a tensor for
every operation and passes through them one after another; here activations are overwritten in
place, and in a captured CUDA graph the gradients of the weights run beside the backward chain, of
which they are no part. Second derivatives go through autograd.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from selfnorm.training import SideStream

__all__ = ["NARROW", "WRITTEN_OUT", "activate", "negative_energy", "pull_back"]

_ops = torch.ops.aten
NARROW = 16  # columns of an input from which on a CPU multiplies as well with it on the right
WRITTEN_OUT = ("relu", "tanh", "silu", "gelu")  # activations known here


def negative_energy(rows: Tensor, weights: Sequence[Tensor], activation: str) -> Tensor:
    r"""``-E(x) = -w . h_L(x)`` with ``h_l = f(W_l h_{l-1} + c_l)``: ``(n, d) -> (n,)``.

    Args:
        rows: ``(n, d)``, without gradient.
        weights: ``W_1, c_1, ..., W_L, c_L, w`` as ``nn.Linear`` holds them; ``w`` is ``(1, k)``.
        activation: one of :data:`WRITTEN_OUT`.

    Example:
        >>> first, c, last = torch.eye(2), torch.zeros(2), torch.ones(1, 2).requires_grad_()
        >>> minus_energy = negative_energy(torch.tensor([[3.0, -1.0]]), [first, c, last], "relu")
        >>> minus_energy.sum().backward()
        >>> minus_energy.detach(), last.grad
        (tensor([-3.]), tensor([[-3., -0.]]))
    """
    value: Tensor = _NegativeEnergy.apply(rows, activation, *weights)
    return value


def activate(z: Tensor, activation: str) -> Tensor:
    """The activation, in place where its derivative is known from its value."""
    if activation == "relu":
        return z.relu_()
    if activation == "tanh":
        return z.tanh_()
    silu = activation == "silu"
    return torch.nn.functional.silu(z) if silu else torch.nn.functional.gelu(z)


def pull_back(slope: Tensor, kept: Tensor, activation: str) -> None:
    """Multiply ``slope`` by the activation's derivative, in place."""
    if activation == "relu":
        _ops.threshold_backward.grad_input(slope, kept, 0, grad_input=slope)
    elif activation == "tanh":
        _ops.tanh_backward.grad_input(slope, kept, grad_input=slope)
    elif activation == "silu":
        _ops.silu_backward.grad_input(slope, kept, grad_input=slope)
    else:
        _ops.gelu_backward.grad_input(slope, kept, grad_input=slope)


def _plain(rows: Tensor, activation: str, weights: Sequence[Tensor]) -> Tensor:
    """The same by autograd's means."""
    functions = {"relu": torch.relu, "tanh": torch.tanh}
    functions |= {"silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu}
    h = rows
    for weight, bias in zip(weights[:-1:2], weights[1::2], strict=True):
        h = functions[activation](torch.nn.functional.linear(h, weight, bias))
    return -(h @ weights[-1][0])


class _NegativeEnergy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, activation: str, *weights: Tensor) -> Tensor:
        side = SideStream(rows.device) if rows.is_cuda else None
        with nullcontext() if side is None else side.branch():
            minus = -weights[-1][0]
        h = rows
        inputs, kept = [rows], []  # of the layers, and what each derivative is computed from
        for weight, bias in zip(weights[:-1:2], weights[1::2], strict=True):
            if activation == "relu" and rows.is_cuda:
                h = torch._addmm_activation(bias, h, weight.t())  # one kernel
                kept.append(h)
            else:
                z = torch.addmm(bias, h, weight.t())
                h = activate(z, activation)
                kept.append(z)
            inputs.append(h)
        ctx.save_for_backward(*inputs, *kept, *weights, minus)
        ctx.activation, ctx.depth = activation, len(kept)
        if side is not None:
            side.join()
        return torch.mv(h, minus)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        depth, activation = ctx.depth, ctx.activation
        saved = ctx.saved_tensors
        inputs, kept = saved[: depth + 1], saved[depth + 1 : 2 * depth + 1]
        weights, minus = saved[2 * depth + 1 : -1], saved[-1]
        slope_out = upstream[0]
        if torch.is_grad_enabled():
            # Somebody will differentiate the gradient (create_graph): it must not be a constant.
            value = _plain(inputs[0], activation, weights)
            found = torch.autograd.grad(value, weights, slope_out, create_graph=True)
            return None, None, *found
        found = [torch.empty_like(weight) for weight in weights]
        way = _one_by_one if slope_out.device.type == "cpu" else _side_by_side
        way(slope_out, inputs, kept, weights, minus, activation, found)
        return None, None, *found


def _one_by_one(
    slope_out: Tensor,
    inputs: Sequence[Tensor],
    kept: Sequence[Tensor],
    weights: Sequence[Tensor],
    minus: Tensor,
    activation: str,
    found: list[Tensor],
) -> None:
    """Write the gradient of every weight into ``found``."""
    torch.mv(inputs[-1].t(), slope_out, out=found[-1][0]).neg_()
    slope = torch.outer(slope_out, minus)
    for layer in reversed(range(len(kept))):
        pull_back(slope, kept[layer], activation)
        torch.sum(slope, 0, out=found[2 * layer + 1])
        if inputs[layer].shape[1] < NARROW:
            found[2 * layer].copy_(torch.mm(inputs[layer].t(), slope).t())
        else:
            torch.mm(slope.t(), inputs[layer], out=found[2 * layer])
        if layer:
            slope = torch.mm(slope, weights[2 * layer])


def _side_by_side(
    slope_out: Tensor,
    inputs: Sequence[Tensor],
    kept: Sequence[Tensor],
    weights: Sequence[Tensor],
    minus: Tensor,
    activation: str,
    found: list[Tensor],
) -> None:
    """The same with the backward chain as main line, and all else on branches of the graph."""
    products, sums = (SideStream(slope_out.device, number) for number in (0, 1))
    with products.branch():
        torch.mv(inputs[-1].t(), slope_out, out=found[-1][0]).neg_()
    slope = torch.outer(slope_out, minus)
    alive = []  # until the branches have joined
    for layer in reversed(range(len(kept))):
        pull_back(slope, kept[layer], activation)
        alive.append(slope)
        with sums.branch():
            torch.sum(slope, 0, out=found[2 * layer + 1])
        if layer:
            with products.branch():
                torch.mm(slope.t(), inputs[layer], out=found[2 * layer])
            slope = torch.mm(slope, weights[2 * layer])
        else:  # the last product of all has nothing to run beside
            torch.mm(slope.t(), inputs[0], out=found[0])
    products.join()
    sums.join()
