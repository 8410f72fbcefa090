"""What a table's columns are: scale, grid, atoms, limits; and the map to the scale models work in.

A density with respect to Lebesgue measure is unbounded on data that repeat a value exactly, so
repeated values are spread out before a model sees them. The convention, for every method compared:

* **grid**: all values of a column lie on a regular grid with a step of at least a thousandth of its
  standard deviation: a value ``v`` stands for ``[v - step/2, v + step/2)``, uniformly.
* **atom**: in any other column, a value held by more than 0.2 % of the rows (a cap, a default)
  stands for an interval of width 1 % of the standard deviation around it.
* **constant**: a column with one value is given an interval of width one.

The mass of a value on a grid is the integral of the density over its cell. The density *at the grid
point* times the step is the midpoint rule for that integral: a fitted density is smooth where the
spread-out data have edges, hence not flat within a cell, and these products add up to 1 only within
a few per cent. :func:`log_cell_mass` averages over the cell instead.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, softplus

from selfnorm._inputs import as_rows, check_rows
from selfnorm._saved import saved
from selfnorm.columns.kinds.number import detect_step
from selfnorm.errors import DataError, SelfnormWarning

N_ATOMS = 4
N_KNOTS = 17
Support = Sequence[tuple[float | None, float | None] | None]


def detect_atoms(values: np.ndarray) -> list[float]:
    """Values that more than 0.2 % of the rows (and five at least) share, most frequent first.

    Example:
        >>> detect_atoms(np.r_[np.linspace(0, 1, 90), np.full(10, 0.25)])
        [0.25]
    """
    distinct, counts = np.unique(values, return_counts=True)
    often = counts > max(4.5, 0.002 * len(values))
    order = np.argsort(-counts[often], kind="stable")
    return [float(v) for v in distinct[often][order][:N_ATOMS]]


def label_step(y: np.ndarray) -> float:
    """Width over which the values of a target should be spread: 0 for a continuous one.

    At most a hundred distinct values, each ten times on average, are steps of their smallest gap.
    Values that differ by rounding alone (0.3 and 0.1 + 0.2) are one. A value that is a twentieth of
    all (zeros, a cap) is spread by a hundredth of the deviation, that of the middle half of the
    other values if it is smaller: long tails do not widen it.

    >>> label_step(np.repeat([3.0, 4.0, 5.0], 100)), label_step(np.linspace(0, 1, 300))
    (1.0, 0.0)
    """
    values, counts = np.unique(y, return_counts=True)
    # far from zero the first bound may exceed the step, the second does not
    rounding = min(1e-9 * np.abs(values).max(), 1e-6 * y.std())
    distinct = np.r_[True, np.diff(values) > rounding]
    values, counts = values[distinct], np.add.reduceat(counts, np.flatnonzero(distinct))
    if len(values) < 2:
        return 0.0
    if len(values) <= min(100, len(y) / 10):
        return float(np.diff(values).min())
    if counts.max() >= max(10, 0.05 * len(y)):
        others = y[np.abs(y - values[counts.argmax()]) > rounding]
        low, high = np.percentile(others, [25, 75])
        return float(0.01 * min(y.std(), (high - low) / 1.349 or y.std()))
    return 0.0


@saved(
    arguments=lambda columns: {"dim": len(columns.center)},
    build=lambda kind, dim: kind(dim, discrete=None),
)
class Columns(nn.Module):
    r"""Elementwise map ``x -> z`` with its log-determinant, and the noise for discrete values.

    ``z = (t(x) - center) / scale`` with ``t`` the identity, or a map of ``(low, high)`` onto the
    line for columns with limits: logit for two limits, inverse softplus for one. ``center`` and
    ``scale`` are the median and the 5-95 % range (in units of a normal distribution's), so that a
    heavy-tailed column is not shrunk by its outliers.

    Args:
        dim: number of columns.
        support: ``(low, high)`` for each column, ``None`` for no limit or neither. Density zero
            outside.
        discrete: ``"auto"`` detects grids and atoms, ``None`` treats all as continuous, a sequence
            of steps (0 = continuous) states them.
        encoding: what :meth:`encode` gives a network.

    Example:
        >>> columns = Columns(1, support=[(0.0, None)])
        >>> _ = columns.fit(torch.rand(100, 1))
        >>> z, log_det = columns(torch.tensor([[0.5]]))
        >>> torch.allclose(columns.inverse(z), torch.tensor([[0.5]]))
        True
    """

    center: Tensor
    scale: Tensor
    step: Tensor
    atoms: Tensor
    atom_width: Tensor
    low: Tensor
    high: Tensor
    unit: Tensor
    knots: Tensor
    fitted: Tensor

    def __init__(
        self,
        dim: int,
        *,
        support: Support | None = None,
        discrete: str | Sequence[float] | None = "auto",
        encoding: str = "value",
    ) -> None:
        super().__init__()
        if encoding not in ("value", "quantiles"):
            raise ValueError(f"encoding must be 'value' or 'quantiles', not {encoding!r}")
        if support is not None and len(support) != dim:
            raise DataError(f"support has {len(support)} entries for {dim} columns; give one each")
        if isinstance(discrete, str) and discrete != "auto":
            raise DataError(
                f"discrete must be 'auto', None or one step per column, not {discrete!r}"
            )
        self.encoding, self.discrete, self.bounded = encoding, discrete, support is not None
        if not isinstance(discrete, str | None) and len(discrete) != dim:
            raise DataError(f"discrete has {len(discrete)} steps for {dim} columns; give one each")
        limits = [pair or (None, None) for pair in support or [None] * dim]
        low = [-np.inf if a is None else float(a) for a, _ in limits]
        high = [np.inf if b is None else float(b) for _, b in limits]
        if any(a >= b for a, b in zip(low, high, strict=True)):
            raise DataError("support needs low < high in every column")
        self.register_buffer("low", torch.tensor(low))
        self.register_buffer("high", torch.tensor(high))
        for name in ("center", "step", "atom_width"):
            self.register_buffer(name, torch.zeros(dim))
        for name in ("scale", "unit"):
            self.register_buffer(name, torch.ones(dim))
        self.register_buffer("atoms", torch.full((dim, N_ATOMS), torch.nan))
        self.register_buffer("knots", torch.linspace(-2, 2, N_KNOTS).repeat(dim, 1))
        self.register_buffer("fitted", torch.tensor(False))

    @classmethod
    def of(cls, center: Tensor, scale: Tensor, step: Tensor | None = None) -> Columns:
        """Columns without limits whose center, scale and steps are known.

        Example:
            >>> columns = Columns.of(torch.tensor([2.0]), torch.tensor([4.0]))
            >>> columns(torch.tensor([[10.0]]))[0]
            tensor([[2.]])
        """
        columns = cls(len(center), discrete=None).to(center)
        columns.center.copy_(center)
        columns.scale.copy_(scale)
        if step is not None:
            columns.step.copy_(step)
        return columns

    @property
    def log_jacobian(self) -> float:
        """``-sum(log scale)``: what is added to a log-density of mapped rows, without limits."""
        return -float(self.scale.log().sum())

    @property
    def n_inputs(self) -> int:
        """Numbers per column that :meth:`encode` returns."""
        return 1 if self.encoding == "value" else N_KNOTS

    @property
    def dim(self) -> int:
        """Number of columns."""
        return self.center.shape[0]

    def fit(self, x: Tensor) -> Columns:
        """Read scales, grids and atoms off a table ``(n, dim)``."""
        if not isinstance(x, Tensor):
            x = as_rows(x, dtype=torch.float64)
        x = check_rows(x, "the table", width=self.dim, constant_ok=True)
        table = np.asarray(x.detach().cpu().double())
        near = x.to(self.low)  # in the type of the limits: 0.7 is more than 0.7 in float32
        outside = (near < self.low) | (near > self.high)
        if bool(outside.any()):
            bad = outside.any(0).nonzero().flatten().tolist()
            raise DataError(f"columns {bad} hold values outside the stated support; widen it")
        # a spread of rounding size is none
        rounding = (1e-12 if x.dtype == torch.float64 else 1e-7) * np.abs(table).max(0).clip(1e-30)
        constant = np.ptp(table, 0) <= rounding
        self._warn(table, constant)
        sd = table.std(0)
        for j in range(self.dim):
            self._fit_discrete(j, table[:, j], float(sd[j]), bool(constant[j]))
        self.unit.copy_(torch.as_tensor(np.where(sd > 0, sd, 1.0)))
        noisy = self.dequantise(x.to(self.center))
        # Of the spread-out values: the quantiles of a grid would jump by a step.
        t, _ = self._unbound(noisy)
        levels = torch.linspace(0, 1, N_KNOTS, dtype=t.dtype, device=t.device)
        levels[0], levels[-1] = 0.005, 0.995
        levels = torch.cat([levels.new_tensor([0.05, 0.5, 0.95]), levels])
        every = -(-len(t) // 200_000)  # rows from all over the table, which may be sorted
        ordered = torch.quantile(t[::every], levels, 0)
        spread = (ordered[2] - ordered[0]) / 3.29
        # Where nine rows in ten share a value, their noise tells no scale.
        ends = torch.quantile(x[::every].to(t), levels[[0, 2]], 0)
        spread = torch.where(ends[1] - ends[0] > 1e-6 * self.unit, spread, t.std(0))
        self.scale.copy_(torch.where(spread > 0, spread, torch.ones_like(spread)))
        self.center.copy_(ordered[1])
        self.knots.copy_(((ordered[3:] - ordered[1]) / self.scale).T)
        self.fitted.fill_(True)
        return self

    def _fit_discrete(self, j: int, values: np.ndarray, sd: float, constant: bool) -> None:
        self.step[j], self.atom_width[j], self.atoms[j] = 0.0, 0.0, torch.nan
        if self.discrete is None:
            return
        if not isinstance(self.discrete, str):
            self.step[j] = float(self.discrete[j])
            return
        step = 1.0 if constant else detect_step(values)
        self.step[j] = step
        for a, atom in enumerate([] if step > 0 else detect_atoms(values)):
            self.atoms[j, a] = atom
            self.atom_width[j] = 0.01 * sd

    def _warn(self, table: np.ndarray, constant: np.ndarray) -> None:
        same = np.flatnonzero(constant).tolist()
        _, first = np.unique(table, axis=1, return_index=True)
        twins = sorted(set(range(table.shape[1])) - set(first.tolist()) - set(same))
        words = {
            "are constant: they carry no information and are given an interval of width one; drop "
            "them for a density of the others": same,
            "repeat another column exactly: their density is bounded only by the narrowest "
            "component a model may use; drop them": twins,
        }
        for what, columns in words.items():
            if columns:
                warnings.warn(f"columns {columns} {what}", SelfnormWarning, stacklevel=4)

    def dequantise(self, x: Tensor) -> Tensor:
        """Add uniform noise of the width that each value stands for (global generator)."""
        hit = (x.unsqueeze(-1) - self.atoms).abs() <= 1e-6 * self.unit.unsqueeze(-1)
        width = self.step + hit.any(-1) * self.atom_width
        # single precision is enough of a random number
        noisy = x + width * (torch.rand_like(x, dtype=torch.float32) - 0.5)
        if not self.bounded:
            return noisy
        noisy = torch.where(noisy < self.low, 2 * self.low - noisy, noisy)  # reflected, so that no
        return torch.where(noisy > self.high, 2 * self.high - noisy, noisy)  # mass piles up there

    def inside(self, x: Tensor) -> Tensor:
        """``(n,)``: rows within the support."""
        return ((x >= self.low) & (x <= self.high)).all(-1)

    def _limits(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Which columns have a lower, an upper limit; and the limits, 0 where there is none."""
        lower, upper = torch.isfinite(self.low), torch.isfinite(self.high)
        return lower, upper, self.low.where(lower, 0.0), self.high.where(upper, 0.0)

    def _unbound(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``t(x)`` and ``log dt/dx``, elementwise."""
        if not self.bounded:
            return x, torch.zeros_like(x)
        lower, upper, low, high = self._limits()
        zero = torch.zeros_like(low)
        width = torch.where(lower & upper, high - low, torch.ones_like(zero))
        r = ((x - low) / width).clamp(1e-12, 1 - 6e-8)
        both = torch.log(r) - torch.log1p(-r)
        both_slope = -torch.log(r) - torch.log1p(-r) - torch.log(width)
        sign = 2.0 * lower - 1.0
        v = (sign * (x - torch.where(lower, low, high)) / self.unit).clamp_min(1e-12)
        shrink = torch.log(-torch.expm1(-v))
        one, one_slope = sign * (v + shrink), -torch.log(self.unit) - shrink
        t = torch.where(lower & upper, both, torch.where(lower | upper, one, x))
        slope = torch.where(lower & upper, both_slope, torch.where(lower | upper, one_slope, zero))
        return t, slope

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``z`` ``(n, dim)`` and ``log |dz/dx|`` summed over the columns ``(n,)``."""
        log_det = -torch.log(self.scale).sum()
        if not self.bounded:
            return (x - self.center) / self.scale, log_det.expand(x.shape[:-1])
        t, slope = self._unbound(x)
        return (t - self.center) / self.scale, slope.sum(-1) + log_det

    def inverse(self, z: Tensor) -> Tensor:
        """``x`` from ``z``."""
        t = z * self.scale + self.center
        if not self.bounded:
            return t
        lower, upper, low, high = self._limits()
        both = low + (high - low) * torch.exp(logsigmoid(t))
        one = torch.where(lower, low + self.unit * softplus(t), high - self.unit * softplus(-t))
        return torch.where(lower & upper, both, torch.where(lower | upper, one, t))

    def encode(self, z: Tensor) -> Tensor:
        """Inputs for a network, ``(*z.shape, n_inputs)``: the squashed value, and with
        ``encoding="quantiles"`` its place between each two neighbouring quantiles of the column.
        """
        if self.encoding == "value":
            return torch.asinh(z).unsqueeze(-1)
        left, right = self.knots[:, :-1], self.knots[:, 1:]
        place = (z.unsqueeze(-1) - left) / (right - left).clamp_min(1e-3)
        return torch.cat([torch.asinh(z).unsqueeze(-1), place.clamp(0, 1)], -1)


def log_cell_mass(
    log_density: Callable[[Tensor], Tensor],
    x: Tensor,
    step: Tensor,
    *,
    n_points: int = 64,
) -> Tensor:
    r"""``log int_cell p`` ``(n,)``: log-probability of the grid values in rows ``x`` ``(n, dim)``.

    The cell of a row is ``[x_j - step_j/2, x_j + step_j/2)`` in every column with ``step_j > 0``;
    in the other columns the result stays a density. The density is averaged over ``n_points``
    Sobol points of the cell, which are centred: with a power of two of them and one column with a
    step they are the midpoints of as many equal parts.

    Example:
        >>> def triangle(x):                                    # p(x) = 1 - |x|
        ...     return torch.log1p(-x.squeeze(-1).abs())
        >>> mass = log_cell_mass(triangle, torch.zeros(1, 1), torch.ones(1)).exp()
        >>> round(float(mass), 3), float(triangle(torch.zeros(1, 1)).exp())   # mass, midpoint rule
        (0.75, 1.0)
    """
    grid = step > 0
    if not bool(grid.any()):
        return log_density(x)
    points = torch.quasirandom.SobolEngine(int(grid.sum())).draw(n_points).to(x) + 0.5 / n_points
    offsets = x.new_zeros(n_points, x.shape[1])
    offsets[:, grid] = (points - 0.5) * step[grid].to(x)
    total = log_density(x + offsets[0])
    for offset in offsets[1:]:
        total = torch.logaddexp(total, log_density(x + offset))
    return total - math.log(n_points) + step[grid].to(x).log().sum()
