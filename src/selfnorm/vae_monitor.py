"""Does an energy prior grow spikes? Weights at posterior samples against proposal samples.

Where an energy has found places that its proposal never visits, weights at posterior samples exceed
every one of ``M`` proposal weights. A region that none of them hit has a proposal mass of up to
``3/M`` (at 95 % confidence), so with weights of size ``w`` there the estimate of ``Z`` may miss up
to ``3 w / M``: small as long as weights are moderate, anything at all on a spike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from selfnorm.weight_stream import WeightStream

__all__ = ["SpikeReport", "check_spikes"]

TOLERATED_SHARE = 0.01
ROOM_LIMIT = 1.0  # nats


@dataclass(frozen=True)
class SpikeReport:
    """``room``: nats by which ``log Z`` may be too low; ``share``: posterior samples beyond reach.

    ``spiked`` is the verdict: ``room`` above one nat.
    """

    room: float
    share: float
    spiked: bool

    def __str__(self) -> str:
        return (
            f"{100 * self.share:.1f} % of the posterior samples have a larger weight than every "
            f"proposal sample, so large that log Z may be too low by {self.room:.1f} nats"
        )


def check_spikes(
    log_w_posterior: Tensor, log_w_proposal: Tensor | WeightStream, limit: float = ROOM_LIMIT
) -> SpikeReport:
    """Compare log-weights against one proposal at posterior samples and at proposal samples.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> check_spikes(torch.randn(500) + 1, torch.randn(5000)).spiked
        False
        >>> check_spikes(torch.randn(500) + 20, torch.randn(5000)).spiked
        True
    """
    stream = WeightStream.of(log_w_proposal)
    at_posterior = log_w_posterior.detach().flatten().double()
    if math.isinf(stream.largest):
        return SpikeReport(math.inf, 1.0, True)
    beyond = at_posterior > stream.largest
    share = float(beyond.double().mean())
    if share <= TOLERATED_SHARE:
        return SpikeReport(0.0, share, False)
    # The median of those beyond: one odd row must not decide.
    size = at_posterior[beyond].median() - stream.log_mean
    room = float(torch.nn.functional.softplus(size + math.log(3 / stream.n)))
    return SpikeReport(room, share, not room <= limit)
