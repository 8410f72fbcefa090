"""What a column of a table is: scale, grid, atoms, limits, and the map to units of models."""

from selfnorm.columns.columns import Columns, detect_step, log_cell_mass
from selfnorm.columns.scaling import Scaling
from selfnorm.columns.target_steps import label_step

__all__ = ["Columns", "Scaling", "detect_step", "label_step", "log_cell_mass"]
