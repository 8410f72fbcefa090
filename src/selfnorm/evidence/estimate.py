"""``evidence``: the log-normaliser of any density, from draws of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TypedDict

import numpy as np
import torch
from scipy.special import logsumexp

from selfnorm import functional as F
from selfnorm._context import SeedLike, seeded
from selfnorm.errors import DataError
from selfnorm.evaluation import PARETO_K_LIMIT, Finding, heavy_tail, tail_index
from selfnorm.evidence.bridge import TOO_FEW, Side, bridge, reciprocal
from selfnorm.evidence.draws import (
    ParameterDraws,
    Reach,
    by_walker,
    disagreement,
    effective_draws,
    read_draws,
    two_parts,
    walkers_in_turn,
)
from selfnorm.evidence.proposal import FittedProposal
from selfnorm.evidence.result import Evidence
from selfnorm.evidence.target import LogDensity, Support, Target

R_HAT_LIMIT = 1.05
FEWEST_SAMPLES = 500  # of each q: they cost nothing but evaluations
TOLERATED_BEYOND = 0.1  # share of held-out draws that q may miss: the bridge does without them
PROBES = 20_000  # rows drawn, not evaluated, of which those beyond all draws are kept
FREE_SAMPLES = 4000  # of q, at which the density is not evaluated
LEAST_SHIFT = 0.02  # of a bounded mean, of standard deviations of some half
CROSSED = 5  # standard errors by which the lower bound may be above the upper one
PRIOR_HALVES = 4  # how many differences between halves the delta method's variance is worth

UNSEEN = "A mode that is in no draw cannot be seen from the draws."
DRAWS_ONLY = (
    "Only the log-densities of the draws were given: this is the reciprocal estimate and an upper "
    "bound; no lower bound, and no check of where the draws are not."
)


@torch.inference_mode(False)  # q is trained
def evidence(
    log_density: LogDensity | None,
    draws: object,
    *,
    support: object = None,
    log_density_draws: object = None,
    max_evaluations: int | None = None,
    chains: bool | None = None,
    max_steps: int | None = None,
    seed: SeedLike = None,
) -> Evidence:
    r"""``log Z = log int p~(x) dx`` of an unnormalised density, from draws of it.

    A mixture of Student-t distributions, with a chain of one-dimensional EBMs where it does not
    come close, is fitted to one half of the draws and adjusted to the density there: a normalised
    density ``q`` close to ``p`` that can be sampled. The value comes by bridge sampling between the
    other half and samples of ``q``; the halves are then swapped and both values averaged. No
    gradients are needed.

    .. math:: E_q[\log \tilde p - \log q] \le \log Z \le E_p[\log \tilde p - \log q]

    The first needs only the density; the second holds if the draws are from ``p``: if the first is
    above the second by more than chance, they are not.

    Args:
        log_density: ``log p~``, of NumPy arrays or tensors, of all rows ``(n, d)`` at once or of
            one row ``(d,)``; ``evidence`` tries them. With named draws it is given a dict of
            parameters. ``None`` if only ``log_density_draws`` are known.
        draws: ``(n, d)`` or ``(chains, n, d)``, correlated or not; a dict of parameter to
            ``(n, *shape)``; ArviZ's InferenceData or DataTree. Keep their order, from which their
            autocorrelation is computed. Walkers of an ensemble sampler are chains; draws of all
            walkers step by step are recognised.
        support: where ``p`` lives: per column (or a dict over the parameters) ``"real"``,
            ``"positive"``, ``(low, high)`` with ``None`` for no end, or ``"simplex"`` on all the
            coordinates of one, whose density is then with respect to Lebesgue measure on all but
            the last. ``q`` is fitted in unconstrained coordinates. A support that is not stated
            costs accuracy, not correctness, if ``log_density`` is ``-inf`` outside.
        log_density_draws: ``log p~`` at the draws where the sampler has kept them, ``(n,)`` or
            ``(chains, n)``: saves as many evaluations.
        max_evaluations: of the density; by default one for each draw and as many for samples of
            ``q`` (a thousand at least), of which a quarter serves to fit it and a tenth to look for
            mass that the draws miss. With fewer, evenly spaced draws are evaluated; all serve to
            fit ``q``. More of them lower the error while they are not far above the draws.
        chains: whether the first dimension counts chains, where the number of dimensions does not
            show it.
        max_steps: training steps of a chain; ``None`` chooses.
        seed: same seed, same numbers.

    Returns:
        An :class:`Evidence`.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> draws = rng.normal(size=(600, 2)) * [1.0, 3.0]
        >>> estimate = evidence(lambda x: -0.5 * (x[:, 0]**2 + x[:, 1]**2 / 9), draws, seed=0)
        >>> exact = math.log(2 * math.pi * 3)
        >>> abs(estimate.log_z - exact) < 0.02, estimate.reliable
        (True, True)
    """
    data = _prepared(log_density, draws, support, log_density_draws, max_evaluations, chains)
    with seeded(seed):
        start = int(torch.randint(2**31, ()))
    halves = [_half(data, k, start, max_steps) for k in range(2)]
    if data.target is None:
        figures = _figures_of_draws(data, halves)
        return replace(
            figures,
            findings=tuple(_findings_of_draws(figures, data, halves)),
            notes=(*data.notes, DRAWS_ONLY, UNSEEN),
        )
    figures = _figures_of_bridge(data, halves)
    return replace(
        figures,
        findings=tuple(_findings_of_bridge(figures, data, halves)),
        notes=(*_about_crossing(figures), *data.notes, UNSEEN),
    )


@dataclass(frozen=True)
class _Prepared:
    """Draws ``(chains, n, d)`` in unconstrained coordinates, and which of them are evaluated."""

    target: Target | None
    space: Support
    y: np.ndarray
    log_p: np.ndarray  # at the draws that are kept, zero elsewhere
    parts: tuple[np.ndarray, np.ndarray]
    kept: np.ndarray
    n_samples: int  # of each q
    reach: Reach
    notes: tuple[str, ...]

    @cached_property
    def slowest(self) -> float:
        """Independent draws that the draws kept are worth, in the worst coordinate."""
        rows = _evenly(self.kept, self.y)
        return min(effective_draws(rows[..., j]) for j in range(rows.shape[2]))


@dataclass(frozen=True)
class _Half:
    """What a ``q`` that is fitted to one half of the draws says with the other half.

    Attributes:
        log_weights_draws: ``log p~ - log q`` at the other half ``(chains, n)``.
        shift: means by draws minus means by samples, and standard errors: ``(2, f)``.
        unseen: mass beyond the draws, in units of ``Z``, and its standard error.
    """

    log_weights_draws: np.ndarray
    shift: np.ndarray
    bridged: Side | None = None  # this and what follows: with a density
    unseen: tuple[float, float] = (0.0, 0.0)
    n_nan: int = 0

    @property
    def side(self) -> Side:
        """The bridge between the other half and samples of ``q``."""
        assert self.bridged is not None
        return self.bridged


def _prepared(
    log_density: LogDensity | None,
    draws: object,
    support: object,
    log_density_draws: object,
    max_evaluations: int | None,
    chains: bool | None,
) -> _Prepared:
    """Draws and density, checked, and a plan of what is evaluated."""
    table = read_draws(draws, chains)
    log_p_draws = _of_sampler(log_density_draws, table.values.shape[:2])
    notes: tuple[str, ...] = ()
    if walkers := walkers_in_turn(table.values):
        table = replace(table, values=by_walker(table.values, walkers))
        log_p_draws = None if log_p_draws is None else by_walker(log_p_draws, walkers)
        notes = (f"Rows {walkers} apart are alike: taken as {walkers} walkers in turn.",)
    space = Support(support, table)
    shape, d = table.values.shape[:2], table.values.shape[2]
    y = space.unconstrained(table.values.reshape(-1, d)).reshape(*shape, -1)
    if log_density is None and log_p_draws is None:
        raise DataError("give log_density, or log_density_draws where it cannot be evaluated")
    target = None if log_density is None else Target(log_density, table)
    if target is not None and log_p_draws is not None:
        _refuse_others(log_p_draws.ravel()[: len(target.first)], target.first)
    parts = two_parts(y)
    n_kept, n_samples = _plan(parts, max_evaluations, log_p_draws is not None)
    kept = _kept(shape, parts, n_kept)
    log_p = _at_draws(target, table, space, y, kept, log_p_draws)
    return _Prepared(target, space, y, log_p, parts, kept, n_samples, Reach(y), notes)


def _half(data: _Prepared, k: int, start: int, max_steps: int | None) -> _Half:
    """Fit ``q`` to half ``k`` and confront it with the other one."""
    own, other = data.parts[k], data.parts[1 - k]
    q = FittedProposal(_part(data.y, own), start + k, max_steps)
    learnt, held_out = own & data.kept, other & data.kept
    y, log_p = _part(data.y, held_out), _part(data.log_p, held_out)
    n_probes, n_learnt = max(1, data.n_samples // 10), data.n_samples // 4
    if data.target is None:
        q.add_chain()
    else:
        evaluate = partial(_at_samples, data.target, data.space)
        rows, log_p_rows = _part(data.y, learnt), _part(data.log_p, learnt)
        q.learn(rows, log_p_rows, evaluate, n_learnt, start + 6 + k)
    log_weights = log_p - q.log_prob(y.reshape(-1, y.shape[2])).reshape(log_p.shape)
    places = _features(q, q.sample(FREE_SAMPLES, start + 8 + k))
    if data.target is None:
        return _Half(log_weights, _shift_of_q(_features(q, y), log_weights, places))
    samples = q.sample(data.n_samples - n_probes - n_learnt, start + 2 + k)
    log_p_samples = evaluate(samples)
    n_nan = int(np.isnan(log_p_samples).sum())
    log_p_samples = np.nan_to_num(log_p_samples, nan=-math.inf, neginf=-math.inf)
    side = bridge(log_weights, log_p_samples - q.log_prob(samples))
    unseen = _unseen(side.log_z, q, evaluate, data.reach, n_probes, start + 4 + k)
    at_draws, at_samples = _features(q, y, log_p), _features(q, samples, log_p_samples)
    shift = _shift(at_draws, at_samples, side.log_weights, places)
    return _Half(log_weights, shift, side, unseen, n_nan)


def _of_sampler(values: object, shape: tuple[int, int]) -> np.ndarray | None:
    if values is None:
        return None
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
    log_p = np.asarray(values, dtype=np.float64)
    if log_p.size != shape[0] * shape[1]:
        raise DataError(
            f"log_density_draws has shape {log_p.shape}; one number for each of "
            f"{shape[0]} x {shape[1]} draws is needed"
        )
    return log_p.reshape(shape)


def _refuse_others(of_sampler: np.ndarray, evaluated: np.ndarray) -> None:
    """What samplers keep often has a Jacobian more or a constant less."""
    off = np.abs(of_sampler - evaluated) > 1e-4 * (1 + np.abs(evaluated))
    if off.any():
        j = int(off.argmax())
        raise DataError(
            f"log_density_draws says {of_sampler[j]:.6g} at draw {j} where log_density says "
            f"{evaluated[j]:.6g}: they must be one function; leave log_density_draws out"
        )


def _plan(parts: Sequence[np.ndarray], limit: int | None, evaluated: bool) -> tuple[int, int]:
    """Draws evaluated, all together, and samples of each ``q``."""
    n = int(sum(part.sum() for part in parts))
    if limit is None:
        return n, max(n // 2, FEWEST_SAMPLES)
    if limit < 100:
        raise DataError(f"max_evaluations must be at least 100, got {limit}")
    limit -= 6  # to find out how the density is called
    if evaluated:
        return n, limit // 2
    n_kept = min(n, limit // 2)
    return n_kept, (limit - n_kept) // 2


def _kept(shape: tuple[int, int], parts: Sequence[np.ndarray], n_kept: int) -> np.ndarray:
    """Which draws are evaluated: evenly spaced places, the same in every chain."""
    used = parts[0] | parts[1]
    total = int(used.sum())
    if n_kept >= total:
        return used
    kept = np.zeros(shape, bool)
    for part in parts:
        columns = np.flatnonzero(part.any(0))
        rows = int(part.any(1).sum())
        wanted = max(4, int(n_kept * part.sum() / total / rows))
        chosen = columns[np.linspace(0, len(columns) - 1, min(wanted, len(columns))).astype(int)]
        kept[np.ix_(part.any(1), np.isin(np.arange(shape[1]), chosen))] = True
    return kept


def _part(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """``values (chains, n, ...)`` at a mask of whole rows and columns: ``(c, m, ...)``."""
    return values[np.ix_(mask.any(1), mask.any(0))]


def _evenly(kept: np.ndarray, values: np.ndarray) -> np.ndarray:
    """``values`` at the draws kept; all chains have as many."""
    fewest = int(kept.sum(1).min())
    return np.stack([row[mask][:fewest] for row, mask in zip(values, kept, strict=True)])


def _at_draws(
    target: Target | None,
    table: ParameterDraws,
    space: Support,
    y: np.ndarray,
    kept: np.ndarray,
    log_p_draws: np.ndarray | None,
) -> np.ndarray:
    """``log p~`` in unconstrained coordinates at the draws that are kept, zero elsewhere."""
    log_p = np.zeros(kept.shape)
    if log_p_draws is not None:
        log_p[kept] = log_p_draws[kept]
    else:
        assert target is not None
        log_p[kept] = target(table.values[kept])
    bad = ~np.isfinite(log_p)
    if bad.any():
        chain, row = (int(i) for i in np.argwhere(bad)[0])
        raise DataError(
            f"log_density is {log_p[chain, row]} at {int(bad.sum())} of {int(kept.sum())} draws, "
            f"the first in chain {chain}, draw {row}: draws of a density are where it is positive "
            "and finite; check its support, the order of the columns, and overflow"
        )
    log_p[kept] += space.constrained(y[kept])[1]
    return log_p


def _at_samples(target: Target, space: Support, y: np.ndarray) -> np.ndarray:
    x, log_jacobian = space.constrained(y)
    finite = np.isfinite(x).all(1) & np.isfinite(log_jacobian)
    values = np.full(len(y), -math.inf)  # so far out that a coordinate overflows
    values[finite] = target(x[finite]) + log_jacobian[finite]
    if np.isposinf(values).any():
        raise DataError("log_density is +inf at a sample: such a density has no normaliser")
    return values


def _unseen(
    log_z: float,
    q: FittedProposal,
    evaluate: Callable[[np.ndarray], np.ndarray],
    reach: Reach,
    n: int,
    seed: int,
) -> tuple[float, float]:
    """Mass beyond the reach of the draws, in units of ``Z``, and its standard error.

    ``E_r[p~ / (r Z); A] = P(A)`` for any wide density ``r`` and the event ``A`` that a row lies
    beyond all draws; only rows in ``A`` are evaluated. In few dimensions this shows draws that were
    cut off; in many, samples of ``r`` rarely reach ``p``, and it shows nothing.
    """
    y, log_r = q.probe(PROBES, seed)
    beyond = reach.beyond(y)
    y, log_r, share = y[beyond][:n], log_r[beyond][:n], float(beyond.mean())
    if not len(y):
        return 0.0, 0.0
    log_p = np.nan_to_num(evaluate(y), nan=-math.inf, neginf=-math.inf)
    terms = share * np.exp(np.minimum(log_p - log_r - log_z, 300.0))
    return float(terms.mean()), float(terms.std()) / math.sqrt(len(y))


def _features(q: FittedProposal, y: np.ndarray, log_p: np.ndarray | None = None) -> np.ndarray:
    """Bounded functions ``(..., 2 d + 1)`` of rows: where they are, how wide, how likely."""
    place = np.tanh(q.standardised(y))
    parts = [place, place**2]
    if log_p is not None:
        parts.append(np.tanh((log_p - q.log_level) / math.sqrt(y.shape[-1]))[..., None])
    return np.concatenate(parts, axis=-1)


def _shift(
    draws: np.ndarray, samples: np.ndarray, log_weights: np.ndarray, places: np.ndarray
) -> np.ndarray:
    """``E h`` by draws minus that by samples of ``q``, and standard errors: ``(2, f)``.

    ``E_p h = E_q h + E_q[(w - 1) h]`` with weights ``w`` of mean one: the first term from as many
    samples as one likes, where no density is evaluated, the second from those that have weights.
    """
    m, n_places = len(samples), places.shape[1]
    weights = m * np.exp(log_weights - logsumexp(log_weights))[:, None]
    middle = (weights * samples).mean(0)
    terms = weights * (samples - middle)
    terms[:, :n_places] -= samples[:, :n_places] - middle[:n_places]
    by_samples = middle + terms.mean(0)
    by_samples[:n_places] += (places - middle[:n_places]).mean(0)
    variance = terms.var(0) / m
    variance[:n_places] += places.var(0) / len(places)
    flat = draws.reshape(-1, draws.shape[-1])
    effective = [effective_draws(draws[..., j]) for j in range(draws.shape[-1])]
    return np.stack([flat.mean(0) - by_samples, np.sqrt(variance + flat.var(0) / effective)])


def _shift_of_q(draws: np.ndarray, l1: np.ndarray, places: np.ndarray) -> np.ndarray:
    """``E_q h`` by draws that weigh ``q / p~`` minus that by samples of ``q``; as ``_shift``."""
    weights = np.exp(l1.min() - l1)[..., None]
    terms = weights / weights.mean() * draws
    middle = terms.mean((0, 1))
    terms -= weights / weights.mean() * middle
    effective = [effective_draws(terms[..., j]) for j in range(terms.shape[-1])]
    variance = terms.var((0, 1)) / effective + places.var(0) / len(places)
    return np.stack([middle - places.mean(0), np.sqrt(variance)])


def _figures_of_bridge(data: _Prepared, halves: Sequence[_Half]) -> Evidence:
    """The value by bridge sampling and its bounds: means over both halves."""
    sides = one, two = [half.side for half in halves]
    # Where q is a parametric fit, the draws cause the same error in both halves: the parameters
    # move with one half, and the other half multiplies. So this error does not average out.
    from_draws = (math.sqrt(one.variance_draws) + math.sqrt(two.variance_draws)) / 2
    variance = from_draws**2 + (one.variance_samples + two.variance_samples) / 4
    excess = (one.log_z - two.log_z) ** 2 / _variance_of_difference(halves)
    if excess > 1:
        variance *= (PRIOR_HALVES + excess) / (PRIOR_HALVES + 1)
    lower, lower_se = _mean([side.lower() for side in sides])
    upper, upper_se = _mean([side.upper() for side in sides])
    weights = torch.from_numpy(np.concatenate([side.log_weights for side in sides]))
    return Evidence(
        log_z=(one.log_z + two.log_z) / 2,
        se=math.sqrt(variance),
        lower=lower,
        upper=upper,
        lower_se=lower_se,
        upper_se=upper_se,
        importance=float(np.mean([side.importance() for side in sides])),
        reciprocal=float(np.mean([side.reciprocal() for side in sides])),
        support_share=sum(side.support_share for side in sides) / 2,
        halves=(one.log_z, two.log_z),
        effective_draws=sum(side.effective_draws for side in sides),
        ess=float(F.ess(weights)),
        overlap=min(side.overlap for side in sides),
        pareto_k_draws=max(side.pareto_k_draws for side in sides),
        pareto_k_samples=max(side.pareto_k_samples for side in sides),
        log_weights_samples=weights.numpy(),
        **_common_figures(data, halves),
    )


def _figures_of_draws(data: _Prepared, halves: Sequence[_Half]) -> Evidence:
    """The reciprocal value and the upper bound, which need the draws alone."""
    held_out = [half.log_weights_draws for half in halves]
    values, errors = zip(*(reciprocal(log_w) for log_w in held_out), strict=True)
    apart, se = values[0] - values[1], sum(errors) / 2
    upper, upper_se = _mean(
        [(float(w.mean()), math.sqrt(w.var() / effective_draws(w))) for w in held_out]
    )
    log_z = sum(values) / 2
    return Evidence(
        log_z=log_z,
        se=math.hypot(se, max(0.0, abs(apart) / 2 - se)),
        upper=upper,
        upper_se=upper_se,
        reciprocal=log_z,
        halves=(values[0], values[1]),
        effective_draws=sum(effective_draws(log_w) for log_w in held_out),
        pareto_k_draws=max(tail_index(torch.from_numpy(-w.ravel())) for w in held_out),
        **_common_figures(data, halves),
    )


class _Common(TypedDict):
    """Figures that an estimate has with and without a density."""

    n_draws: int
    dim: int
    n_evaluations: int
    r_hat: float
    log_weights_draws: np.ndarray


def _common_figures(data: _Prepared, halves: Sequence[_Half]) -> _Common:
    y = data.y
    return {
        "n_draws": y.shape[0] * y.shape[1],
        "dim": y.shape[2],
        "n_evaluations": 0 if data.target is None else data.target.n_evaluations,
        "r_hat": max(disagreement(y), disagreement(_evenly(data.kept, data.log_p[..., None]))),
        "log_weights_draws": np.concatenate([half.log_weights_draws.ravel() for half in halves]),
    }


def _variance_of_difference(halves: Sequence[_Half]) -> float:
    return sum(half.side.variance_draws + half.side.variance_samples for half in halves)


def _mean(bounds: list[tuple[float, float]]) -> tuple[float, float]:
    """Mean of two bounds; the errors are taken as fully dependent."""
    return sum(b for b, _ in bounds) / 2, sum(e for _, e in bounds) / 2


def _crossing(figures: Evidence) -> tuple[float, float]:
    """By how much the lower bound is above the upper one, and the standard error of that."""
    rounding = 1e-9 * (1 + abs(figures.upper))
    error = math.hypot(figures.lower_se, figures.upper_se) + rounding
    return figures.lower - figures.upper, error


def _about_crossing(figures: Evidence) -> Iterator[str]:
    """A note where the bounds cross by no more than chance."""
    crossed, se = _crossing(figures)
    if 0 < crossed <= CROSSED * se:
        yield (
            f"The bounds meet: the lower is above by {crossed:.2g}, or {crossed / se:.1f} standard "
            "errors."
        )


def _findings_of_bridge(
    figures: Evidence, data: _Prepared, halves: Sequence[_Half]
) -> Iterator[Finding]:
    """The checks that a value by bridge sampling does not pass."""
    sides = [half.side for half in halves]
    yield from _about_draws(figures, data)
    yield from _about_unseen(data, halves)
    effective_samples = min(
        len(side.log_weights) * float(F.ess(torch.from_numpy(side.log_weights))) for side in sides
    )
    if effective_samples > 2 * TOO_FEW:
        yield from _about_shifts(halves, data.space.free_names)
    drifting = [side for side in sides if abs(side.drift) > 0.01 + 4 * side.drift_se]
    if drifting:
        drift, limit = drifting[0].drift, 0.01 + 4 * drifting[0].drift_se
        words = (
            f"Bridges that lean on the draws or on q differ by {drift:.3f}, which they do "
            "not for draws from this density; check parametrisation, Jacobians and convergence."
        )
        yield Finding("drift", abs(drift), limit, words)
    crossed, crossed_se = _crossing(figures)
    if crossed > CROSSED * crossed_se:
        words = (
            f"The lower bound is above the upper one by {crossed:.2g}, or "
            f"{crossed / crossed_se:.0f} standard errors: the draws are not from this density; "
            "check parametrisation, Jacobians and convergence."
        )
        yield Finding("crossed", crossed, CROSSED * crossed_se, words)
    yield from _about_halves(figures.halves, math.sqrt(_variance_of_difference(halves)))
    yield from _about_overlap(figures, sides)
    n_nan = sum(half.n_nan for half in halves)
    if n_nan:
        words = (
            f"log_density is NaN at {n_nan} samples of q, which counted as outside the support: "
            "return -inf there if that is meant."
        )
        yield Finding("nan", n_nan, 0.0, words)


def _findings_of_draws(
    figures: Evidence, data: _Prepared, halves: Sequence[_Half]
) -> Iterator[Finding]:
    """The checks that a reciprocal value does not pass."""
    yield from _about_draws(figures, data)
    yield from _about_shifts(halves, data.space.free_names)
    cure = "q has heavier tails than the draws, a few draws carry the estimate; give log_density"
    yield from heavy_tail(figures.pareto_k_draws, f"{cure} for a bridge estimate.")
    errors = (reciprocal(half.log_weights_draws)[1] for half in halves)
    yield from _about_halves(figures.halves, math.hypot(*errors))


def _about_draws(figures: Evidence, data: _Prepared) -> Iterator[Finding]:
    """Whether the chains agree, and what they are worth."""
    n_chains, n, _ = data.y.shape
    limit = R_HAT_LIMIT + 5 / (n // 2)
    if figures.r_hat > limit:
        who = "The chains" if n_chains > 1 else "The two halves of the chain"
        words = (
            f"{who} disagree (R-hat {figures.r_hat:.2f}): the draws are not (yet) from the "
            "density, or it has modes between which they rarely move; run the sampler longer."
        )
        yield Finding("r_hat", figures.r_hat, limit, words)
    if data.slowest < TOO_FEW:
        words = (
            f"The draws are worth {data.slowest:.0f} independent ones: run the sampler longer, "
            "thin less, or allow more evaluations."
        )
        yield Finding("effective_draws", data.slowest, TOO_FEW, words)


def _about_unseen(data: _Prepared, halves: Sequence[_Half]) -> Iterator[Finding]:
    """Whether there is mass around the draws that no draw has seen."""
    excess = float(np.mean([half.unseen[0] for half in halves]))
    excess_se = math.hypot(*(half.unseen[1] for half in halves)) / 2
    limit = 0.02 + data.reach.expected / data.slowest + 4 * excess_se
    if excess > limit:
        words = (
            f"There is mass around the draws that no draw has seen (about {excess:.2f} of theirs): "
            "they come from a part of the support only; check limits and truncation of the sampler."
        )
        yield Finding("unseen", excess, limit, words)


def _about_shifts(halves: Sequence[_Half], names: Sequence[str]) -> Iterator[Finding]:
    """Whether means by the draws are those of the density."""
    one, two = (half.shift for half in halves)
    away = (one[0] + two[0]) / 2
    se = np.hypot(one[1], two[1]) / 2
    excess = np.abs(away) - LEAST_SHIFT - 5 * se
    worst = int(excess.argmax())
    if excess[worst] > 0:
        d = len(names)
        what = ("place", "spread")[worst // d] if worst < 2 * d else "log-density"
        of = f" of {names[worst % d]!r}" if worst < 2 * d else ""
        words = (
            f"The draws differ from the density in the {what}{of}: its mean is off by "
            f"{abs(away[worst]) / se[worst]:.0f} standard errors. They are not from this density; "
            "check parametrisation, Jacobians, limits and convergence."
        )
        yield Finding("shift", float(abs(away[worst])), LEAST_SHIFT + 5 * float(se[worst]), words)


def _about_halves(log_z: Sequence[float], se: float) -> Iterator[Finding]:
    """Whether both halves of the draws give one value."""
    apart, limit = abs(log_z[0] - log_z[1]), 0.02 + 4 * se
    if apart > limit:
        words = (
            f"The two halves of the draws give {log_z[0]:.3f} and {log_z[1]:.3f}: one lacks what "
            "the other has; run the sampler longer."
        )
        yield Finding("halves", apart, limit, words)


def _about_overlap(figures: Evidence, sides: Sequence[Side]) -> Iterator[Finding]:
    """Whether draws and samples of ``q`` are in the same places."""
    beyond = max(side.share_beyond for side in sides)
    if beyond > TOLERATED_BEYOND:
        words = (
            f"{100 * beyond:.0f} % of the held-out draws lie where the q fitted to the other half "
            "hardly ever is: a mode or a tail is missing from one half; run the sampler longer."
        )
        yield Finding("data_side", beyond, TOLERATED_BEYOND, words)
    effective = min(
        side.overlap * min(side.effective_draws, len(side.log_weights)) for side in sides
    )
    if effective < TOO_FEW:
        words = (
            f"Draws and q overlap in {effective:.0f} effective draws only: bring more draws, or "
            "state the support."
        )
        yield Finding("overlap", effective, TOO_FEW, words)
    k_draws, k_samples = figures.pareto_k_draws, figures.pareto_k_samples
    if min(k_draws, k_samples) > PARETO_K_LIMIT and figures.overlap < 0.5:
        words = (
            f"Heavy tails on both sides (Pareto k {k_draws:.2f} and {k_samples:.2f}), and an "
            f"overlap of {figures.overlap:.2f}: bring more draws, or state the support."
        )
        yield Finding("pareto_k", min(k_draws, k_samples), PARETO_K_LIMIT, words)
