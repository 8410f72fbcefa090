"""Anomaly scores by the conventions of PyOD, whose tools they then work with."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import erf
from sklearn.base import BaseEstimator, clone
from sklearn.utils.validation import check_is_fitted

from selfnorm._context import on_cpu, seed_of, whole_or_not_at_all
from selfnorm._inputs import RandomState, checked_weights
from selfnorm.columns import TableLike
from selfnorm.errors import DataError
from selfnorm.tables.density import EnergyDensity
from selfnorm.tables.promises import benjamini_hochberg, conformal
from selfnorm.tables.strangeness import Novelty, Stiff, Strangeness


class OutlierDetector(BaseEstimator):
    r"""A detector of PyOD's kind: larger scores are stranger, outliers are 1.

    A row is looked at in several views, and the score is the mean of its surprise in them,
    ``s_k(x) = -log P(v_k(X) >= v_k(x))`` by the training rows. What the views are depends on these:

    - ``training="normal"``: none of them is an anomaly. The density, and the distance to the
      nearest training row, in deviations of the columns and in their normal scores: a row is
      strange if it is improbable, or like none that was seen.
    - ``training="unlabelled"``: some may be. The distance to the nearest of four rows and of eight,
      drawn again and again, to neighbours among all, one Gaussian of the columns' normal
      scores, and the density. What is flexible learns a cluster of anomalies among its training
      rows, which few rows hardly ever hold and a stiff density cannot follow; these do not see the
      anomaly between two clusters.

    Beyond the last training row ``s_k`` goes on in proportion to ``v_k``. Training rows are scored
    by what has not seen them (the density of more than 2,500 unlabelled rows excepted).

    :meth:`p_values` says how often a normal row is as strange. With ``"normal"`` that is exact for
    rows that could change places with those of training: the density stays as it is trained by
    folds (``EnergyDensity.fit(keep_folds=True)``), of which each is scored by those who have not
    seen it. With ``"unlabelled"`` the anomalies among the training rows make p-values too large.

    Attributes after ``fit``: ``decision_scores_`` of the training rows, the ``views_`` behind
    them and their ``view_names_``, ``threshold_``, ``labels_`` and the fitted density
    ``density_``. PyOD is not needed.

    Args:
        density: an :class:`~selfnorm.EnergyDensity`, which is cloned; ``None``: with its defaults.
        training: what the training rows are, ``"normal"`` or ``"unlabelled"``.
        contamination: share of the training rows above the threshold: with ``"normal"`` the rate of
            false alarms among normal rows.

    Example:
        >>> X = np.random.default_rng(0).normal(size=(200, 2))
        >>> density = EnergyDensity(max_steps=20, random_state=0)
        >>> detector = OutlierDetector(density, contamination=0.05).fit(X)
        >>> int(detector.labels_.sum()), detector.predict([[9.0, 9.0], [0.0, 0.0]]).tolist()
        (10, [1, 0])
    """

    _views: ClassVar[dict[str, type[Strangeness]]] = {"normal": Novelty, "unlabelled": Stiff}

    def __init__(
        self,
        density: EnergyDensity | None = None,
        *,
        training: str = "unlabelled",
        contamination: float = 0.1,
    ) -> None:
        self.density = density
        self.training = training
        self.contamination = contamination

    @whole_or_not_at_all
    def fit(self, X: TableLike, y: object = None) -> OutlierDetector:  # noqa: ARG002 PyOD's signature
        """Fit the density to the rows of a table, outliers among them or not."""
        if not 0 < self.contamination <= 0.5:
            raise DataError(f"contamination must be in (0, 0.5], got {self.contamination}")
        if self.training not in self._views:
            raise DataError(f"training must be 'normal' or 'unlabelled', got {self.training!r}")
        keep_folds = self.training == "normal"
        self.density_ = clone(self.density or EnergyDensity()).fit(X, keep_folds=keep_folds)
        with on_cpu():
            self._strangeness = self._views[self.training](self.density_, X)
        self.views_, self.decision_scores_ = self._strangeness.views, self._strangeness.scores
        self.view_names_ = self._strangeness.names
        if keep_folds:
            self._check_rate("contamination", self.contamination)
        self.threshold_ = float(np.quantile(self.decision_scores_, 1 - self.contamination))
        self.labels_ = (self.decision_scores_ > self.threshold_).astype(int)
        return self

    @on_cpu()
    def views(self, X: TableLike) -> np.ndarray:
        """``(n, V)``: how strange rows are in each view, in units of the view.

        Unlabelled: distance to one of four rows, of eight, to neighbours; Gaussian of normal
        scores, density. Normal: distance to the nearest row in deviations, in normal scores;
        density.
        """
        check_is_fitted(self, "density_")
        return np.asarray(self._strangeness.views_of(X).mean(0))

    def decision_function(self, X: TableLike) -> np.ndarray:
        """How strange rows are ``(n,)``: mean of their surprise in all views, in nats."""
        return np.asarray(self._scores(X).mean(0))

    def predict(self, X: TableLike) -> np.ndarray:
        """1 for outliers, 0 for others."""
        return (self.decision_function(X) > self.threshold_).astype(int)

    def fit_predict(self, X: TableLike, y: object = None) -> np.ndarray:
        """Fit to the rows of a table: 1 for outliers among them, 0 for others."""
        return self.fit(X, y).labels_

    def predict_proba(self, X: TableLike, method: str = "linear") -> np.ndarray:
        """``(n, 2)``: PyOD's shares of normal and strange, by scores between those of training.

        ``"linear"``: from the least of them to the largest; ``"unify"``: by the error function of
        their mean and deviation. They are no probabilities: see :meth:`p_values`.
        """
        check_is_fitted(self, "density_")
        seen, scores = self.decision_scores_, self.decision_function(X)
        if method == "linear":
            strange = (scores - seen.min()) / max(float(np.ptp(seen)), 1e-12)
        elif method == "unify":
            strange = erf((scores - seen.mean()) / (max(float(seen.std()), 1e-12) * np.sqrt(2)))
        else:
            raise DataError(f"method must be 'linear' or 'unify', got {method!r}")
        strange = np.clip(strange, 0.0, 1.0)
        return np.column_stack([1 - strange, strange])

    def p_values(
        self,
        X: TableLike,
        weights: tuple[ArrayLike, ArrayLike] | None = None,
        *,
        break_ties: bool = True,
        random_state: RandomState = 0,
    ) -> np.ndarray:
        """``(n,)``: how often a normal row is as strange as each of these.

        Conformal: the rank of a score among those of the training rows. If a row is as these are,
        ``P(p <= a) = a`` for every ``a``, whatever the density. For that each row is judged by one
        of the folds, and ties are broken, at random: ``random_state``. ``weights``, of the training
        rows and of those of ``X``: how much likelier each is where normal rows come from now than
        it was where those of training did. ``break_ties=False`` counts ties in full, and the row
        itself: then ``p`` is ``1 / (n + 1)`` at least, and ``P(p <= a) <= a``.
        """
        scores = self._scores(X)
        n = scores.shape[1]
        rng = np.random.default_rng(seed_of(random_state))
        judge, ties = rng.integers(len(scores), size=n), rng.random((n,))
        ties = ties if break_ties else np.ones(n)
        counts = None
        if weights is not None:
            of_training, of_rows = weights
            n_training = len(self.decision_scores_)
            counts = checked_weights(of_training, n_training), checked_weights(of_rows, n)
            if not counts[0].any():
                raise DataError("weights of the training rows are all zero: none calibrates")
        return conformal(self.decision_scores_, scores[judge, np.arange(n)], ties, counts)

    def discoveries(
        self, X: TableLike, fdr: float = 0.1, *, random_state: RandomState = 0
    ) -> np.ndarray:
        """Numbers of the rows that are called anomalies, strangest first.

        As many as Benjamini and Hochberg allow, so that on average at most the share ``fdr`` of
        them is normal. That holds if normal rows are as those of training are, and independent of
        each other (Bates et al., 2023); how strange anomalies are does not matter. Ties count in
        full: of strange rows beyond all of training several would else have small p-values at once.
        """
        check_is_fitted(self, "density_")
        if not 0 < fdr < 1:
            raise DataError(f"fdr must be in (0, 1), got {fdr}")
        self._check_rate("fdr", fdr)
        p = self.p_values(X, break_ties=False, random_state=random_state)
        chosen = benjamini_hochberg(p, fdr)
        rows, scores = np.flatnonzero(chosen), self.decision_function(X)
        return rows[np.argsort(-scores[rows], kind="stable")]

    @on_cpu()
    def _scores(self, X: TableLike) -> np.ndarray:
        """``(K, n)``: scores by each judge."""
        check_is_fitted(self, "density_")
        return self._strangeness.scores_of(self._strangeness.views_of(X))

    def _check_rate(self, name: str, rate: float) -> None:
        """Refuse a rate that so few calibration rows cannot keep."""
        n = len(self.decision_scores_)
        if rate * (n + 1) < 1:
            raise DataError(
                f"{name}={rate:g} takes {int(np.ceil(1 / rate)) - 1:,} training rows; "
                f"{n:,} can promise {1 / (n + 1):.2g} at the least"
            )
