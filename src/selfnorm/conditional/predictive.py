"""Predictive tables: density and distribution function of ``y`` given each ``x`` on fine grids.

Panels between the landmarks of a mixture (its means and multiples of its scales) carry
Gauss-Legendre nodes, so that a component is resolved however narrow it is. Integrals over the nodes
are exact to many digits for densities that vary on the scale of the mixture.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from selfnorm.distributions import MixtureLabels
from selfnorm.errors import DataError

__all__ = ["PredictiveTable", "interpolate_rows", "legendre", "panel_nodes"]

# Landmarks of a component in units of its scale.
_LANDMARKS = (-6.0, -4.0, -2.75, -1.75, -0.9, 0.0, 0.9, 1.75, 2.75, 4.0, 6.0)


def legendre(n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Nodes and weights of the Gauss-Legendre rule on ``[-1, 1]``, and its cumulative weights.

    Row ``i`` of the last gives the integral from -1 to node ``i`` of the polynomial through the
    values at the nodes.

    >>> nodes, weights, cumulative = legendre(4)
    >>> round(float((cumulative[3] * nodes**2).sum()), 6) == round(float(nodes[3] ** 3 + 1) / 3, 6)
    True
    """
    nodes, weights = np.polynomial.legendre.leggauss(n)
    # Coefficients by the Vandermonde matrix, then the integral of every power from -1 to the node.
    powers = np.arange(1, n + 1)
    integrals = (nodes[:, None] ** powers - (-1.0) ** powers) / powers
    cumulative = integrals @ np.linalg.inv(np.vander(nodes, n, increasing=True))
    return torch.from_numpy(nodes), torch.from_numpy(weights), torch.from_numpy(cumulative)


def panel_nodes(
    q: MixtureLabels, wide: Tensor, n: int, *, frequency: float = 4.0
) -> tuple[Tensor, Tensor]:
    """Nodes ``(*batch, panels, n)`` and half-widths ``(*batch, panels)`` for labels of dimension 1.

    ``wide`` holds further landmarks ``(L,)`` or ``(*batch, L)``, for mass far from every component.
    The density may hold waves of up to ``frequency`` in units of the mixture's deviation: none of
    them passes through more than half a period within a panel.
    """
    marks = torch.tensor(_LANDMARKS, dtype=torch.float64, device=q.means.device)
    means, scales = q.means.double(), q.scales.double()
    own = (means + scales * marks).flatten(-2)
    steps = max(8, math.ceil(8.0 * frequency / math.pi))
    even = torch.linspace(-4.0, 4.0, steps + 1, dtype=torch.float64, device=own.device)
    own = torch.cat([own, q.mean.double() + q.stddev.double() * even], dim=-1)
    edges = torch.cat([own, wide.to(own).expand(*own.shape[:-1], -1)], dim=-1).sort(-1).values
    half = 0.5 * (edges[..., 1:] - edges[..., :-1])
    middle = 0.5 * (edges[..., 1:] + edges[..., :-1])
    nodes = legendre(n)[0].to(own)
    return middle.unsqueeze(-1) + half.unsqueeze(-1) * nodes, half


def interpolate_rows(at: Tensor, points: Tensor, values: Tensor) -> Tensor:
    """Piecewise linear interpolation row by row; constant beyond the ends.

    Args:
        at: ``(*batch, m)`` where to interpolate.
        points: ``(*batch, g)`` in ascending order.
        values: ``(*batch, g)``.

    >>> points, values = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.0, 4.0]])
    >>> interpolate_rows(torch.tensor([[0.5]]), points, values)
    tensor([[2.]])
    """
    right = torch.searchsorted(points.contiguous(), at.contiguous()).clamp(1, points.shape[-1] - 1)
    x0, x1 = points.gather(-1, right - 1), points.gather(-1, right)
    v0, v1 = values.gather(-1, right - 1), values.gather(-1, right)
    share = ((at - x0) / (x1 - x0).clamp_min(1e-300)).clamp(0.0, 1.0)
    return v0 + share * (v1 - v0)


def _hermite_rows(at: Tensor, points: Tensor, values: Tensor, slopes: Tensor) -> Tensor:
    """Monotone cubic interpolation of a distribution function with its density as slopes."""
    right = torch.searchsorted(points.contiguous(), at.contiguous()).clamp(1, points.shape[-1] - 1)
    x0, x1 = points.gather(-1, right - 1), points.gather(-1, right)
    v0, v1 = values.gather(-1, right - 1), values.gather(-1, right)
    width = (x1 - x0).clamp_min(1e-300)
    secant = (v1 - v0) / width
    # Slopes of at most three secants keep the cubic monotone (Fritsch & Carlson 1980).
    s0 = torch.minimum(slopes.gather(-1, right - 1), 3 * secant)
    s1 = torch.minimum(slopes.gather(-1, right), 3 * secant)
    t = ((at - x0) / width).clamp(0.0, 1.0)
    smooth = v0 + (v1 - v0) * t * t * (3 - 2 * t)
    return smooth + width * t * (1 - t) * (s0 * (1 - t) - s1 * t)


@dataclass(frozen=True)
class PredictiveTable:
    """Density and CDF of one label on a grid per input.

    Attributes:
        y: ``(n, g)`` ascending grid points.
        pdf: ``(n, g)`` density there (with respect to Lebesgue measure).
        cdf: ``(n, g)`` distribution function, from about 0 to about 1, never falling.
        mean: ``(n,)``, by quadrature.
    """

    y: Tensor
    pdf: Tensor
    cdf: Tensor
    mean: Tensor

    @classmethod
    def combine(
        cls,
        nodes: Tensor,
        half: Tensor,
        density: Tensor,
        wide: torch.distributions.Distribution,
        wide_weight: Tensor,
    ) -> PredictiveTable:
        """The table of ``(1 - a) mean_k p_k + a r`` from the members' densities at their nodes.

        Args:
            nodes: ``(K, n, panels, m)``.
            half: ``(K, n, panels)`` half-widths of the panels.
            density: ``(K, n, panels, m)`` normalised densities.
            wide: the law ``r``.
            wide_weight: ``(n,)`` its weight ``a``.
        """
        _, weights, cumulative = (t.to(nodes) for t in legendre(nodes.shape[-1]))
        panel_mass = (density * weights).sum(-1) * half
        before = panel_mass.cumsum(-1) - panel_mass
        inside = torch.einsum("...j,ij->...i", density, cumulative) * half.unsqueeze(-1)
        cdf = (before.unsqueeze(-1) + inside).flatten(-2)
        cdf = cdf.clamp(0.0, 1.0).cummax(-1).values
        means = (density * nodes * weights * half.unsqueeze(-1)).sum((-1, -2))
        points, pdf = nodes.flatten(-2), density.flatten(-2)
        n = points.shape[1]
        grid = points.movedim(0, 1).reshape(n, -1)
        extra = _wide_points(wide).to(grid).expand(n, -1)
        grid = torch.cat([grid, extra], dim=-1).sort(-1).values
        total_cdf, total_pdf = torch.zeros_like(grid), torch.zeros_like(grid)
        for k in range(len(points)):
            total_cdf += _hermite_rows(grid, points[k], cdf[k], pdf[k])
            inside_range = (grid >= points[k][:, :1]) & (grid <= points[k][:, -1:])
            total_pdf += interpolate_rows(grid, points[k], pdf[k]) * inside_range
        a = wide_weight.to(grid).unsqueeze(-1)
        share = (1 - a) / len(points)
        total_cdf = share * total_cdf + a * _student_cdf(wide, grid)
        total_pdf = share * total_pdf + a * wide.log_prob(grid).exp()
        mean = (1 - a[:, 0]) * means.mean(0) + a[:, 0] * wide.mean.to(grid)
        return cls(grid, total_pdf, total_cdf.clamp(0.0, 1.0).cummax(-1).values, mean)

    def cdf_at(self, y: Tensor) -> Tensor:
        """``F(y|x)`` at ``(n, m)`` labels."""
        inner = interpolate_rows(y, self.y, self.cdf)
        return torch.where(y < self.y[:, :1], 0.0, torch.where(y > self.y[:, -1:], 1.0, inner))

    def quantile(self, levels: Tensor) -> Tensor:
        """Inverse of :meth:`cdf_at` at ``(m,)`` or ``(n, m)`` levels: ``(n, m)``."""
        if levels.ndim == 1:
            levels = levels.expand(len(self.y), -1)
        return interpolate_rows(levels.to(self.cdf), self.cdf, self.y)

    def mode(self) -> Tensor:
        """The grid point of highest density, ``(n,)``."""
        return self.y.gather(-1, self.pdf.argmax(-1, keepdim=True)).squeeze(-1)

    def central_interval(self, coverage: float) -> Tensor:
        """``(n, 2)`` ends with equal mass on either side outside."""
        tail = 0.5 * (1 - _check_coverage(coverage))
        return self.quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64))

    def shortest_interval(self, coverage: float, n_starts: int = 257) -> Tensor:
        """``(n, 2)`` ends of the shortest single interval that holds ``coverage``."""
        spare = 1 - _check_coverage(coverage)
        starts = torch.linspace(0.0, spare, n_starts, dtype=torch.float64).clamp(1e-6, 1 - 1e-6)
        low = self.quantile(starts)
        high = self.quantile((starts + coverage).clamp_max(1 - 1e-6))
        best = (high - low).argmin(-1, keepdim=True)
        return torch.cat([low.gather(-1, best), high.gather(-1, best)], dim=-1)

    def highest_density_regions(self, coverage: float) -> list[np.ndarray]:
        """For every input the intervals ``(k, 2)`` where the density is highest."""
        _check_coverage(coverage)
        regions = []
        mass = torch.diff(self.cdf, dim=-1)
        height = 0.5 * (self.pdf[:, 1:] + self.pdf[:, :-1])
        order = height.argsort(-1, descending=True)
        before = mass.gather(-1, order).cumsum(-1) - mass.gather(-1, order)
        kept = torch.zeros_like(mass, dtype=torch.bool).scatter(-1, order, before < coverage)
        for y, cells in zip(self.y.cpu().numpy(), kept.cpu().numpy(), strict=True):
            padded = np.concatenate([[False], cells, [False]])
            starts = np.flatnonzero(~padded[:-1] & padded[1:])
            ends = np.flatnonzero(padded[:-1] & ~padded[1:])
            regions.append(np.stack([y[starts], y[ends]], axis=-1))
        return regions

    def crps(self, y: Tensor) -> Tensor:
        """``integral (F(t) - [t >= y])^2 dt`` at labels ``(n,)``, in the table's units."""
        here = self.cdf_at(y[:, None])
        grid, order = torch.cat([self.y, y[:, None]], dim=-1).sort(-1)
        f = torch.cat([self.cdf, here], dim=-1).gather(-1, order)
        f0, f1, width = f[:, :-1], f[:, 1:], torch.diff(grid, dim=-1)
        # On a cell F is linear: the integral of its square is w (f0^2 + f0 f1 + f1^2) / 3.
        above = grid[:, :-1] >= y[:, None]
        g0, g1 = torch.where(above, 1 - f0, f0), torch.where(above, 1 - f1, f1)
        return (width * (g0 * g0 + g0 * g1 + g1 * g1) / 3).sum(-1)


def _wide_points(wide: torch.distributions.Distribution) -> Tensor:
    """Points that resolve the wide law, out to where about 1e-5 of its mass is left."""
    u = torch.linspace(-1.0, 1.0, 129, dtype=torch.float64)
    return wide.mean.double() + wide.stddev.double() * torch.sinh(4.0 * u)


def _student_cdf(wide: torch.distributions.Distribution, y: Tensor) -> Tensor:
    """CDF of a Student-t with three degrees of freedom, in closed form."""
    t = (y - wide.loc.to(y)) / wide.scale.to(y)  # type: ignore[attr-defined]
    s = t / 3**0.5
    return 0.5 + (s / (1 + s * s) + torch.atan(s)) / torch.pi


def _check_coverage(coverage: float) -> float:
    if not 0.0 < coverage < 1.0:
        raise DataError(f"coverage must lie between 0 and 1, got {coverage}")
    return coverage
