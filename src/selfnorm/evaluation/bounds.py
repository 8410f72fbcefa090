"""How good is the model, and can the number be trusted: two bounds, their errors, a verdict."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Protocol, TypeVar, runtime_checkable

import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from selfnorm import functional as F
from selfnorm._context import SeedLike, evaluating, seeded
from selfnorm._inputs import check_rows
from selfnorm.distributions import (
    CHUNK_SIZE,
    Defensive,
    Proposal,
    StudentT,
    UnnormalisedModel,
    proposal_for,
)
from selfnorm.errors import DataError, ProposalError, SelfnormWarning
from selfnorm.evaluation.diagnostics import (
    LARGEST_ERROR,
    TOLERATED_SHARE,
    WRONG,
    Finding,
    Judged,
    WeightStream,
    data_side_check,
    deviations,
    stream_log_weights,
    verdict,
)
from selfnorm.evaluation.memory import chunk_size_for
from selfnorm.sampling import value_and_gradient

AnyBounds = TypeVar("AnyBounds", bound="Bounds")

B_TOLERANCE = 0.05  # nats between b and log Z before a word is said, ...
B_LIMIT = 0.15  # ... and by which b may lie above it; five standard errors at least, both of them
MORE_SAMPLES = 8  # times n_samples, at most, where the first ones were not enough
NOT_A_NUMBER = Finding(
    "nan",
    math.nan,
    0.0,
    "A bound or log Z is NaN: nothing is known; look for NaN in model and data.",
)
NOT_FINITE = Finding(
    "not_finite",
    math.inf,
    0.0,
    "A bound is not finite: the model's energy or b is broken; retrain.",
)
_ROWS_TO_FIT = 20_000
_JOINED = "The proposal alone was not enough: a distribution fitted to the rows has joined it."
_CLIMBING = (2.0**4, 2.0**12)  # radii, in deviations
_FAR_MASS = math.log(1e-3)  # of the whole, below which it does not matter what is far out


@dataclass(frozen=True)
class Bounds(Judged):
    """Lower and upper bound of the mean log-likelihood (nats per row), and their reliability.

    Attributes:
        lower: ``l_SNL``, a lower bound in expectation.
        upper: ``l_IS``, an upper bound in expectation; infinite where a model has none (a VAE).
        lower_se, upper_se: Monte-Carlo standard errors (test rows and proposal samples).
        log_norm: importance-sampling estimate of ``log Z``; ``log_norm_se`` its standard error,
            widened where the weights have a heavy tail.
        ess: effective sample size, as a fraction of ``n_samples``.
        pareto_k: tail index of the weights; above 0.7 the estimate cannot be trusted.
        n_samples: number of proposal samples behind these figures.
        findings: checks that the numbers did not pass; none if they are reliable. ``reasons`` are
            the same in words.
        learned_error: ``log Z`` minus the learned ``b`` (of a conditional model, a chain: the mean
            over the rows). ``log_prob`` by the learned ``b`` is too high by as much.
        remarks: what is worth knowing but makes no number unreliable.
        measure: fingerprint of the reference measure of the densities, where a model has one.

    ``lower <= log-likelihood <= upper`` holds for expectations. For one estimate the gap is
    ``t - 1 - log t`` with ``t = exp(-b) mean(w)``: where ``b`` is the log-normaliser it is next to
    nothing, and the truth lies below ``lower`` in one case of two. What covers it is
    :meth:`interval`, and that is what is printed.

    Example:
        >>> import selfnorm as sn
        >>> x = torch.randn(500, 1)
        >>> model = sn.EBM(lambda v: v.square().sum(-1) / 2, log_norm=0.9189)     # log sqrt(2 pi)
        >>> bounds = sn.evaluate(model, x, proposal=sn.StudentT.fit_to(x), seed=0)
        >>> low, high = bounds.interval(0.95)
        >>> bounds.reliable, low < -1.419 < high                     # minus the entropy of N(0, 1)
        (True, True)
    """

    lower: float
    upper: float
    lower_se: float
    upper_se: float
    log_norm: float
    log_norm_se: float
    ess: float
    pareto_k: float
    n_samples: int
    findings: tuple[Finding, ...] = ()
    learned_error: float = math.nan
    remarks: tuple[str, ...] = ()
    measure: str | None = None

    def __post_init__(self) -> None:
        if not self.findings and any(map(math.isnan, (self.lower, self.upper, self.log_norm))):
            object.__setattr__(self, "findings", (NOT_A_NUMBER,))

    @property
    def gap(self) -> float:
        """``upper - lower``; small where ``b`` is the log-normaliser."""
        return self.upper - self.lower

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """Confidence interval around both bounds: the lower's lower end, the upper's upper end.

        Each end is that of a normal interval at ``level``; it covers test rows and proposal
        samples, and means something only where :attr:`reliable` is true.
        """
        z = deviations(level)
        return self.lower - z * self.lower_se, self.upper + z * self.upper_se

    def shifted(self: AnyBounds, by: float) -> AnyBounds:
        """Both bounds moved, e.g. by the log-Jacobian of a change of units."""
        return replace(self, lower=self.lower + by, upper=self.upper + by)

    def minus(self, other: Bounds) -> tuple[float, float]:
        """By how much another model's log-likelihood of the same rows is lower: both ends (nats).

        The interval from this lower bound minus that upper one to the reverse. Densities in
        different measures (units, cells, point masses) cannot be compared: a warning says so.

        Example:
            >>> a = Bounds(-1.0, -0.9, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 100, measure="cents")
            >>> b = replace(a, lower=-3.0, upper=-2.9)
            >>> [round(end, 6) for end in a.minus(b)]
            [1.9, 2.1]
        """
        if None not in (self.measure, other.measure) and self.measure != other.measure:
            warnings.warn(
                f"log-likelihoods of different measures ({self.measure}, {other.measure}) cannot "
                "be compared: fit both models with one schema=Schema.detect(table)",
                SelfnormWarning,
                stacklevel=2,
            )
        return self.lower - other.upper, self.upper - other.lower

    def to_dict(self) -> dict[str, object]:
        """All fields, the gap, the 95 % interval and the verdict as a plain dict.

        An upper bound that does not exist is ``None``.
        """
        low, high = self.interval()
        values: dict[str, object] = {
            **asdict(self),
            "gap": self.gap,
            "interval": [low, high],
            "reliable": self.reliable,
            "reasons": list(self.reasons),
        }
        if math.isinf(self.upper):
            values |= {"upper": None, "upper_se": None, "gap": None, "interval": [low, None]}
        return values

    def __str__(self) -> str:
        low, high = self.interval()
        if math.isinf(self.upper):
            bounds = f"at least {low:.4f} nats (95 %; bound {self.lower:.4f}, no upper bound)"
        else:
            bounds = (
                f"in [{low:.4f}, {high:.4f}] nats (95 % interval; bounds {self.lower:.4f} and "
                f"{self.upper:.4f}, gap {self.gap:.4f})"
            )
        remarks = " ".join([".", *self.remarks]) if self.remarks else ""
        return (
            f"log-likelihood {bounds}, log Z {self.log_norm:.4f} ± {self.log_norm_se:.4f}, "
            f"log_prob by the learned b off by {self.learned_error:+.4f}, ESS {self.ess:.3f}, "
            f"Pareto k {self.pareto_k:.2f}: {self._verdict().rstrip('.')}{remarks}"
        )


@runtime_checkable
class HasBounds(Protocol):
    """A model that computes its bounds by a method of its own."""

    @property
    def bounds(self) -> Callable[..., Bounds]:
        """The method."""
        ...


@torch.no_grad()
def evaluate(
    model: HasBounds | UnnormalisedModel,
    x: object,
    *,
    proposal: object = None,
    n_samples: int = 20_000,
    chunk_size: int | None = None,
    seed: SeedLike = None,
    max_memory: float | None = None,
    reference: ArrayLike | Tensor | None = None,
    adapt: bool = True,
    **options: object,
) -> Bounds:
    """Bounds of the mean log-likelihood of ``x`` under ``model``.

    Where the proposal's samples are not enough (a heavy tail, few effective samples, rows that they
    do not reach, a ``b`` that is elsewhere) a Student-t fitted to the rows joins the proposal,
    half and half, and up to eight times as many samples are drawn. The verdict is on those.

    Args:
        model: an :class:`~selfnorm.EBM`, or any model with a ``bounds`` method of its own.
        x: ``(n, d)`` held-out rows: a tensor, an array or a data frame of numbers.
        proposal: proposal distribution; the model's base density by default.
        n_samples: number of proposal samples for ``Z``.
        chunk_size: rows per forward pass; another size draws other samples from the same seed.
        seed: for the proposal samples.
        max_memory: bytes (or, below 1, the share of the free memory) that one forward pass may
            take; sets ``chunk_size``. Weights are summed up chunk by chunk and not kept.
        reference: ``(m, d)`` rows that the model was trained on: an energy that has grown spikes at
            them, with mass that neither samples nor held-out rows meet, is found there.
        adapt: ``False`` judges the proposal as it is, by ``n_samples`` of its own samples.
        options: passed on to a model's own ``bounds``, as are ``proposal``, ``chunk_size``,
            ``max_memory`` and ``reference``; one that it does not take is an error.

    Example:
        >>> import selfnorm as sn
        >>> base = sn.Gaussian(torch.zeros(1), scale=1.0)
        >>> model = sn.EBM(sn.ExponentialFamily(lambda x: x, 1), base=base)   # Z = 1, b = 0
        >>> bounds = sn.evaluate(model, torch.zeros(3, 1), n_samples=1000)
        >>> round(bounds.lower, 4), round(bounds.gap, 6), bounds.reliable
        (-0.9189, 0.0, True)
    """
    if isinstance(model, HasBounds):
        stated = {"proposal": proposal, "chunk_size": chunk_size, "max_memory": max_memory}
        stated |= {"reference": reference, "adapt": None if adapt else False}
        options |= {name: value for name, value in stated.items() if value is not None}
        return _by_own_method(model, x, n_samples, seed, options)
    if options:
        raise TypeError(f"evaluate() got unexpected options {sorted(options)}")
    if getattr(model, "log_unnormalized", None) is None:
        raise TypeError(
            f"evaluate needs an EBM or a model with bounds() of its own, got {type(model).__name__}"
            "; the log_prob of a proposal or flow is exact already: take its mean"
        )
    proposal = getattr(model, "base", None) if proposal is None else proposal
    if proposal is None:
        raise ProposalError("evaluate needs a proposal (or a model with a base density)")
    if n_samples < 2:
        raise DataError(f"n_samples must be at least 2, got {n_samples}")
    dtype = getattr(model, "dtype", None)
    x = check_rows(x, "x", minimum=1, dtype=dtype).to(model.device)
    if reference is not None:
        reference = check_rows(reference, "reference", minimum=1, dtype=dtype, width=x.shape[-1])
        reference = reference.to(model.device)
    q = proposal_for(model, proposal, x.shape[-1])
    if max_memory is not None and chunk_size is None:
        chunk_size = chunk_size_for(model, q, max_memory)
    with evaluating(model), seeded(seed, model.device):
        judge = _Judge(model, x, reference, chunk_size or CHUNK_SIZE)
        bounds, clear = judge.bounds(q, n_samples)
        if adapt and not clear:
            bounds = judge.widened(q, n_samples, bounds)
        # Nothing can be compared with a log Z that is NaN.
        if not math.isnan(bounds.log_norm):
            far = far_mass(model, q, x, bounds.log_norm)
            bounds = replace(bounds, findings=(*bounds.findings, *far))
    return bounds


def _by_own_method(
    model: HasBounds, x: object, n_samples: int, seed: SeedLike, options: dict[str, object]
) -> Bounds:
    """Bounds of a model that has a method for them."""
    parameters = inspect.signature(model.bounds).parameters.values()
    takes_any = any(p.name == "proposal" or p.kind is p.VAR_KEYWORD for p in parameters)
    if "proposal" in options and not takes_any:
        raise ProposalError(
            f"{type(model).__name__} brings its own proposal and evaluates with that one: "
            "leave proposal out"
        )
    # Estimators of tables name their seed as scikit-learn does, and regressors take (X, y).
    named = "random_state" if any(p.name == "random_state" for p in parameters) else "seed"
    pair = x if isinstance(x, tuple) and any(p.name == "y" for p in parameters) else (x,)
    return model.bounds(*pair, n_samples=n_samples, **{named: seed}, **options)


class _Judge:
    """A model and the rows by which it is judged, under several proposals."""

    def __init__(
        self, model: UnnormalisedModel, x: Tensor, reference: Tensor | None, chunk: int
    ) -> None:
        self.model, self.x, self.reference, self.chunk = model, x, reference, chunk
        self.b = float(model.log_norm)
        self.log_p = self._at(model.log_unnormalized, x)
        if reference is not None:
            self.log_p_reference = self._at(model.log_unnormalized, reference)

    def _at(self, log_density: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        return torch.cat([log_density(part) for part in rows.split(self.chunk)]).double()

    def bounds(self, q: Proposal, n: int) -> tuple[Bounds, bool]:
        """Bounds from ``n`` samples of a proposal; and whether they leave no doubt at all."""
        log_w = stream_log_weights(self.model, q, n, self.chunk)
        log_q = self._at(q.log_prob, self.x)
        log_w_data = self.log_p - log_q
        bounds = bounds_from_weights(self.log_p, log_w, log_w_data, self.b)
        of_proposal = () if log_w.broken_by_proposal else _of_proposal(log_q)
        of_reference = self._of_reference(q, log_w)
        bounds = replace(bounds, findings=(*of_proposal, *bounds.findings, *of_reference))
        reached = data_side_check(log_w_data, log_w).share * len(self.x) < 2
        agree = -bounds.learned_error <= max(B_TOLERANCE, 5 * bounds.log_norm_se)
        exact = bounds.pareto_k <= 0.3 and bounds.log_norm_se <= 0.8 * LARGEST_ERROR
        return bounds, bounds.reliable and reached and agree and exact

    def _of_reference(self, q: Proposal, log_w: WeightStream) -> Iterator[Finding]:
        """Spikes of the energy at the rows that it was trained on."""
        if self.reference is None:
            return
        check = data_side_check(self.log_p_reference - self._at(q.log_prob, self.reference), log_w)
        if not check.passed:
            words = (
                f"{100 * check.share:.1f} % of the reference rows have a larger weight than every "
                f"sample ({check.decisive} of {len(self.reference)} would each move log Z by more "
                f"than {WRONG}): the energy has grown spikes at rows it was trained on; regularise "
                "it, or stop earlier."
            )
            yield Finding("spikes", check.share, TOLERATED_SHARE, words)

    def widened(self, q: Proposal, n_samples: int, bounds: Bounds) -> Bounds:
        """Bounds with a Student-t beside the proposal, then from more samples, where that helps."""
        wide = joined_by_rows(q, self.x if self.reference is None else self.reference) or q
        for n in (n_samples, MORE_SAMPLES * n_samples):
            if wide is not q or n > n_samples:
                bounds, _ = self.bounds(wide, n)
            # More samples do not move a b that is above log Z.
            others = [finding for finding in bounds.findings if finding.code != "b_above"]
            if not others and bounds.log_norm_se <= 0.8 * LARGEST_ERROR:
                break
        if wide is not q:
            bounds = replace(bounds, remarks=(*bounds.remarks, _JOINED))
        return bounds


def _of_proposal(log_q: Tensor) -> Iterator[Finding]:
    n_nan = int(torch.isnan(log_q).sum())
    if n_nan:
        words = f"The proposal's log_prob is NaN at {n_nan} of {len(log_q)} rows: mend it."
        yield Finding("proposal_nan", n_nan, 0.0, words)


def joined_by_rows(q: Proposal, x: Tensor) -> Proposal | None:
    """``q`` and a Student-t fitted to rows ``x``, half and half; ``None`` where it cannot be.

    The weights of the mixture are at most twice those of ``q`` alone, and bounded wherever the rows
    are. It cannot be for models of whole numbers, for bounded supports (outside ``q``'s the model
    is not defined), and for fewer than five rows a column.
    """
    n, dim = x.shape
    if n < max(20, 5 * dim):
        return None
    x = x[:: -(-n // _ROWS_TO_FIT)]
    broad = StudentT.fit_to(x, df=3.0).to(x)
    samples = q.sample((64,))
    outside = torch.isneginf(q.log_prob(broad.sample((1024,))))
    if bool((samples == samples.round()).all(0).any()) or bool(outside.any()):
        return None
    return Defensive(q, broad, 0.5, stratified=True)


def bounds_from_weights(
    log_p: Tensor, log_w: Tensor | WeightStream, log_w_data: Tensor, log_norm: float
) -> Bounds:
    """Bounds from the numbers alone.

    Args:
        log_p: ``(n,)`` unnormalised log-density at the data.
        log_w: ``(M,)`` log-weights of proposal samples, or their running summary.
        log_w_data: ``(n,)`` log-weights at the data.
        log_norm: the learned ``b``.
    """
    log_p, weights = log_p.double(), WeightStream.of(log_w)
    n = len(log_p)
    log_z = math.nan if weights.broken else weights.log_mean
    mean_weight = log_p.new_tensor([log_z])
    lower = float(F.snl(log_p, mean_weight, log_norm))
    upper = float(F.importance_ml(log_p, mean_weight))
    ratio = float(log_p.mean()) - log_norm + 1 - lower  # exp(-b) mean(w), as the lower bound has it
    judged = verdict(weights, log_w_data.double())
    z_var = judged.log_norm_se**2
    p_var = float(log_p.var(correction=1)) / n if n > 1 else 0.0
    of_b, remarks = about_b(log_z, log_norm, judged.log_norm_se)
    if n == 1:
        remarks = (*remarks, "The interval is that of this one row, not of a mean over rows.")
    findings = (*judged.findings, *of_b)
    by_proposal = weights.broken_by_proposal and bool(torch.isfinite(log_p).all())
    if not (math.isfinite(lower) and math.isfinite(upper)) and not by_proposal:
        findings = (NOT_FINITE, *findings)
    return Bounds(
        lower=lower,
        upper=upper,
        lower_se=math.sqrt(p_var + ratio**2 * z_var),
        upper_se=math.sqrt(p_var + z_var),
        log_norm=log_z,
        log_norm_se=judged.log_norm_se,
        ess=weights.ess,
        pareto_k=judged.pareto_k,
        n_samples=weights.n,
        findings=findings,
        learned_error=log_z - log_norm,
        remarks=remarks,
    )


def about_b(log_z: float, b: float, se: float) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
    """Findings and remarks on a learned ``b`` that is not ``log Z``; none where they agree.

    Training draws many more samples than an evaluation. A ``b`` above the estimate may therefore
    hold mass that the samples at hand miss; far above the estimate it is a finding. A ``b`` below
    the estimate is not trained to its end; the bounds do not rest on it.
    """
    if abs(log_z - b) <= max(B_TOLERANCE, 5 * se) or math.isnan(log_z - b):
        return (), ()
    if b < log_z:
        words = (
            f"The learned b = {b:.2f} is below log Z = {log_z:.2f}: it is not trained to its end; "
            "log_prob is too high by the difference, and the lower bound is loose."
        )
        return (), (words,)
    words = (
        f"The learned b = {b:.2f} is above log Z = {log_z:.2f}: training has met mass that "
        "these samples miss, or b is not trained; pass training rows as reference, widen the "
        "proposal, or train on."
    )
    limit = max(B_LIMIT, 5 * se)
    if b - log_z > limit:
        return (Finding("b_above", b - log_z, limit, words),), ()
    return (), (words,)


@torch.no_grad()
def far_mass(
    model: UnnormalisedModel, proposal: Proposal, x: Tensor, log_norm: float
) -> tuple[Finding, ...]:
    """Look for mass far beyond the data, where proposal samples never fall.

    Estimates the mass of shells at 8, 16, ... 4096 standard deviations from the mean of the data,
    by the model's density in 256 random directions. Where it *grows* outwards the integral ``Z``
    does not exist, whatever the samples say: a network's energy falls linearly, and only a Gaussian
    base (or an energy with ``saturate``) holds that. The mass may grow within a narrow cone that
    none of those directions meets. So a search starts from the most promising of some thousands
    (random, along the axes, through rows). It climbs to where the density far out is highest, or
    its ratio to the proposal's (the energy alone, where the proposal is the base), and follows
    those rays.

    Returns:
        The finding, if there is one.
    """
    dim = x.shape[-1]
    center = x.mean(0)
    scale = x.std(0, correction=0) if len(x) > 1 else torch.ones_like(center)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))

    def log_density(directions: Tensor, radius: float) -> Tensor:
        points = center + radius * scale * directions
        # Outside the proposal's support the model is not defined (discrete data, a box).
        supported = torch.isfinite(proposal.log_prob(points))
        log_p = torch.full((len(points),), -math.inf, dtype=torch.float64, device=x.device)
        if bool(supported.any()):
            log_p[supported] = model.log_unnormalized(points[supported]).double()
        return log_p - log_norm

    def log_weight(directions: Tensor, radius: float) -> Tensor:
        log_q = proposal.log_prob(center + radius * scale * directions)
        return log_density(directions, radius) - torch.where(torch.isfinite(log_q), log_q, 0.0)

    with seeded(0, x.device):
        random = torch.randn(4096, dim, device=x.device, dtype=x.dtype)
    random = nn.functional.normalize(random, dim=-1)
    log_sphere = math.log(2) + dim / 2 * math.log(math.pi) - math.lgamma(dim / 2)
    log_masses = []
    for radius in (2.0**k for k in range(3, 13)):
        log_volume = dim * math.log(radius) + math.log((2**dim - 1) / dim) + scale.log().sum()
        log_masses.append(float(F.log_mean_exp(log_density(random[:256], radius)) + log_volume))
        log_masses[-1] += log_sphere
    outermost = max(log_masses[-4:])
    grows = math.isnan(outermost) or outermost > max(log_masses[0], _FAR_MASS)
    if not grows:
        rows = nn.functional.normalize((x[:256] - center) / scale, dim=-1)
        axes = torch.eye(dim, device=x.device, dtype=x.dtype)[:128]
        rows = rows[rows.norm(dim=-1) > 0.5]  # one at the very centre points nowhere
        starts = torch.cat([random, rows, axes, -axes])
        highest = torch.cat([_climbed(f, starts) for f in (log_density, log_weight)])
        # A ray has a tube of one deviation around it: its mass must fall as it goes out.
        tube = float(scale.log().sum())
        near, far = (log_density(highest, r) + math.log(r) + tube for r in (2.0**10, 2.0**14))
        grows = bool(((far >= near) & (far > _FAR_MASS)).any())
    words = (
        "The density does not vanish far from the data, so its integral does not exist: use a "
        "Gaussian base, or bound the energy, e.g. MLP(..., saturate=4)."
    )
    return (Finding("far_mass", math.exp(min(outermost, 50.0)), 1e-3, words),) if grows else ()


def _climbed(log_density: Callable[..., Tensor], directions: Tensor) -> Tensor:
    """The best of unit vectors ``(m, d)``, moved over spheres to where the density is higher.

    Near spheres first: a smooth energy shows there where it will fall, far out it is flat around
    the cone.
    """
    for radius in _CLIMBING:
        u = directions[_largest(log_density(directions, radius))]
        path = [u]
        try:
            for step in (0.5 * 0.6**k for k in range(8)):
                _, gradient = value_and_gradient(partial(log_density, radius=radius), u)
                along = nn.functional.normalize(gradient - (gradient * u).sum(-1, True) * u, dim=-1)
                u = nn.functional.normalize(u + step * along, dim=-1)
                path.append(u)
        except RuntimeError:  # an energy that has no gradient
            pass
        directions = torch.cat([directions, *path])
    return directions[_largest(log_density(directions, _CLIMBING[-1]))]


def _largest(values: Tensor, n: int = 64) -> Tensor:
    return values.nan_to_num(nan=-math.inf).topk(min(n, len(values))).indices
