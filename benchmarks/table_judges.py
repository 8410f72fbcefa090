"""Judges of samples, imputations and explanations for ``tables.py``.

Those of samples need sdmetrics and XGBoost (``peers/judges.txt``) and import them late; the others
need NumPy and SciPy.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.spatial.distance import cdist

from measuring import Row
from table_frames import (
    SETS,
    Coding,
    Frame,
    as_float,
    at_most,
    categories,
    complete,
    is_gap,
    n_rows,
    shuffled,
    take,
    to_pandas,
)

N_BOOTSTRAPS = 5


# Samples


def judge(name: str, train: Frame, test: Frame, samples: Frame, seed: int) -> Row:
    """Every figure of one set of samples.

    Complete rows are compared with complete rows: whether gaps are drawn as well is a choice, and
    not every method has it.
    """
    train, test, samples = complete(train), complete(test), complete(samples)
    few = at_most(samples, n_rows(test), seed)
    return {
        "xgboost": two_sample_score("xgboost", train, samples, seed),
        "logistic": two_sample_score("logistic", train, samples, seed),
        "xgboost_test": two_sample_score("xgboost", test, few, seed),
        **agreement(name, train, samples),
        **noise(name, train, seed),
        **closest_records(name, train, test, samples, seed),
        **utility(name, train, test, samples),
    }


def noise(name: str, train: Frame, seed: int) -> dict[str, float]:
    """Agreement of real rows: with those drawn from them again (``bootstrap_``), of one half with
    the other (``fresh_``) and with its own rows drawn again (``half_bootstrap_``).

    What fresh rows of the same table lose against rows drawn again, no model can be asked for.
    """
    rng, order = np.random.default_rng([seed, 2]), shuffled(n_rows(train), seed)
    half, fresh = (take(train, rows) for rows in np.array_split(order, 2))
    figures = {f"fresh_{k}": v for k, v in agreement(name, half, fresh).items()}
    for prefix, rows in (("bootstrap", train), ("half_bootstrap", half)):
        n = n_rows(rows)
        drawn = [take(rows, rng.integers(n, size=n)) for _ in range(N_BOOTSTRAPS)]
        scores = [agreement(name, rows, rows_again) for rows_again in drawn]
        for key in scores[0]:
            values = [score[key] for score in scores]
            figures[f"{prefix}_{key}"] = float(np.mean(values))
            figures[f"{prefix}_{key}_sd"] = float(np.std(values))
    return figures


def detector(kind: str) -> Any:
    """The two-sample test of sdmetrics with its logistic regression or with XGBoost."""
    from sdmetrics.single_table import LogisticDetection
    from sdmetrics.single_table.detection.sklearn import ScikitLearnClassifierDetectionMetric

    if kind != "xgboost":
        return LogisticDetection
    from xgboost import XGBClassifier

    class XGBoostDetection(ScikitLearnClassifierDetectionMetric):
        @staticmethod
        def _get_classifier() -> XGBClassifier:
            return XGBClassifier(eval_metric="logloss", enable_categorical=True, random_state=0)

    return XGBoostDetection


def two_sample_score(kind: str, real: Frame, samples: Frame, seed: int) -> float:
    """``2 - 2 max(0.5, AUROC)``, mean of three folds: 1 cannot tell, 0 always tells.

    Text becomes one column a level, as in sdmetrics, but of the levels of both tables: one that
    only the samples have is an error there.
    """
    import pandas as pd

    both = pd.concat([to_pandas(real), to_pandas(samples)], ignore_index=True)
    text = [c for c in both.columns if both[c].dtype in (object, "str")]
    coded = pd.get_dummies(both, columns=text, dtype=float)
    halves = coded.iloc[: n_rows(real)], coded.iloc[n_rows(real) :].reset_index(drop=True)
    state = np.random.get_state()  # noqa: NPY002 sdmetrics draws its folds from there
    np.random.seed(seed)  # noqa: NPY002
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # logistic regression that has not converged
            return float(detector(kind).compute(*halves))
    finally:
        np.random.set_state(state)  # noqa: NPY002


def metadata(name: str, frame: Frame) -> Row:
    """Kinds of columns in sdmetrics' words."""
    kinds: dict[str, Row] = {}
    for column, values in frame.items():
        if column in categories(name, frame):
            kinds[column] = {"sdtype": "categorical"}
        elif values.dtype.kind == "M":
            kinds[column] = {"sdtype": "datetime", "datetime_format": "%Y-%m-%d %H:%M:%S"}
        else:
            kinds[column] = {"sdtype": "numerical"}
    return {"columns": kinds}


def agreement(name: str, train: Frame, samples: Frame) -> dict[str, float]:
    """sdmetrics' Column Shapes and Column Pair Trends, and the latter in bins of the training rows.

    Trends are of all pairs, as in published figures, where sdmetrics of today leaves out those that
    hardly depend on each other. It cuts numbers into ten bins from the least to the greatest of
    each table by itself: one extreme row moves them all, so that even two bootstraps of thousands
    of rows differ by 0.01. ``trend_same_bins`` is the same without that.
    """
    from sdmetrics.reports import QualityReport

    report = QualityReport()
    report.real_correlation_threshold = report.real_association_threshold = 0
    tables = ({"table": to_pandas(rows)} for rows in (train, samples))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # constant columns in small tables
        report.generate(*tables, {"tables": {"table": metadata(name, train)}}, verbose=False)
    properties = report.get_properties().set_index("Property")["Score"]
    return {
        "shape": float(properties["Column Shapes"]),
        "trend": float(properties["Column Pair Trends"]),
        "trend_same_bins": trend_same_bins(name, train, samples),
    }


def trend_same_bins(name: str, train: Frame, samples: Frame) -> float:
    """Agreement of pairs: half the difference of correlations of two numbers, else the total
    variation between tables of counts, numbers in ten bins of the training rows; both from 1.
    """
    coding = Coding(train, categories(name, train))
    sizes = {c: len(levels) + 1 for c, levels in coding.levels.items()}
    codes, numbers = [], []
    for frame in (train, samples):
        coded = {c: coding.codes(frame, c) + 1 for c in coding.levels}  # 0: a level never seen
        values = {c: as_float(frame[c]) for c in coding.values}
        for c, column in values.items():
            edges = np.histogram_bin_edges(as_float(train[c]), bins=10)[1:-1]
            coded[c] = np.digitize(column, edges)
            sizes[c] = 10
        codes.append(coded)
        numbers.append(values)
    scores = []
    for a, b in itertools.combinations(coding.names, 2):
        if a in coding.values and b in coding.values:
            real, drawn = (np.corrcoef(v[a], v[b])[0, 1] for v in numbers)
            scores.append(1 - abs(real - drawn) / 2)
        else:
            real, drawn = (
                np.bincount(k[a] * sizes[b] + k[b], minlength=sizes[a] * sizes[b]) / len(k[a])
                for k in codes
            )
            scores.append(1 - np.abs(real - drawn).sum() / 2)
    return float(np.nanmean(scores))


def distances(name: str, train: Frame) -> Callable[[Frame], np.ndarray]:
    """The map of rows to a space where L1 is the distance: min-max by ``train``, one-hot."""
    coding = Coding(train, categories(name, train))
    matrix = coding.matrix(train)
    low, high = matrix.min(axis=0), matrix.max(axis=0)
    width = np.where(high > low, high - low, 1.0)
    return lambda frame: (coding.matrix(frame) - low) / width


def to_nearest(rows: np.ndarray, others: np.ndarray) -> np.ndarray:
    """L1 distance of each row to the closest of the others."""
    nearest = [cdist(part, others, "cityblock").min(axis=1) for part in chunks(rows, 256)]
    return np.concatenate(nearest)


def chunks(rows: np.ndarray, size: int) -> list[np.ndarray]:
    """The rows some at a time: a distance matrix is large."""
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def closest_records(name: str, train: Frame, test: Frame, samples: Frame, seed: int) -> Row:
    """Are samples copies? ``closest_record``: the share of samples closer to a training row than to
    a test row, as many of each (ties count half); ``nearest_ratio``: median distance of samples to
    the nearest training row over that of test rows.
    """
    place = distances(name, train)
    trained, tested, drawn = place(train), place(test), place(samples)
    few = trained[shuffled(len(trained), seed)[: len(tested)]]
    difference = to_nearest(drawn, few) - to_nearest(drawn, tested)
    tied = np.abs(difference) < 1e-12
    queried = drawn[shuffled(len(drawn), seed)[: max(len(tested), 1000)]]
    near, near_test = (float(np.median(to_nearest(rows, trained))) for rows in (queried, tested))
    return {
        "closest_record": float(np.mean((difference < 0) & ~tied) + 0.5 * np.mean(tied)),
        "closest_record_ties": float(np.mean(tied)),
        "nearest": near,
        "nearest_test": near_test,
        "nearest_ratio": near / near_test if near_test > 0 else float("nan"),
    }


def utility(name: str, train: Frame, test: Frame, samples: Frame) -> Row:
    """AUROC on test rows of XGBoost trained on samples, and of the same on real rows."""
    target = SETS[name].target
    if target is None:
        return {}
    sampled, real = (classifier_auroc(name, rows, test, train) for rows in (samples, train))
    return {"auroc": sampled, "auroc_real": real, "utility": sampled / real}


def classifier_auroc(name: str, rows: Frame, test: Frame, coded_by: Frame) -> float:
    """AUROC of XGBoost; trees are added until a ninth of its own rows says stop."""
    from sklearn.metrics import roc_auc_score
    from xgboost import XGBClassifier

    target = SETS[name].target or ""
    coding = Coding(coded_by, categories(name, coded_by))
    features = np.array(coding.names)[coding.owner] != target
    x, x_test = (coding.matrix(part)[:, features] for part in (rows, test))
    y, y_test = (coding.codes(part, target) for part in (rows, test))
    if len(set(y)) < len(coding.levels[target]):
        return float("nan")  # a class has no sample
    order = shuffled(len(x), 0)
    held, kept = order[: len(x) // 9], order[len(x) // 9 :]
    options = {"learning_rate": 0.1, "n_estimators": 1000, "early_stopping_rounds": 20}
    model = XGBClassifier(random_state=0, **options)
    model.fit(x[kept], y[kept], eval_set=[(x[held], y[held])], verbose=False)
    predicted = model.predict_proba(x_test)
    if predicted.shape[1] == 2:
        return float(roc_auc_score(y_test, predicted[:, 1]))
    return float(roc_auc_score(y_test, predicted, multi_class="ovr"))


# Imputations


def crps(truth: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """``E|X - y| - E|X - X'| / 2`` for ``truth (n,)`` and ``draws (m, n)``, unbiased in the draws.

    Example:
        >>> crps(np.array([1.0]), np.array([[0.0], [2.0]]))
        array([0.])
    """
    m = len(draws)
    ranks = 2 * np.arange(1, m + 1) - m - 1
    spread = (ranks[:, None] * np.sort(draws, axis=0)).sum(axis=0) / (m * (m - 1))
    return np.abs(draws - truth).mean(axis=0) - spread


def log_loss(truth: np.ndarray, draws: np.ndarray, n_levels: int) -> np.ndarray:
    """Minus log of the share of draws that hit, with one more draw spread over all levels.

    Example:
        >>> np.exp(-log_loss(np.array([0]), np.array([[0], [0], [1]]), 2))
        array([0.625])
    """
    hits = (draws == truth).sum(axis=0)
    return -np.log((hits + 1 / n_levels) / (len(draws) + 1))


def covered(truth: np.ndarray, draws: np.ndarray, seed: int) -> np.ndarray:
    """Whether the truth lies in the central 90 % of as many draws: ``len(draws) + 1`` is a multiple
    of 20, and the rank of the truth among the draws, ties broken at random, is not among the lowest
    or highest twentieth.
    """
    m = len(draws)
    if (m + 1) % 20:
        raise ValueError(f"90 % of the ranks of {m} draws: take 19, 39, ...")
    rng = np.random.default_rng([seed, 3])
    ties = (draws == truth).sum(axis=0)
    rank = (draws < truth).sum(axis=0) + rng.integers(0, ties + 1)
    edge = (m + 1) // 20
    return (rank >= edge) & (rank < m + 1 - edge)


def imputation_scores(
    name: str, truth: Frame, gone: np.ndarray, draws: list[Frame], seed: int
) -> Row:
    """Scores of the removed cells of ``truth``, a mean of columns each.

    CRPS of numbers in units of the column's standard deviation; coverage over columns with more
    values than the finite ones of a schema have (256, or a twentieth of the rows).
    """
    categorical = categories(name, truth)
    coding = Coding(truth, categorical)
    limit = min(256, n_rows(truth) // 20)
    scores_by_kind: dict[str, list[float]] = {"crps": [], "log_loss": [], "coverage": []}
    by_column: Row = {}
    for j, column in enumerate(truth):
        cells = gone[:, j] & ~is_gap(truth[column])
        if not cells.any():
            continue
        if column in categorical:
            true = coding.codes(truth, column)[cells]
            drawn = np.stack([coding.codes(d, column)[cells] for d in draws])
            score = float(log_loss(true, drawn, len(coding.levels[column])).mean())
            scores_by_kind["log_loss"].append(score)
            by_column[column] = {"log_loss": score}
            continue
        values = as_float(truth[column])
        true = values[cells]
        drawn = np.stack([as_float(d[column])[cells] for d in draws])
        score = float(crps(true, drawn).mean() / np.nanstd(values))
        scores_by_kind["crps"].append(score)
        by_column[column] = {"crps": score}
        if len(coding.values[column]) > limit:
            share = float(covered(true, drawn, seed).mean())
            scores_by_kind["coverage"].append(share)
            by_column[column]["coverage"] = share
    means = {key: float(np.mean(values)) for key, values in scores_by_kind.items() if values}
    return {**means, "columns": by_column}


# Explanations


def guilty_rank(scores: np.ndarray, guilty: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of ``scores (n, columns)``, higher is stranger: the chance that the guilty column is named
    first, and its mean rank from 1, where ties are broken at random.

    Example:
        >>> guilty_rank(np.array([[3.0, 3.0, 1.0]]), np.array([1]))
        (array([0.5]), array([1.5]))
    """
    own = np.take_along_axis(scores, guilty[:, None], axis=1)
    above, tied = (scores > own).sum(axis=1), (scores == own).sum(axis=1)
    return np.where(above == 0, 1.0 / tied, 0.0), above + (tied + 1) / 2
