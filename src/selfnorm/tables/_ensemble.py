"""An ensemble of conditional EBMs, its members trained together in two stages.

Stage one fits a mixture density network by maximum likelihood and freezes it at its best state.
Stage two puts an energy on top, with a trunk of its own and outputs that start at zero: the model
starts *at* the proposal and SNL moves it from there. Every member holds out other rows, and keeps
its own best state.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from selfnorm import functional as F
from selfnorm._saved import saved
from selfnorm.conditional import ConditionalEBM, ConditionalTask, LabelEnergy, weighted_mean
from selfnorm.distributions import MDN, MixtureLabels, log_normal_mass, mixture_log_prob
from selfnorm.networks import StackedLinear, StackedMLP, decay_groups
from selfnorm.training import (
    Clock,
    History,
    Keeper,
    MemberSource,
    MembersTask,
    ParameterGroup,
    State,
    TrainingOptions,
    run,
)

# Slices of the proposal when a member's held-out score is computed: with many rows fewer will do.
_VALIDATION_POINTS = (64, 32)
_MANY_ROWS = 500
_MAX_QUANTILE_ROWS = 100_000
_COSINES = 4
_MAX_HELD_OUT = 2000
_PROPOSAL_SHARE = 0.5  # of the time, where energies follow
_MOST_CELLS = 1000  # all of which a normaliser sums over
_BLANKED = 0.3  # of the rows of a training step get gaps of others, where there are any


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
    """
    levels = torch.linspace(0.0, 1.0, bins + 1, dtype=values.dtype, device=values.device)
    levels = levels.expand(members or 1, values.shape[1], -1)
    if members is not None:
        moves = torch.rand(levels.shape, dtype=levels.dtype).to(levels.device) - 0.5
        levels = (levels + jitter / bins * moves).clamp(0.0, 1.0)
    step = -(-len(values) // _MAX_QUANTILE_ROWS)  # some rows are enough: quantiles need a sort
    columns = zip(values[::step].T, levels.unbind(1), strict=True)
    quantiles = [torch.quantile(column, at.flatten()).view_as(at) for column, at in columns]
    edges = torch.stack(quantiles, dim=1).unsqueeze(1)
    edges[..., 0], edges[..., -1] = values.amin(0), values.amax(0)
    return edges[0, 0] if members is None else edges


def _with_bins(
    kind: type[nn.Module], bins: list[int] | None, **arguments: list[float]
) -> nn.Module:
    """Features with ``bins`` of this shape, whose edges are to be loaded."""
    return kind(**arguments, edges=None if bins is None else torch.zeros(bins))


@saved(
    arguments=lambda waves: {
        "frequencies": waves.frequencies.tolist(),
        "bins": None if waves.bins is None else list(waves.bins.edges.shape),
    },
    build=_with_bins,
)
class LabelWaves(nn.Module):
    """Label features relative to the proposal: ``z``, cosines of its CDF, waves of ``z``.

    ``z = 3 tanh((y - mean_q) / (3 sd_q))``; ``cos(pi j F_q(y))`` for ``j = 1..4``; ``sin`` and
    ``cos`` of ``f z`` for every frequency ``f``. With ``edges (d, bins + 1)`` also how far ``y``
    itself reaches into each bin, for edges of the distribution that stay in place as ``x`` moves.
    """

    orders: Tensor
    frequencies: Tensor

    def __init__(
        self, frequencies: Sequence[float] = (1.0, 2.0, 4.0), edges: Tensor | None = None
    ) -> None:
        super().__init__()
        self.register_buffer("orders", math.pi * torch.arange(1, _COSINES + 1), persistent=False)
        self.register_buffer("frequencies", torch.tensor(list(frequencies)), persistent=False)
        self.bins = None if edges is None else Bins(edges)
        self.per_label = 1 + _COSINES + 2 * len(frequencies)
        if self.bins is not None:
            self.per_label += self.bins.per_value

    def forward(self, y: Tensor, q: MixtureLabels) -> Tensor:
        """Features ``(*samples, *batch, d * per_label)`` of labels ``(*samples, *batch, d)``."""
        # Bounded: an energy linear in y, however faintly, moves the mass of a wide component of
        # next to no weight as far as it likes, where no sample of the proposal will ever be.
        z = 3.0 * torch.tanh((y - q.mean) / (3.0 * q.stddev)).unsqueeze(-1)
        waves = z * self.frequencies
        steps = torch.cos(q.cdf(y).unsqueeze(-1) * self.orders)
        features = [z, steps, torch.sin(waves), torch.cos(waves)]
        if self.bins is not None:
            features.append(self.bins(y).expand(*z.shape[:-1], -1))  # one y may serve all members
        return torch.cat(features, dim=-1).flatten(-2)


@saved()
@dataclass(frozen=True)
class LabelCells:
    """Labels ``first, first + step, ...``: a cell for each, as wide as the step.

    The cells of the first and the last label are open: members know no label beyond them. A new
    label lies there with the probability that the rule of succession leaves it.

    Attributes:
        first, last: smallest and largest label of the training rows.
        step: distance of neighbours.
        below, above: probability of a label beyond either end.
    """

    first: float
    last: float
    step: float
    below: float = 0.0
    above: float = 0.0

    @classmethod
    def of(cls, y: np.ndarray, step: float) -> LabelCells | None:
        """The cells of ``y (n,)``; ``None`` where they lie on no grid, or on one too long.

        The probabilities are ``(1 + s) / (n + 2)``, where ``s`` is 1 if only one label is at that
        end.

        >>> LabelCells.of(np.array([2.0, 4.0, 8.0, 8.0]), 2.0)
        LabelCells(first=2.0, last=8.0, step=2.0, below=0.333..., above=0.166...)
        >>> LabelCells.of(np.array([0.0, 1.0, 2.5]), 1.0) is None
        True
        """
        if not step > 0 or np.ptp(y) > _MOST_CELLS * step:
            return None
        place = (y - y.min()) / step
        if np.abs(place - np.round(place)).max() > 0.01:
            return None
        ends = float(y.min()), float(y.max())
        counts = [int((np.abs(y - end) < 0.5 * step).sum()) for end in ends]
        return cls(*ends, float(step), *((1 + (count == 1)) / (len(y) + 2) for count in counts))

    def standardised(self, center: float, scale: float) -> LabelCells:
        """The cells of ``(y - center) / scale``."""
        first, last = (self.first - center) / scale, (self.last - center) / scale
        return replace(self, first=first, last=last, step=self.step / scale)

    @property
    def centres(self) -> Tensor:
        """All labels ``(g,)`` from the first to the last."""
        n = round((self.last - self.first) / self.step)
        return self.first + self.step * torch.arange(n + 1, dtype=torch.float64)

    @property
    def edges(self) -> Tensor:
        """``(g + 1,)`` ends of their cells."""
        return torch.cat([self.centres - 0.5 * self.step, self.ends[1:]])

    @property
    def ends(self) -> Tensor:
        """Lower end of the first cell and upper end of the last, ``(2,)``."""
        half = 0.5 * self.step
        return torch.tensor([self.first - half, self.last + half], dtype=torch.float64)

    def nearest(self, y: Tensor) -> Tensor:
        """The labels in whose cells numbers lie."""
        return self.first + self.step * torch.round((y - self.first) / self.step)


class CellMixture(MixtureLabels):
    """A mixture of Gaussians on cells: draws are labels, ``log_prob`` is ``log(mass / step)``."""

    def __init__(self, q: MixtureLabels, cells: LabelCells) -> None:
        super().__init__(q.log_weights, q.means, q.scales)
        self.cells = cells

    def log_prob(self, y: Tensor) -> Tensor:
        """Of labels ``(*samples, *batch, 1)``; shape ``(*samples, *batch)``."""
        cells, half = self.cells, 0.5 * self.cells.step
        ends = (y - half, y + half)
        low, high = (((end.unsqueeze(-2) - self.means) / self.scales) for end in ends)
        at_first, at_last = (y < cells.first + half, y > cells.last - half)
        log_mass = log_normal_mass(low, high)
        log_mass = torch.where(at_first.unsqueeze(-2), torch.special.log_ndtr(high), log_mass)
        log_mass = torch.where(at_last.unsqueeze(-2), torch.special.log_ndtr(-low), log_mass)
        return mixture_log_prob(self.log_weights, log_mass.squeeze(-1)) - math.log(cells.step)

    def from_uniforms(self, u: Tensor) -> Tensor:
        """Labels of uniforms ``(*shape, *batch, 1)``."""
        y = super().from_uniforms(u).clamp(self.cells.first, self.cells.last)
        return self.cells.nearest(y)


@saved(
    arguments=lambda mdn: {
        **{name: mdn.config[name] for name in ("context", "dim", "components", "members")},
        "cells": mdn.cells,
    }
)
class CellMDN(MDN):
    """A mixture density network for labels with cells; other arguments as those of an ``MDN``."""

    def __init__(
        self, context: int, dim: int, components: int, *, cells: LabelCells, members: int
    ) -> None:
        # Of the narrowest components two thirds are in one cell; the energy sharpens the rest.
        narrowest = 0.5 * cells.step
        super().__init__(context, dim, components, hidden=(), members=members, min_scale=narrowest)
        self.cells = cells

    def forward(self, h: Tensor) -> CellMixture:
        """The mixture for features ``(*batch, context)``."""
        return CellMixture(super().forward(h), self.cells)


@saved(arguments=lambda inputs: {"bins": list(inputs.bins.edges.shape)}, build=_with_bins)
class InputBins(nn.Module):
    """Inputs beside their bins: ``(*batch, d)`` to ``(*batch, d * (1 + bins))``."""

    def __init__(self, edges: Tensor) -> None:
        super().__init__()
        self.bins = Bins(edges)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` and how far it reaches into each bin."""
        features = self.bins(x).flatten(-2)
        return torch.cat([x.expand(*features.shape[:-1], -1), features], dim=-1)


def build_ensemble(
    n_features: int,
    dim: int,
    *,
    members: int = 5,
    components: int = 5,
    width: int = 128,
    energy_width: int = 64,
    dropout: tuple[float, float] = (0.05, 0.1),
    frequencies: Sequence[float] = (1.0, 2.0, 4.0),
    input_edges: Tensor | None = None,
    label_edges: Tensor | None = None,
    cells: LabelCells | None = None,
) -> ConditionalEBM:
    """A stacked :class:`~selfnorm.ConditionalEBM` that equals its mixture proposal at the start.

    ``input_edges (d_x, bins + 1)`` and ``label_edges (d, bins + 1)`` add piecewise linear features;
    either may hold edges for each member, ``(members, 1, d, bins + 1)``. ``cells`` are those of the
    labels.
    """
    waves = LabelWaves(frequencies, label_edges)
    layers = (energy_width, energy_width)
    energy = LabelEnergy(width, waves.per_label * dim, hidden=layers, members=members, zero=True)
    proposal = MDN(width, dim, components, hidden=(), members=members)
    if cells is not None:
        proposal = CellMDN(width, dim, components, cells=cells, members=members)
    return ConditionalEBM(
        energy,
        proposal,
        features=_trunk(members, n_features, width, dropout[1], input_edges),
        proposal_features=_trunk(members, n_features, width, dropout[0], input_edges),
        log_norm=StackedLinear(members, width, 1, zero=True),
        base="proposal",
        label_features=waves,
    )


def _trunk(
    members: int, n_features: int, width: int, dropout: float, edges: Tensor | None
) -> nn.Module:
    if edges is None:
        return StackedMLP(members, n_features, (width, width), dropout=dropout)
    inner = StackedMLP(members, n_features * edges.shape[-1], (width, width), dropout=dropout)
    return nn.Sequential(InputBins(edges), inner)


class _JitteredRows(MemberSource):
    """Rows of members; labels get uniform noise of width ``jitter (d,)`` when they are taken."""

    def __init__(self, tables: tuple[Tensor, ...], rows: Tensor, jitter: Tensor) -> None:
        super().__init__(tables, rows)
        self.jitter = jitter
        self._noisy = bool((jitter > 0).any())

    def take(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Inputs ``(K, B, d_x)``, labels and weights at places ``(B,)`` of the members' lists."""
        x, y, *weight = super().take(rows)
        x = self.varied(x)
        if self._noisy:
            y = y + self.jitter * (torch.rand_like(y) - 0.5)
        return (x, y, *weight)

    def varied(self, x: Tensor) -> Tensor:
        """Inputs as a step sees them: as they are."""
        return x

    def preview(self, device: torch.device) -> tuple[Tensor, ...]:
        """All rows of every member."""
        return self.take(torch.arange(len(self), device=device))


class MemberRows(_JitteredRows):
    """The rows that members train on, and beside them those that they hold out.

    No two members hold out the same rows unless the shares overlap, and each goes through its rows
    in an order of its own: batches differ between members.

    Args:
        x, y, weight: ``(n, d_x)``, ``(n, d)`` and ``(n,)``.
        members: their number.
        fraction: share of the rows that a member holds out.
        jitter: labels get uniform noise of this width ``(d,)`` afresh at every step (0: none).
        input_noise: deviation of normal noise on the inputs at every training step (0: none).
        blank: which cells of ``x`` stand for a gap ``(n, d_x)``, and what stands there ``(d_x,)``.
            At a training step a share of the rows gets the gaps of others besides its own, so
            that what is learned of rows with gaps is not what a few of them happen to be.

    Attributes:
        held_out: a source of the rows that members hold out.
    """

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        weight: Tensor | None = None,
        *,
        members: int,
        fraction: float,
        jitter: Tensor | float = 0.0,
        input_noise: float = 0.0,
        blank: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self.x, self.y, self.blank, self.input_noise = x, y, blank, input_noise
        if blank is not None:
            self.patterns = blank[0][blank[0].any(1)]
        n = len(x)
        size = min(max(1, round(fraction * n)), _MAX_HELD_OUT)
        order = torch.randperm(n)
        turned = [torch.roll(order, -member * size) for member in range(members)]
        train = [rows[size:][torch.randperm(n - size)] for rows in turned]
        tables = (x, y) if weight is None else (x, y, weight)
        width = torch.as_tensor(jitter, dtype=y.dtype, device=y.device)
        super().__init__(tables, torch.stack(train, dim=1).to(x.device), width)
        held_out = torch.stack([rows[:size] for rows in turned], dim=1).to(x.device)
        self.held_out = _JitteredRows(tables, held_out, width)

    def varied(self, x: Tensor) -> Tensor:
        """Inputs with noise, and with gaps of other rows."""
        if self.input_noise > 0:
            x = x + self.input_noise * torch.randn_like(x)
        if self.blank is not None:
            others = torch.rand(2, *x.shape[:2], device=x.device)
            gaps = self.patterns[(others[0] * len(self.patterns)).long()]
            x = torch.where(gaps & (others[1] < _BLANKED).unsqueeze(-1), self.blank[1], x)
        return x

    def preview(self, device: torch.device) -> tuple[Tensor, ...]:  # noqa: ARG002
        """The tables."""
        return self.tensors


class _MemberTask(MembersTask):
    """A loss averaged over members; each member keeps the best state of its own."""

    module: ConditionalEBM
    capturable = True

    def __init__(self, model: ConditionalEBM, rows: MemberRows, *parts: nn.Module | None) -> None:
        self.module, self.rows = model, rows
        self.named = [pair for part in parts if part for pair in part.named_parameters()]
        self.trained = {str(k): p.detach() for k, (_, p) in enumerate(self.named)}

    def parameter_groups(self) -> list[ParameterGroup]:
        """Matrices with weight decay, biases without."""
        return decay_groups(self.named)

    def start(self, data: tuple[Tensor, ...]) -> None:
        """The untrained state counts too: a member that never improves on it keeps it."""
        self.module.eval()
        with torch.no_grad():
            scores = self.member_scores(*self.rows.held_out.preview(data[0].device))
        self.keeper = Keeper(scores, self.trained)

    def validate(self, data: tuple[Tensor, ...]) -> dict[str, float]:
        """Keep every member that got better; the score is the mean of the bests so far."""
        scores = self.member_scores(*data)
        self.keeper.offer(scores, self.trained)
        return {"score": float(self.keeper.score.mean()), "lower": float(scores.mean())}

    @torch.no_grad()
    def finish(self, data: tuple[Tensor, ...]) -> dict[str, float]:  # noqa: ARG002
        """Put every member's best state in place."""
        for name, best in (self.keeper.state or {}).items():
            self.trained[name].copy_(best)
        return {f"member_{k}": float(score) for k, score in enumerate(self.keeper.score)}

    def settings(self) -> State:
        """The stage."""
        return {"stage": type(self).__name__}

    @abstractmethod
    def member_scores(self, x: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        """Score of every member on its held-out rows; higher is better."""


class _ProposalStage(_MemberTask):
    """Maximum likelihood for the mixture density networks."""

    def __init__(self, model: ConditionalEBM, rows: MemberRows) -> None:
        super().__init__(model, rows, model.proposal_features, model.proposal)

    def _log_q(self, x: Tensor, y: Tensor) -> Tensor:
        return self.module.proposal_at(x, x).log_prob(y)

    def loss(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:
        x, y, *weight = batch
        log_q = self._log_q(x, y)
        value = (log_q * weight[0]).mean() if weight else log_q.mean()
        return -value, {"lower": value.detach()}

    def member_scores(self, x: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        return weighted_mean(self._log_q(x, y), weight)


class _EnergyStage(_MemberTask):
    """SNL for energies and ``b``, the proposals frozen."""

    def __init__(self, model: ConditionalEBM, rows: MemberRows, n_samples: int) -> None:
        super().__init__(model, rows, model.features, model.energy, model.log_norm_net)
        self.inner = ConditionalTask(model, objective="snl", n_samples=n_samples)

    def loss(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:
        return self.inner.loss(batch)

    def member_scores(self, x: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        """``l_IS`` of each member, ``Z`` from a deterministic rule on slices of its proposal."""
        return weighted_mean(_log_densities(self.module, x, y)[1], weight)


def _log_densities(model: ConditionalEBM, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """``log q`` and ``log p`` ``(members, n)`` of labels by every member."""
    parts = []
    points = _VALIDATION_POINTS[x.shape[1] > _MANY_ROWS]
    for part in torch.arange(x.shape[1], device=x.device).split(1000):
        h = model.features(x[:, part])
        q = model.proposal_at(x[:, part], h)
        labels = y[:, part]
        samples = q.midpoints(points) if y.shape[-1] == 1 else q.sample((points,))
        f = model.minus_energy(h, torch.cat([labels.unsqueeze(0), samples]), q)
        log_q = q.log_prob(labels)
        parts.append((log_q, log_q + f[0] - F.log_mean_exp(f[1:])))
    log_q, log_p = (torch.cat(columns, dim=1) for columns in zip(*parts, strict=True))
    return log_q, log_p


@torch.no_grad()
def unseen_scores(
    model: ConditionalEBM, rows: MemberRows, most: int
) -> tuple[Tensor, Tensor, Tensor]:
    """``log q``, ``log p`` and weights ``(members, n)`` of rows that a member has held out."""
    x, y, *weight = rows.held_out.take(
        torch.arange(len(rows.held_out), device=rows.x.device)[:most]
    )
    log_q, log_p = _log_densities(model.eval(), x, y)
    return log_q, log_p, weight[0] if weight else torch.ones_like(log_q)


@torch.no_grad()
def likelier_unmarked(model: ConditionalEBM, rows: MemberRows, unmarked: Tensor) -> bool:
    """Whether rows not seen that have gaps are as likely with ``unmarked`` as last input.

    But for one standard error: such rows are few, and the states were chosen with marks.
    """
    assert rows.blank is not None
    marked = rows.blank[0].any(1)[rows.held_out.rows]
    if not marked.any():
        return True
    x, y, *weight = rows.held_out.take(marked.any(1).nonzero().squeeze(1))
    counts = marked[marked.any(1)].T * (weight[0] if weight else 1.0)
    bare = torch.cat([x[..., :-1], unmarked.expand_as(x[..., -1:])], -1)
    gain = (_log_densities(model.eval(), bare, y)[1] - _log_densities(model, x, y)[1]) * counts
    return bool(gain.sum() >= -gain.square().sum().sqrt())


def train_ensemble(
    model: ConditionalEBM,
    rows: MemberRows,
    stages: Sequence[TrainingOptions],
    *,
    n_samples: int,
    clock: Clock,
    closing: float = 0.0,
) -> list[History]:
    """Train the proposals, then the energies, one after the other.

    Args:
        model: of :func:`build_ensemble`.
        rows: of its members.
        stages: options of either; those of the proposals alone leave the mixtures.
        n_samples: labels drawn per row and step of the energies.
        clock: the time of the fit; the energies have what the proposals have left,
        closing: but for so many seconds, which are left to what follows.
    """
    assert isinstance(model.proposal, MDN)
    model.proposal.place(rows.y)
    of_proposals, *of_energies = stages
    stage: _MemberTask = _ProposalStage(model, rows)
    share = _PROPOSAL_SHARE if of_energies else 1.0
    options = replace(of_proposals, **clock.run_for(share, closing))
    first = run(stage, rows, val_data=rows.held_out, options=options)
    model.freeze_proposal()
    # a user who has stopped the first stage does not want the second one
    if not of_energies or first.stopped == "interrupted":
        return [first]
    stage = _EnergyStage(model, rows, n_samples)
    options = replace(of_energies[0], **clock.run_for(1.0, closing))
    if options.checkpoint is not None:  # beside that of the proposals which the energies stand on
        options = replace(options, checkpoint=f"{options.checkpoint}.energy{first.n_steps}")
    return [first, run(stage, rows, val_data=rows.held_out, options=options)]
