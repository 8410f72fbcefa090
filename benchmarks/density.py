"""Density estimation side by side: chains of EBMs against flows, mixtures and kernels.

    python benchmarks/density.py --data DIR --out OUT --device cuda --workers 2 --cpu-workers 12
    python benchmarks/density_table.py --out results/density OUT/density.json

More than two runs at a time on one GPU slow each other down: steps are chains of small kernels.
Six real tables, the same rows and the same scaling for every method (``selfnorm.data.tabular``).
Methods trained by gradient run through the library's own loop with early stopping on the validation
rows, draw fresh dequantisation noise at every step, and are averaged over steps; where a method has
several configurations, the one with the best validation score is reported. Two-sample tests: AUROC
of gradient-boosted trees between test rows and as many samples (0.5: indistinguishable).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import queue
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

SETS = ("power", "bsds300", "california", "magic.gamma", "shuttle", "mammography")
LOOP = {
    "batch_size": 512,
    "max_epochs": 10**6,
    "clip_norm": 5.0,
    "ema": 0.998,
    "weight_decay": 1e-2,
    "schedule": "one_cycle",
    "progress": False,
}


def flow_jobs(dataset: str) -> list[dict[str, Any]]:
    """NSF and MAF at the sizes of NSF's authors: 10 transforms, 2 x 256 (512 for BSDS300)."""
    width = 512 if dataset == "bsds300" else 256
    small = dataset in ("california", "magic.gamma", "mammography")
    steps = {"bsds300": 4000, "power": 2000, "shuttle": 2000}.get(dataset, 600)
    jobs: list[dict[str, Any]] = [
        {
            "method": "nsf",
            "config": f"10x{width}",
            "model": {"kind": "nsf", "transforms": 10, "hidden": (width, width)},
            "loop": {
                "max_steps": steps,
                "lr": 1e-3,
                "batch_size": 1024 if dataset == "bsds300" else 2048,
            },
        }
    ]
    jobs.append(
        {
            "method": "maf",
            "config": f"10x{width}",
            "model": {"kind": "maf", "transforms": 10, "hidden": (width, width)},
            "loop": {
                "max_steps": 1500 if small else 4000,
                "lr": 1e-3,
                "batch_size": 512 if small else 1024,
            },
        }
    )
    return jobs


def jobs_for(dataset: str, methods: list[str], variants: list[dict[str, Any]]) -> list[dict]:
    jobs: list[dict[str, Any]] = []
    if "flows" in methods:
        jobs += flow_jobs(dataset)
    if "classic" in methods:
        jobs += [{"method": "gmm", "config": "by validation"}]
        jobs += [{"method": "kde", "config": "by validation", "one_seed": True}]
    if "ours" in methods:
        jobs += [{"method": "selfnorm", "config": "default"}]
    jobs += [v for v in variants if v.get("dataset", dataset) == dataset]
    return [{**job, "dataset": dataset} for job in jobs]


def two_sample_auroc(real: np.ndarray, fake: np.ndarray, seed: int) -> float:
    """Cross-validated AUROC of gradient-boosted trees that tell samples from held-out rows."""
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.model_selection import cross_val_score

    n = min(len(real), len(fake), 5000)
    x = np.vstack([real[:n], fake[:n]])
    y = np.r_[np.ones(n), np.zeros(n)]
    trees = HistGradientBoostingClassifier(max_iter=100, random_state=seed)
    order = np.random.RandomState(seed).permutation(2 * n)
    return float(cross_val_score(trees, x[order], y[order], cv=2, scoring="roc_auc").mean())


def train_ours(job: dict[str, Any], table: Any, device: str) -> tuple[dict[str, Any], Any, Any]:
    import torch

    from selfnorm.autoregressive import AutoregressiveEBM
    from selfnorm.autoregressive_evaluation import conditional_integrals, row_bounds
    from selfnorm.autoregressive_training import default_options
    from selfnorm.loop import LoopOptions, run

    defaults = default_options(len(table.train), table.dim, device)
    discrete = "auto" if table.name not in ("power", "bsds300") else None
    torch.manual_seed(job["seed"])
    sizes = {**defaults.model, **job.get("model", {}), "discrete": discrete}
    model = AutoregressiveEBM(table.dim, **sizes).to(device)
    loop = {**defaults.fit, **job.get("loop", {}), "progress": False, "seed": job["seed"]}
    task = model.training_task(**{**defaults.task, **job.get("task", {})})
    began = time.perf_counter()
    history = run(
        task,
        (table.train_values.to(device),),
        val_data=(table.val_values.to(device),),
        options=LoopOptions(**loop),
    )
    row: dict[str, Any] = {"seconds": time.perf_counter() - began}
    model.eval()
    test = table.test.to(device)
    log_prob = model.log_prob(test)
    torch.manual_seed(0)
    figures = row_bounds(model, test, n_samples=300 if table.dim > 20 else 1000)
    n_quad = min(len(test), 2000 if table.dim > 20 else 10**6)
    exact = model.log_prob(test[:n_quad], normalizer="quadrature")
    difference = (figures["upper"][:n_quad] - exact).double()
    se = float(figures["variance"][:n_quad].double().sum().sqrt()) / n_quad
    integrals = conditional_integrals(model, test[:100])
    row |= {
        "conditional_integrals": int(integrals.numel()),
        "lower": float(figures["lower"].double().mean()),
        "upper": float(figures["upper"].double().mean()),
        "ess": float(figures["ess"].mean()),
        "ess_worst_column": float(figures["ess"].mean(0).min()),
        "quadrature": float(exact.double().mean()),
        "is_minus_quadrature": float(difference.mean()),
        "is_minus_quadrature_se": se,
        "worst_integral_error": float((integrals - 1).abs().max()),
        "train": float(model.log_prob(table.train[:4000].to(device)).double().mean()),
    }
    return row | progress_of(history), log_prob, model


def progress_of(history: Any) -> dict[str, Any]:
    return {
        "val": history.best_score,
        "best_step": history.best_step,
        "n_steps": history.n_steps,
        "stopped": history.stopped,
        "diverged": history.stopped == "diverged",
        "skipped_steps": history.skipped_steps,
        "val_curve": [
            [r["step"], round(r["val_score"], 4)]
            for r in history.records[:: max(1, len(history.records) // 10)]
        ],
    }


def train_flow(job: dict[str, Any], table: Any, device: str) -> tuple[dict[str, Any], Any, Any]:
    import torch

    from selfnorm.flows import Flow
    from selfnorm.loop import LoopOptions, run

    torch.distributions.Distribution.set_default_validate_args(False)  # it waits for the GPU
    torch.manual_seed(job["seed"])
    flow = Flow(table.dim, **job["model"]).to(device)
    columns = table.columns.to(device) if table.name not in ("power", "bsds300") else None
    steps = job["loop"]["max_steps"]
    loop = {**LOOP, "validate_every": max(100, steps // 40), "patience": 10, **job["loop"]}
    began = time.perf_counter()
    history = run(
        flow.training_task(columns=columns),
        (table.train_values.to(device),),
        val_data=(table.val.to(device),),
        options=LoopOptions(**loop, seed=job["seed"]),
    )
    row = {"seconds": time.perf_counter() - began} | progress_of(history)
    flow.eval()
    with torch.no_grad():
        log_prob = torch.cat([flow.log_prob(part) for part in table.test.to(device).split(4096)])
    return row, log_prob, flow


def fit_classic(job: dict[str, Any], table: Any) -> tuple[dict[str, Any], Any, Any]:
    from sklearn.mixture import GaussianMixture
    from sklearn.neighbors import KernelDensity

    train, val, test = (
        np.asarray(a, dtype=np.float64) for a in (table.train, table.val, table.test)
    )
    began = time.perf_counter()
    best = None
    if job["method"] == "gmm":
        grid: list[Any] = [5, 20, 60] if table.dim > 20 else [10, 30, 100, 200]
        models = [
            GaussianMixture(k, reg_covar=1e-5, random_state=job["seed"], max_iter=200) for k in grid
        ]
        rows = train
    else:
        scale = float(train.std(0).mean())
        grid = [scale * h for h in (0.03, 0.06, 0.12, 0.25, 0.5)]
        models = [KernelDensity(bandwidth=h, rtol=1e-4) for h in grid]
        rows = train[np.random.RandomState(job["seed"]).permutation(len(train))[:20_000]]
    for choice, model in zip(grid, models, strict=True):
        score = float(model.fit(rows).score_samples(val[:1500]).mean())
        if best is None or score > best[0]:
            best = (score, choice, model)
    assert best is not None
    log_prob = best[2].score_samples(test)
    row = {"seconds": time.perf_counter() - began, "val": best[0], "chosen": best[1]}
    return row | {"diverged": False}, log_prob, None


def draw(model: Any, job: dict[str, Any], n: int) -> np.ndarray:
    import torch

    if job["method"] == "selfnorm":
        return np.asarray(model.sample(n, seed=job["seed"]).cpu())
    torch.manual_seed(job["seed"])
    parts = [model.sample((min(2000, n - i),)).cpu() for i in range(0, n, 2000)]
    return np.asarray(torch.cat(parts))


def run_job(job: dict[str, Any], data: str, device: str) -> tuple[dict[str, Any], np.ndarray]:
    import torch

    from selfnorm.data import tabular

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    table = tabular.load(job["dataset"], data)
    if job["method"] == "selfnorm":
        row, log_prob, model = train_ours(job, table, device)
    elif job["method"] in ("nsf", "maf"):
        row, log_prob, model = train_flow(job, table, device)
    else:
        row, log_prob, model = fit_classic(job, table)
    log_prob = np.asarray(log_prob.cpu() if hasattr(log_prob, "cpu") else log_prob, np.float64)
    test = np.asarray(table.test)
    row |= {"test": float(log_prob.mean()), "test_se": float(log_prob.std() / len(test) ** 0.5)}
    row |= {"worst_row": float(log_prob.min()), "n_train": len(table.train), "n_test": len(test)}
    if model is not None and job.get("two_sample", True):
        began = time.perf_counter()
        samples = draw(model, job, min(len(test), 5000))
        row["sampling_seconds"] = time.perf_counter() - began
        finite = np.isfinite(samples).all(1)
        row["samples_not_finite"] = int((~finite).sum())
        row["two_sample_auroc"] = two_sample_auroc(test, samples[finite], job["seed"])
    keys = ("dataset", "method", "config", "seed", "model", "loop", "task")
    return {k: job[k] for k in keys if k in job} | row, log_prob.astype(np.float32)


def worker(jobs: Any, results: Any, data: str, device: str) -> None:
    while True:
        job = jobs.get()
        if job is None:
            return
        try:
            results.put(run_job(job, data, device))
        except Exception as error:  # one failed run must not end the table
            row = {k: job[k] for k in ("dataset", "method", "config", "seed")}
            results.put((row | {"error": f"{type(error).__name__}: {error}"[-800:]}, None))
        if device != "cpu":
            import gc

            import torch

            gc.collect()
            torch.cuda.empty_cache()


def run_all(args: argparse.Namespace) -> None:
    variants = json.loads(Path(args.variants).read_text()) if args.variants else []
    jobs = [
        {**job, "seed": seed}
        for dataset in args.sets
        for job in jobs_for(dataset, args.methods, variants)
        if f"{dataset}/{job['method']}" not in args.skip
        for seed in (args.seeds if not job.get("one_seed") else args.seeds[:1])
    ]
    cost = {"bsds300": 0, "power": 1, "shuttle": 1}
    jobs.sort(key=lambda j: (j["method"] == "maf", cost.get(j["dataset"], 2), j["seed"]))
    on_cpu = [j for j in reversed(jobs) if j["method"] in ("gmm", "kde")]
    on_device = [j for j in jobs if j["method"] not in ("gmm", "kde")]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes, queues = [], []  # a queue that is garbage-collected takes its semaphores along
    for group, device, count in (
        (on_device, args.device, args.workers),
        (on_cpu, "cpu", args.cpu_workers),
    ):
        pending = context.Queue()
        queues.append(pending)
        for job in group:
            pending.put(job)
        for _ in range(min(count, len(group))):
            pending.put(None)
            processes.append(
                context.Process(
                    target=worker, args=(pending, results, args.data, device), daemon=True
                )
            )
    for process in processes:
        process.start()
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    rows, arrays, began, saved = [], {}, time.perf_counter(), 0.0
    while len(rows) < len(jobs) and time.perf_counter() - began < args.deadline:
        try:
            row, log_prob = results.get(timeout=1)
        except queue.Empty:
            continue
        rows.append(row)
        name = f"{row['dataset']}/{row['method']}/{row['config']}/{row['seed']}"
        if log_prob is not None:
            arrays[name] = log_prob
        figures = [
            f"{label} {row[key]:.4f}"
            for label, key in (
                ("test", "test"),
                ("val", "val"),
                ("lower", "lower"),
                ("upper", "upper"),
                ("ess", "ess"),
                ("auroc", "two_sample_auroc"),
                ("train", "train"),
            )
            if isinstance(row.get(key), float)
        ]
        best = f"best at {row.get('best_step')} of {row.get('n_steps')}"
        print(f"{time.perf_counter() - began:5.0f}s {name:42s}", *figures, best, flush=True)
        if "error" in row:
            print(row["error"], flush=True)
        if time.perf_counter() - saved > 10 or len(rows) == len(jobs):
            save(out / args.name, rows, arrays, args, time.perf_counter() - began)
            saved = time.perf_counter()
    save(out / args.name, rows, arrays, args, time.perf_counter() - began)
    print(f"{len(rows)} of {len(jobs)} runs, {time.perf_counter() - began:.0f} s", flush=True)
    for process in processes:
        process.terminate()


def save(path: Path, rows: list, arrays: dict, args: argparse.Namespace, seconds: float) -> None:
    from selfnorm.experiments.report import hardware, versions

    content = {
        "table": "density",
        "recipe": "default",
        "command": "python benchmarks/density.py " + " ".join(sys.argv[1:]),
        "versions": versions(),
        "hardware": hardware(args.device),
        "concurrent_runs": args.workers,
        "seconds": round(seconds, 1),
        "rows": rows,
    }
    path.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")
    np.savez_compressed(path.with_suffix(".npz"), **arrays)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", default="results/density")
    parser.add_argument("--name", default="density")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--cpu-workers", type=int, default=1)
    parser.add_argument("--deadline", type=float, default=1e9)
    parser.add_argument("--sets", nargs="+", default=list(SETS))
    parser.add_argument("--methods", nargs="*", default=["ours", "flows", "classic"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--skip", nargs="*", default=[], help="e.g. bsds300/nsf")
    parser.add_argument("--variants", help="JSON list of further configurations of selfnorm")
    run_all(parser.parse_args())


if __name__ == "__main__":
    main()
