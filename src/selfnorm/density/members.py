"""State of models that train together: weights, best states and counters, a row for each member.

All of it lives in parameters and buffers, so that a checkpoint of the module holds everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from selfnorm.density.model import EBM
from selfnorm.density.stacked_energies import EnergyStack
from selfnorm.density.stacked_proposals import stack_proposals

__all__ = ["Members"]

_N_METRICS = 4
_REASONS = ("", "patience", "diverged")


class Members(nn.Module):
    """The stacked models: ``weights (K, P)``, ``log_norm (K,)`` and what is known of each member.

    Attributes:
        updating: 1 where the last step counts for the member.
        active: 0 once a member has stopped; ``reason`` says why, ``stop_step`` when.
        lr_factor, log_norm_factor, weight_decay: see
        :class:`~selfnorm.density.member_adam.MemberAdam`.
        streak, skipped, rollbacks: non-finite steps in a row and in all, and their consequences.
    """

    updating: Tensor
    active: Tensor
    lr_factor: Tensor
    log_norm_factor: Tensor
    weight_decay: Tensor
    streak: Tensor
    skipped: Tensor
    rollbacks: Tensor
    n_steps: Tensor
    good: Tensor
    totals: Tensor
    stale: Tensor
    best_score: Tensor
    best_step: Tensor
    stop_step: Tensor
    reason: Tensor

    def __init__(
        self,
        models: Sequence[EBM],
        lr_factors: Sequence[float],
        log_norm_factors: Sequence[float],
        weight_decays: Sequence[float],
    ) -> None:
        super().__init__()
        energies: list[Any] = [m.energy for m in models]
        self.energies = EnergyStack(energies)
        self.weights = nn.Parameter(self.energies.flatten(energies))
        self.log_norm = nn.Parameter(torch.stack([m.log_norm.detach() for m in models]))
        with_base = [k for k, m in enumerate(models) if m.base is not None]
        self.all_have_base = len(with_base) == len(models)
        self.base = (
            stack_proposals([m.base for m in models if m.base is not None]) if with_base else None
        )
        device, members = self.log_norm.device, len(models)
        self.register_buffer("with_base", torch.tensor(with_base, device=device), persistent=False)

        def vector(name: str, values: Sequence[float] | float = 0.0) -> None:
            row = [values] * members if isinstance(values, float) else list(values)
            self.register_buffer(name, torch.tensor(row, device=device))

        vector("updating", 1.0)
        vector("active", 1.0)
        vector("lr_factor", lr_factors)
        vector("log_norm_factor", log_norm_factors)
        vector("weight_decay", weight_decays)
        vector("best_score", -float("inf"))
        for name in ("streak", "skipped", "rollbacks", "good", "stale"):
            vector(name)
        for name in ("best_step", "stop_step", "reason"):
            vector(name)
        self.register_buffer("n_steps", torch.zeros((), device=device))
        self.register_buffer("totals", torch.zeros(_N_METRICS, members, device=device))
        # The best state, and the last good one with the optimiser's moments, to roll back to.
        for name, like in (("weights", self.weights), ("log_norm", self.log_norm)):
            self.register_buffer(f"best_{name}", like.detach().clone())
            for what in ("value", "exp_avg", "exp_avg_sq", "average"):
                self.register_buffer(f"good_{what}_{name}", torch.zeros_like(like.detach()))
            self.register_buffer(f"good_step_{name}", torch.zeros(members, device=device))
        self.register_buffer("has_good", torch.zeros(members, device=device))

    def log_unnormalized(self, x: Tensor) -> Tensor:
        """``-E_k(x) + log d_k(x)``: ``(K, n, d) -> (K, n)``."""
        minus_energy = -self.energies(self.weights, x)
        if self.base is None:
            return minus_energy
        with torch.no_grad():
            if self.all_have_base:
                log_d = self.base.log_prob(x)
            else:
                rows: Tensor = self.get_buffer("with_base")
                known = self.base.log_prob(x.index_select(0, rows))
                log_d = known.new_zeros(x.shape[:2]).index_copy(0, rows, known)
        return minus_energy + log_d

    @torch.no_grad()
    def count(self, finite: Tensor, metrics: Tensor) -> None:
        """Book one step: which members take it, and their metrics ``(4, K)``."""
        taken = finite.float() * self.active
        bad = (1 - finite.float()) * self.active
        self.updating.copy_(taken)
        self.streak.add_(1).mul_(bad)
        self.skipped.add_(bad)
        self.good.add_(taken)
        self.n_steps.add_(1)
        self.totals.add_(torch.where(taken > 0, metrics, 0.0))

    def read(self) -> Tensor:
        """Mean metrics ``(4, K)`` since the last read."""
        means = self.totals / self.good.clamp_min(1)
        self.totals.zero_()
        self.good.zero_()
        return means

    def _slots(self, optimizer: torch.optim.Optimizer, average: list[Tensor]) -> list[Any]:
        """Pairs of (tensor in use, its last good copy)."""
        pairs: list[tuple[Tensor, Tensor]] = []
        for position, name in enumerate(("weights", "log_norm")):
            p = self.get_parameter(name)
            pairs.append((p, self.get_buffer(f"good_value_{name}")))
            state = optimizer.state[p]
            kept = ("exp_avg", "exp_avg_sq", "step")
            pairs += [(state[what], self.get_buffer(f"good_{what}_{name}")) for what in kept]
            if average:
                pairs.append((average[position], self.get_buffer(f"good_average_{name}")))
        return pairs

    @torch.no_grad()
    def remember(
        self, which: Tensor, optimizer: torch.optim.Optimizer, average: list[Tensor]
    ) -> None:
        """Take the present state of the chosen members as good."""
        for used, good in self._slots(optimizer, average):
            good.copy_(torch.where(_rows(which, used), used, good))
        self.get_buffer("has_good").masked_fill_(which, 1.0)

    @torch.no_grad()
    def roll_back(
        self, which: Tensor, optimizer: torch.optim.Optimizer, average: list[Tensor]
    ) -> None:
        """Return the chosen members to their last good state, with half the learning rate."""
        known = which & (self.get_buffer("has_good") > 0)
        for used, good in self._slots(optimizer, average):
            used.copy_(torch.where(_rows(known, used), good, used))
        self.rollbacks.add_(which.float())
        self.lr_factor.mul_(1 - 0.5 * which.float())
        self.streak.masked_fill_(which, 0.0)

    def stop(self, which: Tensor, reason: str) -> None:
        """Freeze the chosen members."""
        which = which & (self.active > 0)
        self.active.masked_fill_(which, 0.0)
        self.reason.masked_fill_(which, float(_REASONS.index(reason)))
        self.stop_step.copy_(torch.where(which, self.n_steps, self.stop_step))

    @torch.no_grad()
    def keep_best(self, score: Tensor, patience: int | None) -> None:
        """Keep the state of members that got better; stop those that ran out of patience."""
        better = torch.isfinite(score) & (score > self.best_score) & (self.active > 0)
        for name in ("weights", "log_norm"):
            kept, now = self.get_buffer(f"best_{name}"), self.get_parameter(name)
            kept.copy_(torch.where(_rows(better, now), now, kept))
        self.best_score.copy_(torch.where(better, score, self.best_score))
        self.best_step.copy_(torch.where(better, self.n_steps, self.best_step))
        self.stale.add_(1).mul_((~better).float())
        if patience is not None:
            self.stop(self.stale >= patience, "patience")

    @torch.no_grad()
    def adopt_best(self) -> None:
        """Put the best states in place; a member that diverged without one takes its last good."""
        has_best = torch.isfinite(self.best_score)
        diverged = (self.reason == _REASONS.index("diverged")) & (self.get_buffer("has_good") > 0)
        for name in ("weights", "log_norm"):
            p = self.get_parameter(name)
            p.copy_(torch.where(_rows(diverged, p), self.get_buffer(f"good_value_{name}"), p))
            p.copy_(torch.where(_rows(has_best, p), self.get_buffer(f"best_{name}"), p))

    @torch.no_grad()
    def write_back(self, models: Sequence[EBM]) -> None:
        """Copy every member into its own model."""
        self.energies.unflatten(self.weights, [m.energy for m in models])  # type: ignore[misc]
        for model, b in zip(models, self.log_norm, strict=True):
            model.log_norm.copy_(b)

    def outcome(self) -> dict[str, list[Any]]:
        """Counters and reasons as plain lists."""
        names = ("best_score", "best_step", "stop_step", "skipped", "rollbacks")
        found: dict[str, list[Any]] = {name: self.get_buffer(name).tolist() for name in names}
        found["reason"] = [_REASONS[int(r)] for r in self.reason.tolist()]
        return found


def _rows(which: Tensor, like: Tensor) -> Tensor:
    return which.view((-1,) + (1,) * (like.dim() - 1))
