"""How an :class:`~selfnorm.vae.model.EnergyVAE` is trained: one task for every prior."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from selfnorm._context import seeded
from selfnorm.errors import DataError, SelfnormWarning
from selfnorm.evaluation import stream_log_weights
from selfnorm.training import Stepper, Task
from selfnorm.vae.conditionals import GaussianPosterior
from selfnorm.vae.evaluation import Drift, confirmed, drift_of
from selfnorm.vae.priors import EnergyPrior

if TYPE_CHECKING:
    from selfnorm.vae.model import EnergyVAE

_OBJECTIVES = ("snl", "snelbo", "elbo")
_FROZEN = {"all": (), "prior": ("encoder", "decoder"), "encoder": ("decoder", "prior")}
_VALIDATION_SAMPLES = 4  # posterior samples of a held-out row
_CHUNKS = 8  # of 8,192 samples each, on either side as well
_WATCHED = 256  # rows on either side of a comparison: about the posteriors a batch brings


class _Trained(nn.Module):
    """The model and the number of steps done: KL warm-up goes on where a checkpoint left it.

    The ``frozen`` parts stay in evaluation mode: neither running statistics nor dropout of what is
    not trained may act.
    """

    steps: Tensor

    def __init__(self, vae: EnergyVAE, *frozen: str) -> None:
        super().__init__()
        self.vae, self.frozen = vae, frozen
        self.register_buffer("steps", torch.zeros((), device=vae.device))

    def train(self, mode: bool = True) -> _Trained:
        """Training mode, of what is trained."""
        super().train(mode)
        for part in self.frozen:
            getattr(self.vae, part).eval()
        return self


@contextmanager
def without_gradient(*modules: nn.Module) -> Iterator[None]:
    """What is computed inside leaves the parameters of ``modules`` without gradient.

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> with without_gradient(layer):
        ...     y = layer(torch.ones(1, 2, requires_grad=True))
        >>> y.sum().backward()
        >>> layer.weight.grad is None, layer.weight.requires_grad
        (True, True)
    """
    parameters = [p for m in modules for p in m.parameters() if p.requires_grad]
    for p in parameters:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in parameters:
            p.requires_grad_(True)


class VAETask(Task):
    r"""Maximise ``E_q[log p(x|z)] + beta (E_q[bound of log p(z)] + H(q))``.

    The bound of ``log p(z)`` is the prior's own: ``log p(z)`` where it is normalised (the sum is
    then the ELBO), SNL otherwise (the SNELBO).

    Args:
        objective: ``"snelbo"`` (or ``"snl"``, the same); ``"elbo"`` asks for a normalised prior.
        n_samples: samples for the normaliser of a joint energy.
        posterior_samples: ``z`` per row.
        kl_warmup: steps over which ``beta`` rises from 0 to 1.
        train: ``"all"``; ``"prior"``: encoder and decoder stay as they are (*post hoc*);
            ``"encoder"``: the model stays as it is, and its encoder learns from rows that the model
            makes itself (:meth:`EnergyVAE.dream`), which it cannot overfit. At the end the
            prior's normaliser is estimated again, as after any training.
        augment: function applied to the rows while training, e.g. fresh binarisation.
        monitor: what to do when a joint energy grows spikes: ``"stop"``, ``"warn"`` or ``"off"``.
            It looks at every validation, and once at the end; without held-out rows only then.
        betas: of Adam, e.g. the paper's ``(0.5, 0.999)``.
    """

    module: _Trained
    capturable = True

    def __init__(
        self,
        vae: EnergyVAE,
        *,
        objective: Any = "snelbo",
        n_samples: int = 1024,
        posterior_samples: int = 1,
        kl_warmup: int = 0,
        train: str = "all",
        augment: Callable[[Tensor], Tensor] | None = None,
        monitor: str = "warn",
        betas: tuple[float, float] | None = None,
    ) -> None:
        name = getattr(objective, "name", objective)
        if name not in _OBJECTIVES:
            raise ValueError(f"a VAE is trained by one of {_OBJECTIVES}, not by {objective!r}")
        if name == "elbo" and not vae.prior.exact:
            raise ValueError("objective='elbo' needs a normalised prior; use 'snelbo' for energies")
        if train not in _FROZEN:
            raise ValueError(f"train must be one of {tuple(_FROZEN)}, not {train!r}")
        if monitor not in ("stop", "warn", "off"):
            raise ValueError(f"monitor must be 'stop', 'warn' or 'off', not {monitor!r}")
        if posterior_samples < 1 or n_samples < 1:
            raise ValueError("posterior_samples and n_samples must be at least 1")
        self.vae, self.module = vae, _Trained(vae, *_FROZEN[train])
        self.n_samples, self.posterior_samples = n_samples, posterior_samples
        self.kl_warmup, self.train, self.betas = kl_warmup, train, betas
        self.augment, self.monitor = augment, monitor
        self._rows = torch.empty(0)
        self._checked = False
        self.spiked, self._checks = False, 0

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Encoder, decoder and likelihood (unless post hoc), then the prior's; or the encoder."""
        vae = self.vae
        own = {"all": (vae.encoder, vae.decoder, vae.likelihood), "encoder": (vae.encoder,)}
        trained = own.get(self.train, ())
        groups = [{"params": [p for part in trained for p in part.parameters()]}]
        if self.train != "encoder":
            groups += vae.prior.parameter_groups()
        betas = {} if self.betas is None else {"betas": tuple(self.betas)}
        return [{**group, **betas} for group in groups]

    @torch.no_grad()
    def start(self, data: tuple[Tensor, ...]) -> None:
        """Check the rows; post hoc, start the prior at the aggregate posterior."""
        if len(data) != 1:
            raise DataError(f"a VAE is fitted to one tensor of rows, got {len(data)}")
        self.vae.check(data[0])
        self._rows = data[0][:2000]
        if self.train == "prior":
            self.vae.prior.start(self._aggregate(data[0])[0])

    def loss(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:
        """Negative bound of the batch, per row."""
        x = batch[0] if self.augment is None else self.augment(batch[0])
        if self.train == "encoder":
            with without_gradient(self.vae.decoder, self.vae.prior, self.vae.likelihood):
                return self._loss(self.vae.dream(x))
        return self._loss(x)

    def _loss(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        fit, kl, metrics = self._terms(x, self.posterior_samples, self.n_samples)
        metrics["kl"] = kl.detach()
        if self.train == "prior":
            return kl, metrics
        loss = kl - fit
        metrics = {"lower": -loss.detach(), **metrics}
        if self.kl_warmup:
            self.module.steps.add_(1)
            loss = (self.module.steps / self.kl_warmup).clamp_max(1.0) * kl - fit
        return loss, metrics

    def _terms(
        self, x: Tensor, posterior_samples: int, n_samples: int
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """``E_q[log p(x|z)]`` (0 where the prior alone is trained), the divergence, metrics."""
        vae, all_parts = self.vae, self.train != "prior"
        with torch.set_grad_enabled(all_parts and torch.is_grad_enabled()):
            posterior = vae.encode(x)
            z = posterior.sample(posterior_samples)
        prior, metrics = vae.prior.objective(z.flatten(0, 1), posterior, n_samples)
        kl = -(prior.mean() + posterior.entropy().mean())
        fit = vae.log_likelihood(x, z).mean() if all_parts else x.new_zeros(())
        return fit, kl, metrics

    @torch.no_grad()
    def validate(self, data: tuple[Tensor, ...]) -> dict[str, float]:
        """The bound on held-out rows, under noise that is the same every time."""
        vae, (rows,) = self.vae, data
        if not self._checked:
            vae.check(rows)
            self._checked = True
        totals: dict[str, float] = {"fit": 0.0, "kl": 0.0, "gap": 0.0, "ess": 0.0}
        with seeded(0, vae.device):
            for x in rows.split(2000):
                terms = self._terms(x, _VALIDATION_SAMPLES, 8 * self.n_samples)
                figures = {"fit": terms[0], "kl": terms[1], **terms[2]}
                for name, value in figures.items():
                    totals[name] += float(value) * len(x) / len(rows)
        score = totals["fit"] - totals["kl"]
        found = {"score": score, "lower": score, "upper": score + totals["gap"], **totals}
        return {**found, **self._watch(torch.cat([rows[:2000], self._rows.to(rows)]))}

    @torch.no_grad()
    def _watch(self, x: Tensor) -> dict[str, float]:
        """Of a joint energy, how much of ``log Z`` its proposal misses; warn once.

        A random half of the rows makes the proposal, as a batch does in training; the posteriors
        of the others confront it. Rows and samples are drawn afresh for every comparison.
        """
        prior = self.vae.prior
        if not isinstance(prior, EnergyPrior) or self.monitor == "off":
            return {}
        self._checks += 1
        with seeded(self._checks, self.vae.device):
            every = self.vae.posteriors(x)
            half = min(-(-len(x) // 2), _WATCHED)

            def compare() -> Drift:
                order = torch.randperm(len(x), device=x.device)
                known, others = every[order[:half]], every[order[-half:]]
                proposals = prior.proposal_for(known), prior.beside_posteriors(others)
                return drift_of(
                    *(stream_log_weights(prior, q, _CHUNKS * 8192, 8192) for q in proposals)
                )

            report = compare() if self.spiked else confirmed(compare)
        if report.spiked and not self.spiked:
            warnings.warn(
                f"the energy prior grows spikes: log Z is too low by {report.drift:.2f} nats or "
                "more, and every bound from it too good. Use proposal='mixture', a bound on the "
                "energy, weight decay, a smaller learning rate, or an AutoregressivePrior, whose "
                "log Z is exact",
                SelfnormWarning,
                stacklevel=4,
            )
        self.spiked = report.spiked
        found = {name: float(value) for name, value in asdict(report).items()}
        if report.spiked and self.monitor == "stop":
            found["score"] = float("-inf")  # a state with spikes must never be the best one
        return found

    def guard(self, stepper: Stepper, *, looking: bool) -> str | None:
        """Reason to stop where spikes are to stop training."""
        del stepper, looking
        return "spikes" if self.spiked and self.monitor == "stop" else None

    def finish(self, data: tuple[Tensor, ...]) -> dict[str, float]:
        """Close the prior's normaliser on the aggregate posterior."""
        closed = self.vae.prior.finish(*self._aggregate(data[0]))
        seen = self._watch(data[0][:4000])
        seen.pop("score", None)
        return {**closed, **seen}

    @torch.no_grad()
    def _aggregate(self, x: Tensor) -> tuple[Tensor, GaussianPosterior]:
        """Samples of the aggregate posterior, and the posteriors of up to 4,000 rows."""
        n = 20_000 if self.vae.device.type == "cuda" else min(4000, max(500, len(x)))
        every = self.vae.posteriors(x[torch.randint(len(x), (n,), device=x.device)])
        return every.sample(1)[0], every[:4000]
