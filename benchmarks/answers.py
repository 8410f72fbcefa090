"""Answers of a fitted table: counts, posteriors, imputations, and how far they are from the joint.

Parts, each by itself; a second call adds what is missing. Models are fitted once (``fit``) to
tables and simulations that ``data`` wrote; the machine that fits needs neither pandas nor sbibm.

    python benchmarks/answers.py data --data-dir DATA         # with pandas and sbibm; once
    python benchmarks/answers.py fit --device cuda            # EnergyDensity with its defaults
    python benchmarks/answers.py queries                      # counts by the density
    PGHOST=/tmp PGUSER=postgres python benchmarks/answers.py queries --method postgresql
    python benchmarks/answers.py posteriors                   # with sbibm
    python benchmarks/answers.py imputations --accuracy fast  # one pass of the network
    python benchmarks/answers.py consistency
    python benchmarks/answers.py rules                        # with pandas and sdmetrics
    python benchmarks/answers.py coverage

- *Queries.* How many rows obey a conjunction (``cardinality.py``); the model is fitted to all rows,
  as planners see them all. The q-error is ``max(a / b, b / a)`` of the true and the estimated
  number of rows, both at least 1.
- *Posteriors.* Simulations of sbibm are a table of parameters and observations; samples given an
  observation are compared with its reference posterior by its classifier (C2ST; 0.5 is best).
- *Imputation.* As in ``tables.py``.
- *Rules.* Rows drawn under an event: how many break it, and sdmetrics' two-sample score (logistic
  regression) against the real rows that obey it, beside that of as many rows without one. What
  holds for all rows of the table is a rule of the fit.
- *Coverage.* All rows of tables of a few labels are scored: these are the true probabilities of
  events, of events given others, of rows with gaps. How many are in the intervals, and within
  three errors.
- *Consistency.* ``log p(x_S)`` of random halves of the columns of held-out rows, against the same
  with ten times the draws.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import tables
from cardinality import RIVALS, Query, event, obeying, q_errors, quantiles, queries, true_counts
from measuring import Results, Row, in_processes, peer, provenance, write_json
from table_frames import (
    Frame,
    at_most,
    load_frame,
    n_rows,
    random_gaps,
    read_raw,
    remove_cells,
    save_frame,
    shuffled,
    take,
)
from table_judges import imputation_scores, two_sample_score

QUERIED = ("adult", "shoppers", "magic", "power", "diamonds")
IMPUTED = ("adult", "shoppers", "penguins", "diamonds", "california", "german", "magic")
CONSISTENT = ("magic", "adult", "shoppers", "california", "penguins")
TASKS = ("two_moons", "gaussian_mixture", "slcp", "bernoulli_glm")
SIMULATED = [f"{task}-{n}" for n in (10_000, 1_000, 30_000) for task in TASKS]
QUERIES_AT_ONCE, FREQUENT = 100, 30
IMPUTED_ROWS, REMOVED = 10_000, 0.3  # as in tables.py
CONSISTENT_ROWS, REFERENCE_DRAWS, RELIABLE_SE = 100, 20_480, 0.1
RULES = {
    "adult": (
        "age > 50",
        "sex == 'Female' and `hours-per-week` >= 40",
        "`hours-per-week` > age",
        "`capital-gain` == 0 or `capital-loss` == 0",
    ),
    "shoppers": (
        "Revenue",
        "Month in ['May', 'Nov'] and PageValues == 0",
        "ProductRelated_Duration > 30 * ProductRelated",
        "Administrative > 0 or Administrative_Duration == 0",
    ),
}
RULED_ROWS, JUDGED_ROWS = 125_000, 10_000
FINITE = {
    "adult": ("marital-status", "relationship", "race", "sex", "education-num", "income"),
    "shoppers": ("Month", "VisitorType", "Region", "OperatingSystems", "Weekend", "Revenue"),
}
FINITE_ROWS = 5_000
OURS = "selfnorm"


# Models


def simulations(name: str) -> Frame:
    """Parameters drawn from the prior of a task, and what they give."""
    import torch

    task, n = name.split("-")
    torch.manual_seed(int(n))
    simulated = peer("sbibm").get_task(task)
    theta = simulated.get_prior()(num_samples=int(n))
    named = [("theta", theta), ("x", simulated.get_simulator()(theta))]
    return {f"{k}{j}": v[:, j].double().numpy() for k, v in named for j in range(v.shape[1])}


def write_data(args: argparse.Namespace) -> None:
    """Tables and simulations as ``.npz``."""
    for name in args.sets or (*SIMULATED, *dict.fromkeys(QUERIED + IMPUTED)):
        path = args.work / "data" / f"{name}.npz"
        if not path.exists():
            save_frame(path, simulations(name) if "-" in name else read_raw(name, args.data_dir))


def table_of(args: argparse.Namespace, name: str) -> Frame:
    return load_frame(args.work / "data" / f"{name}.npz")


def with_gaps(args: argparse.Namespace, name: str) -> tuple[Frame, np.ndarray]:
    """The rows of which cells are removed, and which cells."""
    frame = at_most(table_of(args, name), IMPUTED_ROWS, 0)
    return frame, random_gaps(frame, REMOVED, 0)


def labels_of(args: argparse.Namespace, name: str) -> Frame:
    """The columns of a table that have few labels."""
    name = name.removesuffix("-labels")
    frame = at_most(table_of(args, name), FINITE_ROWS, 0)
    return {c: np.array([str(v) for v in frame[c]], dtype=object) for c in FINITE[name]}


def fit(args: argparse.Namespace, name: str) -> None:
    """Fit the model of a name and keep it, with what it took."""
    from selfnorm import EnergyDensity

    if name.endswith("-labels"):
        frame = labels_of(args, name)
    elif name.endswith("-gaps"):
        frame = remove_cells(*with_gaps(args, name.removesuffix("-gaps")))
    else:
        frame = table_of(args, name)
    began = time.perf_counter()
    density = EnergyDensity(random_state=0, device=args.device, max_time=args.max_time).fit(frame)
    record = {"fit_seconds": round(time.perf_counter() - began, 1), "steps": density.n_iter_}
    path = args.work / "models" / f"{name}.selfnorm"
    path.parent.mkdir(exist_ok=True)
    density.save(path)
    consistency = {"consistency": density.consistency_}
    write_json(path.with_suffix(".json"), record | consistency | provenance(args.device))
    print(f"{name}: {record}, {density.lower_bound_:.3f}", flush=True)


def fit_all(args: argparse.Namespace) -> None:
    """The models that are not there yet."""
    names = [*SIMULATED, *dict.fromkeys(QUERIED + CONSISTENT), *(f"{n}-gaps" for n in IMPUTED)]
    names += [f"{name}-labels" for name in FINITE]
    names = [n for n in args.sets or names if not (args.work / "models" / f"{n}.json").exists()]
    list(in_processes(fit, [(args, name) for name in names], args.workers))


def model(args: argparse.Namespace, name: str) -> tuple[Any, Row, Row]:
    """A fitted model, what its fit took, and where it comes from."""
    from selfnorm import EnergyDensity

    path, accuracy = args.work / "models" / f"{name}.selfnorm", args.accuracy
    density = EnergyDensity.load(path)
    density.set_params(accuracy=int(accuracy) if accuracy.isdigit() else accuracy)
    fitted_by = json.loads(path.with_suffix(".json").read_text())
    consistency = fitted_by.pop("consistency", {})
    record = {key: fitted_by.pop(key) for key in ("fit_seconds", "steps")}
    network = consistency.get("network", consistency.get("conditionals"))
    return density, record | {"network": network}, {"fitted_by": fitted_by}


# Counts


def by_density(
    args: argparse.Namespace, name: str, made: list[Query]
) -> tuple[np.ndarray, Row, Row]:
    """Probabilities by the model times rows; some queries at a time, kept in files."""
    density, record, others = model(args, name)
    figures = []
    for k in range(0, len(made), QUERIES_AT_ONCE):
        path = args.work / "queries" / f"{name}_{args.accuracy}_{k}.npy"
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            events = [event(query) for query in made[k : k + QUERIES_AT_ONCE]]
            began = time.process_time()
            answers = density.probability(events)
            spent = (time.process_time() - began) / len(answers)
            np.save(path, [(a.value, a.se, a.ess, a.reliable, spent) for a in answers])
        figures.append(np.load(path))
    value, se, ess, reliable, seconds = np.concatenate(figures)[: len(made)].T
    record |= {"reliable": reliable.mean(), "relative_se": np.median(se / value.clip(1e-300))}
    record |= {"ess": np.median(ess), "query_seconds": seconds.mean()}
    return value * density.fitted_to_["rows"], record, others


def run_queries(args: argparse.Namespace, keys: Row) -> tuple[Row, Row]:
    """The q-errors of a method on a table."""
    frame = table_of(args, keys["dataset"])
    made = queries(frame, keys["n_queries"])
    true, began, others = true_counts(frame, made), time.perf_counter(), {}
    if keys["method"] == OURS:
        estimates, record, others = by_density(args, keys["dataset"], made)
    else:
        estimates = RIVALS[keys["method"]](frame, made)
        record = {"query_seconds": (time.perf_counter() - began) / len(made)}
    errors, frequent = q_errors(true, estimates), true >= FREQUENT
    record |= {"all": quantiles(errors), "frequent": quantiles(errors[frequent])}
    return record | {"n_frequent": int(frequent.sum())}, others


# Posteriors, imputations, consistency


def run_posteriors(args: argparse.Namespace, keys: Row) -> tuple[Row, Row]:
    """C2ST of samples given an observation, and the log-evidence of it."""
    import torch

    density, record, others = model(args, keys["simulations"])
    task, number = keys["simulations"].split("-")[0], keys["observation"]
    task = peer("sbibm").get_task(task)
    observation = task.get_observation(number)[0].double().numpy()
    given = {f"x{j}": np.array([value]) for j, value in enumerate(observation)}
    began = time.process_time()
    drawn = density.sample(args.samples, random_state=number, given=given)
    record["sample_seconds"] = time.process_time() - began
    (log_evidence,), (se,) = density.log_prob(given, return_std=True)
    record |= {"n_samples": args.samples, "log_evidence": log_evidence, "log_evidence_se": se}
    theta = np.column_stack([drawn[c] for c in drawn if c.startswith("theta")])
    record["distinct"] = len(np.unique(theta, axis=0)) / len(theta)
    reference = task.get_reference_posterior_samples(number)[: args.samples]
    score = peer("sbibm.metrics").c2st(reference, torch.tensor(theta, dtype=torch.float32))
    return record | {"c2st": float(score)}, others


def run_imputations(args: argparse.Namespace, keys: Row) -> tuple[Row, Row]:
    """Scores of drawn cells, also of ten parts of the rows: what a difference is worth."""
    name = keys["dataset"]
    density, record, others = model(args, f"{name}-gaps")
    truth, gone = with_gaps(args, name)
    scored = shuffled(n_rows(truth), 0)[: tables.SCORED_ROWS]
    given, truth = take(remove_cells(truth, gone), scored), take(truth, scored)
    gone, began, n_draws = gone[scored], time.process_time(), tables.N_DRAWS
    draws = tables.frames(density.impute(given, n_draws=n_draws, random_state=0), given, n_draws)
    record["impute_seconds"] = time.process_time() - began
    record |= {"n_rows": n_rows(truth), **imputation_scores(name, truth, gone, draws, 0)}
    parts = [
        imputation_scores(name, take(truth, k), gone[k], [take(d, k) for d in draws], 0)
        for k in np.array_split(np.arange(n_rows(truth)), 10)
    ]
    shared = [key for key in ("crps", "log_loss") if all(key in part for part in parts)]
    return record | {"parts": {key: [part[key] for part in parts] for key in shared}}, others


def run_consistency(args: argparse.Namespace, keys: Row) -> tuple[Row, Row]:
    """``log p(x_S)`` of held-out rows for random halves ``S``, against ten times the draws."""
    density, record, others = model(args, keys["dataset"])
    frame = table_of(args, keys["dataset"])
    rows = density.held_out_ if len(density.held_out_) else np.arange(n_rows(frame))
    frame = take(frame, rows[shuffled(len(rows), 0)[:CONSISTENT_ROWS]])
    halves = np.random.default_rng(2).random((n_rows(frame), len(frame))).argsort(1)
    given, began = remove_cells(frame, halves < len(frame) // 2), time.process_time()
    value, se = density.log_prob(given, return_std=True)
    record["seconds_a_row"] = (time.process_time() - began) / len(value)
    density.set_params(accuracy=REFERENCE_DRAWS)
    exact, exact_se = density.log_prob(given, return_std=True)
    off, reliable = np.abs(value - exact), se <= RELIABLE_SE
    record |= {"n_rows": len(off), "reliable": reliable.mean(), "median": np.median(off)}
    record |= {"median_reliable": np.median(off[reliable]), "median_se": np.median(se)}
    reliable_then = (exact_se <= RELIABLE_SE).mean()
    return record | {"reference_draws": REFERENCE_DRAWS, "reliable_then": reliable_then}, others


def run_rules(args: argparse.Namespace, keys: Row) -> tuple[Row, Row]:
    """Rows drawn under a rule: how many break it, and whether they look like those that obey."""
    from selfnorm.tables.events import Event
    from selfnorm.tables.questions import checked_rules

    density, record, others = model(args, keys["dataset"])
    frame, rule = table_of(args, keys["dataset"]), RULES[keys["dataset"]][keys["rule"]]
    event = Event.of(density.schema_, rule)
    obey = event.holds(density.schema_.cells(frame))
    if obey.all():  # as fit(table, rules=[rule])
        density.rules_ = checked_rules(density.schema_, frame, [rule])
    began = time.process_time()
    where = None if obey.all() else rule
    drawn = tables.like(density.sample(args.rows, random_state=0, where=where), frame)
    record |= {"event": rule, "share": obey.mean(), "n_rows": n_rows(drawn)}
    record["row_seconds"] = (time.process_time() - began) / args.rows
    record["broken"] = int((~event.holds(density.schema_.cells(drawn))).sum())
    density.rules_ = ()
    free = tables.like(density.sample(JUDGED_ROWS, random_state=1), frame)
    n = min(int(obey.sum()), JUDGED_ROWS)
    for key, real, samples in (("score", take(frame, obey), drawn), ("without", frame, free)):
        parts = (at_most(real, n, 0), at_most(samples, n, 0))
        record[key] = two_sample_score("logistic", *parts, 0)
    return record | {"n_judged": n}, others


def run_coverage(args: argparse.Namespace, keys: Row) -> tuple[Row, Row]:
    """Stated errors of answers beside the sums over all rows of a finite table."""
    density, record, others = model(args, f"{keys['dataset']}-labels")
    frame = labels_of(args, keys["dataset"])
    levels = [dict.fromkeys(column.tolist()) for column in frame.values()]
    rows = np.array(list(itertools.product(*levels)), dtype=object).T
    every = dict(zip(frame, rows, strict=True))
    weight = np.exp(density.score_samples(every))
    made = queries(frame, args.queries)
    holds = [obeying(every, query) for query in made]
    if keys["of"] == "rows":
        rows = np.full((len(made), len(frame)), None)
        for row, query in zip(rows, made, strict=True):
            for c, (_, value) in query.items():
                row[[*frame].index(c)] = value
        given = dict(zip(frame, rows.T, strict=True))
        value, se = density.log_prob(given, return_std=True)
        # what was never seen is in no row
        log_seen = density.distribution_.model.layout.log_seen.numpy()
        gap = np.equal(rows, None)
        truth = np.log([weight[of].sum() for of in holds]) - (gap * log_seen).sum(1)
        low, high = value - 1.96 * se, value + 1.96 * se
    else:
        answers, truth = [], []
        for k, (query, both) in enumerate(zip(made, holds, strict=True)):
            (column, (_, is_value)), *rest = query.items()
            before = {c: v for c, (_, v) in rest} if keys["of"] == "events given others" else {}
            asked = {column: is_value} if before else event(query)
            answers.append(density.probability(asked, before or None, random_state=k))
            given = obeying(every, dict(rest)) if before else np.ones(len(weight), bool)
            truth.append(weight[both].sum() / weight[given].sum())
        value, se, low, high = np.array([(a.value, a.se, a.low, a.high) for a in answers]).T
    slack = 1e-5 * np.abs(truth)  # of sums in single precision
    covered = (low - slack <= truth) & (truth <= high + slack)
    drawn = se > slack
    record |= {"n": len(truth), "drawn": int(drawn.sum()), "covered": covered[drawn].mean()}
    record |= {"exact": covered[~drawn].mean() if not drawn.all() else None}
    off = np.abs(value - truth)[drawn] / se[drawn]
    return record | {"within_3": (off <= 3).mean(), "mean_off": (off**2).mean() ** 0.5}, others


RUNS: dict[str, Callable[[argparse.Namespace, Row], tuple[Row, Row]]] = {
    "queries": run_queries,
    "posteriors": run_posteriors,
    "imputations": run_imputations,
    "consistency": run_consistency,
    "rules": run_rules,
    "coverage": run_coverage,
}


def run_part(args: argparse.Namespace) -> None:
    """Run what has no row yet."""
    sets = {"queries": QUERIED, "posteriors": SIMULATED}
    sets |= {"imputations": IMPUTED, "consistency": CONSISTENT, "rules": tuple(RULES)}
    sets |= {"coverage": tuple(FINITE)}
    values: dict[str, Any] = {"dataset": args.sets or sets[args.part], "accuracy": [args.accuracy]}
    if args.part == "queries":
        values = {"dataset": values["dataset"], "method": args.method or [OURS]}
        values["n_queries"] = [args.queries]
    elif args.part == "coverage":
        values["of"] = ["events", "events given others", "rows"]
    elif args.part == "rules":
        values["rule"] = range(4)
    elif args.part == "posteriors":
        values["simulations"], values["observation"] = values.pop("dataset"), range(1, 11)
    results = Results(args.out / f"{args.part}.json", provenance())
    every = [
        dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())
    ]
    todo = [(args, keys) for keys in every if not results.has(keys)]
    for keys, record, others in in_processes(run_one, todo, args.workers):
        results.add(keys | record, **others)
        long = ("columns", "parts", "versions")
        print({k: v for k, v in results.rows[-1].items() if k not in long}, flush=True)


def run_one(args: argparse.Namespace, keys: Row) -> tuple[Row, Row, Row]:
    """One row, by what it is of."""
    return keys, *RUNS[args.part](args, keys)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=["data", "fit", *RUNS])
    parser.add_argument("--data-dir", type=Path, help="data: folder with mixed/, tabular/, power/")
    parser.add_argument("--work", type=Path, default=Path("out/answers"), help="tables and models")
    parser.add_argument("--out", type=Path, default=Path("results/answers"))
    parser.add_argument("--sets", nargs="+", help="tables, or TASK-SIMULATIONS")
    parser.add_argument("--method", nargs="+", help=f"queries: {OURS} or {', '.join(RIVALS)}")
    parser.add_argument("--queries", type=int, default=2_000, help="how many of a table")
    parser.add_argument("--samples", type=int, default=10_000, help="of a posterior")
    parser.add_argument("--rows", type=int, default=RULED_ROWS, help="under a rule")
    parser.add_argument("--accuracy", default="joint", help="joint, fast, or a number of draws")
    parser.add_argument("--device", default="cpu", help="of fits")
    parser.add_argument("--max-time", type=float, help="seconds of a fit")
    parser.add_argument("--workers", type=int, default=1, help="fits, or rows, at a time")
    args = parser.parse_args()
    {"data": write_data, "fit": fit_all}.get(args.part, run_part)(args)


if __name__ == "__main__":
    main()
