"""Bounds for chains of one-dimensional EBMs, and a check that every conditional is a density."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from selfnorm.diagnostics import data_side_check, tail_index
from selfnorm.errors import DataError
from selfnorm.evaluation import Bounds
from selfnorm.functional import bound_gap, ess, log_mean_exp, mixture_lower
from selfnorm.randomness import SeedLike, seeded

if TYPE_CHECKING:
    from selfnorm.autoregressive import AutoregressiveEBM

__all__ = ["bounds", "conditional_integrals", "row_bounds"]

MAX_SAMPLES = 2000


@torch.no_grad()
def row_bounds(
    model: AutoregressiveEBM,
    x: Tensor,
    condition: Tensor | None = None,
    *,
    n_samples: int = 1000,
    stratified: bool = False,
    chunk_size: int | None = None,
) -> dict[str, Tensor]:
    """Estimates for each row from ``n_samples`` proposal samples per factor.

    Returns ``lower`` and ``upper`` ``(n,)``; ``variance`` ``(n,)`` of ``upper`` that the samples
    cause; ``log_norm`` ``(n,)``, summed over factors; ``ess`` ``(n, dim)``, the mean over
    orderings; ``log_weights`` and ``log_weights_data``, self-normalised log-weights at a few
    thousand samples and at the data, pooled over factors.
    """
    x = model.check(x)
    out: dict[str, list[Tensor]] = {}
    for rows in model.chunks(len(x), n_samples, chunk_size):
        given = None if condition is None else condition[rows].to(x)
        z, log_det = model.columns(x[rows])
        at = model.factors(z, given)
        here = z.expand(model.n_orderings, -1, -1)
        f = model.energy(here.unsqueeze(0), at)[0]
        b = model.energy.log_norm(at.context)
        log_w = model.energy(at.proposal.sample(n_samples, stratified=stratified), at)
        log_z = log_mean_exp(log_w)
        log_q = at.proposal.log_prob(here)
        upper = (f + log_q - log_z).sum(-1) + log_det
        own = (f + log_q - b).sum(-1) + log_det
        fraction = ess(log_w)
        share = torch.softmax(upper, 0)  # of each ordering in the mixture, at this row
        values = {
            "upper": log_mean_exp(upper),
            "lower": mixture_lower(upper - bound_gap(log_z - b).sum(-1), own),
            "variance": (share.square() * ((1 / fraction - 1) / n_samples).sum(-1)).sum(0),
            "log_norm": log_z.sum(-1).mean(0),
            "ess": fraction.mean(0),
            "log_weights": (log_w - log_z).flatten()[:4096],
            "log_weights_data": (f - log_z).flatten()[:4096],
        }
        inside = model.columns.inside(x[rows])
        for name in ("upper", "lower"):
            values[name] = values[name].masked_fill(~inside, -math.inf)
        for name, value in values.items():
            out.setdefault(name, []).append(value)
    return {name: torch.cat(parts) for name, parts in out.items()}


def bounds(
    model: AutoregressiveEBM,
    x: Tensor,
    condition: Tensor | None = None,
    *,
    n_samples: int = 1000,
    seed: SeedLike = None,
    chunk_size: int | None = None,
) -> Bounds:
    """Bounds of the mean log-likelihood: every factor is bounded, the rows' bounds are averaged.

    ``lower`` uses the learned ``b_i``, ``upper`` the importance estimates of ``log Z_i``, both from
    ``n_samples`` samples for each factor of each row (at most 2,000). ``log_norm`` is the mean of
    ``sum_i log Z_i``, relative to the proposals. ``ess`` is the mean over factors; the verdict
    looks at the worst column too. With several orderings the rows' bounds are those of the mixture.
    """
    if n_samples < 2:
        raise DataError(f"n_samples must be at least 2, got {n_samples}")
    if len(x) == 0:
        raise DataError("no rows to bound: pass at least one")
    n_samples = min(n_samples, MAX_SAMPLES)
    with seeded(seed, model.columns.center.device):
        rows = row_bounds(model, x, condition, n_samples=n_samples, chunk_size=chunk_size)
    n = len(x)
    upper, lower = rows["upper"].double(), rows["lower"].double()
    sample_variance = float(rows["variance"].double().sum()) / n**2

    def standard_error(values: Tensor) -> float:
        spread = float(values.var(correction=1)) / n if n > 1 else 0.0
        return math.sqrt(spread + sample_variance)

    k = tail_index(rows["log_weights"])
    columns = rows["ess"].double().mean(0)
    return Bounds(
        lower=float(lower.mean()),
        upper=float(upper.mean()),
        lower_se=standard_error(lower),
        upper_se=standard_error(upper),
        log_norm=float(rows["log_norm"].double().mean()),
        log_norm_se=math.sqrt(sample_variance),
        ess=float(columns.mean()),
        pareto_k=k,
        n_samples=n_samples,
        reasons=_reasons(rows, columns, k, n_samples),
    )


def _reasons(rows: dict[str, Tensor], columns: Tensor, k: float, n_samples: int) -> tuple[str, ...]:
    reasons = []
    if not bool(torch.isfinite(rows["lower"]).all()):
        reasons.append("Some rows have density zero: they lie outside the support that was stated.")
    worst = int(columns.argmin())
    if float(columns[worst]) * n_samples < 100:
        reasons.append(
            f"Column {worst} has an effective sample size of {columns[worst]:.3f} x {n_samples}: "
            "train longer, or with more mixture components."
        )
    if k > 0.7:
        reasons.append(
            f"Pareto k = {k:.2f} is above 0.7: the energy has spikes that the proposal rarely "
            "meets; train with more samples, or compare with normalizer='quadrature'."
        )
    if not data_side_check(rows["log_weights_data"], rows["log_weights"]).passed:
        reasons.append(
            "The weights at the data exceed those at the proposal samples: the energy has spikes "
            "at the data; compare with normalizer='quadrature'."
        )
    return tuple(reasons)


@torch.no_grad()
def conditional_integrals(
    model: AutoregressiveEBM,
    x: Tensor,
    condition: Tensor | None = None,
    *,
    n_nodes: int = 2048,
    n_grid: int = 600,
) -> Tensor:
    """``int p(x_i | x_<i) dx_i`` for every factor at rows ``x``, ``(R, n, dim)``: ones.

    The factors are normalised by the quadrature of :meth:`AutoregressiveEBM.log_prob` and
    integrated by another rule: trapezoids on the union of ``n_grid`` points around every component,
    fine at its centre and reaching out to 10,000 of its scales.
    """
    x = model.check(x)
    parts = []
    for rows in model.chunks(len(x), n_grid * model.n_components):
        given = None if condition is None else condition[rows].to(x)
        at = model.factors(model.columns(x[rows])[0], given)
        log_norm = model.quadrature(at, n_nodes)
        reach = math.asinh(1e4)
        around = torch.sinh(torch.linspace(-reach, reach, n_grid, device=x.device)).view(
            -1, 1, 1, 1
        )
        k = model.n_components
        grid = [
            at.proposal.loc[..., i] + at.proposal.log_scale[..., i].exp() * around for i in range(k)
        ]
        y = torch.cat(grid).sort(0).values
        log_p = at.proposal.log_prob(y) + model.energy(y, at) - log_norm
        parts.append(torch.trapezoid(log_p.double().exp(), y.double(), dim=0))
    return torch.cat(parts, 1)
