"""``fit``, the one door to training: one model, several side by side, or one on many processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

from torch import nn

from selfnorm._context import seeded
from selfnorm.density.distributed import Ranks, launched
from selfnorm.density.many import train as train_several
from selfnorm.density.model import EBM, Objective, checked_data, make_task, usual
from selfnorm.errors import DataError
from selfnorm.training import (
    History,
    Options,
    Task,
    TaskOptions,
    TrainingOptions,
    run,
    split_rows,
)

if TYPE_CHECKING:
    from lightning_fabric import Fabric
    from typing_extensions import Unpack

SHARE = 0.1  # of the rows held out where nothing is said


@overload
def fit(
    model: nn.Module,
    x_train: object,
    *,
    proposal: object = None,
    objective: str | Objective = "snl",
    n_samples: int = 1024,
    val_data: object = SHARE,
    fabric: Fabric | Ranks | None = None,
    task: Task | None = None,
    task_options: TaskOptions | None = None,
    options: TrainingOptions | None = None,
    **training: Unpack[Options],
) -> History: ...
@overload
def fit(model: Sequence[EBM], x_train: object, **how: Any) -> list[History]: ...
def fit(
    model: nn.Module | Sequence[EBM],
    x_train: object,
    *,
    proposal: object = None,
    objective: str | Objective | Sequence[str] = "snl",
    n_samples: int = 1024,
    val_data: object = SHARE,
    fabric: Fabric | Ranks | None = None,
    task: Task | None = None,
    task_options: TaskOptions | None = None,
    options: TrainingOptions | None = None,
    **training: Any,
) -> History | list[History]:
    r"""Train ``model`` on ``x_train`` and leave it normalised.

    Args:
        model: an :class:`~selfnorm.EBM`, a sequence of them (:func:`~selfnorm.fit_many`), or a
            model with a ``training_task`` of its own.
        x_train: ``(n, d)`` rows: a tensor, an array or a data frame of numbers (or a tuple of
            tensors, for conditional models), or a :class:`~selfnorm.training.Source` of rows that
            are not in memory.
        proposal: where the samples for ``Z`` come from. By default the model's base, with a
            heavy-tailed part (:class:`~selfnorm.Defensive`) where it is Gaussian. Any distribution;
            see :func:`~selfnorm.as_proposal`.
        objective: ``"snl"``, ``"nce"``, ``"ranking_nce"``, ``"importance_ml"``, the Bregman family
            ``"bregman_lsif"``, ``"bregman_reverse"``, ``"bregman_exponential"``, contrastive
            divergence ``"cd"``, ``"pcd"``, score matching ``"dsm"``, ``"ssm"``, or a
            :class:`selfnorm.density.Objective`. Other models take some of them.
        n_samples: proposal samples per step.
        val_data: held-out rows; the state with the best held-out score is kept. A number is the
            share of ``x_train`` to hold out (an EBM's alone, and none of a table too small to spare
            20 rows), ``None`` holds out none.
        fabric: a launched ``lightning_fabric.Fabric``: every rank calls ``fit`` with the same data
            (:func:`~selfnorm.fit_distributed`).
        task: what a step minimises, a :class:`~selfnorm.training.Task` of one's own.
        task_options: passed to the model's own ``training_task``. An EBM takes
            ``log_norm_lr_scale``, the learning rate of its ``b`` in units of ``lr`` (10 by default:
            it must follow ``log Z`` as the energy moves), ``max_memory``, bytes (below 1: share
            of the free memory) that the samples of a step may take; they then go through the
            network in chunks, with the gradient unchanged; and ``proposal_loss``, by which a
            :class:`~selfnorm.Flow` as proposal is trained in the same steps.
        options: how to train: a :class:`~selfnorm.TrainingOptions`, where all of them are
            described. For an EBM the usual length is 10,000 steps, at most 400 epochs, at a
            learning rate of 0.005 with a moving average (``ema=0.998``), and training ends where
            15 validations brought no better score.
        training: the same by name (``max_steps=2000, lr=3e-3``), in place of those of ``options``.

    Returns:
        The :class:`~selfnorm.History` (of several models: one for each). A model is changed in
        place, ends in its best state and, for objectives that do not fix it otherwise, with
        ``b = log Z_hat`` on fresh samples.

    Example:
        >>> import selfnorm as sn
        >>> import torch
        >>> x = torch.randn(500, 2) * torch.tensor([1.0, 3.0]) + 1
        >>> q = sn.Gaussian.fit_to(x)
        >>> model = sn.EBM(sn.MLP(2, hidden=(16,)), base=q)
        >>> history = sn.fit(model, x, proposal=q, max_epochs=2, ema=0.99, seed=0, progress=False)
        >>> history.stopped
        'max_epochs'
    """
    if not isinstance(options, TrainingOptions | None):
        raise TypeError(f"options must be a selfnorm.TrainingOptions, got {options!r}")
    share = val_data if isinstance(val_data, int | float) else None
    if share is not None:
        _check_share(share, model, fabric)
    how: dict[str, Any] = {"proposal": proposal, "objective": objective}
    how["task_options"] = task_options
    if not isinstance(model, nn.Module):
        if fabric is not None:
            raise TypeError("fabric is for one model; several are trained on one device")
        rows = None if share is not None else val_data
        how |= {"n_samples": n_samples, "val_data": rows, "options": options}
        return train_several(model, x_train, **how, **training)
    options = (options or TrainingOptions()).given(**training)
    data, held_out = checked_data(model, x_train, None if share is not None else val_data)
    if isinstance(model, EBM):
        if share is not None and fabric is None and isinstance(data, tuple):
            with seeded(options.seed, data[0].device):
                rows, spared = split_rows(data[0], share)
            data, held_out = (rows,), None if spared is None else (spared,)
        options = usual(options, judged=held_out is not None)
    if fabric is None:
        task = task or make_task(model, n_samples=n_samples, caller="fit", **how)
        return run(task, data, val_data=held_out, options=options)
    ranks = fabric if isinstance(fabric, Ranks) else Ranks(fabric)
    n_samples = ranks.share_of(n_samples, model, data, options, **how)
    task = task or make_task(model, n_samples=n_samples, caller="fit_distributed", **how)
    return ranks.run(task, data, held_out, options)


def _check_share(share: float, model: object, fabric: object) -> None:
    """Refuse a share of the rows where rows are to be given."""
    if not 0 <= share < 1:
        raise DataError(f"val_data as a share of the rows must lie between 0 and 1, got {share}")
    if share in (0, SHARE):
        return
    if fabric is not None or not isinstance(model, nn.Module):
        raise DataError(
            f"val_data are rows here, not a share of them ({share}): several models, and "
            "several processes, hold out the same rows"
        )
    if not isinstance(model, EBM):
        raise DataError(
            f"a share of the rows is held out for an EBM alone: give val_data of a "
            f"{type(model).__name__} as rows"
        )


def fit_many(
    models: Sequence[EBM], x_train: object, *, val_data: object = None, **how: Any
) -> list[History]:
    r"""Train ``K`` EBMs of the same shape together; each ends as after :func:`selfnorm.fit`.

    Args:
        models: EBMs whose energies are built alike; bases may differ, or be absent.
        x_train: ``(n, d)`` rows shared by all members, or one table for each. Members with fewer
            rows than the largest go through theirs more often; an epoch is the largest's.
        proposal: one for all members or a sequence of one for each; by default as in
            :func:`~selfnorm.fit`.
        objective: one that is a function of weights (``"snl"``, ``"nce"``, ..., see
            :func:`selfnorm.fit`), or one for each member.
        n_samples: proposal samples per step **and member**.
        val_data: held-out rows, shared or one table each; every member keeps its own best state.
        how: the rest is as in :func:`~selfnorm.fit`. ``lr`` and ``weight_decay`` are a number, or
            one for each member; ``clip_norm`` and ``patience`` are each member's (one that has
            stopped no longer moves), a ``checkpoint`` is that of all. ``task_options`` takes
            ``log_norm_lr_scale`` as in :func:`selfnorm.fit`; ``same_batches`` and
            ``same_samples`` give all members the same rows and (with a common proposal) the same
            samples. With both, member ``k`` gets the very random numbers of
            ``fit(models[k], ..., seed=seed)`` and its energy ends there too, up to rounding; the
            closing ``b`` is from other samples, and agrees within its standard error.

    Returns:
        One :class:`~selfnorm.History` per member; ``seconds`` is the time of all together.

    Example:
        >>> import selfnorm as sn
        >>> import torch
        >>> x = torch.randn(500, 2) * torch.tensor([1.0, 3.0]) + 1
        >>> q = sn.Gaussian.fit_to(x)
        >>> models = [sn.EBM(sn.MLP(2, hidden=(16,)), base=q) for _ in range(4)]
        >>> histories = sn.fit_many(models, x, lr=[1e-3, 3e-3, 1e-2, 3e-2], max_epochs=2, seed=0,
        ...                         progress=False)
        >>> [h.stopped for h in histories]
        ['max_epochs', 'max_epochs', 'max_epochs', 'max_epochs']
    """
    models = [] if isinstance(models, nn.Module) else list(models)
    if not models or not all(isinstance(model, EBM) for model in models):
        raise TypeError("fit_many needs a sequence of one or more selfnorm.EBM")
    return fit(models, x_train, val_data=val_data, **how)


def fit_distributed(
    model: nn.Module,
    x_train: object,
    *,
    fabric: Fabric | None = None,
    n_accumulate: int = 1,
    samples: str = "per_rank",
    val_data: object = None,
    **how: Any,
) -> History:
    """:func:`selfnorm.fit` over the ranks of a Fabric; call it on every rank, with the same data.

    ``batch_size`` and ``n_samples`` are those of **one optimiser step**: they are divided among
    ranks and accumulation pieces, so that the run does not depend on how many there are.

    Args:
        model: an :class:`~selfnorm.EBM`, or a model with a ``training_task`` of its own whose loss
            is a mean over rows.
        x_train: all rows, on every rank.
        fabric: a launched ``lightning_fabric.Fabric``; a default one (all devices; under
            ``torchrun`` its ranks) if absent.
        n_accumulate: pieces of a rank's share that go through the network one after another.
        samples: ``"per_rank"``: every rank draws its own share from its own stream. ``"same"``:
            all ranks draw all samples from one stream and keep their share, so that the numbers
            are those of a single process with the same seed. ``"per_piece"``: every piece of a step
            draws from a stream of its own, so that the numbers depend on ranks times
            ``n_accumulate`` alone: two ranks do what one does in two pieces.
        how: the rest is as in :func:`selfnorm.fit`. The seed is drawn on rank 0 and sent to the
            others if absent. ``checkpoint`` is a file on a disk all ranks can read; rank 0 writes
            it. It does not depend on the number of ranks: a run may be resumed on another, or by
            :func:`selfnorm.fit`.

    Example:
        >>> import selfnorm as sn
        >>> from lightning_fabric import Fabric             # doctest: +SKIP
        >>> fabric = Fabric(accelerator="cuda", devices=4, strategy="ddp")  # doctest: +SKIP
        >>> fabric.launch()                                  # doctest: +SKIP
        >>> sn.fit_distributed(model, x, fabric=fabric, proposal=q)  # doctest: +SKIP
        >>> fabric.barrier()                                 # doctest: +SKIP
        >>> torch.distributed.destroy_process_group()        # doctest: +SKIP

    The last two lines close the group: a rank that leaves with the group's threads alive may be
    aborted at its exit, after all is done. Ctrl-C on any rank stops all of them at one and the same
    step, with the best state kept on each; a second one ends the rank at once.
    """
    ranks = Ranks(fabric or launched(), n_accumulate, samples)
    return fit(model, x_train, val_data=val_data, fabric=ranks, **how)
