"""Drift: false alarms of the e-value, delay to a change in one conditional alone, columns blamed.

    python benchmarks/drift.py --data DATA --out results/drift

Of five tables 1,000 rows are trained on and 500 are the reference; streams of 400 rows are drawn
from the others. ``still``: 200 streams a table that are as they were, each watched row by row.
``changed``: the cells of one column are permuted among the rows of the stream, so that it does not
depend on the others any more while every margin and the other columns stay; five streams for each
column that the others tell something of (0.05 nats at least, by the density, of reference rows).
Against it: Kolmogorov and Smirnov's test of each column every ten rows, by Bonferroni for the
columns alone, which is not enough where one looks again and again: that favours the test.

Rows are written as they come; a second call adds what is missing.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import ks_2samp

from measuring import Row, Stopwatch, rows_in, write

TABLES = ("california", "magic", "shuttle", "adult", "shoppers")
TRAINED, REFERENCE, STREAM, STILL, PER_COLUMN = 1000, 500, 400, 200, 5
ALPHA, LEAST_NATS, LOOK = 0.05, 0.05, 10
KEYS = ("dataset", "part", "column", "seed")


def table_of(data: Path, name: str) -> Any:
    """A table as a data frame, its rows in random order."""
    import pandas as pd

    if name in ("adult", "shoppers"):
        file = {"adult": "adult.data", "shoppers": "online_shoppers_intention.csv"}[name]
        frame = pd.read_csv(data / "mixed" / file, skipinitialspace=True).dropna()
        frame = frame.iloc[:, :8]
    else:
        file = next((data / "tabular").glob(f"*{name}*.npz"))
        with np.load(file, allow_pickle=True) as content:
            frame = pd.DataFrame(content["X"].astype(float)).add_prefix("x")
    return frame.sample(min(len(frame), 12_000), random_state=0).reset_index(drop=True)


def still_alarms(density: Any, reference: Any, rest: Any) -> tuple[int, float]:
    """Of how many streams the e-value reaches ``1 / ALPHA`` at some row; the largest of all."""
    import torch

    from selfnorm.tables import drift

    schema, distribution = density.schema_, density.distribution_
    before, after = (torch.from_numpy(schema.encode(table)[0]) for table in (reference, rest))
    drawn = torch.from_numpy(distribution.sample(drift.DRAWN, 0))
    usual = drift.Places(distribution.columns.parts, drawn)
    scores = [usual.normal_scores(usual.numbers(rows)) for rows in (drawn, before, after)]
    of_before, of_after = (drift.statistics(distribution, rows) for rows in (before, after))
    ratio, highest = drift.Ratio(scores[0]), []
    for seed in range(STILL):
        # the reference is drawn anew as well: one of them would be right or wrong for all streams
        rng = np.random.default_rng(seed)
        pool = rng.permutation(len(of_before) + len(of_after))[: REFERENCE + STREAM]
        rows, places = (np.concatenate(two)[pool] for two in ((of_before, of_after), scores[1:]))
        two = np.split(rows, [REFERENCE]) + np.split(places, [REFERENCE])
        _, log_e = drift.watched(two[0], two[1], seed, ratio, two[2], two[3])
        highest.append(log_e.max())
    return int((np.exp(highest) >= 1 / ALPHA).sum()), float(np.exp(max(highest)))


def delay_of_tests(reference: Any, stream: Any) -> int | None:
    """Rows after which some column of the stream differs."""
    for n in range(LOOK, len(stream) + 1, LOOK):
        codes = [(reference[c], stream[c].iloc[:n]) for c in stream]
        codes = [(a, b) if a.dtype.kind in "if" else (a.map(hash), b.map(hash)) for a, b in codes]
        if min(ks_2samp(a, b).pvalue for a, b in codes) < ALPHA / len(codes):
            return n
    return None


def lost_nats(density: Any, reference: Any, column: str) -> float:
    """What the others tell of a column, by the density: nats a row, of permuted reference rows."""
    permuted = reference.copy()
    permuted[column] = reference[column].sample(frac=1, random_state=0).to_numpy()
    return density.score(reference) - density.score(permuted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("results/drift"))
    parser.add_argument("--sets", nargs="+", default=list(TABLES))
    parser.add_argument("--streams", type=int, default=PER_COLUMN, help="changed, for each column")
    args = parser.parse_args()
    import torch

    from selfnorm import EnergyDensity

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    path = args.out / "drift.json"
    rows = {tuple(row.get(k) for k in KEYS): row for row in rows_in(path)}

    def add(row: Row) -> None:
        rows[tuple(row.get(k) for k in KEYS)] = row
        write(path, [*rows.values()], summary=summary([*rows.values()]))
        print(row, flush=True)

    for name in args.sets:
        table = table_of(args.data, name)
        train, reference, rest = (
            table.iloc[:TRAINED],
            table.iloc[TRAINED : TRAINED + REFERENCE],
            table.iloc[TRAINED + REFERENCE :],
        )
        density = EnergyDensity(random_state=0).fit(train)
        for column in table:
            todo = [s for s in range(args.streams) if (name, "changed", column, s) not in rows]
            nats = lost_nats(density, reference, column) if todo else 0.0
            for seed in todo if nats >= LEAST_NATS else ():
                stream = rest.sample(STREAM, random_state=seed)
                stream[column] = stream[column].sample(frac=1, random_state=seed + 1).to_numpy()
                clock = Stopwatch()
                drift = density.compare(stream, reference)
                row = {"dataset": name, "part": "changed", "column": column, "seed": seed}
                row |= {"nats": nats, "delay": drift.alarm(ALPHA)}
                row |= {"blamed": drift.columns[0].column, **clock()}
                add(row | {"delay_of_tests": delay_of_tests(reference, stream)})
        if (name, "still", None, None) not in rows:
            clock = Stopwatch()
            alarms, highest = still_alarms(density, reference, rest)
            row = {"dataset": name, "part": "still", "streams": STILL, "alarms": alarms}
            add(row | {"highest": highest} | clock())
    print(summary([*rows.values()]))


def summary(rows: list[Row]) -> Row:
    """False alarms of all streams; per table the median delays, and how often blame was right."""
    still = [row for row in rows if row["part"] == "still"]
    out: Row = {k: sum(row[k] for row in still) for k in ("streams", "alarms")}
    for name in TABLES:
        changed = [r for r in rows if r["part"] == "changed" and r["dataset"] == name]
        if changed:
            delays = {
                k: statistics.median(STREAM + 1 if r[k] is None else r[k] for r in changed)
                for k in ("delay", "delay_of_tests")
            }
            right = statistics.fmean(r["blamed"] == r["column"] for r in changed)
            out[name] = {"streams": len(changed), **delays, "blamed_right": right}
    return out


if __name__ == "__main__":
    main()
