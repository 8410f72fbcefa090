"""Reasons: the column to blame, and the value with which a row would be ordinary."""

import numpy as np
import pandas as pd
import pytest

from selfnorm import EnergyDensity


@pytest.fixture(scope="module", params=["dict", "frame", "array"])
def fitted(request):
    """``b`` is twice ``a``, nearly; the third stands alone."""
    rng = np.random.default_rng(0)
    a = rng.normal(size=200)
    rows = np.column_stack(
        [a, np.round(2 * a, 1) + 0.1 * rng.normal(size=200), rng.normal(size=200)]
    )
    make = {
        "dict": lambda x: dict(zip("abc", x.T, strict=True)),
        "frame": lambda x: pd.DataFrame(x, columns=list("abc")),
        "array": lambda x: x,
    }[request.param]
    return EnergyDensity(max_steps=60, random_state=0).fit(make(rows)), make


def test_the_cell_that_is_wrong_is_blamed_and_an_ordinary_value_is_named(fitted):
    density, make = fitted
    usual, odd, far = density.reasons(
        make(np.array([[0.5, 1.0, 0.0], [0.0, 0.0, 9.0], [0, 9, -9]]))
    )
    assert usual.columns == ()
    assert str(usual) == "ordinary"
    (name,) = odd.columns
    assert name in ("c", "x2")
    assert abs(odd.values[name]) < 3
    assert odd.probability < 0.02
    assert str(odd).startswith(f"would be ordinary with {name} = ")
    assert len(far.columns) >= 2
