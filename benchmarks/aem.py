"""Autoregressive Energy Machines (Nash & Durkan 2019), the nearest relative of our chains.

``p(x) = prod_i exp(-E(x_i, c_i)) / Z_i``: a ResMADE gives each column a context ``c_i`` and a
mixture ``q_i`` of ten Gaussians, an energy network sees the value beside its context, and

    ``log Z_i = log mean_m exp(-E(y_m, c_i)) / q_i(y_m)``,  ``y_m ~ q_i``,

from 20 samples in training (maximum likelihood by importance sampling) and from more afterwards.
The proposals are trained by their own likelihood. There is no learned normaliser: a density costs
the samples it is normalised with.

Made of the library's networks, in the place of its energies and its loss. Where the two differ in
what has nothing to do with the idea, the library's choice serves both: scales of the columns,
stratified samples in training, a heavy-tailed component beside the Gaussians. An energy that is
flat far out has no ``Z``; here it rises there, as a Student law's does, so that ``Z`` exists and
the weights of far samples are bounded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import relu, softplus

from selfnorm._context import seeded
from selfnorm.chain import AutoregressiveEBM, Factors
from selfnorm.chain.task import AutoregressiveTask
from selfnorm.functional import log_mean_exp
from selfnorm.networks import ChainLinear

FAR = 10.0  # scales of a column, beyond which energies rise


class ValueEnergy(nn.Module):
    """``-E(y, c) - log q(y)`` for all factors.

    ``E = softplus(residual network of y and c) + 1.5 log(1 + (y / 10)^2)``.
    """

    def __init__(self, stack: int, context: int, hidden: int, blocks: int) -> None:
        super().__init__()
        self.from_context = ChainLinear(stack, context, hidden)
        self.from_value = ChainLinear(stack, 1, hidden, bias=False)
        self.layers = nn.ModuleList(ChainLinear(stack, hidden, hidden) for _ in range(2 * blocks))
        self.last = ChainLinear(stack, hidden, 1)

    def forward(self, y: Tensor, at: Factors) -> Tensor:
        """At values ``(S, R, N, dim)`` of the factors ``at``, same shape; ``q`` is held fixed."""
        context = self.from_context(at.context.flatten(1, 2)).unsqueeze(1)
        h = self.from_value(y.transpose(0, 1).flatten(2, 3).unsqueeze(-1)) + context
        for i in range(0, len(self.layers), 2):
            h = h + self.layers[i + 1](relu(self.layers[i](relu(h))))
        energy = softplus(self.last(relu(h)).squeeze(-1)).unflatten(2, y.shape[2:]).transpose(0, 1)
        energy = energy + 1.5 * torch.log1p((y / FAR).square())
        return -energy - at.proposal.detach().log_prob(y)


class EnergyMachine(AutoregressiveEBM):
    """The model; sizes as its authors have them, but for those of small tables.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> model = EnergyMachine(3, hidden=16, blocks=1, energy_hidden=8, energy_blocks=1)
        >>> x = torch.randn(50, 3)
        >>> model.set_scaling(x).log_prob(x, n_samples=10).shape
        torch.Size([50])
    """

    def __init__(
        self,
        dim: int,
        *,
        orderings: int = 1,
        hidden: int = 512,
        blocks: int = 4,
        context: int = 64,
        energy_hidden: int = 128,
        energy_blocks: int = 4,
        drop: float = 0.1,
        discrete: Any = None,
        encoding: str = "value",
    ) -> None:
        super().__init__(
            dim,
            orderings=orderings,
            hidden=hidden,
            blocks=blocks,
            components=10,
            family="gaussian",
            context=context,
            drop=drop,
            drop_context=False,
            discrete=discrete,
            encoding=encoding,
        )
        described = context + 3 * self.n_components  # the context tells the proposal as well
        self.energy = ValueEnergy(self.n_orderings, described, energy_hidden, energy_blocks)

    def training_task(self, **options: Any) -> EnergyMachineTask:
        return EnergyMachineTask(self, **options)

    def log_norm(self, at: Factors, n_samples: int = 1000, *, stratified: bool = False) -> Tensor:
        """``log Z_i (R, N, dim)`` by importance sampling."""
        return log_mean_exp(self.tilt(at.proposal.sample(n_samples, stratified=stratified), at))

    def quadrature(self, at: Factors, n_nodes: int = 2048) -> Tensor:
        """``log Z_i`` by nodes at values as they are: these energies see no others."""
        y, log_weight = at.proposal.nodes(n_nodes)
        return torch.logsumexp(log_weight + self.tilt(y, at), 0)

    @torch.no_grad()
    def log_prob(
        self,
        x: Tensor,
        condition: Tensor | None = None,
        *,
        normalizer: str = "samples",
        n_samples: int = 1000,
        stratified: bool = False,
        n_nodes: int = 2048,
        chunk_size: int | None = None,
    ) -> Tensor:
        """Log-density ``(n,)``, normalised by samples, or by ``"quadrature"`` to check them."""
        quadrature, parts = normalizer == "quadrature", []
        x = self.check(x)
        for rows in self.chunks(len(x), n_nodes if quadrature else n_samples, chunk_size):
            terms = self.at_rows(x[rows], condition)
            log_norm = (
                self.quadrature(terms.factors, n_nodes)
                if quadrature
                else self.log_norm(terms.factors, n_samples, stratified=stratified)
            )
            parts.append(log_mean_exp(terms.log_prob(log_norm)))
        return torch.cat(parts)


@torch.no_grad()
def sampled_score(module: Any, data: tuple[Tensor, ...], n_samples: int) -> float:
    """Held-out log-likelihood of a chain by samples that are the same every time."""
    total = 0.0
    with seeded(0, data[0].device):
        for rows in module.chunks(len(data[0]), n_samples + 1):
            terms = module.at_batch(tuple(t[rows] for t in data), n_samples)
            log_p = terms.log_prob(log_mean_exp(terms.log_w))
            total += float(log_mean_exp(log_p).double().sum())
    return total / len(data[0])


class EnergyMachineTask(AutoregressiveTask):
    """Maximum likelihood by importance sampling; that of the proposals beside it."""

    module: EnergyMachine

    def loss(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:
        """Minus the log-likelihoods of the proposals and of the energies, a row."""
        terms = self.module.at_batch(batch, self.n_samples)
        tilt = terms.minus_energy - log_mean_exp(terms.log_w)
        of_energy = (terms.log_q.detach() + tilt).sum(-1)
        loss = -(terms.log_q.sum(-1) + of_energy).mean()
        return loss, {"log_prob": (of_energy + terms.log_det).mean().detach()}

    def validate(self, data: tuple[Tensor, ...]) -> dict[str, float]:
        """Held-out log-likelihood by samples that are the same every time."""
        return {"score": sampled_score(self.module, data, self.validation_samples)}

    def finish(self, data: tuple[Tensor, ...]) -> dict[str, float]:
        """There is no ``b`` to fit."""
        del data
        return {}
