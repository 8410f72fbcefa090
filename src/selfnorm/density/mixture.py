"""An ensemble of EBMs as one density: the mixture of its members."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from selfnorm._context import SeedLike, seeded
from selfnorm.density.model import EBM
from selfnorm.errors import DataError

__all__ = ["Ensemble"]


class _MixtureEnergy(nn.Module):
    def __init__(self, members: Sequence[EBM]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, x: Tensor) -> Tensor:
        log_p = torch.stack([member(x) for member in self.members])
        return math.log(len(self.members)) - torch.logsumexp(log_p, 0)


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
        super().__init__(_MixtureEnergy(members))
        self.log_norm.requires_grad_(False)
        self.to(members[0].device)

    @property
    def members(self) -> list[EBM]:
        """The models the mixture is made of."""
        assert isinstance(self.energy, _MixtureEnergy)
        return [m for m in self.energy.members if isinstance(m, EBM)]

    def sample(
        self,
        n: int,
        *,
        proposal: Any = None,
        method: str = "sir",
        generator: SeedLike = None,
        **options: Any,
    ) -> Tensor:
        """Draw ``(n, dim)`` rows: a random member for each row, then a row of that member."""
        with seeded(generator, self.device):
            which = torch.randint(len(self.members), (n,), device=self.device)
            counts = torch.bincount(which, minlength=len(self.members)).tolist()
            drawn = [
                member.sample(count, proposal=proposal, method=method, **options)
                for member, count in zip(self.members, counts, strict=True)
                if count
            ]
            return torch.cat(drawn)[torch.randperm(n, device=self.device)]
