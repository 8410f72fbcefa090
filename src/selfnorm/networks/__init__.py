"""Networks: energies of rows, masked residual networks, features of numbers, ResNet-18."""

from selfnorm.networks.perceptrons import (
    MLP,
    ExponentialFamily,
    FourierFeatures,
    StackedLinear,
    StackedMLP,
    activation_module,
    linear,
    perceptron,
)
from selfnorm.networks.resmade import ChainLinear, ResMADE, draw_orderings
from selfnorm.networks.resnet import ResNet18

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
    "perceptron",
]
