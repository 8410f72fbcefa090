"""Networks: energies of rows, features of numbers, masked residual networks, those of images."""

from selfnorm.networks.convolutional import (
    ConvDecoder,
    ConvEncoder,
    DenseDecoder,
    DenseEncoder,
    ResNet18,
)
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

__all__ = [
    "MLP",
    "ChainLinear",
    "ConvDecoder",
    "ConvEncoder",
    "DenseDecoder",
    "DenseEncoder",
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
