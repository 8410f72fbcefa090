"""Recommended models, proposals and training options: what a user gets without choosing."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from selfnorm.density.model import EBM
from selfnorm.distributions import Defensive, GaussianMixture, Proposal, StudentT
from selfnorm.networks import MLP, FourierFeatures
from selfnorm.training import TrainingOptions


@dataclass(frozen=True)
class Recipe:
    """A model ready to be fitted by ``sn.fit(r.model, x, proposal=r.proposal, ...)``, and how."""

    model: EBM
    proposal: Proposal
    options: TrainingOptions
    n_samples: int = 1024


def joint_energy(dim: int) -> MLP:
    """The network of :func:`joint_density`: random waves of the bounded row, three small layers."""
    return MLP(
        dim,
        hidden=(64, 64, 64),
        activation="relu",
        features=FourierFeatures(dim, n_features=256, scale=3.0),
        zero_init=True,
        saturate=4.0,
    )


def joint_density(x: Tensor) -> Recipe:
    """The default for low-dimensional standardised data ``(n, d)``: one energy for the whole row.

    A broad, heavy-tailed base (Student-t fitted to the data) with a bounded energy, so that ``Z``
    exists whatever the tails; a sharp proposal (Gaussian mixture) made defensive by the same base.

    Example:
        >>> import torch
        >>> recipe = joint_density(torch.randn(500, 2))
        >>> recipe.proposal.dim
        2
    """
    n, dim = x.shape
    base = StudentT.fit_to(x, df=5.0)
    sharp = GaussianMixture.fit_to(x, n_components=40)
    # With the base inside the proposal, weights are bounded by exp(-min E) / 0.2.
    proposal = Defensive(sharp, base, weight=0.2)
    n_steps = int(min(1500, max(300, 0.2 * n)))
    return Recipe(
        EBM(joint_energy(dim), base=base),
        proposal,
        TrainingOptions(
            max_epochs=10**6,
            max_steps=n_steps,
            lr=2e-3,
            weight_decay=1e-2,
            ema=0.998,
            clip_norm=5.0,
            validate_every=max(25, n_steps // 20),
        ),
    )
