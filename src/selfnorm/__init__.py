"""selfnorm: energy-based models that are normalised, fast and trustworthy.

One extra parameter ``b`` learns ``log Z`` while the energy is trained by maximum likelihood,
without MCMC; every number comes with a lower and an upper bound.
"""

import sys
from types import ModuleType
from typing import Any

from selfnorm._door import __version__ as __version__
from selfnorm._door import lazy

# Rooms are entered when a name of theirs is first asked for: torch alone takes two seconds.
# The same names stand in __init__.pyi, for type checkers and editors.
_NAMES = {
    "chain": "AutoregressiveEBM",
    "columns": "Schema",
    "conditional": "ConditionalEBM LabelEnergy",
    "density": "EBM Ensemble fit fit_distributed fit_many log_weights",
    "density.mcmc_objectives": "mcmc_objectives",
    "density.score_matching": "score_matching",
    "distributions": "Defensive Flow Gaussian GaussianMixture MDN StudentT Uniform as_proposal",
    "errors": "SelfnormError SelfnormWarning",
    "evaluation": "Bounds evaluate exact_log_norm",
    "evidence": "Evidence evidence",
    "functional": "functional",
    "images": "ImageRegressor",
    "networks": "MLP ExponentialFamily FourierFeatures",
    "saving": "load save",
    "tables": "EnergyDensity EnergyRegressor",
    "training": "Checkpoint History TrainingOptions",
    "vae": "EnergyVAE add_energy_prior",
}
_PLACES = {name: room for room, names in _NAMES.items() for name in names.split()}
_ROOMS = {room: room for room in (*_NAMES, "sampling") if "." not in room}

__all__ = sorted(_PLACES)
__getattr__ = lazy(__name__, {**_ROOMS, **_PLACES})


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


class _Door(ModuleType):
    """The package: importing the room ``evidence`` does not put it before its function."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "evidence" or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Door
