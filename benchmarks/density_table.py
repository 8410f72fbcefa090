"""Join result files of ``benchmarks/density.py`` into one table with paired differences.

    python benchmarks/density_table.py --out results/density FILE.json [FILE.json ...]

Beside each ``FILE.json`` lies ``FILE.npz`` with the log-density of every test row. Per method and
set the configuration with the best mean validation score is shown, mean and standard deviation over
the seeds. The difference to the best flow is paired row by row (each method's log-density averaged
over its seeds); its standard error is that of the mean over test rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from selfnorm.experiments.report import markdown_table

FLOWS = ("nsf", "maf")
LABELS = {"selfnorm": "selfnorm", "nsf": "NSF", "maf": "MAF", "gmm": "GMM", "kde": "KDE"}


def read(paths: list[Path]) -> tuple[list[dict[str, Any]], dict[str, np.ndarray], dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    arrays: dict[str, np.ndarray] = {}
    head: dict[str, Any] = {}
    for path in paths:
        content = json.loads(path.read_text())
        side_by_side = content.get("concurrent_runs")
        rows += [
            {**row, "concurrent_runs": side_by_side}
            for row in content["rows"]
            if "error" not in row
        ]
        head.setdefault("versions", content["versions"])
        head.setdefault("hardware", content["hardware"])
        head.setdefault("command", []).append(content["command"])
        if path.with_suffix(".npz").exists():
            with np.load(path.with_suffix(".npz")) as file:
                arrays |= {name: file[name] for name in file}
    return rows, arrays, head


def chosen(rows: list[dict[str, Any]], dataset: str, method: str) -> list[dict[str, Any]]:
    """Rows of the configuration with the best mean validation score."""
    mine = [r for r in rows if r["dataset"] == dataset and r["method"] == method]
    by_config: dict[str, list[dict[str, Any]]] = {}
    for row in mine:
        by_config.setdefault(row["config"], []).append(row)
    if not by_config:
        return []
    return max(by_config.values(), key=lambda group: statistics.fmean(r["val"] for r in group))


def cell(group: list[dict[str, Any]], key: str, digits: int = 3) -> str:
    values = [r[key] for r in group if r.get(key) is not None]
    if not values:
        return "–"
    sd = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{sd} ({len(values)})"


def log_density(group: list[dict[str, Any]], arrays: dict[str, np.ndarray]) -> np.ndarray | None:
    names = [f"{r['dataset']}/{r['method']}/{r['config']}/{r['seed']}" for r in group]
    found = [arrays[name].astype(np.float64) for name in names if name in arrays]
    return np.mean(found, 0) if found else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path("results/density"))
    parser.add_argument("--note", default="", help="what a reader must know about these runs")
    args = parser.parse_args()
    rows, arrays, head = read(args.files)
    sets = list(dict.fromkeys(r["dataset"] for r in rows))
    body, bounds, comparisons = [], [], []
    for dataset in sets:
        groups = {method: chosen(rows, dataset, method) for method in LABELS}
        body.append([dataset, *(cell(groups[method], "test") for method in LABELS)])
        ours = groups["selfnorm"]
        if ours:
            gap = [{"gap": r["upper"] - r["lower"]} for r in ours]
            bounds.append(
                [
                    dataset,
                    ours[0]["config"],
                    cell(gap, "gap", 4),
                    cell(ours, "ess"),
                    cell(ours, "ess_worst_column"),
                    cell(ours, "two_sample_auroc"),
                    cell(groups["nsf"], "two_sample_auroc"),
                    cell(groups["maf"], "two_sample_auroc"),
                ]
            )
        mine = log_density(ours, arrays) if ours else None
        for method in FLOWS:
            theirs = log_density(groups[method], arrays) if groups[method] else None
            if mine is None or theirs is None:
                continue
            difference = mine - theirs
            comparisons.append(
                {
                    "dataset": dataset,
                    "against": method,
                    "difference": float(difference.mean()),
                    "se": float(difference.std(ddof=1) / len(difference) ** 0.5),
                }
            )
    args.out.mkdir(parents=True, exist_ok=True)
    recipes = {r["config"] for r in rows if r["method"] == "selfnorm"}
    recipe = "default" if recipes == {"default"} else "variants, chosen on validation"
    content = {"table": "density", "recipe": recipe, "note": args.note, **head}
    content["comparisons"] = comparisons
    (args.out / "density.json").write_text(json.dumps(content | {"rows": rows}, indent=1) + "\n")
    paired = [
        [c["dataset"], LABELS[c["against"]], f"{c['difference']:+.3f} ± {c['se']:.3f}"]
        for c in comparisons
    ]
    text = [
        "# Density estimation: test log-likelihood (nats per row)",
        "",
        "Mean ± sd over the seeds (number of runs). `–`: not run.",
        "",
        *([args.note, ""] if args.note else []),
        markdown_table(["set", *LABELS.values()], body),
        "",
        "## selfnorm minus flow, paired over test rows (± standard error)",
        "",
        markdown_table(["set", "against", "difference"], paired),
        "",
        "## Bounds, effective sample size, two-sample AUROC (0.5: indistinguishable)",
        "",
        markdown_table(
            ["set", "configuration", "gap", "ESS", "worst column", "selfnorm", "NSF", "MAF"], bounds
        ),
    ]
    (args.out / "density.md").write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
