"""What every mixture ``q(x) = sum_k pi_k f_k(x)`` shares: its density, and which component drew.

A law writes its own components; the sum over them, the choice of one and the look-up of its
parameters are these functions. Components are the last dimension of weights and log-densities,
``(*batch, K)``; parameters may have dimensions of an event behind it, ``(*batch, K, d)``; samples
stand in front, ``(*shape, *batch)``:

>>> log_weights, means, scales = torch.tensor([0.3, 0.7]).log(), torch.randn(2, 3), torch.ones(2, 3)
>>> component, _ = choose_component(log_weights.exp(), torch.rand(5))        # (5,)
>>> mean = pick_component(means, component, event_dims=1)                     # (5, 3)
>>> x = mean + pick_component(scales, component, event_dims=1) * torch.randn(5, 3)
>>> z = (x.unsqueeze(-2) - means) / scales                                    # (5, 2, 3)
>>> mixture_log_prob(log_weights, gaussian_log_prob(z, scales.log().sum(-1))).shape
torch.Size([5])
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["choose_component", "gaussian_log_prob", "mixture_log_prob", "pick_component"]

_LOG_2PI = math.log(2 * math.pi)


def gaussian_log_prob(z: Tensor, log_det: Tensor | float) -> Tensor:
    """Gaussian log-density from whitened rows ``z = L^-1 (x - mean)``: ``(*shape, d) -> (*shape)``.

    ``log_det`` is ``log |det L|``: the sum of the log-scales where ``L`` is diagonal.

    Example:
        >>> gaussian_log_prob(torch.zeros(2), 0.0)
        tensor(-1.8379)
    """
    return -0.5 * (z.square().sum(-1) + z.shape[-1] * _LOG_2PI) - log_det


def mixture_log_prob(log_weights: Tensor, log_components: Tensor) -> Tensor:
    """``log sum_k pi_k f_k(x)``: weights ``(*batch, K)``, components ``(*shape, *batch, K)``.

    Example:
        >>> mixture_log_prob(torch.tensor([0.5, 0.5]).log(), torch.zeros(3, 2))
        tensor([0., 0., 0.])
    """
    return torch.logsumexp(log_weights + log_components, -1)


def choose_component(weights: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """The component that each uniform number falls on, and where it falls within it.

    Args:
        weights: ``(*batch, K)``, summing to one.
        u: uniforms ``(*shape, *batch)``.

    Returns:
        The index ``(*shape, *batch)`` and what is left of ``u``, a uniform number again: the level
        of a quantile of that component (clamp it where 0 and 1 have none). Stratified ``u`` stay
        stratified within each component.

    Example:
        >>> choose_component(torch.tensor([0.25, 0.75]), torch.tensor([0.125, 0.25, 1.0]))
        (tensor([0, 1, 1]), tensor([0.5000, 0.0000, 1.0000]))
    """
    ends = weights.cumsum(-1)
    component = (u.unsqueeze(-1) >= ends[..., :-1]).sum(-1)
    start, width = pick_component(ends - weights, component), pick_component(weights, component)
    return component, (u - start) / width.clamp_min(torch.finfo(u.dtype).tiny)


def pick_component(values: Tensor, component: Tensor, event_dims: int = 0) -> Tensor:
    """Parameters ``(*batch, K, *event)`` of the chosen components ``(*shape, *batch)``.

    ``event_dims`` is the number of dimensions behind ``K``; the result is
    ``(*shape, *batch, *event)``. Sizes of ``batch`` broadcast.

    Example:
        >>> means = torch.tensor([[[0.0], [1.0]], [[2.0], [3.0]]])      # two laws, K = 2, d = 1
        >>> pick_component(means, torch.tensor([1, 0]), event_dims=1)
        tensor([[1.],
                [2.]])
    """
    *batch, k = values.shape[: values.dim() - event_dims]
    first = k * torch.arange(math.prod(batch), device=values.device).view(batch)
    return values.flatten(0, len(batch))[first + component]  # one list of all laws' components
