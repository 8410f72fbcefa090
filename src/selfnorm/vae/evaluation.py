"""How good is a VAE, and can the figure be trusted: SNELBO, ELBO, ``log p(x)``, one verdict."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from selfnorm._context import SeedLike, evaluating, seeded
from selfnorm._inputs import as_rows
from selfnorm.errors import DataError
from selfnorm.evaluation import Bounds, Finding, Judged
from selfnorm.functional import log_mean_exp
from selfnorm.vae.normaliser import REFERENCE_ROWS, LogNorm, best_of

if TYPE_CHECKING:
    from selfnorm.vae.model import EnergyVAE

_PIXELS_AT_ONCE = {"cpu": 2**22, "cuda": 2**26}
LOG_PX_LIMIT = 0.1  # nats by which twice the posterior samples may raise log p(x)


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
        indices = [e.pareto_k for e in self.log_norm.values() if e.pareto_k is not None]
        return min(indices, default=0.0)

    @property
    def ess(self) -> float:
        """Smallest ESS of the estimators (1 where ``log Z`` is exact)."""
        return min((e.ess for e in self.log_norm.values() if e.ess is not None), default=1.0)

    @property
    def learned_error(self) -> float:
        """``log Z`` minus the learned ``b``: densities by the learned ``b`` are too high by it.

        ``exact`` of a chain is relative to its ``b_i`` already.
        """
        mixture = self.log_norm.get("mixture")
        return mixture.value - self.learned_log_norm if mixture else self.log_norm["exact"].value

    def to_dict(self) -> dict[str, object]:
        """All fields and the verdict as a plain dict."""
        own = {"reliable": self.reliable, "pareto_k": self.pareto_k, "ess": self.ess}
        return {**asdict(self), **own}

    def to_bounds(self) -> Bounds:
        """The importance-weighted SNELBO as ``lower``; there is no upper bound of ``log p(x)``.

        ``lower`` is ``log_px`` by the learned normaliser: a lower bound in expectation by both, the
        samples of the posterior and ``b``. Where twice as many posterior samples would still move
        it, that is a reason: it is a bound, and no estimate of ``log p(x)``.
        """
        best = best_of(self.log_norm)
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
    x: ArrayLike | Tensor,
    *,
    posterior_samples: int = 100,
    many_samples: int = 0,
    many_rows: int = 1000,
    reference: ArrayLike | Tensor | None = None,
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
            an energy fits them best.
        n_prior_samples: samples of each importance estimate of ``log Z``.
        n_nodes: quadrature nodes per factor of a chain.
        seed: for all samples.
    """
    if getattr(vae, "posteriors", None) is None:
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
        reference = vae.rows(reference[:REFERENCE_ROWS], "reference")
    if posterior_samples < 2:
        raise DataError(f"posterior_samples must be at least 2, got {posterior_samples}")
    chosen = slice(0, None, max(1, len(x) // max(many_rows, 1)))
    with evaluating(vae), seeded(seed, vae.device):
        norm = vae.prior.normaliser(vae.posteriors, x, reference, n_prior_samples, n_nodes)
        rows = row_figures(vae, x, posterior_samples)
        many = row_figures(vae, x[chosen], many_samples).log_px if many_samples else None
    n, shift = len(x), norm.shift
    elbo, rise = rows.fit - rows.kl + shift, rows.log_px - rows.log_px_half
    return VAEReport(
        snelbo=float(elbo.mean()) - norm.gap,
        elbo=float(elbo.mean()),
        log_px=float(rows.log_px.mean()) + shift,
        log_px_rise=float(rise.mean()),
        log_px_rise_se=float(rise.std()) / math.sqrt(n) if n > 1 else 0.0,
        log_px_many=None if many is None else float((many + shift).mean()),
        log_px_few=None if many is None else float(rows.log_px[chosen].mean()) + shift,
        se=math.sqrt(float(elbo.var()) / n + norm.best.se**2) if n > 1 else math.nan,
        reconstruction=float(rows.fit.mean()),
        kl=float(rows.kl.mean()) - shift,
        log_norm=norm.estimates,
        learned_log_norm=norm.learned,
        active_units=int((rows.mean.var(0) > 0.01).sum()) if n > 1 else 0,
        n_rows=n,
        posterior_samples=posterior_samples,
        many_samples=many_samples,
        many_rows=0 if many is None else len(many),
        findings=norm.findings,
    )


class RowFigures(NamedTuple):
    """Of rows, by the learned normaliser, in double precision; and the posterior's ``mean``.

    ``fit`` is ``E log p(x|z)``, ``kl`` the divergence, ``log_px`` the importance-weighted
    ``log p(x)`` and ``log_px_half`` the mean of it from each half of the samples.
    """

    fit: Tensor
    kl: Tensor
    log_px: Tensor
    log_px_half: Tensor
    mean: Tensor


def row_figures(vae: EnergyVAE, x: Tensor, k: int) -> RowFigures:
    """Figures of rows from ``k`` posterior samples of each."""
    if k < 1:
        raise DataError(f"n_samples must be at least 1, got {k}")
    at_once = max(1, _PIXELS_AT_ONCE.get(vae.device.type, 2**22) // x[:1].numel())
    parts = []
    for rows in x.split(max(1, at_once // k)):
        posterior = vae.encode(rows)
        fits, ratios = [], []
        for begin in range(0, k, at_once):
            z = posterior.sample(min(at_once, k - begin))
            fits.append(vae.log_likelihood(rows, z))
            ratios.append(fits[-1] + vae.prior.log_prob(z) - posterior.log_prob(z))
        # ELBO and log p(x) from the same ratios: the one is below the other row by row.
        fit, ratio = (torch.cat(v).double() for v in (fits, ratios))
        half = torch.stack([log_mean_exp(part) for part in ratio.chunk(2)]).mean(0)
        kl = (fit - ratio).mean(0)
        parts.append((fit.mean(0), kl, log_mean_exp(ratio), half, posterior.mean))
    return RowFigures(*map(torch.cat, zip(*parts, strict=True)))
