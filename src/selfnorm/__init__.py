"""selfnorm: energy-based models that are normalised, fast and trustworthy.

One extra parameter ``b`` learns ``log Z`` while the energy is trained by maximum likelihood,
without MCMC; every number comes with a lower and an upper bound.
"""

import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType

__version__ = "0.1.0"  # also written into every model folder

# A folder is imported when a name of it is first used: torch alone takes two seconds.
# The same names stand in __init__.pyi, for type checkers and editors.
_NAMES = {
    "chain": "AutoregressiveEBM",
    "columns": "Schema",
    "conditional": "ConditionalEBM LabelEnergy",
    "density": "EBM Ensemble fit fit_distributed fit_many log_weights "
    "mcmc_objectives score_matching",
    "distributions": "Defensive Flow Gaussian GaussianMixture MDN StudentT Uniform as_proposal",
    "errors": "SelfnormError SelfnormWarning",
    "evaluation": "Bounds evaluate exact_log_norm",
    "evidence": "Evidence evidence",
    "images": "ImageRegressor",
    "networks": "MLP ExponentialFamily FourierFeatures",
    "saving": "load save",
    "tables": "EnergyDensity EnergyRegressor Estimate",
    "training": "Checkpoint History TrainingOptions",
    "vae": "EnergyVAE add_energy_prior",
}
_PLACES = {name: folder for folder, names in _NAMES.items() for name in names.split()}
_FOLDERS = {*_NAMES, "functional", "integrations", "sampling"}

__all__ = sorted([*_PLACES, "functional"])


def __getattr__(name: str) -> object:
    """A name of the library, or a folder of it (PEP 562)."""
    if name in _PLACES:
        value = getattr(import_module(f"selfnorm.{_PLACES[name]}"), name)
    elif name in _FOLDERS:
        value = import_module(f"selfnorm.{name}")
    else:
        raise AttributeError(f"module 'selfnorm' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


class _Door(ModuleType):
    """The package: an import of the folder ``evidence`` does not replace the function.

    It is pickled by its name, as other modules are by ``cloudpickle``.
    """

    def __reduce__(self) -> tuple[Callable[[str], ModuleType], tuple[str]]:
        return import_module, (self.__name__,)

    def __setattr__(self, name: str, value: object) -> None:
        if name != "evidence" or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Door
