"""The batched model behind :func:`selfnorm.fit_many`, as a task of the one training loop."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.func import vmap

from selfnorm import functional as F
from selfnorm._context import random_state, seeded, set_random_state
from selfnorm.density import objectives
from selfnorm.density.fit import DensityTask
from selfnorm.density.member_adam import MemberAdam
from selfnorm.density.members import Members
from selfnorm.density.model import EBM
from selfnorm.density.objectives import Objective, WeightObjective, Weights
from selfnorm.density.stacked_proposals import stack_proposals
from selfnorm.distributions import Proposal
from selfnorm.errors import SelfnormError
from selfnorm.evaluation import estimate_log_norm
from selfnorm.training import History, Task, TrainingOptions, fingerprint

if TYPE_CHECKING:
    from selfnorm.training import Stepper

__all__ = ["ManyTask", "MemberData"]

_MAX_BAD_STREAK, _MAX_ROLLBACKS = 5, 8  # as in the loop, but for each member
_METRICS = ("loss", "grad_norm", "lower", "upper")
_N_VAL_SAMPLES = 16_384
_TOLERANCE = 2e-3  # standard error of the closing log Z, as for a single run
# Rows of all members together in one forward pass without gradient: enough to fill the device.
_ROWS_AT_ONCE = {"cpu": 2**17, "cuda": 2**21}


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
        models: Sequence[EBM],
        proposals: Sequence[Proposal],
        data: MemberData,
        val_data: MemberData | None,
        *,
        objective_list: Sequence[Objective],
        n_samples: int,
        lr_factors: Sequence[float],
        log_norm_factors: Sequence[float],
        weight_decays: Sequence[float],
        patience: int | None = None,
        same_samples: bool = False,
    ) -> None:
        device = models[0].device
        self.models, self.data, self.val_data = models, data, val_data
        self.n_samples, self.patience = n_samples, patience
        self.proposals = [q.to(device) for q in proposals]
        self.stack = stack_proposals(self.proposals).to(device)
        self.same_samples = same_samples
        if same_samples and self.stack.shared is None:
            raise ValueError("same_samples needs one proposal common to all members")
        self.module = Members(models, lr_factors, log_norm_factors, weight_decays).to(device)
        self.objectives = objective_list
        self.groups = _by_objective(objective_list, device)
        self.needs_q_at_data = any(o.needs_proposal_at_data for o, _ in self.groups)
        learns = [o.learns_log_norm for o in objective_list]
        self._learns = torch.tensor(learns, device=device)
        self._loss = torch.zeros(len(models), device=device)
        self._values = torch.zeros(2, len(models), device=device)
        self._val_samples: tuple[Tensor, Tensor] | None = None
        self._settings = {
            "objective": [objectives.label(o) for o in objective_list],
            "n_samples": n_samples,
            "same_samples": same_samples,
            "lr": list(lr_factors),
            "lr_log_norm": list(log_norm_factors),
            "weight_decay": list(weight_decays),
            "patience": patience,
        }
        self._rows = fingerprint(tuple(data.tables[: 1 if data.shared else None]))

    def settings(self) -> dict[str, Any]:
        """What a resumed run must share; rates are shares of the largest."""
        told = {f"members' {name}": value for name, value in self._settings.items()}
        return {**told, "rows": self._rows}

    def witness(self, data: tuple[Tensor, ...]) -> Tensor:  # noqa: ARG002
        """``log p~`` and ``log q`` of every member at its first rows."""
        rows = self.data.rows[..., :64, :].expand(len(self.models), -1, -1)
        return torch.cat([self.module.log_unnormalized(rows), self.stack.log_prob(rows)])

    def parameter_groups(self) -> list[dict[str, Any]]:
        """The energies' weights, and ``b``."""
        return [
            {"params": [self.module.weights], "lr_scale": 1.0},
            {"params": [self.module.log_norm], "lr_scale": 1.0, "log_norm": True},
        ]

    def make_optimizer(self, options: TrainingOptions) -> torch.optim.Optimizer:
        """Adam with a learning rate and a weight decay for each member."""
        return MemberAdam(
            self.parameter_groups(), self.module, decoupled=options.optimizer == "adamw"
        )

    def start(self, data: tuple[Tensor, ...]) -> None:  # noqa: ARG002
        """The checks and the first ``b`` of every member, as in a run of its own."""
        device = self.module.log_norm.device
        before = random_state(device)
        for k, (model, q) in enumerate(zip(self.models, self.proposals, strict=True)):
            if self.same_samples:
                set_random_state(before, device)
            model.eval()
            single = DensityTask(model, q, objective=self.objectives[k])
            try:
                single.start((self.data.tables[k],))
            except SelfnormError as error:
                raise type(error)(f"member {k}: {error}") from error
        with torch.no_grad():
            self.module.log_norm.copy_(torch.stack([m.log_norm for m in self.models]))

    def _draw(self) -> Tensor:
        if self.same_samples and self.stack.shared is not None:
            drawn = self.stack.shared.sample((self.n_samples,))
            return drawn.expand(len(self.models), -1, -1)
        return self.stack.sample(self.n_samples)

    def loss(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum of the members' losses: the gradient of each is untouched by the others."""
        x = self.data.take(batch[0].T)
        n = x.shape[1]
        with torch.no_grad():
            points = torch.cat([x, self._draw()], dim=1)
            log_q = self.stack.log_prob(points if self.needs_q_at_data else points[:, n:])
        log_p = self.module.log_unnormalized(points)
        log_p_data, log_w = log_p[:, :n], log_p[:, n:] - log_q[:, -self.n_samples :]
        log_z = F.log_mean_exp(log_w, 1)
        b = self.module.log_norm
        seen = Weights(
            log_p_data,
            log_p_data - log_q[:, :n] if self.needs_q_at_data else log_p_data,
            log_w,
            log_z,
            b,
        )
        losses = -self._objective_values(seen)
        with torch.no_grad():
            upper = log_p_data.mean(1) - log_z
            lower = upper - F.bound_gap(log_z - b)
        return self._sum_up(losses, upper, lower)

    def _sum_up(
        self, losses: Tensor, upper: Tensor, lower: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of all; ``l_SNL`` is the lower bound where none is given."""
        with torch.no_grad():
            lower = -losses if lower is None else lower
            self._loss.copy_(losses)
            self._values.copy_(torch.stack([lower, upper]))
            finite = torch.isfinite(losses)
            means = [torch.where(finite, v, 0.0).mean() for v in (lower, upper)]
        # A member whose loss is not finite must not reach the others through the sum.
        loss = torch.where(finite, losses, 0.0).sum()
        return loss, {"lower": means[0], "upper": means[1]}

    def _objective_values(self, seen: Weights) -> Tensor:
        if len(self.groups) == 1:
            values: Tensor = vmap(self.groups[0][0].value)(seen)
            return values
        out = torch.zeros_like(seen.log_z)
        for objective, members in self.groups:
            part = Weights(*(t.index_select(0, members) for t in seen))
            out = out.index_add(0, members, vmap(objective.value)(part))
        return out

    @torch.no_grad()
    def condition_gradients(self, params: Sequence[Tensor], clip_norm: float | None) -> Tensor:  # noqa: ARG002
        """Clip member by member and mark those that may not step; returns the overall norm."""
        module = self.module
        grad, grad_b = module.weights.grad, module.log_norm.grad
        assert grad is not None
        norm = torch.linalg.vector_norm(grad, dim=1)
        if grad_b is not None:
            norm = torch.hypot(norm, grad_b)
        finite = torch.isfinite(norm) & torch.isfinite(self._loss)
        module.count(finite, torch.cat([torch.stack([self._loss, norm]), self._values]))
        if norm.device.type == "cpu" and bool(finite.all()):
            longest = float(norm.max())
            if clip_norm is None or longest + 1e-6 <= clip_norm:  # nothing to change
                return torch.linalg.vector_norm(norm)
        scale = torch.ones_like(norm)
        if clip_norm is not None:
            scale = (clip_norm / (norm + 1e-6)).clamp_max(1.0)
        # where, not a product: a non-finite gradient times zero is still not finite.
        module.weights.grad = torch.where(finite[:, None], grad * scale[:, None], 0.0)
        if grad_b is not None:
            module.log_norm.grad = torch.where(finite, grad_b * scale, 0.0).to(grad_b.dtype)
        return torch.where(finite, norm, 0.0).square().sum().sqrt()

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
        log_w = self._in_chunks(samples) - log_q
        rows = self.val_data.rows
        log_p = self._in_chunks(rows if rows.dim() == 3 else rows.expand(len(self.models), -1, -1))
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

    def _validation_samples(self) -> tuple[Tensor, Tensor]:
        """The very samples on which a run of its own would judge each member."""
        if self._val_samples is None:
            drawn: list[Tensor] = []
            for k, q in enumerate(self.proposals):
                if k and self.stack.shared is not None:
                    drawn.append(drawn[0])
                    continue
                with seeded(20_231_106, self.module.log_norm.device):
                    drawn.append(q.sample((_N_VAL_SAMPLES,)))
            samples = torch.stack(drawn)
            self._val_samples = samples, self.stack.log_prob(samples)
        return self._val_samples

    def _chunk_size(self) -> int:
        rows = _ROWS_AT_ONCE.get(self.module.log_norm.device.type, 2**17)
        return max(1024, rows // len(self.models))

    def _in_chunks(self, x: Tensor) -> Tensor:
        size = self._chunk_size()
        return torch.cat([self.module.log_unnormalized(part) for part in x.split(size, 1)], dim=1)

    @torch.no_grad()
    def finish(self, data: tuple[Tensor, ...]) -> dict[str, float]:  # noqa: ARG002
        """Best states in place, then ``b <- log Z_hat`` on fresh samples for every member."""
        self.module.adopt_best()
        learned = self.module.log_norm.detach().clone()
        log_z, error, n_used = self._estimate_log_norm()
        if log_z.device.type == "cpu":
            self._refine(log_z, error, n_used)
        self.module.log_norm.copy_(torch.where(torch.isfinite(log_z), log_z, learned))
        final: dict[str, float] = {}
        for k in range(len(self.models)):
            final[f"{k}/log_norm"] = float(log_z[k])
            final[f"{k}/log_norm_se"] = float(error[k])
            final[f"{k}/log_norm_learned"] = float(learned[k])
            final[f"{k}/log_norm_samples"] = n_used[k]
        return final

    def _refine(self, log_z: Tensor, error: Tensor, n_used: list[int]) -> None:
        """More samples for the members that need them: on a CPU the others would cost as much."""
        self.module.write_back(self.models)
        for k in (error >= _TOLERANCE).nonzero().flatten().tolist():
            value, spread, n_used[k] = estimate_log_norm(self.models[k], self.proposals[k])
            log_z[k], error[k] = value, spread

    def _estimate_log_norm(self) -> tuple[Tensor, Tensor, list[int]]:
        """Draw until the standard error of every member's ``log Z`` is small (CUDA), or once."""
        max_samples = 2**20 if self.module.log_norm.device.type == "cuda" else _N_VAL_SAMPLES
        chunk = min(_N_VAL_SAMPLES, self._chunk_size())
        first: list[Tensor] = []
        second: list[Tensor] = []
        while True:
            samples = self.stack.sample(chunk)
            log_w = (self._in_chunks(samples) - self.stack.log_prob(samples)).double()
            first.append(F.log_mean_exp(log_w, 1))
            second.append(F.log_mean_exp(2 * log_w, 1))
            counts = [chunk] * len(first)
            total = sum(counts)
            log_z = F.combine_log_means(first, counts)
            excess = torch.expm1(F.combine_log_means(second, counts) - 2 * log_z)
            error = (excess.clamp_min(0) / total).sqrt()
            enough = total >= _N_VAL_SAMPLES and not bool((error >= _TOLERANCE).any())
            if enough or total + chunk > max_samples:
                return log_z, error, [total] * len(self.models)

    def histories(self, joint: History, rates: Sequence[float]) -> list[History]:
        """The record of each member out of that of all."""
        state = self.module.outcome()
        found = []
        for k in range(len(self.models)):
            records = [
                _member_record(r, k, rates[k] / max(rates))
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


def _by_objective(
    given: Sequence[Objective], device: torch.device
) -> list[tuple[WeightObjective, Tensor]]:
    """Members that share an objective, evaluated together."""
    groups: dict[Any, tuple[WeightObjective, list[int]]] = {}
    for k, objective in enumerate(given):
        if not isinstance(objective, WeightObjective):
            raise ValueError(
                f"fit_many trains by objectives that are functions of weights (snl, nce, ...); "
                f"{type(objective).__name__} is none: use fit() for each model"
            )
        groups.setdefault(objective.value, (objective, []))[1].append(k)
    return [(o, torch.tensor(members, device=device)) for o, members in groups.values()]


def _member_record(record: dict[str, float], k: int, lr_share: float) -> dict[str, float]:
    own = {name: record[name] for name in ("step", "epoch")}
    train, held_out = f"val_{k}/train/", f"val_{k}/"
    for key, value in record.items():
        if key.startswith(train):
            own[key.removeprefix(train)] = value
        elif key.startswith(held_out):
            own["val_" + key.removeprefix(held_out)] = value
    return {**own, "lr": record["lr"] * lr_share, "seconds": record["seconds"]}
