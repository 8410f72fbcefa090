"""The detector of PyOD's kind: what its views see, units, gaps, rows it was fitted to."""

import numpy as np
import pytest
from scipy.stats import kstest
from sklearn.metrics import roc_auc_score

from selfnorm import EnergyDensity
from selfnorm.errors import DataError
from selfnorm.tables import OutlierDetector


def detector(contamination=0.1, **options):
    density = EnergyDensity(max_steps=15, random_state=0, **options)
    return OutlierDetector(density, contamination=contamination)


@pytest.fixture(scope="module")
def table():
    """Two thirds on a line, a third on another; anomalies far out together, and between both."""
    rng = np.random.default_rng(0)
    a = rng.normal(size=120)
    rows = np.column_stack([a, np.where(np.arange(120) % 3, a, -a) + 0.1 * rng.normal(size=120)])
    rows = np.column_stack([rows, rng.normal(size=120)])
    cluster = rng.normal(loc=[4, 4, 4], scale=0.1, size=(5, 3))
    return np.concatenate([rows, cluster]), np.r_[np.zeros(120), np.ones(5)]


@pytest.fixture(scope="module")
def fitted(table):
    return detector(contamination=0.05).fit(table[0])


def test_a_cluster_of_anomalies_among_the_training_rows_is_found(fitted, table):
    rows, labels = table
    found = roc_auc_score(labels, fitted.decision_scores_)
    assert found > max(0.9, roc_auc_score(labels, fitted.views_[:, -1]))  # than the density alone
    assert fitted.labels_.sum() == pytest.approx(0.05 * len(rows), abs=1)
    assert fitted.views_.shape == (len(rows), 5)
    assert fitted.predict([[9, -9, 9], [0.2, 0.2, 0.1]]).tolist() == [1, 0]


def test_units_do_not_matter(fitted, table):
    factors = np.array([1e3, 1e-3, 1.0])
    scaled = detector(contamination=0.05).fit(table[0] * factors + [0, 0, 5])
    assert np.corrcoef(scaled.decision_scores_, fitted.decision_scores_)[0, 1] > 0.99


def test_further_out_is_stranger_beyond_the_training_rows(fitted):
    far = np.array([[k, -k, k] for k in (3.0, 10.0, 30.0)])
    assert (np.diff(fitted.decision_function(far)) > 0).all()


def test_training_rows_are_scored_by_laws_that_have_not_seen_them(table):
    rng = np.random.default_rng(1)
    rows = np.concatenate([table[0][:60], rng.normal(scale=6, size=(3, 3))])
    fitted = detector().fit(rows)
    assert np.isfinite(fitted.density_.unseen_decision_).all()
    own, unseen = fitted.views(rows)[-3:, 1:], fitted.views_[-3:, 1:]
    # a lone row is less likely to those that were not shown it
    assert ((unseen > own).sum(0) >= 2).all()


def test_text_gaps_and_values_never_seen(table):
    rng = np.random.default_rng(0)
    kinds = rng.choice(["a", "b"], 120).astype(object)
    size = np.where(rng.random(120) < 0.1, np.nan, rng.normal(size=120))
    count = np.where(rng.random(120) < 0.7, 0.0, rng.exponential(size=120))
    fitted = detector().fit({"kind": kinds, "size": size, "count": count})
    asked = {"kind": ["a", "c", None], "size": [0.0, 0.0, np.nan], "count": [0.0, 0.0, 50.0]}
    with pytest.warns(UserWarning, match="c"):
        usual, never, far = fitted.decision_function(asked)
    with pytest.warns(UserWarning, match="c"):
        alone = fitted.decision_function({name: cells[1:2] for name, cells in asked.items()})
    assert alone == pytest.approx(never)
    assert np.isfinite([usual, never, far]).all()
    assert usual < min(never, far)


def test_contamination_is_a_share():
    with pytest.raises(DataError, match="contamination"):
        detector(contamination=0.7).fit(np.zeros((20, 2)))


@pytest.fixture(scope="module")
def novelty():
    """Fitted to normal rows, two columns of which are nearly one."""
    a = np.random.default_rng(0).normal(size=(240, 1))
    normal = np.concatenate([a, a], 1) + 0.1 * np.random.default_rng(1).normal(size=(240, 2))
    rows = np.column_stack(
        [normal, np.random.default_rng(2).choice(4, 240, p=[0.6, 0.2, 0.1, 0.1])]
    )
    density = EnergyDensity(max_steps=40, random_state=0)
    return OutlierDetector(density, training="normal").fit(rows[:120]), rows[120:]


def test_normal_rows_have_uniform_p_values_and_a_false_alarm_rate(novelty):
    fitted, normal = novelty
    p = fitted.p_values(normal)
    assert kstest(p, "uniform").pvalue > 0.01
    assert fitted.predict(normal).mean() == pytest.approx(fitted.contamination, abs=0.07)
    assert (fitted.p_values(normal) == p).all()
    assert (fitted.p_values(normal, random_state=1) != p).any()


def test_discoveries_are_the_anomalies_strangest_first(novelty):
    fitted, normal = novelty
    odd = np.array([[2.0, -2.0, 0], [8.0, 8.0, 0], [30.0, -30.0, 9]])
    rows = np.concatenate([normal[:20], odd])
    with pytest.warns(UserWarning, match="never seen"):
        found = fitted.discoveries(rows, fdr=0.2)
    with pytest.warns(UserWarning, match="never seen"):
        scores = fitted.decision_function(rows)[found]
    assert {20, 21, 22} <= set(found.tolist())
    assert len(found) <= 5
    assert (np.diff(scores) <= 0).all()
    assert len(fitted.discoveries(normal[:20], fdr=0.05)) <= 1


def test_conventions_of_pyod(fitted, table, novelty):
    rows, _ = table
    for method in ("linear", "unify"):
        shares = fitted.predict_proba(rows, method)
        assert shares.shape == (len(rows), 2)
        assert shares.min() >= 0
        assert shares.sum(1) == pytest.approx(1)
        order = np.argsort(fitted.decision_function(rows))
        assert (np.diff(shares[order, 1]) >= 0).all()
    with pytest.raises(DataError, match="method must be"):
        fitted.predict_proba(rows, "softmax")
    detector, normal = novelty
    assert detector.decision_scores_.shape == detector.labels_.shape == (120,)
    strange = detector.decision_function(normal) > detector.threshold_
    assert (detector.predict(normal) == strange).all()


def test_scores_of_equal_rows_are_equal_in_training_and_after(novelty):
    fitted, _ = novelty
    rows = np.repeat([[0.0, 0.0, 1.0]], 3, 0)
    assert np.ptp(fitted.decision_function(rows)) == 0
    assert np.isfinite(fitted.density_.unseen_decision_).all()


def test_weights_move_p_values_to_another_mix_of_rows(novelty):
    fitted, normal = novelty
    alike = fitted.p_values(normal, (np.ones(120), np.ones(len(normal))))
    assert alike == pytest.approx(fitted.p_values(normal))
    strange = fitted.decision_scores_ > np.median(fitted.decision_scores_)
    weighted = fitted.p_values(normal, (np.where(strange, 9.0, 1.0), np.ones(len(normal))))
    assert weighted.mean() > alike.mean() + 0.1
    with pytest.raises(DataError, match="sample_weight"):
        fitted.p_values(normal, (np.ones(3), np.ones(len(normal))))


def test_rates_that_few_rows_cannot_promise_are_refused(novelty):
    fitted, normal = novelty
    with pytest.raises(DataError, match=r"fdr=0.005 takes 199 training rows; 120 can .* 0.0083"):
        fitted.discoveries(normal, fdr=0.005)
    with pytest.raises(DataError, match=r"fdr must be in \(0, 1\)"):
        fitted.discoveries(normal, fdr=10)
    density = EnergyDensity(max_steps=2, random_state=0)
    with pytest.raises(DataError, match=r"contamination=0\.01 takes 99 training rows"):
        OutlierDetector(density, training="normal", contamination=0.01).fit(normal[:20])
    with pytest.raises(DataError, match="training must be"):
        OutlierDetector(density, training="clean").fit(normal)
    with pytest.raises(DataError, match="folds of at least 15 rows"):
        OutlierDetector(density, training="normal").fit(normal[:10])


def test_constant_scores_have_uniform_p_values():
    rows = np.tile([[1.0, 1.0], [1.0, 2.0]], (20, 1))
    fitted = OutlierDetector(EnergyDensity(max_steps=2, random_state=0), training="normal").fit(
        rows
    )
    assert kstest(fitted.p_values(np.tile(rows, (3, 1))), "uniform").pvalue > 0.01
    assert len(fitted.discoveries(rows[:1])) <= 1
    with pytest.raises(DataError, match="no column is left"):
        OutlierDetector(training="normal").fit(np.ones((40, 2)))
