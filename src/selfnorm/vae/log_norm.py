"""``log Z`` of a joint energy prior: three estimators, one verdict, and a watch over training.

Does an energy prior grow spikes? Where an energy has found places that its proposal never visits,
weights at posterior samples exceed every one of ``M`` proposal weights. A region that none of them
hit has a proposal mass of up to ``3/M`` (at 95 % confidence), so with weights of size ``w`` there
the estimate of ``Z`` may miss up to ``3 w / M``: little as long as weights are moderate, anything
at all on a spike. Samples *from* the posteriors then say how much it does miss.

A run is looked at many times, and an estimate from few effective samples passes two standard errors
by noise up to once in five times (Cantelli's inequality). :func:`confirmed` therefore asks for
several comparisons on independent samples of which all but two agree, the more of them the more
often it has looked: noise alone flags one run in a hundred at most, however long it is. A spike is
there every time.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from selfnorm.evaluation import PARETO_K_LIMIT, WeightStream, stream_log_weights, verdict
from selfnorm.sampling import smc
from selfnorm.vae.conditionals import GaussianPosterior
from selfnorm.vae.energy_prior import EnergyPrior

__all__ = [
    "LogNorm",
    "SpikeReport",
    "check_spikes",
    "comparisons_needed",
    "confirmed",
    "estimate_log_norm",
    "judge",
    "judge_held_out",
]

AGREEMENT = 0.05  # nats between the estimators
B_LIMIT = 0.2  # nats by which b may exceed the estimates: the noise of a run that just ended
TOLERATED_SHARE = 0.01
DRIFT_LIMIT = 0.2  # nats
FALSE_ALARM = 0.01  # of a run, over all its checks
NOISE_ALONE = 0.2  # of one comparison: no law passes two standard errors more often
MISSES = 2  # comparisons that may disagree


@dataclass(frozen=True)
class LogNorm:
    """One estimate of ``log Z``: value, standard error and, of its weights, ESS and Pareto k."""

    value: float
    se: float
    ess: float | None = None
    pareto_k: float | None = None


@torch.no_grad()
def estimate_log_norm(
    prior: EnergyPrior,
    posterior: GaussianPosterior,
    *,
    n_samples: int = 200_000,
    n_particles: int | None = None,
    n_runs: int = 4,
) -> tuple[dict[str, LogNorm], dict[str, WeightStream]]:
    """``base``, ``mixture`` and ``smc`` estimates; the weights of the first two.

    ``base`` draws from the base density, ``mixture`` half from it and half from the aggregate
    of the given posteriors, ``smc`` carries particles from base to prior in tempered steps
    (``n_runs`` times: its standard error is that of the runs; ``n_particles`` are 4096, or a
    fiftieth of ``n_samples`` where that is more).
    """
    particles = n_particles or max(4096, n_samples // 50)
    found: dict[str, LogNorm] = {}
    streams: dict[str, WeightStream] = {}
    for name, q in (("base", prior.base), ("mixture", prior.beside_posteriors(posterior))):
        stream = stream_log_weights(prior, q, n_samples)
        judged = verdict(stream)
        # Weights with k > 0.7 reach n^0.7 times their mean. Where none of them exceeds it ten
        # times there is no tail, whatever law is fitted to the last digits of the largest.
        level = stream.largest - stream.log_mean < math.log(10)
        tail = min(judged.pareto_k, 0.0) if level and n_samples >= 10_000 else judged.pareto_k
        found[name] = LogNorm(stream.log_mean, stream.log_mean_se, judged.ess, tail)
        streams[name] = stream
    runs = [_tempered(prior, particles) for _ in range(n_runs)]
    spread = statistics.stdev(runs) / math.sqrt(n_runs) if n_runs > 1 else math.nan
    found["smc"] = LogNorm(statistics.fmean(runs), spread)
    return found, streams


def _tempered(prior: EnergyPrior, n: int) -> float:
    state = smc.init(prior.log_unnormalized, prior.base, n)
    while state.temperature < 1.0:
        state, _ = smc.step(state, prior.log_unnormalized, prior.base)
    return float(state.log_norm)


@torch.no_grad()
def judge_held_out(
    prior: EnergyPrior, held_out: GaussianPosterior, mixture: LogNorm, n_samples: int
) -> tuple[str, ...]:
    """Reasons found at posteriors that no estimator has seen, and in the learned ``b``.

    ``held_out`` are posteriors of the evaluated rows that are not part of the mixture proposal.
    """
    reasons = []
    stream = stream_log_weights(prior, prior.beside_posteriors(held_out), n_samples)
    noise = math.hypot(mixture.se, stream.log_mean_se)
    if not stream.log_mean - mixture.value <= AGREEMENT + 2 * noise:
        reasons.append(
            f"Samples from the posteriors of held-out rows give log Z = {stream.log_mean:.2f}, "
            f"the mixture {mixture.value:.2f}: the energy has spikes there, which no estimator "
            "sees; every figure is too good."
        )
    b = float(prior.log_norm)
    if not b - mixture.value <= B_LIMIT:
        reasons.append(
            f"The learned b = {b:.2f} is above log Z = {mixture.value:.2f}: training has met mass "
            "that the estimators miss; pass training rows as reference."
        )
    return tuple(reasons)


def judge(found: dict[str, LogNorm], streams: dict[str, WeightStream]) -> tuple[str, ...]:
    """Reasons against the estimates, none where they can be trusted."""
    reasons: list[str] = []
    values = {name: e.value for name, e in found.items()}
    low, high = min(values, key=values.__getitem__), max(values, key=values.__getitem__)
    if not values[high] - values[low] <= AGREEMENT:
        reasons.append(
            f"Three estimators of log Z disagree: {values[low]:.2f} ({low}) against "
            f"{values[high]:.2f} ({high}); the energy has mass that some of them miss. Train with "
            "proposal='mixture', a bounded energy or more weight decay."
        )
    # The weights of a mixture pile up below a plateau, with a shoulder where one part alone
    # reaches; a Pareto law fitted across it reads a high k for bounded weights. One of the two
    # must be clean; that they agree is asked for above.
    name, k = min(
        ((n, found[n].pareto_k or 0.0) for n in ("base", "mixture")), key=lambda item: item[1]
    )
    if k > PARETO_K_LIMIT:
        reasons.append(
            f"Pareto k = {k:.2f} of the {name} weights is above {PARETO_K_LIMIT}: a few samples "
            "carry log Z; bound the energy or give it less freedom."
        )
    reasons += [
        f"Only {s.ess * s.n:.0f} effective of {s.n} {name} samples; the prior has left its base."
        for name, s in streams.items()
        if s.ess * s.n < 100
    ]
    return tuple(reasons)


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
    noise = math.hypot(stream.log_mean_se, wide.log_mean_se)
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
