import numpy as np
import pytest
import torch

from selfnorm.errors import DataError
from selfnorm.evidence.draws import ParameterDraws, read_draws
from selfnorm.evidence.target import Support, Target

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


def test_a_density_of_one_row_is_not_taken_for_one_of_all():
    x = np.random.default_rng(1).normal(size=(30, 3))
    draws = read_draws({"a": x[:, :2], "b": x[:, 2]})
    of_one_row = Target(lambda p: -0.5 * ((p["a"] ** 2).sum() + p["b"] ** 2), draws)
    assert np.allclose(of_one_row(x), -0.5 * (x**2).sum(1))


def test_what_a_broken_density_said_is_told():
    def broken(x):
        raise KeyError("theta")

    with pytest.raises(DataError, match=r"one number for each row.*KeyError: 'theta'"):
        Target(broken, read_draws(X))
    with pytest.raises(DataError, match="one number for each row"):
        Target(lambda x: np.zeros(7), read_draws(X))


def space(support, d):
    return Support(support, ParameterDraws(np.zeros((1, 1, d)), None, tuple(map(str, range(d)))))


@pytest.mark.parametrize(
    ("support", "k"),
    [
        (["real", "positive", (-1.0, 3.0), (2.0, None), (None, 5.0)], 5),
        (["simplex"] * 4, 3),
        (["positive", "simplex", "simplex", "simplex", None], 4),
    ],
)
def test_round_trip_and_jacobian(support, k):
    where = space(support, len(support))
    y = np.random.default_rng(0).normal(size=(5, k))
    x, log_jacobian = where.constrained(y)
    assert np.allclose(where.unconstrained(x), y)
    free = [j for j in range(len(support)) if not (support[j] == "simplex" and _last(support, j))]
    for row, expected in zip(y, log_jacobian, strict=True):
        step = 1e-6 * np.eye(k)
        up, down = where.constrained(row + step)[0], where.constrained(row - step)[0]
        jacobian = (up - down)[:, free] / 2e-6
        assert np.linalg.slogdet(jacobian)[1] == pytest.approx(expected, abs=1e-6)


def _last(support, j):
    return j + 1 == len(support) or support[j + 1] != "simplex"


def test_parameters_have_supports_by_name():
    rng = np.random.default_rng(0)
    draws = read_draws({"w": rng.dirichlet([1.0, 2.0, 3.0], size=30), "s": rng.gamma(2.0, size=30)})
    where = Support({"w": "simplex", "s": "positive"}, draws)
    y = where.unconstrained(draws.values[0])
    assert y.shape == (30, 3)
    assert np.allclose(where.constrained(y)[0], draws.values[0])
    with pytest.raises(DataError, match="'w', 's'"):
        Support(["simplex"] * 3 + ["positive"], draws)


@pytest.mark.parametrize(
    ("support", "row", "message"),
    [
        (["positive"], [0.0], "not inside"),
        ([(0.0, 1.0)], [1.5], "not inside"),
        (["simplex", "simplex"], [0.2, 0.3], "add to 1"),
        (["simplex"], [1.0], "two columns"),
        ([(1.0, 0.0)], [0.5], "must be"),
        (["round"], [0.5], "must be"),
        ("positive", [0.5], "each of the 1 columns"),
    ],
)
def test_draws_outside_and_words_that_mean_nothing(support, row, message):
    with pytest.raises(DataError, match=message):
        space(support, len(row)).unconstrained(np.array([row]))
