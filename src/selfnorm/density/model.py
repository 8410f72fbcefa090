"""The energy-based model: energy, optional base density, learned log-normaliser; mixtures."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from selfnorm._context import SeedLike, evaluating, seeded
from selfnorm._inputs import as_rows
from selfnorm._saved import saved
from selfnorm.distributions import Proposal, as_proposal, proposal_for
from selfnorm.errors import DataError, EnergyError
from selfnorm.sampling import draw


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
