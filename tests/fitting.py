"""Training functions with all options in one flat list, for tests that combine many of them."""

import inspect
from functools import partial

import selfnorm as sn


def _flat(function, *args, **given):
    direct = {k: given.pop(k) for k in [*given] if k in inspect.signature(function).parameters}
    if given:
        direct["options"] = sn.TrainingOptions(**given)
    return function(*args, **direct)


fit, fit_many, fit_distributed = (
    partial(_flat, function) for function in (sn.fit, sn.fit_many, sn.fit_distributed)
)
