"""One run of the density benchmark: train a method on a set, score it, draw from it."""

from __future__ import annotations

import math
import time
import warnings
from typing import Any

import numpy as np
import torch

import tabular
from measuring import Row, now

CONTINUOUS = ("power", "bsds300")  # sets whose loaders leave nothing to dequantise
CHAINS = ("selfnorm", "aem")
FLOWS = ("nsf", "maf")
KEYS = ("dataset", "method", "config", "seed")
NODES = 8192  # of the quadrature that normalises the conditionals whose integrals are checked
FLOW_LOOP = {
    "batch_size": 512,
    "max_epochs": 10**6,
    "lr": 1e-3,
    "clip_norm": 5.0,
    "ema": 0.998,
    "weight_decay": 1e-2,
    "schedule": "one_cycle",
    "progress": False,
}


def progress_of(history: Any) -> Row:
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


def chain_options(job: Row, table: Any, device: str) -> tuple[Row, Row, Row]:
    """Sizes, loop and task of our chain, or of an energy machine with the same budget: steps, rows
    a step, rate.
    """
    from selfnorm.chain import default_options

    defaults = default_options(len(table.train), table.dim, device)
    sizes = dict(defaults.model)
    if job["method"] == "aem":
        alike = ("hidden", "blocks", "orderings", "drop", "encoding")
        sizes = {name: sizes[name] for name in alike} if job.get("as_ours") else {}
    sizes |= job.get("model", {})
    sizes["discrete"] = None if table.name in CONTINUOUS else "auto"
    loop = {**defaults.fit, **job.get("loop", {}), "progress": False}
    return sizes, loop, {**defaults.task, **job.get("task", {})}


def trained(task: Any, table: Any, val: torch.Tensor, loop: Row, device: str) -> tuple[Any, float]:
    """The history of a run through the library's loop, and its seconds."""
    from selfnorm.training import TrainingOptions, run

    rows, held_out = (table.train_values.to(device),), (val.to(device),)
    began = now(device)
    history = run(task, rows, val_data=held_out, options=TrainingOptions(**loop))
    return history, now(device) - began


def train_chain(job: Row, table: Any, device: str) -> tuple[Row, Any]:
    from aem import EnergyMachine
    from selfnorm.chain import AutoregressiveEBM

    sizes, loop, task_options = chain_options(job, table, device)
    torch.manual_seed(job["seed"])
    kind = EnergyMachine if job["method"] == "aem" else AutoregressiveEBM
    model = kind(table.dim, **sizes).to(device)
    loop["seed"] = job["seed"]
    task = model.training_task(**task_options)
    history, seconds = trained(task, table, table.val_values, loop, device)
    row = {"seconds": seconds, "model": sizes, "loop": loop, "task": task_options}
    model.eval()
    return row | progress_of(history), model


@torch.no_grad()
def conditional_integrals(
    model: Any, x: torch.Tensor, *, n_nodes: int = 2048, n_grid: int = 600
) -> torch.Tensor:
    """``int p(x_i | x_<i) dx_i`` for every factor at rows ``x``, ``(R, n, dim)``: ones.

    The factors are normalised by the quadrature of ``log_prob`` and
    integrated by another rule: trapezoids on the union of ``n_grid`` points around every component,
    fine at its centre and reaching out to 10,000 of its scales.
    """
    x = model.check(x)
    parts = []
    for rows in model.chunks(len(x), n_grid * model.n_components):
        at = model.factors(model.columns(x[rows])[0])
        log_norm = model.quadrature(at, n_nodes)
        reach = math.asinh(1e4)
        around = torch.sinh(torch.linspace(-reach, reach, n_grid, device=x.device)).view(
            -1, 1, 1, 1
        )
        k = model.n_components
        grid = [
            at.proposal.loc[..., i] + at.proposal.log_scale[..., i].exp() * around for i in range(k)
        ]
        y = torch.cat(grid).sort(0).values
        log_p = at.proposal.log_prob(y) + model.energy(y, at) - log_norm
        parts.append(torch.trapezoid(log_p.double().exp(), y.double(), dim=0))
    return torch.cat(parts, 1)


def bounds_of(model: Any, table: Any, device: str) -> Row:
    """Bounds, what the learned b is off, effective sample size, agreement with quadrature,
    integrals of conditionals.

    Agreement is measured on the lower bound, which is linear in the samples: quadrature minus it
    has mean zero. The upper bound holds the logarithm of a mean and is too high by half its
    variance, several standard errors where many factors and rows are averaged.
    """
    from selfnorm.chain import row_bounds

    test = table.test.to(device)
    wide = table.dim > 20
    rows = test[: 2000 if wide else 10**6]
    torch.manual_seed(0)
    figures = row_bounds(model, rows, n_samples=300 if wide else 1000)
    compared = rows[: 500 if wide else 2000]
    exact = model.log_prob(compared, normalizer="quadrature").double()
    difference = figures["lower"][: len(compared)].double() - exact
    variance = figures["variance"][: len(compared)].double()
    off = (figures["learned"] - figures["quadrature"]).double()
    contexts = test[torch.randperm(len(test))[:100]]
    integrals = conditional_integrals(model, contexts, n_nodes=NODES, n_grid=2000)
    return {
        "lower": float(figures["lower"].double().mean()),
        "upper": float(figures["upper"].double().mean()),
        "learned_lower": float(figures["learned_lower"].double().mean()),
        "learned_error": float(off.mean()),
        "learned_rms": float(off.square().mean().sqrt()),
        "ess": float(figures["ess"].mean()),
        "ess_worst_column": float(figures["ess"].mean(0).min()),
        "rows_bounded": len(rows),
        "quadrature": float(exact.mean()),
        "rows_quadrature": len(compared),
        "is_minus_quadrature": float(difference.mean()),
        "is_minus_quadrature_se": float(variance.sum().sqrt()) / len(compared),
        "contexts_integrated": len(contexts),
        "nodes": NODES,
        "conditionals_integrated": int(integrals.numel()),
        "worst_integral_error": float((integrals - 1).abs().max()),
        "train": float(model.log_prob(table.train[:4000].to(device)).double().mean()),
    }


def make_flow(dim: int, sizes: Row, device: str) -> Any:
    from flow_tails import SquashedFlow
    from selfnorm.distributions import Flow

    torch.distributions.Distribution.set_default_validate_args(False)  # it waits for the GPU
    squash = sizes.get("squash", False)
    options = {k: v for k, v in sizes.items() if k != "squash"}
    return (SquashedFlow if squash else Flow)(dim, **options).to(device)


def train_flow(job: Row, table: Any, device: str) -> tuple[Row, Any]:
    torch.manual_seed(job["seed"])
    flow = make_flow(table.dim, job["model"], device)
    columns = None if table.name in CONTINUOUS else table.columns.to(device)
    looks = {"validate_every": max(1, job["loop"]["max_steps"] // 30)}
    loop = FLOW_LOOP | looks | job["loop"]
    task = flow.training_task(columns=columns)
    history, seconds = trained(task, table, table.val, loop | {"seed": job["seed"]}, device)
    row = {"seconds": seconds, "model": job["model"], "loop": loop}
    flow.eval()
    return row | progress_of(history), flow


def fit_classic(job: Row, table: Any) -> tuple[Row, Any]:
    from sklearn.mixture import GaussianMixture
    from sklearn.neighbors import KernelDensity

    train, val = (np.asarray(a, dtype=np.float64) for a in (table.train, table.val))
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
    row = {"seconds": time.perf_counter() - began, "val": best[0], "chosen": best[1]}
    return row | {"diverged": False}, best[2]


def log_prob_times(job: Row, table: Any, model: Any, test: torch.Tensor, device: str) -> Row:
    """What a normalised ``log_prob`` costs, and how far it is from the exact normaliser's.

    By the learned ``b`` of a chain, in one pass; by samples of an energy machine, and beside these
    one pass of a chain of our default sizes, whose weights do not matter. Root mean square over
    rows, in nats; microseconds a row.
    """
    from selfnorm.chain import AutoregressiveEBM

    rows = test[: 500 if test.shape[1] > 20 else 1000]
    exact = model.log_prob(rows, normalizer="quadrature", n_nodes=4096)

    def timed(of: Any, **way: Any) -> tuple[torch.Tensor, float]:
        of.log_prob(rows, **way)
        began = now(device)
        log_p = of.log_prob(rows, **way)
        return log_p, 1e6 * (now(device) - began) / len(rows)

    more = {}
    if job["method"] == "selfnorm":
        ways: list[Row] = [{"normalizer": "learned"}]
    else:
        ways = [{"n_samples": n, "stratified": False} for n in (20, 100, 500, 2000)]
        sizes, *_ = chain_options(job | {"method": "selfnorm", "model": {}}, table, device)
        ours = AutoregressiveEBM(table.dim, **sizes).to(device).eval()
        more["one_pass_us"] = timed(ours.set_scaling(table.train.to(device)))[1]
    out = []
    for way in ways:
        log_p, took = timed(model, **way)
        error = (log_p - exact).double()
        figures = {"rms": float(error.square().mean().sqrt()), "mean": float(error.mean())}
        out.append(way | figures | {"us_a_row": took})
    return {"log_prob_by": out, "exact": float(exact.double().mean())} | more


def log_density(model: Any, method: str, test: torch.Tensor) -> np.ndarray:
    if method in ("gmm", "kde"):
        return np.asarray(model.score_samples(np.asarray(test, dtype=np.float64)))
    with torch.no_grad():
        if method in CHAINS:  # of an energy machine by 1,000 samples a factor
            return np.asarray(model.log_prob(test).cpu(), dtype=np.float64)
        parts = [model.log_prob(part) for part in test.split(4096)]
        return np.asarray(torch.cat(parts).cpu(), dtype=np.float64)


def draw(model: Any, method: str, n: int, seed: int) -> np.ndarray:
    if method in CHAINS:
        return np.asarray(model.sample(n, seed=seed).cpu())
    torch.manual_seed(seed)
    parts = [model.sample((min(2000, n - i),)).cpu() for i in range(0, n, 2000)]
    return np.asarray(torch.cat(parts))


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


def name_of(row: Row) -> str:
    """A run in words."""
    return f"{row['dataset']}/{row['method']}/{row['config']}/{row['seed']}"


def attempt(job: Row, data: str, device: str) -> tuple[Row, np.ndarray | None]:
    """The row of a run and the log-density of its test rows; a failed run must not end the table.

    What a run may end by: training and memory (RuntimeError), data, linear algebra, overflow,
    files.
    """
    torch.set_num_threads(1)
    try:
        return run_job(job, data, device)
    except (RuntimeError, ValueError, ArithmeticError, MemoryError, OSError) as error:
        row = {k: job[k] for k in KEYS}
        return row | {"error": f"{type(error).__name__}: {error}"[:200]}, None


def run_job(job: Row, data: str, device: str) -> tuple[Row, np.ndarray]:
    """Train, score the test rows, draw samples, bound, and time it all."""
    warnings.simplefilter("ignore")
    torch.set_float32_matmul_precision("high")
    table = tabular.load(job["dataset"], data)
    if job["method"] in CHAINS:
        row, model = train_chain(job, table, device)
    elif job["method"] in FLOWS:
        row, model = train_flow(job, table, device)
    else:
        row, model = fit_classic(job, table)
    torch.set_float32_matmul_precision("highest")
    method = job["method"]
    test = table.test if method in ("gmm", "kde") else table.test.to(device)
    log_density(model, method, test[:64])  # what runs once (kernel choice, loading) is not timed
    began = now(device)
    log_prob = log_density(model, method, test)
    row["log_prob_seconds"] = now(device) - began
    row |= {"test": float(log_prob.mean()), "test_se": float(log_prob.std() / len(test) ** 0.5)}
    row |= {"worst_row": float(log_prob.min()), "n_train": len(table.train), "n_test": len(test)}
    if method in (*CHAINS, *FLOWS) and job.get("two_sample", True):
        began = now(device)
        samples = draw(model, method, min(len(test), 5000), job["seed"])
        row |= {"sampling_seconds": now(device) - began, "n_sampled": len(samples)}
        finite = np.isfinite(samples).all(1)
        row["samples_not_finite"] = int((~finite).sum())
        real = np.asarray(table.test)
        row["two_sample_auroc"] = two_sample_auroc(real, samples[finite], job["seed"])
    if method in CHAINS and (method == "selfnorm" or job["seed"] == 0):  # samples take minutes
        row |= log_prob_times(job, table, model, test, device)
    if method == "selfnorm":
        row |= bounds_of(model, table, device)
    return {k: job[k] for k in KEYS} | row, log_prob.astype(np.float32)
