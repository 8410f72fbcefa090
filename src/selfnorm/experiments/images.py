"""The paper's image regression table: ranking NCE, binary NCE and SNL, four proposals, six sets.

Recipe ``paper`` keeps the paper's networks and training: ResNet-18 features, the label through
16-32-64-128, one joint hidden layer of 640, ``b`` and the mixture density network with one hidden
layer of 512, ``M = 64``, Adam 1e-3, batches of 32, 75 epochs, the best validation state; features
learn from the energy's objective alone. What differs: no pretrained weights, standardised labels
(densities are given in the labels' own units), and uniform noise of one step on integer labels,
because a continuous likelihood is unbounded there. Recipe ``literal`` leaves the labels as they
are. Recipe ``best`` is :class:`~selfnorm.ImageRegressor` as it comes; all its rows share the
features, the augmentation and the number of steps.

The paper's "NCE" is *ranking* NCE (``ranking_nce``): it gives ``b`` no gradient, so ``l_SNL`` of
those rows is loose by construction. ``nce`` is the binary form, which learns ``b``. Rows ``mdn``,
``gaussian`` and ``l2`` have no energy.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from selfnorm.data import images
from selfnorm.errors import MissingDataError, SelfnormError
from selfnorm.experiments.image_judging import judge
from selfnorm.experiments.image_report import markdown
from selfnorm.experiments.report import Table
from selfnorm.image_regression import ImageRegressor
from selfnorm.label_space import dequantised

__all__ = [
    "BEST_PROPOSAL",
    "DATASETS",
    "METHODS",
    "RECIPES",
    "Config",
    "fit_and_judge",
    "regressor",
    "run",
]

DATASETS = images.DATASETS
RECIPES = ("paper", "literal", "best")
N_SAMPLES = 64
METHODS: tuple[tuple[str, str], ...] = (
    ("snl", "mdn-4"),
    ("ranking_nce", "mdn-4"),
    ("nce", "mdn-4"),
    ("mdn", "mdn-4"),
    ("gaussian", "none"),
    ("l2", "none"),
    ("snl", "mdn-8"),
    ("snl", "uniform"),
    ("snl", "gaussian"),
    ("ranking_nce", "mdn-8"),
    ("ranking_nce", "gaussian"),
    ("ranking_nce", "uniform"),
    ("nce", "mdn-8"),
    ("nce", "gaussian"),
    ("nce", "uniform"),
    ("mdn", "mdn-8"),
)
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
# The same for every method; the best state by validation comes about half-way, then all overfit.
_BEST: dict[str, dict[str, Any]] = {
    "utkface": {"max_epochs": 40, "dropout": 0.3, "ema": 0.998, "validate_every": 50},
    "cells": {"max_epochs": 36, "dropout": 0.3, "ema": 0.998, "validate_every": 50},
    "driving": {"max_epochs": 70, "dropout": 0.3, "ema": 0.998, "validate_every": 50},
}


# SNL's best proposal by the validation images of split 0 (of mdn-4, mdn-8, gaussian, uniform).
BEST_PROPOSAL = {"utkface": "uniform", "cells": "gaussian", "driving": "uniform"}


@dataclass(frozen=True)
class Config:
    """One run before it is run."""

    dataset: str
    objective: str
    proposal: str
    n_samples: int
    seed: int
    recipe: str
    device: str
    data_dir: str | None
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
    """Train one model; its row, each test image's figures, and the model."""
    began = time.perf_counter()
    model = regressor(config, data).fit(*data.train, val=data.val)
    seconds = time.perf_counter() - began
    if model.history_.stopped == "interrupted":
        raise KeyboardInterrupt  # a run cut short is no row
    held_out, _ = judge(model, data.val, n_samples=None)
    figures, arrays = judge(
        model,
        data.test,
        n_samples=config.n_test_samples,
        seed=config.seed,
        groups=data.test_groups,
    )
    row_calibrated = _calibrated(model, data)
    history = model.history_
    row = {
        **config.keys(),
        **figures,
        **row_calibrated,
        **{f"val_{k}": held_out[k] for k in ("exact", "mae", "coverage") if k in held_out},
        "val_score": history.best_score,
        "best_step": history.best_step,
        "n_steps": history.n_steps,
        "skipped_steps": history.skipped_steps,
        "rollbacks": history.rollbacks,
        "diverged": history.stopped == "diverged",
        "seconds": round(seconds, 2),
    }
    return row, arrays, model


def _calibrated(model: ImageRegressor, data: images.ImageData) -> dict[str, float]:
    """Figures on the test images once a temperature is fitted to the validation images."""
    if model.space_.dim > 1:
        return {}
    labels = dequantised(torch.as_tensor(data.val[1]), model.space_.step)
    temperature = model.calibrate(data.val[0], labels)
    figures, _ = judge(model, data.test, n_samples=None)
    model.temperature_ = 1.0  # what is drawn later is the model as trained
    kept = ("exact", "mae", "coverage", "pit_distance", "crps")
    return {"temperature": temperature, **{f"{k}_calibrated": figures[k] for k in kept}}


def run(
    *,
    recipe: str = "best",
    seeds: int = 3,
    out: str | Path = "out",
    device: str = "cpu",
    progress: bool = True,
    data_dir: str | Path | None = None,
    datasets: Sequence[str] = DATASETS,
    methods: Sequence[tuple[str, str]] = METHODS,
    objectives: Sequence[str] | None = None,
    proposals: Sequence[str] | None = None,
    n_samples: int = N_SAMPLES,
    max_epochs: int | None = None,
    n_test_samples: int = 20_000,
    backbone: Any = "resnet18",
    figures: bool = True,
    deadline: float | None = None,
    **_unused: Any,
) -> Table:
    """Run the table; write ``images.json``, ``images.md`` and figures into ``out``.

    Args:
        recipe: ``"paper"``, ``"literal"`` or ``"best"``.
        seeds: repetitions; each has a split of its own, shared by all methods.
        out: directory of the result files; finished rows found there are kept.
        device: torch device.
        progress: print every run.
        data_dir: data directory.
        datasets: which sets; those without files are named with their source, and left out.
        methods: pairs of objective and proposal.
        objectives, proposals: only the methods with these.
        n_samples: ``M``.
        max_epochs: shorter or longer training than the recipe's.
        n_test_samples: proposal samples of the bounds.
        backbone: another feature extractor.
        figures: draw images with their densities, and reliability diagrams.
        deadline: begin no run later than so many seconds after the call.
    """
    if recipe not in RECIPES:
        raise ValueError(f"unknown recipe {recipe!r}; choose one of {RECIPES}")
    methods = [
        (o, p)
        for o, p in methods
        if o in (objectives or [o]) and p in (*(proposals or [p]), "none")
    ]
    table = Table("images", recipe, Path(out), device=device)
    missing = missing_files(datasets, data_dir)
    present = [name for name in datasets if name not in missing]
    if not present:
        raise MissingDataError(" ".join(missing.values()))
    for message in missing.values():
        print(message, flush=True)
    began = time.perf_counter()
    for seed in range(seeds):
        loaded = {name: images.load(name, seed=seed, data_dir=data_dir) for name in present}
        for objective, proposal in methods:
            for name in present:
                config = Config(
                    name,
                    objective,
                    proposal,
                    n_samples,
                    seed,
                    recipe,
                    device,
                    None if data_dir is None else str(data_dir),
                    max_epochs,
                    backbone,
                    n_test_samples,
                )
                late = deadline is not None and time.perf_counter() - began > deadline
                if late or table.has(**config.keys()):
                    continue
                row, arrays, model = fit_and_judge(config, loaded[name])
                table.add(row)
                save_arrays(table.directory, config, arrays)
                if progress:
                    print(_line(row), flush=True)
                if figures and seed == 0 and (objective, proposal) == methods[0]:
                    _draw(model, loaded[name], arrays, table.directory)
    table.write_markdown(markdown(table, missing))
    return table


def missing_files(datasets: Sequence[str], data_dir: str | Path | None = None) -> dict[str, str]:
    """What is missing, by set: the message names the file and its source."""
    found = {name: _missing(name, data_dir) for name in datasets}
    return {name: message for name, message in found.items() if message}


def _missing(name: str, data_dir: str | Path | None) -> str:
    try:
        images.locate(name, data_dir)
    except MissingDataError as error:
        return f"{name}: {error}."
    return ""


def save_arrays(directory: Path, config: Config, arrays: dict[str, np.ndarray]) -> None:
    """Each test image's figures, for paired comparisons: ``scores/KEYS.npz``."""
    name = "-".join(str(v) for v in list(config.keys().values())[:5])
    (directory / "scores").mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        directory / "scores" / f"{name}.npz",
        **{k: v.astype(np.float32) for k, v in arrays.items()},  # type: ignore[arg-type]
    )


def _line(row: dict[str, Any]) -> str:
    named = ", ".join(str(row[k]) for k in ("dataset", "objective", "proposal", "seed"))
    value = row.get("exact", row.get("upper"))
    return f"{named}: {value:.3f} nats, MAE {row['mae']:.3f}, {row['seconds']:.0f} s"


def _draw(
    model: ImageRegressor, data: images.ImageData, arrays: dict[str, np.ndarray], out: Path
) -> None:
    if model.space_.dim != 1:
        return
    from selfnorm.plotting_images import density_panels, plot_panels
    from selfnorm.plotting_regression import plot_reliability

    panels = density_panels(model, *data.test)
    np.savez_compressed(out / "scores" / f"densities_{data.name}.npz", **panels)  # type: ignore[arg-type]
    try:
        plot_panels(panels, out / f"densities_{data.name}.png")
        plot_reliability({"SNL": arrays["pit"]}, out / f"reliability_{data.name}.png")
    except SelfnormError as error:  # no matplotlib: the numbers are there, the figures can wait
        print(error)
