"""evaluate, Bounds, exact quadrature, the look far out."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import selfnorm as sn
from selfnorm._context import seeded
from selfnorm.errors import DataError, ProposalError
from selfnorm.evaluation import GridDensity
from tests.analytic.models import ANALYTIC, Potential


def test_standard_errors_are_those_of_repetition():
    case = ANALYTIC[0]
    model = case.ebm()
    runs = [
        sn.evaluate(
            model, case.sample(200), proposal=case.proposal, n_samples=500, seed=s, adapt=False
        )
        for s in range(100)
    ]
    for value, error in (("upper", "upper_se"), ("log_norm", "log_norm_se")):
        spread = torch.tensor([getattr(r, value) for r in runs]).std()
        claimed = torch.tensor([getattr(r, error) for r in runs]).mean()
        assert float(claimed / spread) == pytest.approx(1.0, abs=0.2)


def test_mass_beyond_the_samples_is_found():
    """A Student-t base cannot hold an energy that falls linearly: Z does not exist."""
    base = sn.StudentT(3.0, torch.zeros(2), scale=1.0)
    x = base.sample((500,))
    runaway = sn.EBM(Potential(lambda v: -0.01 * v[..., 0].abs()), base=base)
    verdict = sn.evaluate(runaway, x, seed=0)
    assert any("does not exist" in r for r in verdict.reasons)
    tame = sn.EBM(Potential(lambda v: -0.01 * v[..., 0].abs().clamp_max(10)), base=base)
    assert sn.evaluate(tame, x, seed=0).reliable
    held = sn.EBM(
        Potential(lambda v: -0.5 * v[..., 0].abs()), base=sn.Gaussian(torch.zeros(2), scale=1.0)
    )
    verdict = sn.evaluate(held, torch.randn(500, 2), seed=0)
    assert verdict.reliable, verdict.reasons


def _cone(direction, opening):
    """An energy that falls along a direction, and rises beside it beyond an opening."""

    def energy(v):
        along = v @ direction
        beside = (v - along[:, None] * direction).norm(dim=-1)
        return 0.05 * (beside / opening - along)

    return Potential(energy)


@pytest.mark.parametrize("dim", [2, 8, 30])
def test_a_narrow_cone_of_falling_energy_is_found(dim):
    torch.manual_seed(dim)
    base = sn.StudentT(3.0, torch.zeros(dim), scale=1.0)
    direction = nn.functional.normalize(torch.randn(dim), dim=0)
    x = base.sample((300,))
    runaway = sn.EBM(_cone(direction, 0.05), base=base)
    assert any("does not exist" in r for r in sn.evaluate(runaway, x, seed=0).reasons)
    held = sn.EBM(_cone(direction, 0.05), base=sn.Gaussian(torch.zeros(dim), scale=1.0))
    assert not any("does not exist" in r for r in sn.evaluate(held, x, seed=0).reasons)


def test_rows_at_one_place_are_no_reason_to_doubt_the_normaliser():
    base = sn.Gaussian(torch.zeros(2), scale=1.0)
    model = sn.EBM(Potential(lambda v: 0 * v[..., 0]), base=base)
    for x in (torch.zeros(3, 2), torch.zeros(1, 2), torch.tensor([[-1.0, 2.0], [0, 0], [1, -2]])):
        found = sn.evaluate(model, x, n_samples=1000, seed=0)
        assert found.reliable, found.reasons


def test_laws_of_whole_numbers_and_boxes_are_judged_by_their_own_proposal():
    case = ANALYTIC[3]
    found = sn.evaluate(case.ebm(), case.sample(500), proposal=case.proposal, seed=0)
    assert found.log_norm == pytest.approx(case.log_norm, abs=0.03)
    assert not any("joined" in r for r in found.remarks)
    box = sn.Uniform(torch.tensor([0.0]), torch.tensor([1.0]))
    model = sn.EBM(Potential(lambda v: 40 * v[..., 0]))  # outside the box there is no model
    found = sn.evaluate(model, 0.025 * torch.rand(100, 1), proposal=box, n_samples=500, seed=0)
    assert found.log_norm == pytest.approx(-np.log(40), abs=0.1)
    assert found.n_samples == 4000  # more of its own


@pytest.mark.parametrize("df", [2.0, 5.0])
def test_quadrature_integrates_polynomial_tails(df):
    t = sn.StudentT(df, torch.tensor([0.7, -0.4]), scale=torch.tensor([0.5, 2.0]))
    log_z, error = sn.exact_log_norm(t.log_prob, 2)
    assert abs(log_z) < 1e-3
    assert error < 1e-3


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3, 3e3, 1e4])
def test_the_error_of_quadrature_includes_what_the_grid_leaves_out(dim, scale):
    log_z, error = sn.exact_log_norm(lambda v: -0.5 * (v / scale).square().sum(-1), dim)
    off = abs(log_z - dim * (np.log(scale) + 0.5 * np.log(2 * np.pi)))
    assert off <= error + 1e-6
    cauchy = sn.StudentT(1.0, torch.zeros(dim), scale=1.0)
    log_z, error = sn.exact_log_norm(cauchy.log_prob, dim)
    assert abs(log_z) <= error < 1e-3


def test_quadrature_in_one_dimension_and_on_a_box():
    case = ANALYTIC[4]
    box = (torch.tensor([0.0]), torch.tensor([2.0]))
    log_z, _ = sn.exact_log_norm(case.ebm(), 1, support=box, n_points=4001)
    assert log_z == pytest.approx(case.log_norm, abs=1e-4)
    student = ANALYTIC[1]
    unit = sn.exact_log_norm(lambda x: 3 * x[:, 0], 1, support=(0.0, 1.0))
    assert unit[0] == pytest.approx(math.log(math.expm1(3) / 3), abs=1e-5)
    assert sn.exact_log_norm(student.ebm(), 1)[0] == pytest.approx(student.log_norm, abs=1e-4)


def test_the_interval_of_one_row_says_that_it_is_of_one_row():
    model = sn.EBM(lambda v: v.square().sum(-1) / 2, log_norm=math.log(math.sqrt(2 * math.pi)))
    q = sn.Gaussian(torch.zeros(1), scale=1.5)
    one, two = (sn.evaluate(model, torch.zeros(n, 1), proposal=q, seed=0) for n in (1, 2))
    assert "of this one row" in str(one)
    assert "one row" not in str(two)


def test_errors_name_the_cure():
    model, q = sn.EBM(sn.MLP(2)), sn.Gaussian(torch.zeros(2), scale=1.0)
    with pytest.raises(ProposalError, match="base density"):
        sn.evaluate(model, torch.zeros(3, 2))
    with pytest.raises(ProposalError, match="3 columns"):
        sn.evaluate(model, torch.zeros(3, 3), proposal=q)
    with pytest.raises(DataError, match="n_samples"):
        sn.evaluate(model, torch.zeros(3, 2), proposal=q, n_samples=1)
    with pytest.raises(TypeError, match="typo"):
        sn.evaluate(model, torch.zeros(3, 2), proposal=q, typo=1)
    with pytest.raises(TypeError, match="got Gaussian; the log_prob of a proposal"):
        sn.evaluate(q, torch.zeros(3, 2))
    with pytest.raises(DataError, match="evaluate"):
        sn.exact_log_norm(lambda x: x.sum(-1), 3)
    with pytest.raises(DataError, match="one value a row"):
        sn.exact_log_norm(lambda x: x, 2, n_points=5)


def test_a_model_with_its_own_bounds_gets_the_options_or_refuses_them():
    x = torch.randn(20, 2, generator=torch.Generator().manual_seed(0))
    wide = sn.Gaussian(torch.zeros(1), scale=3.0)
    chain = sn.AutoregressiveEBM(2, hidden=8, components=2, context=2, energy_hidden=8)
    with pytest.raises(ProposalError, match="leave proposal out"):
        sn.evaluate(chain, x, proposal=sn.Gaussian(torch.zeros(2), scale=1.0), n_samples=10)
    with pytest.raises(TypeError, match="max_memory"):
        sn.evaluate(chain, x, n_samples=10, max_memory=0.5)
    torch.nn.init.normal_(chain.energy.last.weight)
    whole = sn.evaluate(chain, x, n_samples=10, seed=0)
    # rows taken a few at a time meet other random numbers: the chunk size has arrived
    parts = sn.evaluate(chain, x, n_samples=10, seed=0, chunk_size=3)
    assert parts.log_norm != whole.log_norm
    assert parts.log_norm == pytest.approx(whole.log_norm, abs=5 * whole.log_norm_se)

    class Records(torch.nn.Module):
        def bounds(self, x, *, n_samples, seed, proposal):
            return proposal

    assert sn.evaluate(Records(), x, proposal=wide) is wide


def test_grids_take_the_type_of_the_model_and_any_numbers():
    energy = sn.ExponentialFamily(lambda v: v, 2, theta=torch.tensor([0.5, -1.0]).double())
    model = sn.EBM(energy, base=sn.Gaussian([0.0, 0.0], 1.0))
    for center, scale in (([0.5, -1], np.ones(2)), (torch.tensor([0.5, -1.0]), 1), (0, [1.0])):
        log_z, _ = sn.exact_log_norm(model, 2, center=center, scale=scale, n_points=257)
        assert log_z == pytest.approx(0.625, abs=1e-9)


def test_estimators_of_tables_are_evaluated_too():
    X = np.random.default_rng(0).normal(size=(30, 2))
    density = sn.EnergyDensity(max_steps=5, random_state=0).fit(X)
    assert sn.evaluate(density, X, seed=1) == density.bounds(X, n_samples=20_000, random_state=1)
    regressor = sn.EnergyRegressor(n_members=1, hidden=8, max_epochs=1, random_state=0).fit(
        X, X[:, 0]
    )
    assert sn.evaluate(regressor, (X, X[:, 0]), n_samples=64, seed=0).n_samples == 64


@pytest.mark.parametrize("name", ["lower", "upper", "log_norm"])
def test_bounds_with_a_nan_are_never_reliable(name):
    fine = sn.Bounds(-1.0, -0.9, 0.1, 0.1, 0.0, 0.0, 1.0, 0.0, 100)
    assert fine.reliable
    broken = replace(fine, **{name: math.nan})
    assert not broken.reliable
    assert "NaN" in str(broken)
    assert "NOT RELIABLE" in str(fine.shifted(math.nan))
    assert replace(fine, upper=math.inf).reliable  # a model that has none


def test_a_tilted_grid_sees_a_narrow_ridge_and_draws_from_it():
    covariance = torch.tensor([[1.0, 0.9999], [0.9999, 1.0]], dtype=torch.float64)
    target = sn.Gaussian(torch.ones(2), covariance=covariance)
    frame = {"center": torch.ones(2), "scale": torch.linalg.cholesky(covariance)}
    log_z, error = sn.exact_log_norm(target.log_prob, 2, n_points=257, **frame)
    assert abs(log_z) < 1e-4
    assert error < 1e-3
    grid = GridDensity(target.log_prob, 2, n_points=257, core=4.0, reach=3.0, **frame)
    with seeded(0):
        x = grid.sample((4000,))
    assert (grid.log_prob(x) - target.log_prob(x)).abs().mean() < 0.02
    assert torch.allclose(torch.cov(x.T), covariance.float(), atol=0.1)
    assert (x[:, 1] - x[:, 0]).std() == pytest.approx(0.0002**0.5, rel=0.1)
    assert torch.isneginf(grid.log_prob(torch.full((1, 2), 1e9)))
