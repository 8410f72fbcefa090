"""The paper's MNIST table: VAEs with six priors on statically binarised digits.

Rows ``vae``, ``vae_mog``, ``vae_ebm_post_hoc`` and ``vae_ebm`` are the paper's; the two with a
chain of one-dimensional energies are ours. Encoder and decoder are the paper's (``ngf`` 16, 16
latent numbers). Every row is evaluated on the test part with 100 posterior samples and its
``log Z`` by three estimators (exactly, where the prior allows it): a row counts only with its
verdict.

Recipe ``paper`` is the paper's set-up: ten posterior samples, the energy's smaller learning rate,
base samples for ``Z``, 100,000 iterations (see :mod:`selfnorm.paper.mnist_rows`). Recipe
``best`` is ours. Settings were chosen on the validation part.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import selfnorm as sn
from selfnorm.datasets import mnist
from selfnorm.paper.mnist_report import finished, markdown
from selfnorm.paper.mnist_rows import MODELS, RECIPES, Row, drop_pixels, rows
from selfnorm.paper.report import Table, check_choices
from selfnorm.paper.runner import run_side_by_side
from selfnorm.vae import ConvDecoder, ConvEncoder, EnergyVAE, VAEReport, evaluate_vae

__all__ = ["MODELS", "RECIPES", "report_figures", "run", "train_row"]


@dataclass(frozen=True)
class Job:
    """One row and how it is to be run; ``vae_steps`` are those of the VAE it is put on."""

    row: Row
    seed: int
    ngf: int
    energy_layers: int
    folder: Path
    device: str
    data_dir: str | Path | None
    n_rows: int | None
    evaluation: dict[str, int]
    vae_steps: int | None
    progress: bool

    @property
    def size(self) -> str:
        """What tells model folders of one row apart."""
        return _size(self.seed, self.ngf, self.energy_layers)

    def keys(self) -> dict[str, Any]:
        """What identifies the row in the result file."""
        return {
            "model": self.row.model,
            "seed": self.seed,
            "ngf": self.ngf,
            "energy_layers": self.energy_layers,
            "max_steps": self.row.fit["max_steps"],
        }


def run(
    *,
    recipe: str = "paper",
    seeds: int | Sequence[int] = 2,
    out: str | Path = "out",
    device: str = "cpu",
    progress: bool = True,
    data_dir: str | Path | None = None,
    models: Sequence[str] = MODELS,
    max_steps: int | None = None,
    ngf: int = 16,
    energy_layers: int = 2,
    posterior_samples: int = 100,
    many_samples: int = 5000,
    many_rows: int = 1000,
    n_prior_samples: int = 1_000_000,
    n_rows: int | None = None,
    figures: bool = True,
    jobs: int = 1,
) -> Table:
    """Run the table and write ``mnist.json``, ``mnist.md`` and figures of samples into ``out``.

    Args:
        recipe: ``"paper"`` or ``"best"``.
        seeds: repetitions, or the seeds themselves.
        out: directory of the results; finished rows found there are kept, and an interrupted row
            goes on from its checkpoint, or is done again.
        data_dir: folder with ``binarized_mnist/``.
        models: which rows.
        max_steps: shorter training than the recipe's.
        ngf, energy_layers: 16 and 2 as printed; the authors' code has 64 and 3.
        posterior_samples, many_samples, many_rows, n_prior_samples: see
            :func:`selfnorm.vae.evaluation.evaluate_vae`.
        n_rows: use only so many rows of each part (a rehearsal).
        figures: draw samples of every row (needs matplotlib).
        jobs: rows to run side by side, in processes of one thread; a post-hoc row begins when the
            VAE of its seed is there.
    """
    check_choices("model", models, MODELS)
    table = Table("mnist", recipe, Path(out), device=device)
    evaluation = {
        "posterior_samples": posterior_samples,
        "many_samples": many_samples,
        "many_rows": many_rows,
        "n_prior_samples": n_prior_samples,
    }
    steps_of = {row.model: row.at_most(max_steps).fit["max_steps"] for row in rows(recipe)}
    asked = [
        Job(
            row.at_most(max_steps), seed, ngf, energy_layers, table.directory, device, data_dir,
            n_rows, evaluation, steps_of.get(row.on or ""), progress and jobs == 1,
        )
        for seed in (range(seeds) if isinstance(seeds, int) else seeds)
        for row in rows(recipe)
        if row.model in models
    ]  # fmt: skip
    table.expect(len(asked))
    kept = finished(table.rows)
    missing = [job for job in asked if not _same(kept, job.keys())]

    def source(job: Job) -> Job | None:
        """The row whose encoder and decoder this one takes, if it is still to be made."""
        return next((j for j in missing if (j.row.model, j.seed) == (job.row.on, job.seed)), None)

    for job in missing:
        if source(job) is None:
            _refuse_other_vae(job, kept)
    try:
        for job, found in run_side_by_side(_run_row, missing, jobs, after=source):
            for interrupted in _same(table.rows, job.keys()):
                table.rows.remove(interrupted)
            table.add(found)
            _checkpoint(table.directory, job.row, job.size).unlink(missing_ok=True)
            if progress:
                print(f"{job.row.model}, seed {job.seed}: {found['snelbo']:.2f} nats", flush=True)
    finally:
        _digits.cache_clear()
    table.write_markdown(markdown(table.rows, recipe, table.command, table.seconds))
    if figures:
        _draw(table.directory, models, _size(0, ngf, energy_layers))
    return table


@lru_cache(maxsize=1)
def _digits(data_dir: str | Path | None, n_rows: int | None, device: str) -> tuple[Tensor, ...]:
    """Training, validation and test part, loaded once for all rows of a process."""
    digits = mnist.load_binarized(data_dir)
    return tuple(t[:n_rows].to(device) for t in (digits.train, digits.valid, digits.test))


def _run_row(job: Job) -> dict[str, Any]:
    """Train and evaluate one row."""
    train, valid, test = _digits(job.data_dir, job.n_rows, job.device)
    began = time.perf_counter()
    vae, history = train_row(
        job.row, train, valid, seed=job.seed, ngf=job.ngf, energy_layers=job.energy_layers,
        folder=job.folder, device=job.device, progress=job.progress,
    )  # fmt: skip
    common: dict[str, Any] = {"reference": train[:4000], "seed": 10_000 + job.seed}
    report = evaluate_vae(vae, test, **job.evaluation, **common)
    n_prior_samples = job.evaluation["n_prior_samples"]
    held_out = evaluate_vae(
        vae, valid, posterior_samples=10, n_prior_samples=n_prior_samples, **common
    )
    return {
        **job.keys(),
        **({} if job.vae_steps is None else {"vae_steps": job.vae_steps}),
        **report_figures(report),
        "valid_snelbo": held_out.snelbo,
        "diverged": history.stopped == "diverged",
        "stopped": history.stopped,
        "best_step": history.best_step,
        "n_steps": history.n_steps,
        "step_ms": round(1e3 * history.seconds / max(history.n_steps, 1), 3),
        "seconds": round(time.perf_counter() - began, 2),
    }


def _size(seed: int, ngf: int, energy_layers: int) -> str:
    return f"{seed}-ngf{ngf}-layers{energy_layers}"


def _same(rows_: list[dict[str, Any]], keys: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows with these values."""
    return [r for r in rows_ if all(r.get(k) == v for k, v in keys.items())]


def _refuse_other_vae(job: Job, kept: list[dict[str, Any]]) -> None:
    """A post-hoc row belongs to the VAE it names: that folder may hold one of another length."""
    names = ("seed", "ngf", "energy_layers")
    keys = {"model": job.row.on, **{k: v for k, v in job.keys().items() if k in names}}
    there = job.folder / "models" / f"{job.row.on}-{job.size}"
    last = [row["max_steps"] for row in _same(kept, keys)][-1:]  # that row wrote the folder
    if job.row.on is not None and there.exists() and last != [job.vae_steps]:
        raise ValueError(
            f"{job.row.model} is put on a {job.row.on} of {job.vae_steps} steps, and {there} is "
            f"not known to hold it: run that row first (--model {job.row.on}), or both with "
            "another --out"
        )


def _checkpoint(folder: Path, row: Row, size: str) -> Path:
    return folder / "checkpoints" / f"{row.model}-{size}-{row.fit['max_steps']}.pt"


def _draw(folder: Path, models: Sequence[str], size: str) -> None:
    """Sheets of samples of every trained row, whenever it was trained."""
    from selfnorm.plotting import plot_samples

    for model in models:
        saved = folder / "models" / f"{model}-{size}"
        if saved.exists():
            images = EnergyVAE.load(saved).sample(64, mean=True, seed=0)
            plot_samples(images, folder / f"mnist_{model}.png")


def train_row(
    row: Row,
    train: Tensor,
    valid: Tensor,
    *,
    seed: int,
    folder: Path,
    device: str = "cpu",
    ngf: int = 16,
    energy_layers: int = 2,
    progress: bool = False,
) -> tuple[EnergyVAE, sn.History]:
    """Train one row, or go on with it; its model folder serves the post-hoc rows.

    Ctrl-C ends the run: the checkpoint stays, and nothing half-trained is written down. That of a
    finished run stays as well, until its row is written: it need not be trained again.
    """
    size = _size(seed, ngf, energy_layers)
    torch.manual_seed(seed)
    encoder, decoder = ConvEncoder(ngf=ngf), ConvDecoder(ngf=ngf)
    vae = EnergyVAE(encoder, decoder, row.make_prior(energy_layers)).to(device)
    options = dict(row.fit)
    if row.drop:
        options["corrupt"] = drop_pixels(row.drop)
    if row.on is not None:
        source = folder / "models" / f"{row.on}-{size}"
        if not source.exists():
            raise ValueError(
                f"{row.model} is put on a trained {row.on}, and there is none at {source}: run "
                "that row first, or both with another --out"
            )
        trained = EnergyVAE.load(source)
        vae.encoder.load_state_dict(trained.encoder.state_dict())
        vae.decoder.load_state_dict(trained.decoder.state_dict())
        options["train"] = "prior"
        options.pop("kl_warmup", None)
    checkpoint = _checkpoint(folder, row, size)
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    names = {each.name for each in fields(sn.TrainingOptions)}
    how = {name: options.pop(name) for name in [*options] if name in names}
    every = max(1, how["max_steps"] // 20)
    history = sn.fit(
        vae, train, n_samples=options.pop("n_samples", 1024), val_data=valid, seed=seed,
        progress=progress, task_options=options,
        options=sn.TrainingOptions(checkpoint=checkpoint, checkpoint_every=every, **how),
    )  # fmt: skip
    if history.stopped == "interrupted":
        raise KeyboardInterrupt
    vae.save(folder / "models" / f"{row.model}-{size}")
    return vae, history


def report_figures(report: VAEReport) -> dict[str, Any]:
    """The columns of a row that come from its evaluation; values are plain, ready for JSON."""
    return {
        "lower": report.snelbo,
        "upper": report.log_px,
        "elbo": report.elbo,
        "snelbo": report.snelbo,
        "log_px": report.log_px,
        "log_px_many": report.log_px_many,
        "log_px_few": report.log_px_few,
        "many_samples": report.many_samples,
        "many_rows": report.many_rows,
        "se": report.se,
        "reconstruction": report.reconstruction,
        "kl": report.kl,
        "log_norm": {name: e.value for name, e in report.log_norm.items()},
        "log_norm_se": {name: e.se for name, e in report.log_norm.items()},
        "log_norm_pareto_k": {name: e.pareto_k for name, e in report.log_norm.items()},
        "learned_log_norm": report.learned_log_norm,
        "ess": report.ess,
        "pareto_k": report.pareto_k,
        "reliable": report.reliable,
        "reasons": list(report.reasons),
        "active_units": report.active_units,
    }
