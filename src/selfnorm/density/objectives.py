"""What an EBM is trained by: SNL and its kin as functions of log-weights, by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from selfnorm import functional as F
from selfnorm.density.model import EBM
from selfnorm.distributions import Proposal
from selfnorm.errors import EnergyError
from selfnorm.evaluation import chunk_size_for
from selfnorm.functional import Weights
from selfnorm.training import State

Metrics = dict[str, Tensor]


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
        chunk_size: samples at a time; or
        max_memory: bytes (below 1: share of the free memory) a chunk may take.
    """

    capturable = False  # random states are put back from the host

    def __init__(
        self,
        objective: str | Objective = "snl",
        *,
        chunk_size: int | None = None,
        max_memory: float | None = None,
    ) -> None:
        inner = get(objective)
        if not isinstance(inner, WeightObjective):
            raise ValueError(
                f"{type(inner).__name__} is no function of weights and cannot be chunked; use "
                "snl, nce, importance_ml, ranking_nce or the Bregman family"
            )
        if (chunk_size is None) == (max_memory is None):
            raise ValueError("give exactly one of chunk_size and max_memory")
        if chunk_size is not None and chunk_size < 1:
            raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
        super().__init__(
            inner.value, inner.label, learns_log_norm=inner.learns_log_norm, linear=inner.linear
        )
        self.chunk_size, self.max_memory = chunk_size, max_memory

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
            assert self.max_memory is not None
            self.chunk_size = chunk_size_for(model, proposal, self.max_memory)

        def log_weights(size: int, device: Tensor) -> Tensor:  # noqa: ARG001 whose state is kept
            with torch.no_grad():
                samples = proposal.sample((size,))
                log_q = proposal.log_prob(samples)
            return model.log_unnormalized(samples) - log_q

        size = self.chunk_size
        at_data = [
            checkpoint(model.log_unnormalized, rows, use_reentrant=False) for rows in x.split(size)
        ]
        sizes = [min(size, n_samples - start) for start in range(0, n_samples, size)]
        at_samples = [checkpoint(log_weights, n, x, use_reentrant=False) for n in sizes]
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


def register(name: str, factory: Callable[[], Objective]) -> None:
    """Make an objective known by ``name``; a name can be taken once."""
    if name in _OBJECTIVES:
        raise ValueError(f"an objective named {name!r} exists already")
    _OBJECTIVES[name] = factory


def available() -> list[str]:
    """Names that ``fit(objective=...)`` understands."""
    return sorted(_OBJECTIVES)


def get(objective: str | Objective) -> Objective:
    """An objective by name; objects pass through."""
    if isinstance(objective, Objective):
        return objective
    if objective not in _OBJECTIVES:
        raise ValueError(
            f"unknown objective {objective!r}; choose one of {available()}, or derive your own "
            "from selfnorm.density.Objective"
        )
    return _OBJECTIVES[objective]()
