"""More samples than memory: an objective whose samples go through the network in chunks.

A chunk's activations are not kept: where the gradient needs them the chunk runs again, with the
random numbers it had. Values and gradient are those of the whole, for any function of weights.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from selfnorm.density.fit import Metrics, Objective, WeightObjective, Weights, get
from selfnorm.density.model import EBM
from selfnorm.distributions import Proposal
from selfnorm.errors import EnergyError
from selfnorm.evaluation import chunk_size_for


class Chunked(WeightObjective):
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

    capturable = False  # random states are put back from the host

    def __init__(
        self,
        objective: str | Objective = "snl",
        *,
        chunk_size: int | None = None,
        max_memory: float | None = None,
    ) -> None:
        whole = get(objective)
        if not isinstance(whole, WeightObjective):
            raise ValueError(
                f"{type(whole).__name__} is no function of weights and cannot be chunked; use "
                "snl, nce, importance_ml, ranking_nce or the Bregman family"
            )
        if (chunk_size is None) == (max_memory is None):
            raise ValueError("give exactly one of chunk_size and max_memory")
        if chunk_size is not None and chunk_size < 1:
            raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
        super().__init__(
            whole.value, whole.label, learns_log_norm=whole.learns_log_norm, linear=whole.linear
        )
        self.chunk_size, self.max_memory = chunk_size, max_memory

    def loss(
        self, model: EBM, proposal: Proposal, x: Tensor, n_samples: int
    ) -> tuple[Tensor, Metrics]:
        """Loss and metrics on one mini-batch, chunk by chunk."""
        if any(isinstance(m, _BatchNorm) and m.training for m in model.modules()):
            raise EnergyError(
                "batch normalisation depends on all rows of a pass: in chunks the energy would be "
                "another one. Train without max_memory, or normalise by nn.LayerNorm"
            )
        if self.chunk_size is None:
            assert self.max_memory is not None
            self.chunk_size = chunk_size_for(model, proposal, self.max_memory)

        def log_weights(size: int, device: Tensor) -> Tensor:  # noqa: ARG001 whose state is kept
            with torch.no_grad():
                samples = proposal.sample((size,))
                log_q = proposal.log_prob(samples)
            return model.log_unnormalized(samples) - log_q

        size = self.chunk_size
        at_data = [
            checkpoint(model.log_unnormalized, rows, use_reentrant=False) for rows in x.split(size)
        ]
        sizes = [min(size, n_samples - start) for start in range(0, n_samples, size)]
        at_samples = [checkpoint(log_weights, n, x, use_reentrant=False) for n in sizes]
        with torch.no_grad():
            log_q = torch.cat([proposal.log_prob(rows) for rows in x.split(size)])
        log_p = torch.cat(at_data)
        return self.judge(Weights(log_p, log_p - log_q, torch.cat(at_samples), model.log_norm))
