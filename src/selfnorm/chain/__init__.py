"""``AutoregressiveEBM``: a chain of one-dimensional EBMs, its factors, training and bounds."""

from selfnorm.chain.bounds import N_NODES, row_bounds
from selfnorm.chain.model import AutoregressiveEBM, Factors
from selfnorm.chain.task import default_options

__all__ = ["N_NODES", "AutoregressiveEBM", "Factors", "default_options", "row_bounds"]
