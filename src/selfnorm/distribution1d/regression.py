"""What a regressor answers that has a distribution of labels for every input."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from selfnorm._context import on_cpu
from selfnorm.distribution1d.distribution import Distribution1d
from selfnorm.errors import DataError
from selfnorm.evaluation import check_coverage


class PredictsDistributions(ABC):
    """Means, quantiles, intervals, densities, scores and draws of ``p(y|x)``.

    A model says how inputs are encoded, and what the distribution of one label is for each of
    them. Labels and distributions may have a scale of their own, see :meth:`_scaled`.

    Attributes:
        flat_target_: whether the targets of the fit were ``(n,)``.
    """

    flat_target_: bool

    @property
    @abstractmethod
    def _dim(self) -> int:
        """Number of label coordinates."""

    @abstractmethod
    def _encoded(self, X: ArrayLike) -> Tensor:
        """Checked inputs as the model takes them, a row each."""

    @abstractmethod
    def _pairs(self, X: ArrayLike, y: ArrayLike) -> tuple[Tensor, Tensor]:
        """Encoded inputs and as many scaled labels ``(n, d)``."""

    @abstractmethod
    def _distributions(self, inputs: Tensor) -> Iterator[tuple[slice, Distribution1d]]:
        """Distributions of one label in chunks of the encoded inputs."""

    @abstractmethod
    def _log_density(self, inputs: Tensor, labels: Tensor, *, learned: bool = False) -> Tensor:
        """``log p(y|x)`` ``(..., n)`` of scaled labels ``(..., n, d)``, in the units of ``y``.

        ``learned`` normalises by ``b(x)``. Of labels with cells it is the mass of a label's cell
        divided by the width.
        """

    @abstractmethod
    def _mean_of_several(self, inputs: Tensor) -> Tensor:
        """Means ``(n, d)`` of several labels."""

    def _quantiles_of_several(self, inputs: Tensor, levels: Tensor) -> Tensor:  # noqa: ARG002
        """Quantiles ``(n, m, d)`` of several labels, where a model has them."""
        raise self._not_one_label("a quantile")

    def _scaled(self, y: np.ndarray) -> Tensor:
        """Labels on the scale of the distributions."""
        return torch.from_numpy(np.array(y))  # a copy: arrays may be read-only

    def _in_units(self, labels: Tensor | np.ndarray) -> np.ndarray:
        """Labels of the distributions in the units of ``y``."""
        return torch.as_tensor(labels).cpu().numpy()

    @property
    def _unit(self) -> float:
        """Units of ``y`` in one of the distributions."""
        return 1.0

    def _not_one_label(self, what: str) -> DataError:
        return DataError(
            f"{what} is for one target; for {self._dim} use log_prob, sample or predict"
        )

    def _of_distributions(
        self, inputs: Tensor, take: Callable[[Distribution1d, slice], Tensor]
    ) -> Tensor:
        """``take(distributions, rows)`` of chunks of the inputs, joined: all may not fit."""
        if self._dim != 1:
            raise self._not_one_label("this")
        return torch.cat([take(part, rows) for rows, part in self._distributions(inputs)])

    @on_cpu()
    def predict(self, X: ArrayLike) -> np.ndarray:
        """Mean of ``p(y|x)``: ``(n,)``, or ``(n, d)`` for several targets."""
        inputs = self._encoded(X)
        if self._dim == 1:
            means = self._of_distributions(inputs, lambda part, _: part.mean)[:, None]
        else:
            means = self._mean_of_several(inputs)
        values = self._in_units(means)
        return values[:, 0] if self.flat_target_ else values

    @on_cpu()
    def predict_mode(self, X: ArrayLike) -> np.ndarray:
        """The label of highest density, ``(n,)``."""
        inputs = self._encoded(X)
        return self._in_units(self._of_distributions(inputs, lambda part, _: part.mode()))

    @on_cpu()
    def predict_quantiles(self, X: ArrayLike, q: ArrayLike = (0.05, 0.5, 0.95)) -> np.ndarray:
        """Quantiles ``(n, len(q))`` at levels between 0 and 1.

        Of several image labels those of each, ``(n, len(q), d)``.
        """
        levels = torch.from_numpy(np.atleast_1d(np.asarray(q, dtype=np.float64)))
        if levels.ndim != 1 or not bool(((levels > 0) & (levels < 1)).all()):
            raise DataError(
                f"quantile levels must lie between 0 and 1, got {np.asarray(q).tolist()}"
            )
        inputs = self._encoded(X)
        if self._dim > 1:
            return self._in_units(self._quantiles_of_several(inputs, levels))
        take = self._of_distributions(inputs, lambda part, _: part.quantile(levels))
        return self._in_units(take)

    @on_cpu()
    def predict_interval(
        self, X: ArrayLike, coverage: float = 0.9, kind: str = "central"
    ) -> np.ndarray:
        """``(n, 2)`` ends of an interval that holds ``coverage`` of the mass.

        ``kind="central"`` leaves equal mass on both sides; ``"highest_density"`` is the shortest
        interval. For distributions with several modes see :meth:`highest_density_regions`.
        """
        if kind not in ("central", "highest_density"):
            raise DataError(f'kind must be "central" or "highest_density", not {kind!r}')
        tail = 0.5 * (1 - check_coverage(coverage))
        if kind == "central":
            return self.predict_quantiles(X, (tail, 1 - tail))
        inputs = self._encoded(X)
        ends = self._of_distributions(inputs, lambda part, _: part.shortest_interval(coverage))
        return self._in_units(ends)

    @on_cpu()
    def highest_density_regions(self, X: ArrayLike, coverage: float = 0.9) -> list[np.ndarray]:
        """For every input the intervals ``(k, 2)`` of highest density that hold ``coverage``."""
        regions: list[np.ndarray] = []

        def collect(part: Distribution1d, _: slice) -> Tensor:
            regions.extend(self._in_units(r) for r in part.highest_density_regions(coverage))
            return part.mean

        self._of_distributions(self._encoded(X), collect)
        return regions

    @on_cpu()
    def log_prob(self, X: ArrayLike, y: ArrayLike, method: str = "exact") -> np.ndarray:
        """``log p(y|x)`` of pairs, ``(n,)``, in the units of ``y``.

        ``method="exact"`` normalises by quadrature, ``"learned"`` by ``b(x)``, which is faster. Of
        a whole-number target of a table it is the mass of the value (the integral over its cell)
        divided by the step.
        """
        if method not in ("exact", "learned"):
            raise DataError(f'method must be "exact" or "learned", not {method!r}')
        inputs, labels = self._pairs(X, y)
        log_p = self._log_density(inputs, labels, learned=method == "learned")
        return log_p.cpu().numpy()

    @on_cpu()
    def pdf(self, X: ArrayLike, grid: ArrayLike) -> np.ndarray:
        """Density ``(n, g)`` on a grid ``(g,)`` or on one grid per row ``(n, g)``."""
        inputs = self._encoded(X)
        labels = self._scaled_grid(grid, len(inputs)).T.unsqueeze(-1)
        return self._log_density(inputs, labels).exp().cpu().numpy().T

    @on_cpu()
    def cdf(self, X: ArrayLike, grid: ArrayLike) -> np.ndarray:
        """Distribution function ``(n, g)`` on a grid ``(g,)`` or ``(n, g)``."""
        inputs = self._encoded(X)
        labels = self._scaled_grid(grid, len(inputs))
        values = self._of_distributions(inputs, lambda part, rows: part.cdf_at(labels[rows]))
        return values.cpu().numpy()

    def _scaled_grid(self, grid: ArrayLike, n: int) -> Tensor:
        """Scaled labels ``(n, g)`` of a grid ``(g,)`` or ``(n, g)``."""
        if self._dim != 1:
            raise self._not_one_label("a grid")
        values = np.asarray(grid, dtype=np.float64)
        if values.ndim == 1:
            values = np.broadcast_to(values, (n, len(values)))
        if values.ndim != 2 or len(values) != n:
            raise DataError(f"expected a grid (g,) or ({n}, g), got shape {values.shape}")
        return self._scaled(values.reshape(-1, 1)).view(values.shape)

    def pit(self, X: ArrayLike, y: ArrayLike) -> np.ndarray:
        """``F(y|x)`` of pairs, uniform for a calibrated model: ``(n,)``."""
        return self.pit_and_crps(X, y)[0]

    def crps(self, X: ArrayLike, y: ArrayLike) -> np.ndarray:
        """Continuous ranked probability score of pairs, ``(n,)``, in the units of ``y``."""
        return self.pit_and_crps(X, y)[1]

    @on_cpu()
    def pit_and_crps(self, X: ArrayLike, y: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """``F(y|x)`` and the CRPS of pairs, from one pass over the distributions."""
        inputs, labels = self._pairs(X, y)

        def both(part: Distribution1d, rows: slice) -> Tensor:
            own = labels[rows, 0]
            return torch.stack([part.cdf_at(own), part.crps(own)], dim=-1)

        pit, crps = self._of_distributions(inputs, both).cpu().numpy().T
        return pit, crps * self._unit

    def _drawn(self, inputs: Tensor, n: int) -> Tensor:
        """``(rows, n)`` draws of one label for encoded inputs, by the global random stream."""
        u = torch.rand(len(inputs), n, dtype=torch.float64, device=inputs.device)
        return self._of_distributions(inputs, lambda part, rows: part.quantile(u[rows]))

    def score(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> float:
        """Mean :meth:`log_prob` of the pairs (nats per row): higher is better."""
        weights = None if sample_weight is None else np.asarray(sample_weight, dtype=np.float64)
        return float(np.average(self.log_prob(X, y), weights=weights))
