"""What a column of a table is: kind, scale, grid, atoms, limits; the maps to codes and to units."""

from selfnorm.columns.coded import GAP, UNSEEN, CodedColumns, knots_for
from selfnorm.columns.coding import Column, Part
from selfnorm.columns.columns import Columns, label_step, log_cell_mass
from selfnorm.columns.detection import detect_step
from selfnorm.columns.schema import Schema
from selfnorm.columns.text import MISSING

__all__ = [
    "GAP",
    "MISSING",
    "UNSEEN",
    "CodedColumns",
    "Column",
    "Columns",
    "Part",
    "Schema",
    "detect_step",
    "knots_for",
    "label_step",
    "log_cell_mass",
]
