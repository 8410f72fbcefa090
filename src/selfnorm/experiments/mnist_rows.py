"""The rows of the MNIST table: which prior, on which VAE, trained how."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from selfnorm.vae_energy_prior import EnergyPrior, latent_energy
from selfnorm.vae_priors import AutoregressivePrior, LatentPrior, MixturePrior, StandardNormal

__all__ = ["MODELS", "PAPER_ROWS", "RECIPES", "Row", "drop_pixels", "rows"]

PAPER_ROWS = ("vae", "vae_mog", "vae_ebm_post_hoc", "vae_ebm")
MODELS = (*PAPER_ROWS, "vae_ar_ebm_post_hoc", "vae_ar_ebm")
RECIPES = ("paper", "best")
LATENT = 16


def drop_pixels(probability: float) -> Callable[[Tensor], Tensor]:
    """Noise for the encoder's input: pixels set to zero, the others scaled up."""

    def corrupt(x: Tensor) -> Tensor:
        return x * (torch.rand_like(x) >= probability) / (1 - probability)

    return corrupt


@dataclass(frozen=True)
class Row:
    """How one row is trained.

    ``on`` names the row whose encoder and decoder a post-hoc prior is put on. ``fit`` are options
    of :func:`selfnorm.fit`; ``prior`` of the prior's constructor; ``drop`` of the encoder's input.
    """

    model: str
    on: str | None = None
    fit: dict[str, Any] = field(default_factory=dict)
    prior: dict[str, Any] = field(default_factory=dict)
    drop: float = 0.0

    def make_prior(self, energy_layers: int) -> LatentPrior:
        """The prior, at its start values."""
        if self.model == "vae":
            return StandardNormal(LATENT)
        if self.model == "vae_mog":
            return MixturePrior(LATENT, **self.prior)
        if "ar_ebm" in self.model:
            return AutoregressivePrior(LATENT, **self.prior)
        energy = latent_energy(LATENT, (200,) * energy_layers)
        return EnergyPrior(energy, dim=LATENT, **self.prior)

    def at_most(self, max_steps: int | None) -> Row:
        """The same row with fewer steps."""
        if max_steps is None:
            return self
        steps = min(max_steps, self.fit["max_steps"])
        warm = min(self.fit.get("kl_warmup", 0), steps // 4)
        fit = {**self.fit, "max_steps": steps, "validate_every": max(1, steps // 4)}
        if "kl_warmup" in self.fit:
            fit["kl_warmup"] = warm
        prior = dict(self.prior)
        if "ar_ebm" in self.model:
            prior["polish_steps"] = min(200, steps)
        return replace(self, fit=fit, prior=prior)


_CHAIN = {"hidden": 128, "components": 8, "context": 16, "energy_hidden": 32, "n_samples": 8}


def rows(recipe: str) -> list[Row]:
    """The six rows of a recipe, those that others build on first."""
    if recipe not in RECIPES:
        raise ValueError(f"unknown recipe {recipe!r}; choose one of {RECIPES}")
    return _paper() if recipe == "paper" else _best()


def _schedule(steps: int, lr: float, **more: Any) -> dict[str, Any]:
    return {
        "batch_size": 256,
        "max_epochs": 10**6,
        "max_steps": steps,
        "validate_every": max(1, steps // 20),
        "lr": lr,
        **more,
    }


def _paper() -> list[Row]:
    """The paper's set-up: ten posterior samples, energy at a fifth of the learning rate.

    Cut from 100,000 iterations at 1e-4 (times 0.998 an epoch) to 30,000 at 3e-4 falling along a
    cosine. Samples for ``Z`` come from the base alone, 256 a step, as in the paper.
    """
    full = _schedule(
        30_000, 3e-4, schedule="cosine", optimizer="adam", posterior_samples=10, n_samples=256,
        patience=12,
    )  # fmt: skip
    post = {**full, "max_steps": 15_000, "validate_every": 375}
    ebm = {"proposal": "base", "lr_scale": 0.2, "log_norm_lr_scale": 1.0}
    chain = {"weight_decay": 1e-2, "optimizer": "adamw", "lr": 1e-3}
    return [
        Row("vae", fit=full),
        Row("vae_mog", fit=full),
        Row("vae_ebm_post_hoc", on="vae", fit=post, prior=ebm),
        Row("vae_ebm", fit=full, prior=ebm),
        Row("vae_ar_ebm_post_hoc", on="vae", fit={**post, **chain}, prior=_CHAIN),
        Row("vae_ar_ebm", fit=full, prior=_CHAIN),
    ]


def _best() -> list[Row]:
    """Ours: one cycle to 1e-3, averaged weights, KL warm-up, weight decay, noise on the input."""
    full = _schedule(20_000, 1e-3, ema=0.999, weight_decay=0.1, kl_warmup=1000, n_samples=1024)
    post = _schedule(6_000, 1e-3, ema=0.999, weight_decay=1e-2, n_samples=1024)
    honest = {"proposal": "mixture", "bound": 10.0, "weight_decay": 1e-2, "lr_scale": 0.2}
    return [
        Row("vae", fit=full, drop=0.2),
        Row("vae_ar_ebm_post_hoc", on="vae", fit=post, prior=_CHAIN),
        Row("vae_ebm_post_hoc", on="vae", fit=post, prior={**honest, "lr_scale": 1.0}),
        Row("vae_ar_ebm", fit=full, prior=_CHAIN, drop=0.2),
        Row("vae_mog", fit=full, drop=0.2),
        Row("vae_ebm", fit=full, prior=honest, drop=0.2),
    ]
