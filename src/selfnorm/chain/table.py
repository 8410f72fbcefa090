"""A chain over columns of every kind: categories, point masses, cells, numbers, gaps."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from selfnorm._context import SeedLike, seeded
from selfnorm._saved import saved
from selfnorm.chain.drawing import Drawing
from selfnorm.chain.layout import PackedRows, PartLayout
from selfnorm.chain.lines import MOST_ROWS, LinePrediction, Lines
from selfnorm.chain.model import Chain, Factors, RowTerms, orderings_of, outputs_at
from selfnorm.columns import FAR, GAP, CodedColumns, Part
from selfnorm.distributions import Mixture1d
from selfnorm.errors import DataError
from selfnorm.functional import log_mean_exp
from selfnorm.networks import ResMADE

N_KNOTS = 17  # normal quantiles between which a network sees the place of a number
N_NODES, FINE_NODES = 64, 256  # of the quadrature of a factor; of one or two numbers in all
LEVEL_COMPONENTS = 4  # of the mixtures over levels on a grid
DRAWN_AT_ONCE = 1024  # rows, part by part
# tensors that all orders share; every other one has one entry for each order
SHARED_BY_ORDERS = ("columns.", "tokens.", "energy.frequencies")


def _padded(mask: Tensor, n: int) -> Tensor:
    """A mask ``(k, p)`` of the first of ``n`` rows, ``(n, p)``: false for the others."""
    return nn.functional.pad(mask, (0, 0, 0, n - len(mask)))


class ColumnDensity(NamedTuple):
    """``p(x_j | rest)`` of one part at ``n`` rows, a mixture over the orders.

    Args:
        log_codes: ``(n, K)`` log-probabilities of the codes, that of "a number" last.
        nodes: ``(m, n)`` normal scores at which the distribution of the number is computed.
        log_weights: ``(m, n)`` log-probabilities of the nodes, given that it is a number.
        log_density: ``(m, n)`` log-density there, with respect to normal scores, or log-mass of
            the cell.
        log_own: ``(n,)`` the same at the number that the row has.
    """

    log_codes: Tensor
    nodes: Tensor
    log_weights: Tensor
    log_density: Tensor
    log_own: Tensor


@saved()
class TableChain(Chain):
    r"""``p(x) = 1/R sum_r prod_i p_r(x_i | x_before i in order r)`` over parts of every kind.

    A masked residual network for each of ``R`` saved orders reads the parts before part ``i`` and
    yields the probabilities of its codes (a finite factor has an exact ``Z``: its energies are
    normalised by their sum) and, where numbers are possible, a one-dimensional EBM on a mixture
    proposal, as in :class:`~selfnorm.AutoregressiveEBM`. A number with cells has the discretised
    mixture as proposal and an energy at the centre of each cell, so that ``Z`` is a sum again.
    A gap is a token of its own, and its factor is left out, unless its part has a code for it
    (``Part.gap``): then it is one more outcome. A second channel shows the network the columns that
    are *given*, so that any conditional takes one pass. The chain is trained on random choices of
    given and missing columns.

    Rows are those of :meth:`CodedColumns.pack <selfnorm.columns.CodedColumns.pack>`; densities are
    with respect to normal scores of continuous numbers and counting measure in everything else.

    Args:
        parts: what the parts of the table are.
        orderings: how many orders, or the ranks themselves.
        n_knots: of the map to normal scores.
        embedding: numbers by which a network sees a code.
        masked: share of the rows that are trained with random columns given or missing.
        ordered: whether finite factors of many numbers on a grid have a mixture, as those of
            numbers with cells do: by ``p(k) ~ q(cell k) exp(-E_k)`` close levels are alike.
        lines: whether factors of numbers are relative to :class:`~selfnorm.chain.lines.Lines`.
        others: as in :class:`~selfnorm.AutoregressiveEBM`.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> parts = [Part(0, "kind", 3, rest=False, unseen=0.01), Part(1, "size", 0, rest=True)]
        >>> model = TableChain(parts, hidden=16, components=3, context=4, energy_hidden=8).eval()
        >>> x = torch.tensor([[[2.0, 0.0], [0.0, 0.3]]])
        >>> packed, _ = model.columns.pack(x)
        >>> model.log_prob(packed).shape, model.sample(5, seed=0).shape
        (torch.Size([1]), torch.Size([5, 2, 4]))
    """

    quantiles: Tensor

    def __init__(
        self,
        parts: Sequence[Any],
        *,
        orderings: int | Sequence[Sequence[int]] = 1,
        hidden: int = 256,
        blocks: int = 2,
        components: int = 8,
        context: int = 32,
        energy_hidden: int = 32,
        energy_blocks: int = 1,
        drop: float = 0.1,
        embedding: int = 16,
        n_knots: int = 64,
        masked: float = 0.4,
        ordered: bool = False,
        lines: bool = False,
    ) -> None:
        super().__init__()
        parts = [part if isinstance(part, Part) else Part(**part) for part in parts]
        ranks = orderings_of(orderings, len(parts))
        self.config: dict[str, Any] = {"parts": parts, "orderings": ranks.tolist()}
        self.dim, self.masked = len(parts), masked
        self.columns = CodedColumns(parts, n_knots)
        self.layout = PartLayout(parts, ordered=ordered)
        self.has_cells = len(self.layout.cells) > 0
        lines = lines and len(self.layout.numbers) > 0
        self.lines = Lines(len(ranks), len(self.layout.numbers)) if lines else None
        self.tokens = nn.Embedding(self.layout.n_tokens, embedding)
        nn.init.normal_(self.tokens.weight, std=0.5)
        per_part = embedding + N_KNOTS + lines
        shape = {"per_column": per_part, "condition_dim": len(parts) * per_part}
        self.trunk = ResMADE(ranks, hidden=hidden, blocks=blocks, drop=drop, **shape)
        self._make_number_heads(
            self.layout.numbers.tolist(), components=components, family="logistic",
            context=context, energy_hidden=energy_hidden, energy_blocks=energy_blocks,
        )  # fmt: skip
        levels = self.layout.ordered.tolist()
        if levels:
            self.level_head = self.trunk.head(
                [3 * LEVEL_COMPONENTS * (j in levels) for j in range(self.dim)]
            )
            with torch.no_grad():
                self.level_head.weight.mul_(0.2)
        probabilities = torch.linspace(0, 1, N_KNOTS)
        probabilities[0], probabilities[-1] = 0.005, 0.995
        self.register_buffer("quantiles", torch.special.ndtri(probabilities), persistent=False)
        self.code_head = self.trunk.head(self.layout.outcomes)
        with torch.no_grad():
            self.code_head.weight.mul_(0.2)
        self.start_at_marginals()

    def set_columns(self, columns: CodedColumns) -> TableChain:
        """Take map and frequencies as ``columns`` has them; start every factor at its marginal."""
        self.columns.load_state_dict(columns.state_dict())
        self.start_at_marginals()
        return self

    @torch.no_grad()
    def start_at_lines(self, packed: Tensor, weights: Tensor) -> TableChain:
        """Begin at lines fitted to packed rows ``(n, p, 4)`` that count ``weights (n,)``.

        Factors of numbers start at the quantiles of what is left.
        """
        assert self.lines is not None
        rows = PackedRows.of(packed[:MOST_ROWS].to(self.device))
        z, is_number = self.scores(rows)
        self.lines.fit(z, weights[:MOST_ROWS].to(z), self.trunk.ranks[:, self.layout.numbers])
        mean, spread = self.lines(z)
        left = ((z - mean) / spread).masked_fill(~is_number, torch.nan).double()
        levels = torch.special.ndtr(self.quantiles.double())
        knots = torch.nanquantile(left, levels, dim=1).movedim(0, -1)
        self._start_numbers_at(knots.where(knots.isfinite(), self.quantiles).to(self.quantiles))
        return self

    def scores(self, rows: PackedRows) -> tuple[Tensor, Tensor]:
        """``(..., D)``: the numbers of rows, zero where there is none, and where there are."""
        is_number = rows.is_number(self.layout)[..., self.layout.numbers]
        return rows.z[..., self.layout.numbers].where(is_number, 0.0), is_number

    def line_of(self, rows: PackedRows) -> LinePrediction | None:
        """The lines ``(R, n, D)`` of the numbers of rows; ``None`` where the chain has none."""
        return None if self.lines is None else self.lines(self.scores(rows)[0])

    def of_orders(self, orders: Sequence[int]) -> TableChain:
        """A copy with these orders alone, in this sequence."""
        orders = list(orders)
        ranks = self.trunk.ranks[orders]
        with seeded(0):  # the caller's random stream stays where it is
            chain = TableChain(**self.config | {"orderings": ranks.tolist()}).to(self.quantiles)
        state = self.state_dict()
        chain.load_state_dict(
            {k: v if k.startswith(SHARED_BY_ORDERS) else v[orders] for k, v in state.items()}
        )
        return chain.train(self.training)

    def chunks(self, n: int, nodes: int, chunk_size: int | None = None) -> Iterator[slice]:
        """Slices of ``n`` rows small enough, the levels of their parts included."""
        # a level is a number, a node of a factor many; an ordered one has several components
        n_levels = (len(self.layout.ordered) + len(self.layout.finite) / 8) * self.layout.widest
        return super().chunks(n, nodes + int(n_levels // self.dim), chunk_size)

    @torch.no_grad()
    def start_at_marginals(self) -> None:
        """Begin at independent columns: frequencies of codes, the normal distribution of scores."""
        layout = self.layout
        self._start_numbers_at(self.quantiles.expand(self.n_numbers, -1))
        logits = self.columns.log_share[layout.finite].to(self.quantiles)  # (F, widest or more)
        if len(layout.ordered):  # a normal distribution has these masses in their cells
            knots = self.quantiles.expand(len(layout.ordered), -1)
            self._start_numbers_at(knots, self.level_head, LEVEL_COMPONENTS)
            logits[layout.ordered_finite] = 0.0
        flat = logits[:, : layout.widest][~layout.absent]
        assert self.code_head.bias is not None
        self.code_head.bias.copy_(flat.expand_as(self.code_head.bias))

    def _level_edges(self) -> Tensor:
        """``(O, widest + 1)``: normal scores between the levels of ordered parts."""
        which, widest = self.layout.ordered, self.layout.widest
        share = self.columns.log_share[which, :widest].double().exp()
        exists = torch.arange(widest, device=share.device) < self.layout.number_code[which, None]
        below = (share * exists).cumsum(-1)
        scores = torch.special.ndtri((below / below[:, -1:])[:, :-1]).clamp(-FAR, FAR)
        return nn.functional.pad(nn.functional.pad(scores, (1, 0), value=-FAR), (0, 1), value=FAR)

    def _level_logits(self, features: Tensor) -> Tensor:
        """``(R, n, O, widest)``: log-masses of the levels of ordered parts by their mixtures."""
        raw = self.trunk.outputs(self.level_head, features, 3 * LEVEL_COMPONENTS)
        edges, absent = self._level_edges().to(raw), self.layout.absent[self.layout.ordered_finite]
        left, right = edges[:, :-1].masked_fill(absent, 0.0), edges[:, 1:].masked_fill(absent, 1.0)
        mixture = Mixture1d.from_raw(raw.unsqueeze(-2), LEVEL_COMPONENTS, family=self.family)
        return mixture.log_mass(left, right)

    # -- one pass -----------------------------------------------------------------------------

    def check(self, x: object) -> Tensor:
        """Packed rows ``(n, p, 4)`` on the model's device and dtype."""
        if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[1:] != (self.dim, 4):
            raise DataError(f"expected packed rows of shape (n, {self.dim}, 4)")
        return x.to(self.quantiles)

    def given(self, condition: object, n: int) -> Tensor | None:
        """The parts conditioned on, ``(n, p)`` of bool; ``None`` where there are none."""
        if condition is None:
            return None
        return torch.as_tensor(condition, dtype=torch.bool, device=self.device).expand(n, self.dim)

    def start(
        self, x: Tensor, weights: Tensor | None = None, learned: Tensor | None = None
    ) -> None:
        """Check packed rows; the columns were fitted before, or the rows could not be packed."""
        del weights, learned
        if not bool(torch.isfinite(self.check(x)).all()):
            raise DataError("packed rows hold NaN or infinity")

    def inside(self, x: Tensor) -> Tensor:
        """``(n,)``: all rows, since every value has a probability."""
        return torch.ones(len(x), dtype=torch.bool, device=x.device)

    def inputs(self, rows: PackedRows, part: Tensor | None = None) -> Tensor:
        """``(..., p, per_part)``: a token's numbers, then the place of a number among quantiles.

        Of rows of other parts than all: ``part``, of the shape of their codes.
        """
        layout = self.layout
        part = torch.arange(self.dim, device=self.device) if part is None else part
        token = torch.where(rows.observed, rows.code, layout.gap_token[part])
        left, right = self.quantiles[:-1], self.quantiles[1:]
        z, is_number = rows.z, rows.observed & (rows.code == layout.number_code[part])
        if len(layout.ordered):
            edges = self._level_edges().clamp(-4.0, 4.0).to(z)
            middle = edges.new_zeros(self.dim, edges.shape[1] - 1)
            middle[layout.ordered] = (edges[:, :-1] + edges[:, 1:]) / 2
            is_ordered = torch.isin(part, layout.ordered)
            place = middle[part, rows.code.clamp_max(middle.shape[1] - 1)]
            z = torch.where(is_ordered, place, z)
            is_number = torch.where(is_ordered, rows.observed & ~rows.unseen, is_number)
        z = z.unsqueeze(-1)
        number = torch.cat([torch.asinh(z), ((z - left) / (right - left)).clamp(0, 1)], -1)
        token = token + layout.first_token[part]
        return torch.cat([self.tokens(token), number * is_number.unsqueeze(-1)], -1)

    def features(
        self, rows: PackedRows, given: Tensor | None = None, line: LinePrediction | None = None
    ) -> Tensor:
        """Hidden features ``(R, n, hidden)`` of rows ``(n, p)``, or ``(R, n, p)``.

        ``given`` may be that of the first rows alone; ``line`` is that of the rows.
        """
        inputs, stack = self.inputs(rows), self.n_orderings
        condition = self.condition(rows, given, inputs)
        if line is not None:
            inputs = self.with_lines(inputs, rows, line)
        features: Tensor = self.trunk(inputs.flatten(-2).expand(stack, -1, -1), condition)
        return features

    def condition(self, rows: PackedRows, given: Tensor | None, inputs: Tensor) -> Tensor | None:
        """``(R, n, p * per_part)``: what is shown of the parts that are given."""
        if given is None:
            return None
        n = given.shape[-2]
        shown = inputs[..., :n, :, :] * (given & rows.observed[..., :n, :]).unsqueeze(-1)
        if self.lines is not None:
            shown = nn.functional.pad(shown, (0, 1))
        return shown.flatten(-2).expand(self.n_orderings, -1, -1)

    def with_lines(self, inputs: Tensor, rows: PackedRows, line: LinePrediction) -> Tensor:
        """Inputs of all parts, and how far numbers are from their lines."""
        z, is_number = self.scores(rows)
        off = line.off(z).where(is_number, 0.0)
        of_parts = off.new_zeros(*off.shape[:-1], self.dim)
        of_parts = of_parts.index_copy(-1, self.layout.numbers, off)
        return torch.cat([inputs.expand(*of_parts.shape, -1), of_parts.unsqueeze(-1)], -1)

    def code_log_probs(self, features: Tensor) -> Tensor:
        """``(R, n, F, widest)``: log-probabilities of the outcomes of all finite parts."""
        logits = self.code_head(features)[..., self.layout.logit]
        if len(self.layout.ordered):
            place = self.layout.ordered_finite
            logits = logits.index_add(-2, place, self._level_logits(features))
        return torch.log_softmax(logits.masked_fill(self.layout.absent, -torch.inf), -1)

    def code_logits(self, features: Tensor, which: Tensor) -> Tensor:
        """``(R, n, widest)``: logits of the outcomes of finite part ``which[r]`` in order ``r``."""
        logits = outputs_at(self.code_head, features, self.layout.logit[which])
        same = which.unsqueeze(1) == self.layout.ordered_finite  # (R, O)
        if bool(same.any()):
            logits = logits + (self._level_logits(features) * same[:, None, :, None]).sum(2)
        return logits.masked_fill(self.layout.absent[which].unsqueeze(1), -torch.inf)

    def rounded(self, y: Tensor, shift: float = 0.0) -> Tensor:
        """Scores ``(..., D)`` of numbers, moved to the centres (or edges) of cells."""
        if not self.has_cells:
            return y
        cells = self.layout.cells
        moved = self.columns.rounded(y[..., cells], shift, self.layout.numbers[cells])
        return y.index_copy(-1, cells, moved)

    def at_rows(
        self,
        x: Tensor,
        given: Tensor | None = None,
        learned: Tensor | None = None,
        *,
        n_samples: int = 0,
        exact: bool = True,
    ) -> RowTerms:
        """The terms of packed rows: ``log_q`` of all parts, ``-E`` of those with numbers.

        ``-E`` and ``log_w`` are zero where a row has no number. With ``exact`` a point mass
        includes the cell at its place; without (in training) its probability is a lower bound.
        ``given`` may be that of the first rows alone: the others have none then. Cells that are
        not ``learned`` count for nothing.
        """
        rows, layout, stack = PackedRows.of(x), self.layout, self.n_orderings
        numbers = layout.numbers
        mask = None if given is None else _padded(given, len(x))
        line = self.line_of(rows)
        features = self.features(rows, given, line)
        target = rows.observed if mask is None else rows.observed & ~mask
        target = target if learned is None else target & learned
        active = (target & rows.is_number(layout))[:, numbers].expand(stack, -1, -1)
        factors = self.factors_of(features, line)._replace(active=active)
        log_codes = self.code_log_probs(features)
        code = rows.code[:, layout.finite].expand(stack, -1, -1).unsqueeze(-1)
        log_code = log_codes.gather(-1, code).squeeze(-1) + layout.log_seen[layout.finite]
        log_number = self._log_proposal(factors.proposal, rows)
        log_q = layout.log_seen.to(features).expand(stack, *rows.code.shape)
        log_q = log_q.index_copy(-1, layout.finite, log_code)
        at_mass = layout.at_mass & target & (rows.code < self.columns.n_values)
        if exact and bool(at_mass.any()):
            every = factors._replace(active=active | at_mass[:, numbers])
            log_z = self.quadrature(every)
            factors = factors._replace(log_z=log_z.where(active, 0.0))
            log_cell = log_number + self.tilt(rows.z[None, None, :, numbers], every)[0] - log_z
            log_q = log_q + self._cells_at_masses(at_mass, log_q, log_codes, log_cell)
        log_q = log_q.index_add(-1, numbers, log_number.where(active, 0.0))
        log_q = log_q.where(target, 0.0)
        unseen = rows.unseen if mask is None else rows.unseen & ~mask
        log_q = torch.where(unseen, layout.log_unseen, log_q)
        y = rows.z[:, numbers].expand(1, stack, -1, -1)
        return self.terms_of(factors, log_q, y, log_q.new_zeros(len(x)), n_samples)

    def _log_proposal(self, proposal: Mixture1d, rows: PackedRows) -> Tensor:
        """``(R, n, D)``: log-density of the numbers, log-mass of those with cells."""
        z, left, right = (t[:, self.layout.numbers] for t in (rows.z, rows.left, rows.right))
        if not self.has_cells:
            return proposal.log_prob(z)
        out = proposal.loc.new_zeros(proposal.loc.shape[:-1])
        cells, others = self.layout.cells, self.layout.continuous
        mass = proposal.at(..., cells, slice(None)).log_mass(left[:, cells], right[:, cells])
        density = proposal.at(..., others, slice(None)).log_prob(z[:, others])
        return out.index_copy(-1, cells, mass).index_copy(-1, others, density)

    def _cells_at_masses(
        self, at_mass: Tensor, log_q: Tensor, log_codes: Tensor, log_cell: Tensor
    ) -> Tensor:
        """What cells of numbers ``(R, n, D)`` add to the log-probability of a point mass there."""
        layout = self.layout
        log_rest = torch.zeros_like(log_q)
        last = layout.number_code[layout.finite].expand(*log_codes.shape[:2], -1).unsqueeze(-1)
        last = last.clamp_max(log_codes.shape[-1] - 1)
        log_rest = log_rest.index_copy(-1, layout.finite, log_codes.gather(-1, last).squeeze(-1))
        both = torch.full_like(log_q, -torch.inf).index_copy(-1, layout.numbers, log_cell)
        added = torch.nn.functional.softplus(both + log_rest - log_q)
        return added.where(at_mass.expand_as(log_q), 0.0)

    @property
    def n_nodes(self) -> int:
        """Of the quadrature of a factor: rows of one or two numbers can afford more."""
        return FINE_NODES if len(self.layout.numbers) <= 2 else N_NODES

    def quadrature(self, at: Factors, n_nodes: int | None = None) -> Tensor:
        """As :meth:`Chain.quadrature`; not once more where it was computed before."""
        if at.log_z is not None and n_nodes in (None, self.n_nodes):
            return at.log_z
        return super().quadrature(at, n_nodes or self.n_nodes)

    def at_batch(self, batch: tuple[Tensor, ...], n_samples: int) -> RowTerms:
        """:meth:`at_rows` of training rows; in training the first of them, a random choice as all
        of a batch are, with random columns given or missing.
        """
        x, given = batch[0], None
        learned = batch[2] if len(batch) > 2 else None
        n_masked = round(self.masked * len(x)) if self.training else 0
        if n_masked:
            given, missing = self._random_masks(n_masked)
            if learned is not None:  # rows with cells that are not to be learned stay as they are
                free = learned[:n_masked].all(-1, keepdim=True)
                given, missing = given & free, missing & free
            code = x[..., 0].masked_fill(_padded(missing, len(x)), float(GAP))
            x = torch.cat([code.unsqueeze(-1), x[..., 1:]], -1)
        return self.at_rows(x, given, learned, n_samples=n_samples, exact=False)

    def weights_of(self, batch: tuple[Tensor, ...]) -> Tensor | None:
        """The second part of a batch, ``(n, R)``."""
        return batch[1].T if len(batch) > 1 else None

    def _random_masks(self, n: int) -> tuple[Tensor, Tensor]:
        """Which parts ``(n, p)`` are given, and which are missing; parts of a column alike.

        A random share of the columns is given. In half of the rows a random share of the others is
        missing.
        """
        draw = torch.rand(2, n, self.layout.n_columns, device=self.device)[..., self.layout.column]
        share, half, rest = torch.rand(3, n, 1, device=self.device)
        given = draw[0] < share
        return given, (half < 0.5) & (draw[1] < rest) & ~given

    def of_random_columns(self, batch: tuple[Tensor, ...], n_samples: int) -> Tensor | None:
        """``(R, n)``: log-likelihood of random columns given the others.

        ``None`` where fewer than half of the rows are trained so.
        """
        if self.masked <= 0.5:
            return None
        n = len(batch[0])
        draw = torch.rand(n, self.layout.n_columns, device=self.device)[:, self.layout.column]
        given = draw < torch.rand(n, 1, device=self.device)
        terms = self.at_rows(batch[0], given, n_samples=n_samples, exact=False)
        return terms.log_prob(log_mean_exp(terms.log_w))

    # -- densities ----------------------------------------------------------------------------

    def log_prob(
        self,
        x: Tensor,
        given: Tensor | Sequence[bool] | None = None,
        *,
        normalizer: str = "quadrature",
        n_nodes: int | None = None,
        chunk_size: int | None = None,
    ) -> Tensor:
        """``(n,)``: log-probability of packed rows given the parts of a mask.

        The mean over the orders. Gaps are left out: the answer is that of the network trained with
        gaps, normalised for each pattern of them. ``normalizer="learned"`` takes the learned
        ``b_i`` in place of a quadrature over ``n_nodes`` nodes for each number (``None``:
        :attr:`n_nodes`), and leaves cells out that point masses stand in.
        """
        return self._log_prob(x, given, normalizer, n_nodes or self.n_nodes, chunk_size)

    @torch.no_grad()
    def column_density(self, x: Tensor, part: int, *, n_nodes: int | None = None) -> ColumnDensity:
        """``p(x_j | all others)`` of part ``j`` at packed rows ``(n, p, 4)``."""
        layout, stack = self.layout, self.n_orderings
        rows = PackedRows.of(self.check(x))
        given = rows.observed & (layout.column != layout.column[part])
        # parts of the same column that come after it in an order are not used
        line = self.line_of(rows)
        features = self.features(rows, given, line)
        log_outcomes = self._log_outcomes(features, part)
        log_codes = log_mean_exp(log_outcomes)
        numbers = layout.numbers.tolist()
        if part not in numbers:
            none = x.new_zeros(0, len(x))
            return ColumnDensity(log_codes, none, none, none, none.sum(0))
        column = slice(numbers.index(part), numbers.index(part) + 1)
        factors = self.factors_of(features, line).at(slice(None), slice(None), column)
        which = layout.numbers[column]
        cells = float(self.columns.step[part]) > 0

        exact = self.columns.knots  # whose map may keep more digits than the network

        def rounded(y: Tensor, shift: float = 0.0) -> Tensor:
            return self.columns.rounded(y.to(exact), shift, which).to(y) if cells else y

        n_nodes = n_nodes or self.n_nodes
        rule = factors.proposal.nodes(n_nodes, rounded if self.has_cells else None)
        y, log_mass = rule  # (m, R, n, 1)
        f = self.energy(y, factors)
        log_z = torch.logsumexp(log_mass + f, 0)
        log_share = (log_mass + f - log_z).squeeze(-1) + log_outcomes[..., -1]  # (m, R, n)
        log_weights = (log_share - math.log(stack)).flatten(0, 1) - log_codes[:, -1]

        def log_density(z: Tensor) -> Tensor:
            """``(m, n)`` mixture over the orders at scores ``(m, n)``."""
            z = z.unsqueeze(1).unsqueeze(-1).expand(-1, stack, -1, -1)
            if cells:
                ends = self.columns.ends(self.columns.from_scores(z.to(exact), which), which)
                log_q = factors.proposal.log_mass(*(end.to(z) for end in ends))
            else:
                log_q = factors.proposal.log_prob(z)
            of_order = (log_q + self.energy(z, factors) - log_z).squeeze(-1)
            return log_mean_exp(of_order + log_outcomes[..., -1], 1) - log_codes[:, -1]

        nodes = y.squeeze(-1).flatten(0, 1)
        own = log_density(rows.z[None, :, part])[0]
        return ColumnDensity(log_codes, nodes, log_weights, log_density(nodes), own)

    def _log_outcomes(self, features: Tensor, part: int) -> Tensor:
        """``(R, n, K)``: log-probabilities of the outcomes of one part, a number's last."""
        layout = self.layout
        finite, log_seen = layout.finite.tolist(), layout.log_seen[part]
        if part not in finite:
            return log_seen.to(features).expand(*features.shape[:2], 1)
        which = torch.full((self.n_orderings,), finite.index(part), device=self.device)
        logits = self.code_logits(features, which)
        return torch.log_softmax(logits[..., : layout.outcomes[part]], -1) + log_seen

    # -- samples ------------------------------------------------------------------------------

    @torch.no_grad()
    def sample(
        self,
        n: int,
        x: Tensor | None = None,
        given: Tensor | Sequence[bool] | None = None,
        *,
        n_candidates: int = 64,
        within: bool = False,
        gaps: bool = False,
        seed: SeedLike = None,
        chunk_size: int | None = None,
    ) -> Tensor:
        """Packed rows ``(n, p, 4)`` without gaps; parts that are ``given`` stay as ``x`` has them.

        Each row follows one of the orders, part by part: a code by its probability, a number by
        importance resampling among ``n_candidates`` stratified proposal samples. ``within`` keeps
        numbers in the range of the training rows: those beyond it come at its ends. A sample of
        as many rows then reaches the ends as often as rows drawn anew from the table would. With
        ``gaps`` those that are outcomes of a part are drawn as well.
        """
        like = self.quantiles
        with seeded(seed, like.device):
            rows = torch.zeros(n, self.dim, 4).to(like)
            keep = torch.zeros(n, self.dim, dtype=torch.bool, device=like.device)
            if x is not None:
                rows, mask = self.check(x), self.given(given, n)
                keep = keep if mask is None else mask & (rows[..., 0] >= 0)
            drawing = Drawing(self, n_candidates=n_candidates, within=within, gaps=gaps)
            return self.filled(drawing, rows, keep, chunk_size=chunk_size)[0]

    def filled(
        self,
        drawing: Drawing,
        x: Tensor,
        keep: Tensor,
        *,
        shown: bool = True,
        needed: Tensor | None = None,
        chunk_size: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Packed rows ``(n, p, 4)`` with all parts drawn but those to ``keep (n, p)``, and weights.

        Each row follows one of the orders, as many rows each. See :class:`Drawing`.
        """
        places = self._random_places(len(x))
        rows, kept = (self._in_orders(t, places) for t in (x, keep))
        log_w = rows.new_zeros(rows.shape[:2])
        size = chunk_size or max(1, DRAWN_AT_ONCE // self.n_orderings)
        for start in range(0, rows.shape[1], size):
            part = slice(start, start + size)
            log_w[:, part] = drawing.fill(rows[:, part], kept[:, part], shown=shown, needed=needed)
        return rows.flatten(0, 1)[places], log_w.flatten(0, 1)[places]

    def single(self) -> TableChain:
        """A copy in single precision."""
        return copy.deepcopy(self).float().eval()
