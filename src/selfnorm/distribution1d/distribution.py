"""``p(y) = q(y) exp(-E(y)) / Z`` of one variable, normalised by quadrature, many rows at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from selfnorm.distributions import ends_of_cells, interpolate
from selfnorm.evaluation import check_coverage, crps_from_cdf


@dataclass(frozen=True)
class Distribution1d:
    """Density and distribution function of one variable on a grid, one distribution per row.

    :meth:`from_cells` takes a density that is constant on cells, :meth:`from_nodes` the values of a
    smooth one at the nodes of Gauss-Legendre panels. Densities are with respect to Lebesgue
    measure in the units of the grid.

    Attributes:
        edges: ``(n, g + 1)`` ascending ends of the cells, or nodes.
        pdf: ``(n, g)`` density of every cell, or mean density of its ends.
        cdf: ``(n, g + 1)`` distribution function at the edges, from about 0 to about 1.
        mean: ``(n,)``, by quadrature.
        log_norm: ``(n,)`` log of the mass before normalisation; 0 where it was not computed.
        density: ``(n, g + 1)`` density at the nodes of a smooth one; ``None``: constant on cells.

    Example:
        >>> flat = Distribution1d.from_cells(torch.zeros(2, 4), torch.linspace(0, 2, 5))
        >>> flat.quantile(torch.tensor([0.25, 0.5]))[0], flat.cdf_at(torch.tensor([0.5, 1.5]))
        (tensor([0.5000, 1.0000]), tensor([0.2500, 0.7500]))
    """

    edges: Tensor
    pdf: Tensor
    cdf: Tensor
    mean: Tensor
    log_norm: Tensor = field(default_factory=lambda: torch.zeros(()))
    density: Tensor | None = None

    @classmethod
    def from_cells(cls, log_density: Tensor, edges: Tensor) -> Distribution1d:
        """Normalise log-densities ``(..., g)`` of cells that lie between ``edges (g + 1,)``."""
        edges = edges.to(log_density)
        width, middle = torch.diff(edges), 0.5 * (edges[1:] + edges[:-1])
        log_norm = torch.logsumexp(log_density + width.log(), dim=-1)
        pdf = (log_density - log_norm[..., None]).exp()
        mass = pdf * width
        cdf = torch.nn.functional.pad(mass.cumsum(-1).clamp_max(1.0), (1, 0))
        edges = edges.expand(*pdf.shape[:-1], -1)
        return cls(edges, pdf, cdf, (mass * middle).sum(-1), log_norm)

    @classmethod
    def from_nodes(cls, log_density: Tensor, nodes: Tensor, half: Tensor) -> Distribution1d:
        """Normalise log-densities ``(..., panels, m)`` at the nodes of panels.

        The integral over a panel is that of the polynomial through its values.

        Args:
            log_density: at the nodes.
            nodes: ``(..., panels, m)``: those of :func:`legendre` on consecutive panels.
            half: ``(..., panels)`` half-widths of the panels.

        Example:
            >>> ends = torch.linspace(-8, 8, 17, dtype=torch.float64)
            >>> nodes = 0.5 * legendre(4)[0] + ends[:-1, None] + 0.5
            >>> half = torch.full((16,), 0.5, dtype=torch.float64)
            >>> normal = Distribution1d.from_nodes(-0.5 * nodes[None] ** 2, nodes[None], half[None])
            >>> normal.log_norm  # log sqrt(2 pi)
            tensor([0.9189], dtype=torch.float64)
        """
        _, weights, cumulative = (t.to(nodes) for t in legendre(nodes.shape[-1]))
        top = log_density.amax((-1, -2), keepdim=True)
        density = torch.exp(log_density - top)
        mass = ((density * weights).sum(-1) * half).sum(-1)
        density = density / mass[..., None, None]
        of_panel = (density * weights).sum(-1) * half
        before = of_panel.cumsum(-1) - of_panel
        inside = torch.einsum("...j,ij->...i", density, cumulative) * half.unsqueeze(-1)
        cdf = (before.unsqueeze(-1) + inside).flatten(-2).clamp(0.0, 1.0).cummax(-1).values
        mean = (density * nodes * weights * half.unsqueeze(-1)).sum((-1, -2))
        log_norm = mass.log() + top[..., 0, 0]
        return cls.of_points(nodes.flatten(-2), density.flatten(-2), cdf, mean, log_norm)

    @classmethod
    def of_points(
        cls, points: Tensor, density: Tensor, cdf: Tensor, mean: Tensor, log_norm: Tensor
    ) -> Distribution1d:
        """A smooth one by its density and distribution function ``(..., g + 1)`` at points."""
        pdf = 0.5 * (density[..., 1:] + density[..., :-1])
        return cls(points, pdf, cdf, mean, log_norm, density)

    @property
    def middle(self) -> Tensor:
        """``(n, g)`` midpoints of the cells."""
        return 0.5 * (self.edges[:, 1:] + self.edges[:, :-1])

    def pdf_at(self, y: Tensor) -> Tensor:
        """Density at ``(..., m)`` points, zero beyond the ends."""
        inside = (y >= self.edges[..., :1]) & (y <= self.edges[..., -1:])
        if self.density is not None:
            return interpolate(y, self.edges, self.density) * inside
        cell = torch.searchsorted(self.edges.contiguous(), y.contiguous(), right=True) - 1
        return self.pdf.gather(-1, cell.clamp(0, self.pdf.shape[-1] - 1)) * inside

    def cdf_at(self, y: Tensor) -> Tensor:
        """Distribution function at ``(n,)`` points or at ``(..., m)``, the same shape."""
        if y.ndim == 1:
            return self.cdf_at(y[:, None])[:, 0]
        y = y.to(self.edges)
        if self.density is not None:  # the nodes reach to where next to no mass is left
            return _monotone_cubic(y, self.edges, self.cdf, self.density)
        inner = interpolate(y, self.edges, self.cdf)
        beyond = torch.where(y > self.edges[..., -1:], 1.0, inner)
        return torch.where(y < self.edges[..., :1], 0.0, beyond)

    def quantile(self, levels: Tensor) -> Tensor:
        """Inverse of :meth:`cdf_at` at ``(m,)`` or ``(n, m)`` levels: ``(n, m)``."""
        levels = levels.to(self.cdf).expand(len(self.cdf), -1)
        return interpolate(levels, self.cdf, self.edges)

    def sample(self, n: int) -> Tensor:
        """``(rows, n)`` draws by the inverse distribution function."""
        size = (len(self.cdf), n)
        return self.quantile(torch.rand(size, dtype=self.cdf.dtype, device=self.cdf.device))

    def mode(self) -> Tensor:
        """The middle of the cell of highest density, ``(n,)``."""
        return self.middle.gather(-1, self.pdf.argmax(-1, keepdim=True)).squeeze(-1)

    def central_interval(self, coverage: float) -> Tensor:
        """``(n, 2)`` ends with equal mass on either side outside."""
        tail = 0.5 * (1 - check_coverage(coverage))
        return self.quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64))

    def shortest_interval(self, coverage: float, n_starts: int = 257) -> Tensor:
        """``(n, 2)`` ends of the shortest single interval that holds ``coverage``."""
        spare = 1 - check_coverage(coverage)
        starts = torch.linspace(0.0, spare, n_starts, dtype=torch.float64).clamp(1e-6, 1 - 1e-6)
        low = self.quantile(starts)
        high = self.quantile((starts + coverage).clamp_max(1 - 1e-6))
        best = (high - low).argmin(-1, keepdim=True)
        return torch.cat([low.gather(-1, best), high.gather(-1, best)], dim=-1)

    def highest_density_regions(self, coverage: float) -> list[np.ndarray]:
        """For every row the intervals ``(k, 2)`` where the density is highest."""
        check_coverage(coverage)
        regions = []
        mass = torch.diff(self.cdf, dim=-1)
        order = self.pdf.argsort(-1, descending=True)
        before = mass.gather(-1, order).cumsum(-1) - mass.gather(-1, order)
        kept = torch.zeros_like(mass, dtype=torch.bool).scatter(-1, order, before < coverage)
        for edges, cells in zip(self.edges.cpu().numpy(), kept.cpu().numpy(), strict=True):
            padded = np.concatenate([[False], cells, [False]])
            starts = np.flatnonzero(~padded[:-1] & padded[1:])
            ends = np.flatnonzero(padded[:-1] & ~padded[1:])
            regions.append(np.stack([edges[starts], edges[ends]], axis=-1))
        return regions

    def crps(self, y: Tensor) -> Tensor:
        """``integral (F(t) - [t >= y])^2 dt`` at ``(n,)`` points, in the units of the grid."""
        return crps_from_cdf(y.to(self.cdf), self.edges, self.cdf)


def _monotone_cubic(y: Tensor, points: Tensor, values: Tensor, slopes: Tensor) -> Tensor:
    """Interpolation of a distribution function with its density as slopes."""
    (x0, x1), (v0, v1), (s0, s1) = ends_of_cells(y, points, values, slopes)
    width = (x1 - x0).clamp_min(1e-300)
    # Slopes of at most three secants keep the cubic monotone (Fritsch & Carlson 1980).
    steepest = 3 * (v1 - v0) / width
    s0, s1 = torch.minimum(s0, steepest), torch.minimum(s1, steepest)
    t = ((y - x0) / width).clamp(0.0, 1.0)
    smooth = v0 + (v1 - v0) * t * t * (3 - 2 * t)
    return smooth + width * t * (1 - t) * (s0 * (1 - t) - s1 * t)


@lru_cache
def legendre(n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Nodes and weights of the Gauss-Legendre rule on ``[-1, 1]``, and its cumulative weights.

    Row ``i`` of the last gives the integral from -1 to node ``i`` of the polynomial through the
    values at the nodes.

    Example:
        >>> nodes, _, cumulative = legendre(4)
        >>> round(float((cumulative[3] * nodes**2).sum() - (nodes[3] ** 3 + 1) / 3), 6)
        0.0
    """
    nodes, weights = np.polynomial.legendre.leggauss(n)
    # Coefficients by the Vandermonde matrix, then the integral of every power from -1 to the node.
    powers = np.arange(1, n + 1)
    integrals = (nodes[:, None] ** powers - (-1.0) ** powers) / powers
    cumulative = integrals @ np.linalg.inv(np.vander(nodes, n, increasing=True))
    return torch.from_numpy(nodes), torch.from_numpy(weights), torch.from_numpy(cumulative)
