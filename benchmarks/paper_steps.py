"""The paper's 2-D network on a standard Gaussian base, and training steps of one and of many."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import selfnorm as sn
from measuring import Work
from selfnorm.density.many import ManyTask, MemberData
from selfnorm.density.task import DensityTask
from selfnorm.training import Stepper, TrainingOptions

HIDDEN = (200, 100, 50, 50)
N_ROWS = 7000


def energy() -> sn.MLP:
    return sn.MLP(2, hidden=HIDDEN, activation="relu")


def models(members: int, device: str = "cpu") -> list[sn.EBM]:
    """Models that differ in their initial weights alone."""
    torch.manual_seed(0)
    base = sn.Gaussian(torch.zeros(2), scale=1.0).to(device)
    return [sn.EBM(energy(), base=base).to(device) for _ in range(members)]


def single_step(
    model: sn.EBM, batch: int, n_samples: int, options: TrainingOptions, proposal: Any = None
) -> Work:
    """A step as :func:`selfnorm.fit` takes it."""
    data = torch.randn(N_ROWS, 2, device=model.device)
    task = DensityTask(model, proposal, n_samples=n_samples)
    return _steps(Stepper(task, (data,), options), data.device, batch)


def many_task(members: int, n_samples: int, options: TrainingOptions, device: str) -> ManyTask:
    runs = [DensityTask(model, None, n_samples=n_samples) for model in models(members, device)]
    rows = MemberData([torch.randn(N_ROWS, 2, device=device)] * members)
    rates, decays = [1e-3] * members, [0.0] * members
    return ManyTask(runs, rows, None, rates=rates, weight_decays=decays, options=options)


def many_step(
    members: int,
    batch: int,
    n_samples: int,
    options: TrainingOptions,
    device: str = "cpu",
    *,
    capture: bool = True,
) -> Work:
    """A step as :func:`selfnorm.fit_many` takes it, on CUDA as a graph."""
    task = many_task(members, n_samples, options, device)
    task.capturable = capture
    orders = torch.stack([torch.randperm(N_ROWS, device=device) for _ in range(members)], dim=1)
    return _steps(Stepper(task, (orders,), options), orders.device, batch)


def _steps(stepper: Stepper, device: torch.device, batch: int) -> Work:
    order: Tensor = torch.randperm(N_ROWS, device=device)
    count = 0

    def step() -> None:
        nonlocal count
        start = count % (N_ROWS // batch) * batch
        stepper.step(order[start : start + batch], 1e-3, count)
        count += 1

    return step
