"""Proposals for labels: mixture density networks, and fixed laws that ignore the input.

A conditional proposal is a module whose ``forward(h)`` takes features ``h`` of shape
``(*batch, d_h)`` and returns a distribution over labels ``y`` of shape ``(*batch, d)`` with
``sample(shape)`` and ``log_prob(y)``; densities are with respect to Lebesgue measure on ``y``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from selfnorm._inputs import check_rows
from selfnorm.distributions.defensive import mix_log_probs, mix_samples
from selfnorm.distributions.mixtures import (
    choose_component,
    gaussian_log_prob,
    mixture_log_prob,
    pick_component,
)
from selfnorm.distributions.proposals import Uniform
from selfnorm.errors import DataError, ProposalError
from selfnorm.networks import StackedMLP, perceptron

_SQRT_2 = math.sqrt(2.0)


class _FromUniforms(ABC):
    """A law of labels whose draws are a function of uniform numbers, one law per batch element."""

    def __init__(self, like: Tensor, batch_shape: Sequence[int], event_shape: torch.Size) -> None:
        self.batch_shape, self.event_shape = torch.Size(batch_shape), event_shape
        self.tensor_options: dict[str, Any] = {"device": like.device, "dtype": like.dtype}

    @abstractmethod
    def from_uniforms(self, u: Tensor) -> Tensor:
        """Map uniforms ``(*shape, *batch, d)`` to labels of that shape."""

    def sample(self, shape: Sequence[int] = ()) -> Tensor:
        """Independent draws ``(*shape, *batch, d)``."""
        return self.from_uniforms(self._uniforms(*shape))

    def stratified_sample(self, n_samples: int) -> Tensor:
        """``n_samples`` draws ``(M, *batch, d)``, one from each of ``M`` slices of equal mass.

        Slices are in the first uniform number; averages over the draws are unbiased, with less
        variance than independent draws have.
        """
        u = self._uniforms(n_samples)
        first = (self._slices(n_samples) + u[..., :1]) / n_samples
        return self.from_uniforms(torch.cat([first, u[..., 1:]], dim=-1))

    def midpoints(self, n_samples: int) -> Tensor:
        """The middle of each of ``M`` slices of a one-dimensional label: a deterministic rule."""
        u = (self._slices(n_samples) + 0.5) / n_samples
        return self.from_uniforms(u.expand(n_samples, *self.batch_shape, 1))

    def _uniforms(self, *shape: int) -> Tensor:
        return torch.rand((*shape, *self.batch_shape, *self.event_shape), **self.tensor_options)

    def _slices(self, n_samples: int) -> Tensor:
        index = torch.arange(n_samples, **self.tensor_options)
        return index.view(-1, *[1] * (len(self.batch_shape) + 1))


class MixtureLabels(_FromUniforms):
    """Mixture of diagonal Gaussians over ``y``, one mixture per batch element.

    ``q(y) = sum_k pi_k prod_j N(y_j; mu_kj, sigma_kj^2)``

    Args:
        log_weights: ``(*batch, K)``, normalised: ``logsumexp`` over the last dimension is zero.
        means: ``(*batch, K, d)``.
        scales: ``(*batch, K, d)``, positive.

    >>> q = MixtureLabels(torch.tensor([[0.0]]), torch.tensor([[[1.0]]]), torch.tensor([[[2.0]]]))
    >>> round(q.log_prob(torch.tensor([[1.0]])).item(), 4)
    -1.6121
    """

    def __init__(self, log_weights: Tensor, means: Tensor, scales: Tensor) -> None:
        super().__init__(means, log_weights.shape[:-1], means.shape[-1:])
        self.log_weights, self.means, self.scales = log_weights, means, scales

    def log_prob(self, y: Tensor) -> Tensor:
        """``log q(y|x)`` of labels ``(*samples, *batch, d)``; shape ``(*samples, *batch)``."""
        _check_width(y, self.means.shape[-1])
        z = (y.unsqueeze(-2) - self.means) / self.scales
        return mixture_log_prob(self.log_weights, gaussian_log_prob(z, self.scales.log().sum(-1)))

    def from_uniforms(self, u: Tensor) -> Tensor:
        """Map uniforms ``(*shape, *batch, d)`` to labels of that shape.

        The first coordinate chooses the component by weight and, by what is left of it, the
        quantile of the component's first coordinate; the others are quantiles of theirs.
        """
        component, level = choose_component(self.log_weights.exp(), u[..., 0])
        levels = torch.cat([level.unsqueeze(-1), u[..., 1:]], dim=-1)
        eps = torch.finfo(u.dtype).eps
        noise = torch.special.ndtri(levels.clamp(eps, 1 - eps))
        mean, scale = (pick_component(t, component, 1) for t in (self.means, self.scales))
        return mean + scale * noise

    def cdf(self, y: Tensor) -> Tensor:
        """Per-coordinate mixture CDF of ``(*samples, *batch, d)``, the same shape."""
        _check_width(y, self.means.shape[-1])
        z = (y.unsqueeze(-2) - self.means) / self.scales
        inside = 0.5 * (1.0 + torch.erf(z / _SQRT_2))
        return (inside * self.log_weights.exp().unsqueeze(-1)).sum(-2)

    @property
    def mean(self) -> Tensor:
        """Mean, ``(*batch, d)``."""
        return (self.log_weights.exp().unsqueeze(-1) * self.means).sum(-2)

    @property
    def stddev(self) -> Tensor:
        """Standard deviation of each coordinate, ``(*batch, d)``."""
        weights = self.log_weights.exp().unsqueeze(-1)
        spread = self.scales.square() + (self.means - self.mean.unsqueeze(-2)).square()
        return (weights * spread).sum(-2).sqrt()


class MDN(nn.Module):
    """Mixture density network: features ``h`` to a mixture of ``components`` Gaussians over ``y``.

    Three small networks give logits, means and log-scales, as in the paper; with ``hidden=()`` they
    are linear heads. With ``members`` the heads are stacked and ``h`` is ``(members, n, d_h)``.

    Args:
        context: number of features.
        dim: number of label coordinates.
        components: number ``K`` of Gaussians.
        hidden: hidden layer sizes of each of the three networks.
        activation: "relu", "silu", "gelu" or "tanh".
        members: stack this many networks (None: one, without a member dimension).
        min_scale: lower limit of every standard deviation.

    >>> mdn = MDN(context=4, components=3)
    >>> mdn(torch.randn(6, 4)).log_prob(torch.zeros(6, 1)).shape
    torch.Size([6])
    """

    offsets: Tensor
    log_start: Tensor

    def __init__(
        self,
        context: int,
        dim: int = 1,
        components: int = 5,
        *,
        hidden: Sequence[int] = (10,),
        activation: str = "relu",
        members: int | None = None,
        min_scale: float = 1e-3,
    ) -> None:
        super().__init__()
        self.dim, self.components, self.min_scale = dim, components, min_scale
        self.config = {
            "context": context,
            "dim": dim,
            "components": components,
            "hidden": list(hidden),
            "activation": activation,
            "members": members,
            "min_scale": min_scale,
        }
        sizes = (components, components * dim, components * dim)
        # Saved models know the layers by these names: stacked ones are those of a StackedMLP.
        make: Any = perceptron if members is None else StackedMLP
        self.logits, self.means, self.log_scales = (
            make(members, context, hidden, size, activation=activation) for size in sizes
        )
        # Apart from the start: components that begin equal learn the same thing for long.
        self.register_buffer(
            "offsets", torch.linspace(-1.0, 1.0, components)[:, None].expand(-1, dim).clone()
        )
        self.register_buffer("log_start", torch.full((dim,), -0.7))

    def place(self, y: Tensor) -> None:
        """Spread the components over the quantiles of labels ``(n, d)``, with matching scales."""
        y = check_rows(y, "the labels", constant_ok=True)
        levels = (torch.arange(self.components, device=y.device) + 0.5) / self.components
        quantiles = torch.quantile(y.float(), levels.float(), dim=0)
        self.offsets.copy_(quantiles.to(self.offsets))
        self.log_start.copy_(y.std(0).clamp_min(1e-6).mul(0.5).log().to(self.log_start))

    def forward(self, h: Tensor) -> MixtureLabels:
        """The mixture for features ``(*batch, context)``."""
        shape = (*h.shape[:-1], self.components, self.dim)
        log_weights = torch.log_softmax(self.logits(h), dim=-1)
        unit = self.log_start.exp()
        means = self.means(h).view(shape) * unit + self.offsets
        scales = (self.log_scales(h).view(shape).clamp(-12.0, 8.0) + self.log_start).exp()
        return MixtureLabels(log_weights, means, scales + self.min_scale)


class LabelGaussian(nn.Module):
    """``N(mu, Sigma)`` over labels, the same for every input; ``fit_to`` takes training labels.

    >>> q = LabelGaussian.fit_to(torch.randn(100, 2))
    >>> q(torch.zeros(5, 3)).sample((4,)).shape
    torch.Size([4, 5, 2])
    """

    shared = True  # one law for every input
    mean: Tensor
    scale_tril: Tensor

    def __init__(self, mean: Tensor, scale_tril: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("scale_tril", scale_tril)

    @classmethod
    def fit_to(cls, y: Tensor) -> LabelGaussian:
        """Mean and full covariance of labels ``(n, d)``."""
        y = check_rows(y, "the labels")
        return cls(y.mean(0), torch.linalg.cholesky(torch.atleast_2d(torch.cov(y.T))))

    def forward(self, h: Tensor) -> torch.distributions.MultivariateNormal:
        """The Gaussian, expanded to the batch of ``h``."""
        law = torch.distributions.MultivariateNormal(
            self.mean, scale_tril=self.scale_tril, validate_args=False
        )
        return law.expand(h.shape[:-1])


class UniformLabels(_FromUniforms):
    """Uniform law on a box, ``log_prob`` of ``-inf`` outside; batch shape as given."""

    def __init__(self, low: Tensor, high: Tensor, batch_shape: Sequence[int]) -> None:
        super().__init__(low, batch_shape, low.shape)
        self.low, self.high = low, high

    def from_uniforms(self, u: Tensor) -> Tensor:
        """Uniforms ``(*shape, *batch, d)`` moved onto the box."""
        return self.low + (self.high - self.low) * u

    def log_prob(self, y: Tensor) -> Tensor:
        """Log-density of ``(*samples, *batch, d)``."""
        _check_width(y, self.low.shape[-1])
        inside = ((y >= self.low) & (y <= self.high)).all(-1)
        return torch.where(inside, -(self.high - self.low).log().sum(), -math.inf)


class LabelUniform(Uniform):
    """Uniform over a box of labels, the same for every input.

    ``shared``: training draws one set of labels for a whole batch, not one for every input.
    A label outside has density zero and breaks the bounds: hence the margin of ``fit_to``.

    >>> q = LabelUniform.fit_to(torch.tensor([[0.0], [2.0]]), margin=0.5)
    >>> q(torch.zeros(1, 1)).log_prob(torch.tensor([[2.5], [3.5]]))
    tensor([-1.3863,    -inf])
    """

    def __init__(self, low: Tensor, high: Tensor, *, shared: bool = True) -> None:
        super().__init__(low, high)
        self.shared = shared

    def forward(self, h: Tensor) -> UniformLabels:
        """The uniform law, expanded to the batch of ``h``."""
        return UniformLabels(self.low, self.high, h.shape[:-1])


class _TwoLabels:
    """``(1 - a) q + a r`` for two label laws of the same batch shape."""

    def __init__(self, sharp: Any, wide: Any, weight: float) -> None:
        self.sharp, self.wide, self.weight = sharp, wide, weight
        self.batch_shape, self.event_shape = sharp.batch_shape, sharp.event_shape

    def sample(self, shape: Sequence[int] = ()) -> Tensor:
        """Independent draws ``(*shape, *batch, d)``."""
        return mix_samples(self.sharp.sample(shape), self.wide.sample(shape), self.weight)

    def log_prob(self, y: Tensor) -> Tensor:
        """Log-density of the mixture."""
        return mix_log_probs(self.sharp.log_prob(y), self.wide.log_prob(y), self.weight)


class DefensiveLabels(nn.Module):
    """``(1 - a) q(y|x) + a r(y)``: a sharp conditional proposal with a wide law mixed in.

    The importance weights are then bounded by ``1 / a`` times those under ``r`` wherever the sharp
    proposal misses mass.

    >>> y = torch.randn(50, 1)
    >>> q = DefensiveLabels(MDN(2), LabelGaussian.fit_to(3 * y), weight=0.1)
    >>> q(torch.zeros(4, 2)).sample((3,)).shape
    torch.Size([3, 4, 1])
    """

    def __init__(self, proposal: nn.Module, wide: nn.Module, *, weight: float = 0.1) -> None:
        super().__init__()
        if not 0.0 < weight < 1.0:
            raise ProposalError(f"the weight of the wide part must be in (0, 1), got {weight}")
        self.proposal, self.wide, self.weight = proposal, wide, weight

    def forward(self, h: Tensor) -> _TwoLabels:
        """The mixture for features ``(*batch, context)``."""
        return _TwoLabels(self.proposal(h), self.wide(h), self.weight)


def _check_width(y: Tensor, dim: int) -> None:
    """Refuse labels ``(n,)``: they would broadcast against the laws of all inputs."""
    if y.ndim == 0 or y.shape[-1] != dim:
        raise DataError(
            f"labels must have {dim} number(s) in their last dimension, got shape "
            f"{tuple(y.shape)}" + ("; use y[:, None]" if dim == 1 and y.ndim == 1 else "")
        )
