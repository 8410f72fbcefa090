"""The inner functions of a latent chain with their gradients written out.

A training step of a VAE with a chain prior is hundreds of small operations, and on a GPU each costs
a launch whatever its size. What autograd would spread over some two hundred of them is done here in
eighty: the same values and gradients up to rounding (``tests/test_vae_fused.py``). There is no
second derivative.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import softplus

from selfnorm.mixtures1d import LOG_SQRT_2PI, LOGISTIC_SD, Mixture1d

__all__ = ["LIMITS", "described_proposals", "mixture_log_prob", "tilt"]

_FLOOR, _CEILING = -8.0, 12.0  # of log-scales, as in Mixture1d.from_raw
# Lower and upper limits, then divisors, of what a factor is told of its proposal: log-weights,
# places, log-scales.
LIMITS = ((-10.0, -10.0, -8.0), (torch.inf, 10.0, 8.0), (4.0, 2.0, 4.0))


class _LogProb(torch.autograd.Function):
    """``log q(y)`` of Gaussian mixtures with a Student-t tail."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, log_pi: Tensor, loc: Tensor, log_scale: Tensor) -> Tensor:
        inverse = torch.exp(-log_scale)
        e = (y.unsqueeze(-1) - loc).mul_(inverse)
        parts = log_pi - log_scale
        body, tail = e[..., :-1], e[..., -1:]
        heavy = tail.square().add_(2)
        parts[..., :-1].sub_(body.square(), alpha=0.5).sub_(LOG_SQRT_2PI)
        parts[..., -1:].sub_(heavy.log(), alpha=1.5)
        top = parts.amax(-1, keepdim=True)
        share = parts.sub_(top).exp_()
        total = share.sum(-1, keepdim=True)
        share.div_(total)
        # -d log q_k / de: e of a Gaussian, 3 e / (2 + e^2) of the tail
        pull = e.clone()
        pull[..., -1:].mul_(3).div_(heavy)
        ctx.save_for_backward(inverse, e, pull, share)
        return total.log_().add_(top).squeeze(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> Any:
        inverse, e, pull, share = ctx.saved_tensors
        g_log_pi = share * upstream.unsqueeze(-1)
        pulled = g_log_pi * pull
        g_loc = pulled * inverse
        g_log_scale = torch.addcmul(-g_log_pi, pulled, e)
        return -g_loc.sum(-1), g_log_pi, g_loc, g_log_scale


def mixture_log_prob(proposal: Mixture1d, y: Tensor) -> Tensor:
    """``proposal.log_prob(y)`` for ``y`` of the proposal's own shape.

    Example:
        >>> q = Mixture1d.from_raw(torch.zeros(2, 9), 3, family="gaussian")
        >>> y = torch.tensor([0.3, -2.0])
        >>> torch.allclose(mixture_log_prob(q, y), q.log_prob(y))
        True
    """
    if proposal.family != "gaussian" or torch.compiler.is_compiling():
        return proposal.log_prob(y)
    found: Tensor = _LogProb.apply(y, proposal.log_pi, proposal.loc, proposal.log_scale)
    return found


class _Described(torch.autograd.Function):
    """The output layer, the proposals, and the description that the energies are given.

    The gradient of the proposals reaches layer and features, that of the description the features
    alone.
    """

    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        weight: Tensor,
        bias: Tensor,
        limits: Tensor,
        dim: int,
        unit: float,
    ) -> tuple[Tensor, ...]:
        low, high, divisor = limits.unsqueeze(-1)
        raw = torch.baddbmm(bias.unsqueeze(1), features, weight.transpose(1, 2))
        logits, loc, raw_scale = raw.unflatten(-1, (dim, 3, -1)).unbind(-2)
        log_pi = torch.log_softmax(logits, -1)
        shifted = raw_scale - _FLOOR
        log_scale = softplus(shifted).add_(_FLOOR).clamp_(max=_CEILING)
        body = torch.cat([logits[..., :-1], torch.full_like(logits[..., -1:], -torch.inf)], -1)
        pi = torch.softmax(body, -1)  # zero at the tail, which has no variance
        spread = log_scale.exp().mul_(unit).square_()
        mean = (pi * loc).sum(-1, keepdim=True)
        away = loc - mean
        second = torch.addcmul(spread, away, away)
        sd = (pi * second).sum(-1, keepdim=True).sqrt_()
        told = torch.stack([log_pi, away / sd, log_scale - sd.log()], -2)
        clamped = torch.clamp(told, low, high)
        slope = (clamped == told) / divisor
        steep = torch.sigmoid(shifted).mul_(log_scale < _CEILING)
        ctx.save_for_backward(
            features, weight, log_pi, loc, pi, spread, away, second, sd, slope, steep
        )
        shape = clamped.div_(divisor).flatten(-2)
        return log_pi, loc, log_scale, mean.squeeze(-1), sd.squeeze(-1), shape

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        features, weight, log_pi, loc, pi, spread, away, second, sd, slope, steep = (
            ctx.saved_tensors
        )
        own_log_pi, own_loc, own_log_scale, g_mean, g_sd, g_shape = upstream
        g_log_pi, g_place, g_size = (g_shape.unflatten(-1, (3, -1)) * slope).unbind(-2)
        inverse = sd.reciprocal()
        g_away = g_place * inverse
        g_mean = g_mean.unsqueeze(-1) - g_away.sum(-1, keepdim=True)
        lost = torch.addcmul(g_size, g_away, away).sum(-1, keepdim=True)
        g_var = (g_sd.unsqueeze(-1) - lost.mul_(inverse)).mul_(inverse).mul_(0.5)
        # d var / d mean = -2 sum pi (loc - mean) = 0
        g_pi = torch.addcmul(g_var * second, g_mean, loc)
        g_loc = torch.addcmul(g_away, pi, torch.addcmul(g_mean, g_var, away, value=2))
        g_log_scale = torch.addcmul(g_size, pi * spread, g_var, value=2)
        own_logits = torch._log_softmax_backward_data(
            own_log_pi.contiguous(), log_pi, -1, log_pi.dtype
        )
        g_logits = torch._log_softmax_backward_data(
            g_log_pi.contiguous(), log_pi, -1, log_pi.dtype
        ) + torch._softmax_backward_data(g_pi, pi, -1, pi.dtype)
        own = torch.stack([own_logits, own_loc, own_log_scale * steep], -2).flatten(-3)
        other = torch.stack([g_logits, g_loc, g_log_scale * steep], -2).flatten(-3)
        g_weight = torch.bmm(own.transpose(1, 2), features)
        g_features = torch.bmm(other.add_(own), weight)
        return g_features, g_weight, own.sum(1), None, None, None


def described_proposals(
    features: Tensor, weight: Tensor, bias: Tensor, limits: Tensor, dim: int, family: str
) -> tuple[Mixture1d, Tensor, Tensor, Tensor]:
    """Proposals of all factors; their mean and standard deviation; their shape for the energies.

    Args:
        features: ``(R, N, hidden)``.
        weight, bias: ``(R, dim * 3 n, hidden)`` and ``(R, dim * 3 n)``, for ``n`` components with
            the tail; trained by the proposals alone.
        limits: ``LIMITS`` on the device: a captured graph cannot fetch it from the host.

    Returns:
        The proposals ``(R, N, dim)``; ``(R, N, dim)`` twice; ``(R, N, dim, 3 n)``.
    """
    unit = 1.0 if family == "gaussian" else LOGISTIC_SD
    log_pi, loc, log_scale, mean, sd, shape = _Described.apply(
        features, weight, bias, limits, dim, unit
    )
    return Mixture1d(log_pi, loc, log_scale, family), mean, sd, shape


class _Tilt(torch.autograd.Function):
    """``f - b - e^{-b} mean(e^{log_w}) + 1``, and ``mean(w)``."""

    @staticmethod
    def forward(ctx: Any, f: Tensor, log_w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        w = log_w.exp()
        mean_w = w.mean(0)
        # No b of a sound run is below -60: the weights are at most e^20.
        scale = (-b).clamp_(max=60.0).exp_()
        ratio = mean_w * scale
        ctx.save_for_backward(w, scale, ratio)
        ctx.mark_non_differentiable(mean_w)
        return (f - b).sub_(ratio).add_(1), mean_w

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> Any:
        w, scale, ratio = ctx.saved_tensors
        g_log_w = w * (upstream * scale).mul_(-1 / len(w))
        return upstream, g_log_w, (ratio - 1).mul_(upstream)


def tilt(f: Tensor, log_w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """SNL terms of factors with bounded energies; the mean weights, without gradient.

    Args:
        f: ``-E`` at the data, any shape.
        log_w: log-weights of the samples, ``(S, *f.shape)``, at most 20.
        b: learned normalisers, of the shape of ``f``.

    Example:
        >>> value, mean_w = tilt(torch.zeros(3), torch.zeros(4, 3), torch.zeros(3))
        >>> value, mean_w
        (tensor([0., 0., 0.]), tensor([1., 1., 1.]))
    """
    if torch.compiler.is_compiling():
        mean_w = log_w.exp().mean(0)
        return f - b - mean_w * (-b).clamp_max(60.0).exp() + 1, mean_w.detach()
    found: tuple[Tensor, Tensor] = _Tilt.apply(f, log_w, b)
    return found
