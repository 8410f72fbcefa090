"""The image regression table in words and numbers, beside the paper's."""

from __future__ import annotations

from typing import Any

from selfnorm.paper.image_comparisons import comparisons
from selfnorm.paper.report import Table, markdown_table, mean_sd, paper_numbers

__all__ = ["markdown"]

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


def markdown(table: Table, missing: dict[str, str] | None = None) -> str:
    """The table with means and deviations over seeds, comparisons, and what was missing."""
    printed = {(r["objective"], r["proposal"]): r for r in paper_numbers()["images"]}
    body = []
    sets = list(table.groups("dataset"))
    grouped = table.groups("dataset", "objective", "proposal").items()
    for (dataset, objective, proposal), rows in sorted(grouped, key=lambda g: sets.index(g[0][:1])):
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
                _mean(rows, "exact_calibrated"),
                _mean(rows, "coverage_calibrated"),
                _printed(paper.get(f"{column}_is")),
                _printed(paper.get(f"{column}_snl")),
            ]
        )
    header = ["data set", "objective", "proposal", "exact", "l_IS", "l_SNL", "l_IS - l_SNL"]
    header += ["MAE", "90 % covers", "exact with temperature", "90 % covers with it"]
    header += ["paper l_IS", "paper l_SNL"]
    note = (
        "Test log-likelihood in nats in the labels' units, mean ± sd over seeds. `exact` "
        "normalises by quadrature (one label); `l_IS` and `l_SNL` use 20,000 samples of the "
        "model's own proposal. Ranking NCE gives `b` no gradient: its `l_SNL` is loose by "
        "construction. `with temperature`: after one temperature for all images is fitted to the "
        "validation images, the law normalised again. The paper's rows are for its own files and a "
        "pretrained ResNet; `cells` and `driving` are other data than its cell count and steering "
        "angle. Ranking NCE trains on independent draws, as it must, the others on stratified "
        "ones. SNL and binary NCE with the uniform proposal on `cells` have a `b` with anchors. "
        "Settings were chosen on validation images of split 0, some of which are test images "
        "of other splits."
    )
    text = (
        f"# Image regression, recipe `{table.recipe}`\n\n{note}\n\n{markdown_table(header, body)}"
    )
    diverged = [r for r in table.rows if r.get("diverged")]
    if diverged:
        names = ", ".join(
            " ".join(str(r[k]) for k in ("dataset", "objective", "proposal", "seed"))
            for r in diverged
        )
        text += f"\n\n**Diverged**, and left out of the comparisons: {names}."
    found = comparisons(table)
    best = [c for c in found if c.get("choice", "best") == "best"]
    same = [c for c in found if c.get("choice") == "same"]
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
        text += "\n\n## Not run\n\n" + "\n".join(f"- {message}" for message in missing.values())
    return f"{text}\n\n`{table.command}`, {table.seconds:.0f} s\n"


def _differences(found: list[dict[str, Any]]) -> str:
    header = ["data set", "SNL's proposal", "against", "difference ± standard error"]
    header += ["with temperatures", "seeds"]
    return markdown_table(header, [_difference(c) for c in found])


def _difference(found: dict[str, Any]) -> list[str]:
    tempered = "–"
    if "difference_calibrated" in found:
        tempered = f"{found['difference_calibrated']:+.3f} ± {found['se_calibrated']:.3f}"
    return [
        found["dataset"],
        found["snl_proposal"],
        f"{_NAMES[found['objective']]} ({found['proposal']})",
        f"{found['difference']:+.3f} ± {found['se']:.3f}",
        tempered,
        str(found["seeds"]),
    ]


def _mean(rows: list[dict[str, Any]], key: str, digits: int = 3) -> str:
    """Mean and deviation over seeds; of a single run the value alone."""
    if len(rows) > 1 or rows[0].get(key) is None:
        return mean_sd(rows, key, digits)
    return f"{rows[0][key]:.{digits}f}"


def _printed(value: Any) -> str:
    if isinstance(value, dict):
        return f"{value['mean']:.3f} ± {value['sd']:.3f}"
    return str(value) if value else "–"
