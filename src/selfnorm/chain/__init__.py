"""Chains of one-dimensional EBMs: their factors, training and bounds; over numbers, over tables."""

from selfnorm.chain.bounds import N_NODES, row_bounds
from selfnorm.chain.defaults import FEWEST_IN_FOLDS, FOLDED_BELOW, default_options, table_options
from selfnorm.chain.drawing import Drawing
from selfnorm.chain.model import AutoregressiveEBM, Factors
from selfnorm.chain.table import ColumnDensity, TableChain

__all__ = [
    "FEWEST_IN_FOLDS",
    "FOLDED_BELOW",
    "N_NODES",
    "AutoregressiveEBM",
    "ColumnDensity",
    "Drawing",
    "Factors",
    "TableChain",
    "default_options",
    "row_bounds",
    "table_options",
]
