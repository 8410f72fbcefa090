"""Models of one shape side by side: one table of their parameters, their functions under ``vmap``.

Row ``k`` of the table is member ``k``: the trained weights of its energy, flattened, then its
``b``. One table makes optimiser, clipping and moving average a handful of operations, however many
tensors a network has.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from selfnorm._context import seeded
from selfnorm.density.fit import WeightObjective
from selfnorm.density.model import EBM
from selfnorm.distributions import Defensive, Gaussian, GaussianMixture, Proposal, StudentT, Uniform
from selfnorm.errors import EnergyError

__all__ = ["Member", "Members", "check_training_keeps_buffers", "same_law"]

_N_METRICS = 4
_MAX_ROLLBACKS = 8  # as in the loop, but for each member
_BATCHED = (Gaussian, StudentT, Uniform, GaussianMixture, Defensive)  # laws that vmap can follow
_PLAIN = (bool, int, float, str, tuple, type(None))
# Rows of all members together in one pass: enough to fill the device.
_ROWS_AT_ONCE = {"cpu": 2**17, "cuda": 2**21}


class Member(nn.Module):
    """One model with its proposal and its objective; a call asks it a question."""

    def __init__(self, model: EBM, proposal: Proposal, objective: WeightObjective) -> None:
        super().__init__()
        self.model, self.proposal, self.objective = model, proposal, objective

    def forward(self, question: Callable[..., Any], *args: Tensor) -> Any:
        """``question(self, *args)``, under whatever parameters are in place."""
        return question(self, *args)


class Members(nn.Module):
    """``K`` models as one table of parameters, and what is known of each of them.

    Members whose laws and objectives are built alike answer as one batch; energies must be.

    Args:
        members: the models; they are read here, and changed by :meth:`write_back` only.
        lr_factors: learning rates as shares of the loop's.

    Attributes:
        table: ``(K, P + 1)``, the only parameter.
        updating: 1 where the last step counts for the member, else 0; ``taken`` counts them.
        active: 0 once a member has stopped; ``stop_step`` says when.
        streak, skipped, rollbacks: non-finite steps in a row and in all, and their consequences.
        good, best: rows of the table to roll back to (with the optimiser's moments and the moving
            average), and those of the best score.

    Example:
        >>> import selfnorm as sn
        >>> from selfnorm.density.fit import get
        >>> q = sn.Gaussian(torch.zeros(2), scale=1.0)
        >>> models = [sn.EBM(sn.MLP(2, (8,)), base=q) for _ in range(3)]
        >>> together = Members([Member(m, q, get("snl")) for m in models])
        >>> x = torch.randn(3, 5, 2)
        >>> log_p = together.ask(lambda member, rows: member.model.log_unnormalized(rows), x)
        >>> torch.allclose(log_p[1], models[1].log_unnormalized(x[1]), atol=1e-5)
        True
    """

    updating: Tensor
    active: Tensor
    taken: Tensor
    lr_factor: Tensor
    streak: Tensor
    skipped: Tensor
    rollbacks: Tensor
    stale: Tensor
    best_score: Tensor
    best_step: Tensor
    stop_step: Tensor
    n_read: Tensor
    n_steps: Tensor
    totals: Tensor
    good: Tensor
    good_taken: Tensor
    best: Tensor

    def __init__(self, members: Sequence[Member], lr_factors: Sequence[float] = ()) -> None:
        super().__init__()
        _check_alike([m.model.energy for m in members])  # type: ignore[misc]
        first = members[0].model
        places: dict[Tensor, list[str]] = {}  # of a trained parameter, in one layer or several
        for name, tensor in _slots(members[0]):
            if tensor.requires_grad and name.startswith("model.energy."):
                places.setdefault(tensor, []).append(name)
        if not places:
            raise EnergyError("nothing to train: no parameter of the energies asks for a gradient")
        self.names = list(places.values())
        self.shapes = [p.shape for p in places]
        self.sizes = [p.numel() for p in places]
        self.kind = next(iter(places)).dtype
        # Out of the module tree: what belongs to the caller is neither moved nor saved here.
        self.members = (*members,)
        self.table = nn.Parameter(torch.stack([self._row(member) for member in members]))
        self.groups = [self._group(part) for part in _alike(members)]
        self.places = torch.argsort(torch.cat([numbers for numbers, _, _ in self.groups]))
        device, n = first.device, len(members)

        def register(name: str, value: float | Tensor, *shape: int) -> None:
            whole = torch.full((*shape, n), value) if isinstance(value, float) else value
            self.register_buffer(name, whole.to(device))

        for name in ("taken", "streak", "skipped", "rollbacks", "stale", "n_read"):
            register(name, 0.0)
        for name in ("best_step", "stop_step", "good_taken"):
            register(name, 0.0)
        register("updating", 1.0)
        register("active", 1.0)
        register("lr_factor", torch.tensor(list(lr_factors) or [1.0] * n))
        register("best_score", -float("inf"))
        register("totals", 0.0, _N_METRICS)
        register("n_steps", torch.zeros(()))
        register("best", self.table.detach().clone())
        register("good", torch.zeros(4, *self.table.shape, dtype=self.table.dtype))

    def _row(self, member: Member) -> Tensor:
        named, b = dict(_slots(member)), member.model.log_norm.detach()
        parts = [named[names[0]].detach().flatten() for names in self.names]
        return torch.cat([*(part.to(b) for part in parts), b.view(1)])

    def _group(self, numbers: list[int]) -> tuple[Tensor, Member, dict[str, Tensor]]:
        """Which members, one to stand for all of them, and their fixed tensors, stacked."""
        members = [self.members[k].eval() for k in numbers]
        slots = [dict(_slots(member)) for member in members]
        known = {"model.log_norm", *(name for names in self.names for name in names)}
        fixed = {k: torch.stack([s[k].detach() for s in slots]) for k in slots[0] if k not in known}
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
        if len(self.groups) == 1:
            _, member, fixed = self.groups[0]
            return self._ask_group(question, member, fixed, (self.table, *args))
        answers = []
        for numbers, member, fixed in self.groups:
            chosen = [t.index_select(0, numbers) for t in (self.table, *args)]
            answers.append(self._ask_group(question, member, fixed, chosen))
        return torch.cat(answers).index_select(0, self.places)

    def _ask_group(
        self,
        question: Callable[..., Tensor],
        member: Member,
        fixed: dict[str, Tensor],
        chosen: Sequence[Tensor],
    ) -> Tensor:
        def one(row: Tensor, fixed: dict[str, Tensor], *args: Tensor) -> Tensor:
            *parts, b = row.split([*self.sizes, 1])
            trained = {
                name: part.view(shape).to(self.kind)
                for names, shape, part in zip(self.names, self.shapes, parts, strict=True)
                for name in names
            }
            tensors = {**fixed, **trained, "model.log_norm": b.view(())}
            answer: Tensor = functional_call(member, tensors, (question, *args), tie_weights=False)
            return answer

        table, *args = chosen
        if len(table) == 1:  # laws that vmap cannot follow are alone
            own = {name: value[0] for name, value in fixed.items()}
            return one(table[0], own, *(a[0] for a in args)).unsqueeze(0)
        rows = max((a.shape[1] for a in args if a.dim() > 1), default=1)
        at_once = max(1, _ROWS_AT_ONCE.get(table.device.type, 2**17) // rows)
        batched = vmap(
            one, randomness="different", chunk_size=at_once if at_once < len(table) else None
        )
        answers: Tensor = batched(table, fixed, *args)
        return answers

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
        return self.rollbacks > _MAX_ROLLBACKS

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

    def _in_use(self, optimizer: torch.optim.Optimizer, average: list[Tensor]) -> list[Tensor]:
        """The tensors that :attr:`good` has copies of."""
        state = optimizer.state[self.table]
        return [self.table, state["exp_avg"], state["exp_avg_sq"], *average]

    @torch.no_grad()
    def remember(
        self, which: Tensor, optimizer: torch.optim.Optimizer, average: list[Tensor]
    ) -> None:
        """Take the present state of the chosen members as good."""
        for used, good in zip(self._in_use(optimizer, average), self.good, strict=False):
            good.copy_(torch.where(which[:, None], used, good))
        self.good_taken.copy_(torch.where(which, self.taken, self.good_taken))

    @torch.no_grad()
    def roll_back(
        self, which: Tensor, optimizer: torch.optim.Optimizer, average: list[Tensor]
    ) -> None:
        """Return the chosen members to their last good state, with half the learning rate."""
        for used, good in zip(self._in_use(optimizer, average), self.good, strict=False):
            used.copy_(torch.where(which[:, None], good, used))
        self.taken.copy_(torch.where(which, self.good_taken, self.taken))
        self.rollbacks.add_(which.float())
        self.lr_factor.mul_(1 - 0.5 * which.float())
        self.streak.masked_fill_(which, 0.0)

    def stop(self, which: Tensor) -> None:
        """Freeze the chosen members."""
        which = which & (self.active > 0)
        self.active.masked_fill_(which, 0.0)
        self.stop_step.copy_(torch.where(which, self.n_steps, self.stop_step))

    @torch.no_grad()
    def keep_best(self, score: Tensor, patience: int | None) -> None:
        """Keep the state of members that got better; stop those that ran out of patience."""
        better = torch.isfinite(score) & (score > self.best_score) & (self.active > 0)
        self.best.copy_(torch.where(better[:, None], self.table, self.best))
        self.best_score.copy_(torch.where(better, score, self.best_score))
        self.best_step.copy_(torch.where(better, self.n_steps, self.best_step))
        self.stale.add_(1).mul_((~better).float())
        if patience is not None:
            self.stop(self.stale >= patience)

    @torch.no_grad()
    def adopt_best(self) -> None:
        """Put the best states in place; a member that diverged without one takes its last good."""
        self.table.copy_(torch.where(self.diverged[:, None], self.good[0], self.table))
        has_best = torch.isfinite(self.best_score)
        self.table.copy_(torch.where(has_best[:, None], self.best, self.table))

    @torch.no_grad()
    def write_back(self) -> None:
        """Copy every row into its own model."""
        for row, member in zip(self.table, self.members, strict=True):
            named = dict(_slots(member))
            *parts, b = row.split([*self.sizes, 1])
            for names, shape, part in zip(self.names, self.shapes, parts, strict=True):
                named[names[0]].copy_(part.view(shape))
            member.model.log_norm.copy_(b.squeeze())

    def outcome(self) -> dict[str, list[Any]]:
        """Counters and reasons as plain lists."""
        names = ("best_score", "best_step", "stop_step", "skipped", "rollbacks")
        found: dict[str, list[Any]] = {name: self.get_buffer(name).tolist() for name in names}
        stopped = zip(self.active.tolist(), self.diverged.tolist(), strict=True)
        found["reason"] = [
            "" if active else "diverged" if diverged else "patience" for active, diverged in stopped
        ]
        return found


def _alike(members: Sequence[Member]) -> list[list[int]]:
    """Numbers of the members that can answer as one batch."""
    groups: dict[Any, list[int]] = {}
    for k, member in enumerate(members):
        laws = [member.proposal, *([] if member.model.base is None else [member.model.base])]
        known = all(isinstance(part, _BATCHED) for law in laws for part in law.modules())
        built = [_build(law, ignore=False) for law in laws]
        names = [name for name, _ in _slots(member)]  # they tell which parts are shared
        key = (str(built), str(names), member.objective.label) if known else k
        groups.setdefault(key, []).append(k)
    return list(groups.values())


def _build(module: nn.Module, *, ignore: bool) -> list[Any]:
    """How a module is built, for comparison: kinds, plain attributes and shapes of its tensors.

    Attributes of other kinds (functions, say) are ignored, or told apart by what they are.
    """
    own = vars(nn.Module()).keys()
    found: list[Any] = []
    for name, part in module.named_modules():
        plain = {k: v for k, v in vars(part).items() if k not in own and k != "training"}
        kept = {k: v if isinstance(v, _PLAIN) else id(v) for k, v in plain.items()}
        if ignore:
            kept = {k: v for k, v in plain.items() if isinstance(v, _PLAIN)}
        found.append((name, type(part), sorted(kept.items())))
    found.append([(n, tuple(t.shape), t.dtype, t.requires_grad) for n, t in _slots(module)])
    return found


def same_law(one: Proposal, other: Proposal) -> bool:
    """Whether two proposals are the same density."""
    if one is other:
        return True
    pairs = zip(_slots(one), _slots(other), strict=False)
    alike = str(_build(one, ignore=False)) == str(_build(other, ignore=False))
    return alike and all(torch.equal(mine, theirs) for (_, mine), (_, theirs) in pairs)


def _slots(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Tensors of a module by name, each place once.

    One parameter in two layers is at two places; a layer that is reached in two ways is one.
    """
    return [
        (f"{part}.{name}" if part else name, tensor)
        for part, layer in module.named_modules()
        for name, tensor in (
            *layer.named_parameters(recurse=False),
            *layer.named_buffers(recurse=False),
        )
    ]


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
