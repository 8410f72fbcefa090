"""The chain of one-dimensional energies as a prior: differentiable in every place it looks at."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout

from selfnorm.autoregressive import AutoregressiveEBM
from selfnorm.factors import Factors
from selfnorm.mixtures1d import Mixture1d
from selfnorm.vae_fused import LIMITS, described_proposals, mixture_log_prob

__all__ = ["LatentChain"]


class LatentChain(AutoregressiveEBM):
    """The chain with every dependence on ``z`` differentiable: an encoder is trained through it.

    On data the shape of a proposal is cut from the graph, because nothing upstream of it learns;
    here a cut would bias the encoder's gradient. The shape is read off a second copy of the
    proposal, whose head takes no gradient: the proposals themselves are fitted by maximum
    likelihood alone, and stay where the mass is.
    """

    limits: Tensor

    def __init__(self, dim: int, **options: Any) -> None:
        super().__init__(dim, **options)
        self.register_buffer("limits", torch.tensor(LIMITS), persistent=False)

    def shaped(self, z: Tensor, *, with_proposal: bool) -> tuple[Tensor, Mixture1d, Factors]:
        """``log q`` of the values at scaled ``z`` ``(R, N, dim)``; the proposals; the factors.

        With ``with_proposal`` the proposals within the factors depend on ``z`` as well. A compiler
        is given the plain formulas: it fuses them better than any hand.
        """
        features = self.trunk(self.columns.encode(z).flatten(-2))
        context = self.trunk.outputs(self.context_head, features)
        context = dropout(context, self.context_drop, self.training)
        head = self.mixture_head
        assert head.bias is not None
        if with_proposal or torch.compiler.is_compiling():
            raw = self.trunk.outputs(head, features)
            proposal = Mixture1d.from_raw(raw, self.n_components, family=self.family)
            weight, bias = head.effective_weight().detach(), head.bias.detach()
            copied = torch.baddbmm(bias.unsqueeze(1), features, weight.transpose(1, 2))
            at = self._describe(copied.unflatten(-1, (self.dim, -1)), context)
            return proposal.log_prob(z), proposal, at
        proposal, mean, sd, shape = described_proposals(
            features, head.effective_weight(), head.bias, self.limits, self.dim, self.family
        )
        described = torch.cat([context, shape], -1)
        return mixture_log_prob(proposal, z), proposal, Factors(proposal, described, mean, sd)

    def _describe(self, raw: Tensor, context: Tensor) -> Factors:
        proposal = Mixture1d.from_raw(raw, self.n_components, family=self.family)
        mean, sd = proposal.moments()
        low, high, divisor = LIMITS
        told = [
            proposal.log_pi,
            (proposal.loc - mean.unsqueeze(-1)) / sd.unsqueeze(-1),
            proposal.log_scale - sd.log().unsqueeze(-1),
        ]
        shape = [told[i].clamp(low[i], high[i]) / divisor[i] for i in range(3)]
        return Factors(proposal, torch.cat([context, *shape], -1), mean, sd)
