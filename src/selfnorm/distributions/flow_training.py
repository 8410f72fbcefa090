"""Training flows: on the data, towards a model they serve as proposal of, or together with it.

Three losses for a proposal ``q`` of a model ``p``:

* ``"data"``: ``-E_data[log q]``, maximum likelihood;
* ``"kl"``: ``KL(p || q)`` by self-normalised importance sampling from ``q`` itself,
  ``-sum_m w_m log q(x_m) / sum_m w_m`` with the weights held fixed;
* ``"both"``: their average.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from selfnorm.columns import Columns
from selfnorm.distributions.proposals import Proposal, UnnormalisedModel
from selfnorm.errors import DataError
from selfnorm.training import Task

if TYPE_CHECKING:
    from selfnorm.distributions.flows import Flow

__all__ = ["FlowTask", "proposal_loss"]

LOSSES = ("data", "kl", "both")


def proposal_loss(
    proposal: Proposal, model: UnnormalisedModel | None, x: Tensor, loss: str, n_samples: int
) -> Tensor:
    """One of the three losses above, to minimise; gradients reach the proposal alone."""
    if loss not in LOSSES:
        raise ValueError(f"loss must be one of {LOSSES}, not {loss!r}")
    if loss != "data" and model is None:
        raise ValueError(f"the loss {loss!r} needs the model that the proposal serves")
    on_data = -proposal.log_prob(x).mean() if loss != "kl" else None
    if loss == "data" or model is None:
        assert on_data is not None
        return on_data
    y = proposal.sample((n_samples,)).detach()
    log_q = proposal.log_prob(y)
    with torch.no_grad():
        weights = torch.softmax(model.log_unnormalized(y) - log_q, 0)
    towards_model = -(weights * log_q).sum()
    return towards_model if on_data is None else 0.5 * (on_data + towards_model)


class FlowTask(Task):
    """Training of a flow by one of the three losses, for :func:`selfnorm.fit`.

    Args:
        columns: spreads discrete values out afresh at every step, where given.
        model: what the flow is a proposal of, for the losses ``"kl"`` and ``"both"``.
    """

    module: Flow
    capturable = True

    def __init__(
        self,
        flow: Flow,
        *,
        columns: Columns | None = None,
        model: UnnormalisedModel | None = None,
        loss: str = "data",
        n_samples: int = 512,
    ) -> None:
        if loss not in LOSSES:
            raise ValueError(f"loss must be one of {LOSSES}, not {loss!r}")
        self.module = flow
        self.columns, self.model = columns, model
        self.kind, self.n_samples = loss, n_samples

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Matrices with the optimiser's weight decay, vectors without."""
        parameters = list(self.module.parameters())
        return [
            {"params": [p for p in parameters if p.dim() > 1]},
            {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
        ]

    def start(self, data: tuple[Tensor, ...]) -> None:
        """Standardise by the training data unless that was done."""
        expected = 2 if self.module.condition_dim else 1
        if len(data) != expected:
            raise DataError(
                f"the flow has condition_dim={self.module.condition_dim}: expected {expected} "
                f"tensors (x{', condition' if expected == 2 else ''}), got {len(data)}"
            )
        if not bool(self.module.fitted):
            self.module.set_scaling(data[0])

    def loss(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:
        """The chosen loss; the negative mean log-likelihood by default."""
        x = batch[0] if self.columns is None else self.columns.dequantise(batch[0])
        if self.module.condition_dim:
            loss = -self.module.log_prob(x, batch[1]).mean()
        else:
            loss = proposal_loss(self.module, self.model, x, self.kind, self.n_samples)
        return loss, {"log_prob": -loss.detach()}

    def validate(self, data: tuple[Tensor, ...]) -> dict[str, float]:
        """Mean held-out log-likelihood of the rows as given."""
        given = data[1:] if self.module.condition_dim else ()
        parts = [
            self.module.log_prob(data[0][i : i + 8192], *(t[i : i + 8192] for t in given))
            for i in range(0, len(data[0]), 8192)
        ]
        return {"score": float(torch.cat(parts).double().mean())}

    def finish(self, data: tuple[Tensor, ...]) -> dict[str, float]:  # noqa: ARG002
        """Nothing to close."""
        return {}
