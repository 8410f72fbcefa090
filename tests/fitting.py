"""What tests of training share: plain options, skewed rows, energies that misbehave."""

from functools import partial

import torch
from torch import nn

import selfnorm as sn
from selfnorm.density.model import DensityTask
from selfnorm.training import Options

# What tests were written with; a newcomer's fit has other values (``density.model.usual``).
PLAIN = {"lr": 1e-3, "max_epochs": 25, "ema": 0, "patience": 0}
_OF_FIT = {"proposal", "objective", "n_samples", "val_data", "task", "task_options", "options"}
_OF_FIT |= {"fabric", "n_accumulate", "samples", *Options.__annotations__}


def _plainly(function, *args, **how):
    task = {name: how.pop(name) for name in how.keys() - _OF_FIT}
    if task:
        how["task_options"] = {**how.get("task_options", {}), **task}
    return function(*args, **{"val_data": None} | ({} if "options" in how else PLAIN) | how)


fit, fit_many, fit_distributed = (
    partial(_plainly, function) for function in (sn.fit, sn.fit_many, sn.fit_distributed)
)


def skewed(n=600, seed=0, shift=0.0):
    """Two dependent columns, neither symmetric."""
    z = torch.randn(n, 2, generator=torch.Generator().manual_seed(seed))
    return torch.stack([z[:, 0].exp() - 1.5 + shift, 0.5 * z[:, 1] + 0.4 * z[:, 0] ** 2], -1)


def weights(*models):
    """All parameters as one row."""
    return torch.cat([p.detach().flatten() for m in models for p in m.parameters()])


class Troubled(nn.Module):
    """Finite in checks; NaN, or interrupted, in training calls ``first`` to ``last``."""

    def __init__(self, first, last=10**9, *, interrupts=False):
        super().__init__()
        self.net = sn.MLP(2, (16,), saturate=10.0)
        self.first, self.last, self.interrupts, self.calls = first, last, interrupts, 0

    def forward(self, x):
        self.calls += self.training
        if not self.training or not self.first <= self.calls < self.last:
            return self.net(x)
        if self.interrupts:
            raise KeyboardInterrupt
        return self.net(x) * torch.nan


class Hole(nn.Module):
    """An energy with a hole of some depth beyond 1.5."""

    def __init__(self, depth):
        super().__init__()
        self.depth = nn.Parameter(torch.tensor(depth))

    def forward(self, x):
        return -self.depth * torch.sigmoid(20 * (x[:, 0] - 1.5))


class Deepens(DensityTask):
    """``b`` is set at the start; the hole opens after it."""

    def start(self, data):
        super().start(data)
        with torch.no_grad():
            self.module.energy.depth.fill_(60.0)
