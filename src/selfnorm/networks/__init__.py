"""Networks: energies of rows, masked residual networks, features of numbers, ResNet-18."""

from selfnorm.networks.energies import MLP, ExponentialFamily, FourierFeatures
from selfnorm.networks.resmade import ChainLinear, ResMADE, draw_orderings, masked_weights
from selfnorm.networks.resnet import ResNet18
from selfnorm.networks.stacked import StackedLinear, StackedMLP, activation_module, linear

__all__ = [
    "MLP",
    "ChainLinear",
    "ExponentialFamily",
    "FourierFeatures",
    "ResMADE",
    "ResNet18",
    "StackedLinear",
    "StackedMLP",
    "activation_module",
    "draw_orderings",
    "linear",
    "masked_weights",
]
