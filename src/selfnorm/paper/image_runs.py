"""Single runs of image regression: a recipe's settings, training, judging, the row."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from selfnorm.datasets import images
from selfnorm.errors import MissingDataError
from selfnorm.images import ImageRegressor, dequantised
from selfnorm.paper.image_judging import judge

__all__ = [
    "RECIPES",
    "Config",
    "fit_and_judge",
    "present_sets",
    "regressor",
]

RECIPES = ("paper", "literal", "best")
_PAPER: dict[str, Any] = {
    "energy": "paper",
    "base": None,
    "share_gradient": False,
    "proposal_loss": "both",
    "dropout": 0.0,
    "batch_size": 32,
    "max_epochs": 75,
    "lr": 1e-3,
    "weight_decay": 0.0,
    "optimizer": "adam",
    "schedule": "constant",
    "ema": None,
}
# The same for every method. The best state by validation comes about half-way, then all overfit:
# ten looks without a better one end a run, but for the cells, whose scores go up and down.
_BEST: dict[str, dict[str, Any]] = {
    "utkface": {"max_epochs": 40, "dropout": 0.3, "ema": 0.998, "validate_every": 50},
    "cells": {"max_epochs": 36, "dropout": 0.3, "ema": 0.998, "validate_every": 50},
    "driving": {"max_epochs": 70, "dropout": 0.3, "ema": 0.998, "validate_every": 50},
}
for _name in ("utkface", "driving"):
    _BEST[_name]["patience"] = 10
# The laws of the counts are sharp, and a learned b lagged behind them: one anchor for each count.
# By validation anchors bring nothing for ages, and ranking NCE does not use b.
_ANCHORS = {("cells", "uniform"): 51}
_LEARN_B = ("snl", "nce")
_CALIBRATED = ("exact", "exact_se", "mae", "coverage", "pit_distance", "crps")


@dataclass(frozen=True)
class Config:
    """One run before it is run; ``options`` change settings of the recipe."""

    dataset: str
    objective: str
    proposal: str
    n_samples: int
    seed: int
    recipe: str
    device: str = "cpu"
    max_epochs: int | None = None
    backbone: Any = "resnet18"
    n_test_samples: int = 20_000
    options: Any = None

    def keys(self) -> dict[str, Any]:
        """What identifies the run in the result file."""
        names = ("dataset", "objective", "proposal", "n_samples", "seed")
        backbone = self.backbone
        return {
            **{name: getattr(self, name) for name in names},
            "max_epochs": self.settings().get("max_epochs"),
            "backbone": backbone if isinstance(backbone, str) else type(backbone).__name__,
        }

    def settings(self) -> dict[str, Any]:
        """Options of the recipe, with what this run changes."""
        options = dict(_PAPER) if self.recipe != "best" else dict(_BEST.get(self.dataset, {}))
        anchors = _ANCHORS.get((self.dataset, self.proposal))
        if anchors and self.recipe == "best" and self.objective in _LEARN_B:
            options["anchors"] = anchors
        if self.max_epochs is not None:
            options["max_epochs"] = self.max_epochs
        return options | (self.options or {})


def regressor(config: Config, data: images.ImageData) -> ImageRegressor:
    """The untrained model of one run."""
    options = config.settings()
    # The augmentation is the published one for head poses, our own choice elsewhere.
    if config.recipe == "best" or config.dataset == "biwi":
        options["augmentation"] = data.augmentation
    return ImageRegressor(
        config.objective,
        "mdn-4" if config.proposal == "none" else config.proposal,
        n_samples=config.n_samples,
        label_step=data.label_step,
        label_range=data.label_range,
        dequantise=config.recipe != "literal",
        backbone=config.backbone,
        device=config.device,
        random_state=config.seed,
        **options,
    )


def fit_and_judge(
    config: Config, data: images.ImageData
) -> tuple[dict[str, Any], dict[str, np.ndarray], ImageRegressor]:
    """Train one model; its row, each test image's figures, and the model as trained.

    Figures that end in ``_calibrated`` are those of the model once a temperature is fitted to the
    validation images: the same test images under ``p^(1/T)``, normalised again.
    """
    began = time.perf_counter()
    model = regressor(config, data).fit(*data.train, val=data.val)
    seconds = time.perf_counter() - began
    history = model.history_
    if history.stopped == "interrupted":
        raise KeyboardInterrupt  # a run cut short is no row
    held_out, _ = judge(model, data.val, n_samples=None)
    figures, arrays = judge(
        model,
        data.test,
        n_samples=config.n_test_samples,
        seed=config.seed,
        groups=data.test_groups,
    )
    row = {
        **config.keys(),
        **figures,
        **_calibrated(model, data, arrays),
        **{f"val_{k}": held_out[k] for k in ("exact", "mae", "coverage") if k in held_out},
        "val_score": history.best_score,
        "best_step": history.best_step,
        "n_steps": history.n_steps,
        "skipped_steps": history.skipped_steps,
        "rollbacks": history.rollbacks,
        "diverged": history.stopped == "diverged" or history.best_score is None,
        "seconds": round(seconds, 2),
    }
    if config.options:
        row["options"] = dict(config.options)
    return row, arrays, model


def _calibrated(
    model: ImageRegressor, data: images.ImageData, arrays: dict[str, np.ndarray]
) -> dict[str, float]:
    """Figures of the test images with the temperature that suits the validation images."""
    if model.space_.dim > 1:
        return {}
    labels = dequantised(torch.as_tensor(data.val[1]), model.space_.step)
    temperature = model.calibrate(data.val[0], labels)
    figures, tempered = judge(model, data.test, n_samples=None, groups=data.test_groups)
    model.temperature_ = 1.0  # what is drawn later is the model as trained
    arrays |= {f"{name}_calibrated": tempered[name] for name in ("log_prob", "pit")}
    return {"temperature": temperature, **{f"{k}_calibrated": figures[k] for k in _CALIBRATED}}


def present_sets(
    datasets: Sequence[str], data_dir: str | Path | None
) -> tuple[list[str], dict[str, str]]:
    """The sets whose files are there, and what is missing of the others and where to get it."""
    found = {name: _missing(name, data_dir) for name in datasets}
    missing = {name: message for name, message in found.items() if message}
    present = [name for name in datasets if name not in missing]
    if not present:
        raise MissingDataError(" ".join(missing.values()))
    for message in missing.values():
        print(message, flush=True)
    return present, missing


def _missing(name: str, data_dir: str | Path | None) -> str:
    try:
        images.locate(name, data_dir)
    except MissingDataError as error:
        return f"{name}: {error}."
    return ""
