"""Spikes on purpose: a joint energy prior normalised by base samples alone, and honest settings.

scikit-learn's digits, binarised; a VAE with 16 latent numbers is trained with a standard normal
prior, then goes on with a joint energy. ``spike`` estimates ``Z`` from base samples and sets the
energy no limit; ``honest`` adds the aggregate posterior to the proposal, a bound and weight decay.
The monitor only warns here; what it saw at every validation is written down.

    python benchmarks/vae_spikes.py --setting spike --steps 2500 --out results/vae_spikes
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor

import selfnorm as sn
from selfnorm.errors import SelfnormWarning
from selfnorm.experiments.report import hardware, versions
from selfnorm.vae import EnergyVAE
from selfnorm.vae_energy_prior import EnergyPrior, latent_energy
from selfnorm.vae_evaluation import evaluate_vae
from selfnorm.vae_networks import DenseDecoder, DenseEncoder

LATENT = 16
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "spike": (
        {"proposal": "base"},
        {"posterior_samples": 8, "n_samples": 1024, "lr": 3e-4},
    ),
    "honest": (
        {"proposal": "mixture", "bound": 10.0, "weight_decay": 0.1, "lr_scale": 0.3},
        {"posterior_samples": 1, "n_samples": 256, "lr": 3e-4, "weight_decay": 0.05},
    ),
}


def digits() -> tuple[Tensor, Tensor, Tensor]:
    """Training, validation and test digits."""
    x = torch.tensor(load_digits().data > 7).float()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, valid, test = x[order].split([1300, 200, 297])
    return train, valid, test


def main() -> None:
    """Run one setting and write what the monitor and the evaluation say."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--setting", choices=sorted(SETTINGS), default="spike")
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--out", default="results/vae_spikes")
    given = parser.parse_args()
    torch.set_num_threads(1)
    train, valid, test = digits()
    torch.manual_seed(0)
    encoder, decoder = DenseEncoder(64, LATENT), DenseDecoder(LATENT, 64)
    common: dict[str, Any] = {
        "val_data": valid, "max_epochs": 10**6, "batch_size": 128, "seed": 0, "progress": False,
    }  # fmt: skip
    plain = EnergyVAE(encoder, decoder, LATENT)
    sn.fit(plain, train, max_steps=800, lr=2e-3, validate_every=400, **common)
    before = evaluate_vae(plain, test, seed=0, posterior_samples=50)
    prior_options, fit_options = SETTINGS[given.setting]
    vae = EnergyVAE(encoder, decoder, EnergyPrior(latent_energy(LATENT), **prior_options))
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SelfnormWarning)
        history = sn.fit(
            vae, train, max_steps=given.steps, schedule="constant",
            validate_every=max(1, given.steps // 50), **fit_options, **common,
        )  # fmt: skip
    report = evaluate_vae(vae, test, seed=0, posterior_samples=50, reference=train)
    names = ("step", "val_score", "val_ess", "val_room", "val_drift", "val_spiked")
    result = {
        "setting": given.setting,
        "command": f"python benchmarks/vae_spikes.py --setting {given.setting} "
        f"--steps {given.steps}",
        "prior": prior_options,
        "fit": fit_options,
        "versions": versions(),
        "hardware": hardware("cpu"),
        "seconds": round(time.perf_counter() - began, 1),
        "vae": {"elbo": before.elbo},
        "best_step": history.best_step,
        "final": {k: v for k, v in report.to_dict().items() if k != "log_norm"},
        "log_norm": {k: v.value for k, v in report.log_norm.items()},
        "curve": [{k: r.get(k) for k in names} for r in history.records],
        "first_flag": next((r["step"] for r in history.records if r["val_spiked"]), None),
    }
    path = Path(given.out) / f"{given.setting}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1, default=float) + "\n")
    print(given.setting, "first flag at", result["first_flag"], "|", report)


if __name__ == "__main__":
    main()
