"""Densities of latent vectors: the posteriors of an encoder; priors.

The posteriors of a batch are Gaussian; their mixture is the aggregate posterior, where an encoder
puts a data set. Priors are a standard normal, a mixture, a joint energy, a chain of energies.

Every prior gives ``log_prob(z)`` (by its learned normaliser), ``objective(z, posterior)``, the
lower bound of ``log p(z)`` it is trained by, and ``sample(n)``. A prior with ``exact = True`` is
normalised by construction: its bound is ``log p(z)`` itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from selfnorm._context import SeedLike, seeded
from selfnorm._saved import saved
from selfnorm.chain import AutoregressiveEBM
from selfnorm.distributions import (
    Defensive,
    Mixture1d,
    Proposal,
    choose_component,
    draw_log_weights,
    gaussian_log_prob,
    mixture_log_prob,
    pick_component,
)
from selfnorm.errors import DataError, EnergyError
from selfnorm.evaluation import Finding, stream_log_weights
from selfnorm.functional import bound_gap, ess, log_mean_exp, snl
from selfnorm.networks import MLP
from selfnorm.sampling import draw
from selfnorm.training import ParameterGroup
from selfnorm.vae.normaliser import (
    REFERENCE_ROWS,
    Drift,
    LogNorm,
    Normaliser,
    confirmed,
    drift_of,
    estimates_of,
    findings_against,
)

_LOG_2PI = math.log(2 * math.pi)
_LIMITS = (-7.0, 5.0)  # of log sd: values outside are numerical failures
# Points times rows handled at once: on a CPU what fits its cache, on a GPU what fills it.
_PAIRS_AT_ONCE = {"cpu": 2**19, "cuda": 2**24}
_EXACT_ROWS = 10_000  # latent vectors whose factors are normalised by quadrature
_NODES_LIMIT = 0.01  # nats between two rules of quadrature
_CHUNKS = 8  # of 8,192 samples each, on either side as well
_WATCHED = 256  # rows on either side of a comparison: about as many as a batch has


@dataclass(frozen=True)
class GaussianPosterior:
    """``q(z|x) = N(mean, diag(exp(log_sd))^2)`` for each row: ``mean``, ``log_sd`` ``(n, d)``."""

    mean: Tensor
    log_sd: Tensor

    @classmethod
    def from_output(cls, output: Tensor | Sequence[Tensor]) -> GaussianPosterior:
        """From an encoder's mean and log-variance: a pair, or one tensor ``(n, 2 d)``."""
        pair = output.chunk(2, -1) if isinstance(output, Tensor) else output
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            given = f"{len(pair)} parts" if isinstance(pair, tuple | list) else type(pair).__name__
            raise DataError(
                "the encoder must give a mean and a log-variance: a pair of (n, d), or one tensor "
                f"(n, 2 d); it gives {given}"
            )
        mean, log_variance = pair
        return cls(mean, (0.5 * log_variance).clamp(*_LIMITS))

    def __getitem__(self, rows: Tensor | slice) -> GaussianPosterior:
        """The posteriors of some rows."""
        return GaussianPosterior(self.mean[rows], self.log_sd[rows])

    def sample(self, n: int = 1) -> Tensor:
        """``(n, batch, d)`` reparametrised samples: gradients reach mean and scale."""
        noise = torch.randn((n, *self.mean.shape), dtype=self.mean.dtype, device=self.mean.device)
        return self.mean + self.log_sd.exp() * noise

    def log_prob(self, z: Tensor) -> Tensor:
        """``log q(z|x)``: ``(..., batch, d) -> (..., batch)``."""
        e = (z - self.mean) * torch.exp(-self.log_sd)
        return gaussian_log_prob(e, self.log_sd.sum(-1))

    def entropy(self) -> Tensor:
        """``(batch,)``, in closed form."""
        return (self.log_sd + 0.5 * (1 + _LOG_2PI)).sum(-1)

    def aggregate(self) -> AggregatePosterior:
        """The equal mixture of the batch's posteriors, without gradient."""
        return AggregatePosterior(self.mean.detach(), self.log_sd.detach())


class AggregatePosterior(Proposal):
    """``(1/n) sum_i q(z|x_i)``: where an encoder puts a data set.

    ``log_prob`` costs ``n`` Gaussians a point, and works through the points in chunks.
    """

    mean: Tensor
    log_sd: Tensor

    def __init__(self, mean: Tensor, log_sd: Tensor) -> None:
        super().__init__()
        self.dim = mean.shape[1]
        self.register_buffer("mean", mean)
        self.register_buffer("log_sd", log_sd)

    def sample(self, shape: Sequence[int] = ()) -> Tensor:
        """``(*shape, d)``, each from the posterior of a random row."""
        row = torch.randint(len(self.mean), tuple(shape), device=self.mean.device)
        mean = self.mean[row]
        return mean + self.log_sd[row].exp() * torch.randn_like(mean)

    def log_prob(self, x: Tensor) -> Tensor:
        """Log-density of the mixture."""
        # |(z - m)/s|^2 = z^2/s^2 - 2 z m/s^2 + m^2/s^2: two matrix products instead of an
        # (points, rows, d) tensor. Float64, because the terms cancel where a scale is small.
        mean, log_sd = self.mean.double(), self.log_sd.double()
        precision = torch.exp(-2 * log_sd)
        scaled = mean * precision
        constant = gaussian_log_prob(mean * torch.exp(-log_sd), log_sd.sum(-1))
        constant -= math.log(len(mean))
        size = max(1, _PAIRS_AT_ONCE.get(x.device.type, 2**19) // len(mean))
        parts = [
            mixture_log_prob(constant, (z @ scaled.T).addmm_(z.square(), precision.T, alpha=-0.5))
            for z in x.reshape(-1, self.dim).double().split(size)
        ]
        return torch.cat(parts).reshape(x.shape[:-1]).to(x.dtype)


Encode = Callable[[Tensor], GaussianPosterior]  # rows to their posteriors


def _figures(log_w: Tensor, log_norm: Tensor) -> dict[str, Tensor]:
    """Mean gap of the bounds and effective share of samples, from ``(M, *batch)`` log-weights.

    Empty in a training step, where gradients are on: the figures would cost time.
    """
    if torch.is_grad_enabled():
        return {}
    gap = bound_gap(log_mean_exp(log_w) - log_norm).sum(-1).mean()
    return {"gap": gap, "ess": ess(log_w).mean()}


class LatentPrior(Proposal):
    """A density over latent vectors of ``dim`` numbers, learned with a VAE."""

    exact = True

    def objective(
        self, z: Tensor, posterior: GaussianPosterior, n_samples: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """A lower bound of ``log p(z)`` to train by, ``(n, d) -> (n,)``, and metrics.

        ``posterior`` is that of the batch; ``n_samples`` serve the normaliser, where one is needed.
        """
        del posterior, n_samples
        return self.log_prob(z), {}

    def parameter_groups(self) -> list[ParameterGroup]:
        """Optimiser groups of the prior."""
        return [{"params": list(self.parameters())}]

    def start(self, z: Tensor) -> None:
        """Set initial values from aggregate posterior samples ``(n, d)``."""

    def finish(self, z: Tensor, posterior: GaussianPosterior) -> dict[str, float]:
        """Close the normaliser after training."""
        del z, posterior
        return {}

    def normaliser(
        self, encode: Encode, x: Tensor, reference: Tensor | None, n_samples: int, n_nodes: int
    ) -> Normaliser:
        """``log Z`` as held-out rows ``x`` are judged with it.

        Args:
            encode: rows to their posteriors.
            x: held-out rows.
            reference: rows whose posteriors join the proposal, where there is one.
            n_samples: of each importance estimate.
            n_nodes: of a quadrature.
        """
        del encode, x, reference, n_samples, n_nodes
        return Normaliser({"exact": LogNorm(0.0, 0.0)})

    def watch(self, encode: Encode, x: Tensor, spiked: bool) -> Drift | None:
        """How much of ``log Z`` the proposal misses; ``None`` where nothing can be missed.

        ``spiked``: whether spikes were seen before, so that no more comparisons must confirm them.
        """
        del encode, x, spiked
        return None


@saved()
class StandardNormal(LatentPrior):
    """``N(0, I)``."""

    _where: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.register_buffer("_where", torch.zeros(()), persistent=False)

    def sample(self, shape: Sequence[int] = ()) -> Tensor:
        """``(*shape, dim)``."""
        return torch.randn(*shape, self.dim, device=self._where.device, dtype=self._where.dtype)

    def log_prob(self, x: Tensor) -> Tensor:
        """Log-density."""
        return gaussian_log_prob(x, 0.0)


@saved()
class MixturePrior(LatentPrior):
    """A mixture of ``n_components`` diagonal Gaussians, learned."""

    def __init__(self, dim: int, n_components: int = 10) -> None:
        super().__init__()
        if n_components < 1:
            raise ValueError(f"n_components must be at least 1, got {n_components}")
        self.dim = dim
        self.logits = nn.Parameter(torch.zeros(n_components))
        self.means = nn.Parameter(torch.randn(n_components, dim))
        self.log_scales = nn.Parameter(torch.zeros(n_components, dim))

    def sample(self, shape: Sequence[int] = ()) -> Tensor:
        """``(*shape, dim)``."""
        with torch.no_grad():
            u = torch.rand(*shape, device=self.logits.device, dtype=self.logits.dtype)
            which, _ = choose_component(torch.softmax(self.logits, 0), u)
            mean = pick_component(self.means, which, event_dims=1)
            scale = pick_component(self.log_scales, which, event_dims=1).exp()
            return mean + scale * torch.randn_like(mean)

    def log_prob(self, x: Tensor) -> Tensor:
        """Log-density."""
        e = (x.unsqueeze(-2) - self.means) * torch.exp(-self.log_scales)
        parts = gaussian_log_prob(e, self.log_scales.sum(-1))
        return mixture_log_prob(torch.log_softmax(self.logits, 0), parts)


def latent_energy(
    dim: int,
    hidden: Sequence[int] = (200, 200),
    *,
    activation: str = "leaky_relu",
    zero_init: bool = True,
) -> MLP:
    """The paper's energy over latent vectors.

    Two hidden layers of 200 as printed; the authors' code has three. It starts at zero: the prior
    starts at its base density.
    """
    return MLP(dim, hidden, activation=activation, zero_init=zero_init)


@saved("energy", "base", "dim", "proposal", "bound", "lr_scale", "weight_decay")
class EnergyPrior(LatentPrior):
    r"""``log p(z) = log d(z) - E(z) - b`` with a scalar ``b``.

    The normaliser is estimated from samples, and an energy exploits whatever they miss: in 16
    dimensions it grows spikes at posteriors, where base samples never fall. What prevents that is
    ``proposal="mixture"``, a ``bound``, weight decay and a small learning rate for the energy.

    Args:
        energy: ``(n, dim) -> (n,)`` or ``(n, 1)``; or ``None`` for :func:`latent_energy`.
        base: a normalised prior ``d``; standard normal by default.
        dim: latent numbers, needed where neither base nor energy is given.
        proposal: ``"mixture"`` of base and aggregate posterior, or ``"base"`` (the paper's).
        bound: limit of ``|E|``, by a smooth squashing; ``None`` for none.
        lr_scale: learning rate of the energy relative to the VAE's (the paper's: 0.2).
        weight_decay: of the energy; ``None`` leaves it to the optimiser.
    """

    exact = False

    def __init__(
        self,
        energy: nn.Module | None = None,
        base: LatentPrior | None = None,
        *,
        dim: int | None = None,
        proposal: str = "mixture",
        bound: float | None = None,
        lr_scale: float = 1.0,
        weight_decay: float | None = None,
    ) -> None:
        super().__init__()
        if proposal not in ("mixture", "base"):
            raise ValueError(f"proposal must be 'mixture' or 'base', not {proposal!r}")
        stated = (dim, getattr(energy, "dim", None), getattr(base, "dim", None))
        dims = {number for number in stated if isinstance(number, int)}
        if len(dims) != 1:
            raise ValueError(
                "give dim, a base or an energy with an attribute dim, all of one number; got "
                f"{' and '.join(map(str, sorted(dims))) or 'none'}"
            )
        self.dim = dims.pop()
        self.base = StandardNormal(self.dim) if base is None else base
        self.energy = energy if energy is not None else latent_energy(self.dim)
        self.log_norm = nn.Parameter(torch.zeros(()))
        self.proposal, self.bound = proposal, bound
        self.lr_scale, self.weight_decay = lr_scale, weight_decay

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return self.log_norm.device

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

    def log_unnormalized(self, x: Tensor) -> Tensor:
        """``log d(z) - E(z)``."""
        return self.base.log_prob(x) + self.negative_energy(x)

    def log_prob(self, x: Tensor) -> Tensor:
        """``log p(z)`` by the learned ``b``."""
        return self.log_unnormalized(x) - self.log_norm

    def beside_posteriors(self, posterior: GaussianPosterior) -> Proposal:
        """Half base samples, the others from the aggregate of some rows' posteriors.

        Base samples alone miss the places where posteriors sit; posteriors alone miss where the
        prior has mass and no data. Weights are bounded by those against either part.
        """
        return Defensive(posterior.aggregate(), self.base, 0.5, stratified=True)

    def proposal_for(self, posterior: GaussianPosterior) -> Proposal:
        """Where the samples for ``Z`` come from, given the posteriors of some rows."""
        if self.proposal == "base":
            return self.base
        return self.beside_posteriors(posterior)

    def objective(
        self, z: Tensor, posterior: GaussianPosterior, n_samples: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """``log d(z) - E(z) - b - mean(w) e^{-b} + 1``; outside of training gap and ESS."""
        at_z, log_w = self.weigh(z, posterior, n_samples)
        value = snl(self.base.log_prob(z) + at_z, log_w, self.log_norm, reduction="none")
        return value, _figures(log_w, self.log_norm)

    def weigh(
        self, z: Tensor, posterior: GaussianPosterior, n_samples: int
    ) -> tuple[Tensor, Tensor]:
        """``-E`` at ``z`` and log-weights of proposal samples, in one pass of the energy."""
        with torch.no_grad():
            q = self.proposal_for(posterior)
            y = q.sample((n_samples,))
            log_q = q.log_prob(y)
        at_z, at_y = self.negative_energy(torch.cat([z, y])).split([len(z), n_samples])
        return at_z, at_y + self.base.log_prob(y) - log_q

    @torch.no_grad()
    def finish(self, z: Tensor, posterior: GaussianPosterior) -> dict[str, float]:
        """``b <- log Z_hat`` from the mixture of base and aggregate posterior."""
        del z
        log_z = log_mean_exp(draw_log_weights(self, self.beside_posteriors(posterior), 2**16, 4096))
        self.log_norm.copy_(log_z)
        return {"log_norm": float(log_z)}

    @torch.no_grad()
    def normaliser(
        self, encode: Encode, x: Tensor, reference: Tensor | None, n_samples: int, n_nodes: int
    ) -> Normaliser:
        """``log Z`` from samples, of the base, of the mixture and by tempered steps.

        Without a ``reference`` the first half of ``x`` serves, and the second is held out.
        """
        del n_nodes
        half = max(1, len(x) // 2)
        rows, held_out = (x[:half], x[half:]) if reference is None else (reference, x)
        estimates = estimates_of(self, encode(rows[:REFERENCE_ROWS]), n_samples)
        others = encode((held_out if len(held_out) else x)[:REFERENCE_ROWS])
        log_z, b = estimates["mixture"].value, float(self.log_norm)
        gap = float(bound_gap(torch.tensor(log_z - b, dtype=torch.float64)))
        findings = tuple(findings_against(self, estimates, others, n_samples))
        return Normaliser(estimates, b, b - log_z, gap, findings)

    @torch.no_grad()
    def watch(self, encode: Encode, x: Tensor, spiked: bool) -> Drift | None:
        """How much of ``log Z`` the proposal misses.

        A random half of the rows makes the proposal, as a batch does in training; the posteriors
        of the others confront it. Rows and samples are drawn afresh for every comparison.
        """
        posterior = encode(x)
        half = min(-(-len(x) // 2), _WATCHED)

        def compare() -> Drift:
            order = torch.randperm(len(x), device=x.device)
            own, others = posterior[order[:half]], posterior[order[-half:]]
            proposals = self.proposal_for(own), self.beside_posteriors(others)
            return drift_of(*(stream_log_weights(self, q, _CHUNKS * 8192, 8192) for q in proposals))

        return compare() if spiked else confirmed(compare)

    def parameter_groups(self) -> list[ParameterGroup]:
        """The base with the VAE's learning rate, the energy and ``b`` with their own."""
        own = {} if self.weight_decay is None else {"weight_decay": self.weight_decay}
        return [
            {"params": list(self.base.parameters())},
            {"params": list(self.energy.parameters()), "lr_scale": self.lr_scale, **own},
            {"params": [self.log_norm], "weight_decay": 0.0},
        ]

    @torch.no_grad()
    def sample(self, shape: Sequence[int] = (), method: str = "sir", **options: Any) -> Tensor:
        """``(*shape, dim)`` by resampling base samples, or another method of ``sampling.draw``."""
        n = math.prod(shape)
        drawn = draw(self.log_unnormalized, n, proposal=self.base, method=method, **options)
        return drawn.samples.reshape(*shape, self.dim)


class _LatentChain(AutoregressiveEBM):
    """The chain with every dependence on ``z`` differentiable: an encoder is trained through it.

    On data the shape of a proposal is cut from the graph, because nothing upstream of it learns;
    here a cut would bias the encoder's gradient. The shape is read off a second copy of the
    proposal, whose head takes no gradient: the proposals themselves are fitted by maximum
    likelihood alone, and stay where the mass is.
    """

    def _seen_by_energies(self, proposal: Mixture1d, features: Tensor) -> Mixture1d:
        del proposal
        raw = self.trunk.outputs(self.mixture_head, features, 3 * self.n_components, fixed=True)
        return Mixture1d.from_raw(raw, self.n_components, family=self.family)

    def draws(self, proposal: Mixture1d, n: int) -> Tensor:
        """``(n, R, N, dim)``: stratified samples, drawn factor by factor."""
        like: Any = {"dtype": proposal.loc.dtype, "device": proposal.loc.device}
        u = torch.rand(*proposal.loc.shape[:-1], n, **like)
        u = torch.add(torch.linspace(0, 1 - 1 / n, n, **like), u, alpha=1 / n)  # one in each cell
        return proposal.from_uniform(u.movedim(-1, 0))


@saved()
class AutoregressivePrior(LatentPrior):
    r"""``p(z) = prod_i q_i(z_i|z_<i) exp(-E(z_i, c_i) - b_i)``: exactly normalised.

    A chain of one-dimensional energies (:class:`~selfnorm.AutoregressiveEBM`), each with its own
    learned ``b_i(z_<i)``. ``objective`` is the sum of the factors' SNL bounds. The samples of a
    factor come from a proposal that depends on ``z_<i``, so a score ``(w - 1) grad log q_i``
    belongs to its gradient in ``z``; it is about one per cent of it and left out.

    Args:
        dim: latent numbers.
        n_samples: stratified proposal samples per factor in training (32 at most).
        polish_steps: steps given to the ``b_i`` alone at the end.
        sizes: of the chain, see :class:`~selfnorm.AutoregressiveEBM`.
    """

    exact = False  # of the learned b; `log_prob_exact` normalises by quadrature

    def __init__(
        self, dim: int, *, n_samples: int = 8, polish_steps: int = 200, **sizes: Any
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {
            "hidden": 128, "blocks": 2, "components": 8, "context": 16, "energy_hidden": 32,
            "energy_blocks": 1, "family": "gaussian", **sizes,
        }  # fmt: skip
        self.dim, self.n_samples, self.polish_steps = dim, min(n_samples, 32), polish_steps
        self.chain = _LatentChain(dim, discrete=None, **options)
        self.config = options
        self._start_at_normal()

    @torch.no_grad()
    def _start_at_normal(self) -> None:
        knots = self.chain.columns.knots
        level = torch.linspace(0, 1, knots.shape[1], dtype=torch.float64).clamp(0.005, 0.995)
        knots.copy_(torch.special.ndtri(level).to(knots))
        self.chain.columns.fitted.fill_(True)
        self.chain.start_at_marginals()

    def start(self, z: Tensor) -> None:
        """Begin every factor at its marginal, read off samples ``z (n, d)``."""
        if len(z) < 100:
            raise DataError(f"{len(z)} latent vectors cannot tell marginals; give at least 100")
        self.chain.set_scaling(z)

    def log_prob(self, x: Tensor) -> Tensor:
        """``log p(z)`` by the learned ``b_i``; ``(..., dim) -> (...)``, with gradient."""
        terms = self.chain.at_rows(x.reshape(-1, self.dim))
        chains = terms.log_prob(self.chain.log_norm(terms.factors))
        return log_mean_exp(chains).reshape(x.shape[:-1])

    def objective(
        self, z: Tensor, posterior: GaussianPosterior, n_samples: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum of the factors' SNL bounds; outside of training their mean gap and ESS."""
        del posterior, n_samples
        terms = self.chain.at_rows(z, n_samples=self.n_samples)
        b = self.chain.log_norm(terms.factors)
        tilt = snl(terms.minus_energy, terms.log_w, b, reduction="none")
        chains = (terms.log_q + tilt).sum(-1) + terms.log_det
        value = log_mean_exp(chains) if self.chain.n_orderings > 1 else chains.squeeze(0)
        return value, _figures(terms.log_w, b)

    @torch.no_grad()
    def log_prob_exact(self, z: Tensor, n_nodes: int = 256) -> tuple[Tensor, Tensor, Tensor]:
        """``log p(z)`` by quadrature, by the learned ``b``, and its SNL bound; each ``(n,)``."""
        parts = []
        for rows in self.chain.chunks(len(z), 4):  # the quadrature slices them for its nodes
            terms = self.chain.at_rows(z[rows])
            b = self.chain.log_norm(terms.factors)
            log_z = self.chain.quadrature(terms.factors, n_nodes)
            exact, learned = terms.log_prob(log_z), terms.log_prob(b)
            lower = exact - bound_gap(log_z - b).sum(-1)
            parts.append(torch.stack([log_mean_exp(v) for v in (exact, learned, lower)]))
        exact, learned, lower = torch.cat(parts, 1)
        return exact, learned, lower

    @torch.no_grad()
    def normaliser(
        self, encode: Encode, x: Tensor, reference: Tensor | None, n_samples: int, n_nodes: int
    ) -> Normaliser:
        """``sum_i log Z_i - sum_i b_i`` by quadrature, which a rule of half the nodes confirms."""
        del reference, n_samples
        z = encode(x[:_EXACT_ROWS]).sample(1)[0]
        exact, learned, lower = (v.double() for v in self.log_prob_exact(z, n_nodes))
        shift = exact - learned
        se = float(shift.std()) / math.sqrt(len(z)) if len(z) > 1 else math.nan
        coarse, _, _ = self.log_prob_exact(z[:1000], n_nodes // 2)
        error = abs(float((coarse.double() - exact[:1000]).mean()))
        findings: tuple[Finding, ...] = ()
        if not error < _NODES_LIMIT:
            words = (
                f"Quadrature with {n_nodes} and {n_nodes // 2} nodes differs by {error:.3f} nats: "
                "raise n_nodes."
            )
            findings = (Finding("nodes", error, _NODES_LIMIT, words),)
        estimates = {"exact": LogNorm(float(-shift.mean()), se)}
        gap = float((exact - lower).mean())
        return Normaliser(estimates, 0.0, float(shift.mean()), gap, findings)

    def sample(self, shape: Sequence[int] = (), seed: SeedLike = None) -> Tensor:
        """``(*shape, dim)``, one number after another."""
        with seeded(seed, self.chain.columns.center.device):
            return self.chain.sample(math.prod(shape)).reshape(*shape, self.dim)

    def parameter_groups(self) -> list[ParameterGroup]:
        """Matrices with weight decay, biases without."""
        return self.chain.parameter_groups()

    def finish(self, z: Tensor, posterior: GaussianPosterior) -> dict[str, float]:
        """Fit the ``b_i`` to the finished energies, everything else fixed."""
        del posterior
        with torch.enable_grad():
            return self.chain.fit_log_norm((z,), self.polish_steps)
