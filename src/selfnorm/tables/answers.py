r"""Answers of a chain of a table that are those of its joint density, with their errors.

What a row does not have is drawn ``m`` times, and every completed row is weighed by the joint
density over the density that it was drawn from, ``w = p(x_S, x_T) / g(x_T)``. Then ``mean w`` is an
unbiased estimate of the marginal ``p(x_S)``, and draws chosen by their weights are draws of
``p(x_T | x_S)``: self-normalised importance sampling, asked of one row at a time.

Two proposals are mixed, and a draw is weighed by their mixture: the network that is shown all of
``x_S`` beforehand, and each order of the chain, which comes to a part of ``x_S`` in its turn. Where
``T`` has few values, all of them are the draws.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from selfnorm._context import seeded
from selfnorm.chain import Drawing, TableChain
from selfnorm.columns import Part, PartValues
from selfnorm.errors import SelfnormWarning
from selfnorm.evaluation import (
    Finding,
    Judged,
    deviations,
    heavy_tail,
    tail_index,
)
from selfnorm.functional import log_mean_exp

MAX_COMPLETIONS = 128  # of a row, all of which are the draws
QUADRATURES = 8192  # completions whose normalisers are all exact
SHOWN, GROUP = 3, 4  # draws of so many that come from the network that is shown what is given
CANDIDATES = 16  # of which a number of a draw is chosen; the weight makes up for their being few
DRAWS_AT_ONCE = 4096
CORRECTED = 8  # draws of a row whose normalisers are made exact
FEWEST, MOST = 32, 8192  # draws of a row
MEMBER_DRAWS = 256  # of a row, from all simple densities together
FEW_EFFECTIVE, FEWEST_EFFECTIVE = 3, 10.0  # draws of an imputed row, of a mean
FLAT = 2.0  # weights none of which is as many times the mean have no tail
COUNTED = 4096  # effective draws of which those that obey are counted
EVENT_DRAWS = 256  # of an event, to begin with
TOTAL = 32_768  # draws of a call, beyond the fewest of each row
EVENT_SE = 0.06  # of the logarithm of the probability of an event, unless draws are counted
GOAL_SE = 0.01  # nats: a row whose error is larger gets more draws
RELIABLE_SE = 0.1  # nats
ROUNDING = 1e-12  # of a sum of shares
LEVEL = 0.95  # of intervals


@dataclass(frozen=True)
class Estimate(Judged):
    """A probability or a mean, and how far it can be trusted.

    Attributes:
        value: the estimate.
        low: lower end of its 95 % interval, and ``high`` the upper one: of the error of drawing,
            not of the model.
        se: standard error.
        ess: effective number of draws behind it.
        pareto_k: tail index of their weights.
        findings: what speaks against it; ``reliable`` and ``reasons`` say so.

    Example:
        >>> Estimate.of_probability(0.25, 0.01, ess=900.0, pareto_k=0.1)
        0.25 (95 % interval 0.2309 to 0.2701), reliable
    """

    value: float
    low: float
    high: float
    se: float
    ess: float
    pareto_k: float
    findings: tuple[Finding, ...] = ()

    @classmethod
    def of_probability(cls, value: float, se: float, ess: float, pareto_k: float) -> Estimate:
        """That of a probability: its interval is of the logarithm of its odds."""
        z = deviations(LEVEL)
        if value <= 0.0:  # no draw obeys: one in so many could have been missed
            high = 1.0 - (1.0 - LEVEL) ** (1.0 / max(ess, 1.0))
            return cls(0.0, 0.0, high, se, ess, pareto_k, tuple(_findings(math.inf, pareto_k)))
        value = value if value < 1.0 - ROUNDING else 1.0
        low, high = value, value
        if value < 1.0:
            log_odds, spread = math.log(value / (1 - value)), z * se / (value * (1 - value))
            low, high = (1 / (1 + math.exp(min(700.0, -log_odds + d))) for d in (spread, -spread))
        findings = tuple(_findings(se / value, pareto_k))
        return cls(value, low, high, se, ess, pareto_k, findings)

    @classmethod
    def of_mean(cls, value: float, se: float, ess: float, pareto_k: float) -> Estimate:
        """That of a mean."""
        half = deviations(LEVEL) * se
        findings = tuple(_findings(0.0, pareto_k))
        if ess < FEWEST_EFFECTIVE:
            words = f"Only {ess:.1f} draws count: ask for more (accuracy=)."
            findings = (Finding("draws", ess, FEWEST_EFFECTIVE, words), *findings)
        return cls(value, value - half, value + half, se, ess, pareto_k, findings)

    def __repr__(self) -> str:
        interval = f"95 % interval {self.low:.4g} to {self.high:.4g}"
        return f"{self.value:.4g} ({interval}), {self._verdict()}"


def _findings(relative_se: float, pareto_k: float) -> Iterator[Finding]:
    """What speaks against an estimate."""
    if not relative_se <= RELIABLE_SE:
        words = f"The relative standard error is {relative_se:.2g}: ask for more draws (accuracy=)."
        if math.isinf(relative_se):
            words = "No draw obeys the event: its probability is below the upper limit."
        yield Finding("standard_error", relative_se, RELIABLE_SE, words)
    yield from heavy_tail(
        pareto_k, "the draws do not reach where the density is; ask for more (accuracy=)."
    )


@dataclass(frozen=True)
class Limits:
    """What completed rows are to be.

    Attributes:
        allowed: values that drawn parts may take; ``None``: all.
        obey: which of completed coded rows ``(M, p, 2)`` count at all; ``None``: all.
        boxed: whether all rows within what is allowed obey.
        gaps: whether gaps are values, too, where they are outcomes of a part.
        wanted: ``(n,)`` effective draws that rows are to have; their error counts if ``None``.
    """

    allowed: Sequence[PartValues | None] | None = None
    obey: Callable[[Tensor], Tensor] | None = None
    boxed: bool = True
    gaps: bool = True
    wanted: Tensor | None = None


class Draws(NamedTuple):
    """Completed rows and their weights, those of a row one after the other.

    Args:
        row: ``(M,)`` the row that a draw completes, ascending.
        completed: ``(M, p, ...)`` the completed row, packed or coded.
        log_w: ``(M,)`` its log-weight.
        exact: ``(n,)`` rows of which all completions are there.
        log_p: ``(M,)`` its log-density by the learned ``b``; that by quadrature where ``exact``.
        stratum: ``(M,)`` which of the densities whose mean is asked for it is drawn from.
    """

    row: Tensor
    completed: Tensor
    log_w: Tensor
    exact: Tensor
    log_p: Tensor
    stratum: Tensor

    @property
    def counts(self) -> Tensor:
        """``(n,)``: how many draws rows have."""
        return torch.bincount(self.row, minlength=len(self.exact))

    @property
    def n_strata(self) -> int:
        """How many strata there are."""
        return int(self.stratum.max()) + 1 if len(self.stratum) else 1

    def joined(self, others: Draws) -> Draws:
        """With more draws of the same rows."""
        order = torch.cat([self.row, others.row]).argsort(stable=True)

        def both(a: Tensor, b: Tensor) -> Tensor:
            return torch.cat([a, b])[order]

        return Draws(
            both(self.row, others.row),
            both(self.completed, others.completed),
            both(self.log_w, others.log_w),
            self.exact | others.exact,
            both(self.log_p, others.log_p),
            both(self.stratum, others.stratum),
        )

    def without(self, bad: Tensor) -> Draws:
        """The weights of some draws ``(M,)`` zero."""
        return self._replace(log_w=self.log_w.masked_fill(bad, -torch.inf))

    def _largest(self) -> Tensor:
        most = torch.full((len(self.exact),), -torch.inf, dtype=torch.float64)
        most = most.scatter_reduce(0, self.row, self.log_w.double(), "amax")
        return most.where(most > -torch.inf, 0.0)

    def log_mean(self) -> tuple[Tensor, Tensor, Tensor]:
        """Log of the mean weight, its standard error, effective numbers of draws, ``(n,)``."""
        most, counts = self._largest(), self.counts.double()
        w = (self.log_w.double() - most[self.row]).exp()
        total, squares = (torch.zeros_like(most).index_add(0, self.row, x) for x in (w, w.square()))
        ess = total.square() / squares.clamp_min(1e-300)
        place, size = self.row * self.n_strata + self.stratum, len(most) * self.n_strata
        sums = torch.zeros(size, dtype=torch.float64).index_add(0, place, w)
        of_means = sums.square() / torch.bincount(place, minlength=size).clamp_min(1)
        within = (squares - of_means.view(-1, self.n_strata).sum(1)).clamp_min(0.0)
        se = (within / total.square().clamp_min(1e-300)).sqrt()
        se = se.where(total > 0, torch.inf).where(~self.exact, 0.0)
        return most + (total / counts.clamp_min(1)).log(), se, ess

    def shares(self) -> Tensor:
        """``(M,)``: the weights of the draws, which sum to one for each row."""
        w = (self.log_w.double() - self._largest()[self.row]).exp()
        total = torch.zeros(len(self.exact), dtype=torch.float64).index_add(0, self.row, w)
        return w / total.clamp_min(1e-300)[self.row]

    def pick(self, counts: Tensor) -> Tensor:
        """``(sum of counts,)``: draws chosen by their weights, so many of each row, row by row.

        By systematic resampling; where no draw of a row has a weight, all are as good.
        """
        most = self._largest()
        w = (self.log_w.double() - most[self.row]).exp()
        total = torch.zeros_like(most).index_add(0, self.row, w)
        w = torch.where(total[self.row] > 0, w, 1.0)
        total = torch.zeros_like(most).index_add(0, self.row, w)
        cumulative = (w / total[self.row]).cumsum(0)
        row = torch.repeat_interleave(torch.arange(len(counts)), counts)
        place = torch.arange(len(row)) - (counts.cumsum(0) - counts)[row]
        point = row + (place + torch.rand(len(counts), dtype=torch.float64)[row]) / counts[row]
        chosen = torch.searchsorted(cumulative, point)
        last = self.counts.cumsum(0) - 1
        chosen = torch.minimum(torch.maximum(chosen, last[row] + 1 - self.counts[row]), last[row])
        shuffled = torch.argsort(row + torch.rand(len(row), dtype=torch.float64))  # within rows
        return chosen[shuffled]


@dataclass(frozen=True)
class Effort:
    """How many draws answers take.

    Attributes:
        fewest: of a row.
        most: of a row whose error stays above :data:`GOAL_SE`.
        total: of all rows, beyond the fewest.
        event_se: of the logarithm of a probability that has enough of them.
    """

    fewest: int = FEWEST
    most: int = MOST
    total: int = TOTAL
    event_se: float = EVENT_SE

    @classmethod
    def of(cls, accuracy: str | int) -> Effort | None:
        """That of ``accuracy``: ``"joint"``, a number of draws of a row; ``"fast"``: none."""
        if accuracy == "fast":
            return None
        if accuracy == "joint":
            return cls()
        n = int(accuracy)
        return cls(min(n, FEWEST), n, 2**62, GOAL_SE)


class ChainAnswers:
    """The engine of answers of one chain.

    Args:
        chain: what is asked; its map of the columns keeps all its digits.
    """

    def __init__(self, chain: TableChain) -> None:
        self.chain = chain
        self.fast = chain.single()

    # -- draws ----------------------------------------------------------------------------------

    @torch.no_grad()
    def draws(
        self, packed: Tensor, seen: Tensor, effort: Effort, limits: Limits, seed: int = 0
    ) -> Draws:
        """Weighted completions of packed rows ``(n, p, 4)`` whose parts ``seen (n, p)`` stay."""
        wanted = limits.wanted
        allowed, gaps = limits.allowed, limits.gaps
        obey = None if limits.boxed else limits.obey
        with seeded(seed):
            few = self._few(seen, allowed, gaps)
            draws = self._all_of(packed, seen, few, gaps)
            if obey is not None:
                draws = draws.without(~obey(self.coded(draws.completed)))
            todo = torch.nonzero(~few)[:, 0]
            n_more = torch.full((len(todo),), effort.fewest)
            if wanted is not None:
                n_more = torch.maximum(n_more, 2 * wanted[todo])
            left, counts = effort.total, torch.zeros(len(packed), dtype=torch.long)
            while len(todo):
                n_more = -(-n_more // GROUP) * GROUP
                more = self._drawn(packed, seen, todo, n_more, allowed, gaps)
                if obey is not None:
                    more = more.without(~obey(self.coded(more.completed)))
                draws = draws.joined(more)
                counts[todo] += n_more
                _, se, ess = draws.log_mean()
                enough = se <= GOAL_SE if wanted is None else ess >= wanted
                most = effort.most if wanted is None else (8 * wanted).clamp_min(effort.most)
                todo = torch.nonzero(~enough & ~draws.exact & (counts < most))[:, 0]
                # as many again; the worst rows first where not all can have more
                todo = todo[se[todo].argsort(descending=True, stable=True)]
                n_more = counts[todo]
                todo = todo[n_more.cumsum(0) <= left].sort().values
                n_more = counts[todo]
                left -= int(n_more.sum())
        return draws

    def coded(self, packed: Tensor) -> Tensor:
        """Coded rows of packed draws, also those beyond the range of the training rows."""
        code, z = packed[..., :2].double().unbind(-1)
        return self.chain.columns.unpack(code, z)

    def _few(self, seen: Tensor, allowed: Sequence[PartValues | None] | None, gaps: bool) -> Tensor:
        """``(n,)``: rows with few completions, all of which can be weighed."""
        if allowed is not None:
            return torch.zeros(len(seen), dtype=torch.bool)
        sizes = [math.inf if part.rest else _n_values(part, gaps) for part in self._parts]
        of_rows = torch.tensor(sizes, dtype=torch.float64).where(~seen, 1.0)
        return of_rows.prod(1) <= MAX_COMPLETIONS

    @property
    def _parts(self) -> tuple[Part, ...]:
        return self.chain.columns.parts

    def _all_of(self, packed: Tensor, seen: Tensor, few: Tensor, gaps: bool) -> Draws:
        """Rows with ``few`` completions, all of which are there."""
        rows, completed = [torch.zeros(0, dtype=torch.long)], [packed[:0]]
        for pattern in torch.unique(seen[few], dim=0):
            of_pattern = torch.nonzero(few & (seen == pattern).all(1))[:, 0]
            free = (~pattern).nonzero()[:, 0].tolist()
            parts = [self._parts[j] for j in free]
            codes = [torch.arange(_n_values(part, gaps)) for part in parts]
            combinations = torch.cartesian_prod(*codes).view(-1, len(codes)) if codes else None
            n = 1 if combinations is None else len(combinations)
            every = packed[of_pattern].repeat_interleave(n, 0)
            if combinations is not None:
                every[:, free] = 0.0
                every[:, free, 0] = combinations.repeat(len(of_pattern), 1).to(every)
            rows.append(of_pattern.repeat_interleave(n))
            completed.append(every)
        row, every = torch.cat(rows), torch.cat(completed)
        order = row.argsort(stable=True)
        row, every = row[order], every[order]
        log_p = self._of_all(row, every, len(packed))
        counts = torch.bincount(row, minlength=len(packed))
        # the rest is reserved for the never seen
        log_seen = (self.chain.layout.log_seen * ~seen).sum(1)
        log_w = log_p + counts[row].log() - log_seen[row]
        return Draws(row, every, log_w, few, log_p, torch.zeros_like(row))

    def _of_all(self, row: Tensor, packed: Tensor, n: int) -> Tensor:
        """``(M,)``: log-density of all completions of ``n`` rows.

        By quadrature; where they are many by the learned ``b``, but for the likeliest of each row,
        which tells what the others are off by.
        """
        if len(packed) <= QUADRATURES:
            return self._exact(packed)
        log_p = self.fast.log_prob(packed.float(), normalizer="learned").double()
        most = log_p.new_full((n,), -torch.inf).scatter_reduce(0, row, log_p, "amax")
        likeliest = torch.nonzero(log_p == most[row])[:, 0]
        change = torch.zeros_like(most)
        change[row[likeliest]] = self._exact(packed[likeliest]) - log_p[likeliest]
        return log_p + change[row]

    def _exact(self, packed: Tensor) -> Tensor:
        """``(M,)``: log-density by quadrature."""
        return self.chain.log_prob(packed.to(self.chain.quantiles)).double()

    def _drawn(
        self,
        packed: Tensor,
        seen: Tensor,
        todo: Tensor,
        counts: Tensor,
        allowed: Sequence[PartValues | None] | None,
        gaps: bool,
    ) -> Draws:
        """So many draws of the rows ``todo``, from both proposals."""
        row = todo.repeat_interleave(counts)
        place = torch.arange(len(row)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
        # nothing is shown of rows of which nothing is seen
        shown = (place % GROUP < SHOWN) & seen.any(1)[row]
        drawing = Drawing(
            self.fast, n_candidates=CANDIDATES, allowed=allowed, gaps=gaps, weighted=True
        )
        out, log_w, log_p = [], [], []
        for rows, of_network in zip(
            row.split(DRAWS_AT_ONCE), shown.split(DRAWS_AT_ONCE), strict=True
        ):
            every, kept = packed[rows].float(), seen[rows]
            log_c = every.new_zeros(len(rows))
            for is_shown in (True, False):
                which = torch.nonzero(of_network == is_shown)[:, 0]
                if len(which):
                    every[which], log_c[which] = self.fast.filled(
                        drawing, every[which], kept[which], shown=is_shown
                    )
            if self.chain.has_cells:
                every = self._packed(every)
            every = torch.where(kept.unsqueeze(-1), packed[rows].float(), every)
            log_joint, log_g = self._log_densities(every, kept)
            out.append(every)
            log_p.append(log_joint)
            log_w.append(log_c + log_joint - log_g)
        none = torch.zeros(len(packed), dtype=torch.bool)
        log_w_all = torch.nan_to_num(torch.cat(log_w).double(), nan=-torch.inf)
        log_p_all = torch.cat(log_p).double()
        return Draws(
            row, torch.cat(out).to(packed), log_w_all, none, log_p_all, torch.zeros_like(row)
        )

    def _log_densities(self, packed: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        """``(M,)``: log of the joint density, and of that of the proposals, at completed rows.

        Both by the learned ``b``.
        """
        fast = self.fast
        joint, proposals = packed.new_empty(len(packed)), packed.new_empty(len(packed))
        for rows in fast.chunks(len(packed), 4):
            x, kept = packed[rows], seen[rows]
            terms = fast.at_rows(x, exact=False)
            tilt = terms.minus_energy - fast.log_norm(terms.factors)
            of_parts = terms.log_q.index_add(-1, fast.layout.numbers, tilt)
            joint[rows] = log_mean_exp(of_parts.sum(-1))
            of_orders = log_mean_exp(of_parts.where(~kept, 0.0).sum(-1))
            shown = fast.at_rows(x, kept, exact=False)
            of_network = log_mean_exp(shown.log_prob(fast.log_norm(shown.factors)))
            share = torch.where(kept.any(1), SHOWN / GROUP, 0.0)
            proposals[rows] = torch.logaddexp(
                share.log() + of_network, (1 - share).log() + of_orders
            )
        return joint, proposals

    # -- answers --------------------------------------------------------------------------------

    @torch.no_grad()
    def along(self, packed: Tensor, part: int) -> Tensor:
        """Log of the marginal density ``(n,)`` of rows that have all but one part, a number.

        By a quadrature whose nodes are those of the network's own answer.
        """
        chain, columns = self.chain, self.chain.columns
        rows = packed.to(chain.quantiles)
        own = chain.column_density(rows, part)
        n, n_codes = len(rows), columns.parts[part].n_codes
        code = torch.arange(n_codes + 1).repeat_interleave(
            torch.tensor([1] * n_codes + [len(own.nodes)])
        )
        cells = rows[:, part].repeat(len(code), 1, 1)
        cells[..., 0] = code.unsqueeze(1)
        cells[..., 1] = torch.cat([own.nodes.new_zeros(n_codes, n), own.nodes])
        every = rows.repeat(len(code), 1, 1, 1)
        every[:, :, part] = cells
        flat = every.flatten(0, 1)
        log_p = chain.log_prob(flat if n_codes == 0 and not chain.has_cells else self._packed(flat))
        log_w = torch.zeros_like(log_p).view(len(code), n)
        log_w[n_codes:] = own.log_weights - own.log_density
        if n_codes and chain.has_cells:
            drawing = Drawing(chain, n_candidates=1)
            at_mass, _ = drawing.at_masses(own.nodes.unsqueeze(1), torch.tensor([part]))
            log_w[n_codes:] = log_w[n_codes:].masked_fill(at_mass[:, 0], -torch.inf)
        return torch.logsumexp(log_p.view(log_w.shape) + log_w, 0)

    def _packed(self, packed: Tensor) -> Tensor:
        """Rows with new codes and scores, with the places and ends of their cells."""
        columns = self.chain.columns
        coded = columns.unpack(packed[..., 0].double(), packed[..., 1].double())
        return columns.pack(coded)[0].to(packed)

    def log_marginal(self, draws: Draws, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Log of the marginal density ``(n,)`` of what is seen, and its standard error.

        Weights are of densities by the learned ``b``; a few draws of each row tell what exact
        normalisers change.
        """
        log_mean, se, _ = draws.log_mean()
        todo = torch.nonzero(~draws.exact & torch.isfinite(log_mean))[:, 0]
        if len(todo) == 0:
            return log_mean, se
        counts = torch.zeros(len(draws.exact), dtype=torch.long)
        counts[todo] = CORRECTED
        with seeded(seed):
            chosen = draws.pick(counts)
        ratio = (self._exact(draws.completed[chosen]) - draws.log_p[chosen]).view(-1, CORRECTED)
        change = torch.logsumexp(ratio, 1) - math.log(CORRECTED)
        log_mean[todo] += change
        spread = (ratio - change.unsqueeze(1)).exp().var(1) / CORRECTED
        se[todo] = torch.hypot(se[todo], spread.clamp_max(1e6).sqrt())
        return log_mean, se

    @torch.no_grad()
    def within(self, effort: Effort, limits: Limits, *, whole: bool, seed: int) -> Draws:
        """Draws of one row of which nothing is seen, within limits.

        Part after part of each order is drawn within its limits; the product of the probabilities
        of these is the weight, whose mean is the probability of all limits together. Unless rows
        are to be ``whole``, parts after the last limit are left.
        """
        allowed = limits.allowed or [None] * self.chain.dim
        drawing = Drawing(
            self.fast, n_candidates=CANDIDATES, allowed=allowed, gaps=limits.gaps,
            weighted=True, normalised=True,
        )  # fmt: skip
        needed = None if whole else torch.tensor([of_part is not None for of_part in allowed])
        goal, most = 0.0, effort.most
        if limits.wanted is not None:
            goal = float(limits.wanted[0])
            most = max(most, 8 * int(goal))
        n, draws = max(EVENT_DRAWS, min(int(goal), DRAWS_AT_ONCE)), None
        with seeded(seed):
            while True:
                more = self._within(n, drawing, needed)
                if limits.obey is not None and not limits.boxed:
                    more = more.without(~limits.obey(self.coded(more.completed)))
                draws = more if draws is None else draws.joined(more)
                n_all, (_, se, ess) = len(draws.row), draws.log_mean()
                times = (float(se) / effort.event_se) ** 2  # of these draws that are called for
                if limits.wanted is not None:
                    times = goal / max(float(ess), 1.0)
                if times <= 1 or n_all >= most:
                    return draws
                n = min(math.ceil(n_all * min(max(1.1 * times - 1, 0.25), 2.0)), most - n_all)

    def _within(self, n: int, drawing: Drawing, needed: Tensor | None) -> Draws:
        """``n`` of these draws, or a few more: as many by each order."""
        rows, log_w, orders = [], [], torch.arange(self.fast.n_orderings)
        for start in range(0, n, DRAWS_AT_ONCE):
            of_order = -(-min(n - start, DRAWS_AT_ONCE) // len(orders))
            drawn = torch.zeros(len(orders), of_order, self.chain.dim, 4)
            kept = torch.zeros(drawn.shape[:3], dtype=torch.bool)
            log_w.append(drawing.fill(drawn, kept, needed=needed).flatten().double())
            rows.append(drawn.flatten(0, 1))
        order = torch.cat([orders.repeat_interleave(len(r) // len(orders)) for r in rows])
        row, none = torch.zeros_like(order), torch.zeros(1, dtype=torch.bool)
        weights = torch.cat(log_w)
        return Draws(row, torch.cat(rows), weights, none, torch.zeros_like(weights), order)


def strata_joined(strata: Sequence[Draws], log_weights: Tensor) -> Draws:
    """Draws of the members of a mixture, whose mean weight is that of the mixture."""
    total = sum((draws.counts for draws in strata), torch.zeros(len(strata[0].exact)).long())
    joined, first = None, 0
    for draws, log_weight in zip(strata, log_weights, strict=True):
        more = (total / draws.counts.clamp_min(1)).log().double() + log_weight
        weighed = draws._replace(
            log_w=draws.log_w + more[draws.row],
            exact=torch.zeros_like(draws.exact),
            stratum=draws.stratum + first,
        )
        first += draws.n_strata
        joined = weighed if joined is None else joined.joined(weighed)
    assert joined is not None
    return joined


def few_effective(draws: Draws) -> None:
    """Warn where few draws of rows have a weight that counts."""
    few = draws.log_mean()[2] < FEW_EFFECTIVE
    few &= ~draws.exact
    if bool(few.any()):
        warnings.warn(
            f"{int(few.sum()):,} of {len(few):,} rows are completed from fewer than "
            f"{FEW_EFFECTIVE} effective draws: what they are given is rare; ask for more draws "
            "(accuracy=)",
            SelfnormWarning,
            stacklevel=2,
        )


def _n_values(part: Part, gaps: bool) -> int:
    """How many values a finite part can take."""
    return max(1, part.n_codes - (part.gap and not gaps))


def judged_weights(log_w: Tensor) -> tuple[float, float]:
    """Effective number of draws, and tail index of their weights ``(M,)``."""
    log_w = log_w[log_w > -torch.inf]
    if len(log_w) == 0:
        return 0.0, math.inf
    w = torch.softmax(log_w, 0)
    ess = float(1 / w.square().sum())
    if float(w.max()) * len(w) < FLAT:
        return ess, 0.0
    return ess, tail_index(log_w)
