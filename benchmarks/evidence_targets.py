"""Densities with a known log Z, exact draws and draws by MCMC; NumPy and SciPy only.

The peers of ``evidence.py`` stand in environments of their own, without torch.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats
from scipy.special import gammaln, logsumexp

Array = np.ndarray
LOG_2PI = math.log(2 * math.pi)


@dataclass(frozen=True)
class Target:
    """``log_density (n, d) -> (n,)``, ``draw(n, rng) -> (n, d)``, the exact ``log_z``."""

    name: str
    dim: int
    log_density: Callable[[Array], Array]
    draw: Callable[[int, np.random.Generator], Array]
    log_z: float
    support: tuple[Any, ...] | None = None


TARGETS: dict[str, Target] = {}


def add(
    name: str,
    dim: int,
    log_density: Callable[[Array], Array],
    draw: Callable[[int, np.random.Generator], Array],
    log_z: float,
    support: tuple[Any, ...] | None = None,
) -> None:
    TARGETS[name] = Target(name, dim, log_density, draw, float(log_z), support)


# -- Gaussians and conjugate regressions ------------------------------------------------------


def gaussian(d: int, correlation: float) -> None:
    covariance = (1 - correlation) * np.eye(d) + correlation
    root, precision = np.linalg.cholesky(covariance), np.linalg.inv(covariance)
    add(
        f"gaussian_{d}",
        d,
        lambda x: -0.5 * np.einsum("ni,ij,nj->n", x, precision, x),
        lambda n, rng: rng.normal(size=(n, d)) @ root.T,
        d / 2 * LOG_2PI + np.log(np.diag(root)).sum(),
    )


for _d, _rho in ((2, 0.9), (20, 0.5), (50, 0.3)):
    gaussian(_d, _rho)


def regression(d: int, n: int) -> None:
    """Gaussian prior, known noise: the evidence is a Gaussian density of the targets."""
    rng = np.random.default_rng(d)
    X = rng.normal(size=(n, d)) @ np.triu(np.full((d, d), 0.5) + 0.5 * np.eye(d))
    y = X @ rng.normal(size=d) + 0.7 * rng.normal(size=n)
    noise, prior = 0.49, 4.0
    precision = X.T @ X / noise + np.eye(d) / prior
    root = np.linalg.cholesky(np.linalg.inv(precision))
    mean = np.linalg.solve(precision, X.T @ y / noise)

    def log_density(b: Array) -> Array:
        error = ((y - b @ X.T) ** 2).sum(1)
        likelihood = -0.5 * error / noise - n / 2 * math.log(2 * math.pi * noise)
        return likelihood - 0.5 * (b**2).sum(1) / prior - d / 2 * math.log(2 * math.pi * prior)

    add(
        f"regression_{d}",
        d,
        log_density,
        lambda n, rng: mean + rng.normal(size=(n, d)) @ root.T,
        stats.multivariate_normal.logpdf(y, cov=noise * np.eye(n) + prior * X @ X.T),
    )


regression(4, 50)
regression(12, 80)


def regression_unknown_noise(d: int, n: int) -> None:
    """Normal-inverse-gamma prior: the evidence is a multivariate Student-t density."""
    rng = np.random.default_rng(100 + d)
    X = rng.normal(size=(n, d))
    y = X @ rng.normal(size=d) + rng.standard_t(4, size=n)
    a, b, prior = 2.0, 2.0, 4.0
    precision = X.T @ X + np.eye(d) / prior
    mean, root = np.linalg.solve(precision, X.T @ y), np.linalg.cholesky(np.linalg.inv(precision))
    a_n, b_n = a + n / 2, b + 0.5 * (y @ y - mean @ precision @ mean)

    def log_density(x: Array) -> Array:
        beta, v = x[:, :d], x[:, d]
        with np.errstate(all="ignore"):
            inside = -0.5 * (((y - beta @ X.T) ** 2).sum(1) + (beta**2).sum(1) / prior) / v
            inside = inside - (n + d) / 2 * np.log(2 * math.pi * v) - d / 2 * math.log(prior)
            inside = inside + a * math.log(b) - gammaln(a) - (a + 1) * np.log(v) - b / v
        return np.where(v > 0, inside, -np.inf)

    def draw(m: int, rng: np.random.Generator) -> Array:
        v = b_n / rng.gamma(a_n, size=(m, 1))
        return np.hstack([mean + np.sqrt(v) * (rng.normal(size=(m, d)) @ root.T), v])

    log_z = -n / 2 * LOG_2PI + np.log(np.diag(root)).sum() - d / 2 * math.log(prior)
    log_z += a * math.log(b) - a_n * math.log(b_n) + gammaln(a_n) - gammaln(a)
    name, support = f"regression_noise_{d}", (None,) * d + ("positive",)
    add(name, d + 1, log_density, draw, log_z, support)


regression_unknown_noise(5, 40)


# -- counts: positive, interval and simplex supports ------------------------------------------


def normal_gamma(n: int) -> None:
    """Mean and precision of a Gaussian, with a vague conjugate prior."""
    y = np.random.default_rng(3).normal(size=n)
    a, b, k = 1e-3, 1e-3, 1e-2  # prior: shape and rate of the precision, weight of the mean 0
    squares = ((y - y.mean()) ** 2).sum()
    a_n, k_n = a + n / 2, k + n
    b_n = b + squares / 2 + k * n * y.mean() ** 2 / (2 * k_n)
    shift = a * math.log(b) - gammaln(a) + 0.5 * math.log(k) - (n + 1) / 2 * LOG_2PI

    def log_density(x: Array) -> Array:
        mean, precision = x[:, 0], np.maximum(x[:, 1], 1e-300)
        quadratic = 2 * b + k * mean**2 + squares + n * (mean - y.mean()) ** 2
        value = shift + (a + (n - 1) / 2) * np.log(precision) - precision / 2 * quadratic
        return np.where(x[:, 1] > 0, value, -np.inf)

    def draw(m: int, rng: np.random.Generator) -> Array:
        precision = rng.gamma(a_n, 1 / b_n, size=m)
        mean = n * y.mean() / k_n + rng.normal(size=m) / np.sqrt(k_n * precision)
        return np.column_stack([mean, precision])

    log_z = gammaln(a_n) - gammaln(a) + a * math.log(b) - a_n * math.log(b_n)
    log_z += 0.5 * math.log(k / k_n) - n / 2 * LOG_2PI
    add("normal_gamma", 2, log_density, draw, log_z, (None, "positive"))


def logistic(n: int) -> None:
    """Logistic regression on one feature: ``log Z`` by quadrature."""
    rng = np.random.default_rng(4)
    X = np.column_stack([np.ones(n), rng.normal(size=n)])
    y = rng.random(n) < 1 / (1 + np.exp(1 - X[:, 1]))

    def log_density(x: Array) -> Array:
        score = x @ X.T
        return score @ y - np.logaddexp(0, score).sum(1) - 0.5 * (x**2).sum(1) - LOG_2PI

    side = np.linspace(-4, 4, 401)
    nodes = np.stack(np.meshgrid(side, side), -1).reshape(-1, 2)
    values = np.concatenate([log_density(part) for part in np.array_split(nodes, 100)])
    log_z, width = logsumexp(values), side[1] - side[0]

    def draw(m: int, rng: np.random.Generator) -> Array:
        chosen = rng.choice(len(nodes), size=m, p=np.exp(values - log_z))
        return nodes[chosen] + width * (rng.random((m, 2)) - 0.5)

    add("logistic_2", 2, log_density, draw, log_z + 2 * math.log(width))


gaussian(5, 0.6)
normal_gamma(100)
logistic(200)
FOR_ENSEMBLES = tuple(TARGETS)[-3:]


def beta_binomial(successes: int, trials: int) -> None:
    a, b = 0.8 + successes, 1.5 + trials - successes

    def log_density(x: Array) -> Array:
        p = x[:, 0]
        with np.errstate(all="ignore"):
            inside = (a - 1) * np.log(p) + (b - 1) * np.log1p(-p)
        return np.where((p > 0) & (p < 1), inside, -np.inf)

    log_z = gammaln(a) + gammaln(b) - gammaln(a + b)
    add("beta", 1, log_density, lambda n, rng: rng.beta(a, b, size=(n, 1)), log_z, ((0.0, 1.0),))


beta_binomial(2, 13)


def gammas(shapes: tuple[float, ...], name: str) -> None:
    k = np.array(shapes)

    def log_density(x: Array) -> Array:
        with np.errstate(all="ignore"):
            inside = ((k - 1) * np.log(x) - x).sum(1)
        return np.where((x > 0).all(1), inside, -np.inf)

    support = ("positive",) * len(k)
    draw = lambda n, rng: rng.gamma(k, size=(n, len(k)))  # noqa: E731
    add(name, len(k), log_density, draw, gammaln(k).sum(), support)


gammas((1.7,), "gamma_1")
gammas((0.6, 1.0, 2.5, 6.0), "gamma_4")


def dirichlet(alpha: tuple[float, ...]) -> None:
    a = np.array(alpha)

    def log_density(x: Array) -> Array:
        with np.errstate(all="ignore"):
            inside = ((a - 1) * np.log(x)).sum(1)
        return np.where((x > 0).all(1), inside, -np.inf)

    name, support = f"dirichlet_{len(a)}", ("simplex",) * len(a)
    draw = lambda n, rng: rng.dirichlet(a, size=n)  # noqa: E731
    add(name, len(a), log_density, draw, gammaln(a).sum() - gammaln(a.sum()), support)


dirichlet((4.0, 1.0, 7.5, 2.0))
dirichlet((0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 13.0))


def log_normals(d: int) -> None:
    scale = np.linspace(0.3, 1.2, d)

    def log_density(x: Array) -> Array:
        with np.errstate(all="ignore"):
            inside = (-0.5 * (np.log(x) / scale) ** 2 - np.log(x)).sum(1)
        return np.where((x > 0).all(1), inside, -np.inf)

    draw = lambda n, rng: np.exp(scale * rng.normal(size=(n, d)))  # noqa: E731
    log_z = d / 2 * LOG_2PI + np.log(scale).sum()
    add(f"log_normal_{d}", d, log_density, draw, log_z, ("positive",) * d)


log_normals(3)


# -- supports that are not stated -------------------------------------------------------------


def half_normals(d: int) -> None:
    def log_density(x: Array) -> Array:
        return np.where((x > 0).all(1), -0.5 * (x**2).sum(1), -np.inf)

    draw = lambda n, rng: np.abs(rng.normal(size=(n, d)))  # noqa: E731
    add(f"half_normal_{d}_unstated", d, log_density, draw, d * 0.5 * math.log(math.pi / 2))


half_normals(2)


def ball(d: int) -> None:
    def draw(n: int, rng: np.random.Generator) -> Array:
        z = rng.normal(size=(n, d))
        return z / np.linalg.norm(z, axis=1, keepdims=True) * rng.random((n, 1)) ** (1 / d)

    log_z = d / 2 * math.log(math.pi) - gammaln(d / 2 + 1)
    inside = lambda x: np.where((x**2).sum(1) < 1, 0.0, -np.inf)  # noqa: E731
    add(f"ball_{d}_unstated", d, inside, draw, log_z)


ball(3)


# -- curved -----------------------------------------------------------------------------------


def banana(d: int, bend: float, wide: float = 1.0) -> None:
    def log_density(x: Array) -> Array:
        second = x[:, 1] - bend * (x[:, 0] ** 2 - wide**2)
        rest = (x[:, 2:] ** 2).sum(1)
        return -0.5 * ((x[:, 0] / wide) ** 2 + second**2 + rest)

    def draw(n: int, rng: np.random.Generator) -> Array:
        x = rng.normal(size=(n, d))
        x[:, 0] *= wide
        x[:, 1] += bend * (x[:, 0] ** 2 - wide**2)
        return x

    add(f"banana_{d}_{bend:g}", d, log_density, draw, d / 2 * LOG_2PI + math.log(wide))


banana(2, 0.1, 10.0)
banana(3, 0.5)
banana(8, 1.0)


def rosenbrock(d: int) -> None:
    """Each coordinate is bent by the one before it."""

    def log_density(x: Array) -> Array:
        bent = x[:, 1:] - x[:, :-1] ** 2
        return -0.5 * (x[:, 0] - 0.5) ** 2 - 2.0 * (bent**2).sum(1)

    def draw(n: int, rng: np.random.Generator) -> Array:
        x = np.empty((n, d))
        x[:, 0] = 0.5 + rng.normal(size=n)
        for j in range(1, d):
            x[:, j] = x[:, j - 1] ** 2 + 0.5 * rng.normal(size=n)
        return x

    add(f"rosenbrock_{d}", d, log_density, draw, d / 2 * LOG_2PI + (d - 1) * math.log(0.5))


rosenbrock(3)


def funnel(d: int, s: float) -> None:
    def log_density(x: Array) -> Array:
        v = x[:, 0]
        return -0.5 * (v / s) ** 2 - 0.5 * (x[:, 1:] ** 2).sum(1) * np.exp(-v) - (d - 1) / 2 * v

    def draw(n: int, rng: np.random.Generator) -> Array:
        v = s * rng.normal(size=(n, 1))
        return np.hstack([v, rng.normal(size=(n, d - 1)) * np.exp(v / 2)])

    add(f"funnel_{d}", d, log_density, draw, math.log(s) + d / 2 * LOG_2PI)


funnel(2, 1.5)
funnel(5, 1.5)
funnel(10, 1.0)


def shells(d: int, radius: float, width: float, apart: float) -> None:
    r = np.linspace(max(1e-9, radius - 12 * width), radius + 12 * width, 200_001)
    log_radial = -0.5 * ((r - radius) / width) ** 2 + (d - 1) * np.log(r)
    log_area = math.log(2) + d / 2 * math.log(math.pi) - gammaln(d / 2)
    cumulative = np.cumsum(np.exp(log_radial - log_radial.max()))
    log_shell = log_area + logsumexp(log_radial) + math.log(r[1] - r[0])
    center = np.zeros(d)
    center[0] = apart

    def log_density(x: Array) -> Array:
        pair = [np.linalg.norm(x - side * center, axis=1) for side in (-1, 1)]
        return np.logaddexp(*(-0.5 * ((distance - radius) / width) ** 2 for distance in pair))

    def draw(n: int, rng: np.random.Generator) -> Array:
        z = rng.normal(size=(n, d))
        length = np.interp(rng.random((n, 1)) * cumulative[-1], cumulative, r)
        side = np.where(rng.random((n, 1)) < 0.5, -1, 1)
        return z / np.linalg.norm(z, axis=1, keepdims=True) * length + side * center

    add(f"shells_{d}", d, log_density, draw, log_shell + math.log(2))


shells(2, 2.0, 0.3, 3.5)
shells(5, 2.0, 0.4, 3.5)


def egg_box() -> None:
    grid = (np.arange(2000) + 0.5) * 10 * math.pi / 2000
    values = 5 * np.log(2 + np.cos(grid[:, None] / 2) * np.cos(grid / 2))
    width = grid[1] - grid[0]

    def log_density(x: Array) -> Array:
        value = 5 * np.log(2 + np.cos(x[:, 0] / 2) * np.cos(x[:, 1] / 2))
        return np.where(((x > 0) & (x < 10 * math.pi)).all(1), value, -np.inf)

    def draw(n: int, rng: np.random.Generator) -> Array:
        kept = np.empty((0, 2))
        while len(kept) < n:
            x = rng.random((20 * n, 2)) * 10 * math.pi
            passed = np.log(rng.random(20 * n)) < log_density(x) - 5 * math.log(3)
            kept = np.vstack([kept, x[passed]])
        return kept[:n]

    log_z = logsumexp(values) + 2 * math.log(width)
    add("egg_box", 2, log_density, draw, log_z, ((0.0, 10 * math.pi),) * 2)


egg_box()


# -- several modes ----------------------------------------------------------------------------


def mixture(d: int, weights: tuple[float, ...], spread: float) -> None:
    rng = np.random.default_rng(d)
    share = np.array(weights)
    directions = rng.normal(size=(len(share), d))
    centers = spread * directions / np.linalg.norm(directions, axis=1, keepdims=True)
    scales = np.linspace(0.6, 1.2, len(share))

    def log_density(x: Array) -> Array:
        squares = ((x[:, None] - centers) ** 2).sum(2) / scales**2
        return logsumexp(np.log(share) - d * np.log(scales) - 0.5 * squares, axis=1)

    def draw(n: int, rng: np.random.Generator) -> Array:
        k = rng.choice(len(share), size=n, p=share)
        return centers[k] + scales[k, None] * rng.normal(size=(n, d))

    add(f"mixture_{d}", d, log_density, draw, d / 2 * LOG_2PI)


mixture(1, (0.5, 0.2, 0.3), 4.0)
mixture(2, (0.4, 0.1, 0.3, 0.2), 5.0)
mixture(5, (0.7, 0.3), 4.0)
mixture(10, (0.3, 0.3, 0.4), 4.0)
mixture(20, (0.75, 0.25), 4.0)
mixture(50, (0.6, 0.4), 5.0)


# -- tails and skewness -----------------------------------------------------------------------


def student(d: int, df: float) -> None:
    def draw(n: int, rng: np.random.Generator) -> Array:
        return rng.normal(size=(n, d)) / np.sqrt(rng.chisquare(df, size=(n, 1)) / df)

    log_z = gammaln(df / 2) - gammaln((df + d) / 2) + d / 2 * math.log(df * math.pi)
    tail = lambda x: -(df + d) / 2 * np.log1p((x**2).sum(1) / df)  # noqa: E731
    add(f"student_{d}", d, tail, draw, log_z)


student(2, 3.0)
student(8, 4.0)


def products(name: str, d: int, density: Any, log_shift: float) -> None:
    """Independent coordinates of a law of SciPy, mixed by a fixed matrix of determinant one."""
    mix = np.eye(d) + np.diag(np.full(d - 1, 0.7), 1) if d > 1 else np.eye(1)
    back = np.linalg.inv(mix)
    add(
        f"{name}_{d}",
        d,
        lambda x: density.logpdf(x @ back.T).sum(1) + log_shift,
        lambda n, rng: density.rvs(size=(n, d), random_state=rng) @ mix.T,
        log_shift,
    )


products("skew_normal", 1, stats.skewnorm(6.0), 3.0)
products("skew_normal", 6, stats.skewnorm(4.0), -12.0)
products("gumbel", 4, stats.gumbel_r(), 100.0)
products("laplace", 5, stats.laplace(), 0.0)
products("student_factors", 4, stats.t(3.0), 5.0)


# -- draws ------------------------------------------------------------------------------------


def rng_of(target: Target, seed: int) -> np.random.Generator:
    return np.random.default_rng([zlib.crc32(target.name.encode()), seed])


def exact_draws(target: Target, n: int, seed: int) -> Array:
    return target.draw(n, rng_of(target, seed))


def mcmc_draws(target: Target, n: int, seed: int, chains: int = 4, thin: int = 20) -> Array:
    """``(chains, n / chains, d)`` by differential evolution with a fixed pool of exact draws.

    A move adds the scaled difference of two members of the pool, which is symmetric; every fifth
    is unscaled, and may lead from mode to mode. Chains start in the law itself; what is left are
    correlated draws and repeated rows.
    """
    rng = rng_of(target, 1000 + seed)
    pool, x = target.draw(2000, rng), target.draw(chains, rng)
    log_p = target.log_density(x)
    d, kept = target.dim, []
    for step in range(thin * (n // chains)):
        pair = pool[rng.integers(len(pool), size=(2, chains))]
        scale = 1.0 if step % 5 == 0 else 2.38 / math.sqrt(2 * d) * rng.choice([1.0, 0.4])
        proposed = x + scale * (pair[0] - pair[1])
        if target.support and target.support[-1] == "simplex":
            proposed[:, -1] = 1 - proposed[:, :-1].sum(1)
        log_new = target.log_density(proposed)
        accepted = np.log(rng.random(chains)) < log_new - log_p
        x = np.where(accepted[:, None], proposed, x)
        log_p = np.where(accepted, log_new, log_p)
        if step % thin == thin - 1:
            kept.append(x)
    return np.stack(kept, 1)


def ensemble_draws(target: Target, n: int, seed: int, walkers: int = 100) -> Array:
    """``(walkers, n / walkers, d)`` by stretch moves (Goodman & Weare 2010).

    In turn, each half of the walkers moves along lines through walkers of the other half.
    """
    rng = rng_of(target, 2000 + seed)
    x, d, kept = target.draw(walkers, rng), target.dim, []
    log_p = target.log_density(x)
    halves = np.arange(0, walkers, 2), np.arange(1, walkers, 2)
    for _ in range(100 + n // walkers):
        for moved, fixed in (halves, halves[::-1]):
            z = (1 + rng.random(len(moved))) ** 2 / 2
            other = x[rng.choice(fixed, size=len(moved))]
            proposed = other + z[:, None] * (x[moved] - other)
            log_new = target.log_density(proposed)
            log_ratio = (d - 1) * np.log(z) + log_new - log_p[moved]
            accepted = np.log(rng.random(len(moved))) < log_ratio
            x[moved] = np.where(accepted[:, None], proposed, x[moved])
            log_p[moved] = np.where(accepted, log_new, log_p[moved])
        kept.append(x.copy())
    return np.stack(kept[100:], 1)


def free(target: Target) -> tuple[Callable[[Array], Array], Callable[[Array], Array], int]:
    """The target in unconstrained coordinates: log-density, map of draws there, dimension.

    For the peers, which know no supports: positive columns by the logarithm, intervals by the
    logit, a simplex by log-ratios to its last coordinate.
    """
    support = target.support or (None,) * target.dim
    if support[0] == "simplex":

        def spread(y: Array) -> Array:
            full = np.hstack([y, np.zeros((len(y), 1))])
            return np.exp(full - logsumexp(full, axis=1, keepdims=True))

        def log_density(y: Array) -> Array:
            x = spread(y)
            return target.log_density(x) + np.log(x).sum(1)

        return log_density, lambda x: np.log(x[:, :-1] / x[:, -1:]), target.dim - 1

    positive = np.array([s == "positive" for s in support])
    ends = [s if isinstance(s, tuple) else (math.nan, math.nan) for s in support]
    low, high = np.array(ends).T
    between = np.isfinite(low)

    def to_free(x: Array) -> Array:
        with np.errstate(all="ignore"):
            inside = np.log(x - low) - np.log(high - x)
            return np.where(positive, np.log(x), np.where(between, inside, x))

    def log_density_free(y: Array) -> Array:
        with np.errstate(all="ignore"):
            u = 1 / (1 + np.exp(-y))
            x = np.where(positive, np.exp(y), np.where(between, low + (high - low) * u, y))
            slope = np.where(between, np.log((high - low) * u * (1 - u)), 0.0)
            log_p = target.log_density(x) + np.where(positive, y, slope).sum(1)
        return np.where(np.isnan(log_p), -np.inf, log_p)

    return log_density_free, to_free, target.dim
