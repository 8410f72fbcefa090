"""Defensive mixtures: keep a sharp proposal, lose its blind spots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from selfnorm._context import seeded
from selfnorm.distributions.adapters import as_proposal
from selfnorm.distributions.proposals import GaussianMixture, Proposal, StudentT
from selfnorm.errors import ProposalError

__all__ = ["Defensive"]


class Defensive(Proposal):
    r"""``(1 - weight) q + weight h``: a sharp proposal ``q`` with a heavy-tailed one mixed in.

    Wherever ``q`` is too light, ``h`` bounds the importance weights by ``p / (weight h)``; where
    ``q`` is good they grow by at most ``1 / (1 - weight)``.

    Args:
        proposal: the sharp part.
        heavy: the heavy-tailed part; by default a Student-t (3 degrees of freedom) with 1.5 times
            the scatter scale of ``proposal``, measured on its samples.
        weight: share of ``heavy``.

    Example:
        >>> from selfnorm.distributions.proposals import Gaussian
        >>> q = Defensive(Gaussian(torch.zeros(2), scale=1.0), weight=0.2)
        >>> bool(q.log_prob(torch.full((2,), 30.0)) > -25)
        True
    """

    def __init__(self, proposal: Any, heavy: Any = None, weight: float = 0.2) -> None:
        super().__init__()
        if not 0 < weight < 1:
            raise ProposalError(f"weight must lie strictly between 0 and 1, got {weight}")
        sharp = as_proposal(proposal)
        if heavy is None:
            with torch.no_grad():
                place = sharp.sample((1,)).device
                with seeded(0, place):
                    drawn = sharp.sample((4096,))
            fitted = StudentT.fit_to(drawn, df=3.0)
            tril = 1.5 * fitted.scale_tril.double()
            heavy = StudentT(3.0, fitted.loc, covariance=tril @ tril.T).to(place)
        self.sharp = sharp
        self.heavy = as_proposal(heavy, sharp.dim)
        self.weight = weight
        self.dim = sharp.dim

    @classmethod
    def fit_to(
        cls,
        x: Tensor,
        *,
        n_components: int = 20,
        weight: float = 0.2,
        df: float = 3.0,
        seed: int = 0,
    ) -> Defensive:
        """Gaussian mixture for the body, Student-t for the tails."""
        mixture = GaussianMixture.fit_to(x, n_components=n_components, seed=seed)
        return cls(mixture, StudentT.fit_to(x, df=df), weight)

    def sample(self, shape: Sequence[int] = ()) -> Tensor:
        """Draw rows: ``(*shape, dim)``."""
        # Both parts are drawn in full and one is chosen: shapes never depend on random numbers, so
        # the step can be captured as a CUDA graph.
        sharp, heavy = self.sharp.sample(shape), self.heavy.sample(shape)
        choose_heavy = torch.rand(*shape, 1, device=sharp.device) < self.weight
        return torch.where(choose_heavy, heavy, sharp)

    def log_prob(self, x: Tensor) -> Tensor:
        """Log-density of rows."""
        return torch.logaddexp(
            self.sharp.log_prob(x) + math.log1p(-self.weight),
            self.heavy.log_prob(x) + math.log(self.weight),
        )
