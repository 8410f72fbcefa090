"""Drift: an e-value without false alarms, what it sees, the column to blame, what it refuses."""

import numpy as np
import pytest

from selfnorm import EnergyDensity, load
from selfnorm.errors import DataError
from selfnorm.tables import drift


def table(n, seed, broken=False):
    """``b`` follows ``a``, unless that is broken; ``kind`` stands alone."""
    rng = np.random.default_rng(seed)
    a = rng.normal(size=n)
    b = np.round(4 * (rng.permutation(a) if broken else a) + rng.normal(size=n))
    return {"a": a, "b": b, "kind": rng.choice(["u", "v", "w"], n, p=[0.6, 0.3, 0.1])}


@pytest.fixture(scope="module")
def density():
    return EnergyDensity(max_steps=30, random_state=0).fit(table(300, 0))


def test_watching_rarely_alarms_where_nothing_changes():
    usual, alarms = drift.Ratio(np.random.default_rng(0).normal(size=(1000, 2))), 0
    for seed in range(30):
        rows = np.random.default_rng(seed).normal(size=(160, 2))
        of_rows = np.column_stack([np.round(rows), (rows**2).sum(1)])  # with ties
        two = np.split(of_rows, [100]) + np.split(rows, [100])
        alarms += drift.watched(two[0], two[1], seed, usual, two[2], two[3])[1].max() >= np.log(10)
    assert alarms <= 4


def test_a_conditional_that_breaks_alone_is_seen_and_blamed(density):
    found = density.compare(table(200, 2, broken=True), table(200, 1))
    assert found.alarm(0.01) < 120
    assert found.nats > 5 * found.nats_se
    assert {found.columns[0].column, found.columns[1].column} == {"a", "b"}
    assert max(column.e_value for column in found.columns if column.column != "kind") < 20
    assert "changed: e-value 100 at row" in str(found)


def test_rows_like_those_of_the_reference_are_no_change(density):
    found = density.compare(table(150, 2), table(200, 1))
    assert found.alarm() is None
    assert found.e_value < 5
    assert str(found).startswith("no evidence of a change")


def test_what_was_said_stays_as_rows_are_added(density):
    new, reference = table(120, 3, broken=True), table(100, 1)
    early = {name: cells[:70] for name, cells in new.items()}
    first, second = (density.compare(rows, reference).e_values for rows in (early, new))
    assert second[:70] == pytest.approx(first, rel=1e-3)


def test_a_margin_that_moves_is_named(density):
    new = table(150, 4)
    new["kind"] = np.random.default_rng(0).choice(["u", "v", "w"], 150, p=[0.1, 0.2, 0.7])
    found = density.compare(new, table(200, 1))
    assert found.alarm() is not None
    assert max(found.columns, key=lambda column: column.e_value).column == "kind"


def test_reference_rows_are_needed_that_were_not_trained_on(density, tmp_path):
    with pytest.raises(DataError, match="give others as reference="):
        density.compare(table(50, 1))
    with pytest.raises(DataError, match="give others as reference="):
        density.compare(table(50, 1), table(300, 0))
    with pytest.raises(DataError, match="comparing takes 20 at least"):
        density.compare(table(50, 1), table(5, 1))
    with pytest.raises(DataError, match="alpha must be in"):
        density.compare(table(5, 1), table(50, 2)).alarm(5)
    density.save(tmp_path)
    again = load(tmp_path).compare(table(5, 1), table(50, 2))
    assert again.e_values == pytest.approx(density.compare(table(5, 1), table(50, 2)).e_values)
