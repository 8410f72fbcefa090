"""Objectives by name: thin callers of :mod:`selfnorm.functional`, used by :func:`selfnorm.fit`.

An objective turns (model, proposal, mini-batch, number of samples) into one loss to minimise and a
few detached metrics. New ones are added with :func:`register`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from selfnorm import functional as F
from selfnorm.density.model import EBM
from selfnorm.distributions import Proposal
from selfnorm.errors import DataError

__all__ = [
    "Objective",
    "WeightObjective",
    "available",
    "column_spread",
    "draw_points",
    "get",
    "label",
    "register",
]

Metrics = dict[str, Tensor]


class Objective(Protocol):
    """What :func:`selfnorm.fit` asks of an objective."""

    learns_log_norm: bool

    def loss(
        self, model: EBM, proposal: Proposal, x: Tensor, n_samples: int
    ) -> tuple[Tensor, Metrics]:
        """Loss to minimise on the mini-batch ``x`` of shape ``(n, d)``, and metrics."""
        ...


class Weights(NamedTuple):
    """All that a weight-based objective sees of a mini-batch (names as in ``functional``).

    ``log_z`` is ``log_mean_exp(log_w)``, computed once; the mean weight is all that SNL needs.
    """

    log_p_data: Tensor
    log_w_data: Tensor
    log_w: Tensor
    log_z: Tensor
    log_norm: Tensor


class WeightObjective:
    """An objective that is a function of log-weights alone: SNL, NCE, IS-ML, the Bregman family.

    Data and proposal samples go through the network in **one** forward pass.
    """

    def __init__(
        self,
        value: Callable[[Weights], Tensor],
        *,
        learns_log_norm: bool,
        needs_proposal_at_data: bool,
        linear: bool = True,
    ) -> None:
        self.value = value
        # Linear in per-sample terms: means over ranks and accumulation steps are then exact.
        self.linear = linear
        self.learns_log_norm = learns_log_norm
        self.needs_proposal_at_data = needs_proposal_at_data

    def loss(
        self,
        model: EBM,
        proposal: Proposal,
        x: Tensor,
        n_samples: int,
        log_base: Tensor | None = None,
    ) -> tuple[Tensor, Metrics]:
        """Loss and metrics on one mini-batch.

        ``log_base`` may bring ``log d(x_i)``, ``(n,)``, where the base is the proposal and its
        density at the data is known already.
        """
        points = draw_points(proposal, x, n_samples)
        return self.loss_at(model, proposal, points, n_samples, log_base)

    def loss_at(
        self,
        model: EBM,
        proposal: Proposal,
        points: Tensor,
        n_samples: int,
        log_base: Tensor | None = None,
    ) -> tuple[Tensor, Metrics]:
        """:meth:`loss` at points of :func:`draw_points`: data rows, then ``n_samples`` samples."""
        n = len(points) - n_samples
        if proposal is model.base:
            # Base and proposal cancel in the weights: log w = -E, no density to compute there.
            log_w = model.negative_energy(points)
            with torch.no_grad():
                log_q_data = proposal.log_prob(points[:n]) if log_base is None else log_base
            log_w_data, log_w = log_w.split([n, n_samples])
            log_p_data = log_w_data + log_q_data
        else:
            with torch.no_grad():
                asked = points if self.needs_proposal_at_data else points[n:]
                log_q = proposal.log_prob(asked)
                log_q_data = log_q[:n] if self.needs_proposal_at_data else points.new_zeros(())
            log_p = model.log_unnormalized(points)
            log_p_data, log_w = log_p.split([n, n_samples])
            log_w_data, log_w = log_p_data - log_q_data, log_w - log_q[-n_samples:]
        log_z = F.log_mean_exp(log_w)
        value = self.value(Weights(log_p_data, log_w_data, log_w, log_z, model.log_norm))
        with torch.no_grad():
            # l_SNL and l_IS from the numbers at hand; the ESS is left to validation, where more
            # samples make it meaningful.
            upper = log_p_data.mean() - log_z
            lower = upper - F.bound_gap(log_z - model.log_norm)
        return -value, {"lower": lower, "upper": upper}


@torch.no_grad()
def draw_points(proposal: Proposal, x: Tensor, n_samples: int) -> Tensor:
    """Mini-batch and fresh samples in one table: ``(n + n_samples, d)``."""
    return torch.cat([x, proposal.sample((n_samples,))])


def column_spread(x: Tensor) -> Tensor:
    """Standard deviation of each column of a mini-batch, ``(n, d) -> (d,)``, never zero.

    Example:
        >>> column_spread(torch.tensor([[0.0, 1.0], [2.0, 1.0]]))
        tensor([1.4142e+00, 1.0000e-06])
    """
    if len(x) < 2:
        raise DataError(
            "this objective measures the columns' spread in every mini-batch, which takes two rows "
            "or more: raise batch_size"
        )
    return x.std(0).clamp_min(1e-6)


def _snl(w: Weights) -> Tensor:
    return F.snl(w.log_p_data, w.log_w, w.log_norm)


def _nce(w: Weights) -> Tensor:
    return F.nce(w.log_w_data, w.log_w, w.log_norm)


def _ranking(w: Weights) -> Tensor:
    return F.ranking_nce(w.log_w_data, w.log_w)


def _importance_ml(w: Weights) -> Tensor:
    return F.importance_ml(w.log_p_data, w.log_z.unsqueeze(0))


def _bregman(family: str) -> Callable[[Weights], Tensor]:
    def value(w: Weights) -> Tensor:
        return F.bregman(w.log_w_data, w.log_w, w.log_norm, family=family)

    value.__name__ = f"bregman_{family}"
    return value


_FACTORIES: dict[str, Callable[[], Objective]] = {}


def register(name: str, factory: Callable[[], Objective]) -> None:
    """Make an objective known by ``name``; a name can be taken once."""
    if name in _FACTORIES:
        raise ValueError(f"an objective named {name!r} exists already")
    _FACTORIES[name] = factory


def available() -> list[str]:
    """Names that ``fit(objective=...)`` understands.

    Example:
        >>> "snl" in available()
        True
    """
    return sorted(_FACTORIES)


def get(objective: str | Objective) -> Objective:
    """An objective by name; objects pass through."""
    if not isinstance(objective, str):
        return objective
    if objective not in _FACTORIES:
        raise ValueError(f"unknown objective {objective!r}; choose one of {available()}")
    return _FACTORIES[objective]()


def label(objective: Objective) -> str:
    """What an objective is, in a word: a run is resumed only with the one it began with.

    Example:
        >>> label(get("nce"))
        'nce'
    """
    value = getattr(objective, "value", None)
    named = getattr(objective, "label", None) or getattr(value, "__name__", None)
    return str(named or type(objective).__name__).strip("_")


def _weight_objective(
    value: Callable[[Weights], Tensor],
    learns_log_norm: bool,
    needs_proposal_at_data: bool,
    linear: bool = True,
) -> Callable[[], Objective]:
    return lambda: WeightObjective(
        value,
        learns_log_norm=learns_log_norm,
        needs_proposal_at_data=needs_proposal_at_data,
        linear=linear,
    )


register("snl", _weight_objective(_snl, True, False))
register("nce", _weight_objective(_nce, True, True))
register("ranking_nce", _weight_objective(_ranking, False, True, linear=False))
register("importance_ml", _weight_objective(_importance_ml, False, False, linear=False))
for _family in ("lsif", "reverse", "exponential"):
    register(f"bregman_{_family}", _weight_objective(_bregman(_family), True, True))
