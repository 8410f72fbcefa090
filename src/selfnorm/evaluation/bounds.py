"""How good is the model, and can the number be trusted: two bounds, their errors, a verdict."""

from __future__ import annotations

import inspect
import math
from dataclasses import asdict, dataclass, replace
from statistics import NormalDist
from typing import Any, TypeVar

import torch
from torch import Tensor

from selfnorm import functional as F
from selfnorm._context import SeedLike, evaluating, seeded
from selfnorm._inputs import check_rows
from selfnorm.distributions import Proposal, UnnormalisedModel, proposal_for
from selfnorm.errors import DataError, ProposalError
from selfnorm.evaluation.diagnostics import CHUNK_SIZE, WeightStream, stream_log_weights, verdict
from selfnorm.evaluation.memory import chunk_size_for

AnyBounds = TypeVar("AnyBounds", bound="Bounds")


@dataclass(frozen=True)
class Bounds:
    """Lower and upper bound of the mean log-likelihood (nats per row), and their reliability.

    Attributes:
        lower: ``l_SNL``, a lower bound in expectation.
        upper: ``l_IS``, an upper bound in expectation.
        lower_se, upper_se: Monte-Carlo standard errors (test rows and proposal samples).
        log_norm: importance-sampling estimate of ``log Z``; ``log_norm_se`` its standard error.
        ess: effective sample size, as a fraction of ``n_samples``.
        pareto_k: tail index of the weights; above 0.7 the estimate cannot be trusted.
        n_samples: number of proposal samples.
        reasons: why the numbers are not reliable and what to do; empty if they are.

    ``lower <= log-likelihood <= upper`` holds for expectations. For one estimate the gap is
    ``t - 1 - log t`` with ``t = exp(-b) mean(w)``.
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
    reasons: tuple[str, ...] = ()

    @property
    def gap(self) -> float:
        """``upper - lower``; small where ``b`` is the log-normaliser."""
        return self.upper - self.lower

    @property
    def reliable(self) -> bool:
        """Whether no check found anything against the numbers."""
        return not self.reasons

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """Confidence interval around both bounds: the lower's lower end, the upper's upper end.

        Each end is that of a normal interval at ``level``; it covers test rows and proposal
        samples, and means something only where :attr:`reliable` is true.
        """
        if not 0.0 < level < 1.0:
            raise ValueError(f"level must lie between 0 and 1, got {level}")
        z = NormalDist().inv_cdf(0.5 + level / 2)
        return self.lower - z * self.lower_se, self.upper + z * self.upper_se

    def shifted(self: AnyBounds, by: float) -> AnyBounds:
        """Both bounds moved, e.g. by the log-Jacobian of a change of units."""
        return replace(self, lower=self.lower + by, upper=self.upper + by)

    def to_dict(self) -> dict[str, Any]:
        """All fields, the gap and the verdict as a plain dict."""
        return {**asdict(self), "gap": self.gap, "reliable": self.reliable}

    def __str__(self) -> str:
        verdict = "reliable" if self.reliable else "NOT RELIABLE: " + " ".join(self.reasons)
        return (
            f"log-likelihood in [{self.lower:.4f} ± {self.lower_se:.4f}, "
            f"{self.upper:.4f} ± {self.upper_se:.4f}] nats, gap {self.gap:.4f}, "
            f"log Z {self.log_norm:.4f} ± {self.log_norm_se:.4f}, ESS {self.ess:.3f}, "
            f"Pareto k {self.pareto_k:.2f}: {verdict}"
        )


@torch.no_grad()
def evaluate(
    model: Any,
    x: Tensor,
    *,
    proposal: Any = None,
    n_samples: int = 20_000,
    chunk_size: int | None = None,
    seed: SeedLike = None,
    max_memory: float | None = None,
    **options: Any,
) -> Bounds:
    """Bounds of the mean log-likelihood of ``x`` under ``model``.

    Args:
        model: an :class:`~selfnorm.EBM`, or any model with a ``bounds`` method of its own.
        x: ``(n, d)`` held-out rows: a tensor, an array or a data frame of numbers.
        proposal: proposal distribution; the model's base density by default.
        n_samples: number of proposal samples for ``Z``.
        chunk_size: rows per forward pass; another size draws other samples from the same seed.
        seed: for the proposal samples.
        max_memory: bytes (or, below 1, the share of the free memory) that one forward pass may
            take; sets ``chunk_size``. Weights are summed up chunk by chunk and not kept.
        options: passed on to a model's own ``bounds``, as are ``proposal``, ``chunk_size`` and
            ``max_memory``; one that it does not take is an error.

    Example:
        >>> import selfnorm as sn
        >>> base = sn.Gaussian(torch.zeros(1), scale=1.0)
        >>> model = sn.EBM(sn.ExponentialFamily(lambda x: x, 1), base=base)   # Z = 1, b = 0
        >>> bounds = sn.evaluate(model, torch.zeros(3, 1), n_samples=1000)
        >>> round(bounds.lower, 4), round(bounds.gap, 6), bounds.reliable
        (-0.9189, 0.0, True)
    """
    if hasattr(model, "bounds"):
        stated = {"proposal": proposal, "chunk_size": chunk_size, "max_memory": max_memory}
        options |= {name: value for name, value in stated.items() if value is not None}
        taken = inspect.signature(model.bounds).parameters.values()
        any_will_do = any(p.name == "proposal" or p.kind is p.VAR_KEYWORD for p in taken)
        if proposal is not None and not any_will_do:
            raise ProposalError(
                f"{type(model).__name__} brings its own proposal and evaluates with that one: "
                "leave proposal out"
            )
        # Estimators of tables name their seed as scikit-learn does, and regressors take (X, y).
        named = "random_state" if any(p.name == "random_state" for p in taken) else "seed"
        pair = x if isinstance(x, tuple) and any(p.name == "y" for p in taken) else (x,)
        bounds: Bounds = model.bounds(*pair, n_samples=n_samples, **{named: seed}, **options)
        return bounds
    if options:
        raise TypeError(f"evaluate() got unexpected options {sorted(options)}")
    if not hasattr(model, "log_unnormalized"):
        raise TypeError(
            f"evaluate needs an EBM or a model with bounds() of its own, got {type(model).__name__}"
            "; the log_prob of a proposal or flow is exact already: take its mean"
        )
    if proposal is None:
        proposal = model.base
    if proposal is None:
        raise ProposalError("evaluate needs a proposal (or a model with a base density)")
    if n_samples < 2:
        raise DataError(f"n_samples must be at least 2, got {n_samples}")
    x = check_rows(x, "x", minimum=1, dtype=getattr(model, "dtype", None)).to(model.device)
    q = proposal_for(model, proposal, x.shape[-1])
    chunk = chunk_size or CHUNK_SIZE
    if max_memory is not None and chunk_size is None:
        chunk = chunk_size_for(model, q, max_memory)
    with evaluating(model):
        with seeded(seed, model.device):
            log_w = stream_log_weights(model, q, n_samples, chunk)
        log_p = torch.cat([model.log_unnormalized(part) for part in x.split(chunk)])
        log_w_data = log_p - torch.cat([q.log_prob(part) for part in x.split(chunk)])
        bounds = summarise(log_p, log_w, log_w_data, float(model.log_norm))
        far = far_mass(model, q, x, bounds.log_norm)
    if far is None:
        return bounds
    return replace(bounds, reasons=(*bounds.reasons, far))


def summarise(
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
    z_var = weights.log_mean_se**2
    p_var = float(log_p.var(correction=1)) / n if n > 1 else 0.0
    judged = verdict(weights, log_w_data.double())
    reasons = judged.reasons
    if not (math.isfinite(lower) and math.isfinite(upper)):
        broken = "A bound is not finite: the model's energy or b is broken; retrain."
        reasons = (broken, *reasons)
    return Bounds(
        lower=lower,
        upper=upper,
        lower_se=math.sqrt(p_var + ratio**2 * z_var),
        upper_se=math.sqrt(p_var + z_var),
        log_norm=log_z,
        log_norm_se=weights.log_mean_se,
        ess=weights.ess,
        pareto_k=judged.pareto_k,
        n_samples=weights.n,
        reasons=reasons,
    )


@torch.no_grad()
def far_mass(
    model: UnnormalisedModel, proposal: Proposal, x: Tensor, log_norm: float
) -> str | None:
    """Look for mass far beyond the data, where proposal samples never fall.

    Estimates the mass of shells at 8, 16, ... 4096 standard deviations from the mean of the data,
    by the model's density in 256 random directions. Where it *grows* outwards the integral ``Z``
    does not exist, whatever the samples say: a network's energy falls linearly, and only a Gaussian
    base (or an energy with ``saturate``) holds that.

    Returns:
        A sentence on what is wrong and what to do, or ``None``.
    """
    dim = x.shape[-1]
    center = x.mean(0)
    scale = x.std(0, correction=0) if len(x) > 1 else torch.ones_like(center)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    with seeded(0, x.device):
        direction = torch.randn(256, dim, device=x.device, dtype=x.dtype)
    direction = direction / direction.norm(dim=-1, keepdim=True)
    log_sphere = math.log(2) + dim / 2 * math.log(math.pi) - math.lgamma(dim / 2)
    log_masses = []
    for radius in (2.0**k for k in range(3, 13)):
        points = center + radius * scale * direction
        # Outside the proposal's support the model is not defined (discrete data, a box).
        supported = torch.isfinite(proposal.log_prob(points))
        log_p = torch.full((len(points),), -math.inf, dtype=torch.float64, device=x.device)
        if bool(supported.any()):
            log_p[supported] = model.log_unnormalized(points[supported]).double()
        log_volume = dim * math.log(radius) + math.log((2**dim - 1) / dim)
        log_shell = F.log_mean_exp(log_p) + log_sphere + log_volume + scale.log().sum()
        log_masses.append(float(log_shell) - log_norm)
    outermost = max(log_masses[-4:])
    if math.isnan(outermost) or outermost > max(log_masses[0], math.log(1e-3)):
        return (
            "The density does not vanish far from the data, so its integral does not exist: use a "
            "Gaussian base, or bound the energy, e.g. MLP(..., saturate=4)."
        )
    return None
