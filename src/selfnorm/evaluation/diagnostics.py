r"""Can this log-likelihood be trusted? Checks that take log-weights, and say what to do.

``log_w`` are the log-weights ``log p~(x_m) - log q(x_m)`` of proposal samples, ``log_w_data`` the
same at held-out data. The estimate of ``log Z`` sees only what the proposal visits; three questions
decide whether that was enough:

- effective sample size: does a handful of samples carry the estimate?
- Pareto k: do the largest weights belong to a law with a mean and a variance?
- the data-side check: are there data where ``p~/q`` is larger than at *every* proposal sample?
  Such data lie in a region that the proposal (almost) never visits: a missed mode, a lighter tail,
  a collapsed proposal. ESS and Pareto k are blind to it, for both look at proposal samples only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from scipy import stats
from torch import Tensor

from selfnorm._context import SeedLike, seeded
from selfnorm.evaluation.weight_stream import WeightStream
from selfnorm.functional import log_mean_exp, pareto_k

__all__ = [
    "DataSideCheck",
    "Verdict",
    "confidence_interval",
    "data_side_check",
    "energy_distance_test",
    "relative_error",
    "tail_index",
    "verdict",
]

PARETO_K_LIMIT = 0.7
MINIMUM_EFFECTIVE_SAMPLES = 100.0
# The proposal may miss one per cent of the data before the verdict changes: log Z is then off by
# about 0.01 nats. A finite sample always misses something (for Pareto k = 0.5 about 1/sqrt(M)).
TOLERATED_SHARE = 0.01


def relative_error(log_w: Tensor) -> Tensor:
    r"""Standard error of ``log mean(w)`` by the delta method: ``sd(w) / (mean(w) sqrt(M))``.

    It equals ``sqrt((1/ESS - 1) / (M - 1))`` and is meaningful for Pareto k below 0.5 only.

    >>> import torch
    >>> float(relative_error(torch.zeros(10)))
    0.0
    """
    m = log_w.shape[0]
    if m < 2:
        return torch.full(log_w.shape[1:], math.inf, device=log_w.device)
    log_w = log_w.detach().double()
    weights = torch.exp(log_w - log_mean_exp(log_w, 0))
    return weights.std(0) / math.sqrt(m)


def confidence_interval(value: float, se: float, level: float = 0.95) -> tuple[float, float]:
    """Normal interval ``value -+ z se``.

    >>> low, high = confidence_interval(0.0, 1.0)
    >>> round(high, 2), round(low, 2)
    (1.96, -1.96)
    """
    if not 0.0 < level < 1.0:
        raise ValueError(f"level must lie between 0 and 1, got {level}")
    z = float(stats.norm.ppf(0.5 + level / 2))
    return value - z * se, value + z * se


@dataclass(frozen=True)
class DataSideCheck:
    """Weights at held-out data against weights at proposal samples.

    ``share``: fraction of the data whose weight exceeds every proposal weight. ``decisive``:
    number of data points, each of which would by itself more than double the estimate of Z had the
    proposal drawn it. ``p_value``: chance of so many exceedances if the true share were the
    tolerated one. ``passed`` is the outcome.
    """

    share: float
    decisive: int
    p_value: float
    n_data: int
    passed: bool


def data_side_check(
    log_w_data: Tensor, log_w: Tensor | WeightStream, *, tolerated: float = TOLERATED_SHARE
) -> DataSideCheck:
    """Does the proposal reach the data?

    A region where ``w`` exceeds all of ``M`` proposal weights has a proposal mass of about ``1/M``
    or less. If more than a tolerated share of held-out data lies there, the proposal does not cover
    the data, and ``log Z`` misses whatever mass the model has in that region.

    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> data_side_check(torch.randn(500), torch.randn(5000)).passed
    True
    >>> data_side_check(torch.cat([torch.randn(400), 50 + torch.randn(100)]),
    ...                 torch.randn(5000)).passed
    False
    """
    log_w_data, stream = log_w_data.detach().double(), WeightStream.of(log_w)
    n, m = len(log_w_data), stream.n
    # an infinite weight at a data point (q = 0 there) exceeds everything, a nan is no evidence
    usable = log_w_data[~torch.isnan(log_w_data)]
    if n == 0 or math.isinf(stream.largest):
        return DataSideCheck(math.nan, 0, math.nan, n, passed=n == 0)
    # rounding alone must not count: constant weights differ in the last digits
    margin = 1e-4 * (1.0 + abs(stream.largest))
    above = int((usable > stream.largest + margin).sum())
    decisive = int((usable > stream.log_mean + math.log(m)).sum())
    p_value = float(stats.binom.sf(above - 1, n, tolerated))
    passed = not (p_value < 0.01 or decisive >= max(2, 0.002 * n))
    return DataSideCheck(above / n, decisive, p_value, n, passed)


@dataclass(frozen=True)
class Verdict:
    """``reliable`` and one sentence per reason: cause, then cure."""

    reliable: bool
    reasons: tuple[str, ...]
    ess: float
    pareto_k: float
    data_side: DataSideCheck | None


def tail_index(log_w: Tensor | WeightStream) -> float:
    """Pareto k of the weights, read again on the very largest where the first reading is high.

    A defensive mixture bounds the weights and lets many of them pile up just below a plateau, with
    a shoulder of larger ones where only its broad part reaches. A generalised Pareto law fitted
    across the two reads k = 5 for weights that never exceed 1.7. The 70 or so largest weights lie
    on the shoulder alone and show that it ends; a tail that is truly heavy looks the same there.

    >>> import torch
    >>> u = (torch.arange(20_000) + 0.5) / 20_000
    >>> tail_index(-1.5 * u.log()) > 1.0
    True
    """
    stream = WeightStream.of(log_w)
    k = stream.pareto_k()
    if k > PARETO_K_LIMIT and stream.n >= 2000:
        narrow = float(pareto_k(stream.top[:500]))
        if narrow < 0.5:
            return narrow
    return k


def verdict(log_w: Tensor | WeightStream, log_w_data: Tensor | None = None) -> Verdict:
    """Judge an importance-sampling estimate of ``log Z`` from its weights.

    ``log_w (M,)`` at proposal samples (or their summary), ``log_w_data (n,)`` at held-out data
    (recommended: without it a missed mode cannot be seen).

    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> verdict(0.1 * torch.randn(5000), 0.1 * torch.randn(500)).reliable
    True
    """
    stream = WeightStream.of(log_w)
    m = stream.n
    reasons: list[str] = []
    if stream.broken:
        reasons.append(
            "Some weights are not finite: the energy returns nan or -inf at proposal samples; "
            "check the energy for overflow."
        )
    if math.isinf(stream.largest):
        reasons.append(
            "No proposal sample has a positive weight: model and proposal do not overlap; fit the "
            "proposal to the data."
        )
        return Verdict(False, tuple(reasons), 0.0, math.inf, None)
    fraction, k = stream.ess, tail_index(stream)
    if k > PARETO_K_LIMIT:
        reasons.append(
            f"Pareto k = {k:.2f} is above {PARETO_K_LIMIT}: the weights are so heavy-tailed that "
            "no number of samples helps; use a proposal with heavier tails "
            "(Defensive or StudentT fitted to the data)."
        )
    if fraction * m < MINIMUM_EFFECTIVE_SAMPLES:
        reasons.append(
            f"Only {fraction * m:.0f} effective of {m} proposal samples: a few of them carry the "
            "estimate; raise n_samples or bring the proposal closer to the model."
        )
    check = None
    if log_w_data is not None and log_w_data.numel():
        check = data_side_check(log_w_data.flatten(), stream)
        if not check.passed:
            reasons.append(
                f"{100 * check.share:.1f} % of the data have a larger weight than every proposal "
                f"sample ({check.decisive} of {check.n_data} would each double the estimate of Z): "
                "the proposal misses a region where the data are (a mode or a tail), or the energy "
                "has grown a spike there; widen the proposal (Defensive) or fit it to these data."
            )
    return Verdict(not reasons, tuple(reasons), fraction, k, check)


def energy_distance_test(
    x: Tensor, y: Tensor, *, n_permutations: int = 199, seed: SeedLike = 0, block: int = 1000
) -> tuple[float, float]:
    r"""Two-sample energy distance and its permutation p-value.

    ``2 E|X - Y| - E|X - X'| - E|Y - Y'| >= 0``, zero iff both laws agree (Szekely and Rizzo 2013).
    Distances are built block by block: memory ``block * (n + m)``, time ``(n + m)^2``.

    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> distance, p = energy_distance_test(torch.randn(200, 2), torch.randn(200, 2))
    >>> p > 0.01
    True
    >>> energy_distance_test(torch.randn(200, 2), torch.randn(200, 2) + 1.0)[1] < 0.01
    True
    """
    n, m = len(x), len(y)
    pooled = torch.cat([x, y]).to(torch.float32)
    pooled = (pooled - pooled.mean(0)) / pooled.std(0).clamp_min(1e-12)
    with seeded(seed):
        orders = [torch.arange(n + m), *(torch.randperm(n + m) for _ in range(n_permutations))]
    # s'Ds with s = 1/n on one sample and -1/m on the other is minus the energy distance
    signs = torch.full((n + m, len(orders)), -1.0 / m)
    for column, order in enumerate(orders):
        signs[order[:n], column] = 1.0 / n
    total = torch.zeros(len(orders), dtype=torch.float64)
    for begin in range(0, n + m, block):
        rows = pooled[begin : begin + block]
        distances = torch.cdist(rows, pooled, compute_mode="donot_use_mm_for_euclid_dist")
        total -= ((distances @ signs).double() * signs[begin : begin + block].double()).sum(0)
    p_value = float((total >= total[0] - 1e-12).double().mean())
    return float(total[0]), p_value
