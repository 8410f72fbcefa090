"""Figures of what they are given: arrays, records and public methods; needs matplotlib."""

from selfnorm.plotting.densities import (
    new_figure,
    plot_densities,
    plot_history,
    plot_reliability,
    plot_samples,
    plot_snl_surface,
    save,
)
from selfnorm.plotting.images import density_panels, plot_ablation, plot_panels

__all__ = [
    "density_panels",
    "new_figure",
    "plot_ablation",
    "plot_densities",
    "plot_history",
    "plot_panels",
    "plot_reliability",
    "plot_samples",
    "plot_snl_surface",
    "save",
]
