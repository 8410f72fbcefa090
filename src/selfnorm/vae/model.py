r"""A variational auto-encoder with any encoder, decoder and prior, energy-based ones included.

``log p(x) >= ELBO = E_q[log p(x|z) + log p(z) - log q(z|x)] >= SNELBO``. With a joint energy prior
``p(z) = d(z) e^{-E(z)} / Z`` and a learned ``b``,

.. math:: SNELBO = E_q[\log p(x|z)] + E_q[\log d(z)/q(z|x)] + E_q[-E(z) - b]
          - E_d[e^{-E(z) - b}] + 1,

tight in ``b`` at ``b = log Z``.
"""

from __future__ import annotations

import itertools
import os
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from selfnorm import saving
from selfnorm._context import SeedLike, evaluating, seeded
from selfnorm._inputs import as_rows
from selfnorm.density import fit
from selfnorm.errors import DataError
from selfnorm.evaluation import Bounds
from selfnorm.training import History, TrainingOptions
from selfnorm.vae.conditionals import GaussianPosterior, Likelihood, as_likelihood
from selfnorm.vae.evaluation import evaluate_vae, row_figures
from selfnorm.vae.priors import AutoregressivePrior, LatentPrior, StandardNormal
from selfnorm.vae.task import VAETask, without_gradient


class EnergyVAE(nn.Module):
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
        >>> from selfnorm.vae.networks import DenseDecoder, DenseEncoder
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
        """The task that :func:`selfnorm.fit` runs; options of :class:`~selfnorm.vae.task`."""
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

    def rows(self, x: Any, name: str = "x") -> Tensor:
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
    def elbo(self, x: Any, n_samples: int = 1, seed: SeedLike = None) -> Tensor:
        """``(n,)`` ELBO of each row by the prior's learned normaliser."""
        x = self.rows(x)
        with evaluating(self), seeded(seed, self.device):
            fit, kl, *_ = row_figures(self, x, n_samples)
        return (fit - kl).to(x.dtype)

    @torch.no_grad()
    def log_prob(self, x: Any, n_samples: int = 100, seed: SeedLike = None) -> Tensor:
        """``(n,)`` importance-weighted estimates of ``log p(x)`` by the learned normaliser.

        Below ``log p(x)`` in expectation where the prior is normalised. With an energy prior they
        are too high by ``log Z - b`` where ``b`` is too low: ask
        :func:`~selfnorm.vae.evaluation.evaluate_vae` for a figure with a verdict.
        """
        x = self.rows(x)
        with evaluating(self), seeded(seed, self.device):
            return row_figures(self, x, n_samples)[2].to(x.dtype)

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

        As many rows as an encoder could wish for: an encoder learns the posterior of the rows it
        has seen, and on others its ELBO is lower than the model allows. The decoder's own rows are
        like the data, never the same twice, and their posterior is what the encoder is to find.
        """
        rows = self.likelihood.sample(self.decode(self.encode(x).sample(1)[0]))
        return rows.to(x.dtype).reshape(x.shape)

    @torch.no_grad()
    def reconstruct(self, x: Any) -> Tensor:
        """Means of ``x`` given the posterior mean of ``z``."""
        with evaluating(self):
            return self.likelihood.mean(self.decode(self.encode(self.rows(x)).mean))

    def bounds(
        self,
        x: Tensor,
        *,
        n_samples: int = 20_000,
        posterior_samples: int = 100,
        reference: Any = None,
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

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a model folder; modules of your own must be given to ``load``."""
        saving.save(self, path)

    @staticmethod
    def load(
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
    known = [p for m in (encoder, decoder) for p in m.parameters()]
    vae.to(known[0].device if known else None)
    options = options or TrainingOptions(
        max_epochs=10**6, max_steps=2000, lr=2e-3, weight_decay=1e-2, ema=0.99, progress=False
    )
    with without_gradient(vae.encoder, vae.decoder):
        history = fit(
            vae, x, objective="snelbo", max_steps=max_steps, lr=lr, val_data=val_data, seed=seed,
            progress=progress, options=options,
            task_options={"train": "prior", **(task_options or {})},
        )  # fmt: skip
    return vae, history
