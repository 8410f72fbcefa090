"""New rows: they are learned, those of before are not forgotten, unseen levels are counted."""

import numpy as np
import pytest

from selfnorm import EnergyDensity
from selfnorm.errors import DataError


def table(n, seed, shift=0.0):
    rng = np.random.default_rng(seed)
    a = rng.normal(size=n) + shift
    return {"a": a, "b": a + 0.3 * rng.normal(size=n), "kind": rng.choice(["u", "v"], n)}


def test_new_rows_are_learned_and_those_of_before_are_kept():
    before, after = table(300, 1), table(300, 2, shift=2.0)
    density = EnergyDensity(max_steps=80, random_state=0).partial_fit(table(300, 0))
    old, new = density.score(before), density.score(after)
    schema = density.schema_
    density.partial_fit(table(300, 3, shift=2.0))
    assert density.score(after) > new + 0.3
    assert density.score(before) > old - 0.5
    assert density.schema_ is schema
    assert density.fitted_to_["rows"] == 600
    with pytest.warns(UserWarning, match="never seen"):
        density.partial_fit({"a": [0.0, 1.0], "b": [0.0, 1.0], "kind": ["w", "u"]})
    assert density.unseen_ == {"kind": 1}
    with pytest.raises(DataError, match="give others as reference="):
        density.compare(before)


def test_one_energy_does_not_go_on():
    rows = np.random.default_rng(0).normal(size=(60, 2))
    density = EnergyDensity(method="joint", max_steps=5, random_state=0).fit(rows)
    with pytest.raises(DataError, match="partial_fit is for chains"):
        density.partial_fit(rows)
