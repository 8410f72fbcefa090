"""``p(y) = q(y) exp(-E(y)) / Z`` of one variable, by quadrature, many rows at once.

And what a regressor answers by it that has such a distribution for every input.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from selfnorm._context import on_cpu
from selfnorm.distributions import ends_of_cells, interpolate
from selfnorm.errors import DataError
from selfnorm.evaluation import check_coverage, crps_from_cdf

__all__ = ["Distribution1d", "PredictsDistributions", "legendre"]


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


class PredictsDistributions(ABC):
    """Means, quantiles, intervals, densities, scores and draws of ``p(y|x)``.

    A model says how inputs are encoded, and what the distribution of one label is for each of
    them. Labels and distributions may have a scale of their own, see :meth:`_scaled`.

    Attributes:
        flat_target_: whether the targets of the fit were ``(n,)``.
    """

    flat_target_: bool

    @property
    @abstractmethod
    def _dim(self) -> int:
        """Number of label coordinates."""

    @abstractmethod
    def _encoded(self, X: ArrayLike) -> Tensor:
        """Checked inputs as the model takes them, a row each."""

    @abstractmethod
    def _pairs(self, X: ArrayLike, y: ArrayLike) -> tuple[Tensor, Tensor]:
        """Encoded inputs and as many scaled labels ``(n, d)``."""

    @abstractmethod
    def _distributions(self, inputs: Tensor) -> Iterator[tuple[slice, Distribution1d]]:
        """Distributions of one label in chunks of the encoded inputs."""

    @abstractmethod
    def _log_density(self, inputs: Tensor, labels: Tensor, *, learned: bool = False) -> Tensor:
        """``log p(y|x)`` ``(..., n)`` of scaled labels ``(..., n, d)``, in the units of ``y``.

        ``learned`` normalises by ``b(x)``. Of labels with cells it is the mass of a label's cell
        divided by the width.
        """

    @abstractmethod
    def _mean_of_several(self, inputs: Tensor) -> Tensor:
        """Means ``(n, d)`` of several labels."""

    def _quantiles_of_several(self, inputs: Tensor, levels: Tensor) -> Tensor:  # noqa: ARG002
        """Quantiles ``(n, m, d)`` of several labels, where a model has them."""
        raise self._not_one_label("a quantile")

    def _scaled(self, y: np.ndarray) -> Tensor:
        """Labels on the scale of the distributions."""
        return torch.from_numpy(np.array(y))  # a copy: arrays may be read-only

    def _in_units(self, labels: Tensor | np.ndarray) -> np.ndarray:
        """Labels of the distributions in the units of ``y``."""
        return torch.as_tensor(labels).cpu().numpy()

    @property
    def _unit(self) -> float:
        """Units of ``y`` in one of the distributions."""
        return 1.0

    def _not_one_label(self, what: str) -> DataError:
        return DataError(
            f"{what} is for one target; for {self._dim} use log_prob, sample or predict"
        )

    def _of_distributions(
        self, inputs: Tensor, take: Callable[[Distribution1d, slice], Tensor]
    ) -> Tensor:
        """``take(distributions, rows)`` of chunks of the inputs, joined: all may not fit."""
        if self._dim != 1:
            raise self._not_one_label("this")
        return torch.cat([take(part, rows) for rows, part in self._distributions(inputs)])

    @on_cpu()
    def predict(self, X: ArrayLike) -> np.ndarray:
        """Mean of ``p(y|x)``: ``(n,)``, or ``(n, d)`` for several targets."""
        inputs = self._encoded(X)
        if self._dim == 1:
            means = self._of_distributions(inputs, lambda part, _: part.mean)[:, None]
        else:
            means = self._mean_of_several(inputs)
        values = self._in_units(means)
        return values[:, 0] if self.flat_target_ else values

    @on_cpu()
    def predict_mode(self, X: ArrayLike) -> np.ndarray:
        """The label of highest density, ``(n,)``."""
        inputs = self._encoded(X)
        return self._in_units(self._of_distributions(inputs, lambda part, _: part.mode()))

    @on_cpu()
    def predict_quantiles(self, X: ArrayLike, q: ArrayLike = (0.05, 0.5, 0.95)) -> np.ndarray:
        """Quantiles ``(n, len(q))`` at levels between 0 and 1.

        Of several image labels those of each, ``(n, len(q), d)``.
        """
        levels = torch.from_numpy(np.atleast_1d(np.asarray(q, dtype=np.float64)))
        if levels.ndim != 1 or not bool(((levels > 0) & (levels < 1)).all()):
            raise DataError(
                f"quantile levels must lie between 0 and 1, got {np.asarray(q).tolist()}"
            )
        inputs = self._encoded(X)
        if self._dim > 1:
            return self._in_units(self._quantiles_of_several(inputs, levels))
        take = self._of_distributions(inputs, lambda part, _: part.quantile(levels))
        return self._in_units(take)

    @on_cpu()
    def predict_interval(
        self, X: ArrayLike, coverage: float = 0.9, kind: str = "central"
    ) -> np.ndarray:
        """``(n, 2)`` ends of an interval that holds ``coverage`` of the mass.

        ``kind="central"`` leaves equal mass on both sides; ``"highest_density"`` is the shortest
        interval. For distributions with several modes see :meth:`highest_density_regions`.
        """
        if kind not in ("central", "highest_density"):
            raise DataError(f'kind must be "central" or "highest_density", not {kind!r}')
        tail = 0.5 * (1 - check_coverage(coverage))
        if kind == "central":
            return self.predict_quantiles(X, (tail, 1 - tail))
        inputs = self._encoded(X)
        ends = self._of_distributions(inputs, lambda part, _: part.shortest_interval(coverage))
        return self._in_units(ends)

    @on_cpu()
    def highest_density_regions(self, X: ArrayLike, coverage: float = 0.9) -> list[np.ndarray]:
        """For every input the intervals ``(k, 2)`` of highest density that hold ``coverage``."""
        regions: list[np.ndarray] = []

        def collect(part: Distribution1d, _: slice) -> Tensor:
            regions.extend(self._in_units(r) for r in part.highest_density_regions(coverage))
            return part.mean

        self._of_distributions(self._encoded(X), collect)
        return regions

    @on_cpu()
    def log_prob(self, X: ArrayLike, y: ArrayLike, method: str = "exact") -> np.ndarray:
        """``log p(y|x)`` of pairs, ``(n,)``, in the units of ``y``.

        ``method="exact"`` normalises by quadrature, ``"learned"`` by ``b(x)``, which is faster. Of
        a whole-number target of a table it is the mass of the value (the integral over its cell)
        divided by the step.
        """
        if method not in ("exact", "learned"):
            raise DataError(f'method must be "exact" or "learned", not {method!r}')
        inputs, labels = self._pairs(X, y)
        log_p = self._log_density(inputs, labels, learned=method == "learned")
        return log_p.cpu().numpy()

    @on_cpu()
    def pdf(self, X: ArrayLike, grid: ArrayLike) -> np.ndarray:
        """Density ``(n, g)`` on a grid ``(g,)`` or on one grid per row ``(n, g)``."""
        inputs = self._encoded(X)
        labels = self._scaled_grid(grid, len(inputs)).T.unsqueeze(-1)
        return self._log_density(inputs, labels).exp().cpu().numpy().T

    @on_cpu()
    def cdf(self, X: ArrayLike, grid: ArrayLike) -> np.ndarray:
        """Distribution function ``(n, g)`` on a grid ``(g,)`` or ``(n, g)``."""
        inputs = self._encoded(X)
        labels = self._scaled_grid(grid, len(inputs))
        values = self._of_distributions(inputs, lambda part, rows: part.cdf_at(labels[rows]))
        return values.cpu().numpy()

    def _scaled_grid(self, grid: ArrayLike, n: int) -> Tensor:
        """Scaled labels ``(n, g)`` of a grid ``(g,)`` or ``(n, g)``."""
        if self._dim != 1:
            raise self._not_one_label("a grid")
        values = np.asarray(grid, dtype=np.float64)
        if values.ndim == 1:
            values = np.broadcast_to(values, (n, len(values)))
        if values.ndim != 2 or len(values) != n:
            raise DataError(f"expected a grid (g,) or ({n}, g), got shape {values.shape}")
        return self._scaled(values.reshape(-1, 1)).view(values.shape)

    def pit(self, X: ArrayLike, y: ArrayLike) -> np.ndarray:
        """``F(y|x)`` of pairs, uniform for a calibrated model: ``(n,)``."""
        return self.pit_and_crps(X, y)[0]

    def crps(self, X: ArrayLike, y: ArrayLike) -> np.ndarray:
        """Continuous ranked probability score of pairs, ``(n,)``, in the units of ``y``."""
        return self.pit_and_crps(X, y)[1]

    @on_cpu()
    def pit_and_crps(self, X: ArrayLike, y: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """``F(y|x)`` and the CRPS of pairs, from one pass over the distributions."""
        inputs, labels = self._pairs(X, y)

        def both(part: Distribution1d, rows: slice) -> Tensor:
            own = labels[rows, 0]
            return torch.stack([part.cdf_at(own), part.crps(own)], dim=-1)

        pit, crps = self._of_distributions(inputs, both).cpu().numpy().T
        return pit, crps * self._unit

    def _drawn(self, inputs: Tensor, n: int) -> Tensor:
        """``(rows, n)`` draws of one label for encoded inputs, by the global random stream."""
        u = torch.rand(len(inputs), n, dtype=torch.float64, device=inputs.device)
        return self._of_distributions(inputs, lambda part, rows: part.quantile(u[rows]))

    def score(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> float:
        """Mean :meth:`log_prob` of the pairs (nats per row): higher is better."""
        weights = None if sample_weight is None else np.asarray(sample_weight, dtype=np.float64)
        return float(np.average(self.log_prob(X, y), weights=weights))
