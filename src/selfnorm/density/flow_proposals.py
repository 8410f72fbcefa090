"""Flows beside a model: brought closer to it, tilted by it, or trained together with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from selfnorm.density.model import EBM
from selfnorm.density.task import DensityTask
from selfnorm.distributions import Flow, FlowTask, proposal_loss
from selfnorm.training import History, Task, TrainingOptions, run


def adapt(
    flow: Flow,
    model: EBM,
    x: Tensor,
    *,
    loss: str = "both",
    n_samples: int = 512,
    options: TrainingOptions | None = None,
) -> History:
    """Bring a flow closer to the model it serves."""
    task = FlowTask(flow, model=model, loss=loss, n_samples=n_samples)
    return run(task, (x,), options=options or TrainingOptions())


def tilt(flow: Flow, energy: Callable[[Tensor], Tensor]) -> EBM:
    """``p(x) = flow(x) exp(-E(x) - b)``: a frozen flow as base, and as proposal of the model.

    With an energy that starts at zero the model starts exactly at the flow's likelihood, with
    ``b = 0``. Train it by ``selfnorm.fit(model, x, proposal=flow)``.

    Example:
        >>> import torch, selfnorm as sn
        >>> flow = sn.Flow(2, transforms=1, hidden=(8,))
        >>> model = tilt(flow, sn.MLP(2, hidden=(8,), zero_init=True))
        >>> x = torch.randn(5, 2)
        >>> torch.allclose(model.log_prob(x), flow.log_prob(x))
        True
    """
    return EBM(energy, base=flow.requires_grad_(False))


class JointTask(Task):
    """A model by SNL and its flow proposal by one of the three losses, in the same steps."""

    capturable = True

    def __init__(self, model: EBM, flow: Flow, *, loss: str = "data", n_samples: int = 512) -> None:
        self.model, self.flow = model, flow
        self.module = nn.ModuleDict({"model": model, "flow": flow})
        self.kind, self.n_samples = loss, n_samples
        self.of_model = DensityTask(model, flow, n_samples=n_samples)

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Those of the model, and the flow's parameters at the same rate."""
        return [*self.of_model.parameter_groups(), {"params": list(self.flow.parameters())}]

    def start(self, data: tuple[Tensor, ...]) -> None:
        """Standardise the flow, start ``b`` at its importance estimate."""
        if not bool(self.flow.fitted):
            self.flow.set_scaling(data[0])
        self.of_model.start(data)

    def loss(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:
        """``-l_SNL`` of the model plus the proposal's loss."""
        of_model, metrics = self.of_model.loss(batch)
        of_flow = proposal_loss(self.flow, self.model, batch[0], self.kind, self.n_samples)
        return of_model + of_flow, {**metrics, "flow": -of_flow.detach()}

    def validate(self, data: tuple[Tensor, ...]) -> dict[str, float]:
        """Both bounds on held-out rows."""
        return self.of_model.validate(data)

    def finish(self, data: tuple[Tensor, ...]) -> dict[str, float]:
        """``b <- log Z_hat`` on fresh samples."""
        return self.of_model.finish(data)


def fit_jointly(
    model: EBM,
    flow: Flow,
    x: Tensor,
    *,
    loss: str = "data",
    n_samples: int = 512,
    val_data: Tensor | None = None,
    options: TrainingOptions | None = None,
) -> History:
    """Train an EBM and its flow proposal together."""
    task = JointTask(model, flow, loss=loss, n_samples=n_samples)
    held_out = None if val_data is None else (val_data,)
    return run(task, (x,), val_data=held_out, options=options or TrainingOptions())
