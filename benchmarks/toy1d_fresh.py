"""The second one-dimensional set, judged on a large fresh draw instead of one test set.

    python benchmarks/toy1d_fresh.py --data DIR --device cuda --out results/toy1d/fresh

Our recipe (``reproduce toy1d --recipe best``) is fitted to the authors' training and validation
points and judged on 200,000 points of the generator at every third of its 3,800 inputs; the limit
is the true mean log-density on the same points. Rows are written as they come; a second call adds
what is missing.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch

from measuring import Row, Stopwatch, commit, in_processes, need, rows_in, write
from selfnorm.datasets import toy1d

NAME = "dataset2"
GRID, EVERY = 3799, 3  # inputs lie on i / 3799; every third is judged, as many take minutes
KEYS = ("variant", "draw", "seed")


def log_density(model: Any, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """``log p(y|x)`` of points ``(n,)`` whose inputs repeat: each is normalised once."""
    inputs, which, counts = np.unique(x, return_inverse=True, return_counts=True)
    order = np.argsort(which, kind="stable")
    place = np.empty_like(which)
    place[order] = np.arange(len(y)) - np.repeat(np.cumsum(counts) - counts, counts)
    labels = np.full((len(inputs), counts.max()), y.mean())
    labels[which, place] = y
    return np.log(model.pdf(inputs[:, None], labels)[which, place])


def run_one(job: Row) -> Row:
    """Fit the recipe to the authors' training and validation points, and judge it."""
    import selfnorm as sn
    from selfnorm.paper.toy1d import BEST

    torch.set_num_threads(job["threads"])
    data = toy1d.load(NAME, data_dir=job["data"])
    x, y = (torch.cat([getattr(p, k) for p in (data.train, data.val)]).numpy() for k in "xy")
    how = {"device": job["device"], "random_state": job["seed"], **job["limits"]}
    clock = Stopwatch()
    model = sn.EnergyRegressor(**BEST[NAME] | how).fit(x, y[:, 0])
    seconds = clock(1)["seconds"]
    clock = Stopwatch()
    drawn = torch.Generator().manual_seed(123_456)
    fresh = toy1d.sample(NAME, round(1.1 * EVERY * job["points"]), generator=drawn)
    kept = ((fresh.x * GRID).round() % EVERY == 0)[:, 0].nonzero()[: job["points"], 0]
    limit = float(toy1d.conditional_log_prob(NAME, fresh.x[kept], fresh.y[kept]).mean())
    x, y = (part[kept].numpy()[:, 0] for part in (fresh.x, fresh.y))
    log_p = log_density(model, x, y)
    return {key: job[key] for key in KEYS} | {
        "limit": limit,
        "exact": float(log_p.mean()),
        "se": float(log_p.std() / len(log_p) ** 0.5),
        "gap": limit - float(log_p.mean()),
        "n_test": len(y),
        "seconds": seconds,
        "seconds_judging": clock(1)["seconds"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="folder with the authors' csv files")
    parser.add_argument("--out", type=Path, default=Path("results/toy1d/fresh"))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--points", type=int, default=200_000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--max-epochs", type=int, help="for a quick look")
    args = parser.parse_args()
    need(args.device)
    path = args.out / "toy1d_fresh.json"
    rows = {tuple(r[k] for k in KEYS): r for r in rows_in(path)}
    common: Row = {name: getattr(args, name) for name in ("data", "points", "device", "threads")}
    common["limits"] = {} if args.max_epochs is None else {"max_epochs": args.max_epochs}
    keys = {"variant": "recipe", "draw": "authors"}
    jobs = [keys | {"seed": seed} | common for seed in args.seeds]
    jobs = [job for job in jobs if tuple(job[k] for k in KEYS) not in rows]
    made_at = {"commit": commit()}
    for row in in_processes(run_one, [(job,) for job in jobs], args.jobs):
        rows[tuple(row[k] for k in KEYS)] = row | made_at
        print(*(f"{k}={row[k]}" for k in (*KEYS, "gap", "seconds")), flush=True)
        write(path, [*rows.values()], args.device)


if __name__ == "__main__":
    main()
