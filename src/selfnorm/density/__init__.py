"""``EBM``: model, objectives, ``fit``, many models at once, chunked and distributed, baselines."""

from selfnorm.density.distributed import fit_distributed
from selfnorm.density.fit import fit
from selfnorm.density.many import fit_many
from selfnorm.density.mixture import Ensemble
from selfnorm.density.model import EBM, log_weights
from selfnorm.density.recipes import Recipe, joint_density, joint_energy

__all__ = [
    "EBM",
    "Ensemble",
    "Recipe",
    "fit",
    "fit_distributed",
    "fit_many",
    "gradients_with_graph",
    "joint_density",
    "joint_energy",
    "log_weights",
]
