"""What a person sees of a fitted model of tables: figures, and a report in one HTML file."""

from selfnorm.report.density import DensityReport
from selfnorm.report.figures import plot_density_model, plot_regressor
from selfnorm.report.page import Facts, findings_of, in_python, write_report
from selfnorm.report.regressor import RegressorReport, input_names
from selfnorm.report.sections import About

__all__ = [
    "About",
    "DensityReport",
    "Facts",
    "RegressorReport",
    "findings_of",
    "in_python",
    "input_names",
    "plot_density_model",
    "plot_regressor",
    "write_report",
]
