"""``EnergyDensity`` and ``EnergyRegressor``: tables, behind the scikit-learn contract."""

from selfnorm.tables.density import EnergyDensity
from selfnorm.tables.plots import plot_density_model, plot_regressor
from selfnorm.tables.regressor import EnergyRegressor, RegressorNetwork

__all__ = [
    "EnergyDensity",
    "EnergyRegressor",
    "RegressorNetwork",
    "plot_density_model",
    "plot_regressor",
]
