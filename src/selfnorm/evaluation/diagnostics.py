r"""Log-weights summed up, and the verdict: can this log-likelihood be trusted?

A verdict lists findings: checks that a number did not pass, with figure and limit.

``log_w`` are the log-weights ``log p~(x_m) - log q(x_m)`` of proposal samples, ``log_w_data`` the
same at held-out data. The estimate of ``log Z`` sees only what the proposal visits; three questions
decide whether that was enough:

- standard error: does a handful of samples carry the estimate? An error of more than
  :data:`WRONG` nats is a wrong number, so the standard error has to stay well below that.
- Pareto k: do the largest weights belong to a distribution with a mean and a variance? Between 0.5
  and 0.7 the sample's variance is too small too often, and the standard error is widened.
- the data-side check: are there data where ``p~/q`` is larger than at *every* proposal sample?
  Such data lie in a region that the proposal (almost) never visits: a missed mode, a lighter tail,
  a collapsed proposal. ESS and Pareto k are blind to it, for both look at proposal samples only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import NormalDist

import torch
from scipy.special import bdtrc
from torch import Tensor

from selfnorm import functional as F
from selfnorm.distributions import CHUNK_SIZE, Proposal, UnnormalisedModel, log_weight_chunks

PARETO_K_LIMIT = 0.7
WRONG = 0.1  # nats: a log Z that is off by more is wrong
LARGEST_ERROR = 0.3 * WRONG  # standard error beyond which chance alone makes wrong numbers
# The proposal may miss one per cent of the data before the verdict changes: log Z is then off by
# about 0.01 nats. A finite sample always misses something (for Pareto k = 0.5 about 1/sqrt(M)).
TOLERATED_SHARE = 0.01
_ALWAYS_KEPT = 500  # the narrow reading of the tail index looks at so many


@dataclass(frozen=True)
class Finding:
    """A check that a number did not pass.

    Attributes:
        code: name of the check, for programs: ``"pareto_k"``, ``"standard_error"``, ...
        figure: what was measured.
        limit: the value beyond which the check is not passed.
        words: the cause, then the cure.

    Example:
        >>> Finding("pareto_k", 0.9, 0.7, "The weights have a heavy tail: widen the proposal.").code
        'pareto_k'
    """

    code: str
    figure: float
    limit: float
    words: str


class Judged:
    """Numbers and their findings: none where the numbers are reliable."""

    findings: tuple[Finding, ...]

    @property
    def reliable(self) -> bool:
        """Whether every check was passed."""
        return not self.findings

    @property
    def reasons(self) -> tuple[str, ...]:
        """The findings in words: why the numbers are not reliable, and what to do."""
        return tuple(finding.words for finding in self.findings)

    def _verdict(self) -> str:
        return "reliable" if self.reliable else "NOT RELIABLE: " + " ".join(self.reasons)


@torch.no_grad()
def stream_log_weights(
    model: UnnormalisedModel, proposal: Proposal, n_samples: int, chunk_size: int = CHUNK_SIZE
) -> WeightStream:
    """Summary of ``n_samples`` fresh log-weights, of which one chunk at a time is held."""
    stream = WeightStream(n_samples)
    for log_w, log_q in log_weight_chunks(model, proposal, n_samples, chunk_size):
        stream.update(log_w, log_q)
    return stream


class WeightStream:
    """Running summary of ``n_total`` log-weights: what an estimate of ``log Z`` needs of them.

    The mean needs one running sum, the effective sample size two, Pareto k only the ``3 sqrt(M)``
    largest weights: memory does not grow with ``M`` beyond that. Weights that are NaN or infinite
    count as zero, and set :attr:`broken`.
    """

    def __init__(self, n_total: int) -> None:
        self.n_total = n_total
        tail = min(n_total // 5, math.ceil(3 * math.sqrt(n_total)))
        self._n_kept = min(n_total, max(tail + 1, _ALWAYS_KEPT))
        self.n = 0
        self.top = torch.empty(0, dtype=torch.float64)
        self._log_sum = torch.tensor(-math.inf, dtype=torch.float64)
        self._log_sum_squares = self._log_sum
        self._n_broken = self._n_nan_q = torch.zeros((), dtype=torch.long)

    @classmethod
    def of(cls, log_w: Tensor | WeightStream) -> WeightStream:
        """The summary of weights at hand; a summary passes through."""
        if isinstance(log_w, WeightStream):
            return log_w
        stream = cls(log_w.numel())
        stream.update(log_w)
        return stream

    def update(self, log_w: Tensor, log_q: Tensor | None = None) -> None:
        """Take in a chunk of log-weights, and the proposal's log-density behind them if known."""
        log_w = log_w.detach().flatten().double()
        if self.n == 0:
            device = log_w.device
            self.top, self._n_broken = self.top.to(device), self._n_broken.to(device)
            self._n_nan_q = self._n_nan_q.to(device)
            self._log_sum = self._log_sum_squares = self._log_sum.to(device)
        self.n += log_w.numel()
        broken = torch.isnan(log_w) | torch.isposinf(log_w)
        self._n_broken = self._n_broken + broken.sum()
        if log_q is not None:
            self._n_nan_q = self._n_nan_q + torch.isnan(log_q).sum()
        log_w = log_w.masked_fill(broken, -math.inf)
        self._log_sum = torch.logaddexp(self._log_sum, torch.logsumexp(log_w, 0))
        squares = torch.logsumexp(2 * log_w, 0)
        self._log_sum_squares = torch.logaddexp(self._log_sum_squares, squares)
        best = torch.topk(log_w, min(self._n_kept, log_w.numel())).values
        self.top = torch.cat([self.top, best]).sort(descending=True).values[: self._n_kept]

    @property
    def broken(self) -> bool:
        """Whether a weight was NaN or infinite."""
        return bool(self._n_broken > 0)

    @property
    def broken_by_proposal(self) -> bool:
        """Whether the proposal's own log-density was NaN at a sample of it."""
        return bool(self._n_nan_q > 0)

    @property
    def largest(self) -> float:
        """The largest finite log-weight, ``-inf`` if there is none."""
        return float(self.top[0]) if self.n else -math.inf

    @property
    def log_mean(self) -> float:
        """``log mean(w)``."""
        return float(self._log_sum) - math.log(max(self.n, 1))

    @property
    def ess(self) -> float:
        """Effective sample size as a fraction of the samples."""
        if math.isinf(self.largest):
            return 0.0
        log_ess = 2 * self._log_sum - self._log_sum_squares
        return min(float(torch.exp(log_ess)) / self.n, 1.0)  # equal weights round to above 1

    @property
    def log_mean_se(self) -> float:
        """Standard error of ``log mean(w)``: ``sqrt((1/ESS - 1) / M)``.

        By the delta method: it is meaningful for Pareto k below 0.5 only (:func:`tail_factor`).
        """
        return math.sqrt((1 / self.ess - 1) / self.n) if self.ess > 0 else math.inf

    def pareto_k(self) -> float:
        """Pareto k of all weights; see :func:`selfnorm.functional.pareto_k`."""
        return float(F.pareto_k(self.top, n_total=self.n))


@dataclass(frozen=True)
class DataSideCheck:
    """Weights at held-out data against weights at proposal samples.

    ``share``: fraction of the data whose weight exceeds every proposal weight. ``decisive``:
    number of data points, each of which would by itself have moved ``log Z`` by more than
    :data:`WRONG`, had the proposal drawn it. ``passed`` is the outcome.
    """

    share: float
    decisive: int
    passed: bool


def tail_factor(k: float, n: int) -> float:
    """By how much the standard error of ``n`` weights with a (finite) Pareto k is widened.

    ``1 + 6 max(0, k + 2 sd - 0.5)``, with ``sd = (1 + k) / sqrt(3 sqrt(n))`` the standard deviation
    of the fitted ``k``. Where the variance is infinite, most samples lack the rare large weights
    that make it so; their mean and their variance are both too low. Of Pareto weights with k
    between 0.5 and 0.7 three plain errors are passed in 1 to 20 % of all samples, three widened
    ones in at most 1 %.

    Example:
        >>> tail_factor(0.2, 20_000), round(tail_factor(0.6, 20_000), 1)
        (1.0, 2.5)
    """
    if not math.isfinite(k):  # a verdict of its own
        return 1.0
    spread = (1 + k) / math.sqrt(3 * math.sqrt(n))
    return 1 + 6 * max(0.0, k + 2 * spread - 0.5)


def few_beyond(count: float, n: int, by_chance: float) -> bool:
    """Whether ``count`` of ``n`` data may outweigh all proposal samples.

    Data that follow the model do so with probability ``by_chance``, the share of the largest weight
    in the sum of all. A share of :data:`TOLERATED_SHARE` more is tolerated. Under both together
    so high a count must have a probability of at least 1 %.

    Example:
        >>> few_beyond(5, 500, 0.001), few_beyond(15, 500, 0.001), few_beyond(15, 500, 0.02)
        (True, False, True)
    """
    return float(bdtrc(count - 1, n, min(1.0, TOLERATED_SHARE + by_chance))) >= 0.01


def data_side_check(log_w_data: Tensor, log_w: Tensor | WeightStream) -> DataSideCheck:
    """Does the proposal reach the data?

    A region where ``w`` exceeds all of ``M`` proposal weights has a proposal mass of about ``1/M``
    or less. If more than a tolerated share of held-out data lies there, the proposal does not cover
    the data, and ``log Z`` misses whatever mass the model has in that region. One row is enough if
    its weight is overwhelming.
    """
    log_w_data, stream = log_w_data.detach().double(), WeightStream.of(log_w)
    n, m = len(log_w_data), stream.n
    # an infinite weight at a data point (q = 0 there) exceeds everything, a nan is no evidence
    usable = log_w_data[~torch.isnan(log_w_data)]
    if n == 0 or math.isinf(stream.largest):
        return DataSideCheck(math.nan, 0, passed=n == 0)
    # rounding alone must not count: constant weights differ in the last digits
    margin = 1e-4 * (1.0 + abs(stream.largest))
    above = int((usable > stream.largest + margin).sum())
    decisive = int((usable > stream.log_mean + math.log(m * math.expm1(WRONG))).sum())
    by_chance = math.exp(stream.largest - stream.log_mean) / m
    passed = few_beyond(above, n, by_chance) and decisive == 0
    return DataSideCheck(above / n, decisive, passed)


def deviations(level: float) -> float:
    """How many standard deviations a normal interval of that level has on either side."""
    if not 0.0 < level < 1.0:
        raise ValueError(f"level must lie between 0 and 1, got {level}")
    return NormalDist().inv_cdf(0.5 + level / 2)


@dataclass(frozen=True)
class Verdict(Judged):
    """Findings against an estimate of ``log Z``, and its tail index.

    ``log_norm_se``: standard error of ``log Z``, widened where the tail asks for it.
    """

    findings: tuple[Finding, ...]
    pareto_k: float
    log_norm_se: float = math.inf


def tail_index(log_w: Tensor | WeightStream) -> float:
    """Pareto k of the weights, read again in two other ways where the first reading is high.

    A defensive mixture bounds the weights and lets many of them pile up just below a plateau, with
    a shoulder of larger ones where only its broad part reaches. A generalised Pareto fitted
    across the two reads k = 5 for weights that never exceed 1.7. The 70 or so largest weights lie
    on the shoulder alone and show that it ends; a tail that is truly heavy looks the same there.
    And of Pareto weights with ``k >= 0.7`` the largest one holds more than ``0.1 n^-0.3`` of the
    sum in 99 of 100 samples: where it holds less, that tail is not there, and k is 0.5 at most.
    """
    stream = WeightStream.of(log_w)
    k = stream.pareto_k()
    if k > PARETO_K_LIMIT and stream.n >= 2000:
        narrow = float(F.pareto_k(stream.top[:500]))
        if narrow < 0.5:
            return narrow
        share = math.exp(stream.largest - stream.log_mean) / stream.n
        if share < 0.1 * stream.n**-0.3:
            return 0.5
    return k


def verdict(log_w: Tensor | WeightStream, log_w_data: Tensor | None = None) -> Verdict:
    """Judge an importance-sampling estimate of ``log Z`` from its weights.

    ``log_w (M,)`` at proposal samples (or their summary), ``log_w_data (n,)`` at held-out data
    (recommended: without it a missed mode cannot be seen).
    """
    stream = WeightStream.of(log_w)
    findings = list(_of_broken_weights(stream))
    if math.isinf(stream.largest):
        return Verdict(tuple(findings), math.inf)
    k = tail_index(stream)
    se = stream.log_mean_se * tail_factor(k, stream.n)
    findings += _of_weights(stream, k, se)
    if log_w_data is not None and log_w_data.numel():
        findings += _of_data(data_side_check(log_w_data.flatten(), stream), log_w_data.numel())
    return Verdict(tuple(findings), k, se)


def _of_broken_weights(stream: WeightStream) -> Iterator[Finding]:
    if stream.broken_by_proposal:
        yield Finding(
            "proposal_nan", math.nan, 0.0,
            "The proposal's log_prob is NaN at samples of its own: mend the proposal, or take "
            "another one.",
        )  # fmt: skip
    elif stream.broken:
        yield Finding(
            "weights_not_finite", math.nan, 0.0,
            "Some weights are not finite: the energy returns nan or -inf at proposal samples; "
            "check the energy for overflow.",
        )  # fmt: skip
    if math.isinf(stream.largest):
        yield Finding(
            "no_overlap", 0.0, 0.0,
            "No proposal sample has a positive weight: model and proposal do not overlap; fit the "
            "proposal to the data.",
        )  # fmt: skip


def heavy_tail(k: float, cure: str, of: str = "") -> Iterator[Finding]:
    """A tail index above its limit; ``cure`` says what it means and what helps."""
    if k > PARETO_K_LIMIT:
        words = f"Pareto k = {k:.2f} {of}is above {PARETO_K_LIMIT}: {cure}"
        yield Finding("pareto_k", k, PARETO_K_LIMIT, words)


def _of_weights(stream: WeightStream, k: float, se: float) -> Iterator[Finding]:
    yield from heavy_tail(
        k,
        "the weights are so heavy-tailed that no number of samples helps; use a proposal with "
        "heavier tails (Defensive or StudentT fitted to the data).",
    )
    if not se <= LARGEST_ERROR:
        yield Finding(
            "standard_error", se, LARGEST_ERROR,
            f"Only {stream.ess * stream.n:.0f} effective of {stream.n} proposal samples, and a "
            f"standard error of {se:.3f}: a few of them carry the estimate; raise n_samples or "
            "bring the proposal closer to the model.",
        )  # fmt: skip


def _of_data(check: DataSideCheck, n: int) -> Iterator[Finding]:
    if not check.passed:
        yield Finding(
            "data_side", check.share, TOLERATED_SHARE,
            f"{100 * check.share:.1f} % of the data have a larger weight than every proposal "
            f"sample ({check.decisive} of {n} would each move log Z by more than {WRONG}): the "
            "proposal misses a region where the data are (a mode or a tail), or the energy has "
            "grown a spike there; widen the proposal (Defensive) or fit it to these data.",
        )  # fmt: skip
