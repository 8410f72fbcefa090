"""The distribution of ``y`` given ``x`` of a fitted ensemble of conditional EBMs.

``p(y|x) = (1 - a(x)) mean_k p_k(y|x) + a(x) r(y)`` in standardised units: the mixture of the
members, each normalised by quadrature, and a wide Student-t distribution ``r`` with weight
``a(x)``. Within the range of the training inputs ``a`` is a small constant; outside, the members
see the nearest input of that range and ``a`` grows with the distance, so that far from the data the
answer is "anything", not a spike.

Panels between the landmarks of a mixture (its means and multiples of its scales) carry
Gauss-Legendre nodes, so that a component is resolved however narrow it is. Integrals over the nodes
are exact to many digits for densities that vary on the scale of the mixture.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from selfnorm import functional as F
from selfnorm._saved import saved
from selfnorm.conditional import ConditionalEBM, InputFigures, weight_checks
from selfnorm.distribution1d import Distribution1d, legendre
from selfnorm.distributions import MixtureLabels
from selfnorm.evaluation import Bounds
from selfnorm.tables._ensemble import LabelCells

FLOOR = 1e-3  # weight of the wide distribution where there are data
WIDE_SCALE = 1.5  # its scale, in standard deviations of the training labels
# Landmarks of a component in units of its scale.
_LANDMARKS = (-6.0, -4.0, -2.75, -1.75, -0.9, 0.0, 0.9, 1.75, 2.75, 4.0, 6.0)
_ROWS_AT_ONCE = 20_000  # labels that go through the energies at once: what caches hold
_SOBOL_POINTS = 1024  # labels per input where quadrature is out of reach


def _wide_cdf(y: Tensor) -> Tensor:
    """Distribution function of the wide distribution: Student-t with three degrees of freedom."""
    s = y / (WIDE_SCALE * 3**0.5)
    return 0.5 + (s / (1 + s * s) + torch.atan(s)) / torch.pi


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


@saved("model", "low", "high", "label_low", "label_high", "cells")
class PredictiveModel:
    """Density, distributions and samples of ``y`` given standardised inputs ``z (n, d_x)``.

    Args:
        model: the stacked ensemble of :func:`build_ensemble`, as trained.
        low, high: range of the training inputs, ``(d_x,)``.
        label_low, label_high: range of the training labels, ``(d,)``.
        cells: of the labels, in standardised units; ``None``: they are continuous.
    """

    def __init__(
        self,
        model: ConditionalEBM,
        low: Tensor,
        high: Tensor,
        label_low: Tensor,
        label_high: Tensor,
        *,
        cells: LabelCells | None = None,
    ) -> None:
        self.cells = cells
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
        # Fewer members leave fewer nodes in the joint grid: each of them has more.
        self.nodes_per_panel = {1: 12, 2: 8, 3: 8}.get(self.members, 4)
        zero = torch.zeros((), dtype=torch.float64, device=self.low.device)
        self.wide = torch.distributions.StudentT(zero + 3.0, zero, zero + WIDE_SCALE)
        if self.dim > 1:  # the same low-discrepancy points for every input
            engine = torch.quasirandom.SobolEngine(self.dim, scramble=True, seed=1)
            self.uniforms = engine.draw(_SOBOL_POINTS, dtype=torch.float64)

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
        """Chunks of inputs: their rows, features, proposals of the members, weight of the wide one.

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
            yield rows, h, self.model.proposal_at(inside, h), a

    def member_distributions(self, h: Tensor, q: MixtureLabels) -> Distribution1d:
        """Distributions ``(K, n)`` of one label by every member."""
        if self.cells is not None:
            y = self.cells.centres.to(q.means).view(-1, 1, 1, 1)
            log_f = self.model.minus_energy(h, y, q) + q.log_prob(y)
            return Distribution1d.from_cells(log_f.movedim(0, -1), self.cells.edges)
        nodes, half = panel_nodes(q, self.landmarks, self.nodes_per_panel, frequency=self.frequency)
        y = nodes.flatten(-2).movedim(-1, 0).unsqueeze(-1)
        log_f = self.model.minus_energy(h, y, q) + q.log_prob(y)
        return Distribution1d.from_nodes(log_f.movedim(0, -1).view_as(nodes), nodes, half)

    def _sobol(self, q: MixtureLabels) -> Tensor:
        """Low-discrepancy points ``(points, K, rows, d)``, labels by quantiles of the mixtures."""
        u = self.uniforms.to(q.means).view(-1, *[1] * len(q.batch_shape), self.dim)
        return q.from_uniforms(u.expand(-1, *q.batch_shape, -1))

    def _log_norms(self, h: Tensor, q: MixtureLabels) -> Tensor:
        """``log Z_k(x)``, ``(K, n)``: quadrature for one label, low-discrepancy points for more."""
        if self.dim == 1:
            return self.member_distributions(h, q).log_norm
        return F.log_mean_exp(self.model.minus_energy(h, self._sobol(q), q))

    def _at_labels(
        self, h: Tensor, q: MixtureLabels, y: Tensor, a: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of labels ``(*samples, n, d)``: ``log f_k``, the log-weight of the members, ``log a r``.

        ``log f_k (*samples, K, n)`` is the log-density of every member before normalisation, or
        with cells the log-mass divided by the step, as is ``log a r``, ``(*samples, n)``.
        """
        cells, weight = self.cells, torch.log1p(-a)
        if cells is None:
            log_wide = a.log() + self.wide.log_prob(y).sum(-1)
        else:
            label, half = cells.nearest(y)[..., 0], 0.5 * cells.step
            mass = _wide_cdf(label + half) - _wide_cdf(label - half)
            first, last = _wide_cdf(cells.ends.to(y))
            below, above = (label < cells.first - half).to(y), (label > cells.last + half).to(y)
            beyond = cells.below * below / first + cells.above * above / (1 - last)
            log_wide = (mass * (a + (1 - a) * beyond)).clamp_min(1e-300).log()
            log_wide = log_wide - math.log(cells.step)
            weight = weight + math.log1p(-cells.below - cells.above)
        shared = y.unsqueeze(-3)
        log_f = self.model.minus_energy(h, shared, q) + q.log_prob(shared)
        if cells is not None:
            log_f = log_f.masked_fill((below + above > 0).unsqueeze(-2), -torch.inf)
        return log_f, weight, log_wide

    @torch.no_grad()
    def log_prob(self, z: Tensor, y: Tensor, *, learned: bool = False) -> Tensor:
        """``log p(y|x)`` of ``(*samples, n, d)`` labels; ``learned`` normalises by ``b(x)``."""
        log_p = []
        for rows, h, q, a in self.parts(z, math.prod(y.shape[:-2]) + (0 if learned else 300)):
            own = y[..., rows, :]
            own = own if self.cells is None else self.cells.nearest(own)
            log_f, weight, log_wide = self._at_labels(h, q, own, a)
            log_z = self.model.b(h) if learned else self._log_norms(h, q)
            log_p.append(torch.logaddexp(F.log_mean_exp(log_f - log_z, dim=-2) + weight, log_wide))
        return torch.cat(log_p, dim=-1)

    @torch.no_grad()
    def log_norm_error(self, z: Tensor) -> Tensor:
        """Log of the mass under the learned normalisers, ``(n,)``: 0 where ``b`` is exact."""
        errors = []
        for _, h, q, a in self.parts(z, 300):
            ratio = F.log_mean_exp(self._log_norms(h, q) - self.model.b(h))
            errors.append(torch.logaddexp(ratio + torch.log1p(-a), a.log()))
        return torch.cat(errors)

    @torch.no_grad()
    def distributions(self, z: Tensor) -> Iterator[tuple[slice, Distribution1d]]:
        """``(1 - a) mean_k p_k + a r`` of one label on the joint grid of all members' nodes."""
        # Points that resolve the wide one, out to where about 1e-5 of its mass is left.
        far = self.wide.stddev * torch.linspace(-4.0, 4.0, 129, dtype=torch.float64).sinh()
        for rows, h, q, a in self.parts(z, self.nodes_per_panel * 80):
            members = self.member_distributions(h, q)
            if self.cells is not None:
                yield rows, self._of_cells(members, far, a)
                continue
            points = [*members.edges, far.to(members.edges).expand(len(a), -1)]
            edges = torch.cat(points, dim=-1).sort(-1).values
            shared = edges.expand(len(members.edges), -1, -1)
            wide = a.unsqueeze(-1)
            share = (1 - wide) / len(members.edges)
            cdf = share * members.cdf_at(shared).sum(0) + wide * _wide_cdf(edges)
            pdf = share * members.pdf_at(shared).sum(0) + wide * self.wide.log_prob(edges).exp()
            cdf = cdf.clamp(0.0, 1.0).cummax(-1).values
            mean = (1 - a) * members.mean.mean(0)
            yield rows, Distribution1d(edges, 0.5 * (pdf[:, 1:] + pdf[:, :-1]), cdf, mean)

    def _of_cells(self, members: Distribution1d, far: Tensor, a: Tensor) -> Distribution1d:
        """The same on the cells, and beyond them on the points ``far``."""
        assert self.cells is not None
        low, high = self.cells.ends.to(far)
        edges = torch.cat([far[far < low], self.cells.edges, far[far > high]]).to(members.edges)
        wide, (first, last) = _wide_cdf(edges), _wide_cdf(self.cells.ends)
        below, above = self.cells.below, self.cells.above
        tails = below * (wide / first).clamp_max(1.0) + above * ((wide - last) / (1 - last)).relu()
        inner = members.cdf_at(edges.expand(*members.edges.shape[:2], -1)).mean(0)
        a = a.unsqueeze(-1)
        cdf = (1 - a) * ((1 - below - above) * inner + tails) + a * wide
        mass = cdf.diff()
        mean = (mass * 0.5 * (edges[1:] + edges[:-1])).sum(-1)
        return Distribution1d(edges.expand(len(cdf), -1), mass / edges.diff(), cdf, mean)

    @torch.no_grad()
    def mean_of_several(self, z: Tensor) -> Tensor:
        """Means of several labels, ``(n, d)``."""
        means = []
        for _, h, q, a in self.parts(z, _SOBOL_POINTS):
            y = self._sobol(q)
            weights = torch.softmax(self.model.minus_energy(h, y, q), dim=0)
            means.append((1 - a).unsqueeze(-1) * (weights.unsqueeze(-1) * y).sum(0).mean(0))
        return torch.cat(means)

    @torch.no_grad()
    def sample_of_several(self, z: Tensor, n: int) -> Tensor:
        """``(rows, n, d)`` draws of several labels by resampling."""
        candidates = max(_SOBOL_POINTS, 4 * n)
        drawn = []
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
            drawn.append(torch.where(use_wide, wide, picked))
        return torch.cat(drawn)

    @torch.no_grad()
    def bounds(self, z: Tensor, y: Tensor, n_samples: int) -> Bounds:
        """Bounds of the mean of :meth:`log_prob`: every ``Z_k`` by samples, ``b_k`` as learned.

        The density is the mixture of members, each normalised by itself, and the wide one. The
        upper bound puts estimates in the place of the ``Z_k``: their log-sum is convex in them. The
        lower bound is that of :func:`selfnorm.functional.mixture_lower`, with the shares that the
        learned ``b_k`` give: linear in the estimates.
        """
        parts = []
        y = y if self.cells is None else self.cells.nearest(y)
        for rows, h, q, a in self.parts(z, n_samples):
            b = self.model.b(h)
            log_w = self.model.minus_energy(h, q.sample((n_samples,)), q)
            log_z = F.log_mean_exp(log_w)
            log_f, weight, log_wide = self._at_labels(h, q, y[rows], a)
            share = weight - math.log(self.members)
            upper = torch.cat([log_f - log_z + share, log_wide[None]])
            learned = torch.cat([log_f - b + share, log_wide[None]])
            gap = F.bound_gap(log_z - b)
            lower = upper - torch.cat([gap, torch.zeros_like(gap[:1])])
            at_label = self.model.minus_energy(h, y[rows].expand(self.members, -1, -1), q)
            checks = weight_checks(log_w, at_label, len(z), rows.start)
            ess, beyond, chance = (check.mean(0) for check in checks[:3])
            figures = InputFigures(
                F.mixture_lower(lower, learned) + math.log(len(lower)),
                torch.logsumexp(upper, 0),
                log_z.mean(0),
                torch.logsumexp(learned, 0) - torch.logsumexp(upper, 0),
                ess,
                beyond,
                chance,
                checks[3].amax(0),
            )
            parts.append(figures)
        return InputFigures.joined(parts).bounds(n_samples)
