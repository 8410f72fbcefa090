"""``EBM``: model, objectives, ``fit``, many models at once, chunked and distributed, baselines."""

# these two make their objectives known by name
from selfnorm.density import mcmc_objectives, score_matching
from selfnorm.density.distributed import Ranks, launched
from selfnorm.density.fitting import fit, fit_distributed, fit_many
from selfnorm.density.model import EBM, Ensemble, Objective, log_weights
from selfnorm.density.recipes import Recipe, joint_density, joint_energy

__all__ = [
    "EBM",
    "Ensemble",
    "Objective",
    "Ranks",
    "Recipe",
    "fit",
    "fit_distributed",
    "fit_many",
    "joint_density",
    "joint_energy",
    "launched",
    "log_weights",
    "mcmc_objectives",
    "score_matching",
]
