r"""A variational auto-encoder with any encoder, decoder and prior, and how it is trained.

``log p(x) >= ELBO = E_q[log p(x|z) + log p(z) - log q(z|x)] >= SNELBO``. With a joint energy prior
``p(z) = d(z) e^{-E(z)} / Z`` and a learned ``b``,

.. math:: SNELBO = E_q[\log p(x|z)] + E_q[\log d(z)/q(z|x)] + E_q[-E(z) - b]
          - E_d[e^{-E(z) - b}] + 1,

tight in ``b`` at ``b = log Z``.

A likelihood maps decoder outputs ``(..., n_parameters)`` and rows ``(..., dim)`` to
``log p(x|z)``, summed over the row. Leading dimensions broadcast.
"""

from __future__ import annotations

import itertools
import math
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict
from numbers import Integral
from typing import Any

import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn
from torch.nn.functional import softplus

from selfnorm import saving
from selfnorm._context import SeedLike, evaluating, seeded, without_gradient
from selfnorm._inputs import as_rows
from selfnorm._saved import saved
from selfnorm.distributions import gaussian_log_prob
from selfnorm.errors import DataError, SelfnormWarning
from selfnorm.evaluation import Bounds
from selfnorm.training import History, ParameterGroup, Stepper, Task, TrainingOptions, run
from selfnorm.vae.evaluation import evaluate_vae, row_figures
from selfnorm.vae.priors import AutoregressivePrior, GaussianPosterior, LatentPrior, StandardNormal

_OBJECTIVES = ("snl", "snelbo", "elbo")
_FROZEN = {"all": (), "prior": ("encoder", "decoder"), "encoder": ("decoder", "prior")}
_VALIDATION_SAMPLES = 4  # posterior samples of a held-out row


class Likelihood(nn.Module, ABC):
    """``p(x|z)`` given the decoder's output."""

    n_parameters = 1  # decoder outputs for each value of a row

    def flat(self, output: Tensor) -> Tensor:
        """A decoder's output ``(n, ...)`` as rows ``(n, n_parameters * dim)``."""
        if not isinstance(output, Tensor):
            raise DataError(
                f"the decoder must give one tensor, the parameters of the likelihood (logits or "
                f"means), not a {type(output).__name__}"
            )
        return output.flatten(1)

    @abstractmethod
    def log_prob(self, output: Tensor, x: Tensor) -> Tensor:
        """``log p(x|z)``: ``(..., n_parameters), (..., dim) -> (...)``."""

    @abstractmethod
    def mean(self, output: Tensor) -> Tensor:
        """Mean of ``x`` (probabilities for binary and categorical rows)."""

    @abstractmethod
    def sample(self, output: Tensor) -> Tensor:
        """One draw of ``x`` per row."""

    def check(self, x: Tensor) -> None:
        """Refuse rows that the likelihood gives no probability."""


@saved()
class Bernoulli(Likelihood):
    """Independent binary pixels; the decoder gives their logits. Counting measure.

    Example:
        >>> Bernoulli().log_prob(torch.zeros(1, 2), torch.tensor([[0.0, 1.0]]))
        tensor([-1.3863])
    """

    def log_prob(self, output: Tensor, x: Tensor) -> Tensor:
        """``sum_j x_j l_j - log(1 + e^{l_j})``."""
        return (x * output - softplus(output)).sum(-1)

    def mean(self, output: Tensor) -> Tensor:
        """Probabilities of ones."""
        return torch.sigmoid(output)

    def sample(self, output: Tensor) -> Tensor:
        """Binary rows."""
        return torch.bernoulli(torch.sigmoid(output))

    def check(self, x: Tensor) -> None:
        """Only values in [0, 1] (grey values count as probabilities) are binary pixels."""
        if bool(((x < 0) | (x > 1)).any()):
            raise DataError(
                f"a Bernoulli likelihood needs values in [0, 1], got [{float(x.min()):.3g}, "
                f"{float(x.max()):.3g}]; binarise the data or use likelihood='gaussian'"
            )


@saved()
class GaussianNoise(Likelihood):
    """``x ~ N(output, scale^2)``, Lebesgue measure; ``scale`` is learned unless ``learned=False``.

    Example:
        >>> GaussianNoise(2.0, learned=False).log_prob(torch.zeros(1, 1), torch.zeros(1, 1))
        tensor([-1.6121])
    """

    log_scale: Tensor

    def __init__(self, scale: float = 1.0, *, learned: bool = True) -> None:
        super().__init__()
        if not 0 < scale < math.inf:
            raise ValueError(f"scale must be a positive number, got {scale}")
        start = torch.tensor(math.log(scale))
        if learned:
            self.log_scale = nn.Parameter(start)
        else:
            self.register_buffer("log_scale", start)

    def log_prob(self, output: Tensor, x: Tensor) -> Tensor:
        """Sum of normal log-densities."""
        e = (x - output) * torch.exp(-self.log_scale)
        return gaussian_log_prob(e, e.shape[-1] * self.log_scale)

    def mean(self, output: Tensor) -> Tensor:
        """The output itself."""
        return output

    def sample(self, output: Tensor) -> Tensor:
        """Output plus noise."""
        return output + self.log_scale.exp() * torch.randn_like(output)


@saved()
class Categorical(Likelihood):
    """Each of ``dim`` entries takes one of ``n_classes`` values ``0, 1, ...``; counting measure.

    The decoder gives ``dim * n_classes`` logits, those of one entry side by side: ``(n, dim *
    n_classes)`` or ``(n, ..., n_classes)``; or, as ``cross_entropy`` has them, with the classes
    before an image's height and width, ``(n, n_classes, ...)``.

    Example:
        >>> Categorical(4).log_prob(torch.zeros(1, 8), torch.tensor([[3.0, 0.0]]))
        tensor([-2.7726])
    """

    def __init__(self, n_classes: int) -> None:
        super().__init__()
        if n_classes < 2:
            raise ValueError(f"n_classes must be at least 2, got {n_classes}")
        self.n_classes = self.n_parameters = n_classes

    def flat(self, output: Tensor) -> Tensor:
        """Logits with those of one entry side by side, wherever the decoder has the classes."""
        if isinstance(output, Tensor) and output.dim() > 2:
            first, last = (output.shape[i] == self.n_classes for i in (1, -1))
            if first == last:
                raise DataError(
                    f"the decoder gives shape {tuple(output.shape)}, which does not tell where the "
                    f"logits of the {self.n_classes} classes are: give (n, dim * "
                    f"{self.n_classes}), those of one entry side by side"
                )
            output = output.movedim(1, -1) if first else output
        return super().flat(output)

    def _distribution(self, output: Tensor) -> torch.distributions.Categorical:
        logits = output.unflatten(-1, (-1, self.n_classes))
        return torch.distributions.Categorical(logits=logits, validate_args=False)

    def log_prob(self, output: Tensor, x: Tensor) -> Tensor:
        """Sum of the log-probabilities of the values."""
        return self._distribution(output).log_prob(x).sum(-1)

    def mean(self, output: Tensor) -> Tensor:
        """Probabilities ``(..., dim, n_classes)``."""
        return self._distribution(output).probs

    def sample(self, output: Tensor) -> Tensor:
        """Values as floating-point numbers."""
        return self._distribution(output).sample().to(output.dtype)

    def check(self, x: Tensor) -> None:
        """Only whole numbers below ``n_classes``."""
        if bool(((x < 0) | (x >= self.n_classes) | (x != x.round())).any()):
            raise DataError(
                f"a categorical likelihood with {self.n_classes} classes needs whole numbers "
                f"0..{self.n_classes - 1}, got values in [{float(x.min()):.3g}, "
                f"{float(x.max()):.3g}]"
            )


def as_likelihood(likelihood: str | Likelihood) -> Likelihood:
    """``"bernoulli"``, ``"gaussian"``, ``"categorical:K"`` or a :class:`Likelihood`."""
    if isinstance(likelihood, Likelihood):
        return likelihood
    name, _, classes = likelihood.partition(":")
    if name == "bernoulli":
        return Bernoulli()
    if name == "gaussian":
        return GaussianNoise()
    if name == "categorical" and classes.isdigit():
        return Categorical(int(classes))
    raise ValueError(
        f"likelihood must be 'bernoulli', 'gaussian', 'categorical:K' or a Likelihood, not "
        f"{likelihood!r}"
    )


@saved("encoder", "decoder", "likelihood", "prior")
class EnergyVAE(saving.Saved, nn.Module):
    """``p(x) = int p(z) p(x|z) dz`` with a Gaussian posterior ``q(z|x)``.

    Args:
        encoder: rows to ``(n, 2 d)``, mean and log-variance side by side, or a pair of ``(n, d)``.
        decoder: latent vectors ``(n, d)`` to the likelihood's parameters, one row each, flat or
            with the shape of an image.
        prior: a :class:`~selfnorm.vae.priors.LatentPrior`, or the number ``d`` of latent
            numbers for a standard normal one.
        likelihood: ``"bernoulli"``, ``"gaussian"``, ``"categorical:K"`` or an object.

    Densities of ``x`` are with respect to the likelihood's measure (counting measure for binary
    and categorical rows, Lebesgue otherwise). Train it with :func:`selfnorm.fit`.

    Example:
        >>> from selfnorm.vae import DenseDecoder, DenseEncoder
        >>> _ = torch.manual_seed(0)
        >>> vae = EnergyVAE(DenseEncoder(6, 2), DenseDecoder(2, 6), prior=2)
        >>> x = torch.randint(2, (8, 6)).float()
        >>> vae.log_prob(x, n_samples=20, seed=0).shape, vae.sample(3, seed=0).shape
        (torch.Size([8]), torch.Size([3, 6]))
    """

    def __init__(
        self,
        encoder: nn.Module,
        decoder: nn.Module,
        prior: LatentPrior | int,
        likelihood: str | Likelihood = "bernoulli",
    ) -> None:
        super().__init__()
        if not isinstance(prior, Integral | nn.Module) or (
            isinstance(prior, Integral) and prior < 1
        ):
            raise DataError(
                "prior must be a module of selfnorm.vae.priors or the number of latent numbers, "
                f"not {prior!r}"
            )
        self.encoder, self.decoder = encoder, decoder
        self.prior = StandardNormal(int(prior)) if isinstance(prior, Integral) else prior
        self.likelihood = as_likelihood(likelihood)
        self.latent = self.prior.dim

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return next(itertools.chain(self.parameters(), self.buffers())).device

    @property
    def dtype(self) -> torch.dtype:
        """Floating-point type of the parameters: that of the rows."""
        tensors = itertools.chain(self.parameters(), self.buffers())
        return next((t.dtype for t in tensors if t.is_floating_point()), torch.get_default_dtype())

    def training_task(self, **options: Any) -> VAETask:
        """The task that :func:`selfnorm.fit` runs; options of :class:`VAETask`."""
        return VAETask(self, **options)

    # -- the parts -----------------------------------------------------------------------------

    def encode(self, x: Tensor) -> GaussianPosterior:
        """``q(z|x)`` of rows."""
        return GaussianPosterior.from_output(self.encoder(x))

    def decode(self, z: Tensor) -> Tensor:
        """The likelihood's parameters at ``z`` ``(n, d)``, flat: ``(n, parameters)``."""
        return self.likelihood.flat(self.decoder(z))

    def log_likelihood(self, x: Tensor, z: Tensor) -> Tensor:
        """``log p(x|z)``: rows ``(n, ...)`` and ``z`` ``(k, n, d)`` give ``(k, n)``."""
        output = self.decode(z.flatten(0, -2))
        return self.likelihood.log_prob(output.unflatten(0, z.shape[:-1]), x.flatten(1))

    def rows(self, x: ArrayLike | Tensor, name: str = "x") -> Tensor:
        """What ``x`` holds as rows on the model's device, or an error that says what is wrong."""
        rows = as_rows(x, name, self.dtype).to(self.device)
        if rows.dim() < 2 or rows.numel() == 0:
            raise DataError(f"expected {name} of shape (n, ...), got {tuple(rows.shape)}")
        if not bool(torch.isfinite(rows).all()):
            raise DataError(f"{name} holds NaN or infinity: drop or impute those rows first")
        self.likelihood.check(rows)
        return rows

    def check(self, x: Tensor) -> None:
        """Refuse rows, or an encoder and a decoder, that do not fit together."""
        if x.dtype != self.dtype:
            raise DataError(
                f"expected rows of {self.dtype}, got {x.dtype}: give x.to({self.dtype})"
            )
        self.rows(x)
        with torch.no_grad(), evaluating(self):
            try:
                mean = self.encode(x[:2]).mean
            except RuntimeError as error:
                raise DataError(
                    f"the encoder fails on rows of shape {tuple(x.shape[1:])}: {error}"
                ) from error
            if mean.shape != (len(x[:2]), self.latent):
                raise DataError(
                    f"the prior has {self.latent} latent numbers, so the encoder must give a mean "
                    f"and a log-variance of shape (n, {self.latent}); its mean is "
                    f"{tuple(mean.shape)}"
                )
            given, needed = self.decode(mean).shape[1], x[:1].numel() * self.likelihood.n_parameters
            if given != needed:
                raise DataError(
                    f"the decoder gives {given} numbers a row; rows of {x[:1].numel()} values "
                    f"need {needed} under this likelihood"
                )

    def posteriors(self, x: Tensor) -> GaussianPosterior:
        """``q(z|x)`` of any number of rows, some at a time."""
        parts = [self.encode(rows.to(self.device)) for rows in x.split(2000)]
        return GaussianPosterior(
            torch.cat([p.mean for p in parts]), torch.cat([p.log_sd for p in parts])
        )

    # -- what it is for ------------------------------------------------------------------------

    @torch.no_grad()
    def elbo(self, x: ArrayLike | Tensor, n_samples: int = 1, seed: SeedLike = None) -> Tensor:
        """``(n,)`` ELBO of each row by the prior's learned normaliser."""
        x = self.rows(x)
        with evaluating(self), seeded(seed, self.device):
            figures = row_figures(self, x, n_samples)
        return (figures.fit - figures.kl).to(x.dtype)

    @torch.no_grad()
    def log_prob(
        self, x: ArrayLike | Tensor, n_samples: int = 100, seed: SeedLike = None
    ) -> Tensor:
        """``(n,)`` importance-weighted estimates of ``log p(x)`` by the learned normaliser.

        Below ``log p(x)`` in expectation where the prior is normalised. With an energy prior they
        are too high by ``log Z - b`` where ``b`` is too low: ask
        :func:`~selfnorm.vae.evaluation.evaluate_vae` for a figure with a verdict.
        """
        x = self.rows(x)
        with evaluating(self), seeded(seed, self.device):
            return row_figures(self, x, n_samples).log_px.to(x.dtype)

    @torch.no_grad()
    def sample(
        self, n: int, *, mean: bool = False, seed: SeedLike = None, **options: Any
    ) -> Tensor:
        """``n`` rows: ``z`` from the prior, then ``x`` (or its mean) from the decoder.

        ``options`` go to the prior's sampler, e.g. ``method="mala"`` for a joint energy.
        """
        with evaluating(self), seeded(seed, self.device):
            output = self.decode(self.prior.sample((n,), **options))
            return self.likelihood.mean(output) if mean else self.likelihood.sample(output)

    @torch.no_grad()
    def dream(self, x: Tensor) -> Tensor:
        """One row ``x' ~ p(x'|z)``, ``z ~ q(z|x)``, for each of ``x``; same shape.

        An encoder learns the posteriors of the rows it is trained on; on other rows its ELBO is
        lower than the model allows. The decoder makes rows like the data without end, and never the
        same twice: an encoder that is trained on them cannot overfit.
        """
        rows = self.likelihood.sample(self.decode(self.encode(x).sample(1)[0]))
        return rows.to(x.dtype).reshape(x.shape)

    @torch.no_grad()
    def reconstruct(self, x: ArrayLike | Tensor) -> Tensor:
        """Means of ``x`` given the posterior mean of ``z``."""
        with evaluating(self):
            return self.likelihood.mean(self.decode(self.encode(self.rows(x)).mean))

    def bounds(
        self,
        x: Tensor,
        *,
        n_samples: int = 20_000,
        posterior_samples: int = 100,
        reference: ArrayLike | Tensor | None = None,
        seed: SeedLike = None,
    ) -> Bounds:
        """A lower bound of ``log p(x)`` (importance-weighted SNELBO) with the verdict.

        A VAE has no upper bound: ``upper`` is infinite. ``n_samples`` are for ``log Z``; the others
        and all figures as in :func:`selfnorm.vae.evaluation.evaluate_vae`.
        """
        report = evaluate_vae(
            self,
            x,
            posterior_samples=posterior_samples,
            reference=reference,
            n_prior_samples=n_samples,
            seed=seed,
        )
        return report.to_bounds()

    # -- files ---------------------------------------------------------------------------------

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        encoder: nn.Module | None = None,
        decoder: nn.Module | None = None,
        energy: nn.Module | None = None,
        likelihood: Likelihood | None = None,
    ) -> EnergyVAE:
        """Read a model folder; copies of the modules you give are filled with its weights."""
        given = {"encoder": encoder, "decoder": decoder, "energy": energy, "likelihood": likelihood}
        own = {part: module for part, module in given.items() if module is not None}
        loaded: EnergyVAE = saving.load(path, kind="EnergyVAE", **own)
        return loaded


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
        objective: object = "snelbo",
        n_samples: int = 1024,
        posterior_samples: int = 1,
        kl_warmup: int = 0,
        train: str = "all",
        augment: Callable[[Tensor], Tensor] | None = None,
        monitor: str = "warn",
        betas: tuple[float, float] | None = None,
    ) -> None:
        if objective not in _OBJECTIVES:
            raise ValueError(f"a VAE is trained by one of {_OBJECTIVES}, not by {objective!r}")
        if objective == "elbo" and not vae.prior.exact:
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

    def parameter_groups(self) -> list[ParameterGroup]:
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
        bounds = {"score": score, "lower": score, "upper": score + totals["gap"]}
        watched = self._watch(torch.cat([rows[:2000], self._rows.to(rows)]))
        return {**bounds, **totals, **watched}

    @torch.no_grad()
    def _watch(self, x: Tensor) -> dict[str, float]:
        """How much of ``log Z`` the prior's proposal misses; warn once."""
        if self.monitor == "off":
            return {}
        self._checks += 1
        with seeded(self._checks, self.vae.device):
            report = self.vae.prior.watch(self.vae.posteriors, x, self.spiked)
        if report is None:
            return {}
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
        figures = {name: float(value) for name, value in asdict(report).items()}
        if report.spiked and self.monitor == "stop":
            figures["score"] = float("-inf")  # a state with spikes must never be the best one
        return figures

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


def add_energy_prior(
    encoder: nn.Module,
    decoder: nn.Module,
    x: Tensor,
    *,
    latent: int,
    likelihood: str | Likelihood = "bernoulli",
    prior: LatentPrior | None = None,
    val_data: Tensor | None = None,
    max_steps: int | None = None,
    lr: float | None = None,
    seed: int | None = None,
    progress: bool | None = None,
    task_options: dict[str, Any] | None = None,
    options: TrainingOptions | None = None,
) -> tuple[EnergyVAE, History]:
    """Give a trained VAE an energy prior: encoder and decoder stay, the prior is learned.

    The prior fits the aggregate posterior of ``x``, which the standard normal prior of a trained
    VAE never quite does; the ELBO rises by the divergence that is removed.

    Args:
        encoder, decoder: trained modules, see :class:`EnergyVAE`.
        x: training rows.
        latent: number of latent numbers, that of ``prior`` where one is given.
        prior: an :class:`~selfnorm.vae.priors.AutoregressivePrior` by default, whose normaliser is
            exact.
        max_steps, lr, seed, progress: where given they replace those of ``options``.
        task_options, options: how to train, see :func:`selfnorm.fit`; 2,000 steps by default.

    Returns:
        The VAE with its new prior, and the history of its training.

    Example:
        >>> encoder, decoder = nn.Linear(8, 2 * 2), nn.Linear(2, 8)
        >>> x = torch.rand(64, 8).round()
        >>> prior = AutoregressivePrior(2, hidden=8, polish_steps=2)
        >>> vae, history = add_energy_prior(
        ...     encoder, decoder, x, latent=2, prior=prior, max_steps=2, seed=0
        ... )
        >>> vae.sample(3, seed=0).shape
        torch.Size([3, 8])
    """
    if prior is None:
        with seeded(seed):
            prior = AutoregressivePrior(latent)
    vae = EnergyVAE(encoder, decoder, prior, likelihood)
    if vae.latent != latent:
        raise DataError(f"latent={latent}, but the prior has {vae.latent} latent numbers")
    parameters = itertools.chain(encoder.parameters(), decoder.parameters())
    vae.to(next((p.device for p in parameters), None))
    usual = TrainingOptions(
        max_epochs=10**6, max_steps=2000, lr=2e-3, weight_decay=1e-2, ema=0.99, progress=False
    )
    options = (options or usual).given(max_steps=max_steps, lr=lr, seed=seed, progress=progress)
    held_out = None if val_data is None else (val_data,)
    with without_gradient(vae.encoder, vae.decoder):
        task = vae.training_task(**{"train": "prior", **(task_options or {})})
        return vae, run(task, (x,), val_data=held_out, options=options)
