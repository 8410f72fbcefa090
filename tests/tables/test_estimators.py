import warnings

import joblib
import numpy as np
import pandas as pd
import polars as pl
import pytest
from scipy import stats
from sklearn.base import clone
from sklearn.mixture import GaussianMixture
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.neighbors import KernelDensity
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from selfnorm import EnergyDensity
from selfnorm.errors import DataError


def _cannot_hold(estimator):
    """Rows that come twice are repeated values, by which a schema knows grids and point masses."""
    del estimator
    return {"check_sample_weight_equivalence_on_dense_data": "rows that come twice are repeated"}


@parametrize_with_checks([EnergyDensity(max_steps=5)], expected_failed_checks=_cannot_hold)
def test_scikit_learn_contract(estimator, check):
    check(estimator)


def skewed(n, d=2, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.gumbel(size=(n, d))
    X[:, -1] += 0.5 * X[:, 0]
    return X


@pytest.fixture(scope="module")
def fitted():
    return EnergyDensity(random_state=0, max_steps=200).fit(skewed(600))


def test_an_offset_a_million_times_the_spread_is_no_problem():
    X = skewed(80)
    near = EnergyDensity(random_state=0, max_steps=20).fit(X)
    far = EnergyDensity(random_state=0, max_steps=20).fit(X + 1e6)
    assert np.allclose(near.score_samples(X), far.score_samples(X + 1e6), atol=1e-2)


def test_density_is_close_to_the_truth(fitted):
    X = skewed(1000, seed=1)
    truth = stats.gumbel_r.logpdf(X[:, 0]) + stats.gumbel_r.logpdf(X[:, 1] - 0.5 * X[:, 0])
    assert fitted.score(X) > truth.mean() - 0.12
    bounds = fitted.bounds(X, random_state=0)
    assert bounds.reliable, bounds.reasons
    assert bounds.lower - 0.01 <= fitted.score(X) <= bounds.upper + 0.01
    assert fitted.lower_bound_ == pytest.approx(truth.mean(), abs=0.4)
    assert fitted.n_iter_ >= fitted.history_.n_steps


def test_two_columns_of_few_rows_are_no_worse_than_simple_densities():
    """A ring: one energy, a tenth of the rows held out to stop it, came to a Gaussian's score."""

    def ring(n, seed):
        rng = np.random.default_rng(seed)
        angle, radius = rng.uniform(0, 2 * np.pi, n), rng.normal(3, 0.2, n)
        return np.column_stack([radius * np.cos(angle), radius * np.sin(angle)])

    X, test = ring(300, 0), ring(1000, 1)
    density = EnergyDensity(random_state=0).fit(X)
    assert density.method_ == "autoregressive"
    mixtures = [GaussianMixture(k, random_state=0).fit(X) for k in (1, 4, 8)]
    kernels = [KernelDensity(bandwidth=width).fit(X) for width in (0.2, 0.3)]
    simple = [m.score(test) for m in mixtures] + [k.score(test) / 1000 for k in kernels]
    assert density.score(test) > max(simple) - 0.05


def test_bounds_of_a_large_table_agree_with_those_of_all_its_rows(monkeypatch):
    from selfnorm.tables import chain_distribution as room

    X = skewed(300, d=3)
    density = EnergyDensity(random_state=0, max_steps=30).fit(X[:100])
    every_row = density.bounds(X, n_samples=128, random_state=0)
    monkeypatch.setattr(room, "MAX_FACTOR_SAMPLES", 128 * 3 * 150)
    subset = density.bounds(X, n_samples=128, random_state=0)
    assert subset.n_samples == 128
    assert subset.lower == pytest.approx(every_row.lower, abs=2e-3)
    assert subset.upper == pytest.approx(every_row.upper, abs=2e-3)
    assert subset.upper_se == pytest.approx(every_row.upper_se, rel=0.1)
    assert subset.reliable == every_row.reliable


@pytest.mark.parametrize(("rows", "d"), [(120, 2), (100, 3)])
def test_restarts_keep_the_best(rows, d):
    X = skewed(rows, d)
    how = {"method": "autoregressive" if d == 3 else "joint", "random_state": 0, "max_steps": 12}
    once = EnergyDensity(**how).fit(X)
    many = EnergyDensity(**how, n_init=3).fit(X)
    again = EnergyDensity(**how, n_init=3).fit(X)
    assert np.array_equal(many.score_samples(X), again.score_samples(X))
    assert np.isfinite(many.score_samples(X)).all()
    if d == 3:  # a chain's first restart is the lone run
        assert many.history_.best_score >= once.history_.best_score
    else:  # batched restarts draw from a common stream
        assert not np.array_equal(many.score_samples(X), once.score_samples(X))


def test_outliers(fitted):
    far = np.array([[40.0, -30.0], [0.5, 0.5]])
    assert fitted.predict(far).tolist() == [-1, 1]
    assert fitted.sample().shape == (1, 2)
    X = skewed(600)
    assert (fitted.predict(X) == -1).mean() == pytest.approx(0.01, abs=0.01)
    assert np.array_equal(fitted.decision_function(X), fitted.score_samples(X) - fitted.offset_)


def test_clone_pipeline_grid_search_joblib(fitted):
    X = skewed(40)
    assert clone(fitted).get_params() == fitted.get_params()
    pipeline = make_pipeline(StandardScaler(), EnergyDensity(max_steps=5, random_state=0))
    assert pipeline.fit(X).score_samples(X).shape == (40,)
    pipeline.set_output(transform="pandas")
    frame = pd.DataFrame(X, columns=["a", "b"])
    assert list(pipeline.fit(frame)[-1].feature_names_in_) == ["a", "b"]
    grid = {"max_steps": [5, 10]}
    search = GridSearchCV(EnergyDensity(random_state=0), grid, cv=2, n_jobs=1).fit(X)
    assert set(search.best_params_) == set(grid)
    scores = joblib.Parallel(n_jobs=2, backend="threading")(
        joblib.delayed(fitted.score)(X[i::2]) for i in range(2)
    )
    assert np.isfinite(scores).all()
    assert np.isfinite(cross_val_score(EnergyDensity(max_steps=5, random_state=0), X, cv=2)).all()


def test_masked_cells_are_gaps():
    X = skewed(60)
    masked = np.ma.masked_greater(X, X.mean())
    one_energy = EnergyDensity(method="joint", random_state=0, max_steps=3)
    density = one_energy.fit(np.ma.masked_array(X))  # no mask
    gaps = density.score_samples(masked)
    assert np.array_equal(gaps, density.score_samples(masked.filled(np.nan)))
    assert np.isfinite(gaps).all()
    with_gaps = EnergyDensity(random_state=0, max_steps=3).fit(masked)
    assert with_gaps.method_ == "autoregressive"
    few = masked[:4]
    assert few.mask.any()
    gaps = with_gaps.score_samples(few)
    assert np.array_equal(gaps, with_gaps.score_samples(few.filled(np.nan)))


@pytest.mark.parametrize("d", [2, 3])
def test_numbers_too_small_to_tell_apart_are_refused(d):
    x = np.random.default_rng(0).normal(size=(100, d))
    quick = EnergyDensity(max_steps=5, hidden=8, random_state=0)
    known = quick.fit(x).score_samples(x)
    for scale in (1e-50, 1e-100, 1e-150, 1e-310):
        with pytest.raises(DataError, match=r"'x1' varies by as little as .*; multiply it"):
            quick.fit(x * [1.0, scale, 1.0][:d])
    small = x * [1.0, 1e-30, 1.0][:d]
    assert quick.fit(small).score_samples(small) + np.log(1e-30) == pytest.approx(known, abs=0.05)
    assert len(np.unique(quick.sample(50, random_state=0)[:, 1])) > 45  # but for the ends


def test_integer_columns_get_a_density_not_a_spike():
    rng = np.random.default_rng(0)
    X = np.column_stack([rng.poisson(3.0, 800), rng.normal(size=800)]).astype(float)
    density = EnergyDensity(random_state=0, max_steps=100).fit(X)
    truth = stats.poisson.logpmf(X[:, 0], 3.0) + stats.norm.logpdf(X[:, 1])
    # step 1: density of a value = its mass
    assert density.score(X) == pytest.approx(truth.mean(), abs=0.15)
    drawn = density.sample(500, random_state=0)
    assert np.array_equal(drawn[:, 0], np.round(drawn[:, 0]))  # synthetic counts are counts
    assert drawn[:, 0].mean() == pytest.approx(3.0, abs=0.4)
    assert len(np.unique(drawn[:, 1])) > 400


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda X: X[:3], "at least 5 rows"),
        (lambda X: np.where(X[9, 0] == X, np.inf, X), "'x0' holds an infinite value .* in row 9"),
        (lambda X: np.full_like(X, 0.1), "no column is left to model: 'x0' is always 0.1"),
        (lambda X: X[:, 0], "Reshape your data"),
    ],
)
def test_unusable_tables_are_refused_with_cause_and_cure(spoil, words):
    with pytest.raises(DataError, match=words):
        EnergyDensity(max_steps=5).fit(spoil(skewed(50)))


def test_no_warnings_in_ordinary_use():
    X = skewed(100)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        density = EnergyDensity(max_steps=20, random_state=0).fit(X)
        density.bounds(X, n_samples=1000)
        density.predict(X)
    with pytest.raises(ValueError, match="at least 1"):
        density.sample(0)


def test_integers_far_from_zero_are_drawn_as_integers_and_have_masses():
    counts = np.random.default_rng(0).poisson(3, 300)
    near = EnergyDensity(random_state=0, max_steps=30).fit(counts[:, None])
    far = EnergyDensity(random_state=0, max_steps=30).fit(counts[:, None] + 2_000_000)
    values = np.arange(8.0)[:, None]
    assert np.allclose(far.score_samples(values + 2_000_000), near.score_samples(values), atol=1e-6)
    drawn = far.sample(50, random_state=0)
    assert np.array_equal(drawn, near.sample(50, random_state=0) + 2_000_000)


def test_a_marginal_of_an_array_scores_its_own_samples_and_columns_by_name():
    X = np.random.default_rng(0).normal(size=(200, 3))
    marginal = EnergyDensity(max_steps=5, random_state=0).fit(X).marginal(["x2", "x0"])
    assert marginal.columns == ("x0", "x2")
    drawn = marginal.sample(4, random_state=0)
    scores = marginal.score_samples(drawn)
    named = {"x2": drawn[:, 1], "x0": drawn[:, 0]}
    whole = np.insert(drawn, 1, 7.0, axis=1)
    tables = (drawn.tolist(), np.ma.asarray(drawn), named, pd.DataFrame(named), pl.DataFrame(named))
    for table in (*tables, whole, pd.DataFrame(whole), pd.DataFrame(named).assign(x1=7.0)):
        assert np.array_equal(marginal.score_samples(table), scores)
    with pytest.raises(DataError, match="1 columns"):
        marginal.score_samples(drawn[:, :1])
    assert np.isfinite(marginal.score_samples({"x0": [0.0]})).all()  # the other is a gap


def test_a_model_of_an_array_answers_questions_by_name():
    X = np.random.default_rng(0).normal(size=(80, 3)).round(1)
    X[:, 1] = X[:, 1] > 0
    model = EnergyDensity(max_steps=5, random_state=0).fit(X)
    found = model.probabilities({"x0": [0.5, 1.0]}, "x1")
    assert sum(found.values()) == pytest.approx(1.0)
    assert (np.asarray(model.sample(4, given={"x1": 1.0}, random_state=0))[:, 1] == 1).all()
    assert np.isfinite(model.log_prob({"x0": [0.5], "x1": [1.0]}, given=["x1"])).all()


def test_a_marginal_of_a_frame_scores_an_array_of_its_own_columns():
    frame = pd.DataFrame(np.random.default_rng(0).normal(size=(200, 3)), columns=list("abc"))
    marginal = EnergyDensity(max_steps=5, random_state=0).fit(frame).marginal(["c", "a"])
    rows = frame[["a", "c"]][:5]
    assert np.array_equal(marginal.score_samples(rows.to_numpy()), marginal.score_samples(rows))
