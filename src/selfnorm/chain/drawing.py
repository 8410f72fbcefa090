"""Rows of a table drawn from a chain, part by part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from selfnorm.chain.layout import PackedRows
from selfnorm.chain.lines import LinePrediction
from selfnorm.chain.model import Factors, chosen
from selfnorm.columns import GAP, CodedColumns, PartValues
from selfnorm.distributions import Mixture1d
from selfnorm.functional import log_mean_exp

if TYPE_CHECKING:
    from selfnorm.chain.table import TableChain

SAME_SCORE = 1e-6  # of normal scores that are those of one cell


@dataclass(frozen=True)
class Allowed:
    """The values that drawn parts may take.

    Attributes:
        outcomes: ``(p, K)`` which codes, and which numbers: at the place ``n_codes``.
        ends: ``(p, I, 2)`` of the intervals of numbers, in normal scores.
        limited: ``(p,)`` whether numbers have intervals at all.
        some: ``(p,)`` whether some value is not allowed.
    """

    outcomes: Tensor
    ends: Tensor
    limited: Tensor
    some: Tensor

    @classmethod
    def of(
        cls, columns: CodedColumns, values: Sequence[PartValues | None] | None, gaps: bool
    ) -> Allowed | None:
        """Those of some values of each part, ``None`` for all; ``gaps`` are values, too, or not.

        ``None`` where every value is allowed.
        """
        parts = columns.parts
        values = [None] * len(parts) if values is None else values
        without = not gaps and any(part.gap for part in parts)
        if not without and all(part is None for part in values):
            return None
        most = max((len(v.intervals) for v in values if v is not None), default=0)
        outcomes = torch.ones(len(parts), 1 + max(part.n_codes for part in parts), dtype=torch.bool)
        ends = torch.zeros(len(parts), max(most, 1), 2, dtype=torch.float64)
        for j, (part, of_part) in enumerate(zip(parts, values, strict=True)):
            if of_part is not None:
                outcomes[j, : part.n_codes] = torch.from_numpy(of_part.codes)
                outcomes[j, part.n_codes] = part.rest and len(of_part.intervals) > 0
                if outcomes[j, part.n_codes]:
                    intervals = torch.tensor(of_part.intervals, dtype=torch.float64)
                    ends[j, : len(intervals)] = _scores_of(columns, j, intervals)
            if part.gap and not gaps:
                outcomes[j, part.gap_code] = False
        limited = torch.tensor([v is not None for v in values])
        return cls(outcomes, ends, limited, limited | ~outcomes.all(1))


def _scores_of(columns: CodedColumns, j: int, intervals: Tensor) -> Tensor:
    """Normal scores of intervals ``(I, 2)`` of a part's numbers; cells at limits are open."""
    part = columns.parts[j]
    scores = columns.to_scores(intervals.clamp(-1e300, 1e300).view(-1, 1), torch.tensor([j]))[0]
    low = -math.inf if part.low is None else part.low + 1e-3 * part.step
    high = math.inf if part.high is None else part.high - 1e-3 * part.step
    scores = scores.view(-1, 2).to(intervals)
    scores = torch.where(intervals <= low, -math.inf, scores)
    return torch.where(intervals >= high, math.inf, scores)


class Drawing:
    """Fills the parts of rows one by one, in each chain's own order.

    A draw that comes with a weight is *properly weighted* for the unnormalised density
    ``g(x_T) = prod_i q_i(x_i) exp(-E_i(x_i) - b_i)`` of the drawn parts ``T`` on what is allowed:
    ``E[w f(x)]`` is the integral of ``g f``. A number is chosen among candidates in proportion to
    ``exp(-E)``, and brings the mean of these, over ``exp(b)``, into the weight. With ``normalised``
    it brings what is allowed of the factor, ``b`` being the mean over all values.

    Args:
        chain: what rows are drawn from.
        n_candidates: proposal samples of which a number is chosen.
        within: whether numbers stay in the range of the training rows.
        allowed: the values of drawn parts; ``None``: all but gaps.
        gaps: whether gaps are drawn that are outcomes of a part.
        weighted: whether draws have weights.
        normalised: see above.
    """

    def __init__(
        self,
        chain: TableChain,
        *,
        n_candidates: int,
        within: bool = False,
        gaps: bool = False,
        allowed: Sequence[PartValues | None] | None = None,
        weighted: bool = False,
        normalised: bool = False,
    ) -> None:
        self.chain, self.layout = chain, chain.layout
        self.n_candidates, self.within = n_candidates, within
        self.allowed = Allowed.of(chain.columns, allowed, gaps)
        self.weighted, self.normalised = weighted, normalised
        self.orders = torch.arange(chain.n_orderings, device=chain.device)
        self.place_of_finite = self._places(self.layout.finite)
        self.place_of_number = self._places(self.layout.numbers)
        is_number = (self.place_of_number >= 0).to(self.layout.number_code)
        self.only_code = self.layout.number_code - 1 + is_number  # of parts of one outcome

    def _places(self, which: Tensor) -> Tensor:
        """``(p,)``: places of parts among those listed, -1 where they are not."""
        places = which.new_full((self.chain.dim,), -1)
        places[which] = torch.arange(len(which), device=which.device)
        return places

    def fill(
        self, packed: Tensor, keep: Tensor, *, shown: bool = True, needed: Tensor | None = None
    ) -> Tensor:
        """Draw the parts of ``packed (R, n, p, 4)`` in place, but for those to ``keep``.

        Returns log-weights ``(R, n)``. ``shown``: whether the network sees what is kept before it
        comes to it in the order. ``needed (p,)``: parts after the last of which no more is drawn.
        """
        chain = self.chain
        given = keep if shown and bool(keep.any()) else None
        packed[..., 0] = packed[..., 0].where(keep, float(GAP))
        rows = PackedRows.of(packed)
        inputs = chain.inputs(rows)
        course = chain.trunk.course(packed.shape[1], chain.condition(rows, given, inputs))
        if chain.lines is not None:
            inputs = torch.nn.functional.pad(inputs, (0, 1))
        log_w = packed.new_zeros(packed.shape[:2])
        by_rank = chain.trunk.ranks.argsort(1).T  # (p, R): the parts at one place of each order
        to_draw = torch.stack([~keep[self.orders, :, part] for part in by_rank])
        of_rank = to_draw.flatten(1).any(1)
        if needed is not None:
            of_rank &= needed[by_rank].any(1)
        last = int(of_rank.nonzero().max()) if bool(of_rank.any()) else -1
        for rank, part in enumerate(by_rank[: last + 1]):
            features = course.features(rank, inputs.flatten(-2))
            line = self._line(packed, part)
            if bool(to_draw[rank].any()):
                code, z, log_part = self._draw(features, part, line)
                old, free = packed[self.orders, :, part], to_draw[rank].unsqueeze(-1)
                new = torch.cat([torch.stack([code.to(z), z], -1), old[..., 2:]], -1)
                packed[self.orders, :, part] = torch.where(free, new, old)
                log_w += log_part.where(to_draw[rank], 0.0)
            elif line is None:  # what is kept has been seen
                continue
            self._see(inputs, packed, part, line)
        return log_w

    def _line(self, packed: Tensor, part: Tensor) -> LinePrediction | None:
        """The line ``(R, n)`` of one part for each order, by the numbers before it."""
        if self.chain.lines is None:
            return None
        z, _ = self.chain.scores(PackedRows.of(packed))
        return self.chain.lines.at(z, self.place_of_number[part].clamp_min(0))

    def _see(
        self, inputs: Tensor, packed: Tensor, part: Tensor, line: LinePrediction | None
    ) -> None:
        """Put what is there of one part for each order in the inputs ``(R, n, p, per_part)``."""
        rows = PackedRows.of(packed[self.orders, :, part])
        of_part = self.chain.inputs(rows, part.unsqueeze(1))
        if line is not None:
            is_number = rows.observed & (rows.code == self.layout.number_code[part].unsqueeze(1))
            of_part = torch.cat([of_part, line.off(rows.z).where(is_number, 0.0).unsqueeze(-1)], -1)
        inputs[self.orders, :, part] = of_part

    def _draw(
        self, features: Tensor, part: Tensor, line: LinePrediction | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Codes, normal scores and log-weights ``(R, n)`` of one part for each order."""
        place = self.place_of_number[part]
        if not bool((place >= 0).any()):
            code, log_w = self._codes(features, part, None)
            return code, torch.zeros_like(log_w), log_w
        at = self.chain.number_at(features, place.clamp_min(0), line)
        limits = None
        if self.allowed is not None and bool(self.allowed.limited[part].any()):
            limits = _Within(at.proposal, *self._intervals(part))
        log_inside = None if limits is None else limits.log_mass
        code, log_w = self._codes(features, part, log_inside)
        z, log_mean = self._numbers(at, part, limits)
        is_number = code == self.layout.number_code[part, None]
        log_w = log_w + log_mean.where(is_number, 0.0)
        z = z.where(is_number, 0.0)
        if self.normalised and self.chain.has_cells:  # a number at a point mass is the mass
            at_mass, mass = self.at_masses(z, part)
            at_mass &= is_number
            code, z = torch.where(at_mass, mass, code), z.where(~at_mass, 0.0)
        return code, z, log_w

    def _intervals(self, part: Tensor) -> tuple[Tensor, Tensor]:
        """Ends ``(R, I)`` of the numbers that are allowed; all of those without limits."""
        assert self.allowed is not None
        low, high = self.allowed.ends[part].unbind(-1)
        free = ~self.allowed.limited[part].unsqueeze(1)
        first = torch.arange(low.shape[1]) == 0
        low = torch.where(free, torch.where(first, -math.inf, 0.0), low)
        return low, torch.where(free, torch.where(first, math.inf, 0.0), high)

    def _codes(
        self, features: Tensor, part: Tensor, log_inside: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """A code of one part for each order, and the log-probability ``(R, n)`` of what is allowed.

        ``log_inside``: of the numbers that are allowed, given that it is a number.
        """
        layout, finite = self.layout, self.place_of_finite[part]
        code = self.only_code[part].unsqueeze(1).expand(features.shape[:2])
        if self.allowed is None and not bool((finite >= 0).any()):
            return code, features.new_zeros(features.shape[:2])
        n_outcomes = layout.widest
        outcome = torch.arange(n_outcomes, device=features.device)
        only = torch.where(outcome == code.unsqueeze(-1), 0.0, -torch.inf).to(features)
        if len(layout.finite):
            which = finite.clamp_min(0)
            logits = torch.log_softmax(self.chain.code_logits(features, which), -1)
            only = torch.where((finite >= 0)[:, None, None], logits, only)
        if self.normalised and not (self.allowed and bool(self.allowed.some[part].any())):
            return picked(only.exp()), features.new_zeros(features.shape[:2])
        if self.allowed is not None:
            outcomes = self.allowed.outcomes[part, :n_outcomes]
            only = only.masked_fill(~outcomes.unsqueeze(1), -torch.inf)
            if log_inside is not None:
                number = outcome == layout.number_code[part, None]
                only = only + log_inside.unsqueeze(-1).where(number.unsqueeze(1), 0.0)
        log_total = torch.logsumexp(only, -1)
        # where nothing is allowed any draw will do: its weight is zero
        shares = torch.softmax(only.where(log_total.unsqueeze(-1) > -torch.inf, 0.0), -1)
        if self.normalised:
            return picked(shares), log_total
        return torch.multinomial(shares.flatten(0, 1), 1).view(code.shape), log_total

    def _numbers(self, at: Factors, part: Tensor, limits: _Within | None) -> tuple[Tensor, Tensor]:
        """Normal scores of a number of one part for each order, and log-weights, ``(R, n)``."""
        chain, proposal = self.chain, at.proposal
        y = self._rounded(proposal.sample(self.n_candidates), part)
        log_f = chain.energy(y, at)  # (S, R, n, 1)
        log_w = torch.zeros_like(log_f[0, ..., 0])
        if self.normalised and limits is not None:
            assert self.allowed is not None
            log_z = log_mean_exp(log_f)[..., 0]
            y = self._rounded(limits.sample(self.n_candidates), part)
            log_f = chain.energy(y, at)
            log_w = log_mean_exp(log_f)[..., 0] - log_z
            log_w = log_w.where(self.allowed.limited[part, None], 0.0)
        elif self.weighted and not self.normalised:
            if limits is not None:
                y = self._rounded(limits.sample(self.n_candidates), part)
                log_f = chain.energy(y, at)
            if chain.has_cells:
                at_mass = self.at_masses(y[..., 0], part)[0]
                log_f = log_f.masked_fill(at_mass.unsqueeze(-1), -torch.inf)
            log_w = (log_mean_exp(log_f) - chain.energy.log_norm(at.context))[..., 0]
            log_f = log_f.where(log_w.unsqueeze(-1) > -torch.inf, 0.0)
        if self.normalised:
            pick = picked(torch.softmax(log_f, 0).movedim(0, -1))
            drawn = y.gather(0, pick.unsqueeze(0))[0, ..., 0]
        else:
            drawn = chosen(y, log_f)
        if self.within:
            low, high = chain.columns.span[part].view(-1, 1, 2).unbind(-1)
            drawn = torch.minimum(torch.maximum(drawn, low), high)
        return drawn, log_w

    def _rounded(self, y: Tensor, part: Tensor) -> Tensor:
        """Scores ``(S, R, n, 1)`` to centres of cells, order ``r`` being at ``part[r]``."""
        chain = self.chain
        if not chain.has_cells:
            return y
        by_order = y.squeeze(-1).movedim(1, -1)  # (S, n, R)
        moved = chain.columns.rounded(by_order, 0.0, part)
        has_cells = (chain.columns.step > 0)[part]
        return torch.where(has_cells, moved, by_order).movedim(-1, 1).unsqueeze(-1)

    def at_masses(self, z: Tensor, part: Tensor) -> tuple[Tensor, Tensor]:
        """Which scores ``(.., R, n)`` are in the cell of a point mass, and the code of that."""
        columns = self.chain.columns
        exists = torch.arange(columns.values.shape[1]) < columns.n_values[part, None]
        exists &= self.layout.at_mass[part, None]
        masses = columns.to_scores(columns.values[part].T, part)[0].T.to(z)  # (R, K)
        masses = masses.masked_fill(~exists, torch.inf)
        ordered, code = masses.sort(-1)
        flat = z.movedim(-2, 0).flatten(1).contiguous()  # (R, ..)
        place = torch.searchsorted(ordered, flat - SAME_SCORE).clamp_max(ordered.shape[1] - 1)
        same = (ordered.gather(1, place) - flat).abs() <= SAME_SCORE * (1 + flat.abs())
        shape = z.movedim(-2, 0).shape
        same, code = same.view(shape), code.gather(1, place).view(shape)
        return same.movedim(0, -2), code.movedim(0, -2)


def picked(shares: Tensor) -> Tensor:
    """``(*batch,)``: indices in proportion to shares ``(*batch, K)``, by a random number each."""
    below = shares.cumsum(-1)
    level = (1 - torch.rand_like(below[..., :1])) * below[..., -1:]  # in (0, 1]: no share of zero
    return (below < level).sum(-1)


class _Within:
    """Mixtures ``(R, N, 1)`` within intervals: their mass there, and stratified draws.

    In double precision: the mass beyond a far end has no digits otherwise.

    Args:
        mixture: the mixtures.
        low, high: ends ``(R, I)`` of disjoint intervals; those of no length hold nothing.
    """

    def __init__(self, mixture: Mixture1d, low: Tensor, high: Tensor) -> None:
        self._of, self._like = mixture.to(torch.float64), mixture.loc
        ends = (end[:, None, None, None, :] for end in (low, high))
        self._below, above = map(self._of.component_cdf, ends)  # (R, N, 1, K, I)
        self._share = (above - self._below).clamp_min(0.0)
        mass = self._of.log_pi.exp().unsqueeze(-1) * self._share
        self.log_mass = mass.sum((-1, -2)).log()[..., 0].to(self._like)

    def sample(self, n: int) -> Tensor:
        """``(n, R, N, 1)``."""
        return self._of.sample_pieces(n, self._below, self._share).to(self._like)
