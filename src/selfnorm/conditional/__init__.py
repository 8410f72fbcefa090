"""``ConditionalEBM``: ``p(y|x)`` normalised for every ``x``, and the density of ``y`` on a grid."""

from selfnorm.conditional.members import (
    MemberRows,
    build_ensemble,
    likelier_unmarked,
    quantile_edges,
    train_ensemble,
    unseen_scores,
)
from selfnorm.conditional.model import ConditionalEBM, ConditionalTask, LabelEnergy
from selfnorm.conditional.predictive import LabelGrid, PredictiveLaw, PredictiveModel

__all__ = [
    "ConditionalEBM",
    "ConditionalTask",
    "LabelEnergy",
    "LabelGrid",
    "MemberRows",
    "PredictiveLaw",
    "PredictiveModel",
    "build_ensemble",
    "likelier_unmarked",
    "quantile_edges",
    "train_ensemble",
    "unseen_scores",
]
