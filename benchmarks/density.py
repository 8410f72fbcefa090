"""Density estimation side by side: our chains, energy machines, flows, mixtures, kernels.

    python benchmarks/density.py --data DIR --out OUT --device cuda --workers 3 --cpu-workers 2
    python benchmarks/density_table.py --out results/density OUT/density.json

Six real tables, the same rows and the same scaling for every method
(``tabular.py``).
Methods trained by gradient run through the library's own loop, keep the best state on validation
rows, draw fresh dequantisation noise at every step, and are averaged over steps; where a method has
several configurations, the one with the best validation score is reported. Two-sample tests: AUROC
of gradient-boosted trees between test rows and as many samples (0.5: indistinguishable).

Rows are written as they come; a second call with the same ``--out`` and ``--name`` adds what is
missing. ``--runs`` names runs in the order wanted (``california/nsf`` or ``california/nsf/0``;
``california/nsf/10x256/1+2`` trains two seeds in one run, see ``seeds.py``).
More than three runs at a time on one GPU slow each other down: steps are chains of small kernels.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import queue
import time
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import density_runs
from measuring import provenance
from selfnorm.errors import SelfnormError

SETS = ("california", "magic.gamma", "mammography", "power", "shuttle", "bsds300")
SMALL = ("california", "magic.gamma", "mammography")
CLASSIC = ("gmm", "kde")
TOGETHER = ("nsf", "maf", "aem")  # whose seeds may be trained in one run
AEM_TASK = {"n_samples": 20, "validation_samples": 20}
# what a run may end by: training and memory (RuntimeError), data, linear algebra, overflow, files
FAILURES = (RuntimeError, ValueError, ArithmeticError, MemoryError, OSError, SelfnormError)
SHOWN = ("test", "val", "lower", "upper", "ess", "train", "seconds")


def flow_jobs(dataset: str) -> list[dict[str, Any]]:
    """NSF and MAF at the sizes of NSF's authors (10 transforms, 2 x 256; 512 for BSDS300), as they
    are and with squashed columns (``flow_tails.py``), and smaller NSFs where 15,000 rows let the
    large one overfit. More steps where the validation score rises for longer.
    """
    width = 512 if dataset == "bsds300" else 256
    large = {"transforms": 10, "hidden": (width, width)}
    small = {"transforms": 5, "hidden": (128, 128)}
    steps = {"bsds300": 2000, "power": 5000, "shuttle": 6000, "mammography": 5000}
    nsf: dict[str, Any] = {"max_steps": steps.get(dataset, 2000)}
    maf: dict[str, Any] = {"max_steps": 2500 if dataset == "bsds300" else 3000}
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
    if dataset in SMALL:
        fewer = {"kind": "nsf", "transforms": 5, "hidden": (256, 256), "squash": True}
        for config, model in (("5x128", {"kind": "nsf", **small}), ("asinh-5x256", fewer)):
            jobs.append({"method": "nsf", "config": config, "model": model, "loop": nsf})
    return jobs


def jobs_for(dataset: str, variants: list[dict[str, Any]]) -> list[dict[str, Any]]:
    jobs: list[dict[str, Any]] = [
        {"method": "selfnorm", "config": "default"},
        # AEM (``aem.py``) at its authors' sizes, and at those of our chain with as many orders
        {"method": "aem", "config": "4x512", "task": AEM_TASK},
        {"method": "aem", "config": "as-ours", "as_ours": True, "task": AEM_TASK},
        *flow_jobs(dataset),
        {"method": "gmm", "config": "by validation"},
        {"method": "kde", "config": "by validation"},
        *(v for v in variants if v.get("dataset", dataset) == dataset),
    ]
    return [{**job, "dataset": dataset} for job in jobs]


def name_of(row: dict[str, Any]) -> str:
    return f"{row['dataset']}/{row['method']}/{row['config']}/{row['seed']}"


def matches(job: dict[str, Any], wanted: list[str]) -> bool:
    """Whether a run is meant by ``[method or config[, config]]``."""
    return all(word in (job["method"], job["config"]) for word in wanted)


def planned(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The runs asked for, in order, each once."""
    variants = json.loads(Path(args.variants).read_text()) if args.variants else []
    chosen: dict[str, dict[str, Any]] = {}
    for pattern in args.runs or args.sets:
        dataset, *wanted = pattern.split("/")
        seeds, together = list(args.seeds), False
        if wanted and wanted[-1].replace("+", "").isdigit():
            together = "+" in wanted[-1]
            seeds = [int(seed) for seed in wanted.pop().split("+")]
        for seed in seeds:
            for job in jobs_for(dataset, variants):
                if not matches(job, wanted) or (job["method"] == "kde" and seed != seeds[0]):
                    continue  # nothing is random in a kernel density
                if args.max_steps and job["method"] not in CLASSIC:
                    job["loop"] = {**job.get("loop", {}), "max_steps": args.max_steps}
                if together and job["method"] in TOGETHER:
                    job["seeds"] = seeds
                first = job | {"seed": seeds[0] if "seeds" in job else seed}
                chosen.setdefault(name_of(first), first)
    return list(chosen.values())


def worker(jobs: Any, results: Any, data: str, device: str) -> None:
    import gc

    import torch

    torch.set_num_threads(1)
    while True:
        job = jobs.get()
        if job is None:
            return
        try:
            for result in density_runs.run_job(job, data, device):
                results.put(result)
        except FAILURES as error:  # one failed run must not end the table
            row = {k: job[k] for k in ("dataset", "method", "config", "seed")}
            results.put((row | {"error": f"{type(error).__name__}: {error}"[:200]}, None, None))
            if "CUDA error" in str(error):  # nothing works in this process any more
                results.close()
                results.join_thread()
                os._exit(1)
        gc.collect()
        if device != "cpu":
            torch.cuda.empty_cache()


class Outcome:
    """The rows and the log-densities of the test rows, on disk beside each other."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.began = args, time.perf_counter()
        # asked for once: a GPU that has failed since does not answer
        self.made_by = provenance(args.device)
        self.path = Path(args.out) / args.name
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.rows: list[dict[str, Any]] = []
        self.arrays: dict[str, np.ndarray] = {}
        self.saved = 0.0
        if self.json.exists():
            self.rows = [r for r in json.loads(self.json.read_text())["rows"] if "error" not in r]
            if self.npz.exists():
                with np.load(self.npz) as file:
                    self.arrays = {name: file[name] for name in file}
        self.done = {name_of(row) for row in self.rows}

    @property
    def json(self) -> Path:
        return self.path.with_name(self.path.name + ".json")

    @property
    def npz(self) -> Path:
        return self.path.with_name(self.path.name + ".npz")

    def add(self, row: dict[str, Any], log_prob: np.ndarray | None) -> None:
        row["commit"] = self.made_by["commit"]
        self.rows.append(row)
        if log_prob is not None:
            self.arrays[name_of(row)] = log_prob
        figures = [f"{k} {row[k]:.4f}" for k in SHOWN if isinstance(row.get(k), float)]
        if "error" in row:
            figures.append(row["error"])
        best = f"best at {row.get('best_step')} of {row.get('n_steps')}"
        elapsed = time.perf_counter() - self.began
        print(f"{elapsed:5.0f}s {name_of(row):36s}", *figures, best, flush=True)

    def save(self, *, at_once: bool = False) -> None:
        if not at_once and time.perf_counter() - self.saved < 8:
            return
        content = {
            "table": "density",
            "recipe": "default",
            **self.made_by,
            "concurrent_runs": self.args.workers,
            "seconds": round(time.perf_counter() - self.began, 1),
            "rows": self.rows,
        }
        # a file that is replaced at once is whole whenever the benchmark is killed
        arrays, rows = (self.path.with_name(f"{self.path.name}.part.{e}") for e in ("npz", "json"))
        np.savez_compressed(arrays, **self.arrays)
        os.replace(arrays, self.npz)
        rows.write_text(json.dumps(content, indent=1) + "\n")
        os.replace(rows, self.json)
        self.saved = time.perf_counter()


def run_all(args: argparse.Namespace) -> None:
    outcome = Outcome(args)
    jobs = [job for job in planned(args) if name_of(job) not in outcome.done]
    expected = sum(len(job.get("seeds", [0])) for job in jobs)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes, queues = [], []  # a queue that is garbage-collected takes its semaphores along
    for group, device, count in (
        ([j for j in jobs if j["method"] not in CLASSIC], args.device, args.workers),
        ([j for j in jobs if j["method"] in CLASSIC], "cpu", args.cpu_workers),
    ):
        pending = context.Queue()
        queues.append(pending)
        for job in group:
            pending.put(job)
        for _ in range(min(count, len(group))):
            pending.put(None)
            asked = (pending, results, args.data, device)
            processes.append(context.Process(target=worker, args=asked, daemon=True))
    for process in processes:
        process.start()
    scores: list[tuple[dict[str, Any], Future[float]]] = []
    received = 0
    testers = max(1, args.cpu_workers)
    with ProcessPoolExecutor(testers, mp_context=context) as pool:  # trees, beside the training
        while received < expected or scores:
            if time.perf_counter() - outcome.began > args.deadline:
                break
            try:
                row, log_prob, pair = results.get(timeout=1)
            except queue.Empty:
                if not scores and not any(process.is_alive() for process in processes):
                    break
            else:
                received += 1
                outcome.add(row, log_prob)
                outcome.save(at_once=True)
                if pair is not None:
                    test = density_runs.two_sample_auroc
                    scores.append((row, pool.submit(test, *pair, row["seed"])))
            for row, future in [s for s in scores if s[1].done()]:
                row["two_sample_auroc"] = future.result()
                scores.remove((row, future))
            outcome.save()
        outcome.save(at_once=True)
        for process in processes:
            process.terminate()
        pool.shutdown(wait=False, cancel_futures=True)
    print(f"{received} of {expected} runs", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", default="results/density")
    parser.add_argument("--name", default="density")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--cpu-workers", type=int, default=1, help="GMM, KDE; two-sample tests")
    parser.add_argument("--deadline", type=float, default=1e9, help="seconds")
    parser.add_argument("--sets", nargs="+", default=list(SETS))
    parser.add_argument("--runs", nargs="*", help="set[/method[/config]][/seed], in order")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--max-steps", type=int, help="for a quick look")
    parser.add_argument("--variants", help="JSON list of further configurations of selfnorm")
    run_all(parser.parse_args())


if __name__ == "__main__":
    main()
