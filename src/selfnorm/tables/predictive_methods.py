"""What a fitted regressor can tell of ``y`` given ``x``, in the units of ``y``."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from selfnorm._context import seeded
from selfnorm._inputs import refuse_text
from selfnorm.conditional import PredictiveModel, PredictiveTable
from selfnorm.errors import DataError
from selfnorm.evaluation import Bounds

__all__ = ["PredictiveMixin"]


class PredictiveMixin:
    """Predictions from ``_predictive``, with the scales of inputs and targets undone."""

    _predictive: PredictiveModel
    _x_center: np.ndarray
    _x_scale: np.ndarray
    _y_center: np.ndarray
    _y_scale: np.ndarray
    _flat_target: bool
    _one_target: bool
    n_outputs_: int
    label_step_: float

    def predict(self, X: ArrayLike) -> np.ndarray:
        """Mean of ``p(y|x)``: ``(n,)``, or ``(n, d)`` for several targets."""
        z = self._inputs(X)
        means = self._predictive.moments(z).numpy() * self._y_scale + self._y_center
        return means[:, 0] if self._flat_target else means

    def predict_mode(self, X: ArrayLike) -> np.ndarray:
        """The label of highest density, ``(n,)``."""
        return self._in_units(self._tables(X, lambda table, _: table.mode()))

    def predict_quantiles(self, X: ArrayLike, q: ArrayLike = (0.05, 0.5, 0.95)) -> np.ndarray:
        """Quantiles ``(n, len(q))`` at levels between 0 and 1."""
        levels = torch.from_numpy(np.atleast_1d(np.asarray(q, dtype=np.float64)))
        if levels.ndim != 1 or not bool(((levels > 0) & (levels < 1)).all()):
            raise DataError(
                f"quantile levels must lie between 0 and 1, got {np.asarray(q).tolist()}"
            )
        return self._in_units(self._tables(X, lambda table, _: table.quantile(levels)))

    def predict_interval(
        self, X: ArrayLike, coverage: float = 0.9, kind: str = "central"
    ) -> np.ndarray:
        """``(n, 2)`` ends of an interval that holds ``coverage`` of the mass.

        ``kind="central"`` leaves equal mass on both sides; ``"highest_density"`` is the shortest
        interval. For laws with several modes see :meth:`highest_density_regions`.
        """
        if kind not in ("central", "highest_density"):
            raise DataError(f'kind must be "central" or "highest_density", not {kind!r}')
        name = "central_interval" if kind == "central" else "shortest_interval"
        return self._in_units(self._tables(X, lambda table, _: getattr(table, name)(coverage)))

    def highest_density_regions(self, X: ArrayLike, coverage: float = 0.9) -> list[np.ndarray]:
        """For every input the intervals ``(k, 2)`` of highest density that hold ``coverage``."""
        regions: list[np.ndarray] = []

        def collect(table: PredictiveTable, _: slice) -> Tensor:
            regions.extend(self._in_units(r) for r in table.highest_density_regions(coverage))
            return torch.zeros(len(table.y))

        self._tables(X, collect)
        return regions

    def log_prob(self, X: ArrayLike, y: ArrayLike, method: str = "exact") -> np.ndarray:
        """``log p(y|x)`` of pairs, ``(n,)``, in the units of ``y``.

        ``method="exact"`` normalises by quadrature, ``"learned"`` by ``b(x)``, which is faster.
        """
        if method not in ("exact", "learned"):
            raise DataError(f'method must be "exact" or "learned", not {method!r}')
        z, t = self._pairs(X, y)
        log_p = self._predictive.log_prob(z, t, learned=method == "learned")
        return log_p.numpy() - np.log(self._y_scale).sum()

    def log_mass(self, X: ArrayLike, y: ArrayLike) -> np.ndarray:
        """Log-probability of the step around ``y`` for discrete targets, ``(n,)``."""
        self._need_one_target("log_mass")
        if not self.label_step_ > 0:
            raise DataError("the target is continuous: it has a density (log_prob), no mass")
        values = np.asarray(y, dtype=np.float64).reshape(-1)
        ends = values[:, None] + 0.5 * self.label_step_ * np.array([-1.0, 1.0])
        below, above = self.cdf(X, ends).T
        return np.log(np.maximum(above - below, 1e-300))

    def pdf(self, X: ArrayLike, grid: ArrayLike) -> np.ndarray:
        """Density ``(n, g)`` on a grid ``(g,)`` or on one grid per row ``(n, g)``."""
        self._need_one_target("pdf")
        z = self._inputs(X)
        t = self._targets(self._grid(grid, len(z)).T.reshape(-1)).view(-1, len(z), 1)
        return self._predictive.log_prob(z, t).exp().numpy().T / self._y_scale[0]

    def cdf(self, X: ArrayLike, grid: ArrayLike) -> np.ndarray:
        """Distribution function ``(n, g)`` on a grid ``(g,)`` or ``(n, g)``."""
        n = len(self._inputs(X))
        values = self._grid(grid, n)
        t = torch.from_numpy((values - self._y_center[0]) / self._y_scale[0])
        return self._tables(X, lambda table, rows: table.cdf_at(t[rows])).numpy()

    def crps(self, X: ArrayLike, y: ArrayLike) -> np.ndarray:
        """Continuous ranked probability score of pairs, ``(n,)``, in the units of ``y``."""
        t = self._pairs(X, y)[1][:, 0]
        score = self._tables(X, lambda table, rows: table.crps(t[rows]))
        return score.numpy() * self._y_scale[0]

    def pit_and_crps(self, X: ArrayLike, y: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """``F(y|x)`` and the CRPS of pairs, from one pass over the tables."""
        t = self._pairs(X, y)[1]

        def both(table: PredictiveTable, rows: slice) -> Tensor:
            return torch.stack([table.cdf_at(t[rows])[:, 0], table.crps(t[rows, 0])], dim=-1)

        pit, score = self._tables(X, both).numpy().T
        return pit, score * self._y_scale[0]

    def without_energy(self) -> Any:
        """A copy with all energies at zero: the ensemble of mixture density networks alone."""
        check_is_fitted(self)
        twin = copy.deepcopy(self)
        twin._predictive.drop_energy()
        return twin

    def sample(self, X: ArrayLike, n: int = 1, random_state: Any = None) -> np.ndarray:
        """``(n_rows, n)`` labels drawn from ``p(y|x)``; ``(n_rows, n, d)`` for several targets."""
        if n < 1:
            raise DataError(f"n must be at least 1, got {n}")
        z = self._inputs(X)
        seed = int(check_random_state(random_state).randint(2**31 - 1))
        with seeded(seed):
            drawn = self._predictive.sample(z, n).movedim(0, 1).numpy()
        drawn = drawn * self._y_scale + self._y_center
        return drawn[..., 0] if self._one_target else drawn

    def bounds(
        self, X: ArrayLike, y: ArrayLike, n_samples: int = 2000, random_state: Any = None
    ) -> Bounds:
        """Lower and upper bound of the mean log-density with the learned ``b(x)``."""
        z, t = self._pairs(X, y)
        seed = int(check_random_state(random_state).randint(2**31 - 1))
        with seeded(seed):
            found = self._predictive.bounds(z, t, n_samples)
        shift = float(np.log(self._y_scale).sum())
        return dataclasses.replace(found, lower=found.lower - shift, upper=found.upper - shift)

    def score(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> float:
        """Mean log-density of the pairs (nats per row): higher is better."""
        weights = None if sample_weight is None else np.asarray(sample_weight, dtype=np.float64)
        return float(np.average(self.log_prob(X, y), weights=weights))

    def _inputs(self, X: ArrayLike) -> Tensor:
        check_is_fitted(self)
        refuse_text(X)
        rows: Any = validate_data(self, X, reset=False, dtype=np.float64)
        return torch.from_numpy((rows - self._x_center) / self._x_scale)

    def _pairs(self, X: ArrayLike, y: ArrayLike) -> tuple[Tensor, Tensor]:
        """Inputs and as many targets, standardised."""
        z, t = self._inputs(X), self._targets(y)
        if len(z) != len(t):
            raise DataError(f"X has {len(z)} rows but y has {len(t)}")
        return z, t

    def _targets(self, y: ArrayLike) -> Tensor:
        y = np.asarray(y, dtype=np.float64)
        if y.ndim == 0:
            raise DataError("y must hold one target per row of X: write [y] for a single row")
        y = y.reshape(len(y), -1)
        if y.shape[1] != self.n_outputs_:
            raise DataError(
                f"y has {y.shape[1]} columns, the model was fitted to {self.n_outputs_}"
            )
        if not np.isfinite(y).all():
            raise DataError("y holds NaN or infinite values: drop those rows")
        return torch.from_numpy((y - self._y_center) / self._y_scale)

    def _tables(self, X: ArrayLike, take: Any) -> Tensor:
        z = self._inputs(X)
        self._need_one_target("this")
        return self._predictive.over_tables(z, take)

    def _need_one_target(self, what: str) -> None:
        check_is_fitted(self)
        if self.n_outputs_ != 1:
            raise DataError(
                f"{what} is for one target; for {self.n_outputs_} use log_prob, sample or predict"
            )

    def _grid(self, grid: ArrayLike, n: int) -> np.ndarray:
        values = np.asarray(grid, dtype=np.float64)
        if values.ndim == 1:
            values = np.broadcast_to(values, (n, len(values)))
        if values.ndim != 2 or len(values) != n:
            raise DataError(f"expected a grid (g,) or ({n}, g), got shape {values.shape}")
        return values

    def _in_units(self, values: Any) -> np.ndarray:
        return np.asarray(values) * self._y_scale[0] + self._y_center[0]
