"""Energies of plain networks side by side in a training step, with their gradient written out.

What :mod:`selfnorm.networks.mlp_gradient` does for one network, for the rows of a table of
weights: batched
products, activations overwritten in place, and the gradient written into a table of the same shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from selfnorm.networks.mlp_gradient import NARROW, activate, pull_back

__all__ = ["stacked_energy"]


def stacked_energy(
    rows: Tensor,
    table: Tensor,
    shapes: Sequence[torch.Size],
    activation: str,
    plain: Callable[[Tensor], Tensor],
) -> Tensor:
    """Energies ``(K, n)`` of rows ``(K, n, d)``, member ``k`` by row ``k`` of the table.

    Args:
        rows: without gradient.
        table: ``(K, P)``: weights and biases layer by layer, the last layer without bias.
        shapes: of the tensors in a row of the table.
        activation: one of :data:`selfnorm.networks.mlp_gradient.WRITTEN_OUT`.
        plain: the same function of the table by autograd's means, for second derivatives.

    Example:
        >>> table = torch.tensor([[2.0, 1.0, 3.0], [-2.0, 1.0, 3.0]], requires_grad=True)
        >>> shapes = [torch.Size([1, 1]), torch.Size([1]), torch.Size([1, 1])]
        >>> energy = stacked_energy(torch.ones(2, 1, 1), table, shapes, "relu", lambda t: t)
        >>> energy.sum().backward()
        >>> energy.detach().flatten(), table.grad
        (tensor([9., 0.]), tensor([[3., 3., 3.],
                [0., 0., 0.]]))
    """
    energy: Tensor = _StackedEnergy.apply(rows, table, shapes, activation, plain)
    return energy


def _parts(table: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Views ``(K, *shape)`` of the tensors in the table."""
    pieces = table.split([shape.numel() for shape in shapes], dim=1)
    return [piece.view(-1, *shape) for piece, shape in zip(pieces, shapes, strict=True)]


class _StackedEnergy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        table: Tensor,
        shapes: Sequence[torch.Size],
        activation: str,
        plain: Callable[[Tensor], Tensor],
    ) -> Tensor:
        weights = _parts(table, shapes)
        h, inputs, kept = rows, [rows], []
        for weight, bias in zip(weights[:-1:2], weights[1::2], strict=True):
            z = torch.baddbmm(bias.unsqueeze(1), h, weight.mT)
            h = activate(z, activation)
            kept.append(z)
            inputs.append(h)
        ctx.save_for_backward(table, *inputs, *kept)
        ctx.shapes, ctx.activation, ctx.plain = shapes, activation, plain
        return torch.bmm(h, weights[-1].mT).squeeze(-1)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        table, *saved = ctx.saved_tensors
        slope_out = upstream[0]
        if torch.is_grad_enabled():
            # Somebody will differentiate the gradient (create_graph): it must not be a constant.
            (found,) = torch.autograd.grad(ctx.plain(table), table, slope_out, create_graph=True)
            return None, found, None, None, None
        depth = len(saved) // 2
        inputs, kept = saved[: depth + 1], saved[depth + 1 :]
        weights = _parts(table, ctx.shapes)
        gradient = torch.empty_like(table)
        found = _parts(gradient, ctx.shapes)
        found[-1].copy_(torch.bmm(slope_out.unsqueeze(1), inputs[-1]))
        slope = slope_out.unsqueeze(-1) * weights[-1]
        for layer in reversed(range(depth)):
            pull_back(slope, kept[layer], ctx.activation)
            if inputs[layer].shape[2] < NARROW:
                found[2 * layer].copy_(torch.bmm(inputs[layer].mT, slope).mT)
            else:
                found[2 * layer].copy_(torch.bmm(slope.mT, inputs[layer]))
            torch.sum(slope, 1, out=found[2 * layer + 1])
            if layer:
                slope = torch.bmm(slope, weights[2 * layer])
        return None, gradient, None, None, None
