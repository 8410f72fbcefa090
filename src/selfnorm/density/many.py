"""``fit_many``: train many models of one shape as one batched model.

Seeds, restarts, ensembles and grids of learning rates cost little more than a single run: their
networks become batched matrix products, their optimisers one. Everything else stays each member's
own: data and their order, proposal samples, learning rate, weight decay, gradient clipping, skipped
steps, early stopping, best state and closing ``b``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from selfnorm._inputs import check_rows
from selfnorm.density import objectives
from selfnorm.density.many_task import ManyTask, MemberData
from selfnorm.density.model import EBM
from selfnorm.density.stacked_energies import check_training_keeps_buffers
from selfnorm.distributions import proposal_for
from selfnorm.errors import DataError, ProposalError
from selfnorm.training import (
    History,
    TrainingOptions,
    fingerprint,
    refuse_unknown,
    run,
    whole_number,
)

__all__ = ["fit_many"]

PerMember = float | Sequence[float]


def fit_many(
    models: Sequence[EBM],
    x_train: Tensor | Sequence[Tensor],
    *,
    proposal: Any = None,
    objective: str | Sequence[str] = "snl",
    n_samples: int = 1024,
    batch_size: int = 256,
    max_epochs: int = 25,
    lr: PerMember = 1e-3,
    val_data: Tensor | Sequence[Tensor] | None = None,
    seed: int | None = None,
    progress: bool = True,
    lr_log_norm: PerMember | None = None,
    weight_decay: PerMember = 0.0,
    same_batches: bool = False,
    same_samples: bool = False,
    checkpoint: str | None = None,
    **options: Any,
) -> list[History]:
    r"""Train ``K`` EBMs of the same shape together; each ends as after :func:`selfnorm.fit`.

    Args:
        models: EBMs whose energies are built alike; bases may differ, or be absent.
        x_train: ``(n, d)`` rows shared by all members, or one table for each. Members with fewer
            rows than the largest go through theirs more often; an epoch is the largest's.
        proposal: one for all members or a sequence of one for each; the bases by default.
        objective: a name of :func:`selfnorm.density.objectives.available` that is a function of
        weights
            (``"snl"``, ``"nce"``, ...), or one for each member.
        n_samples: proposal samples per step **and member**.
        batch_size, max_epochs, seed, progress: as in :func:`selfnorm.fit`.
        lr, lr_log_norm, weight_decay: a number, or one for each member.
        val_data: held-out rows, shared or one table each; every member keeps its own best state.
        same_batches, same_samples: give all members the same rows and (with a common proposal) the
            same samples. With both, member ``k`` gets the very random numbers of
            ``fit(models[k], ..., seed=seed)`` and ends there too, up to rounding.
        checkpoint: file to save the progress of all members to, and to resume from.
        options: the remaining options of :func:`selfnorm.fit`: ``max_steps``, ``optimizer``,
            ``schedule``, ``warmup``, ``clip_norm`` (per member), ``ema``, ``patience`` (per
            member: one that has stopped no longer moves), ``validate_every``, ``resume`` ...

    Returns:
        One :class:`~selfnorm.History` per member; ``seconds`` is the time of all together.

    Example:
        >>> import selfnorm as sn
        >>> x = torch.randn(500, 2) * torch.tensor([1.0, 3.0]) + 1
        >>> q = sn.Gaussian.fit_to(x)
        >>> models = [sn.EBM(sn.MLP(2, hidden=(16,)), base=q) for _ in range(4)]
        >>> histories = sn.fit_many(models, x, lr=[1e-3, 3e-3, 1e-2, 3e-2], max_epochs=2, seed=0,
        ...                         progress=False)
        >>> [h.stopped for h in histories]
        ['max_epochs', 'max_epochs', 'max_epochs', 'max_epochs']
    """
    models = list(models)
    if not models or not all(isinstance(m, EBM) for m in models):
        raise TypeError("fit_many needs a sequence of one or more selfnorm.EBM")
    if len({id(m) for m in models}) < len(models):
        raise ValueError("the same model object appears twice; copy.deepcopy it for a second run")
    _refuse_shared(models)
    n_samples = whole_number("n_samples", n_samples)
    refuse_unknown(options, "fit_many")
    members = len(models)
    device = models[0].device
    dtype = models[0].dtype
    rows = _moved(_tables(x_train, members, "x_train", dtype=dtype), device)
    if isinstance(models[0].energy, nn.Module):
        check_training_keeps_buffers(models[0].energy, rows[0])
    held_out = None
    if val_data is not None:
        width = rows[0].shape[1]
        held_out = _tables(val_data, members, "val_data", width=width, minimum=1, dtype=dtype)
        held_out = _moved(held_out, device)
    elif options.get("patience") is not None:
        raise DataError(
            "early stopping (patience) needs held-out data: pass val_data, or leave patience=None"
        )
    rates = _per_member(lr, members, "lr")
    rates_b = (
        [10.0 * r for r in rates]
        if lr_log_norm is None
        else _per_member(lr_log_norm, members, "lr_log_norm")
    )
    decays = _per_member(weight_decay, members, "weight_decay")
    names = [objective] * members if isinstance(objective, str) else list(objective)
    if len(names) != members:
        raise ValueError(f"got {len(names)} objectives for {members} models")
    loop_options = TrainingOptions(
        batch_size=batch_size,
        max_epochs=max_epochs,
        lr=max(rates),
        seed=seed,
        progress=progress,
        checkpoint=None if checkpoint is None else str(checkpoint),
        **options,
    )
    task = ManyTask(
        models,
        _proposals(proposal, models),
        MemberData(rows),
        None if held_out is None else MemberData(held_out),
        objective_list=[objectives.get(name) for name in names],
        n_samples=n_samples,
        lr_factors=[r / max(rates) for r in rates],
        log_norm_factors=[b / r for b, r in zip(rates_b, rates, strict=True)],
        weight_decays=decays,
        patience=loop_options.patience,
        same_samples=same_samples,
    )
    patience = [float(loop_options.patience or 0)] * members
    settings = torch.tensor([rates, rates_b, decays, patience], dtype=torch.float64)
    order = _row_orders(rows, seed, settings, same_batches, keep=checkpoint is not None)
    # The loop hands out rows of `order`; what is held out, and who has stopped, the task knows.
    shared_options = replace(loop_options, patience=None)
    joint = run(task, (order.to(device),), val_data=(order[:1],), options=shared_options)
    task.module.write_back(models)
    for model in models:
        model.eval()
    return task.histories(joint, rates)


def _refuse_shared(models: Sequence[EBM]) -> None:
    """One network in two models would end with the weights of one and the ``b`` of the other."""
    owner: dict[int, int] = {}
    for k, model in enumerate(models):
        energy = model.energy
        trained = energy.parameters() if isinstance(energy, nn.Module) else ()
        for p in trained:
            if p.requires_grad and owner.setdefault(id(p), k) != k:
                raise ValueError(
                    f"members {owner[id(p)]} and {k} share a trained parameter; give each an "
                    "energy of its own, e.g. copy.deepcopy(energy)"
                )


def _tables(
    x: Any,
    members: int,
    name: str,
    *,
    width: int | None = None,
    minimum: int = 2,
    dtype: torch.dtype | None,
) -> list[Tensor]:
    if len(getattr(x, "shape", ())) in (1, 2):  # one tensor, array or data frame for all
        return [check_rows(x, name, width=width, minimum=minimum, dtype=dtype)] * members
    tables = list(x)
    if len(tables) != members:
        raise DataError(
            f"{name} holds {len(tables)} tables for {members} models: pass one table for all, or "
            "one for each"
        )
    width = width or np.shape(tables[0])[-1]
    return [
        check_rows(t, f"{name}[{k}]", width=width, minimum=minimum, dtype=dtype)
        for k, t in enumerate(tables)
    ]


def _per_member(value: PerMember, members: int, name: str) -> list[float]:
    values = [float(v) for v in np.ravel(value)]
    if np.ndim(value) == 0:
        values = values * members
    if len(values) != members:
        raise ValueError(f"{name} holds {len(values)} numbers for {members} models")
    if name != "weight_decay" and not all(v > 0 for v in values):
        raise ValueError(f"{name} must be positive, got {values}")
    return values


def _moved(tables: list[Tensor], device: torch.device) -> list[Tensor]:
    """The tables on the device; one that all members share is moved once."""
    moved = {id(table): table.to(device) for table in tables}
    return [moved[id(table)] for table in tables]


def _proposals(proposal: Any, models: Sequence[EBM]) -> list[Any]:
    if proposal is None:
        given: list[Any] = [m.base for m in models]
    elif isinstance(proposal, list | tuple):
        given = list(proposal)
        if len(given) != len(models):
            raise ProposalError(f"got {len(given)} proposals for {len(models)} models")
    else:
        given = [proposal] * len(models)
    if any(q is None for q in given):
        raise ProposalError(
            "fit_many needs a proposal: pass one (or one for each member), e.g. "
            "proposal=selfnorm.Defensive.fit_to(x_train), or give every model a base density"
        )
    return [proposal_for(model, q) for model, q in zip(models, given, strict=True)]


def _row_orders(
    rows: list[Tensor], seed: int | None, settings: Tensor, same: bool, keep: bool
) -> Tensor:
    """``(n, K)`` row numbers: column ``k`` is the order in which member ``k`` meets its rows.

    The loop shuffles the rows of this table every epoch; as the columns are independent
    permutations, so are the members' batches.
    """
    longest = max(len(t) for t in rows)
    lengths = torch.tensor([len(t) for t in rows])
    if same:
        return torch.arange(longest)[:, None] % lengths
    # Seeded by the data and settings too: the loop refuses to resume when its table has changed.
    start = int(fingerprint((*rows[: 1 if rows[0] is rows[-1] else None], settings))[:15], 16)
    if seed is None and not keep:
        start = int(torch.randint(2**60, ()))
    generator = torch.Generator().manual_seed((start ^ (seed or 0)) % 2**63)
    columns = [torch.randperm(longest, generator=generator) % n for n in lengths.tolist()]
    return torch.stack(columns, dim=1)
