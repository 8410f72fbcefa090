"""Networks: energies of rows, masked residual networks, features of numbers, ResNet-18."""

from selfnorm.networks.energies import MLP, ExponentialFamily, FourierFeatures
from selfnorm.networks.mlp_gradient import WRITTEN_OUT
from selfnorm.networks.resmade import ChainLinear, ResMADE, draw_orderings, masked_weights
from selfnorm.networks.resnet import resnet18
from selfnorm.networks.stacked import StackedLinear, StackedMLP, activation_module, linear
from selfnorm.networks.stacked_gradient import stacked_energy

__all__ = [
    "MLP",
    "WRITTEN_OUT",
    "ChainLinear",
    "ExponentialFamily",
    "FourierFeatures",
    "ResMADE",
    "StackedLinear",
    "StackedMLP",
    "activation_module",
    "draw_orderings",
    "linear",
    "masked_weights",
    "resnet18",
    "stacked_energy",
]
