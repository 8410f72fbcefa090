"""Write the result files of ``tables.py`` as tables, beside published rows.

python benchmarks/table_pages.py [--results results/tables]
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

from measuring import Row, mean_and_sd
from selfnorm.paper.report import markdown_table

NAMES = {
    "selfnorm": "**selfnorm**",
    "selfnorm-cpu": "**selfnorm**, two CPU cores",
    "arfpy": "adversarial forest (arfpy)",
    "bootstrap": "training rows, drawn again",
    "miceforest": "miceforest",
    "iterative": "IterativeImputer",
    "mean_mode": "mean, mode",
    "ecod": "ECOD",
    "copod": "COPOD",
    "shap": "SHAP, isolation forest",
}


def group(rows: list[Row], *keys: str) -> dict[tuple[object, ...], list[Row]]:
    """Rows by the values of some keys, methods in the order above."""
    order = list(NAMES)
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in sorted(rows, key=lambda r: order.index(r["method"])):
        groups.setdefault(tuple(row[k] for k in keys), []).append(row)
    return groups


def cell(rows: list[Row], key: str, digits: int = 3) -> str:
    """Mean and, of several rows, standard deviation."""
    return mean_and_sd([row[key] for row in rows if row.get(key) is not None], digits)


MEANINGS = """- *XGBoost*, *logistic*: two-sample score `2 - 2 max(0.5, AUROC)` of a classifier that
  tells samples from training rows. 1: it cannot tell; 0: it always can. *test rows*: XGBoost's,
  from test rows.
- *shape*, *trend*: agreement of single columns and of pairs of columns; 1 is best.
- *closest record*: share of samples that are closer to training rows than to as many test rows; 0.5
  is best.
- *nearest*: median distance of samples to the nearest training row, divided by that of test rows.
  Below 1, samples are too close to training rows.
- *AUROC*: of XGBoost trained on samples and tested on real rows; *of real*: divided by that of
  XGBoost trained on real rows."""


def generation(content: Row, published: Row) -> str:
    """Samples: one table a set, ours, peers, what was published."""
    digits = dict.fromkeys(("xgboost", "xgboost_test", "logistic", "shape", "trend"), 3)
    digits |= {"closest_record": 3, "nearest_ratio": 3, "auroc": 3, "utility": 3}
    digits |= {"fit_seconds": 0, "sample_seconds": 1}
    header = ["method", "seeds", "XGBoost", "test rows", "logistic", "shape", "trend"]
    header += ["closest record", "nearest", "AUROC", "of real", "training, s", "sampling, s"]
    parts = ["# Samples of mixed tables", "Mean ± standard deviation over seeds.", MEANINGS]
    for dataset in dict.fromkeys(row["dataset"] for row in content["rows"]):
        rows = [row for row in content["rows"] if row["dataset"] == dataset]
        n = rows[0]["n_train"]
        body = []
        for (method,), of_method in group(rows, "method").items():
            few = of_method[0]["n_given"]
            said = NAMES[str(method)] + (f", {few:,} rows" if few < n else "")
            body.append(
                [said, str(len(of_method)), *(cell(of_method, k, d) for k, d in digits.items())]
            )
        body += [
            [f"{row['method']}, published", "5", *(cell([row], k, d) for k, d in digits.items())]
            for row in published["rows"]
            if row["dataset"] == dataset
        ]
        parts += [
            f"## {dataset}: {n:,} training rows",
            markdown_table(header, body),
            noise_of_samples(rows),
        ]
    return "\n\n".join([*parts, f"Published: {published['source']}."])


def noise_of_samples(rows: list[Row]) -> str:
    """Shape and trend beside those of training rows drawn again."""
    ours = [row for row in rows if row["method"] == "selfnorm"] or rows[:1]
    whose = "ours" if ours[0]["method"] == "selfnorm" else NAMES[ours[0]["method"]]
    names = {"shape": "shape", "trend": "trend"}
    names |= {"trend_same_bins": "trend in bins of the training rows"}
    said = [
        f"{name} {cell(ours, key, 4)} ({statistics.fmean(r[f'bootstrap_{key}'] for r in ours):.4f} "
        f"± {statistics.fmean(r[f'bootstrap_{key}_sd'] for r in ours):.4f})"
        for key, name in names.items()
    ]
    text = (
        f"How much of shape and trend is chance? Those of {whose}, and in brackets those of "
        f"training rows resampled with replacement: {'; '.join(said)}."
    )
    halves = [row for row in ours if "fresh_trend" in row]
    if halves:
        lost = {
            key: [row[f"fresh_{key}"] - row[f"half_bootstrap_{key}"] for row in halves]
            for key in names
        }
        said = [f"{names[key]} {mean_and_sd(lost[key], 4)}" for key in names]
        text += (
            " One half of the real rows against the other, minus the same half resampled: "
            f"{'; '.join(said)}."
        )
    return text


def gaps(content: Row, _published: Row) -> str:
    """Log-likelihood after training on gaps, and what imputing first loses."""
    body = []
    for (dataset, share), rows in group(content["rows"], "dataset", "share").items():
        by = {
            method: {row["seed"]: row["test_log_likelihood"] for row in of_method}
            for (method,), of_method in group(rows, "method").items()
        }
        ours = by.pop("selfnorm", {})
        line = [str(dataset), f"{share:.0%}", mean_and_sd(list(ours.values()))]
        for method in ("mean_mode", "iterative"):
            lost = [by[method][s] - v for s, v in ours.items() if s in by.get(method, {})]
            line.append(mean_and_sd(lost))
        body.append([*line, str(len(ours))])
    header = ["set", "removed", "trained on gaps", "mean, mode first", "IterativeImputer first"]
    return "\n\n".join(
        [
            "# Training with gaps",
            "Log-likelihood of complete test rows (nats per row) after training on tables with "
            "gaps. *First*: what is lost or gained by imputing the gaps first and training on the "
            "filled table, paired. Mean ± standard deviation over splits.",
            markdown_table([*header, "splits"], body),
        ]
    )


def imputation(content: Row, _published: Row) -> str:
    """Scores of draws."""
    body = []
    for (dataset,), rows in group(content["rows"], "dataset").items():
        for (method,), of_method in group(rows, "method").items():
            size = f"{of_method[0]['n_rows']:,}"
            line = [cell(of_method, key) for key in ("crps", "log_loss", "coverage")]
            spent = statistics.fmean(
                r["impute_seconds"] + r.get("fit_seconds", 0) for r in of_method
            )
            body.append([str(dataset), size, NAMES[str(method)], *line, f"{spent:,.0f}"])
    draws = content["rows"][0]["n_draws"]
    return "\n\n".join(
        [
            "# Imputation",
            f"30 % of the cells are removed at random and drawn {draws} times. CRPS of numbers, in "
            "standard deviations of their column, and log-loss of categories: means over columns, "
            "lower is better. Coverage: share of true values of continuous columns within central "
            "90 % intervals.",
            markdown_table(
                ["set", "rows", "method", "CRPS", "log-loss", "coverage", "seconds"], body
            ),
        ]
    )


def explanation(content: Row, _published: Row) -> str:
    """How often the replaced cell is the first named."""
    sets = list(dict.fromkeys(row["dataset"] for row in content["rows"]))
    body = []
    for (method,), of_method in group(content["rows"], "method").items():
        by = {row["dataset"]: row for row in of_method}
        shares = [cell([by[s]], "first") if s in by else "–" for s in sets]
        n = sum(row["n_rows"] for row in of_method)
        first = sum(row["first"] * row["n_rows"] for row in of_method) / n
        spent = 1e3 * sum(row["explain_seconds"] for row in of_method) / n
        body.append([NAMES[str(method)], *shares, f"{first:.3f}", f"{spent:.2f}"])
    widths = {row["dataset"]: row["n_columns"] for row in content["rows"]}
    header = ["method", *(f"{s} ({widths[s]} columns)" for s in sets), "all", "ms a row"]
    return "\n\n".join(
        [
            "# Which cell is wrong?",
            "One cell of each row is replaced by a different value of its column. Share of rows in "
            "which that column is named first.",
            markdown_table(header, body),
        ]
    )


PAGES: dict[str, Callable[[Row, Row], str]] = {
    "generation": generation,
    "gaps": gaps,
    "imputation": imputation,
    "explanation": explanation,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("results/tables"))
    args = parser.parse_args()
    published = json.loads((args.results / "published.json").read_text())
    for name, page in PAGES.items():
        path = args.results / f"{name}.json"
        if path.exists():
            content = json.loads(path.read_text())
            path.with_suffix(".md").write_text(page(content, published) + "\n")
            print(path.with_suffix(".md"))


if __name__ == "__main__":
    main()
