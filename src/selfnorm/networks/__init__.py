"""Networks: energies of rows, masked residual networks, features of numbers, ResNet-18."""

from selfnorm.networks.energies import MLP, ExponentialFamily, FourierFeatures, activation_module
from selfnorm.networks.resmade import ChainLinear, ResMADE, draw_orderings
from selfnorm.networks.resnet import resnet18
from selfnorm.networks.stacked import StackedLinear, StackedMLP, linear

__all__ = [
    "MLP",
    "ChainLinear",
    "ExponentialFamily",
    "FourierFeatures",
    "ResMADE",
    "StackedLinear",
    "StackedMLP",
    "activation_module",
    "draw_orderings",
    "linear",
    "resnet18",
]
