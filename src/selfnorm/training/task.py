"""What a run trains, a :class:`Task`; and where its rows come from, a :class:`Source`.

The engine knows rows by their numbers. It asks a :class:`Source` for the order of an epoch, for the
row numbers of its mini-batches and for the rows themselves. Tensors in memory are a
:class:`TensorSource`; models that train side by side go through rows of their own, which is a
:class:`MemberSource`; data larger than memory need a source of three methods:

>>> class Squares(Source):
...     def __len__(self) -> int:
...         return 4
...     def take(self, rows: Tensor) -> tuple[Tensor, ...]:
...         return (rows.square(),)
...     def fingerprint(self) -> str:
...         return "squares"
>>> source = Squares()
>>> epoch = torch.tensor([2, 0, 3, 1])
>>> [source.take(rows)[0].tolist() for rows in source.batches(epoch, 2)]
[[4, 0], [9, 1]]
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from selfnorm._inputs import as_tensors

if TYPE_CHECKING:
    from selfnorm.training.loop import Stepper
    from selfnorm.training.options import Keeper, TrainingOptions

ParameterGroup = dict[str, Any]  # of an optimiser
State = dict[str, Any]  # values and tensors by name, as a checkpoint stores them
TaskOptions = dict[str, Any]  # what a model's own task takes, by name

_PREVIEW = 10_000  # rows that a task sees of data that are not in memory


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


class MembersTask(Task):
    """A task of members that train side by side, of which each keeps its own best state.

    Attributes:
        keeper: the best states.
    """

    keeper: Keeper

    def own_state(self) -> State:
        """The members' best states."""
        return self.keeper.state_dict()

    def load_own_state(self, state: State) -> None:
        """Go on with the best states of a checkpoint."""
        self.keeper.load_state_dict(state)


class Source(ABC):
    """Rows by their numbers, ``0`` to ``len(source) - 1``.

    Attributes:
        capturable: :meth:`take` asks nothing of the host, so that a step may be captured as a CUDA
            graph.
    """

    capturable: bool = False

    @abstractmethod
    def __len__(self) -> int:
        """Number of rows."""

    @abstractmethod
    def take(self, rows: Tensor) -> tuple[Tensor, ...]:
        """A mini-batch: the rows of these numbers ``(B,)``, on the device of the numbers."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Hash of the data: a run is resumed only on the data it began with."""

    def preview(self, device: torch.device) -> tuple[Tensor, ...]:
        """Rows for a task's checks, validation and closing step: all of those in memory."""
        return self.take(torch.arange(min(len(self), _PREVIEW), device=device))

    def epoch(self, device: torch.device) -> Tensor:
        """Row numbers in the order of a new epoch, from torch's global generator.

        Checkpoints store them.
        """
        return torch.randperm(len(self), device=device)

    def batches(self, epoch: Tensor, size: int, rank: int = 0, world: int = 1) -> Tensor:
        """Row numbers ``(steps, size / world)`` of the mini-batches that one of ``world`` ranks
        takes; rows at the end of an epoch that fill no batch are left out.
        """
        steps = max(1, len(epoch) // size)
        return epoch[: steps * size].view(steps, -1)[:, rank::world]


class TensorSource(Source):
    """Tensors with one first dimension, on the device of the model."""

    capturable = True

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.tensors[0])

    def take(self, rows: Tensor) -> tuple[Tensor, ...]:
        """These rows of every tensor."""
        return tuple(tensor.index_select(0, rows) for tensor in self.tensors)

    def fingerprint(self) -> str:
        """Of the tensors."""
        return fingerprint(self.tensors)

    def preview(self, device: torch.device) -> tuple[Tensor, ...]:
        """All rows."""
        return tuple(tensor.to(device) for tensor in self.tensors)


class MemberSource(Source):
    """Rows for members that train side by side: each goes through rows and in an order of its own.

    Args:
        tensors: ``(n, ...)`` that the members share, or ``(K, n, ...)``, a table for each of them.
        rows: ``(len, K)``; column ``k`` are the row numbers that member ``k`` goes through.
        shared: whether the tables are shared.
    """

    capturable = True

    def __init__(self, tensors: tuple[Tensor, ...], rows: Tensor, *, shared: bool = True) -> None:
        self.tensors, self.rows, self.shared = tensors, rows, shared
        self._member = torch.arange(rows.shape[1], device=rows.device)[:, None]

    def __len__(self) -> int:
        """Length of the members' lists."""
        return len(self.rows)

    def take(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Rows ``(K, B, ...)`` at places ``(B,)`` of the members' lists."""
        numbers = self.rows.index_select(0, rows).T
        if self.shared:
            return tuple(tensor[numbers] for tensor in self.tensors)
        return tuple(tensor[self._member, numbers] for tensor in self.tensors)

    def fingerprint(self) -> str:
        """Of the tables and of the members' rows."""
        return fingerprint((self.rows, *self.tensors))


def as_source(data: Source | Sequence[Tensor], name: str, device: torch.device) -> Source:
    """Data as a source; tensors and arrays are moved to the device."""
    return data if isinstance(data, Source) else TensorSource(as_tensors(tuple(data), name, device))


def fingerprint(tensors: Sequence[Tensor]) -> str:
    """Hash of shapes, types and numbers of tensors."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(str((tuple(tensor.shape), tensor.dtype)).encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
