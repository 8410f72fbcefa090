import math

import numpy as np
import pytest
import torch
from scipy.special import gammaln

import selfnorm as sn
from selfnorm.errors import DataError

QUICK = {"max_steps": 20, "seed": 0}


def gauss(x):
    return -0.5 * (x**2).sum(-1)


def normal(n, d, seed=0):
    return np.random.default_rng(seed).normal(size=(n, d))


def skewed(x):
    """Gamma(3) in logarithms, twice its density: log Z = log 2 + log Gamma(3)."""
    return math.log(2) + 3 * x[..., 0] - np.exp(x[..., 0])


def skewed_2d(x):
    return (3 * x - np.exp(x)).sum(-1)


def two_modes(x):
    sides = [-0.5 * ((x - c) ** 2).sum(-1) for c in (2.0, -2.0)]
    return np.logaddexp(math.log(0.7) + sides[0], math.log(0.3) + sides[1])


def modal(n, share, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, 2)) + np.where(rng.random((n, 1)) < share, 2.0, -2.0)


CASES = {
    "chains": (gauss, normal(600, 2).reshape(4, 150, 2), math.log(2 * math.pi), None),
    "skewed": (
        skewed,
        np.log(np.random.default_rng(0).gamma(3.0, size=(600, 1))),
        math.log(4),
        None,
    ),
    "modes": (two_modes, modal(800, 0.7), math.log(2 * math.pi), None),
    "positive": (
        lambda x: np.log(x[:, 0]) - x[:, 0] - 0.5 * x[:, 1] ** 2,
        np.column_stack([np.random.default_rng(1).gamma(2.0, size=600), normal(600, 1)[:, 0]]),
        0.5 * math.log(2 * math.pi),
        ["positive", None],
    ),
    "simplex": (
        lambda x: (np.array([1.0, 2.0, 0.5]) * np.log(x)).sum(1),
        np.random.default_rng(2).dirichlet([2.0, 3.0, 1.5], size=600),
        float(gammaln([2.0, 3.0, 1.5]).sum() - gammaln(6.5)),
        ["simplex"] * 3,
    ),
    "half": (
        lambda x: np.where((x > 0).all(1), gauss(x), -np.inf),
        np.abs(normal(600, 2)),
        math.log(math.pi / 2),
        None,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_known_constants(name):
    log_density, draws, exact, support = CASES[name]
    found = sn.evidence(log_density, draws, support=support, **QUICK)
    assert abs(found.log_z - exact) < 4 * found.se + 1e-3
    assert found.se < 0.1
    assert found.lower < exact + 4 * found.lower_se
    assert found.upper > exact - 4 * found.upper_se
    assert found.reliable, found.reasons


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


def test_float32_and_tensors():
    x = torch.from_numpy(normal(300, 2)).float()
    found = sn.evidence(lambda x: -0.5 * x.square().sum(-1), x, **QUICK)
    assert abs(found.log_z - math.log(2 * math.pi)) < 4 * found.se + 1e-3


def test_fifty_draws_give_a_value_with_an_error_to_match():
    found = sn.evidence(gauss, normal(50, 2), seed=0)
    assert abs(found.log_z - math.log(2 * math.pi)) < 4 * found.se + 0.01


def test_repeated_rows_of_a_sampler_are_no_point_masses():
    draws = np.repeat(normal(300, 1), 3, axis=0)
    found = sn.evidence(gauss, draws, **QUICK)
    assert found.effective_draws < 500
    assert abs(found.log_z - 0.5 * math.log(2 * math.pi)) < 4 * found.se + 1e-3


SABOTAGE = {
    "narrow draws": (gauss, 0.8 * normal(2000, 2)),
    "forgotten Jacobian": (
        lambda x: 2 * x[:, 0] - np.exp(x[:, 0]),
        np.log(np.random.default_rng(0).gamma(3.0, size=(1500, 1))),
    ),
    "truncated draws": (gauss, np.abs(normal(1500, 2))),
    "a mode in one half": (two_modes, np.vstack([modal(500, 1.0), modal(500, 0.2)])),
    "a mode in one chain": (
        two_modes,
        np.stack([modal(300, share, s) for s, share in enumerate((1.0, 1.0, 1.0, 0.0))]),
    ),
    "chains that did not move": (
        gauss,
        3 * normal(4, 2)[:, None] + 0.05 * np.cumsum(normal(800, 2).reshape(4, 200, 2), axis=1),
    ),
    "Gaussian draws of a Cauchy": (lambda x: -np.log1p(x**2).sum(-1), normal(1500, 2)),
    "tails cut off": (
        lambda x: -np.log1p(x**2).sum(-1),
        np.tan(np.random.default_rng(0).uniform(-1.37, 1.37, size=(1500, 2))),
    ),
    "walkers that stay in modes, in wrong proportions": (
        two_modes,
        np.stack([modal(40, float(k < 34), k) for k in range(40)]),
    ),
    "one walker that does not move": (
        gauss,
        np.concatenate([normal(2000, 2).reshape(50, 40, 2), 5 + 0.01 * normal(40, 2)[None]]),
    ),
    "modes in wrong proportions, the same in all chains": (
        two_modes,
        modal(1600, 0.85).reshape(4, 400, 2),
    ),
}


@pytest.mark.parametrize("name", SABOTAGE)
def test_sabotage_is_flagged(name):
    found = sn.evidence(*SABOTAGE[name], **QUICK)
    assert not found.reliable


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


def stretch_moves(log_density, x, steps, rng):
    """``(steps, walkers, d)`` of Goodman & Weare's ensemble sampler."""
    kept, halves = [], (np.arange(0, len(x), 2), np.arange(1, len(x), 2))
    for _ in range(steps):
        for moved, fixed in (halves, halves[::-1]):
            z = (1 + rng.random(len(moved))) ** 2 / 2
            other = x[rng.choice(fixed, len(moved))]
            proposed = other + z[:, None] * (x[moved] - other)
            log_ratio = log_density(proposed) - log_density(x[moved])
            log_ratio += (x.shape[1] - 1) * np.log(z)
            accepted = np.log(rng.random(len(moved))) < log_ratio
            x[moved] = np.where(accepted[:, None], proposed, x[moved])
        kept.append(x.copy())
    return np.stack(kept)


def test_an_ensemble_of_walkers_is_judged_as_one_by_walker_or_flattened_by_step(rng):
    by_step = stretch_moves(skewed_2d, np.log(rng.gamma(3.0, size=(60, 2))), 60, rng)
    layouts = by_step.swapaxes(0, 1), by_step.reshape(-1, 2)
    values = [sn.evidence(skewed_2d, draws, **QUICK) for draws in layouts]
    for value in values:
        assert value.log_z == values[0].log_z
        assert abs(value.log_z - 2 * math.log(2)) < 4 * value.se
        assert value.effective_draws < 1500  # of 3600
        assert value.reliable, value.reasons
    assert "60 walkers in turn" in values[1].notes[0]


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
