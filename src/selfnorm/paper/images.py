"""The paper's image regression table: ranking NCE, binary NCE and SNL, four proposals, six sets.

Recipe ``paper`` keeps the paper's networks and training: ResNet-18 features, the label through
16-32-64-128, one joint hidden layer of 640, ``b`` and the mixture density network with one hidden
layer of 512, ``M = 64``, Adam 1e-3, batches of 32, 75 epochs, the best validation state; features
learn from the energy's objective alone. What differs: no pretrained weights, standardised labels
(densities are given in the labels' own units), and uniform noise of one step on integer labels,
because a continuous likelihood is unbounded there. Recipe ``literal`` leaves the labels as they
are. Recipe ``best`` is :class:`~selfnorm.ImageRegressor` as it comes; all its rows share the
features, the augmentation and the number of steps, and every objective has the same proposals.

The paper's "NCE" is *ranking* NCE (``ranking_nce``): it gives ``b`` no gradient, so ``l_SNL`` of
those rows is loose by construction. ``nce`` is the binary form, which learns ``b``. Rows ``mdn``,
``gaussian`` and ``l2`` have no energy.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from selfnorm.datasets import images
from selfnorm.errors import MissingDataError
from selfnorm.evaluation import calibration
from selfnorm.images import (
    IMAGE_OPTIONS,
    PROPOSALS,
    WITHOUT_ENERGY,
    EnergyHead,
    ImageRegressor,
    dequantised,
)
from selfnorm.paper.report import (
    Planned,
    ResultTable,
    Row,
    bounds_columns,
    check_choices,
    history_columns,
    markdown_table,
    mean_sd,
    paper_numbers,
    paper_value,
    sets_with_files,
)
from selfnorm.paper.runner import Settings, refuse_cut_short
from selfnorm.plotting import density_panels, plot_panels, plot_reliability

Method = tuple[str, str]  # objective and proposal
Scores = dict[tuple[int, int], dict[str, np.ndarray]]  # of test images, by n_samples and seed
DATASETS = images.DATASETS
RECIPES = ("paper", "literal", "best")
N_SAMPLES = 64
_RUN = ("dataset", "objective", "proposal", "n_samples", "seed")  # what a run is called by
# SNL's two best proposals by validation images, the better one first: of all four on split 0, for
# the cells once more on three splits.
BEST_PROPOSALS: dict[str, tuple[str, ...]] = {
    "utkface": ("uniform", "mdn-8"),
    "cells": ("uniform", "gaussian"),
    "driving": ("uniform", "mdn-8"),
}
_ENERGIES = ("snl", "ranking_nce", "nce")
_OBJECTIVES = (*_ENERGIES, *WITHOUT_ENERGY)
_NAMES = {
    "snl": "SNL",
    "nce": "binary NCE",
    "ranking_nce": "ranking NCE",
    "mdn": "MDN alone",
    "gaussian": "Gaussian head",
    "l2": "L2",
}

_PAPER: Row = {
    "energy": EnergyHead("paper", base=None, share_gradient=False, proposal_loss="both"),
    "options": replace(
        IMAGE_OPTIONS, weight_decay=0.0, optimizer="adam", schedule="constant", ema=None
    ),
    "dropout": 0.0,
    "batch_size": 32,
    "max_epochs": 75,
    "lr": 1e-3,
}
# The same for every method. The best state by validation comes about half-way, then all overfit:
# ten looks without a better one end a run, but for the cells, whose scores go up and down.
_OFTEN = replace(IMAGE_OPTIONS, validate_every=50)
_TEN_LOOKS = replace(_OFTEN, patience=10)
_BEST: dict[str, Row] = {
    "utkface": {"max_epochs": 40, "dropout": 0.3, "options": _TEN_LOOKS},
    "cells": {"max_epochs": 36, "dropout": 0.3, "options": _OFTEN},
    "driving": {"max_epochs": 70, "dropout": 0.3, "options": _TEN_LOOKS},
}
# The distributions of the counts are sharp, and a learned b lagged behind them: one anchor for
# each count. On validation images anchors gain nothing for ages, and ranking NCE does not use b.
_ANCHORS = {("cells", "uniform"): 51}
_LEARN_B = ("snl", "nce")


@dataclass(frozen=True)
class Config(Planned):
    """One run before it is run; the densities of one row of a set are ``drawn``."""

    dataset: str
    objective: str
    proposal: str
    n_samples: int
    seed: int
    settings: Settings
    max_epochs: int | None = None
    backbone: str | nn.Module = "resnet18"
    n_test_samples: int = 20_000
    drawn: bool = False

    def keys(self) -> Row:
        """What identifies the run in the result file."""
        backbone = self.backbone
        return {
            **{name: getattr(self, name) for name in _RUN},
            "max_epochs": self.parameters().get("max_epochs"),
            "backbone": backbone if isinstance(backbone, str) else type(backbone).__name__,
        }

    def parameters(self) -> Row:
        """Parameters of the model in the recipe, with what this run changes."""
        best = self.settings.recipe == "best"
        parameters = dict(_BEST.get(self.dataset, {}) if best else _PAPER)
        anchors = _ANCHORS.get((self.dataset, self.proposal))
        if anchors and best and self.objective in _LEARN_B:
            parameters["energy"] = EnergyHead(anchors=anchors)
        if self.max_epochs is not None:
            parameters["max_epochs"] = self.max_epochs
        return parameters

    def regressor(self, data: images.ImageData) -> ImageRegressor:
        """The untrained model of this run."""
        # The augmentation is the published one for head poses, our own choice elsewhere.
        recipe = self.settings.recipe
        augmented = recipe == "best" or self.dataset == "biwi"
        return ImageRegressor(
            self.objective,
            "mdn-4" if self.proposal == "none" else self.proposal,
            n_samples=self.n_samples,
            label_step=0.0 if recipe == "literal" else data.label_step,
            label_range=data.label_range,
            augmentation=data.augmentation if augmented else None,
            backbone=self.backbone,
            device=self.settings.device,
            random_state=self.seed,
            **self.parameters(),
        )


def methods_for(dataset: str, recipe: str, proposals: Sequence[str] | None = None) -> list[Method]:
    """Objectives with their proposals, the most telling first.

    SNL and both forms of NCE have the same ones: those asked for, by default all, in recipe
    ``best`` the two that suit SNL best. A mixture alone has four components, and eight where an
    energy's proposal has.

    >>> methods_for("cells", "best")[:4]
    [('snl', 'uniform'), ('ranking_nce', 'uniform'), ('nce', 'uniform'), ('mdn', 'mdn-4')]
    """
    usual = BEST_PROPOSALS.get(dataset, PROPOSALS) if recipe == "best" else PROPOSALS
    chosen = tuple(proposals or usual)
    energies = [(objective, p) for p in chosen for objective in _ENERGIES]
    mixtures = dict.fromkeys(["mdn-4", *(p for p in chosen if p.startswith("mdn-"))])
    alone = [*(("mdn", p) for p in mixtures), ("gaussian", "none"), ("l2", "none")]
    return [*energies[:3], *alone, *energies[3:]]


_LEVEL = 0.9
_CALIBRATED = ("exact", "exact_se", "mae", "coverage", "pit_distance", "crps")


def fit_and_judge(
    config: Config, data: images.ImageData
) -> tuple[Row, dict[str, np.ndarray], ImageRegressor]:
    """Train one model; its row, each test image's figures, and the model as trained.

    Figures that end in ``_calibrated`` are those of the model once a temperature is fitted to the
    validation images: the same test images under ``p^(1/T)``, normalised again.
    """
    began = time.perf_counter()
    model = config.regressor(data).fit(*data.train, val=data.val)
    seconds = time.perf_counter() - began
    history = model.history_
    refuse_cut_short(history.stopped)
    held_out, _ = judge(model, data.val, n_samples=None)
    figures, arrays = judge(
        model, data.test, n_samples=config.n_test_samples, seed=config.seed, groups=data.test_groups
    )
    if model.space_.dim == 1:
        labels = dequantised(torch.as_tensor(data.val[1]), model.space_.step)
        figures["temperature"] = model.calibrate(data.val[0], labels)
        again, tempered = judge(model, data.test, n_samples=None, groups=data.test_groups)
        figures |= {f"{name}_calibrated": again[name] for name in _CALIBRATED}
        arrays |= {f"{name}_calibrated": tempered[name] for name in ("log_prob", "pit")}
        model.temperature_ = 1.0  # what is drawn later is the model as trained
    return (
        {
            **config.keys(),
            **figures,
            **{f"val_{k}": held_out[k] for k in ("exact", "mae", "coverage") if k in held_out},
            "val_score": history.best_score,
            **history_columns(history),
            "diverged": history.stopped == "diverged" or history.best_score is None,
            "seconds": round(seconds, 2),
        },
        arrays,
        model,
    )


def judge(
    model: ImageRegressor,
    pair: images.Pair,
    *,
    n_samples: int | None = 20_000,
    seed: int = 0,
    groups: np.ndarray | None = None,
) -> tuple[Row, dict[str, np.ndarray]]:
    """Figures of a model on held-out images, and each image's ``log_prob`` and ``pit``.

    Labels get the noise that the model was trained with (the same draw for every model); errors of
    the mean are taken against the labels as recorded. ``exact`` normalises by quadrature (one
    label); ``lower`` and ``upper`` are ``l_SNL`` and ``l_IS`` with ``n_samples`` of the proposal
    (``None``: left out). Images of one of the ``groups`` are not independent: ``exact_se`` is
    over the groups.
    """
    pictures, recorded = pair
    labels = dequantised(torch.as_tensor(recorded), model.space_.step)
    figures: Row = {"n_test": len(recorded)}
    arrays: dict[str, np.ndarray] = {}
    if model.objective not in WITHOUT_ENERGY and n_samples is not None:
        bounds = model.bounds(pictures, labels, n_samples=n_samples, seed=1000 + seed)
        figures |= bounds_columns(bounds)
    if model.space_.dim == 1 or model.objective in WITHOUT_ENERGY:
        exact = arrays["log_prob"] = model.log_prob(pictures, labels)
        figures["exact"] = float(exact.mean())
        if groups is not None:
            arrays["groups"] = np.asarray(groups)
        figures["exact_se"] = standard_error(exact, groups)
    error = np.abs(np.reshape(model.predict(pictures), recorded.shape) - recorded)
    figures["mae"] = float(error.mean())
    if model.space_.dim == 1:
        arrays["pit"], crps = model.pit_and_crps(pictures, labels)
        ends = model.predict_interval(pictures, _LEVEL)
        figures["coverage"] = calibration.central_coverage(arrays["pit"], _LEVEL)
        figures["width"] = float(np.diff(ends).mean())
        figures["pit_distance"] = calibration.pit_distance(arrays["pit"])
        figures["crps"] = float(crps.mean())
    return figures, arrays


def standard_error(values: np.ndarray, groups: np.ndarray | None = None) -> float:
    """Standard error of a mean over images, those of one group counting as one observation.

    For groups ``g`` with sums of deviations ``s_g``: ``sqrt(G / (G - 1) sum s_g^2) / n``.

    >>> round(standard_error(np.array([1.0, 1.0, 3.0, 3.0]), np.array([0, 0, 1, 1])), 4)
    1.0
    """
    deviations = values - values.mean()
    if groups is None:
        groups = np.arange(len(values))
    sums = np.bincount(np.unique(groups, return_inverse=True)[1], weights=deviations)
    n_groups = len(sums)
    if n_groups < 2:
        return float("nan")
    return float(np.sqrt(n_groups / (n_groups - 1) * np.sum(sums**2)) / len(values))


def run_all(table: ResultTable, configs: Sequence[Config], common: Settings) -> None:
    """Run what the table lacks, and add rows as they finish."""
    for _ in common.rows(table, _work, configs):
        pass
    _data.cache_clear()


_data = lru_cache(maxsize=3)(images.load)  # splits in use


def _work(config: Config) -> tuple[Row, None]:
    """Train and judge; the files of a row are there before the row is."""
    directory = Path(config.settings.out)
    data = _data(config.dataset, seed=config.seed, data_dir=config.settings.data_dir)
    row, arrays, model = fit_and_judge(config, data)
    kept: Row = {name: values.astype(np.float32) for name, values in arrays.items()}
    path = _scores_file(directory, row)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, **kept)
    if config.drawn and model.space_.dim == 1:
        panels: Row = density_panels(model, *data.test)
        np.savez_compressed(path.with_name(f"densities_{data.name}.npz"), **panels)
        plot_panels(panels, directory / f"densities_{data.name}.png")
        plot_reliability({"SNL": arrays["pit"]}, directory / f"reliability_{data.name}.png")
    return row, None


def _scores_file(directory: Path, row: Row) -> Path:
    """Where a row has each test image's figures, for paired comparisons."""
    return directory / "scores" / ("-".join(str(row[name]) for name in _RUN) + ".npz")


def run(
    *,
    recipe: str = "best",
    seeds: int = 3,
    datasets: Sequence[str] = DATASETS,
    objectives: Sequence[str] | None = None,
    proposals: Sequence[str] | None = None,
    max_epochs: int | None = None,
    backbone: str | nn.Module = "resnet18",
    n_test_samples: int = 20_000,
    **settings: Any,
) -> ResultTable:
    """Run the table; write ``images.json``, ``images.md`` and figures into ``out``.

    Args:
        recipe: ``"paper"``, ``"literal"`` or ``"best"``.
        seeds: repetitions; each has a split of its own, shared by all methods.
        datasets: which sets; those without files are named with their source, and left out.
        objectives, proposals: only the methods of :func:`methods_for` with these.
        max_epochs, backbone: in place of the recipe's.
        n_test_samples: of the proposal, for the bounds of each test image.
        settings: further ones of :class:`~selfnorm.paper.runner.Settings`.
    """
    common = Settings(recipe, **settings)
    check_choices("objective", objectives or (), _OBJECTIVES)
    check_choices("proposal", proposals or (), PROPOSALS)
    table = common.table("images", RECIPES)
    present, missing = present_sets(datasets, common)
    wanted = objectives or _OBJECTIVES
    methods = {
        name: [m for m in methods_for(name, recipe, proposals) if m[0] in wanted]
        for name in present
    }
    # Set by set within a method: a call that is stopped early leaves the most complete table.
    configs = [
        Config(
            name, *methods[name][k], N_SAMPLES, seed, common, max_epochs, backbone, n_test_samples,
            drawn=seed == k == 0,
        )
        for seed in range(seeds)
        for k in range(max(map(len, methods.values())))
        for name in present
        if k < len(methods[name])
    ]  # fmt: skip
    run_all(table, configs, common)
    table.write_page(markdown(table, missing))
    return table


def present_sets(datasets: Sequence[str], common: Settings) -> tuple[list[str], dict[str, str]]:
    """The sets that can be run, and what is missing of the others; an error if all lack files."""
    present, missing = sets_with_files(datasets, images.locate, common.data_dir)
    notes = [f"{name}: {reason}." for name, reason in missing.items()]
    if not present:
        raise MissingDataError(" ".join(notes))
    if notes:
        print("\n".join(notes), flush=True)
    return present, missing


def paired(
    first: Sequence[np.ndarray],
    second: Sequence[np.ndarray],
    groups: Sequence[np.ndarray | None] | None = None,
) -> Row:
    """Compare two models image by image: the mean difference and how sure it is.

    Each list holds one array of the test images' log-densities per seed; ``groups`` says which
    images belong together, and the error over images is over these groups within runs. ``se`` is
    the larger of the errors over images and over seeds (``None`` for a single one).

    >>> paired([np.array([1.0, 2.0])], [np.array([0.0, 1.0])])["difference"]
    1.0
    """
    differences = [a - b for a, b in zip(first, second, strict=True)]
    means = np.array([d.mean() for d in differences])
    together = groups or [None] * len(means)
    within = [standard_error(d, g) ** 2 for d, g in zip(differences, together, strict=True)]
    over_images = float(np.sqrt(np.sum(within)) / len(means))
    over_seeds = float(means.std(ddof=1) / np.sqrt(len(means))) if len(means) > 1 else None
    return {
        "difference": float(means.mean()),
        "se": max(over_images, over_seeds or 0.0),
        "se_images": over_images,
        "se_seeds": over_seeds,
        "by_seed": means.tolist(),
    }


def best_by_validation(table: ResultTable, dataset: str, objective: str) -> str | None:
    """The proposal whose runs have the highest mean log-likelihood of the validation images.

    Runs that diverged count as missing, and a proposal with fewer runs than another is left out.
    """
    scores: dict[str, list[float]] = {}
    for row in table.rows:
        if (row["dataset"], row["objective"]) == (dataset, objective) and not row.get("diverged"):
            score = "val_exact" if "val_exact" in row else "val_score"
            scores.setdefault(row["proposal"], []).append(row[score])
    most = max((len(v) for v in scores.values()), default=0)
    full = {name: float(np.mean(v)) for name, v in scores.items() if len(v) == most}
    return max(full, key=lambda name: full[name]) if full else None


def comparisons(table: ResultTable) -> list[Row]:
    """SNL with its best proposal against the best of every other method, and proposal by proposal.

    ``choice`` is ``"best"`` where each side has its best proposal by validation, ``"same"`` where
    both have the same one. Differences are of test log-densities, paired over images and averaged
    over seeds; those named ``calibrated`` are between densities with their temperatures. From the
    per-image scores in ``scores/``; the result is kept in ``comparisons.json``, which serves where
    the scores are gone.
    """
    kept = table.directory / "comparisons.json"
    if not (table.directory / "scores").exists():
        return json.loads(kept.read_text()) if kept.exists() else []
    compared = []
    for (dataset,), rows in table.groups("dataset").items():
        scores = _scores_of(table, rows)
        best = {o: best_by_validation(table, dataset, o) for o in _OBJECTIVES}
        pairs = [("best", best["snl"] or "", o, p or "") for o, p in best.items() if o != "snl"]
        pairs += [("same", p, o, p) for s, p in sorted(scores) if s == "snl" for o in _ENERGIES[1:]]
        for choice, ours, objective, theirs in pairs:
            both = scores.get(("snl", ours), {}), scores.get((objective, theirs), {})
            plain = _difference(*both, "log_prob")
            if plain is None:
                continue
            row: Row = {"dataset": dataset, "choice": choice, "snl_proposal": ours}
            row |= {"objective": objective, "proposal": theirs}
            row |= {**plain, "seeds": len(plain["by_seed"])}
            tempered = _difference(*both, "log_prob_calibrated")
            if tempered is not None:
                row["difference_calibrated"] = tempered["difference"]
                row["se_calibrated"] = tempered["se"]
            compared.append(row)
    kept.write_text(json.dumps(compared, indent=1) + "\n")
    return compared


def _scores_of(table: ResultTable, rows: list[Row]) -> dict[Method, Scores]:
    """Each test image's figures, of the rows that have them, by method."""
    scores: dict[Method, Scores] = {}
    for row in rows:
        path = _scores_file(table.directory, row)
        if path.exists() and not row.get("diverged"):
            with np.load(path) as content:
                of_method = scores.setdefault((row["objective"], row["proposal"]), {})
                of_method[row["n_samples"], row["seed"]] = dict(content)
    return scores


def _difference(ours: Scores, theirs: Scores, name: str) -> Row | None:
    """``paired`` over the runs that both sides have, if there are any."""
    runs = [k for k in sorted(ours.keys() & theirs.keys()) if name in ours[k] and name in theirs[k]]
    if not runs:
        return None
    first, second = ([side[k][name].astype(np.float64) for k in runs] for side in (ours, theirs))
    return paired(first, second, [theirs[k].get("groups") for k in runs])


_NOTE = (
    "Test log-likelihood in nats in the labels' units, mean ± sd over seeds. `exact` "
    "normalises by quadrature (one label); `l_IS` and `l_SNL` use 20,000 samples of the "
    "model's own proposal. Ranking NCE gives `b` no gradient: its `l_SNL` is loose by "
    "construction. `with temperature`: after one temperature for all images is fitted to the "
    "validation images, the density normalised again. The paper's rows are for its own files and a "
    "pretrained ResNet; `cells` and `driving` are other data than its cell count and steering "
    "angle. Ranking NCE trains on independent draws, as it must, the others on stratified "
    "ones. SNL and binary NCE with the uniform proposal on `cells` have a `b` with anchors. "
    "Settings were chosen on validation images of split 0, some of which are test images "
    "of other splits."
)
_COLUMNS = {
    "exact": "exact",
    "upper": "l_IS",
    "lower": "l_SNL",
    "gap": "l_IS - l_SNL",
    "mae": "MAE",
    "coverage": "90 % covers",
    "exact_calibrated": "exact with temperature",
    "coverage_calibrated": "90 % covers with it",
}


def markdown(table: ResultTable, missing: dict[str, str] | None = None) -> str:
    """The table with means and deviations over seeds, comparisons, and what was missing."""
    printed = {(r["objective"], r["proposal"]): r for r in paper_numbers()["images"]}
    body = []
    sets = list(table.groups("dataset"))
    grouped = table.groups("dataset", "objective", "proposal").items()
    for (dataset, objective, proposal), rows in sorted(grouped, key=lambda g: sets.index(g[0][:1])):
        # What the paper calls NCE is ranking NCE; the binary form has no row there.
        name = {"ranking_nce": "nce", "nce": ""}.get(objective, objective)
        paper = printed.get((name, proposal), {})
        own = "utkfaces" if dataset == "utkface" else dataset
        figures = [mean_sd(rows, key, 4 if key == "gap" else 3) for key in _COLUMNS]
        theirs = [paper_value(paper.get(f"{own}_{bound}")) for bound in ("is", "snl")]
        body.append([dataset, _NAMES[objective], proposal, *figures, *theirs])
    header = ["data set", "objective", "proposal", *_COLUMNS.values(), "paper l_IS", "paper l_SNL"]
    text = f"# Image regression, recipe `{table.recipe}`\n\n{_NOTE}\n\n"
    text += markdown_table(header, body)
    keys = ("dataset", "objective", "proposal", "seed")
    diverged = [" ".join(str(r[k]) for k in keys) for r in table.rows if r.get("diverged")]
    if diverged:
        text += f"\n\n**Diverged**, and left out of the comparisons: {', '.join(diverged)}."
    compared = comparisons(table)
    best = [c for c in compared if c["choice"] == "best"]
    same = [c for c in compared if c["choice"] == "same"]
    if best:
        text += (
            "\n\n## SNL minus the others, paired over test images\n\n"
            "Proposals are the best by validation among those run. Standard errors are over "
            "stretches of 50 frames (`driving`), pictures (`cells`) or images, and over seeds "
            "where that is larger.\n\n" + _differences(best)
        )
    if same:
        text += "\n\n## SNL minus NCE with the same proposal\n\n" + _differences(same)
    if missing:
        text += "\n\n## Not run\n\n" + "\n".join(
            f"- {name}: {why}" for name, why in missing.items()
        )
    return text


def _differences(compared: list[Row]) -> str:
    header = ["data set", "SNL's proposal", "against", "difference ± standard error"]
    header += ["with temperatures", "seeds"]
    body = [
        [
            c["dataset"],
            c["snl_proposal"],
            f"{_NAMES[c['objective']]} ({c['proposal']})",
            f"{c['difference']:+.3f} ± {c['se']:.3f}",
            f"{c['difference_calibrated']:+.3f} ± {c['se_calibrated']:.3f}"
            if "difference_calibrated" in c
            else "–",
            str(c["seeds"]),
        ]
        for c in compared
    ]
    return markdown_table(header, body)
