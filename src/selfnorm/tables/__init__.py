"""``EnergyDensity`` and ``EnergyRegressor``: tables, behind the scikit-learn contract."""

from selfnorm.report import plot_density_model, plot_regressor
from selfnorm.tables.density import EnergyDensity
from selfnorm.tables.files import Table, check_output, numeric, read_table, table_of, write_table
from selfnorm.tables.regressor import EnergyRegressor, RegressorNetwork

__all__ = [
    "EnergyDensity",
    "EnergyRegressor",
    "RegressorNetwork",
    "Table",
    "check_output",
    "numeric",
    "plot_density_model",
    "plot_regressor",
    "read_table",
    "table_of",
    "write_table",
]
