r"""A joint energy prior ``p(z) = d(z) exp(-E(z) - b)``, with the means to keep it honest.

The normaliser is estimated from samples, and an energy exploits whatever they do not see: in 16
dimensions it grows spikes where posteriors sit and base samples never fall. Against that:

* ``proposal="mixture"``: half of the samples come from the aggregate posterior of the batch;
* ``moves=k``: samples moved from the base by ``k`` Metropolis-adjusted Langevin steps along a
  tempered path (annealed importance sampling, whose weights stay unbiased);
* ``bound``: ``|E| <= bound``, by a smooth squashing;
* spectral normalisation of the network (:func:`latent_energy`), ``gradient_penalty``, and weight
  decay and a small learning rate for the energy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from selfnorm.distributions import Proposal
from selfnorm.errors import EnergyError
from selfnorm.functional import bound_gap, capped_exp, log_mean_exp
from selfnorm.networks import MLP
from selfnorm.sampling import draw, mala
from selfnorm.vae.posterior import BaseAndAggregate, GaussianPosterior
from selfnorm.vae.priors import LatentPrior, StandardNormal

__all__ = ["EnergyPrior", "latent_energy"]


def latent_energy(
    dim: int,
    hidden: Sequence[int] = (200, 200),
    *,
    activation: str = "leaky_relu",
    spectral: bool = False,
    zero_init: bool = True,
) -> MLP:
    """The paper's energy over latent vectors; ``spectral`` bounds its slope layer by layer.

    Two hidden layers of 200 as printed; the authors' code has three. It starts at zero: the prior
    starts at its base density.

    Example:
        >>> latent_energy(16)(torch.zeros(3, 16))
        tensor([0., 0., 0.], grad_fn=<SqueezeBackward1>)
    """
    energy = MLP(dim, hidden, activation=activation, zero_init=zero_init and not spectral)
    if spectral:
        for layer in energy.layers:
            if isinstance(layer, nn.Linear):
                spectral_norm(layer)
    return energy


class EnergyPrior(LatentPrior):
    r"""``log p(z) = log d(z) - E(z) - b`` with a scalar ``b``.

    Args:
        energy: ``(n, dim) -> (n,)`` or ``(n, 1)``; or ``None`` for :func:`latent_energy`.
        base: a normalised prior ``d``; standard normal by default.
        dim: latent numbers, needed where neither base nor energy is given.
        proposal: ``"mixture"`` of base and aggregate posterior, or ``"base"`` (the paper's).
        share: of base samples in the mixture.
        moves: Langevin steps of the base samples (0: none).
        bound: limit of ``|E|``; ``None`` for none.
        gradient_penalty: weight of ``E |grad E|^2`` at posterior and proposal samples.
        lr_scale: learning rate of the energy relative to the VAE's (the paper's: 0.2).
        weight_decay: of the energy; ``None`` leaves it to the optimiser.

    Example:
        >>> prior = EnergyPrior(dim=4)
        >>> prior.log_prob(torch.zeros(2, 4)).shape
        torch.Size([2])
    """

    exact = False

    def __init__(
        self,
        energy: nn.Module | None = None,
        base: LatentPrior | None = None,
        *,
        dim: int | None = None,
        proposal: str = "mixture",
        share: float = 0.5,
        moves: int = 0,
        step_size: float = 0.3,
        bound: float | None = None,
        gradient_penalty: float = 0.0,
        lr_scale: float = 1.0,
        log_norm_lr_scale: float = 1.0,
        weight_decay: float | None = None,
    ) -> None:
        super().__init__()
        if proposal not in ("mixture", "base"):
            raise ValueError(f"proposal must be 'mixture' or 'base', not {proposal!r}")
        if not 0 < share < 1:
            raise ValueError(f"share must lie between 0 and 1, got {share}")
        if moves and proposal == "mixture":
            raise ValueError("moves start at base samples: use proposal='base' with moves > 0")
        width = dim if dim is not None else getattr(energy, "dim", None)
        if base is None and width is None:
            raise ValueError("give dim, a base, or an energy with an attribute dim")
        self.base = base if base is not None else StandardNormal(int(width or 0))
        self.dim = self.base.dim
        for what, given in (("dim", dim), ("the energy's dim", getattr(energy, "dim", None))):
            if isinstance(given, int) and given != self.dim:
                raise ValueError(
                    f"{what} is {given}, but the base is over {self.dim} latent numbers; they must "
                    "be the same"
                )
        self.energy = energy if energy is not None else latent_energy(self.dim)
        self.log_norm = nn.Parameter(torch.zeros(()))
        self.proposal, self.share, self.moves, self.step_size = proposal, share, moves, step_size
        self.bound, self.gradient_penalty = bound, gradient_penalty
        self.lr_scale, self.log_norm_lr_scale = lr_scale, log_norm_lr_scale
        self.weight_decay = weight_decay
        self.config = {
            "dim": self.dim, "proposal": proposal, "share": share, "moves": moves,
            "step_size": step_size, "bound": bound, "gradient_penalty": gradient_penalty,
            "lr_scale": lr_scale, "log_norm_lr_scale": log_norm_lr_scale,
            "weight_decay": weight_decay,
        }  # fmt: skip

    def negative_energy(self, z: Tensor) -> Tensor:
        """``-E(z)``, the log-weight against the base: ``(..., dim) -> (...)``."""
        energy = self.energy(z.reshape(-1, self.dim))
        if energy.numel() != z.numel() // self.dim:
            raise EnergyError(
                "the energy must give one number for each latent vector, (n,) or (n, 1); of "
                f"{z.numel() // self.dim} vectors it makes {tuple(energy.shape)}"
            )
        energy = energy.reshape(z.shape[:-1])
        if self.bound is not None:
            energy = self.bound * torch.tanh(energy / self.bound)
        return -energy

    def log_unnormalized(self, z: Tensor) -> Tensor:
        """``log d(z) - E(z)``."""
        return self.base.log_prob(z) + self.negative_energy(z)

    def log_prob(self, x: Tensor) -> Tensor:
        """``log p(z)`` by the learned ``b``."""
        return self.log_unnormalized(x) - self.log_norm

    def proposal_for(self, posterior: GaussianPosterior) -> Proposal:
        """Where the samples for ``Z`` come from, given the posteriors of some rows."""
        if self.proposal == "base":
            return self.base
        return BaseAndAggregate(self.base, posterior.aggregate(), self.share)

    def _log_weights(self, posterior: GaussianPosterior, n_samples: int) -> tuple[Tensor, Tensor]:
        """Proposal samples and log-weights, differentiable in the energy's parameters."""
        if self.moves:
            return self._annealed(n_samples)
        y, log_ratio = self._proposed(posterior, n_samples)
        return y, self.negative_energy(y) + log_ratio

    def _proposed(
        self, posterior: GaussianPosterior, n_samples: int
    ) -> tuple[Tensor, Tensor | float]:
        """Proposal samples ``y`` and ``log d(y) - log q(y)``."""
        q = self.proposal_for(posterior)
        if q is self.base:
            y = self.base.sample((n_samples,))
            return y, self._base_score(y)
        with torch.no_grad():
            y = q.sample((n_samples,))
            log_q = q.log_prob(y)
        return y, self.base.log_prob(y) - log_q

    def _annealed(self, n_samples: int) -> tuple[Tensor, Tensor]:
        """Base samples carried to the prior along ``d exp(-t E)``, with their AIS weights.

        The gradient of ``log mean(w)`` is that of ``-E`` at the end points, weighted: Fisher's
        identity under the weighted sample. The path itself is held fixed.
        """
        z = self.base.sample((n_samples,))
        log_w = torch.zeros(n_samples, device=z.device, dtype=z.dtype)
        with torch.no_grad():
            for k in range(self.moves):
                f = self.negative_energy(z)
                log_w = log_w + f / (self.moves + 1)
                t = (k + 1) / (self.moves + 1)

                def tempered(v: Tensor, t: float = t) -> Tensor:
                    return self.base.log_prob(v) + t * self.negative_energy(v)

                state, _ = mala.step(mala.init(tempered, z), tempered, step_size=self.step_size)
                z = state.positions
            log_w = log_w + self.negative_energy(z) / (self.moves + 1)
        f = self.negative_energy(z)
        return z, log_w + f - f.detach() + self._base_score(z)

    def _base_score(self, y: Tensor) -> Tensor | float:
        """Zero, with the gradient of ``log d(y)``: samples of a learned base move with it."""
        if not self.base.trainable:
            return 0.0
        log_d = self.base.log_prob(y)
        return log_d - log_d.detach()

    def objective(
        self, z: Tensor, posterior: GaussianPosterior, n_samples: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """``log d(z) - E(z) - b - mean(w) e^{-b} + 1``; a penalty is a metric apart from it."""
        if self.moves:
            y, log_w = self._annealed(n_samples)
            at_z = self.negative_energy(z)
        else:  # one pass of the energy for all places
            y, at_base = self._proposed(posterior.detach(), n_samples)
            at_z, at_y = self.negative_energy(torch.cat([z, y])).split([len(z), len(y)])
            log_w = at_y + at_base
        log_ratio = log_mean_exp(log_w) - self.log_norm
        value = self.base.log_prob(z) + at_z - self.log_norm - capped_exp(log_ratio) + 1
        with torch.no_grad():
            share = torch.softmax(log_w, 0)
            ess = 1 / (len(share) * share.square().sum())
            metrics = {"gap": bound_gap(log_ratio), "ess": ess}
        if self.gradient_penalty and torch.is_grad_enabled():
            slope = self._slope(torch.cat([z.detach(), y.detach()]))
            metrics["penalty"] = self.gradient_penalty * slope
        return value, metrics

    def _slope(self, z: Tensor) -> Tensor:
        with torch.enable_grad():
            z = z.requires_grad_(True)
            (slope,) = torch.autograd.grad(self.negative_energy(z).sum(), z, create_graph=True)
        return slope.square().sum(-1).mean()

    @torch.no_grad()
    def finish(self, z: Tensor, posterior: GaussianPosterior) -> dict[str, float]:
        """``b <- log Z_hat`` from the mixture of base and aggregate posterior."""
        del z
        q = BaseAndAggregate(self.base, posterior.aggregate(), 0.5)
        parts = []
        for _ in range(16):
            y = q.sample((4096,))
            parts.append(self.log_unnormalized(y) - q.log_prob(y))
        log_z = log_mean_exp(torch.cat(parts))
        self.log_norm.copy_(log_z)
        return {"log_norm": float(log_z)}

    def parameter_groups(self) -> list[dict[str, Any]]:
        """The base with the VAE's learning rate, the energy and ``b`` with their own."""
        energy: dict[str, Any] = {
            "params": list(self.energy.parameters()),
            "lr_scale": self.lr_scale,
        }
        if self.weight_decay is not None:
            energy["weight_decay"] = self.weight_decay
        return [
            {"params": list(self.base.parameters())},
            energy,
            {
                "params": [self.log_norm],
                "lr_scale": self.log_norm_lr_scale,
                "weight_decay": 0.0,
            },
        ]

    @torch.no_grad()
    def sample(self, shape: Sequence[int] = (), method: str = "sir", **options: Any) -> Tensor:
        """``(*shape, dim)`` by resampling base samples, or another method of ``sampling.draw``."""
        n = math.prod(shape)
        drawn = draw(self.log_unnormalized, n, proposal=self.base, method=method, **options)
        return drawn.samples.reshape(*shape, self.dim)
