"""The paper's two-dimensional sets: densities that can be sampled *and* evaluated exactly.

Because the density is known, the best expected log-likelihood any model can reach is known too:
minus the entropy. A fitted model is judged by its distance to that limit, in nats. All densities
are with respect to the Lebesgue measure on the plane. :func:`load` draws a set, splits and
standardises it, and gives the truth in the units of the split.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from selfnorm.datasets.directory import check_name
from selfnorm.errors import DataError

_LOG_2PI = math.log(2.0 * math.pi)


def _log_normal(x: Tensor, mean: float, sd: float) -> Tensor:
    return -0.5 * ((x - mean) / sd) ** 2 - math.log(sd) - 0.5 * _LOG_2PI


class PlaneDensity(ABC):
    """A density on the plane with a sampler and an exact log-density, in raw units.

    Attributes:
        name: by which :func:`load` finds it.
        entropy: differential entropy in nats; ``-entropy`` is the limit for raw data.
    """

    name: ClassVar[str]
    entropy: ClassVar[float]

    def sample(self, n: int, seed: int | np.random.Generator | None = None) -> Tensor:
        """Draw ``n`` points, a float64 tensor of shape ``(n, 2)``.

        >>> Funnel().sample(3, seed=0).shape
        torch.Size([3, 2])
        """
        points = self._draw(int(n), np.random.default_rng(seed))
        return torch.from_numpy(np.ascontiguousarray(points, dtype=np.float64))

    def log_density(self, x: Tensor) -> Tensor:
        """Exact ``log p(x)`` of raw points: ``(..., 2) -> (...)``, computed in float64.

        >>> Checkerboard().log_density(torch.tensor([[0.5, 0.5], [0.5, -0.5]]))
        tensor([-3.4657,    -inf], dtype=torch.float64)
        """
        x = torch.as_tensor(x)
        if x.ndim < 1 or x.shape[-1] != 2:
            raise DataError(
                f"{self.name} lives on the plane: expected points of shape (..., 2), "
                f"got {tuple(x.shape)}"
            )
        flat = x.detach().to("cpu", torch.float64).reshape(-1, 2)
        return self._log_density(flat).reshape(x.shape[:-1]).to(x.device)

    @abstractmethod
    def _draw(self, n: int, rng: np.random.Generator) -> np.ndarray: ...

    @abstractmethod
    def _log_density(self, x: Tensor) -> Tensor: ...


class Funnel(PlaneDensity):
    """``y ~ N(0, 1)``, ``x | y ~ N(0, exp(2 y))``, point ``(x, y)``.

    The marginal of ``x`` has heavier tails than any Gaussian, so a Gaussian proposal gives
    importance weights of infinite variance here.
    """

    name = "funnel"
    entropy = 1.0 + _LOG_2PI  # two Gaussian entropies plus E[log sd(x | y)] = E[y] = 0

    def _draw(self, n: int, rng: np.random.Generator) -> np.ndarray:
        y = rng.standard_normal(n)
        x = np.exp(y) * rng.standard_normal(n)
        return np.stack([x, y], axis=1)

    def _log_density(self, x: Tensor) -> Tensor:
        y = x[:, 1]
        return _log_normal(y, 0.0, 1.0) + _log_normal(x[:, 0] * torch.exp(-y), 0.0, 1.0) - y


class Pinwheel(PlaneDensity):
    """Five twisted arms: ``r = 1 + 0.3 e1``, ``t = 0.05 e2``, angle ``a = 2 pi k / 5 + 0.25 e^r``.

    The point is ``10 R(-a) (r, t)``. The map ``(r, t) -> x`` has the Jacobian determinant
    ``100 (1 + 0.25 t e^r)``. To invert it, write ``(r, t) = rho (cos u, sin u)`` with
    ``rho = |x| / 10``: the polar angle of ``x`` is ``u - 0.25 exp(rho cos u) - 2 pi k / 5``, one
    equation in ``u`` modulo ``2 pi / 5`` that collects the five arms.
    """

    name = "pinwheel"
    entropy = 4.849459  # quadrature over (r, t); a grid over the plane agrees to 1e-7

    _ARMS = 5
    _RATE = 0.25
    _RADIAL_SD = 0.3
    _TANGENTIAL_SD = 0.05
    _RADIUS = 10.0
    _NODES = 96
    _CHUNK = 32_768

    def _draw(self, n: int, rng: np.random.Generator) -> np.ndarray:
        arm = rng.integers(0, self._ARMS, n)
        r = 1.0 + self._RADIAL_SD * rng.standard_normal(n)
        t = self._TANGENTIAL_SD * rng.standard_normal(n)
        angle = 2.0 * math.pi * arm / self._ARMS + self._RATE * np.exp(r)
        c, s = np.cos(angle), np.sin(angle)
        return self._RADIUS * np.stack([r * c + t * s, t * c - r * s], axis=1)

    def _log_density(self, x: Tensor) -> Tensor:
        # The bracketing table has _NODES entries a point: chunks bound its memory.
        return torch.cat([self._log_density_chunk(part) for part in x.split(self._CHUNK)])

    def _log_density_chunk(self, x: Tensor) -> Tensor:
        rho = x.norm(dim=1) / self._RADIUS
        polar = torch.atan2(x[:, 1], x[:, 0])
        point, u = self._roots(rho, polar)
        r, t = rho[point] * u.cos(), rho[point] * u.sin()
        jacobian = 1.0 + self._RATE * t * torch.exp(r)
        terms = (
            _log_normal(r, 1.0, self._RADIAL_SD)
            + _log_normal(t, 0.0, self._TANGENTIAL_SD)
            - torch.log(jacobian.abs())
            - math.log(self._ARMS * self._RADIUS**2)
        )
        # log-sum-exp over the roots of each point
        top = torch.full_like(rho, -math.inf).scatter_reduce(0, point, terms, "amax")
        total = torch.zeros_like(rho).index_add(0, point, torch.exp(terms - top[point]))
        return top + torch.log(total)

    def _roots(self, rho: Tensor, polar: Tensor) -> tuple[Tensor, Tensor]:
        """All solutions ``u`` of ``u - 0.25 exp(rho cos u) = polar (mod 2 pi / 5)``.

        Returns the index of the point and the root, one entry per root. A fine table brackets
        the sign changes, bisection finishes them. Beyond ``rho`` of about 3.5 (eight standard
        deviations) several roots can share a bracket and one is kept.
        """
        period = 2.0 * math.pi / self._ARMS
        nodes = torch.linspace(-math.pi, math.pi, self._NODES + 1, dtype=torch.float64)
        twist = nodes - self._RATE * torch.exp(rho[:, None] * nodes.cos())
        turns = torch.floor((twist - polar[:, None]) / period)
        point, cell = torch.nonzero(turns[:, 1:] != turns[:, :-1], as_tuple=True)
        level = torch.maximum(turns[point, cell], turns[point, cell + 1])
        target = polar[point] + period * level
        rho = rho[point]
        low, high = nodes[cell], nodes[cell + 1]
        rising = twist[point, cell + 1] > twist[point, cell]
        for _ in range(48):  # halves: the bracket shrinks to 2e-16
            u = 0.5 * (low + high)
            right = (u - self._RATE * torch.exp(rho * u.cos()) < target) == rising
            low, high = torch.where(right, u, low), torch.where(right, high, u)
        return point, 0.5 * (low + high)


class Checkerboard(PlaneDensity):
    """Uniform on the eight dark squares (side 2) of ``[-4, 4]^2``: ``log p = -log 32``."""

    name = "checkerboard"
    entropy = math.log(32.0)

    # Scaling a point to float32 and back moves it by about 1e-7: the edge belongs to the square
    # with this margin, or one sample in a million would have density zero.
    _MARGIN = 1e-6

    def _draw(self, n: int, rng: np.random.Generator) -> np.ndarray:
        x1 = 4.0 * rng.random(n) - 2.0
        x2 = rng.random(n) - 2.0 * rng.integers(0, 2, n) + np.floor(x1) % 2
        return 2.0 * np.stack([x1, x2], axis=1)

    def _log_density(self, x: Tensor) -> Tensor:
        half = 0.5 * x
        dark = torch.zeros(len(x), dtype=torch.bool)
        for shift1 in (-self._MARGIN, self._MARGIN):
            for shift2 in (-self._MARGIN, self._MARGIN):
                i = torch.floor(half[:, 0] + shift1)
                j = torch.floor(half[:, 1] + shift2)
                on_board = (i >= -2) & (i <= 1) & (j >= -2) & (j <= 1)
                dark |= on_board & ((i + j) % 2 == 0)
        outside = torch.full_like(half[:, 0], -math.inf)
        return torch.where(dark, torch.full_like(outside, -self.entropy), outside)


class FourCircles(PlaneDensity):
    """Rings of radius 2 around ``(+-1, +-1)``, each point blurred by ``N(0, 0.1^2 I)``.

    One ring at distance ``s`` from its centre has the density
    ``exp(-(s - 2)^2 / (2 v)) i0e(2 s / v) / (2 pi v)``, ``v = 0.01``, where ``i0e`` is the
    exponentially scaled Bessel function (``I0`` itself overflows).
    """

    name = "four_circles"
    entropy = 2.870819  # quadrature; unchanged from a 400 x 400 to a 1200 x 1200 grid

    _RING = 2.0
    _SD = 0.1
    _CENTRES = ((-1.0, -1.0), (-1.0, 1.0), (1.0, -1.0), (1.0, 1.0))

    def _draw(self, n: int, rng: np.random.Generator) -> np.ndarray:
        centre = np.array(self._CENTRES)[rng.integers(0, 4, n)]
        angle = 2.0 * math.pi * rng.random(n)
        ring = self._RING * np.stack([np.cos(angle), np.sin(angle)], axis=1)
        return centre + ring + self._SD * rng.standard_normal((n, 2))

    def _log_density(self, x: Tensor) -> Tensor:
        variance = self._SD**2
        centres = torch.tensor(self._CENTRES, dtype=torch.float64)
        s = (x[:, None, :] - centres).norm(dim=2)
        ring = (
            -0.5 * (s - self._RING) ** 2 / variance
            + torch.log(torch.special.i0e(s * self._RING / variance))
            - _LOG_2PI
            - math.log(variance)
        )
        return torch.logsumexp(ring, dim=1) - math.log(4.0)


DENSITIES: dict[str, PlaneDensity] = {
    density.name: density for density in (Funnel(), Pinwheel(), Checkerboard(), FourCircles())
}
NAMES: tuple[str, ...] = tuple(DENSITIES)


@dataclass(frozen=True, eq=False)
class Split2D:
    """One draw of a two-dimensional set: three splits and the truth in their units.

    Attributes:
        name: name of the set.
        train, val, test: standardised points ``(x - shift) / scale``, float32, shape ``(n, 2)``.
        shift, scale: mean and standard deviation of the raw training points, shape ``(2,)``.
        density: the distribution of the raw points.
    """

    name: str
    train: Tensor
    val: Tensor
    test: Tensor
    shift: Tensor
    scale: Tensor
    density: PlaneDensity = field(repr=False)

    @property
    def limit(self) -> float:
        """Largest expected log-likelihood of scaled points: ``-H + sum(log scale)``."""
        return -self.density.entropy + float(self.scale.log().sum())

    def log_density(self, x_scaled: Tensor) -> Tensor:
        """Exact log-density of *scaled* points, Jacobian included: ``(..., 2) -> (...)``, float64.

        ``log p_scaled(z) = log p(shift + scale z) + sum(log scale)``.
        """
        raw = self.shift + self.scale * torch.as_tensor(x_scaled).to(torch.float64)
        return self.density.log_density(raw) + self.scale.log().sum()

    def draw(self, n: int, seed: int | np.random.Generator | None = None) -> Tensor:
        """Fresh points from the same distribution in the same units, float32 ``(n, 2)``.

        A large draw removes the sampling noise of a 2,000-point test split from a comparison.
        """
        return ((self.density.sample(n, seed) - self.shift) / self.scale).to(torch.float32)


def load(
    name: str, seed: int | None = 0, n_train: int = 7000, n_val: int = 1000, n_test: int = 2000
) -> Split2D:
    """Draw one of the four sets and standardise all splits by the training statistics.

    Args:
        name: ``"funnel"``, ``"pinwheel"``, ``"checkerboard"`` or ``"four_circles"``.
        seed: seed of the draw. The splits use independent streams, so the training points do
            not depend on the sizes of the other splits.
        n_train, n_val, n_test: sizes of the splits, at least two points each.

    >>> split = load("four_circles", seed=0)
    >>> split.train.shape, round(split.limit, 3)
    (torch.Size([7000, 2]), -1.766)
    """
    check_name(name, NAMES, "two-dimensional set")
    sizes = (n_train, n_val, n_test)
    if min(sizes) < 2:
        raise DataError(f"splits of {sizes} points: each needs at least 2")
    density = DENSITIES[name]
    streams = np.random.SeedSequence(seed).spawn(len(sizes))
    raw = [
        density.sample(size, np.random.default_rng(stream))
        for size, stream in zip(sizes, streams, strict=True)
    ]
    shift, scale = raw[0].mean(dim=0), raw[0].std(dim=0, correction=0)
    train, val, test = (((points - shift) / scale).to(torch.float32) for points in raw)
    return Split2D(name, train, val, test, shift, scale, density)
