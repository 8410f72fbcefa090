"""Several proposals of one kind side by side, sampled and evaluated together.

A stack of ``K`` proposals maps ``n`` to ``(K, n, d)`` samples and ``(K, n, d)`` rows to ``(K, n)``
log-densities, member ``k`` by its own law. Equal proposals are kept once; proposals of this library
with the same shapes are computed as one batch; anything else is asked member by member.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from selfnorm.distributions import Defensive, Gaussian, GaussianMixture, Proposal, StudentT, Uniform

__all__ = ["ProposalStack", "stack_proposals"]

_LOG_2PI = math.log(2 * math.pi)


class ProposalStack(nn.Module):
    """``K`` laws over rows; ``shared`` holds the one law where they are all the same."""

    def __init__(self, shared: Proposal | None = None) -> None:
        super().__init__()
        self.shared = shared

    def sample(self, n: int) -> Tensor:
        """Draw ``(K, n, d)``, independent between members."""
        raise TypeError(f"{type(self).__name__} cannot draw {n} samples")

    def log_prob(self, x: Tensor) -> Tensor:
        """``(K, n, d) -> (K, n)``."""
        raise TypeError(f"{type(self).__name__} has no density for {tuple(x.shape)}")


def stack_proposals(proposals: Sequence[Proposal]) -> ProposalStack:
    """One stack of the given proposals.

    Example:
        >>> q = [Gaussian(torch.zeros(2), scale=s) for s in (1.0, 3.0)]
        >>> stack = stack_proposals(q)
        >>> x = torch.randn(2, 5, 2)
        >>> torch.allclose(stack.log_prob(x)[1], q[1].log_prob(x[1]))
        True
        >>> stack.sample(7).shape
        torch.Size([2, 7, 2])
    """
    first = proposals[0]
    if all(_same(first, q) for q in proposals[1:]):
        return _Shared(first, len(proposals))
    for kind, stack in _STACKS.items():
        if all(type(q) is kind for q in proposals) and _same_shapes(proposals):
            return stack(proposals)
    return _OneByOne(proposals)


class _Shared(ProposalStack):
    def __init__(self, proposal: Proposal, members: int) -> None:
        super().__init__(proposal)
        self.members = members

    def sample(self, n: int) -> Tensor:
        assert self.shared is not None
        return self.shared.sample((self.members, n))

    def log_prob(self, x: Tensor) -> Tensor:
        assert self.shared is not None
        return self.shared.log_prob(x)


class _OneByOne(ProposalStack):
    def __init__(self, proposals: Sequence[Proposal]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(proposals)

    def sample(self, n: int) -> Tensor:
        return torch.stack([_proposal(q).sample((n,)) for q in self.parts])

    def log_prob(self, x: Tensor) -> Tensor:
        pairs = zip(self.parts, x, strict=True)
        return torch.stack([_proposal(q).log_prob(rows) for q, rows in pairs])


class _Gaussians(ProposalStack):
    loc: Tensor
    scale_tril: Tensor
    whiten: Tensor
    const: Tensor

    def __init__(self, proposals: Sequence[Proposal]) -> None:
        super().__init__()
        _stack_buffers(self, proposals, ("loc", "scale_tril", "whiten"))
        const = torch.stack([q.get_buffer("log_scale_const") for q in proposals])
        self.register_buffer("const", const[:, None], persistent=False)

    def _noise(self, n: int) -> Tensor:
        members, dim = self.loc.shape
        return torch.randn(members, n, dim, device=self.loc.device, dtype=self.loc.dtype)

    def sample(self, n: int) -> Tensor:
        return self.loc[:, None] + self._noise(n) @ self.scale_tril.mT

    def _distance(self, x: Tensor) -> Tensor:
        return ((x - self.loc[:, None]) @ self.whiten.mT).square().sum(-1)

    def log_prob(self, x: Tensor) -> Tensor:
        return self.const - 0.5 * (self._distance(x) + self.loc.shape[1] * _LOG_2PI)


class _StudentTs(_Gaussians):
    df: Tensor

    def __init__(self, proposals: Sequence[Proposal]) -> None:
        super().__init__(proposals)
        df = torch.stack([q.get_buffer("df") for q in proposals])
        gammas = torch.tensor([q._log_const for q in proposals], device=df.device, dtype=df.dtype)
        self.register_buffer("df", df[:, None], persistent=False)
        self.const = self.const + gammas[:, None]

    def sample(self, n: int) -> Tensor:
        half_df = (self.df / 2).expand(-1, n)
        mixing = (torch._standard_gamma(half_df) / half_df).clamp_min(1e-30)
        return self.loc[:, None] + (self._noise(n) / mixing.sqrt()[..., None]) @ self.scale_tril.mT

    def log_prob(self, x: Tensor) -> Tensor:
        tail = torch.log1p(self._distance(x) / self.df)
        return self.const - 0.5 * (self.df + self.loc.shape[1]) * tail


class _Uniforms(ProposalStack):
    low: Tensor
    high: Tensor

    def __init__(self, proposals: Sequence[Proposal]) -> None:
        super().__init__()
        _stack_buffers(self, proposals, ("low", "high"))

    def sample(self, n: int) -> Tensor:
        members, dim = self.low.shape
        u = torch.rand(members, n, dim, device=self.low.device, dtype=self.low.dtype)
        return self.low[:, None] + (self.high - self.low)[:, None] * u

    def log_prob(self, x: Tensor) -> Tensor:
        inside = ((x >= self.low[:, None]) & (x <= self.high[:, None])).all(-1)
        log_density = -(self.high - self.low).log().sum(-1, keepdim=True)
        return torch.where(inside, log_density, -math.inf)


class _Mixtures(ProposalStack):
    weights: Tensor
    means: Tensor
    scale_trils: Tensor
    whiten: Tensor
    log_consts: Tensor

    def __init__(self, proposals: Sequence[Proposal]) -> None:
        super().__init__()
        names = ("weights", "means", "scale_trils", "whiten", "log_consts")
        _stack_buffers(self, proposals, names)

    def sample(self, n: int) -> Tensor:
        members, components, dim = self.means.shape
        u = torch.rand(members, n, device=self.means.device, dtype=self.means.dtype)
        which = torch.searchsorted(self.weights.cumsum(1), u).clamp_max(components - 1)
        # Components of all members in one list: a single index reaches each of them.
        which = which + components * torch.arange(members, device=u.device)[:, None]
        noise = torch.randn(members, n, dim, 1, device=u.device, dtype=u.dtype)
        spread = self.scale_trils.flatten(0, 1)[which] @ noise
        return self.means.flatten(0, 1)[which] + spread.squeeze(-1)

    def log_prob(self, x: Tensor) -> Tensor:
        centred = x.unsqueeze(-2) - self.means[:, None]
        z = torch.einsum("kcij,kmcj->kmci", self.whiten, centred)
        return torch.logsumexp(self.log_consts[:, None] - 0.5 * z.square().sum(-1), -1)


class _Defensives(ProposalStack):
    weight: Tensor

    def __init__(self, proposals: Sequence[Proposal]) -> None:
        super().__init__()
        parts: list[Defensive] = [q for q in proposals if isinstance(q, Defensive)]
        self.sharp = stack_proposals([q.sharp for q in parts])
        self.heavy = stack_proposals([q.heavy for q in parts])
        place = next(parts[0].heavy.buffers(), torch.zeros(())).device
        weight = torch.tensor([[q.weight] for q in parts], device=place)
        self.register_buffer("weight", weight, persistent=False)

    def sample(self, n: int) -> Tensor:
        sharp, heavy = self.sharp.sample(n), self.heavy.sample(n)
        choose_heavy = torch.rand(*sharp.shape[:2], device=sharp.device) < self.weight
        return torch.where(choose_heavy[..., None], heavy, sharp)

    def log_prob(self, x: Tensor) -> Tensor:
        return torch.logaddexp(
            self.sharp.log_prob(x) + torch.log1p(-self.weight),
            self.heavy.log_prob(x) + self.weight.log(),
        )


_STACKS: dict[type[Proposal], Callable[[Sequence[Proposal]], ProposalStack]] = {
    Gaussian: _Gaussians,
    StudentT: _StudentTs,
    Uniform: _Uniforms,
    GaussianMixture: _Mixtures,
    Defensive: _Defensives,
}


def _proposal(module: nn.Module) -> Proposal:
    assert isinstance(module, Proposal)
    return module


def _stack_buffers(stack: nn.Module, proposals: Sequence[Proposal], names: Sequence[str]) -> None:
    for name in names:
        values = torch.stack([q.get_buffer(name) for q in proposals])
        stack.register_buffer(name, values, persistent=False)


def _same_shapes(proposals: Sequence[Proposal]) -> bool:
    if isinstance(proposals[0], Defensive):
        return True
    shapes = [[(n, b.shape, b.dtype) for n, b in q.named_buffers()] for q in proposals]
    return all(s == shapes[0] for s in shapes)


def _same(a: Proposal, b: Proposal) -> bool:
    """Whether two proposals are one object, or the same law of this library."""
    if a is b:
        return True
    if type(a) is not type(b) or type(a) not in _STACKS:
        return False
    if isinstance(a, Defensive) and isinstance(b, Defensive):
        return a.weight == b.weight and _same(a.sharp, b.sharp) and _same(a.heavy, b.heavy)
    mine, other = dict(a.named_buffers()), dict(b.named_buffers())
    return all(
        mine[n].shape == other[n].shape and torch.equal(mine[n], other[n].to(mine[n].device))
        for n in mine
    )
