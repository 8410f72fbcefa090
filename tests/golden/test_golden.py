"""Nothing may change: values of seeded fits, public names and parameters, saved models."""

import json
import os

import numpy as np
import pytest

import selfnorm as sn
from tests.golden import cases, record

RTOL = float(os.environ.get("SELFNORM_GOLDEN_RTOL", "1e-4"))  # 0: the same bits
ATOL = 1e-6
FOLDER_RTOL = 1e-5
# "Class.method.parameter": why it is gone
MOVED_PARAMETERS = {
    "ImageRegressor.anchors": "energy=EnergyHead(...)",
    "ImageRegressor.base": "energy=EnergyHead(...)",
    "ImageRegressor.bf16": "always on CUDA",
    "ImageRegressor.compile_heads": "the step is a CUDA graph",
    "ImageRegressor.cuda_graph": "options=TrainingOptions(...)",
    "ImageRegressor.dequantise": "label_step=0",
    "ImageRegressor.ema": "options=TrainingOptions(...)",
    "ImageRegressor.optimizer": "options=TrainingOptions(...)",
    "ImageRegressor.patience": "options=TrainingOptions(...)",
    "ImageRegressor.proposal_loss": "energy=EnergyHead(...)",
    "ImageRegressor.schedule": "options=TrainingOptions(...)",
    "ImageRegressor.share_gradient": "energy=EnergyHead(...)",
    "ImageRegressor.validate_every": "options=TrainingOptions(...)",
    "ImageRegressor.verbose": "options=TrainingOptions(...)",
    "ImageRegressor.weight_decay": "options=TrainingOptions(...)",
}
VALUES, FOLDERS, API = (
    json.loads((record.HERE / f"{name}.json").read_text()) for name in ("values", "folders", "api")
)


def compare(found, expected, rtol):
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        atol = ATOL if rtol else 0.0
        np.testing.assert_allclose(found[name], values, rtol=rtol, atol=atol, err_msg=name)


def test_every_case_is_recorded():
    assert VALUES.keys() == cases.CASES.keys()
    assert FOLDERS.keys() == cases.SAVED.keys()


@pytest.mark.parametrize("name", VALUES)
def test_values_of_a_seeded_fit(name):
    compare(cases.run(cases.CASES[name]), VALUES[name], RTOL)


@pytest.mark.parametrize("name", FOLDERS)
def test_saved_models_load_with_their_values(name):
    compare(record.folder_values(name), FOLDERS[name], min(RTOL, FOLDER_RTOL))


def lost(name, now, old):
    """What the snapshot has of a public name and today's code has not."""
    if old["kind"] == "module":
        gone = [f"{name}.{n}" for n in old["names"] if n not in now["names"]]
        kept = old["names"].keys() & now["names"].keys()
        return gone + [g for n in kept for g in lost(n, now["names"][n], old["names"][n])]
    before, after = ({"": d["own"], **d.get("methods", {})} for d in (old, now))
    wanted = {f"{name}.{m}.{p}".replace("..", ".") for m in before for p in before[m][0]}
    there = {f"{name}.{m}.{p}".replace("..", ".") for m in after for p in after[m][0]}
    gone = sorted(wanted - there - MOVED_PARAMETERS.keys())
    gone += [f"{name}.{m}" for m in before if m not in after]
    known = [*now.get("attributes", ()), *after]
    return gone + [f"{name}.{a}" for a in old.get("attributes", ()) if a not in known]


@pytest.mark.parametrize("name", API)
def test_public_names_and_parameters_are_still_there(name):
    assert name in sn.__all__
    now = record.described(getattr(sn, name))
    assert now["kind"] == API[name]["kind"]
    assert not lost(name, now, API[name])
