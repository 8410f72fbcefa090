import math

import numpy as np
import pytest
import torch

import evidence_sabotage
import selfnorm as sn
from evidence_targets import TARGETS, ensemble_draws, exact_draws
from selfnorm.errors import DataError

QUICK = {"max_steps": 20, "seed": 0}


def gauss(x):
    return -0.5 * (x**2).sum(-1)


def normal(n, d, seed=0):
    return np.random.default_rng(seed).normal(size=(n, d))


KNOWN = ("gaussian_2", "skew_normal_1", "mixture_2", "gamma_1", "dirichlet_4")
KNOWN += ("half_normal_2_unstated",)


@pytest.mark.parametrize("name", KNOWN)
def test_known_constants(name):
    target = TARGETS[name]
    draws = exact_draws(target, 800, 0).reshape(4, 200, -1)
    found = sn.evidence(target.log_density, draws, support=target.support, **QUICK)
    assert abs(found.log_z - target.log_z) < 4 * found.se + 1e-3
    assert found.se < 0.1
    assert found.lower < target.log_z + 4 * found.lower_se
    assert found.upper > target.log_z - 4 * found.upper_se
    assert found.reliable, found.reasons


def two_modes(x):
    sides = [-0.5 * ((x - c) ** 2).sum(-1) for c in (2.0, -2.0)]
    return np.logaddexp(math.log(0.7) + sides[0], math.log(0.3) + sides[1])


def test_a_constant_added_is_a_constant_found_and_seeds_repeat():
    x = normal(300, 2)
    one, two, three = (
        sn.evidence(lambda x, c=c: gauss(x) + c, x, seed=s, max_steps=20)
        for c, s in ((0.0, 1), (500.0, 1), (0.0, 2))
    )
    assert two.log_z - one.log_z == pytest.approx(500.0, abs=1e-9)
    assert one.log_z != three.log_z
    state = torch.random.get_rng_state()
    sn.evidence(gauss, x, **QUICK)
    assert torch.equal(state, torch.random.get_rng_state())


def test_units_do_not_matter():
    x = normal(300, 2)
    scale = np.array([1e-6, 1e5])
    found = sn.evidence(lambda x: gauss(x / scale), x * scale, **QUICK)
    plain = sn.evidence(gauss, x, **QUICK)
    assert found.log_z - np.log(scale).sum() == pytest.approx(plain.log_z, abs=0.02)


def test_named_parameters_and_known_log_densities():
    x = normal(300, 2)
    named = {"a": x[:, 0], "b": x[:, 1:]}
    found = sn.evidence(lambda p: -0.5 * (p["a"] ** 2 + (p["b"] ** 2).sum(-1)), named, **QUICK)
    known = sn.evidence(gauss, x, log_density_draws=gauss(x), **QUICK)
    assert known.log_z == pytest.approx(found.log_z, abs=1e-9)
    assert known.n_evaluations == found.n_evaluations - 300


@pytest.mark.parametrize("chains", [1, 3])
def test_no_more_evaluations_than_allowed(chains):
    calls = []

    def counted(x):
        calls.append(len(x))
        return gauss(x)

    draws = normal(900, 2).reshape(chains, -1, 2)
    found = sn.evidence(counted, draws, max_evaluations=400, **QUICK)
    assert sum(calls) == found.n_evaluations <= 400
    assert abs(found.log_z - math.log(2 * math.pi)) < 4 * found.se + 1e-3
    with pytest.raises(DataError, match="at least 100"):
        sn.evidence(gauss, draws, max_evaluations=10)


def test_fifty_draws_give_a_value_with_an_error_to_match():
    found = sn.evidence(gauss, normal(50, 2), seed=0)
    assert abs(found.log_z - math.log(2 * math.pi)) < 4 * found.se + 0.01


def test_repeated_rows_of_a_sampler_are_no_point_masses():
    draws = np.repeat(normal(300, 1), 3, axis=0)
    found = sn.evidence(gauss, draws, **QUICK)
    assert found.effective_draws < 500
    assert abs(found.log_z - 0.5 * math.log(2 * math.pi)) < 4 * found.se + 1e-3


WRONG = ("mode_in_second_half", "mode_in_one_chain", "unconverged_chains", "tails_cut_off")
WRONG += ("gaussian_draws_of_a_cauchy", "draws_of_half_the_support", "too_narrow")
WRONG += ("forgotten_jacobian", "all_chains_in_wrong_proportions")


@pytest.mark.parametrize("name", WRONG)
def test_sabotage_is_flagged(name, rng):
    log_density, draws, _ = evidence_sabotage.CASES[name](rng)
    assert not sn.evidence(log_density, draws[..., ::2, :], **QUICK).reliable


def test_walkers_that_stay_where_they_are_are_flagged(rng):
    sides = np.where(np.arange(40) < 34, 2.0, -2.0)[:, None, None]  # in wrong proportions
    stuck = np.concatenate([normal(2000, 2).reshape(50, 40, 2), 5 + 0.01 * normal(40, 2)[None]])
    for log_density, draws in ((two_modes, rng.normal(size=(40, 40, 2)) + sides), (gauss, stuck)):
        assert not sn.evidence(log_density, draws, **QUICK).reliable


def test_an_ensemble_of_walkers_is_judged_as_one_by_walker_or_flattened_by_step():
    target = TARGETS["gumbel_4"]
    by_walker = ensemble_draws(target, 3600, 0, walkers=60)
    layouts = by_walker, by_walker.swapaxes(0, 1).reshape(-1, target.dim)
    values = [sn.evidence(target.log_density, draws, **QUICK) for draws in layouts]
    for value in values:
        assert value.log_z == values[0].log_z
        assert abs(value.log_z - target.log_z) < 4 * value.se
        assert value.effective_draws < 1500  # of 3600
        assert value.reliable, value.reasons
    assert "60 walkers in turn" in values[1].notes[0]


def test_bounds_that_cross_by_many_errors_are_a_reason():
    """Draws 1.2 times too wide: the lower bound is above by 0.013, six or seven errors of it."""
    wide = sn.evidence(gauss, 1.2 * normal(2000, 3), **QUICK)
    assert wide.lower - wide.upper > 5 * math.hypot(wide.lower_se, wide.upper_se)
    crossed = next(finding for finding in wide.findings if finding.code == "crossed")
    assert crossed.figure == pytest.approx(wide.lower - wide.upper)
    assert crossed.figure > crossed.limit
    assert "lower bound is above the upper" in crossed.words
    assert not any("bounds meet" in note for note in wide.notes)


@pytest.mark.parametrize("seed", range(4))
def test_bounds_that_meet_by_chance_are_no_reason(seed):
    found = sn.evidence(gauss, normal(1000, 2, seed), **QUICK)
    assert found.reliable, found.reasons
    assert found.upper - found.lower < 0.02
    crossed = found.lower > found.upper
    assert crossed == any("bounds meet" in note for note in found.notes)


def test_a_density_of_the_family_is_found_and_not_estimated():
    """The draws alone know a Gaussian of 10 columns to 0.01; its density knows it without noise."""
    root = np.linalg.cholesky(np.full((10, 10), 0.6) + 0.4 * np.eye(10))
    back, draws = np.linalg.inv(root), normal(1500, 10) @ root.T
    found = sn.evidence(lambda x: gauss(x @ back.T), draws, **QUICK)
    exact = 5 * math.log(2 * math.pi) + np.log(np.diag(root)).sum()
    assert found.se < 0.002
    assert abs(found.log_z - exact) < 4 * found.se
    assert found.reliable, found.reasons


def nan_beyond(x):
    return np.where(x[:, 0] < 1.9, gauss(x), np.nan)


@pytest.mark.parametrize(
    ("log_density", "draws", "message"),
    [
        (lambda x: np.where(x[:, 0] > 0, gauss(x), -np.inf), normal(200, 2), "-inf at"),
        (lambda x: gauss(x) * np.nan, normal(200, 2), "nan at 200"),
        (gauss, np.column_stack([normal(200, 1)[:, 0]] * 2), "determined by the others"),
        (gauss, np.ones((200, 2)), "constant"),
        (None, normal(200, 2), "give log_density"),
        (lambda x: None, normal(200, 2), "not real numbers"),
        (lambda x: gauss(x) if np.abs(x).max() < 3 else 1 / 0, normal(200, 2), "ZeroDivision"),
        (gauss, [normal(30, 2), normal(40, 2)], "of one length"),
    ],
)
def test_bad_input_is_refused(log_density, draws, message):
    with pytest.raises(DataError, match=message):
        sn.evidence(log_density, draws, **QUICK)


def test_log_densities_of_another_function_are_refused():
    """What a sampler has kept often lacks a constant or has a Jacobian more."""
    x = normal(200, 2)
    with pytest.raises(DataError, match="must be one function"):
        sn.evidence(gauss, x, log_density_draws=gauss(x) - 3, **QUICK)


def test_nan_at_samples_alone_is_a_reason():
    draws = normal(600, 2)
    found = sn.evidence(nan_beyond, draws[draws[:, 0] < 1.9], **QUICK)
    assert any("NaN" in reason for reason in found.reasons)


def test_draws_alone_give_the_reciprocal_value_and_say_so():
    x = normal(1000, 2)
    found = sn.evidence(None, x, log_density_draws=gauss(x) + 7, **QUICK)
    assert abs(found.log_z - math.log(2 * math.pi) - 7) < 4 * found.se + 0.01
    assert found.n_evaluations == 0
    assert found.lower == -math.inf
    assert found.upper > math.log(2 * math.pi) + 7 - 4 * found.upper_se
    assert "reciprocal estimate" in str(found)
    with pytest.raises(DataError, match="one number for each"):
        sn.evidence(None, x, log_density_draws=np.zeros(3))
    other = sn.evidence(None, x[:600], log_density_draws=x[:600, 0], **QUICK)
    assert any("not from this density" in reason for reason in other.reasons)


def test_models_are_compared_and_drawn(tmp_path):
    x = normal(300, 2)
    one = sn.evidence(gauss, x, **QUICK)
    other = sn.evidence(lambda x: gauss(x) - 1.5, x, seed=5, max_steps=20)
    found = one.compare(other)
    assert found.log_bayes_factor == pytest.approx(1.5, abs=4 * found.se + 1e-3)
    assert found.se == pytest.approx(math.hypot(one.se, other.se))
    assert found.probability == pytest.approx(1 / (1 + math.exp(-1.5)), abs=0.02)
    assert found.interval()[0] < 1.5 < found.interval()[1] + 1e-3
    assert other.compare(one).log_bayes_factor == -found.log_bayes_factor
    low, high = one.interval(0.5)
    assert high - low == pytest.approx(2 * 0.6745 * one.se, rel=1e-3)
    with pytest.raises(ValueError, match="level"):
        one.interval(95)
    one.plot(tmp_path / "evidence.png")
    assert (tmp_path / "evidence.png").stat().st_size > 1000
    assert "log_weights_draws" not in one.to_dict()
