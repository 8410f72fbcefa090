"""Anomaly detection on the tables of ADBench and others: AUROC and rank against PyOD's detectors.

    python benchmarks/anomaly.py --data DIR/adbench DIR/tabular --jobs 8 --out results/anomaly

Two settings. ``all``: fitted to all rows, anomalies among them, without labels, and judged on the
same rows. ``normal``: fitted to a random half of the normal rows, judged on the other half and all
anomalies. Of a larger table at most 5,000 rows and 200,000 cells (but 2,000 rows at least) are
drawn at random, with the share of anomalies that it has (but twenty of them at least). Every
detector has its default settings; PyOD's get standardised columns, ours the table as it is.

Rows are written as they come; a second call adds what is missing. PyOD: ``pip install pyod numba``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import rankdata
from sklearn.metrics import average_precision_score, roc_auc_score
from sklearn.preprocessing import StandardScaler

from measuring import Row, Stopwatch, commit, in_processes, peer, rows_in, write
from selfnorm.paper.report import markdown_table

OURS = "selfnorm"
PEERS = {
    "IForest": "pyod.models.iforest",
    "KNN": "pyod.models.knn",
    "LOF": "pyod.models.lof",
    "ECOD": "pyod.models.ecod",
    "COPOD": "pyod.models.copod",
}
MODELS = (OURS, *PEERS)
SETTINGS = {
    "all": "fitted to all rows, anomalies among them",
    "normal": "fitted to half of the normal rows",
}
VIEWS = ("one_of_4", "one_of_8", "neighbours", "normal_scores", "density")  # ours is their mean
LEFT_OUT = ("california",)  # has no anomalies
MOST_ROWS, MOST_CELLS, FEWEST, ANOMALIES = 5_000, 200_000, 2_000, 20
KEYS = ("setting", "dataset", "model", "seed")


def tables_in(folders: list[Path]) -> dict[str, Path]:
    """Every table of the folders by its name, without the number that ADBench gives it."""
    files = sorted(file for folder in folders for file in folder.glob("*.npz"))
    by_name = {file.stem.split("_", 1)[-1]: file for file in files}
    return {name: file for name, file in by_name.items() if name not in LEFT_OUT}


def split(file: Path, setting: str, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows to fit, rows to judge and the labels of these."""
    rng = np.random.default_rng(seed)
    with np.load(file, allow_pickle=True) as content:
        X, y = content["X"], content["y"].ravel().astype(int)
    n = min(len(y), MOST_ROWS, max(FEWEST, MOST_CELLS // X.shape[1]))
    strange, usual = (rng.permutation(np.flatnonzero(y == label)) for label in (1, 0))
    strange = strange[: max(ANOMALIES, round(n * y.mean()))] if n < len(y) else strange
    rows = rng.permutation(np.concatenate([strange, usual[: n - len(strange)]]))
    X, y = X[rows].astype(np.float64), y[rows]
    if setting == "all":
        return X, X, y
    inliers = np.flatnonzero(y == 0)
    half = len(inliers) // 2
    test = np.concatenate([inliers[half:], np.flatnonzero(y == 1)])
    return X[inliers[:half]], X[test], y[test]


def ours(train: np.ndarray, test: np.ndarray, job: Row) -> tuple[np.ndarray, Row]:
    """The detector with its defaults, and what one fit tells beside its scores."""
    from selfnorm import EnergyDensity
    from selfnorm.tables import OutlierDetector

    limits = {"max_steps": job["max_steps"], "max_time": job["max_time"]}
    density = EnergyDensity(random_state=job["seed"], device=job["device"], **limits)
    detector = OutlierDetector(density).fit(train)
    fitted = detector.density_
    views = detector.views_ if test is train else detector.views(test)
    facts = {"steps": fitted.n_iter_, "method": fitted.method_, "device": job["device"]}
    return scores_of(detector, train, test), facts | {"views": views}


def scores_of(detector: Any, train: np.ndarray, test: np.ndarray) -> np.ndarray:
    """Of the rows it was fitted to its own scores: a row is not its own neighbour there."""
    return detector.decision_scores_ if test is train else detector.decision_function(test)


def theirs(model: str, train: np.ndarray, test: np.ndarray, seed: int) -> np.ndarray:
    scaler = StandardScaler().fit(train)
    scaled = scaler.transform(train)
    kind = getattr(peer(PEERS[model]), model)
    detector = kind(random_state=seed) if model == "IForest" else kind()
    return scores_of(
        detector.fit(scaled), scaled, scaled if test is train else scaler.transform(test)
    )


def run_one(job: Row) -> Row:
    """One detector on one table."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    keys = {key: job[key] for key in KEYS}
    train, test, labels = split(Path(job["file"]), job["setting"], job["seed"])
    clock = Stopwatch()
    facts: Row = {}
    if job["model"] == OURS:
        scores, facts = ours(train, test, job)
    else:
        scores = theirs(job["model"], train, test, job["seed"])
    took = clock(1)
    scored = {"auroc": roc_auc_score(labels, scores)}
    for name, view in zip(VIEWS, facts.pop("views").T, strict=True) if "views" in facts else ():
        scored[f"auroc_{name}"] = roc_auc_score(labels, view)
    scored["average_precision"] = average_precision_score(labels, scores)
    sizes = {"n_train": len(train), "n_test": len(test), "columns": train.shape[1]}
    sizes["anomalies"] = int(labels.sum())
    rounded = {k: round(float(v), 5) for k, v in scored.items()}
    return keys | rounded | sizes | took | facts


def attempt(job: Row) -> Row | None:
    """The same; a detector that fails is told, and ends nothing."""
    try:
        return run_one(job)
    except (RuntimeError, ValueError, MemoryError, ArithmeticError) as error:
        print(f"failed: {type(error).__name__}: {error}"[:300], flush=True)
        return None


def means(rows: list[Row], setting: str) -> dict[str, dict[str, float]]:
    """Mean AUROC over the draws that ours has, or over all of a table that it has not reached."""
    of_setting = [row for row in rows if row["setting"] == setting]
    drawn = {(row["dataset"], row["seed"]) for row in of_setting if row["model"] == OURS}
    reached = {name for name, _ in drawn}
    values: dict[str, dict[str, list[float]]] = {}
    for row in of_setting:
        if (row["dataset"], row["seed"]) in drawn or row["dataset"] not in reached:
            of = values.setdefault(row["dataset"], {})
            of.setdefault(row["model"], []).append(row["auroc"])
    return {
        name: {m: statistics.fmean(of[m]) for m in MODELS if m in of} for name, of in values.items()
    }


def standing(rows: list[Row], setting: str) -> dict[str, dict[str, float]]:
    """Mean AUROC and mean rank of every detector on the tables that all of them have."""
    complete = [of for of in means(rows, setting).values() if len(of) == len(MODELS)]
    if not complete:
        return {}
    values = np.array([[of[m] for m in MODELS] for of in complete])
    ranks = rankdata(-values.round(4), axis=1)
    return {
        m: {"auroc": values[:, i].mean(), "rank": ranks[:, i].mean(), "tables": len(complete)}
        for i, m in enumerate(MODELS)
    }


def page(rows: list[Row]) -> str:
    """Every table, and the means, in Markdown."""
    draws = len({row["seed"] for row in rows if row["model"] == OURS}) or 1
    sections = [f"# Anomaly detection: AUROC, mean of {draws} draw{'s' * (draws > 1)}"]
    for setting, words in SETTINGS.items():
        by_table, of = means(rows, setting), standing(rows, setting)
        if not by_table:
            continue
        body = []
        for name in sorted(by_table, key=str.lower):
            first = next(r for r in rows if (r["setting"], r["dataset"]) == (setting, name))
            best = max(by_table[name].values())
            cells = [
                (f"**{v:.3f}**" if v == best else f"{v:.3f}") if v is not None else "–"
                for v in (by_table[name].get(m) for m in MODELS)
            ]
            size = [f"{first['n_train']:,}", str(first["columns"]), str(first["anomalies"])]
            body.append([name, *size, *cells])
        if of:
            n = int(of[OURS]["tables"])
            body.append([f"mean of {n}", "", "", "", *(f"{of[m]['auroc']:.3f}" for m in MODELS)])
            body.append(["mean rank", "", "", "", *(f"{of[m]['rank']:.2f}" for m in MODELS)])
        header = ["table", "rows fitted", "columns", "anomalies", *MODELS]
        sections += [f"## {words[0].upper()}{words[1:]}", markdown_table(header, body)]
    return "\n\n".join(sections) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", nargs="+", type=Path, default=[], help="folders of .npz files")
    parser.add_argument("--out", type=Path, default=Path("results/anomaly"))
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS))
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--sets", nargs="+", help="tables, by default all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--jobs", type=int, default=1, help="processes, of one thread each")
    parser.add_argument("--longest-first", action="store_true")
    parser.add_argument("--device", default="cpu", help="where ours is trained")
    parser.add_argument("--max-steps", type=int, help="of ours, for a quick look")
    parser.add_argument("--max-time", type=float, help="seconds a fit of ours, where short of time")
    args = parser.parse_args()

    path = args.out / "anomaly.json"
    rows = {tuple(row[k] for k in KEYS): row for row in rows_in(path)}
    tables = tables_in(args.data)
    common = {"device": args.device, "max_steps": args.max_steps, "max_time": args.max_time}
    jobs = [
        {
            "setting": setting,
            "dataset": name,
            "model": model,
            "seed": seed,
            "file": str(tables[name]),
        }
        for seed in args.seeds
        for name in args.sets or tables
        for setting in args.settings
        for model in args.models
    ]
    jobs = [job | common for job in jobs if tuple(job[k] for k in KEYS) not in rows]
    if args.longest_first:  # so that the last to end is short
        jobs.sort(key=lambda job: -os.path.getsize(job["file"]))
    made_at = {"commit": commit()}

    def save() -> None:
        of_settings = {s: standing([*rows.values()], s) for s in SETTINGS}
        write(path, [*rows.values()], args.device, standing=of_settings)
        path.with_suffix(".md").write_text(page([*rows.values()]))

    for row in filter(None, in_processes(attempt, [(job,) for job in jobs], args.jobs)):
        rows[tuple(row[k] for k in KEYS)] = row | made_at
        print(*(f"{k}={row[k]}" for k in (*KEYS, "auroc", "seconds")), flush=True)
        save()
    save()
    print(path.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
