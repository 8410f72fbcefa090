"""Several seeds of one model in one training run: the same kernels serve them all.

The training step of a flow or of a small chain is a row of small kernels that leave a GPU mostly
idle. Stacking the weights of ``S`` models trains ``S`` seeds in about the time of one. Nothing is
shared: every seed has its own weights, its own rows in each step, its own gradient norm for
clipping, and keeps its own best state on the validation rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from selfnorm._context import seeded
from selfnorm.chain import AutoregressiveEBM
from selfnorm.columns import Columns
from selfnorm.distributions import Flow
from selfnorm.functional import log_mean_exp
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
        self.n_seeds = len(flows)
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


@torch.no_grad()
def sampled_scores(module: Any, data: tuple[Tensor, ...], n_samples: int) -> Tensor:
    """Held-out log-likelihood ``(S,)`` of chains by samples that are the same every time."""
    total = torch.zeros(module.n_seeds, dtype=torch.float64, device=data[0].device)
    with seeded(0, data[0].device):
        for rows in module.chunks(len(data[0]), n_samples + 1):
            part = tuple(t[rows] for t in data)
            _, log_q, f, log_w, log_det = module.at_batch(part, n_samples)
            log_p = (log_q + f - log_mean_exp(log_w)).sum(-1) + log_det
            each = log_p.unflatten(0, (module.n_seeds, -1))
            total += log_mean_exp(each, 1).double().sum(1)
    return total / len(data[0])


class SeedsTask(Task):
    """What seeds trained together keep apart; parameters hold one seed after the other.

    Before the task of one model: ``class MySeedsTask(SeedsTask, MyTask)``, whose loss is the sum
    over seeds and whose ``scores_of`` tells them apart.
    """

    module: Any  # has n_seeds
    scores_of: Callable[[tuple[Tensor, ...]], Tensor]  # held-out log-likelihoods, (S,)
    best: list[Tensor] | None = None
    scores: list[list[float]]  # of every validation, seed by seed

    def weights(self) -> list[Tensor]:
        """All that is trained."""
        return [p.detach() for p in self.module.parameters() if p.requires_grad]

    def condition_gradients(self, params: Any, clip_norm: float | None) -> Tensor:
        """Clip every seed by its own norm; the largest one is returned."""
        grads = [
            p.grad.unflatten(0, (self.module.n_seeds, -1)) for p in params if p.grad is not None
        ]
        norms = torch.stack([g.flatten(1).square().sum(1) for g in grads]).sum(0).sqrt()
        if clip_norm is not None:
            scale = (clip_norm / (norms + 1e-6)).clamp_max(1.0)
            for g in grads:
                g.mul_(scale.view(-1, *[1] * (g.dim() - 1)))
        return norms.max()

    @torch.no_grad()
    def validate(self, data: tuple[Tensor, ...]) -> dict[str, float]:
        """Mean over seeds; each seed's best weights are put aside here."""
        scores = self.scores_of(data)
        if self.best is None:
            self.scores, self.best = [], [p.clone() for p in self.weights()]
        else:
            better = scores.cpu() > torch.tensor(self.scores).amax(0)
            for kept, p in zip(self.best, self.weights(), strict=True):
                mine = better.to(p.device).repeat_interleave(len(p) // self.module.n_seeds)
                kept[mine] = p[mine]
        self.scores.append(scores.tolist())
        return {"score": float(scores.mean())}

    def finish(self, data: tuple[Tensor, ...]) -> dict[str, float]:
        """Every seed goes back to its own best state."""
        for p, kept in zip(self.weights(), self.best or self.weights(), strict=True):
            p.copy_(kept)
        return super().finish(data)


class ChainSeeds(AutoregressiveEBM):
    """Chains of one shape as one, the orders of the first before those of the second.

    Beside the class of the chains: ``class MySeeds(ChainSeeds, MyChain)``.

    Example:
        >>> chains = [AutoregressiveEBM(2, hidden=8, components=2, context=2) for _ in range(3)]
        >>> seeds = ChainSeeds(chains, hidden=8, components=2, context=2)
        >>> seeds.n_orderings
        3
    """

    def __init__(self, chains: list[Any], **sizes: Any) -> None:
        ranks = [rank for chain in chains for rank in chain.config["orderings"]]
        super().__init__(chains[0].dim, **sizes | {"orderings": ranks})
        self.n_seeds = len(chains)
        self.chains = chains  # a plain list: their own weights are filled in by `split`
        named = [dict(chain.named_parameters()) for chain in chains]
        with torch.no_grad():
            for name, weight in self.named_parameters():
                weight.copy_(torch.cat([own[name] for own in named]))

    def at_batch(self, batch: tuple[Tensor, ...], n_samples: int) -> Any:
        """In training every chain at its own share of the rows, else all at all of them."""
        if not self.training:
            return super().at_batch(batch, n_samples)
        x = self.columns.dequantise(batch[0].to(self.columns.center))
        shares, each = x.unflatten(0, (self.n_seeds, -1)), self.n_orderings // self.n_seeds
        return self.at_rows(shares.repeat_interleave(each, 0), n_samples=n_samples)

    @torch.no_grad()
    def split(self) -> list[Any]:
        """The chains, each with its own trained weights."""
        for i, chain in enumerate(self.chains):
            chain.columns = copy.deepcopy(self.columns)
            own, k = dict(chain.named_parameters()), chain.n_orderings
            for name, weight in self.named_parameters():
                own[name].copy_(weight[i * k : (i + 1) * k])
        return self.chains


class FlowSeedsTask(SeedsTask):
    """Maximum likelihood of every flow on its own share of the batch."""

    module: FlowSeeds
    capturable = True

    def __init__(self, module: FlowSeeds, *, columns: Columns | None = None) -> None:
        self.module, self.columns = module, columns

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
        per_seed = self.module.log_prob(x.unflatten(0, (self.module.n_seeds, -1))).mean(1)
        return -per_seed.sum(), {"log_prob": per_seed.detach().mean()}

    def scores_of(self, data: tuple[Tensor, ...]) -> Tensor:
        """Mean log-density of the rows."""
        parts = [
            self.module.log_prob(p.expand(self.module.n_seeds, -1, -1)).double()
            for p in data[0].split(4096)
        ]
        return torch.cat(parts, 1).mean(1)
