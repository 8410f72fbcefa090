"""Can a number be trusted: bounds, log-weights, the verdict, quadrature, calibration."""

from selfnorm.evaluation.bounds import B_LIMIT, NOT_FINITE, Bounds, about_b, evaluate
from selfnorm.evaluation.calibration import (
    assess,
    central_coverage,
    check_coverage,
    crps_from_cdf,
    pit_distance,
)
from selfnorm.evaluation.diagnostics import (
    PARETO_K_LIMIT,
    TOLERATED_SHARE,
    Finding,
    Judged,
    WeightStream,
    data_side_check,
    deviations,
    few_beyond,
    heavy_tail,
    stream_log_weights,
    tail_factor,
    tail_index,
    verdict,
)
from selfnorm.evaluation.memory import chunk_size_for, free_memory
from selfnorm.evaluation.quadrature import GridDensity, exact_log_norm

__all__ = [
    "B_LIMIT",
    "NOT_FINITE",
    "PARETO_K_LIMIT",
    "TOLERATED_SHARE",
    "Bounds",
    "Finding",
    "GridDensity",
    "Judged",
    "WeightStream",
    "about_b",
    "assess",
    "central_coverage",
    "check_coverage",
    "chunk_size_for",
    "crps_from_cdf",
    "data_side_check",
    "deviations",
    "evaluate",
    "exact_log_norm",
    "few_beyond",
    "free_memory",
    "heavy_tail",
    "pit_distance",
    "stream_log_weights",
    "tail_factor",
    "tail_index",
    "verdict",
]
