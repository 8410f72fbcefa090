"""Bounds of the mean ``log p(y|x)`` from the samples that every input has of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from selfnorm import functional as F
from selfnorm.evaluation import (
    NOT_FINITE,
    TOLERATED_SHARE,
    Bounds,
    Finding,
    about_b,
    few_beyond,
    heavy_tail,
    tail_factor,
)

_JUDGED_INPUTS = 200  # whose Pareto k is computed: it needs a sort


@dataclass(frozen=True)
class InputFigures:
    """What ``M`` samples say of every input, ``(n,)`` each.

    Attributes:
        lower, upper: bounds of ``log p(y|x)``.
        log_norm: ``log Z_hat``.
        off: ``log Z_hat - b``.
        ess: effective share of the samples.
        beyond: 1 where the weight of the label is larger than that of all samples.
        chance: how probable that is under the model.
        pareto_k: NaN for inputs that it was not computed for.
    """

    lower: Tensor
    upper: Tensor
    log_norm: Tensor
    off: Tensor
    ess: Tensor
    beyond: Tensor
    chance: Tensor
    pareto_k: Tensor

    @classmethod
    def joined(cls, parts: Sequence[InputFigures]) -> InputFigures:
        """The figures of consecutive inputs in one."""
        names = [field.name for field in fields(cls)]
        return cls(*(torch.cat([getattr(part, name) for part in parts]).cpu() for name in names))

    def bounds(self, m: int, *, shared: bool = False, nan_proposal: bool = False) -> Bounds:
        """Bounds of the mean over the inputs, each from ``m`` samples.

        ``shared``: all inputs have the same samples, whose errors do not average out.
        ``nan_proposal``: the log-density of the proposal is NaN somewhere, which is not the fault
        of the energy.
        """
        n = len(self.lower)
        k = self.pareto_k[~torch.isnan(self.pareto_k)]
        finite = len(k) > 0 and bool(torch.isfinite(k).all())
        tail = float(k.quantile(0.95)) if finite else float("inf")
        inverse_ess = 1 / self.ess.clamp_min(1e-12)
        variance = float(((inverse_ess - 1) / m).mean()) / (1 if shared else n)
        se = tail_factor(tail, m) * variance**0.5
        # The scatter of the rows holds that of their samples, unless all have the same.
        common = variance if shared else 0.0

        def error(values: Tensor) -> float:
            return (float(values.var()) / n + common) ** 0.5 if n > 1 else se

        log_norm = float(self.log_norm.mean())
        of_b, remarks = about_b(log_norm, float((self.log_norm - self.off).mean()), se)
        return Bounds(
            lower=float(self.lower.mean()),
            upper=float(self.upper.mean()),
            lower_se=error(self.lower),
            upper_se=error(self.upper),
            log_norm=log_norm,
            log_norm_se=se,
            ess=float(self.ess.mean()),
            pareto_k=tail,
            n_samples=m,
            findings=(*self._findings(m, tail, nan_proposal), *of_b),
            learned_error=float(self.off.mean()),
            remarks=remarks,
        )

    def _findings(self, m: int, tail: float, nan_proposal: bool) -> list[Finding]:
        findings = []
        if nan_proposal:
            words = "The log_prob of the proposal (or base) is NaN at labels: mend it."
            findings.append(Finding("proposal_nan", math.nan, 0.0, words))
        elif not bool(torch.isfinite(self.lower).all() & torch.isfinite(self.upper).all()):
            findings.append(NOT_FINITE)
        cure = "mix a wider distribution into the proposal (Defensive)."
        findings += heavy_tail(tail, cure, "at the 95 % point of the inputs ")
        few = float((self.ess * m < 50).double().mean())
        if few > 0.05:
            words = (
                f"{100 * few:.0f} % of the inputs have fewer than 50 effective samples: use a "
                "proposal closer to the model or more samples."
            )
            findings.append(Finding("ess", few, 0.05, words))
        beyond = float(self.beyond.mean())
        if not few_beyond(float(self.beyond.sum()), len(self.beyond), float(self.chance.mean())):
            words = (
                f"{100 * beyond:.1f} % of the labels have larger weights than any proposal sample: "
                "the proposal misses mass that the model has; mix in a wider one."
            )
            findings.append(Finding("data_side", beyond, TOLERATED_SHARE, words))
        return findings


def weight_checks(
    log_w: Tensor, at_label: Tensor, n: int, first: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The last four of :class:`InputFigures`, ``(..., inputs)`` each.

    Args:
        log_w: log-weights ``(M, ..., inputs)`` of the inputs from number ``first`` on.
        at_label: log-weights ``(..., inputs)`` of the labels.
        n: number of all inputs.
        first: number of the first of these.
    """
    share = torch.softmax(log_w, 0).amax(0)
    # But for rounding: of labels with cells many samples are the label itself.
    beyond = (at_label > log_w.amax(0) + 1e-6).double()
    return F.ess(log_w), beyond, share, _pareto_k(log_w, n, first)


def _pareto_k(log_w: Tensor, n: int, first: int) -> Tensor:
    """Pareto k of some of ``n`` inputs, evenly spaced; NaN for the others.

    Where the largest weight holds too little of the sum for a tail with ``k > 0.7`` (see
    :func:`selfnorm.evaluation.tail_index`) k is 0.5 at most, whatever distribution fits the
    shoulder of weights that end.
    """
    k = torch.full(log_w.shape[1:], torch.nan, dtype=torch.float64, device=log_w.device)
    step = max(1, n // _JUDGED_INPUTS)
    start = -first % step
    if start < k.shape[-1]:
        chosen = log_w[..., start::step]
        share = torch.softmax(chosen, 0).amax(0)
        fitted = F.pareto_k(chosen).double()
        ends = (share < 0.1 * len(log_w) ** -0.3) & torch.isfinite(fitted)
        k[..., start::step] = torch.where(ends, fitted.clamp_max(0.5), fitted)
    return k
