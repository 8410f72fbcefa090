"""Does an energy prior grow spikes? Weights at posterior samples against proposal samples.

Where an energy has found places that its proposal never visits, weights at posterior samples exceed
every one of ``M`` proposal weights. A region that none of them hit has a proposal mass of up to
``3/M`` (at 95 % confidence), so with weights of size ``w`` there the estimate of ``Z`` may miss up
to ``3 w / M``: little as long as weights are moderate, anything at all on a spike. Samples *from*
the posteriors then say how much it does miss.

A run is looked at many times, and an estimate from few effective samples passes two standard errors
by noise up to once in five times (Cantelli's inequality). :func:`confirmed` therefore asks for
several comparisons on independent samples of which all but two agree, the more of them the more
often it has looked: noise alone flags one run in a hundred at most, however long it is. A spike is
there every time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from selfnorm.evaluation import WeightStream

__all__ = ["SpikeReport", "check_spikes", "comparisons_needed", "confirmed"]

TOLERATED_SHARE = 0.01
DRIFT_LIMIT = 0.2  # nats
FALSE_ALARM = 0.01  # of a run, over all its checks
NOISE_ALONE = 0.2  # of one comparison: no law passes two standard errors more often
MISSES = 2  # comparisons that may disagree


@dataclass(frozen=True)
class SpikeReport:
    """What the proposal misses.

    Attributes:
        share: of posterior samples whose weight exceeds that of every proposal sample.
        room: nats by which ``log Z`` may be too low on their account.
        drift: nats by which it is, by samples that include the posteriors; ``drift_se`` its
            standard error.
        spiked: ``share`` above 1 % and ``drift`` above 0.2 nats by two of its standard errors.
    """

    share: float
    room: float
    drift: float
    drift_se: float
    spiked: bool

    def __str__(self) -> str:
        return (
            f"{100 * self.share:.1f} % of the posterior samples have a larger weight than every "
            f"proposal sample, and log Z is too low by {self.drift:.2f} nats or more"
        )


def check_spikes(
    log_w_posterior: Tensor,
    log_w_proposal: Tensor | WeightStream,
    log_w_wide: Tensor | WeightStream,
) -> SpikeReport:
    """Compare log-weights against one proposal at posterior samples and at proposal samples.

    ``log_w_wide`` are weights of samples that include the posteriors.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> check_spikes(torch.randn(500), torch.randn(5000), torch.randn(5000)).spiked
        False
        >>> check_spikes(torch.randn(500) + 20, torch.randn(5000), torch.randn(5000) + 4).spiked
        True
    """
    stream, wide = WeightStream.of(log_w_proposal), WeightStream.of(log_w_wide)
    at_posterior = log_w_posterior.detach().flatten().double()
    if math.isinf(stream.largest):
        return SpikeReport(1.0, math.inf, math.inf, math.inf, True)
    drift = wide.log_mean - stream.log_mean
    noise = math.hypot(*(_error(s) for s in (stream, wide)))
    beyond = at_posterior > stream.largest
    share = float(beyond.double().mean())
    if share <= TOLERATED_SHARE:
        return SpikeReport(share, 0.0, drift, noise, False)
    # The median of those beyond: one odd row must not decide.
    size = at_posterior[beyond].median() - stream.log_mean
    room = float(torch.nn.functional.softplus(size + math.log(3 / stream.n)))
    return SpikeReport(share, room, drift, noise, not drift <= DRIFT_LIMIT + 2 * noise)


def comparisons_needed(n_checks: int) -> int:
    """Comparisons at the ``n_checks``-th check of a run, of which all but two must agree.

    The check may raise a false alarm with probability ``0.01 / (n (n + 1))``, which sums to 0.01
    over any number of checks. Independent comparisons, each wrong with probability 0.2 at most,
    agree by noise alone no more often than a binomial law says.

    Example:
        >>> [comparisons_needed(n) for n in (1, 10, 1000)]
        [7, 10, 17]
    """
    allowed = FALSE_ALARM / (n_checks * (n_checks + 1))
    n = MISSES + 1
    while _by_noise(n) > allowed:
        n += 1
    return n


def _by_noise(n: int) -> float:
    """Probability that at most ``MISSES`` of ``n`` comparisons find nothing in pure noise."""
    p = NOISE_ALONE
    return sum(math.comb(n, k) * (1 - p) ** k * p ** (n - k) for k in range(MISSES + 1))


def confirmed(compare: Callable[[], SpikeReport], n_checks: int) -> SpikeReport:
    """The mildest of the comparisons that find spikes; where too few do, one that does not.

    ``compare`` must draw afresh at every call. It is called once where the first finds nothing.
    """
    mildest, misses = compare(), 0
    if not mildest.spiked:
        return mildest
    for _ in range(comparisons_needed(n_checks) - 1):
        again = compare()
        if not again.spiked:
            misses += 1
            if misses > MISSES:
                return again
        elif again.drift < mildest.drift:
            mildest = again
    return mildest


def _error(stream: WeightStream) -> float:
    """Standard error of ``log mean(w)``."""
    return math.sqrt(max(1 / max(stream.ess, 1e-12) - 1, 0.0) / stream.n)
