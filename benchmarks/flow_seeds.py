"""Several seeds of one flow in one training run: the same kernels serve them all.

A flow's training step is a chain of small kernels that leave a GPU mostly idle. Stacking the
weights of ``S`` flows (``torch.func``) trains ``S`` seeds in about the time of one. Nothing is
shared: every seed has its own weights, its own rows in each step, its own gradient norm for
clipping, and keeps its own best state on the validation rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from selfnorm.columns import Columns
from selfnorm.distributions import Flow
from selfnorm.training import Task


class _LogProb(nn.Module):
    """A flow whose forward pass is its log-density, which ``functional_call`` asks for."""

    def __init__(self, flow: Flow) -> None:
        super().__init__()
        self.flow = flow

    def forward(self, x: Tensor) -> Tensor:
        return self.flow.log_prob(x)


class FlowSeeds(nn.Module):
    """``S`` flows of one shape, weights stacked; buffers (masks, scaling) are those of the first.

    Example:
        >>> flows = [Flow(2, transforms=1, hidden=(8,)) for _ in range(3)]
        >>> FlowSeeds(flows).log_prob(torch.zeros(3, 5, 2)).shape
        torch.Size([3, 5])
    """

    def __init__(self, flows: list[Flow]) -> None:
        super().__init__()
        self.template = _LogProb(flows[0]).requires_grad_(False)
        named = [dict(_LogProb(flow).named_parameters()) for flow in flows]
        self.names = list(named[0])
        self.stacked = nn.ParameterList(
            nn.Parameter(torch.stack([one[name].detach() for one in named])) for name in self.names
        )
        self.flows = flows  # a plain list: their own weights are filled in by `split`

    def log_prob(self, x: Tensor) -> Tensor:
        """``(S, n)`` log-densities of ``x`` ``(S, n, dim)``, seed by seed."""
        buffers = dict(self.template.named_buffers())

        def one(weights: tuple[Tensor, ...], rows: Tensor) -> Tensor:
            named = dict(zip(self.names, weights, strict=True))
            result: Tensor = functional_call(self.template, {**named, **buffers}, (rows,))
            return result

        return vmap(one)(tuple(self.stacked), x)

    @torch.no_grad()
    def split(self) -> list[Flow]:
        """The flows, each with its own trained weights."""
        for i, flow in enumerate(self.flows):
            own = dict(_LogProb(flow).named_parameters())
            for name, weight in zip(self.names, self.stacked, strict=True):
                own[name].copy_(weight[i])
        return self.flows


class FlowSeedsTask(Task):
    """Maximum likelihood of every flow on its own share of the batch."""

    module: FlowSeeds
    capturable = True

    def __init__(self, module: FlowSeeds, *, columns: Columns | None = None) -> None:
        self.module, self.columns = module, columns
        self.best: list[Tensor] | None = None
        self.scores: list[list[float]] = []

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Matrices with the optimiser's weight decay, vectors without."""
        weights = list(self.module.stacked)
        return [
            {"params": [p for p in weights if p.dim() > 2]},
            {"params": [p for p in weights if p.dim() <= 2], "weight_decay": 0.0},
        ]

    def start(self, data: tuple[Tensor, ...]) -> None:
        """Standardise by the training rows."""
        for flow in self.module.flows:
            flow.set_scaling(data[0])

    def loss(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum over seeds: gradients of one do not meet those of another."""
        x = batch[0] if self.columns is None else self.columns.dequantise(batch[0])
        per_seed = self.module.log_prob(x.unflatten(0, (len(self.module.flows), -1))).mean(1)
        return -per_seed.sum(), {"log_prob": per_seed.detach().mean()}

    def condition_gradients(self, params: Any, clip_norm: float | None) -> Tensor:  # noqa: ARG002
        """Clip every seed by its own norm; the largest one is returned."""
        grads = [p.grad for p in self.module.stacked if p.grad is not None]
        norms = torch.stack([g.flatten(1).square().sum(1) for g in grads]).sum(0).sqrt()
        if clip_norm is not None:
            scale = (clip_norm / (norms + 1e-6)).clamp_max(1.0)
            for g in grads:
                g.mul_(scale.view(-1, *[1] * (g.dim() - 1)))
        return norms.max()

    def validate(self, data: tuple[Tensor, ...]) -> dict[str, float]:
        """Mean over seeds; each seed's best weights are put aside here."""
        stack = len(self.module.flows)
        parts = [
            self.module.log_prob(p.expand(stack, -1, -1)).double() for p in data[0].split(4096)
        ]
        scores = torch.cat(parts, 1).mean(1)
        before = torch.tensor(self.scores).amax(0) if self.scores else None
        self.scores.append(scores.tolist())
        if self.best is None or before is None:
            self.best = [p.detach().clone() for p in self.module.stacked]
        else:
            better = scores.cpu() > before
            for kept, p in zip(self.best, self.module.stacked, strict=True):
                kept[better.to(kept.device)] = p.detach()[better.to(kept.device)]
        return {"score": float(scores.mean())}

    def finish(self, data: tuple[Tensor, ...]) -> dict[str, float]:  # noqa: ARG002
        """Every seed goes back to its own best state."""
        if self.best is not None:
            with torch.no_grad():
                for p, kept in zip(self.module.stacked, self.best, strict=True):
                    p.copy_(kept)
        return {}
