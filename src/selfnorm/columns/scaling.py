"""Standardising columns in float64, and the Jacobian that puts densities back into their units."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["Scaling"]


@dataclass(frozen=True)
class Scaling:
    r"""``z = (x - center) / scale`` column by column.

    ``log p_x(x) = log p_z(z) - sum_j log scale_j``; the last term is :attr:`log_jacobian`.

    >>> import numpy as np
    >>> scaling = Scaling.fit_to(np.array([[1e6], [2e6], [3e6], [4e6]]))
    >>> bool(np.abs(scaling.forward(np.array([[2.5e6]]))).max() < 1e-12)
    True
    """

    center: np.ndarray
    scale: np.ndarray

    @classmethod
    def fit_to(cls, x: np.ndarray) -> Scaling:
        """Median and 5-95 % range (in units of a normal law's), so that outliers do not set it.

        Where that range is much smaller than the standard deviation (most rows share one value) the
        standard deviation is taken.
        """
        low, center, high = np.quantile(x, [0.05, 0.5, 0.95], axis=0)
        spread = (high - low) / 3.29
        # deviations from the median, not x itself: the sum of squares of large offsets loses digits
        deviation = np.sqrt(np.mean((x - center) ** 2, axis=0))
        scale = np.where(spread > 1e-3 * deviation, spread, deviation)
        return cls(np.ascontiguousarray(center), np.ascontiguousarray(scale))

    @property
    def log_jacobian(self) -> float:
        """``-sum(log scale)``: what is added to ``log p_z``."""
        return -float(np.log(self.scale).sum())

    def forward(self, x: np.ndarray) -> np.ndarray:
        """Rows in standard units."""
        return (x - self.center) / self.scale

    def inverse(self, z: np.ndarray) -> np.ndarray:
        """Rows in the units of the table."""
        return z * self.scale + self.center
