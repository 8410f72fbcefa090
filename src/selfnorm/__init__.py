"""selfnorm: energy-based models that are normalised, fast and trustworthy.

One extra parameter ``b`` learns ``log Z`` while the energy is trained by maximum likelihood,
without MCMC; every number comes with a lower and an upper bound.
"""

from selfnorm import functional
from selfnorm.chain import AutoregressiveEBM
from selfnorm.columns import Schema
from selfnorm.conditional import ConditionalEBM, LabelEnergy
from selfnorm.density import (
    EBM,
    Ensemble,
    fit,
    fit_distributed,
    fit_many,
    log_weights,
    mcmc_objectives,
    score_matching,
)
from selfnorm.distributions import (
    MDN,
    Defensive,
    Flow,
    Gaussian,
    GaussianMixture,
    StudentT,
    Uniform,
    as_proposal,
)
from selfnorm.errors import SelfnormError, SelfnormWarning
from selfnorm.evaluation import Bounds, evaluate, exact_log_norm
from selfnorm.evidence import Evidence, evidence
from selfnorm.images import ImageRegressor
from selfnorm.networks import MLP, ExponentialFamily, FourierFeatures
from selfnorm.saving import __version__ as __version__
from selfnorm.saving import load, save
from selfnorm.tables import EnergyDensity, EnergyRegressor
from selfnorm.training import Checkpoint, History, TrainingOptions
from selfnorm.vae import EnergyVAE, add_energy_prior

__all__ = [
    "EBM",
    "MDN",
    "MLP",
    "AutoregressiveEBM",
    "Bounds",
    "Checkpoint",
    "ConditionalEBM",
    "Defensive",
    "EnergyDensity",
    "EnergyRegressor",
    "EnergyVAE",
    "Ensemble",
    "Evidence",
    "ExponentialFamily",
    "Flow",
    "FourierFeatures",
    "Gaussian",
    "GaussianMixture",
    "History",
    "ImageRegressor",
    "LabelEnergy",
    "Schema",
    "SelfnormError",
    "SelfnormWarning",
    "StudentT",
    "TrainingOptions",
    "Uniform",
    "add_energy_prior",
    "as_proposal",
    "evaluate",
    "evidence",
    "exact_log_norm",
    "fit",
    "fit_distributed",
    "fit_many",
    "functional",
    "load",
    "log_weights",
    "mcmc_objectives",
    "save",
    "score_matching",
]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
