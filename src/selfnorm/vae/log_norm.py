"""``log Z`` of a joint energy prior by three independent estimators, and one verdict on it."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

import torch
from torch import Tensor

from selfnorm.distributions import Proposal
from selfnorm.evaluation import PARETO_K_LIMIT, WeightStream, verdict
from selfnorm.sampling import smc
from selfnorm.vae.energy_prior import EnergyPrior
from selfnorm.vae.posterior import BaseAndAggregate, GaussianPosterior

__all__ = ["AGREEMENT", "LogNorm", "estimate_log_norm", "judge", "judge_held_out"]

AGREEMENT = 0.05  # nats between the estimators
B_LIMIT = 0.2  # nats by which b may exceed the estimates: the noise of a run that just ended
_CHUNK = 16_384


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
    mixture = BaseAndAggregate(prior.base, posterior.aggregate(), 0.5)
    for name, q in (("base", prior.base), ("mixture", mixture)):
        stream = WeightStream(n_samples)
        for begin in range(0, n_samples, _CHUNK):
            stream.update(_log_weights(prior, q, q.sample((min(_CHUNK, n_samples - begin),))))
        judged = verdict(stream)
        # Weights with k > 0.7 reach n^0.7 times their mean. Where none of them exceeds it ten
        # times there is no tail, whatever law is fitted to the last digits of the largest.
        level = stream.largest - stream.log_mean < math.log(10)
        tail = min(judged.pareto_k, 0.0) if level and n_samples >= 10_000 else judged.pareto_k
        found[name] = LogNorm(stream.log_mean, _error(stream), judged.ess, tail)
        streams[name] = stream
    runs = [_tempered(prior, particles) for _ in range(n_runs)]
    spread = statistics.stdev(runs) / math.sqrt(n_runs) if n_runs > 1 else math.nan
    found["smc"] = LogNorm(statistics.fmean(runs), spread)
    return found, streams


def _error(stream: WeightStream) -> float:
    """Standard error of ``log mean(w)``."""
    return math.sqrt(max(1 / max(stream.ess, 1e-12) - 1, 0.0) / stream.n)


def _log_weights(prior: EnergyPrior, q: Proposal, z: Tensor) -> Tensor:
    return prior.log_unnormalized(z) - q.log_prob(z)


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
    wide = BaseAndAggregate(prior.base, held_out.aggregate(), 0.5)
    stream = WeightStream(n_samples)
    for begin in range(0, n_samples, _CHUNK):
        stream.update(_log_weights(prior, wide, wide.sample((min(_CHUNK, n_samples - begin),))))
    noise = math.hypot(mixture.se, _error(stream))
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
