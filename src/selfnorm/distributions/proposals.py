"""Proposals and base densities: modules with ``sample(shape)`` and ``log_prob(x)``.

They behave like ``torch.distributions`` objects over rows of ``d`` numbers, move with
``.to(device)`` and are fitted to data by ``fit_to(x)``. Densities are with respect to Lebesgue
measure. Outside the support ``log_prob`` is ``-inf``; it never raises for a value. Any other
distribution (of torch, of zuko, your own object) is made one of them by :func:`as_proposal`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn
from torch.distributions import Distribution, Independent

from selfnorm._context import alone, seeded
from selfnorm._inputs import as_rows, one_per_row
from selfnorm._saved import saved
from selfnorm.distributions.mixtures import (
    FromUniforms,
    check_width,
    choose_component,
    mixture_log_prob,
    pick_component,
)
from selfnorm.errors import ProposalError

CHUNK_SIZE = 16_384  # rows per forward pass where the caller does not say
_LOG_2PI = math.log(2 * math.pi)


class UnnormalisedModel(Protocol):
    """A density up to its normaliser: what the weights of proposal samples are computed for."""

    log_norm: Any

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        ...

    def log_unnormalized(self, x: Tensor) -> Tensor:
        """``-E(x) + log d(x)``: ``(n, dim) -> (n,)``."""
        ...


class Samples(Protocol):
    """Anything that draws samples of a shape."""

    def sample(self, shape: torch.Size, /) -> object:
        """Draws ``(*shape, d)``."""
        ...


class LabelDistribution(Protocol):
    """What a proposal called with a condition returns: one density for each of a batch."""

    def sample(self, shape: Sequence[int] = ()) -> Tensor:
        """Independent draws ``(*shape, *batch, d)``."""
        ...

    def log_prob(self, y: Tensor) -> Tensor:
        """Log-density of rows ``(*samples, *batch, d)``."""
        ...


class Proposal(nn.Module, ABC):
    """A density over rows of ``dim`` numbers that can be sampled and evaluated.

    Called with a condition ``(*batch, k)``, as conditional proposals are, it is the same density
    for each of the batch.

    Attributes:
        shared: whether conditional models may draw one set of samples for a whole batch.

    Example:
        >>> q = Uniform(torch.zeros(1), torch.ones(1))
        >>> q(torch.zeros(5, 3)).sample((2,)).shape
        torch.Size([2, 5, 1])
    """

    dim: int
    shared: bool = True
    light_tails: ClassVar[bool] = False  # a Gaussian's: weights of heavier ones have no variance

    def extra_repr(self) -> str:
        """What stands between the brackets where it is printed."""
        return f"dim={self.dim}"

    @property
    def event_shape(self) -> torch.Size:
        """``(dim,)``, as in ``torch.distributions``."""
        return torch.Size([self.dim])

    @property
    def trainable(self) -> bool:
        """Whether any parameter of the proposal asks for a gradient."""
        return any(p.requires_grad for p in self.parameters())

    @abstractmethod
    def sample(self, shape: Sequence[int] = ()) -> Tensor:
        """Draw rows: ``(*shape, dim)``."""

    @abstractmethod
    def log_prob(self, x: Tensor) -> Tensor:
        """Log-density of rows: ``(*shape, dim) -> (*shape)``."""

    def forward(self, condition: Tensor) -> LabelDistribution:
        """The density at every place of the condition's batch."""
        return Expanded(self, condition.shape[:-1])


class Expanded:
    """A density over rows at every place of a batch, as ``torch.distributions`` expands one."""

    def __init__(self, proposal: Proposal, batch_shape: Sequence[int]) -> None:
        self.proposal, self.batch_shape = proposal, torch.Size(batch_shape)
        self.event_shape = proposal.event_shape

    def sample(self, shape: Sequence[int] = ()) -> Tensor:
        """Independent draws ``(*shape, *batch, d)``."""
        return self.proposal.sample((*shape, *self.batch_shape))

    def log_prob(self, y: Tensor) -> Tensor:
        """Log-density of rows ``(*samples, *batch, d)``."""
        check_width(y, self.proposal.dim)
        return self.proposal.log_prob(y)


class _LocationScale(Proposal):
    """``x = loc + L e`` with ``e`` a standard distribution: what Gaussian and Student-t share."""

    loc: Tensor
    scale_tril: Tensor
    whiten: Tensor
    log_scale_const: Tensor

    def __init__(
        self, loc: Tensor, scale: Tensor | float | None, covariance: Tensor | None
    ) -> None:
        super().__init__()
        loc = torch.atleast_1d(_numbers(loc)).clone()
        if loc.dim() != 1:
            raise ProposalError(
                f"the location must be a vector of length d, got {tuple(loc.shape)}"
            )
        self.dim = loc.shape[0]
        if (scale is None) == (covariance is None):
            raise ProposalError("give exactly one of scale (diagonal) and covariance (full)")
        if covariance is not None:
            tril = _cholesky(_numbers(covariance), (self.dim, self.dim)).to(loc.dtype)
        else:
            tril = torch.diag(_diagonal(_numbers(scale, loc), self.dim))
        whiten, log_det = _whitening(tril)
        self.register_buffer("loc", loc)
        self.register_buffer("scale_tril", tril)
        self.register_buffer("whiten", whiten.to(loc.dtype))
        self.register_buffer("log_scale_const", (-log_det).to(loc.dtype))

    def _noise(self, shape: Sequence[int]) -> Tensor:
        return torch.randn(*shape, self.dim, device=self.loc.device, dtype=self.loc.dtype)

    def _whitened(self, x: Tensor) -> Tensor:
        return (x - self.loc) @ self.whiten.T


def _unit_box(kind: type[Uniform], dim: int, shared: bool) -> Uniform:
    box = kind(torch.zeros(dim), torch.ones(dim))
    box.shared = shared
    return box


def _unit_mixture(kind: type[GaussianMixture], dim: int, n_components: int) -> GaussianMixture:
    shapes = torch.eye(dim).repeat(n_components, 1, 1)
    return kind(torch.ones(n_components), torch.zeros(n_components, dim), shapes)


@saved("dim", build=lambda kind, dim: kind(torch.zeros(dim), covariance=torch.eye(dim)))
class Gaussian(_LocationScale):
    r"""Gaussian with diagonal (``scale``) or full (``covariance``) spread.

    Example:
        >>> q = Gaussian(torch.zeros(2), scale=torch.ones(2))
        >>> q.log_prob(torch.zeros(2))
        tensor(-1.8379)
        >>> x = torch.randn(500, 3)
        >>> Gaussian.fit_to(x, full=True).sample((7,)).shape
        torch.Size([7, 3])
    """

    light_tails = True

    def __init__(
        self, mean: Tensor, scale: Tensor | float | None = None, covariance: Tensor | None = None
    ) -> None:
        super().__init__(mean, scale, covariance)

    @classmethod
    def fit_to(cls, x: Tensor, *, full: bool = True, inflate: float = 1.0) -> Gaussian:
        """Maximum-likelihood mean and (co)variance; ``inflate`` multiplies the spread."""
        x, dtype = _double_rows(x)
        mean = x.mean(0)
        if full and x.shape[1] > 1:
            cov = torch.cov(x.T, correction=0) * inflate**2
            return cls(mean.to(dtype), covariance=_ridge(cov, x))
        return cls(mean.to(dtype), scale=_positive_scale(x) * inflate)

    def sample(self, shape: Sequence[int] = ()) -> Tensor:
        """Draw rows: ``(*shape, dim)``."""
        return self.loc + self._noise(shape) @ self.scale_tril.T

    def log_prob(self, x: Tensor) -> Tensor:
        """Log-density of rows."""
        square = self._whitened(x).square().sum(-1)
        return self.log_scale_const - 0.5 * (square + self.dim * _LOG_2PI)


@saved(
    arguments=lambda q: {"dim": q.dim, "df": float(q.df)},
    build=lambda kind, dim, df: kind(df, torch.zeros(dim), covariance=torch.eye(dim)),
)
class StudentT(_LocationScale):
    r"""Multivariate Student-t: Gaussian in the middle, polynomial tails.

    The tails make it a safe proposal: importance weights against any lighter-tailed model are
    bounded.

    Example:
        >>> q = StudentT(3.0, torch.zeros(1), scale=1.0)
        >>> ref = torch.distributions.StudentT(3.0).log_prob(torch.tensor(2.0))
        >>> torch.allclose(q.log_prob(torch.tensor([2.0])), ref)
        True
    """

    df: Tensor

    def __init__(
        self,
        df: float,
        loc: Tensor,
        scale: Tensor | float | None = None,
        covariance: Tensor | None = None,
    ) -> None:
        super().__init__(loc, scale, covariance)
        if df <= 0:
            raise ProposalError(f"the degrees of freedom must be positive, got {df}")
        self.register_buffer("df", torch.as_tensor(float(df), dtype=self.loc.dtype))
        self._log_const = _student_const(float(df), self.dim)

    def extra_repr(self) -> str:
        """With the degrees of freedom."""
        return f"dim={self.dim}, df={float(self.df):g}"

    def _load_from_state_dict(self, *args: Any, **options: Any) -> None:
        super()._load_from_state_dict(*args, **options)
        self._log_const = _student_const(float(self.df), self.dim)  # of the degrees just read

    @classmethod
    def fit_to(cls, x: Tensor, *, df: float = 5.0, n_iter: int = 50) -> StudentT:
        """Maximum-likelihood location and scatter for a given ``df``, by EM.

        EM reweights far points down, so a few extreme rows (or infinite variance) do not blow the
        scatter up as they would a covariance.
        """
        x, dtype = _double_rows(x)
        n, d = x.shape
        loc = x.median(0).values
        start = torch.cov(x.T, correction=0).reshape(d, d)
        scatter = _ridge(start, x)
        for _ in range(n_iter):
            centred = x - loc
            z = torch.linalg.solve_triangular(
                torch.linalg.cholesky(scatter), centred.T, upper=False
            )
            weight = (df + d) / (df + z.square().sum(0))
            loc = (weight[:, None] * x).sum(0) / weight.sum()
            centred = x - loc
            scatter = _ridge((centred.T * weight) @ centred / n, x)
        return cls(df, loc.to(dtype), covariance=scatter)

    def sample(self, shape: Sequence[int] = ()) -> Tensor:
        """Draw rows: ``(*shape, dim)``."""
        noise, half_df = self._noise(shape), self.df / 2
        # What Gamma draws, by an operation that goes through vmap.
        mixing = torch._standard_gamma(half_df.expand(*shape, 1)) / half_df  # noqa: SLF001
        # Clamped, because float32 gamma draws can underflow to zero.
        return self.loc + (noise / mixing.clamp_min(1e-30).sqrt()) @ self.scale_tril.T

    def log_prob(self, x: Tensor) -> Tensor:
        """Log-density of rows."""
        tail = torch.log1p(self._whitened(x).square().sum(-1) / self.df)
        return self._log_const + self.log_scale_const - 0.5 * (self.df + self.dim) * tail


@saved("dim", "shared", build=_unit_box)
class Uniform(Proposal):
    """Uniform over a box.

    Example:
        >>> q = Uniform(torch.tensor([0.0]), torch.tensor([2.0]))
        >>> q.log_prob(torch.tensor([[1.0], [3.0]]))
        tensor([-0.6931,    -inf])
    """

    low: Tensor
    high: Tensor

    def __init__(self, low: Tensor, high: Tensor) -> None:
        super().__init__()
        low, high = torch.atleast_1d(_numbers(low)), torch.atleast_1d(_numbers(high))
        if low.shape != high.shape or low.dim() != 1 or not bool((low < high).all()):
            raise ProposalError(
                "low and high must be vectors of one length with low < high in every column, got "
                f"shapes {tuple(low.shape)} and {tuple(high.shape)}"
            )
        self.dim = low.shape[0]
        self.register_buffer("low", low.detach().clone())
        self.register_buffer("high", high.detach().clone())

    @classmethod
    def fit_to(cls, x: Tensor, *, margin: float = 0.1) -> Uniform:
        """The bounding box of the data, widened on each side by ``margin`` times its width."""
        x, dtype = _double_rows(x)
        low, high = x.min(0).values, x.max(0).values
        width = torch.where(high > low, high - low, 1.0)
        return cls((low - margin * width).to(dtype), (high + margin * width).to(dtype))

    def sample(self, shape: Sequence[int] = ()) -> Tensor:
        """Draw rows: ``(*shape, dim)``."""
        u = torch.rand(*shape, self.dim, device=self.low.device, dtype=self.low.dtype)
        return self.from_uniforms(u)

    def from_uniforms(self, u: Tensor) -> Tensor:
        """Uniform numbers ``(*shape, dim)`` between 0 and 1 moved onto the box."""
        return self.low + (self.high - self.low) * u

    def log_prob(self, x: Tensor) -> Tensor:
        """Log-density of rows, ``-inf`` outside the box."""
        inside = ((x >= self.low) & (x <= self.high)).all(-1)
        log_density = -(self.high - self.low).log().sum()
        return torch.where(inside, log_density, -math.inf)

    def forward(self, condition: Tensor) -> LabelDistribution:
        """The density at every place of the condition's batch; its draws may be stratified."""
        return _ExpandedUniform(self, condition.shape[:-1])


class _ExpandedUniform(FromUniforms):
    """A box at every place of a batch."""

    def __init__(self, box: Uniform, batch_shape: Sequence[int]) -> None:
        super().__init__(box.low, batch_shape, box.event_shape)
        self.box = box

    def from_uniforms(self, u: Tensor) -> Tensor:
        """Uniforms ``(*shape, *batch, d)`` moved onto the box."""
        return self.box.from_uniforms(u)

    def log_prob(self, y: Tensor) -> Tensor:
        """Log-density of rows ``(*samples, *batch, d)``."""
        check_width(y, self.box.dim)
        return self.box.log_prob(y)


@saved(
    arguments=lambda q: {"dim": q.dim, "n_components": len(q.weights)},
    build=_unit_mixture,
)
class GaussianMixture(Proposal):
    """Mixture of full-covariance Gaussians, fitted by scikit-learn's EM.

    Example:
        >>> x = torch.cat([torch.randn(200, 2) - 3, torch.randn(200, 2) + 3])
        >>> q = GaussianMixture.fit_to(x, n_components=2, seed=0)
        >>> q.sample((4,)).shape, q.log_prob(x).shape
        (torch.Size([4, 2]), torch.Size([400]))
    """

    light_tails = True
    weights: Tensor
    means: Tensor
    scale_trils: Tensor
    whiten: Tensor
    log_consts: Tensor

    def __init__(self, weights: Tensor, means: Tensor, covariances: Tensor) -> None:
        super().__init__()
        means = _numbers(means)
        weights, covariances = _numbers(weights, means), _numbers(covariances, means)
        n_components, self.dim = means.shape
        if weights.shape != (n_components,):
            raise ProposalError(f"expected weights ({n_components},), got {tuple(weights.shape)}")
        if bool((weights < 0).any()) or not float(weights.sum()) > 0:
            raise ProposalError(f"the weights must not be negative, got {weights.tolist()}")
        tril = _cholesky(covariances, (n_components, self.dim, self.dim))
        whiten, log_det = _whitening(tril)
        dtype = means.dtype
        self.register_buffer("weights", weights / weights.sum())
        self.register_buffer("means", means.detach().clone())
        self.register_buffer("scale_trils", tril.to(dtype))
        self.register_buffer("whiten", whiten.to(dtype))
        log_consts = self.weights.double().log() - log_det - 0.5 * self.dim * _LOG_2PI
        self.register_buffer("log_consts", log_consts.to(dtype))

    @classmethod
    def fit_to(
        cls, x: Tensor, *, n_components: int = 10, seed: int = 0, min_scale: float = 1e-2
    ) -> GaussianMixture:
        """Fit by EM; ``min_scale`` (in column sds) keeps components from collapsing on points."""
        from sklearn.mixture import GaussianMixture as SklearnMixture

        x, dtype = _double_rows(x)
        scale = _positive_scale(x)
        k = max(1, min(n_components, x.shape[0] // 5))
        fitted = SklearnMixture(k, reg_covar=min_scale**2, random_state=seed, max_iter=200)
        with alone():  # scikit-learn changes the number of threads of the process
            fitted.fit((x / scale).cpu().numpy())

        def to_torch(values: np.ndarray) -> Tensor:
            return torch.as_tensor(values, dtype=dtype, device=x.device)

        outer = (scale[:, None] * scale).to(dtype)
        return cls(
            to_torch(fitted.weights_),
            to_torch(fitted.means_) * scale.to(dtype),
            to_torch(fitted.covariances_) * outer,
        )

    def sample(self, shape: Sequence[int] = ()) -> Tensor:
        """Draw rows: ``(*shape, dim)``."""
        u = torch.rand(*shape, device=self.means.device, dtype=self.means.dtype)
        component, _ = choose_component(self.weights, u)
        noise = torch.randn(*shape, self.dim, 1, device=u.device, dtype=u.dtype)
        spread = pick_component(self.scale_trils, component, event_dims=2) @ noise
        return pick_component(self.means, component, event_dims=1) + spread.squeeze(-1)

    def log_prob(self, x: Tensor) -> Tensor:
        """Log-density of rows."""
        centred = x.unsqueeze(-2) - self.means
        z = torch.einsum("kij,...kj->...ki", self.whiten, centred)
        return mixture_log_prob(self.log_consts, -0.5 * z.square().sum(-1))


def as_proposal(q: object, dim: int | None = None) -> Proposal:
    """Make ``q`` a :class:`Proposal`.

    Accepts a proposal of this library, any ``torch.distributions.Distribution`` (scalar ones become
    one-column ones, batched ones independent columns), a lazy distribution (a module whose call
    without arguments returns a distribution, as in zuko), or any object with ``sample(shape)`` and
    ``log_prob(x)``.

    Example:
        >>> q = as_proposal(torch.distributions.Exponential(torch.tensor([1.0, 2.0])))
        >>> q.sample((3,)).shape, q.log_prob(torch.tensor([-1.0, 1.0]))
        (torch.Size([3, 2]), tensor(-inf))
    """
    if isinstance(q, Proposal):
        proposal: Proposal = q
    elif isinstance(q, Distribution):
        rows = _over_rows(q)
        own = not type(q).__module__.startswith(("torch.", "zuko."))
        proposal = _Foreign(rows, partial(_log_prob_with_support, rows), own=own)
    elif hasattr(q, "sample") and hasattr(q, "log_prob"):
        proposal = _Foreign(q, q.log_prob)
    elif isinstance(q, nn.Module):
        proposal = _Lazy(q)
    else:
        raise ProposalError(
            f"{type(q).__name__} cannot serve as a proposal: it needs sample(shape) and "
            "log_prob(x), or to be a torch.distributions.Distribution"
        )
    if dim is not None and proposal.dim != dim:
        raise ProposalError(
            f"the proposal is over rows of {proposal.dim} numbers, the data have {dim} columns; "
            f"fit it to the data (e.g. Gaussian.fit_to(x)) or give it event shape ({dim},)"
        )
    return proposal


def proposal_for(model: UnnormalisedModel, q: object, dim: int | None = None) -> Proposal:
    """:func:`as_proposal`, on the model's device and in the floating-point type of its parameters.

    A proposal with tensors of its own is moved in place, as ``nn.Module.to`` does.
    """
    proposal = as_proposal(q, dim)
    for part in proposal.modules():
        if isinstance(part, _Foreign) and part.own:
            _refuse_contradiction(part, model.device)
    return proposal.to(model.device, getattr(model, "dtype", None))


_JUDGED = 2000  # rows of each kind that tell whether samples and log_prob belong together


@torch.no_grad()
def _refuse_contradiction(q: _Foreign, device: torch.device) -> None:
    """Refuse a proposal whose ``log_prob`` is not the log-density of its samples.

    For any density ``h`` and any region, ``E_q[h/q; region] = P_h(region)``. Here ``h`` is a
    mixture fitted to some samples of ``q``; the region is their box, and in it where ``h/q`` is not
    larger than at 99 % of them, so that both are means of bounded numbers. Nothing is said where
    values repeat (whole numbers, atoms), or where ``h`` does not come close enough.
    """
    with seeded(0, device):
        first, rows = q.sample((2 * _JUDGED,)).chunk(2)
        repeats = any(len(column.unique()) < _JUDGED // 2 for column in first.T)
        if repeats or not bool(first.isfinite().all()):
            return
        h = GaussianMixture.fit_to(first)
        low, high = first.aminmax(dim=0)

        def log_ratios(x: Tensor) -> Tensor:
            ratios = x.new_full((len(x),), math.inf, dtype=torch.float64)
            inside = ((x >= low) & (x <= high)).all(-1)
            ratios[inside] = (h.log_prob(x[inside]) - q.log_prob(x[inside])).double()
            return ratios

        limit = log_ratios(first).quantile(0.99)
        of_q, of_h = log_ratios(rows), log_ratios(h.sample((_JUDGED,)))
    by_q, by_h = torch.where(of_q <= limit, (of_q - limit).exp(), 0.0), (of_h <= limit).double()
    parts = [(x.mean().log(), x.var() / x.mean().square() / _JUDGED) for x in (by_q, by_h)]
    off = float(limit + parts[0][0] - parts[1][0])
    error = math.sqrt(float(parts[0][1] + parts[1][1]))
    if error < 0.1 and abs(off) > 0.1 + 5 * error:
        raise ProposalError(
            f"log_prob of {type(q.distribution).__name__} is not the log-density of its samples: "
            f"every log Z would be off by {off:+.2f}. Is a constant or a Jacobian missing, a scale "
            "another one, or log_prob not -inf where no sample can be?"
        )


class _Foreign(Proposal):
    """A distribution of somebody's own; its first sample has its width and type.

    ``nn.Module.to`` does not reach the distribution: ``kind`` has the type of the samples.
    """

    kind: Tensor

    def __init__(
        self, distribution: Samples, log_density: Callable[[Tensor], object], *, own: bool = True
    ) -> None:
        super().__init__()
        self.distribution, self.log_density, self.own = distribution, log_density, own
        with seeded(0):
            first = torch.as_tensor(distribution.sample(torch.Size([1])))
        self.dim = first.numel()
        self._own = first.dtype if first.is_floating_point() else torch.float32
        self.register_buffer("kind", torch.zeros((), dtype=self._own), persistent=False)

    def sample(self, shape: Sequence[int] = ()) -> Tensor:
        drawn = torch.as_tensor(self.distribution.sample(torch.Size(shape)))
        return drawn.to(self.kind.dtype).reshape(*shape, self.dim)

    def log_prob(self, x: Tensor) -> Tensor:
        # Rows as wide as the distribution's own numbers: a flow in float64 needs such rows.
        rows = x.to(torch.promote_types(x.dtype, self._own))
        whose = f"log_prob of {type(self.distribution).__name__}"
        return one_per_row(self.log_density(rows), x.shape[:-1], whose, ProposalError).to(x.dtype)


class _Lazy(Proposal):
    """A module whose call returns a distribution over rows."""

    def __init__(self, lazy: nn.Module) -> None:
        super().__init__()
        self.lazy = lazy
        distribution = lazy()
        if not isinstance(distribution, Distribution) or len(distribution.event_shape) != 1:
            raise ProposalError(
                f"calling {type(lazy).__name__}() did not return a distribution over rows; "
                "pass the distribution itself"
            )
        self.dim = distribution.event_shape[0]

    @torch.no_grad()
    def sample(self, shape: Sequence[int] = ()) -> Tensor:
        drawn: Tensor = self.lazy().sample(torch.Size(shape))
        return drawn

    def log_prob(self, x: Tensor) -> Tensor:
        result: Tensor = self.lazy().log_prob(x)
        return result


def _over_rows(distribution: Distribution) -> Distribution:
    """One distribution over rows: a scalar one has one column, a batch independent columns."""
    if not distribution.event_shape and not distribution.batch_shape:
        distribution = distribution.expand(torch.Size([1]))
    if len(distribution.batch_shape) == 1 and not distribution.event_shape:
        distribution = Independent(distribution, 1)
    if distribution.batch_shape or len(distribution.event_shape) != 1:
        raise ProposalError(
            "a proposal must be one distribution over rows: got batch shape "
            f"{tuple(distribution.batch_shape)} and event shape {tuple(distribution.event_shape)}"
        )
    return distribution


def _log_prob_with_support(distribution: Distribution, x: Tensor) -> Tensor:
    """Log-density with ``-inf`` outside the support, where torch would raise or extrapolate."""
    try:
        inside = distribution.support.check(x)  # type: ignore[union-attr]
    except NotImplementedError:  # not said, e.g. by zuko's flows: everywhere
        return distribution.log_prob(x)
    if inside.dim() == x.dim():
        inside = inside.all(-1)
    if bool(inside.all()):
        return distribution.log_prob(x)
    safe = torch.where(inside.unsqueeze(-1), x, distribution.sample())
    return torch.where(inside, distribution.log_prob(safe), -math.inf)


def _numbers(values: ArrayLike | Tensor | None, like: Tensor | None = None) -> Tensor:
    """Floating-point numbers without a gradient, of the type and on the device of ``like``."""
    tensor = torch.as_tensor(values).detach()
    if like is not None:
        return tensor.to(like)
    return tensor if tensor.is_floating_point() else tensor.float()


def _double_rows(x: object) -> tuple[Tensor, torch.dtype]:
    """Rows to fit to, in double precision, and the type of the result: theirs, or float32."""
    x = as_rows(x)
    if x.dim() == 1:
        x = x.unsqueeze(-1)
    if x.dim() != 2 or x.shape[0] < 2:
        raise ProposalError(
            f"fit_to needs a table of at least two rows, shape (n, d); got {tuple(x.shape)}"
        )
    if not bool(torch.isfinite(x).all()):
        raise ProposalError("fit_to needs finite data; drop or impute NaN and infinite rows first")
    return x.detach().double(), torch.promote_types(x.dtype, torch.float32)


def _student_const(df: float, dim: int) -> float:
    """The part of a Student-t's log-density that depends on neither place nor scatter."""
    gammas = math.lgamma((df + dim) / 2) - math.lgamma(df / 2)
    return gammas - 0.5 * dim * math.log(df * math.pi)


def _positive_scale(x: Tensor) -> Tensor:
    scale = x.std(0, correction=0)
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def _ridge(cov: Tensor, x: Tensor) -> Tensor:
    """Make a covariance safely positive definite, relative to its own scale in each column.

    Stays in double precision: rounded to float32 the ridge of columns that repeat one another
    would be lost again. A constant column of the rows ``x`` gets variance one, as in
    :func:`_positive_scale`.
    """
    constant = (x == x[0]).all(0)
    return cov + torch.diag(torch.where(constant, 1.0, 1e-8 * cov.diagonal()))


def _diagonal(scale: Tensor, dim: int) -> Tensor:
    """One positive scale per column."""
    if scale.shape not in ((), (1,), (dim,)):
        raise ProposalError(f"the scale must be a number or ({dim},), got {tuple(scale.shape)}")
    if not bool((scale > 0).all()):
        raise ProposalError("every scale must be positive; is a column constant?")
    return scale.expand(dim)


def _cholesky(covariance: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Lower triangles of covariances ``(*K, d, d)``, in double precision."""
    if covariance.shape != shape:
        raise ProposalError(
            f"the covariance must have shape {shape}, got {tuple(covariance.shape)}"
        )
    tril, info = torch.linalg.cholesky_ex(covariance.double())
    if bool((info != 0).any()):
        which = f" of component {int(info.nonzero()[0])}" if info.dim() else ""
        raise ProposalError(
            f"the covariance{which} is not positive definite: does a column repeat others, or "
            "their sum? Drop it, or add a small multiple of the identity"
        )
    return tril


def _whitening(tril: Tensor) -> tuple[Tensor, Tensor]:
    """``L^-1`` and ``log |det L|`` of lower triangles ``(*K, d, d)``, in double precision."""
    tril = tril.double()
    eye = torch.eye(tril.shape[-1], dtype=tril.dtype, device=tril.device).expand_as(tril)
    whiten = torch.linalg.solve_triangular(tril, eye, upper=False)
    return whiten, tril.diagonal(dim1=-2, dim2=-1).log().sum(-1)


def log_weight_chunks(
    model: UnnormalisedModel, proposal: Proposal, n_samples: int, chunk_size: int = CHUNK_SIZE
) -> Iterator[tuple[Tensor, Tensor]]:
    """Log-weights ``log p~(x) - log q(x)`` of fresh proposal samples, a chunk at a time.

    With them goes ``log q``, which tells whose fault a weight is that is not a number.
    """
    for start in range(0, n_samples, chunk_size):
        samples = proposal.sample((min(chunk_size, n_samples - start),))
        log_p, log_q = model.log_unnormalized(samples), proposal.log_prob(samples)
        yield log_p - log_q, log_q


def refuse_nan(log_q: Tensor, where: str, whose: str = "the proposal's") -> None:
    """Say of a proposal whose log-density is NaN that it is the proposal's."""
    nan = torch.isnan(log_q).flatten()
    if bool(nan.any()):
        raise ProposalError(
            f"{whose} log_prob is NaN at {int(nan.sum())} of {len(nan)} {where} (the "
            f"first is number {int(nan.nonzero()[0])}): it must be a number, or -inf where the "
            "proposal has no mass"
        )


def refuse_unreached(log_q: Tensor, what: str, cure: str) -> None:
    """Refuse a proposal that has no density at data: what it cannot reach, it cannot normalise."""
    refuse_nan(log_q, what)
    missed = ~torch.isfinite(log_q).flatten()
    if bool(missed.any()):
        raise ProposalError(
            f"the proposal has zero density at {int(missed.sum())} of {len(missed)} {what} (the "
            f"first is number {int(missed.nonzero()[0])}): what it cannot reach, it cannot "
            f"normalise. Widen it, or {cure}"
        )


@torch.no_grad()
def draw_log_weights(
    model: UnnormalisedModel, proposal: Proposal, n_samples: int, chunk_size: int = CHUNK_SIZE
) -> Tensor:
    """Log-weights of ``n_samples`` fresh proposal samples, in chunks: ``(n_samples,)``."""
    chunks = log_weight_chunks(model, proposal, n_samples, chunk_size)
    return torch.cat([log_w for log_w, _ in chunks])
