"""The paper's UCI table: a joint EBM with a Gaussian proposal, and a chain of EBMs, on real files.

``joint`` is the paper's method: one energy over the whole row, the full-covariance Gaussian of the
training rows as base and proposal. ``chain`` is :class:`~selfnorm.AutoregressiveEBM` with the sizes
of :func:`~selfnorm.chain.defaults.default_options`. Every set whose file is in the data
directory is run; the others are named in the result.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

import selfnorm as sn
from selfnorm.chain import AutoregressiveEBM, default_options
from selfnorm.datasets import find_set, maf_benchmark
from selfnorm.evaluation import Bounds
from selfnorm.paper.report import (
    Planned,
    ResultTable,
    Row,
    bounds_columns,
    check_choices,
    markdown_table,
    mean_sd,
    paper_numbers,
    sets_with_files,
)
from selfnorm.paper.runner import Settings, refuse_cut_short
from selfnorm.training import TrainingOptions
from selfnorm.training import run as train

_MODELS = {"joint": "joint EBM, Gaussian proposal", "chain": "chain of EBMs"}


def run(
    *,
    recipe: str = "paper",
    seeds: int = 3,
    datasets: Sequence[str] = maf_benchmark.NAMES,
    max_steps: int | None = None,
    **settings: Any,
) -> ResultTable:
    """Run the table and write ``uci.json`` and ``uci.md`` into ``out``.

    Args:
        recipe: ``"paper"`` runs both models, ``"best"`` the chain alone.
        seeds: repetitions.
        datasets: which sets.
        max_steps: limit of the steps of either model (for trying it out).
        settings: further ones of :class:`~selfnorm.paper.runner.Settings`.
    """
    common = Settings(recipe, **settings)
    table = common.table("uci")
    check_choices("set", datasets, maf_benchmark.NAMES)
    present, missing = sets_with_files(datasets, find_set, common.data_dir)
    runs = [
        Job(name, model, seed, max_steps, common)
        for name in present
        for seed in range(seeds)
        for model in (_MODELS if recipe == "paper" else ("chain",))
    ]
    for _ in common.rows(table, _run_row, runs):
        pass
    _loaded.cache_clear()
    _write_page(table, missing)
    return table


@dataclass(frozen=True)
class Job(Planned):
    """One row and how it is to be run."""

    identity = ("dataset", "model", "seed")
    dataset: str
    model: str
    seed: int
    max_steps: int | None
    settings: Settings


_loaded = lru_cache(maxsize=1)(maf_benchmark.load)


def _run_row(job: Job) -> tuple[Row, None]:
    """Train and judge one model."""
    data = _loaded(job.dataset, job.settings.data_dir)
    began = time.perf_counter()
    torch.manual_seed(job.seed)
    bounds, stopped = (_joint if job.model == "joint" else _chain)(data, job)
    refuse_cut_short(stopped)
    row = {
        **job.keys(),
        **bounds_columns(bounds),
        "lower_se": bounds.lower_se,
        "upper_se": bounds.upper_se,
        "reasons": list(bounds.reasons),
        "n_train": len(data.train),
        "n_test": len(data.test),
        "full": len(data.train) >= paper_numbers()["uci_rows"][job.dataset],
        "seconds": time.perf_counter() - began,
        "diverged": stopped == "diverged",
    }
    return row, None


def _joint(data: maf_benchmark.Splits, job: Job) -> tuple[Bounds, str]:
    device = job.settings.device
    proposal = sn.Gaussian.fit_to(data.train, full=True).to(device)
    energy = sn.MLP(data.dim, hidden=(300, 200, 100, 100, 50), activation="relu")
    model = sn.EBM(energy, base=proposal).to(device)
    history = sn.fit(
        model,
        data.train.to(device),
        proposal=proposal,
        n_samples=1024,
        batch_size=512,
        max_epochs=20,
        max_steps=job.max_steps,
        lr=1e-4,
        task_options={"log_norm_lr_scale": 1.0},
        options=TrainingOptions(optimizer="adam", weight_decay=5e-4, schedule="constant"),
        val_data=data.val.to(device),
        seed=job.seed,
        progress=job.settings.bars,
    )
    test = data.test.to(device)
    bounds = sn.evaluate(model, test, proposal=proposal, n_samples=20_000, seed=job.seed)
    return bounds, history.stopped


def _chain(data: maf_benchmark.Splits, job: Job) -> tuple[Bounds, str]:
    device = job.settings.device
    defaults = default_options(len(data.train), data.dim, device)
    # The benchmark states its own noise: the values are scored as they are.
    model = AutoregressiveEBM(data.dim, discrete=None, **defaults.model).to(device)
    fit = defaults.fit
    if job.max_steps is not None:
        fit = {**fit, "max_steps": job.max_steps, "validate_every": max(1, job.max_steps // 5)}
    history = train(
        model.training_task(**defaults.task),
        (data.train.to(device),),
        val_data=(data.val.to(device),),
        options=TrainingOptions(**fit, seed=job.seed, progress=job.settings.bars),
    )
    bounds = model.eval().bounds(data.test, n_samples=500, seed=job.seed)
    return bounds, history.stopped


def _write_page(table: ResultTable, missing: dict[str, str]) -> None:
    numbers = paper_numbers()
    paper = {row["dataset"]: row["ebm_snl"] for row in numbers["uci"]}
    sections = [
        "# UCI: test log-likelihood in nats",
        "Lower bound (SNL) and upper bound (IS), mean and standard deviation over the seeds.",
    ]
    for (name,), rows in table.groups("dataset").items():
        note = "a subset of the benchmark's rows: **not comparable** with the published rows"
        if all(row["full"] for row in rows):
            note = "the full file: comparable with the published rows"
        n_train, n_test = rows[0]["n_train"], rows[0]["n_test"]
        sections.append(f"## {name}: {n_train:,} training and {n_test:,} test rows ({note})")
        body = []
        for model, label in _MODELS.items():
            mine = [row for row in rows if row["model"] == model]
            if mine:
                trust = "yes" if all(row["reliable"] for row in mine) else "**no**"
                means = [mean_sd(mine, key) for key in ("lower", "upper")]
                body.append([label, *means, mean_sd(mine, "ess", 2), trust])
        if name in paper:
            both = [str(paper[name][key]) for key in ("snl", "is")]
            body.append(["the paper's EBM (full file)", *both, "–", "–"])
        body += [
            [f"{row['model']}, published (full file)", str(row[name]), "", "–", "–"]
            for row in numbers["uci_published"]
        ]
        sections.append(markdown_table(["model", "lower", "upper", "ESS", "reliable"], body))
    if missing:
        sections.append("## Not run: files missing")
        sections.append("\n".join(f"- {name}: {reason}" for name, reason in missing.items()))
    table.write_page(*sections)
