"""How strange rows of a table are in several views, and what these come to.

A view measures in units of its own: a log-density, a distance. It becomes the surprise of a row,
``s(x) = -log P(v(X) >= v(x))`` by the training rows, and goes on in proportion to ``v`` beyond the
last of them, as it does in an exponential tail. The score of a row is the mean of its surprises.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch
from sklearn.metrics import pairwise_distances_chunked
from sklearn.neighbors import NearestNeighbors
from torch import Tensor

from selfnorm._context import seeded
from selfnorm.columns import TableLike
from selfnorm.errors import DataError
from selfnorm.tables import members
from selfnorm.tables.density import EnergyDensity
from selfnorm.tables.distribution import comparable
from selfnorm.tables.places import CellPlaces, Places

N_FOLDS = 5  # in which training rows are scored by the Gaussian
FEW, DRAWS = (4, 8), 64  # rows of a small draw, and how many draws there are
NEIGHBOURS = 5
MOST_NEIGHBOURS = 10_000  # rows that are kept to be neighbours
TAIL = 0.1  # share of the training rows whose excess says how scores go on beyond the last
FARTHEST = 1e6  # nats of such an excess, where training rows hardly differ


class Strangeness(ABC):
    """Views of the rows of a table, by a density fitted to it and by the training rows.

    Attributes:
        density: the fitted density.
        views: ``(n, V)`` of the training rows, by what has not seen them.
        scores: ``(n,)`` of the same, in nats.
    """

    names: tuple[str, ...]
    views: np.ndarray
    scores: np.ndarray

    def __init__(self, density: EnergyDensity, X: TableLike) -> None:
        self.density = density
        self._fit(X, self._coded(X))

    @abstractmethod
    def _fit(self, X: TableLike, rows: Tensor) -> None:
        """Views and scores of the training rows."""

    @abstractmethod
    def views_of(self, X: TableLike) -> np.ndarray:
        """``(K, n, V)``: views of a table, by each of ``K`` judges."""

    @abstractmethod
    def scores_of(self, views: np.ndarray) -> np.ndarray:
        """``(K, n)``: what they come to."""

    def _coded(self, X: TableLike) -> Tensor:
        return torch.from_numpy(self.density.schema_.encode(X)[0])


class Stiff(Strangeness):
    """Views that anomalies among the training rows do not mislead: few rows, stiff densities."""

    names = ("one of 4", "one of 8", "neighbours", "Gaussian", "density")

    def _fit(self, X: TableLike, rows: Tensor) -> None:
        parts = self.density.schema_.parts
        alike, kind = torch.ones(len(rows), dtype=torch.float64), members.Kind(1, straight=False)
        columns = members.columns_of(parts, rows, straight=False)
        self._gaussian = members.simple_density(kind, columns, rows, alike, seed=0).eval()
        self._neighbours = _Neighbours(Places(parts, rows), rows)
        with seeded(0):
            folds = members.folds_of(len(rows), N_FOLDS, None)
        log_p = members.held_out_scores([kind], parts, rows, alike, folds, seed=0)[kind]
        of_density = self.density.unseen_decision_
        if not np.isfinite(of_density).all():
            of_density = self.density.decision_function(X)
        self.views = self._views(rows, self._neighbours.apart(), log_p, of_density)
        self._sorted = np.sort(self.views, axis=0)
        self.scores = self.scores_of(self.views[None])[0]

    def views_of(self, X: TableLike) -> np.ndarray:
        """By one judge."""
        rows = self._coded(X)
        log_p = members.log_density(self._gaussian, rows).numpy()
        apart = self._neighbours.apart(rows)
        return self._views(rows, apart, log_p, self.density.decision_function(X))[None]

    def _views(
        self, rows: Tensor, apart: np.ndarray, log_p: np.ndarray, of_density: np.ndarray
    ) -> np.ndarray:
        """The views ``(n, 5)`` of coded rows from what is known of them."""
        gaussian = -log_p - comparable(self._gaussian.columns, rows).numpy()
        return np.column_stack([apart, gaussian, -of_density])

    def scores_of(self, views: np.ndarray) -> np.ndarray:
        """Mean over views."""
        total = np.zeros(views.shape[1])
        for seen, own in zip(self._sorted.T, views[0].T, strict=True):
            total += _surprise(seen, own)
        return (total / views.shape[2])[None]


class Novelty(Strangeness):
    """Views of rows beside those of training that are normal: the density, and the nearest of them.

    The density has several judges. Each has not seen one fold of the training rows, which it
    scores as it scores rows to come; of the distance to the nearest row a training row is left out.
    """

    names = ("nearest", "nearest by ranks", "density")

    def _fit(self, X: TableLike, rows: Tensor) -> None:
        folds = self.density.folds_
        if folds is None:
            raise DataError(
                f"training='normal' takes folds of at least 15 rows, and the table has {len(rows)}"
            )
        self._folds, self._places = folds, CellPlaces(self.density.schema_, X)
        numbers = self._places.numbers_of(X)
        self._nearest = [_Nearest(self._places.deviations(numbers), "manhattan")]
        self._nearest += [_Nearest(self._places.normal_scores(numbers), "manhattan")]
        apart = [nearest.apart() for nearest in self._nearest]
        log_p = self._rounded(folds.own(rows), rows)
        self.views = np.column_stack([*apart, -log_p])
        self._sorted = [[np.sort(view)] * len(folds) for view in self.views.T[:-1]]
        self._sorted += [[np.sort(-log_p[folds.of_row == k]) for k in range(len(folds))]]
        self.scores = np.empty(len(rows))
        for k in range(len(folds)):
            own = folds.of_row == k
            self.scores[own] = self._score(self.views[own], k)

    def views_of(self, X: TableLike) -> np.ndarray:
        """By each fold."""
        rows, numbers = self._coded(X), self._places.numbers_of(X)
        of_places = self._places.deviations(numbers), self._places.normal_scores(numbers)
        apart = [near.apart(at) for near, at in zip(self._nearest, of_places, strict=True)]
        log_p = self._rounded(self._folds.log_prob(rows), rows)
        return np.stack([np.column_stack([*apart, -of_fold]) for of_fold in log_p])

    def scores_of(self, views: np.ndarray) -> np.ndarray:
        """By each fold."""
        return np.stack([self._score(of_fold, k) for k, of_fold in enumerate(views)])

    def _score(self, views: np.ndarray, fold: int) -> np.ndarray:
        """``(n,)``, alike for rows that are alike: ties are ties."""
        scores = np.zeros(len(views))
        for seen, view in zip(self._sorted, views.T, strict=True):
            scores += _surprise(seen[fold], view)
        return scores / len(self.names)

    def _rounded(self, log_p: np.ndarray, rows: Tensor) -> np.ndarray:
        """Comparable with each other; equal rows are equal, to the digits that batches agree in."""
        return np.round(log_p + self.density.distribution_.comparable(rows).numpy(), 3)


def _surprise(seen: np.ndarray, values: np.ndarray) -> np.ndarray:
    """``(n,)``: of values, by those that were seen, sorted."""
    n = len(seen)
    as_strange = n - np.searchsorted(seen, values)
    excess = np.minimum(np.maximum(values - seen[-1], 0.0) / _scale(seen), FARTHEST)
    return np.asarray(excess - np.log((as_strange + 0.5) / (n + 1)))


def _scale(seen: np.ndarray) -> float:
    """Mean excess of the last of sorted values."""
    last = seen[-max(1, round(TAIL * len(seen))) :]
    return max(float((last - last[0]).mean()), 1e-12)


class _Nearest:
    """How far rows are from the nearest of training; of a large table some rows stand for all."""

    def __init__(self, places: np.ndarray, metric: str = "minkowski") -> None:
        self.places = places
        self.kept = np.random.default_rng(0).permutation(len(places))[:MOST_NEIGHBOURS]
        self.own = np.zeros(len(places), dtype=bool)
        self.own[self.kept] = True
        self.tree = NearestNeighbors(n_neighbors=1, metric=metric).fit(places[self.kept])

    def apart(self, places: np.ndarray | None = None, nearest: int = 1) -> np.ndarray:
        """``(n,)``: of training rows, ``places=None``, the row itself is not counted."""
        most = self.tree.n_samples_fit_
        at = self.places if places is None else places
        distance = self.tree.kneighbors(at, min(nearest + 1, most))[0]
        last = np.full(len(at), min(nearest, most) - 1)
        if places is None:  # the nearest of these is the row itself
            last += self.own & (most > nearest)
        return np.asarray(distance[np.arange(len(at)), last])


class _Neighbours:
    """How far rows are from few of those of training, and from the fifth nearest of all."""

    def __init__(self, places: Places, rows: Tensor) -> None:
        self.places = places
        self.rows = places.deviations(places.numbers(rows))
        self.nearest = _Nearest(self.rows)
        rng = np.random.default_rng(0)
        rng.permutation(len(rows))
        self.few = [
            np.stack([rng.choice(len(rows), min(n, len(rows) - 1), False) for _ in range(DRAWS)])
            for n in FEW
        ]

    def apart(self, rows: Tensor | None = None) -> np.ndarray:
        """``(n, 3)``: log of the distance to one of few, of more and to the fifth nearest of all.

        Of training rows, ``rows=None``, the row itself is not counted.
        """
        places = None if rows is None else self.places.deviations(self.places.numbers(rows))
        nearest = self.nearest.apart(places, NEIGHBOURS)
        at = self.rows if places is None else places
        few = [self._from_few(at, drawn, own=rows is None) for drawn in self.few]
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
