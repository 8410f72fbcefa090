"""Priors over latent vectors: standard normal, mixture, joint energy, chain of energies.

Every prior gives ``log_prob(z)`` (by its learned normaliser), ``objective(z, posterior)``, the
lower bound of ``log p(z)`` it is trained by, ``sample(n)`` and ``config`` (to rebuild it). A prior
with ``exact = True`` is normalised by construction: its bound is ``log p(z)`` itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from selfnorm._context import SeedLike, seeded
from selfnorm.chain import Factors
from selfnorm.distributions import Proposal
from selfnorm.errors import DataError
from selfnorm.functional import bound_gap, log_mean_exp
from selfnorm.vae.chain import LatentChain
from selfnorm.vae.fused import measures, stratified
from selfnorm.vae.posterior import GaussianPosterior

__all__ = ["AutoregressivePrior", "LatentPrior", "MixturePrior", "StandardNormal"]

_LOG_2PI = math.log(2 * math.pi)


class LatentPrior(Proposal):
    """A density over latent vectors of ``dim`` numbers, learned with a VAE."""

    exact = True
    config: dict[str, Any]

    def objective(
        self, z: Tensor, posterior: GaussianPosterior, n_samples: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """A lower bound of ``log p(z)`` to train by, ``(n, d) -> (n,)``, and metrics.

        ``posterior`` is that of the batch; ``n_samples`` serve the normaliser, where one is needed.
        """
        del posterior, n_samples
        return self.log_prob(z), {}

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Optimiser groups of the prior."""
        return [{"params": list(self.parameters())}]

    def start(self, z: Tensor) -> None:
        """Set initial values from aggregate posterior samples ``(n, d)``."""

    def finish(self, z: Tensor, posterior: GaussianPosterior) -> dict[str, float]:
        """Close the normaliser after training."""
        del z, posterior
        return {}


class StandardNormal(LatentPrior):
    """``N(0, I)``.

    Example:
        >>> StandardNormal(2).log_prob(torch.zeros(1, 2))
        tensor([-1.8379])
    """

    _where: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim, self.config = dim, {"dim": dim}
        self.register_buffer("_where", torch.zeros(()), persistent=False)

    def sample(self, shape: Sequence[int] = ()) -> Tensor:
        """``(*shape, dim)``."""
        return torch.randn(*shape, self.dim, device=self._where.device, dtype=self._where.dtype)

    def log_prob(self, x: Tensor) -> Tensor:
        """Log-density."""
        return -0.5 * (x.square() + _LOG_2PI).sum(-1)


class MixturePrior(LatentPrior):
    """A mixture of ``n_components`` diagonal Gaussians, learned.

    Example:
        >>> MixturePrior(3, 10).log_prob(torch.zeros(5, 3)).shape
        torch.Size([5])
    """

    def __init__(self, dim: int, n_components: int = 10, spread: float = 1.0) -> None:
        super().__init__()
        if n_components < 1:
            raise ValueError(f"n_components must be at least 1, got {n_components}")
        self.dim = dim
        self.config = {"dim": dim, "n_components": n_components}
        self.logits = nn.Parameter(torch.zeros(n_components))
        self.means = nn.Parameter(spread * torch.randn(n_components, dim))
        self.log_scales = nn.Parameter(torch.zeros(n_components, dim))

    def sample(self, shape: Sequence[int] = ()) -> Tensor:
        """``(*shape, dim)``."""
        with torch.no_grad():
            ends = torch.softmax(self.logits, 0).cumsum(0)
            u = torch.rand(*shape, device=ends.device, dtype=ends.dtype)
            which = torch.searchsorted(ends, u).clamp_max(len(ends) - 1)
            mean = self.means[which]
            return mean + self.log_scales[which].exp() * torch.randn_like(mean)

    def log_prob(self, x: Tensor) -> Tensor:
        """Log-density."""
        e = (x.unsqueeze(-2) - self.means) * torch.exp(-self.log_scales)
        parts = (-0.5 * (e.square() + _LOG_2PI) - self.log_scales).sum(-1)
        return torch.logsumexp(parts + torch.log_softmax(self.logits, 0), -1)


class AutoregressivePrior(LatentPrior):
    r"""``p(z) = prod_i q_i(z_i|z_<i) exp(-E(z_i, c_i) - b_i)``: exactly normalised.

    A chain of one-dimensional energies (:class:`~selfnorm.AutoregressiveEBM`), each with its own
    learned ``b_i(z_<i)``. ``objective`` is the sum of the factors' SNL bounds. The samples of a
    factor come from a proposal that depends on ``z_<i``, so a score ``(w - 1) grad log q_i``
    belongs to its gradient in ``z``; it is about one per cent of it and left out unless asked for.

    Args:
        dim: latent numbers.
        n_samples: stratified proposal samples per factor in training (32 at most).
        polish_steps: steps given to the ``b_i`` alone at the end.
        score: include the score: unbiased in ``z``, a third slower.
        sizes: of the chain, see :class:`~selfnorm.AutoregressiveEBM`.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> prior = AutoregressivePrior(3, hidden=16, components=3, context=4, energy_hidden=8)
        >>> prior.log_prob(torch.zeros(5, 3)).shape, prior.sample((4,)).shape
        (torch.Size([5]), torch.Size([4, 3]))
    """

    exact = False  # of the learned b; `log_prob_exact` normalises by quadrature

    def __init__(
        self,
        dim: int,
        *,
        n_samples: int = 8,
        polish_steps: int = 200,
        score: bool = False,
        **sizes: Any,
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {
            "hidden": 128, "blocks": 2, "components": 8, "context": 16, "energy_hidden": 32,
            "energy_blocks": 1, "family": "gaussian", **sizes,
        }  # fmt: skip
        self.dim, self.n_samples = dim, min(n_samples, 32)
        self.polish_steps, self.score = polish_steps, score
        self.chain = LatentChain(dim, discrete=None, **options)
        self.config = {
            "dim": dim,
            "n_samples": n_samples,
            "polish_steps": polish_steps,
            "score": score,
            **options,
        }
        self._start_at_normal()

    @torch.no_grad()
    def _start_at_normal(self) -> None:
        knots = self.chain.columns.knots
        level = torch.linspace(0, 1, knots.shape[1], dtype=torch.float64).clamp(0.005, 0.995)
        knots.copy_(torch.special.ndtri(level).to(knots))
        self.chain.columns.fitted.fill_(True)
        self.chain.set_columns(self.chain.columns)

    def start(self, z: Tensor) -> None:
        """Begin every factor at its marginal, read off samples ``z (n, d)``."""
        if len(z) < 100:
            raise DataError(f"{len(z)} latent vectors cannot tell marginals; give at least 100")
        self.chain.set_scaling(z)

    def _pass(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor, Factors]:
        at_z, log_det = self.chain.columns(z)
        at = self.chain.factors(at_z)
        here = at_z.expand(self.chain.n_orderings, -1, -1)
        return here, at.proposal.log_prob(here), log_det, at

    def log_prob(self, x: Tensor) -> Tensor:
        """``log p(z)`` by the learned ``b_i``; ``(..., dim) -> (...)``, with gradient."""
        here, log_q, log_det, at = self._pass(x.reshape(-1, self.dim))
        f = self.chain.energy(here.unsqueeze(0), at)[0]
        chains = (log_q + f - self.chain.energy.log_norm(at.context)).sum(-1) + log_det
        return log_mean_exp(chains).reshape(x.shape[:-1])

    def objective(
        self, z: Tensor, posterior: GaussianPosterior, n_samples: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum of the factors' SNL bounds."""
        del posterior, n_samples
        plain = self.score or self.chain.family != "gaussian" or torch.compiler.is_compiling()
        chains, metrics = (self._plain if plain else self.chain.bound)(z, self.n_samples)
        value = chains.squeeze(0) if self.chain.n_orderings == 1 else log_mean_exp(chains)
        return value, metrics

    def _plain(self, z: Tensor, n_samples: int) -> tuple[Tensor, dict[str, Tensor]]:
        """What ``chain.bound`` gives, by formulas that a compiler fuses; and with the score."""
        chain = self.chain
        at_z, log_det = chain.columns(z)
        here = at_z.expand(chain.n_orderings, -1, -1)
        log_q, proposal, at = chain.shaped(here)
        with torch.no_grad():
            y = proposal.from_uniform(stratified(n_samples, here).movedim(-1, 0))
        f, log_w = chain.energy(torch.cat([here.unsqueeze(0), y]), at).split([1, len(y)])
        b = chain.energy.log_norm(at.context)
        w = log_w.exp()
        ratio = w.mean(0) * (-b).clamp_max(60.0).exp()
        bound = f.squeeze(0) - b - ratio + 1
        if self.score:
            # d/dz of E_{y ~ q(.|z)}[w(y, z)] has a score part. E[score] = 0 lets w - 1 take the
            # place of w: almost no noise, as the weights are close to one.
            weight = (log_w - b).detach().clamp_max(20.0).exp() - 1
            score = (weight * at.proposal.log_prob(y)).mean(0)
            bound = bound - (score - score.detach())
        return (log_q + bound).sum(-1) + log_det, measures(w, ratio)

    @torch.no_grad()
    def log_prob_exact(self, z: Tensor, n_nodes: int = 256) -> tuple[Tensor, Tensor, Tensor]:
        """``log p(z)`` by quadrature, by the learned ``b``, and its SNL bound; each ``(n,)``."""
        parts = []
        for rows in self.chain.chunks(len(z), n_nodes):
            here, log_q, log_det, at = self._pass(z[rows])
            f = self.chain.energy(here.unsqueeze(0), at)[0]
            b, log_z = self.chain.energy.log_norm(at.context), self.chain.quadrature(at, n_nodes)
            exact = (log_q + f - log_z).sum(-1) + log_det
            learned = (log_q + f - b).sum(-1) + log_det
            lower = exact - bound_gap(log_z - b).sum(-1)
            parts.append(torch.stack([log_mean_exp(v) for v in (exact, learned, lower)]))
        exact, learned, lower = torch.cat(parts, 1)
        return exact, learned, lower

    def sample(self, shape: Sequence[int] = (), seed: SeedLike = None) -> Tensor:
        """``(*shape, dim)``, one number after another."""
        with seeded(seed, self.chain.columns.center.device):
            return self.chain.sample(math.prod(shape)).reshape(*shape, self.dim)

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Matrices with weight decay, biases without."""
        named = list(self.named_parameters())
        return [
            {"params": [p for n, p in named if n.endswith("weight")]},
            {"params": [p for n, p in named if not n.endswith("weight")], "weight_decay": 0.0},
        ]

    def finish(self, z: Tensor, posterior: GaussianPosterior) -> dict[str, float]:
        """Fit the ``b_i`` to the finished energies, everything else fixed."""
        del posterior
        with torch.enable_grad():
            return self.chain.training_task(polish_steps=self.polish_steps).finish((z,))
