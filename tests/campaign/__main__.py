"""``python -m tests.campaign N SEED``: one table of verdicts; every failure with its replay.

``--only KIND,KIND`` asks for these trials alone, ``--keep NAME`` writes the table to
``results/reliability/NAME.json``, too, as it goes: the same command goes on where it was stopped,
from ``out/campaign/NAME.jsonl``, and tries again what failed.
``python -m tests.campaign --replay KIND SEED`` runs one trial again, in this process.
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


def asked(worker, kind, seed, limit):
    """Verdict, a word on it and figures."""
    try:
        return worker.ask([kind, seed], limit)
    except TimeoutError as error:
        return "hang", str(error), {}
    except EOFError as error:
        return "traceback", str(error), {}


def failed(rows):
    return [row for row in rows if row["verdict"] not in FINE]


def summary(rows):
    """The table of verdicts; what default fits came to, and how long trials took."""
    kinds = [name for name in TRIALS if any(row["kind"] == name for row in rows)]
    of = {name: [row for row in rows if row["kind"] == name] for name in kinds}
    counts = {name: Counter(row["verdict"] for row in of[name]) for name in kinds}
    table = {name: {verdict: counts[name][verdict] for verdict in VERDICTS} for name in kinds}
    table["all"] = {verdict: sum(table[name][verdict] for name in kinds) for verdict in VERDICTS}
    found = {
        "commits": Counter(row["commit"] for row in rows),
        "seconds": round(sum(row["seconds"] for row in rows), 1),
        "tried": len(rows),
        "table": table,
    }
    fitted = [row for row in of.get("default", []) if "reliable" in row["figures"]]
    if fitted:
        doubted = [row for row in fitted if not row["figures"]["reliable"]]
        above = sorted(
            row["figures"]["above_gaussian"] for row in fitted if "above_gaussian" in row["figures"]
        )
        found["default_fits"] = {
            "tried": len(of["default"]),
            "fitted": len(fitted),
            "unreliable": len(doubted),
            "share_unreliable": round(len(doubted) / len(fitted), 4),
            "compared_with_a_gaussian": len(above),
            "nats_above_it": {"least": above[0], "median": median(above)} if above else {},
        }
    for clock, of_row in (
        ("seconds", lambda row: row["seconds"]),
        ("processor_seconds", lambda row: row["figures"].get("processor_seconds", 0.0)),
    ):
        spent = {name: sorted(of_row(row) for row in of[name]) for name in kinds}
        found[f"median_{clock}"] = {name: round(median(spent[name]), 2) for name in kinds}
        found[f"longest_{clock}"] = {name: spent[name][-1] for name in kinds}
    found["failures"] = failed(rows)
    unreliable = [row for row in fitted if not row["figures"]["reliable"]]
    found["told"] = rows if len(rows) <= 5 else unreliable
    return found


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
    parser.add_argument("--replay", nargs=2, metavar=("KIND", "SEED"))
    given = parser.parse_args()
    if given.replay:
        print(*attempt(given.replay[0], int(given.replay[1])), sep=": ")
        return 0
    OUT.mkdir(parents=True, exist_ok=True)
    describe = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(describe, capture_output=True, text=True).stdout.strip()
    about = {
        "command": f"python -m tests.campaign {' '.join(sys.argv[1:])}",
        "commit": commit,
        "versions": versions(),
        "hardware": hardware(),
        "seed": given.seed,
    }
    seconds, content = {name: [] for name in TRIALS}, {}
    path = OUT / f"{given.keep or given.number}.jsonl"
    lines = path.read_text().splitlines(keepends=True) if given.keep and path.exists() else []
    lines = [line for line in lines if line.endswith("\n")]  # a kill may have cut the last one
    known = [json.loads(line) for line in lines]
    rows, earlier = [row for row in known if row["verdict"] in FINE], failed(known)
    done = {(row["kind"], row["seed"]) for row in rows}
    worker = Worker("tests.campaign.answers")
    replaced(path, "".join(lines))
    with open(path, "a") as log:
        for kind, seed in drawn(given.number, given.seed, given.only):
            if (kind, seed) in done:
                continue
            usual = median(seconds[kind]) if len(seconds[kind]) > 4 else 0.0
            start = time.perf_counter()
            limit = max(TRIALS[kind][1], 10 * usual)
            verdict, told, figures = asked(worker, kind, seed, limit)
            seconds[kind].append(time.perf_counter() - start)
            row = {"kind": kind, "seed": seed, "verdict": verdict, "told": told}
            row |= {"figures": figures, "seconds": round(seconds[kind][-1], 2), "commit": commit}
            rows.append(row)
            log.write(json.dumps(row) + "\n")
            log.flush()
            if verdict not in FINE:
                print(f"{verdict}: {told}\n  python -m tests.campaign --replay {kind} {seed}")
                sys.stdout.flush()
            content = {**about, **summary(rows), "failures_before": earlier}
            if given.keep:
                replaced(KEPT / f"{given.keep}.json", json.dumps(content, indent=1) + "\n")
    worker.end()
    if not content:
        print(f"all {given.number} trials are done, see {path}")
        return 0
    print(" | ".join(["trial", "tried", *VERDICTS]))
    for name, row in content["table"].items():
        print(" | ".join(map(str, (name, sum(row.values()), *row.values()))))
    if "default_fits" in content:
        print(", ".join(f"{key} {value}" for key, value in content["default_fits"].items()))
    failures = len(content["failures"])
    print(f"campaign of {given.number}, seed {given.seed}: {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
