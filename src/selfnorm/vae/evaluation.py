"""How good is a VAE, and can the figure be trusted: SNELBO, ELBO, ``log p(x)``, one verdict.

``log Z`` of a joint energy prior comes from three estimators that must agree. While it trains, it
is watched: does it grow spikes, at places that its proposal never visits? Samples that include the
posteriors of other rows then give a larger ``log Z`` than the proposal's own (:func:`drift_of`).

A run is looked at many times, and an estimate from few effective samples passes two standard errors
by noise up to once in five times (Cantelli's inequality). :func:`confirmed` therefore asks for
twelve comparisons on independent samples of which all but two agree: by noise alone one look in
200,000 flags a run. A spike is there every time.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from selfnorm._context import SeedLike, evaluating, seeded
from selfnorm._inputs import as_rows
from selfnorm.errors import DataError
from selfnorm.evaluation import (
    B_LIMIT,
    PARETO_K_LIMIT,
    Bounds,
    Finding,
    Judged,
    WeightStream,
    stream_log_weights,
    verdict,
)
from selfnorm.functional import bound_gap, log_mean_exp
from selfnorm.sampling import smc
from selfnorm.vae.conditionals import GaussianPosterior
from selfnorm.vae.priors import AutoregressivePrior, EnergyPrior

if TYPE_CHECKING:
    from selfnorm.vae.model import EnergyVAE

_PIXELS_AT_ONCE = {"cpu": 2**22, "cuda": 2**26}
_REFERENCE_ROWS = 4000  # whose posteriors join the proposal for log Z
_EXACT_ROWS = 10_000  # latent vectors whose factors are normalised by quadrature
AGREEMENT = 0.05  # nats between the estimators
LOG_PX_LIMIT = 0.1  # nats by which twice the posterior samples may raise log p(x)
DRIFT_LIMIT = 0.2  # nats
NODES_LIMIT = 0.01  # nats between two rules of quadrature
FEWEST_EFFECTIVE = 100  # samples of the base, of the mixture
COMPARISONS, MISSES = 12, 2  # asked for before a flag, and how many of them may disagree


@dataclass(frozen=True)
class LogNorm:
    """One estimate of ``log Z``: value, standard error and, of its weights, ESS and Pareto k."""

    value: float
    se: float
    ess: float | None = None
    pareto_k: float | None = None


@dataclass(frozen=True)
class VAEReport(Judged):
    """Figures in nats per row; ``findings`` are empty where they can be trusted.

    Attributes:
        snelbo: by the learned normaliser; ``elbo`` by the estimated (or exact) one.
        log_px: importance-weighted ``log p(x)`` from ``posterior_samples`` samples per row: a
            *lower* bound in expectation, like the two above, whatever their number.
        log_px_rise, log_px_rise_se: by how much it is lower from half as many, and the standard
            error of that. Where it still rises, it has not arrived.
        log_px_many: the same from ``many_samples``, on ``many_rows`` evenly spaced rows;
            ``log_px_few`` is that of ``posterior_samples`` on the same rows.
        se: standard error of ``elbo`` over rows and of the normaliser.
        log_norm: estimates of ``log Z`` by name; ``exact`` where the prior is normalised. For a
            chain it is the mean of ``sum_i log Z_i`` minus that of ``sum_i b_i``.
        learned_log_norm: ``b`` of a joint energy.
        reconstruction, kl: the two parts of the ELBO.
        active_units: latent numbers whose posterior mean varies over the rows (variance > 0.01).
    """

    snelbo: float
    elbo: float
    log_px: float
    log_px_rise: float
    log_px_rise_se: float
    log_px_many: float | None
    log_px_few: float | None
    se: float
    reconstruction: float
    kl: float
    log_norm: dict[str, LogNorm]
    learned_log_norm: float
    active_units: int
    n_rows: int
    posterior_samples: int
    many_samples: int
    many_rows: int
    findings: tuple[Finding, ...] = ()

    @property
    def pareto_k(self) -> float:
        """Pareto k of the cleaner of the two importance estimators (0 where ``log Z`` is exact)."""
        known = [e.pareto_k for e in self.log_norm.values() if e.pareto_k is not None]
        return min(known, default=0.0)

    @property
    def ess(self) -> float:
        """Smallest ESS of the estimators (1 where ``log Z`` is exact)."""
        return min((e.ess for e in self.log_norm.values() if e.ess is not None), default=1.0)

    @property
    def learned_error(self) -> float:
        """``log Z`` minus the learned ``b``: by how much the learned normaliser promises too much.

        ``exact`` of a chain is relative to its ``b_i`` already.
        """
        mixture = self.log_norm.get("mixture")
        return mixture.value - self.learned_log_norm if mixture else self.log_norm["exact"].value

    def to_dict(self) -> dict[str, Any]:
        """All fields and the verdict as a plain dict."""
        own = {"reliable": self.reliable, "pareto_k": self.pareto_k, "ess": self.ess}
        return {**asdict(self), **own}

    def to_bounds(self) -> Bounds:
        """The importance-weighted SNELBO as ``lower``; there is no upper bound of ``log p(x)``.

        ``lower`` is ``log_px`` by the learned normaliser: a lower bound in expectation by both, the
        samples of the posterior and ``b``. Where twice as many posterior samples would still move
        it, that is a reason: it is a bound, and no estimate of ``log p(x)``.
        """
        best = self.log_norm.get("mixture") or self.log_norm["exact"]
        rise = self.log_px_rise
        findings, limit = self.findings, max(LOG_PX_LIMIT, 3 * self.log_px_rise_se)
        if not rise <= limit:
            words = (
                f"log p(x) rose by {rise:.2f} nats from {self.posterior_samples // 2} to "
                f"{self.posterior_samples} posterior samples and will rise on: it is a lower bound "
                "far from the truth; raise posterior_samples, or train the encoder on."
            )
            findings = (*findings, Finding("posterior_samples", rise, limit, words))
        return Bounds(
            lower=self.log_px - (self.elbo - self.snelbo),
            upper=math.inf,
            lower_se=self.se,
            upper_se=math.inf,
            log_norm=best.value,
            log_norm_se=best.se,
            ess=self.ess,
            pareto_k=self.pareto_k,
            n_samples=self.posterior_samples,
            findings=findings,
            learned_error=self.learned_error,
        )

    def __str__(self) -> str:
        estimates = ", ".join(f"{k} {v.value:.3f} ± {v.se:.3f}" for k, v in self.log_norm.items())
        return (
            f"SNELBO {self.snelbo:.3f}, ELBO {self.elbo:.3f} ± {self.se:.3f}, log p(x) at least "
            f"{self.log_px:.3f} (+{self.log_px_rise:.3f} by the last doubling of posterior "
            f"samples); log Z: {estimates}: {self._verdict()}"
        )


@torch.no_grad()
def evaluate_vae(
    vae: EnergyVAE,
    x: Any,
    *,
    posterior_samples: int = 100,
    many_samples: int = 0,
    many_rows: int = 1000,
    reference: Any = None,
    n_prior_samples: int = 200_000,
    n_nodes: int = 512,
    seed: SeedLike = None,
) -> VAEReport:
    """All figures of ``vae`` on held-out rows ``x``.

    Args:
        x: rows, a tensor or an array of numbers.
        posterior_samples: per row, for SNELBO, ELBO and ``log p(x)``.
        many_samples: also ``log p(x)`` from so many samples, on ``many_rows`` of the rows, evenly
            spaced (files are often sorted: the first digits of MNIST's test part are the hardest).
        reference: rows (of the training data) whose aggregate posterior joins the proposal for
            ``log Z`` of a joint energy; the first half of ``x`` by default. Give training rows:
            an energy knows them best.
        n_prior_samples: samples of each importance estimate of ``log Z``.
        n_nodes: quadrature nodes per factor of a chain.
        seed: for all samples.
    """
    if not all(hasattr(vae, part) for part in ("encode", "decoder", "prior", "check")):
        raise TypeError(
            f"evaluate_vae needs an EnergyVAE, got {type(vae).__name__}; wrap encoder and decoder "
            "as EnergyVAE(encoder, decoder, prior)"
        )
    x = vae.rows(x)
    vae.check(x)
    if reference is not None:
        reference = as_rows(reference, "reference", x.dtype)
        if len(reference) == 0 or reference[:1].numel() != x[:1].numel():
            raise DataError(
                f"reference has shape {tuple(reference.shape)}, expected rows of "
                f"{x[:1].numel()} values as in x"
            )
        reference = vae.rows(reference[:_REFERENCE_ROWS], "reference")
    if posterior_samples < 2:
        raise DataError(f"posterior_samples must be at least 2, got {posterior_samples}")
    chosen = slice(0, None, max(1, len(x) // max(many_rows, 1)))
    with evaluating(vae), seeded(seed, vae.device):
        norms, shift, gap, findings = _normaliser(vae, x, reference, n_prior_samples, n_nodes)
        fit, kl, iw, half, means = row_figures(vae, x, posterior_samples)
        many = row_figures(vae, x[chosen], many_samples)[2] + shift if many_samples else None
    elbo = fit - kl + shift
    norm_se = (norms.get("mixture") or norms["exact"]).se
    se = math.sqrt(float(elbo.var()) / len(elbo) + norm_se**2) if len(elbo) > 1 else math.nan
    active = int((means.var(0) > 0.01).sum()) if len(means) > 1 else 0
    learned = float(getattr(vae.prior, "log_norm", torch.zeros(())))
    return VAEReport(
        snelbo=float(elbo.mean()) - gap,
        elbo=float(elbo.mean()),
        log_px=float(iw.mean()) + shift,
        log_px_rise=float((iw - half).mean()),
        log_px_rise_se=float((iw - half).std()) / math.sqrt(len(iw)) if len(iw) > 1 else 0.0,
        log_px_many=None if many is None else float(many.mean()),
        log_px_few=float(iw[chosen].mean()) + shift if many_samples else None,
        se=se,
        reconstruction=float(fit.mean()),
        kl=float(kl.mean()) - shift,
        log_norm=norms,
        learned_log_norm=learned,
        active_units=active,
        n_rows=len(x),
        posterior_samples=posterior_samples,
        many_samples=many_samples,
        many_rows=len(x[chosen]) if many_samples else 0,
        findings=findings,
    )


def row_figures(vae: EnergyVAE, x: Tensor, k: int) -> tuple[Tensor, ...]:
    """Per row, by the learned normaliser, from ``k`` posterior samples of each.

    ``E log p(x|z)``, KL, ``log p(x)`` and the mean of it from each half of the samples, in double
    precision; and the posterior's mean.
    """
    if k < 1:
        raise DataError(f"n_samples must be at least 1, got {k}")
    pixels = _PIXELS_AT_ONCE.get(vae.device.type, 2**22)
    width = x[:1].numel()
    at_once = max(1, pixels // width)
    size = max(1, at_once // k)
    out: list[list[Tensor]] = [[], [], [], [], []]
    for rows in x.split(size):
        posterior = vae.encode(rows)
        fits, ratios = [], []
        for begin in range(0, k, at_once):
            z = posterior.sample(min(at_once, k - begin))
            fits.append(vae.log_likelihood(rows, z))
            ratios.append(fits[-1] + vae.prior.log_prob(z) - posterior.log_prob(z))
        # ELBO and log p(x) from the same ratios: the one is below the other row by row.
        fit, ratio = (torch.cat(v).double() for v in (fits, ratios))
        halves = [log_mean_exp(part) for part in ratio.chunk(2)]
        half = torch.stack(halves).mean(0)
        found = (fit.mean(0), (fit - ratio).mean(0), log_mean_exp(ratio), half, posterior.mean)
        for part, value in zip(out, found, strict=True):
            part.append(value)
    return tuple(torch.cat(part) for part in out)


def _normaliser(
    vae: EnergyVAE, x: Tensor, reference: Tensor | None, n_samples: int, n_nodes: int
) -> tuple[dict[str, LogNorm], float, float, tuple[Finding, ...]]:
    """Estimates of ``log Z``; what they add to ``log p(z)``; the gap of ``b``; findings."""
    prior = vae.prior
    if isinstance(prior, EnergyPrior):
        half = max(1, len(x) // 2)
        known = x[:half] if reference is None else reference
        unseen = x[half:] if reference is None else x
        norms = _estimates(prior, vae.posteriors(known[:_REFERENCE_ROWS]), n_samples)
        held_out = vae.posteriors((unseen if len(unseen) else x)[:_REFERENCE_ROWS])
        log_z, b = norms["mixture"].value, float(prior.log_norm)
        gap = float(bound_gap(torch.tensor(log_z - b, dtype=torch.float64)))
        return norms, b - log_z, gap, tuple(_findings(prior, norms, held_out, n_samples))
    if isinstance(prior, AutoregressivePrior):
        z = vae.posteriors(x[:_EXACT_ROWS]).sample(1)[0]
        exact, learned, lower = (v.double() for v in prior.log_prob_exact(z, n_nodes))
        shift = exact - learned
        se = float(shift.std()) / math.sqrt(len(z)) if len(z) > 1 else math.nan
        # A second rule with half the nodes must agree: quadrature that has not converged is none.
        coarse, _, _ = prior.log_prob_exact(z[:1000], n_nodes // 2)
        error = abs(float((coarse.double() - exact[:1000]).mean()))
        findings: tuple[Finding, ...] = ()
        if not error < NODES_LIMIT:
            words = (
                f"Quadrature with {n_nodes} and {n_nodes // 2} nodes differs by {error:.3f} nats: "
                "raise n_nodes."
            )
            findings = (Finding("nodes", error, NODES_LIMIT, words),)
        norms = {"exact": LogNorm(float(-shift.mean()), se)}
        return norms, float(shift.mean()), float((exact - lower).mean()), findings
    return {"exact": LogNorm(0.0, 0.0)}, 0.0, 0.0, ()


def _estimates(
    prior: EnergyPrior, posterior: GaussianPosterior, n_samples: int
) -> dict[str, LogNorm]:
    """``base``, ``mixture`` and ``smc`` estimates of ``log Z``.

    ``base`` draws from the base density, ``mixture`` half from it and half from the aggregate
    of the given posteriors, ``smc`` carries 4096 particles (or a fiftieth of ``n_samples`` where
    that is more) from base to prior in tempered steps, four times: its standard error is that of
    the runs.
    """
    found: dict[str, LogNorm] = {}
    for name, q in (("base", prior.base), ("mixture", prior.beside_posteriors(posterior))):
        stream = stream_log_weights(prior, q, n_samples)
        judged = verdict(stream)
        found[name] = LogNorm(stream.log_mean, judged.log_norm_se, stream.ess, judged.pareto_k)
    runs = [_tempered(prior, max(4096, n_samples // 50)) for _ in range(4)]
    found["smc"] = LogNorm(statistics.fmean(runs), statistics.stdev(runs) / 2)
    return found


def _tempered(prior: EnergyPrior, n: int) -> float:
    state = smc.init(prior.log_unnormalized, prior.base, n)
    while state.temperature < 1.0:
        state, _ = smc.step(state, prior.log_unnormalized, prior.base)
    return float(state.log_norm)


def _findings(
    prior: EnergyPrior, norms: dict[str, LogNorm], held_out: GaussianPosterior, n_samples: int
) -> Iterator[Finding]:
    """Findings against the estimates, none where they can be trusted.

    ``held_out`` are posteriors of the evaluated rows that are not part of the mixture proposal.
    """
    low, high = (choose(norms, key=lambda name: norms[name].value) for choose in (min, max))
    apart = norms[high].value - norms[low].value
    if not apart <= AGREEMENT:
        words = (
            f"Three estimators of log Z disagree: {norms[low].value:.2f} ({low}) against "
            f"{norms[high].value:.2f} ({high}); the energy has mass that some of them miss. Train "
            "with proposal='mixture', a bounded energy or more weight decay."
        )
        yield Finding("disagreement", apart, AGREEMENT, words)
    # The weights of a mixture pile up below a plateau, with a shoulder where one part alone
    # reaches; a Pareto distribution fitted across it reads a high k for bounded weights. One of
    # the two must be clean; that they agree is checked above.
    k, name = min((norms[name].pareto_k or 0.0, name) for name in ("base", "mixture"))
    if k > PARETO_K_LIMIT:
        words = (
            f"Pareto k = {k:.2f} of the {name} weights is above {PARETO_K_LIMIT}: a few samples "
            "carry log Z; bound the energy or give it less freedom."
        )
        yield Finding("pareto_k", k, PARETO_K_LIMIT, words)
    for name in ("base", "mixture"):
        effective = (norms[name].ess or 0.0) * n_samples
        if effective < FEWEST_EFFECTIVE:
            words = (
                f"Only {effective:.0f} effective of {n_samples} {name} samples; the prior has left "
                "its base."
            )
            yield Finding("ess", effective, FEWEST_EFFECTIVE, words)
    mixture = norms["mixture"]
    stream = stream_log_weights(prior, prior.beside_posteriors(held_out), n_samples)
    drift = stream.log_mean - mixture.value
    limit = AGREEMENT + 2 * math.hypot(mixture.se, stream.log_mean_se)
    if not drift <= limit:
        words = (
            f"Samples from the posteriors of held-out rows give log Z = {stream.log_mean:.2f}, "
            f"the mixture {mixture.value:.2f}: the energy has spikes there, which no estimator "
            "sees; every figure is too good."
        )
        yield Finding("spikes", drift, limit, words)
    b, limit = float(prior.log_norm), max(B_LIMIT, 5 * mixture.se)
    if not b - mixture.value <= limit:
        words = (
            f"The learned b = {b:.2f} is above log Z = {mixture.value:.2f}: training has met mass "
            "that the estimators miss; pass training rows as reference."
        )
        yield Finding("b_above", b - mixture.value, limit, words)


@dataclass(frozen=True)
class Drift:
    """What the proposal misses.

    Attributes:
        drift: nats by which ``log Z`` is too low, by samples that include other rows' posteriors;
            ``drift_se`` its standard error.
        spiked: ``drift`` above 0.2 nats by two of its standard errors.
    """

    drift: float
    drift_se: float
    spiked: bool


def drift_of(known: Tensor | WeightStream, wide: Tensor | WeightStream) -> Drift:
    """Compare the log-weights of proposal samples with those of samples beside other posteriors."""
    known, wide = WeightStream.of(known), WeightStream.of(wide)
    if math.isinf(known.largest):
        return Drift(math.inf, math.inf, True)
    drift, noise = wide.log_mean - known.log_mean, math.hypot(known.log_mean_se, wide.log_mean_se)
    return Drift(drift, noise, not drift <= DRIFT_LIMIT + 2 * noise)


def confirmed(compare: Callable[[], Drift]) -> Drift:
    """The mildest of the comparisons that find spikes; where too few do, one that does not.

    ``compare`` must draw afresh at every call. It is called once where the first finds nothing.
    """
    mildest, misses = compare(), 0
    if not mildest.spiked:
        return mildest
    for _ in range(COMPARISONS - 1):
        again = compare()
        if not again.spiked:
            misses += 1
            if misses > MISSES:
                return again
        elif again.drift < mildest.drift:
            mildest = again
    return mildest
