"""``evidence``: the log-normaliser of anybody's density, from draws."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy.special import logsumexp

from selfnorm import functional as F
from selfnorm._context import SeedLike, seeded
from selfnorm.errors import DataError
from selfnorm.evaluation import PARETO_K_LIMIT, Finding, tail_index
from selfnorm.evidence.bridge import TOO_FEW, Side, bridge, reciprocal
from selfnorm.evidence.draws import (
    Draws,
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
from selfnorm.evidence.target import Support, Target

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
    log_density: Callable[[Any], Any] | None,
    draws: Any,
    *,
    support: Any = None,
    log_density_draws: Any = None,
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
            tell.
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
    given = read_draws(draws, chains)
    log_p_draws = _of_sampler(log_density_draws, given.values.shape[:2])
    notes: list[str] = []
    if walkers := walkers_in_turn(given.values):
        given = replace(given, values=by_walker(given.values, walkers))
        log_p_draws = None if log_p_draws is None else by_walker(log_p_draws, walkers)
        notes.append(f"Rows {walkers} apart are alike: taken as {walkers} walkers in turn.")
    space = Support(support, given)
    shape, d = given.values.shape[:2], given.values.shape[2]
    y = space.unconstrained(given.values.reshape(-1, d)).reshape(*shape, -1)
    if log_density is None and log_p_draws is None:
        raise DataError("give log_density, or log_density_draws where it cannot be evaluated")
    target = None if log_density is None else Target(log_density, given)
    if target is not None and log_p_draws is not None:
        _refuse_others(log_p_draws.ravel()[: len(target.first)], target.first)
    parts = two_parts(y)
    n_kept, n_samples = _plan(parts, max_evaluations, log_p_draws is not None)
    kept = _kept(shape, parts, n_kept)
    log_p = _at_draws(target, given, space, y, kept, log_p_draws)
    with seeded(seed):
        start = int(torch.randint(2**31, ()))
    sides: list[Side] = []
    held: list[np.ndarray] = []
    n_nan, unseen, shifts = 0, [], []
    reach = Reach(y)
    for k, (own, other) in enumerate((parts, parts[::-1])):
        q = FittedProposal(_part(y, own), start + k, max_steps)
        mine, chosen = own & kept, other & kept
        n_probes, n_learnt = max(1, n_samples // 10), n_samples // 4
        if target is None:
            q.add_chain()
        else:
            evaluate = partial(_at_samples, target, space)
            q.learn(_part(y, mine), _part(log_p, mine), evaluate, n_learnt, start + 6 + k)
        l1 = _part(log_p, chosen) - q.log_prob(_part(y, chosen).reshape(-1, y.shape[2])).reshape(
            _part(log_p, chosen).shape
        )
        held.append(l1)
        places = _features(q, q.sample(FREE_SAMPLES, start + 8 + k))
        if target is None:
            shifts.append(_shift_of_q(_features(q, _part(y, chosen)), l1, places))
        else:
            samples = q.sample(n_samples - n_probes - n_learnt, start + 2 + k)
            log_p_samples = _at_samples(target, space, samples)
            n_nan += int(np.isnan(log_p_samples).sum())
            log_p_samples = np.nan_to_num(log_p_samples, nan=-math.inf, neginf=-math.inf)
            sides.append(bridge(l1, log_p_samples - q.log_prob(samples)))
            unseen.append(_unseen(sides[-1].log_z, q, evaluate, reach, n_probes, start + 4 + k))
            at_draws = _features(q, _part(y, chosen), _part(log_p, chosen))
            at_samples = _features(q, samples, log_p_samples)
            shifts.append(_shift(at_draws, at_samples, sides[-1].log_weights, places))
    rows = _evenly(kept, y)
    common: dict[str, Any] = {
        "n_draws": shape[0] * shape[1],
        "dim": y.shape[2],
        "n_evaluations": 0 if target is None else target.n_evaluations,
        "r_hat": max(disagreement(y), disagreement(_evenly(kept, log_p[..., None]))),
        "log_weights_draws": np.concatenate([l1.ravel() for l1 in held]),
    }
    slowest = min(effective_draws(rows[..., j]) for j in range(rows.shape[2]))
    n_split = shape[1] // 2
    reasons = list(_of_draws(common["r_hat"], n_split, slowest, shape[0]))
    if target is None:
        reasons += _of_shifts(shifts, space.free_names)
        return _by_reciprocal(held, reasons, notes, common)
    excess, excess_se = np.mean([e for e, _ in unseen]), math.hypot(*(se for _, se in unseen)) / 2
    if excess > 0.02 + reach.expected / slowest + 4 * excess_se:
        reasons.append(
            f"There is mass around the draws that no draw has seen (about {excess:.2f} of theirs): "
            "they come from a part of the support only; check limits and truncation of the sampler."
        )
    effective_samples = min(
        len(side.log_weights) * float(F.ess(torch.from_numpy(side.log_weights))) for side in sides
    )
    if effective_samples > 2 * TOO_FEW:
        reasons += _of_shifts(shifts, space.free_names)
    return _by_bridge(sides, reasons, notes, n_nan, common)


def _of_sampler(values: Any, shape: tuple[int, int]) -> np.ndarray | None:
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
    given: Draws,
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
        log_p[kept] = target(given.values[kept])
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
    cut off; in many, ``r`` hardly ever meets ``p``, and it shows nothing.
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


def _of_shifts(shifts: list[np.ndarray], names: Sequence[str]) -> Iterator[str]:
    away = (shifts[0][0] + shifts[1][0]) / 2
    se = np.hypot(shifts[0][1], shifts[1][1]) / 2
    excess = np.abs(away) - LEAST_SHIFT - 5 * se
    worst = int(excess.argmax())
    if excess[worst] > 0:
        d = len(names)
        what = ("place", "spread")[worst // d] if worst < 2 * d else "log-density"
        of = f" of {names[worst % d]!r}" if worst < 2 * d else ""
        yield (
            f"The draws differ from the density in the {what}{of}: its mean is off by "
            f"{abs(away[worst]) / se[worst]:.0f} standard errors. They are not from this density; "
            "check parametrisation, Jacobians, limits and convergence."
        )


def _of_draws(r_hat: float, n: int, effective: float, chains: int) -> Iterator[str]:
    if r_hat > R_HAT_LIMIT + 5 / n:
        who = "The chains" if chains > 1 else "The two halves of the chain"
        yield (
            f"{who} disagree (R-hat {r_hat:.2f}): the draws are not (yet) from the density, or it "
            "has modes between which they hardly move; run the sampler longer."
        )
    if effective < TOO_FEW:
        yield (
            f"The draws are worth {effective:.0f} independent ones: run the sampler longer, thin "
            "less, or allow more evaluations."
        )


def _of_halves(log_z: Sequence[float], se: float) -> Iterator[str]:
    if abs(log_z[0] - log_z[1]) > 0.02 + 4 * se:
        yield (
            f"The two halves of the draws give {log_z[0]:.3f} and {log_z[1]:.3f}: one lacks what "
            "the other has; run the sampler longer."
        )


def _by_bridge(
    sides: list[Side],
    reasons: list[str],
    notes: list[str],
    n_nan: int,
    common: dict[str, Any],
) -> Evidence:
    one, two = sides
    log_z = (one.log_z + two.log_z) / 2
    # What the draws put in is the same product of fluctuations of both halves where q is a
    # parametric fit (its parameters move with one half, the other half multiplies): no averaging.
    from_draws = (math.sqrt(one.variance_draws) + math.sqrt(two.variance_draws)) / 2
    variance = from_draws**2 + (one.variance_samples + two.variance_samples) / 4
    expected = sum(side.variance_draws + side.variance_samples for side in sides)
    excess = (one.log_z - two.log_z) ** 2 / expected
    if excess > 1:
        variance *= (PRIOR_HALVES + excess) / (PRIOR_HALVES + 1)
    se = math.sqrt(variance)
    lower, lower_se = _mean([side.lower() for side in sides])
    upper, upper_se = _mean([side.upper() for side in sides])
    k_draws = max(side.pareto_k_draws for side in sides)
    k_samples = max(side.pareto_k_samples for side in sides)
    share = sum(side.support_share for side in sides) / 2
    crossed = lower - upper
    notes.append(UNSEEN)
    crossed_se = math.hypot(lower_se, upper_se) + 1e-9 * (1 + abs(upper))  # of rounding
    drifting = [side.drift for side in sides if abs(side.drift) > 0.01 + 4 * side.drift_se]
    if drifting:
        reasons.append(
            f"Bridges that lean on the draws or on q differ by {drifting[0]:.3f}, which they do "
            "not for draws from this density; check parametrisation, Jacobians and convergence."
        )
    if crossed > CROSSED * crossed_se:
        reasons.append(
            f"The lower bound is above the upper one by {crossed:.2g}, or "
            f"{crossed / crossed_se:.0f} standard errors: the draws are not from this density; "
            "check parametrisation, Jacobians and convergence."
        )
    elif crossed > 0:
        notes.insert(
            0,
            f"The bounds meet: the lower is above by {crossed:.2g}, or "
            f"{crossed / crossed_se:.1f} standard errors.",
        )
    reasons += _of_halves((one.log_z, two.log_z), math.sqrt(expected))
    beyond = max(side.share_beyond for side in sides)
    if beyond > TOLERATED_BEYOND:
        reasons.append(
            f"{100 * beyond:.0f} % of the held-out draws lie where the q fitted to the other half "
            "hardly ever is: a mode or a tail is missing from one half; run the sampler longer."
        )
    effective = min(
        side.overlap * min(side.effective_draws, len(side.log_weights)) for side in sides
    )
    if effective < TOO_FEW:
        reasons.append(
            f"Draws and q overlap in {effective:.0f} effective draws only: bring more draws, or "
            "state the support."
        )
    overlap = min(side.overlap for side in sides)
    if min(k_draws, k_samples) > PARETO_K_LIMIT and overlap < 0.5:
        reasons.append(
            f"Heavy tails on both sides (Pareto k {k_draws:.2f} and {k_samples:.2f}), and an "
            f"overlap of {overlap:.2f}: bring more draws, or state the support."
        )
    if n_nan:
        reasons.append(
            f"log_density is NaN at {n_nan} samples of q, which counted as outside the support: "
            "return -inf there if that is meant."
        )
    weights = torch.from_numpy(np.concatenate([side.log_weights for side in sides]))
    return Evidence(
        log_z=log_z,
        se=se,
        lower=lower,
        upper=upper,
        lower_se=lower_se,
        upper_se=upper_se,
        importance=float(np.mean([side.importance() for side in sides])),
        reciprocal=float(np.mean([side.reciprocal() for side in sides])),
        support_share=share,
        halves=(one.log_z, two.log_z),
        effective_draws=sum(side.effective_draws for side in sides),
        ess=float(F.ess(weights)),
        overlap=overlap,
        pareto_k_draws=k_draws,
        pareto_k_samples=k_samples,
        log_weights_samples=weights.numpy(),
        findings=tuple(Finding("evidence", math.nan, math.nan, words) for words in reasons),
        notes=tuple(notes),
        **common,
    )


def _by_reciprocal(
    held: list[np.ndarray], reasons: list[str], notes: list[str], common: dict[str, Any]
) -> Evidence:
    """What the draws alone tell."""
    values, errors = zip(*(reciprocal(l1) for l1 in held), strict=True)
    k = max(tail_index(torch.from_numpy(-l1.ravel())) for l1 in held)
    if k > PARETO_K_LIMIT:
        reasons.append(
            f"Pareto k = {k:.2f} is above {PARETO_K_LIMIT}: q has heavier tails than the draws, a "
            "few draws carry the estimate; give log_density for a bridge estimate."
        )
    apart, se = values[0] - values[1], sum(errors) / 2
    reasons += _of_halves(values, math.hypot(*errors))
    upper, upper_se = _mean(
        [(float(l1.mean()), math.sqrt(l1.var() / effective_draws(l1))) for l1 in held]
    )
    log_z = sum(values) / 2
    return Evidence(
        log_z=log_z,
        se=math.hypot(se, max(0.0, abs(apart) / 2 - se)),
        upper=upper,
        upper_se=upper_se,
        reciprocal=log_z,
        halves=(values[0], values[1]),
        effective_draws=sum(effective_draws(l1) for l1 in held),
        pareto_k_draws=k,
        findings=tuple(Finding("evidence", math.nan, math.nan, words) for words in reasons),
        notes=(*notes, DRAWS_ONLY, UNSEEN),
        **common,
    )


def _mean(bounds: list[tuple[float, float]]) -> tuple[float, float]:
    """Mean of two bounds; the errors are taken as fully dependent."""
    return sum(b for b, _ in bounds) / 2, sum(e for _, e in bounds) / 2
