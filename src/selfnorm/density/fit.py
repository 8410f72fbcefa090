"""``fit``: train a model by SNL or another objective, from start values to the closing ``b``."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from selfnorm import functional as F
from selfnorm._context import seeded
from selfnorm._inputs import check_rows, moved
from selfnorm.density import objectives
from selfnorm.density.chunked import Chunked
from selfnorm.density.model import EBM
from selfnorm.distributions import Proposal, proposal_for
from selfnorm.errors import DataError, EnergyError, ProposalError, SelfnormWarning
from selfnorm.evaluation import draw_log_weights, estimate_log_norm
from selfnorm.training import History, Task, TrainingOptions, run, whole_number

__all__ = ["DensityTask", "checked_tables", "fit"]


@moved(bf16="densities are trained in the precision of their parameters")
def fit(
    model: nn.Module,
    x_train: Any,
    *,
    proposal: Any = None,
    objective: str | objectives.Objective = "snl",
    n_samples: int = 1024,
    batch_size: int = 256,
    max_epochs: int = 25,
    lr: float = 1e-3,
    val_data: Any = None,
    seed: int | None = None,
    progress: bool = True,
    lr_log_norm: float | None = None,
    max_steps: int | None = None,
    optimizer: str = "adamw",
    weight_decay: float = 0.0,
    schedule: str = "one_cycle",
    warmup: float = 0.1,
    clip_norm: float | None = 10.0,
    ema: float | None = None,
    patience: int | None = None,
    validate_every: int | None = None,
    checkpoint: str | None = None,
    checkpoint_every: int | None = None,
    resume: bool = True,
    cuda_graph: bool = True,
    compile_step: bool = False,
    max_memory: float | None = None,
    **task_options: Any,
) -> History:
    r"""Train ``model`` on ``x_train`` and leave it normalised.

    Args:
        model: an :class:`~selfnorm.EBM`, or a model with a ``training_task`` of its own.
        x_train: ``(n, d)`` rows: a tensor, an array or a data frame of numbers (or a tuple of
            tensors, for conditional models).
        proposal: where the samples for ``Z`` come from; the model's base by default. Any
            distribution; see :func:`~selfnorm.distributions.as_proposal`.
        objective: ``"snl"`` or another name of :func:`selfnorm.density.objectives.available`, or
        an object. n_samples: proposal samples per step.
        batch_size, max_epochs, max_steps: size of the run, whichever ends first.
        lr: peak learning rate of the energy; ``lr_log_norm`` that of ``b`` (10 times it by
            default: ``b`` must follow ``log Z`` as the energy moves).
        val_data: held-out rows; the state with the best held-out score is kept.
        seed: same seed, same bits on CPU; the caller's random state is left alone.
        progress: show a progress bar with both bounds.
        optimizer: ``"adamw"`` or ``"adam"``; ``weight_decay`` spares ``b``.
        schedule: ``"one_cycle"`` (rise over the ``warmup`` share, then cosine), ``"cosine"``,
            ``"constant"``, ``"exponential"`` (falls to ``1/e``).
        clip_norm: gradient norm limit, ``None`` for none.
        ema: decay of a moving average of the parameters, e.g. 0.999; it is what is validated
            and kept.
        patience: stop after so many validations without a better score.
        validate_every: steps between validations (an epoch, or a hundredth of the run).
        checkpoint: file to save progress to, every ``checkpoint_every`` steps; an existing one of
            the same run is resumed (``resume=False`` starts afresh). On CPU a resumed run ends
            with the same bits as one never stopped.
        cuda_graph: capture the step on CUDA where possible.
        compile_step: let ``torch.compile`` fuse the loss and its gradient. Takes half a minute
            before the first step, then saves most where many small operations meet: models
            trained together, small networks. Same numbers up to rounding.
        max_memory: bytes (below 1: share of the free memory) that the samples of a step may take;
            they then go through the network in chunks, with the gradient unchanged.
        task_options: passed to the model's own ``training_task``.

    Returns:
        The :class:`~selfnorm.History`. The model is changed in place, ends in its best state and,
        for objectives that do not fix it otherwise, with ``b = log Z_hat`` on fresh samples.

    Example:
        >>> import selfnorm as sn
        >>> x = torch.randn(500, 2) * torch.tensor([1.0, 3.0]) + 1
        >>> q = sn.Gaussian.fit_to(x)
        >>> model = sn.EBM(sn.MLP(2, hidden=(16,)), base=q)
        >>> history = sn.fit(model, x, proposal=q, max_epochs=2, seed=0, progress=False)
        >>> history.stopped
        'max_epochs'
    """
    n_samples = whole_number("n_samples", n_samples)
    options = TrainingOptions(
        batch_size=batch_size,
        max_epochs=max_epochs,
        max_steps=max_steps,
        lr=lr,
        optimizer=optimizer,
        weight_decay=weight_decay,
        schedule=schedule,
        warmup=warmup,
        clip_norm=clip_norm,
        ema=ema,
        patience=patience,
        validate_every=validate_every,
        seed=seed,
        progress=progress,
        checkpoint=None if checkpoint is None else str(checkpoint),
        checkpoint_every=checkpoint_every,
        resume=resume,
        cuda_graph=cuda_graph,
        compile_step=compile_step,
    )
    data = x_train if isinstance(x_train, tuple) else (x_train,)
    held_out = val_data if val_data is None or isinstance(val_data, tuple) else (val_data,)
    task: Task
    make_task: Any = getattr(model, "training_task", None)
    if make_task is not None:
        if max_memory is not None:
            raise TypeError(f"max_memory is for an EBM; {type(model).__name__} trains its own way")
        if proposal is not None:
            task_options["proposal"] = proposal
        task = make_task(objective=objective, n_samples=n_samples, **task_options)
    elif isinstance(model, EBM):
        if task_options:
            raise TypeError(f"fit() got unexpected options {sorted(task_options)}")
        task = DensityTask(
            model,
            proposal,
            objective=objective
            if max_memory is None
            else Chunked(objective, max_memory=max_memory),
            n_samples=n_samples,
            log_norm_lr_scale=10.0 if lr_log_norm is None else lr_log_norm / lr,
        )
        data, held_out = checked_tables(model, data, held_out)
    else:
        raise TypeError(
            f"fit() cannot train a {type(model).__name__}: wrap the energy as "
            "selfnorm.EBM(energy), or give the model a training_task() method"
        )
    return run(task, data, val_data=held_out, options=options)


Parts = tuple[Any, ...]


def checked_tables(model: EBM, data: Parts, held_out: Parts | None) -> tuple[Parts, Parts | None]:
    """Training and held-out rows of a density: one table each, checked, in the model's type."""
    _refuse_more_parts(data, "x_train")
    rows = check_rows(data[0], "x_train", dtype=model.dtype)
    if held_out is None:
        return (rows,), None
    _refuse_more_parts(held_out, "val_data")
    held = check_rows(held_out[0], "val_data", width=rows.shape[1], minimum=1, dtype=model.dtype)
    return (rows,), (held,)


def _refuse_more_parts(data: Parts, name: str) -> None:
    """A density has one table: weights or labels beside it would be ignored in silence."""
    if len(data) != 1:
        raise DataError(
            f"{name} is a tuple of {len(data)} parts, an EBM is trained on one table: pass that "
            "alone (rows with weights can be drawn with torch.multinomial; labels need a "
            "ConditionalEBM)"
        )


class DensityTask(Task):
    """Training of an EBM with a fixed (or separately trained) proposal."""

    module: EBM

    def __init__(
        self,
        model: EBM,
        proposal: Any,
        *,
        objective: str | objectives.Objective = "snl",
        n_samples: int = 1024,
        log_norm_lr_scale: float = 10.0,
        n_val_samples: int = 16_384,
    ) -> None:
        self.module = model
        self.objective = objectives.get(objective)
        # Objectives with inner gradients or host-side buffers cannot be captured as a CUDA graph.
        self.capturable = getattr(self.objective, "capturable", True)
        self.n_samples = n_samples
        self.log_norm_lr_scale = log_norm_lr_scale
        self.n_val_samples = n_val_samples
        if proposal is None:
            proposal = model.base
        if proposal is None:
            raise ProposalError(
                "fit needs a proposal: pass one fitted to the data, e.g. "
                "proposal=selfnorm.Defensive.fit_to(x_train), or give the model a base density"
            )
        self.proposal: Proposal = proposal_for(model, proposal)
        self._val_samples: tuple[Tensor, Tensor] | None = None

    def settings(self) -> dict[str, Any]:
        """What a resumed run must share with the one it continues, beside the loop's options."""
        return {
            "objective": objectives.label(self.objective),
            "n_samples": self.n_samples,
            "lr_log_norm": f"{self.log_norm_lr_scale:.6g} x lr",
        }

    def witness(self, data: tuple[Tensor, ...]) -> Tensor:
        """``log p~`` and ``log q`` of the first rows: other laws, other numbers."""
        x = data[0][:64]
        return torch.cat([self.module.log_unnormalized(x), self.proposal.log_prob(x)])

    def own_state(self) -> Any:
        """What the objective remembers from step to step, e.g. chains; ``None`` if nothing."""
        remembered: Any = getattr(self.objective, "state_dict", None)
        return None if remembered is None else remembered()

    def load_own_state(self, state: Any) -> None:
        """Go on with what :meth:`own_state` gave."""
        take: Any = getattr(self.objective, "load_state_dict", None)
        if take is not None:
            take(state)

    def parameter_groups(self) -> list[dict[str, Any]]:
        """The energy's parameters, and ``b`` with a learning rate of its own."""
        b = self.module.log_norm
        rest = [p for p in self.module.parameters() if p is not b and p.requires_grad]
        return [
            {"params": rest},
            {"params": [b], "lr_scale": self.log_norm_lr_scale, "weight_decay": 0.0},
        ]

    @torch.no_grad()
    def start(self, data: tuple[Tensor, ...]) -> None:
        """Check proposal and energy on the data, and set ``b`` to an estimate of ``log Z``."""
        x = data[0]
        trained = [p for p in self.module.parameters() if p.requires_grad]
        if all(p is self.module.log_norm for p in trained):
            warnings.warn(
                "the energy has no parameter to train: only b is fitted. A network inside a "
                "function or lambda is not seen; make the energy a torch.nn.Module",
                SelfnormWarning,
                stacklevel=5,
            )
        if self.proposal.dim != x.shape[1]:
            raise ProposalError(
                f"the proposal is over rows of {self.proposal.dim} numbers, the data have "
                f"{x.shape[1]} columns; fit it to the data, e.g. Gaussian.fit_to(x)"
            )
        log_q = self.proposal.log_prob(x)
        missed = ~torch.isfinite(log_q)
        if bool(missed.any()):
            raise ProposalError(
                f"the proposal has zero density at {int(missed.sum())} of {len(x)} rows (the first "
                f"is row {int(missed.nonzero()[0])}): what it cannot reach, it cannot normalise. "
                "Widen it, or use Defensive.fit_to(x)"
            )
        probe = x[: min(len(x), 1024)]
        log_p = self.module.log_unnormalized(probe)
        if not bool(torch.isfinite(log_p).all()):
            raise EnergyError(
                f"the energy (or base) is not finite at {int((~torch.isfinite(log_p)).sum())} of "
                f"the first {len(probe)} rows; check its inputs' scale and its output"
            )
        log_w = draw_log_weights(self.module, self.proposal, self.n_val_samples)
        if bool(torch.isnan(log_w).any()):
            raise EnergyError(
                "the energy returns NaN at proposal samples; it must be defined wherever the "
                "proposal puts mass"
            )
        self.module.log_norm.copy_(F.log_mean_exp(log_w.double()))

    def loss(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:
        """The objective on one mini-batch with fresh proposal samples."""
        x, *columns = batch
        if columns and isinstance(self.objective, objectives.WeightObjective):
            return self.objective.loss(self.module, self.proposal, x, self.n_samples, columns[0])
        return self.objective.loss(self.module, self.proposal, x, self.n_samples)

    def _takes_log_base(self) -> bool:
        # A subclass with a loss of its own keeps to the protocol, which has no such argument.
        return getattr(type(self.objective), "loss", None) is objectives.WeightObjective.loss

    @torch.no_grad()
    def data_columns(self, data: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """What a step needs of each row and no training changes: ``log d(x_i)`` of a base that is
        the proposal too. The loop hands it to :meth:`loss` beside the row."""
        known = self.proposal is self.module.base and not self.proposal.trainable
        if not known or not self._takes_log_base():
            return ()
        return (self.proposal.log_prob(data[0]),)

    @torch.no_grad()
    def validate(self, data: tuple[Tensor, ...]) -> dict[str, float]:
        """Held-out bounds on a set of proposal samples that stays the same over the run.

        The score is the lower bound: ``b`` has followed *all* samples seen in training, so a state
        whose mass the validation samples miss shows as a gap and is not chosen. Objectives that
        do not learn ``b`` are scored by the upper bound.
        """
        samples, log_q = self._validation_samples()
        log_w = self.module.log_unnormalized(samples) - log_q
        log_p = self.module.log_unnormalized(data[0]).mean()
        log_z = F.log_mean_exp(log_w)
        upper = log_p - log_z
        lower = upper - F.bound_gap(log_z - self.module.log_norm)
        return {
            "score": float(lower if self.objective.learns_log_norm else upper),
            "lower": float(lower),
            "upper": float(upper),
            "ess": float(F.ess(log_w)),
        }

    def _validation_samples(self) -> tuple[Tensor, Tensor]:
        if self._val_samples is None or self.proposal.trainable:
            with seeded(20_231_106, self.module.device):
                samples = self.proposal.sample((self.n_val_samples,))
            self._val_samples = samples, self.proposal.log_prob(samples)
        return self._val_samples

    def finish(self, data: tuple[Tensor, ...]) -> dict[str, float]:  # noqa: ARG002
        """``b <- log Z_hat`` on fresh samples: the closed-form maximiser of SNL in ``b``."""
        learned = float(self.module.log_norm.detach())
        log_z, error, n_used = estimate_log_norm(self.module, self.proposal)
        if math.isfinite(log_z):
            with torch.no_grad():
                self.module.log_norm.fill_(log_z)
        return {
            "log_norm": log_z,
            "log_norm_se": error,
            "log_norm_learned": learned,
            "log_norm_samples": n_used,
        }
