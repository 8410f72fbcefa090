"""One energy over all columns of a table: for one or two columns of numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from selfnorm._context import seeded
from selfnorm.columns import Columns
from selfnorm.density import EBM, Recipe, fit, fit_many, joint_density, joint_energy
from selfnorm.distributions import Defensive, Proposal, StudentT
from selfnorm.networks import MLP
from selfnorm.training import History, TrainingOptions, split_rows


def fit_joint(
    x: Tensor,
    *,
    hidden: int | None,
    n_init: int,
    validation_fraction: float,
    device: str,
    seed: int,
    stated: dict[str, Any],
) -> tuple[list[EBM], Proposal, list[History], Columns, np.ndarray]:
    """Restarts of one energy over the rows ``x (n, d)`` in float64, and the map of the columns.

    The last of what is returned are the rows that were held out.

    The base is a Student-t fitted to the rows (polynomial tails, so ``Z`` exists for any
    bounded energy), the proposal a Gaussian mixture with a Student-t part; the energy starts at
    zero, that is, at the base. Tables of a thousand rows and more get the recipe of
    :func:`selfnorm.density.recipes.joint_density`, smaller ones a smaller network and fewer
    steps. Restarts differ in their energies alone.
    """
    n, d = x.shape
    with seeded(seed):
        columns = Columns(d).double().fit(x)
        chosen, spared = split_rows(torch.arange(n), validation_fraction)
        train, held_out = x[chosen], None if spared is None else x[spared]
        if bool((columns.step > 0).any() or (columns.atom_width > 0).any()):
            # fresh noise for each copy, so that the noise itself cannot be learned
            copies = max(1, min(8, 20_000 // len(train)))
            train = columns.dequantise(train.repeat(copies, 1))
            held_out = None if held_out is None else columns.dequantise(held_out)
        train = columns(train)[0].float()
        recipe = joint_density(train) if n >= 1000 else _small_joint(train)
        models = [recipe.model]
        if hidden is not None:
            models = [EBM(_energy_of(n, d, hidden), base=recipe.model.base)]
        models += [EBM(_energy_of(n, d, hidden), base=recipe.model.base) for _ in range(n_init - 1)]
    models = [model.to(device) for model in models]
    options = recipe.options.given(**stated)
    if options.validate_every is None and options.max_steps is not None:
        options = options.given(validate_every=max(25, options.max_steps // 20))
    mapped = None if held_out is None else columns(held_out)[0].float()
    common: dict[str, Any] = {"proposal": recipe.proposal, "n_samples": recipe.n_samples}
    common |= {"val_data": mapped, "options": options}
    one = n_init == 1
    histories = [fit(models[0], train, **common)] if one else fit_many(models, train, **common)
    return models, recipe.proposal, histories, columns, in_order(spared)


def in_order(rows: Tensor | None) -> np.ndarray:
    """Numbers of rows, ascending; none for ``None``."""
    return np.sort(rows.numpy()) if rows is not None else np.zeros(0, dtype=np.int64)


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
