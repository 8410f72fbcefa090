"""The detector of PyOD's kind: what its views see, units, gaps, rows it was fitted to."""

import numpy as np
import pytest
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
