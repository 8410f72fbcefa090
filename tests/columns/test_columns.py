"""Columns: grids, atoms, limits and the change of variables."""

import numpy as np
import pytest
import torch

from selfnorm.columns import Columns, detect_step, log_cell_mass
from selfnorm.errors import DataError, SelfnormWarning


def draws(values, n=300):
    return np.random.default_rng(0).choice(values, n)


EXACT, NORMAL = draws(range(-5, 6)) * 0.1, np.random.default_rng(0).normal(size=300)
SINGLE = (np.arange(4000) % 900 * 0.01 + 32.54).astype(np.float32).astype(float)
GRIDS = {
    "whole numbers": (np.arange(50) % 7 * 1.0, 1.0),
    "even numbers": (np.repeat([0.0, 2.0, 4.0, 10.0], 5), 2.0),
    "single precision": (SINGLE, 0.01),
    "no grid": (NORMAL, 0.0),
    "no grid but a repeated value": (np.r_[NORMAL, np.zeros(50)], 0.0),
    "one value": (np.full(10, 3.0), 0.0),
    **{
        f"{step} from {far}": (draws([0, 1, 2, 3, 5, 7, 8, 11]) * step + far, step)
        for far in (0.0, 1e6, 1.2e6, 1.6e9)
        for step in (1.0, 0.25)
    },
    **{
        f"unit {unit}": (draws(range(20)) * unit, unit) for unit in (1.5e-12, 3e-13, 4e-300, 2.5e14)
    },
    # a step of 1 is next to nothing beside the deviation that one value far out makes
    **{f"with {far}": (np.r_[draws(range(5)), far], 0.0) for far in (1e6, 999_999.0, -1e12)},
    "values that differ by rounding": (
        np.r_[EXACT, EXACT + 2.2e-16, EXACT.astype(np.float32).astype(float)],
        0.1,
    ),
    "too fine to matter": (draws(range(100_000), 5000) * 1e-5, 0.0),
}


@pytest.mark.parametrize("name", GRIDS)
def test_the_step_of_a_grid_is_found_and_only_there(name):
    values, step = GRIDS[name]
    assert np.isclose(detect_step(values), step, rtol=1e-6, atol=0)


def test_dequantised_values_round_back_and_fill_their_cells():
    torch.manual_seed(0)
    x = torch.randint(0, 5, (2000, 1)).float() * 0.5
    columns = Columns(1).fit(x)
    noisy = columns.dequantise(x)
    assert torch.equal((noisy / 0.5).round() * 0.5, x)
    offset = (noisy - x) / 0.5
    assert offset.min() < -0.49
    assert offset.max() > 0.49
    assert abs(float(offset.mean())) < 0.02


def test_only_the_rows_at_an_atom_get_noise():
    torch.manual_seed(0)
    x = torch.cat([torch.randn(900, 1), torch.full((100, 1), 0.25)])
    columns = Columns(1).fit(x)
    noisy = columns.dequantise(x)
    assert torch.equal(noisy[:900], x[:900])
    moved = (noisy[900:] - 0.25).abs()
    assert 0 < float(moved.max()) <= 0.0051 * float(x.std()) + 1e-6


@pytest.mark.parametrize(
    "support", [[(0.0, 1.0)], [(0.0, None)], [(None, 1.0)], [(None, None)], None]
)
def test_the_map_inverts_and_its_determinant_is_its_derivative(support):
    x = torch.linspace(0.02, 0.98, 200, dtype=torch.float64).unsqueeze(1) ** 2
    columns = Columns(1, support=support, discrete=None).double().fit(x)
    z, log_det = columns(x)
    assert torch.allclose(columns.inverse(z), x, atol=1e-9)
    x = x.clone().requires_grad_(True)
    (slope,) = torch.autograd.grad(columns(x)[0].sum(), x)
    assert torch.allclose(slope.log().squeeze(), log_det, atol=1e-8)
    assert (slope > 0).all()


def test_scales_resist_outliers():
    torch.manual_seed(0)
    x = torch.randn(2000, 1)
    x[0] = 1e6
    assert 0.8 < float(Columns(1).fit(x).scale) < 1.2


def test_where_nine_rows_in_ten_share_a_value_the_deviation_is_the_scale():
    torch.manual_seed(0)
    x = torch.cat([torch.zeros(970, 1), 5 + torch.randn(30, 1)])
    columns = Columns(1).fit(x)
    assert float(columns.scale) == pytest.approx(float(x.std()), rel=0.01)


def test_constant_and_repeated_columns_are_said():
    x = torch.randn(100, 3)
    x[:, 1] = 4.0
    with pytest.warns(SelfnormWarning, match=r"columns \[1\] are constant"):
        columns = Columns(3).fit(x)
    assert float(columns.step[1]) == 1.0
    x[:, 1] = x[:, 2]
    with pytest.warns(SelfnormWarning, match="repeat another column"):
        Columns(3).fit(x)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.full((5, 2), float("nan")), "NaN"),
        (torch.zeros(5, 3), "has 3 columns, expected 2"),
        (torch.zeros(1, 2), "row"),
        (torch.linspace(-1, 1, 50).repeat(2, 1).T, "outside the stated support"),
    ],
)
def test_unusable_tables_are_refused(x, message):
    with pytest.raises(DataError, match=message):
        Columns(2, support=[(0.0, 1.0), None]).fit(x)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"support": [(0.0, 1.0)]}, "entries"),
        ({"support": [(1.0, 0.0), None]}, "low < high"),
        ({"discrete": "yes"}, "discrete"),
        ({"discrete": [1.0]}, "discrete has 1 steps for 2 columns"),
        ({"encoding": "raw"}, "encoding"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Columns(2, **settings)


def test_noise_at_a_limit_is_reflected_not_piled_up():
    torch.manual_seed(0)
    x = (torch.arange(1000) % 4).float().unsqueeze(1)
    columns = Columns(1, support=[(0.0, 3.0)]).fit(x)
    noisy = columns.dequantise(x)
    assert float(noisy.min()) >= 0
    assert float(noisy.max()) <= 3
    assert int((noisy == 0).sum()) + int((noisy == 3).sum()) < 5


def test_cell_masses_are_integrals_over_the_columns_with_a_step():
    law = torch.distributions.MultivariateNormal(
        torch.tensor([0.3, -0.2, 1.0]),
        torch.tensor([[1.0, 0.6, 0], [0.6, 1.5, 0.3], [0, 0.3, 0.8]]),
    )
    a, c = torch.arange(-5.0, 6.0), torch.arange(-3.0, 5.0, 0.5)
    rows = torch.cartesian_prod(a, torch.tensor([0.4]), c)
    step = torch.tensor([1.0, 0.0, 0.5])
    mass = log_cell_mass(law.log_prob, rows, step, n_points=256).exp()
    marginal = torch.distributions.Normal(-0.2, 1.5**0.5).log_prob(torch.tensor(0.4)).exp()
    assert torch.allclose(mass.sum(), marginal, rtol=2e-3)  # column 1 stays a density
    # one cell of one column, in closed form
    one = torch.distributions.Normal(0.0, 1.0)
    cell = log_cell_mass(lambda x: one.log_prob(x[:, 0]), torch.zeros(1, 1), torch.tensor([2.0]))
    exact = one.cdf(torch.tensor(1.0)) - one.cdf(torch.tensor(-1.0))
    assert torch.allclose(cell.exp(), exact, atol=1e-4)
    assert abs(2 * float(one.log_prob(torch.zeros(())).exp()) - float(exact)) > 0.1
    # without a step the mass is the density
    assert torch.equal(log_cell_mass(law.log_prob, rows, 0 * step), law.log_prob(rows))


def test_a_value_at_a_limit_is_inside_in_any_floating_point_type():
    x = torch.tensor([[0.1], [0.4], [0.7]], dtype=torch.float64)  # 0.7 in float32 is less
    columns = Columns(1, support=[(0.1, 0.7)]).fit(x)
    assert bool(columns.inside(x.to(columns.low)).all())


def test_scales_of_a_sorted_table_are_those_of_all_its_rows():
    x = torch.linspace(0, 1, 401_000)[:, None] ** 2
    columns = Columns(1, discrete=None).fit(x)
    assert float(columns.center) == pytest.approx(0.25, abs=1e-3)
    top = columns.inverse(columns.knots[:, -1:].T)
    assert float(top) == pytest.approx(0.995**2, abs=1e-3)
