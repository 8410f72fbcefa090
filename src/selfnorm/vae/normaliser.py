"""``log Z`` of a prior: its estimates, the checks of them, and the spikes that they miss.

``log Z`` of a joint energy prior comes from three estimators that must agree. While it trains, it
is watched for spikes at places that its proposal never visits. Samples that include the posteriors
of other rows then give a larger ``log Z`` than the proposal's own (:func:`drift_of`).

A run is watched many times, and an estimate from few effective samples passes two standard errors
by noise up to once in five times (Cantelli's inequality). :func:`confirmed` therefore asks for
twelve comparisons on independent samples of which all but two agree: by noise alone one look in
200,000 flags a run. A spike is there every time.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from selfnorm.evaluation import (
    Finding,
    WeightStream,
    about_b,
    heavy_tail,
    stream_log_weights,
    verdict,
)
from selfnorm.sampling import smc

if TYPE_CHECKING:
    from selfnorm.vae.priors import EnergyPrior, GaussianPosterior

REFERENCE_ROWS = 4000  # whose posteriors join the proposal for log Z
AGREEMENT = 0.05  # nats between the estimators
DRIFT_LIMIT = 0.2  # nats
FEWEST_EFFECTIVE = 100  # samples of the base, of the mixture
COMPARISONS, MISSES = 12, 2  # asked for before a flag, and how many of them may disagree


@dataclass(frozen=True)
class LogNorm:
    """One estimate of ``log Z``: value, standard error and, of its weights, ESS and Pareto k."""

    value: float
    se: float
    ess: float | None = None
    pareto_k: float | None = None


@dataclass(frozen=True)
class Normaliser:
    """What is known of the normaliser of a prior.

    Attributes:
        estimates: of ``log Z`` by name; ``exact`` where the prior is normalised.
        learned: ``b`` of a joint energy.
        shift: what the estimate adds to the ``log p(z)`` of the learned normaliser.
        gap: of the SNL bound of ``log p(z)``.
        findings: checks that the estimates did not pass.
    """

    estimates: dict[str, LogNorm]
    learned: float = 0.0
    shift: float = 0.0
    gap: float = 0.0
    findings: tuple[Finding, ...] = ()

    @property
    def best(self) -> LogNorm:
        """The estimate that is reported."""
        return best_of(self.estimates)


def best_of(estimates: dict[str, LogNorm]) -> LogNorm:
    """The exact ``log Z``, or its estimate from base and aggregate posterior."""
    return estimates.get("mixture") or estimates["exact"]


def estimates_of(
    prior: EnergyPrior, posterior: GaussianPosterior, n_samples: int
) -> dict[str, LogNorm]:
    """``base``, ``mixture`` and ``smc`` estimates of ``log Z``.

    ``base`` draws from the base density, ``mixture`` half from it and half from the aggregate
    of the given posteriors, ``smc`` carries 4096 particles (or a fiftieth of ``n_samples`` where
    that is more) from base to prior in tempered steps, four times: its standard error is that of
    the runs.
    """
    estimates: dict[str, LogNorm] = {}
    for name, q in (("base", prior.base), ("mixture", prior.beside_posteriors(posterior))):
        stream = stream_log_weights(prior, q, n_samples)
        judged = verdict(stream)
        estimates[name] = LogNorm(stream.log_mean, judged.log_norm_se, stream.ess, judged.pareto_k)
    runs = [_tempered(prior, max(4096, n_samples // 50)) for _ in range(4)]
    estimates["smc"] = LogNorm(statistics.fmean(runs), statistics.stdev(runs) / 2)
    return estimates


def _tempered(prior: EnergyPrior, n: int) -> float:
    state = smc.init(prior.log_unnormalized, prior.base, n)
    while state.temperature < 1.0:
        state, _ = smc.step(state, prior.log_unnormalized, prior.base)
    return float(state.log_norm)


def findings_against(
    prior: EnergyPrior, norms: dict[str, LogNorm], held_out: GaussianPosterior, n_samples: int
) -> Iterator[Finding]:
    """The checks that the estimates did not pass.

    ``held_out`` are posteriors of the evaluated rows that are not part of the mixture proposal.
    """
    low, high = (choose(norms, key=lambda name: norms[name].value) for choose in (min, max))
    apart = norms[high].value - norms[low].value
    if not apart <= AGREEMENT:
        words = (
            f"Three estimators of log Z disagree: {norms[low].value:.2f} ({low}) against "
            f"{norms[high].value:.2f} ({high}); the energy has mass that some of them miss. Train "
            "with proposal='mixture', a bounded energy or more weight decay."
        )
        yield Finding("disagreement", apart, AGREEMENT, words)
    # The weights of a mixture pile up below a plateau, with a shoulder where one part alone
    # reaches; a Pareto distribution fitted across it reads a high k for bounded weights. One of
    # the two must be clean; that they agree is checked above.
    k, name = min((norms[name].pareto_k or 0.0, name) for name in ("base", "mixture"))
    cure = "a few samples carry log Z; bound the energy or give it less freedom."
    yield from heavy_tail(k, cure, f"of the {name} weights ")
    for name in ("base", "mixture"):
        effective = (norms[name].ess or 0.0) * n_samples
        if effective < FEWEST_EFFECTIVE:
            words = (
                f"Only {effective:.0f} effective of {n_samples} {name} samples; the prior has left "
                "its base."
            )
            yield Finding("ess", effective, FEWEST_EFFECTIVE, words)
    mixture = norms["mixture"]
    stream = stream_log_weights(prior, prior.beside_posteriors(held_out), n_samples)
    drift = stream.log_mean - mixture.value
    limit = AGREEMENT + 2 * math.hypot(mixture.se, stream.log_mean_se)
    if not drift <= limit:
        words = (
            f"Samples from the posteriors of held-out rows give log Z = {stream.log_mean:.2f}, "
            f"the mixture {mixture.value:.2f}: the energy has spikes there, which no estimator "
            "sees; every figure is too good."
        )
        yield Finding("spikes", drift, limit, words)
    yield from about_b(mixture.value, float(prior.log_norm), mixture.se)[0]


@dataclass(frozen=True)
class Drift:
    """What the proposal misses.

    Attributes:
        drift: nats by which ``log Z`` is too low, by samples that include other rows' posteriors;
            ``drift_se`` its standard error.
        spiked: ``drift`` above 0.2 nats by two of its standard errors.
    """

    drift: float
    drift_se: float
    spiked: bool


def drift_of(narrow: Tensor | WeightStream, wide: Tensor | WeightStream) -> Drift:
    """Compare ``log Z`` by the proposal with that by samples which include other posteriors."""
    narrow, wide = WeightStream.of(narrow), WeightStream.of(wide)
    if math.isinf(narrow.largest):
        return Drift(math.inf, math.inf, True)
    drift = wide.log_mean - narrow.log_mean
    noise = math.hypot(narrow.log_mean_se, wide.log_mean_se)
    return Drift(drift, noise, not drift <= DRIFT_LIMIT + 2 * noise)


def confirmed(compare: Callable[[], Drift]) -> Drift:
    """The mildest of the comparisons that find spikes; where too few do, one that does not.

    ``compare`` must draw afresh at every call. It is called once where the first finds nothing.
    """
    mildest, misses = compare(), 0
    if not mildest.spiked:
        return mildest
    for _ in range(COMPARISONS - 1):
        again = compare()
        if not again.spiked:
            misses += 1
            if misses > MISSES:
                return again
        elif again.drift < mildest.drift:
            mildest = again
    return mildest
