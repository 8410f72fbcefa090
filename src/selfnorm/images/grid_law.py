"""Predictive laws of one label given images, by quadrature on an even grid.

Cells divide the label's step, so that a density that is constant on steps is integrated exactly,
and one that varies on the scale of a step to many digits (midpoint rule).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from selfnorm.errors import DataError
from selfnorm.images.labels import LabelSpace

__all__ = ["GridLaw", "label_grid", "log_densities"]

_CELLS_PER_STEP = 16
_CELLS_PER_RANGE = 1024  # where the labels are continuous, or have more steps than this
_ROWS_AT_ONCE = 400_000


def label_grid(space: LabelSpace, *, margin: float = 0.5, refine: int = 1) -> tuple[Tensor, float]:
    """Midpoints ``(G,)`` in the label's units and the width of their cells.

    The grid reaches ``margin`` ranges beyond the range on each side; ``refine`` divides cells.

    >>> space = LabelSpace((0.0,), (1.0,), (0.5,), (60.5,), 1.0)
    >>> grid, width = label_grid(space, margin=0.0)
    >>> len(grid), width
    (960, 0.0625)
    """
    low, high = space.grid_range()
    steps = round((high - low) / space.step) if space.step > 0 else 0
    # Prices in whole dollars: a law is not constant on each of a million steps, and refining the
    # grid finds the cells that it needs.
    n = _CELLS_PER_STEP * steps if 0 < steps <= _CELLS_PER_RANGE else _CELLS_PER_RANGE
    n *= refine
    width = (high - low) / n
    extra = round(margin * n)
    index = torch.arange(-extra, n + extra, dtype=torch.float64)
    return low + (index + 0.5) * width, width


@torch.no_grad()
def log_densities(heads: Any, h: Tensor, y: Tensor, space: LabelSpace) -> Tensor:
    """``log p~(y|x)``, ``(n, G)``, of labels ``y (G,)`` for every row of ``h``, not normalised.

    It refers to Lebesgue measure in the label's own units, which are those of ``y``.
    """
    z = space.standardise(y.to(h.device)[:, None]).to(h.dtype)
    # The labels are the same for all images: the label network sees each of them once.
    parts = [
        heads.log_unnormalized(rows, z.view(-1, 1, 1)).double().T
        for rows in h.split(max(1, _ROWS_AT_ONCE // len(z)))
    ]
    return torch.cat(parts) - space.log_scale


@dataclass(frozen=True)
class GridLaw:
    """Normalised densities of one label on an even grid, one row per image.

    Attributes:
        grid: ``(G,)`` midpoints.
        width: of a cell.
        pdf: ``(n, G)``.
        log_norm: ``(n,)`` log of the mass before normalisation.
    """

    grid: Tensor
    width: float
    pdf: Tensor
    log_norm: Tensor

    @classmethod
    def of(cls, log_density: Tensor, grid: Tensor, width: float) -> GridLaw:
        """Normalise ``(n, G)`` unnormalised log-densities."""
        log_norm = torch.logsumexp(log_density, dim=1) + math.log(width)
        return cls(grid.to(log_density), width, (log_density - log_norm[:, None]).exp(), log_norm)

    @property
    def mean(self) -> Tensor:
        """``(n,)``."""
        return (self.pdf * self.grid).sum(1) * self.width

    @property
    def cdf(self) -> Tensor:
        """``(n, G)`` distribution function at the right end of every cell."""
        return (self.pdf * self.width).cumsum(1).clamp_max(1.0)

    def cdf_at(self, y: Tensor) -> Tensor:
        """``F(y|x)`` at labels ``(n,)``; the density is taken constant within a cell."""
        at = (y.to(self.grid) - (self.grid[0] - 0.5 * self.width)) / self.width
        cell = at.floor().long().clamp(0, len(self.grid) - 1)[:, None]
        density = self.pdf.gather(1, cell)[:, 0] * self.width
        before = self.cdf.gather(1, cell)[:, 0] - density
        return (before + density * (at - cell[:, 0]).clamp(0.0, 1.0)).clamp(0.0, 1.0)

    def quantile(self, levels: Tensor) -> Tensor:
        """``(n, m)`` quantiles at levels ``(m,)`` or ``(n, m)``."""
        levels = levels.to(self.pdf)
        if levels.ndim == 1:
            levels = levels.expand(len(self.pdf), -1)
        cdf = self.cdf
        cell = torch.searchsorted(cdf, levels.contiguous()).clamp_max(len(self.grid) - 1)
        mass = self.pdf.gather(1, cell) * self.width
        before = cdf.gather(1, cell) - mass
        share = ((levels - before) / mass.clamp_min(1e-300)).clamp(0.0, 1.0)
        return self.grid[cell] + (share - 0.5) * self.width

    def central_interval(self, coverage: float) -> Tensor:
        """``(n, 2)`` ends with equal mass outside on either side."""
        if not 0.0 < coverage < 1.0:
            raise DataError(f"coverage must lie between 0 and 1, got {coverage}")
        tail = 0.5 * (1.0 - coverage)
        return self.quantile(torch.tensor([tail, 1.0 - tail], dtype=torch.float64))

    def crps(self, y: Tensor) -> Tensor:
        """``integral (F(t) - [t >= y])^2 dt`` at labels ``(n,)``, to the width of a cell."""
        above = (self.grid[None, :] >= y.to(self.grid)[:, None]).to(self.pdf)
        middle = self.cdf - 0.5 * self.pdf * self.width
        return ((middle - above) ** 2).sum(1) * self.width
