r"""Bounds for chains of one-dimensional EBMs.

The bounds enclose the log-density of the chain *normalised exactly*. The lower one,
``f - b - exp(-b) Z_hat + 1`` for every factor, holds in expectation for **any** ``b`` that is
independent of the samples behind ``Z_hat``, so it takes the best ``b`` there is: a quadrature over
deterministic nodes. ``log_prob`` uses the learned ``b_i`` by default, and :class:`ChainBounds`
reports what these cost.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from selfnorm.evaluation import (
    B_LIMIT,
    TOLERATED_SHARE,
    Bounds,
    Finding,
    data_side_check,
    heavy_tail,
    tail_index,
)
from selfnorm.functional import bound_gap, ess, log_mean_exp, mixture_lower

if TYPE_CHECKING:
    from selfnorm.chain.model import Chain

MAX_SAMPLES = 2000
N_NODES = 256  # of the b in the lower bound: their error widens the gap, nothing else
FEWEST_EFFECTIVE = 100  # samples of the worst column
DISAGREEMENT = 0.01  # nats between samples and nodes that the verdict lets pass


@dataclass(frozen=True)
class ChainBounds(Bounds):
    """:class:`~selfnorm.evaluation.bounds.Bounds` of a chain, and what its learned ``b_i`` are
    worth.

    ``lower`` and ``upper`` enclose the log-likelihood of the exactly normalised chain, the one of
    ``log_prob(normalizer="quadrature")``: their gap says how well the evaluation knows it, nothing
    about the learned ``b_i``. Scores that use them (``log_prob`` by default) have these errors.

    Attributes:
        learned_error: mean over the rows of ``log_prob`` by the learned ``b_i`` minus ``log_prob``
            by quadrature; positive where the learned one promises too much.
        learned_rms: root mean square of that difference over the rows.
        learned_gap: ``upper`` minus the lower bound that the learned ``b_i`` give.
        disagreement: log-likelihood by the nodes alone minus ``lower``. Zero on average with
            standard error ``log_norm_se``, if samples and nodes see the same ``Z_i``.
    """

    learned_error: float = math.nan
    learned_rms: float = math.nan
    learned_gap: float = math.nan
    disagreement: float = math.nan

    def __str__(self) -> str:
        return (
            f"{super().__str__()}; by the learned b: log_prob off by {self.learned_error:+.4f} on "
            f"average (rms {self.learned_rms:.4f}), gap {self.learned_gap:.4f}"
        )


@torch.no_grad()
def row_bounds(
    model: Chain,
    x: Tensor,
    condition: Tensor | None = None,
    *,
    n_samples: int = 1000,
    n_nodes: int = N_NODES,
    chunk_size: int | None = None,
) -> dict[str, Tensor]:
    """Estimates for each row from ``n_samples`` proposal samples per factor and as many nodes.

    Returns ``lower``, ``upper`` and ``quadrature`` ``(n,)``, the bounds and the log-density by
    ``n_nodes`` nodes; ``variance`` ``(n,)`` that the samples cause in either bound; ``learned`` and
    ``learned_lower`` ``(n,)``, log-density and lower bound by the learned ``b_i``; ``log_norm``
    ``(n,)``, summed over factors; ``ess`` and ``b_above`` ``(n, dim)``, means over orderings, the
    latter of the learned ``b_i`` minus ``log Z_i`` by the nodes; ``log_weights`` and
    ``log_weights_data``, self-normalised log-weights at a few thousand samples and at the data,
    pooled over factors.

    ``quadrature - lower`` is linear in the samples: it has mean zero and ``variance``, whereas
    ``upper - quadrature`` is positive on average, by half the variance of each ``log Z_i``.
    """
    x = model.check(x)
    condition = model.given(condition, len(x))
    out: dict[str, list[Tensor]] = {}
    for rows in model.chunks(len(x), max(n_samples, n_nodes), chunk_size):
        given = None if condition is None else condition[rows]
        terms = model.at_rows(x[rows], given)
        factors = terms.factors
        y = model.rounded(factors.proposal.sample(n_samples, stratified=False))
        log_w = model.tilt(y, factors)
        log_z = log_mean_exp(log_w)
        unnormalised = terms.log_q.sum(-1) + terms.minus_energy.sum(-1) + terms.log_det
        upper = unnormalised - log_z.sum(-1)
        b, nodes = model.log_norm(factors), model.quadrature(factors, n_nodes)
        learned, exact = (unnormalised - log_norm.sum(-1) for log_norm in (b, nodes))
        learned_lower, lower = (upper - bound_gap(log_z - v).sum(-1) for v in (b, nodes))
        fraction = ess(log_w)
        share = torch.softmax(exact, 0)  # of each ordering in the mixture, at this row
        values = {
            "upper": log_mean_exp(upper),
            "lower": mixture_lower(lower, exact),
            "quadrature": log_mean_exp(exact),
            "variance": (share.square() * ((1 / fraction - 1) / n_samples).sum(-1)).sum(0),
            "learned": log_mean_exp(learned),
            "learned_lower": mixture_lower(learned_lower, learned),
            "log_norm": log_z.sum(-1).mean(0),
            "ess": fraction.mean(0),
            "b_above": (b - nodes).mean(0),
            "log_weights": (log_w - log_z).flatten()[:4096],
            "log_weights_data": (terms.minus_energy - log_z).flatten()[:4096],
        }
        inside = model.inside(x[rows])
        for name in ("upper", "lower", "quadrature", "learned", "learned_lower"):
            values[name] = values[name].masked_fill(~inside, -math.inf)
        for name, value in values.items():
            out.setdefault(name, []).append(value)
    return {name: torch.cat(parts) for name, parts in out.items()}


def summarise(rows: dict[str, Tensor], n_samples: int) -> ChainBounds:
    """Bounds of the mean log-likelihood from those of the rows, as :func:`row_bounds` gives them.

    ``log_norm`` is the mean of ``sum_i log Z_i``, relative to the proposals; ``ess`` the mean over
    factors. The verdict looks at the worst column too, and at whether samples and nodes agree.
    """
    n = len(rows["lower"])
    upper, lower = rows["upper"].double(), rows["lower"].double()
    sample_variance = float(rows["variance"].double().sum()) / n**2

    def standard_error(values: Tensor) -> float:
        spread = float(values.var(correction=1)) / n if n > 1 else 0.0
        return math.sqrt(spread + sample_variance)

    k = tail_index(rows["log_weights"])
    columns = rows["ess"].double().mean(0)
    inside = torch.isfinite(rows["quadrature"])
    off = (rows["learned"] - rows["quadrature"])[inside].double()
    apart = float((rows["quadrature"] - rows["lower"])[inside].double().mean())
    se = math.sqrt(sample_variance)
    return ChainBounds(
        lower=float(lower.mean()),
        upper=float(upper.mean()),
        lower_se=standard_error(lower),
        upper_se=standard_error(upper),
        log_norm=float(rows["log_norm"].double().mean()),
        log_norm_se=se,
        ess=float(columns.mean()),
        pareto_k=k,
        n_samples=n_samples,
        findings=tuple(_findings(rows, columns, k, n_samples, apart, se)),
        learned_error=float(off.mean()),
        learned_rms=float(off.square().mean().sqrt()),
        learned_gap=float((rows["upper"] - rows["learned_lower"])[inside].double().mean()),
        disagreement=apart,
    )


def _findings(
    rows: dict[str, Tensor], columns: Tensor, k: float, n_samples: int, apart: float, se: float
) -> Iterator[Finding]:
    if n_outside := int(torch.isinf(rows["lower"]).sum()):
        words = "Some rows have density zero: they lie outside the support that was stated."
        yield Finding("outside_support", n_outside, 0.0, words)
    if n_nan := int((torch.isnan(rows["lower"]) | torch.isnan(rows["upper"])).sum()):
        words = f"The log-likelihood is NaN at {n_nan} rows: an energy or b is broken; retrain."
        yield Finding("nan", n_nan, 0.0, words)
    limit = max(DISAGREEMENT, 5 * se)
    if abs(apart) > limit:
        words = (
            f"Samples and quadrature nodes disagree by {apart:.3f} nats (standard error {se:.3f}): "
            "an energy has spikes that one of them misses; raise n_nodes and n_samples."
        )
        yield Finding("disagreement", abs(apart), limit, words)
    above, limit = rows["b_above"].double().mean(0), max(B_LIMIT, 5 * se)
    if float(above.max()) > limit:
        words = (
            f"The learned b of column {int(above.argmax())} is {float(above.max()):.2f} above what "
            "samples and nodes find: the energy has mass that neither meets and training has met; "
            "raise n_nodes and n_samples, or train b for longer."
        )
        yield Finding("b_above", float(above.max()), limit, words)
    worst = int(columns.argmin())
    effective = float(columns[worst]) * n_samples
    if effective < FEWEST_EFFECTIVE:
        words = (
            f"Column {worst} has an effective sample size of {columns[worst]:.3f} x {n_samples}: "
            "raise n_samples; if that is not enough, train longer or with more mixture components."
        )
        yield Finding("ess", effective, FEWEST_EFFECTIVE, words)
    yield from heavy_tail(
        k,
        "the energy has spikes that the proposal rarely meets; train with more samples, or compare "
        "with normalizer='quadrature'.",
    )
    check = data_side_check(rows["log_weights_data"], rows["log_weights"])
    if not check.passed:
        words = (
            "The weights at the data exceed those at the proposal samples: the energy has spikes "
            "at the data; compare with normalizer='quadrature'."
        )
        yield Finding("data_side", check.share, TOLERATED_SHARE, words)
