"""The normalising constant of any density, from draws of it: value, bounds, verdict."""

from selfnorm.evidence.estimate import evidence
from selfnorm.evidence.result import Comparison, Evidence

__all__ = ["Comparison", "Evidence", "evidence"]
