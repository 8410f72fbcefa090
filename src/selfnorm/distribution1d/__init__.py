"""``Distribution1d``: a normalised density of one variable, and what a regressor answers by it."""

from selfnorm.distribution1d.distribution import Distribution1d, legendre
from selfnorm.distribution1d.regression import PredictsDistributions

__all__ = ["Distribution1d", "PredictsDistributions", "legendre"]
