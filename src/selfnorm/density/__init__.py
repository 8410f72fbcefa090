"""``EBM``: model, objectives, ``fit``, many models at once, chunked and distributed, baselines."""

from selfnorm.density.distributed import fit_distributed
from selfnorm.density.fit import fit
from selfnorm.density.many import fit_many
from selfnorm.density.mixture import Ensemble
from selfnorm.density.model import EBM, log_weights
from selfnorm.density.recipes import Recipe, joint_density, joint_energy
from selfnorm.density.snl_loss import capped_exp_and_slope, gradients_with_graph

__all__ = [
    "EBM",
    "Ensemble",
    "Recipe",
    "capped_exp_and_slope",
    "fit",
    "fit_distributed",
    "fit_many",
    "gradients_with_graph",
    "joint_density",
    "joint_energy",
    "log_weights",
]
