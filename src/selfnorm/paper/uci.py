"""The paper's UCI table: a joint EBM with a Gaussian proposal, and a chain of EBMs, on real files.

``joint`` is the paper's method: one energy over the whole row, the full-covariance Gaussian of the
training rows as base and proposal. ``chain`` is :class:`~selfnorm.AutoregressiveEBM` with the sizes
of :func:`~selfnorm.chain.task.default_options`. Every set whose file is in the data
directory is run; the others are named in the result.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

import selfnorm as sn
from selfnorm.chain import AutoregressiveEBM, default_options
from selfnorm.datasets import maf_benchmark
from selfnorm.datasets.directory import is_present
from selfnorm.errors import MissingDataError
from selfnorm.evaluation import Bounds, evaluate
from selfnorm.paper.report import Table, check_choices, markdown_table, mean_sd, paper_numbers
from selfnorm.paper.runner import run_side_by_side
from selfnorm.training import TrainingOptions
from selfnorm.training import run as train

__all__ = ["RECIPES", "run"]

RECIPES = ("paper", "best")
# Training rows of the full files; a smaller file is a subset, and its figures stand alone.
FULL = {"power": 1_000_000, "gas": 852_174, "hepmass": 315_123, "miniboone": 29_556}
FULL["bsds300"] = 1_000_000
# Published test log-likelihoods (nats), those whose source was read: NSF (Durkan et al. 2019) for
# the flows, TAN's own record (Oliva et al. 2018).
_SETS = ("power", "gas", "hepmass", "miniboone", "bsds300")
PUBLISHED: dict[str, dict[str, float]] = {
    "FFJORD": dict(zip(_SETS, (0.46, 8.59, -14.92, -10.43, 157.40), strict=True)),
    "NAF-DDSF": dict(zip(_SETS, (0.62, 11.96, -15.09, -8.86, 157.73), strict=True)),
    "TAN": dict(zip(_SETS, (0.60, 12.06, -13.78, -11.01, 159.80), strict=True)),
    "RQ-NSF (AR)": dict(zip(_SETS, (0.66, 13.09, -14.01, -9.22, 157.31), strict=True)),
}


def run(
    *,
    recipe: str = "paper",
    seeds: int = 3,
    out: str | Path = "out",
    device: str = "cpu",
    progress: bool = True,
    data_dir: str | Path | None = None,
    datasets: Sequence[str] = maf_benchmark.NAMES,
    max_rows: int | None = None,
    joint_epochs: int = 20,
    max_steps: int | None = None,
    jobs: int = 1,
) -> Table:
    """Run the table and write ``uci.json`` and ``uci.md`` into ``out``.

    Args:
        recipe: ``"paper"`` runs both models, ``"best"`` the chain alone.
        seeds: repetitions.
        out: directory of the result files; finished rows found there are kept.
        device: torch device.
        progress: show progress bars.
        data_dir: where the files are (else ``$SELFNORM_DATA`` or the cache).
        datasets: which sets.
        max_rows: use at most so many training rows (for trying it out; said in the result).
        joint_epochs: epochs of the joint EBM.
        max_steps: limit of the steps of either model (for trying it out).
        jobs: rows to run side by side, in processes of one thread.
    """
    check_choices("recipe", [recipe], RECIPES)
    table = Table("uci", recipe, Path(out), device=device)
    missing: dict[str, str] = {}
    for name in datasets:
        if not is_present(name, data_dir):
            try:
                maf_benchmark.load(name, data_dir)
            except MissingDataError as error:
                missing[name] = str(error)
    models = ("joint", "chain") if recipe == "paper" else ("chain",)
    limits = (max_rows, joint_epochs, max_steps)
    asked = [
        Job(name, model, seed, device, data_dir, *limits, progress and jobs == 1)
        for name in datasets
        if name not in missing
        for seed in range(seeds)
        for model in models
    ]
    table.expect(len(asked))
    left = [job for job in asked if not table.has(**job.keys())]
    try:
        for job, found in run_side_by_side(_run_row, left, jobs):
            if isinstance(found, str):  # one of the set's files is there, another is not
                missing[job.dataset] = found
                continue
            table.add(found)
            if progress:
                lower, upper = found["lower"], found["upper"]
                named = ", ".join(str(value) for value in job.keys().values())
                print(f"{named}: {lower:.3f} to {upper:.3f} nats", flush=True)
    finally:
        _loaded.cache_clear()
    if progress:
        for name, message in missing.items():
            print(f"{name}: {message}", flush=True)
    table.write_markdown(_markdown(table, missing))
    return table


@dataclass(frozen=True)
class Job:
    """One row and how it is to be run."""

    dataset: str
    model: str
    seed: int
    device: str
    data_dir: str | Path | None
    max_rows: int | None
    joint_epochs: int
    max_steps: int | None
    progress: bool

    def keys(self) -> dict[str, Any]:
        """What identifies the row in the result file."""
        return {"dataset": self.dataset, "model": self.model, "seed": self.seed}


_loaded = lru_cache(maxsize=1)(maf_benchmark.load)


def _run_row(job: Job) -> dict[str, Any] | str:
    """Train and judge one model; of a set that is not complete, what is missing."""
    try:
        data = _loaded(job.dataset, job.data_dir)
    except MissingDataError as error:
        return str(error)
    rows = data.train if job.max_rows is None else data.train[: job.max_rows]
    began = time.perf_counter()
    bounds, stopped = (_joint if job.model == "joint" else _chain)(
        rows, data, job.seed, job.device, job.progress, job.joint_epochs, job.max_steps
    )
    if stopped == "interrupted":
        raise KeyboardInterrupt  # a run cut short is no row
    row = _row(job.dataset, job.model, job.seed, bounds, len(rows), len(data.test))
    return row | {"seconds": time.perf_counter() - began, "diverged": stopped == "diverged"}


def _row(
    name: str, model: str, seed: int, bounds: Bounds, n_train: int, n_test: int
) -> dict[str, Any]:
    return {
        "dataset": name,
        "model": model,
        "seed": seed,
        "lower": bounds.lower,
        "upper": bounds.upper,
        "lower_se": bounds.lower_se,
        "upper_se": bounds.upper_se,
        "ess": bounds.ess,
        "pareto_k": bounds.pareto_k,
        "reliable": bounds.reliable,
        "reasons": list(bounds.reasons),
        "n_train": n_train,
        "n_test": n_test,
        "full": n_train >= FULL[name],
    }


def _joint(
    rows: torch.Tensor,
    data: maf_benchmark.Splits,
    seed: int,
    device: str,
    progress: bool,
    epochs: int,
    max_steps: int | None,
) -> tuple[Bounds, str]:
    torch.manual_seed(seed)
    proposal = sn.Gaussian.fit_to(rows, full=True).to(device)
    model = sn.EBM(
        sn.MLP(data.dim, hidden=(300, 200, 100, 100, 50), activation="relu"), base=proposal
    ).to(device)
    history = sn.fit(
        model,
        rows.to(device),
        proposal=proposal,
        n_samples=1024,
        batch_size=512,
        max_epochs=epochs,
        max_steps=max_steps,
        lr=1e-4,
        options=TrainingOptions(
            lr_log_norm=1e-4, optimizer="adam", weight_decay=5e-4, schedule="constant"
        ),
        val_data=data.val.to(device),
        seed=seed,
        progress=progress,
    )
    bounds = evaluate(model, data.test.to(device), proposal=proposal, n_samples=20_000, seed=seed)
    return bounds, history.stopped


def _chain(
    rows: torch.Tensor,
    data: maf_benchmark.Splits,
    seed: int,
    device: str,
    progress: bool,
    epochs: int,  # noqa: ARG001 the chain's length of training goes by steps
    max_steps: int | None,
) -> tuple[Bounds, str]:
    torch.manual_seed(seed)
    defaults = default_options(len(rows), data.dim, device)
    # The benchmark states its own noise: the values are scored as they are.
    model = AutoregressiveEBM(data.dim, discrete=None, **defaults.model).to(device)
    fit = defaults.fit
    if max_steps is not None:
        fit = {**fit, "max_steps": max_steps, "validate_every": max(1, max_steps // 5)}
    history = train(
        model.training_task(**defaults.task),
        (rows.to(device),),
        val_data=(data.val.to(device),),
        options=TrainingOptions(**fit, seed=seed, progress=progress),
    )
    bounds = model.eval().bounds(data.test, n_samples=500, seed=seed)
    return bounds, history.stopped


def _markdown(table: Table, missing: dict[str, str]) -> str:
    paper = {row["dataset"]: row for row in paper_numbers()["uci"]}
    lines = [
        "# UCI: test log-likelihood in nats",
        "",
        "Lower bound (SNL) and upper bound (IS), mean and standard deviation over the seeds.",
    ]
    for (name,), rows in table.groups("dataset").items():
        full = all(row["full"] for row in rows)
        note = (
            "the full file: comparable with the published rows"
            if full
            else "a subset of the benchmark's rows: **not comparable** with the published rows"
        )
        n_train, n_test = rows[0]["n_train"], rows[0]["n_test"]
        lines += ["", f"## {name}: {n_train:,} training and {n_test:,} test rows ({note})", ""]
        body = []
        for model in dict.fromkeys(row["model"] for row in rows):
            mine = [row for row in rows if row["model"] == model]
            trust = "yes" if all(row["reliable"] for row in mine) else "**no**"
            body.append(
                [
                    {"joint": "joint EBM, Gaussian proposal", "chain": "chain of EBMs"}[model],
                    mean_sd(mine, "lower"),
                    mean_sd(mine, "upper"),
                    mean_sd(mine, "ess", 2),
                    trust,
                ]
            )
        if name in paper:
            theirs = paper[name]["ebm_snl"]
            row = ["the paper's EBM (full file)", str(theirs["snl"]), str(theirs["is"]), "–", "–"]
            body.append(row)
        for label, published in PUBLISHED.items():
            body.append([f"{label}, published (full file)", str(published[name]), "", "–", "–"])
        lines.append(markdown_table(["model", "lower", "upper", "ESS", "reliable"], body))
    if missing:
        lines += ["", "## Not run: files missing", ""]
        lines += [f"- {name}: {reason}" for name, reason in missing.items()]
    return "\n".join(lines)
