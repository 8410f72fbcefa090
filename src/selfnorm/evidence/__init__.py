"""The normalising constant of anybody's density, from draws: value, bounds, verdict."""

from selfnorm.evidence.estimate import evidence
from selfnorm.evidence.result import Comparison, Evidence

__all__ = ["Comparison", "Evidence", "evidence"]
