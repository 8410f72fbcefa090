"""The members of a table's distribution: simple densities beside what was trained, and weights.

A mixture of normalised densities is one. Members are judged on rows that they have not seen, by
folds or on a part held out, and weighed by the likelihood of the mixture on these rows.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.special import logsumexp
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture
from torch import Tensor

from selfnorm._saved import saved
from selfnorm.chain import TableChain
from selfnorm.columns import FAR, CodedColumns, Part, knots_for
from selfnorm.distributions import TableMixture

LEAST_WEIGHT = 1e-2  # of a member that is kept
ROWS_PER_COMPONENT = 20
MOST_ROWS = 5000  # that the simple densities of a table are fitted to: more tell little
COMPONENTS = (1, 2, 4, 8)
GROUPS = 4  # of the rows, at most, by which coordinates are chosen
STRAYING = 1 / 3  # of its deviation: a number that strays less from a line is on a ridge
MOST_KERNELS, MOST_CELLS = 1000, 12_000  # rows with a kernel each, and their cells
MOST_CODES = 12  # of a column by which rows are grouped


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


def judged(log_p: np.ndarray, rows: np.ndarray, first: float = 0.0) -> np.ndarray:
    """``(n,)``: log-density of the mixture of members, weighed by the other half of the rows.

    Arguments as of :func:`mixture_weights`; a row takes no part in the weights it is judged with.
    """
    half = np.random.default_rng(0).permutation(len(log_p)) % 2
    scores = np.empty(len(log_p))
    for chosen in (half == 0, half == 1):
        others = ~chosen if 0 < chosen.sum() < len(chosen) else chosen
        scores[chosen] = mixed(log_p[chosen], mixture_weights(log_p[others], rows[others], first))
    return scores


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
    density = TableMixture(
        columns.parts, components=components, shared=kind.components == 0, n_knots=columns.n_knots
    ).double()
    density.columns.load_state_dict(columns.state_dict())
    if kind.components == 0:
        return density.fit_kernels(packed, weights)
    shares = torch.ones(len(x), 1, dtype=torch.float64)
    if components > 1:
        shares = torch.from_numpy(_groups(packed, columns.parts, weights, components, seed))
    return density.fit(packed, shares * weights.unsqueeze(1))


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
            seen += [(code == level).astype(float) for level in range(part.n_codes)]
    rows = np.clip(np.stack(seen, 1), -10, 10)
    rng, share = np.random.default_rng(seed), weights.numpy() / float(weights.sum())
    alike = bool((weights == weights[0]).all())
    drawn = rows if alike else rows[rng.choice(len(rows), len(rows), p=share)]
    groups = GaussianMixture(components, reg_covar=1e-3, max_iter=60, random_state=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return np.asarray(groups.fit(drawn).predict_proba(rows))


def log_density(density: TableMixture | TableChain, coded: Tensor, **how: Any) -> Tensor:
    """``(n,)``: log-density of coded rows in the units of the table, but for what is open."""
    packed, slope = density.columns.pack(coded)
    return density.log_prob(packed, **how) + slope.sum(-1)


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
    scores: dict[Kind, np.ndarray] = {}
    in_folds = [folds == fold for fold in range(int(folds.max()) + 1)]
    maps = {
        s: [columns_of(parts, x[~held], straight=s) for held in in_folds]
        for s in {kind.straight for kind in kinds}
    }
    for kind in sorted(kinds, key=lambda kind: kind.components != 1):
        if kind.components != 1 and not go_on():
            break
        scores[kind] = np.full(len(x), np.nan)
        for held, columns in zip(in_folds, maps[kind.straight], strict=True):
            density = simple_density(kind, columns, x[~held], weights[~held], seed)
            scores[kind][held.numpy()] = log_density(density, x[held]).numpy()
    return {kind: scores[kind] for kind in kinds if kind in scores}


def folds_of(n: int, n_folds: int, held_out: Tensor | None) -> Tensor:
    """``(n,)``: the fold in which a row is judged, -1 where it is in none."""
    if n_folds > 1:
        return torch.randperm(n) % n_folds
    folds = torch.full((n,), -1)
    if held_out is not None:
        folds[held_out] = 0
    return folds


def coordinates(scores: dict[Kind, np.ndarray]) -> bool:
    """Whether a chain sees columns as they are (straight), or their normal scores.

    By rows not seen and the largest mixture of few Gaussians that was tried in both: columns stay
    as they are unless clearly more rows are likelier otherwise.
    """
    tried = [k.components for k in scores if k.straight and 0 < k.components <= GROUPS]
    tried = [components for components in tried if Kind(components, straight=False) in scores]
    if not tried:
        return False
    straight, curved = (scores[Kind(max(tried), way)] for way in (True, False))
    gain = (straight - curved)[np.isfinite(straight)]
    return bool((gain > 0).mean() > 0.5 - 1 / math.sqrt(len(gain)))


def has_ridge(columns: CodedColumns, x: Tensor) -> bool:
    """Whether some number strays little from a line in the others, in rows ``x`` as mapped."""
    z = columns.pack(x[:MOST_ROWS])[0][..., 1].numpy()
    z = z[:, [part.rest for part in columns.parts] & (z.std(0) > 0)]
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
            shares = weights * ((rows / (p @ weights)) @ p) / rows.sum()
            weights = (shares + prior) / (1 + first)
        if (weights[kept] >= LEAST_WEIGHT).all():
            break
        kept = weights >= min(LEAST_WEIGHT, weights.max())
        weights = np.where(kept, weights, 0.0) / weights[kept].sum()
    return weights


def mixed(log_p: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """``(n,)``: log-density of the mixture of members ``(n, M)``."""
    with np.errstate(divide="ignore"):
        return np.asarray(logsumexp(log_p + np.log(weights), axis=1))
