"""How a table's density is fitted: the two methods behind :class:`~selfnorm.EnergyDensity`.

Both take standardised rows ``z (n, d)`` and return a :class:`FittedDensity` in the same units.

- *joint* (few columns): one energy over all columns on a heavy-tailed base, normalised by a sharp
  proposal with a heavy-tailed part mixed in.
- *autoregressive* (any number of columns): a chain of one-dimensional EBMs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from selfnorm.autoregressive import AutoregressiveEBM
from selfnorm.columns import Columns
from selfnorm.defensive import Defensive
from selfnorm.energies import MLP, FourierFeatures
from selfnorm.evaluation import Bounds, evaluate
from selfnorm.history import History
from selfnorm.loop import LoopOptions, run
from selfnorm.models import EBM
from selfnorm.proposals import Proposal, StudentT
from selfnorm.randomness import SeedLike, seeded
from selfnorm.training import fit

__all__ = ["METHODS", "FitRequest", "FittedDensity", "fit_autoregressive", "fit_joint"]


@dataclass(frozen=True)
class FitRequest:
    """What the user asked for; ``None`` leaves a choice to the method and the size of the table."""

    max_steps: int | None = None
    batch_size: int | None = None
    lr: float | None = None
    weight_decay: float | None = None
    hidden: int | None = None
    validation_fraction: float = 0.1
    discrete: str | None = "auto"
    device: str | None = None
    seed: int | None = None
    progress: bool = False
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass
class FittedDensity:
    """A trained model with, for the joint method, its proposal."""

    model: EBM | AutoregressiveEBM
    proposal: Proposal | None
    history: History

    @torch.no_grad()
    def log_prob(self, z: Tensor, chunk_size: int = 16_384) -> Tensor:
        """Log-density ``(n,)`` in the units of ``z``."""
        return torch.cat([self.model.log_prob(part) for part in z.split(chunk_size)])

    def sample(self, n: int, seed: SeedLike = None, method: str = "sir") -> Tensor:
        """``(n, d)`` rows."""
        if isinstance(self.model, EBM):
            return self.model.sample(n, proposal=self.proposal, method=method, generator=seed)
        return self.model.sample(n, seed=seed)

    def bounds(self, z: Tensor, n_samples: int, seed: SeedLike = None) -> Bounds:
        """Bounds of the mean log-likelihood of ``z``, with the verdict."""
        if isinstance(self.model, EBM):
            return evaluate(self.model, z, proposal=self.proposal, n_samples=n_samples, seed=seed)
        return evaluate(self.model, z, n_samples=n_samples, seed=seed)


def fit_joint(z: Tensor, request: FitRequest) -> FittedDensity:
    """One energy over all columns; for one or two columns, or a proposal known to be good.

    The base is a Student-t fitted to the rows (polynomial tails, so ``Z`` exists for any bounded
    energy), the proposal a Gaussian mixture with a Student-t part; the energy starts at zero, that
    is, at the base. Network and number of steps grow with the number of rows.
    """
    n, d = z.shape
    seed = request.seed
    with seeded(seed):
        columns = Columns(d, discrete=request.discrete).fit(z)
        spread = bool((columns.step > 0).any() or (columns.atom_width > 0).any())
        train, held_out = _split(z, request.validation_fraction)
        if spread:
            # fresh noise for each copy, so that the noise itself cannot be learned
            copies = max(1, min(8, 20_000 // len(train)))
            train = columns.dequantise(train.repeat(copies, 1))
            held_out = None if held_out is None else columns.dequantise(held_out)
        base = StudentT.fit_to(train, df=5.0)
        proposal = Defensive.fit_to(train, n_components=min(20, max(1, n // 50)), seed=seed or 0)
        width = request.hidden or (32 if n < 200 else 64 if n < 1000 else 128)
        waves = FourierFeatures(n_octaves=4) if n >= 1000 else None
        energy = MLP(
            d,
            hidden=(width,) * (2 if n < 1000 else 3),
            features=waves,
            saturate=8.0,
            zero_init=True,
        )
    model = EBM(energy, base=base).to(request.device or "cpu")
    steps = request.max_steps or int(min(3000, max(100, 10 * n**0.65)))
    batch_size = request.batch_size or min(512, max(32, n // 4))
    history = fit(
        model,
        train,
        proposal=proposal,
        n_samples=1024 if n >= 1000 else 512,
        batch_size=batch_size,
        max_epochs=10**6,
        max_steps=steps,
        lr=request.lr or 2e-3,
        weight_decay=1e-2 if request.weight_decay is None else request.weight_decay,
        val_data=held_out,
        validate_every=max(25, steps // 20),
        ema=0.99 if n < 1000 else 0.995,
        seed=seed,
        progress=request.progress,
        **request.extra,
    )
    return FittedDensity(model, proposal, history)


def fit_autoregressive(z: Tensor, request: FitRequest) -> FittedDensity:
    """A chain of one-dimensional EBMs; sizes by the model's own table of defaults."""
    n, d = z.shape
    with seeded(request.seed):
        train, held_out = _split(z, request.validation_fraction)
        hidden = request.hidden or (32 if n < 500 else 128 if n < 5000 else 192)
        model = AutoregressiveEBM(
            d,
            hidden=hidden,
            components=5 if n < 500 else 8,
            energy_hidden=32 if n < 5000 else 48,
            context=16,
            drop=0.1,
            discrete=request.discrete,
        )
        model.set_scaling(train)
    model = model.to(request.device or "cpu")
    steps = request.max_steps or int(min(3000, max(60, 6 * n**0.65)))
    options = LoopOptions(
        batch_size=request.batch_size or min(256, max(16, n // 4)),
        max_epochs=10**6,
        max_steps=steps,
        lr=request.lr or 2e-3,
        weight_decay=1e-2 if request.weight_decay is None else request.weight_decay,
        validate_every=max(20, steps // 20),
        ema=0.99,
        seed=request.seed,
        progress=request.progress,
        **request.extra,
    )
    task = model.training_task(n_samples=8, polish_steps=min(200, steps // 4))
    history = run(
        task, (train,), val_data=None if held_out is None else (held_out,), options=options
    )
    return FittedDensity(model.eval(), None, history)


def _split(z: Tensor, fraction: float) -> tuple[Tensor, Tensor | None]:
    """Rows to train on and rows to choose the best state by; none are spared of a tiny table."""
    held_out = int(fraction * len(z))
    if held_out < 20:
        return z, None
    order = torch.randperm(len(z))
    return z[order[held_out:]], z[order[:held_out]]


METHODS = {"joint": fit_joint, "autoregressive": fit_autoregressive}
