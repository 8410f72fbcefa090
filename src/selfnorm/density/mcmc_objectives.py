r"""Contrastive divergence: the baseline that needs Markov chains at every step.

``grad log-likelihood = -E_data[grad E] + E_model[grad E]``; the second mean is taken over chains
that have run for a few steps only. With ``"cd"`` they start afresh from the proposal (short-run),
with ``"pcd"`` from a replay buffer of earlier chains (persistent). The loss ``mean E(data) -
mean E(chains)`` has that gradient; its value says nothing about the likelihood, so bounds come from
:func:`selfnorm.evaluate`, and ``fit`` ends with ``b <- log Z_hat`` as for any other objective.

The chains are Metropolis-adjusted (``sampling.mala_step``): an unadjusted chain with a step
and a noise of unrelated sizes trains a tempered energy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from selfnorm._context import evaluating, without_gradient
from selfnorm.density.model import EBM, Objective, register_objective
from selfnorm.density.score_matching import column_spread
from selfnorm.distributions import Proposal
from selfnorm.sampling import as_log_density, gradient_init, mala_step
from selfnorm.training import State

__all__ = ["ContrastiveDivergence"]

_ENERGY_L2 = 1e-3  # weight of mean(E(data)^2 + E(chains)^2), which keeps energies from drifting


class ContrastiveDivergence(Objective):
    """Contrastive divergence with short-run or persistent chains.

    Args:
        start: ``"proposal"`` (short-run), ``"buffer"`` (persistent) or ``"data"`` (CD-k).
        n_steps: Langevin steps per training step.
        step_size: initial step in units of the data's standard deviation; it follows the
            acceptance rate towards 0.6.
        buffer_size: chains remembered (``"buffer"``).
        refresh: share of chains restarted from the proposal at each step (``"buffer"``).
    """

    # acceptance rates are read on the host to steer the step: no CUDA graph
    capturable = False

    def __init__(
        self,
        start: str = "proposal",
        *,
        n_steps: int = 20,
        step_size: float = 0.3,
        buffer_size: int = 10_000,
        refresh: float = 0.05,
    ) -> None:
        if start not in ("proposal", "buffer", "data"):
            raise ValueError(f"start must be 'proposal', 'buffer' or 'data', not {start!r}")
        if n_steps < 1 or buffer_size < 1 or not 0 <= refresh <= 1:
            raise ValueError("n_steps and buffer_size must be positive, refresh within [0, 1]")
        self.start, self.n_steps, self.step_size = start, n_steps, step_size
        self.buffer_size, self.refresh = buffer_size, refresh
        self.label = f"contrastive divergence from {start}"
        self._buffer: Tensor | None = None

    def state_dict(self) -> State:
        """Step size and chains, which the next step goes on with."""
        return {"step_size": self.step_size, "buffer": self._buffer}

    def load_state_dict(self, state: State) -> None:
        """Go on with saved chains."""
        self.step_size, self._buffer = state["step_size"], state["buffer"]

    def loss(
        self, model: EBM, proposal: Proposal, x: Tensor, n_samples: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """``mean log p~(chains) - mean log p~(data)`` plus the energy penalty, and metrics."""
        start, places = self._starts(proposal, x, n_samples)
        chains, acceptance = self._run(model, start, column_spread(x))
        if self._buffer is not None and places is not None:
            self._buffer[places] = chains
        log_p = model.log_unnormalized(torch.cat([x, chains]))
        at_data, at_chains = log_p[: len(x)], log_p[len(x) :]
        loss = at_chains.mean() - at_data.mean()
        base = torch.zeros_like(log_p)
        if model.base is not None:
            base = model.base.log_prob(torch.cat([x, chains])).detach()
        loss = loss + _ENERGY_L2 * (log_p - base).square().mean()
        return loss, {
            "contrast": (at_chains.mean() - at_data.mean()).detach(),
            "accept": acceptance,
        }

    @torch.no_grad()
    def _starts(self, proposal: Proposal, x: Tensor, n: int) -> tuple[Tensor, Tensor | None]:
        if self.start == "data":
            return x.detach().clone(), None
        if self.start == "proposal":
            return proposal.sample((n,)), None
        kept = self._buffer
        if kept is None or kept.shape[1] != x.shape[1]:  # none yet, or those of another table
            kept = proposal.sample((self.buffer_size,))
        self._buffer = kept.to(x)
        places = torch.randperm(self.buffer_size, device=x.device)[:n]
        fresh = torch.rand(len(places), 1, device=x.device) < self.refresh
        start = torch.where(fresh, proposal.sample((len(places),)), self._buffer[places])
        return start, places

    def _run(self, model: EBM, start: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        log_density = as_log_density(model)
        # The density that is evaluated is what chains walk on: in training mode a row's energy
        # would hang on the other chains (batch normalisation), whose averages took them in.
        # Gradients in x only are half the cost.
        with without_gradient(model), evaluating(model):
            state = gradient_init(log_density, start)
            rates = []
            for _ in range(self.n_steps):
                state, info = mala_step(state, log_density, step_size=self.step_size, scale=scale)
                rates.append(info.acceptance.mean())
        acceptance = torch.stack(rates).mean()
        factor = 1.05 if float(acceptance) > 0.6 else 1 / 1.05
        self.step_size = min(max(self.step_size * factor, 1e-3), 3.0)
        return state.positions.detach(), acceptance


register_objective("cd", lambda: ContrastiveDivergence("proposal"))
register_objective("pcd", lambda: ContrastiveDivergence("buffer"))
