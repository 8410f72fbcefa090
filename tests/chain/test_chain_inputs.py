"""What may be given to a chain: rows and conditions in every form, and what is refused."""

import numpy as np
import pandas as pd
import pytest
import torch

import selfnorm as sn
from selfnorm.errors import DataError

TINY = {"hidden": 8, "blocks": 1, "components": 2, "context": 4, "energy_hidden": 8}
ROWS = torch.randn(12, 2, generator=torch.Generator().manual_seed(0)).exp()
GIVEN = torch.linspace(-1, 1, 12)[:, None]


def chain(**options):
    torch.manual_seed(0)
    return sn.AutoregressiveEBM(2, **TINY, **options).set_scaling(ROWS).eval()


@pytest.mark.parametrize(
    "form",
    [np.asarray, torch.Tensor.tolist, torch.Tensor.double, lambda x: pd.DataFrame(x.numpy())],
)
def test_rows_and_conditions_in_every_form_give_the_same_numbers(form):
    model, conditional = chain(), chain(condition_dim=1)
    for ask in (model.log_prob, model.log_mass):
        assert torch.equal(ask(form(ROWS)), ask(ROWS))
    assert torch.equal(conditional.log_prob(form(ROWS), form(GIVEN)), conditional(ROWS, GIVEN))
    drawn = conditional.sample(12, form(GIVEN), seed=0)
    assert torch.equal(drawn, conditional.sample(12, GIVEN, seed=0))
    expected = model.bounds(ROWS, n_samples=20, seed=0).lower
    assert sn.evaluate(model, form(ROWS), n_samples=20, seed=0).lower == expected


def test_a_pair_is_evaluated_as_it_is_fitted():
    model = chain(condition_dim=1)
    found = sn.evaluate(model, (ROWS, GIVEN), n_samples=20, seed=0)
    assert found.lower == model.bounds(ROWS, GIVEN, n_samples=20, seed=0).lower


@pytest.mark.parametrize("count", [1, 6, 24])
def test_conditions_of_another_number_are_refused_however_rows_are_cut(count):
    model, given = chain(condition_dim=1), GIVEN.repeat(2, 1)[:count]
    with pytest.raises(DataError, match=r"expected a condition of shape \(12, 1\)"):
        model.log_prob(ROWS, given, chunk_size=6)
    with pytest.raises(DataError, match=r"expected a condition of shape \(12, 1\)"):
        model.bounds(ROWS, given, n_samples=20, chunk_size=6)


def test_the_number_of_orderings():
    assert chain(orderings=np.int64(2)).n_orderings == 2
    with pytest.raises(DataError, match="orderings must be at least 1"):
        chain(orderings=0)


def test_a_column_without_limits_may_be_none():
    model = chain(support=[(0.0, 50.0), None])
    assert model.config["support"] == [[0.0, 50.0], [None, None]]
    assert torch.isfinite(model.log_prob([[1.0, -5.0]])).all()
    assert torch.isinf(model.log_prob([[-1.0, 1.0]])).all()
