"""Variational auto-encoders with energy-based priors, trained by the SNELBO."""

from selfnorm.vae.evaluation import VAEReport, evaluate_vae
from selfnorm.vae.model import Bernoulli, Categorical, EnergyVAE, GaussianNoise, add_energy_prior
from selfnorm.vae.networks import ConvDecoder, ConvEncoder, DenseDecoder, DenseEncoder
from selfnorm.vae.priors import (
    AutoregressivePrior,
    EnergyPrior,
    LatentPrior,
    MixturePrior,
    StandardNormal,
    latent_energy,
)

__all__ = [
    "AutoregressivePrior",
    "Bernoulli",
    "Categorical",
    "ConvDecoder",
    "ConvEncoder",
    "DenseDecoder",
    "DenseEncoder",
    "EnergyPrior",
    "EnergyVAE",
    "GaussianNoise",
    "LatentPrior",
    "MixturePrior",
    "StandardNormal",
    "VAEReport",
    "add_energy_prior",
    "evaluate_vae",
    "latent_energy",
]
