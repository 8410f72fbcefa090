import numpy as np
import pytest
import torch

from selfnorm.errors import DataError
from selfnorm.evidence.draws import read_draws
from selfnorm.evidence.target import Target

X = np.random.default_rng(0).normal(size=(30, 2))
EXPECTED = -0.5 * (X**2).sum(1)
NORMAL = torch.distributions.Normal(torch.zeros(2), torch.ones(2))  # float32
SHIFT = float(np.log(2 * np.pi))


@pytest.mark.parametrize(
    "log_density",
    [
        lambda x: -0.5 * (x**2).sum(-1),
        lambda x: -0.5 * (x**2).sum(-1, keepdims=True),
        lambda x: -0.5 * np.sum(np.square(np.asarray(x)), axis=1),
        lambda x: -0.5 * np.sum(x**2),
        lambda x: float(-0.5 * (x[0] ** 2 + x[1] ** 2)),
        lambda x: -0.5 * torch.square(x).sum(-1),
        lambda x: -0.5 * torch.dot(x, x),
        lambda x: NORMAL.log_prob(x).sum(-1) + SHIFT,
        lambda x: -0.5 * (x @ torch.eye(2) * x).sum(-1),
    ],
)
def test_every_way_to_write_it(log_density):
    target = Target(log_density, read_draws(X))
    before = target.n_evaluations
    assert np.allclose(target(X), EXPECTED, atol=1e-5)
    assert target.n_evaluations == before + 30


def test_parameters_by_name():
    draws = read_draws({"a": X[:, 0], "b": X[:, 1:]})
    batched = Target(lambda p: -0.5 * (p["a"] ** 2 + (p["b"] ** 2).sum(-1)), draws)
    assert np.allclose(batched(X), EXPECTED)


def test_what_a_broken_density_said_is_told():
    def broken(x):
        raise KeyError("theta")

    with pytest.raises(DataError, match=r"one number for each row.*KeyError: 'theta'"):
        Target(broken, read_draws(X))
    with pytest.raises(DataError, match="one number for each row"):
        Target(lambda x: np.zeros(7), read_draws(X))
