"""``fit_many``: train many models of one shape as one batched model.

Seeds, restarts, ensembles and grids of learning rates cost little more than a single run: their
networks become batched matrix products, their optimisers one. Everything else stays each member's
own: data and their order, proposal samples, learning rate, weight decay, gradient clipping, skipped
steps, early stopping, best state and closing ``b``.

Models of one shape stand side by side in one table of parameters, their functions go through
``vmap``. Row ``k`` of the table is member ``k``: the trained weights of its energy, flattened, then
its ``b``. So optimiser, clipping and moving average are a handful of operations, however many
tensors a network has.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from selfnorm import functional as F
from selfnorm._context import seeded
from selfnorm._inputs import check_rows
from selfnorm.density.model import (
    EBM,
    LOG_NORM_LR_SCALE,
    DensityTask,
    Objective,
    WeightObjective,
    both_bounds,
    checked_options,
    log_weights,
    usual,
    weigh,
)
from selfnorm.distributions import Defensive, Gaussian, GaussianMixture, Proposal, StudentT, Uniform
from selfnorm.errors import DataError, EnergyError, ProposalError, SelfnormError
from selfnorm.functional import Weights
from selfnorm.training import (
    MAX_BAD_STREAK,
    MAX_ROLLBACKS,
    History,
    Keeper,
    MemberSource,
    MembersTask,
    State,
    Stepper,
    TaskOptions,
    TensorSource,
    TrainingOptions,
    copy_rows,
    fingerprint,
    run,
    whole_number,
)

PerMember = float | Sequence[float]
_METRICS = ("loss", "grad_norm", "lower", "upper")
# Densities that vmap can follow.
_BATCHED = (Gaussian, StudentT, Uniform, GaussianMixture, Defensive)
_PLAIN = (bool, int, float, str, tuple, type(None))
# Rows of all members together in one pass: enough to fill the device.
_ROWS_AT_ONCE = {"cpu": 2**17, "cuda": 2**21}


@torch.inference_mode(False)
def train(
    models: Sequence[EBM],
    x_train: object,
    *,
    proposal: object,
    objective: str | Sequence[str],
    n_samples: int,
    val_data: object,
    task_options: TaskOptions | None,
    options: TrainingOptions | None,
    lr: PerMember | None = None,
    weight_decay: PerMember | None = None,
    **training: Any,
) -> list[History]:
    """One history per member; see :func:`selfnorm.fit_many`."""
    _refuse_shared(models)
    n_samples = whole_number("n_samples", n_samples)
    options = (options or TrainingOptions()).given(**training)
    options = usual(options, judged=val_data is not None)
    of_task = checked_options(
        *("fit_many", task_options, "a batch of EBMs"),
        same_batches=False,
        same_samples=False,
        log_norm_lr_scale=LOG_NORM_LR_SCALE,
    )
    same_batches = of_task.pop("same_batches")
    members = len(models)
    device, dtype = models[0].device, models[0].dtype
    rows = _tables(x_train, members, "x_train", device, dtype=dtype)
    if isinstance(models[0].energy, nn.Module):
        check_training_keeps_buffers(models[0].energy, rows[0])
    held_out = None
    if val_data is not None:
        checks = {"width": rows[0].shape[1], "minimum": 1, "dtype": dtype}
        held_out = _tables(val_data, members, "val_data", device, **checks)
    elif options.patience is not None:
        raise DataError(
            "early stopping (patience) needs held-out data: pass val_data, or leave patience=None"
        )
    rates = _per_member(options.lr or 0.0 if lr is None else lr, members, "lr")
    decays = _per_member(
        options.weight_decay if weight_decay is None else weight_decay, members, "weight_decay"
    )
    given = [None] * members if proposal is None else proposal
    proposals = _for_members(given, members, "proposals", ProposalError)
    names = _for_members(objective, members, "objectives", ValueError)
    scale = of_task.pop("log_norm_lr_scale")
    runs = [
        DensityTask(model, q, objective=name, n_samples=n_samples, log_norm_lr_scale=scale)
        for model, q, name in zip(models, proposals, names, strict=True)
    ]
    task = ManyTask(runs, rates=rates, weight_decays=decays, options=options, **of_task)
    settings = torch.tensor([rates, decays], dtype=torch.float64)
    keep = options.checkpoint is not None
    order = _row_orders(rows, options.seed, settings, same_batches, keep=keep)
    judges = TensorSource(() if held_out is None else stacked(held_out))
    # Patience, rates and weight decay are the members' own.
    shared_options = replace(options, patience=None, lr=max(rates), weight_decay=0.0)
    joint = run(task, MemberTables(rows, order), val_data=judges, options=shared_options)
    task.module.write_back()
    for model in models:
        model.eval()
    return task.histories(joint)


def _of_weights(objective: Objective) -> WeightObjective:
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


def _for_members(value: object, members: int, what: str, error: type[Exception]) -> list[Any]:
    """One value for all members, or a list or tuple of one for each."""
    values = list(value) if isinstance(value, list | tuple) else [value] * members
    if len(values) != members:
        raise error(f"got {len(values)} {what} for {members} models: pass one for all or for each")
    return values


def _tables(x: Any, members: int, name: str, device: torch.device, **checks: Any) -> list[Tensor]:
    """Checked tables on the device; one that members share is checked and moved once."""
    if len(getattr(x, "shape", ())) in (1, 2):  # one tensor, array or data frame for all
        return [check_rows(x, name, **checks).to(device)] * members
    tables = _for_members(list(x), members, f"tables in {name}", DataError)
    checks = {"width": np.shape(tables[0])[-1], **checks}
    checked: dict[int, Tensor] = {}
    for k, table in enumerate(tables):
        if id(table) not in checked:
            checked[id(table)] = check_rows(table, f"{name}[{k}]", **checks).to(device)
    return [checked[id(table)] for table in tables]


def _per_member(value: PerMember, members: int, name: str) -> list[float]:
    numbers = np.asarray(value, dtype=float)
    values: list[float] = _for_members(numbers.tolist(), members, f"numbers in {name}", ValueError)
    if name != "weight_decay" and not all(v > 0 for v in values):
        raise ValueError(f"{name} must be positive, got {values}")
    return values


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


class MemberTables(MemberSource):
    """A table for each member, gone through by the columns of ``order (n, K)``."""

    def __init__(self, tables: Sequence[Tensor], order: Tensor) -> None:
        rows, _ = stacked(tables)
        self.tables = (*tables,)
        super().__init__((rows,), order.to(rows.device), shared=rows.dim() == 2)

    def preview(self, device: torch.device) -> tuple[Tensor, ...]:  # noqa: ARG002
        """Every member's table."""
        return self.tables


def stacked(tables: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """One table per member as ``(K, n, d)``, or one for all as ``(n, d)``; and weights ``(K, n)``.

    Shorter tables repeat their rows up to the longest; the weights, which sum to 1 for every
    member, leave the repetitions out of means.
    """
    first, longest = tables[0], max(len(table) for table in tables)
    numbers = torch.arange(longest, device=first.device)
    lengths = torch.tensor([len(table) for table in tables], device=first.device)[:, None]
    weight = (numbers < lengths).float() / lengths
    if all(table is first for table in tables):
        return first, weight
    return torch.stack([table[numbers % len(table)] for table in tables]), weight


class ManyTask(MembersTask):
    """``K`` trainings of EBMs at once; see :func:`selfnorm.fit_many`.

    Args:
        runs: what each member would be trained by alone: same number of samples, objectives that
            are functions of weights.
        rates, weight_decays: of each.
        options: of all.
        same_samples: whether all members see the same proposal samples.
    """

    module: Members
    capturable = True

    def __init__(
        self,
        runs: Sequence[DensityTask],
        *,
        rates: Sequence[float],
        weight_decays: Sequence[float],
        options: TrainingOptions,
        same_samples: bool = False,
    ) -> None:
        device, first = runs[0].model.device, runs[0].proposal
        self.runs = runs
        self.n_samples, self.same_samples = runs[0].n_samples, same_samples
        self.rates, self.patience = rates, options.patience
        if same_samples and not all(_same_distribution(run.proposal, first) for run in runs):
            raise ValueError("same_samples needs one proposal common to all members")
        members = [Member(run.model, run.proposal) for run in runs]
        self.module = Members(members, [rate / max(rates) for rate in rates])
        self._of_b = runs[0].log_norm_lr_scale
        self._decay = torch.tensor(list(weight_decays), device=device)[:, None]
        self._decoupled = options.optimizer == "adamw"
        objectives = [_of_weights(run.objective) for run in runs]
        groups: dict[str, list[int]] = {}
        for k, objective in enumerate(objectives):
            groups.setdefault(objective.label, []).append(k)
        self._judges = [
            (objectives[numbers[0]], torch.tensor(numbers, device=device))
            for numbers in groups.values()
        ]
        self._judged = torch.argsort(torch.cat([numbers for _, numbers in self._judges]))
        learns = [objective.learns_log_norm for objective in objectives]
        self._learns = torch.tensor(learns, device=device)
        self._seen = torch.zeros(3, len(runs), device=device)  # loss, lower, upper
        self.keeper = Keeper(torch.full((len(runs),), -math.inf, device=device))
        self._before: list[Tensor] = []
        self._settings = {  # by names that the options of all do not have
            "same_samples": same_samples,
            "members' lr": list(rates),
            "members' weight_decay": list(weight_decays),
            "members' patience": options.patience,
        }

    def settings(self) -> State:
        """What a resumed run must share."""
        return {"members": [run.settings() for run in self.runs], **self._settings}

    def witness(self, data: tuple[Tensor, ...]) -> Tensor:
        """``log p~`` and ``log q`` of every member at its first rows."""
        rows = stacked([table[:64] for table in data])[0].expand(len(self.runs), -1, -1)
        return self.module.ask(
            lambda m, x: torch.cat([m.model.log_unnormalized(x), m.proposal.log_prob(x)]), rows
        )

    def start(self, data: tuple[Tensor, ...]) -> None:
        """The checks and the first ``b`` of every member, as in a run of its own."""
        device = self.module.table.device
        cuda = [device] if device.type == "cuda" else []
        last = len(self.runs) - 1
        for k, single in enumerate(self.runs):
            # with the same samples every member begins where the random stream stands now
            with torch.random.fork_rng(cuda, enabled=self.same_samples and k < last):
                try:
                    single.start((data[k],))
                except SelfnormError as error:
                    raise type(error)(f"member {k}: {error}") from error
        self.module.read_log_norms()
        self.module.good.zero_()  # the optimiser's moments begin at zero
        self.module.good[[0, 3]] = self.module.table.detach()

    def loss(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum of the members' losses: the gradient of each is untouched by the others."""

        def weights(member: Member, x: Tensor, *common: Tensor) -> Tensor:
            with torch.no_grad():
                samples = common[0] if common else member.proposal.sample((self.n_samples,))
            return torch.cat(weigh(member.model, member.proposal, x, samples)[:3])

        common: list[Tensor] = []
        if self.same_samples:
            drawn = self.runs[0].proposal.sample((self.n_samples,))
            common = [drawn.expand(len(self.runs), -1, -1)]
        (rows,) = batch
        answers = self.module.ask(weights, rows, *common), self.module.log_norm
        sizes = [rows.shape[1], rows.shape[1], self.n_samples]

        def judge(objective: WeightObjective, row: Tensor, b: Tensor) -> Tensor:
            log_p, log_w_data, log_w = row.split(sizes)
            loss, bounds = objective.judge(Weights(log_p, log_w_data, log_w, b))
            return torch.stack([loss, bounds["lower"], bounds["upper"]])

        # One pass through all networks; then each objective sees the weights of its members.
        judged = [
            vmap(partial(judge, objective))(*(t.index_select(0, numbers) for t in answers))
            for objective, numbers in self._judges
        ]
        seen = torch.cat(judged).index_select(0, self._judged)
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
        kind = table.grad.dtype if clip_norm is None else torch.float64  # as in a run of its own
        norm = torch.linalg.vector_norm(table.grad, dim=1, dtype=kind).to(table.grad.dtype)
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
    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        table = self.module.table
        if not self._decoupled:
            assert table.grad is not None
            table.grad[:, :-1] += self._decay * table[:, :-1]
        state = optimizer.state[table]
        moments = [state.get(name, torch.zeros_like(table)) for name in ("exp_avg", "exp_avg_sq")]
        self._before = [t.detach().clone() for t in (table, *moments)]

    @torch.no_grad()
    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
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
        bad = (members.streak >= MAX_BAD_STREAK) & (members.active > 0)
        if bool(bad.any()):
            members.roll_back(bad, stepper)
            members.stop(members.diverged)
        if looking:
            members.remember(~bad, stepper)
        if bool((members.active > 0).any()):
            return ""
        return "patience" if self.patience is not None else "diverged"

    @torch.no_grad()
    def validate(self, data: tuple[Tensor, ...]) -> dict[str, float]:
        """Judge every member on its own held-out rows, and keep its best state.

        Figures of member ``k`` are named ``k/...``. The score is left to the members (``-inf``).
        """
        figures = {"score": -math.inf}
        figures |= _by_member(dict(zip(_METRICS, self.module.read(), strict=True)))
        if not data:
            return figures
        rows, weight = data
        drawn = zip(*(run.validation_samples() for run in self.runs), strict=True)
        samples, log_q = (torch.stack(parts) for parts in drawn)
        log_w = self._log_unnormalized(samples) - log_q
        log_p = self._log_unnormalized(rows.expand(len(self.runs), -1, -1))
        log_p = (torch.where(weight > 0, log_p, 0.0) * weight).sum(1)
        lower, upper = both_bounds(log_p, log_w, self.module.log_norm, dim=1)
        score = torch.where(self._learns, lower, upper)
        members = self.module
        better = self.keeper.offer(score, {"table": members.table.detach()}, members.active > 0)
        members.best_step.copy_(torch.where(better, members.n_steps, members.best_step))
        if self.patience is not None:
            members.stop(self.keeper.stale >= self.patience)
        bounds = {"score": score, "lower": lower, "upper": upper, "ess": F.ess(log_w, 1)}
        figures |= _by_member({f"val_{name}": values for name, values in bounds.items()})
        means = {name: float(values.mean()) for name, values in bounds.items() if name != "score"}
        return figures | means

    def _log_unnormalized(self, x: Tensor) -> Tensor:
        return self.module.ask(lambda member, rows: member.model.log_unnormalized(rows), x)

    @torch.no_grad()
    def finish(self, data: tuple[Tensor, ...]) -> dict[str, float]:  # noqa: ARG002
        """Best states in place, then ``b <- log Z_hat`` on fresh samples for every member."""
        members, best = self.module, self.keeper.state
        # A member that diverged without a best state takes its last good one.
        copy_rows(members.diverged, [members.good[0]], [members.table])
        if best is not None:
            copy_rows(self.keeper.score.isfinite(), [best["table"]], [members.table])
        b = members.log_norm
        learned = b.clone()

        def draw(n: int) -> Tensor:
            samples = members.ask(lambda m, _: m.proposal.sample((n,)), b)
            return members.ask(lambda m, x: log_weights(m.model, m.proposal, x), samples).T

        log_z, error, n_used = F.adaptive_log_mean(draw)
        b.copy_(torch.where(torch.isfinite(log_z), log_z.to(b), b))
        members.write_back()
        figures = {"log_norm": log_z, "log_norm_se": error, "log_norm_learned": learned}
        return _by_member({**figures, "log_norm_samples": torch.full_like(b, n_used)})

    def histories(self, joint: History) -> list[History]:
        """The record of each member out of that of all."""
        members, histories = self.module, []
        for k, rate in enumerate(self.rates):
            stop, best = int(members.stop_step[k]), float(self.keeper.score[k])
            steps, judged = stop or joint.n_steps, math.isfinite(best)
            stopped = joint.stopped
            if not members.active[k]:
                stopped = "diverged" if members.diverged[k] else "patience"
            histories.append(
                History(
                    records=[
                        {
                            **{name: record[name] for name in ("step", "epoch")},
                            **_of_member(record, f"val_{k}/"),
                            "lr": record["lr"] * (rate / max(self.rates)),
                            "seconds": record["seconds"],
                        }
                        for record in joint.records
                        if record["step"] <= steps
                    ],
                    n_steps=steps,
                    best_step=int(members.best_step[k]) if judged else steps,
                    best_score=best if judged else None,
                    skipped_steps=int(members.skipped[k]),
                    rollbacks=int(members.rollbacks[k]),
                    stopped=stopped,
                    seconds=joint.seconds,
                    final=_of_member(joint.final, f"{k}/"),
                )
            )
        return histories


def _by_member(figures: dict[str, Tensor]) -> dict[str, float]:
    """Figures ``(K,)`` as ``k/...``, one for each member."""
    return {f"{k}/{name}": v for name in figures for k, v in enumerate(figures[name].tolist())}


def _of_member(figures: dict[str, float], start: str) -> dict[str, float]:
    """The figures of one member out of those of all, whose names begin so."""
    return {k.removeprefix(start): v for k, v in figures.items() if k.startswith(start)}


class Member(nn.Module):
    """One model with its proposal; a call asks it a question."""

    def __init__(self, model: EBM, proposal: Proposal) -> None:
        super().__init__()
        self.model, self.proposal = model, proposal

    def forward(self, question: Callable[..., Tensor], *args: Tensor) -> Tensor:
        """``question(self, *args)``, under whatever parameters are in place."""
        return question(self, *args)


class Members(nn.Module):
    """``K`` models as one table of parameters, and how each of them is doing.

    Members whose proposals and bases are built alike answer as one batch; energies must be.

    Args:
        members: the models; they are read here, and changed by :meth:`write_back` only.
        lr_factors: learning rates as shares of the loop's.

    Attributes:
        table: ``(K, P + 1)``, the only parameter.
        updating: 1 where the last step counts for the member, else 0; ``taken`` counts them.
        active: 0 once a member has stopped; ``stop_step`` says when.
        streak, skipped, rollbacks: non-finite steps in a row and in all, and their consequences.
        good: rows of the table to roll back to, with the optimiser's moments and moving average.
    """

    shares: Tensor
    counts: Tensor
    n_steps: Tensor
    totals: Tensor
    good: Tensor

    def __init__(self, members: Sequence[Member], lr_factors: Sequence[float] = ()) -> None:
        super().__init__()
        _check_alike([m.model.energy for m in members])  # type: ignore[misc]
        first = members[0].model
        places: dict[Tensor, list[str]] = {}  # of a trained parameter, in one layer or several
        for name, tensor in _tensors(members[0]).items():
            if tensor.requires_grad and name.startswith("model.energy."):
                places.setdefault(tensor, []).append(name)
        if not places:
            raise EnergyError("nothing to train: no parameter of the energies asks for a gradient")
        self.trained = [(names, parameter.shape) for parameter, names in places.items()]
        self.kind = next(iter(places)).dtype
        # Out of the module tree: what belongs to the caller is neither moved nor saved here.
        self.members = (*members,)
        self.table = nn.Parameter(torch.stack([self._row(member) for member in members]))
        self.groups = [self._group(part) for part in _alike(members)]
        self.places = torch.argsort(torch.cat([numbers for numbers, _, _ in self.groups]))
        device, n = first.device, len(members)

        shares = [[1.0] * n, [1.0] * n, list(lr_factors) or [1.0] * n]
        self.register_buffer("shares", torch.tensor(shares, device=device))
        self.updating, self.active, self.lr_factor = self.shares.unbind()
        self.register_buffer("counts", torch.zeros(8, n, device=device))
        self.taken, self.good_taken, self.n_read, *consequences = self.counts.unbind()
        self.streak, self.skipped, self.rollbacks, self.best_step, self.stop_step = consequences
        self.register_buffer("totals", torch.zeros(len(_METRICS), n, device=device))
        self.register_buffer("n_steps", torch.zeros((), device=device))
        self.register_buffer("good", self.table.new_zeros(4, *self.table.shape))

    def _row(self, member: Member) -> Tensor:
        named, b = _tensors(member), member.model.log_norm.detach()
        parts = [named[names[0]].detach().flatten() for names, _ in self.trained]
        return torch.cat([*(part.to(b) for part in parts), b.view(1)])

    def _by_name(self, row: Tensor) -> dict[str, Tensor]:
        """The trained tensors of the member whose parameters are a row of the table."""
        *parts, b = row.split([*(shape.numel() for _, shape in self.trained), 1])
        named = {"model.log_norm": b.view(())}
        for (names, shape), part in zip(self.trained, parts, strict=True):
            named |= dict.fromkeys(names, part.view(shape).to(self.kind))
        return named

    def _group(self, numbers: list[int]) -> tuple[Tensor, Member, dict[str, Tensor]]:
        """Which members, one to stand for all of them, and their fixed tensors, stacked."""
        members = [self.members[k].eval() for k in numbers]
        named = [_tensors(member) for member in members]
        names = named[0].keys() - self._by_name(self.table[0]).keys()
        fixed = {name: torch.stack([own[name].detach() for own in named]) for name in names}
        return torch.tensor(numbers, device=self.table.device), members[0], fixed

    def train(self, mode: bool = True) -> Members:
        """Dropout on or off."""
        super().train(mode)
        for _, member, _ in self.groups:
            member.train(mode)
        return self

    def ask(self, question: Callable[..., Tensor], *args: Tensor) -> Tensor:
        """The answers ``question(member, *args)`` of all members, ``(K, ...)``.

        Args:
            question: a function of a :class:`Member` and its arguments, giving a tensor.
            args: ``(K, ...)``.
        """
        answers = []
        for numbers, member, fixed in self.groups:
            table, *given = (t.index_select(0, numbers) for t in (self.table, *args))
            answer = partial(self._answer, member, question)
            if len(numbers) == 1:  # densities that vmap cannot follow are alone
                own = {name: value[0] for name, value in fixed.items()}
                answers.append(answer(table[0], own, *(a[0] for a in given)).unsqueeze(0))
                continue
            rows = max((a.shape[1] for a in given if a.dim() > 1), default=1)
            at_once = max(1, _ROWS_AT_ONCE.get(table.device.type, 2**17) // rows)
            size = at_once if at_once < len(table) else None
            batched = vmap(answer, randomness="different", chunk_size=size)
            answers.append(batched(table, fixed, *given))
        return torch.cat(answers).index_select(0, self.places)

    def _answer(
        self,
        member: Member,
        question: Callable[..., Tensor],
        row: Tensor,
        fixed: dict[str, Tensor],
        *args: Tensor,
    ) -> Tensor:
        """That of one member, whose parameters are a row of the table."""
        tensors = {**fixed, **self._by_name(row)}
        answer: Tensor = functional_call(member, tensors, (question, *args), tie_weights=False)
        return answer

    @property
    def log_norm(self) -> Tensor:
        """``b`` of every member, ``(K,)``."""
        return self.table[:, -1]

    @torch.no_grad()
    def read_log_norms(self) -> None:
        """Take over the ``b`` that the members' models have."""
        self.log_norm.copy_(torch.stack([m.model.log_norm for m in self.members]))

    @property
    def diverged(self) -> Tensor:
        """Which members were rolled back too often."""
        return self.rollbacks > MAX_ROLLBACKS

    @torch.no_grad()
    def count(self, finite: Tensor, metrics: Tensor) -> None:
        """Book one step: which members take it, and their metrics ``(4, K)``."""
        taken = finite.float() * self.active
        bad = (1 - finite.float()) * self.active
        self.updating.copy_(taken)
        self.taken.add_(taken)
        self.streak.add_(1).mul_(bad)
        self.skipped.add_(bad)
        self.n_read.add_(taken)
        self.n_steps.add_(1)
        self.totals.add_(torch.where(taken > 0, metrics, 0.0))

    def read(self) -> Tensor:
        """Mean metrics ``(4, K)`` since the last read."""
        means = self.totals / self.n_read.clamp_min(1)
        self.totals.zero_()
        self.n_read.zero_()
        return means

    def _in_use(self, stepper: Stepper) -> list[Tensor]:
        """The tensors that :attr:`good_taken` and :attr:`good` have copies of."""
        state = stepper.optimizer.state[self.table]
        return [self.taken, self.table, state["exp_avg"], state["exp_avg_sq"], *stepper.average]

    def remember(self, which: Tensor, stepper: Stepper) -> None:
        """Take the present state of the chosen members as good."""
        copy_rows(which, self._in_use(stepper), [self.good_taken, *self.good])

    def roll_back(self, which: Tensor, stepper: Stepper) -> None:
        """Return the chosen members to their last good state, with half the learning rate."""
        copy_rows(which, [self.good_taken, *self.good], self._in_use(stepper))
        self.rollbacks.add_(which.float())
        self.lr_factor.mul_(1 - 0.5 * which.float())
        self.streak.masked_fill_(which, 0.0)

    def stop(self, which: Tensor) -> None:
        """Freeze the chosen members."""
        which = which & (self.active > 0)
        self.active.masked_fill_(which, 0.0)
        self.stop_step.copy_(torch.where(which, self.n_steps, self.stop_step))

    @torch.no_grad()
    def write_back(self) -> None:
        """Copy every row into its own model."""
        for row, member in zip(self.table, self.members, strict=True):
            named = _tensors(member)
            for name, value in self._by_name(row).items():
                named[name].copy_(value)


def _alike(members: Sequence[Member]) -> list[list[int]]:
    """Numbers of the members that can answer as one batch."""
    groups: dict[Any, list[int]] = {}
    for k, member in enumerate(members):
        densities = [member.proposal, *([] if member.model.base is None else [member.model.base])]
        batched = all(isinstance(part, _BATCHED) for q in densities for part in q.modules())
        built = [_build(q, ignore=False) for q in densities]
        names = list(_tensors(member))  # they tell which parts are shared
        groups.setdefault((str(built), str(names)) if batched else k, []).append(k)
    return list(groups.values())


def _build(module: nn.Module, *, ignore: bool) -> list[tuple[Any, ...]]:
    """How a module is built, for comparison: kinds, plain attributes and shapes of its tensors.

    Attributes of other kinds (functions, say) are ignored, or told apart by what they are.
    """
    own = vars(nn.Module()).keys()
    parts: list[tuple[Any, ...]] = []
    for name, part in module.named_modules():
        plain = {k: v for k, v in vars(part).items() if k not in own and k != "training"}
        kept = {k: v if isinstance(v, _PLAIN) else id(v) for k, v in plain.items()}
        if ignore:
            kept = {k: v for k, v in plain.items() if isinstance(v, _PLAIN)}
        parts.append((name, type(part), sorted(kept.items())))
    return parts + [
        (n, tuple(t.shape), t.dtype, t.requires_grad) for n, t in _tensors(module).items()
    ]


def _same_distribution(one: Proposal, other: Proposal) -> bool:
    """Whether two proposals are built alike and hold the same numbers."""
    alike = one is other or _build(one, ignore=False) == _build(other, ignore=False)
    return alike and all(map(torch.equal, _tensors(one).values(), _tensors(other).values()))


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of a module by name, each place once.

    One parameter in two layers is at two places; a layer that is reached in two ways is one.
    """
    return {
        f"{part}.{name}" if part else name: tensor
        for part, layer in module.named_modules()
        for name, tensor in (
            *layer.named_parameters(recurse=False),
            *layer.named_buffers(recurse=False),
        )
    }


def _check_alike(energies: Sequence[nn.Module]) -> None:
    for number, energy in enumerate(energies):
        if not isinstance(energy, nn.Module):
            raise EnergyError(f"the energy of member {number} is no nn.Module: wrap it in one")
        if _build(energy, ignore=True) != _build(energies[0], ignore=True):
            raise EnergyError(
                f"members 0 and {number} have energies of different shape or kind; networks that "
                "train together must be built alike (group them by architecture)"
            )


@torch.no_grad()
def check_training_keeps_buffers(energy: nn.Module, x: Tensor) -> None:
    """Refuse an energy that changes its own buffers in a forward pass of training.

    Batch normalisation and spectral normalisation do: members trained together would end with the
    buffers they began with, and their densities would be those of other networks.
    """
    trial = copy.deepcopy(energy).train()
    before = {name: buffer.clone() for name, buffer in trial.named_buffers()}
    with seeded(0, x.device):
        trial(x[:8])
    changed = [n for n, b in trial.named_buffers() if not torch.equal(before[n], b)]
    if changed:
        raise EnergyError(
            f"training changes the buffer {changed[0]!r} of the energy (batch or spectral "
            "normalisation?), which models trained together cannot follow: train each by fit, or "
            "normalise by a layer without such buffers (nn.LayerNorm)"
        )
