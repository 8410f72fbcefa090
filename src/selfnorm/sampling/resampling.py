"""Turning log-weights into indices."""

from __future__ import annotations

import torch
from torch import Tensor

from selfnorm.errors import ProposalError


def normalised_weights(log_weights: Tensor) -> Tensor:
    """``w_m / sum(w)`` in float64; an error where no weight is usable.

    >>> import torch
    >>> normalised_weights(torch.tensor([0.0, 0.0])).tolist()
    [0.5, 0.5]
    """
    log_weights = torch.nan_to_num(
        log_weights.double(), nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf
    )
    if torch.isinf(log_weights.max()):
        raise ProposalError(
            "no proposal sample has a finite positive weight: the proposal does not overlap with "
            "the model. Fit the proposal to the data (Defensive.fit_to(x)) and check the energy"
        )
    return torch.softmax(log_weights, dim=0)


def systematic(log_weights: Tensor, n: int) -> Tensor:
    """Systematic resampling: ``n`` indices, index ``m`` drawn ``n w_m`` times up to rounding.

    Expected counts are those of multinomial resampling with less noise. Neighbours in the result
    are equal, so a caller that needs exchangeable rows shuffles them.

    >>> import torch
    >>> systematic(torch.tensor([0.0, -torch.inf]), 3).tolist()
    [0, 0, 0]
    """
    cumulative = normalised_weights(log_weights).cumsum(0)
    offset = torch.rand((), dtype=torch.float64, device=log_weights.device)
    points = (torch.arange(n, dtype=torch.float64, device=log_weights.device) + offset) / n
    # the last cumulative sum can round below 1: without the clamp a point above it has no index
    return torch.searchsorted(cumulative, points * cumulative[-1]).clamp_max(len(cumulative) - 1)
