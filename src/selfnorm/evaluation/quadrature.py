"""``log Z`` by quadrature on a grid, in one or two dimensions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from selfnorm._context import evaluating
from selfnorm._inputs import one_per_row
from selfnorm.distributions import UnnormalisedModel
from selfnorm.errors import DataError


@torch.no_grad()
def exact_log_norm(
    model: UnnormalisedModel | Callable[[Tensor], Tensor],
    dim: int,
    *,
    center: Tensor | float = 0.0,
    scale: Tensor | float = 1.0,
    core: float = 6.0,
    n_points: int = 1025,
    support: tuple[Tensor | float, Tensor | float] | None = None,
    chunk_size: int = 65_536,
) -> tuple[float, float]:
    r"""``log Z`` by the trapezoidal rule on a grid, in one or two dimensions.

    The grid is even within ``core`` scales of the centre and grows exponentially beyond, out to
    some 3,000 scales, so that polynomial tails are integrated too. Where a density reaches beyond
    that, or is so narrow that the grid steps over it, the error says so.

    Args:
        model: an EBM, or a function ``(n, dim) -> (n,)`` giving an unnormalised log-density.
        dim: 1 or 2.
        center, scale: of the region with the mass, per column; right for standardised data.
        core: half-width of the even part, in scales.
        n_points: grid points per axis (odd).
        support: ``(low, high)`` corners of a bounded support (per column, or a number for all),
            integrated evenly instead.
        chunk_size: rows per forward pass.

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
    if dim not in (1, 2):
        raise DataError(f"grid quadrature is for one or two dimensions, not {dim}; use evaluate()")
    if n_points % 2 == 0:
        n_points += 1
    log_density: Any = getattr(model, "log_unnormalized", model)
    device = getattr(model, "device", torch.device("cpu"))
    axes, log_widths = [], []
    for j in range(dim):
        points, log_width = _axis(j, n_points, center, scale, core, support)
        axes.append(points)
        log_widths.append(log_width)
    dtype = getattr(model, "dtype", None) or torch.float32
    grid = torch.cartesian_prod(*axes).reshape(-1, dim).to(device, dtype)
    with evaluating(model):
        parts = [
            one_per_row(log_density(part), part.shape[:1], "the log-density")
            for part in grid.split(chunk_size)
        ]
    values = torch.cat(parts).double().cpu()
    values = values.reshape([n_points] * dim)
    for j, log_width in enumerate(log_widths):
        values = values + log_width.view([-1 if i == j else 1 for i in range(dim)])
    full = float(torch.logsumexp(values.flatten(), 0))
    coarse = values[::2] if dim == 1 else values[::2, ::2]
    half = float(torch.logsumexp(coarse.flatten(), 0)) + dim * math.log(2)
    missed = 0.0
    for j, points in enumerate(axes):
        share = (torch.logsumexp(values, 1 - j) if dim == 2 else values) - full
        if float(share.max()) > math.log(0.5):  # all within one cell: of what width, nobody knows
            return full, math.inf
        if support is None:
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


def _axis(
    j: int,
    n_points: int,
    center: Tensor | float,
    scale: Tensor | float,
    core: float,
    support: tuple[Tensor | float, Tensor | float] | None,
) -> tuple[Tensor, Tensor]:
    """Grid points of one axis and the log of their trapezoidal widths."""

    def of_axis(values: Tensor | float) -> float:
        flat = torch.as_tensor(values).flatten()
        return float(flat[j if len(flat) > 1 else 0])

    if support is not None:
        low, high = map(of_axis, support)
        points = torch.linspace(low, high, n_points, dtype=torch.float64)
        log_width = torch.full((n_points,), math.log((high - low) / (n_points - 1)))
        log_width[[0, -1]] -= math.log(2)
        return points, log_width.double()
    at, by = of_axis(center), of_axis(scale)
    u = torch.linspace(-core - 8, core + 8, n_points, dtype=torch.float64)
    # Even up to |u| = core, then x = core + exp(v) - 1: slope 1 at the joint.
    over = (u.abs() - core).clamp_min(0)
    points = at + by * u.sign() * (u.abs().clamp_max(core) + torch.expm1(over))
    log_width = math.log(by * float(u[1] - u[0])) + over
    log_width[[0, -1]] -= math.log(2)
    return points, log_width
