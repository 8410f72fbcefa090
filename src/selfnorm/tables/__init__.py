"""``EnergyDensity`` and ``EnergyRegressor``: tables, behind the scikit-learn contract."""

from selfnorm.report import plot_density_model, plot_regressor
from selfnorm.tables.answers import Estimate
from selfnorm.tables.density import EnergyDensity
from selfnorm.tables.detector import OutlierDetector
from selfnorm.tables.drift import Drift
from selfnorm.tables.questions import Expectation
from selfnorm.tables.regressor import EnergyRegressor, RegressorNetwork

__all__ = [
    "Drift",
    "EnergyDensity",
    "EnergyRegressor",
    "Estimate",
    "Expectation",
    "OutlierDetector",
    "RegressorNetwork",
    "plot_density_model",
    "plot_regressor",
]
