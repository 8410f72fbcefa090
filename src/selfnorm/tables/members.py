"""The members of a table's distribution: simple densities beside what was trained, and weights.

A mixture of normalised densities is one. Members are judged on rows that they have not seen, by
folds or on a part held out, and weighed by the likelihood of the mixture on these rows.
"""

from __future__ import annotations

import copy
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.special import logsumexp
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture
from torch import Tensor

from selfnorm._context import SeedLike, float32_on_cpu, on_cpu, seeded
from selfnorm._saved import saved
from selfnorm.chain import N_NODES, TableChain
from selfnorm.columns import FAR, GAP, CodedColumns, Part, knots_for
from selfnorm.density import EBM
from selfnorm.distributions import TableMixture
from selfnorm.evaluation import Bounds, Finding, GridDensity, evaluate
from selfnorm.sampling import draw
from selfnorm.tables import answers

LEAST_WEIGHT = 1e-2  # of a member that is kept
ROWS_PER_COMPONENT = 20
COMPONENTS = (1, 2, 4, 8)
GROUPS = 4  # of the rows of a larger table, by which its coordinates are chosen
STRAYING = 1 / 3  # of its deviation: a number that strays less from a line is close to it
MOST_KERNELS, MOST_CELLS = 1000, 12_000  # rows with a kernel each, and their cells
MOST_CODES = 12  # of a column by which rows are grouped
CHAIN, ENERGY = "chain", "energy"
CHAIN_PRIOR = 0.1  # share of rows counted for the chain beforehand: all orders and all rows make it
# better than the two orders by which it is judged, and its tails are heavier
# points per axis of a grid for one energy, in one and two dimensions: the first, and the most;
# between them they double until log Z is as sure as this; half-widths of the grid's parts
GRID, MOST_GRID, LOG_NORM_ERROR, CORE, REACH = (0, 2049, 257), (0, 8193, 1025), 2e-4, 4.0, 4.0
WALK = 4  # steps of a sampler from a draw of the grid to one of the density itself


MAX_FACTOR_SAMPLES = 10_000_000  # some 20 s on one core
MIN_SAMPLES = 256  # per factor: enough for a verdict


@saved()
@dataclass(frozen=True)
class Member:
    """A density that was tried: its weight in the mixture, and how it did on rows not seen.

    Attributes:
        name: ``"chain"``, ``"energy"``, or what it is and in which coordinates.
        weight: in the mixture; 0 where it is not part of it.
        score: mean log-likelihood of rows not seen, in the units of the table.
    """

    name: str
    weight: float
    score: float


def grid_of(model: EBM, proposal: Any) -> GridDensity:
    """The density of a model of one or two columns by quadrature, in the frame of its base."""
    dim, base = int(proposal.dim), proposal.heavy
    n_points, most = GRID[dim], MOST_GRID[dim]
    frame = {"center": base.loc, "scale": base.scale_tril, "core": CORE, "reach": REACH}
    while True:
        grid = GridDensity(model, dim, **frame, n_points=n_points)
        if grid.error < LOG_NORM_ERROR or n_points >= most:
            return grid
        n_points = 2 * n_points - 1


@saved("model", "proposal", "columns")
class RowEnergy:
    """One energy over all numbers of coded rows, on scores of its own ``columns``.

    Its normaliser is exact in one and two dimensions.
    """

    def __init__(self, model: EBM, proposal: Any, columns: CodedColumns) -> None:
        self.model, self.proposal, self.columns = model, proposal, columns

    @functools.cached_property
    def _sampler(self) -> tuple[EBM, Any, dict[str, Any]]:
        """Model, proposal and method of samples."""
        model, q = (copy.deepcopy(part).float() for part in (self.model, self.proposal))
        if self.columns.dim > 2:
            return model, q, {}
        return model, grid_of(model, q), {"method": "imh", "n_steps": WALK}

    def log_prob(self, packed: Tensor, normalizer: str = "") -> Tensor:  # noqa: ARG002 one way
        """``(n,)``: log-density of packed rows, in the measure of the scores."""
        parts = packed[..., 1].split(16_384)
        return torch.cat([self.model.log_prob(part) for part in parts])

    def sample(self, n: int, *, within: bool = False, seed: SeedLike = None) -> Tensor:
        """Packed rows ``(n, p, 4)``, whose last two numbers are not filled in.

        ``within`` keeps numbers in the range of the training rows: those beyond come at its ends.
        """
        rows = torch.zeros(n, self.columns.dim, 4, dtype=torch.float64)
        if n == 0:
            return rows
        model, q, how = self._sampler
        z = draw(model.log_unnormalized, n, proposal=q, seed=seed, **how).samples.double()
        low, high = self.columns.span.T
        rows[..., 1] = torch.maximum(torch.minimum(z, high), low) if within else z
        return rows

    def bounds(self, packed: Tensor, n_samples: int, seed: int) -> Bounds:
        """Of the mean log-density of packed rows."""
        how: dict[str, Any] = {"proposal": self.proposal, "n_samples": n_samples, "seed": seed}
        return evaluate(self.model, packed[..., 1], **how)


Law = TableChain | TableMixture | RowEnergy


@dataclass(frozen=True)
class Mixture:
    """The law of coded rows: a chain or one energy, and what is mixed with it.

    ``members`` are all that were tried, chain or energy first; ``simple`` the others that have a
    weight. Only a chain answers what is asked given some columns.
    """

    first: TableChain | RowEnergy
    members: list[Member]
    simple: list[TableMixture]

    @property
    def weights(self) -> list[float]:
        """Of the first, if it counts, and of the others."""
        return [member.weight for member in self.members if member.weight > 0]

    @property
    def first_counts(self) -> bool:
        """Whether the chain or energy has a weight in the scores."""
        return self.members[0].weight > 0

    @property
    def chain(self) -> TableChain:
        """The chain."""
        assert isinstance(self.first, TableChain)
        return self.first

    @torch.no_grad()
    def log_prob(self, coded: Tensor, normalizer: str = "quadrature") -> Tensor:
        """Log-likelihood ``(n,)`` of coded rows in the units of the table, but for what is open."""
        with on_cpu():
            return torch.logsumexp(self._of_members(coded, normalizer), -1)

    def _of_members(
        self, coded: Tensor, normalizer: str = "quadrature", of_first: Tensor | None = None
    ) -> Tensor:
        """``(n, M)``: log of weight times density of coded rows, by the members that count."""
        each = [log_density(law, coded) for law in self.simple]
        if self.first_counts:
            if of_first is None:
                of_first = log_density(self.first, coded, normalizer=normalizer)
            each.insert(0, of_first)
        return torch.stack(each, -1) + torch.tensor(self.weights, dtype=torch.float64).log()

    @torch.no_grad()
    def conditional(self, coded: Tensor, given: Tensor) -> Tensor:
        r"""``log p(x_T | x_S)`` ``(n,)`` of coded rows, ``S`` the parts of the mask ``given (p,)``.

        Members count by what they make of ``x_S``: ``sum_k w_k p_k(x_S) p_k(x_T | x_S)`` over
        ``sum_k w_k p_k(x_S)``. Those of simple densities are exact, but where a cell is wide beside
        the spread around a line; those of the chain are its own.
        """
        packed, slope = self.chain.columns.pack(coded)
        slope = slope.where((coded[..., 0] != GAP) & ~given, 0.0).sum(-1)
        with on_cpu():
            of_chain = answers.conditional(self.chain, packed, given) + slope
            if not self.simple:
                return of_chain
            alone = coded.clone()
            alone[:, ~given, 0] = GAP
            alone_by_chain = log_density(self.chain, alone)
            before = self._of_members(alone, of_first=alone_by_chain)
            whole = self._of_members(coded, of_first=alone_by_chain + of_chain)
            possible = torch.logsumexp(before, -1)
            mixed = torch.logsumexp(whole, -1) - possible
            return mixed.where(possible > -torch.inf, of_chain)  # beyond the limits of a column

    @torch.no_grad()
    def consistency(self, coded: Tensor, seed: int) -> dict[str, float]:
        """As :func:`answers.consistency <selfnorm.tables.answers.consistency>`, of the mixture."""
        coded = coded[: answers.checked_rows(self.chain)]
        packed, slope = self.chain.columns.pack(coded)

        def mixed(of_chain: Tensor) -> Tensor:
            return torch.logsumexp(self._of_members(coded, of_first=of_chain + slope.sum(-1)), -1)

        return answers.consistency(self.chain, packed, seed, mixed)

    def sample(self, n: int, seed: int, missing: bool = False) -> np.ndarray:
        """Coded rows ``(n, p, 2)``, each from one of the members."""
        rng = np.random.default_rng(seed)
        counts = rng.multinomial(n, np.array(self.weights) / sum(self.weights)).tolist()
        rows = []
        if isinstance(self.first, RowEnergy) and self.first_counts:
            drawn = self.first.sample(counts.pop(0), within=True, seed=seed)
            rows.append(_unpacked(self.first, drawn))
        elif self.first_counts:
            # in float32: a few digits of a random number cost twice the time in float64
            chain = copy.deepcopy(self.chain).float()
            drawn = chain.sample(counts.pop(0), within=True, gaps=missing, seed=seed)
            rows.append(_unpacked(self.chain, drawn))
        for k, (law, count) in enumerate(zip(self.simple, counts, strict=True)):
            rows.append(_unpacked(law, law.sample(count, within=True, seed=_stream(seed, 1 + k))))
        return np.concatenate(rows)[rng.permutation(n)] if self.simple else rows[0]

    @torch.no_grad()
    def complete(self, coded: Tensor, seen: Tensor, seed: int, missing: bool = False) -> np.ndarray:
        """Coded rows ``(n, p, 2)`` whose cells that are not ``seen`` are drawn, given the others.

        Each by one of the members, which count by what they make of what is seen.
        """
        out, todo = coded.clone(), torch.nonzero((~seen).any(-1)).flatten()
        laws: list[TableChain | TableMixture] = [*[self.chain] * self.first_counts, *self.simple]
        if len(todo) == 0:
            return out.numpy()
        with float32_on_cpu():
            who = torch.zeros(len(todo), dtype=torch.long)
            if self.simple:
                alone = coded[todo]
                alone[..., 0] = alone[..., 0].where(seen[todo], float(GAP))
                once, place = torch.unique(alone, dim=0, return_inverse=True)
                # one pass by b tells well enough who draws
                log_p = self._of_members(once, "learned")
                shares = torch.softmax(log_p.clamp_min(-1e300), 1)  # of the impossible as well
                with seeded(_stream(seed, 0)):
                    who = torch.multinomial(shares[place], 1)[:, 0]
            for k, law in enumerate(laws):
                rows = todo[who == k]
                if len(rows) == 0:
                    continue
                packed = law.columns.pack(coded[rows])[0]
                if isinstance(law, TableChain):
                    how: dict[str, Any] = {"within": True, "gaps": missing, "seed": seed}
                    chain = copy.deepcopy(law).float()
                    drawn = chain.sample(len(rows), packed.float(), seen[rows], **how)
                else:
                    packed[..., 0] = packed[..., 0].where(seen[rows], float(GAP))
                    drawn = law.sample(len(rows), packed, within=True, seed=_stream(seed, 1 + k))
                new = torch.from_numpy(_unpacked(law, drawn))
                out[rows] = torch.where(seen[rows].unsqueeze(-1), coded[rows], new)
        return out.numpy()

    @torch.no_grad()
    def bounds(self, coded: Tensor, open_: Tensor, n_samples: int, seed: int) -> Bounds:
        """Bounds of the mean log-likelihood; those of the chain or energy, moved.

        Samples are drawn for every factor of every row: a large table would take minutes. The
        distance of both bounds from the log-likelihood hardly differs between rows, so it is
        measured on as many rows as are affordable, and the log-likelihood itself on all of them.
        """
        own = self.log_prob(coded) + open_.sum(-1)
        error = float(own.std(correction=min(1, len(own) - 1))) / math.sqrt(len(own))
        findings: tuple[Finding, ...] = ()
        if not bool(torch.isfinite(own).all()):
            words = "Some rows have no finite log-likelihood."
            findings = (Finding("not_finite", math.inf, 0.0, words),)
        if isinstance(self.first, RowEnergy) and self.first_counts:
            packed, _ = self.first.columns.pack(coded)
            of_energy = self.first.bounds(packed, n_samples, seed)
            by = float(own.mean() - self.first.log_prob(packed).mean())
            return replace(of_energy.shifted(by), findings=findings + of_energy.findings)
        if isinstance(self.first, RowEnergy) or self.first.n_numbers == 0:
            exact = float(own.mean())
            return Bounds(exact, exact, error, error, 0.0, 0.0, 1.0, -math.inf, n_samples, findings)
        model = self.first
        places = model.n_numbers * model.n_orderings
        n_samples = min(n_samples, max(MIN_SAMPLES, MAX_FACTOR_SAMPLES // (len(coded) * places)))
        n_rows = max(500, MAX_FACTOR_SAMPLES // ((n_samples + N_NODES) * places))
        chosen = torch.arange(len(coded))
        if len(coded) > n_rows:
            with seeded(seed):
                chosen = torch.randperm(len(coded))[:n_rows]
        packed, slope = model.columns.pack(coded[chosen])
        part = model.bounds(packed, n_samples=n_samples, seed=seed)
        # what the chain's bounds are off by bounds what those of the mixture are
        with on_cpu():
            of_chain = own[chosen] - (slope + open_[chosen]).sum(-1)
            if self.simple:
                of_chain = model.log_prob(packed)
        shift = float(own.mean() - of_chain.mean())
        error = math.hypot(error, part.log_norm_se)
        if len(chosen) < len(coded):
            error = math.hypot(error, part.learned_rms / math.sqrt(n_rows))
        findings += part.findings
        return replace(part.shifted(shift), lower_se=error, upper_se=error, findings=findings)


def _stream(seed: int, which: int) -> int:
    """A seed of its own: one draw must not tell of another that is made beside it."""
    return int(np.random.SeedSequence([seed, which]).generate_state(1)[0])


def _unpacked(law: Law, drawn: Tensor) -> np.ndarray:
    """Coded rows ``(n, p, 2)`` of packed ones, by the digits of the law's own map."""
    rows: np.ndarray = law.columns.unpack(drawn[..., 0].double(), drawn[..., 1].double()).numpy()
    return rows


def judged(log_p: np.ndarray, rows: np.ndarray, first: float = 0.0) -> np.ndarray:
    """``(n,)``: log-density of the mixture of members, weighed by the other half of the rows.

    Arguments as of :func:`mixture_weights`; a row takes no part in the weights it is judged with.
    """
    half = np.random.default_rng(0).permutation(len(log_p)) % 2
    found = np.empty(len(log_p))
    for here in (half == 0, half == 1):
        others = ~here if 0 < here.sum() < len(here) else here
        found[here] = mixed(log_p[here], mixture_weights(log_p[others], rows[others], first))
    return found


class Kind(NamedTuple):
    """A simple density: how many components (0: one at each row), in which coordinates."""

    components: int
    straight: bool

    @property
    def name(self) -> str:
        """What to call it."""
        what = {0: "kernels", 1: "Gaussian"}.get(self.components)
        where = "columns" if self.straight else "normal scores"
        return f"{what or f'{self.components} Gaussians'} of {where}"


def columns_of(parts: Sequence[Part], x: Tensor, *, straight: bool) -> CodedColumns:
    """The map of coded rows ``x``: centred and scaled, or to normal scores."""
    n_knots = 2 if straight else knots_for(len(x))
    return CodedColumns(parts, n_knots).double().fit(x, straight=straight)


def most_components(n: int, p: int) -> int:
    """How many components ``n`` rows of ``p`` parts can carry: a row of its own for each part."""
    return max(1, n // max(ROWS_PER_COMPONENT, p))


def kinds_for(n: int, parts: Sequence[Part], *, complete: bool) -> Iterator[Kind]:
    """The simple densities worth trying on ``n`` rows: of tables whose columns are all numbers.

    Elsewhere the chain stays alone, so that conditionals of categories are those of the joint.
    """
    if not all(part.rest or part.certain for part in parts):
        return
    plain = all(part.n_codes == 0 or part.certain for part in parts) and complete
    most = most_components(n, len(parts))
    for straight in (True, False):
        for components in COMPONENTS:
            if components <= most:
                yield Kind(components, straight)
        if plain and n <= min(MOST_KERNELS, MOST_CELLS // len(parts)):
            yield Kind(0, straight)


def simple_density(
    kind: Kind, columns: CodedColumns, x: Tensor, weights: Tensor, seed: int
) -> TableMixture:
    """A simple density fitted to coded rows ``x`` that count by ``weights``."""
    packed = columns.pack(x)[0]
    components = kind.components or len(x)
    law = TableMixture(
        columns.parts, components=components, shared=kind.components == 0, n_knots=columns.n_knots
    ).double()
    law.columns.load_state_dict(columns.state_dict())
    if kind.components == 0:
        return law.fit_kernels(packed, weights)
    shares = torch.ones(len(x), 1, dtype=torch.float64)
    if components > 1:
        shares = torch.from_numpy(_groups(packed, columns.parts, weights, components, seed))
    return law.fit(packed, shares * weights.unsqueeze(1))


def _groups(
    packed: Tensor, parts: Sequence[Part], weights: Tensor, components: int, seed: int
) -> np.ndarray:
    """``(n, K)``: how far each row belongs to each group."""
    seen = []
    for j, part in enumerate(parts):
        code = packed[:, j, 0].numpy()
        if part.rest:
            seen.append(np.where(code == part.n_codes, packed[:, j, 1].numpy(), 0.0))
        if 0 < part.n_codes <= MOST_CODES:
            seen += [(code == each).astype(float) for each in range(part.n_codes)]
    rows = np.clip(np.stack(seen, 1), -10, 10)
    rng, share = np.random.default_rng(seed), weights.numpy() / float(weights.sum())
    alike = bool((weights == weights[0]).all())
    drawn = rows if alike else rows[rng.choice(len(rows), len(rows), p=share)]
    groups = GaussianMixture(components, reg_covar=1e-3, max_iter=60, random_state=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return np.asarray(groups.fit(drawn).predict_proba(rows))


def log_density(law: Law, coded: Tensor, **how: Any) -> Tensor:
    """``(n,)``: log-density of coded rows in the units of the table, but for what is open."""
    packed, slope = law.columns.pack(coded)
    return law.log_prob(packed, **how) + slope.sum(-1)


def by_another_map(columns: CodedColumns, other: CodedColumns, x: Tensor) -> Tensor:
    """``(n,)``: what the log-density of coded rows changes by where ``other`` maps their columns.

    To first order: the stretch of each number, or of its cell, differs. So a map that knows the
    rows is made up for.
    """
    (packed, slope), (others, other_slope) = columns.pack(x), other.pack(x)
    wide, other_wide = ((p[..., 3] - p[..., 2]).clamp_min(1e-12) for p in (packed, others))
    inside = (wide < FAR / 2) & (other_wide < FAR / 2) & (columns.step > 0)
    cells = (other_wide.log() - wide.log()).where(inside, 0.0)
    return (other_slope - slope + cells).sum(-1)


def held_out_scores(
    kinds: Sequence[Kind],
    parts: Sequence[Part],
    x: Tensor,
    weights: Tensor,
    folds: Tensor,
    seed: int,
    go_on: Callable[[], bool] = lambda: True,
) -> dict[Kind, np.ndarray]:
    """Log-densities ``(n,)`` of coded rows by fits to the other folds; NaN where ``folds`` < 0.

    Of those kinds that were reached while ``go_on``, one Gaussian in both coordinates at least.
    """
    found: dict[Kind, np.ndarray] = {}
    every = [folds == fold for fold in range(int(folds.max()) + 1)]
    maps = {
        s: [columns_of(parts, x[~here], straight=s) for here in every]
        for s in {kind.straight for kind in kinds}
    }
    for kind in sorted(kinds, key=lambda kind: kind.components != 1):
        if kind.components != 1 and not go_on():
            break
        found[kind] = np.full(len(x), np.nan)
        for here, columns in zip(every, maps[kind.straight], strict=True):
            law = simple_density(kind, columns, x[~here], weights[~here], seed)
            found[kind][here.numpy()] = log_density(law, x[here]).numpy()
    return {kind: found[kind] for kind in kinds if kind in found}


def folds_of(n: int, n_folds: int, held_out: Tensor | None) -> Tensor:
    """``(n,)``: the fold in which a row is judged, -1 where it is in none."""
    if n_folds > 1:
        return torch.randperm(n) % n_folds
    folds = torch.full((n,), -1)
    if held_out is not None:
        folds[held_out] = 0
    return folds


def coordinates(scores: dict[Kind, np.ndarray], components: int = 1) -> bool:
    """Whether lines fit columns as they are (straight) better than their normal scores.

    By rows not seen, but for the least likely twentieth: a chain has heavier tails. Lines of as
    many groups of rows as ``components`` tells.
    """
    if not scores:
        return False

    def middle(kind: Kind) -> float:
        known = np.sort(scores[kind][np.isfinite(scores[kind])])
        return float(known[len(known) // 20 :].mean())

    return middle(Kind(components, straight=True)) > middle(Kind(components, straight=False))


def straighter(parts: Sequence[Part], x: Tensor, weights: Tensor, folds: Tensor, seed: int) -> bool:
    """:func:`coordinates` of a table of many rows, some of which ``x`` are: by a few groups.

    Of columns that are sums of others, pixels beside each other say, each is close to a line in
    the ones before, but not in their normal scores; groups of rows differ in how far it strays.
    """
    if not bool((folds >= 0).any()):
        return False
    groups = min(GROUPS, most_components(int((folds < 0).sum()), len(parts)))
    kinds = [Kind(groups, straight) for straight in (True, False)]
    return coordinates(held_out_scores(kinds, parts, x, weights, folds, seed), groups)


def close_to_lines(parts: Sequence[Part], x: Tensor) -> bool:
    """Whether some number strays little from a line in the others, by normal scores of rows ``x``.

    Such a ridge takes networks long to learn. Elsewhere lines cost more than they bring.
    """
    z = columns_of(parts, x, straight=False).pack(x)[0][..., 1].numpy()
    z = z[:, [part.rest for part in parts] & (z.std(0) > 0)]
    if z.shape[1] < 2:
        return False
    inverse = np.linalg.inv(np.corrcoef(z.T) + 1e-6 * np.eye(z.shape[1]))
    return bool(inverse.diagonal().max() > STRAYING**-2)


def mixture_weights(log_p: np.ndarray, rows: np.ndarray, first: float = 0.0) -> np.ndarray:
    """Weights ``(M,)`` under which the mixture of ``log_p (n, M)`` is most likely, by EM.

    ``rows (n,)`` is how much each row counts. Members of no account are dropped. ``first``: the
    share of all rows that is counted for the first member beforehand.

    Example:
        >>> log_p = np.log([[0.5, 0.1], [0.5, 0.1], [0.1, 0.3]])
        >>> mixture_weights(log_p, np.ones(3)).round(2)
        array([0.92, 0.08])
    """
    log_p = np.where(np.isfinite(log_p), log_p, -1e9)
    kept = np.ones(log_p.shape[1], dtype=bool)
    weights, prior = kept / kept.sum(), first * (np.arange(len(kept)) == 0)
    for _ in range(3):
        log_most = log_p.max(1, where=kept, initial=-np.inf, keepdims=True)
        p = np.where(kept, np.exp(np.minimum(log_p - log_most, 0.0)), 0.0)
        for _ in range(300):
            found = weights * ((rows / (p @ weights)) @ p) / rows.sum()
            weights = (found + prior) / (1 + first)
        if (weights[kept] >= LEAST_WEIGHT).all():
            break
        kept = weights >= min(LEAST_WEIGHT, weights.max())
        weights = np.where(kept, weights, 0.0) / weights[kept].sum()
    return weights


def mixed(log_p: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """``(n,)``: log-density of the mixture of members ``(n, M)``."""
    with np.errstate(divide="ignore"):
        return np.asarray(logsumexp(log_p + np.log(weights), axis=1))
