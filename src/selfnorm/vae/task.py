"""How an :class:`~selfnorm.vae.model.EnergyVAE` is trained: one task for every prior."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from selfnorm._context import seeded
from selfnorm.distributions import Proposal
from selfnorm.errors import DataError, SelfnormWarning
from selfnorm.training import Task, TrainingOptions
from selfnorm.vae.dreams import dreamt, held
from selfnorm.vae.energy_prior import EnergyPrior
from selfnorm.vae.monitor import SpikeReport, check_spikes, confirmed
from selfnorm.vae.posterior import BaseAndAggregate, GaussianPosterior

if TYPE_CHECKING:
    from selfnorm.vae.model import EnergyVAE

__all__ = ["VAETask"]

_OBJECTIVES = ("snl", "snelbo", "elbo")
_FROZEN = {"all": (), "prior": ("encoder", "decoder"), "encoder": ("decoder", "prior")}
_GIVE_UP_AFTER = 50  # non-finite steps in a row
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
            makes itself (see :mod:`selfnorm.vae.dreams`), which it cannot overfit. At the end the
            prior's normaliser is estimated again, as after any training.
        prior_lr_scale: learning rate of the prior relative to the rest.
        augment: function applied to the rows while training, e.g. fresh binarisation.
        corrupt: function applied to the encoder's input alone (a regulariser).
        monitor: what to do when a joint energy grows spikes: ``"stop"``, ``"warn"`` or ``"off"``.
            It looks at every validation, and once at the end; without held-out rows only then.
        betas: of Adam, e.g. the paper's ``(0.5, 0.999)``.
        validation_samples: ``z`` per held-out row.
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
        prior_lr_scale: float = 1.0,
        augment: Callable[[Tensor], Tensor] | None = None,
        corrupt: Callable[[Tensor], Tensor] | None = None,
        monitor: str = "warn",
        betas: tuple[float, float] | None = None,
        validation_samples: int = 4,
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
        self.kl_warmup, self.train, self.prior_lr_scale = kl_warmup, train, prior_lr_scale
        self.augment, self.corrupt, self.monitor = augment, corrupt, monitor
        self.betas = betas
        self._rows = torch.empty(0)
        self._checked = False
        self.validation_samples = validation_samples
        self.spikes: SpikeReport | None = None
        self._checks = 0

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Encoder, decoder and likelihood (unless post hoc), then the prior's; or the encoder."""
        if self.train == "encoder":
            return [{"params": list(self.vae.encoder.parameters())}]
        groups: list[dict[str, Any]] = []
        if self.train == "all":
            parts = (self.vae.encoder, self.vae.decoder, self.vae.likelihood)
            groups.append({"params": [p for m in parts for p in m.parameters()]})
        for group in self.vae.prior.parameter_groups():
            scale = group.get("lr_scale", 1.0) * self.prior_lr_scale
            if groups and scale == 1.0 and "weight_decay" not in group:
                groups[0]["params"] += group["params"]  # every group costs launches of its own
            else:
                groups.append({**group, "lr_scale": scale})
        return groups

    def make_optimizer(self, options: TrainingOptions) -> torch.optim.Optimizer:
        """The loop's optimiser, with this task's ``betas``."""
        optimizer = super().make_optimizer(options)
        if self.betas is not None:
            for group in optimizer.param_groups:
                group["betas"] = tuple(self.betas)
        return optimizer

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
            with held(self.vae.decoder, self.vae.prior, self.vae.likelihood):
                return self._bound(dreamt(self.vae, x))
        return self._bound(x)

    def _bound(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        vae = self.vae
        seen = x if self.corrupt is None else self.corrupt(x)
        if self.train == "prior":
            with torch.no_grad():
                posterior = vae.encode(seen)
                z = posterior.sample(self.posterior_samples)
        else:
            posterior = vae.encode(seen)
            z = posterior.sample(self.posterior_samples)
        prior, metrics = vae.prior.objective(z.flatten(0, 1), posterior, self.n_samples)
        kl = -(prior.mean() + posterior.entropy().mean())
        if self.train != "prior":
            fit = vae.log_likelihood(x, z).mean()
        penalty = metrics.pop("penalty", 0.0)
        if self.train == "prior":
            return kl + penalty, {"kl": kl.detach(), **metrics}
        with torch.no_grad():
            self.module.steps.add_(1)
        beta = (self.module.steps / max(self.kl_warmup, 1)).clamp_max(1.0)
        loss = -fit + (beta if self.kl_warmup else 1.0) * kl + penalty
        return loss, {"lower": (fit - kl).detach(), "kl": kl.detach(), **metrics}

    @torch.no_grad()
    def validate(self, data: tuple[Tensor, ...]) -> dict[str, float]:
        """The bound on held-out rows, under noise that is the same every time."""
        vae, k = self.vae, self.validation_samples
        if not self._checked:
            vae.check(data[0])
            self._checked = True
        totals: dict[str, float] = {"fit": 0.0, "kl": 0.0, "gap": 0.0, "ess": 0.0}
        n = len(data[0])
        with seeded(0, vae.device):
            for x in data[0].split(2000):
                posterior = vae.encode(x)
                z = posterior.sample(k)
                prior, metrics = vae.prior.objective(z.flatten(0, 1), posterior, 8 * self.n_samples)
                fit = vae.log_likelihood(x, z).mean() if self.train != "prior" else x.new_zeros(())
                kl = -(prior.mean() + posterior.entropy().mean())
                metrics.pop("penalty", None)
                figures = {"fit": fit, "kl": kl, **metrics}
                for name, value in figures.items():
                    totals[name] += float(value) * len(x) / n
        score = totals["fit"] - totals["kl"]
        found = {"score": score, "lower": score, "upper": score + totals["gap"], **totals}
        if isinstance(vae.prior, EnergyPrior) and self.monitor != "off":
            rows = torch.cat([data[0][:2000], self._rows.to(data[0])])
            found.update(self._watch(vae.prior, rows))
        return found

    def _watch(self, prior: EnergyPrior, x: Tensor) -> dict[str, float]:
        """Weights at posterior samples against weights at proposal samples; warn once.

        A random half of the rows makes the proposal, as a batch does in training; the posteriors
        of the others confront it. Rows and samples are drawn afresh for every comparison.
        """
        self._checks += 1
        with seeded(self._checks, self.vae.device):
            parts = [self.vae.encode(rows) for rows in x.split(2000)]
            mean, log_sd = (torch.cat([getattr(p, n) for p in parts]) for n in ("mean", "log_sd"))
            half = min(-(-len(x) // 2), _WATCHED)

            def compare() -> SpikeReport:
                order = torch.randperm(len(x), device=x.device)
                known, others = (
                    GaussianPosterior(mean[rows], log_sd[rows])
                    for rows in (order[:half], order[-half:])
                )
                proposal = prior.proposal_for(known)
                z = others.sample(1)[0]
                at_posterior = prior.log_unnormalized(z) - proposal.log_prob(z)
                wide = BaseAndAggregate(prior.base, others.aggregate(), 0.5)
                at_proposal, at_wide = (self._weights(prior, q) for q in (proposal, wide))
                return check_spikes(at_posterior, at_proposal, at_wide)

            known_already = self.spikes is not None and self.spikes.spiked
            report = compare() if known_already else confirmed(compare, self._checks)
        if report.spiked and (self.spikes is None or not self.spikes.spiked):
            warnings.warn(
                f"the energy prior grows spikes: {report}. Its log Z and every bound from it are "
                "too good. Use proposal='mixture', a bound on the energy, weight decay, a smaller "
                "learning rate, or an AutoregressivePrior, whose log Z is exact",
                SelfnormWarning,
                stacklevel=4,
            )
        self.spikes = report
        found = {
            "room": report.room,
            "drift": report.drift,
            "drift_se": report.drift_se,
            "spiked": float(report.spiked),
        }
        if report.spiked and self.monitor == "stop":
            found["score"] = float("-inf")  # a state with spikes must never be the best one
        return found

    @staticmethod
    def _weights(prior: EnergyPrior, proposal: Proposal) -> Tensor:
        parts = []
        for _ in range(_CHUNKS):
            y = proposal.sample((8192,))
            parts.append(prior.log_unnormalized(y) - proposal.log_prob(y))
        return torch.cat(parts)

    def guard(self, stepper: Any, *, looking: bool) -> str:
        """Reason to stop, or an empty string: spikes, or steps that stay non-finite."""
        if not looking:
            stepper.bad_streak = int(stepper.counters.streak)
        if stepper.bad_streak >= _GIVE_UP_AFTER:
            return "diverged"
        stopping = self.monitor == "stop" and self.spikes is not None and self.spikes.spiked
        return "spikes" if stopping else ""

    def finish(self, data: tuple[Tensor, ...]) -> dict[str, float]:
        """Close the prior's normaliser on the aggregate posterior."""
        closed = self.vae.prior.finish(*self._aggregate(data[0]))
        if isinstance(self.vae.prior, EnergyPrior) and self.monitor != "off":
            with torch.no_grad():
                seen = self._watch(self.vae.prior, data[0][:4000])
            closed.update({k: v for k, v in seen.items() if k != "score"})
        return closed

    def _aggregate(self, x: Tensor) -> tuple[Tensor, GaussianPosterior]:
        on_cuda = self.vae.device.type == "cuda"
        return self.vae.aggregate_samples(x, 20_000 if on_cuda else min(4000, max(500, len(x))))
