"""The image regression table in words and numbers, beside the paper's."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from selfnorm.experiments.image_judging import paired
from selfnorm.experiments.report import Table, markdown_table, mean_sd, paper_numbers

__all__ = ["best_by_validation", "comparisons", "markdown"]

_NAMES = {
    "snl": "SNL",
    "nce": "binary NCE",
    "ranking_nce": "ranking NCE",
    "importance_ml": "IS likelihood",
    "mdn": "MDN alone",
    "gaussian": "Gaussian head",
    "l2": "L2",
}
_PAPER_SETS = {
    "steering_angle": "steering_angle",
    "cell_count": "cell_count",
    "utkface": "utkfaces",
    "biwi": "biwi",
}
Key = tuple[str, str]


def best_by_validation(table: Table, dataset: str, objective: str) -> str | None:
    """The proposal whose runs have the highest mean log-likelihood of the validation images."""
    scores: dict[str, list[float]] = {}
    for row in table.rows:
        if (row["dataset"], row["objective"]) == (dataset, objective):
            score = row.get("val_exact", row["val_score"])
            scores.setdefault(row["proposal"], []).append(score)
    most = max((len(v) for v in scores.values()), default=0)
    full = {name: float(np.mean(v)) for name, v in scores.items() if len(v) == most}
    return max(full, key=lambda name: full[name]) if full else None


def comparisons(table: Table) -> list[dict[str, Any]]:
    """SNL with its best proposal (by validation) against the best of every other method, paired.

    From the per-image scores that :func:`~selfnorm.experiments.images.run` leaves in ``scores/``;
    the result is kept in ``comparisons.json``, which serves where the scores are gone.
    """
    kept = table.directory / "comparisons.json"
    if not (table.directory / "scores").exists():
        return json.loads(kept.read_text()) if kept.exists() else []
    found = _compare(table)
    kept.write_text(json.dumps(found, indent=1) + "\n")
    return found


def _compare(table: Table) -> list[dict[str, Any]]:
    found = []
    for (dataset,) in table.groups("dataset"):
        ours = best_by_validation(table, dataset, "snl")
        if ours is None:
            continue
        for objective in ("ranking_nce", "nce", "mdn", "gaussian", "l2"):
            theirs = best_by_validation(table, dataset, objective)
            if theirs is None:
                continue
            pairs = _scores(table, dataset, ("snl", ours), (objective, theirs))
            if pairs:
                difference, error = paired(*(list(column) for column in zip(*pairs, strict=True)))
                found.append(
                    {
                        "dataset": dataset,
                        "snl_proposal": ours,
                        "objective": objective,
                        "proposal": theirs,
                        "difference": difference,
                        "se": error,
                        "seeds": len(pairs),
                    }
                )
    return found


def _scores(
    table: Table, dataset: str, first: Key, second: Key
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray | None]]:
    pairs = []
    sizes = sorted({(r["n_samples"], r["seed"]) for r in table.rows if r["dataset"] == dataset})
    for n_samples, seed in sizes:
        loaded, groups = [], None
        for objective, proposal in (first, second):
            name = f"{dataset}-{objective}-{proposal}-{n_samples}-{seed}.npz"
            path = table.directory / "scores" / name
            if path.exists():
                with np.load(path) as file:
                    if "log_prob" in file:
                        loaded.append(file["log_prob"].astype(np.float64))
                        groups = file.get("groups", None)
        if len(loaded) == 2:
            pairs.append((loaded[0], loaded[1], groups))
    return pairs


def markdown(table: Table, missing: dict[str, str] | None = None) -> str:
    """The table with means and deviations over seeds, comparisons, and what was missing."""
    printed = {(r["objective"], r["proposal"]): r for r in paper_numbers()["images"]}
    body = []
    for (dataset, objective, proposal), rows in table.groups(
        "dataset", "objective", "proposal"
    ).items():
        paper = printed.get(("nce" if objective == "ranking_nce" else objective, proposal), {})
        if objective == "nce":
            paper = {}
        column = _PAPER_SETS.get(dataset, "")
        body.append(
            [
                dataset,
                _NAMES[objective],
                proposal,
                _mean(rows, "exact"),
                _mean(rows, "upper"),
                _mean(rows, "lower"),
                _mean(rows, "gap", 4),
                _mean(rows, "mae"),
                _mean(rows, "coverage"),
                _mean(rows, "coverage_calibrated"),
                _printed(paper.get(f"{column}_is")),
                _printed(paper.get(f"{column}_snl")),
            ]
        )
    header = ["data set", "objective", "proposal", "exact", "l_IS", "l_SNL", "l_IS - l_SNL"]
    header += ["MAE", "90 % covers", "with temperature", "paper l_IS", "paper l_SNL"]
    note = (
        "Test log-likelihood in nats in the labels' units, mean ± sd over seeds. `exact` "
        "normalises by quadrature (one label); `l_IS` and `l_SNL` use 20,000 samples of the "
        "model's own proposal. Ranking NCE gives `b` no gradient: its `l_SNL` is loose by "
        "construction. `with temperature`: the same after one temperature is fitted to the "
        "validation images. The paper's rows are for its own files and a pretrained ResNet; "
        "`cells` and `driving` are other data than its cell count and steering angle. Ranking NCE "
        "trains on independent draws, as it must, the others on stratified ones. Settings were "
        "chosen on validation images of split 0, some of which are test images of other splits."
    )
    text = (
        f"# Image regression, recipe `{table.recipe}`\n\n{note}\n\n{markdown_table(header, body)}"
    )
    compared = [
        [
            c["dataset"],
            c["snl_proposal"],
            f"{_NAMES[c['objective']]} ({c['proposal']})",
            f"{c['difference']:+.3f} ± {c['se']:.3f}",
            str(c["seeds"]),
        ]
        for c in comparisons(table)
    ]
    if compared:
        head = ["data set", "SNL's proposal", "against", "difference ± standard error", "seeds"]
        text += (
            "\n\n## SNL minus the others, paired over test images\n\n"
            "Proposals are the best by validation among those run. Standard errors are over "
            "stretches of 50 frames (`driving`), pictures (`cells`) or images, and over seeds "
            "where that is larger.\n\n" + markdown_table(head, compared)
        )
    if missing:
        text += "\n\n## Not run\n\n" + "\n".join(f"- {message}" for message in missing.values())
    return f"{text}\n\n`{table.command}`, {table.seconds:.0f} s\n"


def _mean(rows: list[dict[str, Any]], key: str, digits: int = 3) -> str:
    """Mean and deviation over seeds; of a single run the value alone."""
    if len(rows) > 1 or rows[0].get(key) is None:
        return mean_sd(rows, key, digits)
    return f"{rows[0][key]:.{digits}f}"


def _printed(value: Any) -> str:
    if isinstance(value, dict):
        return f"{value['mean']:.3f} ± {value['sd']:.3f}"
    return str(value) if value else "–"
