"""Nothing may change: values of seeded fits, public names and parameters, saved models.

Members of ``fit_many`` draw under ``vmap``: other random numbers from the same laws than they once
drew, so ``many_*``, ``resumed_many`` and ``density_best`` were recorded anew for it.
"""

import json
import os
from dataclasses import fields

import numpy as np
import pytest

import selfnorm as sn
from selfnorm.density.fit import in_options
from selfnorm.errors import ModelFileError
from selfnorm.tables import RegressorNetwork
from tests.golden import cases, record

RTOL = float(os.environ.get("SELFNORM_GOLDEN_RTOL", "1e-4"))  # 0: the same bits
ATOL = 1e-6
# Bounds of a regressor hold a mean of log Z - b near zero: rounding b in float32 moves it by 2e-6.
# Pareto k of a chain rests on the largest of its float32 weights.
ROUNDED = {"regressor": 1e-5, "chain_mixed": 1e-4}
FOLDER_RTOL = 1e-5
NEGATIVE_ENERGY = ("negative_energy", "log_unnormalized")
# What is gone and why: "Class.method.parameter", "Class.method" or "module.function".
MOVED_PARAMETERS = {
    "TrainingOptions.warmup": "schedule=('one_cycle', warmup)",
    "AutoregressiveEBM.frequencies": "nobody set it: every energy sees a value through 8 waves",
    **dict.fromkeys(
        [f"{c}.{m}.in_step" for c in ("EBM", "Ensemble") for m in NEGATIVE_ENERGY],
        "a training step calls the energy as everybody does",
    ),
    **dict.fromkeys(
        ("MLP.is_as_built", "MLP.negative_energy_in_step"),
        "belonged to a gradient written by hand",
    ),
    **{
        f"{function}.{name}": "a field of TrainingOptions"
        for function in ("fit", "fit_many", "fit_distributed")
        for name in in_options()
    },
    "AutoregressiveEBM.forward": "log_prob",
    "EnergyDensity.discrete": "schema={column: kind}",
    "EnergyDensity.log_mass.n_points": "cells have masses, which need no integration",
    "EnergyVAE.aggregate_samples": "a step of training, of no use by itself",
    **{f"{kind}.sample.generator": "seed" for kind in ("EBM", "Ensemble", "ConditionalEBM")},
    "add_energy_prior.fit_options": "options=TrainingOptions(...)",
    **{f"fit_many.same_{what}": "task_options" for what in ("batches", "samples")},
    "fit.bf16": "saved less than it cost in digits",
    "functional.snl_of_mean_weight": "snl(log_p_data, log_z[None], log_norm)",
    "snl.max_exponent": "one cap for all: functional.MAX_EXPONENT",
    "capped_exp.max_exponent": "one cap for all: functional.MAX_EXPONENT",
    **dict.fromkeys(
        [f"EnergyRegressor.{field.name}" for field in fields(RegressorNetwork)],
        "seldom tuned: network=RegressorNetwork()",
    ),
    **dict.fromkeys(
        [f"ImageRegressor.{p}" for p in ("anchors", "base", "proposal_loss", "share_gradient")],
        "energy=EnergyHead(...)",
    ),
    **dict.fromkeys(
        [f"ImageRegressor.{p}" for p in ("cuda_graph", "ema", "optimizer", "patience", "schedule")],
        "options=TrainingOptions(...)",
    ),
    **dict.fromkeys(
        [f"ImageRegressor.{p}" for p in ("validate_every", "verbose", "weight_decay")],
        "options=TrainingOptions(...)",
    ),
    "ImageRegressor.bf16": "always on CUDA",
    "ImageRegressor.compile_heads": "the step is a CUDA graph",
    "ImageRegressor.dequantise": "label_step=0",
}
VALUES, FOLDERS, API = (
    json.loads((record.HERE / f"{name}.json").read_text()) for name in ("values", "folders", "api")
)


def compare(found, expected, rtol, atol=ATOL):
    assert found.keys() == expected.keys()
    atol = atol if rtol else 0.0
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=rtol, atol=atol, err_msg=name)


def test_every_case_is_recorded():
    assert VALUES.keys() == cases.CASES.keys()
    assert FOLDERS.keys() == cases.SAVED.keys()


@pytest.mark.parametrize("name", VALUES)
def test_values_of_a_seeded_fit(name):
    compare(cases.run(cases.CASES[name]), VALUES[name], RTOL, ROUNDED.get(name, ATOL))


@pytest.mark.parametrize("name", FOLDERS)
def test_saved_models_load_with_their_values(name):
    compare(record.folder_values(name), FOLDERS[name], min(RTOL, FOLDER_RTOL))


def test_chains_of_the_first_version_are_to_be_fitted_again():
    with pytest.raises(ModelFileError, match="fit it again"):
        sn.EnergyDensity.load(record.HERE / "refused" / "density_chain")


def lost(name, now, old):
    """What the snapshot has of a public name and today's code has not."""
    if old["kind"] == "module":
        names = {f"{name}.{n}" for n in old["names"] if n not in now["names"]}
        gone = sorted(names - MOVED_PARAMETERS.keys())
        kept = old["names"].keys() & now["names"].keys()
        return gone + [g for n in kept for g in lost(n, now["names"][n], old["names"][n])]
    before, after = ({"": d["own"], **d.get("methods", {})} for d in (old, now))
    kept = before.keys() & after.keys()
    wanted = {f"{name}.{m}.{p}".replace("..", ".") for m in kept for p in before[m][0]}
    there = {f"{name}.{m}.{p}".replace("..", ".") for m in after for p in after[m][0]}
    known = [*now.get("attributes", ()), *after]
    named = {f"{name}.{m}" for m in (*before, *old.get("attributes", ())) if m not in known}
    return sorted((wanted - there | named) - MOVED_PARAMETERS.keys())


@pytest.mark.parametrize("name", API)
def test_public_names_and_parameters_are_still_there(name):
    assert name in sn.__all__
    now = record.described(getattr(sn, name))
    assert now["kind"] == API[name]["kind"]
    assert not lost(name, now, API[name])
