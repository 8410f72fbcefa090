"""EnergyRegressor: the scikit-learn contract, and a predictive law that is one."""

from __future__ import annotations

import copy
import time
import warnings

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from scipy.integrate import cumulative_trapezoid
from scipy.stats import multivariate_normal
from sklearn.utils.estimator_checks import parametrize_with_checks

from selfnorm import EnergyRegressor, SelfnormWarning
from selfnorm.columns import label_step
from selfnorm.errors import DataError
from selfnorm.evaluation.calibration import assess, central_coverage
from selfnorm.tables import RegressorNetwork
from selfnorm.tables._ensemble import LabelCells

SMALL = {
    "n_members": 2,
    "hidden": 32,
    "max_epochs": 30,
    "random_state": 0,
    "network": RegressorNetwork(energy_hidden=16, energy_epochs=10),
}
TINY = {**SMALL, "max_epochs": 3, "network": RegressorNetwork(energy_hidden=16, energy_epochs=1)}

# Rows are drawn in mini-batches and held out at random: a row of weight two is not the same as the
# row given twice.
EXPECTED_FAILURES = {
    "check_sample_weight_equivalence_on_dense_data": "stochastic training: repeating a row changes "
    "the mini-batches and the held-out rows"
}


@parametrize_with_checks(
    [EnergyRegressor(n_members=2, hidden=8, max_epochs=4, network=TINY["network"])],
    expected_failed_checks=lambda _: EXPECTED_FAILURES,
)
def test_scikit_learn_checks(estimator, check) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SelfnormWarning)
        check(estimator)


def skewed_data(n: int = 600, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Two modes for negative x0, a skewed law for positive; x1 is noise."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(-1, 1, (n, 2))
    side = np.where(rng.uniform(size=n) < 0.7, 1.0, -1.0)
    modes = side * (1 - X[:, 0]) + 0.15 * rng.standard_normal(n)
    skewed = rng.gamma(1.5, 0.4, n)
    return X, np.where(X[:, 0] < 0, modes, skewed)


@pytest.fixture(scope="module")
def fitted() -> EnergyRegressor:
    torch.set_num_threads(1)
    return EnergyRegressor(**SMALL).fit(*skewed_data())


def test_intervals_hold_what_they_promise(fitted: EnergyRegressor) -> None:
    X, _ = skewed_data(30, seed=4)
    central = fitted.predict_interval(X, 0.8)
    shortest = fitted.predict_interval(X, 0.8, kind="highest_density")
    for ends in (central, shortest):
        held = np.diff(fitted.cdf(X, ends), axis=1)[:, 0]
        np.testing.assert_allclose(held, 0.8, atol=2e-3)
    assert (shortest[:, 1] - shortest[:, 0] <= central[:, 1] - central[:, 0] + 1e-9).all()
    for row, intervals in enumerate(fitted.highest_density_regions(X[:5], 0.8)):
        ends = fitted.cdf(np.repeat(X[row : row + 1], len(intervals), axis=0), intervals)
        assert np.diff(ends, axis=1).sum() == pytest.approx(0.8, abs=0.03)


def test_two_modes_give_two_regions(fitted: EnergyRegressor) -> None:
    regions = fitted.highest_density_regions([[-0.8, 0.0]], 0.8)[0]
    assert len(regions) >= 2
    mode = fitted.predict_mode([[-0.8, 0.0]])[0]
    assert mode == pytest.approx(1.8, abs=0.3)


def test_mean_samples_and_scores_agree_with_the_density(fitted: EnergyRegressor) -> None:
    X, y = skewed_data(25, seed=5)
    grid = np.linspace(-40, 40, 8001)
    pdf, cdf = fitted.pdf(X, grid), fitted.cdf(X, grid)
    np.testing.assert_allclose(cdf, cumulative_trapezoid(pdf, grid, initial=0), atol=2e-3)
    mean = np.trapezoid(pdf * grid, grid, axis=1)
    np.testing.assert_allclose(fitted.predict(X), mean, atol=5e-3)
    samples = fitted.sample(X, 4000, random_state=0)
    assert samples.shape == (25, 4000)
    np.testing.assert_allclose(samples.mean(1), mean, atol=0.1)
    # CRPS = E|Y - y| - E|Y - Y'| / 2
    spread = np.abs(samples[:, 1:] - samples[:, :-1]).mean(1)
    crps = np.abs(samples - y[:, None]).mean(1) - 0.5 * spread
    np.testing.assert_allclose(fitted.crps(X, y), crps, atol=0.03)
    density = np.array([fitted.pdf(X[i : i + 1], [y[i]])[0, 0] for i in range(25)])
    np.testing.assert_allclose(np.log(density), fitted.log_prob(X, y), atol=1e-9)
    assert fitted.score(X, y) == pytest.approx(np.log(density).mean())


def test_it_beats_a_gaussian_and_is_calibrated(fitted: EnergyRegressor) -> None:
    X, y = skewed_data(300, seed=6)
    train = skewed_data()[1]
    gaussian = -0.5 * ((y - train.mean()) / train.std()) ** 2 - np.log(train.std() * 2.5066)
    assert fitted.score(X, y) > gaussian.mean() + 0.3
    found = assess(fitted, X, y)
    assert 0.8 < found.coverage < 0.97
    assert found.n == 300
    pit, _ = fitted.pit_and_crps(X, y)
    assert found.coverage == central_coverage(pit, 0.9)


def test_the_energy_helps_and_can_be_taken_away(fitted: EnergyRegressor) -> None:
    X, y = skewed_data(300, seed=7)
    alone = fitted.without_energy()
    assert fitted.score(X, y) > alone.score(X, y) - 0.02
    grid = np.linspace(-25, 25, 5001)
    mass = np.trapezoid(alone.pdf(X[:5], grid), grid, axis=1)
    np.testing.assert_allclose(mass, 1.0, atol=1e-3)
    exact = alone.log_prob(X[:50], y[:50])
    np.testing.assert_allclose(alone.log_prob(X[:50], y[:50], method="learned"), exact, atol=1e-4)


def test_the_error_of_b_is_judged_all_over_the_table(fitted: EnergyRegressor) -> None:
    z = fitted._x_columns(torch.from_numpy(skewed_data()[0]))[0].float()
    errors = fitted._predictive.log_norm_error(z[::3].double()).abs()  # 200 of the 600 rows
    assert fitted.log_norm_error_ == pytest.approx(float(errors.mean()), rel=1e-6)


def test_shift_and_scale_of_y_move_everything_as_they_must(fitted: EnergyRegressor) -> None:
    X, y = skewed_data()
    moved = EnergyRegressor(**SMALL).fit(X, -40.0 + 8.0 * y)
    probe = X[:10]
    np.testing.assert_allclose(moved.predict(probe), -40 + 8 * fitted.predict(probe), atol=1e-3)
    np.testing.assert_allclose(
        moved.log_prob(probe, -40 + 8 * y[:10]),
        fitted.log_prob(probe, y[:10]) - np.log(8),
        atol=1e-3,
    )
    np.testing.assert_allclose(
        moved.predict_quantiles(probe), -40 + 8 * fitted.predict_quantiles(probe), atol=5e-3
    )


def test_far_from_the_data_the_law_is_wide(fitted: EnergyRegressor) -> None:
    near = np.diff(fitted.predict_interval([[0.5, 0.0]], 0.9))[0, 0]
    far = np.diff(fitted.predict_interval([[50.0, -80.0]], 0.9))[0, 0]
    spread = skewed_data()[1].std()
    assert far > 3 * spread
    assert far > near
    grid = np.linspace(-60, 60, 6001)
    density = fitted.pdf([[50.0, -80.0]], grid)[0]
    assert density.max() < 1 / spread
    assert np.trapezoid(density, grid) == pytest.approx(1.0, abs=5e-3)


def test_weights_count() -> None:
    rng = np.random.default_rng(0)
    X = rng.uniform(-1, 1, (400, 1))
    upper = rng.uniform(size=400) < 0.5
    y = np.where(upper, 2.0, -2.0) + 0.3 * rng.standard_normal(400)
    weight = np.where(upper, 1e308, 0.05e308)  # their sum is not finite
    model = EnergyRegressor(**{**SMALL, "max_epochs": 60}).fit(X, y, sample_weight=weight)
    assert model.predict(X).mean() > 1.2
    with pytest.raises(DataError, match="sample_weight is not zero"):
        model.fit(X, y, sample_weight=np.where(np.arange(400) < 3, 1.0, 0.0))


@pytest.mark.parametrize("targets", [2, 4])
def test_several_targets(targets) -> None:
    rng = np.random.default_rng(0)
    X = rng.uniform(-1, 1, (300, 1))
    first = X[:, 0] + 0.2 * rng.standard_normal(300)
    skewed = np.exp(0.5 * rng.standard_normal(300)) * (1 + X[:, 0] ** 2)
    beside = first + 0.3 * rng.standard_normal(300)
    Y = np.stack([first, 10 * first**2 + rng.standard_normal(300), skewed, beside], axis=1)
    Y = Y[:, :targets]
    model = EnergyRegressor(**SMALL).fit(X, Y)
    assert model.predict(X[:9]).shape == (9, targets)
    assert model.sample(X[:3], 50, random_state=0).shape == (3, 50, targets)
    assert model.log_norm_error_ < 0.05
    marginal = -0.5 * ((Y - Y.mean(0)) / Y.std(0)) ** 2 - np.log(Y.std(0) * 2.5066)
    assert model.score(X[:80], Y[:80]) > marginal[:80].sum(1).mean() + 0.3
    # Normalised over all of them, by importance sampling from a wide Gaussian.
    drawn = model.sample([[0.3]], 400, random_state=0)[0]
    wide = multivariate_normal(drawn.mean(0), 2 * np.cov(drawn.T))
    points = wide.rvs(300, random_state=0)
    log_p = model.log_prob(np.full((300, 1), 0.3), points)
    share = np.exp(log_p - wide.logpdf(points))
    assert share.mean() == pytest.approx(1.0, abs=4 * share.std() / 300**0.5)
    assert model.bounds(X[:50], Y[:50], n_samples=500, random_state=0).gap < 0.3
    for ask in (model.predict_quantiles, lambda rows: model.log_mass(rows, Y)):
        with pytest.raises(DataError, match="is for one target"):
            ask(X)


@pytest.mark.parametrize("step", [1.0, 0.5])
def test_whole_numbers_are_scored_by_their_cells(step: float) -> None:
    """Masses add up to one, the score is theirs, bounds enclose it, samples follow them."""
    rng = np.random.default_rng(1)
    X = rng.uniform(-1, 1, (400, 1))
    y = step * rng.integers(0, 3, 400)  # no law can score above the true one but by chance
    with pytest.warns(SelfnormWarning, match="distinct"):
        model = EnergyRegressor(**SMALL).fit(X[:200], y[:200])
    values = step * np.arange(-40, 44)
    mass = np.exp([model.log_mass(X[:6], np.full(6, v)) for v in values])
    np.testing.assert_allclose(mass.sum(0), 1.0, atol=1e-4)
    seen = (values >= 0) & (values <= 2 * step)
    assert (mass[seen].sum(0) > 0.97).all()
    assert model.score(X[200:], y[200:]) < -np.log(3 * step) + 0.01
    np.testing.assert_allclose(model.log_mass(X, y) - np.log(step), model.log_prob(X, y))
    bounds = model.bounds(X[200:], y[200:], random_state=0)
    assert bounds.reliable, bounds.reasons
    assert bounds.lower - 1e-3 < model.score(X[200:], y[200:]) < bounds.upper + 1e-3
    learned = model.log_prob(X[200:], y[200:], method="learned").mean()
    assert bounds.learned_error == pytest.approx(learned - model.score(X[200:], y[200:]), abs=2e-3)
    drawn = model.sample(X[:6], 4000, random_state=0)
    shares = np.array([(drawn == v).mean(1) for v in values])
    np.testing.assert_allclose(shares, mass, atol=0.04)


def test_counts_keep_what_lies_beyond_the_largest_seen() -> None:
    """A count that ends in single rows has a tail; the zeros, a third of the rows, are an end."""
    y = np.r_[np.zeros(100), np.ones(100), np.full(80, 2.0), np.full(19, 3.0), 4.0]
    cells = LabelCells.of(y, 1.0)
    assert cells is not None
    assert cells.below == pytest.approx(1 / 302)
    assert cells.above == pytest.approx(2 / 302)


def test_a_regressor_that_is_right_is_called_reliable_at_the_default_sample_size() -> None:
    """Energies that hardly move: weights that end at once, to whose last digits any law fits."""
    X, y = skewed_data()
    model = EnergyRegressor(**SMALL).fit(X[:300], y[:300])
    bounds = model.bounds(X[300:], y[300:], random_state=0)
    assert bounds.upper == pytest.approx(model.score(X[300:], y[300:]), abs=1e-4)
    assert bounds.reliable, bounds.reasons


def test_bounds_are_those_of_the_score(fitted: EnergyRegressor) -> None:
    """Members whose learned normalisers are off by different amounts: none of it may show."""
    X, y = skewed_data(200)
    model = copy.deepcopy(fitted)
    with torch.no_grad():
        model._predictive.model.log_norm_net.bias += torch.linspace(-0.4, 0.4, 2)[:, None, None]
    bounds = model.bounds(X, y, n_samples=4000, random_state=0)
    score = model.score(X, y)
    assert bounds.upper == pytest.approx(score, abs=0.01)
    assert bounds.lower < score
    assert 0.05 < bounds.gap < 0.25  # of the two b, and of the shares that they give
    learned = model.log_prob(X, y, method="learned").mean()
    assert bounds.learned_error == pytest.approx(learned - score, abs=0.01)


def test_label_step_tells_grids_from_continuous_targets() -> None:
    rng = np.random.default_rng(0)
    assert label_step(rng.integers(0, 6, 500).astype(float)) == 1.0
    assert label_step(rng.integers(0, 6, 500) + 1.6e9) == 1.0
    assert label_step(0.95 + 0.001 * rng.integers(0, 51, 2000)) == pytest.approx(0.001)
    assert label_step(rng.standard_normal(500)) == 0.0
    rounding = np.r_[np.repeat([0.1, 0.2, 0.3, 0.4], 100), np.full(50, 0.1 + 0.2)]
    assert label_step(rounding) == pytest.approx(0.1)
    long_tail = np.r_[np.zeros(100), rng.lognormal(0.0, 2.0, 900)]
    assert 0 < label_step(long_tail) < 0.05
    assert label_step(np.where(rng.uniform(size=500) < 0.7, 0.0, rng.standard_normal(500))) > 0


@pytest.mark.parametrize("rows", [5, 30])
def test_few_rows_and_one_feature(rows: int) -> None:
    rng = np.random.default_rng(0)
    X = rng.uniform(-1, 1, (rows, 1))
    y = X[:, 0] + 0.1 * rng.standard_normal(rows)
    model = EnergyRegressor(**SMALL).fit(X, y)
    width = np.diff(model.predict_interval(X, 0.9))
    assert np.isfinite(model.log_prob(X, y)).all()
    assert (width > 1e-2).all()


def test_bad_input_is_refused_with_a_reason() -> None:
    X, y = skewed_data(40)
    for rows, targets, words in (
        (X, np.where(np.arange(40) == 3, np.nan, y), "NaN"),
        (X, np.ones(40), "constant"),
        (X[:3], y[:3], "at least 5 rows"),
        (np.where(np.arange(40)[:, None] == 3, np.inf, X), y, "infinity"),
    ):
        with pytest.raises(DataError, match=words):
            EnergyRegressor(**SMALL).fit(rows, targets)


def test_a_target_that_is_not_known_is_named_by_its_row() -> None:
    x = np.random.default_rng(0).normal(size=(80, 2))
    y = [None if i == 3 else float(v) for i, v in enumerate(x[:, 0])]
    with pytest.raises(DataError, match=r"y has no value in 1 row\(s\), the first is row 3"):
        EnergyRegressor().fit(x, y)


def test_bad_questions_are_refused_with_a_reason(fitted: EnergyRegressor) -> None:
    X, y = skewed_data(4)
    for words, ask, *given in (
        ("between 0 and 1", fitted.predict_quantiles, X, [5, 95]),
        ("coverage", fitted.predict_interval, X, 90),
        ("kind", fitted.predict_interval, X, 0.9, "narrow"),
        ("one target per row", fitted.log_prob, X[:1], 0.5),
        ("continuous", fitted.log_mass, X, y),
        ("method", fitted.log_prob, X, y, "fast"),
        *(
            (f"X has {n} rows but y has {count}", ask, X[:n], y[:count])
            for ask in (fitted.log_prob, fitted.crps, fitted.pit_and_crps, fitted.bounds)
            for n, count in ((4, 1), (4, 2), (2, 4))  # two of four targets are no answer
        ),
    ):
        with pytest.raises(DataError, match=words):
            ask(*given)


def quick(X, y):
    return EnergyRegressor(**TINY | {"max_epochs": 1, "hidden": 8}).fit(X, y)


def test_units_of_the_target_may_be_tiny() -> None:
    X, y = skewed_data(60)
    plain = quick(X, y).log_prob(X, y)
    for unit in (1e-200, 1e-160, 1e140):
        fitted = quick(X, y * unit)
        np.testing.assert_allclose(fitted.log_prob(X, y * unit) + np.log(unit), plain, atol=0.05)
        grid = np.linspace(y.min() - 20, y.max() + 20, 2001) * unit
        mass = np.sum(fitted.pdf(X[:2], grid), axis=1) * (grid[1] - grid[0])
        np.testing.assert_allclose(mass, 1.0, atol=0.02)
    with pytest.raises(DataError, match="less than 1e-300"):
        quick(X, y * 1e-305)


def test_targets_beyond_double_precision_or_masked_are_refused(fitted: EnergyRegressor) -> None:
    X, y = skewed_data(30)
    for far in (1e200, -1e200):
        with pytest.raises(DataError, match="y holds numbers as large as"):
            fitted.log_prob(X, np.full(30, far))
    hidden = np.ma.masked_array(y, mask=np.arange(30) == 3)
    for asked in (fitted.log_prob, fitted.crps, quick):
        with pytest.raises(DataError, match="y has 1 masked cell"):
            asked(X, hidden)
    with pytest.raises(DataError, match="X has"):
        fitted.predict(np.ma.masked_array(X, mask=X > 0))


def test_settings_of_the_network_say_what_they_take() -> None:
    with pytest.raises(
        ValueError, match=r"'bin_jitter' of RegressorNetwork must be .* <= 1, got 2"
    ):
        RegressorNetwork(bin_jitter=2.0)


def test_members_with_bins_of_their_own_make_a_normalised_law() -> None:
    rng = np.random.default_rng(0)
    X = rng.uniform(size=(300, 2))
    y = X[:, 0] + 0.1 * rng.exponential(size=300)
    network = RegressorNetwork(energy_epochs=5, label_bins=8, bin_jitter=1.0)
    options = {"n_members": 3, "hidden": 16, "max_epochs": 10, "random_state": 0}
    model = EnergyRegressor(network=network, **options).fit(X, y)
    edges = model._predictive.model.label_features.bins.edges
    assert edges.shape == (3, 1, 1, 9)
    grid = np.linspace(-30, 30, 12_001)
    mass = np.trapezoid(model.pdf(X[:3], grid), grid, axis=1)
    np.testing.assert_allclose(mass, 1.0, atol=1e-3)
    two = EnergyRegressor(network=network, **options).fit(X, np.c_[y, X[:, 1] + y])
    assert two.sample(X[:4], 3, random_state=0).shape == (4, 3, 2)


def test_inputs_of_every_kind_with_gaps(tmp_path):
    rng = np.random.default_rng(2)
    kind, size = rng.choice(["a", "b", "c"], 400), rng.normal(size=400)
    y = 2.0 * (kind == "b") + 3.0 * size + 0.2 * rng.normal(size=400)
    table = pd.DataFrame({"kind": kind, "size": size, "day": pd.Timestamp("2020-01-01")})
    table["day"] += pd.to_timedelta(rng.integers(0, 50, 400), "D")
    table, new, y, y_new = table[:300].copy(), table[300:], y[:300], y[300:]
    table.loc[::15, "size"] = np.nan
    table.loc[::14, "kind"] = None
    model = EnergyRegressor(**SMALL | {"max_epochs": 15}).fit(table, y)
    assert np.sqrt(np.mean((model.predict(new) - y_new) ** 2)) < 1.2 < np.std(y)
    # what twenty rows tell of gaps is not enough: intervals of others would hold 62 of 100
    low, high = model.predict_interval(new.assign(size=np.nan)).T
    assert np.mean((low <= y_new) & (y_new <= high)) > 0.72
    found = model.predict(table)
    assert list(model.feature_names_in_) == ["kind", "size", "day"]
    model.save(tmp_path / "m")
    again = EnergyRegressor.load(tmp_path / "m")
    assert np.array_equal(again.predict(table), found)
    with pytest.warns(SelfnormWarning, match="never seen as 'new'"):
        assert np.isfinite(model.predict(table.assign(kind="new"))).all()
    with pytest.warns(SelfnormWarning, match=r"gaps in .'day .*, where the training rows had none"):
        assert np.isfinite(model.predict(table.assign(day=pd.NaT))).all()
    X, y = skewed_data(40)
    X[3, 0] = np.nan  # a gap that no member has held out
    assert np.isfinite(EnergyRegressor(**SMALL).fit(X, y).score(X, y))


def test_time_covers_both_stages() -> None:
    X, y = skewed_data()
    began = time.perf_counter()
    model = EnergyRegressor(n_members=2, random_state=0, max_time="2s").fit(X, y)
    assert time.perf_counter() - began < 2.2 + 2  # of a machine that does other things, too
    assert {history.stopped for history in model.history_} <= {"max_time", "patience"}


@pytest.mark.parametrize("kind", ["pandas", "arrow", "dict"])
def test_columns_that_were_set_aside_may_be_missing_later(kind):
    def made(frame):
        if kind == "arrow":
            return pa.Table.from_pandas(frame, preserve_index=False)
        return frame if kind == "pandas" else {name: frame[name].tolist() for name in frame}

    rng = np.random.default_rng(0)
    names = [f"r{i}" for i in range(60)]
    frame = pd.DataFrame({"id": names, "kind": rng.choice(["a", "b"], 60), "one": 1.0})
    frame["size"] = rng.normal(size=60)
    model = EnergyRegressor(n_members=1, max_epochs=1, random_state=0)
    with pytest.warns(SelfnormWarning, match="identifiers: 'id'"):
        model.fit(made(frame), rng.normal(size=60))
    expected = model.predict(made(frame))
    for part in (["kind", "one", "size"], ["kind", "size"]):
        np.testing.assert_array_equal(model.predict(made(frame[part])), expected)
    with pytest.raises(DataError, match="kind"):
        model.predict(made(frame[["id", "one", "size"]]))
    turned = made(frame[["size", "one", "kind", "id"]].assign(more=2.0))
    if kind == "pandas":  # as scikit-learn has it
        with pytest.raises(DataError, match="names"):
            model.predict(turned)
    else:
        with pytest.warns(SelfnormWarning, match="never seen are left out"):
            np.testing.assert_array_equal(model.predict(turned), expected)
