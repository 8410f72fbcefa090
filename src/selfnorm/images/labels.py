"""Labels of images: scale, range, step, grid; noise that dequantises them; what energies see."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from selfnorm._context import seeded
from selfnorm._saved import saved
from selfnorm.errors import DataError

_MAX_BINS = 256  # of the labels' range
_WAVES = 4
_CELLS_PER_STEP = 16
_CELLS_PER_RANGE = 1024  # where the labels are continuous, or have more steps than this
NOISE_SEED = 7_341  # of the noise on held-out labels: the same for every model


@saved()
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
        held_out: Tensor | None = None,
        step: float | None = None,
        label_range: tuple[float, float] | None = None,
    ) -> LabelSpace:
        """Centre and scale of training labels ``(n, d)``; ends of all labels that occur or could.

        Args:
            y: training labels.
            held_out: further labels, which count for the ends but not for the scale.
            step: by default 1 where all labels are integers, else 0.
            label_range: of labels that can occur; one outside is refused.
        """
        if len(y) < 2 or not bool((y.double().std(0) > 0).all()):
            raise DataError("the labels are constant: there is nothing to learn")
        labels = y.double() if held_out is None else torch.cat([y, held_out]).double()
        if step is None:
            step = float((labels == labels.round()).all())
        if not 0 <= step < math.inf:
            raise DataError(f"the step of labels must be a number of at least 0, got {step}")
        low, high = labels.amin(0), labels.amax(0)
        if label_range is not None:
            outside = ((labels < label_range[0]) | (labels > label_range[1])).any(1)
            if bool(outside.any()):
                row = int(outside.nonzero()[0])
                which, at = ("training", row) if row < len(y) else ("held-out", row - len(y))
                raise DataError(
                    f"{which} label {at}, {labels[row].tolist()}, lies outside the given range "
                    f"[{label_range[0]:g}, {label_range[1]:g}]: drop it or widen label_range"
                )
            # With a step the whole range has its bins; continuous labels keep near where they are,
            # for a grid over all that could occur would be too coarse.
            slack = torch.inf if step > 0 else 0.1 * (high - low)
            low = (low - slack).clamp_min(label_range[0])
            high = (high + slack).clamp_max(label_range[1])
        return cls(
            tuple(y.double().mean(0).tolist()),
            tuple(y.double().std(0).tolist()),
            tuple((low - 0.5 * step).tolist()),
            tuple((high + 0.5 * step).tolist()),
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
        """``low`` and ``high`` in standardised units, ``(d,)`` each."""
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

    @property
    def n_steps(self) -> int:
        """Label steps in the range of a single label; 0 for continuous labels."""
        low, high = self.grid_range()
        return round((high - low) / self.step) if self.step > 0 else 0

    def grid(self, *, margin: float = 0.5, refine: int = 1) -> tuple[Tensor, float]:
        """Midpoints ``(G,)`` of cells over a single label's range, and the width of the cells.

        The grid reaches ``margin`` ranges beyond the range on each side; ``refine`` divides cells.
        Cells divide the label's step: a density that is constant on steps is integrated exactly,
        one that varies on the scale of a step to many digits (midpoint rule).
        """
        low, high = self.grid_range()
        # Prices in whole dollars: a density is not constant on a million steps, and refining the
        # grid finds the cells that it needs.
        by_steps = 0 < self.n_steps <= _CELLS_PER_RANGE
        n = refine * (_CELLS_PER_STEP * self.n_steps if by_steps else _CELLS_PER_RANGE)
        width = (high - low) / n
        extra = round(margin * n)
        index = torch.arange(-extra, n + extra, dtype=torch.float64)
        return low + (index + 0.5) * width, width


def dequantised(y: Tensor, step: float, seed: int = NOISE_SEED) -> Tensor:
    """Labels with uniform noise of width ``step``, the same for the same seed."""
    if step <= 0:
        return y
    with seeded(seed):
        return y + step * (torch.rand(y.shape, dtype=y.dtype) - 0.5).to(y.device)


@saved("space")
class StepFeatures(nn.Module):
    """What the energy sees of a label: its place in the range, waves of it, and which step it is.

    For each coordinate, with ``s`` running from 0 to 1 over the range: ``2s - 1`` (held constant
    outside), ``sin`` and ``cos`` of ``pi s 2^k``, and the indicator of each of the bins of one
    step, with one more below and above the range. Dequantised integers have a density that is
    constant on such bins; the outer two let the energy close the range.
    """

    low: Tensor
    width: Tensor
    bins: Tensor
    orders: Tensor

    def __init__(self, space: LabelSpace) -> None:
        super().__init__()
        self.space = space
        low, high = space.standardised_ends()
        bins = 0
        if space.dim == 1:
            bins = space.n_steps if 0 < space.n_steps <= _MAX_BINS else 32
        self.n_bins = bins
        self.register_buffer("low", low, persistent=False)
        self.register_buffer("width", high - low, persistent=False)
        self.register_buffer("orders", math.pi * 2.0 ** torch.arange(_WAVES), persistent=False)
        self.register_buffer("bins", torch.arange(-1.0, bins + 1), persistent=False)
        per_label = 1 + 2 * _WAVES + (bins + 2 if bins else 0)
        self.n_features = space.dim * per_label

    def forward(self, y: Tensor, q: object = None) -> Tensor:  # noqa: ARG002
        """Features ``(..., n_features)`` of standardised labels ``(..., d)``."""
        s = ((y - self.low) / self.width).unsqueeze(-1)
        inside = s.clamp(0.0, 1.0)
        waves = inside * self.orders
        parts = [2.0 * inside - 1.0, torch.sin(waves), torch.cos(waves)]
        if self.n_bins:
            place = torch.floor(s * self.n_bins).clamp(-1.0, self.n_bins)
            parts.append((place == self.bins).to(y.dtype))
        return torch.cat(parts, dim=-1).flatten(-2)
