"""Networks: energies of rows, features of numbers, stacked and masked ones."""

from selfnorm.networks.perceptrons import (
    MLP,
    ExponentialFamily,
    FourierFeatures,
    StackedLinear,
    StackedMLP,
    activation_module,
    decay_groups,
    linear,
    perceptron,
)
from selfnorm.networks.resmade import ChainLinear, ResMADE, draw_orderings

__all__ = [
    "MLP",
    "ChainLinear",
    "ExponentialFamily",
    "FourierFeatures",
    "ResMADE",
    "StackedLinear",
    "StackedMLP",
    "activation_module",
    "decay_groups",
    "draw_orderings",
    "linear",
    "perceptron",
]
