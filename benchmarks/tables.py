"""Tables of mixed columns: samples, gaps, imputations, reasons, beside other people's methods.

Six parts, each by itself; a second call adds what is missing. Tables travel as ``.npz``, because
the machine that trains need not have pandas, and the peers stand in environments of their own
(``pip install -r benchmarks/peers/NAME.txt``; the judges of samples: ``judges.txt``).

    python benchmarks/tables.py data --data-dir DATA                  # with pandas; once
    python benchmarks/tables.py fit --device cuda                     # samples of EnergyDensity
    OMP_NUM_THREADS=2 python benchmarks/tables.py fit --seeds 0       # the same on two CPU cores
    python benchmarks/tables.py fit --method arfpy --seeds 0          # samples of a peer
    python benchmarks/tables.py judge                                 # what samples are worth
    python benchmarks/tables.py gaps --device cuda                    # fit to gaps or impute first
    python benchmarks/tables.py impute --method miceforest            # draws of removed cells
    python benchmarks/tables.py explain --method shap                 # which cell was replaced?

- *Samples.* Nine tenths train; as many samples as training rows; complete rows are compared.
- *Gaps.* Cells are removed from the training rows at random; the log-likelihood of complete test
  rows after training on the gaps, or on a table imputed first. One schema, that of the whole table.
- *Imputation.* Every method sees the same table with 30 % of its cells removed and draws them
  equally often; the cells of some of its rows are scored.
- *Reasons.* One cell of each of 250 test rows is replaced by another value of its column; is that
  column the first that is named?

Nothing is chosen by these figures: methods run as they come.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import table_judges
import table_peers
from measuring import Results, Row, in_processes, provenance
from table_frames import (
    SETS,
    Frame,
    at_most,
    complete,
    digest,
    like,
    load_frame,
    n_rows,
    random_gaps,
    read_raw,
    remove_cells,
    save_frame,
    shuffled,
    split,
    take,
)

GENERATED = ("magic", "shoppers", "adult")
WITH_GAPS = ("adult", "shoppers", "penguins", "california")
IMPUTED = ("adult", "shoppers", "penguins", "diamonds", "california", "german")
EXPLAINED = ("adult", "shoppers", "diamonds", "california")
SHARES = (0.2, 0.4)
REMOVED = 0.3
N_DRAWS = 19  # the truth is one of 20: 90 % of its ranks are a whole number of them
IMPUTED_ROWS, SCORED_ROWS = 10_000, 2_000
EXPLAINED_ROWS = 250
OURS, ON_CPU = "selfnorm", "selfnorm-cpu"  # fits without a GPU stand beside those on one


# EnergyDensity


def fitted(train: Frame, job: Row, **options: Any) -> tuple[Any, Row]:
    """``EnergyDensity`` with its defaults, and what the fit took."""
    import torch

    from selfnorm import EnergyDensity

    if job["max_steps"]:
        options["max_steps"] = job["max_steps"]
    if job["device"] != "cpu":
        torch.zeros(1, device=job["device"])  # the start of CUDA is no part of a fit
    clock = table_peers.Clock()
    density = EnergyDensity(random_state=job["seed"], device=job["device"], **options).fit(train)
    return density, {"fit_seconds": clock(), "steps": int(density.n_iter_)}


def frames(imputed: Any, given: Frame, n_draws: int) -> list[Frame]:
    """Imputations as a list of frames, whether they come as one or as one below the other."""
    if isinstance(imputed, list | tuple):
        return [like(frame, given) for frame in imputed]
    together = like(imputed, given)
    n = n_rows(given)
    return [take(together, np.arange(k * n, (k + 1) * n)) for k in range(n_draws)]


# Parts: a job is a dictionary; what it returns is added to its row


def table_of(job: Row) -> Frame:
    return load_frame(Path(job["work"]) / "data" / f"{job['dataset']}.npz")


def sample_path(job: Row) -> Path:
    name = f"{job['method']}_{job['dataset']}_{job['seed']}"
    return Path(job["work"]) / "samples" / f"{name}.npz"


def run_fit(job: Row) -> Row:
    """Fit and draw; the samples and the record go to files of their own."""
    train, test = split(table_of(job), job["seed"])
    given = at_most(train, job["rows"], job["seed"])
    if job["method"] in (OURS, ON_CPU):
        density, record_of_fit = fitted(given, job)
        clock = table_peers.Clock()
        samples = like(density.sample(n_rows(train), random_state=job["seed"]), train)
        record_of_fit["sample_seconds"] = clock()
        record_of_fit["test_log_likelihood"] = float(np.mean(density.score_samples(test)))
    else:
        samples, record_of_fit = table_peers.GENERATORS[job["method"]](
            job["dataset"], given, n_rows(train), job["seed"]
        )
    save_frame(sample_path(job), samples)
    record = {"train": digest(train), "n_given": n_rows(given), **record_of_fit}
    made_by = provenance(job["device"])
    content = {"record": record, "made_by": made_by}
    sample_path(job).with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")
    return record


def run_judge(job: Row) -> Row:
    """Judge one file of samples."""
    train, test = split(table_of(job), job["seed"])
    content = json.loads(sample_path(job).with_suffix(".json").read_text())
    if content["record"]["train"] != digest(train):
        sys.exit(f"{sample_path(job)} was drawn for other training rows: run `fit` again")
    samples = like(load_frame(sample_path(job)), train)
    sizes = {"n_train": n_rows(train), "n_test": n_rows(test), "n_samples": n_rows(samples)}
    scores = table_judges.judge(job["dataset"], train, test, samples, job["seed"])
    return {**content["record"], **sizes, **scores, "fitted_by": content["made_by"]}


def run_gaps(job: Row) -> Row:
    """Train on gaps, or on what an imputer makes of them; score complete rows."""
    from selfnorm.columns import Schema

    table = complete(table_of(job))
    schema = Schema.detect(table)
    train, test = split(table, job["seed"])
    train = at_most(train, job["rows"], job["seed"])
    given = remove_cells(train, random_gaps(train, job["share"], job["seed"]))
    clock = table_peers.Clock()
    if job["method"] != OURS:
        impute = table_peers.FIRST_IMPUTE[job["method"]]
        given = like(impute(job["dataset"], given, 1, job["seed"])[0], train)
    seconds = clock()
    density, record = fitted(given, job, schema=schema)
    scores = density.score_samples(test)
    return {
        "test_log_likelihood": float(scores.mean()),
        "se": float(scores.std(ddof=1) / len(scores) ** 0.5),
        "impute_seconds": seconds if job["method"] != OURS else 0.0,
        "n_train": n_rows(train),
        "n_test": len(scores),
        "schema": schema.fingerprint,
        "data": digest(train),
        **record,
    }


def run_impute(job: Row) -> Row:
    """Complete a table 19 times; score what was removed from some of its rows."""
    truth = at_most(table_of(job), job["rows"] or IMPUTED_ROWS, job["seed"])
    gone = random_gaps(truth, REMOVED, job["seed"])
    given = remove_cells(truth, gone)
    scored = shuffled(n_rows(truth), job["seed"])[:SCORED_ROWS]
    clock = table_peers.Clock()
    n_draws = job["n_draws"]
    if job["method"] == OURS:
        density, record = fitted(given, job)
        clock()
        rows_with_gaps = take(given, scored)
        draws = frames(density.impute(rows_with_gaps, n_draws=n_draws), rows_with_gaps, n_draws)
        record["impute_seconds"] = clock()
    else:
        impute = table_peers.IMPUTERS[job["method"]]
        completed = impute(job["dataset"], given, n_draws, job["seed"])
        record = {"impute_seconds": clock()}
        draws = [take(frame, scored) for frame in completed]
    rows = take(truth, scored)
    scores = table_judges.imputation_scores(job["dataset"], rows, gone[scored], draws, job["seed"])
    sizes = {"n_rows": n_rows(truth), "n_scored": len(scored), "data": digest(given)}
    return {**sizes, **record, **scores}


def replaced_cells(train: Frame, rows: Frame, seed: int) -> tuple[Frame, np.ndarray]:
    """Rows with one cell each replaced by a different value of its column, and which one."""
    rng = np.random.default_rng([seed, 6])
    names = list(rows)
    guilty = rng.integers(len(names), size=n_rows(rows))
    out = {name: column.copy() for name, column in rows.items()}
    for i, j in enumerate(guilty):
        column = train[names[j]]
        others = np.flatnonzero(column != rows[names[j]][i])
        out[names[j]][i] = column[rng.choice(others)]
    return out, guilty


def run_explain(job: Row) -> Row:
    """Ask for the strangest column of rows of which one cell is wrong."""
    train, test = split(complete(table_of(job)), job["seed"])
    rows, guilty = replaced_cells(train, at_most(test, EXPLAINED_ROWS, job["seed"]), job["seed"])
    given = at_most(train, job["rows"], job["seed"])
    if job["method"] == OURS:
        density, record = fitted(given, job)
        clock = table_peers.Clock()
        reasons = density.explain(rows)
        record["explain_seconds"] = clock()
        never = np.ones(n_rows(rows))  # a column that the model leaves out is never named
        columns = [np.asarray(reasons[c]) if c in reasons else never for c in rows]
        scores = -np.column_stack(columns).astype(np.float64)
    else:
        explain = table_peers.EXPLAINERS[job["method"]]
        scores, record = explain(job["dataset"], given, rows, job["seed"])
    first, rank = table_judges.guilty_rank(scores, guilty)
    return {
        "first": float(first.mean()),
        "mean_rank": float(rank.mean()),
        "n_rows": n_rows(rows),
        "n_columns": len(rows),
        "n_given": n_rows(given),
        "data": digest(rows),
        **record,
    }


RUNS: dict[str, Callable[[Row], Row]] = {
    "fit": run_fit,
    "judge": run_judge,
    "gaps": run_gaps,
    "impute": run_impute,
    "explain": run_explain,
}
# The file of a part's results, the keys of its rows
FILES = {"judge": "generation", "gaps": "gaps", "impute": "imputation", "explain": "explanation"}
KEYS = dict.fromkeys(RUNS, ("dataset", "method", "seed")) | {
    "gaps": ("dataset", "share", "method", "seed"),
    "impute": ("dataset", "method", "seed", "n_draws"),
}


def planned(args: argparse.Namespace) -> list[Row]:
    """The jobs of a part, seeds outermost: whatever is cut short has whole tables."""
    common: Row = {"work": str(args.work), "device": args.device, "rows": args.rows}
    common |= {"max_steps": args.max_steps, "n_draws": args.draws}
    if args.part == "judge":
        paths = sorted((args.work / "samples").glob("*.npz"))
        jobs = []
        for path in paths:
            method, dataset, seed = path.stem.split("_")
            jobs.append({"method": method, "dataset": dataset, "seed": int(seed)})
        return [
            {**common, **job}
            for job in jobs
            if (not args.method or job["method"] in args.method)
            and (not args.sets or job["dataset"] in args.sets)
            and (not args.seeds or job["seed"] in args.seeds)
        ]
    sets = {"fit": GENERATED, "gaps": WITH_GAPS, "impute": IMPUTED, "explain": EXPLAINED}
    seeds = dict.fromkeys(RUNS, range(1)) | {"fit": range(3), "gaps": range(5)}
    methods = (OURS, *table_peers.FIRST_IMPUTE) if args.part == "gaps" else (OURS,)
    if args.part == "fit" and args.device == "cpu":
        methods = (ON_CPU,)
    return [
        {**common, "seed": seed, "dataset": dataset, "method": method, **more}
        for seed in args.seeds or seeds[args.part]
        for dataset in args.sets or sets[args.part]
        for more in ([{"share": s} for s in SHARES] if args.part == "gaps" else [{}])
        for method in args.method or methods
    ]


def run_part(args: argparse.Namespace) -> None:
    """Run what is missing, one job after another or several at a time."""
    run, keys = RUNS[args.part], KEYS[args.part]
    jobs = planned(args)
    results = None
    if args.part == "fit":
        jobs = [job for job in jobs if not sample_path(job).with_suffix(".json").exists()]
    else:
        path = args.out / f"{FILES[args.part]}.json"
        results = Results(path, provenance(args.device))
        jobs = [job for job in jobs if not results.has({k: job[k] for k in keys})]

    def done(job: Row, values: Row, seconds: float) -> None:
        row = {k: job[k] for k in keys} | values | {"seconds": round(seconds, 1)}
        shown = {k: round(v, 4) for k, v in row.items() if isinstance(v, float)}
        print(*(row[k] for k in keys), shown, flush=True)
        if results is not None:
            others = {"fitted_by": row.pop("fitted_by")} if "fitted_by" in row else {}
            results.add(row, **others)

    print(f"{args.part}: {len(jobs)} runs", flush=True)
    for finished in in_processes(timed, [(run, job) for job in jobs], args.workers):
        done(*finished)


def timed(run: Callable[[Row], Row], job: Row) -> tuple[Row, Row, float]:
    """A job, what it gave and the seconds it took."""
    began = time.perf_counter()
    if job["device"] == "cpu" and "OMP_NUM_THREADS" in os.environ and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    return job, run(job), time.perf_counter() - began


def write_data(args: argparse.Namespace) -> None:
    """Official files to ``.npz``."""
    for name in args.sets or SETS:
        frame = read_raw(name, args.data_dir)
        save_frame(args.work / "data" / f"{name}.npz", frame)
        print(f"{name}: {n_rows(frame):,} rows, {len(frame)} columns, {digest(frame)}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=["data", *RUNS])
    parser.add_argument("--data-dir", type=Path, help="data: folder with mixed/ and tabular/")
    parser.add_argument("--work", type=Path, default=Path("out/tables"), help="tables and samples")
    parser.add_argument("--out", type=Path, default=Path("results/tables"))
    parser.add_argument("--sets", nargs="+", choices=list(SETS))
    parser.add_argument("--method", nargs="+", help=f"{OURS} (default) or peers")
    parser.add_argument("--seeds", nargs="+", type=int)
    parser.add_argument("--rows", type=int, help="at most so many rows to learn from")
    parser.add_argument("--draws", type=int, default=N_DRAWS, help="imputations; 19, 39, ...")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time")
    parser.add_argument("--max-steps", type=int, help="of EnergyDensity, for a quick look")
    args = parser.parse_args()
    if args.part == "data":
        if args.data_dir is None:
            parser.error("data needs --data-dir")
        write_data(args)
    else:
        run_part(args)


if __name__ == "__main__":
    main()
