"""A chain over columns of every kind: categories, point masses, cells, numbers, gaps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from selfnorm._context import SeedLike, seeded
from selfnorm.chain.model import Chain, Factors, RowTerms, orderings_of
from selfnorm.columns import FAR, GAP, UNSEEN, CodedColumns, Part
from selfnorm.distributions import HIDDEN, LEAST_SPREAD, Mixture1d, completed, ridge_lines
from selfnorm.errors import DataError
from selfnorm.functional import log_mean_exp
from selfnorm.networks import ResMADE

N_KNOTS = 17  # quantiles of the normal law between which a network sees the place of a number
N_NODES = 64  # of the quadrature that normalises a factor
# levels of numbers that fill a grid: beyond, their order is told, by so many components
ORDERED_FROM, SCALE_COMPONENTS = 100, 4
MOST_LINES = 24  # columns: beyond, levels of categories have none, and rows are not told apart
MOST_AT_ONCE = 24  # columns: those of a wider table take no more room while samples are drawn
# tensors that all orders share; every other one has one entry for each order
SHARED_BY_ORDERS = ("columns.", "tokens.", "energy.frequencies")
LEAST_CHANGE = 0.1  # of its frequency: the least probability that lines foretell of a level


class Rows(NamedTuple):
    """A batch of rows, ``(n, p)`` each, from the packed ``(n, p, 4)`` of ``CodedColumns``."""

    code: Tensor  # 0 .. n_codes - 1, or n_codes for a number; 0 where nothing was seen
    z: Tensor  # normal score of the number, and of the ends of its cell
    left: Tensor
    right: Tensor
    seen: Tensor
    unseen: Tensor  # a value that no training row had

    @classmethod
    def of(cls, packed: Tensor) -> Rows:
        """From packed rows ``(..., p, 4)``."""
        code, z, left, right = packed.unbind(-1)
        return cls(code.clamp_min(0).long(), z, left, right, code >= 0, code == UNSEEN)


def _on_a_grid(part: Part) -> bool:
    """Whether a finite part has many levels, and most of them are a step from the next."""
    if part.rest or part.gap or not ORDERED_FROM < part.n_codes == len(part.values):
        return False
    steps = np.diff(part.values)
    return bool(np.median(steps) < 1.5 * steps.min())


def _padded(mask: Tensor, n: int) -> Tensor:
    """A mask ``(k, p)`` of the first of ``n`` rows, ``(n, p)``: false for the others."""
    return nn.functional.pad(mask, (0, 0, 0, n - len(mask)))


class Lines(NamedTuple):
    """A normal distribution of numbers and levels, each given those before it and all given ones.

    ``N`` is the number of rows, or 1 where one law is that of all rows.

    Args:
        order: ``(R, N, U)`` the columns, first to last.
        root: ``(R, N, U, U)`` of their covariance, in that order.
        before: the same where the second column is of a part before that of the first, else 0.
        spread: ``(R, N, U)`` around the line.
    """

    order: Tensor
    root: Tensor
    before: Tensor
    spread: Tensor

    def place(self, u: Tensor) -> Tensor:
        """``(R, n, U)``: what the columns before each one say of it at rows ``u (.., n, U)``."""
        order = self.order.expand(-1, u.shape[-2], -1)
        off = u.to(self.root).expand(order.shape).gather(-1, order).unsqueeze(-1)
        apart = torch.linalg.solve_triangular(self.root, off, upper=False)
        ordered = torch.matmul(self.before, apart).squeeze(-1)
        return torch.zeros_like(ordered).scatter(-1, order, ordered).to(u)


class Told(NamedTuple):
    """What lines tell of rows: of numbers a place and its spread ``(R, n, D)``, and what they add
    to the logits of finite parts ``(R, n, F, widest)``.
    """

    place: Tensor
    spread: Tensor
    logits: Tensor


class ColumnLaw(NamedTuple):
    """``p(x_j | rest)`` of one part at ``n`` rows, a mixture over the orders.

    Args:
        log_codes: ``(n, K)`` log-probabilities of the codes, that of "a number" last.
        nodes: ``(m, n)`` normal scores at which the distribution of the number is known.
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


class TableChain(Chain):
    r"""``p(x) = 1/R sum_r prod_i p_r(x_i | x_before i in order r)`` over parts of every kind.

    A masked residual network for each of ``R`` saved orders reads the parts before part ``i`` and
    yields the probabilities of its codes (a finite factor has an exact ``Z``: its energies are
    normalised by their sum) and, where numbers are possible, a one-dimensional EBM on a mixture
    proposal, as in :class:`~selfnorm.AutoregressiveEBM`. A number with cells has the discretised
    mixture as proposal and an energy at the centre of each cell, so that ``Z`` is a sum again.
    A gap is a token of its own, and its factor is left out, unless its part has a code for it
    (``Part.gap``): then it is one more outcome. A second channel shows the network the columns that
    are *given*: any conditional is one pass away. It is trained on random choices of given and
    missing columns.

    Rows are those of :meth:`CodedColumns.pack <selfnorm.columns.CodedColumns.pack>`; densities are
    with respect to normal scores of continuous numbers and counting measure in everything else.

    Args:
        parts: what the parts of the table are.
        orderings: how many orders, or the ranks themselves.
        n_knots: of the map to normal scores.
        embedding: numbers by which a network sees a code.
        masked: share of the rows that are trained with random columns given or missing.
        lines: whether factors of numbers are told from regressions on the numbers before (see
            :meth:`start_at_lines`), a gap as the mean.
        ordered: whether finite factors of many numbers on a grid are told by a mixture, as those of
            numbers with cells are: ``p(k) ~ q(cell k) exp(-E_k)`` knows which levels are close to
            each other.
        conditioned: whether they are told from all that a row has before it or is given, by the
            normal distribution that the regressions make up, in tables of few columns also those
            of categories. More than 24 columns are not conditioned.
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

    has_roots = False  # of covariances of lines, which ask the host
    slopes: Tensor
    spread: Tensor
    level_part: Tensor
    level_code: Tensor
    line_part: Tensor
    scales: Tensor
    log_unseen: Tensor
    log_known: Tensor
    numbers: Tensor
    finite: Tensor
    cells: Tensor
    continuous: Tensor
    shared: Tensor
    rest_code: Tensor
    column_of: Tensor
    first_token: Tensor
    gap_token: Tensor
    places: Tensor
    logit_index: Tensor
    logit_absent: Tensor
    logit_gap: Tensor

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
        lines: bool = False,
        conditioned: bool = False,
        ordered: bool = False,
    ) -> None:
        super().__init__()
        parts = [part if isinstance(part, Part) else Part(**part) for part in parts]
        ranks = orderings_of(orderings, len(parts))
        self.config: dict[str, Any] = {
            "parts": [asdict(part) for part in parts], "orderings": ranks.tolist(),
            "hidden": hidden, "blocks": blocks, "components": components, "context": context,
            "energy_hidden": energy_hidden, "energy_blocks": energy_blocks, "drop": drop,
            "embedding": embedding, "n_knots": n_knots, "masked": masked, "lines": lines,
            "conditioned": conditioned, "ordered": ordered,
        }  # fmt: skip
        self.dim, self.masked = len(parts), masked
        self.columns = CodedColumns(parts, n_knots)
        n_codes = self.columns.n_codes
        rest = torch.tensor([part.rest for part in parts])
        outcomes = n_codes + rest
        finite, numbers = (torch.nonzero(each).flatten() for each in (outcomes > 1, rest))
        self.n_finite, self.n_numbers = len(finite), len(numbers)
        self._buffer("finite", finite)
        self._buffer("numbers", numbers)
        has_cells = torch.tensor([part.rest and part.step > 0 for part in parts])[numbers]
        self.has_cells = bool(has_cells.any())
        self._buffer("cells", torch.nonzero(has_cells).flatten())  # places among the numbers
        self._buffer("continuous", torch.nonzero(~has_cells).flatten())
        # point masses of numbers with cells: a number may be there too
        self._buffer(
            "shared", torch.tensor([p.rest and p.step > 0 and p.n_codes > p.gap for p in parts])
        )
        reserved = torch.tensor([part.unseen for part in parts])
        self._buffer("log_unseen", reserved.log())
        self._buffer("log_known", torch.log1p(-reserved))
        self._buffer("rest_code", n_codes)
        self._buffer("column_of", torch.tensor([part.column for part in parts]))
        self.n_columns = 1 + max(part.column for part in parts)
        sizes = n_codes + 2  # tokens: the codes, a number, a gap
        self._buffer("first_token", sizes.cumsum(0) - sizes)
        self._buffer("gap_token", sizes - 1)
        self.lines, self.conditioned = lines, conditioned
        if lines:
            # columns of lines: the numbers, then the levels of small categories but the first
            small = [j for j, p in enumerate(parts) if conditioned and not p.rest and p.n_codes > 1]
            shown: list[tuple[int, int]] = []
            for j in sorted(small, key=lambda j: parts[j].n_codes):
                if self.n_numbers + len(shown) + parts[j].n_codes <= MOST_LINES:
                    shown += [(j, code) for code in range(1, parts[j].n_codes)]
            self._buffer("level_part", torch.tensor([j for j, _ in shown], dtype=torch.long))
            self._buffer("level_code", torch.tensor([code for _, code in shown], dtype=torch.long))
            self._buffer("line_part", torch.cat([numbers, self.level_part]))
            stack, n_lines = len(ranks), len(self.line_part)
            self.has_roots = conditioned and self.n_numbers <= MOST_LINES
            self.register_buffer("slopes", torch.zeros(stack, n_lines, n_lines))
            self.register_buffer("spread", torch.ones(stack, n_lines))
        per_part = embedding + N_KNOTS + lines
        self.tokens = nn.Embedding(int(sizes.sum()), embedding)
        nn.init.normal_(self.tokens.weight, std=0.5)
        shape = {"per_column": per_part, "condition_dim": len(parts) * per_part}
        self.trunk = ResMADE(ranks, hidden=hidden, blocks=blocks, drop=drop, **shape)
        self._make_number_heads(
            numbers.tolist(), components=components, family="logistic", context=context,
            energy_hidden=energy_hidden, energy_blocks=energy_blocks,
        )  # fmt: skip
        scales = [j for j, part in enumerate(parts) if ordered and _on_a_grid(part)]
        self._buffer("scales", torch.tensor(scales, dtype=torch.long))
        if scales:
            raw = [3 * SCALE_COMPONENTS * (j in scales) for j in range(self.dim)]
            self.scale_head = self.trunk.head(raw)
            with torch.no_grad():
                self.scale_head.weight.mul_(0.2)
        levels = torch.linspace(0, 1, N_KNOTS)
        levels[0], levels[-1] = 0.005, 0.995
        self._buffer("places", torch.special.ndtri(levels))
        sizes = outcomes.where(outcomes > 1, 0)
        widest = int(outcomes.max())
        index = (sizes.cumsum(0) - sizes)[finite][:, None] + torch.arange(widest)
        absent = torch.arange(widest) >= sizes[finite][:, None]
        self._buffer("logit_index", index.where(~absent, 0))
        self._buffer("logit_absent", absent)
        gap_codes = torch.tensor([part.gap_code for part in parts])
        self._buffer("logit_gap", torch.arange(widest) == gap_codes[finite][:, None])
        self.code_head = self.trunk.head(sizes.tolist())
        with torch.no_grad():
            self.code_head.weight.mul_(0.2)
        self.start_at_marginals()

    def _buffer(self, name: str, value: Tensor) -> None:
        """A constant that follows from the parts, and moves with the model."""
        self.register_buffer(name, value, persistent=False)

    def set_columns(self, columns: CodedColumns) -> TableChain:
        """Take map and frequencies as ``columns`` has them; start every factor at its marginal."""
        self.columns.load_state_dict(columns.state_dict())
        self.start_at_marginals()
        return self

    def of_orders(self, orders: Sequence[int]) -> TableChain:
        """A copy with these orders alone, in this sequence."""
        orders = list(orders)
        ranks = self.trunk.ranks[orders]
        with seeded(0):  # the caller's random stream stays where it is
            chain = TableChain(**self.config | {"orderings": ranks.tolist()}).to(self.places)
        state = self.state_dict()
        chain.load_state_dict(
            {k: v if k.startswith(SHARED_BY_ORDERS) else v[orders] for k, v in state.items()}
        )
        return chain.train(self.training)

    @torch.no_grad()
    def start_at_lines(self, packed: Tensor, weights: Tensor, first: int = 0) -> TableChain:
        """Begin at linear regressions of the parts of packed rows on those before them.

        Args:
            packed: training rows ``(n, p, 4)``.
            weights: ``(n, R)``: how much a row counts for an order.
            first: of the orders that begin so; those before it stay at the marginals.
        """
        u, seen = (each.cpu().numpy() for each in self._in_lines(Rows.of(packed.to(self.device))))
        whole: dict[bytes, np.ndarray] = {}  # orders that count the same rows share them
        ranks = self.trunk.ranks[:, self.line_part].cpu().numpy()
        places = self.places.double().cpu()
        levels = torch.special.ndtr(places).numpy()
        quantiles = places.numpy() * np.ones((self.n_orderings, self.n_numbers, 1))
        for r, rank in enumerate(ranks):
            if r < first:
                continue
            weight = weights[:, r].double().cpu().numpy()
            if weight.tobytes() not in whole:
                whole[weight.tobytes()] = completed(u.astype(np.float64), seen, weight)
            order = np.argsort(rank, kind="stable")
            slopes, spread, left = ridge_lines(whole[weight.tobytes()], order, weight)
            self.slopes[r] = torch.from_numpy(slopes)
            self.spread[r] = torch.from_numpy(spread)
            for i in range(self.n_numbers):
                known = left[(weight > 0) & seen[:, i], i]
                if len(known):
                    quantiles[r, i] = np.quantile(known / spread[i], levels)
        self._start_numbers_at(torch.from_numpy(quantiles).to(self.places))
        return self

    def _in_lines(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """``(..., U)``: the columns of lines in units of about one, 0 where not seen; which are."""
        is_number = rows.seen & (rows.code == self.rest_code)
        hot = (rows.code[..., self.level_part] == self.level_code).to(rows.z)
        share, scale = self._of_levels()
        seen = torch.cat([is_number[..., self.numbers], rows.seen[..., self.level_part]], -1)
        u = torch.cat([rows.z[..., self.numbers], (hot - share) / scale], -1)
        return u.where(seen, 0.0), seen

    def _of_levels(self) -> tuple[Tensor, Tensor]:
        """``(C,)``: the frequencies of the levels in lines, and their standard deviations."""
        share = self.columns.log_share[self.level_part, self.level_code].exp().to(self.places)
        return share, (share * (1 - share)).sqrt()

    def lines_of(self, seen: Tensor, given: Tensor | None = None) -> Lines:
        """The normal law of the lines where some columns are seen and some parts are given.

        Args:
            seen: ``(.., n, U)``.
            given: ``(.., n, p)``, or ``None``.
        """
        part, slopes = self.line_part, self.slopes.double()
        rank = self.trunk.ranks[:, part].unsqueeze(1)  # (R, 1, U)
        if given is not None:
            rank = rank - self.dim * given[..., part].to(rank)
        elif not self.training and bool(seen.all()):
            seen = seen.flatten(0, -2)[:1]
        rank, seen = torch.broadcast_tensors(rank, seen)
        order = rank.argsort(dim=-1, stable=True)
        eye = torch.eye(len(part)).to(slopes)
        root = torch.linalg.solve(eye - slopes, torch.diag_embed(self.spread.double()))
        chain = torch.arange(len(slopes), device=order.device).view(-1, 1, 1, 1)
        covariance = (root @ root.mT)[chain, order.unsqueeze(-1), order.unsqueeze(-2)]
        hidden = HIDDEN * (~seen).gather(-1, order).double()
        own = covariance.diagonal(dim1=-2, dim2=-1)
        root, failed = torch.linalg.cholesky_ex(covariance + torch.diag_embed(hidden))
        # columns that repeat others to the last digit: each by itself
        alone = torch.diag_embed((own + hidden).sqrt())
        root = torch.where((failed > 0)[..., None, None], alone, root)
        rank = rank.gather(-1, order)
        before = root * (rank.unsqueeze(-1) > rank.unsqueeze(-2))
        left = own - before.square().sum(-1)
        spread = left.clamp_min(LEAST_SPREAD**2).sqrt()
        return Lines(order, root, before, torch.zeros_like(spread).scatter(-1, order, spread))

    def chunks(self, n: int, nodes: int, chunk_size: int | None = None) -> Iterator[slice]:
        """Slices of ``n`` rows small enough, their lines and the levels of their parts included."""
        of_lines = len(self.line_part) ** 2 // self.dim if self.has_roots else 0
        # a level is a number, a node of a factor many; on a scale it has several components
        of_levels = (len(self.scales) + self.n_finite / 8) * self.logit_absent.shape[1] // self.dim
        return super().chunks(n, nodes + of_lines + int(of_levels), chunk_size)

    def told(self, rows: Rows, given: Tensor | None, law: Lines | None = None) -> Told | None:
        """What lines tell of rows by the law of their columns; ``None`` where there are none."""
        if not self.lines:
            return None
        u, seen = self._in_lines(rows)
        d = self.n_numbers
        if self.has_roots:
            law = law or self.lines_of(seen, given)
            place, spread = law.place(u), law.spread
        else:  # one law of all rows: the regressions themselves
            place = torch.matmul(u.double(), self.slopes.double().mT).to(u)
            spread = self.spread.unsqueeze(1)
        spread = spread.to(place).expand_as(place)
        return Told(place[..., :d], spread[..., :d], self._logits_of_lines(place))

    def _logits_of_lines(self, place: Tensor) -> Tensor:
        """``(R, n, F, widest)``: what lines add to the logits of finite parts."""
        _, scale = self._of_levels()
        widest = self.logit_absent.shape[1]
        row = torch.searchsorted(self.finite, self.level_part)
        change = place[..., self.n_numbers :] * scale
        added = place.new_zeros(*place.shape[:2], self.n_finite * widest)
        added = added.index_copy(-1, row * widest + self.level_code, change)
        added = added.index_add(-1, row * widest, -change)
        shares = self.columns.log_share[self.finite][:, :widest].exp().to(added)
        added = added.view(*place.shape[:2], self.n_finite, widest)
        return (1 + added / shares).clamp_min(LEAST_CHANGE).log()

    @torch.no_grad()
    def start_at_marginals(self) -> None:
        """Begin at independent columns: frequencies of codes, the normal distribution of scores."""
        self._start_numbers_at(self.places.expand(self.n_numbers, -1))
        logits = self.columns.log_share[self.finite].to(self.places)  # (F, widest or more)
        if len(self.scales):  # a normal distribution has these masses in their cells
            knots = self.places.expand(len(self.scales), -1)
            self._start_numbers_at(knots, self.scale_head, SCALE_COMPONENTS)
            logits[torch.isin(self.finite, self.scales)] = 0.0
        flat = logits[:, : self.logit_absent.shape[1]][~self.logit_absent]
        assert self.code_head.bias is not None
        self.code_head.bias.copy_(flat.expand_as(self.code_head.bias))

    def _edges(self) -> Tensor:
        """``(O, widest + 1)``: normal scores between the levels of parts on a scale."""
        widest = self.logit_absent.shape[1]
        share = self.columns.log_share[self.scales, :widest].double().exp()
        known = torch.arange(widest, device=share.device) < self.rest_code[self.scales, None]
        below = (share * known).cumsum(-1)
        scores = torch.special.ndtri((below / below[:, -1:])[:, :-1]).clamp(-FAR, FAR)
        return nn.functional.pad(nn.functional.pad(scores, (1, 0), value=-FAR), (0, 1), value=FAR)

    def _logits_of_scales(self, features: Tensor) -> Tensor:
        """``(R, n, O, widest)``: log-masses of the levels of parts on a scale by their mixtures."""
        raw = self.trunk.outputs(self.scale_head, features, 3 * SCALE_COMPONENTS)
        edges = self._edges().to(raw)
        absent = self.logit_absent[torch.searchsorted(self.finite, self.scales)]
        left, right = edges[:, :-1].masked_fill(absent, 0.0), edges[:, 1:].masked_fill(absent, 1.0)
        mixture = Mixture1d.from_raw(raw.unsqueeze(-2), SCALE_COMPONENTS, family=self.family)
        return mixture.log_mass(left, right)

    # -- one pass -----------------------------------------------------------------------------

    def check(self, x: Any) -> Tensor:
        """Packed rows ``(n, p, 4)`` on the model's device and dtype."""
        if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[1:] != (self.dim, 4):
            raise DataError(f"expected packed rows of shape (n, {self.dim}, 4)")
        return x.to(self.places)

    def given(self, mask: Any, n: int) -> Tensor | None:
        """The parts conditioned on, ``(n, p)`` of bool; ``None`` where there are none."""
        if mask is None:
            return None
        return torch.as_tensor(mask, dtype=torch.bool, device=self.device).expand(n, self.dim)

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

    def _inputs(self, rows: Rows) -> Tensor:
        """``(..., p, per_part)``: a token's numbers, then the place of a number among quantiles."""
        token = torch.where(rows.seen, rows.code, self.gap_token) + self.first_token
        left, right = self.places[:-1], self.places[1:]
        z, is_number = rows.z, rows.seen & (rows.code == self.rest_code)
        if len(self.scales):
            edges = self._edges().clamp(-4.0, 4.0).to(z)
            middle = (edges[:, :-1] + edges[:, 1:]) / 2
            code = rows.code[..., self.scales].clamp_max(middle.shape[1] - 1)
            known, own = rows.seen & ~rows.unseen, torch.arange(len(middle), device=z.device)
            z = z.index_copy(-1, self.scales, middle[own, code])
            is_number = is_number.index_copy(-1, self.scales, known[..., self.scales])
        z = z.unsqueeze(-1)
        number = torch.cat([torch.asinh(z), ((z - left) / (right - left)).clamp(0, 1)], -1)
        return torch.cat([self.tokens(token), number * is_number.unsqueeze(-1)], -1)

    def features(self, rows: Rows, given: Tensor | None = None, told: Told | None = None) -> Tensor:
        """Hidden features ``(R, n, hidden)`` of rows ``(n, p)``, or ``(R, n, p)``.

        What is ``given`` may be told of the first rows alone.
        """
        inputs, condition, stack = self._inputs(rows), None, self.n_orderings
        if self.lines:
            inputs = nn.functional.pad(inputs, (0, 1))
        if given is not None:
            some = given.shape[-2]
            shown = inputs[..., :some, :, :] * (given & rows.seen[..., :some, :]).unsqueeze(-1)
            condition = shown.flatten(-2).expand(stack, -1, -1)
        if told is not None:  # how far a number is from what was told of it
            is_number = (rows.seen & (rows.code == self.rest_code))[..., self.numbers]
            off = torch.asinh((rows.z[..., self.numbers] - told.place) / told.spread)
            off = off.where(is_number, 0.0)
            whole = off.new_zeros(*off.shape[:-1], self.dim).index_copy(-1, self.numbers, off)
            inputs = torch.cat([inputs[..., :-1].expand(*whole.shape, -1), whole.unsqueeze(-1)], -1)
        features: Tensor = self.trunk(inputs.flatten(-2).expand(stack, -1, -1), condition)
        return features

    def code_log_probs(self, features: Tensor, told: Told | None = None) -> Tensor:
        """``(R, n, F, widest)``: log-probabilities of the outcomes of all finite parts."""
        logits = self.code_head(features)[..., self.logit_index]
        logits = logits if told is None else logits + told.logits
        if len(self.scales):
            place = torch.searchsorted(self.finite, self.scales)
            logits = logits.index_add(-2, place, self._logits_of_scales(features))
        return torch.log_softmax(logits.masked_fill(self.logit_absent, -torch.inf), -1)

    def rounded(self, y: Tensor, shift: float = 0.0) -> Tensor:
        """Scores ``(..., D)`` of numbers, moved to the centres (or edges) of cells."""
        if not self.has_cells:
            return y
        moved = self.columns.rounded(y[..., self.cells], shift, self.numbers[self.cells])
        return y.index_copy(-1, self.cells, moved)

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
        rows, stack = Rows.of(x), self.n_orderings
        of_first = given
        given = None if given is None else _padded(given, len(x))
        told = self.told(rows, given)
        features = self.features(rows, of_first, told)
        asked = rows.seen if given is None else rows.seen & ~given
        asked = asked if learned is None else asked & learned
        at = self.factors_of(features, told and (told.place, told.spread))
        is_number = (asked & (rows.code == self.rest_code))[:, self.numbers]
        active = is_number.expand(stack, -1, -1)
        at = at._replace(active=active)
        log_codes = self.code_log_probs(features, told)
        code = rows.code[:, self.finite].expand(stack, -1, -1).unsqueeze(-1)
        log_code = log_codes.gather(-1, code).squeeze(-1) + self.log_known[self.finite]
        log_number = self._log_proposal(at.proposal, rows)
        log_q = self.log_known.to(features).expand(stack, *rows.code.shape)
        log_q = log_q.index_copy(-1, self.finite, log_code)
        at_mass = self.shared & asked & (rows.code < self.columns.n_values)
        if exact and bool(at_mass.any()):
            every = at._replace(active=active | at_mass[:, self.numbers])
            log_z = self.quadrature(every)
            at = at._replace(log_z=log_z.where(active, 0.0))
            log_cell = log_number + self.tilt(rows.z[None, None, :, self.numbers], every)[0] - log_z
            log_q = log_q + self._cells_at_masses(at_mass, log_q, log_codes, log_cell)
        log_q = log_q.index_add(-1, self.numbers, log_number.where(active, 0.0))
        log_q = log_q.where(asked, 0.0)
        never = rows.unseen if given is None else rows.unseen & ~given
        log_q = torch.where(never, self.log_unseen, log_q)
        y = rows.z[:, self.numbers].expand(1, stack, -1, -1)
        return self.terms_of(at, log_q, y, log_q.new_zeros(len(x)), n_samples)

    def _log_proposal(self, proposal: Mixture1d, rows: Rows) -> Tensor:
        """``(R, n, D)``: log-density of the numbers, log-mass of those with cells."""
        z, left, right = (each[:, self.numbers] for each in (rows.z, rows.left, rows.right))
        if not self.has_cells:
            return proposal.log_prob(z)
        out = proposal.loc.new_zeros(proposal.loc.shape[:-1])
        cells, others = self.cells, self.continuous
        mass = proposal.at(..., cells, slice(None)).log_mass(left[:, cells], right[:, cells])
        density = proposal.at(..., others, slice(None)).log_prob(z[:, others])
        return out.index_copy(-1, cells, mass).index_copy(-1, others, density)

    def _cells_at_masses(
        self, at_mass: Tensor, log_q: Tensor, log_codes: Tensor, log_cell: Tensor
    ) -> Tensor:
        """What cells of numbers ``(R, n, D)`` add to the log-probability of a point mass there."""
        here = at_mass.expand_as(log_q)
        log_rest = torch.zeros_like(log_q)
        last = self.rest_code[self.finite].expand(*log_codes.shape[:2], -1).unsqueeze(-1)
        last = last.clamp_max(log_codes.shape[-1] - 1)
        log_rest = log_rest.index_copy(-1, self.finite, log_codes.gather(-1, last).squeeze(-1))
        both = torch.full_like(log_q, -torch.inf).index_copy(-1, self.numbers, log_cell)
        return torch.nn.functional.softplus(both + log_rest - log_q).where(here, 0.0)

    def quadrature(self, at: Factors, n_nodes: int = N_NODES) -> Tensor:
        """As :meth:`Chain.quadrature`; not once more where it is known."""
        if at.log_z is not None and n_nodes == N_NODES:
            return at.log_z
        return super().quadrature(at, n_nodes)

    def at_batch(self, batch: tuple[Tensor, ...], n_samples: int) -> RowTerms:
        """:meth:`at_rows` of training rows; in training the first of them, a random choice as all
        of a batch are, with random columns given or missing.
        """
        x, given = batch[0], None
        n_masked = round(self.masked * len(x)) if self.training else 0
        if n_masked:
            given, missing = self._random_masks(n_masked)
            if len(batch) > 2:  # rows with cells that are not to be learned are seen as they are
                free = batch[2][:n_masked].all(-1, keepdim=True)
                given, missing = given & free, missing & free
            code = x[..., 0].masked_fill(_padded(missing, len(x)), float(GAP))
            x = torch.cat([code.unsqueeze(-1), x[..., 1:]], -1)
        learned = batch[2] if len(batch) > 2 else None
        return self.at_rows(x, given, learned, n_samples=n_samples, exact=False)

    def weights_of(self, batch: tuple[Tensor, ...]) -> Tensor | None:
        """The second part of a batch, ``(n, R)``."""
        return batch[1].T if len(batch) > 1 else None

    def _random_masks(self, n: int) -> tuple[Tensor, Tensor]:
        """Which parts ``(n, p)`` are given, and which are missing; parts of a column alike.

        A random share of the columns is given, and in half of the rows a random share of the
        remaining ones is missing.
        """
        draw = torch.rand(2, n, self.n_columns, device=self.device)[..., self.column_of]
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
        draw = torch.rand(n, self.n_columns, device=self.device)[:, self.column_of]
        given = draw < torch.rand(n, 1, device=self.device)
        terms = self.at_rows(batch[0], given, n_samples=n_samples, exact=False)
        return terms.log_prob(log_mean_exp(terms.log_w))

    # -- densities ----------------------------------------------------------------------------

    def log_prob(
        self,
        x: Tensor,
        given: Any = None,
        *,
        normalizer: str = "quadrature",
        n_nodes: int = N_NODES,
        chunk_size: int | None = None,
    ) -> Tensor:
        """``(n,)``: log-probability of packed rows given the parts of a mask.

        The mean over the orders. Gaps are left out: the answer is that of the network trained with
        gaps, normalised for each pattern of them. ``normalizer="learned"`` takes the learned
        ``b_i`` in place of a quadrature over ``n_nodes`` nodes for each number, and leaves cells
        out that point masses stand in.
        """
        return self._log_prob(x, given, normalizer, n_nodes, chunk_size)

    @torch.no_grad()
    def column_law(self, x: Tensor, part: int, *, n_nodes: int = N_NODES) -> ColumnLaw:
        """``p(x_j | all others)`` of part ``j`` at packed rows ``(n, p, 4)``."""
        rows, stack = Rows.of(self.check(x)), self.n_orderings
        given = rows.seen & (self.column_of != self.column_of[part])
        # parts of the same column that come after it in an order are not seen by it
        told = self.told(rows, given)
        features = self.features(rows, given, told)
        law = self._law_of_codes(features, part, told)
        log_codes = log_mean_exp(law)
        numbers = self.numbers.tolist()
        if part not in numbers:
            none = x.new_zeros(0, len(x))
            return ColumnLaw(log_codes, none, none, none, none.sum(0))
        place = numbers.index(part)
        column, every = slice(place, place + 1), slice(None)
        at = self.factors_of(features, told and (told.place, told.spread)).at(every, every, column)
        which = self.numbers[column]
        cells = float(self.columns.step[part]) > 0

        exact = self.columns.knots  # whose map may keep more digits than the network

        def rounded(y: Tensor, shift: float = 0.0) -> Tensor:
            return self.columns.rounded(y.to(exact), shift, which).to(y) if cells else y

        y, log_mass = at.proposal.nodes(
            n_nodes, rounded if self.has_cells else None
        )  # (m, R, n, 1)
        f = self.energy(y, at)
        log_z = torch.logsumexp(log_mass + f, 0)
        log_share = (log_mass + f - log_z).squeeze(-1) + law[..., -1]  # (m, R, n)
        log_weights = (log_share - math.log(stack)).flatten(0, 1) - log_codes[:, -1]

        def log_density(z: Tensor) -> Tensor:
            """``(m, n)`` mixture over the orders at scores ``(m, n)``."""
            z = z.unsqueeze(1).unsqueeze(-1).expand(-1, stack, -1, -1)
            if cells:
                ends = self.columns.ends(self.columns.from_scores(z.to(exact), which), which)
                log_q = at.proposal.log_mass(*(end.to(z) for end in ends))
            else:
                log_q = at.proposal.log_prob(z)
            of_order = (log_q + self.energy(z, at) - log_z).squeeze(-1) + law[..., -1]
            return log_mean_exp(of_order, 1) - log_codes[:, -1]

        nodes = y.squeeze(-1).flatten(0, 1)
        own = log_density(rows.z[None, :, part])[0]
        return ColumnLaw(log_codes, nodes, log_weights, log_density(nodes), own)

    def _law_of_codes(self, features: Tensor, part: int, told: Told | None) -> Tensor:
        """``(R, n, K)``: log-probabilities of the outcomes of one part, a number's last."""
        finite = self.finite.tolist()
        if part not in finite:
            return self.log_known[part].to(features).expand(*features.shape[:2], 1)
        place = finite.index(part)
        known = ~self.logit_absent[place]
        index = self.logit_index[place][known]
        weight, bias = self.code_head.effective_weight()[:, index], self.code_head.bias
        assert bias is not None
        logits = torch.baddbmm(bias[:, index].unsqueeze(1), features, weight.transpose(1, 2))
        if told is not None:
            logits = logits + told.logits[:, :, place, known]
        if part in self.scales:
            own = self.scales.tolist().index(part)
            logits = logits + self._logits_of_scales(features)[:, :, own, known]
        return torch.log_softmax(logits, -1) + self.log_known[part]

    # -- samples ------------------------------------------------------------------------------

    @torch.no_grad()
    def sample(
        self,
        n: int,
        x: Tensor | None = None,
        given: Any = None,
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
        stack, like = self.n_orderings, self.places
        per_chain = -(-n // stack)
        rows = torch.zeros(stack * per_chain, self.dim, 4).to(like)
        keep = torch.zeros(stack * per_chain, self.dim, dtype=torch.bool, device=like.device)
        with seeded(seed, like.device):
            order = torch.randperm(stack * per_chain, device=like.device)[:n]
            if x is not None:
                rows[order] = self.check(x)
                mask = self.given(given, n)
                keep[order] = (mask if mask is not None else False) & (rows[order][..., 0] >= 0)
            rows, keep = (each.unflatten(0, (stack, per_chain)) for each in (rows, keep))
            # parts come one by one: many take no more room at a time than a few
            nodes = (64 + n_candidates // self.dim) * min(self.dim, MOST_AT_ONCE) // self.dim
            for part in self.chunks(per_chain, nodes, chunk_size):
                self._fill(rows[:, part], keep[:, part], n_candidates, within, gaps)
        return rows.flatten(0, 1)[order]

    def _fill(
        self, rows: Tensor, keep: Tensor, n_candidates: int, within: bool, gaps: bool
    ) -> None:
        """Draw the parts of packed ``rows (R, n, p, 4)`` in place, but for those to ``keep``."""
        stack, n = rows.shape[:2]
        chain = torch.arange(stack, device=rows.device)
        order = self.trunk.ranks.argsort(1)  # order[r, i]: the part at place i
        place_of = torch.full((2, self.dim), 0, device=rows.device)
        place_of[0, self.finite] = torch.arange(self.n_finite, device=rows.device)
        place_of[1, self.numbers] = torch.arange(self.n_numbers, device=rows.device)
        is_finite = torch.zeros(self.dim, dtype=torch.bool, device=rows.device)
        is_finite[self.finite] = True
        is_number = torch.zeros_like(is_finite)
        is_number[self.numbers] = True
        only = self.rest_code - (~is_number).to(self.rest_code)  # the code where there is but one
        given = keep if bool(keep.any()) else None
        rows[..., 0] = rows[..., 0].where(keep, float(GAP))
        weights = self._head_weights()
        law = None
        if self.has_roots and not bool((self.rest_code[self.numbers] > 0).any()):
            # all columns will be there, those of point masses apart
            law = self.lines_of(rows.new_ones(n, len(self.line_part), dtype=torch.bool), given)
        for place in range(self.dim):
            part = order[:, place]  # (R,)
            if bool(keep[chain, :, part].all()):
                continue
            told = self.told(Rows.of(rows), given, law)
            features = self.features(Rows.of(rows), given, told)
            code = only[part].unsqueeze(1).expand(-1, n)
            if bool(is_finite[part].any()):
                of_code = place_of[0, part]
                added = None if told is None else told.logits[chain, :, of_code]
                here = part.unsqueeze(1) == self.scales  # (R, O)
                if bool(here.any()):
                    own = self._logits_of_scales(features) * here[:, None, :, None]
                    added = own.sum(2) if added is None else added + own.sum(2)
                drawn = self._draw_codes(features, weights, of_code, chain, gaps, added)
                code = drawn.where(is_finite[part].unsqueeze(1), code)
            z = rows.new_zeros(stack, n)
            if bool(is_number[part].any()):
                of_number = place_of[1, part]
                line = told and (told.place[chain, :, of_number], told.spread[chain, :, of_number])
                z = self._draw_numbers(
                    features, weights, of_number, part, chain, n_candidates, within, line
                )
            value = torch.stack(
                [code.to(rows), z.where(code == self.rest_code[part, None], 0.0)], -1
            )
            old = rows[chain, :, part]
            drawn = torch.cat([value, old[..., 2:]], -1)
            rows[chain, :, part] = torch.where(keep[chain, :, part].unsqueeze(-1), old, drawn)

    def _head_weights(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Weights and biases of the heads by column, ``(R, columns, n, hidden)``; codes flat."""
        heads = {"code": self.code_head, "mixture": self.mixture_head, "context": self.context_head}
        sizes = {"mixture": 3 * self.n_components, "context": self.n_context}
        found = {}
        for name, head in heads.items():
            weight, bias = head.effective_weight(), head.bias
            assert bias is not None
            if name in sizes:
                shape = (self.n_numbers, sizes[name])
                weight, bias = weight.unflatten(1, shape), bias.unflatten(1, shape)
            found[name] = weight, bias
        return found

    def _draw_codes(
        self,
        features: Tensor,
        weights: dict[str, tuple[Tensor, Tensor]],
        place: Tensor,
        chain: Tensor,
        gaps: bool,
        added: Tensor | None,
    ) -> Tensor:
        """``(R, n)``: a code of one finite part for each order."""
        weight, bias = weights["code"]
        index, absent = self.logit_index[place], self.logit_absent[place]  # (R, widest)
        absent = absent if gaps else absent | self.logit_gap[place]
        weight, bias = weight[chain[:, None], index], bias[chain[:, None], index]
        logits = torch.baddbmm(bias.unsqueeze(1), features, weight.transpose(1, 2))
        logits = logits if added is None else logits + added
        logits = logits.masked_fill(absent.unsqueeze(1), -torch.inf)
        drawn = torch.multinomial(torch.softmax(logits.flatten(0, 1), -1), 1)
        return drawn.view(features.shape[:2])

    def _draw_numbers(
        self,
        features: Tensor,
        weights: dict[str, tuple[Tensor, Tensor]],
        place: Tensor,
        part: Tensor,
        chain: Tensor,
        n_candidates: int,
        within: bool,
        line: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        """``(R, n)``: normal scores of a number of one part for each order."""
        stack, n = features.shape[:2]

        def output(name: str) -> Tensor:
            weight, bias = (each[chain, place] for each in weights[name])
            flat = torch.baddbmm(bias.unsqueeze(1), features, weight.transpose(1, 2))
            return flat.unsqueeze(2)

        proposal = Mixture1d.from_raw(output("mixture"), self.n_components, family=self.family)
        if line is not None:
            proposal = proposal.moved(*(each.unsqueeze(-1) for each in line))
        at = self._described(proposal, proposal, output("context"))
        y = proposal.sample(n_candidates)  # (S, R, n, 1)
        if self.has_cells:
            y = self._rounded_by_chain(y, part)
        log_w = self.energy(y, at)
        pick = torch.multinomial(torch.softmax(log_w, 0).flatten(1).T, 1).T.reshape(1, stack, n, 1)
        drawn = torch.gather(y, 0, pick)[0, :, :, 0]
        if within:
            low, high = self.columns.span[part].view(stack, 1, 2).unbind(-1)
            drawn = torch.minimum(torch.maximum(drawn, low), high)
        return drawn

    def _rounded_by_chain(self, y: Tensor, part: Tensor) -> Tensor:
        """Scores ``(S, R, n, 1)`` to centres of cells, order ``r`` being at part ``part[r]``."""
        by_chain = y.squeeze(-1).movedim(1, -1)  # (S, n, R)
        moved = self.columns.rounded(by_chain, 0.0, part)
        has_cells = (self.columns.step > 0)[part]
        return torch.where(has_cells, moved, by_chain).movedim(-1, 1).unsqueeze(-1)
