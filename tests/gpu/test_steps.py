"""Captured steps are plain steps, for every family; bfloat16; steps that nearly overflow."""

from functools import partial
from importlib.util import find_spec

import numpy as np
import torch
from torch import nn

import selfnorm as sn
from selfnorm.tables import RegressorNetwork
from selfnorm.training import TrainingOptions, run
from selfnorm.vae import DenseDecoder, DenseEncoder
from tests.fitting import Deepens, Hole, fit, fit_many
from tests.golden.cases import PRIORS, TINY, backbone
from tests.gpu.tools import DEVICE, close, each, flat, graphs, moved, skip

QUICK = {"batch_size": 64, "n_samples": 64, "max_steps": 30, "max_epochs": 1000, "lr": 2e-3}
QUICK |= {"seed": 3, "progress": False}


def rows(n=400, dim=2, seed=0):
    x = np.random.default_rng(seed).gumbel(size=(n, dim)).astype(np.float32)
    return torch.from_numpy(x).to(DEVICE)


def ebm(energy=None, base="gaussian"):
    x = rows()
    bases = {"gaussian": sn.Gaussian.fit_to, "student": sn.StudentT.fit_to}
    energy = energy or sn.MLP(2, (16, 16), saturate=4.0)
    return sn.EBM(energy, base=bases[base](x)).to(DEVICE)


def plain(objective="snl", proposal=None, **options):
    model, x = ebm(base="student" if proposal else "gaussian"), rows()
    q = None if proposal is None else proposal(x)
    fit(model, x, objective=objective, proposal=q, val_data=rows(seed=1), **QUICK | options)
    return [model]


def several():
    models = [ebm() for _ in range(3)]
    fit_many(models, rows(), **QUICK)
    return models


def conditional():
    x, y = rows(), rows(dim=1, seed=2)
    parts = sn.LabelEnergy(2, hidden=(8, 8)), sn.MDN(2, components=3, hidden=(8,))
    model = sn.ConditionalEBM(*parts, log_norm=nn.Linear(2, 1), base="proposal").to(DEVICE)
    fit(model, (x, y), **QUICK | {"n_samples": 8})
    return [model]


def chain():
    model = sn.AutoregressiveEBM(3, blocks=1, discrete=None, **TINY).to(DEVICE)
    polish = {"polish_steps": 5}
    fit(model, rows(dim=3), **QUICK | {"n_samples": 4}, task_options=polish)
    return [model]


def mixed(n):
    """Numbers, some missing, whole ones and words."""
    a, b, c = rows(n, 3).cpu().numpy().T
    words = np.array(["low", "middle", "high"])[(c > 0).astype(int) + (c > 1)]
    return {"a": a, "b": np.where(a > 2, np.nan, b), "c": words, "d": np.floor(3 * c)}


def density(x):
    options = {"max_steps": 30, "hidden": 8, "random_state": 0, "device": str(DEVICE)}
    return [sn.EnergyDensity(**options).fit(x).model_]


def regressor():
    network = RegressorNetwork(energy_hidden=8, energy_epochs=4)
    options = {"n_members": 2, "hidden": 12, "max_epochs": 4, "network": network}
    model = sn.EnergyRegressor(**options, random_state=0, device=str(DEVICE))
    x = rows(dim=3).cpu().numpy()
    return [model.fit(x[:, :2], x[:, 2])._predictive.model]


def images(objective="snl"):
    x = np.random.default_rng(7).integers(0, 255, (96, 1, 8, 8), dtype=np.uint8)
    y = x[:, 0, :4].mean((1, 2)) / 4 + np.arange(96) % 3
    options = {"n_samples": 8, "batch_size": 16, "max_epochs": 4, "random_state": 0}
    model = sn.ImageRegressor(objective, backbone=backbone(), device=str(DEVICE), **options)
    return [model.fit(x, y).model_]


def vae(prior):
    x = (rows(300, 6) > 0.4).float()
    parts = DenseEncoder(6, 2, (8,)), DenseDecoder(2, 6)
    model = sn.EnergyVAE(*parts, PRIORS[prior](), "bernoulli").to(DEVICE)
    fit(model, x, **QUICK)
    return [model]


def flow():
    if find_spec("zuko") is None:
        skip("no zuko")
    model = sn.Flow(2, transforms=2, hidden=(8,)).to(DEVICE)
    fit(model, rows(), **QUICK)
    return [model]


OBJECTIVES = ("snl", "nce", "ranking_nce", "importance_ml", "bregman_lsif", "bregman_reverse")
FAMILIES = {
    **{f"ebm {name}": partial(plain, name) for name in (*OBJECTIVES, "bregman_exponential")},
    "ebm ema": partial(plain, ema=0.9),
    "ebm adam": partial(plain, optimizer="adam", schedule="constant", weight_decay=1e-3),
    "ebm not clipped": partial(plain, clip_norm=None),
    "ebm student": partial(plain, proposal=sn.StudentT.fit_to),
    "ebm mixture": partial(plain, proposal=partial(sn.GaussianMixture.fit_to, n_components=3)),
    "ebm defensive": partial(plain, proposal=partial(sn.Defensive.fit_to, n_components=3)),
    "many": several,
    "chain": chain,
    "joint table": lambda: density(rows(1200, 2).cpu().numpy()),
    # of smaller tables, whose chains begin at regressions, no step is captured
    "chain table": lambda: density(rows(2600, 4).cpu().numpy()),
    "mixed table": lambda: density(mixed(2600)),
    "regressor": regressor,
    "flow": flow,
    "images": images,
    "images mdn": partial(images, "mdn"),
    **{f"vae {prior}": partial(vae, prior) for prior in PRIORS},
}


@each(*FAMILIES)
def test_captured_steps_are_plain_steps(family):
    found = {}
    for wanted in (False, True):
        torch.manual_seed(0)
        with graphs(wanted):
            found[wanted] = [flat(model) for model in FAMILIES[family]()]
    for captured, stepped in zip(found[True], found[False], strict=True):
        assert bool(captured.isfinite().all())
        # The same random numbers; products may be summed in another order.
        close(captured, stepped, 3e-2 if "images" in family else 1e-2)


@each("cd", "pcd", "dsm", "ssm")
def test_objectives_without_a_graph_train_on_the_device(objective):
    model = ebm()
    before = flat(model)
    fit(model, rows(), objective=objective, **QUICK | {"max_steps": 10})
    moved(model, before)


def test_an_energy_in_bfloat16():
    x = rows()
    model = sn.EBM(sn.MLP(2, (16, 16), saturate=4.0).bfloat16()).to(DEVICE)
    before, q = flat(model), sn.Gaussian.fit_to(x)
    history = fit(model, x.bfloat16(), proposal=q, **QUICK)
    assert history.skipped_steps == 0
    assert model.log_norm.dtype == torch.float32
    moved(model, before)


def test_images_in_bfloat16_are_close_to_single_precision():
    torch.manual_seed(0)
    (model,) = images()
    x = torch.rand(20, 1, 8, 8)
    with torch.no_grad():
        on_device = model.features(x.to(DEVICE)).float().cpu()
        expected = model.cpu().features(x)
    close(on_device, expected, 2e-2)


def test_energies_of_a_chain_see_values_as_they_are_where_matrices_are_rounded():
    model, x = sn.AutoregressiveEBM(3, blocks=1, discrete=None, **TINY).to(DEVICE), rows(dim=3)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        with torch.no_grad():
            at = model.set_scaling(x).at_rows(x).factors
            y = at.proposal.sample(4)
            found = model.energy.features(y, at)
    finally:
        torch.set_float32_matmul_precision(before)
    at = at._replace(mean=at.mean.cpu(), inverse_sd=at.inverse_sd.cpu())
    close(found.cpu(), model.cpu().energy.features(y.cpu(), at), 1e-5)


def test_captured_steps_whose_gradient_has_no_square_are_taken():
    q = sn.Gaussian(torch.zeros(2, device=DEVICE), scale=1.0)
    model = sn.EBM(Hole(0.0), base=q).to(DEVICE)
    task = Deepens(model, q, n_samples=1024)
    options = TrainingOptions(max_steps=100, lr=1e-2, batch_size=128, seed=0, progress=False)
    with graphs(True):
        history = run(task, (torch.randn(600, 2, device=DEVICE),), options=options)
    assert history.skipped_steps == 0
    assert float(model.energy.depth.detach()) < 59.9
