"""Other people's methods for ``tables.py``, each in an environment of its own (``peers/*.txt``).

Libraries are imported where they are used. Settings are the libraries' defaults unless a comment
says otherwise.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from measuring import Row, Stopwatch
from table_frames import Coding, Frame, as_float, categories, like, n_rows, take, to_pandas

Generator = Callable[[str, Frame, int, int], tuple[Frame, Row]]
Imputer = Callable[[str, Frame, int, int], list[Frame]]
Explainer = Callable[[str, Frame, Frame, int], tuple[np.ndarray, Row]]


def seed_numpy(seed: int) -> None:
    """For libraries that draw from NumPy's global state."""
    np.random.seed(seed)  # noqa: NPY002


class Clock(Stopwatch):
    """Seconds since it was last asked."""

    def __call__(self) -> float:
        seconds = super().__call__()["seconds"]
        super().__init__()
        return seconds


def text_frame(name: str, frame: Frame) -> Any:
    """A pandas frame whose categories are text, dates seconds: what most libraries understand."""
    import pandas as pd

    table = to_pandas(frame)
    for column in table.columns:
        if column in categories(name, frame):
            seen = table[column].notna()
            table[column] = table[column].map(str).where(seen, None).astype(object)
        elif frame[column].dtype.kind == "M":
            table[column] = as_float(frame[column])
    return pd.DataFrame(table)


def from_text(table: Any, train: Frame) -> Frame:
    """The reverse, for samples."""
    columns = {}
    for name, wanted in train.items():
        values = np.asarray(table[name])
        if wanted.dtype.kind == "M":
            values = np.round(values.astype(np.float64)).astype(np.int64).astype("datetime64[s]")
        elif wanted.dtype.kind in "if" and values.dtype.kind == "O":  # a class named by a number
            values = np.array([np.nan if v is None else float(v) for v in values])
        columns[name] = values
    return like(columns, train)


# Generation: samples as many as asked for, with the seconds of both steps


def bootstrap(_name: str, train: Frame, n: int, seed: int) -> tuple[Frame, Row]:
    """Training rows drawn with replacement: copies, and the noise of a sample that size."""
    rows = np.random.default_rng([seed, 4]).integers(n_rows(train), size=n)
    return take(train, rows), {}


def adversarial_forest(name: str, train: Frame, n: int, seed: int) -> tuple[Frame, Row]:
    """arfpy: gaps are filled first with the mean or a level of their own, it takes none."""
    from arfpy import arf

    clock = Clock()
    seed_numpy(seed)
    table = text_frame(name, train)
    for column in table.columns:
        if table[column].dtype == object:
            table[column] = table[column].fillna("")
        else:
            table[column] = table[column].fillna(table[column].mean())
    model = arf.arf(x=table, random_state=seed, verbose=False)
    model.forde()
    fitted = clock()
    drawn = model.forge(n=n)
    for column in table.columns:
        if drawn[column].dtype == object:
            drawn[column] = drawn[column].where(drawn[column] != "", None)
    return from_text(drawn, train), {"fit_seconds": fitted, "sample_seconds": clock()}


GENERATORS: dict[str, Generator] = {
    "bootstrap": bootstrap,
    "arfpy": adversarial_forest,
}


# Imputation: the table with gaps completed several times


def mean_or_mode(name: str, frame: Frame, n_draws: int, _seed: int) -> list[Frame]:
    """One value a column: the mean (the nearest value seen), the most frequent level."""
    coding = Coding(frame, categories(name, frame))
    matrix = coding.matrix(frame)
    means = np.broadcast_to(np.nanmean(matrix, axis=0), matrix.shape)
    return [coding.frame(np.where(np.isnan(matrix), means, matrix))] * n_draws


def iterative(*, sample_posterior: bool) -> Imputer:
    """scikit-learn's IterativeImputer (Bayesian ridge) on standardised numbers and one column a
    level; the likeliest level, the nearest number seen. One fit, a pass over the gaps for each
    draw: the predictive variance holds the uncertainty of the weights.

    Without its most frequent level a category's columns do not determine one another; with it
    every cell would stay at its first guess. (Codes 0, 1, 2, ... instead score worse throughout.)
    """

    def impute(name: str, frame: Frame, n_draws: int, seed: int) -> list[Frame]:
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.experimental import enable_iterative_imputer  # noqa: F401 it opens the next
        from sklearn.impute import IterativeImputer

        coding = Coding(frame, categories(name, frame))
        matrix = coding.matrix(frame)
        centre, scale = np.nanmean(matrix, axis=0), np.nanstd(matrix, axis=0)
        columns = [np.flatnonzero(coding.owner == coding.names.index(c)) for c in coding.levels]
        left_out = [own[centre[own].argmax()] for own in columns]
        kept = np.setdiff1d(np.flatnonzero(scale > 0), left_out)
        standardised = (matrix[:, kept] - centre[kept]) / scale[kept]
        imputer = IterativeImputer(sample_posterior=sample_posterior, random_state=seed)
        draws = []
        for k in range(n_draws):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ConvergenceWarning)
                filled = (
                    imputer.transform(standardised) if k else imputer.fit_transform(standardised)
                )
            rows = np.where(np.isnan(matrix), centre, matrix)
            rows[:, kept] = filled * scale[kept] + centre[kept]
            for own, reference in zip(columns, left_out, strict=True):
                rows[:, reference] = 1 - rows[:, own[own != reference]].sum(axis=1)
            draws.append(coding.frame(rows))
        return draws

    return impute


def mice_forest(name: str, frame: Frame, n_draws: int, seed: int) -> list[Frame]:
    """miceforest, five iterations; a dataset a draw.

    Categories are drawn by the predicted probabilities: the default, matching log-odds, ends in an
    error where a probability is 1.
    """
    import miceforest

    table = text_frame(name, frame)
    for column in table.columns:
        if table[column].dtype == object:
            table[column] = table[column].astype("category")
    table.columns = [f"c{j}" for j in range(table.shape[1])]  # LightGBM takes no odd names
    kernel = miceforest.ImputationKernel(
        table,
        num_datasets=n_draws,
        mean_match_strategy={
            c: "normal" if table[c].dtype.kind in "if" else "fast" for c in table.columns
        },
        save_all_iterations_data=False,
        random_state=seed,
    )
    kernel.mice(5, num_threads=1)
    draws = []
    for k in range(n_draws):
        filled = kernel.complete_data(dataset=k)
        filled.columns = list(frame)
        draws.append(from_text(filled, frame))
    return draws


IMPUTERS: dict[str, Imputer] = {
    "mean_mode": mean_or_mode,
    "iterative": iterative(sample_posterior=True),
    "miceforest": mice_forest,
}
FIRST_IMPUTE: dict[str, Imputer] = {
    "mean_mode": mean_or_mode,
    "iterative": iterative(sample_posterior=False),
}


# Explanation: a score for every column of every row, higher is stranger


def filled_matrix(coding: Coding, frame: Frame, centre: np.ndarray) -> np.ndarray:
    """Numbers and one column a level, gaps at the mean."""
    matrix = coding.matrix(frame)
    return np.where(np.isnan(matrix), centre, matrix)


def per_column(coding: Coding, scores: np.ndarray) -> np.ndarray:
    """Scores of the matrix' columns added up for each column of the frame."""
    columns = range(len(coding.names))
    return np.column_stack([scores[:, coding.owner == j].sum(axis=1) for j in columns])


def tail_detector(kind: str) -> Explainer:
    """ECOD or COPOD of pyod: their score is a sum over columns."""

    def explain(name: str, train: Frame, rows: Frame, _seed: int) -> tuple[np.ndarray, Row]:
        from pyod.models.copod import COPOD
        from pyod.models.ecod import ECOD

        coding = Coding(train, categories(name, train))
        centre = np.nanmean(coding.matrix(train), axis=0)
        clock = Clock()
        model = {"ecod": ECOD, "copod": COPOD}[kind]()
        model.fit(filled_matrix(coding, train, centre))
        fitted = clock()
        model.decision_function(filled_matrix(coding, rows, centre))
        scores = per_column(coding, model.O[-n_rows(rows) :])  # behind the training rows
        return scores, {"fit_seconds": fitted, "explain_seconds": clock()}

    return explain


def forest_shap(name: str, train: Frame, rows: Frame, seed: int) -> tuple[np.ndarray, Row]:
    """TreeSHAP on an isolation forest."""
    import shap
    from sklearn.ensemble import IsolationForest

    coding = Coding(train, categories(name, train))
    centre = np.nanmean(coding.matrix(train), axis=0)
    clock = Clock()
    forest = IsolationForest(random_state=seed).fit(filled_matrix(coding, train, centre))
    fitted = clock()
    values = shap.TreeExplainer(forest).shap_values(filled_matrix(coding, rows, centre))
    # SHAP explains the mean depth at which a row is isolated: strange rows are isolated early
    return -per_column(coding, values), {"fit_seconds": fitted, "explain_seconds": clock()}


EXPLAINERS: dict[str, Explainer] = {
    "ecod": tail_detector("ecod"),
    "copod": tail_detector("copod"),
    "shap": forest_shap,
}
