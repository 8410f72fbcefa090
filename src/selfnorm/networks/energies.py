"""Energies people need: small modules that map a row to one number.

An energy is anything callable on ``(n, d)`` that returns ``(n,)`` or ``(n, 1)``; these are here to
save typing. Lower energy means higher density.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

__all__ = ["MLP", "ExponentialFamily", "FourierFeatures", "activation_module"]

_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "tanh": nn.Tanh,
    "leaky_relu": lambda: nn.LeakyReLU(0.2),
}


def activation_module(name: str) -> nn.Module:
    """The activation called ``name`` as a module.

    >>> activation_module("silu")
    SiLU()
    """
    if name not in _ACTIVATIONS:
        raise ValueError(f"unknown activation {name!r}; choose one of {sorted(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]()


class FourierFeatures(nn.Module):
    r"""Random waves beside the input: ``x -> [x, sin(x B), cos(x B)]`` with ``B ~ N(0, scale^2)``.

    A plain network learns slow functions first; sharp edges and thin rings need fast ones offered.
    ``scale`` is the typical angular frequency, in units of 1 over the spread of the (standardised)
    data. ``B`` is drawn once, at construction, and never trained.

    Shapes:
        ``(n, dim) -> (n, dim + 2 n_features)``

    Example:
        >>> FourierFeatures(2, n_features=64)(torch.zeros(5, 2)).shape
        torch.Size([5, 130])
    """

    frequencies: Tensor

    def __init__(self, dim: int, n_features: int = 256, scale: float = 3.0) -> None:
        super().__init__()
        if n_features < 1 or scale <= 0:
            raise ValueError(f"need n_features >= 1 and scale > 0, got {n_features} and {scale}")
        self.dim = dim
        self.n_features = n_features
        self.scale = scale
        self.n_out = dim + 2 * n_features
        self.register_buffer("frequencies", scale * torch.randn(dim, n_features))

    def forward(self, x: Tensor) -> Tensor:
        """Append the waves to ``x``."""
        angles = x @ self.frequencies
        return torch.cat([x, angles.sin(), angles.cos()], -1)


class MLP(nn.Module):
    r"""A fully connected energy ``(n, d) -> (n,)`` with a linear output layer.

    The output has no bias: a constant in the energy is the job of ``log_norm``.

    Args:
        dim: number of input columns.
        hidden: widths of the hidden layers.
        activation: ``"silu"`` (default), ``"relu"``, ``"gelu"``, ``"tanh"``, ``"leaky_relu"``.
        features: optional :class:`FourierFeatures` in front of the first layer.
        dropout: dropout probability after each hidden activation.
        zero_init: start at energy 0 everywhere, so that the model starts *at* its base density.
        saturate: bound the input's length smoothly, ``x -> x / sqrt(1 + |x|^2 / saturate^2)``. A
            bounded input makes a bounded energy, so that ``Z`` exists under **any** base density;
            a plain network's energy falls linearly far out, which only a Gaussian base can hold.
            Use 4 to 10 for standardised data.

    Example:
        >>> energy = MLP(2, hidden=(64, 64))
        >>> energy(torch.zeros(5, 2)).shape
        torch.Size([5])
    """

    def __init__(
        self,
        dim: int,
        hidden: Sequence[int] = (128, 128, 128),
        *,
        activation: str = "silu",
        features: FourierFeatures | None = None,
        dropout: float = 0.0,
        zero_init: bool = False,
        saturate: float | None = None,
    ) -> None:
        super().__init__()
        if not hidden:
            raise ValueError("hidden must name at least one layer width, e.g. (128, 128)")
        self.dim = dim
        self.hidden = tuple(hidden)
        self.activation = activation
        self.dropout = dropout
        self.saturate = saturate
        self.features = features
        widths = [features.n_out if features is not None else dim, *hidden]
        layers: list[nn.Module] = []
        for n_in, n_out in pairwise(widths):
            layers += [nn.Linear(n_in, n_out), activation_module(activation)]
            if dropout > 0:
                layers.append(nn.Dropout(dropout))
        last = nn.Linear(widths[-1], 1, bias=False)
        if zero_init:
            nn.init.zeros_(last.weight)
        layers.append(last)
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """Energy of each row."""
        if self.saturate is not None:
            x = x * torch.rsqrt(1 + x.square().sum(-1, keepdim=True) / self.saturate**2)
        out: Tensor = self.layers(x if self.features is None else self.features(x)).squeeze(-1)
        return out


class ExponentialFamily(nn.Module):
    r"""Energy of a canonical exponential family, ``E(x) = -theta . s(x)``.

    With it SNL is jointly concave in ``(theta, b)``. The base measure is the EBM's base density,
    or the measure of the proposal (counting measure for discrete data).

    Args:
        statistics: ``(n, d) -> (n, k)`` sufficient statistics.
        n_statistics: ``k``.
        theta: initial natural parameter, zeros by default.

    Example:
        >>> energy = ExponentialFamily(lambda x: x, n_statistics=1)     # a Gaussian mean
        >>> energy(torch.ones(3, 1)).shape
        torch.Size([3])
    """

    def __init__(
        self,
        statistics: Callable[[Tensor], Tensor],
        n_statistics: int,
        theta: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.statistics = statistics
        self.theta = nn.Parameter(
            torch.zeros(n_statistics) if theta is None else theta.detach().clone()
        )
        if self.theta.shape != (n_statistics,):
            raise ValueError(
                f"theta must have shape ({n_statistics},), got {tuple(self.theta.shape)}"
            )

    def forward(self, x: Tensor) -> Tensor:
        """Energy of each row."""
        return -(self.statistics(x) @ self.theta)
