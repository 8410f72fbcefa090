"""Attempts at the rows of the paper's MNIST table that our recipe misses.

    python benchmarks/mnist_attempts.py --data-dir DATA --device cuda --jobs 2 --models vae

Each attempt is the recipe ``best`` or ``paper`` with the changes that ``ATTEMPTS`` names, one seed.
Compare by the validation part, and only then look at the test part. Three gaps tell what is in the
way, in nats: how much better the training rows are than held-out ones (overfitting); what 200 steps
of gradient ascent on the posterior of each held-out row gain (an encoder that falls short of its
family); and what is left between that and ``log p(x)`` (posteriors that are no Gaussians). The
second is told beside the ELBO, never instead of it.

Rows are kept as they come, so a second call adds what is missing; ``--attempts`` names some.
"""

from __future__ import annotations

import argparse
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from measuring import commit, need, write
from selfnorm.datasets.images import load_binarized
from selfnorm.paper import mnist
from selfnorm.paper.report import Table, markdown_table
from selfnorm.paper.runner import run_side_by_side
from selfnorm.vae import EnergyVAE

LITERAL = ("vae", "vae_mog", "vae_ebm_post_hoc", "vae_ebm")
Row = dict[str, Any]
FEW_ROWS = 2000  # of the training and the validation part, on which the gaps are measured
EVALUATION = {"many_samples": 0, "n_prior_samples": 200_000}


def _fit(steps: int, **more: Any) -> dict[str, Any]:
    return {"max_steps": steps, "validate_every": steps // 20, **more}


ATTEMPTS: dict[str, dict[str, Any]] = {
    # half the steps, to compare the next ones with
    "short": {"fit": _fit(30_000)},
    "short, decay 0.2": {"fit": _fit(30_000, weight_decay=0.2)},
    "short, decay 0.5": {"fit": _fit(30_000, weight_decay=0.5)},
    "short, wide encoder": {"encoder_ngf": 64, "fit": _fit(30_000)},
    "short, four posterior samples": {"fit": _fit(30_000, posterior_samples=4)},
    "short, large batches": {"fit": _fit(30_000, batch_size=1024, lr=2e-3)},
    "short, threefold rate": {"fit": _fit(30_000, lr=3e-3)},
    # wider networks against their overfitting
    "twice as wide, decay 0.2": {"ngf": 32, "fit": _fit(30_000, weight_decay=0.2)},
    "twice as wide, decay 0.5": {"ngf": 32, "fit": _fit(30_000, weight_decay=0.5)},
    "authors' sizes, decay 0.5": {
        "ngf": 64,
        "energy_layers": 3,
        "fit": _fit(15_000, weight_decay=0.5),
    },
    "authors' sizes, decay 1": {
        "ngf": 64,
        "energy_layers": 3,
        "fit": _fit(20_000, weight_decay=1.0),
    },
    # the paper's own recipe, to its end
    "literal": {"recipe": "paper"},
}


def refined(vae: EnergyVAE, x: Tensor, steps: int = 200, samples: int = 8) -> float:
    """Mean ELBO of rows whose Gaussian posteriors are each improved from what the encoder says."""
    started = vae.posteriors(x)
    mean, log_sd = (v.detach().clone().requires_grad_() for v in (started.mean, started.log_sd))
    optimizer = torch.optim.Adam([mean, log_sd], lr=0.03)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    def elbo(k: int) -> Tensor:
        posterior = type(started)(mean, log_sd)
        z = posterior.sample(k)
        fit = vae.log_likelihood(x, z) + vae.prior.log_prob(z)
        return fit.mean(0) + posterior.entropy()

    for _ in range(steps):
        optimizer.zero_grad()
        (-elbo(samples).sum()).backward()
        optimizer.step()
        decay.step()
    with torch.no_grad():
        return float(torch.stack([elbo(20) for _ in range(5)]).mean())


def gaps(vae: EnergyVAE, train: Tensor, valid: Tensor) -> dict[str, float]:
    """Of some training and held-out rows: the ELBO, that with improved posteriors, log p(x)."""
    vae.requires_grad_(False).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        known, held = (float(vae.elbo(x, 100, seed=0).mean()) for x in (train, valid))
        log_px = float(vae.log_prob(valid, 1000, seed=0).mean())
    parts = valid.split(1000)
    better = sum(refined(vae, x) for x in parts) / len(parts)
    return {"gap_train": known - held, "gap_encoder": better - held, "gap_family": log_px - better}


def attempt(given: tuple[str, argparse.Namespace]) -> list[Row]:
    """All rows of one attempt."""
    name, args = given
    options = {"recipe": "best", "max_steps": args.max_steps} | ATTEMPTS[name]
    out = args.out / name.replace(", ", "-").replace(" ", "_").replace("'", "")
    with suppress(ModuleNotFoundError):  # without matplotlib no sheets of samples; rows are there
        mnist.run(
            **options,
            models=args.models,
            seeds=1,
            out=out,
            data_dir=args.data_dir,
            device=args.device,
            evaluation=EVALUATION | ({"n_prior_samples": 2000} if args.max_steps else {}),
            progress=False,
        )
    train, valid, _ = (x[:FEW_ROWS].to(args.device) for x in load_binarized(args.data_dir))
    if args.max_steps:
        train, valid = train[:50], valid[:50]
    rows = []
    for row in Table("mnist", options["recipe"], out).rows:
        (folder,) = out.glob(f"models/*-{row['model']}-{row['seed']}-ngf*")
        found = gaps(EnergyVAE.load(folder).to(args.device), train, valid)
        rows.append({"attempt": name, **row, **found, "commit": commit()})
    return rows


def page(rows: list[Row]) -> str:
    """Every attempt in Markdown, the best on the validation part first."""
    figures = ("valid_snelbo", "gap_train", "gap_encoder", "gap_family", "snelbo", "log_px")
    ordered = sorted(rows, key=lambda r: (LITERAL.index(r["model"]), -r["valid_snelbo"]))
    body = [
        [
            row["model"],
            row["attempt"],
            *(f"{row[k]:.2f}" for k in figures),
            f"{row['best_step']:,} of {row['max_steps']:,}",
            "yes" if row["reliable"] else "no",
        ]
        for row in ordered
    ]
    header = ["row", "attempt", "validation SNELBO", "overfitting", "encoder", "family"]
    header += ["test SNELBO", "log p(x)", "best step", "reliable"]
    return f"# Attempts at the paper's MNIST rows\n\n{markdown_table(header, body)}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--out", type=Path, default=Path("results/mnist/attempts"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--attempts", nargs="+", choices=list(ATTEMPTS), default=list(ATTEMPTS))
    parser.add_argument("--models", nargs="+", choices=LITERAL, default=list(LITERAL))
    parser.add_argument("--max-steps", type=int, help="for a quick look")
    args = parser.parse_args()
    need(args.device)
    path = args.out / "attempts.json"
    rows: list[Row] = json.loads(path.read_text())["rows"] if path.exists() else []
    have = {(row["attempt"], row["model"]) for row in rows}
    wanted = [n for n in args.attempts if not {(n, m) for m in args.models} <= have]
    for (name, _), found in run_side_by_side(attempt, [(n, args) for n in wanted], args.jobs):
        rows = [row for row in rows if row["attempt"] != name] + found
        write(path, rows, args.device)
        path.with_suffix(".md").write_text(page(rows))
        print(page(found), flush=True)


if __name__ == "__main__":
    main()
