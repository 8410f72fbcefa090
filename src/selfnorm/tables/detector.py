"""Anomaly scores by the conventions of PyOD, whose tools they then work with."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, clone
from sklearn.utils.validation import check_is_fitted

from selfnorm.errors import DataError
from selfnorm.tables.density import EnergyDensity


class OutlierDetector(BaseEstimator):
    """A density as a detector of PyOD's kind: larger scores are stranger, outliers are 1.

    Attributes after ``fit``: ``decision_scores_`` of the training rows, ``threshold_``, ``labels_``
    and the fitted density ``density_``. PyOD itself is not needed.

    Args:
        density: an :class:`~selfnorm.EnergyDensity`, which is cloned; ``None``: with its defaults.
        contamination: share of the training rows above the threshold.

    Example:
        >>> X = np.random.default_rng(0).normal(size=(200, 2))
        >>> density = EnergyDensity(max_steps=20, random_state=0)
        >>> detector = OutlierDetector(density, contamination=0.05).fit(X)
        >>> int(detector.labels_.sum()), detector.predict([[9.0, 9.0], [0.0, 0.0]]).tolist()
        (10, [1, 0])
    """

    def __init__(self, density: EnergyDensity | None = None, *, contamination: float = 0.1) -> None:
        self.density = density
        self.contamination = contamination

    def fit(self, X: Any, y: Any = None) -> OutlierDetector:  # noqa: ARG002 PyOD's signature
        """Fit the density to the rows of a table, outliers among them or not."""
        if not 0 < self.contamination <= 0.5:
            raise DataError(f"contamination must be in (0, 0.5], got {self.contamination}")
        self.density_ = clone(self.density or EnergyDensity()).fit(X)
        self.decision_scores_ = self.decision_function(X)
        self.threshold_ = float(np.quantile(self.decision_scores_, 1 - self.contamination))
        self.labels_ = (self.decision_scores_ > self.threshold_).astype(int)
        return self

    def decision_function(self, X: Any) -> np.ndarray:
        """How strange rows are ``(n,)``: minus the density's own ``decision_function``."""
        check_is_fitted(self, "density_")
        return -self.density_.decision_function(X)

    def predict(self, X: Any) -> np.ndarray:
        """1 for outliers, 0 for others."""
        return (self.decision_function(X) > self.threshold_).astype(int)
