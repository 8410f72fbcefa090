"""Training functions with all options in one flat list, for tests that combine many of them."""

import inspect
from dataclasses import fields
from functools import partial

import selfnorm as sn

_NAMES = {each.name for each in fields(sn.TrainingOptions)}


def _flat(function, *args, **given):
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
