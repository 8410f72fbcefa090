"""What a chain over a table knows of single columns: their share of a row, density, tails."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from selfnorm._context import on_cpu, seeded
from selfnorm.chain import ColumnDensity, TableChain
from selfnorm.columns import GAP, UNSEEN, CodedColumns

FINEST = 1e-3  # of its spread: the step of the finest grid whose cells would be counted
ROWS_AT_ONCE = 256
CHECKED_PLACES = 3000  # rows x columns x orders: half a second or so
MAX_COMPLETIONS = 64  # of a row, over which a conditional is summed
WEIGHTS_PER_REASON = 2 * 512**2  # of a layer, over the orders that are asked
MAX_ROWS = 2**16  # of a finite table, which may be summed over as a whole


def resolutions(columns: CodedColumns) -> Tensor:
    """``(p,)``: widths at which densities of numbers count as probabilities.

    A thousandth of the distance between the quartiles; it moves with the units. 1 where numbers
    have cells, whose mass is one already, and where there are none.
    """
    quarter = torch.full((1, columns.dim), 0.6745).to(columns.knots)
    spread = (columns.from_scores(quarter) - columns.from_scores(-quarter))[0].clamp_min(1e-300)
    continuous = torch.tensor([part.rest and part.step == 0 for part in columns.parts])
    return (FINEST * spread).where(continuous, 1.0)


def comparable(columns: CodedColumns, rows: Tensor) -> Tensor:
    """``(n,)``: what makes log-likelihoods of coded rows ``(n, p, 2)`` comparable with each other.

    Numbers are then taken as recorded to :func:`resolutions`, but for a constant that all rows
    share: zero where all are numbers, and at gaps.
    """
    finite = (rows[..., 0] != columns.n_codes) & (rows[..., 0] != GAP)
    return (-resolutions(columns).log()).where(finite, 0.0).sum(-1)


@torch.no_grad()
def shares(model: TableChain, packed: Tensor, normalizer: str = "quadrature") -> Tensor:
    """``(R, n, p)``: log-probability of each part given those before it, for every order."""
    found = []
    for rows in model.chunks(len(packed), 4):
        learned = normalizer == "learned"
        terms = model.at_rows(model.check(packed[rows]), exact=not learned)
        log_z = (model.log_norm if learned else model.quadrature)(terms.factors)
        found.append(terms.log_q.index_add(-1, model.layout.numbers, terms.minus_energy - log_z))
    return torch.cat(found, 1)


def checked_rows(model: TableChain) -> int:
    """How many rows are enough, and soon done, for a figure of the whole model."""
    return max(30, CHECKED_PLACES // (model.dim * model.n_orderings))


def consistency(
    model: TableChain, packed: Tensor, seed: int, mixed: Callable[[Tensor], Tensor]
) -> dict[str, float]:
    """How far the answers of a chain are from those of one joint density, on rows ``(n, p, 4)``.

    ``conditionals``: median of ``|log p(x) - log p(x_S) - log p(x_T | x_S)|`` over rows and random
    halves ``S`` of the columns. ``orders``: median standard deviation of ``log p_r(x)`` over the
    orders ``r``. ``mixed`` makes log-densities ``(n,)`` of the chain those of a mixture it is in.
    """
    with seeded(seed), on_cpu():
        chosen = torch.rand(len(packed), model.layout.n_columns) < 0.5
        given = chosen[:, model.layout.column]
        whole = shares(model, packed).sum(-1)
        code = packed[..., 0].where(given, float(GAP))
        alone = torch.cat([code.unsqueeze(-1), packed[..., 1:]], -1)
        apart = model.log_prob(alone) + model.log_prob(packed, given)
    joint = torch.logsumexp(whole, 0) - math.log(len(whole))
    orders = whole.std(0).median() if len(whole) > 1 else torch.zeros(())
    off = mixed(joint) - mixed(apart)
    return {"conditionals": float(off.abs().median()), "orders": float(orders)}


@torch.no_grad()
def conditional(model: TableChain, packed: Tensor, given: Tensor) -> Tensor:
    r"""``log p(x_T | x_S)`` ``(n,)`` of packed rows, ``S`` the parts of the mask ``given (p,)``.

    Where ``T`` is finite and small, that of the joint itself, ``log p(x) - log sum_T p(x)``:
    a sum over 64 completions of a row at most, or over a finite table of ``2^16`` rows at most.
    Otherwise the network's own answer. Cells of ``T`` that are missing are not asked for.
    """
    asked = (packed[..., 0] != GAP) & ~given
    out = torch.zeros(len(packed)).to(packed)
    sizes = model.columns.n_codes.tolist()
    numbers = set(model.layout.numbers.tolist())
    small_table = not numbers and math.prod(sizes) <= MAX_ROWS
    for pattern in torch.unique(asked, dim=0):
        rows = (asked == pattern).all(-1)
        parts = pattern.nonzero().flatten().tolist()
        completions = math.prod(sizes[j] for j in parts)
        if numbers & set(parts) or not (small_table or completions <= MAX_COMPLETIONS):
            out[rows] = model.log_prob(packed[rows], given)
            continue
        if not parts:
            continue
        codes = torch.cartesian_prod(*(torch.arange(sizes[j]) for j in parts))
        codes = codes.view(completions, len(parts)).to(packed)
        alone = packed[rows].clone()
        alone[:, parts] = 0.0
        alone, place = torch.unique(alone, dim=0, return_inverse=True)
        # the rest is reserved for the never seen
        known = model.layout.log_seen[parts].sum().to(packed)
        log_sum = []
        for some in alone.split(max(1, 8192 // completions)):
            every = some.repeat_interleave(completions, 0)
            every[:, parts, 0] = codes.repeat(len(some), 1)
            log_p = model.log_prob(every).view(len(some), completions)
            log_sum.append(torch.logsumexp(log_p, 1) - known)
        out[rows] = model.log_prob(packed[rows]) - torch.cat(log_sum)[place]
    return out


def laws(model: TableChain, packed: Tensor, part: int) -> Iterator[tuple[slice, ColumnDensity]]:
    """``p(x_j | all other columns)`` of one part, block by block of the rows."""
    for start in range(0, len(packed), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        with on_cpu():
            law = model.column_density(packed[rows], part)
        yield rows, law


@torch.no_grad()
def tail_probabilities(model: TableChain, packed: Tensor) -> np.ndarray:
    """``(n, p)``: ``P(p(X_j | rest) <= p(x_j | rest))`` of every part; NaN at gaps.

    A density counts by the probability of its :func:`resolutions`, as does the value itself, which
    is one of those at most as probable. They are those of all orders where their networks are
    small, of two where they are large: the reasons of many rows should come soon.
    """
    most = max(2, WEIGHTS_PER_REASON // model.config["hidden"] ** 2)
    with on_cpu():
        few = model.of_orders(range(min(most, model.n_orderings))).float()
    few.columns.double().load_state_dict(model.columns.state_dict())  # every digit of the map
    found = [_tails(model, few, packed, part) for part in range(model.dim)]
    return np.stack(found, 1)


def _tails(model: TableChain, few: TableChain, packed: Tensor, part: int) -> np.ndarray:
    """:func:`tail_probabilities` ``(n,)`` of one part by the orders of ``few``."""
    columns = model.columns
    n_codes, rest = columns.parts[part].n_codes, columns.parts[part].rest
    continuous = rest and columns.parts[part].step == 0
    log_width = float(resolutions(columns)[part].log())
    which = torch.tensor([part])
    out = np.full(len(packed), np.nan)
    for rows, found in laws(few, packed, part):
        law = ColumnDensity(*(each.double() for each in found))
        code = packed[rows, part, 0].long()

        def log_mass(z: Tensor, log_density: Tensor, log_number: Tensor) -> Tensor:
            """Of numbers at scores ``z (m, n)``."""
            if continuous:
                number = columns.from_scores(z.unsqueeze(-1), which)
                slope = columns.to_scores(number, which)[1].squeeze(-1)
                log_density = log_density + slope.log() + log_width
            return log_number + log_density

        log_codes = law.log_codes[:, :n_codes]
        seen = code.clamp(0, max(n_codes - 1, 0)).unsqueeze(1)
        own = log_codes.gather(1, seen)[:, 0] if n_codes else torch.zeros(len(code)).to(packed)
        if rest:
            log_number = law.log_codes[:, -1]
            z = packed[rows, part, 1].unsqueeze(0)
            own_number = log_mass(z, law.log_own.unsqueeze(0), log_number)[0]
            own = torch.where(code == n_codes, own_number, own)
        never = model.layout.log_unseen[part].to(own)
        own = torch.where(code == UNSEEN, never, own)
        least = own.unsqueeze(-1) + 1e-9
        total = log_codes.exp().where(log_codes <= least, 0.0).sum(-1)
        if rest:
            at_nodes = log_mass(law.nodes, law.log_density, log_number)
            weights = (law.log_weights + log_number).exp()
            total = total + weights.where(at_nodes <= own + 1e-9, 0.0).sum(0)
        total = total + never.exp().where(never <= own + 1e-9, 0.0)
        total = torch.maximum(total, own.exp()).clamp_max(1.0)
        out[rows] = total.where(code != GAP, torch.nan).numpy()
    return out
