"""``ConditionalEBM``: ``p(y|x)`` normalised for every ``x``."""

from selfnorm.conditional.bounds import InputFigures, weight_checks
from selfnorm.conditional.model import (
    ConditionalEBM,
    ConditionalTask,
    LabelEnergy,
    weighted_mean,
    with_proposal,
)

__all__ = [
    "ConditionalEBM",
    "ConditionalTask",
    "InputFigures",
    "LabelEnergy",
    "weight_checks",
    "weighted_mean",
    "with_proposal",
]
