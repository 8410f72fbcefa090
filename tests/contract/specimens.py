"""A small model of every family, fitted in a second or two, and the questions it answers.

A class that is new has a line in ``SPECIMENS``: then it is saved, pickled, moved, seeded and asked
in every way that ``test_models`` knows.
"""

import math
import re
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import nn

import selfnorm as sn
from selfnorm._context import seeded
from selfnorm.distributions import DefensiveLabels
from selfnorm.tables import OutlierDetector
from selfnorm.vae import evaluate_vae
from tests.golden import cases


class Specimen(NamedTuple):
    """How a model is made, and the calls that ask it, by name; what ``load`` must be given."""

    make: Callable[[], Any]
    questions: Callable[[Any], dict[str, Callable[[], Any]]]
    parts: Callable[[], dict[str, Any]] = dict
    saved: bool = True


# tables


def frame(n, seed=0):
    """Categories, booleans and numbers."""
    rng = np.random.default_rng(seed)
    kind = rng.choice(["a", "b", "c"], n, p=[0.6, 0.3, 0.1])
    size = rng.gumbel(size=n) + (kind == "a")
    flag = rng.random(n) < 1 / (1 + np.exp(-size))
    grade = pd.Categorical(rng.choice(["low", "high"], n), ["low", "high"], ordered=True)
    return pd.DataFrame({"kind": kind, "flag": flag, "size": size, "grade": grade})


def gaps(n, seed=0):
    rng = np.random.default_rng(seed)
    table = frame(n, seed)[["kind", "size"]].assign(other=rng.normal(size=n))
    table.loc[rng.random(n) < 0.3, "size"] = np.nan
    table.loc[rng.random(n) < 0.2, "kind"] = None
    return table


def cells(n, seed=0):
    """Whole numbers, cents, point masses and limits."""
    rng = np.random.default_rng(seed)
    zero = np.where(rng.random(n) < 0.3, 0.0, rng.gamma(2.0, size=n))
    price, share = np.round(rng.gamma(2.0, 20.0, n), 2), np.clip(rng.normal(0.5, 0.4, n), 0, 1)
    return {"count": rng.poisson(40.0, n), "price": price, "zero": zero, "share": share}


def dates(n, seed=0):
    rng = np.random.default_rng(seed)
    start = pd.Timestamp("2024-01-01") + pd.to_timedelta(rng.integers(0, 90 * 86_400, n), "s")
    end = start + pd.to_timedelta(60 * rng.gamma(2.0, 5.0, n).round(), "s")
    day = start.strftime("%d.%m.%Y")
    return pd.DataFrame({"start": start, "end": end, "day": day, "size": rng.normal(size=n)})


def plain(n, seed=0, dim=3):
    return cases.rows(n, dim, seed)


def blanked(table):
    """The table with a gap in a different column of every row."""
    if isinstance(table, np.ndarray):
        holes = table.copy()
        holes[np.arange(len(holes)), np.arange(len(holes)) % holes.shape[1]] = np.nan
        return holes
    names = list(table)
    holes = {name: np.array(table[name], dtype=object) for name in names}
    for i in range(len(table[names[0]])):
        holes[names[i % len(names)]][i] = None
    return pd.DataFrame(holes) if isinstance(table, pd.DataFrame) else holes


def given_of(table, names):
    if isinstance(table, np.ndarray):
        return {names[0]: float(table[0, 0])}
    columns = {name: np.asarray(table[name])[:3] for name in names}
    return pd.DataFrame(columns) if isinstance(table, pd.DataFrame) else columns


# estimators


def of_density(model, table, given, levels):
    facts = ("offset_", "lower_bound_", "consistency_", "held_out_", "members_", "n_iter_")
    return {
        "score_samples": partial(model.score_samples, table),
        "log_mass": partial(model.log_mass, table),
        "log_prob": partial(model.log_prob, table, given=given),
        "decision": partial(model.decision_function, table),
        "predict": partial(model.predict, table),
        "bounds": partial(model.bounds, table, n_samples=200, random_state=0),
        "explain": partial(model.explain, table),
        "sample": partial(model.sample, 5, random_state=0),
        "sample_missing": partial(model.sample, 5, random_state=0, missing=True),
        "sample_given": partial(model.sample, 2, random_state=1, given=given_of(table, given)),
        "impute": partial(model.impute, blanked(table), random_state=0),
        "impute_twice": partial(model.impute, blanked(table), n_draws=2, random_state=1),
        "probabilities": partial(model.probabilities, table, levels),
        "marginal": lambda: model.marginal(given).score_samples(table),
        "marginal_sample": lambda: model.marginal(given).sample(3, random_state=0),
        "facts": model.facts,
        "judgement": lambda: model.judgement_,
        "history": model.history_.to_dict,
        "schema": lambda: [str(model.schema_), model.schema_.fingerprint],
        **{name: partial(getattr, model, name) for name in facts},
        "report": partial(page_of, model, table),
    }


def of_regressor(model, x, y):
    single = model.n_outputs_ == 1
    grid = np.linspace(float(np.min(y)), float(np.max(y)), 9)
    questions = {
        "predict": partial(model.predict, x),
        "mode": partial(model.predict_mode, x),
        "log_prob": partial(model.log_prob, x, y),
        "learned": partial(model.log_prob, x, y, method="learned"),
        "log_mass": partial(model.log_mass, x, y),
        "sample": partial(model.sample, x, 3, random_state=0),
        "bounds": partial(model.bounds, x, y, n_samples=100, random_state=0),
        "without_energy": lambda: model.without_energy().log_prob(x, y),
        "score": partial(model.score, x, y),
        "facts": model.facts,
        "judgement": lambda: model.judgement_,
    }
    if single:
        questions |= {
            "quantiles": partial(model.predict_quantiles, x, (0.05, 0.5, 0.95)),
            "central": partial(model.predict_interval, x, 0.8),
            "shortest": partial(model.predict_interval, x, 0.8, kind="highest_density"),
            "regions": partial(model.highest_density_regions, x, 0.8),
            "pdf": partial(model.pdf, x, grid),
            "cdf": partial(model.cdf, x, grid),
            "pit_and_crps": partial(model.pit_and_crps, x, y),
            "report": partial(page_of, model, x, y),
        }
    return questions


def page_of(model, *rows):
    """The words of a report, and the figures by their hash."""
    with tempfile.TemporaryDirectory() as folder:
        page = model.report(*rows, f"{folder}/report.html").read_text()
    return re.sub(
        r"\s+", " ", re.sub(r"<(style|svg|script).*?</\1>|<[^>]*>", " ", page, flags=re.S)
    )


def density(make, given, levels, *, n=250, schema=None, weights=False, **options):
    options = {"max_steps": 8, "hidden": 8, "random_state": 0} | options

    def fitted():
        table = make(n)
        weight = np.arange(n) % 3 if weights else None
        detected = schema and sn.Schema.detect(table, **schema)
        return sn.EnergyDensity(schema=detected, **options).fit(table, sample_weight=weight)

    return Specimen(fitted, partial(of_density, table=make(6, 1), given=given, levels=levels))


def regressor(make, **options):
    settings = {"n_members": 2, "hidden": 12, "n_components": 3, "max_epochs": 3, "random_state": 0}
    x, y = make(6, 1)
    return Specimen(
        lambda: sn.EnergyRegressor(**settings | options).fit(*make(120)),
        partial(of_regressor, x=x, y=y),
    )


def numbers_target(n, seed=0):
    x = plain(n, seed)
    return x[:, :2], x[:, 2]


def grid_target(n, seed=0):
    table = frame(n, seed).assign(day=dates(n, seed)["start"])
    return table, np.random.default_rng(seed).poisson(3.0, n) + table["flag"]


def two_targets(n, seed=0):
    x = plain(n, seed, 4)
    return x[:, :2], x[:, 2:]


def detector():
    model = OutlierDetector(sn.EnergyDensity(max_steps=8, hidden=8, random_state=0))
    return model.fit(frame(150)[["kind", "size"]])


def of_detector(model):
    table = frame(6, 1)[["kind", "size"]]
    asked = {"views": model.views, "decision": model.decision_function, "predict": model.predict}
    return {name: partial(ask, table) for name, ask in asked.items()}


# modules: what has weights and a log_prob

X = torch.randn(200, 2, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 30.0])
WIDE = sn.Gaussian.fit_to(X, inflate=1.2)


def module(make, of=None, **more):
    """A module of random weights; ``of(model)`` are its questions, else those of a proposal."""

    def built():
        with seeded(0):
            return make().eval()

    return Specimen(built, of or of_proposal, **more)


def of_proposal(model, x=X[:9], **options):
    def sample():
        with seeded(0):
            return model.sample((5,), **options)

    return {"log_prob": lambda: model.log_prob(x), "sample": sample}


def of_model(model, rows=X[:9], **options):
    """Of a density over rows: an EBM, an ensemble, a chain; ``options`` of where it is sampled."""
    return {
        "log_prob": lambda: model.log_prob(rows),
        "log_norm": lambda: model.log_norm,
        "sample": partial(model.sample, 5, seed=0, **options),
        "bounds": partial(sn.evaluate, model, rows, n_samples=500, seed=0, **options),
    }


def of_chain(model, *rows, n_samples=64):
    return {
        "log_prob": lambda: model.log_prob(*rows),
        "quadrature": partial(model.log_prob, *rows, normalizer="quadrature", n_nodes=256),
        "log_mass": lambda: model.log_mass(*rows),
        "sample": partial(model.sample, 7, *rows[1:], seed=0),
        "bounds": partial(model.bounds, *rows, n_samples=n_samples, seed=0),
    }


def of_conditional(model, x=X[:9, :1], y=X[:9, 1:]):
    return {
        "log_prob": lambda: model.log_prob(x, y),
        "log_norm": lambda: model.log_norm(x),
        "sample": partial(model.sample, x, 3, seed=0),
        "bounds": partial(sn.evaluate, model, (x, y), n_samples=200, seed=0),
    }


def ebm(base=WIDE, log_norm=0.3, dim=2, **options):
    return sn.EBM(sn.MLP(dim, hidden=(8, 8), **options), base=base, log_norm=log_norm)


def conditional(proposal, **options):
    return sn.ConditionalEBM(sn.LabelEnergy(1, hidden=(4,)), proposal, **options)


def normed():
    """An energy that depends on its mode."""
    layers = nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1)
    return nn.Sequential(*layers)


def with_features():
    model = sn.ConditionalEBM(
        sn.LabelEnergy(4, label_hidden=(3,), hidden=(8,)),
        sn.MDN(4, components=3),
        features=nn.Sequential(nn.Linear(1, 4), nn.ReLU(), nn.Dropout(0.1)),
        log_norm=nn.Linear(4, 1),
        base="proposal",
    )
    model.freeze_proposal()
    return model


def usual():
    """A model and the history of ``fit`` as a newcomer calls it."""
    torch.manual_seed(0)
    x = cases.table(400).float()
    model = sn.EBM(sn.MLP(2, (8, 8), saturate=4.0), base=sn.StudentT.fit_to(x))
    return model, sn.fit(model, x, max_epochs=2, seed=0, progress=False)


def conditional_chain():
    torch.manual_seed(0)
    x, condition = (v.float() for v in (cases.table(200, 3), cases.table(200, 2, 1)))
    model = sn.AutoregressiveEBM(3, condition_dim=2, blocks=1, **cases.TINY)
    cases.fit(model, (x, condition), **cases.QUICK | {"n_samples": 4, "max_steps": 10})
    return model.eval()


def of_conditional_chain(model):
    return of_chain(model, cases.table(200, 3)[:7].float(), cases.table(200, 2, 1)[:7].float())


class Encoder(nn.Module):
    """Of images, with batch statistics and dropout; it gives its answer in some form."""

    def __init__(self, form=tuple):
        super().__init__()
        self.form = form
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(24, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4)
        )

    def forward(self, x):
        return self.form(self.layers(x).chunk(2, -1))


class Decoder(nn.Module):
    def __init__(self, *shape):
        super().__init__()
        self.shape = shape or (1, 4, 6)
        self.layers = nn.Sequential(
            nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, math.prod(shape))
        )

    def forward(self, z):
        return self.layers(z).unflatten(-1, self.shape)


IMAGES = (torch.arange(24 * 40).reshape(40, 1, 4, 6) * 7 % 11 > 5).float()


def of_vae(model):
    few = {"posterior_samples": 3, "n_prior_samples": 500, "seed": 0}
    questions = {
        "evaluate_vae": lambda: evaluate_vae(model, IMAGES, **few).elbo,
        "one row": lambda: evaluate_vae(model, IMAGES[:1], **few).elbo,
        "log_prob": partial(model.log_prob, IMAGES, n_samples=3, seed=0),
        "elbo": partial(model.elbo, IMAGES, seed=0),
        "sample": partial(model.sample, 5, mean=True, seed=0),
        "reconstruct": partial(model.reconstruct, IMAGES),
    }
    return {"values": lambda: {name: ask() for name, ask in questions.items()}}


def own_networks():
    """What is not the library's own must be given to ``load``."""
    return {"encoder": Encoder(), "decoder": Decoder(1, 4, 6)}


def of_golden(name):
    make = {**cases.SAVED, **cases.UNSAVED}[name]
    image = name.startswith("image")

    def fitted():
        torch.manual_seed(0)
        return make()

    return Specimen(
        fitted,
        lambda model: {"values": partial(cases.of_make(make)[1], model)},
        parts=lambda: {"backbone": cases.backbone()} if image else {},
    )


PROPOSALS = {
    "gaussian": lambda: sn.Gaussian.fit_to(X),
    "diagonal": lambda: sn.Gaussian.fit_to(X, full=False),
    "student": lambda: sn.StudentT.fit_to(X, df=3.0),
    "uniform": lambda: sn.Uniform.fit_to(X),
    "mixture": lambda: sn.GaussianMixture.fit_to(X, n_components=3),
    "defensive": lambda: sn.Defensive.fit_to(X, n_components=2),
    "flow": lambda: sn.Flow(2, transforms=2, hidden=(8,)).set_scaling(X),
    **{f"prior {name}": make for name, make in cases.PRIORS.items()},
}
EBMS = {
    "student": lambda: ebm(sn.StudentT.fit_to(X), features=sn.FourierFeatures(2, 4), saturate=6.0),
    "bare": lambda: ebm(None, activation="tanh", dropout=0.1),
    "bfloat16": lambda: sn.EBM(sn.MLP(2, hidden=(8, 8)).bfloat16()),
    "double": lambda: ebm().double(),
    "sequential": lambda: sn.EBM(
        nn.Sequential(nn.Linear(2, 4), nn.Softplus(3.0), nn.Linear(4, 1)), base=WIDE
    ),
    "normed": lambda: sn.EBM(normed(), base=WIDE),
    "ensemble": lambda: sn.Ensemble([ebm() for _ in "ab"]),
}
CONDITIONALS = {
    "features": with_features,
    "scalar": lambda: conditional(sn.Gaussian.fit_to(X[:, 1:]), log_norm=0.7),
    "defensive": lambda: conditional(DefensiveLabels(sn.MDN(1), sn.Gaussian.fit_to(X[:, 1:]))),
    "box": lambda: conditional(sn.Uniform.fit_to(X[:, 1:])),
}
MIXED = {"given": ["size"], "levels": "kind"}
SPECIMENS = {
    "density/numbers": density(plain, ["x0"], "x1", contamination=0.1),
    "density/weighted": density(plain, ["x0"], "x1", weights=True),
    "density/mixed": density(frame, **MIXED),
    "density/gaps": density(gaps, schema={"model_gaps": True}, **MIXED),
    "density/gaps_left_out": density(gaps, **MIXED),
    "density/cells": density(cells, ["count"], "zero", schema={"support": {"share": (0, 1)}}),
    "density/dates": density(dates, ["start"], "day"),
    "density/held_out": density(plain, ["x0"], "x1", n=2600, max_steps=4),
    "density/one_column": density(partial(plain, dim=1), ["x0"], "x0", n=1000, max_steps=15),
    "density/two_columns": density(partial(plain, dim=2), ["x0"], "x1", n=1000, max_steps=15),
    "regressor/numbers": regressor(numbers_target),
    "regressor/grid": regressor(grid_target),
    "regressor/two_targets": regressor(two_targets),
    "detector": Specimen(detector, of_detector, saved=False),
    "fit": Specimen(lambda: usual()[0], partial(of_model, rows=cases.table(400)[:7].float())),
    "conditional_chain": Specimen(conditional_chain, of_conditional_chain),
    "chain": module(
        lambda: sn.AutoregressiveEBM(2, hidden=8, components=3).set_scaling(X),
        lambda model: of_chain(model, X[:9]),
    ),
    **{f"proposal/{name}": module(make) for name, make in PROPOSALS.items()},
    **{
        f"ebm/{name}": module(
            make,
            partial(of_model, proposal=WIDE),
            parts=lambda own=name == "normed": {"energy": normed()} if own else {},
        )
        for name, make in EBMS.items()
    },
    **{f"conditional/{k}": module(make, of_conditional) for k, make in CONDITIONALS.items()},
    "vae_own": module(lambda: sn.EnergyVAE(**own_networks(), prior=2), of_vae, parts=own_networks),
    **{
        name: of_golden(name)
        for name in (*cases.SAVED, "regressor_two", "vae_gaussian", "image_snl")
        if name.startswith(("regressor_", "vae_", "image_"))
    },
}
