import numpy as np
import pytest
import torch

from selfnorm.errors import DataError
from selfnorm.evidence.draws import (
    by_walker,
    disagreement,
    effective_draws,
    read_draws,
    two_parts,
    walkers_in_turn,
)


def normal(*shape):
    return np.random.default_rng(0).normal(size=shape)


@pytest.mark.parametrize("shape", [(40,), (40, 1), (40, 3), (2, 20, 3)])
@pytest.mark.parametrize("kind", [np.asarray, torch.tensor, lambda x: x.tolist()])
def test_arrays_of_any_kind_become_one_table(shape, kind, rng):
    x = rng.normal(size=shape)
    found = read_draws(kind(x)).values
    assert found.dtype == np.float64
    assert found.shape == (
        (2, 20, 3) if len(shape) == 3 else (1, 40, shape[-1] if x.ndim > 1 else 1)
    )
    assert np.array_equal(found.ravel(), x.ravel())


def test_large_numbers_keep_their_digits(rng):
    x = 1e8 + rng.normal(size=(40, 1))
    assert np.array_equal(read_draws(x).values[0], x)
    frame = pytest.importorskip("pandas").DataFrame({"a": x[:, 0], "b": x[:, 0] + 1})
    found = read_draws(frame)
    assert found.names == ("a", "b")
    assert np.array_equal(found.values[0], frame.to_numpy())


def test_named_parameters_stand_side_by_side_and_come_back(rng):
    parameters = {"mu": rng.normal(size=30), "w": rng.normal(size=(30, 2, 2))}
    found = read_draws(parameters)
    assert found.names == ("mu", "w[0,0]", "w[0,1]", "w[1,0]", "w[1,1]")
    back = found.unpacked(found.values[0])
    assert all(np.array_equal(back[name], parameters[name]) for name in parameters)
    assert found.unpacked(torch.from_numpy(found.values[0, 3]))["w"].shape == (2, 2)
    by_chain = {name: np.stack([value, value + 1]) for name, value in parameters.items()}
    assert read_draws(by_chain, chains=True).values.shape == (2, 30, 5)


def test_xarray_groups_as_arviz_writes_them(rng):
    xarray = pytest.importorskip("xarray")
    values = rng.normal(size=(30, 2, 3))
    group = xarray.Dataset({"b": (("draw", "chain", "k"), values)})
    for draws in (group, xarray.DataTree.from_dict({"posterior": group})):
        found = read_draws(draws)
        assert found.values.shape == (2, 30, 3)
        assert np.array_equal(found.values, values.transpose(1, 0, 2))


@pytest.mark.parametrize(
    ("draws", "message"),
    [
        (np.zeros((3, 2)), "too few"),
        (np.full((30, 2), 2.0), "constant"),
        (np.where(np.arange(30)[:, None] == 4, np.nan, normal(30, 2)), "draw 4"),
        (np.repeat(normal(5, 2), 20, axis=0), "only 5 of 100 draws differ"),
        (normal(2, 2, 30, 2), "shape"),
        ({"a": normal(30), "b": normal(20)}, "one number of draws"),
        ({"a": np.array(["x"] * 30)}, "real numbers"),
        (1e200 * normal(30, 1), "other units"),
        ({"x": normal(40), "chain": np.repeat([1, 2], 20)}, "'chain' holds 2 whole"),
        ({"x": normal(40), "i": np.tile(np.arange(20), 2)}, "'i' counts the draws"),
    ],
)
def test_unusable_draws_are_refused_by_name(draws, message):
    with pytest.raises(DataError, match=message):
        read_draws(draws)


def autoregression(chains, n, rho, rng):
    """Stationary chains ``(chains, n)`` of variance one."""
    x = rng.normal(size=(chains, n))
    for t in range(1, n):
        x[:, t] = rho * x[:, t - 1] + (1 - rho**2) ** 0.5 * x[:, t]
    return x


def test_effective_draws_of_an_autoregression(rng):
    rho, n = 0.8, 20_000
    x = autoregression(2, n, rho, rng)
    expected = 2 * n * (1 - rho) / (1 + rho)
    assert effective_draws(x) == pytest.approx(expected, rel=0.15)
    shifted = x / x.std() + np.array([[0.0], [3.0]])
    assert effective_draws(shifted) < 20
    assert disagreement(x[..., None]) < 1.01 < 1.3 < disagreement(shifted[..., None])


def test_halves_of_chains_and_of_one_chain(rng):
    first, second = two_parts(rng.normal(size=(3, 50, 1)))
    assert first[[0, 2]].all()
    assert second[1].all()
    assert not (first & second).any()
    slow = np.cumsum(rng.normal(size=(1, 400, 1)), axis=1)
    first, second = two_parts(slow)
    gap = second[0].argmax() - first[0].sum()
    assert gap >= 20


def test_walkers_shorter_than_ten_autocorrelation_times_are_counted_right_and_do_not_disagree(rng):
    """Split R-hat of these is 1.3: half a walker is worth two independent draws."""
    counts, r_hats = [], []
    for _ in range(10):
        x = autoregression(100, 100, 0.92, rng)  # autocorrelation time 24
        counts.append(effective_draws(x))
        r_hats.append(disagreement(x[..., None]))
    assert np.mean(counts) == pytest.approx(100 * 100 / 24, rel=0.1)
    assert max(r_hats) < 1.03


@pytest.mark.parametrize("chains", [12, 100])
def test_walkers_that_stay_where_they_are_or_move_together_disagree(rng, chains):
    x = autoregression(chains, 200, 0.9, rng)
    stuck, moving = x.copy(), x + np.linspace(-1, 1, 200)
    stuck[::3] += 4
    assert effective_draws(stuck) < 2 * chains
    for wrong in (stuck, moving):
        assert disagreement(wrong[..., None]) > 1.1


def test_walkers_in_turn_are_seen_in_every_layout_and_nowhere_else(rng):
    x = autoregression(2 * 40, 60, 0.9, rng).reshape(40, 2, 60).swapaxes(1, 2)
    by_step = x.swapaxes(0, 1)
    for draws in (by_step, by_step.reshape(1, -1, 2)):
        assert walkers_in_turn(draws) == 40
        assert np.array_equal(by_walker(draws, 40), x)
    for draws in (x, x.reshape(1, -1, 2), rng.normal(size=(1, 2400, 2)), x[:4], x[:1, :40]):
        assert walkers_in_turn(draws) == 0
