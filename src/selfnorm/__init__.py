"""selfnorm: energy-based models that are normalised, fast and trustworthy.

One extra parameter ``b`` learns ``log Z`` while the energy is trained by maximum likelihood,
without MCMC; every number comes with a lower and an upper bound.
"""

from selfnorm import functional, mcmc_objectives, score_matching
from selfnorm.adapters import as_proposal
from selfnorm.autoregressive import AutoregressiveEBM
from selfnorm.conditional import ConditionalEBM, LabelEnergy
from selfnorm.defensive import Defensive
from selfnorm.distributed import fit_distributed
from selfnorm.energies import MLP, ExponentialFamily, FourierFeatures
from selfnorm.errors import SelfnormError, SelfnormWarning
from selfnorm.estimators import EnergyDensity
from selfnorm.evaluation import Bounds, evaluate
from selfnorm.flows import Flow
from selfnorm.grid_quadrature import exact_log_norm
from selfnorm.history import History
from selfnorm.image_regression import ImageRegressor
from selfnorm.many import fit_many
from selfnorm.mdn import MDN
from selfnorm.mixture import Ensemble
from selfnorm.models import EBM, log_weights
from selfnorm.proposals import Gaussian, GaussianMixture, StudentT, Uniform
from selfnorm.regressor import EnergyRegressor
from selfnorm.training import fit
from selfnorm.vae import EnergyVAE, add_energy_prior

__version__ = "0.1.0"

__all__ = [
    "EBM",
    "MDN",
    "MLP",
    "AutoregressiveEBM",
    "Bounds",
    "ConditionalEBM",
    "Defensive",
    "EnergyDensity",
    "EnergyRegressor",
    "EnergyVAE",
    "Ensemble",
    "ExponentialFamily",
    "Flow",
    "FourierFeatures",
    "Gaussian",
    "GaussianMixture",
    "History",
    "ImageRegressor",
    "LabelEnergy",
    "SelfnormError",
    "SelfnormWarning",
    "StudentT",
    "Uniform",
    "add_energy_prior",
    "as_proposal",
    "evaluate",
    "exact_log_norm",
    "fit",
    "fit_distributed",
    "fit_many",
    "functional",
    "log_weights",
    "mcmc_objectives",
    "score_matching",
]
