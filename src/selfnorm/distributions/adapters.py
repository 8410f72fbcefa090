"""Let any distribution serve as proposal or base: torch.distributions, zuko, or your own object."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Independent

from selfnorm._context import seeded
from selfnorm.distributions.proposals import Proposal
from selfnorm.errors import ProposalError

__all__ = ["as_proposal", "proposal_for"]


def as_proposal(q: Any, dim: int | None = None) -> Proposal:
    """Adapt ``q`` to the :class:`~selfnorm.distributions.proposals.Proposal` interface.

    Accepts a proposal of this library, any ``torch.distributions.Distribution`` (scalar ones become
    one-column ones, batched ones independent columns), a lazy distribution (a module whose call
    without arguments returns a distribution, as in zuko), or any object with ``sample(shape)`` and
    ``log_prob(x)``.

    Example:
        >>> q = as_proposal(torch.distributions.Exponential(torch.tensor([1.0, 2.0])))
        >>> q.sample((3,)).shape, q.log_prob(torch.tensor([-1.0, 1.0]))
        (torch.Size([3, 2]), tensor(-inf))
    """
    if isinstance(q, Proposal):
        proposal: Proposal = q
    elif isinstance(q, Distribution):
        proposal = _TorchProposal(q)
    elif hasattr(q, "sample") and hasattr(q, "log_prob"):
        proposal = _DuckProposal(q)
    elif isinstance(q, nn.Module):
        proposal = _LazyProposal(q)
    else:
        raise ProposalError(
            f"{type(q).__name__} cannot serve as a proposal: it needs sample(shape) and "
            "log_prob(x), or to be a torch.distributions.Distribution"
        )
    if dim is not None and proposal.dim != dim:
        raise ProposalError(
            f"the proposal is over rows of {proposal.dim} numbers, the data have {dim} columns; "
            f"fit it to the data (e.g. Gaussian.fit_to(x)) or give it event shape ({dim},)"
        )
    return proposal


def proposal_for(model: Any, q: Any, dim: int | None = None) -> Proposal:
    """:func:`as_proposal`, on the model's device and in the floating-point type of its parameters.

    A proposal with tensors of its own is moved in place, as ``nn.Module.to`` does.

    Example:
        >>> import selfnorm as sn
        >>> q = sn.Uniform(torch.zeros(1).double(), torch.ones(1).double())
        >>> proposal_for(sn.EBM(sn.MLP(1)), q).sample((2,)).dtype
        torch.float32
    """
    return as_proposal(q, dim).to(model.device, getattr(model, "dtype", None))


class _Foreign(Proposal):
    """A law that ``nn.Module.to`` does not reach: its samples take the type asked for there."""

    kind: Tensor

    def _take_kind_of(self, drawn: Tensor) -> None:
        self._own = drawn.dtype if drawn.is_floating_point() else torch.float32
        self.register_buffer("kind", torch.zeros((), dtype=self._own), persistent=False)

    def _in_own_kind(self, x: Tensor) -> Tensor:
        """Rows as wide as the law's own numbers: a flow in float64 asks for such rows."""
        return x.to(torch.promote_types(x.dtype, self._own))


class _TorchProposal(_Foreign):
    def __init__(self, distribution: Distribution) -> None:
        super().__init__()
        if not distribution.event_shape and not distribution.batch_shape:
            distribution = distribution.expand(torch.Size([1]))
        if len(distribution.batch_shape) == 1 and not distribution.event_shape:
            distribution = Independent(distribution, 1)
        if distribution.batch_shape or len(distribution.event_shape) != 1:
            raise ProposalError(
                "a proposal must be one distribution over rows: got batch shape "
                f"{tuple(distribution.batch_shape)} and event shape "
                f"{tuple(distribution.event_shape)}"
            )
        self.distribution = distribution
        self.dim = distribution.event_shape[0]
        with seeded(0):
            self._take_kind_of(distribution.sample())

    def sample(self, shape: Sequence[int] = ()) -> Tensor:
        return self.distribution.sample(torch.Size(shape)).to(self.kind.dtype)

    def log_prob(self, x: Tensor) -> Tensor:
        return _log_prob_with_support(self.distribution, self._in_own_kind(x)).to(x.dtype)


class _LazyProposal(Proposal):
    def __init__(self, lazy: nn.Module) -> None:
        super().__init__()
        self.lazy = lazy
        distribution = lazy()
        if not isinstance(distribution, Distribution) or len(distribution.event_shape) != 1:
            raise ProposalError(
                f"calling {type(lazy).__name__}() did not return a distribution over rows; "
                "pass the distribution itself"
            )
        self.dim = distribution.event_shape[0]

    def sample(self, shape: Sequence[int] = ()) -> Tensor:
        with torch.no_grad():
            drawn: Tensor = self.lazy().sample(torch.Size(shape))
        return drawn

    def log_prob(self, x: Tensor) -> Tensor:
        result: Tensor = self.lazy().log_prob(x)
        return result


class _DuckProposal(_Foreign):
    """Any object with sample and log_prob; its first sample tells width and type."""

    def __init__(self, q: Any) -> None:
        super().__init__()
        self.q = q
        first = torch.as_tensor(q.sample((1,)))
        self.dim = int(first.reshape(1, -1).shape[-1])
        self._take_kind_of(first)

    def sample(self, shape: Sequence[int] = ()) -> Tensor:
        drawn = torch.as_tensor(self.q.sample(torch.Size(shape))).to(self.kind.dtype)
        return drawn.reshape(*shape, self.dim)

    def log_prob(self, x: Tensor) -> Tensor:
        log_q = torch.as_tensor(self.q.log_prob(self._in_own_kind(x)))
        return log_q.to(x.dtype).reshape(x.shape[:-1])


def _log_prob_with_support(distribution: Distribution, x: Tensor) -> Tensor:
    """Log-density with ``-inf`` outside the support, where torch would raise or extrapolate."""
    try:
        support = distribution.support
    except NotImplementedError:  # not said, e.g. by zuko's flows: everywhere
        support = None
    if support is None:
        return distribution.log_prob(x)
    inside = support.check(x)
    if inside.dim() == x.dim():
        inside = inside.all(-1)
    if bool(inside.all()):
        return distribution.log_prob(x)
    filler = distribution.sample()
    safe = torch.where(inside.unsqueeze(-1), x, filler)
    return torch.where(inside, distribution.log_prob(safe), -math.inf)
