"""Does an energy prior grow spikes? Weights at posterior samples against proposal samples.

Where an energy has found places that its proposal never visits, weights at posterior samples exceed
every one of ``M`` proposal weights. A region that none of them hit has a proposal mass of up to
``3/M`` (at 95 % confidence), so with weights of size ``w`` there the estimate of ``Z`` may miss up
to ``3 w / M``: little as long as weights are moderate, anything at all on a spike. Samples *from*
the posteriors then say how much it does miss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from selfnorm.weight_stream import WeightStream

__all__ = ["SpikeReport", "check_spikes"]

TOLERATED_SHARE = 0.01
DRIFT_LIMIT = 0.2  # nats


@dataclass(frozen=True)
class SpikeReport:
    """What the proposal misses.

    Attributes:
        share: of posterior samples whose weight exceeds that of every proposal sample.
        room: nats by which ``log Z`` may be too low on their account.
        drift: nats by which it is, by samples that include the posteriors.
        spiked: ``share`` above 1 % and ``drift`` above 0.2 nats by two of its standard errors.
    """

    share: float
    room: float
    drift: float
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
        return SpikeReport(1.0, math.inf, math.inf, True)
    drift = wide.log_mean - stream.log_mean
    noise = math.hypot(*(_error(s) for s in (stream, wide)))
    beyond = at_posterior > stream.largest
    share = float(beyond.double().mean())
    if share <= TOLERATED_SHARE:
        return SpikeReport(share, 0.0, drift, False)
    # The median of those beyond: one odd row must not decide.
    size = at_posterior[beyond].median() - stream.log_mean
    room = float(torch.nn.functional.softplus(size + math.log(3 / stream.n)))
    return SpikeReport(share, room, drift, not drift <= DRIFT_LIMIT + 2 * noise)


def _error(stream: WeightStream) -> float:
    """Standard error of ``log mean(w)``."""
    return math.sqrt(max(1 / max(stream.ess, 1e-12) - 1, 0.0) / stream.n)
