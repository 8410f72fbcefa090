"""selfnorm: energy-based models that are normalised, fast and trustworthy.

One extra parameter ``b`` learns ``log Z`` while the energy is trained by maximum likelihood,
without MCMC; every number comes with a lower and an upper bound.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from selfnorm._version import __version__ as __version__

# Rooms are entered when a name of theirs is first asked for: torch alone takes two seconds.
# The same names stand in __init__.pyi, for type checkers and editors.
_NAMES = {
    "chain": "AutoregressiveEBM",
    "columns": "Schema",
    "conditional": "ConditionalEBM LabelEnergy",
    "density": "EBM Ensemble fit fit_distributed fit_many log_weights",
    "distributions": "Defensive Flow Gaussian GaussianMixture MDN StudentT Uniform as_proposal",
    "errors": "SelfnormError SelfnormWarning",
    "evaluation": "Bounds evaluate exact_log_norm",
    "evidence": "Evidence evidence",
    "images": "ImageRegressor",
    "networks": "MLP ExponentialFamily FourierFeatures",
    "sampling": "",
    "saving": "load save",
    "tables": "EnergyDensity EnergyRegressor",
    "training": "Checkpoint History TrainingOptions",
    "vae": "EnergyVAE add_energy_prior",
}
_MODULES = {
    "functional": "functional",
    "mcmc_objectives": "density.mcmc_objectives",
    "score_matching": "density.score_matching",
}
_ROOM_OF = {name: room for room, names in _NAMES.items() for name in names.split()}

__all__ = sorted([*_ROOM_OF, *_MODULES])


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


class _Door(ModuleType):
    """The package: importing the room ``evidence`` does not put it before its function."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _ROOM_OF or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


def __getattr__(name: str) -> Any:
    if name in _ROOM_OF:
        found = getattr(import_module(f"selfnorm.{_ROOM_OF[name]}"), name)
    elif name in _MODULES or name in _NAMES:
        found = import_module(f"selfnorm.{_MODULES.get(name, name)}")
    else:
        raise AttributeError(f"module 'selfnorm' has no attribute {name!r}")
    globals()[name] = found
    return found


sys.modules[__name__].__class__ = _Door
