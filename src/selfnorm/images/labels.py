"""Labels of images: their scale, range and step, noise that dequantises them, features of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from selfnorm._context import seeded
from selfnorm.errors import DataError

__all__ = ["LabelSpace", "StepFeatures", "dequantised"]

MAX_BINS = 256  # of the labels' range
NOISE_SEED = 7_341  # of the noise on held-out labels: the same for every model


@dataclass(frozen=True)
class LabelSpace:
    """Scale, range and step of labels: ``z = (y - center) / scale``.

    ``low`` and ``high`` enclose all labels that can occur (with half a step around integers),
    ``step`` is the width of the uniform noise that dequantises them (0: continuous labels).
    """

    center: tuple[float, ...]
    scale: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    step: float = 0.0

    @classmethod
    def of(
        cls,
        y: Tensor,
        *,
        step: float = 0.0,
        low: Sequence[float] | None = None,
        high: Sequence[float] | None = None,
    ) -> LabelSpace:
        """Centre and scale of training labels ``(n, d)``; their range unless a wider one is given.

        >>> LabelSpace.of(torch.tensor([[1.0], [3.0]]), step=1.0).low
        (0.5,)
        """
        if not 0 <= step < math.inf:
            raise DataError(f"the step of labels must be a number of at least 0, got {step}")
        if y.ndim != 2 or len(y) < 2 or not bool(torch.isfinite(y).all()):
            raise DataError(f"labels must be finite, of shape (n, d), n > 1; got {tuple(y.shape)}")
        spread = y.double().std(0)
        if not bool((spread > 0).all()):
            raise DataError("the labels are constant: there is nothing to learn")
        first, last = y.double().amin(0), y.double().amax(0)
        if low is not None:
            first = torch.minimum(first, torch.tensor(low, dtype=first.dtype))
        if high is not None:
            last = torch.maximum(last, torch.tensor(high, dtype=last.dtype))
        return cls(
            tuple(y.double().mean(0).tolist()),
            tuple(spread.tolist()),
            tuple((first - 0.5 * step).tolist()),
            tuple((last + 0.5 * step).tolist()),
            float(step),
        )

    @property
    def dim(self) -> int:
        """Number of label coordinates."""
        return len(self.center)

    def standardise(self, y: Tensor) -> Tensor:
        """``(y - center) / scale``."""
        return (y - y.new_tensor(self.center)) / y.new_tensor(self.scale)

    def restore(self, z: Tensor) -> Tensor:
        """``center + scale z``."""
        return z.new_tensor(self.center) + z.new_tensor(self.scale) * z

    def standardised_ends(self) -> tuple[Tensor, Tensor]:
        """``low`` and ``high`` in standardised units, ``(d,)`` each.

        >>> low, high = LabelSpace((1e9,), (2.0,), (1e9 - 3,), (1e9 + 3,)).standardised_ends()
        >>> low, high
        (tensor([-1.5000]), tensor([1.5000]))
        """
        # Float32 has no room for the fractions of labels around a million.
        ends = torch.tensor([self.low, self.high], dtype=torch.float64)
        low, high = self.standardise(ends).to(torch.get_default_dtype())
        return low, high

    @property
    def log_scale(self) -> float:
        """``log`` of the volume by which densities of ``z`` exceed those of ``y``."""
        return math.fsum(math.log(s) for s in self.scale)

    @property
    def noise(self) -> tuple[float, ...]:
        """Width of the dequantising noise in standardised units."""
        return tuple(self.step / s for s in self.scale)

    def grid_range(self) -> tuple[float, float]:
        """Ends of the range of a single label."""
        if self.dim != 1:
            raise DataError(f"quadrature needs one label, there are {self.dim}")
        return self.low[0], self.high[0]

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain lists and numbers."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> LabelSpace:
        """Inverse of :meth:`to_dict`."""
        fields: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in values.items()
        }
        return cls(**fields)


def dequantised(y: Tensor, step: float, seed: int = NOISE_SEED) -> Tensor:
    """Labels with uniform noise of width ``step``, the same for the same seed.

    >>> y = dequantised(torch.tensor([[3.0]]), 1.0)
    >>> bool((y - 3.0).abs() <= 0.5)
    True
    """
    if step <= 0:
        return y
    with seeded(seed):
        return y + step * (torch.rand(y.shape, dtype=y.dtype) - 0.5).to(y.device)


def _n_bins(space: LabelSpace) -> int:
    if space.dim > 1:
        return 0
    low, high = space.grid_range()
    steps = round((high - low) / space.step) if space.step > 0 else 0
    return steps if 0 < steps <= MAX_BINS else 32


class StepFeatures(nn.Module):
    """What the energy sees of a label: its place in the range, waves of it, and which step it is.

    For each coordinate, with ``s`` running from 0 to 1 over the range: ``2s - 1`` (held constant
    outside), ``sin`` and ``cos`` of ``pi s 2^k``, and the indicator of each of the bins of one
    step, with one more below and above the range. Dequantised integers have a density that is
    constant on such bins; the outer two let the energy close the range.

    >>> space = LabelSpace.of(torch.tensor([[1.0], [2.0], [4.0]]), step=1.0)
    >>> features = StepFeatures(space)
    >>> features(torch.zeros(5, 1)).shape[-1] == features.n_features == 1 + 2 * 4 + 4 + 2
    True
    """

    low: Tensor
    width: Tensor
    bins: Tensor
    orders: Tensor

    def __init__(self, space: LabelSpace, *, waves: int = 4, bins: int | None = None) -> None:
        super().__init__()
        low, high = space.standardised_ends()
        if bins is None:
            bins = _n_bins(space)
        self.n_bins = bins
        self.register_buffer("low", low, persistent=False)
        self.register_buffer("width", high - low, persistent=False)
        self.register_buffer("orders", math.pi * 2.0 ** torch.arange(waves), persistent=False)
        self.register_buffer("bins", torch.arange(-1.0, bins + 1), persistent=False)
        per_label = 1 + 2 * waves + (bins + 2 if bins else 0)
        self.n_features = space.dim * per_label

    def forward(self, y: Tensor, q: Any = None) -> Tensor:  # noqa: ARG002
        """Features ``(..., n_features)`` of standardised labels ``(..., d)``."""
        s = ((y - self.low) / self.width).unsqueeze(-1)
        inside = s.clamp(0.0, 1.0)
        waves = inside * self.orders
        parts = [2.0 * inside - 1.0, torch.sin(waves), torch.cos(waves)]
        if self.n_bins:
            place = torch.floor(s * self.n_bins).clamp(-1.0, self.n_bins)
            parts.append((place == self.bins).to(y.dtype))
        return torch.cat(parts, dim=-1).flatten(-2)
