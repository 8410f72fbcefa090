"""``fit_many``: train many models of one shape as one batched model.

Seeds, restarts, ensembles and grids of learning rates cost little more than a single run: their
networks become batched matrix products, their optimisers one. Everything else stays each member's
own: data and their order, proposal samples, learning rate, weight decay, gradient clipping, skipped
steps, early stopping, best state and closing ``b``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from selfnorm import functional as F
from selfnorm._context import random_state, seeded, set_random_state
from selfnorm._inputs import check_rows, moved
from selfnorm.density._members import Member, Members, check_training_keeps_buffers, same_law
from selfnorm.density.fit import DensityTask, WeightObjective, get, in_options
from selfnorm.density.model import EBM
from selfnorm.distributions import proposal_for
from selfnorm.errors import DataError, ProposalError, SelfnormError
from selfnorm.training import (
    History,
    Stepper,
    Task,
    TrainingOptions,
    fingerprint,
    run,
    whole_number,
)

__all__ = ["ManyTask", "MemberData", "fit_many"]

PerMember = float | Sequence[float]
_MAX_BAD_STREAK, _MAX_ROLLBACKS = 5, 8  # as in the loop, but for each member
_METRICS = ("loss", "grad_norm", "lower", "upper")
_N_VAL_SAMPLES = 16_384


@moved(**in_options("batch_size", "max_epochs", "lr", "weight_decay", "seed", "progress"))
def fit_many(
    models: Sequence[EBM],
    x_train: Tensor | Sequence[Tensor],
    *,
    proposal: Any = None,
    objective: str | Sequence[str] = "snl",
    n_samples: int = 1024,
    val_data: Tensor | Sequence[Tensor] | None = None,
    batch_size: int | None = None,
    max_epochs: int | None = None,
    lr: PerMember | None = None,
    weight_decay: PerMember | None = None,
    seed: int | None = None,
    progress: bool | None = None,
    same_batches: bool = False,
    same_samples: bool = False,
    options: TrainingOptions | None = None,
) -> list[History]:
    r"""Train ``K`` EBMs of the same shape together; each ends as after :func:`selfnorm.fit`.

    Args:
        models: EBMs whose energies are built alike; bases may differ, or be absent.
        x_train: ``(n, d)`` rows shared by all members, or one table for each. Members with fewer
            rows than the largest go through theirs more often; an epoch is the largest's.
        proposal: one for all members or a sequence of one for each; the bases by default.
        objective: a name of :func:`selfnorm.density.fit.available` that is a function of weights
            (``"snl"``, ``"nce"``, ...), or one for each member.
        n_samples: proposal samples per step **and member**.
        val_data: held-out rows, shared or one table each; every member keeps its own best state.
        lr, weight_decay: a number, or one for each member.
        batch_size, max_epochs, lr, weight_decay, seed, progress: where given they replace those
            of ``options``.
        same_batches, same_samples: give all members the same rows and (with a common proposal) the
            same samples. With both, member ``k`` gets the very random numbers of
            ``fit(models[k], ..., seed=seed)`` and ends there too, up to rounding.
        options: how to train; ``clip_norm`` and ``patience`` are each member's (one that has
            stopped no longer moves), a ``checkpoint`` is that of all.

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
    options = (options or TrainingOptions()).given(
        batch_size=batch_size, max_epochs=max_epochs, seed=seed, progress=progress
    )
    if options.max_memory is not None:
        raise TypeError("max_memory is for fit: models trained together fit into memory together")
    members = len(models)
    device, dtype = models[0].device, models[0].dtype
    rows = _moved(_tables(x_train, members, "x_train", dtype=dtype), device)
    if isinstance(models[0].energy, nn.Module):
        check_training_keeps_buffers(models[0].energy, rows[0])
    held_out = None
    if val_data is not None:
        width = rows[0].shape[1]
        held_out = _tables(val_data, members, "val_data", width=width, minimum=1, dtype=dtype)
        held_out = _moved(held_out, device)
    elif options.patience is not None:
        raise DataError(
            "early stopping (patience) needs held-out data: pass val_data, or leave patience=None"
        )
    rates = _per_member(options.lr if lr is None else lr, members, "lr")
    decays = _per_member(
        options.weight_decay if weight_decay is None else weight_decay, members, "weight_decay"
    )
    names = [objective] * members if isinstance(objective, str) else list(objective)
    if len(names) != members:
        raise ValueError(f"got {len(names)} objectives for {members} models")
    parts = zip(models, _proposals(proposal, models), names, strict=True)
    task = ManyTask(
        [Member(model, q, _of_weights(name)) for model, q, name in parts],
        MemberData(rows),
        None if held_out is None else MemberData(held_out),
        n_samples=n_samples,
        rates=rates,
        weight_decays=decays,
        same_samples=same_samples,
        options=options,
    )
    settings = torch.tensor([rates, decays], dtype=torch.float64)
    keep = options.checkpoint is not None
    order = _row_orders(rows, options.seed, settings, same_batches, keep=keep)
    # The loop hands out rows of `order`; what is held out, and who has stopped, the task knows.
    shared_options = replace(options, patience=None, lr=max(rates), weight_decay=0.0)
    joint = run(task, (order.to(device),), val_data=(order[:1],), options=shared_options)
    task.module.write_back()
    for model in models:
        model.eval()
    return task.histories(joint)


def _of_weights(name: str) -> WeightObjective:
    objective = get(name)
    if not isinstance(objective, WeightObjective):
        raise ValueError(
            f"fit_many trains by objectives that are functions of weights (snl, nce, ...); "
            f"{type(objective).__name__} is none: use fit() for each model"
        )
    return objective


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


class MemberData:
    """One table per member as ``(K, n, d)``, or one for all as ``(n, d)``.

    Shorter tables repeat their rows up to the longest; ``weight`` (``(K, n)``, rows summing to 1)
    leaves the repetitions out of means.
    """

    def __init__(self, tables: Sequence[Tensor]) -> None:
        self.tables = tables
        self.shared = all(t is tables[0] for t in tables)
        longest = max(len(t) for t in tables)
        numbers = torch.arange(longest, device=tables[0].device)
        lengths = torch.tensor([len(t) for t in tables], device=numbers.device)[:, None]
        self.weight = (numbers < lengths).float() / lengths
        self.rows = tables[0] if self.shared else torch.stack([t[numbers % len(t)] for t in tables])
        self._member = torch.arange(len(tables), device=numbers.device)[:, None]

    def take(self, rows: Tensor) -> Tensor:
        """Rows ``(K, B, d)`` of row numbers ``(K, B)``."""
        return self.rows[rows] if self.shared else self.rows[self._member, rows]


class ManyTask(Task):
    """Training of ``K`` EBMs at once; see :func:`selfnorm.fit_many`."""

    module: Members
    capturable = True

    def __init__(
        self,
        members: Sequence[Member],
        data: MemberData,
        val_data: MemberData | None,
        *,
        n_samples: int,
        rates: Sequence[float],
        weight_decays: Sequence[float],
        same_samples: bool,
        options: TrainingOptions,
    ) -> None:
        device = members[0].model.device
        self.members, self.data, self.val_data = members, data, val_data
        self.n_samples, self.same_samples = n_samples, same_samples
        self.rates, self.patience = rates, options.patience
        if same_samples and not all(same_law(m.proposal, members[0].proposal) for m in members):
            raise ValueError("same_samples needs one proposal common to all members")
        self.module = Members(members, [rate / max(rates) for rate in rates])
        # What a run of its own would do before the first step and after the last.
        self.alone = [DensityTask(m.model, m.proposal, objective=m.objective) for m in members]
        of_b = [replace(options, lr=rate).log_norm_lr_scale for rate in rates]
        self._of_b = torch.tensor(of_b, device=device)
        self._decay = torch.tensor(list(weight_decays), device=device)[:, None]
        self._decoupled = options.optimizer == "adamw"
        learns = [m.objective.learns_log_norm for m in members]
        self._learns = torch.tensor(learns, device=device)
        self._seen = torch.zeros(3, len(members), device=device)  # loss, lower, upper
        self._before: list[Tensor] = []
        self._val_samples: tuple[Tensor, Tensor] | None = None
        self._settings = {
            "objective": [m.objective.label for m in members],
            "n_samples": n_samples,
            "same_samples": same_samples,
            "lr": list(rates),
            "weight_decay": list(weight_decays),
            "patience": options.patience,
        }
        self._rows = fingerprint(tuple(data.tables[: 1 if data.shared else None]))

    def settings(self) -> dict[str, Any]:
        """What a resumed run must share."""
        told = {f"members' {name}": value for name, value in self._settings.items()}
        return {**told, "rows": self._rows}

    def witness(self, data: tuple[Tensor, ...]) -> Tensor:  # noqa: ARG002
        """``log p~`` and ``log q`` of every member at its first rows."""
        rows = self.data.rows[..., :64, :].expand(len(self.members), -1, -1)
        return self.module.ask(
            lambda m, x: torch.cat([m.model.log_unnormalized(x), m.proposal.log_prob(x)]), rows
        )

    def start(self, data: tuple[Tensor, ...]) -> None:  # noqa: ARG002
        """The checks and the first ``b`` of every member, as in a run of its own."""
        device = self.module.table.device
        before = random_state(device)
        for k, single in enumerate(self.alone):
            if self.same_samples:
                set_random_state(before, device)
            try:
                single.start((self.data.tables[k],))
            except SelfnormError as error:
                raise type(error)(f"member {k}: {error}") from error
        with torch.no_grad():
            self.module.log_norm.copy_(torch.stack([m.model.log_norm for m in self.members]))

    def loss(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum of the members' losses: the gradient of each is untouched by the others."""

        def losses(member: Member, x: Tensor, *common: Tensor) -> Tensor:
            model, q = member.model, member.proposal
            with torch.no_grad():
                samples = common[0] if common else q.sample((self.n_samples,))
            loss, bounds = member.objective.judge(member.objective.weights(model, q, x, samples))
            return torch.stack([loss, bounds["lower"], bounds["upper"]])

        common: list[Tensor] = []
        if self.same_samples:
            drawn = self.members[0].proposal.sample((self.n_samples,))
            common = [drawn.expand(len(self.members), -1, -1)]
        seen = self.module.ask(losses, self.data.take(batch[0].T), *common)
        finite = torch.isfinite(seen[:, 0])
        with torch.no_grad():
            self._seen.copy_(seen.T)
            means = torch.where(finite, self._seen[1:], 0.0).mean(1)
        # A member whose loss is not finite must not reach the others through the sum.
        loss = torch.where(finite, seen[:, 0], 0.0).sum()
        return loss, {"lower": means[0], "upper": means[1]}

    @torch.no_grad()
    def condition_gradients(self, params: Sequence[Tensor], clip_norm: float | None) -> Tensor:
        """Clip member by member and mark those that may not step; returns the overall norm."""
        (table,) = params
        assert table.grad is not None
        norm = torch.linalg.vector_norm(table.grad, dim=1)
        finite = torch.isfinite(norm) & torch.isfinite(self._seen[0])
        self.module.count(finite, torch.stack([self._seen[0], norm, *self._seen[1:]]))
        scale = torch.ones_like(norm)
        if clip_norm is not None:
            scale = (clip_norm / (norm + 1e-6)).clamp_max(1.0)
        # where, not a product: a non-finite gradient times zero is still not finite.
        table.grad = torch.where(finite[:, None], table.grad * scale[:, None], 0.0)
        return torch.where(finite, norm, 0.0).square().sum().sqrt()

    def make_optimizer(self, options: TrainingOptions) -> torch.optim.Optimizer:
        r"""Torch's Adam on the whole table; what is each member's own is put right afterwards.

        Adam is elementwise and its step linear in the learning rate. So a step at the common rate,
        multiplied by the member's share of it, is the step of an optimiser of its own.
        """
        optimizer = super().make_optimizer(options)
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        return optimizer

    @torch.no_grad()
    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        table = self.module.table
        if not self._decoupled:
            assert table.grad is not None
            table.grad[:, :-1] += self._decay * table[:, :-1]
        state = optimizer.state[table]
        moments = [state.get(name, torch.zeros_like(table)) for name in ("exp_avg", "exp_avg_sq")]
        self._before = [t.detach().clone() for t in (table, *moments)]

    @torch.no_grad()
    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        members, table = self.module, self.module.table
        (group,) = optimizer.param_groups
        state, (before, *moments) = optimizer.state[table], self._before

        def correction(count: Tensor) -> Tensor:
            # In double: 1 - 0.999 loses four digits in single precision.
            first, second = (1 - beta ** count.double().clamp_min(1) for beta in group["betas"])
            return second.sqrt() / first

        # The optimiser counts all steps, a member those it has taken.
        own = (correction(members.taken) / correction(state["step"])).to(table.dtype)
        step = (table - before) * own[:, None]
        step[:, -1] *= self._of_b
        if self._decoupled:
            step[:, :-1] -= group["lr"] * self._decay * before[:, :-1]
        table.copy_(before + (members.updating * members.lr_factor)[:, None] * step)
        for name, kept in zip(("exp_avg", "exp_avg_sq"), moments, strict=True):
            state[name].copy_(torch.where(members.updating[:, None] > 0, state[name], kept))

    def guard(self, stepper: Stepper, *, looking: bool) -> str:
        """Roll back members in trouble; say why to stop once no member is left."""
        members = self.module
        bad = (members.streak >= _MAX_BAD_STREAK) & (members.active > 0)
        if bool(bad.any()):
            members.roll_back(bad, stepper.optimizer, stepper.average)
            members.stop(bad & (members.rollbacks > _MAX_ROLLBACKS), "diverged")
        if looking:
            members.remember(~bad, stepper.optimizer, stepper.average)
        if bool((members.active > 0).any()):
            return ""
        return "patience" if self.patience is not None else "diverged"

    @torch.no_grad()
    def validate(self, data: tuple[Tensor, ...]) -> dict[str, float]:  # noqa: ARG002
        """Judge every member on its own held-out rows, and keep its best state.

        Figures of member ``k`` are named ``k/...``. The score is left to the members (``-inf``).
        """
        figures = {"score": -math.inf}
        for name, values in zip(_METRICS, self.module.read().tolist(), strict=True):
            figures.update({f"{k}/train/{name}": v for k, v in enumerate(values)})
        if self.val_data is None:
            return figures
        samples, log_q = self._validation_samples()
        log_w = self._log_unnormalized(samples) - log_q
        log_p = self._log_unnormalized(self.val_data.rows.expand(len(self.members), -1, -1))
        log_p = (torch.where(self.val_data.weight > 0, log_p, 0.0) * self.val_data.weight).sum(1)
        log_z = F.log_mean_exp(log_w, 1)
        upper = log_p - log_z
        lower = upper - F.bound_gap(log_z - self.module.log_norm)
        score = torch.where(self._learns, lower, upper)
        self.module.keep_best(score, self.patience)
        each = {"score": score, "lower": lower, "upper": upper, "ess": F.ess(log_w, 1)}
        for name, values in each.items():
            figures.update({f"{k}/{name}": v for k, v in enumerate(values.tolist())})
            if name != "score":
                figures[name] = float(values.mean())
        return figures

    def _log_unnormalized(self, x: Tensor) -> Tensor:
        return self.module.ask(lambda member, rows: member.model.log_unnormalized(rows), x)

    def _validation_samples(self) -> tuple[Tensor, Tensor]:
        """The very samples on which a run of its own would judge each member."""
        if self._val_samples is None:
            drawn = []
            for member in self.members:
                with seeded(20_231_106, self.module.table.device):
                    drawn.append(member.proposal.sample((_N_VAL_SAMPLES,)))
            samples = torch.stack(drawn)
            log_q = self.module.ask(lambda member, rows: member.proposal.log_prob(rows), samples)
            self._val_samples = samples, log_q
        return self._val_samples

    def finish(self, data: tuple[Tensor, ...]) -> dict[str, float]:
        """Best states in place, then ``b <- log Z_hat`` on fresh samples for every member."""
        self.module.adopt_best()
        self.module.write_back()
        final: dict[str, float] = {}
        for k, single in enumerate(self.alone):
            final.update({f"{k}/{name}": value for name, value in single.finish(data).items()})
        with torch.no_grad():
            self.module.log_norm.copy_(torch.stack([m.model.log_norm for m in self.members]))
        return final

    def histories(self, joint: History) -> list[History]:
        """The record of each member out of that of all."""
        state = self.module.outcome()
        found = []
        for k in range(len(self.members)):
            records = [
                _member_record(r, k, self.rates[k] / max(self.rates))
                for r in joint.records
                if not state["stop_step"][k] or r["step"] <= state["stop_step"][k]
            ]
            has_best = math.isfinite(state["best_score"][k])
            steps = int(state["stop_step"][k] or joint.n_steps)
            prefix = f"{k}/"
            found.append(
                History(
                    records=records,
                    n_steps=steps,
                    best_step=int(state["best_step"][k]) if has_best else steps,
                    best_score=state["best_score"][k] if has_best else None,
                    skipped_steps=int(state["skipped"][k]),
                    rollbacks=int(state["rollbacks"][k]),
                    stopped=state["reason"][k] or joint.stopped,
                    seconds=joint.seconds,
                    final={
                        key.removeprefix(prefix): value
                        for key, value in joint.final.items()
                        if key.startswith(prefix)
                    },
                )
            )
        return found


def _member_record(record: dict[str, float], k: int, lr_share: float) -> dict[str, float]:
    own = {name: record[name] for name in ("step", "epoch")}
    train, held_out = f"val_{k}/train/", f"val_{k}/"
    for key, value in record.items():
        if key.startswith(train):
            own[key.removeprefix(train)] = value
        elif key.startswith(held_out):
            own["val_" + key.removeprefix(held_out)] = value
    return {**own, "lr": record["lr"] * lr_share, "seconds": record["seconds"]}
