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


SMALL = 1000  # rows: of fewer, a smaller network and fewer steps


def joint_energy(dim: int, rows: int = SMALL, hidden: int | None = None) -> MLP:
    """The network of :func:`joint_density` for a table of so many rows, freshly initialised.

    Random waves of the bounded row and three small layers; plain layers for small tables, and where
    their width ``hidden`` is stated.
    """
    if hidden is not None:
        return MLP(dim, hidden=(hidden,) * 3, saturate=8.0, zero_init=True)
    if rows < SMALL:
        return MLP(dim, hidden=(32 if rows < 200 else 64,) * 2, saturate=8.0, zero_init=True)
    return MLP(
        dim,
        hidden=(64, 64, 64),
        activation="relu",
        features=FourierFeatures(dim, n_features=64 if dim == 1 else 256, scale=3.0),
        zero_init=True,
        saturate=4.0,
    )


def joint_density(x: Tensor, rows: int | None = None) -> Recipe:
    """The default for low-dimensional standardised data ``(n, d)``: one energy for the whole row.

    A broad, heavy-tailed base (Student-t fitted to the data) with a bounded energy, so that ``Z``
    exists whatever the tails; a sharp proposal (Gaussian mixture) made defensive by a Student-t.

    Args:
        x: what to train on.
        rows: of the table behind it, by which the size is chosen; as many as ``x`` by default.
    """
    if (len(x) if rows is None else rows) < SMALL:
        return _small_joint(x)
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
            patience=0,
            clip_norm=5.0,
            validate_every=max(25, n_steps // 20),
        ),
    )


def _small_joint(x: Tensor) -> Recipe:
    n, dim = x.shape
    energy = joint_energy(dim, min(n, SMALL - 1))
    proposal = Defensive.fit_to(x, n_components=max(1, min(20, n // 50)))
    options = TrainingOptions(
        batch_size=min(256, max(16, n // 4)),
        max_epochs=10**6,
        max_steps=int(min(900, max(50, 10 * n**0.65))),
        lr=2e-3,
        weight_decay=1e-2,
        ema=0.99,
    )
    model = EBM(energy, base=StudentT.fit_to(x, df=5.0))
    return Recipe(model, proposal, options, n_samples=256 if n < 200 else 512)
