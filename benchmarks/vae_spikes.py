"""Spikes on purpose: a joint energy prior normalised by base samples alone, and honest settings.

A VAE with 16 latent numbers is trained with a standard normal prior for a while, then goes on with
a joint energy. ``spike`` estimates ``Z`` from base samples and sets the energy no limit; ``honest``
adds the aggregate posterior to the proposal, a bound and weight decay. The monitor only warns here;
what it saw at every validation is written down.

    python benchmarks/vae_spikes.py --setting spike --steps 2500
    python benchmarks/vae_spikes.py --setting honest --steps 50000

run on scikit-learn's digits, binarised, on a CPU; ``--data mnist --data-dir DATA --device cuda``
takes statically binarised MNIST and the paper's encoder and decoder. A run that was interrupted
goes on from its checkpoint.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import selfnorm as sn
from measuring import Stopwatch, provenance, write_json
from selfnorm.datasets.images import load_binarized
from selfnorm.errors import SelfnormWarning
from selfnorm.vae import (
    ConvDecoder,
    ConvEncoder,
    DenseDecoder,
    DenseEncoder,
    EnergyPrior,
    EnergyVAE,
    evaluate_vae,
    latent_energy,
)

LATENT = 16
N_LOOKS = 50
Setting = tuple[dict[str, Any], dict[str, Any]]
SETTINGS: dict[str, dict[str, Setting]] = {
    "digits": {
        "spike": ({"proposal": "base"}, {"posterior_samples": 8, "n_samples": 1024, "lr": 3e-4}),
        "honest": (
            {
                "hidden": (64, 64),
                "proposal": "mixture",
                "bound": 5.0,
                "weight_decay": 0.1,
                "lr_scale": 0.3,
            },
            {
                "posterior_samples": 1,
                "batch_size": 32,
                "n_samples": 256,
                "lr": 3e-4,
                "weight_decay": 0.05,
            },
        ),
    },
    "mnist": {
        "spike": ({"proposal": "base"}, {"posterior_samples": 8, "n_samples": 4096, "lr": 1e-3}),
        "honest": (
            {"proposal": "mixture", "bound": 5.0, "weight_decay": 0.1, "lr_scale": 0.2},
            {"posterior_samples": 1, "n_samples": 1024, "lr": 3e-4, "weight_decay": 0.05},
        ),
    },
}
# Batch size, steps of the plain VAE and its learning rate, samples for log Z at the end.
SIZES: dict[str, tuple[int, int, float, int]] = {
    "digits": (128, 800, 2e-3, 200_000),
    "mnist": (256, 3000, 1e-3, 1_000_000),
}


def digits() -> tuple[Tensor, Tensor, Tensor]:
    """Training, validation and test part of the small digits."""
    from sklearn.datasets import load_digits

    x = torch.tensor(load_digits().data > 7).float()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, valid, test = x[order].split([1300, 200, 297])
    return train, valid, test


def run(given: argparse.Namespace) -> dict[str, Any]:
    """Train one setting; what the monitor and the evaluation say."""
    small = given.data == "digits"
    parts = digits() if small else load_binarized(given.data_dir)
    train, valid, test = (part[: given.rows].to(given.device) for part in parts)
    batch, plain_steps, plain_lr, n_prior_samples = SIZES[given.data]
    torch.manual_seed(0)
    encoder = DenseEncoder(64, LATENT) if small else ConvEncoder(LATENT)
    decoder = DenseDecoder(LATENT, 64) if small else ConvDecoder(LATENT)
    common: dict[str, Any] = {
        "val_data": valid, "max_epochs": 10**6, "batch_size": batch, "seed": 0, "progress": False,
    }  # fmt: skip
    clock = Stopwatch()
    plain_steps = min(plain_steps, given.steps)
    plain = EnergyVAE(encoder, decoder, LATENT).to(given.device)
    sn.fit(
        plain,
        train,
        max_steps=plain_steps,
        lr=plain_lr,
        **common,
        options=sn.TrainingOptions(validate_every=max(1, plain_steps // 2)),
    )
    before = evaluate_vae(plain, test, seed=0, posterior_samples=50)
    prior_options, fit_options = SETTINGS[given.data][given.setting]
    sizes = prior_options.get("hidden", (200, 200))  # the paper's
    options_of_prior = {k: v for k, v in prior_options.items() if k != "hidden"}
    prior = EnergyPrior(latent_energy(LATENT, sizes), **options_of_prior)
    vae = EnergyVAE(encoder, decoder, prior).to(given.device)
    every = max(1, given.steps // N_LOOKS)
    checkpoint = Path(given.out) / f"{name_of(given)}.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SelfnormWarning)
        fitted = {**common, **fit_options}
        task_options = {"posterior_samples": fitted.pop("posterior_samples")}
        options = sn.TrainingOptions(
            schedule="constant",
            weight_decay=fitted.pop("weight_decay", 0.0),
            validate_every=every,
            checkpoint=sn.Checkpoint(checkpoint, every=every),
        )
        history = sn.fit(
            vae, train, max_steps=given.steps, task_options=task_options, options=options, **fitted
        )
    if history.stopped == "interrupted":
        raise KeyboardInterrupt
    report = evaluate_vae(
        vae, test, seed=0, posterior_samples=50, reference=train, n_prior_samples=n_prior_samples
    )
    checkpoint.unlink(missing_ok=True)
    names = ("score", "ess", "drift", "drift_se", "spiked")
    curve = [
        {"step": r["step"], **{f"val_{k}": r.get(f"val_{k}") for k in names}}
        for r in history.records
    ]
    return {
        "setting": given.setting,
        "data": given.data,
        "prior": prior_options,
        "fit": fit_options,
        **provenance(given.device),
        **clock(1),
        "vae": {"elbo": before.elbo},
        "n_steps": history.n_steps,
        "stopped": history.stopped,
        "best_step": history.best_step,
        "final": {k: v for k, v in report.to_dict().items() if k != "log_norm"},
        "log_norm": {k: v.value for k, v in report.log_norm.items()},
        "curve": curve,
        "n_checks": len(curve),
        "n_flags": sum(bool(r["val_spiked"]) for r in curve),
        "first_flag": next((r["step"] for r in curve if r["val_spiked"]), None),
    }


def name_of(given: argparse.Namespace) -> str:
    """Stem of the files of a run."""
    return given.setting if given.data == "digits" else f"{given.data}_{given.setting}"


def main() -> None:
    """Run one setting and write it down."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--setting", choices=("honest", "spike"), default="spike")
    parser.add_argument("--data", choices=sorted(SETTINGS), default="digits")
    parser.add_argument("--data-dir", help="folder with binarized_mnist/")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--rows", type=int, help="of each part at most: a rehearsal")
    parser.add_argument("--out", default="results/vae_spikes")
    given = parser.parse_args()
    if given.device == "cpu":
        torch.set_num_threads(1)
    path = Path(given.out) / f"{name_of(given)}.json"
    result = run(given)
    write_json(path, result)
    final = result["final"]
    print(
        f"{path.stem}: first flag at {result['first_flag']}, {result['n_flags']} of "
        f"{result['n_checks']} checks; ELBO {final['elbo']:.2f}, reliable {final['reliable']}"
    )


if __name__ == "__main__":
    main()
