"""What tests of training share: plain options, and a fit whose gradient overflows."""

from functools import partial

import torch
from torch import nn

import selfnorm as sn
from selfnorm.density.task import DensityTask
from selfnorm.training import Options

# What tests were written with; a newcomer's fit has other values (``density.task.usual``).
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
