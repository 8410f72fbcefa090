"""``ConditionalEBM``: ``p(y|x)`` normalised for every ``x``, and the law of ``y`` on a grid."""

from selfnorm.conditional.members import MemberRows, build_ensemble, member_rows, train_ensemble
from selfnorm.conditional.model import ConditionalEBM, LabelEnergy, check_pairs
from selfnorm.conditional.predictive import PredictiveTable
from selfnorm.conditional.predictive_model import PredictiveModel
from selfnorm.conditional.task import ConditionalTask

__all__ = [
    "ConditionalEBM",
    "ConditionalTask",
    "LabelEnergy",
    "MemberRows",
    "PredictiveModel",
    "PredictiveTable",
    "build_ensemble",
    "check_pairs",
    "member_rows",
    "train_ensemble",
]
