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
        edges: ``(d, bins + 1)``, ascending in every row; ``(members, 1, d, bins + 1)`` gives every
            member of an ensemble edges of its own.

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
        """Features ``(*batch, d, bins)`` of values ``(*batch, d)``.

        With edges for each member the batch is ``(*samples, members, n)``, or broadcasts to it.
        """
        start = self.edges[..., :-1]
        width = (self.edges[..., 1:] - start).clamp_min(1e-6)
        return ((values.unsqueeze(-1) - start) / width).clamp(0.0, 1.0)


def quantile_edges(
    values: Tensor, bins: int, *, members: int | None = None, jitter: float = 0.0
) -> Tensor:
    """Edges ``(d, bins + 1)`` that put the same number of values ``(n, d)`` into each bin.

    With ``members`` every member gets edges of its own, ``(members, 1, d, bins + 1)``: the inner
    quantile levels are moved by uniform noise, ``jitter = 1`` moving each by up to half a bin
    either way. An average over members is then smoother than the bins of any of them.

    >>> quantile_edges(torch.arange(9.0)[:, None], 2)
    tensor([[0., 4., 8.]])
    >>> quantile_edges(torch.arange(9.0)[:, None], 2, members=3, jitter=1.0).shape
    torch.Size([3, 1, 1, 3])
    """
    levels = torch.linspace(0.0, 1.0, bins + 1, dtype=values.dtype, device=values.device)
    step = -(-len(values) // _MAX_ROWS)  # every so many rows are enough: quantiles need a sort
    columns = values[::step].T
    if members is None:
        edges = torch.stack([torch.quantile(column, levels) for column in columns])
    else:
        moves = torch.rand(members, len(columns), bins + 1, dtype=levels.dtype) - 0.5
        own = (levels + jitter / bins * moves.to(levels.device)).clamp(0.0, 1.0)
        by_column = zip(columns, own.unbind(1), strict=True)
        edges = torch.stack([_quantiles(column, wanted) for column, wanted in by_column], dim=1)
        edges = edges.unsqueeze(1)
    edges[..., 0], edges[..., -1] = values.amin(0), values.amax(0)
    return edges


def _quantiles(column: Tensor, levels: Tensor) -> Tensor:
    """Quantiles of one column at ``(members, bins + 1)`` levels."""
    return torch.quantile(column, levels.flatten()).view_as(levels)
