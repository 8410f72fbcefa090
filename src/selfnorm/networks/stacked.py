"""Networks of several ensemble members computed together.

A stacked network holds the weights of ``members`` networks of the same shape in one tensor, so that
one batched matrix product trains all of them: five small networks then cost little more than one.
Inputs have shape ``(*samples, members, n, features)`` or, shared by the members, ``(n, features)``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from selfnorm.networks.energies import activation_module

__all__ = ["StackedLinear", "StackedMLP", "activation_module", "linear"]


class StackedLinear(nn.Module):
    """``members`` linear maps side by side: ``y_k = x_k W_k + c_k``.

    Args:
        members: number of independent maps.
        in_features: size of the last dimension of the input.
        out_features: size of the last dimension of the output.
        zero: start at the zero map.

    >>> layer = StackedLinear(5, 3, 2)
    >>> layer(torch.randn(7, 3)).shape, layer(torch.randn(4, 5, 7, 3)).shape
    (torch.Size([5, 7, 2]), torch.Size([4, 5, 7, 2]))
    """

    def __init__(
        self, members: int, in_features: int, out_features: int, *, zero: bool = False
    ) -> None:
        super().__init__()
        self.members = members
        bound = 0.0 if zero else 1.0 / math.sqrt(max(in_features, 1))
        self.weight = nn.Parameter(torch.empty(members, in_features, out_features))
        self.bias = nn.Parameter(torch.empty(members, 1, out_features))
        for parameter in (self.weight, self.bias):
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(*samples, members, n, in)`` or ``(n, in)`` to ``(*samples, members, n, out)``."""
        if x.ndim == 2:
            x = x.expand(self.members, *x.shape)
        if x.ndim == 3:
            return torch.baddbmm(self.bias, x, self.weight)
        # Members first and samples folded into rows: one product per member. The result keeps that
        # memory order under its outer shape, so the next layer folds without a copy.
        first = x.movedim(-3, 0)
        out = torch.baddbmm(self.bias, first.reshape(self.members, -1, x.shape[-1]), self.weight)
        return out.view(*first.shape[:-1], -1).movedim(0, -3)


def linear(members: int | None, before: int, after: int, *, zero: bool = False) -> Any:
    """A linear map for each member, or a plain one for ``members=None``; ``zero`` starts it at 0.

    >>> linear(None, 3, 2), linear(4, 3, 2).weight.shape
    (Linear(in_features=3, out_features=2, bias=True), torch.Size([4, 3, 2]))
    """
    if members is not None:
        return StackedLinear(members, before, after, zero=zero)
    layer = nn.Linear(before, after)
    for parameter in layer.parameters() if zero else ():
        nn.init.zeros_(parameter)
    return layer


class StackedMLP(nn.Module):
    """``members`` multilayer perceptrons; the activation follows every layer but the last.

    With ``out_features=None`` the network is a trunk: it ends with its last hidden activation.
    ``members=None`` is one network, without a dimension of members.

    >>> net = StackedMLP(2, 3, (8, 8), 1)
    >>> net(torch.randn(10, 3)).shape
    torch.Size([2, 10, 1])
    """

    def __init__(
        self,
        members: int | None,
        in_features: int,
        hidden: Sequence[int],
        out_features: int | None = None,
        *,
        activation: str = "silu",
        dropout: float = 0.0,
        zero: bool = False,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        width = in_features
        for size in hidden:
            layers += [linear(members, width, size), activation_module(activation)]
            if dropout > 0:
                layers.append(nn.Dropout(dropout))
            width = size
        if out_features is not None:
            layers.append(linear(members, width, out_features, zero=zero))
            width = out_features
        self.layers = nn.Sequential(*layers)
        self.out_features = width

    def forward(self, x: Tensor) -> Tensor:
        """Apply every member's network to its slice of ``x``."""
        return self.layers(x)
