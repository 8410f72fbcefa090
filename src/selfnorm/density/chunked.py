"""More samples than memory: chunk sizes from a budget, and training in chunks.

SNL is linear in the weights, so its gradient over ``M`` samples is the sum of gradients over chunks
of them: memory does not depend on ``M``. Objectives with a logarithm around the mean weight are not
linear; for them the weights are computed first, without a graph, and each chunk is then run again
with the gradient that the *whole* objective has at its weights. Both give the unchanged gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from selfnorm import functional as F
from selfnorm._context import random_state, set_random_state
from selfnorm.density import objectives
from selfnorm.density.model import EBM
from selfnorm.density.objectives import Metrics, Objective, WeightObjective, Weights
from selfnorm.distributions import Proposal
from selfnorm.errors import EnergyError
from selfnorm.evaluation import chunk_size_for

__all__ = ["Chunked", "accumulate"]


class Chunked:
    """An objective evaluated in chunks of samples, with the gradient of the whole.

    Args:
        objective: a name, or an objective that is a function of weights.
        chunk_size: samples at a time; or
        max_memory: bytes (below 1: share of the free memory) a chunk may take.

    Example:
        >>> import selfnorm as sn
        >>> x = torch.randn(200, 2)
        >>> q = sn.Gaussian.fit_to(x)
        >>> model = sn.EBM(sn.MLP(2, hidden=(16,)), base=q)
        >>> objective = Chunked("snl", max_memory=2**20)
        >>> history = sn.fit(model, x, objective=objective, n_samples=20_000, max_steps=3,
        ...                  progress=False)
        >>> history.n_steps
        3
    """

    def __init__(
        self,
        objective: str | Objective = "snl",
        *,
        chunk_size: int | None = None,
        max_memory: float | None = None,
    ) -> None:
        whole = objectives.get(objective)
        if not isinstance(whole, WeightObjective):
            raise ValueError(
                f"{type(whole).__name__} is no function of weights and cannot be chunked; use "
                "snl, nce, importance_ml, ranking_nce or the Bregman family"
            )
        if (chunk_size is None) == (max_memory is None):
            raise ValueError("give exactly one of chunk_size and max_memory")
        if chunk_size is not None and chunk_size < 1:
            raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
        self.whole = whole
        self.learns_log_norm = whole.learns_log_norm
        self.linear = whole.linear
        self.label = objectives.label(whole)
        self.chunk_size, self.max_memory = chunk_size, max_memory

    def loss(
        self, model: EBM, proposal: Proposal, x: Tensor, n_samples: int
    ) -> tuple[Tensor, Metrics]:
        """Loss and metrics on one mini-batch; ``backward`` adds the gradient found here."""
        if any(isinstance(m, _BatchNorm) and m.training for m in model.modules()):
            raise EnergyError(
                "batch normalisation depends on all rows of a pass: in chunks the energy would be "
                "another one. Train without max_memory, or normalise by nn.LayerNorm"
            )
        if self.chunk_size is None:
            assert self.max_memory is not None
            self.chunk_size = chunk_size_for(model, proposal, self.max_memory)
        size = self.chunk_size
        sizes = [min(size, n_samples - start) for start in range(0, n_samples, size)]
        params = [p for p in model.parameters() if p.requires_grad]
        gathered = _Gradient(params)
        if self.whole.value is objectives.get("snl").value:  # type: ignore[attr-defined]
            log_p_data, log_z, value = self._linear(model, proposal, x, sizes, gathered)
        else:
            log_p_data, log_z, value = self._replayed(model, proposal, x, sizes, gathered)
        upper = log_p_data - log_z
        lower = upper - F.bound_gap(log_z - model.log_norm.detach())
        loss = with_gradients(-value, params, gathered.total)
        return loss, {"lower": lower, "upper": upper}

    def _linear(
        self, model: EBM, proposal: Proposal, x: Tensor, sizes: list[int], gathered: _Gradient
    ) -> tuple[Tensor, Tensor, Tensor]:
        """SNL: each chunk's gradient can be taken as soon as the chunk is seen."""
        n_samples = sum(sizes)
        data = x.new_zeros(())
        for rows in x.split(sizes[0]):
            part = model.log_unnormalized(rows).sum() / len(x)
            gathered.add(-part)
            data = data + part.detach()
        b = model.log_norm
        gathered.add(b)
        ratio = x.new_zeros(())
        log_means = []
        for size in sizes:
            with torch.no_grad():
                samples = proposal.sample((size,))
                log_q = proposal.log_prob(samples)
            log_mean = F.log_mean_exp(model.log_unnormalized(samples) - log_q)
            part = size / n_samples * F.capped_exp(log_mean - b)
            gathered.add(part)
            ratio = ratio + part.detach()
            log_means.append(log_mean.detach())
        log_z = F.combine_log_means(log_means, sizes)
        return data, log_z, data - b.detach() - ratio + 1

    def _replayed(
        self, model: EBM, proposal: Proposal, x: Tensor, sizes: list[int], gathered: _Gradient
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Any objective: weights first, then every chunk again with its share of the gradient."""
        device = model.device
        states, parts = [], []
        with torch.no_grad():
            before = random_state(device)
            log_p = torch.cat([model.log_unnormalized(rows) for rows in x.split(sizes[0])])
            log_q = torch.cat([proposal.log_prob(rows) for rows in x.split(sizes[0])])
            for size in sizes:
                states.append(random_state(device))
                samples = proposal.sample((size,))
                log_q_samples = proposal.log_prob(samples)
                parts.append(model.log_unnormalized(samples) - log_q_samples)
            after = random_state(device)
        leaf_p, leaf_w = log_p.requires_grad_(), torch.cat(parts).requires_grad_()
        leaf_b = model.log_norm.detach().clone().requires_grad_()
        with torch.enable_grad():
            log_z = F.log_mean_exp(leaf_w)
            value = self.whole.value(Weights(leaf_p, leaf_p - log_q, leaf_w, log_z, leaf_b))
        slopes = torch.autograd.grad(-value, [leaf_p, leaf_w, leaf_b], allow_unused=True)
        slope_p, slope_w, slope_b = slopes
        set_random_state(before, device)
        for rows, slope in zip(x.split(sizes[0]), slope_p.split(sizes[0]), strict=True):
            gathered.add(model.log_unnormalized(rows), slope)
        if slope_b is not None:
            gathered.add(model.log_norm, slope_b)
        for size, state, slope in zip(sizes, states, slope_w.split(sizes), strict=True):
            set_random_state(state, device)
            with torch.no_grad():
                samples = proposal.sample((size,))
                proposal.log_prob(samples)
            gathered.add(model.log_unnormalized(samples), slope)
        set_random_state(after, device)
        return log_p.detach().mean(), log_z.detach(), value.detach()


class _Gradient:
    """Running sum of gradients with respect to the parameters."""

    def __init__(self, params: list[torch.nn.Parameter]) -> None:
        self.params = params
        self.total: list[Tensor | None] = [None] * len(params)

    def add(self, output: Tensor, slope: Tensor | None = None) -> None:
        found = torch.autograd.grad(output, self.params, grad_outputs=slope, allow_unused=True)
        for k, grad in enumerate(found):
            if grad is not None:
                old = self.total[k]
                self.total[k] = grad if old is None else old.add_(grad)


class _Known(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, grads: Sequence[Tensor | None], *params: Tensor) -> Tensor:  # noqa: ARG004
        ctx.grads = grads
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        found = [None if g is None else upstream[0] * g for g in ctx.grads]
        return (None, None, *found)


def with_gradients(
    value: Tensor, params: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> Tensor:
    """``value`` as a function of ``params`` with the given gradient.

    Example:
        >>> p = torch.zeros(2, requires_grad=True)
        >>> with_gradients(torch.tensor(3.0), [p], [torch.tensor([1.0, -1.0])]).backward()
        >>> p.grad
        tensor([ 1., -1.])
    """
    result: Tensor = _Known.apply(value.detach(), list(grads), *params)
    return result


def accumulate(
    parts: Sequence[Callable[[], tuple[Tensor, dict[str, Tensor]]]], params: Sequence[Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean loss and metrics of several parts, of which one at a time is in memory.

    Example:
        >>> p = torch.tensor(2.0, requires_grad=True)
        >>> loss, _ = accumulate([lambda k=k: (k * p, {}) for k in (1.0, 3.0)], [p])
        >>> loss.backward()
        >>> float(loss.detach()), float(p.grad)
        (4.0, 2.0)
    """
    if len(parts) == 1:
        return parts[0]()
    total: list[Tensor | None] = [None] * len(params)
    value: Tensor | None = None
    means: dict[str, Tensor] = {}
    share = 1 / len(parts)
    for part in parts:
        loss, metrics = part()
        found = torch.autograd.grad(loss * share, list(params), allow_unused=True)
        for k, grad in enumerate(found):
            old = total[k]
            if grad is not None:
                total[k] = grad if old is None else old.add_(grad)
        value = loss.detach() * share + (0 if value is None else value)
        for name, metric in metrics.items():
            means[name] = metric.detach() * share + means.get(name, torch.zeros_like(metric))
    assert value is not None
    return with_gradients(value, params, total), means
