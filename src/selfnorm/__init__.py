"""selfnorm: energy-based models that are normalised, fast and trustworthy.

One extra parameter ``b`` learns ``log Z`` while the energy is trained by maximum likelihood,
without MCMC; every number comes with a lower and an upper bound.
"""

from selfnorm import functional
from selfnorm.chain.model import AutoregressiveEBM
from selfnorm.conditional.model import ConditionalEBM, LabelEnergy
from selfnorm.density import mcmc_objectives, score_matching
from selfnorm.density.distributed import fit_distributed
from selfnorm.density.fit import fit
from selfnorm.density.many import fit_many
from selfnorm.density.mixture import Ensemble
from selfnorm.density.model import EBM, log_weights
from selfnorm.distributions.adapters import as_proposal
from selfnorm.distributions.defensive import Defensive
from selfnorm.distributions.flows import Flow
from selfnorm.distributions.mdn import MDN
from selfnorm.distributions.proposals import Gaussian, GaussianMixture, StudentT, Uniform
from selfnorm.errors import SelfnormError, SelfnormWarning
from selfnorm.evaluation.bounds import Bounds, evaluate
from selfnorm.evaluation.quadrature import exact_log_norm
from selfnorm.images.regressor import ImageRegressor
from selfnorm.networks.energies import MLP, ExponentialFamily, FourierFeatures
from selfnorm.tables.density import EnergyDensity
from selfnorm.tables.regressor import EnergyRegressor
from selfnorm.training.history import History
from selfnorm.vae.model import EnergyVAE, add_energy_prior

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
