"""Figures of what they are given: arrays, records and public methods; needs matplotlib.

Functions with ``axes`` draw on your own; ``STYLE`` is the style file of them all.
"""

from selfnorm.plotting.densities import (
    STYLE,
    literal,
    need_matplotlib,
    new_figure,
    plot_densities,
    plot_history,
    plot_reliability,
    plot_samples,
    plot_snl_surface,
    save,
    styled,
)
from selfnorm.plotting.images import density_panels, plot_ablation, plot_panels
from selfnorm.plotting.tables import (
    Scale,
    plot_dependence,
    plot_log_densities,
    plot_marginal,
    plot_pair,
    plot_predictive,
    plot_shares,
)

__all__ = [
    "STYLE",
    "Scale",
    "density_panels",
    "literal",
    "need_matplotlib",
    "new_figure",
    "plot_ablation",
    "plot_densities",
    "plot_dependence",
    "plot_history",
    "plot_log_densities",
    "plot_marginal",
    "plot_pair",
    "plot_panels",
    "plot_predictive",
    "plot_reliability",
    "plot_samples",
    "plot_shares",
    "plot_snl_surface",
    "save",
    "styled",
]
