"""The distribution of ``y`` given ``x`` on a grid, and that of a fitted ensemble.

:class:`PredictiveLaw` answers every question about one label from a grid for each input; whoever
has densities on cells can make one. :class:`PredictiveModel` makes them of an ensemble of
conditional EBMs, in standardised units:
``p(y|x) = (1 - a(x)) mean_k p_k(y|x) + a(x) r(y)``, the mixture of the members, each normalised by
quadrature, and a wide Student-t law ``r`` with weight ``a(x)``. Within the range of the training
inputs ``a`` is a small constant; outside, the members see the nearest input of that range and ``a``
grows with the distance, so that far from the data the answer is "anything", not a spike.

Panels between the landmarks of a mixture (its means and multiples of its scales) carry
Gauss-Legendre nodes, so that a component is resolved however narrow it is. Integrals over the nodes
are exact to many digits for densities that vary on the scale of the mixture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from selfnorm import functional as F
from selfnorm.conditional.model import (
    ConditionalEBM,
    conditional_bounds,
    some_pareto_k,
    weight_figures,
)
from selfnorm.distributions import MixtureLabels, ends_of_cells, interpolate, mix_log_probs
from selfnorm.evaluation import Bounds, check_coverage, crps_from_cdf

FLOOR = 1e-3  # weight of the wide law where there are data
WIDE_SCALE = 1.5  # its scale, in standard deviations of the training labels
# Landmarks of a component in units of its scale.
_LANDMARKS = (-6.0, -4.0, -2.75, -1.75, -0.9, 0.0, 0.9, 1.75, 2.75, 4.0, 6.0)
_ROWS_AT_ONCE = 20_000  # labels that go through the energies at once: what caches hold
_SOBOL_POINTS = 1024  # labels per input where quadrature is out of reach


@dataclass(frozen=True)
class PredictiveLaw:
    """Density and distribution function of one label on a grid, one distribution per input.

    A density constant on each cell and so a distribution function linear in it. Densities are with
    respect to Lebesgue measure in the units of the grid.

    Attributes:
        edges: ``(n, g + 1)`` ascending ends of the cells.
        pdf: ``(n, g)`` density of every cell.
        cdf: ``(n, g + 1)`` distribution function at the edges, from about 0 to about 1.
        mean: ``(n,)``, by quadrature.
        log_norm: ``(n,)`` log of the mass before normalisation; 0 where nobody computed it.

    >>> law = PredictiveLaw.from_cells(torch.zeros(2, 4), torch.linspace(0, 2, 5))
    >>> law.quantile(torch.tensor([0.25, 0.5]))[0], law.cdf_at(torch.tensor([0.5, 1.5]))
    (tensor([0.5000, 1.0000]), tensor([0.2500, 0.7500]))
    """

    edges: Tensor
    pdf: Tensor
    cdf: Tensor
    mean: Tensor
    log_norm: Tensor = field(default_factory=lambda: torch.zeros(()))

    @classmethod
    def from_cells(cls, log_density: Tensor, edges: Tensor) -> PredictiveLaw:
        """Normalise log-densities ``(n, g)`` of cells that lie between ``edges (g + 1,)``."""
        edges = edges.to(log_density)
        width, middle = torch.diff(edges), 0.5 * (edges[1:] + edges[:-1])
        log_norm = torch.logsumexp(log_density + width.log(), dim=1)
        pdf = (log_density - log_norm[:, None]).exp()
        mass = pdf * width
        cdf = torch.nn.functional.pad(mass.cumsum(1).clamp_max(1.0), (1, 0))
        return cls(edges.expand(len(pdf), -1), pdf, cdf, (mass * middle).sum(1), log_norm)

    @property
    def middle(self) -> Tensor:
        """``(n, g)`` midpoints of the cells."""
        return 0.5 * (self.edges[:, 1:] + self.edges[:, :-1])

    def cdf_at(self, y: Tensor) -> Tensor:
        """``F(y|x)`` at ``(n,)`` labels or at ``(n, m)``, the same shape."""
        if y.ndim == 1:
            return self.cdf_at(y[:, None])[:, 0]
        inner = interpolate(y.to(self.edges), self.edges, self.cdf)
        beyond = torch.where(y.to(self.edges) > self.edges[:, -1:], 1.0, inner)
        return torch.where(y.to(self.edges) < self.edges[:, :1], 0.0, beyond)

    def quantile(self, levels: Tensor) -> Tensor:
        """Inverse of :meth:`cdf_at` at ``(m,)`` or ``(n, m)`` levels: ``(n, m)``."""
        levels = levels.to(self.cdf).expand(len(self.cdf), -1)
        return interpolate(levels, self.cdf, self.edges)

    def sample(self, n: int) -> Tensor:
        """``(rows, n)`` labels by the inverse distribution function."""
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
        """For every input the intervals ``(k, 2)`` where the density is highest."""
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
        """``integral (F(t) - [t >= y])^2 dt`` at labels ``(n,)``, in the units of the grid."""
        return crps_from_cdf(y.to(self.cdf), self.edges, self.cdf)


def _monotone_cubic(at: Tensor, points: Tensor, values: Tensor, slopes: Tensor) -> Tensor:
    """Interpolation of a distribution function with its density as slopes."""
    (x0, x1), (v0, v1), (s0, s1) = ends_of_cells(at, points, values, slopes)
    width = (x1 - x0).clamp_min(1e-300)
    # Slopes of at most three secants keep the cubic monotone (Fritsch & Carlson 1980).
    steepest = 3 * (v1 - v0) / width
    s0, s1 = torch.minimum(s0, steepest), torch.minimum(s1, steepest)
    t = ((at - x0) / width).clamp(0.0, 1.0)
    smooth = v0 + (v1 - v0) * t * t * (3 - 2 * t)
    return smooth + width * t * (1 - t) * (s0 * (1 - t) - s1 * t)


def _member_cdf(nodes: Tensor, half: Tensor, density: Tensor) -> Tensor:
    """Distribution functions at all nodes, ``(*batch, panels * n)``, of densities there."""
    _, weights, cumulative = (t.to(nodes) for t in legendre(nodes.shape[-1]))
    panel_mass = (density * weights).sum(-1) * half
    before = panel_mass.cumsum(-1) - panel_mass
    inside = torch.einsum("...j,ij->...i", density, cumulative) * half.unsqueeze(-1)
    return (before.unsqueeze(-1) + inside).flatten(-2).clamp(0.0, 1.0).cummax(-1).values


def _wide_cdf(y: Tensor) -> Tensor:
    """Distribution function of the wide distribution: Student-t with three degrees of freedom."""
    s = y / (WIDE_SCALE * 3**0.5)
    return 0.5 + (s / (1 + s * s) + torch.atan(s)) / torch.pi


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
    own = (q.means.double() + q.scales.double() * marks).flatten(-2)
    steps = max(8, math.ceil(8.0 * frequency / math.pi))
    even = torch.linspace(-4.0, 4.0, steps + 1, dtype=torch.float64, device=own.device)
    own = torch.cat([own, q.mean.double() + q.stddev.double() * even], dim=-1)
    edges = torch.cat([own, wide.to(own).expand(*own.shape[:-1], -1)], dim=-1).sort(-1).values
    half = 0.5 * (edges[..., 1:] - edges[..., :-1])
    middle = 0.5 * (edges[..., 1:] + edges[..., :-1])
    nodes = legendre(n)[0].to(own)
    return middle.unsqueeze(-1) + half.unsqueeze(-1) * nodes, half


@dataclass(frozen=True)
class LabelGrid:
    """Whole-number labels ``first, first + step, ...``: a cell for each, as wide as the step.

    A smooth density leaves mass beyond the cells of the first and the last label that were seen. A
    share of it stays with the labels out there, each of which has a cell too; the rest belongs to
    the label at that end. All cells together hold everything, so that masses add up to one.

    Attributes:
        first, last: smallest and largest label seen.
        step: distance of neighbours.
        below, above: share of the mass beyond either end that stays beyond it.
    """

    first: float
    last: float
    step: float
    below: float = 1.0
    above: float = 1.0

    @classmethod
    def of(cls, y: np.ndarray, step: float) -> LabelGrid | None:
        """The grid that all of ``y (n,)`` lie on; ``None`` where they do not.

        >>> LabelGrid.of(np.array([2.0, 4.0, 8.0]), 2.0)
        LabelGrid(first=2.0, last=8.0, step=2.0, below=1.0, above=1.0)
        >>> LabelGrid.of(np.array([0.0, 1.0, 2.5]), 1.0) is None
        True
        """
        if not step > 0:
            return None
        place = (y - y.min()) / step
        if np.abs(place - np.round(place)).max() > 0.01:
            return None
        return cls(float(y.min()), float(y.max()), float(step))

    def with_tails(self, y: np.ndarray, beyond: tuple[float, float]) -> LabelGrid:
        """Shares by which labels that were never seen get what the rule of succession leaves them.

        ``(1 + s) / (n + 2)`` at either end of ``n`` labels ``y``, where ``s`` is 1 if the label at
        that end was seen only once; ``beyond`` is the mean mass that the distributions have there.
        """
        shares = []
        for end, mass in zip((self.first, self.last), beyond, strict=True):
            once = int((np.abs(y - end) < 0.5 * self.step).sum() == 1)
            shares.append(min(1.0, (1 + once) / (len(y) + 2) / max(mass, 1e-300)))
        return replace(self, below=shares[0], above=shares[1])

    @property
    def ends(self) -> Tensor:
        """Lower end of the first cell and upper end of the last, ``(2,)``."""
        half = 0.5 * self.step
        return torch.tensor([self.first - half, self.last + half], dtype=torch.float64)

    def nearest(self, y: Tensor) -> Tensor:
        """The labels in whose cells numbers lie."""
        return self.first + self.step * torch.round((y - self.first) / self.step)

    def whole(self, y: Tensor) -> Tensor:
        """Draws of the density as draws of the labels: those too far out go back to the end."""
        labels = self.nearest(y)
        stays = torch.rand_like(y)
        labels = torch.where((labels < self.first) & (stays >= self.below), self.first, labels)
        return torch.where((labels > self.last) & (stays >= self.above), self.last, labels)

    def log_mass(self, y: Tensor, cdf: Callable[[Tensor], Tensor]) -> Tensor:
        """Log-mass ``(*batch, n)`` of labels ``(n,)`` by distribution functions of numbers.

        ``cdf`` takes ``(n, 4)`` numbers and gives ``(*batch, n, 4)``.
        """
        label, half = self.nearest(y), 0.5 * self.step
        ends = self.ends.to(y).expand(len(y), -1)
        points = torch.cat([(label - half)[:, None], (label + half)[:, None], ends], -1)
        low, high, first, last = cdf(points).unbind(-1)
        under, over = label < self.first - half, label > self.last + half
        own = torch.where(under, self.below, torch.where(over, self.above, 1.0)) * (high - low)
        at_first, at_last = (label - self.first).abs() < half, (label - self.last).abs() < half
        tails = at_first * (1 - self.below) * first + at_last * (1 - self.above) * (1 - last)
        return (own + tails).clamp_min(1e-300).log()


class PredictiveModel:
    """Density, laws on a grid and samples of ``y`` given standardised inputs ``z (n, d_x)``.

    Args:
        model: the stacked ensemble of :func:`~selfnorm.conditional.build_ensemble`, as trained.
        low, high: range of the training inputs, ``(d_x,)``.
        label_low, label_high: range of the training labels, ``(d,)``.
    """

    def __init__(
        self,
        model: ConditionalEBM,
        low: Tensor,
        high: Tensor,
        label_low: Tensor,
        label_high: Tensor,
    ) -> None:
        self.model = model.double().eval()
        self.low, self.high = low.double(), high.double()
        self.label_low, self.label_high = label_low.double(), label_high.double()
        self.dim = len(label_low)
        waves: Any = model.label_features
        proposal: Any = model.proposal
        self.members: int = proposal.config["members"]
        steps = torch.linspace(-1.0, 2.0, 13, dtype=torch.float64, device=self.low.device)
        span = self.label_high - self.label_low
        self.landmarks = self.label_low[0] + steps * span[0]  # (L,), or (members, 1, L)
        if waves.bins is not None and self.dim == 1:  # the density has kinks at the edges
            kinks = waves.bins.edges.squeeze(-2)
            even = self.landmarks.expand(*kinks.shape[:-1], -1)
            self.landmarks = torch.cat([even, kinks], dim=-1)
        self.frequency = max([1.0, *waves.frequencies.tolist()])
        # Fewer members leave fewer nodes in the joint grid: give each of them more.
        self.nodes_per_panel = 4 if self.members >= 4 else 8 if self.members >= 2 else 12
        zero = torch.zeros((), dtype=torch.float64, device=self.low.device)
        self.wide = torch.distributions.StudentT(zero + 3.0, zero, zero + WIDE_SCALE)

    @torch.no_grad()
    def drop_energy(self) -> None:
        """Set energies and normalisers to zero: what is left are the mixture proposals."""
        model: Any = self.model
        for part in (model.energy.joint[-1], model.log_norm_net):
            for parameter in part.parameters():
                parameter.zero_()

    def parts(
        self, z: Tensor, per_row: int
    ) -> Iterator[tuple[slice, Tensor, MixtureLabels, Tensor]]:
        """Chunks of inputs: which rows, features, the members' proposals, the wide law's weight.

        The members see the nearest inputs within the training range. ``per_row``: labels for each
        input that will go through the energies.
        """
        size = max(1, _ROWS_AT_ONCE // max(1, self.members * per_row))
        for start in range(0, len(z), size):
            rows = slice(start, min(len(z), start + size))
            inside = torch.minimum(torch.maximum(z[rows], self.low), self.high)
            distance = (z[rows] - inside).square().sum(-1)
            h = self.model.features(inside)
            a = 1 - (1 - FLOOR) * torch.exp(-0.5 * distance)
            yield rows, h, self.model.law(inside, h), a

    def node_densities(self, h: Tensor, q: MixtureLabels) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Nodes, half-widths, normalised densities at the nodes and ``log Z_k`` (d = 1)."""
        nodes, half = panel_nodes(q, self.landmarks, self.nodes_per_panel, frequency=self.frequency)
        y = nodes.flatten(-2).movedim(-1, 0).unsqueeze(-1)
        values = self.model.minus_energy(h, y, q) + q.log_prob(y)
        values = values.movedim(0, -1).view_as(nodes)
        weights = legendre(self.nodes_per_panel)[1].to(nodes)
        top = values.amax((-1, -2), keepdim=True)
        density = torch.exp(values - top)
        mass = ((density * weights).sum(-1) * half).sum(-1)
        return nodes, half, density / mass[..., None, None], mass.log() + top[..., 0, 0]

    def _sobol(self, q: MixtureLabels) -> Tensor:
        """The same low-discrepancy points for every input: ``(points, K, rows, d)`` labels."""
        engine = torch.quasirandom.SobolEngine(self.dim, scramble=True, seed=1)
        u = engine.draw(_SOBOL_POINTS, dtype=torch.float64).to(q.means)
        u = u.view(-1, *[1] * len(q.batch_shape), self.dim)
        return q.from_uniforms(u.expand(-1, *q.batch_shape, -1))

    def _log_norms(self, h: Tensor, q: MixtureLabels) -> Tensor:
        """``log Z_k(x)``, ``(K, n)``: quadrature for one label, low-discrepancy points for more."""
        if self.dim == 1:
            return self.node_densities(h, q)[3]
        return F.log_mean_exp(self.model.minus_energy(h, self._sobol(q), q))

    def _at_labels(
        self, h: Tensor, q: MixtureLabels, y: Tensor, grid: LabelGrid | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """What labels ``(*samples, n, d)`` have of each member, and of the wide distribution.

        Of members ``log f_k`` before normalisation, ``(*samples, K, n)``; of the wide law its
        log-density. With a grid, of labels ``(n, 1)``, both are the mass of the label divided by
        the step, ``(K, n)`` and ``(n,)``, and the exact ``log Z_k`` is returned beside them.
        """
        if grid is None:
            here = y.unsqueeze(-3)
            log_f = self.model.minus_energy(h, here, q) + q.log_prob(here)
            return log_f, self.wide.log_prob(y).sum(-1), None
        nodes, half, density, log_z = self.node_densities(h, q)
        points, cdf, pdf = nodes.flatten(-2), _member_cdf(nodes, half, density), density.flatten(-2)

        def member_cdf(at: Tensor) -> Tensor:
            return _monotone_cubic(at.expand(*points.shape[:-1], -1), points, cdf, pdf)

        members, wide = (grid.log_mass(y[:, 0], each) for each in (member_cdf, _wide_cdf))
        return members + log_z - math.log(grid.step), wide - math.log(grid.step), log_z

    @torch.no_grad()
    def log_prob(
        self, z: Tensor, y: Tensor, *, learned: bool = False, grid: LabelGrid | None = None
    ) -> Tensor:
        """``log p(y|x)`` of ``(*samples, n, d)`` labels; ``learned`` normalises by ``b(x)``.

        With a grid (and one label for each input) the mass of the label divided by the step.
        """
        found = []
        nodes = 0 if learned and grid is None else 300
        for rows, h, q, a in self.parts(z, math.prod(y.shape[:-2]) + nodes):
            log_f, log_wide, log_z = self._at_labels(h, q, y[..., rows, :], grid)
            if learned or log_z is None:
                log_z = self.model.b(h) if learned else self._log_norms(h, q)
            members = F.log_mean_exp(log_f - log_z, dim=-2)
            found.append(mix_log_probs(members, log_wide, a))
        return torch.cat(found, dim=-1)

    @torch.no_grad()
    def log_norm_error(self, z: Tensor) -> Tensor:
        """Log of the mass under the learned normalisers, ``(n,)``: 0 where ``b`` is exact."""
        found = []
        for _, h, q, a in self.parts(z, 300):
            ratio = F.log_mean_exp(self._log_norms(h, q) - self.model.b(h))
            found.append(torch.logaddexp(ratio + torch.log1p(-a), a.log()))
        return torch.cat(found)

    @torch.no_grad()
    def over_laws(self, z: Tensor, take: Callable[[PredictiveLaw, slice], Tensor]) -> Tensor:
        """``take(law, rows)`` of chunks of the inputs, joined along the first dimension."""
        chunks = self.parts(z, self.nodes_per_panel * 80)
        return torch.cat([take(self._law(h, q, a), rows) for rows, h, q, a in chunks])

    def _law(self, h: Tensor, q: MixtureLabels, a: Tensor) -> PredictiveLaw:
        """``(1 - a) mean_k p_k + a r`` on the joint grid of all members' nodes (one label)."""
        nodes, half, density, _ = self.node_densities(h, q)
        weights = legendre(nodes.shape[-1])[1].to(nodes)
        member_cdf = _member_cdf(nodes, half, density)
        means = (density * nodes * weights * half.unsqueeze(-1)).sum((-1, -2))
        points, member_pdf = nodes.flatten(-2), density.flatten(-2)
        # Points that resolve the wide law, out to where about 1e-5 of its mass is left.
        far = torch.sinh(torch.linspace(-4.0, 4.0, 129, dtype=torch.float64)).to(points)
        grid = [*points, (self.wide.stddev * far).expand(len(a), -1)]
        edges = torch.cat(grid, dim=-1).sort(-1).values
        cdf, pdf = torch.zeros_like(edges), torch.zeros_like(edges)
        for at, own_cdf, own_pdf in zip(points, member_cdf, member_pdf, strict=True):
            cdf += _monotone_cubic(edges, at, own_cdf, own_pdf)
            reached = (edges >= at[:, :1]) & (edges <= at[:, -1:])
            pdf += interpolate(edges, at, own_pdf) * reached
        wide_cdf = _wide_cdf(edges)
        a = a.unsqueeze(-1)
        share = (1 - a) / len(points)
        cdf = (share * cdf + a * wide_cdf).clamp(0.0, 1.0).cummax(-1).values
        pdf = share * pdf + a * self.wide.log_prob(edges).exp()
        mean = (1 - a[:, 0]) * means.mean(0)
        return PredictiveLaw(edges, 0.5 * (pdf[:, 1:] + pdf[:, :-1]), cdf, mean)

    @torch.no_grad()
    def mean(self, z: Tensor) -> Tensor:
        """Mean of every label, ``(n, d)``."""
        if self.dim == 1:
            return self.over_laws(z, lambda law, _: law.mean)[:, None]
        found = []
        for _, h, q, a in self.parts(z, _SOBOL_POINTS):
            y = self._sobol(q)
            weights = torch.softmax(self.model.minus_energy(h, y, q), dim=0)
            found.append((1 - a).unsqueeze(-1) * (weights.unsqueeze(-1) * y).sum(0).mean(0))
        return torch.cat(found)

    @torch.no_grad()
    def sample(self, z: Tensor, n: int) -> Tensor:
        """``(rows, n, d)`` labels: by the inverse CDF for one label, by resampling for more."""
        if self.dim == 1:
            return self.over_laws(z, lambda law, _: law.sample(n)).unsqueeze(-1)
        candidates = max(_SOBOL_POINTS, 4 * n)
        found = []
        for _, h, q, a in self.parts(z, candidates):
            y = q.sample((candidates,))
            # Every member has the same share, whatever its Z: weights sum to one within members.
            weights = torch.softmax(self.model.minus_energy(h, y, q), dim=0)
            chance = weights.permute(2, 1, 0).flatten(1)  # (rows, K * candidates)
            pool = y.permute(2, 1, 0, 3).flatten(1, 2)  # (rows, K * candidates, d)
            chosen = torch.multinomial(chance, n, replacement=True)
            picked = pool.gather(1, chosen.unsqueeze(-1).expand(-1, -1, self.dim))
            wide = self.wide.sample((len(a), n, self.dim))
            use_wide = torch.rand(len(a), n, 1, dtype=a.dtype, device=a.device) < a[:, None, None]
            found.append(torch.where(use_wide, wide, picked))
        return torch.cat(found)

    @torch.no_grad()
    def bounds(self, z: Tensor, y: Tensor, n_samples: int, grid: LabelGrid | None = None) -> Bounds:
        """Bounds of the mean of :meth:`log_prob`: every ``Z_k`` by samples, ``b_k`` as learned.

        The density is the mixture of members, each normalised by itself, and the wide law. The
        upper bound puts estimates in the place of the ``Z_k``: their log-sum is convex in them. The
        lower bound is that of :func:`selfnorm.functional.mixture_lower`, with the shares that the
        learned ``b_k`` give: linear in the estimates.
        """
        found = []
        for rows, h, q, a in self.parts(z, n_samples):
            b = self.model.b(h)
            log_w = self.model.minus_energy(h, q.sample((n_samples,)), q)
            log_z = F.log_mean_exp(log_w)
            log_f, log_wide, _ = self._at_labels(h, q, y[rows], grid)
            log_share = torch.cat(
                [(torch.log1p(-a) - math.log(self.members)).expand_as(b), a.log()[None]]
            )
            upper = torch.cat([log_f - log_z, log_wide[None]]) + log_share
            learned = torch.cat([log_f - b, log_wide[None]]) + log_share
            gap = F.bound_gap(log_z - b)
            lower = upper - torch.cat([gap, torch.zeros_like(gap[:1])])
            at_label = self.model.minus_energy(h, y[rows].expand(self.members, -1, -1), q)
            ess, beyond, by_chance = (v.mean(0) for v in weight_figures(log_w, at_label))
            figures = [
                F.mixture_lower(lower, learned) + math.log(len(lower)),
                torch.logsumexp(upper, 0),
                log_z.mean(0),
                torch.logsumexp(learned, 0) - torch.logsumexp(upper, 0),
                ess,
                beyond,
                by_chance,
                some_pareto_k(log_w, len(z), rows.start).amax(0),
            ]
            found.append(torch.stack(figures))
        return conditional_bounds(torch.cat(found, dim=1), n_samples)
