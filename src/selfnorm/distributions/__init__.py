"""Bases and proposals: Gaussians, mixtures, defensive ones, flows, density networks, adapters."""

from selfnorm.distributions.defensive import Defensive, mix_log_probs, mix_samples
from selfnorm.distributions.flows import Flow, FlowTask, proposal_loss
from selfnorm.distributions.lines import ridge_lines
from selfnorm.distributions.mdn import (
    MDN,
    DefensiveLabels,
    LabelGaussian,
    LabelUniform,
    MixtureLabels,
    UniformLabels,
)
from selfnorm.distributions.mixtures import (
    Mixture1d,
    choose_component,
    ends_of_cells,
    gaussian_log_prob,
    interpolate,
    log_normal_mass,
    mixture_log_prob,
    pick_component,
    stratified_uniform,
)
from selfnorm.distributions.proposals import (
    Gaussian,
    GaussianMixture,
    Proposal,
    StudentT,
    Uniform,
    UnnormalisedModel,
    as_proposal,
    proposal_for,
)
from selfnorm.distributions.table_mixture import TableMixture

__all__ = [
    "MDN",
    "Defensive",
    "DefensiveLabels",
    "Flow",
    "FlowTask",
    "Gaussian",
    "GaussianMixture",
    "LabelGaussian",
    "LabelUniform",
    "Mixture1d",
    "MixtureLabels",
    "Proposal",
    "StudentT",
    "TableMixture",
    "Uniform",
    "UniformLabels",
    "UnnormalisedModel",
    "as_proposal",
    "choose_component",
    "ends_of_cells",
    "gaussian_log_prob",
    "interpolate",
    "log_normal_mass",
    "mix_log_probs",
    "mix_samples",
    "mixture_log_prob",
    "pick_component",
    "proposal_for",
    "proposal_loss",
    "ridge_lines",
    "stratified_uniform",
]
