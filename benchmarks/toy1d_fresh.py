"""The second one-dimensional set, judged on a large fresh draw instead of one test set.

    python benchmarks/toy1d_fresh.py --data DIR --device cuda --out results/toy1d/fresh

Our recipe (``reproduce toy1d --recipe best``) is fitted to the authors' training and validation
points and judged on 200,000 points of the generator; the limit is the true law's mean log-density
on the same points. ``--variants`` are changes of the recipe, to be compared by ``--draws``:
training sets that are drawn afresh, so that nothing is chosen by the authors' points.
Rows are written as they come; a second call adds what is missing.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from measuring import commit, need, write
from selfnorm.datasets import toy1d
from table_frames import in_processes

NAME = "dataset2"
VARIANTS: dict[str, dict[str, Any]] = {  # options of the regressor, of its networks
    "recipe": {},
    "16 members": {"n_members": 16},
    "twice the bins": {"network": {"input_bins": 256, "label_bins": 128}},
    "half the bins": {"network": {"input_bins": 64, "label_bins": 32}},
    "energy twice as long": {"network": {"energy_epochs": 160}},
    "40 components": {"n_components": 40},
    "less dropout": {"network": {"dropout": 0.15, "energy_dropout": 0.5}},
    "weaker decay": {"weight_decay": 0.1},
}
KEYS = ("variant", "draw", "seed")
Row = dict[str, Any]


def run_one(job: Row) -> Row:
    """Fit a variant to one training set, and judge it."""
    import selfnorm as sn
    from selfnorm.paper.toy1d import BEST

    torch.set_num_threads(job["threads"])
    options = dict(BEST[NAME])
    changes = dict(VARIANTS[job["variant"]])
    network = replace(options.pop("network"), **changes.pop("network", {}))
    draw = job["draw"]
    own = {"data_dir": job["data"]} if draw == "authors" else {"seed": 1000 + draw}
    data = toy1d.load(NAME, **own)
    x, y = (torch.cat([getattr(p, k) for p in (data.train, data.val)]).numpy() for k in "xy")
    began = time.perf_counter()
    model = sn.EnergyRegressor(
        **options | changes | job["limits"],
        network=network,
        device=job["device"],
        random_state=job["seed"],
    ).fit(x, y[:, 0])
    fitted = time.perf_counter() - began
    fresh = toy1d.sample(NAME, job["points"], generator=torch.Generator().manual_seed(123_456))
    limit = float(toy1d.conditional_log_prob(NAME, fresh.x, fresh.y).mean())
    x, y = fresh.x.numpy(), fresh.y.numpy()[:, 0]
    log_p = np.concatenate([
        model.log_prob(x[rows], y[rows]) for rows in np.array_split(np.arange(len(y)), 20)
    ])  # fmt: skip
    return {key: job[key] for key in KEYS} | {
        "limit": limit,
        "exact": float(log_p.mean()),
        "se": float(log_p.std() / len(log_p) ** 0.5),
        "gap": limit - float(log_p.mean()),
        "n_test": len(y),
        "seconds": round(fitted, 1),
        "seconds_judging": round(time.perf_counter() - began - fitted, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="folder with the authors' csv files")
    parser.add_argument("--out", type=Path, default=Path("results/toy1d/fresh"))
    parser.add_argument("--variants", nargs="+", default=["recipe"], choices=list(VARIANTS))
    parser.add_argument("--draws", nargs="*", type=int, help="fresh training sets, not theirs")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--points", type=int, default=200_000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--max-epochs", type=int, help="for a quick look")
    args = parser.parse_args()
    need(args.device)
    path = args.out / "toy1d_fresh.json"
    rows: dict[tuple[Any, ...], Row] = {}
    if path.exists():
        rows = {tuple(r[k] for k in KEYS): r for r in json.loads(path.read_text())["rows"]}
    common: Row = {name: getattr(args, name) for name in ("data", "points", "device", "threads")}
    common["limits"] = {} if args.max_epochs is None else {"max_epochs": args.max_epochs}
    jobs = [
        {"variant": variant, "draw": draw, "seed": seed} | common
        for draw in args.draws or ["authors"]
        for seed in args.seeds
        for variant in args.variants
    ]
    jobs = [job for job in jobs if tuple(job[k] for k in KEYS) not in rows]
    made_at = {"commit": commit()}
    for row in in_processes(run_one, [(job,) for job in jobs], args.jobs):
        rows[tuple(row[k] for k in KEYS)] = row | made_at
        print(*(f"{k}={row[k]}" for k in (*KEYS, "gap", "seconds")), flush=True)
        write(path, [*rows.values()], args.device)


if __name__ == "__main__":
    main()
