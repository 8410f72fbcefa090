"""The predictive law of a fitted ensemble, in standardised units.

``p(y|x) = (1 - a(x)) mean_k p_k(y|x) + a(x) r(y)``: the mixture of the members, each normalised by
quadrature, and a wide Student-t law ``r`` with weight ``a(x)``. Within the range of the training
inputs ``a`` is a small constant; outside, the members see the nearest input of that range and ``a``
grows with the distance, so that far from the data the answer is "anything", not a spike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from selfnorm import functional as F
from selfnorm.conditional.model import ConditionalEBM, conditional_bounds, some_pareto_k
from selfnorm.conditional.predictive import PredictiveTable, legendre, panel_nodes
from selfnorm.distributions import MixtureLabels
from selfnorm.evaluation import Bounds

__all__ = ["PredictiveModel"]

FLOOR = 1e-3  # weight of the wide law where there are data
WIDE_SCALE = 1.5  # its scale, in standard deviations of the training labels
_ROWS_AT_ONCE = 20_000  # labels that go through the energies at once: what caches hold
_SOBOL_POINTS = 1024  # labels per input where quadrature is out of reach


class PredictiveModel:
    """Density, table and samples of ``y`` given standardised inputs ``z (n, d_x)``.

    Args:
        model: the stacked ensemble, in its final state.
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
        self.members: int = model.proposal.logits.layers[-1].members  # type: ignore[union-attr,index,operator,assignment]
        zero = torch.zeros((), dtype=torch.float64, device=self.low.device)
        self.wide = torch.distributions.StudentT(zero + 3.0, zero, zero + WIDE_SCALE)
        span = self.label_high - self.label_low
        steps = torch.linspace(-1.0, 2.0, 13, dtype=torch.float64, device=self.low.device)
        self.landmarks = self.label_low[0] + steps * span[0]  # (L,), or (members, 1, L)
        bins = getattr(model.label_features, "bins", None)
        if bins is not None and self.dim == 1:  # the density has kinks at the edges
            kinks = bins.edges.squeeze(-2)
            even = self.landmarks.expand(*kinks.shape[:-1], -1)
            self.landmarks = torch.cat([even, kinks], dim=-1)
        waves = getattr(model.label_features, "frequencies", torch.zeros(0))
        self.frequency = float(waves.max()) if len(waves) else 1.0
        # Fewer members leave fewer nodes in the joint grid: give each of them more.
        self.nodes_per_panel = 4 if self.members >= 4 else 8 if self.members >= 2 else 12

        self.flat = _is_zero(model.energy)

    @torch.no_grad()
    def drop_energy(self) -> None:
        """Set energies and normalisers to zero: what is left are the mixture proposals."""
        model: Any = self.model
        for part in (model.energy.joint[-1], model.log_norm_net):
            for parameter in part.parameters():
                parameter.zero_()
        self.flat = True

    def place(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """The nearest inputs within the training range, and the wide law's weight ``(n,)``."""
        inside = torch.minimum(torch.maximum(z, self.low), self.high)
        distance = (z - inside).square().sum(-1)
        return inside, 1 - (1 - FLOOR) * torch.exp(-0.5 * distance)

    def _chunks(self, n: int, per_row: int) -> Iterator[slice]:
        size = max(1, _ROWS_AT_ONCE // max(1, self.members * per_row))
        for start in range(0, n, size):
            yield slice(start, min(n, start + size))

    def _log_density(self, h: Tensor, q: MixtureLabels, y: Tensor) -> Tensor:
        """``log p~_k`` of labels ``(*samples, K, n, d)``."""
        if self.flat:
            return q.log_prob(y)
        return self.model.minus_energy(h, y, q) + q.log_prob(y)

    def _laws(self, z: Tensor) -> tuple[Tensor, MixtureLabels]:
        h = self.model.features(z)
        return h, self.model.law(z, h)

    def _node_densities(self, h: Tensor, q: MixtureLabels) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Nodes, half-widths, normalised densities at the nodes and ``log Z_k`` (d = 1)."""
        nodes, half = panel_nodes(q, self.landmarks, self.nodes_per_panel, frequency=self.frequency)
        flat = nodes.flatten(-2)
        values = self._log_density(h, q, flat.movedim(-1, 0).unsqueeze(-1)).movedim(0, -1)
        values = values.view_as(nodes)
        weights = legendre(self.nodes_per_panel)[1].to(nodes)
        top = values.amax((-1, -2), keepdim=True)
        density = torch.exp(values - top)
        mass = ((density * weights).sum(-1) * half).sum(-1)
        log_z = mass.log() + top[..., 0, 0]
        return nodes, half, density / mass[..., None, None], log_z

    def _sobol(self, q: MixtureLabels, n: int = _SOBOL_POINTS) -> Tensor:
        """The same low-discrepancy points for every input: ``(n, K, rows, d)`` labels."""
        engine = torch.quasirandom.SobolEngine(self.dim, scramble=True, seed=1)
        u = engine.draw(n, dtype=torch.float64).to(q.means)
        u = u.view(n, *[1] * len(q.batch_shape), self.dim)
        return q.from_uniforms(u.expand(n, *q.batch_shape, self.dim))

    def _log_norms(self, h: Tensor, q: MixtureLabels) -> Tensor:
        """``log Z_k(x)``, ``(K, n)``: quadrature for one label, low-discrepancy points for more."""
        if self.dim == 1:
            return self._node_densities(h, q)[3]
        return F.log_mean_exp(self.model.minus_energy(h, self._sobol(q), q))

    def _mix(self, log_members: Tensor, y: Tensor, a: Tensor) -> Tensor:
        """Members ``(K, ...)`` and the wide law into one log-density."""
        wide = self.wide.log_prob(y).sum(-1)
        return torch.logaddexp(F.log_mean_exp(log_members) + torch.log1p(-a), wide + a.log())

    @torch.no_grad()
    def log_prob(self, z: Tensor, y: Tensor, *, learned: bool = False) -> Tensor:
        """``log p(y|x)`` of ``(*samples, n, d)`` labels; ``learned`` normalises by ``b(x)``."""
        samples = y.shape[:-2]
        per_row = math.prod(samples) + (0 if learned else 300)
        parts = []
        for rows in self._chunks(len(z), per_row):
            inside, a = self.place(z[rows])
            h, q = self._laws(inside)
            here = y[..., rows, :]
            log_z = self.model.b(h) if learned else self._log_norms(h, q)
            log_members = self._log_density(h, q, here.unsqueeze(-3)) - log_z
            parts.append(self._mix(log_members.movedim(-2, 0), here, a))
        return torch.cat(parts, dim=-1)

    @torch.no_grad()
    def log_norm_error(self, z: Tensor) -> Tensor:
        """Log of the mass under the learned normalisers, ``(n,)``: 0 where ``b`` is exact."""
        parts = []
        for rows in self._chunks(len(z), 300):
            inside, a = self.place(z[rows])
            h, q = self._laws(inside)
            ratio = F.log_mean_exp(self._log_norms(h, q) - self.model.b(h))
            parts.append(torch.logaddexp(ratio + torch.log1p(-a), a.log()))
        return torch.cat(parts)

    @torch.no_grad()
    def over_tables(self, z: Tensor, take: Callable[[PredictiveTable, slice], Tensor]) -> Tensor:
        """``take(table, rows)`` of chunks of the inputs, joined along the first dimension."""
        per_row = self.nodes_per_panel * 80
        return torch.cat(
            [take(self.table(z[rows]), rows) for rows in self._chunks(len(z), per_row)]
        )

    @torch.no_grad()
    def table(self, z: Tensor) -> PredictiveTable:
        """Density and CDF on a grid for every input (one label)."""
        inside, a = self.place(z)
        h, q = self._laws(inside)
        nodes, half, density, _ = self._node_densities(h, q)
        return PredictiveTable.combine(nodes, half, density, self.wide, a)

    @torch.no_grad()
    def moments(self, z: Tensor) -> Tensor:
        """Mean of every label, ``(n, d)``."""
        if self.dim == 1:
            return self.over_tables(z, lambda table, _: table.mean)[:, None]
        parts = []
        for rows in self._chunks(len(z), _SOBOL_POINTS):
            inside, a = self.place(z[rows])
            h, q = self._laws(inside)
            y = self._sobol(q)
            weights = torch.softmax(self.model.minus_energy(h, y, q), dim=0)
            means = (weights.unsqueeze(-1) * y).sum(0).mean(0)
            parts.append((1 - a).unsqueeze(-1) * means)
        return torch.cat(parts)

    @torch.no_grad()
    def sample(self, z: Tensor, n: int) -> Tensor:
        """``(n, rows, d)`` labels: by the inverse CDF for one label, by resampling for more."""
        if self.dim == 1:
            levels = torch.rand(len(z), n, dtype=torch.float64, device=z.device)
            drawn = self.over_tables(z, lambda table, rows: table.quantile(levels[rows]))
            return drawn.T.unsqueeze(-1)
        candidates = max(_SOBOL_POINTS, 4 * n)
        parts = []
        for rows in self._chunks(len(z), candidates):
            inside, a = self.place(z[rows])
            h, q = self._laws(inside)
            y = q.sample((candidates,))
            f = self.model.minus_energy(h, y, q)
            # Every member has the same share, whatever its Z: weights sum to one within members.
            chance = torch.softmax(f, dim=0).permute(2, 1, 0).flatten(1)  # (rows, K * candidates)
            pool = y.permute(2, 1, 0, 3).flatten(1, 2)  # (rows, K * candidates, d)
            chosen = torch.multinomial(chance, n, replacement=True)
            picked = pool.gather(1, chosen.unsqueeze(-1).expand(-1, -1, self.dim))
            wide = self.wide.sample((len(a), n, self.dim))
            use_wide = torch.rand(len(a), n, 1, dtype=a.dtype, device=a.device) < a[:, None, None]
            parts.append(torch.where(use_wide, wide, picked))
        return torch.cat(parts).movedim(0, 1)

    @torch.no_grad()
    def bounds(self, z: Tensor, y: Tensor, n_samples: int) -> Bounds:
        """Bounds of the mean log-density with the learned ``b``: the mixture's mass by sampling."""
        parts = []
        for rows in self._chunks(len(z), n_samples):
            inside, a = self.place(z[rows])
            h, q = self._laws(inside)
            b = self.model.b(h)
            log_w = self.model.minus_energy(h, q.sample((n_samples,)), q)
            here = y[rows].expand(self.members, -1, -1)
            at_label = self.model.minus_energy(h, here, q)
            log_members = at_label + q.log_prob(here) - b
            mass = F.log_mean_exp(F.log_mean_exp(log_w) - b)
            log_mass = torch.logaddexp(mass + torch.log1p(-a), a.log())
            figures = [
                self._mix(log_members, y[rows], a),
                log_mass,
                torch.zeros_like(log_mass),
                F.ess(log_w).mean(0),
                some_pareto_k(log_w, len(z), rows.start).amax(0),
                (at_label > log_w.amax(0)).double().mean(0),
            ]
            parts.append(torch.stack(figures))
        log_p, log_mass, b, ess, k, beyond = torch.cat(parts, dim=1)
        return conditional_bounds(log_p, log_mass, b, ess, k, beyond, n_samples)


def _is_zero(energy: Any) -> bool:
    """Whether a stacked energy gives zero everywhere, as it does before training."""
    return not any(bool(p.any()) for p in energy.joint[-1].parameters())
