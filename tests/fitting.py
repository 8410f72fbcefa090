"""What tests of training share: options in one flat list, and a fit whose gradient overflows."""

import inspect
from dataclasses import fields
from functools import partial

import torch
from torch import nn

import selfnorm as sn
from selfnorm.density.fit import DensityTask

_NAMES = {each.name for each in fields(sn.TrainingOptions)}


# What tests were written with; a newcomer's fit has other values (``density.fit.usual``).
PLAIN = {"lr": 1e-3, "max_epochs": 25, "ema": 0, "patience": 0}


def _flat(function, *args, **given):
    if "options" not in given:
        given = PLAIN | given
    if function is sn.fit:
        given.setdefault("val_data", None)
    own = inspect.signature(function).parameters
    direct = {k: v for k, v in given.items() if k in own}
    rest = {k: v for k, v in given.items() if k not in own}
    how = {k: v for k, v in rest.items() if k in _NAMES}
    task = {k: v for k, v in rest.items() if k not in _NAMES}
    if how:
        direct["options"] = sn.TrainingOptions(**how)
    if task:
        direct["task_options"] = {**direct.get("task_options", {}), **task}
    return function(*args, **direct)


fit, fit_many, fit_distributed = (
    partial(_flat, function) for function in (sn.fit, sn.fit_many, sn.fit_distributed)
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
