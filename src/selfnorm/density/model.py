"""``EBM``: energy, optional base density, learned log-normaliser; what it minimises; mixtures.

What an EBM is trained by, SNL and its kin, goes by name; its task is what the engine sees of it.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from selfnorm import functional as F
from selfnorm._context import SeedLike, evaluating, seeded
from selfnorm._inputs import as_rows, check_rows
from selfnorm._saved import saved
from selfnorm.distributions import (
    Defensive,
    Flow,
    FlowTask,
    Proposal,
    as_proposal,
    draw_log_weights,
    log_weight_chunks,
    proposal_for,
    refuse_nan,
    refuse_unreached,
)
from selfnorm.errors import DataError, EnergyError, ProposalError, SelfnormWarning
from selfnorm.evaluation import chunk_size_for
from selfnorm.functional import Weights
from selfnorm.sampling import draw
from selfnorm.training import (
    Data,
    ParameterGroup,
    Source,
    State,
    Task,
    TaskOptions,
    TrainingOptions,
    whole_number,
)

LOG_NORM_LR_SCALE = 10.0  # learning rate of b in units of that of the energy
# Chosen on draws of the four 2-D sets other than those reported: long enough for a plain network,
# which learns slow functions first; one with waves is stopped by the held-out rows long before.
_USUAL = {"lr": 5e-3, "ema": 0.998}
_LENGTH = {"max_steps": 10_000, "max_epochs": 400}
_PATIENCE = 15
Metrics = dict[str, Tensor]


@saved("energy", "base")
class EBM(nn.Module):
    r"""A normalised energy-based model ``log p(x) = -E(x) + log d(x) - b``.

    Args:
        energy: callable on ``(n, dim)`` giving ``(n,)`` or ``(n, 1)``; usually a ``nn.Module``.
        base: optional base density ``d``; any distribution (see
            :func:`~selfnorm.distributions.as_proposal`). It guarantees that ``Z`` exists;
            it is not trained.
        log_norm: initial ``b``. :func:`selfnorm.fit` replaces it by an importance-sampling
            estimate before the first step.

    The density is with respect to Lebesgue measure (or the counting measure, if the base or the
    proposal used for training is discrete).

    Example:
        >>> import selfnorm as sn
        >>> model = sn.EBM(sn.MLP(2), base=sn.Gaussian(torch.zeros(2), scale=1.0))
        >>> model.log_prob(torch.zeros(4, 2)).shape
        torch.Size([4])
    """

    def __init__(
        self, energy: Callable[[Tensor], Tensor], base: object = None, log_norm: float = 0.0
    ) -> None:
        super().__init__()
        if isinstance(energy, type) or not callable(energy):
            raise EnergyError(
                f"the energy must be a function of rows, or a module that was built, not {energy!r}"
            )
        self.energy = energy
        self.base: Proposal | None = None if base is None else as_proposal(base)
        if self.base is not None:
            self.base.requires_grad_(False).to(self.dtype)
        # Never narrower than float32: log Z may be large, and its error is that of every density.
        kind = torch.promote_types(self.dtype or torch.get_default_dtype(), torch.float32)
        self.log_norm = nn.Parameter(torch.tensor(float(log_norm), dtype=kind))

    def negative_energy(self, x: Tensor) -> Tensor:
        """``-E(x)``, one checked scalar per row: ``(n, dim) -> (n,)``."""
        energy = self.energy(x)
        if energy.dim() == x.dim() and energy.shape[-1] == 1:
            energy = energy.squeeze(-1)
        if energy.shape != x.shape[:-1]:
            raise EnergyError(
                f"the energy must return one scalar per row: for input {tuple(x.shape)} expected "
                f"{tuple(x.shape[:-1])}, got {tuple(energy.shape)}; sum or reduce its output"
            )
        if not energy.is_floating_point():
            raise EnergyError(
                f"the energy must return floating-point numbers, got {energy.dtype}: whole numbers "
                "have no gradient; return energy.float()"
            )
        return -energy

    def log_unnormalized(self, x: Tensor) -> Tensor:
        """``-E(x) + log d(x)``: ``(n, dim) -> (n,)``."""
        value = self.negative_energy(x)
        return value if self.base is None else value + self.base.log_prob(x)

    def log_prob(self, x: Tensor) -> Tensor:
        """Normalised log-density by the learned ``b``: one forward pass, ``(n, dim) -> (n,)``."""
        x = as_rows(x, dtype=self.dtype)
        if self.base is not None and x.shape[-1] != self.base.dim:
            raise DataError(
                f"the model is over rows of {self.base.dim} columns, got {tuple(x.shape)}"
            )
        return self.log_unnormalized(x) - self.log_norm

    def extra_repr(self) -> str:
        """``b``, and that there is no base where there is none."""
        b = f"log_norm={float(self.log_norm.detach()):.4g}" if self.log_norm.numel() == 1 else ""
        return ", ".join(filter(None, [b, "base=None" * (self.base is None)]))

    def forward(self, x: Tensor) -> Tensor:
        """Same as :meth:`log_prob`."""
        return self.log_prob(x)

    @property
    def dtype(self) -> torch.dtype | None:
        """Floating-point type of the energy's parameters, ``None`` if it has none."""
        if not isinstance(self.energy, nn.Module):
            return None
        return next((p.dtype for p in self.energy.parameters()), None)

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return self.log_norm.device

    def sample(
        self,
        n: int,
        *,
        proposal: object = None,
        method: str = "sir",
        seed: SeedLike = None,
        **options: Any,
    ) -> Tensor:
        """Draw ``(n, dim)`` rows from the model.

        Args:
            n: number of rows.
            proposal: where candidates come from; the base density by default.
            method: ``"sir"`` (resampling, default), ``"imh"``, ``"mala"``, ``"hmc"`` or
                ``"smc"``.
            seed: seed or ``torch.Generator``.
            options: passed to the sampler, see :func:`selfnorm.sampling.draw`.
        """
        return self._drawn(n, seed, proposal=proposal, method=method, **options)

    def _drawn(self, n: int, seed: SeedLike, *, proposal: object, **how: Any) -> Tensor:
        if proposal is None:
            if self.base is None:
                raise DataError(
                    "a model without a base density needs a proposal to be sampled: "
                    "model.sample(n, proposal=q)"
                )
            proposal = self.base
        q = proposal_for(self, proposal, None if self.base is None else self.base.dim)
        target = self if self.base is not None else _within(self, q)
        with evaluating(self):
            return draw(target, n, proposal=q, seed=seed, **how).samples


def _within(model: EBM, proposal: Proposal) -> Callable[[Tensor], Tensor]:
    """The unnormalised density where the proposal reaches.

    Without a base the model lives on the proposal's support (a box, the counting measure): that is
    what its ``Z`` is over. Samplers that walk would leave it, for ever where the energy is flat.
    """

    def log_density(x: Tensor) -> Tensor:
        with torch.no_grad():
            outside = torch.isneginf(proposal.log_prob(x.detach()))
        return model.log_unnormalized(x).masked_fill(outside, -torch.inf)

    return log_density


def log_weights(model: EBM, proposal: Proposal, x: Tensor) -> Tensor:
    r"""``log w = -E(x) + log d(x) - log q(x)`` at any rows (samples of ``q``, or data).

    Example:
        >>> import selfnorm as sn
        >>> q = sn.Gaussian(torch.zeros(2), scale=1.0)
        >>> model = EBM(lambda x: x.sum(-1), base=q)
        >>> log_weights(model, q, torch.ones(3, 2))          # the base is the proposal: -E
        tensor([-2.0000, -2.0000, -2.0000])
    """
    return model.log_unnormalized(x) - proposal.log_prob(x)


class _MixtureEnergy(nn.Module):
    def __init__(self, members: Sequence[EBM]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, x: Tensor) -> Tensor:
        log_p = torch.stack([member(x) for member in self.members])
        return math.log(len(self.members)) - torch.logsumexp(log_p, 0)


@saved("members")
class Ensemble(EBM):
    r"""The mixture ``p(x) = (1/K) sum_k p_k(x)`` of fitted EBMs (Lebesgue measure).

    A mixture of normalised densities is normalised, and its log-density is never below the mean of
    the members' (Jensen): averaging restarts beats choosing one. It is an :class:`EBM` with
    ``b = 0`` and ``Z`` the mean of the members' ``Z_k exp(-b_k)``, so :func:`selfnorm.evaluate`
    bounds it like any other; without a base of its own it asks for a proposal there.

    Example:
        >>> import selfnorm as sn
        >>> parts = [sn.EBM(sn.MLP(1), base=sn.Gaussian(torch.tensor([m]), scale=1.0))
        ...          for m in (-3.0, 3.0)]
        >>> Ensemble(parts).log_prob(torch.zeros(4, 1)).shape
        torch.Size([4])
    """

    def __init__(self, members: Sequence[EBM]) -> None:
        members = list(members)
        if not members:
            raise DataError("an ensemble needs at least one member")
        for other in (m for m in members if not isinstance(m, EBM)):
            raise TypeError(f"an Ensemble is of selfnorm.EBM, not of {type(other).__name__}")
        super().__init__(_MixtureEnergy(members))
        self.log_norm.requires_grad_(False)
        self.to(members[0].device)

    @property
    def members(self) -> list[EBM]:
        """The models the mixture is made of."""
        assert isinstance(self.energy, _MixtureEnergy)
        return [m for m in self.energy.members if isinstance(m, EBM)]

    def _drawn(self, n: int, seed: SeedLike, **how: Any) -> Tensor:
        """A random member for each row, then a row of that member."""
        with seeded(seed, self.device):
            which = torch.randint(len(self.members), (n,), device=self.device)
            counts = torch.bincount(which, minlength=len(self.members)).tolist()
            pairs = zip(self.members, counts, strict=True)
            drawn = [member.sample(count, **how) for member, count in pairs if count]
            return torch.cat(drawn)[torch.randperm(n, device=self.device)]


class Objective(ABC):
    """What an EBM is trained by; an objective of one's own derives from it.

    Attributes:
        learns_log_norm: whether ``b`` follows ``log Z`` in training; if not, validation is by the
            upper bound.
        linear: a mean of per-sample terms: means over ranks and accumulation steps are then exact.
        capturable: a step asks nothing of the host, and may be captured as a CUDA graph.
        label: what it is, in a word: a run is resumed only with the one it began with.
    """

    learns_log_norm: bool = False
    linear: bool = True
    capturable: bool = True
    label: str = ""

    @abstractmethod
    def loss(
        self, model: EBM, proposal: Proposal, x: Tensor, n_samples: int
    ) -> tuple[Tensor, Metrics]:
        """Loss to minimise on the mini-batch ``x`` of shape ``(n, d)``, and metrics."""

    def state_dict(self) -> State | None:
        """What it remembers from step to step, e.g. chains; ``None`` if nothing."""
        return None

    def load_state_dict(self, state: State) -> None:
        """Go on with what :meth:`state_dict` gave."""
        del state  # of an objective that remembers nothing


def weigh(model: EBM, proposal: Proposal, x: Tensor, samples: Tensor) -> Weights:
    """Log-densities at the data and log-weights at the samples."""
    points, sizes = torch.cat([x, samples]), [len(x), len(samples)]
    if proposal is model.base:
        # Base and proposal cancel in the weights: log w = -E, no density to compute there.
        log_w_data, log_w = model.negative_energy(points).split(sizes)
        with torch.no_grad():
            log_q = proposal.log_prob(x)
        log_p_data = log_w_data + log_q
    else:
        with torch.no_grad():
            log_q = proposal.log_prob(points)
        log_p = model.log_unnormalized(points)
        log_p_data = log_p[: len(x)]
        log_w_data, log_w = (log_p - log_q).split(sizes)
    return Weights(log_p_data, log_w_data, log_w, model.log_norm)


def both_bounds(
    log_p: Tensor, log_w: Tensor, log_norm: Tensor, dim: int = 0
) -> tuple[Tensor, Tensor]:
    """``l_SNL`` and ``l_IS`` from the mean ``log p~`` of the data and log-weights along ``dim``."""
    log_z = F.log_mean_exp(log_w, dim)
    upper = log_p - log_z
    return upper - F.bound_gap(log_z - log_norm), upper


class WeightObjective(Objective):
    """An objective that is a function of log-weights alone: SNL, NCE, IS-ML, the Bregman family.

    Data and proposal samples go through the network in **one** forward pass.

    Args:
        value: what to maximise, a function of :class:`Weights`.
        label, learns_log_norm, linear: as in :class:`Objective`.
    """

    def __init__(
        self,
        value: Callable[[Weights], Tensor],
        label: str,
        *,
        learns_log_norm: bool = True,
        linear: bool = True,
    ) -> None:
        self.value, self.label = value, label
        self.learns_log_norm, self.linear = learns_log_norm, linear

    def loss(
        self, model: EBM, proposal: Proposal, x: Tensor, n_samples: int
    ) -> tuple[Tensor, Metrics]:
        """Loss and metrics on one mini-batch."""
        with torch.no_grad():
            samples = proposal.sample((n_samples,))
        return self.judge(weigh(model, proposal, x, samples))

    def judge(self, seen: Weights) -> tuple[Tensor, Metrics]:
        """Minus the value, and both bounds."""
        value = self.value(seen)
        with torch.no_grad():
            # l_SNL and l_IS from the numbers at hand; the ESS is left to validation, where more
            # samples make it meaningful.
            lower, upper = both_bounds(seen.log_p_data.mean(), seen.log_w, seen.log_norm)
        return -value, {"lower": lower, "upper": upper}


class Chunked(WeightObjective):
    """An objective evaluated in chunks of samples, with the gradient of the whole.

    A chunk's activations are not kept: where the gradient needs them the chunk runs again, with the
    random numbers it had. Values and gradient are those of the whole.

    Args:
        objective: a name, or an objective that is a function of weights.
        max_memory: bytes (below 1: share of the free memory) a chunk may take.

    Attributes:
        chunk_size: samples at a time; measured at the first step where it is ``None``.
    """

    capturable = False  # random states are put back from the host

    def __init__(self, objective: str | Objective, max_memory: float) -> None:
        inner = objective_named(objective)
        if not isinstance(inner, WeightObjective):
            raise ValueError(
                f"{type(inner).__name__} is no function of weights and cannot be chunked; use "
                "snl, nce, importance_ml, ranking_nce or the Bregman family"
            )
        super().__init__(
            inner.value, inner.label, learns_log_norm=inner.learns_log_norm, linear=inner.linear
        )
        self.max_memory = max_memory
        self.chunk_size: int | None = None

    def loss(
        self, model: EBM, proposal: Proposal, x: Tensor, n_samples: int
    ) -> tuple[Tensor, Metrics]:
        """Loss and metrics on one mini-batch, chunk by chunk."""
        if any(isinstance(m, _BatchNorm) and m.training for m in model.modules()):
            raise EnergyError(
                "batch normalisation depends on all rows of a pass: in chunks the energy would be "
                "another one. Train without max_memory, or normalise by nn.LayerNorm"
            )
        if self.chunk_size is None:
            self.chunk_size = chunk_size_for(model, proposal, self.max_memory)

        def weights_of(size: int, device: Tensor) -> Tensor:  # noqa: ARG001 whose state is kept
            with torch.no_grad():
                samples = proposal.sample((size,))
                log_q = proposal.log_prob(samples)
            return model.log_unnormalized(samples) - log_q

        size = self.chunk_size
        at_data = [
            checkpoint(model.log_unnormalized, rows, use_reentrant=False) for rows in x.split(size)
        ]
        sizes = [min(size, n_samples - start) for start in range(0, n_samples, size)]
        at_samples = [checkpoint(weights_of, n, x, use_reentrant=False) for n in sizes]
        with torch.no_grad():
            log_q = torch.cat([proposal.log_prob(rows) for rows in x.split(size)])
        log_p = torch.cat(at_data)
        return self.judge(Weights(log_p, log_p - log_q, torch.cat(at_samples), model.log_norm))


_WITHOUT_B = ("ranking_nce", "importance_ml")  # they have log Z_hat inside in its place
_OBJECTIVES: dict[str, Callable[[], Objective]] = {
    name: partial(
        WeightObjective,
        value,
        name,
        learns_log_norm=name not in _WITHOUT_B,
        linear=name not in _WITHOUT_B,
    )
    for name, value in F.VALUES.items()
}


def register_objective(name: str, factory: Callable[[], Objective]) -> None:
    """Make an objective known by ``name``; a name can be taken once."""
    if name in _OBJECTIVES:
        raise ValueError(f"an objective named {name!r} exists already")
    _OBJECTIVES[name] = factory


def objective_names() -> list[str]:
    """Names that ``fit(objective=...)`` understands."""
    return sorted(_OBJECTIVES)


def objective_named(objective: str | Objective) -> Objective:
    """An objective by name; objects pass through."""
    if isinstance(objective, Objective):
        return objective
    if objective not in _OBJECTIVES:
        raise ValueError(
            f"unknown objective {objective!r}; choose one of {objective_names()}, or derive your "
            "own from selfnorm.density.Objective"
        )
    return _OBJECTIVES[objective]()


class DensityTask(Task):
    """Training of an EBM; its proposal stays as it is, or learns in the same steps.

    Args:
        model: the EBM.
        proposal: any distribution; by default the base, with a heavy-tailed part where it is light.
        objective: a name, or an :class:`~selfnorm.density.Objective`.
        n_samples, n_val_samples: proposal samples per step, and of a validation.
        log_norm_lr_scale: learning rate of ``b`` in units of that of the energy.
        proposal_loss: trains a flow as proposal by this loss, too: see
            :class:`~selfnorm.distributions.FlowTask`.
    """

    def __init__(
        self,
        model: EBM,
        proposal: object,
        *,
        objective: str | Objective = "snl",
        n_samples: int = 1024,
        log_norm_lr_scale: float = LOG_NORM_LR_SCALE,
        n_val_samples: int = 16_384,
        proposal_loss: str | None = None,
    ) -> None:
        if not log_norm_lr_scale > 0:
            raise ValueError(f"log_norm_lr_scale must be positive, got {log_norm_lr_scale}")
        self.module = self.model = model
        self.objective = objective_named(objective)
        self.capturable = self.objective.capturable
        self.n_samples = n_samples
        self.log_norm_lr_scale = float(log_norm_lr_scale)
        self.n_val_samples = n_val_samples
        if proposal is None and model.base is not None:
            # samples of a Gaussian would not see an energy that lifts its tails
            proposal = Defensive(model.base) if model.base.light_tails else model.base
        if proposal is None:
            raise ProposalError(
                "fit needs a proposal: pass one fitted to the data, e.g. "
                "proposal=selfnorm.Defensive.fit_to(x_train), or give the model a base density"
            )
        self.proposal: Proposal = proposal_for(model, proposal)
        self.of_flow: FlowTask | None = None
        if proposal_loss is not None:
            flow = self.proposal
            if not isinstance(flow, Flow):
                raise ProposalError(
                    f"proposal_loss trains a Flow, not a {type(flow).__name__}: leave it out, or "
                    "give a Flow as proposal"
                )
            self.of_flow = FlowTask(flow, model=model, loss=proposal_loss, n_samples=n_samples)
            self.module = nn.ModuleDict({"model": model, "flow": flow})
        self._val_samples: tuple[Tensor, Tensor] | None = None

    def settings(self) -> State:
        """What a resumed run must share with the one it continues, beside the loop's options."""
        label = self.objective.label or type(self.objective).__name__
        return {
            "objective": label,
            "n_samples": self.n_samples,
            "log_norm_lr_scale": self.log_norm_lr_scale,
        }

    def witness(self, data: tuple[Tensor, ...]) -> Tensor:
        """``log p~`` and ``log q`` of the first rows: other distributions, other numbers."""
        x = data[0][:64]
        return torch.cat([self.model.log_unnormalized(x), self.proposal.log_prob(x)])

    def own_state(self) -> State | None:
        """What the objective remembers from step to step."""
        return self.objective.state_dict()

    def load_own_state(self, state: State) -> None:
        """Go on with what :meth:`own_state` gave."""
        self.objective.load_state_dict(state)

    def parameter_groups(self) -> list[ParameterGroup]:
        """The energy's parameters, ``b`` with a learning rate of its own, those of a flow."""
        b = self.model.log_norm
        rest = [p for p in self.model.parameters() if p is not b]
        groups: list[ParameterGroup] = [
            {"params": rest},
            {"params": [b], "lr_scale": self.log_norm_lr_scale, "weight_decay": 0.0},
        ]
        if self.of_flow is not None:
            groups.append({"params": list(self.of_flow.module.parameters())})
        return groups

    @torch.no_grad()
    def start(self, data: tuple[Tensor, ...]) -> None:
        """Check proposal and energy on the data, and set ``b`` to an estimate of ``log Z``."""
        x = data[0]
        if self.of_flow is not None:
            self.of_flow.start(data)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        if all(p is self.model.log_norm for p in trained):
            warnings.warn(
                "the energy has no parameter to train: only b is fitted. A network inside a "
                "function or lambda is not seen; make the energy a torch.nn.Module",
                SelfnormWarning,
                stacklevel=5,
            )
        parts = self.proposal.modules()
        raw = [part for part in parts if not bool(getattr(part, "fitted", True))]
        if raw:
            name = type(raw[0]).__name__
            warnings.warn(
                f"the proposal is a {name} that was not trained: its samples are not where the "
                f"data are. Train it first: selfnorm.fit(flow, x)",
                SelfnormWarning,
                stacklevel=5,
            )
        if self.proposal.dim != x.shape[1]:
            raise ProposalError(
                f"the proposal is over rows of {self.proposal.dim} numbers, the data have "
                f"{x.shape[1]} columns; fit it to the data, e.g. Gaussian.fit_to(x)"
            )
        refuse_unreached(self.proposal.log_prob(x), "rows", "use Defensive.fit_to(x)")
        probe = x[: min(len(x), 1024)]
        log_p = self.model.log_unnormalized(probe)
        if not bool(torch.isfinite(log_p).all()):
            raise EnergyError(
                f"the energy (or base) is not finite at {int((~torch.isfinite(log_p)).sum())} of "
                f"the first {len(probe)} rows; check its inputs' scale and its output"
            )
        chunks = log_weight_chunks(self.model, self.proposal, self.n_val_samples)
        log_w, log_q = map(torch.cat, zip(*chunks, strict=True))
        refuse_nan(log_q, "samples of its own")
        if bool(torch.isnan(log_w).any()):
            raise EnergyError(
                "the energy returns NaN at proposal samples; it must be defined wherever the "
                "proposal puts mass"
            )
        self.model.log_norm.copy_(F.log_mean_exp(log_w.double()))

    def loss(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, Metrics]:
        """The objective on one mini-batch with fresh proposal samples."""
        loss, metrics = self.objective.loss(self.model, self.proposal, batch[0], self.n_samples)
        if self.of_flow is None:
            return loss, metrics
        of_flow, _ = self.of_flow.loss(batch)
        return loss + of_flow, {**metrics, "flow": -of_flow.detach()}

    @torch.no_grad()
    def validate(self, data: tuple[Tensor, ...]) -> dict[str, float]:
        """Held-out bounds on a set of proposal samples that stays the same over the run.

        The score is the lower bound: ``b`` has followed *all* samples seen in training, so a state
        whose mass the validation samples miss shows as a gap and is not chosen. Objectives that
        do not learn ``b`` are scored by the upper bound.
        """
        samples, log_q = self.validation_samples()
        log_w = self.model.log_unnormalized(samples) - log_q
        log_p = self.model.log_unnormalized(data[0]).mean()
        lower, upper = both_bounds(log_p, log_w, self.model.log_norm)
        return {
            "score": float(lower if self.objective.learns_log_norm else upper),
            "lower": float(lower),
            "upper": float(upper),
            "ess": float(F.ess(log_w)),
        }

    def validation_samples(self) -> tuple[Tensor, Tensor]:
        """Samples for ``Z`` and their ``log q``, the same at every look of a run."""
        if self._val_samples is None or self.proposal.trainable:
            with seeded(20_231_106, self.model.device):
                samples = self.proposal.sample((self.n_val_samples,))
            self._val_samples = samples, self.proposal.log_prob(samples)
        return self._val_samples

    def finish(self, data: tuple[Tensor, ...]) -> dict[str, float]:  # noqa: ARG002
        """``b <- log Z_hat`` on fresh samples: the closed-form maximiser of SNL in ``b``."""
        learned = float(self.model.log_norm.detach())
        log_z, error, n_used = F.adaptive_log_mean(
            partial(draw_log_weights, self.model, self.proposal)
        )
        if torch.isfinite(log_z):
            with torch.no_grad():
                self.model.log_norm.fill_(log_z)
        return {
            "log_norm": float(log_z),
            "log_norm_se": float(error),
            "log_norm_learned": learned,
            "log_norm_samples": n_used,
        }


def usual(options: TrainingOptions, *, judged: bool) -> TrainingOptions:
    """How an EBM is trained where nothing else is said; ``judged``: by held-out rows."""
    wishes: dict[str, Any] = dict(_USUAL)
    if options.max_steps is None and options.max_epochs is None:
        wishes |= _LENGTH
    elif options.max_epochs is None:
        wishes["max_epochs"] = 10**6
    if judged:
        wishes["patience"] = _PATIENCE
    return options.filled(**wishes)


def make_task(
    model: nn.Module,
    *,
    proposal: object,
    objective: str | Objective,
    n_samples: int,
    task_options: TaskOptions | None,
    caller: str,
) -> Task:
    """The model's own training task, or that of a density."""
    n_samples = whole_number("n_samples", n_samples)
    kind = type(model).__name__
    own: Callable[..., Task] | None = getattr(model, "training_task", None)
    if own is not None:
        given = {} if proposal is None else {"proposal": proposal}
        given |= task_options or {}
        try:
            return own(objective=objective, n_samples=n_samples, **given)
        except TypeError as error:
            if "unexpected keyword" not in str(error):
                raise
            raise TypeError(f"a {kind} is trained without {sorted(given)}: {error}") from error
    if not isinstance(model, EBM):
        raise TypeError(
            f"{caller}() cannot train a {kind}: wrap the energy as selfnorm.EBM(energy), or give "
            "the model a training_task() method"
        )
    of_task = checked_options(
        *(caller, task_options, "an EBM"),
        log_norm_lr_scale=LOG_NORM_LR_SCALE,
        max_memory=None,
        proposal_loss=None,
    )
    max_memory = of_task.pop("max_memory")
    if max_memory is not None:
        objective = Chunked(objective, max_memory=max_memory)
    return DensityTask(model, proposal, objective=objective, n_samples=n_samples, **of_task)


def checked_options(
    caller: str, given: TaskOptions | None, whose: str, **defaults: object
) -> TaskOptions:
    """Task options with the defaults of those not given, or an error that names the others.

    Example:
        >>> checked_options("fit", {"b": 1}, "an EBM", a=0)
        Traceback (most recent call last):
        TypeError: fit() got task_options ['b']; an EBM takes ['a']
    """
    other = sorted((given or {}).keys() - defaults.keys())
    if other:
        raise TypeError(f"{caller}() got task_options {other}; {whose} takes {sorted(defaults)}")
    return {**defaults, **(given or {})}


def checked_data(
    model: nn.Module, x_train: object, val_data: object
) -> tuple[Data, tuple[Tensor, ...] | None]:
    """Training and held-out data, a source or tuples; those of a density as one checked table."""
    data = x_train if isinstance(x_train, tuple | Source) else (x_train,)
    held_out = val_data if val_data is None or isinstance(val_data, tuple) else (val_data,)
    if not isinstance(model, EBM):
        return data, held_out
    width = None
    if isinstance(data, tuple):
        data = (_one_table(data, "x_train", dtype=model.dtype),)
        width = data[0].shape[1]
    if held_out is not None:
        checks = {"width": width, "minimum": 1, "dtype": model.dtype}
        held_out = (_one_table(held_out, "val_data", **checks),)
    return data, held_out


def _one_table(data: tuple[object, ...], name: str, **checks: Any) -> Tensor:
    """A density has one table: weights or labels beside it would be ignored in silence."""
    if len(data) != 1:
        raise DataError(
            f"{name} is a tuple of {len(data)} parts, an EBM is trained on one table: pass that "
            "alone (rows with weights can be drawn with torch.multinomial; labels need a "
            "ConditionalEBM)"
        )
    return check_rows(data[0], name, **checks)
