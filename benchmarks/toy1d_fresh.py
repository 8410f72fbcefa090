"""The second one-dimensional set, judged on a large fresh draw instead of one test set.

    python benchmarks/toy1d_fresh.py --data DIR --device cuda --out results/toy1d/fresh

Our recipe (``reproduce toy1d --recipe best``) is fitted to the authors' training and validation
points and judged on 200,000 points of the generator at every third of its 3,800 inputs; the limit
is the true law's mean log-density on the same points. ``--variants`` are changes of the recipe, to
be compared by ``--draws``: training sets that are drawn afresh, so that nothing is chosen by the
authors' points.
Rows are written as they come, models kept beside them; a second call adds what is missing.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from measuring import commit, need, rows_in, write
from selfnorm.datasets import toy1d
from table_frames import in_processes

NAME = "dataset2"
GRID, EVERY = 3799, 3  # inputs lie on i / 3799; every third is judged, as many take minutes
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


def log_density(model: Any, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """``log p(y|x)`` of points ``(n,)`` whose inputs repeat: each is normalised once."""
    inputs, which, counts = np.unique(x, return_inverse=True, return_counts=True)
    order = np.argsort(which, kind="stable")
    place = np.empty_like(which)
    place[order] = np.arange(len(y)) - np.repeat(np.cumsum(counts) - counts, counts)
    labels = np.full((len(inputs), counts.max()), y.mean())
    labels[which, place] = y
    return np.log(model.pdf(inputs[:, None], labels)[which, place])


def fitted(job: Row) -> tuple[Any, float]:
    """A variant fitted to one training set, or as an earlier call left it."""
    import selfnorm as sn
    from selfnorm.paper.toy1d import BEST

    kept = Path(job["models"]) / "-".join(str(job[key]) for key in KEYS).replace(" ", "_")
    if (kept / "seconds").exists():
        return sn.load(kept / "model"), float((kept / "seconds").read_text())
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
    seconds = time.perf_counter() - began
    kept.mkdir(parents=True, exist_ok=True)
    model.save(kept / "model")
    (kept / "seconds").write_text(str(seconds))
    return model, seconds


def run_one(job: Row) -> Row:
    """Fit a variant to one training set, and judge it."""
    torch.set_num_threads(job["threads"])
    model, seconds = fitted(job)
    began = time.perf_counter()
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
        "seconds": round(seconds, 1),
        "seconds_judging": round(time.perf_counter() - began, 1),
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
    rows = {tuple(r[k] for k in KEYS): r for r in rows_in(path)}
    common: Row = {name: getattr(args, name) for name in ("data", "points", "device", "threads")}
    common["models"] = str(args.out / "models")
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
