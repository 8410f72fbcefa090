"""Training on several devices, machines or in accumulated pieces, on Lightning Fabric.

SNL (and NCE, and the Bregman family) is a mean of per-sample terms, so the mean of gradients over
ranks and over accumulation steps *is* the gradient of the whole batch, exactly. Losses with
``log Z_hat`` inside (importance-sampled likelihood, ranking NCE) are not: their average over ``R``
ranks is the objective of ``M / R`` samples, with its larger bias. They are refused here.

Fabric launches the processes, wraps the loss for the chosen strategy (DDP) and reduces; the loop,
the task and the checkpoint are those of :func:`selfnorm.fit`.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, TypeVar, cast

import torch
from torch import Tensor, nn

from selfnorm._context import seeded
from selfnorm.density.model import EBM, DensityTask, Objective, objective_named
from selfnorm.distributions import Proposal
from selfnorm.errors import DataError, SelfnormError
from selfnorm.training import (
    Checkpoint,
    Data,
    History,
    State,
    Stepper,
    Task,
    TaskOptions,
    TrainingOptions,
    load_checkpoint,
    run,
)

if TYPE_CHECKING:
    from lightning_fabric import Fabric


Loss = tuple[Tensor, dict[str, Tensor]]
T = TypeVar("T")


class Ranks:
    """The processes of a Fabric that share the steps of one fit.

    Args:
        fabric: a launched Fabric.
        n_accumulate: pieces of a rank's share that go through the network one after another.
        samples: ``"per_rank"``, ``"same"`` or ``"per_piece"``, see
            :func:`selfnorm.fit_distributed`.
    """

    def __init__(self, fabric: Fabric, n_accumulate: int = 1, samples: str = "per_rank") -> None:
        if n_accumulate < 1:
            raise ValueError(f"n_accumulate must be at least 1, got {n_accumulate}")
        if samples not in ("per_rank", "same", "per_piece"):
            raise ValueError(f"samples must be 'per_rank', 'same' or 'per_piece', not {samples!r}")
        self.fabric, self.n_accumulate, self.samples = fabric, n_accumulate, samples
        self.pieces = fabric.world_size * n_accumulate

    def share_of(
        self,
        n_samples: int,
        model: nn.Module,
        data: Data,
        options: TrainingOptions,
        *,
        objective: str | Objective,
        task_options: TaskOptions | None,
        **_: object,
    ) -> int:
        """The samples that each piece of a step draws; refuses what one process would not do."""
        if "max_memory" in (task_options or {}):
            raise TypeError("max_memory is for one device: here n_accumulate divides a step")
        model.to(self.fabric.device)
        batch = min(options.batch_size, len(data[0] if isinstance(data, tuple) else data))
        of_step = n_samples if isinstance(model, EBM) else 0  # others draw samples for each row
        if batch % self.pieces or of_step % self.pieces:
            raise DataError(
                f"batch_size ({batch}) and n_samples ({n_samples}) must be multiples of "
                f"{self.fabric.world_size} ranks x {self.n_accumulate} accumulation steps"
            )
        if not of_step:
            return n_samples
        share = of_step // self.pieces
        if self.pieces > 1 and not objective_named(objective).linear:
            raise ValueError(
                "this objective has log Z_hat inside: averaged over ranks or accumulation steps it "
                f"is the objective of {share} samples, not of {n_samples}. Use 'snl' (exact) or, "
                "on one device, max_memory"
            )
        return share

    def run(
        self, task: Task, data: Data, held_out: Data | None, options: TrainingOptions
    ) -> History:
        """The run, on every rank."""
        fabric = self.fabric
        seed = _seed_of_resumed(options.saving) if options.seed is None else options.seed
        options = replace(
            options,
            seed=int(fabric.broadcast(seed)),
            max_time=fabric.broadcast(options.max_time),
            progress=options.progress and fabric.is_global_zero,
        )
        shared = DistributedTask(task, self)
        fabric.barrier()  # all ranks see the same checkpoint, or none
        with shared.interrupts_together(), _named_if_lost(fabric.world_size, options.saving):
            return run(cast("Task", shared), data, val_data=held_out, options=options)


def _seed_of_resumed(saving: Checkpoint | None) -> int:
    """The seed that the run drew when it began; a new one where none has begun."""
    if saving is not None and saving.resume and Path(saving.path).exists():
        seed = load_checkpoint(saving.path).get("options", {}).get("seed")
        if seed is not None:
            return int(seed)
    return int(torch.randint(2**31, ()))


@contextmanager
def _named_if_lost(ranks: int, saving: Checkpoint | None) -> Iterator[None]:
    """Say how to go on where the others no longer answer."""
    try:
        yield
    except RuntimeError as error:
        words = str(error).lower()
        lost = isinstance(error, torch.distributed.DistError) or any(
            word in words for word in ("connection", "gloo", "nccl", "peer", "timed out")
        )
        if ranks == 1 or not lost:
            raise
        cure = "nothing was saved: give options=TrainingOptions(checkpoint=...) next time"
        if saving is not None:
            cure = f"start all ranks again with the same call: it goes on from {saving.path}"
            if not Path(saving.path).exists():
                cure = f"it was lost before {saving.path} was written: start all ranks again"
        raise SelfnormError(f"a rank has ended or does not answer ({error}); {cure}") from error


class _Loss(nn.Module):
    """The loss as a forward pass, because that is what Fabric's strategies wrap."""

    def __init__(self, module: nn.Module, loss: Callable[[tuple[Tensor, ...]], Loss]) -> None:
        super().__init__()
        self.inner = module
        self._loss = loss

    def forward(self, *batch: Tensor) -> Loss:
        return self._loss(batch)


class DistributedTask:
    """A task whose loss and gradient are the mean over ranks and accumulation steps.

    Every rank walks through the same batches (the loop's random stream is common to all), of which
    its source gives it the rows of its own share. What is not here is the task's own.
    """

    capturable = False

    def __init__(self, task: Task, ranks: Ranks) -> None:
        self.task, self.module = task, task.module
        fabric = self.fabric = ranks.fabric
        self.n_accumulate, self.pieces = ranks.n_accumulate, ranks.pieces
        self.own_stream, self.per_piece = ranks.samples != "same", ranks.samples == "per_piece"
        self._common = 0
        self.rank, self.world = fabric.global_rank, fabric.world_size
        self._interrupted = False
        trained = [p for group in task.parameter_groups() for p in group["params"]]
        self._params = [p for p in trained if p.requires_grad]
        self._loss = fabric.setup_module(_Loss(task.module, self._local_loss))

    def __getattr__(self, name: str) -> object:
        return getattr(self.task, name)

    def settings(self) -> State:
        """Those of the task, with the samples of all ranks and pieces together."""
        settings = self.task.settings()
        if "n_samples" in settings:
            settings["n_samples"] *= self.pieces
        return settings

    def start(self, data: tuple[Tensor, ...]) -> None:
        """The task's own start; rank 0's state is what all begin with."""
        self.task.start(data)
        self._agree()

    def _agree(self) -> None:
        if self.world == 1:
            return
        with torch.no_grad():
            for p in self._params:
                p.copy_(self.fabric.broadcast(p.detach(), src=0).to(p.device))

    def loss(self, batch: tuple[Tensor, ...]) -> Loss:
        """Loss on this rank's share of a batch; value and metrics are means over all ranks.

        Means of ``loss`` and ``lower`` are those of the whole batch; ``upper`` has a logarithm, its
        mean is that of bounds with ``M / R`` samples. Validation uses all samples on every rank.
        """
        # One number from the common stream seeds every rank's own: nothing to save per rank.
        common = int(torch.randint(2**62, ())) if self.own_stream else None
        self._common = common or 0
        own = None if common is None else (common + 7_919 * self.rank) % 2**62
        with seeded(own, self.fabric.device):
            loss, metrics = self._loss(*batch)
        if self.world == 1:
            return loss, metrics
        stop = loss.new_tensor(float(self._interrupted))
        local = torch.stack([loss.detach(), stop, *(metrics[k].detach() for k in metrics)])
        means = self.fabric.all_reduce(local, reduce_op="mean")
        if float(means[1]) > 0:
            raise KeyboardInterrupt
        # All ranks must see the same value, or one would skip a step that another takes.
        value = loss + (means[0] - loss.detach())
        return value, dict(zip(metrics, means[2:], strict=True))

    def guard(self, stepper: Stepper, *, looking: bool) -> str | None:
        """The task's reason to stop, asked before validations alone: rank 0 decides for all."""
        if not looking:
            return None
        return self.fabric.broadcast(self.task.guard(stepper, looking=looking))

    @contextmanager
    def interrupts_together(self) -> Iterator[None]:
        """Turn Ctrl-C on one rank into an interrupt of all ranks at the same step.

        An exception at once would leave the others waiting for ever in a reduction. The second
        Ctrl-C is the usual one.
        """
        alone = self.world == 1
        if alone or threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(signum: int, frame: FrameType | None) -> None:  # noqa: ARG001 the signal module's signature
            self._interrupted = True
            signal.signal(signal.SIGINT, before)

        before = signal.signal(signal.SIGINT, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _local_loss(self, batch: tuple[Tensor, ...]) -> Loss:
        n, task = self.n_accumulate, self.task
        pieces = [tuple(t[k::n] for t in batch) for k in range(n)]
        if self.per_piece:
            streams = [self._common + 7_919 * (self.rank + self.world * k) for k in range(n)]
            named = zip(streams, pieces, strict=True)
            losses = [partial(self._loss_of_piece, stream, piece) for stream, piece in named]
            return _accumulate(losses, self._params)
        if self.own_stream or not isinstance(task, DensityTask):
            return _accumulate([partial(task.loss, piece) for piece in pieces], self._params)
        model, q, count = task.model, task.proposal, task.n_samples
        with torch.no_grad():
            drawn = q.sample((count * self.pieces,))[self.rank :: self.world]
        dealt = [_Drawn(q, drawn[k::n]) for k in range(n)]
        pairs = zip(dealt, pieces, strict=True)
        parts = [partial(task.objective.loss, model, own, x, count) for own, (x,) in pairs]
        return _accumulate(parts, self._params)

    def _loss_of_piece(self, stream: int, piece: tuple[Tensor, ...]) -> Loss:
        with seeded(stream % 2**62, self.fabric.device):
            return self.task.loss(piece)

    def agreed(self, value: T) -> T:
        """What rank 0 says."""
        agreed: T = self.fabric.broadcast(value)
        return agreed

    def validate(self, data: tuple[Tensor, ...]) -> dict[str, float]:
        """The task's figures, as rank 0 sees them: all ranks decide alike."""
        figures: dict[str, float] = self.fabric.broadcast(self.task.validate(data))
        return figures

    def finish(self, data: tuple[Tensor, ...]) -> dict[str, float]:
        """The task's closing step; rank 0's outcome counts."""
        final: dict[str, float] = self.fabric.broadcast(self.task.finish(data))
        self._agree()
        return final


class _Drawn(Proposal):
    """A proposal whose samples are drawn already."""

    def __init__(self, proposal: Proposal, samples: Tensor) -> None:
        super().__init__()
        self.proposal, self.samples, self.dim = proposal, samples, proposal.dim

    def sample(self, shape: Sequence[int] = ()) -> Tensor:  # noqa: ARG002 as many as there are
        return self.samples

    def log_prob(self, x: Tensor) -> Tensor:
        return self.proposal.log_prob(x)


def launched() -> Fabric:
    """A Fabric over all devices; under ``torchrun`` over its ranks."""
    try:
        from lightning_fabric import Fabric
    except ImportError as error:
        raise SelfnormError(
            "distributed training needs Lightning Fabric: pip install 'selfnorm[distributed]'"
        ) from error
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or torch.cuda.is_available():
        made = Fabric()
    else:  # without GPUs a Fabric takes one device, whatever torchrun has begun
        nodes = int(os.environ["WORLD_SIZE"]) // local
        made = Fabric(accelerator="cpu", devices=local, num_nodes=nodes, strategy="ddp")
    made.launch()
    return made


def _accumulate(parts: Sequence[Callable[[], Loss]], params: Sequence[Tensor]) -> Loss:
    """Mean loss and metrics of several parts, of which one at a time is in memory."""
    if len(parts) == 1:
        return parts[0]()
    total: list[Tensor | None] = [None] * len(params)
    values: list[Tensor] = []
    seen: list[dict[str, Tensor]] = []
    for part in parts:
        loss, metrics = part()
        grads = torch.autograd.grad(loss / len(parts), list(params), allow_unused=True)
        total = [_added(*pair) for pair in zip(total, grads, strict=True)]
        values.append(loss.detach())
        seen.append({name: metric.detach() for name, metric in metrics.items()})
    value = torch.stack(values).mean()
    for p, gradient in zip(params, total, strict=True):
        if gradient is not None:  # zero, and the gradient is the one computed
            value = value + ((p - p.detach()) * gradient).sum()
    return value, {name: torch.stack([m[name] for m in seen]).mean() for name in seen[0]}


def _added(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other
