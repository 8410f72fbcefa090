"""Spikes on purpose: a joint energy prior normalised by base samples alone, and honest settings.

A VAE with 16 latent numbers is trained with a standard normal prior for a while, then goes on with
a joint energy. ``spike`` estimates ``Z`` from base samples and sets the energy no limit; ``honest``
adds the aggregate posterior to the proposal, a bound and weight decay. The monitor only warns here;
what it saw at every validation is written down.

    python benchmarks/vae_spikes.py --setting spike --steps 2500
    python benchmarks/vae_spikes.py --setting honest --steps 50000

run on scikit-learn's digits, binarised, on a CPU. A run that was interrupted goes on from its
checkpoint.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits

import selfnorm as sn
from measuring import Row, Stopwatch, provenance, write_json
from selfnorm.errors import SelfnormWarning
from selfnorm.vae import (
    DenseDecoder,
    DenseEncoder,
    EnergyPrior,
    EnergyVAE,
    evaluate_vae,
    latent_energy,
)

LATENT = 16
N_LOOKS = 50
PLAIN_STEPS = 800  # with the standard normal prior, before
N_PRIOR_SAMPLES = 200_000
SETTINGS: dict[str, Row] = {
    "spike": {
        "hidden": (200, 200),  # the paper's
        "prior": {"proposal": "base"},
        "posterior_samples": 8,
        "fit": {"n_samples": 1024},
        "options": {"weight_decay": 0.0},
    },
    "honest": {
        "hidden": (64, 64),
        "prior": {"proposal": "mixture", "bound": 5.0, "weight_decay": 0.1, "lr_scale": 0.3},
        "posterior_samples": 1,
        "fit": {"batch_size": 32, "n_samples": 256},
        "options": {"weight_decay": 0.05},
    },
}


def run(given: argparse.Namespace, checkpoint: Path) -> Row:
    """Train one setting; what the monitor and the evaluation say."""
    setting = SETTINGS[given.setting]
    x = torch.tensor(load_digits().data > 7).float()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, valid, test = (part[: given.rows] for part in x[order].split([1300, 200, 297]))
    torch.manual_seed(0)
    encoder, decoder = DenseEncoder(64, LATENT), DenseDecoder(LATENT, 64)
    common: dict[str, Any] = {
        "val_data": valid, "max_epochs": 10**6, "batch_size": 128, "seed": 0, "progress": False,
    }  # fmt: skip
    clock = Stopwatch()
    steps = min(PLAIN_STEPS, given.steps)
    plain = EnergyVAE(encoder, decoder, LATENT)
    halfway = sn.TrainingOptions(validate_every=max(1, steps // 2))
    sn.fit(plain, train, max_steps=steps, lr=2e-3, **common, options=halfway)
    before = evaluate_vae(plain, test, seed=0, posterior_samples=50)
    prior = EnergyPrior(latent_energy(LATENT, setting["hidden"]), **setting["prior"])
    vae = EnergyVAE(encoder, decoder, prior)
    every = max(1, given.steps // N_LOOKS)
    options = sn.TrainingOptions(
        schedule="constant",
        validate_every=every,
        checkpoint=sn.Checkpoint(checkpoint, every=every),
        **setting["options"],
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SelfnormWarning)
        history = sn.fit(
            vae,
            train,
            max_steps=given.steps,
            lr=3e-4,
            task_options={"posterior_samples": setting["posterior_samples"]},
            options=options,
            **{**common, **setting["fit"]},
        )
    if history.stopped == "interrupted":
        raise KeyboardInterrupt
    figures = {"posterior_samples": 50, "n_prior_samples": N_PRIOR_SAMPLES}
    report = evaluate_vae(vae, test, seed=0, reference=train, **figures)
    checkpoint.unlink(missing_ok=True)
    names = ("score", "ess", "drift", "drift_se", "spiked")
    curve = [
        {"step": r["step"], **{f"val_{k}": r.get(f"val_{k}") for k in names}}
        for r in history.records
    ]
    return {
        "setting": given.setting,
        **setting,
        **provenance(),
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


def main() -> None:
    """Run one setting and write it down."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--setting", choices=SETTINGS, default="spike")
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--rows", type=int, help="of each part at most: a rehearsal")
    parser.add_argument("--out", type=Path, default=Path("results/vae_spikes"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    path = given.out / f"{given.setting}.json"
    result = run(given, path.with_suffix(".pt"))
    write_json(path, result)
    final = result["final"]
    print(
        f"{path.stem}: first flag at {result['first_flag']}, {result['n_flags']} of "
        f"{result['n_checks']} checks; ELBO {final['elbo']:.2f}, reliable {final['reliable']}"
    )


if __name__ == "__main__":
    main()
