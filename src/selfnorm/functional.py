"""Objectives and estimators as pure functions of tensors, all in log space.

Conventions, shared by every function here:

* ``log_p_data``: ``-E(x_i) + log d(x_i)``, the unnormalised log-density at the data, ``(n,)``.
* ``log_w``: ``-E(x_m) + log d(x_m) - log q(x_m)``, the log-weights of ``M`` proposal samples; the
  **sample dimension is the first one**: ``(M,)``, or ``(M, n)`` with one row of samples per
  condition (regression).
* ``log_w_data``: the same log-weights at the data, ``log_p_data - log q(x_i)``, shape ``(n,)``.
* ``log_norm``: the learned ``b``, a scalar, or ``(n,)`` for ``b(x_i)``.
* every objective returns a value to **maximise**.

The reference measure is the one ``q`` is a density of: Lebesgue for continuous proposals, counting
for discrete ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

__all__ = [
    "MAX_EXPONENT",
    "adaptive_log_mean",
    "bound_gap",
    "bregman",
    "capped_exp",
    "combine_log_means",
    "ess",
    "importance_ml",
    "log_mean_exp",
    "mixture_lower",
    "nce",
    "pareto_k",
    "ranking_nce",
    "snl",
]


def log_mean_exp(log_w: Tensor, dim: int = 0) -> Tensor:
    r"""``log (1/M) sum_m exp(log_w_m)`` along ``dim``: the log of an importance estimate of ``Z``.

    Example:
        >>> log_mean_exp(torch.tensor([200.0, 200.0]))
        tensor(200.)
    """
    return torch.logsumexp(log_w, dim) - math.log(log_w.shape[dim])


def combine_log_means(log_means: Iterable[Tensor], counts: Iterable[int]) -> Tensor:
    r"""Join :func:`log_mean_exp` of chunks of unequal size into that of all samples together.

    ``log( sum_c n_c exp(l_c) / sum_c n_c )``. Each chunk is weighted by its own size, so that
    splitting ``M`` samples changes the estimate by rounding only.

    Example:
        >>> log_w = torch.tensor([0.0, 1.0, -3.0])
        >>> parts = [log_mean_exp(log_w[:2]), log_mean_exp(log_w[2:])]
        >>> torch.allclose(combine_log_means(parts, [2, 1]), log_mean_exp(log_w))
        True
    """
    sizes = list(counts)
    stacked = torch.stack(list(log_means))
    log_sizes = torch.tensor(sizes, dtype=stacked.dtype, device=stacked.device).log()
    shape = (-1,) + (1,) * (stacked.dim() - 1)
    return torch.logsumexp(stacked + log_sizes.view(shape), 0) - math.log(sum(sizes))


@torch.no_grad()
def adaptive_log_mean(
    draw: Callable[[int], Tensor],
    *,
    tolerance: float = 2e-3,
    min_samples: int = 0,
    max_samples: int = 2**20,
    chunk_size: int = 16_384,
) -> tuple[Tensor, Tensor, int]:
    """``log mean(w)``, with as many weights as its standard error asks for.

    Args:
        draw: gives ``(n, *batch)`` fresh log-weights for a number ``n``; one estimate for every
            place of ``batch`` (one of each of several models).
        tolerance: draw until every standard error is below it ...
        min_samples, max_samples: ... but at least, and at most, so many.
        chunk_size: number of weights drawn at a time.

    Returns:
        The estimates and their standard errors, both ``(*batch,)`` in double precision, and the
        number of samples.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> log_z, error, n = adaptive_log_mean(lambda n: torch.randn(n, 2), tolerance=0.01)
        >>> bool((log_z - 0.5).abs().max() < 0.03), n
        (True, 32768)
    """
    n, log_sum, log_squares = 0, torch.tensor(-math.inf), torch.tensor(-math.inf)
    while True:
        log_w = draw(chunk_size).double()
        n += chunk_size
        log_sum = torch.logaddexp(log_sum.to(log_w), torch.logsumexp(log_w, 0))
        log_squares = torch.logaddexp(log_squares.to(log_w), torch.logsumexp(2 * log_w, 0))
        excess = torch.expm1(log_squares - 2 * log_sum + math.log(n))  # relative variance of w
        error = (excess.clamp_min(0) / n).sqrt()
        enough = n >= min_samples and not bool((error >= tolerance).any())
        if enough or n + chunk_size > max_samples:
            return log_sum - math.log(n), error, n


def ess(log_w: Tensor, dim: int = 0) -> Tensor:
    r"""Effective sample size as a fraction of ``M``: ``(sum w)^2 / (M sum w^2)``, in ``(0, 1]``.

    Equal weights give 1, one dominating weight ``1/M``. Blind to mass no sample has seen: read it
    beside :func:`pareto_k`.

    Example:
        >>> ess(torch.zeros(10))
        tensor(1.)
    """
    return torch.exp(
        2 * torch.logsumexp(log_w, dim)
        - torch.logsumexp(2 * log_w, dim)
        - math.log(log_w.shape[dim])
    )


MAX_EXPONENT = 80.0  # exp overflows float32 at 88


def capped_exp(u: Tensor) -> Tensor:
    """``exp(u)`` up to :data:`MAX_EXPONENT`, continued linearly (same slope) beyond it.

    Exact, value and gradient, below the cap; above it the gradient stays finite and still points
    the right way.

    Example:
        >>> capped_exp(torch.tensor([0.0, 1000.0])).isfinite().all()
        tensor(True)
    """
    return torch.exp(u.clamp(max=MAX_EXPONENT)) + _beyond_cap(u)


def _beyond_cap(u: Tensor) -> Tensor:
    return math.exp(MAX_EXPONENT) * torch.relu(u - MAX_EXPONENT)


def snl(
    log_p_data: Tensor, log_w: Tensor, log_norm: Tensor | float, *, reduction: str = "mean"
) -> Tensor:
    r"""The self-normalised log-likelihood, a lower bound of the log-likelihood in expectation.

    .. math:: \ell_{SNL} = \frac1n\sum_i \log\tilde p(x_i) - b - e^{-b}\,\frac1M\sum_m w_m + 1

    Linear in the weights, so its gradients are unbiased for any proposal; maximal in ``b`` at
    ``b = log mean(w)``, where it equals the log-likelihood.

    One model, samples for every condition, or several models are one formula: samples
    ``(M, *batch)`` stand for one ``Z`` per entry of ``batch``, with which data and ``b`` broadcast.

    ================== ============== ============= =========
    what               ``log_p_data`` ``log_w``     ``b``
    ================== ============== ============= =========
    one density        ``(n,)``       ``(M,)``      ``()``
    given conditions   ``(n,)``       ``(M, n)``    ``(n,)``
    ``K`` densities    ``(n, K)``     ``(M, K)``    ``(K,)``
    ================== ============== ============= =========

    Args:
        log_p_data: unnormalised log-density at the data.
        log_w: log-weights; the sample dimension is the first one.
        log_norm: ``b``.
        reduction: ``"mean"``, or ``"none"`` for the terms, of the shape of ``log_p_data``.

    Example:
        >>> log_w = torch.tensor([200.0, 200.0])      # Z = exp(200), far beyond float32
        >>> snl(torch.tensor([199.0]), log_w, 200.0)
        tensor(-1.)
    """
    log_z = log_mean_exp(log_w)
    terms = log_p_data - log_norm - capped_exp(log_z - log_norm) + 1
    return _reduce(terms, reduction)


def importance_ml(log_p_data: Tensor, log_w: Tensor, *, reduction: str = "mean") -> Tensor:
    r"""Importance-sampled log-likelihood ``l_IS``, an upper bound in expectation.

    ``mean(log p~(x_i)) - log mean(w)``. Its gradient is biased for finite ``M``; it is what SNL
    becomes when ``b`` is maximised on the very same samples.

    Example:
        >>> importance_ml(torch.tensor([1.0]), torch.tensor([3.0, 3.0]))
        tensor(-2.)
    """
    return _reduce(log_p_data - log_mean_exp(log_w), reduction)


def nce(
    log_w_data: Tensor, log_w: Tensor, log_norm: Tensor | float, *, nu: float | None = None
) -> Tensor:
    r"""Binary noise-contrastive estimation; learns ``b`` too.

    ``mean_i log sigma(u_i) + nu mean_m log sigma(-u_m)`` with ``u = log w - b - log nu``.
    ``nu`` is the number of noise samples per data point: ``M/n`` by default (``M`` if ``log_w``
    holds samples per condition).

    Example:
        >>> zeros = torch.zeros(4)
        >>> nce(zeros, zeros, 0.0)                    # two equal classes: 2 log(1/2)
        tensor(-1.3863)
    """
    ratio = _noise_ratio(log_w_data, log_w) if nu is None else nu
    shift = log_norm + math.log(ratio)
    data = logsigmoid(log_w_data - shift).mean()
    noise = logsigmoid(-(log_w - shift)).mean()
    return data + ratio * noise


def ranking_nce(log_w_data: Tensor, log_w: Tensor) -> Tensor:
    r"""Ranking NCE (InfoNCE): ``mean_i log [ w_i / (w_i + sum_m w_m) ]``.

    Unchanged when any function of the condition is added to the energy: it **never learns the
    normaliser**, and ``b`` receives no gradient from it.

    Example:
        >>> ranking_nce(torch.zeros(5), torch.zeros(3, 5))     # log 1/4
        tensor(-1.3863)
    """
    log_noise = torch.logsumexp(log_w, 0)
    return (log_w_data - torch.logaddexp(log_w_data, log_noise)).mean()


def bregman(
    log_w_data: Tensor,
    log_w: Tensor,
    log_norm: Tensor | float,
    *,
    family: str = "snl",
    nu: float | None = None,
) -> Tensor:
    r"""The Bregman family of noise-contrastive objectives (Pihlaja 2010, Gutmann & Hirayama 2011).

    Maximises ``E_p[psi'(u)] - nu E_q[psi'(u) u - psi(u)]`` with ``u = exp(log w - b) / nu``.

    =============== ============================ ====================================
    family          psi(u)                       remark
    =============== ============================ ====================================
    ``snl``         ``u log u``                  SNL, up to ``-mean log q - log nu``
    ``nce``         ``u log u - (1+u) log(1+u)`` binary NCE, identical to :func:`nce`
    ``lsif``        ``u^2 / 2``                  least squares importance fitting
    ``reverse``     ``-log u``                   reverse importance sampling
    ``exponential`` ``-2 sqrt(u)``               exponential loss, weights ``sqrt(u)``
    =============== ============================ ====================================

    Example:
        >>> zeros = torch.zeros(4)
        >>> torch.allclose(bregman(zeros, zeros, 0.3, family="nce"), nce(zeros, zeros, 0.3))
        True
    """
    ratio = _noise_ratio(log_w_data, log_w) if nu is None else nu
    log_u_data = log_w_data - log_norm - math.log(ratio)
    log_u = log_w - log_norm - math.log(ratio)
    if family == "snl":
        data, noise = log_u_data + 1, capped_exp(log_u)
    elif family == "nce":
        data, noise = logsigmoid(log_u_data), softplus(log_u)
    elif family == "lsif":
        data, noise = capped_exp(log_u_data), capped_exp(2 * log_u) / 2
    elif family == "reverse":
        data, noise = -capped_exp(-log_u_data), log_u - 1
    elif family == "exponential":
        data, noise = -capped_exp(-log_u_data / 2), capped_exp(log_u / 2)
    else:
        raise ValueError(
            f"unknown Bregman family {family!r}; choose one of 'snl', 'nce', 'lsif', 'reverse', "
            "'exponential'"
        )
    return data.mean() - ratio * noise.mean()


def bound_gap(log_ratio: Tensor) -> Tensor:
    r"""Distance between the two bounds, ``t - 1 - log t`` with ``log_ratio = log mean(w) - b``.

    Example:
        >>> bound_gap(torch.tensor(0.0))
        tensor(0.)
    """
    # expm1, not capped_exp: near the optimum the gap is the square of a small number.
    return torch.expm1(log_ratio.clamp(max=MAX_EXPONENT)) + _beyond_cap(log_ratio) - log_ratio


def mixture_lower(lower: Tensor, own: Tensor) -> Tensor:
    r"""Lower bound of a mixture of orderings from lower bounds of each: ``(R, n) -> (n,)``.

    ``sum_r s_r (lower_r - log s_r) - log R`` with ``s`` the shares by the model's own density
    ``own`` (learned ``b``). Linear in the noisy ``lower``, whereas ``log_mean_exp(lower)`` gains
    by their noise and bounds nothing; equal to it where the two agree.

    Example:
        >>> same = torch.tensor([[0.3], [-1.0]])
        >>> torch.allclose(mixture_lower(same, same), log_mean_exp(same))
        True
    """
    log_share = torch.log_softmax(own, 0)
    return (log_share.exp() * (lower - log_share)).sum(0) - math.log(len(lower))


def pareto_k(log_w: Tensor, dim: int = 0, *, n_total: int | None = None) -> Tensor:
    r"""Shape ``k`` of a generalised Pareto distribution fitted to the largest weights.

    Weights have about ``1/k`` finite moments: below 0.5 the variance is finite, above 0.7 no
    practical number of samples makes the average reliable (Vehtari et al. 2024). The fit is the
    profile-posterior mean of Zhang & Stephens (2009) over the ``min(M/5, 3 sqrt(M))`` largest
    weights, shrunk towards 0.5 by the weight of ten observations.

    Constant weights have no tail: 0. Fewer than 25 samples, or weights that are all zero, cannot be
    judged: infinity. With ``n_total`` given, ``log_w`` holds only the largest of so many weights.

    Example:
        >>> bool(pareto_k(torch.zeros(1000)) == 0)
        True
        >>> u = (torch.arange(4000) + 0.5) / 4000
        >>> light, heavy = -0.1 * u.log(), -2.0 * u.log()   # Pareto weights, k = 0.1 and k = 2
        >>> bool(pareto_k(light) < 0.3), bool(pareto_k(heavy) > 1.5)
        (True, True)
    """
    log_w = log_w.detach().movedim(dim, 0).double()
    total = log_w.shape[0] if n_total is None else n_total
    n_tail = min(total // 5, math.ceil(3 * math.sqrt(total)))
    if n_tail < 5:
        return torch.full(log_w.shape[1:], math.inf, device=log_w.device, dtype=torch.float32)
    top = torch.topk(log_w, n_tail + 1, dim=0).values
    unseen = torch.isneginf(top[0])  # every weight is zero: nothing to judge
    top = torch.exp(top - torch.where(unseen, torch.zeros_like(top[0]), top[0]))
    excess = (top[:-1] - top[-1:]).flip(0)  # ascending, n_tail of them
    flat = excess[-1] <= 1e-12
    # The grid of Zhang & Stephens: candidates for theta, centred on the lower quartile. Ties at the
    # threshold make that quartile zero; the smallest positive scale keeps the grid finite.
    quartile = excess[int(n_tail / 4 + 0.5) - 1].clamp_min(1e-300)
    largest = torch.where(flat, torch.ones_like(excess[-1]), excess[-1])
    quartile = torch.where(flat, torch.ones_like(quartile), quartile.clamp_min(1e-12))
    n_grid = 30 + int(math.sqrt(n_tail))
    steps = torch.arange(1, n_grid + 1, device=log_w.device, dtype=log_w.dtype) - 0.5
    offsets = 1 - torch.sqrt(n_grid / steps)
    theta = offsets.view(-1, *([1] * largest.dim())) / (3 * quartile) + 1 / largest
    shape = torch.log1p(-theta.unsqueeze(1) * excess).mean(1)
    log_like = n_tail * (torch.log(-theta / shape) - shape - 1)
    weights = torch.softmax(torch.nan_to_num(log_like, nan=-math.inf), 0)
    best = (weights * theta).sum(0)
    k = torch.log1p(-best * excess).mean(0)
    k = (n_tail * k + 10 * 0.5) / (n_tail + 10)
    k = torch.where(flat, torch.zeros_like(k), k)
    return torch.where(unseen, torch.full_like(k, math.inf), k).float()


class Weights(NamedTuple):
    """All that an objective sees of a mini-batch: names and shapes as above."""

    log_p_data: Tensor
    log_w_data: Tensor
    log_w: Tensor
    log_norm: Tensor


def _bregman(family: str, w: Weights) -> Tensor:
    return bregman(w.log_w_data, w.log_w, w.log_norm, family=family)


# The objectives by the names that people give.
VALUES: dict[str, Callable[[Weights], Tensor]] = {
    "snl": lambda w: snl(w.log_p_data, w.log_w, w.log_norm),
    "nce": lambda w: nce(w.log_w_data, w.log_w, w.log_norm),
    "ranking_nce": lambda w: ranking_nce(w.log_w_data, w.log_w),
    "importance_ml": lambda w: importance_ml(w.log_p_data, w.log_w),
    **{f"bregman_{name}": partial(_bregman, name) for name in ("lsif", "reverse", "exponential")},
}


def _noise_ratio(log_w_data: Tensor, log_w: Tensor) -> float:
    return log_w.numel() / log_w_data.numel()


def _reduce(terms: Tensor, reduction: str) -> Tensor:
    if reduction == "mean":
        return terms.mean()
    if reduction == "none":
        return terms
    raise ValueError(f"reduction must be 'mean' or 'none', not {reduction!r}")
