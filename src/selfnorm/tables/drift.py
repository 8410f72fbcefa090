r"""Has the distribution of a table changed? An e-value that may be watched, and columns to blame.

Statistics of a row are its log-density, the factor of each part given parts before it, the value of
each part, and a likelihood ratio: of a Gaussian fitted to the new rows so far against one of the
density, both of normal scores. The rank of a new row's statistic among those of reference rows and
of new rows that the statistic was not made of is uniform and independent of the ranks before, if
nothing has changed: rows could then change places. A bet on the next rank, by a histogram of those
so far, multiplies the capital by ``B (n_b + 1) / (n + B)``, on average by one; so does a bet on the
ratio, by its value over the mean of the rows so far. So the probability that the capital ever
reaches ``1 / a`` without a change is at most ``a``, however long it is watched and however wrong
the density is (Ville; Vovk's conformal martingales). The e-value is the mean capital of bets on
all statistics, begun again and again; some of it is never bet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.special import logsumexp
from torch import Tensor

from selfnorm.columns import GAP, Part, Schema
from selfnorm.errors import DataError
from selfnorm.tables.chain_distribution import ChainDistribution, shares
from selfnorm.tables.distribution import RowDistribution
from selfnorm.tables.places import Places

BINS = 2, 4, 8
POWERS, KEPT = (0.25, 0.5, 1.0), 0.25  # of likelihood ratios; share of the capital that is not bet
ROWS_PER_START = 50  # new rows after which bets are begun again
FEWEST_REFERENCE = 20
DRAWN = 2000  # rows of the density whose Gaussian is the usual one


@dataclass(frozen=True)
class ColumnDrift:
    """What changed in one column.

    Attributes:
        column: its name.
        nats: how far its distribution given all others is from that of the reference: the
            divergence of Kullback and Leibler of Gaussians of normal scores, above zero by chance.
        e_value: of its values alone; near one or below where its margin did not move.
    """

    column: object
    nats: float
    e_value: float


@dataclass(frozen=True)
class Drift:
    """What :meth:`~selfnorm.EnergyDensity.compare` says of new rows.

    Attributes:
        e_values: ``(n,)`` after each of the rows, in their sequence.
        nats: by how much the mean log-density is lower than in the reference; nats a row.
        nats_se: standard error.
        columns: those of the table, the one to blame first.
    """

    e_values: np.ndarray
    nats: float
    nats_se: float
    columns: tuple[ColumnDrift, ...]

    @property
    def e_value(self) -> float:
        """The evidence for a change in all rows: bets won so many times their stake."""
        return float(self.e_values[-1])

    def alarm(self, alpha: float = 0.01) -> int | None:
        """The number of rows at which the e-value first reached ``1 / alpha``, if it ever did.

        Without a change that happens with probability ``alpha`` at most.
        """
        if not 0 < alpha < 1:
            raise DataError(f"alpha must be in (0, 1), got {alpha}")
        reached = np.flatnonzero(self.e_values >= 1 / alpha)
        return int(reached[0]) + 1 if len(reached) else None

    def __str__(self) -> str:
        at = self.alarm()
        verdict = "no evidence of a change" if at is None else f"changed: e-value 100 at row {at:,}"
        lines = [f"{verdict} (e-value {self.e_value:.3g} after {len(self.e_values):,} rows)"]
        lines += [f"log-density lower by {self.nats:.3f} ± {self.nats_se:.3f} nats a row"]
        for drift in self.columns[:3] if at else ():
            alone = f"its values alone: e-value {drift.e_value:.3g}"
            lines.append(f"{drift.column}: {drift.nats:.3f} nats off, given the others; {alone}")
        return "\n".join(lines)


def drift_of(
    schema: Schema, distribution: RowDistribution, new: Tensor, reference: Tensor, seed: int
) -> Drift:
    """Compare coded rows with reference rows, which the distribution has not been trained on."""
    if len(reference) < FEWEST_REFERENCE:
        raise DataError(
            f"reference has {len(reference)} row(s); comparing takes {FEWEST_REFERENCE} at least, "
            "and the more the sooner a change is seen"
        )
    parts = distribution.columns.parts
    before, after = (statistics(distribution, rows) for rows in (reference, new))
    drawn = torch.from_numpy(distribution.sample(DRAWN, seed))
    usual = Places(parts, drawn)
    scores = [usual.normal_scores(usual.numbers(rows)) for rows in (drawn, reference, new)]
    log_capital, log_e = watched(before, after, seed, Ratio(scores[0]), scores[1], scores[2])
    now, was = after[:, 0], before[:, 0]
    nats_se = math.hypot(_standard_error(now), _standard_error(was))
    blamed = _blamed(schema, usual, scores[1], scores[2], log_capital[-len(parts) :])
    return Drift(np.exp(np.minimum(log_e, 700)), float(was.mean() - now.mean()), nats_se, blamed)


def _standard_error(values: np.ndarray) -> float:
    return float(values.std() / math.sqrt(max(len(values) - 1, 1)))


@torch.no_grad()
def statistics(distribution: RowDistribution, rows: Tensor) -> np.ndarray:
    """``(n, S)``: log-density, factors, values of coded rows."""
    log_p = distribution.log_prob(rows, "learned") + distribution.comparable(rows)
    of_row = [np.round(log_p.numpy(), 3)[:, None]]
    if isinstance(distribution, ChainDistribution):
        factors = shares(distribution.model, distribution.pack(rows), "learned").mean(0)
        of_row.append(np.round(factors.double().numpy(), 3))
    of_row.append(_values(distribution.columns.parts, rows))
    return np.concatenate(of_row, 1)


def _values(parts: Sequence[Part], rows: Tensor) -> np.ndarray:
    """``(n, p)``: an order of the values of each part; gaps are below all."""
    values = []
    for part, (code, number) in zip(parts, rows.permute(1, 2, 0).numpy(), strict=True):
        value = part.numbers(code, number) if part.rest or part.values else code
        values.append(np.where((code == GAP) | np.isnan(value), -np.inf, value))
    return np.stack(values, 1)


class Ratio:
    """The log-likelihood ratio of Gaussians: fitted to some rows, and to many of the density.

    Few rows are mixed with what the density says, so that the ratio never goes far wrong.
    """

    def __init__(self, usual: np.ndarray) -> None:
        self.mean, self.n_prior = usual.mean(0), 2.0 * usual.shape[1]
        self.covariance = np.cov(usual.T).reshape(len(self.mean), -1) + 1e-2 * np.eye(
            len(self.mean)
        )

    def fitted_to(self, rows: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
        """The ratio, of rows ``(n, D)`` to come."""
        n, gap = len(rows), rows - self.mean
        covariance = (gap.T @ gap + self.n_prior * self.covariance) / (n + self.n_prior)
        mean = self.mean + gap.sum(0) / (n + self.n_prior)
        covariance -= np.outer(mean - self.mean, mean - self.mean) * n / (n + self.n_prior)
        new, old = np.linalg.inv(covariance), np.linalg.inv(self.covariance)

        def ratio(at: np.ndarray) -> np.ndarray:
            far, usual = at - mean, at - self.mean
            squares = np.einsum("ni,ij,nj->n", usual, old, usual)
            return np.asarray(squares - np.einsum("ni,ij,nj->n", far, new, far)) / 2

        return ratio


class _Bets:
    """Log-capital ``(S,)`` of bets on ranks of statistics, by histograms of several widths."""

    def __init__(self, n_statistics: int) -> None:
        self.every = np.arange(n_statistics)
        self.counts = [np.ones((n_statistics, b)) for b in BINS]
        self.capital = np.zeros((len(BINS), n_statistics))

    def settle(self, ranks: np.ndarray) -> None:
        """Bets on ranks ``(S,)``, which are then known."""
        for capital, counts in zip(self.capital, self.counts, strict=True):
            b = counts.shape[1]
            which = np.minimum((ranks * b).astype(int), b - 1)
            capital += np.log(b * counts[self.every, which] / counts.sum(1))
            counts[self.every, which] += 1

    @property
    def log_capital(self) -> np.ndarray:
        return np.asarray(logsumexp(self.capital, axis=0) - math.log(len(BINS)))


def watched(
    before: np.ndarray, after: np.ndarray, seed: int, ratio: Ratio,
    places_before: np.ndarray, places_after: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Log-capital ``(S,)`` of bets on each statistic from the first row on; log e-values ``(n,)``.

    ``before (m, S)`` are statistics of reference rows, ``after (n, S)`` of new ones; their places
    ``(m, D)`` and ``(n, D)`` are what likelihood ratios are of.
    """
    n, n_statistics = after.shape
    starts = range(0, n, ROWS_PER_START)
    stakes = 1 / (np.arange(1, len(starts) + 1) * np.arange(2, len(starts) + 2))  # below 1 in all
    ranks, capital, bets = _ranks(before, after, [seed]), np.zeros((n, len(starts) + 1)), []
    for k, start in enumerate(starts):
        bets.append(_Bets(n_statistics))
        for t in range(start, n):
            bets[k].settle(ranks[t])
            capital[t, k] = logsumexp(bets[k].log_capital) - math.log(n_statistics)
        if start:  # the ratio has half of the stake
            at = ratio.fitted_to(places_after[:start])
            of_ratio = _capital_of_ratio(at(places_before), at(places_after[start:]))
            capital[start:, k] = np.logaddexp(capital[start:, k], of_ratio) - math.log(2)
    log_e = logsumexp(capital, b=np.append(stakes, 1 - stakes.sum()), axis=1)
    return bets[0].log_capital, log_e


def _capital_of_ratio(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """``(n,)``: log-capital of bets on log-likelihood ratios, against their mean so far.

    Each of the rows so far could be the last one: the mean of ``w(x) / mean(w)`` over them is one.
    """
    paths = []
    for power in POWERS:
        w = np.exp(power * (np.concatenate([before, after]) - max(before.max(), after.max())))
        means = (np.cumsum(w) / np.arange(1, len(w) + 1))[len(before) :]
        won = w[len(before) :] / np.maximum(means, 1e-300)
        paths.append(np.cumsum(np.log(KEPT + (1 - KEPT) * won)))
    return np.asarray(logsumexp(paths, axis=0) - math.log(len(POWERS)))


def _ranks(before: np.ndarray, after: np.ndarray, seed: list[int]) -> np.ndarray:
    """``(n, S)``: ranks of statistics among those before, between 0 and 1; ties are drawn."""
    pool = np.concatenate([before, after])
    ties, m = np.random.default_rng(seed).random(after.shape), len(before)
    ranks = np.empty(after.shape)
    for t in range(len(after)):
        others, own = pool[: m + t], after[t]
        below, equal = (others < own).sum(0), (others == own).sum(0)
        ranks[t] = (below + ties[t] * (equal + 1)) / (m + t + 1)
    return ranks


def _blamed(
    schema: Schema, places: Places, before: np.ndarray, after: np.ndarray, alone: np.ndarray
) -> tuple[ColumnDrift, ...]:
    """Columns by how far their conditionals are from what they were, the farthest first.

    ``KL(x) = KL(x without j) + KL(x_j | rest)``, of Gaussians of normal scores.
    """
    blamed, total = [], _divergence(after, before)
    for column in schema.modelled:
        parts = list(schema.parts_of([column.name]))
        others = ~np.isin(places.of_part, parts)
        nats = total - (_divergence(after[:, others], before[:, others]) if others.any() else 0.0)
        log_e = logsumexp(alone[parts]) - math.log(len(parts))
        blamed.append(ColumnDrift(column.name, nats, math.exp(min(log_e, 700))))
    return tuple(sorted(blamed, key=lambda drift: -drift.nats))


def _divergence(new: np.ndarray, old: np.ndarray) -> float:
    """Nats between Gaussians that are fitted to rows ``(n, D)``."""
    ridge, gap = 1e-2 * np.eye(new.shape[1]), new.mean(0) - old.mean(0)
    of_new, of_old = (np.atleast_2d(np.cov(rows.T, bias=True)) + ridge for rows in (new, old))
    ratio = np.linalg.solve(of_old, of_new)
    squares = float(gap @ np.linalg.solve(of_old, gap))
    return (float(np.trace(ratio)) + squares - len(gap) - float(np.linalg.slogdet(ratio)[1])) / 2
