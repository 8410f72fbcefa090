"""How a table's density is fitted: the two methods behind :class:`~selfnorm.EnergyDensity`.

Both take standardised rows ``z (n, d)`` and return a :class:`FittedDensity` in the same units.

- *joint* (few columns): one energy over all columns on a heavy-tailed base, normalised by a sharp
  proposal with a heavy-tailed part mixed in.
- *autoregressive* (any number of columns): a chain of one-dimensional EBMs.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from selfnorm._context import SeedLike, seeded
from selfnorm.chain import N_NODES, AutoregressiveEBM, default_options
from selfnorm.columns import Columns
from selfnorm.density import EBM, Recipe, fit, fit_many, joint_density, joint_energy
from selfnorm.distributions import Defensive, Proposal, StudentT
from selfnorm.evaluation import Bounds, evaluate
from selfnorm.networks import MLP
from selfnorm.training import History, TrainingOptions

__all__ = ["METHODS", "FitRequest", "FittedDensity", "fit_autoregressive", "fit_joint"]

MAX_FACTOR_SAMPLES = 10_000_000  # some 20 s on one core
MIN_SAMPLES = 256  # per factor: enough for a verdict


@dataclass(frozen=True)
class FitRequest:
    """What the user asked for; ``None`` leaves a choice to the method and the size of the table."""

    max_steps: int | None = None
    batch_size: int | None = None
    lr: float | None = None
    weight_decay: float | None = None
    hidden: int | None = None
    validation_fraction: float = 0.1
    discrete: str | None = "auto"
    device: str | None = None
    seed: int | None = None
    progress: bool = False
    n_init: int = 1


@dataclass
class FittedDensity:
    """A trained model with, for the joint method, its proposal."""

    model: EBM | AutoregressiveEBM
    proposal: Proposal | None
    history: History

    @torch.no_grad()
    def log_prob(self, z: Tensor, chunk_size: int = 16_384) -> Tensor:
        """Log-density ``(n,)`` in the units of ``z``."""
        return torch.cat([self.model.log_prob(part) for part in z.split(chunk_size)])

    def sample(self, n: int, seed: SeedLike = None, method: str = "sir") -> Tensor:
        """``(n, d)`` rows."""
        if isinstance(self.model, EBM):
            return self.model.sample(n, proposal=self.proposal, method=method, seed=seed)
        # drawn in float32: a few digits of a random number cost twice the time in float64
        return copy.deepcopy(self.model).float().sample(n, seed=seed)

    def bounds(self, z: Tensor, n_samples: int, seed: SeedLike = None) -> Bounds:
        """Bounds of the mean log-likelihood of ``z``, with the verdict."""
        if isinstance(self.model, EBM):
            return evaluate(self.model, z, proposal=self.proposal, n_samples=n_samples, seed=seed)
        return self._chain_bounds(z, n_samples, seed)

    def _chain_bounds(self, z: Tensor, n_samples: int, seed: SeedLike) -> Bounds:
        """Bounds of a chain, whose samples are drawn for every factor of every row.

        A large table would take minutes. The distance of both bounds from the log-density by the
        learned ``b_i`` hardly differs between rows, so it is measured on as many rows as are
        affordable, and that log-density itself on all of them.
        """
        model: Any = self.model
        places = model.dim * model.n_orderings
        n_samples = min(n_samples, max(MIN_SAMPLES, MAX_FACTOR_SAMPLES // (len(z) * places)))
        n_rows = max(500, MAX_FACTOR_SAMPLES // ((n_samples + N_NODES) * places))
        if len(z) <= n_rows:
            return evaluate(model, z, n_samples=n_samples, seed=seed)
        with seeded(0 if seed is None else seed):
            chosen = torch.randperm(len(z))[:n_rows]
        part = model.bounds(z[chosen], n_samples=n_samples, seed=seed)
        own = self.log_prob(z)
        shift = float(own.mean() - own[chosen].mean())
        chosen_rows = part.learned_rms / math.sqrt(n_rows)
        error = math.hypot(float(own.std()) / math.sqrt(len(z)), part.log_norm_se, chosen_rows)
        return replace(
            part,
            lower=part.lower + shift,
            upper=part.upper + shift,
            lower_se=error,
            upper_se=error,
        )


def fit_joint(z: Tensor, request: FitRequest) -> FittedDensity:
    """One energy over all columns; for one or two columns, or a proposal known to be good.

    The base is a Student-t fitted to the rows (polynomial tails, so ``Z`` exists for any bounded
    energy), the proposal a Gaussian mixture with a Student-t part; the energy starts at zero, that
    is, at the base. Tables of a thousand rows and more get the recipe of
    :func:`selfnorm.density.recipes.joint_density`, smaller ones a smaller network and fewer steps.
    """
    n, d = z.shape
    with seeded(request.seed):
        columns = Columns(d, discrete=request.discrete).fit(z)
        train, held_out = _split(z, request.validation_fraction)
        if bool((columns.step > 0).any() or (columns.atom_width > 0).any()):
            # fresh noise for each copy, so that the noise itself cannot be learned
            copies = max(1, min(8, 20_000 // len(train)))
            train = columns.dequantise(train.repeat(copies, 1))
            held_out = None if held_out is None else columns.dequantise(held_out)
        recipe = joint_density(train) if n >= 1000 else _small_joint(train)
        models = [recipe.model]
        if request.hidden is not None:
            models = [EBM(_energy_of(n, d, request.hidden), base=recipe.model.base)]
        models += [
            EBM(_energy_of(n, d, request.hidden), base=recipe.model.base)
            for _ in range(request.n_init - 1)
        ]
    models = [model.to(request.device or "cpu") for model in models]
    options = recipe.options.given(**_stated(request), seed=request.seed, progress=request.progress)
    if options.validate_every is None and options.max_steps is not None:
        options = options.given(validate_every=max(25, options.max_steps // 20))
    common: dict[str, Any] = {
        "proposal": recipe.proposal,
        "n_samples": recipe.n_samples,
        "val_data": held_out,
    }
    if request.n_init == 1:
        history = fit(models[0], train, options=options, **common)
        return FittedDensity(models[0], recipe.proposal, history)
    histories = fit_many(models, train, options=options, **common)
    best = _best(histories)
    return FittedDensity(models[best], recipe.proposal, histories[best])


def _best(histories: list[History]) -> int:
    """The restart with the best score: held-out rows where there are any, else the training's."""

    def score(history: History) -> float:
        if history.best_score is not None:
            return history.best_score
        return history.records[-1].get("lower", -math.inf) if history.records else -math.inf

    return max(range(len(histories)), key=lambda k: score(histories[k]))


def _energy_of(n: int, d: int, hidden: int | None) -> MLP:
    """The network for ``n`` rows of ``d`` columns, freshly initialised."""
    if hidden is not None:
        return MLP(d, hidden=(hidden,) * 3, saturate=8.0, zero_init=True)
    if n >= 1000:
        return joint_energy(d)
    return MLP(d, hidden=(32 if n < 200 else 64,) * 2, saturate=8.0, zero_init=True)


def _small_joint(x: Tensor) -> Recipe:
    """The joint recipe for tables of less than a thousand rows."""
    n, d = x.shape
    energy = _energy_of(n, d, None)
    proposal = Defensive.fit_to(x, n_components=max(1, min(20, n // 50)))
    options = TrainingOptions(
        batch_size=min(256, max(16, n // 4)),
        max_epochs=10**6,
        max_steps=int(min(900, max(50, 10 * n**0.65))),
        lr=2e-3,
        weight_decay=1e-2,
        ema=0.99,
    )
    model = EBM(energy, base=StudentT.fit_to(x, df=5.0))
    return Recipe(model, proposal, options, n_samples=256 if n < 200 else 512)


def fit_autoregressive(z: Tensor, request: FitRequest) -> FittedDensity:
    """A chain of one-dimensional EBMs, of the sizes that ``default_options`` recommends.

    Small tables get a narrower network and fewer steps.
    """
    n, d = z.shape
    device = request.device or "cpu"
    defaults = default_options(n, d, device)
    sizes, options = dict(defaults.model), dict(defaults.fit)
    if n < 2000:
        sizes |= {"orderings": 1 if n < 500 else 2, "hidden": 32 if n < 500 else 64}
        sizes |= {"components": 4, "context": 8, "energy_hidden": 16}
        options["max_steps"] = int(min(options["max_steps"], max(30, 8 * n**0.65)))
        options["validate_every"] = max(20, options["max_steps"] // 20)
        options |= {"ema": 0.98 if n < 500 else 0.99, "lr": 3e-3}
    if request.hidden is not None:
        sizes["hidden"] = request.hidden
    options |= _stated(request)
    with seeded(request.seed):
        train, held_out = _split(z, request.validation_fraction)
        models = [
            AutoregressiveEBM(d, discrete=request.discrete, **sizes).set_scaling(train)
            for _ in range(request.n_init)
        ]
    if held_out is None:
        options["patience"] = None
    task = dict(defaults.task)
    # a step for b alone draws many samples: no more than an eighth of the run
    task["polish_steps"] = min(task["polish_steps"], max(1, options["max_steps"] // 8))
    options |= {"seed": request.seed, "progress": request.progress}
    common: dict[str, Any] = {"n_samples": task.pop("n_samples"), "task_options": task}
    common |= {"val_data": held_out, "options": TrainingOptions(**options)}
    histories = [fit(model.to(device), train, **common) for model in models]
    best = _best(histories)
    return FittedDensity(models[best].eval(), None, histories[best])


def _stated(request: FitRequest) -> dict[str, Any]:
    """The training options that the user stated."""
    stated: dict[str, Any] = {
        "max_steps": request.max_steps,
        "batch_size": request.batch_size,
        "lr": request.lr,
        "weight_decay": request.weight_decay,
    }
    return {name: value for name, value in stated.items() if value is not None}


def _split(z: Tensor, fraction: float) -> tuple[Tensor, Tensor | None]:
    """Rows to train on and rows to choose the best state by; none are spared of a tiny table."""
    held_out = int(fraction * len(z))
    if held_out < 20:
        return z, None
    order = torch.randperm(len(z))
    return z[order[held_out:]], z[order[:held_out]]


METHODS = {"joint": fit_joint, "autoregressive": fit_autoregressive}
