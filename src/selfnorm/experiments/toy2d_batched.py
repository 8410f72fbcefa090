"""The runs of the two-dimensional table trained together: one batched model for all of them.

Seeds, data sets, objectives and bases of one recipe share a network shape, so all their runs are
members of one :func:`selfnorm.fit_many`. Each run draws data, split, initialisation and proposal
from its own seed, as the table run by run does; batches and samples come from a common stream.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

import selfnorm as sn
from selfnorm.data import toy2d as data2d
from selfnorm.experiments import toy2d
from selfnorm.recipes import joint_density

__all__ = ["train_all"]


def train_all(
    configs: Sequence[toy2d.Config], *, seed: int = 0, progress: bool = True, **changes: Any
) -> tuple[list[toy2d.Fitted], float]:
    """Train every configuration of one recipe as one batch.

    Args:
        configs: rows of the table before they are run; one recipe and one device.
        seed: of the common stream of batches and samples.
        progress: show one progress bar for all.
        changes: options of :func:`selfnorm.fit_many` to replace, e.g. ``max_steps``.

    Returns:
        The fitted models in the order of ``configs``, and the seconds that training all of them
        took (drawing data and fitting proposals not counted).
    """
    recipes = {config.recipe for config in configs}
    devices = {config.device for config in configs}
    if len(recipes) != 1 or len(devices) != 1:
        raise ValueError(f"one recipe and one device at a time, got {recipes} on {devices}")
    prepare = _prepare_paper if recipes == {"paper"} else _prepare_best
    prepared = [prepare(config) for config in configs]
    models = [p["model"] for p in prepared]
    splits = [p["split"] for p in prepared]
    options = prepared[0]["options"]
    if any(p["options"] != options for p in prepared):
        raise ValueError("the recipe gives these runs different training options; group them first")
    began = time.perf_counter()
    histories = sn.fit_many(
        models,
        [split.train for split in splits],
        proposal=[p["proposal"] for p in prepared],
        objective=[config.objective for config in configs],
        val_data=[split.val for split in splits],
        seed=seed,
        progress=progress,
        **{**options, **changes},
    )
    if torch.device(configs[0].device).type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    fitted = [
        toy2d.Fitted(p["model"], p["proposal"], p["split"], history)
        for p, history in zip(prepared, histories, strict=True)
    ]
    return fitted, seconds


def _prepare_paper(config: toy2d.Config) -> dict[str, Any]:
    split = data2d.load(config.dataset, seed=config.seed, scaling=config.scaling)
    torch.manual_seed(config.seed)
    proposal = sn.Gaussian(torch.zeros(2), scale=1.0).to(config.device)
    energy = sn.MLP(2, hidden=(200, 100, 50, 50), activation="relu")
    model = sn.EBM(energy, base=proposal if config.base == "standard_normal" else None)
    options = {
        "n_samples": 1024,
        "batch_size": 128,
        "max_epochs": 25,
        "lr": 1e-3,
        "lr_log_norm": 1e-3,
        "optimizer": "adam",
        "schedule": "constant",
    }
    return {
        "model": model.to(config.device),
        "proposal": proposal,
        "split": split,
        "options": options,
    }


def _prepare_best(config: toy2d.Config) -> dict[str, Any]:
    split = data2d.load(config.dataset, seed=config.seed, scaling=config.scaling)
    torch.manual_seed(config.seed)
    recipe = joint_density(split.train)
    return {
        "model": recipe.model.to(config.device),
        "proposal": recipe.proposal.to(config.device),
        "split": split,
        "options": recipe.fit_options,
    }
