"""What people bring as rows: arrays, data frames, other types, and what is no table at all."""

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch

import selfnorm as sn
from selfnorm._inputs import refuse_repeated_names, refuse_text
from selfnorm.errors import DataError
from tests.fitting import fit_many

ROWS = np.random.default_rng(0).gamma(2.0, size=(120, 2)).astype(np.float32)
QUICK = {"max_steps": 3, "max_epochs": 100, "n_samples": 64, "seed": 0, "progress": False}
FORMS = {
    "float32 tensor": torch.from_numpy,
    "float64 tensor": lambda x: torch.from_numpy(x).double(),
    "float32 array": lambda x: x,
    "float64 array": lambda x: x.astype(np.float64),
    "lists": lambda x: x.tolist(),
    "pandas": lambda x: pd.DataFrame(x, columns=["a", "b"]),
    "polars": lambda x: pl.DataFrame(x, schema=["a", "b"]),
    "not contiguous": lambda x: np.asfortranarray(x)[::-1][::-1],
}


def model():
    torch.manual_seed(0)
    return sn.EBM(sn.MLP(2, hidden=(8,), saturate=5.0), base=sn.StudentT.fit_to(ROWS))


def trained(rows):
    ebm = model()
    sn.fit(ebm, rows, val_data=rows, **QUICK)
    bounds = sn.evaluate(ebm, rows, n_samples=200, seed=0)
    return ebm.log_prob(rows).detach(), bounds


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_table_gives_the_same_numbers(form):
    expected_log_prob, expected_bounds = trained(torch.from_numpy(ROWS))
    log_prob, bounds = trained(FORMS[form](ROWS))
    assert torch.equal(log_prob, expected_log_prob)
    assert bounds == expected_bounds


def test_half_precision_rows_are_read_in_the_type_of_the_network():
    log_prob, bounds = trained(torch.from_numpy(ROWS).half())
    assert log_prob.dtype == torch.float32
    assert bounds.reliable


def test_an_energy_without_parameters_takes_rows_as_they_are():
    ebm = sn.EBM(lambda x: 0.5 * x.square().sum(-1))
    assert ebm.log_prob(torch.zeros(3, 2, dtype=torch.float64)).dtype == torch.float64


def test_fit_many_takes_one_array_or_frame_for_all():
    histories = fit_many([model(), model()], pd.DataFrame(ROWS), **QUICK)
    assert [h.n_steps for h in histories] == [3, 3]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (pd.DataFrame({"a": [1.0, 2.0], "b": ["x", "y"]}), "real numbers"),
        (pd.DataFrame({"a": pd.date_range("2020-01-01", periods=2), "b": [0.1, 2]}), "dates"),
        (pd.DataFrame({"a": pd.date_range("2020-01-01", periods=2)}), "not datetime64"),
        (np.array([["1", "2"], ["3", "5"]]), "real numbers"),
        (ROWS + 1j, "not complex"),
        (torch.ones(4, 2, dtype=torch.complex64), "complex"),
        (ROWS[:0], "0 row"),
        (ROWS[:, 0], r"x\[:, None\]"),
        (np.where(ROWS > 3, np.nan, ROWS), "NaN or infinite"),
    ],
)
def test_what_is_no_table_of_numbers_is_refused_by_fit_and_evaluate(rows, words):
    with pytest.raises(DataError, match=words):
        sn.fit(model(), rows, **QUICK)
    with pytest.raises(DataError, match=words):
        sn.evaluate(model(), rows, n_samples=100)


def test_the_loop_refuses_no_rows_and_parts_of_different_length():
    energy = sn.LabelEnergy(1, hidden=(4,))
    conditional = sn.ConditionalEBM(energy, sn.MDN(1, components=1))
    with pytest.raises(DataError, match="no rows"):
        sn.fit(conditional, (torch.zeros(0, 1), torch.zeros(0, 1)), **QUICK)
    with pytest.raises(DataError, match=r"different numbers of rows: \[3, 4\]"):
        sn.fit(conditional, (torch.zeros(3, 1), torch.zeros(4, 1)), **QUICK)


def test_two_columns_of_one_name_are_refused_by_that_name():
    table = pd.DataFrame(ROWS[:, [0, 1, 0]], columns=["size", "age", "size"])
    with pytest.raises(DataError, match="column 'size' appears twice"):
        sn.EnergyDensity(max_steps=2).fit(table)
    regressor = sn.EnergyRegressor(max_epochs=1)
    with pytest.raises(DataError, match="X: column 'size' appears 2 times"):
        regressor.fit(table, ROWS[:, 0])
    with pytest.raises(DataError, match="y: column 'size' appears 2 times"):
        regressor.fit(ROWS, table)


def test_columns_of_equal_content_have_names_of_their_own():
    refuse_repeated_names(pa.table({"a": [1.0, 2.0], "b": [1.0, 2.0]}))
    refuse_repeated_names(pd.DataFrame({"a": [1.0, 2.0], "b": [1.0, 2.0]}))


def test_numbers_in_columns_of_type_object_or_category_are_numbers():
    whole = pd.DataFrame({"a": [1, 2, 3], "b": [4, 5, 7]})
    refuse_text(whole.astype(object))
    refuse_text(whole.astype("category"))


def test_estimators_refuse_numbers_whose_squares_overflow_and_targets_of_text():
    with pytest.raises(DataError, match="holds a number as large as"):
        sn.EnergyDensity(max_steps=2).fit(ROWS.astype(np.float64) * 1e200)
    regressor = sn.EnergyRegressor(max_epochs=1)
    with pytest.raises(DataError, match="y holds numbers as large as"):
        regressor.fit(ROWS, ROWS[:, 0].astype(np.float64) * 1e200)
    days = pd.date_range("2020-01-01", periods=len(ROWS))
    for words in (["a"] * len(ROWS), days, days.date, pd.Categorical(["a"] * len(ROWS))):
        with pytest.raises(DataError, match="y holds text or dates"):
            regressor.fit(ROWS, words)


def test_regressors_take_arrays_of_dates():
    days = (86_400 * np.arange(30) ** 2).astype("datetime64[s]")[:, None]
    regressor = sn.EnergyRegressor(max_epochs=1, n_members=1, hidden=8)
    assert np.isfinite(regressor.fit(days, np.arange(30.0) ** 2).predict(days)).all()
