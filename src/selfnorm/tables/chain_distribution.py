"""The distribution of a table whose trained model is a chain of one-dimensional factors."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from selfnorm._context import float32_on_cpu, seeded
from selfnorm._saved import saved
from selfnorm.chain import N_NODES, ColumnDensity, TableChain, row_bounds
from selfnorm.columns import GAP, UNSEEN, CodedColumns
from selfnorm.distributions import TableMixture
from selfnorm.evaluation import Bounds
from selfnorm.networks import ChainLinear
from selfnorm.tables.answers import (
    FEWEST,
    MEMBER_DRAWS,
    ChainAnswers,
    Draws,
    Effort,
    Limits,
    few_effective,
    strata_joined,
)
from selfnorm.tables.distribution import (
    STEADY,
    RowDistribution,
    resolutions,
    standard_error,
    stream,
    unpacked,
)
from selfnorm.tables.members import Member, by_another_map, log_density

ROWS_AT_ONCE = 256
CHECKED_PLACES = 3000  # rows x columns x orders: half a second or so
WEIGHTS_PER_REASON = 2 * 512**2  # of a layer, over the orders that explain
MAX_FACTOR_SAMPLES = 10_000_000  # some 20 s on one core
MIN_SAMPLES = 256  # per factor: enough for a verdict
ROWS_OF_WEIGHTS = 200  # whose log-weights are shown


@saved("model", "members", "simple", "gap_scores")
@dataclass(eq=False)
class ChainDistribution(RowDistribution):
    """A chain over the parts of coded rows, and the simple densities beside it.

    Attributes:
        gap_scores: ``(p,)``: mean log-likelihood of a cell of each part, see :meth:`comparable`.
    """

    method: ClassVar[str] = "autoregressive"
    words: ClassVar[str] = "a chain of one-dimensional energies, a factor for each column"
    bound_samples: ClassVar[int] = 256
    trained: ClassVar[str] = "chain"

    model: TableChain
    members: list[Member]
    simple: list[TableMixture]
    gap_scores: Tensor
    columns: CodedColumns = field(init=False)
    proposal: None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.columns = self.model.columns

    @property
    def marginal_columns(self) -> CodedColumns:
        """Columns that have the marginals of the training rows."""
        return self.model.columns

    @property
    def factors_per_row(self) -> int:
        """Parts times orders."""
        return self.model.dim * self.model.n_orderings

    @property
    def exact(self) -> bool:
        """Whether all columns are finite."""
        return self.model.n_numbers == 0

    def pack(self, coded: Tensor) -> Tensor:
        """``(n, p, 4)``."""
        return self.columns.pack(coded)[0]

    def _log_density(self, coded: Tensor, normalizer: str) -> Tensor:
        return log_density(self.model, coded, normalizer=normalizer)

    @functools.cached_property
    def _steady_models(self) -> dict[str, TableChain]:
        """The chain that takes so many rows at a time; by its learned ``b`` in single precision."""
        models = {"quadrature": copy.copy(self.model), "learned": self.model.single()}
        models["learned"].columns.double().load_state_dict(self.columns.state_dict())
        for way, model in models.items():
            model.rows_at_once = STEADY[way]
        for layer in models["learned"].modules():
            if isinstance(layer, ChainLinear):
                layer.freeze()
        return models

    def _steady_piece(self, coded: Tensor, normalizer: str) -> Tensor:
        of_model = None
        if self.model_counts:
            of_model = log_density(self._steady_models[normalizer], coded, normalizer=normalizer)
        return torch.logsumexp(self._of_members(coded, of_model=of_model), -1)

    def _draw(self, n: int, seed: int, missing: bool) -> np.ndarray:
        # in float32: a few digits of a random number cost twice the time in float64
        chain = copy.deepcopy(self.model).float()
        return unpacked(
            self.columns, chain.sample(n, within=self.columns.keeps_range, gaps=missing, seed=seed)
        )

    def with_gap_scores(self, coded: Tensor) -> ChainDistribution:
        """The same, with the mean log-likelihood of the cells of rows that were not trained on.

        Numbers are in their own units; ``-log`` of the width of a number is left in, where a cell
        holds none.
        """
        columns = self.columns
        packed = columns.pack(coded)[0][: 2 * self._checked_rows]
        of_parts = shares(self.model, packed, normalizer="learned").mean(0)
        coded = columns.unpack(packed[..., 0], packed[..., 1])
        is_number = packed[..., 0] == columns.n_codes
        log_width = resolutions(columns).log()
        of_parts = of_parts + columns.pack(coded)[1] - log_width.where(~is_number, 0.0)
        seen = packed[..., 0] != GAP
        scores = of_parts.where(seen, 0.0).sum(0) / seen.sum(0).clamp_min(1)
        return replace(self, gap_scores=scores)

    def _gap_scores(self) -> Tensor:
        return self.gap_scores

    @functools.cached_property
    def _answers(self) -> ChainAnswers:
        return ChainAnswers(self.model)

    @torch.no_grad()
    def marginal(
        self, coded: Tensor, effort: Effort | None, seed: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Log-likelihoods ``(n,)`` of what coded rows have, and their standard errors.

        Simple densities integrate exactly, but where a cell is wide beside the spread around a
        line; of the chain rows are drawn, or answered by the network where there is no effort.
        """
        log_p, se = torch.zeros(len(coded), dtype=torch.float64), coded.new_zeros(len(coded))
        seen = coded[..., 0] != GAP
        quick = seen.all(1) | (not self.model_counts) | (effort is None)
        if bool(quick.any()):
            log_p[quick] = self.log_prob(coded[quick])
        todo = torch.nonzero(~quick & seen.any(1))[:, 0]  # of nothing the density is 1
        if effort is None or len(todo) == 0:
            return log_p, se
        with float32_on_cpu():
            alone = coded[todo]
            alone[..., 1] = alone[..., 1].where(seen[todo], 0.0)
            once, place = torch.unique(alone, dim=0, return_inverse=True)
            packed, slope = self.columns.pack(once)
            of_chain, of_chain_se = self._of_pattern(packed, once[..., 0] != GAP, effort, seed)
            of_chain = of_chain + slope.where(once[..., 0] != GAP, 0.0).sum(-1)
            of_members = self._of_members(once, of_model=of_chain)
            mixed = torch.logsumexp(of_members, -1)
            share = (of_members[:, 0] - mixed).exp()
            log_p[todo], se[todo] = mixed[place], (share * of_chain_se)[place].to(se)
        return log_p, se

    def _of_pattern(
        self, packed: Tensor, seen: Tensor, effort: Effort, seed: int
    ) -> tuple[Tensor, Tensor]:
        """The same of packed rows, by the chain alone."""
        log_p = torch.zeros(len(packed), dtype=torch.float64)
        se, one = torch.zeros_like(log_p), (~seen).sum(1) == 1
        for part in self.model.layout.numbers.tolist():
            for rows in torch.nonzero(one & ~seen[:, part])[:, 0].split(ROWS_AT_ONCE):
                log_p[rows] = self._answers.along(packed[rows], part).double()
        one &= ~seen[:, self.model.layout.numbers].all(1)
        if not bool(one.all()):
            draws = self._answers.draws(packed[~one], seen[~one], effort, Limits(), seed)
            log_p[~one], se[~one] = self._answers.log_marginal(draws, seed)
        return log_p, se

    @torch.no_grad()
    def conditional(
        self, coded: Tensor, given: Tensor, effort: Effort | None
    ) -> tuple[Tensor, Tensor]:
        r"""``log p(x_T | x_S)`` ``(n,)`` of coded rows, ``S`` the parts of the mask ``given (p,)``,
        and its standard error.

        ``log p(x_S, x_T) - log p(x_S)``. Without effort the network's own: members then count by
        what they make of ``x_S``, ``sum_k w_k p_k(x_S) p_k(x_T | x_S)`` over
        ``sum_k w_k p_k(x_S)``.
        """
        alone = coded.clone()
        alone[:, ~given, 0] = GAP
        if effort is not None:
            log_p, se = self.marginal(torch.cat([coded, alone]), effort)
            (joint, before), (error, other) = log_p.chunk(2), se.chunk(2)
            beyond = torch.isneginf(before)  # the limits of columns: the network answers there
            log_p, se = joint - before, torch.hypot(error, other)
            if bool(beyond.any()):
                log_p[beyond] = self.conditional(coded[beyond], given, None)[0]
            return log_p, se
        packed, slope = self.columns.pack(coded)
        slope = slope.where((coded[..., 0] != GAP) & ~given, 0.0).sum(-1)
        of_chain = self.model.log_prob(packed, given) + slope
        if self.simple:
            alone_by_chain = log_density(self.model, alone)
            before = torch.logsumexp(self._of_members(alone, of_model=alone_by_chain), -1)
            joint = self._of_members(coded, of_model=alone_by_chain + of_chain)
            mixed = torch.logsumexp(joint, -1) - before
            of_chain = mixed.where(before > -torch.inf, of_chain)  # beyond limits of a column
        return of_chain, torch.zeros_like(of_chain)

    @torch.no_grad()
    def pool(self, coded: Tensor, seen: Tensor, effort: Effort, limits: Limits, seed: int) -> Draws:
        """Weighted completions of coded rows; those of all members with a weight."""
        n, strata = len(coded), []
        with float32_on_cpu():
            alone = coded.clone()
            alone[..., 0] = alone[..., 0].where(seen, float(GAP))
            log_members = torch.full((n, len(self.weights)), -torch.inf, dtype=torch.float64)
            weights = torch.tensor(self.weights, dtype=torch.float64).log()
            if self.model_counts:
                strata.append(self._of_chain(coded, seen, effort, limits, seed))
                log_members[:, 0] = strata[0].log_mean()[0] + weights[0]
            first = int(self.model_counts)
            for k, density in enumerate(self.simple, first):
                log_members[:, k] = log_density(density, alone) + weights[k]
            if not self.simple:
                return strata[0]._replace(log_w=strata[0].log_w + weights[0])
            fewest = torch.full((n,), MEMBER_DRAWS)
            fewest = fewest if limits.wanted is None else torch.maximum(fewest, 2 * limits.wanted)
            shares = torch.softmax(log_members.clamp_min(-1e300), 1)
            for k, density in enumerate(self.simple, first):
                counts = (fewest * shares[:, k]).ceil().long().clamp_min(FEWEST)
                row = torch.arange(n).repeat_interleave(counts)
                packed = density.columns.pack(alone)[0][row]
                drawn = density.sample(len(row), packed, seed=stream(seed, 1 + k))
                new = torch.from_numpy(unpacked(density.columns, drawn))
                rows = torch.where(seen[row].unsqueeze(-1), coded[row], new)
                log_w = (log_members[:, k] - weights[k])[row]
                none = torch.zeros(n, dtype=torch.bool)
                of_member = Draws(row, rows, log_w, none, log_w, torch.zeros_like(row))
                if limits.obey is not None:
                    of_member = of_member.without(~limits.obey(rows))
                strata.append(of_member)
            return strata_joined(strata, weights)

    def _of_chain(
        self, coded: Tensor, seen: Tensor, effort: Effort, limits: Limits, seed: int
    ) -> Draws:
        """Those of the chain alone, in the units of the table."""
        packed, slope = self.columns.pack(coded)
        if len(coded) == 1 and not bool(seen.any()):
            draws = self._answers.within(effort, limits, whole=True, seed=seed)
        else:
            draws = self._answers.draws(packed, seen, effort, limits, seed)
        slope = slope.where(seen, 0.0).sum(-1)
        rows = self._answers.coded(draws.completed)
        rows = torch.where(seen[draws.row].unsqueeze(-1), coded[draws.row], rows)
        return draws._replace(completed=rows, log_w=draws.log_w + slope[draws.row])

    def log_probability(self, limits: Limits, effort: Effort, seed: int) -> Draws:
        """Weights whose mean is the probability of limits; the draws need not be whole rows.

        Where there are simple densities, the whole rows that the chain draws within the limits
        are weighed by the mixture: draws of simple densities seldom obey what is rare.
        """
        if not limits.boxed:
            return super().log_probability(limits, effort, seed)
        with torch.no_grad(), float32_on_cpu():
            draws = self._answers.within(effort, limits, whole=bool(self.simple), seed=seed)
            if not self.simple:
                return draws
            code, z = draws.completed[..., :2].double().unbind(-1)
            rows = self.columns.unpack(code, z)
            of_chain = log_density(self.model, rows, normalizer="learned")
            mixed = torch.logsumexp(self._of_members(rows, of_model=of_chain), -1)
            log_w = (draws.log_w + mixed - of_chain).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
            return draws._replace(log_w=log_w)

    @torch.no_grad()
    def complete(
        self,
        coded: Tensor,
        seen: Tensor,
        seed: int,
        missing: bool = False,
        effort: Effort | None = None,
    ) -> np.ndarray:
        """Coded rows whose cells that are not ``seen (n, p)`` are drawn, given the others.

        Each row by one of the members, which count by what they make of what is seen.
        """
        out, todo = coded.clone(), torch.nonzero((~seen).any(-1)).flatten()
        if len(todo) == 0:
            return out.numpy()
        if effort is None:
            return self._complete_quickly(out, seen, todo, seed, missing)
        alone = torch.cat([coded[todo], seen[todo].unsqueeze(-1).double()], -1)
        alone[..., :2] *= seen[todo].unsqueeze(-1)
        once, place, counts = torch.unique(alone, dim=0, return_inverse=True, return_counts=True)
        limits = Limits(gaps=missing, wanted=counts)
        draws = self.pool(once[..., :2], once[..., 2] > 0, effort, limits, seed)
        few_effective(draws)
        with seeded(stream(seed, 2**16)):
            chosen = draws.pick(counts)
        out[todo[place.argsort(stable=True)]] = draws.completed[chosen]
        return out.numpy()

    def _complete_quickly(
        self, out: Tensor, seen: Tensor, todo: Tensor, seed: int, missing: bool
    ) -> np.ndarray:
        """The same by what the network says in one pass, without weights."""
        first, coded = int(self.model_counts), out.clone()
        with float32_on_cpu():
            chosen = torch.zeros(len(todo), dtype=torch.long)
            if self.simple:
                alone = coded[todo]
                alone[..., 0] = alone[..., 0].where(seen[todo], float(GAP))
                once, place = torch.unique(alone, dim=0, return_inverse=True)
                # one pass by b tells well enough who draws
                log_p = self._of_members(once, "learned")
                shares = torch.softmax(log_p.clamp_min(-1e300), 1)  # of the impossible as well
                with seeded(stream(seed, 0)):
                    chosen = torch.multinomial(shares[place], 1)[:, 0]
            for k in range(len(self.weights)):
                rows = todo[chosen == k]
                if len(rows) == 0:
                    continue
                if k < first:
                    new = self._completed_by_chain(coded[rows], seen[rows], seed, missing)
                else:
                    density = self.simple[k - first]
                    packed = density.columns.pack(coded[rows])[0]
                    packed[..., 0] = packed[..., 0].where(seen[rows], float(GAP))
                    drawn = density.sample(
                        len(rows), packed, within=self.columns.keeps_range, seed=stream(seed, 1 + k)
                    )
                    new = torch.from_numpy(unpacked(density.columns, drawn))
                out[rows] = torch.where(seen[rows].unsqueeze(-1), coded[rows], new)
        return out.numpy()

    def _completed_by_chain(self, coded: Tensor, seen: Tensor, seed: int, missing: bool) -> Tensor:
        packed, chain = self.pack(coded).float(), copy.deepcopy(self.model).float()
        drawn = chain.sample(
            len(packed), packed, seen, within=self.columns.keeps_range, gaps=missing, seed=seed
        )
        return torch.from_numpy(unpacked(self.columns, drawn))

    def _bounds(
        self, coded: Tensor, open_: Tensor, scores: Tensor, n_samples: int, seed: int
    ) -> Bounds:
        """Samples are drawn for every factor of every row: a large table would take minutes.

        The distance of both bounds from the log-likelihood hardly differs between rows, so it is
        measured on as many rows as are affordable, and the log-likelihood itself on all of them.
        """
        model = self.model
        places = model.n_numbers * model.n_orderings
        n_samples = min(n_samples, max(MIN_SAMPLES, MAX_FACTOR_SAMPLES // (len(coded) * places)))
        n_rows = max(500, MAX_FACTOR_SAMPLES // ((n_samples + N_NODES) * places))
        chosen = torch.arange(len(coded))
        if len(coded) > n_rows:
            with seeded(seed):
                chosen = torch.randperm(len(coded))[:n_rows]
        packed, slope = model.columns.pack(coded[chosen])
        bounds = model.bounds(packed, n_samples=n_samples, seed=seed)
        of_chain = scores[chosen] - (slope + open_[chosen]).sum(-1)
        if self.simple:
            of_chain = model.log_prob(packed)
        shift = float(scores.mean() - of_chain.mean())
        error = math.hypot(standard_error(scores), bounds.log_norm_se)
        if len(chosen) < len(coded):
            error = math.hypot(error, bounds.learned_rms / math.sqrt(n_rows))
        return replace(bounds.shifted(shift), lower_se=error, upper_se=error)

    def log_weights(self, coded: Tensor | None) -> tuple[Tensor, Tensor | None] | None:
        """Those of the one-dimensional factors, pooled."""
        rows = torch.from_numpy(self.sample(ROWS_OF_WEIGHTS, 0)) if coded is None else coded
        with seeded(0):
            pooled = row_bounds(self.model, self.pack(rows[:ROWS_OF_WEIGHTS]), n_samples=64)
        if len(pooled["log_weights"]) == 0:
            return None
        return pooled["log_weights"], None if coded is None else pooled["log_weights_data"]

    @torch.no_grad()
    @float32_on_cpu()
    def explain(self, coded: Tensor) -> np.ndarray:
        """``(n, p)``: ``P(p(X_j | rest) <= p(x_j | rest))`` of every part; NaN at gaps.

        A density counts by the probability of its :func:`resolutions`, as does the value itself,
        which is one of those at most as probable. They are those of all orders of the chain where
        their networks are small, of two where they are large: the reasons of many rows should come
        soon.
        """
        model, packed = self.model, self.pack(coded)
        most = max(2, WEIGHTS_PER_REASON // model.config["hidden"] ** 2)
        few = model.of_orders(range(min(most, model.n_orderings))).float()
        few.columns.double().load_state_dict(model.columns.state_dict())  # every digit of the map
        return np.stack([_tails(model, few, packed, part) for part in range(model.dim)], 1)

    def log_codes(self, coded: Tensor, part: int, effort: Effort | None, seed: int) -> Tensor:
        """``(n, C)``: by the joint density with effort, else the network's own."""
        if effort is not None:
            return super().log_codes(coded, part, effort, seed)
        return torch.cat(
            [density.log_codes for _, density in densities(self.model, self.pack(coded), part)]
        )

    @torch.no_grad()
    def consistency(self, coded: Tensor, seed: int) -> dict[str, float]:
        """How far answers are from those of one joint density, in nats.

        ``conditionals``: median of ``|log p(x) - log p(x_S) - log p(x_T | x_S)|`` over rows and
        random halves ``S`` of the columns. ``orders``: median standard deviation of ``log p_r(x)``
        over the orders ``r`` of the chain.
        """
        model, coded = self.model, coded[: self._checked_rows]
        packed, slope = self.columns.pack(coded)
        with seeded(seed):
            chosen = torch.rand(len(packed), model.layout.n_columns) < 0.5
            given = chosen[:, model.layout.column]
            of_orders = shares(model, packed).sum(-1)
            code = packed[..., 0].where(given, float(GAP))
            alone = torch.cat([code.unsqueeze(-1), packed[..., 1:]], -1)
            apart = model.log_prob(alone) + model.log_prob(packed, given)
        joint = torch.logsumexp(of_orders, 0) - math.log(len(of_orders))
        orders = of_orders.std(0).median() if len(of_orders) > 1 else torch.zeros(())
        of_joint, of_parts = (
            torch.logsumexp(self._of_members(coded, of_model=log_p + slope.sum(-1)), -1)
            for log_p in (joint, apart)
        )
        off = (of_joint - of_parts).abs().median()
        return {"conditionals": float(off), "orders": float(orders)}

    @property
    def _checked_rows(self) -> int:
        """How many rows are enough, and soon done, for a figure of the model."""
        return max(30, CHECKED_PLACES // self.factors_per_row)


@torch.no_grad()
def shares(model: TableChain, packed: Tensor, normalizer: str = "quadrature") -> Tensor:
    """``(R, n, p)``: log-probability of each part given those before it, for every order."""
    parts = []
    for rows in model.chunks(len(packed), 4):
        learned = normalizer == "learned"
        terms = model.at_rows(model.check(packed[rows]), exact=not learned)
        log_z = (model.log_norm if learned else model.quadrature)(terms.factors)
        parts.append(terms.log_q.index_add(-1, model.layout.numbers, terms.minus_energy - log_z))
    return torch.cat(parts, 1)


def of_chain(
    chain: TableChain, columns: CodedColumns, others: CodedColumns, coded: Tensor,
    normalizer: str = "quadrature",
) -> Tensor:  # fmt: skip
    """``(n,)``: log-density of coded rows by a chain that sees them through the map ``columns``.

    ``others`` is the map of the rows that it was trained on; the difference is made up for.
    """
    packed, slope = columns.pack(coded)
    of_orders = shares(chain, packed.to(chain.quantiles), normalizer).sum(-1)
    log_p = torch.logsumexp(of_orders.double().cpu(), 0) - math.log(len(of_orders))
    log_p = log_p + slope.sum(-1)
    return log_p if others is columns else log_p + by_another_map(columns, others, coded)


def densities(
    model: TableChain, packed: Tensor, part: int
) -> Iterator[tuple[slice, ColumnDensity]]:
    """``p(x_j | all other columns)`` of one part, block by block of the rows."""
    for start in range(0, len(packed), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        yield rows, model.column_density(packed[rows], part)


def _tails(model: TableChain, few: TableChain, packed: Tensor, part: int) -> np.ndarray:
    """:meth:`ChainDistribution.explain` ``(n,)`` of one part by the orders of ``few``."""
    columns = model.columns
    n_codes, rest = columns.parts[part].n_codes, columns.parts[part].rest
    continuous = rest and columns.parts[part].step == 0
    log_width = float(resolutions(columns)[part].log())
    which = torch.tensor([part])
    out = np.full(len(packed), np.nan)
    for rows, single in densities(few, packed, part):
        density = ColumnDensity(*(figure.double() for figure in single))
        code = packed[rows, part, 0].long()

        def log_mass(z: Tensor, log_density: Tensor, log_number: Tensor) -> Tensor:
            """Of numbers at scores ``z (m, n)``."""
            if continuous:
                number = columns.from_scores(z.unsqueeze(-1), which)
                slope = columns.to_scores(number, which)[1].squeeze(-1)
                log_density = log_density + slope.log() + log_width
            return log_number + log_density

        log_codes = density.log_codes[:, :n_codes]
        seen = code.clamp(0, max(n_codes - 1, 0)).unsqueeze(1)
        own = log_codes.gather(1, seen)[:, 0] if n_codes else torch.zeros(len(code)).to(packed)
        if rest:
            log_number = density.log_codes[:, -1]
            z = packed[rows, part, 1].unsqueeze(0)
            own_number = log_mass(z, density.log_own.unsqueeze(0), log_number)[0]
            own = torch.where(code == n_codes, own_number, own)
        never = model.layout.log_unseen[part].to(own)
        own = torch.where(code == UNSEEN, never, own)
        least = own.unsqueeze(-1) + 1e-9
        total = log_codes.exp().where(log_codes <= least, 0.0).sum(-1)
        if rest:
            at_nodes = log_mass(density.nodes, density.log_density, log_number)
            weights = (density.log_weights + log_number).exp()
            total = total + weights.where(at_nodes <= own + 1e-9, 0.0).sum(0)
        total = total + never.exp().where(never <= own + 1e-9, 0.0)
        total = torch.maximum(total, own.exp()).clamp_max(1.0)
        out[rows] = total.where(code != GAP, torch.nan).numpy()
    return out
