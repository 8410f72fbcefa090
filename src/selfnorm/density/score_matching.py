r"""Score matching: baselines that never touch the normaliser.

With ``s(x) = grad_x log p~(x)``:

- denoising (``"dsm"``): ``1/2 E |sigma s(x + sigma eps) + eps|^2`` fits the density of the data
  blurred by ``sigma`` (given in units of each column's spread);
- sliced (``"ssm"``): ``E [ v's'(x) v + 1/2 |s(x)|^2 ]`` with random ``v``: no blur, but second
  derivatives.

Neither sees the relative mass of well-separated modes, for the score does not depend on it. The
likelihood comes from :func:`selfnorm.evaluate`; ``fit`` ends with ``b <- log Z_hat``.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from selfnorm.density.model import EBM, Objective, register_objective
from selfnorm.distributions import Proposal
from selfnorm.errors import DataError

__all__ = ["DenoisingScoreMatching", "SlicedScoreMatching", "column_spread", "score"]


def column_spread(x: Tensor) -> Tensor:
    """Standard deviation of each column of a mini-batch, ``(n, d) -> (d,)``, never zero."""
    if len(x) < 2:
        raise DataError(
            "this objective measures the columns' spread in every mini-batch, which takes two rows "
            "or more: raise batch_size"
        )
    return x.std(0).clamp_min(1e-6)


def score(model: EBM, x: Tensor) -> Tensor:
    """``grad_x log p~(x)``, ``(n, d)``, itself differentiable (in ``x`` too, if it asks for it)."""
    with torch.enable_grad():
        x = x if x.requires_grad else x.detach().requires_grad_(True)
        (gradient,) = torch.autograd.grad(model.log_unnormalized(x).sum(), x, create_graph=True)
    return gradient


class ScoreMatching(Objective):
    """An objective of the score alone: it needs no samples of the proposal."""

    capturable = False

    @abstractmethod
    def error(self, model: EBM, x: Tensor) -> Tensor:
        """What to minimise, up to a constant the squared distance of the scores."""

    def loss(
        self,
        model: EBM,
        proposal: Proposal,  # noqa: ARG002
        x: Tensor,
        n_samples: int,  # noqa: ARG002
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The error on one mini-batch."""
        error = self.error(model, x)
        return error, {"score_error": error.detach()}


class DenoisingScoreMatching(ScoreMatching):
    """Denoising score matching with one noise level ``sigma``, relative to the column spreads."""

    def __init__(self, sigma: float = 0.1) -> None:
        if not sigma > 0:
            raise ValueError(f"sigma must be positive, got {sigma}")
        self.sigma = sigma

    def error(self, model: EBM, x: Tensor) -> Tensor:
        """Mean squared error of the predicted noise, halved."""
        width = self.sigma * column_spread(x)
        noise = torch.randn_like(x)
        residual = width * score(model, x + width * noise) + noise
        return 0.5 * residual.square().sum(-1).mean()


class SlicedScoreMatching(ScoreMatching):
    """Sliced score matching with the exact second moment (SSM-VR), ``n_slices`` directions per row.

    Activations need a second derivative: SiLU, GELU or tanh, not ReLU.
    """

    def __init__(self, n_slices: int = 1) -> None:
        if n_slices < 1:
            raise ValueError(f"n_slices must be positive, got {n_slices}")
        self.n_slices = n_slices

    def error(self, model: EBM, x: Tensor) -> Tensor:
        """``mean [ v' s'(x) v + |s(x)|^2 / 2 ]`` in coordinates scaled by the column spreads."""
        spread = column_spread(x)
        x = x.repeat(self.n_slices, 1).detach().requires_grad_(True)
        with torch.enable_grad():
            gradient = score(model, x)
            direction = torch.randn_like(x) * spread
            along = (gradient * direction).sum()
            (second,) = torch.autograd.grad(along, x, create_graph=True)
        curvature = (second * direction).sum(-1)
        return (curvature + 0.5 * (gradient * spread).square().sum(-1)).mean()


register_objective("dsm", DenoisingScoreMatching)
register_objective("ssm", SlicedScoreMatching)
