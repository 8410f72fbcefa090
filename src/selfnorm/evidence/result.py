"""``Evidence``: a log-normaliser with its error, bounds and verdict; and the comparison of two."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from selfnorm.evaluation import Finding, Judged, deviations
from selfnorm.plotting import new_figure, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def _interval(value: float, se: float, level: float) -> tuple[float, float]:
    half = deviations(level) * se
    return value - half, value + half


@dataclass(frozen=True)
class Evidence(Judged):
    r"""``log Z`` of an unnormalised density, estimated from draws, and whether to trust it.

    Attributes:
        log_z: the estimate, by bridge sampling; by the reciprocal estimate where no density could
            be evaluated.
        se: its standard error, with the autocorrelation of the draws in it.
        lower: ``E_q[log p~ - log q]``, a lower bound that needs only the density. ``-inf`` where it
            could not be evaluated.
        upper: ``E_p[log p~ - log q]``, an upper bound *if the draws are from* ``p``.
        lower_se, upper_se: their standard errors.
        importance: ``log mean_q(p~ / q)``, the ``b`` that maximises SNL; NaN without a density.
        reciprocal: ``-log mean_p(q / p~)``, corrected for ``support_share``.
        support_share: share of ``q``'s mass inside the support of ``p``.
        halves: the estimates of the two swapped halves, whose mean ``log_z`` is.
        effective_draws: independent draws that the held-out draws are worth.
        ess: effective sample size of ``p~ / q``, as a fraction of ``q``'s samples.
        overlap: ``int p q / (s1 p + s2 q)``; 1 where ``q`` is ``p``.
        pareto_k_draws, pareto_k_samples: tail index of ``q / p~`` at the draws and of ``p~ / q`` at
            the samples; above 0.7 ``reciprocal`` or ``importance`` rests on a few of them. The
            bridge, whose terms are bounded, needs neither.
        r_hat: split R-hat of the draws, the largest over coordinates and ``log p~``. Of ten chains
            or more, the variance between chains is that of chains which stay apart or drift.
        n_draws, dim, n_evaluations: number of draws, of unconstrained coordinates, of density
            evaluations.
        findings: checks that the numbers did not pass; ``reasons`` are the same in words.
        notes: what this estimate could not check.

    Example:
        >>> import selfnorm as sn
        >>> x = np.random.default_rng(0).normal(size=(400, 1))
        >>> wide = sn.evidence(lambda x: -(x[:, 0] ** 2) / 2, x, seed=0)
        >>> half = sn.evidence(lambda x: np.log(0.5) - x[:, 0] ** 2 / 2, x, seed=0)
        >>> round(wide.compare(half).log_bayes_factor, 3)
        0.693
    """

    log_z: float
    se: float
    upper: float
    upper_se: float
    reciprocal: float
    halves: tuple[float, float]
    effective_draws: float
    pareto_k_draws: float
    r_hat: float
    n_draws: int
    dim: int
    n_evaluations: int
    lower: float = -math.inf  # this and what follows: not without a density
    lower_se: float = math.nan
    importance: float = math.nan
    support_share: float = math.nan
    ess: float = math.nan
    overlap: float = math.nan
    pareto_k_samples: float = math.nan
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    log_weights_draws: np.ndarray = field(default_factory=lambda: np.zeros(0), repr=False)
    log_weights_samples: np.ndarray = field(default_factory=lambda: np.zeros(0), repr=False)

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """Normal confidence interval of ``log Z``; it means something where :attr:`reliable`."""
        return _interval(self.log_z, self.se, level)

    def compare(self, other: Evidence) -> Comparison:
        """The log Bayes factor ``log Z - log Z'`` in favour of this model."""
        if not isinstance(other, Evidence):
            raise TypeError(
                f"an Evidence is compared with another, not with {type(other).__name__}"
            )
        findings = tuple(
            replace(finding, words=f"{which}: {finding.words}")
            for which, model in (("first", self), ("second", other))
            for finding in model.findings
        )
        return Comparison(self.log_z - other.log_z, math.hypot(self.se, other.se), findings)

    def to_dict(self) -> dict[str, object]:
        """All figures and the verdict as a plain dict, without the log-weights."""
        values = asdict(self)
        del values["log_weights_draws"], values["log_weights_samples"]
        verdict = {"reliable": self.reliable, "reasons": list(self.reasons)}
        return {**values, "interval_95": self.interval(), **verdict}

    def plot(self, path: str | Path | None = None) -> Figure:
        """``log p~ - log q`` at draws and at samples of ``q``, with ``log Z`` and its bounds.

        Where ``q`` is close to ``p``, both histograms are narrow and lie on ``log Z``. A part of
        the draws far to the right is mass that ``q`` does not reach.
        """
        figure, axis = new_figure(figsize=(6.4, 3.6))
        values = [self.log_weights_draws, self.log_weights_samples]
        values = [v[np.isfinite(v)] for v in values]
        pooled = np.concatenate(values)
        ends = np.quantile(pooled, [0.002, 0.998])
        margin = 0.05 * (ends[1] - ends[0]) + 1e-6
        bins = np.linspace(ends[0] - margin, ends[1] + margin, 60)
        for part, label in zip(values, ("draws of p", "samples of q"), strict=True):
            if len(part):
                inside = np.clip(part, bins[0], bins[-1])
                axis.hist(inside, bins, histtype="step", density=True, label=label)
        axis.axvspan(*self.interval(), color="0.8", label="log Z, 95 %")
        for value, name in ((self.lower, "lower"), (self.upper, "upper")):
            if math.isfinite(value):
                axis.axvline(value, color="k", ls=":" if name == "lower" else "--", label=name)
        axis.set(xlabel="log p~ - log q", yticks=[])
        mark = "" if self.reliable else " (not reliable)"
        axis.set_title(f"log Z = {self.log_z:.3f} ± {self.se:.3f}{mark}", fontsize=10)
        axis.legend(fontsize=8)
        return save(figure, path)

    def __str__(self) -> str:
        notes = "".join(f" Note: {note}" for note in self.notes)
        return (
            f"log Z = {self.log_z:.4f} ± {self.se:.4f}, bounds [{self.lower:.4f} ± "
            f"{self.lower_se:.4f}, {self.upper:.4f} ± {self.upper_se:.4f}], Pareto k "
            f"{self.pareto_k_draws:.2f} and {self.pareto_k_samples:.2f}, "
            f"{self.effective_draws:.0f} effective of {self.n_draws} draws, {self.n_evaluations} "
            f"evaluations: {self._verdict()}{notes}"
        )


@dataclass(frozen=True)
class Comparison(Judged):
    """Two models of the same data.

    Attributes:
        log_bayes_factor: ``log Z`` of the first minus that of the second; positive favours the
            first.
        se: standard error; the two estimates are taken as independent.
        findings: checks that either estimate did not pass.
    """

    log_bayes_factor: float
    se: float
    findings: tuple[Finding, ...] = ()

    @property
    def probability(self) -> float:
        """Posterior probability of the first model where both were equally likely before."""
        return 1 / (1 + math.exp(-max(min(self.log_bayes_factor, 700.0), -700.0)))

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """Normal confidence interval of the log Bayes factor."""
        return _interval(self.log_bayes_factor, self.se, level)

    def __str__(self) -> str:
        return (
            f"log Bayes factor {self.log_bayes_factor:+.3f} ± {self.se:.3f}, probability of the "
            f"first {self.probability:.4f} from even odds: {self._verdict()}"
        )
