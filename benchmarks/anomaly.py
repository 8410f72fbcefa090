"""Anomaly detection on the tables of ADBench, OddBench and others, against PyOD's detectors.

    python benchmarks/anomaly.py --data DIR/adbench DIR/tabular --odd DIR/oddbench --jobs 8

Two settings for tables that hold all rows. ``all``: fitted to all rows, anomalies among them,
without labels, and judged on the same rows. ``normal``: fitted to a random half of the normal rows,
judged on the other half and all anomalies. Of a larger table at most 5,000 rows and 200,000 cells
(but 2,000 rows at least) are drawn at random, with the share of anomalies that it has (but twenty
of them at least). Tables of OddBench come as normal rows and rows to judge. By every second of
them, sorted by name and beginning with the first, the views of ours were chosen (``choosing``); the
others report (``odd``). Every detector has its default settings; others get standardised columns,
ours the table as it is. ``MSD`` is the mean squared distance to five neighbours.

Rows are written as they come; a second call adds what is missing. PyOD: ``pip install pyod numba``.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import kstest, kstwobign, rankdata, studentized_range
from sklearn.metrics import average_precision_score, roc_auc_score
from sklearn.neighbors import NearestNeighbors
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
MODELS = (OURS, *PEERS, "MSD")
SETTINGS = {
    "all": "fitted to all rows, anomalies among them",
    "normal": "fitted to half of the normal rows",
    "odd": "tables of OddBench that chose nothing, fitted to normal rows",
    "choosing": "tables of OddBench that chose the views, fitted to normal rows",
}
FIGURES = {"auroc": "AUROC", "average_precision": "average precision"}
NEIGHBOURS = 5
PROMISES = ("below_0.1", "false_alarms_0.1", "fdp_0.1", "power_0.1", "fdp_0.2", "power_0.2")
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
    if setting in ("odd", "choosing"):
        with np.load(file, allow_pickle=True) as content:
            train, test = (content[name].astype(np.float64) for name in ("train", "test"))
            return train, test, content["labels"].astype(int)
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


def ours(
    train: np.ndarray, test: np.ndarray, labels: np.ndarray, job: Row
) -> tuple[np.ndarray, Row]:
    """The detector with its defaults, and what one fit tells beside its scores."""
    from selfnorm import EnergyDensity
    from selfnorm.tables import OutlierDetector

    limits = {"max_steps": job["max_steps"], "max_time": job["max_time"]}
    density = EnergyDensity(random_state=job["seed"], device=job["device"], **limits)
    training = "unlabelled" if test is train else "normal"
    detector = OutlierDetector(density, training=training).fit(train)
    fitted = detector.density_
    views = detector.views_ if test is train else detector.views(test)
    facts = {"steps": fitted.n_iter_, "method": fitted.method_, "device": job["device"]}
    if training == "normal":
        facts |= kept_promises(detector, test, labels)
    names = [name.replace(" ", "_") for name in detector.view_names_]
    return scores_of(detector, train, test), facts | {
        "views": dict(zip(names, views.T, strict=True))
    }


def kept_promises(detector: Any, test: np.ndarray, labels: np.ndarray) -> Row:
    """Whether p-values of normal rows are uniform, and what discoveries come to.

    Of ``m`` p-values by ``n`` rows of calibration, ``sqrt(n m / (n + m))`` times the distance of
    Kolmogorov and Smirnov has their limit (``ks``); of a tenth of ``n`` nearly ``sqrt(m)`` times
    (``ks_few``, the plain test of uniformity).
    """
    p = detector.p_values(test)
    normal, n = p[labels == 0], len(detector.decision_scores_)
    m = len(normal)
    few = normal[np.random.default_rng(0).permutation(m)[: max(20, n // 10)]]
    distance = kstest(normal, "uniform").statistic
    facts = {"ks": kstwobign.sf(distance * math.sqrt(n * m / (n + m)))}
    facts |= {"ks_few": kstest(few, "uniform").pvalue, "below_0.1": (normal <= 0.1).mean()}
    facts["false_alarms_0.1"] = detector.predict(test[labels == 0]).mean()
    for fdr in (0.1, 0.2):
        rows = detector.discoveries(test, fdr)
        facts[f"fdp_{fdr}"] = (labels[rows] == 0).mean() if len(rows) else 0.0
        facts[f"power_{fdr}"] = labels[rows].sum() / labels.sum()
    return {name: round(float(value), 4) for name, value in facts.items()}


def scores_of(detector: Any, train: np.ndarray, test: np.ndarray) -> np.ndarray:
    """Of the rows it was fitted to its own scores: a row is not its own neighbour there."""
    return detector.decision_scores_ if test is train else detector.decision_function(test)


def theirs(model: str, train: np.ndarray, test: np.ndarray, seed: int) -> np.ndarray:
    scaler = StandardScaler().fit(train)
    scaled = scaler.transform(train)
    if model == "MSD":
        tree = NearestNeighbors(n_neighbors=NEIGHBOURS).fit(scaled)
        asked = None if test is train else scaler.transform(test)  # a row is not its own neighbour
        return np.square(tree.kneighbors(asked)[0]).mean(1)
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
        scores, facts = ours(train, test, labels, job)
    else:
        scores = theirs(job["model"], train, test, job["seed"])
    took = clock(1)
    scored = {"auroc": roc_auc_score(labels, scores)}
    for name, view in facts.pop("views", {}).items():
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


def means(rows: list[Row], setting: str, figure: str = "auroc") -> dict[str, dict[str, float]]:
    """Mean figure over the draws that ours has, or over all of a table that it has not reached."""
    of_setting = [row for row in rows if row["setting"] == setting]
    drawn = {(row["dataset"], row["seed"]) for row in of_setting if row["model"] == OURS}
    reached = {name for name, _ in drawn}
    values: dict[str, dict[str, list[float]]] = {}
    for row in of_setting:
        if (row["dataset"], row["seed"]) in drawn or row["dataset"] not in reached:
            of = values.setdefault(row["dataset"], {})
            of.setdefault(row["model"], []).append(row[figure])
    return {
        name: {m: statistics.fmean(of[m]) for m in MODELS if m in of} for name, of in values.items()
    }


def standing(rows: list[Row], setting: str) -> dict[str, dict[str, float]]:
    """Mean figures and mean rank by AUROC of every detector, on the tables that all of them have.

    ``critical``: the difference of mean ranks beyond which two differ (Nemenyi, 5 %).
    """
    of_figures = {figure: means(rows, setting, figure) for figure in FIGURES}
    complete = [name for name, of in of_figures["auroc"].items() if len(of) == len(MODELS)]
    if not complete:
        return {}
    values = {
        figure: np.array([[of[name][m] for m in MODELS] for name in complete])
        for figure, of in of_figures.items()
    }
    ranks = rankdata(-values["auroc"].round(4), axis=1).mean(0)
    n, k = len(complete), len(MODELS)
    critical = studentized_range.ppf(0.95, k, np.inf) * math.sqrt(k * (k + 1) / (12 * n))
    return {
        m: {figure: of[:, i].mean() for figure, of in values.items()}
        | {"rank": ranks[i], "critical": critical, "tables": n}
        for i, m in enumerate(MODELS)
    }


def promises(rows: list[Row]) -> dict[str, Row]:
    """What p-values and discoveries came to, over the tables of a setting."""
    out = {}
    for setting in SETTINGS:
        of = [row for row in rows if row["setting"] == setting and "ks" in row]
        if of:
            mean = {k: statistics.fmean(row[k] for row in of) for k in of[0] if k in PROMISES}
            uniform = {k: sum(row[k] > 0.01 for row in of) for k in ("ks", "ks_few")}
            out[setting] = {"tables": len(of), **{f"uniform_{k}": v for k, v in uniform.items()}}
            out[setting] |= mean
    return out


def plot(rows: list[Row], path: Path) -> None:
    """Mean ranks of a critical-difference diagram: bars join what cannot be told apart."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    reached = {s: of for s in SETTINGS if (of := standing(rows, s))}
    if not reached:
        return
    figure = Figure(figsize=(7, 1.9 * len(reached)), layout="constrained")
    for axes, (setting, of) in zip(
        np.atleast_1d(figure.subplots(len(reached), 1)), reached.items(), strict=True
    ):
        order = sorted(of, key=lambda m: of[m]["rank"])
        for i, m in enumerate(order):
            rank = of[m]["rank"]
            axes.plot(rank, 0, "o", color="C3" if m == OURS else "C0")
            axes.text(rank, 0.25 + 0.35 * (i % 2), m, ha="center", fontsize=8)
            alike = [o for o in order if 0 < of[o]["rank"] - rank < of[m]["critical"]]
            if alike:
                axes.plot([rank, of[alike[-1]]["rank"]], [-0.15 - 0.12 * i] * 2, color="0.4", lw=2)
        axes.set(ylim=(-1.2, 1), yticks=[], title=SETTINGS[setting], xlabel="mean rank by AUROC")
    figure.savefig(path, metadata={"Date": None})


def page(rows: list[Row]) -> str:
    """Every table, and the means, in Markdown."""
    draws = len({row["seed"] for row in rows if row["model"] == OURS}) or 1
    sections = [f"# Anomaly detection: mean of {draws} draw{'s' * (draws > 1)}"]
    for (setting, words), figure in itertools.product(SETTINGS.items(), FIGURES):
        by_table, of = means(rows, setting, figure), standing(rows, setting)
        if not by_table or (figure != "auroc" and setting in ("all", "normal")):
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
            body.append([f"mean of {n}", "", "", "", *(f"{of[m][figure]:.3f}" for m in MODELS)])
            if figure == "auroc":
                body.append(["mean rank", "", "", "", *(f"{of[m]['rank']:.2f}" for m in MODELS)])
        header = ["table", "rows fitted", "columns", "anomalies", *MODELS]
        title = f"## {FIGURES[figure]}: {words}"
        sections += [title, markdown_table(header, body)]
    return "\n\n".join(sections) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", nargs="+", type=Path, default=[], help="folders of .npz files")
    parser.add_argument("--odd", type=Path, help="folder of the tables of OddBench")
    parser.add_argument("--out", type=Path, default=Path("results/anomaly"))
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS))
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--sets", nargs="+", help="tables, by default all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--jobs", type=int, default=1, help="processes, of one thread each")
    parser.add_argument("--longest-first", action="store_true")
    parser.add_argument("--shortest-first", action="store_true", help="where time is short")
    parser.add_argument("--device", default="cpu", help="where ours is trained")
    parser.add_argument("--max-steps", type=int, help="of ours, for a quick look")
    parser.add_argument("--max-time", type=float, help="seconds a fit of ours, where short of time")
    args = parser.parse_args()

    path = args.out / "anomaly.json"
    rows = {tuple(row[k] for k in KEYS): row for row in rows_in(path)}
    tables = dict.fromkeys(("all", "normal"), tables_in(args.data))
    odd = sorted(args.odd.glob("*.npz")) if args.odd else []
    tables |= {s: {f.stem: f for f in odd[k::2]} for k, s in enumerate(("choosing", "odd"))}
    common = {"device": args.device, "max_steps": args.max_steps, "max_time": args.max_time}
    jobs = [
        {
            "setting": setting,
            "dataset": name,
            "model": model,
            "seed": seed,
            "file": str(file),
        }
        for seed in args.seeds
        for setting in args.settings
        for name, file in tables[setting].items()
        for model in args.models
        if not args.sets or name in args.sets
    ]
    jobs = [job | common for job in jobs if tuple(job[k] for k in KEYS) not in rows]
    if args.longest_first:  # so that the last to end is short
        jobs.sort(key=lambda job: -os.path.getsize(job["file"]))
    if args.shortest_first:
        jobs.sort(key=lambda job: os.path.getsize(job["file"]))
    made_at = {"commit": commit()}

    def save() -> None:
        of_settings = {s: standing([*rows.values()], s) for s in SETTINGS}
        kept = promises([*rows.values()])
        write(path, [*rows.values()], args.device, standing=of_settings, promises=kept)
        path.with_suffix(".md").write_text(page([*rows.values()]))

    for row in filter(None, in_processes(attempt, [(job,) for job in jobs], args.jobs)):
        rows[tuple(row[k] for k in KEYS)] = row | made_at
        print(*(f"{k}={row[k]}" for k in (*KEYS, "auroc", "seconds")), flush=True)
        save()
    save()
    plot([*rows.values()], path.with_name("ranks.svg"))
    print(path.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
