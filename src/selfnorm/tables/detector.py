"""Anomaly scores by the conventions of PyOD, whose tools they then work with."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from scipy.special import log_ndtr
from sklearn.base import BaseEstimator, clone
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from selfnorm._context import seeded
from selfnorm.columns import GAP, CodedColumns
from selfnorm.errors import DataError
from selfnorm.tables import answers, members
from selfnorm.tables.density import EnergyDensity

N_FOLDS = 5  # in which training rows are scored by the stiff laws
TAIL = 0.1  # share of the training rows whose excess says how scores go on beyond the last


class OutlierDetector(BaseEstimator):
    r"""A detector of PyOD's kind: larger scores are stranger, outliers are 1.

    A row is looked at in four degrees of detail: cell by cell, by one Gaussian law of the columns
    and one of their normal scores, and by the fitted density. A density that is flexible enough
    learns a cluster of anomalies among its training rows, which a stiff law cannot follow; a stiff
    law does not see the anomaly between two clusters. Each view tells how many of the training rows
    are at most as likely, ``s_k(x) = -log P(log p_k(X) <= log p_k(x))``, whatever its units, and
    the score is the mean of these. Beyond the last training row ``s_k`` goes on in proportion to
    the log-density, as it does in an exponential tail. Training rows are scored by laws that have
    not seen them (the density of more than 2,500 rows excepted): a row is no evidence for itself.

    Attributes after ``fit``: ``decision_scores_`` of the training rows and the ``views_`` behind
    them, ``threshold_``, ``labels_`` and the fitted density ``density_``. PyOD is not needed.

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
        parts, rows = self.density_.schema_.parts, self._coded(X)
        alike = torch.ones(len(rows), dtype=torch.float64)
        kinds = [members.Kind(1, straight=straight) for straight in (True, False)]
        self._stiff = []
        for kind in kinds:
            columns = members.columns_of(parts, rows, straight=kind.straight)
            self._stiff.append(members.simple_density(kind, columns, rows, alike, seed=0).eval())
        with seeded(0):
            folds = members.folds_of(len(rows), N_FOLDS, None)
        unseen = members.held_out_scores(kinds, parts, rows, alike, folds, seed=0)
        of_density = self.density_.unseen_decision_
        if not np.isfinite(of_density).all():
            of_density = self.density_.decision_function(X)
        self.views_ = self._views(rows, [*unseen.values()], of_density)
        self._sorted = np.sort(self.views_, axis=0)
        self.decision_scores_ = self._surprise(self.views_)
        self.threshold_ = float(np.quantile(self.decision_scores_, 1 - self.contamination))
        self.labels_ = (self.decision_scores_ > self.threshold_).astype(int)
        return self

    def views(self, X: Any) -> np.ndarray:
        """``(n, 4)``: minus the log-likelihood of rows in each view, up to a constant of the view.

        Cell by cell, Gaussian of columns, Gaussian of normal scores, fitted density.
        """
        check_is_fitted(self, "density_")
        rows = self._coded(X)
        of_stiff = [members.log_density(law, rows).numpy() for law in self._stiff]
        return self._views(rows, of_stiff, self.density_.decision_function(X))

    def decision_function(self, X: Any) -> np.ndarray:
        """How strange rows are ``(n,)``: mean of their surprise in all views, in nats."""
        return self._surprise(self.views(X))

    def predict(self, X: Any) -> np.ndarray:
        """1 for outliers, 0 for others."""
        return (self.decision_function(X) > self.threshold_).astype(int)

    def _coded(self, X: Any) -> Tensor:
        return torch.from_numpy(self.density_.schema_.encode(X)[0])

    def _views(
        self, rows: Tensor, of_stiff: list[np.ndarray], of_density: np.ndarray
    ) -> np.ndarray:
        """The views ``(n, 4)`` of coded rows from what the laws say of them."""
        cells = _surprise_of_cells(self._stiff[-1].columns, rows)
        stiff = [
            -log_p - answers.comparable(law.columns, rows).numpy()
            for law, log_p in zip(self._stiff, of_stiff, strict=True)
        ]
        return np.stack([cells, *stiff, -of_density], 1)

    def _surprise(self, views: np.ndarray) -> np.ndarray:
        """``(n,)``: mean over views of ``-log`` of the share of training rows as strange."""
        n, total = len(self._sorted), np.zeros(len(views))
        for seen, own in zip(self._sorted.T, views.T, strict=True):
            as_strange = n - np.searchsorted(seen, own)
            last = seen[-max(1, round(TAIL * n)) :]
            scale = max(float((last - last[0]).mean()), 1e-12)
            total += np.maximum(own - seen[-1], 0.0) / scale - np.log((as_strange + 0.5) / (n + 1))
        return total / views.shape[1]


def _surprise_of_cells(columns: CodedColumns, rows: Tensor) -> np.ndarray:
    """``(n,)``: sum over the parts of ``-log P(as rare as this)`` of coded rows ``(n, p, 2)``.

    Rarer are codes of a smaller share, and numbers further out than this one.
    """
    packed, shares = columns.pack(rows)[0], columns.log_share.exp()
    total = np.zeros(len(rows))
    for j, part in enumerate(columns.parts):
        of = shares[j, : part.n_codes + part.rest]
        rarer = torch.stack([of[of < each].sum() for each in of])
        code, z = packed[:, j, 0].long(), packed[:, j, 1].numpy()
        place = code.clamp(0, len(of) - 1)
        tail = (rarer + of)[place].numpy()
        if part.rest:  # codes as rare as numbers are not counted twice
            beyond = rarer[-1].item() + of[-1].item() * 2 * np.exp(log_ndtr(-np.abs(z)))
            tail = np.where(code == part.n_codes, beyond, tail)
        never = 0.5 / len(rows)
        tail = np.where((code < 0).numpy(), np.where(code == GAP, 1.0, never), tail)
        total -= np.log(np.maximum(tail, 1e-300))
    return total
