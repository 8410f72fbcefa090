"""``ConditionalEBM``: ``p(y|x)`` normalised for every ``x``, and the law of ``y`` on a grid."""

from selfnorm.conditional.members import (
    MemberRows,
    build_ensemble,
    quantile_edges,
    train_ensemble,
    unseen_scores,
)
from selfnorm.conditional.model import ConditionalEBM, LabelEnergy, check_pairs
from selfnorm.conditional.predictive import LabelGrid, PredictiveLaw, PredictiveModel
from selfnorm.conditional.task import ConditionalTask

__all__ = [
    "ConditionalEBM",
    "ConditionalTask",
    "LabelEnergy",
    "LabelGrid",
    "MemberRows",
    "PredictiveLaw",
    "PredictiveModel",
    "build_ensemble",
    "check_pairs",
    "quantile_edges",
    "train_ensemble",
    "unseen_scores",
]
