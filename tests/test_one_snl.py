"""The formula in ``functional`` is what runs: one training step of every family executes it."""

import sys

import numpy as np
import pytest
import torch
from torch import nn

import selfnorm as sn
from selfnorm import functional
from selfnorm.vae import AutoregressivePrior, EnergyPrior, EnergyVAE
from tests.fitting import fit, fit_many

QUICK = {"n_samples": 8, "max_steps": 1, "batch_size": 20, "seed": 0, "progress": False}


def rows(n=60, d=2):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(0))


def ebm():
    return sn.EBM(sn.MLP(2, (4,)), base=sn.Gaussian.fit_to(rows()))


def conditional():
    energy = sn.LabelEnergy(2, 1, hidden=(4,))
    model = sn.ConditionalEBM(energy, sn.MDN(2, 1, components=2))
    fit(model, (rows(), rows(d=1)), **QUICK)


def chain():
    sizes = {"orderings": 1, "hidden": 8, "components": 2, "context": 2, "energy_hidden": 4}
    fit(sn.AutoregressiveEBM(2, **sizes), rows(), polish_steps=1, **QUICK)


def regressor():
    sn.EnergyRegressor(max_epochs=1, random_state=0).fit(rows().numpy(), rows(d=1).numpy()[:, 0])


def images():
    x = np.random.default_rng(0).integers(0, 256, (40, 3, 4, 4), dtype=np.uint8)
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(48, 8))
    sn.ImageRegressor(backbone=backbone, n_samples=4, max_epochs=1, random_state=0).fit(
        x, np.arange(40.0)
    )


def vae(prior):
    model = EnergyVAE(nn.Linear(6, 4), nn.Linear(2, 6), prior)
    fit(model, (rows(d=6) > 0).float(), objective="snelbo", monitor="off", **QUICK)


FAMILIES = {
    "EBM": lambda: fit(ebm(), rows(), **QUICK),
    "EBM in chunks": lambda: fit(ebm(), rows(), max_memory=2**16, **QUICK),
    "models together": lambda: fit_many([ebm(), ebm()], rows(), **QUICK),
    "conditional": conditional,
    "chain": chain,
    "regressor": regressor,
    "images": images,
    "VAE, energy": lambda: vae(EnergyPrior(dim=2)),
    "VAE, chain": lambda: vae(AutoregressivePrior(2, hidden=8, components=2)),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_training_step_executes_the_formula(family):
    calls, code = [], functional.snl.__code__

    def look(frame, event, _):
        if event == "call" and frame.f_code is code:
            calls.append(torch.is_grad_enabled())

    before = sys.getprofile()
    sys.setprofile(look)  # sees the call by whatever name a module has imported it
    try:
        FAMILIES[family]()
    finally:
        sys.setprofile(before)
    assert any(calls)  # with a gradient: in training, not in validation alone
