"""Piecewise linear features of numbers: how far a value reaches into each of its bins."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["Bins", "quantile_edges"]

_MAX_ROWS = 100_000


class Bins(nn.Module):
    r"""Features ``clamp((v - e_j) / (e_{j+1} - e_j), 0, 1)`` for the bins between edges ``e_j``.

    Bounded, and steep wherever edges lie close together: a network on top of them can jump from one
    value to the next, which it does only slowly on the value itself. Bins without width are steps.

    Args:
        edges: ``(d, bins + 1)``, ascending in every row.

    >>> Bins(torch.tensor([[0.0, 1.0, 3.0]]))(torch.tensor([[0.5], [2.0], [9.0]])).squeeze(-2)
    tensor([[0.5000, 0.0000],
            [1.0000, 0.5000],
            [1.0000, 1.0000]])
    """

    edges: Tensor

    def __init__(self, edges: Tensor) -> None:
        super().__init__()
        self.register_buffer("edges", edges)
        self.per_value = edges.shape[-1] - 1

    def forward(self, values: Tensor) -> Tensor:
        """Features ``(*batch, d, bins)`` of values ``(*batch, d)``."""
        start = self.edges[:, :-1]
        width = (self.edges[:, 1:] - start).clamp_min(1e-6)
        return ((values.unsqueeze(-1) - start) / width).clamp(0.0, 1.0)


def quantile_edges(values: Tensor, bins: int) -> Tensor:
    """Edges ``(d, bins + 1)`` that put the same number of values ``(n, d)`` into each bin.

    >>> quantile_edges(torch.arange(9.0)[:, None], 2)
    tensor([[0., 4., 8.]])
    """
    levels = torch.linspace(0.0, 1.0, bins + 1, dtype=values.dtype, device=values.device)
    step = -(-len(values) // _MAX_ROWS)  # every so many rows are enough: quantiles need a sort
    edges = torch.stack([torch.quantile(column, levels) for column in values[::step].T])
    edges[:, 0], edges[:, -1] = values.amin(0), values.amax(0)
    return edges
