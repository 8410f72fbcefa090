"""The inner functions of a latent chain with their gradients written out.

A training step of a VAE with a chain prior is hundreds of small operations, and on a GPU each costs
a launch whatever its size. The functions here take about half as many as the plain formulas under
autograd, with the same values and gradients up to rounding (``tests/test_vae_fused.py``). There is
no second derivative.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from selfnorm.distributions import EPS, LOG_SQRT_2PI

__all__ = ["LIMITS", "component_constants", "measures", "placed", "stratified", "tilt"]

_FLOOR, _CEILING = -8.0, 12.0  # of log-scales, as in Mixture1d.from_raw
_FAR = 4.0  # limit of the second feature of a value, as in FactorEnergy
# Lower and upper limits, then divisors, of what a factor is told of its proposal: log-weights,
# places, log-scales.
LIMITS = ((-10.0, -10.0, -8.0), (torch.inf, 10.0, 8.0), (4.0, 2.0, 4.0))


def component_constants(n: int) -> Tensor:
    """``(4, n)``: what sets the tail, the last of ``n`` components, apart from the others.

    Added to the logits for the weights of the body and of all; the factor of ``e^2`` in the
    log-density; and a row that starts with 1 and the floor of log-scales. A captured graph cannot
    fetch them from the host.
    """
    rows = torch.zeros(4, n)
    rows[0, -1] = -torch.inf
    rows[2, :-1] = -0.5
    rows[3, 0], rows[3, 1] = 1.0, _FLOOR
    return rows


def stratified(n: int, like: Tensor) -> Tensor:
    """``(*like.shape, n)`` uniforms, one in each of ``n`` equal cells, never 0.

    Example:
        >>> (4 * stratified(4, torch.zeros(2))).floor()
        tensor([[0., 1., 2., 3.],
                [0., 1., 2., 3.]])
    """
    u = torch.empty(*like.shape, n, dtype=like.dtype, device=like.device).uniform_(EPS, 1 / n)
    return u.add_(torch.linspace(0, 1 - 1 / n, n, dtype=like.dtype, device=like.device))


def _samples(table: Tensor, u: Tensor, one: Tensor, out: Tensor) -> None:
    """Samples of mixtures: ``Mixture1d.from_uniform`` with normal components.

    Args:
        table: weights, their cumulative sums, places and scales of the components, ``(4, *, n)``.
        u: uniforms ``(*, S)``.
        out: ``(*, S)``, filled.
    """
    last = table.shape[-1] - 1
    index = torch.searchsorted(table[1], u).clamp_(max=last)
    weight, end, place, scale = table.gather(-1, index.expand(4, *index.shape)).unbind(0)
    above = (end - u).div_(weight).clamp_(EPS, 1 - EPS)  # within the component, from its end
    t = torch.rsub(above, 1, alpha=2)
    heavy = torch.addcmul(one, t, t, value=-1).rsqrt_().mul_(t)
    # Quantiles of the normal and of the t law, both over sqrt(2).
    e = torch.where(index == last, heavy, torch.erfinv(t))
    torch.addcmul(place, scale, e, value=math.sqrt(2), out=out)


def _value_features(u: Tensor, one: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Bounded features of standardised values, as in ``FactorEnergy``, and the slope's root."""
    n = len(frequencies)
    flat = torch.addcmul(one, u, u, value=1 / 36).rsqrt_()
    values = u.new_empty(*u.shape, 2 + 2 * n)
    near = values[..., 0]
    torch.mul(u, flat, out=near)
    torch.mul(torch.asinh(u).clamp_(-2 * _FAR, 2 * _FAR), 0.5, out=values[..., 1])
    waves = near.unsqueeze(-1) * frequencies
    torch.sin(waves, out=values[..., 2 : 2 + n])
    torch.cos(waves, out=values[..., 2 + n :])
    return values, flat


class _Placed(torch.autograd.Function):
    """The output layer, the proposals' density at ``z``, their samples and their description.

    The gradient of the density reaches layer, features and ``z``; that of the description and of
    the values' features reaches ``z`` and the features of the network, not the layer.
    """

    @staticmethod
    def forward(
        ctx: Any, features: Tensor, weight: Tensor, bias: Tensor, z: Tensor, u: Tensor,
        constants: Tensor, limits: Tensor, frequencies: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        n, (one, floor) = constants.shape[1], constants[3, :2].unbind()
        if len(weight) == 1:
            raw = torch.addmm(bias[0], features[0], weight[0].T).unsqueeze(0)
        else:
            raw = torch.baddbmm(bias.unsqueeze(1), features, weight.transpose(1, 2))
        logits, loc, raw_scale = raw.unflatten(-1, (z.shape[-1], 3, n)).unbind(-2)
        log_weights = torch.log_softmax(logits + constants[:2].view(2, 1, 1, 1, n), -1)
        log_pi = log_weights[1]
        free = torch.logaddexp(raw_scale, floor)
        log_scale = free.clamp(max=_CEILING)
        scale = log_scale.exp()
        # Weights of the body alone; weights; their cumulative sums; standardised places and scales.
        table = raw.new_empty(5, *logits.shape)
        torch.exp(log_weights, out=table[:2])
        body, pi = table[0], table[1]
        torch.cumsum(pi, -1, out=table[2])
        # Moments of the body: the tail has no variance.
        spread = scale.square()
        mean = (body * loc).sum(-1, keepdim=True)
        away = loc - mean
        second = torch.addcmul(spread, away, away)
        per_sd = (body * second).sum(-1, keepdim=True).rsqrt_()
        torch.mul(away, per_sd, out=table[3])
        torch.mul(scale, per_sd, out=table[4])
        # What the energies are told of the proposal.
        low, high, divisor = limits.unsqueeze(-1)
        told = torch.stack([log_pi, table[3], table[4].log()], -2)
        clamped = torch.clamp(told, low, high)
        slope = (clamped == told) / divisor
        shape = clamped.div_(divisor).flatten(-2)
        # log q(z) and its gradient in what the layer gives.
        inverse = scale.reciprocal_()
        e = (z.unsqueeze(-1) - loc).mul_(inverse)
        squares = e.square()
        parts = torch.addcmul(log_pi - log_scale, squares, constants[2])
        heavy = squares[..., -1:].add_(2)
        parts[..., :-1].sub_(LOG_SQRT_2PI)
        parts[..., -1:].sub_(heavy.log(), alpha=1.5)
        log_share = torch.log_softmax(parts, -1)
        # By the tail: its part is moderate however far out z is.
        log_q = parts[..., -1] - log_share[..., -1]
        share = log_share.exp_()
        pull = share * e  # times -d log q_k / de: e of a Gaussian, 3 e / (2 + e^2) of the tail
        pull[..., -1:].mul_(3).div_(heavy)
        steep = torch.rsub(inverse, 1, alpha=math.exp(_FLOOR))  # d log_scale / d raw_scale
        steep = torch.ops.aten.hardtanh_backward(steep, free, -torch.inf, _CEILING)
        own = torch.empty_like(told)
        torch.sub(share, pi, out=own[..., 0, :])
        torch.mul(pull, inverse, out=own[..., 1, :])
        torch.mul(pull.mul_(e).sub_(share), steep, out=own[..., 2, :])
        # Standardised values: z itself, then the samples.
        at = raw.new_empty(1 + u.shape[-1], *z.shape)
        torch.mul(z - mean.squeeze(-1), per_sd.squeeze(-1), out=at[0])
        _samples(table[1:], u, one, at[1:].movedim(0, -1))
        values, flat = _value_features(at, one, frequencies)
        ctx.save_for_backward(
            features, weight, constants, frequencies, log_weights, table, loc, spread, away, second,
            per_sd, slope, steep, own, at, values, flat,
        )  # fmt: skip
        return log_q, values, shape

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, g_values: Tensor, g_shape: Tensor) -> Any:
        (
            features, weight, constants, frequencies, log_weights, table, loc, spread, away, second,
            per_sd, slope, steep, own, at, values, flat,
        ) = ctx.saved_tensors  # fmt: skip
        g_at = _g_values(g_values, values, at, flat, frequencies, constants[3, 0])
        g_at.mul_(per_sd.squeeze(-1))
        body, log_pi = table[0], log_weights[1]
        g_log_pi, g_place, g_size = (g_shape.unflatten(-1, (3, -1)) * slope).unbind(-2)
        g_away = g_place * per_sd
        # Minus the gradients of the mean, and of the variance, twice.
        m = g_at.sum(0).unsqueeze(-1).add_(g_away.sum(-1, keepdim=True))
        lost = torch.addcmul(g_size, g_away, away).sum(-1, keepdim=True)
        v = (g_at * at).sum(0).unsqueeze(-1).addcmul_(lost, per_sd).mul_(per_sd)
        # d var / d mean = -2 sum pi (loc - mean) = 0
        g_body = (m * loc).addcmul_(v, second, value=0.5)
        other = torch.empty_like(own)
        torch.sub(
            torch._log_softmax_backward_data(g_log_pi.contiguous(), log_pi, -1, log_pi.dtype),
            torch._softmax_backward_data(g_body, body, -1, body.dtype),
            out=other[..., 0, :],
        )
        torch.addcmul(g_away, body, torch.addcmul(m, v, away), value=-1, out=other[..., 1, :])
        g_log_scale = torch.addcmul(g_size, body * spread, v, value=-1)
        torch.mul(g_log_scale, steep, out=other[..., 2, :])
        g_own = own * upstream[..., None, None]
        g_z = g_at[0] - g_own[..., 1, :].sum(-1)
        flat_own = g_own.flatten(-3)
        g_weight = torch.bmm(flat_own.transpose(1, 2), features)
        g_features = torch.bmm(other.add_(g_own).flatten(-3), weight)
        return g_features, g_weight, flat_own.sum(1), g_z, None, None, None, None


def _g_values(
    upstream: Tensor, values: Tensor, at: Tensor, flat: Tensor, frequencies: Tensor, one: Tensor
) -> Tensor:
    """Gradient of the features in the standardised values."""
    sizes = [1, 1, len(frequencies), len(frequencies)]
    _, far, sines, cosines = values.split(sizes, -1)
    g_near, g_far, g_sines, g_cosines = upstream.split(sizes, -1)
    waves = torch.addcmul(g_sines * cosines, g_cosines, sines, value=-1)
    g = torch.mv(waves.flatten(0, -2), frequencies).view_as(at).add_(g_near.squeeze(-1))
    slope = torch.ops.aten.hardtanh_backward(
        torch.addcmul(one, at, at).rsqrt_(), far.squeeze(-1), -_FAR, _FAR
    )
    found: Tensor = g.mul_(flat.pow(3)).addcmul_(g_far.squeeze(-1), slope, value=0.5)
    return found


def placed(
    features: Tensor, weight: Tensor, bias: Tensor, z: Tensor, u: Tensor, constants: Tensor,
    limits: Tensor, frequencies: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """What the normal-mixture proposals of all factors give the energies.

    Args:
        features: ``(R, N, hidden)``.
        weight, bias: ``(R, dim * 3 n, hidden)`` and ``(R, dim * 3 n)``, for ``n`` components with
            the tail; trained by the proposals' density alone.
        z: scaled values ``(R, N, dim)``.
        u: uniforms ``(R, N, dim, S)`` that make the samples.
        constants, limits, frequencies: of :func:`component_constants`, ``LIMITS`` and the energy's.

    Returns:
        ``log q(z)`` ``(R, N, dim)``; features ``(1 + S, R, N, dim, F)`` of ``z`` and of the
        samples, which are held fixed; the proposals' shape ``(R, N, dim, 3 n)``.
    """
    found: tuple[Tensor, Tensor, Tensor] = _Placed.apply(
        features, weight, bias, z, u, constants, limits, frequencies
    )
    return found


class _Tilt(torch.autograd.Function):
    """``sum_i log q + f_0 - b - e^{-b} mean(e^f)``, ``f = 20 tanh(h / 20)``; weights, ratio."""

    @staticmethod
    def forward(ctx: Any, log_q: Tensor, h: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        t = (h / 20).tanh_()
        w = (t[1:] * 20).exp_()
        # No b of a sound run is below -60: the weights are at most e^20.
        norm = b.clamp(min=-60.0).exp_()
        ratio = w.mean(0).div_(norm)
        value = torch.add(log_q, t[0], alpha=20).sub_(b).sub_(ratio).sum(-1)
        ctx.save_for_backward(t, w, norm, ratio)
        ctx.mark_non_differentiable(w, ratio)
        ctx.set_materialize_grads(False)  # no zeros for those two
        return value, w, ratio

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, *_: Tensor) -> Any:
        t, w, norm, ratio = ctx.saved_tensors
        upstream = upstream.unsqueeze(-1)
        g_f = torch.empty_like(t)
        g_f[0] = upstream
        torch.mul(w, (upstream * (-1 / len(w))) / norm, out=g_f[1:])
        g_h = torch.ops.aten.tanh_backward(g_f, t)
        return upstream.expand_as(ratio), g_h, (ratio - 1).mul_(upstream)


def tilt(log_q: Tensor, h: Tensor, b: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """SNL bounds of chains with bounded energies ``-20 tanh(h / 20)``; gap and ESS.

    Args:
        log_q: of the values, ``(R, N, dim)``.
        h: at the values and at their samples, ``(1 + S, R, N, dim)``.
        b: learned normalisers, ``(R, N, dim)``.

    Returns:
        ``(R, N)``; outside of training the mean gap of a row and the mean effective share of a
        factor's samples, see :func:`measures`.

    Example:
        >>> tilt(torch.zeros(1, 2, 3), torch.zeros(5, 1, 2, 3), torch.zeros(1, 2, 3))[0]
        tensor([[0., 0.]])
    """
    value, w, ratio = _Tilt.apply(log_q, h, b)
    return value + b.shape[-1], measures(w, ratio)


def measures(w: Tensor, ratio: Tensor) -> dict[str, Tensor]:
    """Gap of a row and effective share of samples, from weights ``w`` and ``mean(w) e^{-b}``.

    Nothing where gradients are on: a training step is not for looking at, and they cost launches.
    """
    if torch.is_grad_enabled():
        return {}
    share = w.mean(0).square() / w.square().mean(0)
    return {"gap": (ratio - ratio.log() - 1).sum(-1).mean(), "ess": share.mean()}
