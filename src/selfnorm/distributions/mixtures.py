"""Mixtures ``q(x) = sum_k pi_k f_k(x)``: what they share, one-dimensional ones, those of labels.

A mixture writes its own components; the sum over them, the choice of one and the look-up of its
parameters are these functions. Components are the last dimension of weights and log-densities,
``(*batch, K)``; parameters may have dimensions of an event behind it, ``(*batch, K, d)``; samples
stand in front, ``(*shape, *batch)``:

>>> log_weights, means, scales = torch.tensor([0.3, 0.7]).log(), torch.randn(2, 3), torch.ones(2, 3)
>>> component, _ = choose_component(log_weights.exp(), torch.rand(5))        # (5,)
>>> mean = pick_component(means, component, event_dims=1)                     # (5, 3)
>>> x = mean + pick_component(scales, component, event_dims=1) * torch.randn(5, 3)
>>> z = (x.unsqueeze(-2) - means) / scales                                    # (5, 2, 3)
>>> mixture_log_prob(log_weights, gaussian_log_prob(z, scales.log().sum(-1))).shape
torch.Size([5])

:class:`Mixture1d` is the proposal of every factor of a chain: ``K`` logistic (or Gaussian)
components and one Student-t component with two degrees of freedom. Logistic and t2 have closed-form
quantiles, so a uniform number becomes a sample without rejection and without inverting the mixture:
stratified uniforms give stratified samples, a regular grid of them gives quadrature nodes.

:class:`MDN` is a proposal for labels. A conditional proposal is a module whose ``forward(h)`` takes
features ``h`` of shape ``(*batch, d_h)`` and returns a distribution over labels ``y`` of shape
``(*batch, d)`` with ``sample(shape)`` and ``log_prob(y)``; densities are with respect to Lebesgue
measure on ``y``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import hardtanh, logsigmoid, softplus

from selfnorm._inputs import check_rows
from selfnorm._saved import saved
from selfnorm.errors import DataError
from selfnorm.networks import StackedMLP, perceptron

Index = Tensor | slice | int | EllipsisType | None  # of a dimension of a batch
_LOG_2PI = math.log(2 * math.pi)
_LOGISTIC_SD = math.pi / math.sqrt(3)
_EPS = 2.0**-22
_LOG_SCALES = -8.0, 12.0  # of a component of a one-dimensional mixture, in units of the column


def gaussian_log_prob(z: Tensor, log_det: Tensor | float) -> Tensor:
    """Gaussian log-density from whitened rows ``z = L^-1 (x - mean)``: ``(*shape, d) -> (*shape)``.

    ``log_det`` is ``log |det L|``: the sum of the log-scales where ``L`` is diagonal.
    """
    return -0.5 * (z.square().sum(-1) + z.shape[-1] * _LOG_2PI) - log_det


def mixture_log_prob(log_weights: Tensor, log_components: Tensor) -> Tensor:
    """``log sum_k pi_k f_k(x)``: weights ``(*batch, K)``, components ``(*shape, *batch, K)``."""
    return torch.logsumexp(log_weights + log_components, -1)


def choose_component(weights: Tensor, u: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
    """The component that each uniform number falls on, and where it falls within it.

    Args:
        weights: ``(*batch, K)``, summing to one.
        u: uniforms ``(*shape, *batch)``.
        values: parameters of the components, ``(*batch, K)`` each.

    Returns:
        The index ``(*shape, *batch)`` and what is left of ``u``, a uniform number again: the level
        of a quantile of that component (clamp it where 0 and 1 have none). Stratified ``u`` stay
        stratified within each component. Then those of ``values`` that belong to it.

    Example:
        >>> choose_component(torch.tensor([0.25, 0.75]), torch.tensor([0.125, 0.25, 1.0]))
        (tensor([0, 1, 1]), tensor([0.5000, 0.0000, 1.0000]))
    """
    ends = weights.cumsum(-1)
    # Levels are told from the end of a cell, and the last end is 1: where sums of float32 weights
    # miss it by 1e-7, a narrow last component would lose the outermost part of its tail.
    ends = ends / ends[..., -1:]
    component = (u.unsqueeze(-1) >= ends[..., :-1]).sum(-1)
    cells = torch.stack([ends, weights, *values], -1)
    end, width, *picked = pick_component(cells, component, event_dims=1).unbind(-1)
    return component, 1 - (end - u) / width.clamp_min(torch.finfo(u.dtype).tiny), *picked


def pick_component(values: Tensor, component: Tensor, event_dims: int = 0) -> Tensor:
    """Parameters ``(*batch, K, *event)`` of the chosen components ``(*shape, *batch)``.

    ``event_dims`` is the number of dimensions behind ``K``; the result is
    ``(*shape, *batch, *event)``. Sizes of ``batch`` broadcast.

    Example:
        >>> means = torch.tensor([[[0.0], [1.0]], [[2.0], [3.0]]])      # two of them, K = 2, d = 1
        >>> pick_component(means, torch.tensor([1, 0]), event_dims=1)
        tensor([[1.],
                [2.]])
    """
    *batch, k = values.shape[: values.dim() - event_dims]
    first = torch.arange(0, k * math.prod(batch), k, device=values.device).view(batch)
    return values.flatten(0, len(batch))[first + component]  # one list of all components


def ends_of_cells(at: Tensor, points: Tensor, *values: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Left and right ends of the cells of ascending ``points (*batch, g)`` that ``at (*batch, m)``
    fall into, then every one of ``values (*batch, g)`` there: pairs of ``(*batch, m)``.
    """
    right = torch.searchsorted(points.contiguous(), at.contiguous()).clamp(1, points.shape[-1] - 1)
    return [(of.gather(-1, right - 1), of.gather(-1, right)) for of in (points, *values)]


def interpolate(at: Tensor, points: Tensor, values: Tensor) -> Tensor:
    """Piecewise linear interpolation, one by one, at ``(*batch, m)``; constant beyond the ends.

    Example:
        >>> grid, square = torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([[0.0, 1.0, 4.0]])
        >>> interpolate(torch.tensor([[0.5, 1.5, 3.0]]), grid, square)
        tensor([[0.5000, 2.5000, 4.0000]])
    """
    (x0, x1), (v0, v1) = ends_of_cells(at, points, values)
    share = (at - x0) / (x1 - x0).clamp_min(torch.finfo(at.dtype).tiny)
    return v0 + share.clamp(0.0, 1.0) * (v1 - v0)


def _log_logistic_mass(a: Tensor, b: Tensor) -> Tensor:
    """Log-mass that a standard logistic distribution gives to ``(a, b)``."""
    width = (b - a).clamp_min(torch.finfo(a.dtype).tiny)
    return logsigmoid(b) + logsigmoid(-a) + torch.log(-torch.expm1(-width))


def log_normal_mass(a: Tensor, b: Tensor) -> Tensor:
    """Log-mass that a standard normal distribution gives to ``(a, b)``.

    Example:
        >>> log_normal_mass(torch.tensor(-1.0), torch.tensor(1.0)).exp()
        tensor(0.6827)
    """
    # on the left side, where neither function is near one
    flip = a > 0
    low, high = torch.where(flip, -b, a), torch.where(flip, -a, b)
    log_high = torch.special.log_ndtr(high)
    less = (torch.special.log_ndtr(low) - log_high).clamp_max(-torch.finfo(a.dtype).eps)
    return log_high + torch.log(-torch.expm1(less))


@dataclass(frozen=True)
class Mixture1d:
    r"""``q(y) = sum_k pi_k f_k((y - loc_k)/scale_k)/scale_k``, one for each place of a batch.

    The last component is a Student-t with two degrees of freedom (tails ``|y|^-3``), the others are
    logistic or Gaussian. Density with respect to Lebesgue measure.

    Attributes:
        log_pi, loc, log_scale: ``(*batch, K + 1)``.
        family: ``"logistic"`` or ``"gaussian"``.
    """

    log_pi: Tensor
    loc: Tensor
    log_scale: Tensor
    family: str = "logistic"

    @classmethod
    def from_raw(cls, raw: Tensor, n: int, *, family: str = "logistic") -> Mixture1d:
        """From unconstrained numbers ``(*batch, 3 n)``: logits, locations, log-scales.

        The floor keeps a component from collapsing onto a repeated value; the ceiling keeps the
        moments finite where the network extrapolates.
        """
        logits, loc, raw_scale = raw.split(n, -1)
        low, high = _LOG_SCALES
        log_scale = softplus(raw_scale - low) + low
        # hardtanh: a clamp whose gradient is one operation
        log_scale = hardtanh(log_scale, low, high)
        return cls(torch.log_softmax(logits, -1), loc, log_scale, family)

    def detach(self) -> Mixture1d:
        """The same distribution, cut from the graph."""
        return self._picked(Tensor.detach)

    def moved(self, shift: Tensor, scale: Tensor) -> Mixture1d:
        """Those of ``shift + scale * y``; both of a shape that broadcasts to ``(*batch,)``."""
        shift, scale = shift.unsqueeze(-1), scale.unsqueeze(-1)
        log_scale = self.log_scale + scale.log()
        return Mixture1d(self.log_pi, shift + scale * self.loc, log_scale, self.family)

    def at(self, *index: Index) -> Mixture1d:
        """The distributions at some places of the batch."""
        return self._picked(lambda t: t[index])

    def to(self, dtype: torch.dtype) -> Mixture1d:
        """The same in another precision."""
        return self._picked(lambda t: t.to(dtype))

    def mirrored(self) -> Mixture1d:
        """Those of ``-y``."""
        return Mixture1d(self.log_pi, -self.loc, self.log_scale, self.family)

    def _picked(self, pick: Callable[[Tensor], Tensor]) -> Mixture1d:
        return Mixture1d(pick(self.log_pi), pick(self.loc), pick(self.log_scale), self.family)

    def log_prob(self, y: Tensor) -> Tensor:
        """``log q(y)``, ``y`` of shape ``(..., *batch)``."""
        e = (y.unsqueeze(-1) - self.loc) * torch.exp(-self.log_scale)
        sizes = [e.shape[-1] - 1, 1]
        if self.family == "gaussian":
            squared, tail_squared = e.square().split(sizes, -1)
            log_body = -0.5 * (squared + _LOG_2PI)
        else:
            body, tail = e.split(sizes, -1)
            log_body, tail_squared = logsigmoid(body) + logsigmoid(-body), tail.square()
        log_parts = torch.cat([log_body, -1.5 * torch.log(2 + tail_squared)], -1)
        return mixture_log_prob(self.log_pi, log_parts - self.log_scale)

    def log_mass(self, left: Tensor, right: Tensor) -> Tensor:
        r"""``log Q(left, right)``, the log-probability of intervals ``(..., *batch)``.

        Stable for narrow and for far-out intervals, in single precision too:
        ``s(b) - s(a) = s(b) s(-a) (1 - exp(a - b))`` for the logistic function ``s``; the tail is
        ``F(e) = s(2 asinh(e / sqrt 2))``. Ends beyond ``1e6`` are infinity.
        """
        unit = torch.exp(-self.log_scale)
        a, b = ((y.clamp(-1e6, 1e6).unsqueeze(-1) - self.loc) * unit for y in (left, right))
        sizes = [a.shape[-1] - 1, 1]
        (body_a, tail_a), (body_b, tail_b) = a.split(sizes, -1), b.split(sizes, -1)
        tail_a, tail_b = (2 * torch.asinh(e / math.sqrt(2)) for e in (tail_a, tail_b))
        if self.family == "gaussian":
            log_body = log_normal_mass(body_a, body_b)
        else:
            log_body = _log_logistic_mass(body_a, body_b)
        log_parts = torch.cat([log_body, _log_logistic_mass(tail_a, tail_b)], -1)
        return mixture_log_prob(self.log_pi, log_parts)

    def _quantile(self, v: Tensor, tail: Tensor) -> Tensor:
        twice = 2 * v
        t = twice - 1
        if self.family == "gaussian":
            body = math.sqrt(2) * torch.erfinv(t)
        else:
            body = torch.log(v) - torch.log1p(-v)
        heavy = t / torch.sqrt(twice * (1 - v))
        return torch.where(tail, heavy, body)

    def from_uniform(self, u: Tensor) -> Tensor:
        """Map uniforms ``(..., *batch)`` to samples: the part of ``u`` chooses the component, its
        remainder the quantile within it.

        Exact for any ``u`` uniform on (0, 1), and keeps stratification between and within the
        components.
        """
        component, level, loc, scale = choose_component(
            self.log_pi.exp(), u, self.loc, self.log_scale.exp()
        )
        tail = component == self.loc.shape[-1] - 1
        return loc + scale * self._quantile(level.clamp(_EPS, 1 - _EPS), tail)

    def sample(self, n: int, *, stratified: bool = True) -> Tensor:
        """``(n, *batch)`` samples; stratified: one in each of ``n`` slices of equal mass.

        Their mean has a far smaller variance than that of independent ones, and no bias.
        """
        like: Any = {"dtype": self.log_pi.dtype, "device": self.log_pi.device}
        u = torch.rand((n, *self.log_pi.shape[:-1]), **like)
        if stratified:
            u = (u + torch.arange(n, **like).view(-1, *[1] * (u.dim() - 1))) / n
        return self.from_uniform(u.clamp(_EPS, 1 - _EPS))

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and variance of the body (the tail has none), ``(*batch,)``."""
        without_tail = self.log_pi.clone()
        without_tail[..., -1] = -torch.inf
        pi = torch.softmax(without_tail, -1)
        mean = (pi * self.loc).sum(-1)
        spread = torch.exp(2 * self.log_scale)
        if self.family == "logistic":
            spread = _LOGISTIC_SD**2 * spread
        second = pi * (spread + (self.loc - mean.unsqueeze(-1)).square())
        return mean, second.sum(-1)

    def cdf(self, y: Tensor) -> Tensor:
        """``P(Y <= y)``, ``y`` of shape ``(..., *batch)``."""
        parts = (t.unbind(-1) for t in (self.log_pi.exp(), self.loc, torch.exp(-self.log_scale)))
        *body, (share, loc, unit) = zip(*parts, strict=True)
        e = (y - loc) * unit
        root = torch.sqrt(2 + e.square())
        beyond = 1 / (root * (root + e.abs()))  # mass of the tail on that side
        total = share * torch.where(e < 0, beyond, 1 - beyond)
        below = torch.special.ndtr if self.family == "gaussian" else torch.sigmoid
        for share, loc, unit in body:  # one by one they stay in a processor's cache
            total = torch.addcmul(total, share, below((y - loc) * unit))
        return total

    def component_cdf(self, y: Tensor) -> Tensor:
        """``(*batch, K + 1, I)``: ``P(Y <= y)`` of the components, at ``y`` ``(*batch, 1, I)``."""
        e = (y - self.loc.unsqueeze(-1)) * torch.exp(-self.log_scale).unsqueeze(-1)
        root = torch.sqrt(2 + e[..., -1:, :].square())
        beyond = 1 / (root * (root + e[..., -1:, :].abs()))
        tail = torch.where(e[..., -1:, :] < 0, beyond, 1 - beyond)
        below = torch.special.ndtr if self.family == "gaussian" else torch.sigmoid
        return torch.cat([below(e[..., :-1, :]), tail], -2)

    def sample_pieces(self, n: int, below: Tensor, share: Tensor) -> Tensor:
        """``(n, *batch)`` stratified samples of pieces of the components.

        Args:
            n: how many.
            below: ``(*batch, K + 1, I)``, where a piece begins: the mass of its component below.
            share: the mass of the piece, of that of its component.
        """
        mass = (self.log_pi.exp().unsqueeze(-1) * share).clamp_min(1e-300).flatten(-2)
        u = (
            torch.rand((n, *mass.shape[:-1])).to(mass)
            + torch.arange(n).to(mass).view(-1, *[1] * (mass.dim() - 1))
        ) / n
        piece, level, first, width = choose_component(
            mass / mass.sum(-1, keepdim=True), u, below.flatten(-2), share.flatten(-2)
        )
        component = piece // share.shape[-1]
        v = (first + level * width).clamp(1e-300, 1 - 2.0**-53)
        loc, scale = (pick_component(t, component) for t in (self.loc, self.log_scale.exp()))
        return loc + scale * self._quantile(v, component == self.loc.shape[-1] - 1)

    def nodes(
        self, n: int, rounded: Callable[[Tensor, float], Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Quadrature for ``E_q[w]``: nodes ``(n, *batch)`` and their log-weights, same shape.

        The line is cut into ``n`` cells of about equal mass (smaller and smaller ones towards the
        tails), each with one node inside and its exact mass ``F(right) - F(left)`` as weight: no
        component, however narrow, is counted twice or missed. The cuts come from interpolating the
        distribution function between quantiles of the components. ``rounded(y, shift)`` moves
        places to the nearest centre of a cell (``shift=0``) or to the nearest edge between two
        (``shift=0.5``) where there are cells: nodes are then centres, and the sum is exact as soon
        as there are more nodes than cells that matter.
        """
        options: Any = {"dtype": torch.float64, "device": self.loc.device}
        k = self.loc.shape[-1]
        is_tail = torch.arange(k, device=self.loc.device) == k - 1
        v = torch.sigmoid(torch.linspace(-14, 14, 15, **options))
        e = self._quantile(v.unsqueeze(-1).expand(-1, k), is_tail.expand(15, k)).to(self.loc)
        rows = self._picked(lambda t: t.unsqueeze(-2))
        anchors = (rows.loc + rows.log_scale.exp() * e).flatten(-2).sort(-1).values
        s = torch.linspace(0, 0.5, n + 1, **options)
        u = (s * s * (3 - 2 * s)).to(self.loc).expand(*self.loc.shape[:-1], -1)
        # each half from its own end: a number close to one has few digits for what is beyond it
        left = interpolate(u, rows.cdf(anchors), anchors)
        anchors = -anchors.flip(-1)
        right = -interpolate(u, rows.mirrored().cdf(anchors), anchors).flip(-1)
        cuts = torch.cat([left, right[..., 1:]], -1).movedim(-1, 0).contiguous()
        nodes, edges = cuts[1::2], cuts[2:-1:2]
        if rounded is not None:
            edges = rounded(edges, 0.5)
            left, right = torch.cat([nodes[:1], edges]), torch.cat([edges, nodes[-1:]])
            margin = (right - left) / 4  # well inside, or a node would go to a neighbouring cell
            nodes = rounded(torch.maximum(torch.minimum(nodes, right - margin), left + margin), 0.0)
        half, none = len(edges) // 2, torch.zeros_like(nodes[:1])
        below = torch.cat([none, self.cdf(edges[:half])])
        above = torch.cat([self.mirrored().cdf(-edges[half:]), none])
        middle = 1 - below[-1:] - above[:1]
        masses = torch.cat([below.diff(dim=0), middle, -above.diff(dim=0)]).clamp_min(0)
        return nodes, torch.log(masses)


class FromUniforms(ABC):
    """Labels whose draws are a function of uniform numbers, one density per batch element."""

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


class MixtureLabels(FromUniforms):
    """Mixture of diagonal Gaussians over ``y``, one mixture per batch element.

    ``q(y) = sum_k pi_k prod_j N(y_j; mu_kj, sigma_kj^2)``

    Args:
        log_weights: ``(*batch, K)``, normalised: ``logsumexp`` over the last dimension is zero.
        means: ``(*batch, K, d)``.
        scales: ``(*batch, K, d)``, positive.
    """

    def __init__(self, log_weights: Tensor, means: Tensor, scales: Tensor) -> None:
        super().__init__(means, log_weights.shape[:-1], means.shape[-1:])
        self.log_weights, self.means, self.scales = log_weights, means, scales

    def log_prob(self, y: Tensor) -> Tensor:
        """``log q(y|x)`` of labels ``(*samples, *batch, d)``; shape ``(*samples, *batch)``."""
        check_width(y, self.means.shape[-1])
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
        check_width(y, self.means.shape[-1])
        z = (y.unsqueeze(-2) - self.means) / self.scales
        inside = torch.special.ndtr(z)
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


@saved()
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


class StudentMixture(nn.Module):
    r"""``sum_k w_k t(x; m_k, S_k, nu_k)`` with full scatter matrices, all of it trainable.

    Args:
        weights: ``(K,)``.
        locs: ``(K, d)``.
        whiten: ``(K, d, d)``, lower triangular ``W_k`` with ``S_k^-1 = W_k^T W_k``.
        df: degrees of freedom that all components start with.

    Example:
        >>> from selfnorm.distributions import StudentT
        >>> q = StudentMixture(torch.ones(1), torch.zeros(1, 2), torch.eye(2)[None], df=3.0)
        >>> t = StudentT(3.0, torch.zeros(2), scale=1.0)
        >>> x = torch.randn(5, 2)
        >>> torch.allclose(q.log_prob(x), t.log_prob(x))
        True
    """

    def __init__(self, weights: Tensor, locs: Tensor, whiten: Tensor, df: float) -> None:
        super().__init__()
        self.logits = nn.Parameter(weights.log())
        self.locs = nn.Parameter(locs.clone())
        self.whiten = nn.Parameter(whiten.clone(memory_format=torch.contiguous_format))
        self.log_df = nn.Parameter(torch.full_like(weights, math.log(df)))

    def log_prob(self, x: Tensor) -> Tensor:
        """Log-density of rows ``(n, d)``."""
        d, df = x.shape[1], self.log_df.exp()
        z = torch.einsum("kij,nkj->nki", self.whiten.tril(), x.unsqueeze(1) - self.locs)
        log_const = torch.lgamma((df + d) / 2) - torch.lgamma(df / 2) - d / 2 * (df * math.pi).log()
        log_const = log_const + self.whiten.diagonal(dim1=1, dim2=2).abs().log().sum(1)
        log_parts = log_const - (df + d) / 2 * (z.square().sum(-1) / df).log1p()
        return mixture_log_prob(self.logits.log_softmax(0), log_parts)

    @torch.no_grad()
    def sample(self, n: int) -> Tensor:
        """``(n, d)`` independent rows."""
        k = torch.multinomial(self.logits.softmax(0), n, replacement=True)
        half_df = self.log_df.exp()[k, None] / 2
        mixing = torch._standard_gamma(half_df) / half_df  # noqa: SLF001
        noise = torch.randn(n, self.locs.shape[1]).to(self.locs) / mixing.clamp_min(1e-30).sqrt()
        spread = torch.linalg.solve_triangular(
            self.whiten.tril()[k], noise.unsqueeze(-1), upper=False
        )
        return self.locs[k] + spread.squeeze(-1)


def check_width(y: Tensor, dim: int) -> None:
    """Refuse labels ``(n,)``: they would broadcast against the distributions of all inputs."""
    if y.ndim == 0 or y.shape[-1] != dim:
        raise DataError(
            f"labels must have {dim} number(s) in their last dimension, got shape "
            f"{tuple(y.shape)}" + ("; use y[:, None]" if dim == 1 and y.ndim == 1 else "")
        )
