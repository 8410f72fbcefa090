"""What a column of a table is: scale, grid, atoms, limits, and the map to units of models."""

from selfnorm.columns.coded import GAP, UNSEEN, CodedColumns, Part, knots_for
from selfnorm.columns.columns import Columns, detect_step, label_step, log_cell_mass

__all__ = [
    "GAP",
    "UNSEEN",
    "CodedColumns",
    "Columns",
    "Part",
    "detect_step",
    "knots_for",
    "label_step",
    "log_cell_mass",
]
