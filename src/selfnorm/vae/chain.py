"""The chain of one-dimensional energies as a prior: differentiable in every place it looks at."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout

from selfnorm.chain import AutoregressiveEBM, Factors
from selfnorm.distributions import Mixture1d
from selfnorm.networks import masked_weights
from selfnorm.vae.fused import LIMITS, component_constants, placed, stratified, tilt

__all__ = ["LatentChain"]


class LatentChain(AutoregressiveEBM):
    """The chain with every dependence on ``z`` differentiable: an encoder is trained through it.

    On data the shape of a proposal is cut from the graph, because nothing upstream of it learns;
    here a cut would bias the encoder's gradient. The shape is read off a second copy of the
    proposal, whose head takes no gradient: the proposals themselves are fitted by maximum
    likelihood alone, and stay where the mass is.
    """

    limits: Tensor
    constants: Tensor

    def __init__(self, dim: int, **options: Any) -> None:
        super().__init__(dim, **options)
        self.register_buffer("limits", torch.tensor(LIMITS), persistent=False)
        constants = component_constants(self.n_components)
        self.register_buffer("constants", constants, persistent=False)

    def shaped(self, z: Tensor) -> tuple[Tensor, Mixture1d, Factors]:
        """``log q`` of the values at scaled ``z`` ``(R, N, dim)``; the proposals; the factors.

        The proposals within the factors depend on ``z`` as well, their heads held fixed.
        """
        features = self.trunk(self.columns.encode(z).flatten(-2))
        context = self.trunk.outputs(self.context_head, features)
        context = dropout(context, self.context_drop, self.training)
        head = self.mixture_head
        assert head.bias is not None
        raw = self.trunk.outputs(head, features)
        proposal = Mixture1d.from_raw(raw, self.n_components, family=self.family)
        weight, bias = head.effective_weight().detach(), head.bias.detach()
        copied = torch.baddbmm(bias.unsqueeze(1), features, weight.transpose(1, 2))
        at = self._describe(copied.unflatten(-1, (self.dim, -1)), context)
        return proposal.log_prob(z), proposal, at

    def bound(self, z: Tensor, n_samples: int) -> tuple[Tensor, dict[str, Tensor]]:
        """SNL bounds ``(R, N)`` at ``z`` ``(N, dim)``; outside of training their measures.

        By the formulas of :meth:`shaped`, in fewer launches; for Gaussian components.
        """
        scaled = (z - self.columns.center) / self.columns.scale
        one = self.n_orderings == 1  # the gradient of an expansion is a launch
        here = scaled.unsqueeze(0) if one else scaled.expand(self.n_orderings, -1, -1)
        head, other, energy = self.mixture_head, self.context_head, self.energy
        assert head.bias is not None
        *inner, for_head, for_other = masked_weights(
            [self.trunk.first, *self.trunk.layers, head, other]  # type: ignore[list-item]
        )
        features = self.trunk(self.columns.encode(here).flatten(-2), None, inner)
        context = self.trunk.outputs(other, features, for_other)
        context = dropout(context, self.context_drop, self.training)
        log_q, values, shape = placed(
            features, for_head, head.bias, here, stratified(n_samples, here), self.constants,
            self.limits, energy.frequencies,
        )  # fmt: skip
        described = torch.cat([context, shape], -1)
        bound, metrics = tilt(
            log_q, energy.unbounded(values, described), energy.log_norm(described)
        )
        return bound - self.columns.scale.log().sum(), metrics

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
