import numpy as np
import pytest

from selfnorm.errors import DataError
from selfnorm.evidence.draws import Draws, read_draws
from selfnorm.evidence.support import Support


def space(support, d):
    return Support(support, Draws(np.zeros((1, 1, d)), None, tuple(map(str, range(d)))))


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
