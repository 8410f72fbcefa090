"""Defensive mixtures: keep a sharp proposal, lose its blind spots.

:func:`mix_log_probs` and :func:`mix_samples` are the whole of it, for densities of any kind (one
per input, a stack of them); :class:`Defensive` is the proposal made of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from selfnorm._context import alone, seeded
from selfnorm._saved import saved
from selfnorm.distributions.proposals import (
    GaussianMixture,
    LabelDistribution,
    Proposal,
    StudentT,
    as_proposal,
)
from selfnorm.errors import ProposalError


def mix_log_probs(sharp: Tensor, broad: Tensor, weight: Tensor | float) -> Tensor:
    """``log((1 - weight) q + weight h)`` from ``log q`` and ``log h``; ``weight`` broadcasts.

    Example:
        >>> mix_log_probs(torch.tensor([0.0, -torch.inf]), torch.zeros(2), 0.5).exp()
        tensor([1.0000, 0.5000])
    """
    if isinstance(weight, Tensor):
        return torch.logaddexp(sharp + torch.log1p(-weight), broad + weight.log())
    return torch.logaddexp(sharp + math.log1p(-weight), broad + math.log(weight))


def mix_samples(sharp: Tensor, broad: Tensor, weight: Tensor | float) -> Tensor:
    """Of two samples ``(*shape, d)`` the broad one with chance ``weight``, row by row.

    Both parts are drawn in full and one is chosen: shapes never depend on random numbers, so that
    a training step can be captured as a CUDA graph.

    Example:
        >>> mix_samples(torch.zeros(3, 2), torch.ones(3, 2), 1.0)[0]
        tensor([1., 1.])
    """
    u = torch.rand(sharp.shape[:-1], device=sharp.device, dtype=torch.float32)
    return torch.where((u < weight).unsqueeze(-1), broad, sharp)


@saved("sharp", "heavy", "weight", build=lambda kind, **parts: kind(*parts.values()))
class Defensive(Proposal):
    r"""``(1 - weight) q + weight h``: a sharp proposal ``q`` with a heavy-tailed one mixed in.

    Wherever ``q`` is too light, ``h`` bounds the importance weights by ``p / (weight h)``; where
    ``q`` is good they grow by at most ``1 / (1 - weight)``.

    Args:
        proposal: the sharp part.
        heavy: the heavy-tailed part; by default a Student-t (3 degrees of freedom) with 1.5 times
            the scatter scale of ``proposal``, measured on its samples.
        weight: share of ``heavy``.
        stratified: draw exactly the share ``weight`` of the rows from ``heavy``, and draw them
            first: less noise, but the rows are in order. By default each row is chosen by chance.

    Example:
        >>> from selfnorm.distributions.proposals import Gaussian
        >>> q = Defensive(Gaussian(torch.zeros(2), scale=1.0), weight=0.2)
        >>> bool(q.log_prob(torch.full((2,), 30.0)) > -25)
        True
    """

    def __init__(
        self,
        proposal: object,
        heavy: object = None,
        weight: float = 0.2,
        *,
        stratified: bool = False,
    ) -> None:
        super().__init__()
        if not 0 < weight < 1:
            raise ProposalError(f"weight must lie strictly between 0 and 1, got {weight}")
        sharp = as_proposal(proposal)
        if heavy is None:
            with torch.no_grad(), alone():
                # The device is still unknown: this one row must not move the stream of any GPU.
                gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
                with seeded(0), torch.random.fork_rng(devices=gpus):
                    place = sharp.sample((1,)).device
                with seeded(0, place):
                    drawn = sharp.sample((4096,))
            fitted = StudentT.fit_to(drawn, df=3.0)
            tril = 1.5 * fitted.scale_tril.double()
            heavy = StudentT(3.0, fitted.loc, covariance=tril @ tril.T).to(place)
        self.sharp = sharp
        self.heavy = as_proposal(heavy, sharp.dim)
        self.weight, self.stratified = weight, stratified
        self.dim = sharp.dim

    @classmethod
    def fit_to(
        cls,
        x: Tensor,
        *,
        n_components: int = 20,
        weight: float = 0.2,
        df: float = 3.0,
        seed: int = 0,
    ) -> Defensive:
        """Gaussian mixture for the body, Student-t for the tails."""
        mixture = GaussianMixture.fit_to(x, n_components=n_components, seed=seed)
        return cls(mixture, StudentT.fit_to(x, df=df), weight)

    def sample(self, shape: Sequence[int] = ()) -> Tensor:
        """Draw rows: ``(*shape, dim)``."""
        if not self.stratified:
            return mix_samples(self.sharp.sample(shape), self.heavy.sample(shape), self.weight)
        n = math.prod(shape)
        n_heavy = round(self.weight * n)
        rows = torch.cat([self.heavy.sample((n_heavy,)), self.sharp.sample((n - n_heavy,))])
        return rows.reshape(*shape, self.dim)

    def log_prob(self, x: Tensor) -> Tensor:
        """Log-density of rows."""
        return mix_log_probs(self.sharp.log_prob(x), self.heavy.log_prob(x), self.weight)


class _TwoLabels:
    """``(1 - a) q + a r`` for two label distributions of the same batch shape."""

    def __init__(self, sharp: LabelDistribution, wide: LabelDistribution, weight: float) -> None:
        self.sharp, self.wide, self.weight = sharp, wide, weight

    def sample(self, shape: Sequence[int] = ()) -> Tensor:
        """Independent draws ``(*shape, *batch, d)``."""
        return mix_samples(self.sharp.sample(shape), self.wide.sample(shape), self.weight)

    def log_prob(self, y: Tensor) -> Tensor:
        """Log-density of the mixture."""
        return mix_log_probs(self.sharp.log_prob(y), self.wide.log_prob(y), self.weight)


@saved("proposal", "wide", "weight")
class DefensiveLabels(nn.Module):
    """``(1 - a) q(y|x) + a r(y)``: a sharp conditional proposal with a wide distribution mixed in.

    The importance weights are then bounded by ``1 / a`` times those under ``r`` wherever the sharp
    proposal misses mass.
    """

    def __init__(self, proposal: nn.Module, wide: nn.Module, *, weight: float = 0.1) -> None:
        super().__init__()
        if not 0.0 < weight < 1.0:
            raise ProposalError(f"the weight of the wide part must be in (0, 1), got {weight}")
        self.proposal, self.wide, self.weight = proposal, wide, weight

    def forward(self, h: Tensor) -> _TwoLabels:
        """The mixture for features ``(*batch, context)``."""
        return _TwoLabels(self.proposal(h), self.wide(h), self.weight)
