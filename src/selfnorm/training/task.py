"""What a run trains: a module, its loss, its validation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from selfnorm.training.options import TrainingOptions
    from selfnorm.training.step import Stepper

ParameterGroup = dict[str, Any]  # of an optimiser
State = dict[str, Any]  # values and tensors by name, as a checkpoint stores them


class Task:
    """What is trained: a module, its loss, its validation. All but :meth:`loss` have defaults.

    Attributes:
        module: everything that is trained and checkpointed.
        capturable: a step asks nothing of the host, and may be captured as a CUDA graph.
        rank, world: number of this process among those that train together, and how many there
            are: each takes its share of a batch, and the first one writes the checkpoints.
    """

    module: nn.Module
    capturable: bool = False
    rank: int = 0
    world: int = 1

    def parameter_groups(self) -> list[ParameterGroup]:
        """Optimiser groups: ``params``, optional ``lr_scale`` and ``weight_decay``."""
        return [{"params": list(self.module.parameters())}]

    def start(self, data: tuple[Tensor, ...]) -> None:
        """Check the inputs and set initial values; called once, under the run's seed."""

    def loss(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:
        """Scalar loss and detached metrics, without waiting for the device."""
        raise NotImplementedError(f"{type(self).__name__} has no loss on {len(batch)} tensors")

    def validate(self, data: tuple[Tensor, ...]) -> dict[str, float]:  # noqa: ARG002
        """Figures on held-out data; ``score`` (higher is better) chooses the best state."""
        return {}

    def finish(self, data: tuple[Tensor, ...]) -> dict[str, float]:  # noqa: ARG002
        """Closing step on the chosen state, e.g. ``b <- log Z_hat``."""
        return {}

    def make_optimizer(self, options: TrainingOptions) -> torch.optim.Optimizer:
        """Adam or AdamW over the parameter groups; fused, capturable on CUDA."""
        groups: list[ParameterGroup] = []
        for group in self.parameter_groups():
            params = [p for p in group["params"] if p.requires_grad]
            how = {"weight_decay": options.weight_decay, **group, "params": []}
            alike = [other for other in groups if {**other, "params": []} == how]
            if alike:
                alike[0]["params"] += params  # one update for both
            elif params:
                groups.append({**how, "params": params})
        if not groups:
            raise ValueError("nothing to train: no parameter of the model asks for a gradient")
        device = groups[0]["params"][0].device
        on_cuda = device.type == "cuda"
        kind = torch.optim.AdamW if options.optimizer == "adamw" else torch.optim.Adam
        lr = torch.zeros((), device=device) if on_cuda else 0.0
        return kind(groups, lr=lr, fused=True, capturable=on_cuda)

    def condition_gradients(self, params: Sequence[Tensor], clip_norm: float | None) -> Tensor:
        """Norm of the gradient, which is shortened to ``clip_norm`` where it is longer.

        In double precision: where ``log Z - b`` is over 43 the gradient's square is beyond single
        precision, and a step that would have mended the model was lost, as were all after it.
        """
        grads = [p.grad for p in params if p.grad is not None]
        if clip_norm is None or not grads:  # the optimiser squares gradients, too
            return torch.nn.utils.clip_grad_norm_(params, math.inf)
        norm = torch.stack(torch._foreach_norm(grads, 2, torch.float64)).norm()  # noqa: SLF001
        scale = (clip_norm / (norm + 1e-6)).clamp_max(1.0)
        torch._foreach_mul_(grads, scale.to(grads[0].dtype))
        return norm.to(torch.promote_types(grads[0].dtype, torch.float32))

    def guard(self, stepper: Stepper, *, looking: bool) -> str | None:  # noqa: ARG002
        """A reason to stop, ``""`` to go on; ``None`` leaves the care for bad steps to the loop.

        Called after every step (on CUDA now and then); ``looking`` before a validation.
        """
        return None

    def settings(self) -> State:
        """Plain values that a resumed run must share with the one it continues."""
        return {}

    def witness(self, data: tuple[Tensor, ...]) -> Tensor | None:  # noqa: ARG002
        """Log-densities at a few rows, by which a checkpoint of another network is told apart."""
        return None

    def own_state(self) -> State | None:
        """What a run remembers outside the module; goes into checkpoints."""
        return None

    def load_own_state(self, state: State) -> None:
        """Go on with what :meth:`own_state` gave."""
