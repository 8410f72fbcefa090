"""Can a number be trusted: bounds, log-weights, the verdict, quadrature, calibration."""

from selfnorm.evaluation.bounds import Bounds, draw_log_weights, estimate_log_norm, evaluate
from selfnorm.evaluation.calibration import crps_from_cdf, plot_reliability
from selfnorm.evaluation.diagnostics import PARETO_K_LIMIT, data_side_check, tail_index, verdict
from selfnorm.evaluation.memory import chunk_size_for
from selfnorm.evaluation.quadrature import exact_log_norm
from selfnorm.evaluation.weight_stream import WeightStream

__all__ = [
    "PARETO_K_LIMIT",
    "Bounds",
    "WeightStream",
    "chunk_size_for",
    "crps_from_cdf",
    "data_side_check",
    "draw_log_weights",
    "estimate_log_norm",
    "evaluate",
    "exact_log_norm",
    "plot_reliability",
    "tail_index",
    "verdict",
]
