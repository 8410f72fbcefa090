"""All one-dimensional factors of a chain at once: their energy and their learned normaliser."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu

from selfnorm.distributions import Mixture1d
from selfnorm.networks import ChainLinear

__all__ = ["FactorEnergy", "Factors"]


class Factors(NamedTuple):
    """All conditionals at a batch of rows: what the masked network says before seeing ``x_i``."""

    proposal: Mixture1d  # (R, N, dim)
    context: Tensor  # (R, N, dim, C)
    mean: Tensor  # (R, N, dim), moments of the proposal without gradient
    sd: Tensor


def _features(y: Tensor, mean: Tensor, sd: Tensor, frequencies: Tensor) -> tuple[Tensor, ...]:
    """Features; the standardised value ``u``; the slope ``d near/du`` to the power 1/3."""
    u = (y - mean) / sd
    flat = torch.rsqrt(1 + (u / 6).square())
    near = u * flat  # linear in the middle, saturates at 6
    far = torch.asinh(u).clamp(-8, 8) / 2
    waves = near.unsqueeze(-1) * frequencies
    parts = [near.unsqueeze(-1), far.unsqueeze(-1), torch.sin(waves), torch.cos(waves)]
    return torch.cat(parts, -1), u, flat


class _Features(torch.autograd.Function):
    """The features with their gradient written out: half as many kernels as autograd's."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, mean: Tensor, sd: Tensor, frequencies: Tensor) -> Tensor:
        features, u, flat = _features(y, mean, sd, frequencies)
        ctx.save_for_backward(features, u, flat, sd, frequencies)
        return features

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> Any:
        features, u, flat, sd, frequencies = ctx.saved_tensors
        n = len(frequencies)
        _, far, sines, cosines = features.split([1, 1, n, n], -1)
        g_near, g_far, g_sines, g_cosines = upstream.split([1, 1, n, n], -1)
        waves = torch.addcmul(g_sines * cosines, g_cosines, sines, value=-1)
        g_near = torch.mv(waves.flatten(0, -2), frequencies).view_as(u) + g_near.squeeze(-1)
        g_u = g_near * flat.pow(3)
        slope = torch.rsqrt(u.square().add_(1)).mul_(far.squeeze(-1).abs() < 4)
        g_y = g_u.addcmul_(g_far.squeeze(-1), slope, value=0.5).div_(sd)
        return g_y, -g_y.sum(0), -(g_y * u).sum(0), None


class FactorEnergy(nn.Module):
    r"""``-E(y, c)`` of one factor, for all factors at once, and ``b(c)``.

    The value ``y`` enters through bounded features (its place relative to the proposal, sines and
    cosines of it), so that ``E`` is bounded and every factor has a finite ``Z`` whatever its
    weights. The last layers start at zero: the model starts *at* its proposal, with ``b = 0``.
    """

    frequencies: Tensor

    def __init__(
        self, stack: int, context: int, hidden: int, blocks: int, n_frequencies: int
    ) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.logspace(-0.4, 1.5, n_frequencies))
        n_features = 2 + 2 * n_frequencies
        self.from_context = ChainLinear(stack, context, hidden)
        self.from_value = ChainLinear(stack, n_features, hidden, bias=False)
        self.layers = nn.ModuleList(ChainLinear(stack, hidden, hidden) for _ in range(2 * blocks))
        self.last = ChainLinear(stack, hidden, 1, zero=True, bias=False)
        # b is asked once per factor, the energy once per sample: its network may be wider.
        self.norm_layers = nn.ModuleList(
            [ChainLinear(stack, context, 2 * hidden), ChainLinear(stack, 2 * hidden, 2 * hidden)]
        )
        self.norm_last = ChainLinear(stack, 2 * hidden, 1, zero=True)

    def features(self, y: Tensor, mean: Tensor, sd: Tensor) -> Tensor:
        """Bounded features ``(*y.shape, F)`` of a value relative to its proposal."""
        if mean.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            found: Tensor = _Features.apply(y, mean, sd, self.frequencies)
            return found
        return _features(y, mean, sd, self.frequencies)[0]

    def log_norm(self, context: Tensor) -> Tensor:
        """``b``: ``(R, N, dim)`` from contexts ``(R, N, dim, C)``."""
        h = context.flatten(1, 2)
        for layer in self.norm_layers:
            h = silu(layer(h))
        out: Tensor = self.norm_last(h)
        return out.squeeze(-1).unflatten(1, context.shape[1:3])

    def norm_parameters(self) -> list[nn.Parameter]:
        """Those of ``b`` alone."""
        return [*self.norm_layers.parameters(), *self.norm_last.parameters()]

    def forward(self, y: Tensor, at: Factors) -> Tensor:
        """``-E`` at values ``y`` ``(S, R, N, dim)`` of the factors ``at``, same shape."""
        f = self.unbounded(self.features(y, at.mean, at.sd), at.context)
        return 20 * torch.tanh(f / 20)

    def unbounded(self, values: Tensor, context: Tensor) -> Tensor:
        """``h`` with ``-E = 20 tanh(h / 20)``, ``(S, R, N, dim)``.

        From features ``(S, R, N, dim, F)`` and contexts ``(R, N, dim, C)``.
        """
        n, dim = values.shape[2:4]
        h = self.from_value(values.transpose(0, 1).flatten(2, 3))  # (R, S, N * dim, hidden)
        h = h + self.from_context(context.flatten(1, 2)).unsqueeze(1)
        for i in range(0, len(self.layers), 2):
            h = h + self.layers[i + 1](silu(self.layers[i](silu(h))))
        f: Tensor = self.last(silu(h)).squeeze(-1)
        return f.unflatten(2, (n, dim)).transpose(0, 1)
