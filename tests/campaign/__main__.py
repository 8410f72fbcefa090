"""``python -m tests.campaign N SEED``: one table of verdicts; every failure with its replay.

``python -m tests.campaign --replay KIND SEED`` runs one trial again, in this process.
"""

import json
import sys
import time
from collections import Counter
from pathlib import Path
from statistics import median

import numpy as np

from tests.campaign.trials import TRIALS, attempt
from tests.worker import Worker

VERDICTS = ("right", "clear error", "traceback", "silent wrong", "hang", "lost")
FINE = VERDICTS[:2]
OUT = Path("out/campaign")
LEAST_LIMIT = 60.0  # seconds: a machine may be busy


def main() -> int:
    if sys.argv[1:2] == ["--replay"]:
        print(*attempt(sys.argv[2], int(sys.argv[3])), sep=": ")
        return 0
    number, seed = (int(text) for text in (*sys.argv[1:], "100", "0")[:2])
    rng = np.random.default_rng(seed)
    names, shares = list(TRIALS), np.array([share for share, _ in TRIALS.values()])
    OUT.mkdir(parents=True, exist_ok=True)
    counts, seconds, failures = Counter(), {name: [] for name in names}, []
    worker = Worker("tests.campaign.trials")
    with open(OUT / f"{number}_{seed}.jsonl", "w") as log:
        for _ in range(number):
            kind = str(rng.choice(names, p=shares / shares.sum()))
            own = int(rng.integers(2**31))
            limit = max(LEAST_LIMIT, 10 * median(seconds[kind] or [LEAST_LIMIT]))
            began = time.perf_counter()
            try:
                verdict, told = worker.ask([kind, own], limit)
            except TimeoutError as error:
                verdict, told = "hang", str(error)
            except EOFError as error:
                verdict, told = "traceback", str(error)
            seconds[kind].append(time.perf_counter() - began)
            counts[kind, verdict] += 1
            row = {"kind": kind, "seed": own, "verdict": verdict, "told": told}
            log.write(json.dumps({**row, "seconds": round(seconds[kind][-1], 2)}) + "\n")
            log.flush()
            if verdict not in FINE:
                failures.append(row)
                print(f"{verdict}: {told}\n  python -m tests.campaign --replay {kind} {own}")
    print(" | ".join(["trial", "tried", *VERDICTS]))
    for name in (*names, "all"):
        mine = [counts[n, v] for v in VERDICTS for n in names if name in (n, "all")]
        by_verdict = [sum(counts[n, v] for n in names if name in (n, "all")) for v in VERDICTS]
        print(" | ".join(str(entry) for entry in (name, sum(mine), *by_verdict)))
    print(f"campaign of {number}, seed {seed}: {len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
