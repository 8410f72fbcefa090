"""``python -m tests.campaign N SEED``: one table of verdicts; every failure with its replay.

``--jobs K`` asks K processes at a time, which changes no verdict: each trial hangs on its seed
alone. ``--only KIND,KIND`` asks for these trials alone, ``--keep NAME`` writes the table to
``results/reliability/NAME.json``, too, as it goes: the same command goes on where it was stopped,
from ``out/campaign/NAME.jsonl``, and tries again what failed. Trials that need a package which is
not installed are left, and said to be: the same command tries them where it is.
``python -m tests.campaign --replay KIND SEED`` runs one trial again, in this process.
"""

import argparse
import json
import os
import queue
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import numpy as np

from selfnorm.paper.provenance import commit, hardware, versions
from tests.campaign.trials import NEEDS, TRIALS, attempt
from tests.worker import Worker

VERDICTS = ("right", "clear error", "traceback", "silent wrong", "hang", "lost")
FINE = VERDICTS[:2]
OUT, KEPT = Path("out/campaign"), Path("results/reliability")


def drawn(number, seed, only):
    """Kinds and seeds of so many trials: each kind has its share, to the last one by lot."""
    rng, names = np.random.default_rng(seed), only or list(TRIALS)
    shares = np.array([1.0 if only else TRIALS[name][0] for name in names])
    shares /= shares.sum()
    kinds = [
        name
        for name, share in zip(names, shares, strict=True)
        for _ in range(int(number * share + 1e-9))
    ]
    kinds += [str(name) for name in rng.choice(names, p=shares, size=number - len(kinds))]
    return [(str(kind), int(rng.integers(2**31))) for kind in rng.permutation(kinds)]


class Workers:
    """Processes that are asked for one trial each; how long trials of each kind took."""

    def __init__(self, number):
        self.all = [Worker("tests.campaign.answers") for _ in range(number)]
        self.free, self.seconds = queue.SimpleQueue(), {name: [] for name in TRIALS}
        for worker in self.all:
            self.free.put(worker)

    def ask(self, kind, seed):
        """Kind, seed, verdict, a word on it, figures and seconds."""
        worker, before = self.free.get(), self.seconds[kind]
        usual = median(before) if len(before) > 4 else 0.0
        start = time.perf_counter()
        try:
            verdict, told, figures = worker.ask([kind, seed], max(TRIALS[kind][1], 10 * usual))
        except TimeoutError as error:
            verdict, told, figures = "hang", str(error), {}
        except EOFError as error:
            verdict, told, figures = "traceback", str(error), {}
        before.append(time.perf_counter() - start)
        self.free.put(worker)
        row = {"kind": kind, "seed": seed, "verdict": verdict, "told": told, "figures": figures}
        return row | {"seconds": round(before[-1], 2)}

    def end(self):
        for worker in self.all:
            worker.end()


def failed(rows):
    return [row for row in rows if row["verdict"] not in FINE]


def summary(rows):
    """The table of verdicts, how long trials took, and what failed."""
    kinds = [name for name in TRIALS if any(row["kind"] == name for row in rows)]
    of = {name: [row for row in rows if row["kind"] == name] for name in kinds}
    counts = {name: Counter(row["verdict"] for row in of[name]) for name in kinds}
    table = {name: {verdict: counts[name][verdict] for verdict in VERDICTS} for name in kinds}
    table["all"] = {verdict: sum(table[name][verdict] for name in kinds) for verdict in VERDICTS}
    found = {
        "commits": Counter(row["commit"] for row in rows),
        "machines": Counter(row["machine"] for row in rows),
        "seconds": round(sum(row["seconds"] for row in rows), 1),
        "tried": len(rows),
        "table": table,
    }
    clocks = {name: [row["seconds"] for row in of[name]] for name in kinds}
    found["median_seconds"] = {name: round(median(clocks[name]), 2) for name in kinds}
    doubted = [row for row in rows if not row["figures"].get("reliable", True)]
    return found | {"failures": failed(rows), "told": rows if len(rows) <= 5 else doubted}


def replaced(path, text):
    """Write a file at once: a kill leaves the one of before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part")
    beside.write_text(text)
    beside.replace(path)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign")
    parser.add_argument("number", nargs="?", type=int, default=100)
    parser.add_argument("seed", nargs="?", type=int, default=0)
    parser.add_argument("--only", type=lambda text: text.split(","))
    parser.add_argument("--keep")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--replay", nargs=2, metavar=("KIND", "SEED"))
    given = parser.parse_args()
    unknown = {*(given.only or []), *(given.replay or [])[:1]} - set(TRIALS)
    if unknown or given.number < 1 or given.jobs < 1:
        about = f"no trial {', '.join(unknown)}; there are {', '.join(TRIALS)}"
        parser.error(about if unknown else "trials and jobs are counted from 1")
    if given.replay:
        print(*attempt(given.replay[0], int(given.replay[1])), sep=": ")
        return 0
    OUT.mkdir(parents=True, exist_ok=True)
    about = {
        "command": f"python -m tests.campaign {' '.join(sys.argv[1:])}",
        "commit": commit(),
        "versions": versions(),
        "hardware": hardware(),
        "seed": given.seed,
    }
    here = {"commit": commit(), "machine": f"{os.cpu_count()} cores, torch {versions()['torch']}"}
    path = OUT / f"{given.keep or given.number}.jsonl"
    lines = path.read_text().splitlines(keepends=True) if given.keep and path.exists() else []
    lines = [line for line in lines if line.endswith("\n")]  # a kill may have cut the last one
    known = [json.loads(line) for line in lines]
    rows, earlier = [row for row in known if row["verdict"] in FINE], failed(known)
    done = {(row["kind"], row["seed"]) for row in rows}
    trials = drawn(given.number, given.seed, given.only)
    place = {trial: number for number, trial in enumerate(trials)}
    lacking = {kind: [n for n in NEEDS.get(kind, ()) if find_spec(n) is None] for kind in TRIALS}
    left = Counter(kind for kind, _ in trials if lacking[kind])
    asked = [trial for trial in trials if trial not in done and not lacking[trial[0]]]
    replaced(path, "".join(lines))

    def kept():
        """The table so far, written where it is to be kept."""
        rows.sort(key=lambda row: place.get((row["kind"], row["seed"]), -1))
        content = {**about, **summary(rows), "failures_before": earlier}
        if given.keep:
            replaced(KEPT / f"{given.keep}.json", json.dumps(content, indent=1) + "\n")
        return content

    workers, pool = Workers(given.jobs), ThreadPoolExecutor(given.jobs)
    try:
        with open(path, "a") as log:
            for answer in as_completed([pool.submit(workers.ask, *trial) for trial in asked]):
                row = answer.result() | here
                rows.append(row)
                log.write(json.dumps(row) + "\n")
                log.flush()
                if row["verdict"] not in FINE:
                    replay = f"python -m tests.campaign --replay {row['kind']} {row['seed']}"
                    print(f"{row['verdict']}: {row['told']}\n  {replay}", flush=True)
                kept()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        workers.end()
    for kind, count in left.items():
        print(f"left: {count} trials {kind!r}, which need {', '.join(lacking[kind])}")
    content = kept()
    print(" | ".join(["trial", "tried", *VERDICTS]))
    for name, row in content["table"].items():
        print(" | ".join(map(str, (name, sum(row.values()), *row.values()))))
    failures = len(content["failures"])
    print(f"campaign of {given.number}, seed {given.seed}: {failures} failures")
    return 1 if failures or left else 0


if __name__ == "__main__":
    sys.exit(main())
