"""``python -m tests.campaign N SEED``: one table of verdicts; every failure with its replay.

``--only KIND,KIND`` asks for these trials alone, ``--keep NAME`` writes the table to
``results/reliability/NAME.json``, too. ``python -m tests.campaign --replay KIND SEED`` runs one
trial again, in this process.
"""

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from statistics import median

import numpy as np

from selfnorm.paper.report import hardware, versions
from tests.campaign.trials import TRIALS, attempt
from tests.worker import Worker

VERDICTS = ("right", "clear error", "traceback", "silent wrong", "hang", "lost")
FINE = VERDICTS[:2]
OUT, KEPT = Path("out/campaign"), Path("results/reliability")


def drawn(number, seed, only):
    """Kinds and seeds of so many trials."""
    rng, names = np.random.default_rng(seed), only or list(TRIALS)
    shares = np.array([1.0 if only else TRIALS[name][0] for name in names])
    for _ in range(number):
        yield str(rng.choice(names, p=shares / shares.sum())), int(rng.integers(2**31))


def asked(worker, kind, seed, limit):
    try:
        return worker.ask([kind, seed], limit)
    except TimeoutError as error:
        return "hang", str(error)
    except EOFError as error:
        return "traceback", str(error)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign")
    parser.add_argument("number", nargs="?", type=int, default=100)
    parser.add_argument("seed", nargs="?", type=int, default=0)
    parser.add_argument("--only", type=lambda text: text.split(","))
    parser.add_argument("--keep")
    parser.add_argument("--replay", nargs=2, metavar=("KIND", "SEED"))
    given = parser.parse_args()
    if given.replay:
        print(*attempt(given.replay[0], int(given.replay[1])), sep=": ")
        return 0
    OUT.mkdir(parents=True, exist_ok=True)
    counts, seconds, failures, told_of = Counter(), {name: [] for name in TRIALS}, [], []
    worker, began = Worker("tests.campaign.answers"), time.perf_counter()
    with open(OUT / f"{given.keep or given.number}_{given.seed}.jsonl", "w") as log:
        for kind, seed in drawn(given.number, given.seed, given.only):
            usual = median(seconds[kind]) if len(seconds[kind]) > 4 else 0.0
            start = time.perf_counter()
            verdict, told = asked(worker, kind, seed, max(TRIALS[kind][1], 10 * usual))
            seconds[kind].append(time.perf_counter() - start)
            counts[kind, verdict] += 1
            row = {"kind": kind, "seed": seed, "verdict": verdict, "told": told}
            told_of.append(row)
            log.write(json.dumps({**row, "seconds": round(seconds[kind][-1], 2)}) + "\n")
            log.flush()
            if verdict not in FINE:
                failures.append(row)
                print(f"{verdict}: {told}\n  python -m tests.campaign --replay {kind} {seed}")
                sys.stdout.flush()
    worker.end()
    kinds = [name for name in TRIALS if seconds[name]]
    table = {name: {verdict: counts[name, verdict] for verdict in VERDICTS} for name in kinds}
    table["all"] = {verdict: sum(table[name][verdict] for name in kinds) for verdict in VERDICTS}
    print(" | ".join(["trial", "tried", *VERDICTS]))
    for name, row in table.items():
        print(" | ".join(map(str, (name, sum(row.values()), *row.values()))))
    fitted = [row for row in told_of if row["kind"] == "default" and row["verdict"] == "right"]
    doubted = sum(row["told"].startswith("UNRELIABLE") for row in fitted)
    if fitted:
        print(f"unreliable: {doubted} of {len(fitted)} default fits")
    print(f"campaign of {given.number}, seed {given.seed}: {len(failures)} failures")
    if given.keep:
        commit = ["git", "describe", "--always", "--dirty"]
        content = {
            "command": f"python -m tests.campaign {' '.join(sys.argv[1:])}",
            "commit": subprocess.run(commit, capture_output=True, text=True).stdout.strip(),
            "versions": versions(),
            "hardware": hardware(),
            "seed": given.seed,
            "seconds": round(time.perf_counter() - began, 1),
            "table": table,
            "default_fits": len(fitted),
            "unreliable": doubted,
            "median_seconds": {name: round(median(seconds[name]), 2) for name in kinds},
            "failures": failures,
            "told": told_of if len(told_of) <= 5 else [],
        }
        KEPT.mkdir(parents=True, exist_ok=True)
        (KEPT / f"{given.keep}.json").write_text(json.dumps(content, indent=1) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
