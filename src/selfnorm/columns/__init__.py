"""What a column of a table is: scale, grid, atoms, limits, and the map to units of models."""

from selfnorm.columns.columns import Columns, detect_step, label_step, log_cell_mass

__all__ = ["Columns", "detect_step", "label_step", "log_cell_mass"]
