"""What a person sees of a fitted model of tables: figures, and a report in one HTML file."""

from selfnorm.report.density import About, density_report
from selfnorm.report.facts import Facts, input_names, shortened
from selfnorm.report.figures import plot_density_model, plot_regressor
from selfnorm.report.page import check_page, findings_of, in_python, in_shell, write_page
from selfnorm.report.regressor import regressor_report

__all__ = [
    "About",
    "Facts",
    "check_page",
    "density_report",
    "findings_of",
    "in_python",
    "in_shell",
    "input_names",
    "plot_density_model",
    "plot_regressor",
    "regressor_report",
    "shortened",
    "write_page",
]
