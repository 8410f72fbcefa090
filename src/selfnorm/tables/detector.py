"""Anomaly scores by the conventions of PyOD, whose tools they then work with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from sklearn.base import BaseEstimator, clone
from sklearn.metrics import pairwise_distances_chunked
from sklearn.neighbors import NearestNeighbors
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from selfnorm._context import on_cpu, seeded, whole_or_not_at_all
from selfnorm.columns import GAP, Part, TableLike
from selfnorm.errors import DataError
from selfnorm.tables import members
from selfnorm.tables.density import EnergyDensity
from selfnorm.tables.distribution import comparable

N_FOLDS = 5  # in which training rows are scored by the Gaussian
FEW, DRAWS = (4, 8), 64  # rows of a small draw, and how many draws there are
NEIGHBOURS = 5
MOST_NEIGHBOURS = 10_000  # rows that are kept to be neighbours
TAIL = 0.1  # share of the training rows whose excess says how scores go on beyond the last


class OutlierDetector(BaseEstimator):
    r"""A detector of PyOD's kind: larger scores are stranger, outliers are 1.

    A row is looked at in five ways: by its distance to the nearest of four rows and of eight, drawn
    again and again, to its neighbours among all, by one Gaussian law of the columns' normal scores,
    and by the fitted density. What is flexible learns a cluster of anomalies among its training
    rows, which few rows hardly ever hold and a stiff law cannot follow; these do not see the
    anomaly between two clusters. Each view tells how many of the training rows are as strange,
    ``s_k(x) = -log P(v_k(X) >= v_k(x))``, whatever its units, and the score is the mean of these.
    Beyond the last training row ``s_k`` goes on in proportion to ``v_k``, as it does in an
    exponential tail. Training rows are scored by what has not seen them (the density of more than
    2,500 rows excepted): a row is no evidence for itself.

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

    @whole_or_not_at_all
    def fit(self, X: TableLike, y: object = None) -> OutlierDetector:  # noqa: ARG002 PyOD's signature
        """Fit the density to the rows of a table, outliers among them or not."""
        if not 0 < self.contamination <= 0.5:
            raise DataError(f"contamination must be in (0, 0.5], got {self.contamination}")
        self.density_ = clone(self.density or EnergyDensity()).fit(X)
        parts, rows = self.density_.schema_.parts, self._coded(X)
        alike, kind = torch.ones(len(rows), dtype=torch.float64), members.Kind(1, straight=False)
        columns = members.columns_of(parts, rows, straight=False)
        self._gaussian = members.simple_density(kind, columns, rows, alike, seed=0).eval()
        self._neighbours = _Neighbours(parts, rows)
        with seeded(0):
            folds = members.folds_of(len(rows), N_FOLDS, None)
        log_p = members.held_out_scores([kind], parts, rows, alike, folds, seed=0)[kind]
        of_density = self.density_.unseen_decision_
        if not np.isfinite(of_density).all():
            of_density = self.density_.decision_function(X)
        self.views_ = self._views(rows, self._neighbours.apart(), log_p, of_density)
        self._sorted = np.sort(self.views_, axis=0)
        self.decision_scores_ = self._surprise(self.views_)
        self.threshold_ = float(np.quantile(self.decision_scores_, 1 - self.contamination))
        self.labels_ = (self.decision_scores_ > self.threshold_).astype(int)
        return self

    @on_cpu()
    def views(self, X: TableLike) -> np.ndarray:
        """``(n, 5)``: how strange rows are in each view, in units of the view.

        Distance to one of four rows, of eight, to neighbours; Gaussian of normal scores, density.
        """
        check_is_fitted(self, "density_")
        rows = self._coded(X)
        log_p = members.log_density(self._gaussian, rows).numpy()
        apart = self._neighbours.apart(rows)
        return self._views(rows, apart, log_p, self.density_.decision_function(X))

    def decision_function(self, X: TableLike) -> np.ndarray:
        """How strange rows are ``(n,)``: mean of their surprise in all views, in nats."""
        return self._surprise(self.views(X))

    def predict(self, X: TableLike) -> np.ndarray:
        """1 for outliers, 0 for others."""
        return (self.decision_function(X) > self.threshold_).astype(int)

    def _coded(self, X: TableLike) -> Tensor:
        return torch.from_numpy(self.density_.schema_.encode(X)[0])

    def _views(
        self, rows: Tensor, apart: np.ndarray, log_p: np.ndarray, of_density: np.ndarray
    ) -> np.ndarray:
        """The views ``(n, 5)`` of coded rows from what is known of them."""
        gaussian = -log_p - comparable(self._gaussian.columns, rows).numpy()
        return np.column_stack([apart, gaussian, -of_density])

    def _surprise(self, views: np.ndarray) -> np.ndarray:
        """``(n,)``: mean over views of ``-log`` of the share of training rows as strange."""
        n, total = len(self._sorted), np.zeros(len(views))
        for seen, own in zip(self._sorted.T, views.T, strict=True):
            as_strange = n - np.searchsorted(seen, own)
            last = seen[-max(1, round(TAIL * n)) :]
            scale = max(float((last - last[0]).mean()), 1e-12)
            total += np.maximum(own - seen[-1], 0.0) / scale - np.log((as_strange + 0.5) / (n + 1))
        return total / views.shape[1]


class _Neighbours:
    """How far rows are from those of training, in deviations of the columns.

    Two levels of a category are as far apart as two rows of a number are on average; what is
    missing is at the mean. Of a large table some rows stand for all.
    """

    def __init__(self, parts: Sequence[Part], rows: Tensor) -> None:
        self.parts = parts
        places, hot = self._numbers(rows)
        self.mean = np.nan_to_num(np.nanmean(places, 0))
        spread = np.nanstd(places, 0)
        for which in np.unique(hot[hot >= 0]):  # the columns of one category share a unit
            spread[hot == which] = np.sqrt(max(np.square(spread[hot == which]).sum(), 1e-12))
        self.unit = np.where(spread > 0, spread, 1.0)
        self.rows = self._placed(places)
        rng = np.random.default_rng(0)
        kept = rng.permutation(len(rows))[:MOST_NEIGHBOURS]
        self.tree = NearestNeighbors(n_neighbors=1).fit(self.rows[kept])
        self.few = [
            np.stack([rng.choice(len(rows), min(n, len(rows) - 1), False) for _ in range(DRAWS)])
            for n in FEW
        ]
        self.own = np.zeros(len(rows), dtype=bool)
        self.own[kept] = True

    def _numbers(self, rows: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """``(n, D)``: a column for each number and each level, and of which category it is."""
        numbers, hot = [], []
        for j, part in enumerate(self.parts):
            code, number = rows[:, j].numpy().T
            if part.rest or part.values:
                numbers.append(part.numbers(code, number))
                hot.append(-1)
            else:
                for level in range(part.n_codes):
                    numbers.append(np.where(code == GAP, np.nan, code == level))
                    hot.append(j)
        return np.stack(numbers, 1).astype(np.float64), np.array(hot)

    def _placed(self, numbers: np.ndarray) -> np.ndarray:
        return np.nan_to_num((numbers - self.mean) / self.unit)

    def apart(self, rows: Tensor | None = None) -> np.ndarray:
        """``(n, 3)``: log of the distance to one of few, of more and to the fifth nearest of all.

        Of training rows, ``rows=None``, the row itself is not counted.
        """
        places = self.rows if rows is None else self._placed(self._numbers(rows)[0])
        most = self.tree.n_samples_fit_
        distance = self.tree.kneighbors(places, min(NEIGHBOURS + 1, most))[0]
        last = np.full(len(places), min(NEIGHBOURS, most) - 1)
        if rows is None:  # the nearest of these is the row itself
            last += self.own & (most > NEIGHBOURS)
        nearest = distance[np.arange(len(places)), last]
        few = [self._from_few(places, drawn, own=rows is None) for drawn in self.few]
        return np.log(np.stack([*few, nearest], 1) + 1e-9)

    def _from_few(self, places: np.ndarray, drawn: np.ndarray, *, own: bool) -> np.ndarray:
        """``(n,)``: mean over draws of the distance to the nearest row of the draw."""
        which = drawn.ravel()

        def nearest(distance: np.ndarray, start: int) -> np.ndarray:
            itself = np.flatnonzero((which >= start) & (which < start + len(distance)) & own)
            distance[which[itself] - start, itself] = np.inf
            return distance.reshape(len(distance), *drawn.shape).min(2).mean(1)

        parts = pairwise_distances_chunked(places, self.rows[which], reduce_func=nearest)
        return np.concatenate(list(parts))
