"""Runs of the two-dimensional table: what a configuration trains, alone or in one batch.

Seeds, data sets, objectives and bases of one recipe share a network shape, so all their runs can be
members of one :func:`selfnorm.fit_many`. Each run draws data, split, initialisation and proposal
from its own seed either way; in a batch, mini-batches and samples come from a common stream.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import selfnorm as sn
from selfnorm.datasets import toy2d
from selfnorm.density import joint_density
from selfnorm.distributions import Proposal

__all__ = ["Config", "Fitted", "train_one", "train_together"]


@dataclass(frozen=True)
class Config:
    """One row of the table before it is run."""

    recipe: str
    dataset: str
    objective: str
    base: str
    seed: int
    device: str = "cpu"
    scaling: toy2d.Scaling = "train"
    progress: bool = True

    def keys(self) -> dict[str, Any]:
        """What identifies the run in the result file."""
        return {
            "dataset": self.dataset,
            "objective": self.objective,
            "base": self.base,
            "seed": self.seed,
        }


@dataclass
class Fitted:
    """A trained model with all that is needed to judge it."""

    model: sn.EBM
    proposal: Proposal
    split: toy2d.Split2D
    history: sn.History


@dataclass
class _Prepared:
    model: sn.EBM
    proposal: Proposal
    split: toy2d.Split2D
    options: sn.TrainingOptions


def _prepare(config: Config) -> _Prepared:
    """Data, untrained model, proposal and training options of a configuration."""
    split = toy2d.load(config.dataset, seed=config.seed, scaling=config.scaling)
    torch.manual_seed(config.seed)
    if config.recipe == "best":
        recipe = joint_density(split.train)
        model, proposal, options = recipe.model, recipe.proposal, recipe.options
    else:
        proposal = sn.Gaussian(torch.zeros(2), scale=1.0)
        energy = sn.MLP(2, hidden=(200, 100, 50, 50), activation="relu")
        model = sn.EBM(energy, base=proposal if config.base == "standard_normal" else None)
        options = sn.TrainingOptions(
            batch_size=128,
            max_epochs=25,
            lr=1e-3,
            lr_log_norm=1e-3,
            optimizer="adam",
            schedule="constant",
        )
    return _Prepared(model.to(config.device), proposal.to(config.device), split, options)


def train_one(config: Config, **changes: Any) -> Fitted:
    """Train one configuration by itself; ``changes`` replace its options."""
    run = _prepare(config)
    history = sn.fit(
        run.model,
        run.split.train,
        proposal=run.proposal,
        objective=config.objective,
        val_data=run.split.val,
        seed=config.seed,
        progress=config.progress,
        options=run.options.given(**changes),
    )
    return Fitted(run.model, run.proposal, run.split, history)


def train_together(
    configs: Sequence[Config], *, seed: int = 0, progress: bool = True, **changes: Any
) -> tuple[list[Fitted], float]:
    """Train every configuration of one recipe as one batch.

    Args:
        configs: rows of the table before they are run; one recipe and one device.
        seed: of the common stream of batches and samples.
        progress: show one progress bar for all.
        changes: training options to replace, e.g. ``max_steps``.

    Returns:
        The fitted models in the order of ``configs``, and the seconds that training all of them
        took (drawing data and fitting proposals not counted).
    """
    recipes = {config.recipe for config in configs}
    devices = {config.device for config in configs}
    if len(recipes) != 1 or len(devices) != 1:
        raise ValueError(f"one recipe and one device at a time, got {recipes} on {devices}")
    runs = [_prepare(config) for config in configs]
    options = runs[0].options
    if any(run.options != options for run in runs):
        raise ValueError("the recipe gives these runs different training options; group them first")
    import torch._dynamo  # the first optimiser of a process loads it: seconds that nobody trains

    began = time.perf_counter()
    histories = sn.fit_many(
        [run.model for run in runs],
        [run.split.train for run in runs],
        proposal=[run.proposal for run in runs],
        objective=[config.objective for config in configs],
        val_data=[run.split.val for run in runs],
        seed=seed,
        progress=progress,
        options=options.given(**changes),
    )
    if torch.device(configs[0].device).type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    fitted = [
        Fitted(run.model, run.proposal, run.split, history)
        for run, history in zip(runs, histories, strict=True)
    ]
    return fitted, seconds
