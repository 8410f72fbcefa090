"""The MNIST table with encoders that learn on from rows the models make themselves.

Every row is trained by the recipe ``best``; then its decoder and prior are held fixed, and the
encoder is taught on the model's own images (``train="encoder"``). The model is the same before and
after; what closes is the gap between its ELBO and its likelihood. Post-hoc priors are put on the
VAE that has been taught. With ``--trained`` the models of a finished table are taken instead of
training them again.

    selfnorm reproduce mnist --recipe best --device cuda --data-dir DATA --out best
    python benchmarks/mnist_dreams.py --trained best/models --data-dir DATA --out dreams
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import selfnorm as sn
from selfnorm.datasets.images import load_binarized
from selfnorm.paper.mnist import MODELS, Job, report_figures, rows, train_row, write_page
from selfnorm.paper.report import Table
from selfnorm.paper.runner import Settings
from selfnorm.vae import EnergyVAE, evaluate_vae

RECIPE = "dreams"


def trained(job: Job, parts: tuple[Tensor, Tensor], given: argparse.Namespace) -> EnergyVAE:
    """The row's model by the recipe ``best``: from its folder, or trained here."""
    folder = Path(given.trained or "") / job.model_folder().name
    if job.row.on is None and given.trained and folder.exists():
        return EnergyVAE.load(folder).to(given.device)
    return train_row(job, *parts)[0]


def teach(
    vae: EnergyVAE, parts: tuple[Tensor, Tensor], seed: int, steps: int, energy: bool
) -> sn.History:
    """Go on with the encoder alone, on the model's own rows; the best state by the ELBO."""
    return sn.fit(
        vae,
        parts[0],
        val_data=parts[1],
        batch_size=256,
        max_epochs=10**6,
        max_steps=steps,
        lr=1e-3,
        n_samples=1024 if energy else 1,
        seed=seed,
        progress=False,
        task_options={"train": "encoder", "monitor": "off"},
        options=sn.TrainingOptions(
            validate_every=max(1, steps // 20), ema=0.999, weight_decay=0.01
        ),
    )


def run_row(job: Job, parts: tuple[Tensor, ...], given: argparse.Namespace) -> dict:
    """One row of the table."""
    row, seed = job.row, job.seed
    train, valid, test = parts
    began = time.perf_counter()
    vae = trained(job, (train, valid), given)
    common: dict[str, Any] = {
        "reference": train[:4000],
        "n_prior_samples": given.n_prior_samples,
        "seed": 10_000 + seed,
    }
    before = evaluate_vae(vae, valid, posterior_samples=10, **common)
    taught: dict[str, Any] = {}
    if row.on is None:
        history = teach(vae, (train, valid), seed, given.steps, "ebm" in row.model)
        taught = {
            "encoder_steps": history.n_steps,
            "encoder_best_step": history.best_step,
            "encoder_step_ms": round(1e3 * history.seconds / max(history.n_steps, 1), 3),
            "stopped": history.stopped,
        }
        vae.save(job.model_folder())
    held_out = evaluate_vae(vae, valid, posterior_samples=10, **common)
    report = evaluate_vae(
        vae, test, posterior_samples=given.posterior_samples, many_samples=given.many_samples,
        many_rows=500, **common,
    )  # fmt: skip
    return {
        **job.keys(),
        **report_figures(report),
        "valid_snelbo_before": before.snelbo,
        "valid_log_px_before": before.log_px,
        "valid_snelbo": held_out.snelbo,
        "valid_log_px": held_out.log_px,
        "diverged": False,
        "stopped": "max_epochs",
        **taught,
        "seconds": round(time.perf_counter() - began, 2),
    }


def main() -> None:
    """Run the rows asked for, each written as it is done."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="dreams")
    parser.add_argument("--trained", help="folder `models` of `selfnorm reproduce mnist`")
    parser.add_argument("--data-dir")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", action="append", choices=MODELS)
    parser.add_argument("--seed", type=int, action="append")
    parser.add_argument("--steps", type=int, default=25_000, help="of the encoder alone")
    parser.add_argument("--max-steps", type=int, help="fewer steps of the recipe (a rehearsal)")
    parser.add_argument("--n-rows", type=int, help="fewer rows of each part (a rehearsal)")
    parser.add_argument("--posterior-samples", type=int, default=100)
    parser.add_argument("--many-samples", type=int, default=0)
    parser.add_argument("--n-prior-samples", type=int, default=1_000_000)
    given = parser.parse_args()
    table = Table("mnist", RECIPE, Path(given.out), device=given.device)
    digits = load_binarized(given.data_dir)
    parts = tuple(part[: given.n_rows].to(given.device) for part in digits)
    for seed in given.seed or [0, 1]:
        for row in rows("best"):
            if row.model not in (given.model or MODELS):
                continue
            if table.has(model=row.model, seed=seed):
                continue
            settings = Settings("best", given.out, given.device, False, given.data_dir)
            job = Job(row.at_most(given.max_steps), seed, 16, 2, {}, settings)
            found = run_row(job, parts, given)
            table.add(found)
            print(
                f"{row.model} seed {seed}: SNELBO {found['snelbo']:.3f}, valid "
                f"{found['valid_snelbo_before']:.3f} -> {found['valid_snelbo']:.3f}, reliable "
                f"{found['reliable']}, {found['seconds']:.0f} s",
                flush=True,
            )
    write_page(table)


if __name__ == "__main__":
    main()
