"""Join result files of ``benchmarks/density.py`` into one table with paired differences.

    python benchmarks/density_table.py --out results/density FILE.json [FILE.json ...]

Beside each ``FILE.json`` lies ``FILE.npz`` with the log-density of every test row. Of a run found
in several files the last counts. selfnorm is shown with the library's defaults, other methods with
the configuration of the best mean validation score; mean and standard deviation are over the seeds.
The difference to a flow is paired row by row (each method's log-density averaged over its seeds);
its standard error is that of the mean over test rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from density_runs import FLOWS, name_of
from measuring import Row, mean_and_sd
from selfnorm.paper.report import markdown_table

LABELS = {"selfnorm": "selfnorm", "aem": "AEM", "nsf": "NSF", "maf": "MAF"}
LABELS |= {"gmm": "GMM", "kde": "KDE"}
TRAINED = ("selfnorm", "aem", *FLOWS)
SPARED = 5  # rows a method likes least, left out in a second comparison
COLUMNS = {"california": 8, "magic.gamma": 10, "mammography": 6}
COLUMNS |= {"power": 6, "shuttle": 9, "bsds300": 63}


def read(paths: list[Path]) -> tuple[list[Row], dict[str, np.ndarray], dict[str, Any]]:
    rows: dict[str, Row] = {}
    arrays: dict[str, np.ndarray] = {}
    head: dict[str, Any] = {}
    for path in paths:
        content = json.loads(path.read_text())
        beside = {"concurrent_runs": content.get("concurrent_runs")}
        beside |= {k: content[k] for k in ("commit", "recorded_in") if k in content}
        rows |= {name_of(r): beside | r for r in content["rows"] if "error" not in r}
        head.setdefault("versions", content["versions"])
        head.setdefault("hardware", content["hardware"])
        command = content["command"]
        head.setdefault("command", []).extend([command] if isinstance(command, str) else command)
        if path.with_suffix(".npz").exists():
            with np.load(path.with_suffix(".npz")) as file:
                arrays |= {name: file[name] for name in file}
    of = (row.get("commit", row.get("recorded_in")) for row in rows.values())
    head["commit"] = ", ".join(sorted({commit for commit in of if commit}))
    return list(rows.values()), arrays, head


def by_configuration(rows: list[Row], dataset: str, method: str) -> dict[str, list[Row]]:
    out: dict[str, list[Row]] = {}
    for row in rows:
        if (row["dataset"], row["method"]) == (dataset, method):
            out.setdefault(row["config"], []).append(row)
    return out


def chosen(rows: list[Row], dataset: str, method: str) -> list[Row]:
    """Rows of the defaults (selfnorm), or of the best mean validation score."""
    by_config = by_configuration(rows, dataset, method)
    if not by_config:
        return []
    if method == "selfnorm":
        return by_config.get("default", [])
    return max(by_config.values(), key=lambda group: statistics.fmean(r["val"] for r in group))


def flow_configurations(rows: list[Row], dataset: str) -> list[list[str]]:
    """Every configuration of a flow that was trained, the one of the other tables first."""
    out = []
    for method in ("aem", *FLOWS):
        groups = by_configuration(rows, dataset, method)
        shown = [r["config"] for r in chosen(rows, dataset, method)]
        for config, group in sorted(groups.items(), key=lambda item: item[0] not in shown):
            steps = max(r["n_steps"] for r in group)
            ends = [r["best_step"] for r in group]
            span = f"{min(ends):,}" + (f" to {max(ends):,}" if max(ends) > min(ends) else "")
            figures = [f"{span} of {steps:,}", cell(group, "val"), cell(group, "test")]
            out.append([dataset, LABELS[method], config, *figures])
    return out


def cell(group: list[Row], key: str, digits: int = 3) -> str:
    values = [r[key] for r in group if r.get(key) is not None]
    return mean_and_sd(values, digits) + (f" ({len(values)})" if values else "")


def extreme(group: list[Row], key: str, digits: int = 4) -> str:
    values = [abs(r[key]) for r in group if r.get(key) is not None]
    return f"{max(values):.{digits}f}" if values else "–"


def log_density(group: list[Row], arrays: dict[str, np.ndarray]) -> np.ndarray | None:
    per_seed = [arrays[n].astype(np.float64) for n in map(name_of, group) if n in arrays]
    return np.mean(per_seed, 0) if per_seed else None


def compare(dataset: str, groups: dict[str, list[Row]], arrays: dict[str, np.ndarray]) -> list[Row]:
    """selfnorm minus every other method, paired over the test rows."""
    mine = log_density(groups["selfnorm"], arrays)
    if mine is None:
        return []
    out = []
    for method in LABELS:
        theirs = log_density(groups[method], arrays)
        if method == "selfnorm" or theirs is None:
            continue
        difference = mine - theirs
        se = float(difference.std(ddof=1) / len(difference) ** 0.5)
        kept = np.argsort(theirs)[SPARED:]
        out.append(
            {
                "dataset": dataset,
                "against": method,
                "difference": float(difference.mean()),
                "se": se,
                "difference_without_their_worst": float(difference[kept].mean()),
            }
        )
    return out


def prepare(group: list[Row]) -> list[Row]:
    """Derived figures: gap, disagreement with quadrature in standard errors, times per row."""
    out = []
    for row in group:
        extra: Row = {"train_seconds": row["seconds"]}
        if "upper" in row:
            # runs recorded before the lower bound had a b of its own hold the learned one's
            extra["learned_gap"] = row["upper"] - row.get("learned_lower", row["lower"])
            if "learned_lower" in row:
                extra["gap"] = row["upper"] - row["lower"]
                extra["off"] = row["is_minus_quadrature"]
                extra["in_se"] = row["is_minus_quadrature"] / row["is_minus_quadrature_se"]
        if "log_prob_seconds" in row:
            extra["log_prob_us"] = 1e6 * row["log_prob_seconds"] / row["n_test"]
        if "n_sampled" in row:
            extra["sample_us"] = 1e6 * row["sampling_seconds"] / row["n_sampled"]
        out.append(row | extra)
    return out


def normalisers(dataset: str, ours: list[Row], theirs: list[Row]) -> list[list[str]]:
    """One pass by the learned normaliser beside samples, on one set.

    The samples that are enough are the fewest measured whose error is that of the learned one.
    """
    of_b = [way for row in ours for way in row.get("log_prob_by", [])]
    sampled = [way for row in theirs for way in row.get("log_prob_by", []) if not way["stratified"]]
    if not of_b or not sampled:
        return []

    def at(ways: list[Row], key: str, **keys: Any) -> float:
        return statistics.fmean(w[key] for w in ways if all(w[k] == v for k, v in keys.items()))

    counts = sorted({w["n_samples"] for w in sampled})
    error, one_pass = at(of_b, "rms"), at(of_b, "us_a_row")
    beside = [row["one_pass_us"] for row in theirs if "one_pass_us" in row]
    if beside:  # measured in the same moment
        one_pass = statistics.fmean(beside)
    enough = next((n for n in counts if at(sampled, "rms", n_samples=n) <= error), None)
    n = enough or counts[-1]
    took, more = at(sampled, "us_a_row", n_samples=n), "" if enough else "more than "
    errors = [f"{at(sampled, 'rms', n_samples=k):.3f}" for k in (counts[0], counts[-1])]
    above = at(sampled, "mean", n_samples=counts[-1])
    cells = [f"{error:.3f}", f"{one_pass:.0f}", *errors, f"{above:+.3f}"]
    return [[dataset, *cells, f"{more}{n:,}", f"{took:,.0f}", f"{more}{took / one_pass:,.0f}"]]


def markdown(tables: dict[str, Any], methods: list[str], note: str) -> str:
    """Every table that has rows, of the methods that were run."""
    compared = [
        [
            c["dataset"],
            LABELS[c["against"]],
            f"{c['difference']:+.3f} ± {c['se']:.3f}",
            f"{c['difference_without_their_worst']:+.3f}",
        ]
        for c in tables["comparisons"]
        if c["against"] in TRAINED
    ]
    shown = [LABELS[m] for m in methods]
    trained = [LABELS[m] for m in methods if m in TRAINED]
    parts = [
        (
            "# Density estimation: test log-likelihood (nats per row)",
            " ".join(["Mean ± sd over the seeds (number of runs). `–`: not run.", note]).strip(),
            ["set", "d", "rows", *shown],
            tables["test"],
        ),
        (
            "## selfnorm minus AEM and flows, paired over test rows (± standard error)",
            "",
            ["set", "against", "difference", f"without its {SPARED} worst rows"],
            compared,
        ),
        (
            "## AEM and flows: every configuration trained",
            "The first of each, by its validation score, is that of the other tables. "
            "`asinh`: the same flow of squashed columns (`benchmarks/flow_tails.py`). AEM: "
            "`benchmarks/aem.py`, normalised by 1,000 samples a factor, validated by 20.",
            ["set", "method", "configuration", "best step", "validation", "test"],
            tables["flows"],
        ),
        (
            "## A normalised `log_prob`: learned b of a chain, samples of an energy machine",
            "Error: root mean square over rows against the exact normaliser, nats. Too high by: "
            "mean error of AEM by 2,000 samples a factor, which miss what an energy has learned "
            "to hide from them. Samples a factor that are as near as the learned b, the time of a "
            "row by them, and how many times that of one pass it is.",
            [
                *("set", "error of b", "µs a row", "AEM, 20 samples", "2,000 samples"),
                *("too high by", "samples for b's error", "µs a row", "times as long"),
            ],
            tables["normalisers"],
        ),
        (
            "## Bounds and conditionals of the chains",
            "Gap: upper minus lower bound, with `b` of the lower one by quadrature (`–`: not "
            "measured) and with the learned `b`. ESS per factor: mean, and mean of the worst "
            "column. "
            "Importance sampling minus quadrature: worst of the runs whose gap by quadrature is "
            "known, in nats and in standard errors. "
            "Integrals: worst error over all conditionals at 100 random test rows, normalised by "
            "quadrature with 8,192 nodes and integrated by another rule.",
            [
                *("set", "gap", "gap, learned b", "ESS", "worst column"),
                *("IS - quadrature", "in s.e.", "integrals"),
            ],
            tables["bounds"],
        ),
        (
            "## Two-sample test: AUROC of boosted trees, held-out rows against samples",
            "0.5: indistinguishable.",
            ["set", *trained],
            tables["auroc"],
        ),
        (
            "## Times: training (s), `log_prob` (µs a row), sampling (µs a row)",
            "Runs shared the GPU with others: compare within a row, and roughly.",
            ["set", "method", "training", "log_prob", "sampling"],
            tables["times"],
        ),
    ]
    sections = []
    for title, said, header, body in parts:
        if body:
            sections += [title, said, markdown_table(header, body)]
    return "\n\n".join(section for section in sections if section) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path("results/density"))
    parser.add_argument("--note", default="", help="what a reader must know about these runs")
    args = parser.parse_args()
    rows, arrays, head = read(args.files)
    names = ("test", "flows", "normalisers", "bounds", "auroc", "times", "comparisons")
    tables: dict[str, Any] = {name: [] for name in names}
    methods = [m for m in LABELS if any(r["method"] == m for r in rows)]
    for dataset in (name for name in COLUMNS if any(r["dataset"] == name for r in rows)):
        groups = {method: prepare(chosen(rows, dataset, method)) for method in LABELS}
        any_group = next(g for g in groups.values() if g)
        size = [str(COLUMNS[dataset]), f"{any_group[0]['n_train']:,}"]
        tables["test"].append([dataset, *size, *(cell(groups[m], "test") for m in methods)])
        tables["flows"] += flow_configurations(rows, dataset)
        tables["comparisons"] += compare(dataset, groups, arrays)
        ours = groups["selfnorm"]
        trained = {m: groups[m] for m in TRAINED if m in methods}
        tables["auroc"].append([dataset, *(cell(g, "two_sample_auroc") for g in trained.values())])
        for method, group in trained.items():
            figures = [cell(group, k, 1) for k in ("train_seconds", "log_prob_us", "sample_us")]
            tables["times"].append([dataset, LABELS[method], *figures])
        tables["normalisers"] += normalisers(dataset, ours, groups["aem"])
        if ours:
            tables["bounds"].append(
                [
                    dataset,
                    cell(ours, "gap", 4),
                    cell(ours, "learned_gap", 4),
                    cell(ours, "ess"),
                    cell(ours, "ess_worst_column"),
                    extreme(ours, "off"),
                    extreme(ours, "in_se", 1),
                    extreme([r for r in ours if "nodes" in r], "worst_integral_error", 5),
                ]
            )
    args.out.mkdir(parents=True, exist_ok=True)
    content = {"table": "density", "recipe": "default", "note": args.note, **head}
    content |= {"comparisons": tables["comparisons"], "rows": rows}
    (args.out / "density.json").write_text(json.dumps(content, indent=1) + "\n")
    (args.out / "density.md").write_text(markdown(tables, methods, args.note))


if __name__ == "__main__":
    main()
