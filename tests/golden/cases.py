"""Tiny seeded fits, one or more of every family: what they give is in ``values.json``."""

import tempfile
import warnings
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

import selfnorm as sn
from selfnorm.tables import RegressorNetwork
from selfnorm.vae import (
    AutoregressivePrior,
    DenseDecoder,
    DenseEncoder,
    EnergyPrior,
    MixturePrior,
    StandardNormal,
    latent_energy,
)
from tests.fitting import fit, fit_distributed, fit_many

CASES = {}
QUICK = {"batch_size": 64, "n_samples": 64, "max_steps": 25, "lr": 5e-3, "seed": 3}
QUICK |= {"max_epochs": 1000, "progress": False}
TINY = {"hidden": 12, "components": 3, "context": 4, "energy_hidden": 8}


def case(*kinds):
    def register(function):
        CASES.update({f"{function.__name__}_{kind}": partial(function, kind) for kind in kinds})
        return function

    return register


def run(function):
    """The values that a function returns by name, seeded: 1-D arrays of float64."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = function()
    return {name: flat(value) for name, value in found.items()}


def flat(value):
    value = value.detach().numpy() if isinstance(value, torch.Tensor) else value
    return np.asarray(value, dtype=np.float64).ravel()


def rows(n=300, dim=2, seed=0):
    x = np.random.default_rng(seed).gumbel(size=(n, dim))
    x[:, -1] += 0.5 * x[:, 0] ** 2
    return x


def table(*size):
    return torch.from_numpy(rows(*size))


def pairs(outputs=1):
    x, y = rows(200, 2, 5), rows(200, outputs, 6)
    return x, y + x[:, :1]


def images(n=48):
    x = np.random.default_rng(7).integers(0, 255, (n, 1, 8, 8), dtype=np.uint8)
    return x, x[:, 0, :4].mean((1, 2)) / 4 + np.arange(n) % 3


def numbers(bounds):
    return [v for _, v in sorted(asdict(bounds).items()) if isinstance(v, int | float)]


def mlp(**options):
    return sn.MLP(2, hidden=(12, 12), **options).double()


def layers(kind=nn.Sequential):
    return kind(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 1)).double()


def ebm(energy=mlp, base=True):
    base = sn.Gaussian.fit_to(table(), inflate=1.2) if base else None
    return sn.EBM(energy(), base=base)


def answers(model):
    return torch.cat([model.eval().log_prob(table(7, 2, 1)), model.log_norm[None]])


@case("snl", "nce", "ranking_nce", "importance_ml", "bregman_lsif", "cd", "pcd", "dsm", "ssm")
def objective(name):
    model = ebm()
    history = fit(model, table(), objective=name, proposal=model.base, **QUICK)
    return {"values": answers(model), "loss": history.curve("loss")[1]}


ENERGIES = {
    "float32": lambda: sn.MLP(2, (12, 12)),
    "sequential": layers,
    "fourier": lambda: mlp(features=sn.FourierFeatures(2, n_features=6), saturate=4.0),
    "family": lambda: sn.ExponentialFamily(torch.tanh, 2).double(),
}
OPTIONS = {
    "validated": lambda: {"val_data": table(50, 2, 2), "ema": 0.9, "validate_every": 5},
    "float32": lambda: {"optimizer": "adam", "schedule": "cosine"},
    "sequential": lambda: {"weight_decay": 0.1},
    "fourier": lambda: {"schedule": "constant"},
    "family": lambda: {"clip_norm": None},
    "defensive": lambda: {"proposal": sn.Defensive.fit_to(table()), "clip_norm": 0.1},
    "boxed": lambda: {"proposal": sn.Uniform(*torch.tensor([[-6.0, -9], [9, 40]])), "lr": 1e-2},
    "guarded": lambda: {"proposal": None},
    "chunked": lambda: {"max_memory": 2e4},
    "distributed": lambda: {"n_accumulate": 2},
}


@case(*OPTIONS)
def energy(kind):
    model, options, train = ebm(ENERGIES.get(kind, mlp), kind != "boxed"), OPTIONS[kind](), fit
    if kind == "distributed":
        from lightning_fabric import Fabric

        train = partial(fit_distributed, fabric=Fabric(accelerator="cpu", devices=1))
    history = train(model, table(), **QUICK | {"proposal": model.base} | options)
    return {"values": answers(model), "best": [history.best_step, history.best_score or 0.0]}


@case("bounds", "sir", "imh", "mala", "hmc", "smc")
def fitted(method):
    model, x = ebm(partial(mlp, saturate=2.0)), table()
    fit(model, x, proposal=model.base, **QUICK)
    if method != "bounds":
        return {"rows": model.sample(200, method=method, seed=0)[:6]}
    proposals = {"base": None, "defensive": sn.Defensive.fit_to(x)}
    options = {"n_samples": 2000, "seed": 0}
    found = {k: sn.evaluate(model, x, proposal=q, **options) for k, q in proposals.items()}
    exact = sn.exact_log_norm(model, 2, n_points=65)
    return {k: numbers(v) for k, v in found.items()} | {"quadrature": exact}


@case("independent", "same")
def many(kind):
    models = [ebm() for _ in range(3)]
    options = {"lr": [1e-3, 5e-3, 1e-2], "objective": ["snl", "nce", "snl"], "ema": 0.9}
    options |= {"same_batches": kind == "same", "same_samples": kind == "same"}
    options["proposal"] = [model.base for model in models]
    fit_many(models, table(), val_data=table(50, 2, 2), **QUICK | options)
    mixture, found = sn.Ensemble(models), {f"member{k}": answers(m) for k, m in enumerate(models)}
    return {**found, "mixture": answers(mixture), "rows": mixture.sample(5, seed=0)}


class Stopping(nn.Sequential):
    """An energy that interrupts training at its so manieth call in a training step."""

    left = -1

    def forward(self, x):
        if torch.is_grad_enabled():
            Stopping.left -= 1
            if Stopping.left == 0:
                raise KeyboardInterrupt
        return super().forward(x)


@case("snl", "pcd", "many")
def resumed(kind):
    """Interrupted after some steps and gone on with: the values of a run never stopped."""

    def train(left=-1, path=None):
        torch.manual_seed(0)
        Stopping.left, options = left, QUICK | {"checkpoint": path and sn.Checkpoint(path, every=2)}
        models = [ebm(partial(layers, Stopping)) for _ in range(2)]
        if kind == "many":
            histories = fit_many(models, table(), proposal=[m.base for m in models], **options)
        else:
            options["proposal"] = models[0].base
            histories = [fit(models[0], table(), objective=kind, **options)]
        return torch.cat([answers(m) for m in models]), histories[0]

    whole, _ = train()
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "run.ckpt")
        assert train(200 if kind == "pcd" else 14, path)[1].stopped == "interrupted"
        again, history = train(path=path)
    assert history.n_steps == QUICK["max_steps"]
    assert torch.equal(whole, again)
    return {"values": again}


@case("scalar", "network", "base")
def conditional(kind):
    x, y = (torch.from_numpy(v) for v in pairs())
    parts = sn.LabelEnergy(2, hidden=(8, 8)), sn.MDN(2, components=3, hidden=(8,))
    b, base = 0.0 if kind == "scalar" else nn.Linear(2, 1), "proposal" if kind == "base" else None
    model = sn.ConditionalEBM(*parts, log_norm=b, base=base).double()
    fit(model, (x, y), **QUICK | {"n_samples": 8})
    found = {"log_prob": model.eval().log_prob(x[:7], y[:7]), "log_norm": model.log_norm(x[:7])}
    bounds = sn.evaluate(model, (x[:20], y[:20]), n_samples=200, seed=0)
    return {**found, "bounds": numbers(bounds), "rows": model.sample(x[:3], 2, seed=0)}


@case("one", "mixed")
def chain(kind):
    more = {"one": {"discrete": None}, "mixed": {"orderings": 2, "family": "gaussian", "drop": 0.1}}
    model, x = sn.AutoregressiveEBM(3, blocks=1, **TINY, **more[kind]), table(300, 3).float()
    fit(model, x, val_data=x[:50], **QUICK | {"n_samples": 4}, task_options={"polish_steps": 5})
    found = {"learned": model.eval().log_prob(x[:7]), "rows": model.sample(4, seed=0)}
    found["quadrature"] = model.log_prob(x[:7], normalizer="quadrature", n_nodes=256)
    return {**found, "bounds": numbers(model.bounds(x[:30], n_samples=64, seed=0))}


@case("nsf", "maf")
def flow(kind):
    model, x = sn.Flow(2, kind=kind, transforms=2, hidden=(8,)), table().float()
    fit(model, x, **QUICK)
    return {"log_prob": model.eval().log_prob(x[:7]), "rows": model.sample((3,))}


# -- models that can be saved: how one of each kind is made, and what it is asked -----------------


def density(dim, **options):
    options = {"max_steps": 25, "random_state": 0, "hidden": 8} | options
    x = rows(300, dim)
    method = "joint" if dim <= 2 else "autoregressive"
    return sn.EnergyDensity(method=method, contamination=0.1, **options).fit(x)


def mixed_table(n, seed=0):
    rng = np.random.default_rng(seed)
    kind, size = rng.choice(["a", "b", "c"], n), rng.gumbel(size=n)
    zero = np.where(rng.random(n) < 0.3, 0.0, rng.gamma(2.0, size=n))
    size[::6] = np.nan
    return {"kind": kind, "size": size, "count": rng.poisson(40.0, n), "zero": zero}


def table_density():
    return sn.EnergyDensity(max_steps=25, random_state=0, hidden=8).fit(mixed_table(300))


def table_values(model):
    x = mixed_table(7, 1)
    drawn = model.sample(4, random_state=0)
    found = {"log_prob": model.score_samples(x), "given": model.log_prob(x, given=["size"])}
    found |= {f"rows_{name}": drawn[name] for name in ("size", "count", "zero")}
    found |= {f"explained_{name}": values for name, values in model.explain(x).items()}
    found["other"] = [model.offset_, model.lower_bound_, *model.consistency_.values()]
    return {**found, "bounds": numbers(model.bounds(x, n_samples=200, random_state=0))}


def density_values(model):
    x = rows(7, model.n_features_in_, 1)
    found = {"log_prob": model.score_samples(x), "rows": model.sample(4, random_state=0)}
    found |= {"log_mass": model.log_mass(np.round(x)), "other": [model.offset_, model.lower_bound_]}
    return {**found, "bounds": numbers(model.bounds(x, n_samples=200, random_state=0))}


def regressor(outputs=1, **options):
    network = RegressorNetwork(energy_hidden=8, energy_epochs=3, input_bins=4, **options)
    options = {"n_members": 2, "hidden": 12, "n_components": 3, "network": network}
    options |= {"max_epochs": 4, "random_state": 0}
    x, y = pairs(outputs)
    return sn.EnergyRegressor(**options).fit(x, y if outputs > 1 else y[:, 0])


def regressor_values(model):
    x, y = (v[:7] for v in pairs(model.n_outputs_))
    found = {"mean": model.predict(x), "rows": model.sample(x[:2], 2, random_state=0)}
    found |= {f"log_prob_{m}": model.log_prob(x, y, method=m) for m in ("exact", "learned")}
    if model.n_outputs_ == 1:
        found |= {"quantiles": model.predict_quantiles(x), "crps": model.crps(x, y)}
    return {**found, "bounds": numbers(model.bounds(x, y, n_samples=100, random_state=0))}


PRIORS = {
    "normal": lambda: StandardNormal(2),
    "mixture": lambda: MixturePrior(2, 3),
    "energy": lambda: EnergyPrior(latent_energy(2, (8,), zero_init=False), MixturePrior(2, 2)),
    "chain": lambda: AutoregressivePrior(2, polish_steps=5, **TINY),
}


def vae(prior, likelihood="bernoulli", added=False):
    x, parts = (table(200, 6, 4) > 0.4).double(), (DenseEncoder(6, 2, (8,)), DenseDecoder(2, 6))
    if added:
        options = {"latent": 2, "prior": PRIORS[prior](), "max_steps": 10, "seed": 0}
        return sn.add_energy_prior(*parts, x.float(), **options)[0]
    model = sn.EnergyVAE(*parts, PRIORS[prior](), likelihood).double()
    fit(model, x, **QUICK)
    return model


def vae_values(model):
    x = (table(200, 6, 4) > 0.4)[:7].to(model.dtype)
    found = {"log_prob": model.log_prob(x, 20, seed=0), "elbo": model.elbo(x, 5, seed=0)}
    found["prior"] = model.prior.log_prob(table(7, 2, 1).to(model.dtype))
    return {**found, "rows": model.sample(3, mean=True, seed=0)}


def backbone():
    return nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(4, 6), nn.ReLU())


def image(objective, **options):
    options |= {"n_samples": 8, "batch_size": 16, "max_epochs": 3, "random_state": 0}
    return sn.ImageRegressor(objective, backbone=backbone(), **options).fit(*images())


def image_values(model):
    x, y = (v[:7] for v in images())
    found = {"log_prob": model.log_prob(x, y), "rows": model.sample(x[:2], 2, seed=0)}
    if model.objective in ("snl", "nce"):
        found["learned"] = model.log_prob(x, y, method="learned")
    return {**found, "mean": model.predict(x), "quantiles": model.predict_quantiles(x)}


LOADS = {
    density: (sn.EnergyDensity.load, density_values),
    table_density: (sn.EnergyDensity.load, table_values),
    regressor: (sn.EnergyRegressor.load, regressor_values),
    vae: (sn.EnergyVAE.load, vae_values),
    image: (lambda path: sn.ImageRegressor.load(path, backbone=backbone()), image_values),
}
SAVED = {
    "density_joint": partial(density, 2),
    "density_table": table_density,
    "regressor": regressor,
    "regressor_bins": partial(regressor, label_bins=4, bin_jitter=0.5, input_noise=0.1),
    **{f"vae_{prior}": partial(vae, prior) for prior in PRIORS},
    "image_paper": partial(image, "snl", energy="paper"),
    "image_l2": partial(image, "l2"),
}
UNSAVED = {
    "density_line": partial(density, 1),
    "density_best": partial(density, 2, n_init=2, validation_fraction=0.2),
    "regressor_two": partial(regressor, 2),
    "vae_gaussian": partial(vae, "mixture", "gaussian"),
    "vae_added": partial(vae, "chain", added=True),
    **{f"image_{objective}": partial(image, objective) for objective in ("snl", "nce", "mdn")},
}


def of_make(make):
    return LOADS[getattr(make, "func", make)]


# The fit of a table has default sizes, which may be improved: its folder alone counts.
for _name, _make in {**SAVED, **UNSAVED}.items():
    if _make is table_density:
        continue
    CASES[_name] = lambda make=_make: of_make(make)[1](make())
