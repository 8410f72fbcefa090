"""Training flows: on the data, towards a model they serve as proposal of, or together with it.

Three losses for a proposal ``q`` of a model ``p``:

* ``"data"``: ``-E_data[log q]``, maximum likelihood;
* ``"kl"``: ``KL(p || q)`` by self-normalised importance sampling from ``q`` itself,
  ``-sum_m w_m log q(x_m) / sum_m w_m`` with the weights held fixed;
* ``"both"``: their average.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from selfnorm.columns.columns import Columns
from selfnorm.density.model import EBM
from selfnorm.distributions.proposals import Proposal
from selfnorm.errors import DataError
from selfnorm.functional import ess, log_mean_exp, snl
from selfnorm.training.history import History
from selfnorm.training.loop import LoopOptions, run
from selfnorm.training.task import refuse_unknown

if TYPE_CHECKING:
    from selfnorm.distributions.flows import Flow

__all__ = ["FlowTask", "JointTask", "adapt", "fit_jointly", "proposal_loss", "tilt"]

LOSSES = ("data", "kl", "both")


def proposal_loss(
    proposal: Proposal, model: EBM | None, x: Tensor, loss: str, n_samples: int
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


class FlowTask:
    """Training of a flow by one of the three losses, for :func:`selfnorm.fit`.

    Args:
        columns: spreads discrete values out afresh at every step, where given.
        model: what the flow is a proposal of, for the losses ``"kl"`` and ``"both"``.
    """

    capturable = True

    def __init__(
        self,
        flow: Flow,
        *,
        columns: Columns | None = None,
        model: EBM | None = None,
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


def adapt(flow: Flow, model: EBM, x: Tensor, *, loss: str = "both", **options: Any) -> History:
    """Bring a flow closer to the model it serves (``options`` of the training loop).

    Example:
        >>> import selfnorm as sn
        >>> x = torch.randn(64, 2)
        >>> flow = sn.Flow(2, transforms=1, hidden=(8,))
        >>> model = sn.EBM(sn.MLP(2, hidden=(8,)), base=sn.Gaussian.fit_to(x))
        >>> adapt(flow, model, x, loss="kl", max_steps=2, progress=False).n_steps
        2
    """
    n_samples = int(options.pop("n_samples", 512))
    refuse_unknown(options, "adapt")
    task = FlowTask(flow, model=model, loss=loss, n_samples=n_samples)
    return run(task, (x,), options=LoopOptions(**options))


def tilt(flow: Flow, energy: Callable[[Tensor], Tensor]) -> EBM:
    """``p(x) = flow(x) exp(-E(x) - b)``: a frozen flow as base, and as proposal of the model.

    With an energy that starts at zero the model starts exactly at the flow's likelihood, with
    ``b = 0``. Train it by ``selfnorm.fit(model, x, proposal=flow)``.

    Example:
        >>> import selfnorm as sn
        >>> flow = sn.Flow(2, transforms=1, hidden=(8,))
        >>> model = tilt(flow, sn.MLP(2, hidden=(8,), zero_init=True))
        >>> x = torch.randn(5, 2)
        >>> torch.allclose(model.log_prob(x), flow.log_prob(x))
        True
    """
    return EBM(energy, base=flow.requires_grad_(False))


class JointTask:
    """A model by SNL and its flow proposal by one of the three losses, in the same steps."""

    capturable = True

    def __init__(self, model: EBM, flow: Flow, *, loss: str = "data", n_samples: int = 512) -> None:
        self.model, self.flow = model, flow
        self.module = nn.ModuleDict({"model": model, "flow": flow})
        self.kind, self.n_samples = loss, n_samples

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Everything at one rate, ``b`` at ten times it and without weight decay."""
        b = self.model.log_norm
        others = [p for p in self.module.parameters() if p is not b and p.requires_grad]
        return [{"params": others}, {"params": [b], "lr_scale": 10.0, "weight_decay": 0.0}]

    def start(self, data: tuple[Tensor, ...]) -> None:
        """Standardise the flow, start ``b`` at its importance estimate."""
        if not bool(self.flow.fitted):
            self.flow.set_scaling(data[0])
        self._close()

    @torch.no_grad()
    def _close(self) -> Tensor:
        y = self.flow.sample((max(self.n_samples, 20_000),))
        log_w = self.model.log_unnormalized(y) - self.flow.log_prob(y)
        self.model.log_norm.copy_(log_mean_exp(log_w))
        return log_w

    def _log_weights(self) -> Tensor:
        with torch.no_grad():
            y = self.flow.sample((self.n_samples,))
            log_q = self.flow.log_prob(y)
        return self.model.log_unnormalized(y) - log_q

    def loss(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:
        """``-l_SNL`` of the model plus the proposal's loss."""
        x = batch[0]
        lower = snl(self.model.log_unnormalized(x), self._log_weights(), self.model.log_norm)
        of_flow = proposal_loss(self.flow, self.model, x, self.kind, self.n_samples)
        return of_flow - lower, {"lower": lower.detach(), "flow": -of_flow.detach()}

    def validate(self, data: tuple[Tensor, ...]) -> dict[str, float]:
        """Both bounds on held-out rows."""
        log_w, log_p = self._log_weights(), self.model.log_unnormalized(data[0])
        lower = float(snl(log_p, log_w, self.model.log_norm))
        upper = float(log_p.mean() - log_mean_exp(log_w))
        return {"score": lower, "lower": lower, "upper": upper, "ess": float(ess(log_w))}

    def finish(self, data: tuple[Tensor, ...]) -> dict[str, float]:  # noqa: ARG002
        """``b <- log Z_hat`` on fresh samples."""
        log_w = self._close()
        return {"log_norm": float(self.model.log_norm.detach()), "ess": float(ess(log_w))}


def fit_jointly(
    model: EBM,
    flow: Flow,
    x: Tensor,
    *,
    loss: str = "data",
    n_samples: int = 512,
    val_data: Tensor | None = None,
    **options: Any,
) -> History:
    """Train an EBM and its flow proposal together (``options`` of the training loop).

    Example:
        >>> import selfnorm as sn
        >>> x = torch.randn(64, 2)
        >>> model = sn.EBM(sn.MLP(2, hidden=(8,)), base=sn.Gaussian.fit_to(x))
        >>> flow = sn.Flow(2, transforms=1, hidden=(8,))
        >>> fit_jointly(model, flow, x, max_steps=2, progress=False).n_steps
        2
    """
    refuse_unknown(options, "fit_jointly")
    task = JointTask(model, flow, loss=loss, n_samples=n_samples)
    held_out = None if val_data is None else (val_data,)
    return run(task, (x,), val_data=held_out, options=LoopOptions(**options))
