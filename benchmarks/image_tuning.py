"""The same settings tried for SNL, NCE and the laws without energy; each keeps its best.

``python benchmarks/image_tuning.py --data-dir DIR --runs RUNS --device cuda``. Rows of
``selfnorm reproduce images`` are tried again with other settings, all seeds. A method's proposal
and setting are those with the highest mean log-likelihood of the validation images, and only then
are the test images compared, image by image. ``RUNS`` keeps the rows and each image's scores, one
folder for every setting (``as_is``: those of the table); finished rows are not run again. With
``--report`` nothing is trained.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from selfnorm.experiments.image_judging import Paired, paired
from selfnorm.experiments.image_runs import Config, run_all
from selfnorm.experiments.images import N_SAMPLES, methods_for
from selfnorm.experiments.report import Table, markdown_table, mean_sd

ENERGIES = ("snl", "ranking_nce", "nce")
LEARN_B = ("snl", "nce")  # ranking NCE does not use b: anchors change nothing
STEPS = {"utkface": 60, "cells": 51, "driving": 41}  # one anchor in each step of the labels
# Data set, proposals ("alone": laws without an energy), options, whether b has anchors.
SETTINGS: list[tuple[str, tuple[str, ...], dict[str, Any], bool]] = [
    ("cells", ("uniform", "mdn-4"), {}, True),
    ("utkface", ("uniform",), {}, True),
    ("cells", ("uniform", "mdn-4"), {"dropout": 0.1}, True),
    ("utkface", ("uniform",), {"max_epochs": 20}, True),
    ("cells", ("gaussian", "alone"), {"dropout": 0.1}, False),
    ("utkface", ("mdn-8", "alone"), {"max_epochs": 20}, False),
    ("driving", ("uniform",), {}, True),
]
WORDS = {"anchors": "anchors", "dropout": "dropout {}", "max_epochs": "epochs {}"}


class Trial(NamedTuple):
    """A method with its proposal under one of the settings."""

    setting: str
    dataset: str
    objective: str
    proposal: str


def setting_of(options: dict[str, Any] | None) -> str:
    """Name of a setting: ``as_is``, or what differs from the table's."""
    parts = [WORDS[k].format(v).replace(" ", "") for k, v in sorted((options or {}).items())]
    return "_".join(parts) or "as_is"


def trials() -> list[tuple[Trial, dict[str, Any]]]:
    """All that is tried, with its options."""
    found = []
    for dataset, proposals, options, anchored in SETTINGS:
        for proposal in proposals:
            if proposal == "alone":
                methods = [m for m in methods_for(dataset, "best") if m[0] not in ENERGIES]
            else:
                methods = [(objective, proposal) for objective in ENERGIES]
            for objective, own in methods:
                chosen = dict(options)
                if anchored and objective in LEARN_B:
                    chosen["anchors"] = STEPS[dataset] if own == "uniform" else 32
                found.append((Trial(setting_of(chosen), dataset, objective, own), chosen))
    return found


def collect(runs: Path, seeds: int) -> dict[Trial, list[dict[str, Any]]]:
    """Rows of every trial that has all its seeds, none diverged."""
    found: dict[Trial, list[dict[str, Any]]] = {}
    for path in sorted(runs.glob("*/images.json")):
        for row in json.loads(path.read_text())["rows"]:
            key = Trial(path.parent.name, row["dataset"], row["objective"], row["proposal"])
            found.setdefault(key, []).append(row)
    return {
        key: sorted(rows, key=lambda r: r["seed"])
        for key, rows in found.items()
        if len(rows) == seeds and not any(r["diverged"] for r in rows)
    }


def _words(trial: Trial) -> str:
    return "as in the table" if trial.setting == "as_is" else trial.setting.replace("_", ", ")


def validation(rows: list[dict[str, Any]]) -> float:
    """Mean log-likelihood of the validation images."""
    return float(np.mean([r["val_exact"] for r in rows]))


def best(found: dict[Trial, list[dict[str, Any]]]) -> dict[tuple[str, str], Trial]:
    """For each set and objective the trial with the highest validation figure."""
    chosen: dict[tuple[str, str], Trial] = {}
    for key, rows in found.items():
        place = key.dataset, key.objective
        if place not in chosen or validation(rows) > validation(found[chosen[place]]):
            chosen[place] = key
    return chosen


def compared(runs: Path, ours: Trial, theirs: Trial, seeds: int) -> Paired:
    """Test log-densities of one trial minus another's, paired over images and seeds."""
    columns: list[list[Any]] = [[], [], []]
    for seed in range(seeds):
        for place, trial in enumerate((ours, theirs)):
            name = f"{trial.dataset}-{trial.objective}-{trial.proposal}-{N_SAMPLES}-{seed}.npz"
            with np.load(runs / trial.setting / "scores" / name) as content:
                columns[place].append(content["log_prob"].astype(np.float64))
                groups = content.get("groups", None)
        columns[2].append(groups)
    return paired(*columns)


def report(table: Table, runs: Path, seeds: int) -> None:
    """Write all rows, the comparisons of each method at its best, and both as Markdown."""
    found = collect(runs, seeds)
    chosen = best(found)
    table.rows = [
        {"setting": key.setting, **row} for key, rows in sorted(found.items()) for row in rows
    ]
    body = [
        [
            key.dataset,
            key.objective,
            key.proposal,
            _words(key) + (" **(chosen)**" if key in chosen.values() else ""),
            *(mean_sd(rows, name) for name in ("val_exact", "exact")),
            mean_sd(rows, "gap", 4),
            *(mean_sd(rows, name) for name in ("mae", "coverage", "coverage_calibrated")),
        ]
        for key, rows in sorted(found.items(), key=lambda f: (f[0][1:], f[0][0]))
    ]
    header = ["data set", "objective", "proposal", "setting", "validation", "test"]
    header += ["l_IS - l_SNL", "MAE", "90 % covers", "90 % covers with temperature"]
    rivals, lines = [], []
    for (dataset, objective), theirs in sorted(chosen.items()):
        ours = chosen.get((dataset, "snl"))
        if objective == "snl" or ours is None:
            continue
        values = compared(runs, ours, theirs, seeds)
        rivals.append({"snl": ours._asdict(), "against": theirs._asdict(), **values._asdict()})
        described = f"{objective} ({theirs.proposal}, {_words(theirs)})"
        mine = f"{ours.proposal}, {_words(ours)}"
        lines.append([dataset, mine, described, f"{values.difference:+.3f} ± {values.se:.3f}"])
    table.write()
    (table.directory / "comparisons.json").write_text(json.dumps(rivals, indent=1) + "\n")
    table.write_markdown(
        "# Image regression, settings tried for every method\n\n"
        "Log-likelihoods in nats by quadrature, mean ± sd over seeds. For each method the proposal "
        "and setting with the highest mean over the validation images are chosen; the test images "
        "decide nothing. Anchors: `b` also sees the energy at midpoints of the proposal, which is "
        f"of no concern to ranking NCE.\n\n{markdown_table(header, body)}\n\n"
        "## SNL minus the others, each at its best by validation\n\nPaired over test images; "
        "standard errors as in the table of images.\n\n"
        + markdown_table(["data set", "SNL", "against", "difference ± standard error"], lines)
        + f"\n\n`{table.command}`\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("results/images_tuning"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--report", action="store_true", help="train nothing")
    arguments = parser.parse_args()
    for trial, options in [] if arguments.report else trials():
        table = Table("images", "best", arguments.runs / trial.setting, device=arguments.device)
        configs = [
            Config(*trial[1:], N_SAMPLES, seed, "best", arguments.device, options=options or None)
            for seed in range(arguments.seeds)
        ]
        run_all(table, configs, data_dir=arguments.data_dir)
    command = "python benchmarks/image_tuning.py --data-dir DIR --runs RUNS --device cuda"
    table = Table("images_tuning", "best", arguments.out, arguments.device, command)
    report(table, arguments.runs, arguments.seeds)


if __name__ == "__main__":
    main()
