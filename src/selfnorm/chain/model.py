"""Chains of one-dimensional EBMs: their factors, what all chains share, chains over numbers."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, hardtanh, silu

from selfnorm._context import SeedLike, seeded
from selfnorm._inputs import as_rows
from selfnorm._saved import saved
from selfnorm.chain import bounds as evaluation
from selfnorm.chain.lines import LinePrediction
from selfnorm.chain.task import AutoregressiveTask, polished
from selfnorm.columns import Columns, log_cell_mass
from selfnorm.distributions import Mixture1d
from selfnorm.errors import DataError
from selfnorm.functional import log_mean_exp
from selfnorm.networks import ChainLinear, ResMADE, decay_groups, draw_orderings
from selfnorm.training import ParameterGroup

# Places (rows x columns x nodes x orderings) handled at once outside training. On a CPU few, which
# stay in its cache: scores are quicker by a half than with 2**20.
PLACES_AT_ONCE = {"cpu": 2**16, "cuda": 2**21}

# A mixture component may start this narrow, in units of its column's scale: the step of the finest
# grid that counts as one, a tenth of the interval that a repeated value stands for.
NARROWEST_START = 1e-3
N_FREQUENCIES = 8  # of the waves by which an energy sees a value


class Factors(NamedTuple):
    """All conditionals at a batch of rows: what the masked network says before seeing ``x_i``."""

    proposal: Mixture1d  # (R, N, dim)
    context: Tensor  # (R, N, dim, C)
    mean: Tensor  # (R, N, dim), where the energy has its zero and its unit
    inverse_sd: Tensor
    active: Tensor | None = None  # (R, N, dim) of bool: where a row has a number; None: everywhere
    log_z: Tensor | None = None  # (R, N, dim) where it was computed already, else None

    def at(self, *index: Tensor | slice) -> Factors:
        """Those of some rows, ``at(slice(None), rows)``, or of some columns after these."""
        tensors: Any = (None if tensor is None else tensor[index] for tensor in self[1:])
        return Factors(self.proposal.at(*index), *tensors)

    def standardised(self) -> Factors:
        """The same in single precision, where the energies have their zero and their unit."""
        shift = -self.mean * self.inverse_sd
        proposal = self.proposal.moved(shift, self.inverse_sd).to(torch.float32)
        zero = torch.zeros_like(shift, dtype=torch.float32)
        return Factors(proposal, self.context.float(), zero, zero + 1, self.active)


class RowTerms(NamedTuple):
    """The terms of the log-density of ``n`` rows in each of ``R`` orders.

    Args:
        factors: the conditionals of the numbers at these rows.
        log_q: ``(R, n, p)`` log-density by the proposals, of all parts.
        minus_energy: ``(R, n, D)`` ``-E`` at the numbers of the rows.
        log_w: ``(S, R, n, D)`` ``-E`` at samples of the proposals: their log-weights.
        log_det: ``(n,)`` log-determinant of the columns' scales.
    """

    factors: Factors
    log_q: Tensor
    minus_energy: Tensor
    log_w: Tensor
    log_det: Tensor

    def log_prob(self, log_norm: Tensor) -> Tensor:
        """``(R, n)``: log-density of the rows with normalisers ``(R, n, D)`` of the numbers."""
        log_tilt = (self.minus_energy - log_norm).sum(-1)
        return self.log_q.sum(-1) + self.log_det + log_tilt


class FactorEnergy(nn.Module):
    r"""``-E(y, c)`` of one factor, for all factors at once, and ``b(c)``.

    The value ``y`` enters through bounded features (its place relative to the proposal, sines and
    cosines of it), so that ``E`` is bounded and every factor has a finite ``Z`` whatever its
    weights. The last layers start at zero: the model starts *at* its proposal, with ``b = 0``.
    """

    frequencies: Tensor
    phases: Tensor

    def __init__(self, stack: int, context: int, hidden: int, blocks: int) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.logspace(-0.4, 1.5, N_FREQUENCIES))
        quarter = torch.tensor([0.0, math.pi / 2]).repeat_interleave(N_FREQUENCIES)
        self.register_buffer("phases", quarter, persistent=False)
        n_features = 2 + 2 * N_FREQUENCIES
        self.from_context = ChainLinear(stack, context, hidden)
        self.from_value = ChainLinear(stack, n_features, hidden, bias=False)
        self.layers = nn.ModuleList(ChainLinear(stack, hidden, hidden) for _ in range(2 * blocks))
        self.last = ChainLinear(stack, hidden, 1, zero=True, bias=False)
        # b is asked once per factor, the energy once per sample: its network may be wider.
        self.norm_layers = nn.ModuleList(
            [ChainLinear(stack, context, 2 * hidden), ChainLinear(stack, 2 * hidden, 2 * hidden)]
        )
        self.norm_last = ChainLinear(stack, 2 * hidden, 1, zero=True)

    def features(self, y: Tensor, at: Factors) -> Tensor:
        """Bounded features ``(R, S, N, dim, F)`` of values relative to their proposals."""
        u = (y.transpose(0, 1) - at.mean.unsqueeze(1)) * at.inverse_sd.unsqueeze(1)
        near = 6 * torch.sin(torch.atan(u / 6))  # linear in the middle, saturates at 6
        far = hardtanh(torch.asinh(u), -8.0, 8.0) / 2
        # a cosine is a sine a quarter later
        phases, frequencies = self.phases.to(u), self.frequencies.to(u).repeat(2)
        if u.is_cuda:  # where a product of matrices may be told to keep ten bits
            angles = torch.addcmul(phases, near.unsqueeze(-1), frequencies)
        else:
            angles = torch.addmm(phases, near.reshape(-1, 1), frequencies[None])
            angles = angles.unflatten(0, u.shape)
        return torch.cat([near.unsqueeze(-1), far.unsqueeze(-1), torch.sin(angles)], -1)

    def forward(self, y: Tensor, at: Factors) -> Tensor:
        """``-E`` at values ``y`` ``(S, R, N, dim)`` of the factors ``at``, same shape."""
        values = self.features(y, at).flatten(2, 3)  # (R, S, N * dim, F)
        h = self.from_value(values) + self.from_context(at.context.flatten(1, 2)).unsqueeze(1)
        for i in range(0, len(self.layers), 2):
            h = h + self.layers[i + 1](silu(self.layers[i](silu(h))))
        f: Tensor = 20 * torch.tanh(self.last(silu(h)).squeeze(-1) / 20)
        return f.unflatten(2, y.shape[2:]).transpose(0, 1)

    def log_norm(self, context: Tensor) -> Tensor:
        """``b``: ``(R, N, dim)`` from contexts ``(R, N, dim, C)``."""
        h = context.flatten(1, 2)
        for layer in self.norm_layers:
            h = silu(layer(h))
        out: Tensor = self.norm_last(h)
        return out.squeeze(-1).unflatten(1, context.shape[1:3])


def orderings_of(orderings: int | Sequence[Sequence[int]], dim: int) -> Tensor:
    """Ranks ``(R, dim)``, drawn or as they are given."""
    if isinstance(orderings, int | Integral):
        if int(orderings) < 1:
            raise DataError(f"orderings must be at least 1, not {orderings}")
        return draw_orderings(dim, int(orderings))
    ranks = torch.tensor([list(r) for r in orderings])
    if ranks.shape[1:] != (dim,) or (ranks.sort(1).values != torch.arange(1, dim + 1)).any():
        raise ValueError(f"each ordering must be a permutation of 1..{dim}")
    return ranks


def chosen(y: Tensor, log_w: Tensor) -> Tensor:
    """``(R, N)``: one of candidates ``(S, R, N, 1)`` by their weights."""
    weights = torch.softmax(log_w, 0).flatten(1).T
    pick = torch.multinomial(weights, 1).T.reshape(1, *y.shape[1:])
    return torch.gather(y, 0, pick)[0, ..., 0]


def outputs_at(head: ChainLinear, features: Tensor, index: Tensor) -> Tensor:
    """``(R, N, K)``: the outputs ``index (R, K)`` of a head, others in each order."""
    assert head.bias is not None
    order = torch.arange(len(index), device=index.device).unsqueeze(1)
    weight, bias = head.weight[order, index], head.bias[order, index]
    if head.mask is not None:
        weight = weight * head.mask[order, index]
    return torch.baddbmm(bias.unsqueeze(1), features, weight.transpose(1, 2))


class Chain(nn.Module, ABC):
    """What chains of one-dimensional EBMs share: factors of numbers, training, bounds."""

    trunk: ResMADE
    energy: FactorEnergy
    mixture_head: ChainLinear
    context_head: ChainLinear
    dim: int
    context_drop: float = 0.0
    has_cells = False  # of numbers that are integrated over a cell
    rows_at_once: int | None = None  # of :meth:`chunks`, whatever fits a cache where ``None``

    @property
    def n_orderings(self) -> int:
        """Number of chains mixed."""
        return self.trunk.ranks.shape[0]

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.trunk.ranks.device

    def _make_number_heads(
        self,
        columns: Sequence[int],
        *,
        components: int,
        family: str,
        context: int,
        energy_hidden: int,
        energy_blocks: int,
    ) -> None:
        """Heads of the mixture proposals and contexts of ``columns``, and their energy."""
        self.n_components, self.n_context, self.family = components + 1, context, family
        numbers = set(columns)
        self.n_numbers = len(numbers)
        counts = [int(j in numbers) for j in range(self.dim)]
        self.mixture_head = self.trunk.head([3 * self.n_components * count for count in counts])
        self.context_head = self.trunk.head([context * count for count in counts])
        with torch.no_grad():
            self.mixture_head.weight.mul_(0.2)
        described = context + 3 * self.n_components
        self.energy = FactorEnergy(self.n_orderings, described, energy_hidden, energy_blocks)

    @torch.no_grad()
    def _start_numbers_at(
        self, knots: Tensor, head: ChainLinear | None = None, components: int = 0
    ) -> None:
        """Place the components of every proposal on the quantiles ``knots (..., dim, Q)``.

        ``head`` and ``components``: those of other mixtures than the numbers'.
        """
        k = (components or self.n_components) - 1
        place = torch.linspace(0, knots.shape[-1] - 1, 2 * k + 1, device=knots.device)
        low = place.floor().long().clamp_max(knots.shape[-1] - 2)
        q = knots[..., low] + (place - low) * (knots[..., low + 1] - knots[..., low])
        loc = torch.cat([q[..., 1::2], knots.median(-1, keepdim=True).values], -1)
        width = ((q[..., 2::2] - q[..., :-2:2]) / 2).clamp_min(NARROWEST_START)
        log_scale = torch.cat([width.log(), torch.zeros_like(loc[..., :1])], -1)
        logits = torch.zeros_like(loc)
        logits[..., -1] = math.log(0.02 * k)
        bias = torch.stack([logits, loc, log_scale], -2).flatten(-3)  # (..., dim * 3 * (k + 1))
        own = (head or self.mixture_head).bias
        assert own is not None
        own.copy_(bias.expand_as(own))

    def training_task(self, **options: Any) -> AutoregressiveTask:
        """The task that :func:`selfnorm.fit` runs; options of :class:`AutoregressiveTask`."""
        return AutoregressiveTask(self, **options)

    def parameter_groups(self) -> list[ParameterGroup]:
        """Matrices with weight decay, biases without."""
        return decay_groups(self.named_parameters())

    @abstractmethod
    def start(self, x: Tensor, condition: Tensor | None = None) -> None:
        """Get ready to be trained on rows: check them, read what is read off the data."""

    @abstractmethod
    def check(self, x: object) -> Tensor:
        """Rows on the model's device and dtype, or a :class:`DataError`."""

    @abstractmethod
    def given(self, condition: object, n: int) -> Tensor | None:
        """What ``n`` rows are conditioned on."""

    @abstractmethod
    def inside(self, x: Tensor) -> Tensor:
        """``(n,)``: rows that have a density."""

    @abstractmethod
    def at_rows(
        self, x: Tensor, condition: Tensor | None = None, *, n_samples: int = 0, exact: bool = True
    ) -> RowTerms:
        """The factors at rows, and the terms of the rows' density.

        With ``exact`` the probability of a value that may come about in two ways counts both;
        without it is a lower bound. ``log_w`` are those of stratified proposal samples.
        """

    @abstractmethod
    def at_batch(self, batch: tuple[Tensor, ...], n_samples: int) -> RowTerms:
        """:meth:`at_rows` of a batch of training rows."""

    def weights_of(self, batch: tuple[Tensor, ...]) -> Tensor | None:
        """``(R, n)``: how much the rows of a batch count for each order; ``None``: all alike."""
        del batch
        return None

    def of_random_columns(self, batch: tuple[Tensor, ...], n_samples: int) -> Tensor | None:
        """``(R, n)``: log-likelihood of random columns given the others; ``None``: not trained."""
        del batch, n_samples
        return None

    def factors_of(self, features: Tensor, line: LinePrediction | None = None) -> Factors:
        """Proposals and contexts of all factors of numbers from features ``(R, N, hidden)``.

        Proposals are relative to the ``line (R, N, dim)``, where there is one.
        """
        raw = self.trunk.outputs(self.mixture_head, features, 3 * self.n_components)
        context = self.trunk.outputs(self.context_head, features, self.n_context)
        proposal = Mixture1d.from_raw(raw, self.n_components, family=self.family)
        proposal = proposal if line is None else proposal.moved(*line)
        context = dropout(context, self.context_drop, self.training)
        return self._described(proposal, self._seen_by_energies(proposal, features), context)

    def _seen_by_energies(self, proposal: Mixture1d, features: Tensor) -> Mixture1d:
        """The proposals without gradient: they are fitted by their own likelihood alone."""
        del features
        return proposal.detach()

    def _described(self, proposal: Mixture1d, seen: Mixture1d, context: Tensor) -> Factors:
        """Append the proposal's own shape to the context: energy and ``b`` correct that shape."""
        mean, variance = seen.moments()
        inverse_sd = variance.rsqrt()
        shape = [
            hardtanh(seen.log_pi, -10.0, 1.0) / 4,
            hardtanh((seen.loc - mean.unsqueeze(-1)) * inverse_sd.unsqueeze(-1), -10.0, 10.0) / 2,
            hardtanh(seen.log_scale + inverse_sd.log().unsqueeze(-1), -8.0, 8.0) / 4,
        ]
        return Factors(proposal, torch.cat([context, *shape], -1), mean, inverse_sd)

    def draws(self, proposal: Mixture1d, n: int) -> Tensor:
        """``(n, R, N, dim)``: stratified samples of the proposals, in the centres of cells."""
        return self.rounded(proposal.sample(n))

    def terms_of(
        self, factors: Factors, log_q: Tensor, y: Tensor, log_det: Tensor, n_samples: int
    ) -> RowTerms:
        """The terms at values ``y (1, R, N, dim)``, with so many samples."""
        if n_samples:
            with torch.no_grad():
                drawn = self.draws(factors.proposal, n_samples)
            y = torch.cat([y, drawn])
        f = self.tilt(y, factors)
        return RowTerms(factors, log_q, f[0], f[1:], log_det)

    def tilt(self, y: Tensor, at: Factors) -> Tensor:
        """``-E`` at values ``y (S, R, N, dim)``; zero where a row has no number."""
        f: Tensor = self.energy(y, at)
        return f if at.active is None else f.where(at.active, 0.0)

    def log_norm(self, at: Factors) -> Tensor:
        """The learned ``b (R, N, dim)``; zero where a row has no number."""
        b: Tensor = self.energy.log_norm(at.context)
        return b if at.active is None else b.where(at.active, 0.0)

    def rounded(self, y: Tensor, shift: float = 0.0) -> Tensor:
        """Values moved to the centres of their cells (``shift=0.5``: edges); here unchanged."""
        del shift
        return y

    def chunks(self, n: int, nodes: int, chunk_size: int | None = None) -> Iterator[slice]:
        """Slices of ``n`` rows small enough to handle at once with ``nodes`` values per factor."""
        places = PLACES_AT_ONCE.get(self.device.type, PLACES_AT_ONCE["cpu"])
        size = chunk_size or self.rows_at_once
        size = size or max(1, places // (self.dim * self.n_orderings * nodes))
        for start in range(0, n, size):
            yield slice(start, start + size)

    def quadrature(self, at: Factors, n_nodes: int = 2048) -> Tensor:
        """``log Z_i`` ``(R, N, dim)`` of the factors by a deterministic rule; zero where a row has
        no number.

        In single precision, relative to the proposals: right to some 1e-6 (1e-5 where a cell ends
        within a narrow component), in half the time.
        """
        log_z = torch.empty_like(at.mean)
        for rows in self.chunks(log_z.shape[1], 2 * n_nodes):  # twice: hidden units stay in a cache
            part = at.at(slice(None), rows)
            unit = part.standardised()
            rounded = functools.partial(self._rounded_in_units, part) if self.has_cells else None
            y, log_weight = unit.proposal.nodes(n_nodes, rounded)
            log_z[:, rows] = torch.logsumexp(log_weight + self.tilt(y, unit), 0).to(log_z)
        return log_z if at.active is None else log_z.where(at.active, 0.0)

    def _rounded_in_units(self, at: Factors, y: Tensor, shift: float) -> Tensor:
        """:meth:`rounded` of values in the units of the energies."""
        moved = self.rounded(at.mean + y.to(at.mean) / at.inverse_sd, shift)
        return ((moved - at.mean) * at.inverse_sd).to(y)

    def fit_log_norm(self, data: tuple[Tensor, ...], steps: int) -> dict[str, float]:
        """Fit ``b`` to the finished energy: minimise the gap of the bounds over ``b`` alone."""
        self.eval()
        return polished(self, data, steps)

    @torch.no_grad()
    def _log_prob(
        self, x: Tensor, condition: object, normalizer: str, n_nodes: int, chunk_size: int | None
    ) -> Tensor:
        """``(n,)``: log-density of rows, the mean over the orders."""
        if normalizer not in ("learned", "quadrature"):
            raise ValueError(f"normalizer must be 'learned' or 'quadrature', not {normalizer!r}")
        x, exact = self.check(x), normalizer == "quadrature"
        given = self.given(condition, len(x))
        log_p = x.new_empty(len(x))  # at once: small pieces between large ones would split the heap
        for rows in self.chunks(len(x), 4, chunk_size):
            of_rows = None if given is None else given[rows]
            terms = self.at_rows(x[rows], of_rows, exact=exact)
            factors = terms.factors
            log_norm = self.quadrature(factors, n_nodes) if exact else self.log_norm(factors)
            log_mean = log_mean_exp(terms.log_prob(log_norm))
            log_p[rows] = log_mean.where(self.inside(x[rows]), -math.inf)
        return log_p

    def _random_places(self, n: int) -> Tensor:
        """``(n,)``: places of drawn rows among those of all orders, as many of each."""
        stack = self.n_orderings
        return torch.randperm(stack * -(-n // stack), device=self.device)[:n]

    def _in_orders(self, rows: Tensor, places: Tensor) -> Tensor:
        """Rows ``(n, ...)`` by order, ``(R, ceil(n / R), ...)``; zeros at places that are left."""
        stack = self.n_orderings
        per_order = -(-len(rows) // stack)
        spread = rows.new_zeros(stack * per_order, *rows.shape[1:])
        spread[places] = rows
        return spread.unflatten(0, (stack, per_order))

    def number_at(
        self, features: Tensor, which: Tensor, line: LinePrediction | None = None
    ) -> Factors:
        """The factors ``(R, N, 1)`` of number ``which[r]`` in order ``r``; ``line``: ``(R, N)``."""
        raw, context = (
            outputs_at(head, features, which.unsqueeze(1) * size + which.new_tensor(range(size)))
            for head, size in (
                (self.mixture_head, 3 * self.n_components),
                (self.context_head, self.n_context),
            )
        )
        proposal = Mixture1d.from_raw(raw.unsqueeze(2), self.n_components, family=self.family)
        if line is not None:
            proposal = proposal.moved(line.mean.unsqueeze(-1), line.spread.unsqueeze(-1))
        return self._described(proposal, proposal, context.unsqueeze(2))

    def bounds(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        condition: Tensor | None = None,
        *,
        n_samples: int = 1000,
        n_nodes: int = evaluation.N_NODES,
        seed: SeedLike = None,
        chunk_size: int | None = None,
    ) -> evaluation.ChainBounds:
        """Bounds of the mean log-likelihood of ``x``, with the verdict.

        They enclose the *exactly normalised* density, that of ``normalizer="quadrature"``; how far
        ``log_prob`` by the learned ``b_i`` is from it stands in ``learned_error``, ``learned_rms``
        and ``learned_gap``. ``n_samples`` proposal samples (2,000 at most: a factor is
        one-dimensional and its proposal close) and ``n_nodes`` nodes for every factor of every row.
        ``upper`` comes from importance estimates of ``log Z_i``, ``lower`` from the same samples
        with ``b_i`` by a quadrature over nodes, which are independent of them: the gap is of the
        order of the variance of ``log Z_i``. With several orderings the rows' bounds are those of
        the mixture. A pair ``(x, condition)``, as it is given to ``fit``, may stand in place of
        ``x``.
        """
        x, condition = x if isinstance(x, tuple) else (x, condition)
        if n_samples < 2:
            raise DataError(f"n_samples must be at least 2, got {n_samples}")
        if len(x) == 0:
            raise DataError("no rows to bound: pass at least one")
        n_samples = min(n_samples, evaluation.MAX_SAMPLES)
        with seeded(seed, self.device):
            rows = evaluation.row_bounds(
                self, x, condition, n_samples=n_samples, n_nodes=n_nodes, chunk_size=chunk_size
            )
        return evaluation.summarise(rows, n_samples)


@saved()
class AutoregressiveEBM(Chain):
    r"""``p(x) = prod_i q_i(x_i | x_<i) exp(-E(x_i, c_i) - b_i)``, one EBM per coordinate.

    One masked residual network (:class:`~selfnorm.networks.ResMADE`) reads the columns
    before
    column ``i`` and yields the mixture proposal ``q_i``, a context ``c_i`` and the log-normaliser
    ``b_i``; one small energy network serves all factors. The proposal is trained by maximum
    likelihood, energy, context and ``b`` by SNL with the proposal held fixed, all factors in
    parallel. Densities are with respect to Lebesgue measure, in the units of ``x``.

    With several ``orderings`` the density is the equal mixture of as many independent chains, each
    over its own order of the columns.

    Args:
        dim: number of columns.
        condition_dim: length of a condition vector; the model is then ``p(x | condition)``.
        orderings: how many, or the ranks themselves, one list of places (from 1) per ordering.
        hidden, blocks: width and residual blocks of the masked network.
        components: mixture components per factor, besides one heavy-tailed component.
        family: ``"logistic"`` or ``"gaussian"`` components.
        context: length of ``c_i``.
        energy_hidden, energy_blocks: width and residual blocks of the energy network.
        drop: dropout in the masked network and, with ``drop_context``, on the contexts.
        support, discrete, encoding: see :class:`~selfnorm.columns.columns.Columns`.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> model = AutoregressiveEBM(3, hidden=16, components=3, context=4, energy_hidden=16)
        >>> x = torch.randn(50, 3)
        >>> model.set_scaling(x).log_prob(x).shape
        torch.Size([50])
        >>> model.sample(5, seed=0).shape
        torch.Size([5, 3])
    """

    def __init__(
        self,
        dim: int,
        *,
        condition_dim: int = 0,
        orderings: int | Sequence[Sequence[int]] = 1,
        hidden: int = 256,
        blocks: int = 2,
        components: int = 10,
        family: str = "logistic",
        context: int = 32,
        energy_hidden: int = 64,
        energy_blocks: int = 2,
        drop: float = 0.0,
        drop_context: bool = True,
        support: Sequence[tuple[float | None, float | None] | None] | None = None,
        discrete: str | Sequence[float] | None = "auto",
        encoding: str = "value",
    ) -> None:
        super().__init__()
        if dim < 1:
            raise DataError(f"dim must be at least 1, not {dim}")
        if family not in ("logistic", "gaussian"):
            raise ValueError(f"family must be 'logistic' or 'gaussian', not {family!r}")
        ranks = orderings_of(orderings, dim)
        self.dim, self.condition_dim = dim, condition_dim
        self.context_drop = drop if drop_context else 0.0
        self.config: dict[str, Any] = {
            "orderings": ranks.tolist(),
            "support": None if support is None else [list(s or (None, None)) for s in support],
            "discrete": discrete if isinstance(discrete, str | None) else list(discrete),
        }
        self.columns = Columns(dim, support=support, discrete=discrete, encoding=encoding)
        widths: dict[str, Any] = {"hidden": hidden, "blocks": blocks}
        self.trunk = ResMADE(
            ranks,
            per_column=self.columns.n_inputs,
            drop=drop,
            condition_dim=condition_dim,
            **widths,
        )
        self._make_number_heads(
            range(dim), components=components, family=family, context=context,
            energy_hidden=energy_hidden, energy_blocks=energy_blocks,
        )  # fmt: skip
        self.start_at_marginals()

    @torch.no_grad()
    def set_scaling(self, x: Tensor) -> AutoregressiveEBM:
        """Read the columns' scales off ``x`` ``(n, dim)``; start each proposal at its marginal."""
        self.columns.fit(x)
        self.start_at_marginals()
        return self

    def start_at_marginals(self) -> None:
        """Place the components of every proposal on the quantiles of its column."""
        self._start_numbers_at(self.columns.knots)

    # -- one pass -----------------------------------------------------------------------------

    def given(self, condition: object, n: int) -> Tensor | None:
        """The condition of ``n`` rows, checked; on the model's device and dtype."""
        if self.condition_dim == 0:
            if condition is not None:
                raise DataError("this model has condition_dim=0 and takes no condition")
            return None
        rows = None
        if condition is not None:
            rows = as_rows(condition, "condition").to(self.columns.center)
        if rows is None or rows.shape != (n, self.condition_dim):
            shape = None if rows is None else tuple(rows.shape)
            raise DataError(
                f"expected a condition of shape ({n}, {self.condition_dim}), got {shape}"
            )
        return rows

    def factors(self, z: Tensor, condition: Tensor | None = None) -> Factors:
        """Proposals and contexts of all factors at scaled rows ``z`` ``(N, dim)``."""
        if z.dim() == 2:
            z = z.expand(self.n_orderings, -1, -1)
        given = self.given(condition, z.shape[1])
        if given is not None:
            given = given.expand(self.n_orderings, -1, -1)
        return self.factors_of(self.trunk(self.columns.encode(z).flatten(-2), given))

    def at_rows(
        self, x: Tensor, condition: Tensor | None = None, *, n_samples: int = 0, exact: bool = True
    ) -> RowTerms:
        """The terms of rows ``x``; all are exact here."""
        del exact
        z, log_det = self.columns(x)
        z = z.expand(self.n_orderings, -1, -1)
        factors = self.factors(z, condition)
        log_q = factors.proposal.log_prob(z)
        return self.terms_of(factors, log_q, z.unsqueeze(0), log_det, n_samples)

    def at_batch(self, batch: tuple[Tensor, ...], n_samples: int) -> RowTerms:
        """:meth:`at_rows` of training rows ``(x,)`` or ``(x, condition)``, spread out afresh."""
        x = self.columns.dequantise(batch[0].to(self.columns.center))
        return self.at_rows(x, *batch[1:], n_samples=n_samples)

    def start(self, x: Tensor, condition: Tensor | None = None) -> None:
        """Check the table; read the columns' scales unless they are set already."""
        self.check(x)
        self.given(condition, len(x))
        if not all(bool(torch.isfinite(t).all()) for t in (x, condition) if t is not None):
            raise DataError("the data hold NaN or infinity: drop or impute those rows first")
        if not bool(self.columns.fitted):
            self.set_scaling(x)

    def inside(self, x: Tensor) -> Tensor:
        """``(n,)``: rows within the support."""
        return self.columns.inside(x)

    def check(self, x: object) -> Tensor:
        """``x`` as ``(n, dim)`` on the model's device and dtype, or a :class:`DataError`."""
        rows = as_rows(x, dtype=self.columns.center.dtype)
        if rows.dim() != 2 or rows.shape[1] != self.dim:
            raise DataError(f"expected rows of shape (n, {self.dim}), got {tuple(rows.shape)}")
        return rows.to(self.columns.center)

    # -- densities ----------------------------------------------------------------------------

    def log_prob(
        self,
        x: Tensor,
        condition: Tensor | None = None,
        *,
        normalizer: str = "learned",
        n_nodes: int = 2048,
        chunk_size: int | None = None,
    ) -> Tensor:
        """Log-density ``(n,)`` of rows ``x``; ``-inf`` outside the support.

        ``normalizer="learned"`` uses ``b_i``: one pass. ``"quadrature"`` normalises every factor
        numerically, by ``n_nodes`` nodes of equal proposal mass: a density to the accuracy of that
        rule, whatever the training did to ``b``. Call ``model.eval()`` first if the model
        was built with dropout and is still training. No gradient goes through it.
        """
        return self._log_prob(x, condition, normalizer, n_nodes, chunk_size)

    def log_mass(
        self,
        x: Tensor,
        condition: Tensor | None = None,
        *,
        normalizer: str = "learned",
        n_points: int = 64,
        chunk_size: int | None = None,
    ) -> Tensor:
        """Log-probability ``(n,)`` of rows whose discrete columns lie on a grid.

        The density is integrated over the cell of every column with a step (``columns.step``), by
        ``n_points`` points; it stays a density in the others. ``log_prob`` plus ``log(step)`` is
        the one-point rule for it, right within a few per cent (see
        :mod:`selfnorm.columns.columns`).
        """
        options: dict[str, Any] = {"normalizer": normalizer, "chunk_size": chunk_size}
        x, step = self.check(x), self.columns.step
        return log_cell_mass(
            lambda at: self.log_prob(at, condition, **options), x, step, n_points=n_points
        )

    @torch.no_grad()
    def sample(
        self,
        n: int,
        condition: Tensor | None = None,
        *,
        n_candidates: int = 128,
        seed: SeedLike = None,
        chunk_size: int | None = None,
    ) -> Tensor:
        """``(n, dim)`` rows, one column after another by importance resampling within the factor.

        Each value is chosen among ``n_candidates`` stratified proposal samples in proportion to
        their weights. A condition of shape ``(n, condition_dim)`` gives one row per condition.
        """
        like = self.columns.center
        with seeded(seed, like.device):
            places, given = self._random_places(n), self.given(condition, n)
            if given is not None:
                given = self._in_orders(given, places)
            z = self._in_orders(torch.zeros(n, self.dim).to(like), places)
            for rows in self.chunks(z.shape[1], 64 + n_candidates // self.dim, chunk_size):
                self._fill(z[:, rows], None if given is None else given[:, rows], n_candidates)
            return self.columns.inverse(z.flatten(0, 1)[places])

    def _fill(self, z: Tensor, condition: Tensor | None, n_candidates: int) -> None:
        """Draw the columns of ``z`` ``(R, N, dim)`` in place, in each chain's own order."""
        for column in self.trunk.ranks.argsort(1).T:  # (R,): that at one place of each order
            features = self.trunk(self.columns.encode(z).flatten(-2), condition)
            at = self.number_at(features, column)
            y = at.proposal.sample(n_candidates)
            value = chosen(y, self.energy(y, at))
            z.scatter_(2, column.view(-1, 1, 1).expand(-1, z.shape[1], 1), value.unsqueeze(-1))
