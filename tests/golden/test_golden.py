"""Nothing may change: values of seeded fits, saved models.

Members of ``fit_many`` draw under ``vmap``: other random numbers from the same laws than they once
drew, so ``many_*``, ``resumed_many`` and ``density_best`` were recorded anew for it.
"""

import json
import os

import numpy as np
import pytest

from tests.golden import cases, record

RTOL = float(os.environ.get("SELFNORM_GOLDEN_RTOL", "1e-4"))  # 0: the same bits
ATOL = 1e-6
# Bounds of a regressor hold a mean of log Z - b near zero: rounding b in float32 moves it by 2e-6.
# Pareto k of a chain rests on the largest of its float32 weights.
ROUNDED = {"regressor": 1e-5, "chain_mixed": 1e-4}
FOLDER_RTOL = 1e-5
VALUES, FOLDERS = (
    json.loads((record.HERE / f"{name}.json").read_text()) for name in ("values", "folders")
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
