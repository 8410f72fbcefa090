"""``log Z`` and samples by a grid, in one or two dimensions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from selfnorm._context import evaluating
from selfnorm._inputs import one_per_row
from selfnorm.distributions import Proposal, UnnormalisedModel
from selfnorm.errors import DataError

Ends = tuple[Tensor | float, Tensor | float]
ROWS_AT_ONCE = 65_536


def exact_log_norm(
    model: UnnormalisedModel | Callable[[Tensor], Tensor],
    dim: int,
    *,
    center: Tensor | float = 0.0,
    scale: Tensor | float = 1.0,
    n_points: int = 1025,
    support: Ends | None = None,
) -> tuple[float, float]:
    r"""``log Z`` by the trapezoidal rule on a grid, in one or two dimensions.

    The grid is even within six scales of the centre and grows exponentially beyond, out to
    some 3,000 scales, so that polynomial tails are integrated too. Where a density reaches beyond
    that, or is so narrow that the grid steps over it, the error says so.

    Args:
        model: an EBM, or a function ``(n, dim) -> (n,)`` giving an unnormalised log-density.
        dim: 1 or 2.
        center, scale: of the region with the mass, per column; right for standardised data. A
            lower-triangular ``scale (dim, dim)`` tilts the grid: ``x = center + scale u``.
        n_points: grid points per axis (odd).
        support: ``(low, high)`` corners of a bounded support (per column, or a number for all),
            integrated evenly instead.

    Returns:
        ``log Z`` and an error estimate: its difference from the rule on every second point, and
        twice what the ends of the grid leave out, which is estimated by the power law through the
        last two octaves of each tail. Infinite where such a tail has no integral, and where one
        point of an axis holds more than half of the mass.

    Example:
        >>> exact = exact_log_norm(lambda x: -0.5 * x.square().sum(-1), dim=2, n_points=257)
        >>> bool(abs(exact[0] - math.log(2 * math.pi)) < 1e-6)
        True
    """
    grid = GridDensity(model, dim, center=center, scale=scale, n_points=n_points, support=support)
    return grid.log_norm, grid.error


class GridDensity(Proposal):
    r"""A model's density, made even in each cell of the grid of :func:`exact_log_norm`.

    The sharpest of proposals in one or two dimensions. Arguments as there, and the half-width
    ``core`` of the even part, in scales; the grid ends ``exp(reach) - 1`` scales beyond it.
    ``log_norm`` and ``error`` are what that function returns.

    Example:
        >>> grid = GridDensity(lambda x: -0.5 * x.square().sum(-1), dim=1, n_points=257)
        >>> bool((grid.log_prob(torch.zeros(1, 1)).exp() - 0.3989).abs() < 1e-3)
        True
    """

    log_norm: float
    error: float

    @torch.no_grad()
    def __init__(
        self,
        model: UnnormalisedModel | Callable[[Tensor], Tensor],
        dim: int,
        *,
        center: Tensor | float = 0.0,
        scale: Tensor | float = 1.0,
        core: float = 6.0,
        reach: float = 8.0,
        n_points: int = 1025,
        support: Ends | None = None,
    ) -> None:
        super().__init__()
        if dim not in (1, 2):
            raise DataError(
                f"grid quadrature is for one or two dimensions, not {dim}; use evaluate()"
            )
        n_points += n_points % 2 == 0
        self.dim = dim
        self.center, self.root = _frame(dim, center, scale, support)
        pairs = [_axis(j, n_points, core, reach, support) for j in range(dim)]
        axes, log_widths = zip(*pairs, strict=True)
        log_density: Any = getattr(model, "log_unnormalized", model)
        device = getattr(model, "device", torch.device("cpu"))
        self.dtype = getattr(model, "dtype", None) or torch.float32
        grid = self._placed(torch.cartesian_prod(*axes).reshape(-1, dim)).to(device)
        with evaluating(model):
            parts = [
                one_per_row(log_density(part), part.shape[:1], "the log-density")
                for part in grid.split(ROWS_AT_ONCE)
            ]
        values = torch.cat(parts).double().cpu().reshape([n_points] * dim)
        values = values + self.root.diagonal().log().sum()
        for j, log_width in enumerate(log_widths):
            values = values + log_width.view([-1 if i == j else 1 for i in range(dim)])
        self.log_norm, self.error = _total(values, axes, tails=support is None)
        self.log_mass = values - self.log_norm
        self.edges = [
            torch.cat([points[:1], (points[1:] + points[:-1]) / 2, points[-1:]]) for points in axes
        ]

    def _placed(self, u: Tensor) -> Tensor:
        """Rows at places ``(n, dim)`` of the grid."""
        return (self.center + u @ self.root.T).to(self.dtype)

    @torch.no_grad()
    def sample(self, shape: Sequence[int] = ()) -> Tensor:
        """Draw rows: ``(*shape, dim)``."""
        mass = self.log_mass.exp()
        cell = torch.multinomial(mass.flatten(), math.prod(shape), replacement=True)
        u = torch.rand(len(cell), self.dim, dtype=torch.float64)
        for j, place in enumerate(torch.unravel_index(cell, mass.shape)):
            left, right = self.edges[j][place], self.edges[j][place + 1]
            u[:, j] = left + (right - left) * u[:, j]
        return self._placed(u).reshape(*shape, self.dim)

    def log_prob(self, x: Tensor) -> Tensor:
        """Log-density of rows, minus infinity beyond the grid."""
        flat = (x.double() - self.center).reshape(-1, self.dim)
        u = torch.linalg.solve_triangular(self.root, flat.T, upper=False)
        inside, places = torch.ones(len(flat), dtype=torch.bool), []
        log_width = torch.zeros(len(flat), dtype=torch.float64)
        for edges, at in zip(self.edges, u.contiguous(), strict=True):
            place = torch.searchsorted(edges, at, right=True) - 1
            inside &= (place >= 0) & (place < len(edges) - 1)
            places.append(place.clamp(0, len(edges) - 2))
            log_width = log_width + edges.diff()[places[-1]].log()
        log_p = self.log_mass[tuple(places)] - log_width - self.root.diagonal().log().sum()
        return log_p.where(inside, -torch.inf).to(x.dtype).reshape(x.shape[:-1])


def _total(values: Tensor, axes: Sequence[Tensor], *, tails: bool) -> tuple[float, float]:
    """Log of the sum of a grid's log-masses, and its error."""
    dim = len(axes)
    full = float(torch.logsumexp(values.flatten(), 0))
    coarse = values[::2] if dim == 1 else values[::2, ::2]
    half = float(torch.logsumexp(coarse.flatten(), 0)) + dim * math.log(2)
    missed = 0.0
    for j, points in enumerate(axes):
        share = (torch.logsumexp(values, 1 - j) if dim == 2 else values) - full
        if float(share.max()) > math.log(0.5):  # all within one cell, whose width is unknown
            return full, math.inf
        if tails:
            missed += 2 * (_beyond(points, share) + _beyond(-points.flip(0), share.flip(0)))
    return full, abs(full - half) + math.log1p(missed)


def _beyond(points: Tensor, log_mass: Tensor) -> float:
    """Mass beyond the last point of an axis, relative to the whole.

    Args:
        points: ``(n,)`` grid points in ascending order.
        log_mass: ``(n,)`` log of the mass of each point's cell, relative to the whole.

    In the outer part the points are even in the log of the distance, and so is a cell's mass where
    the tail is a power law: masses of the last two octaves give a ratio, their geometric series the
    rest.
    """
    distance = (points - points[len(points) // 2]).clamp_min(1e-300)
    octave = torch.log2(distance / distance[-1])
    mass = log_mass.exp()
    last = float(mass[octave > -1].sum())
    before = float(mass[(octave > -2) & (octave <= -1)].sum())
    if last < 1e-12:
        return 0.0
    return last * last / (before - last) if last < before else math.inf


def _frame(
    dim: int, center: Tensor | float, scale: Tensor | float, support: Ends | None
) -> tuple[Tensor, Tensor]:
    """Where the grid is: its centre ``(dim,)``, and a lower-triangular matrix of its axes."""
    if support is not None:
        return torch.zeros(dim, dtype=torch.float64), torch.eye(dim, dtype=torch.float64)
    at = torch.as_tensor(center, dtype=torch.float64).detach().cpu().flatten().expand(dim)
    by = torch.as_tensor(scale, dtype=torch.float64).detach().cpu()
    root = by if by.shape == (dim, dim) else torch.diag(by.flatten().expand(dim))
    return at, root.contiguous()


def _axis(
    j: int, n_points: int, core: float, reach: float, support: Ends | None
) -> tuple[Tensor, Tensor]:
    """Grid points of one axis and the log of their trapezoidal widths."""
    if support is not None:
        ends = (torch.as_tensor(end).flatten() for end in support)
        low, high = (float(end[j if len(end) > 1 else 0]) for end in ends)
        points = torch.linspace(low, high, n_points, dtype=torch.float64)
        log_width = torch.full((n_points,), math.log((high - low) / (n_points - 1)))
        log_width[[0, -1]] -= math.log(2)
        return points, log_width.double()
    u = torch.linspace(-core - reach, core + reach, n_points, dtype=torch.float64)
    # Even up to |u| = core, then x = core + exp(v) - 1: slope 1 at the joint.
    over = (u.abs() - core).clamp_min(0)
    points = u.sign() * (u.abs().clamp_max(core) + torch.expm1(over))
    log_width = math.log(float(u[1] - u[0])) + over
    log_width[[0, -1]] -= math.log(2)
    return points, log_width
