"""Density estimation side by side: our chains, energy machines, flows, mixtures, kernels.

    python benchmarks/density.py --data DIR --out OUT --device cuda --workers 3
    python benchmarks/density_table.py --out results/density OUT/density.json

Six real tables, the same rows and the same scaling for every method (``tabular.py``). Methods
trained by gradient run through the library's own loop, keep the best state on validation rows, draw
fresh dequantisation noise at every step, and are averaged over steps; where a method has several
configurations, the one with the best validation score is reported. Two-sample tests: AUROC of
gradient-boosted trees between test rows and as many samples (0.5: indistinguishable).

Rows are written as they come; a second call with the same ``--out`` and ``--name`` adds what is
missing. ``--runs`` names runs in the order wanted (``california/nsf`` or ``california/nsf/0``).
More than three runs at a time on one GPU slow each other down: steps are chains of small kernels.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

import density_runs
from density_runs import name_of
from measuring import Row, in_processes, provenance, write_json

SETS = ("california", "magic.gamma", "mammography", "power", "shuttle", "bsds300")
SMALL = ("california", "magic.gamma", "mammography")
CLASSIC = ("gmm", "kde")
AEM_TASK = {"n_samples": 20, "validation_samples": 20}
SHOWN = ("test", "val", "lower", "upper", "ess", "train", "seconds")


def flow_jobs(dataset: str) -> list[Row]:
    """NSF and MAF at the sizes of NSF's authors (10 transforms, 2 x 256; 512 for BSDS300), as they
    are and with squashed columns (``flow_tails.py``); more steps where the score rises for longer.
    """
    width = 512 if dataset == "bsds300" else 256
    large = {"transforms": 10, "hidden": (width, width)}
    steps = {"bsds300": 2000, "power": 5000, "shuttle": 6000, "mammography": 5000}
    nsf: Row = {"max_steps": steps.get(dataset, 2000)}
    maf: Row = {"max_steps": 2500 if dataset == "bsds300" else 3000}
    if dataset not in SMALL:
        nsf["batch_size"] = maf["batch_size"] = 1024
    if dataset in ("power", "shuttle"):
        maf["max_steps"] = 8000
    jobs = []
    for kind, loop in (("nsf", nsf), ("maf", maf)):
        plain = {"kind": kind, **large}
        squashed = {**plain, "squash": True}
        jobs.append({"method": kind, "config": f"10x{width}", "model": plain, "loop": loop})
        jobs.append({"method": kind, "config": "asinh", "model": squashed, "loop": loop})
    return jobs


def jobs_for(dataset: str) -> list[Row]:
    """Every method and configuration on a set."""
    jobs: list[Row] = [
        {"method": "selfnorm", "config": "default"},
        # AEM (``aem.py``) at its authors' sizes, and at those of our chain with as many orders
        {"method": "aem", "config": "4x512", "task": AEM_TASK},
        {"method": "aem", "config": "as-ours", "as_ours": True, "task": AEM_TASK},
        *flow_jobs(dataset),
        {"method": "gmm", "config": "by validation"},
        {"method": "kde", "config": "by validation"},
    ]
    return [{**job, "dataset": dataset} for job in jobs]


def planned(args: argparse.Namespace) -> list[Row]:
    """The runs asked for, in order, each once."""
    chosen: dict[str, Row] = {}
    for pattern in args.runs or args.sets:
        dataset, *words = pattern.split("/")
        seeds = [int(words.pop())] if words and words[-1].isdigit() else args.seeds
        for seed in seeds:
            for job in jobs_for(dataset):
                if any(word not in (job["method"], job["config"]) for word in words):
                    continue
                if job["method"] == "kde" and seed != seeds[0]:
                    continue  # nothing is random in a kernel density
                if args.max_steps and job["method"] not in CLASSIC:
                    job["loop"] = {**job.get("loop", {}), "max_steps": args.max_steps}
                job["seed"] = seed
                chosen.setdefault(name_of(job), job)
    return list(chosen.values())


def shown(row: Row) -> str:
    """One line on a run."""
    figures = [f"{k} {row[k]:.4f}" for k in SHOWN if isinstance(row.get(k), float)]
    best = f"best at {row.get('best_step')} of {row.get('n_steps')}"
    return " ".join([f"{name_of(row):36s}", *figures, row.get("error", best)])


def main() -> None:
    """Run what is missing; log-densities of the test rows go to a file beside the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path, default=Path("results/density"))
    parser.add_argument("--name", default="density")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--sets", nargs="+", default=list(SETS))
    parser.add_argument("--runs", nargs="*", help="set[/method[/config]][/seed], in order")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--max-steps", type=int, help="for a quick look")
    args = parser.parse_args()
    path = args.out / f"{args.name}.json"
    rows: list[Row] = []
    arrays: dict[str, np.ndarray] = {}
    if path.exists():
        rows = [row for row in json.loads(path.read_text())["rows"] if "error" not in row]
        with np.load(path.with_suffix(".npz")) as file:
            arrays = dict(file)
    made_by = provenance(args.device)
    done = {name_of(row) for row in rows}
    jobs = [job for job in planned(args) if name_of(job) not in done]
    calls: list[Any] = [
        (job, args.data, "cpu" if job["method"] in CLASSIC else args.device) for job in jobs
    ]
    for row, log_prob in in_processes(density_runs.attempt, calls, args.workers):
        rows.append(row | {"commit": made_by["commit"]})
        print(shown(row), flush=True)
        if log_prob is not None:
            arrays[name_of(row)] = log_prob
        part = path.with_suffix(".part.npz")
        part.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(part, **arrays)
        os.replace(part, path.with_suffix(".npz"))
        content = {"table": "density", "recipe": "default", **made_by}
        write_json(path, {**content, "concurrent_runs": args.workers, "rows": rows})


if __name__ == "__main__":
    main()
