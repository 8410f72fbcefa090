"""How a fitted model of labels given images is judged: exact likelihood, bounds, calibration."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from selfnorm.datasets.images import Pair
from selfnorm.evaluation import calibration
from selfnorm.images import LAWS, GridLaw, ImageRegressor, dequantised
from selfnorm.paper.report import bounds_columns

__all__ = ["Paired", "judge", "paired", "standard_error"]

_ROWS = 512
_LEVEL = 0.9


def judge(
    model: ImageRegressor,
    pair: Pair,
    *,
    n_samples: int | None = 20_000,
    seed: int = 0,
    groups: np.ndarray | None = None,
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Figures of a model on held-out images, and each image's ``log_prob`` and ``pit``.

    Labels get the noise that the model was trained with (the same draw for every model); errors of
    the mean are taken against the labels as recorded. ``exact`` normalises by quadrature (one
    label); ``lower`` and ``upper`` are ``l_SNL`` and ``l_IS`` with ``n_samples`` of the proposal
    (``None``: left out). Images of one of the ``groups`` are not independent: ``exact_se`` is
    over the groups.
    """
    images, recorded = pair
    labels = dequantised(torch.as_tensor(recorded), model.space_.step)
    figures: dict[str, Any] = {"n_test": len(recorded)}
    arrays: dict[str, np.ndarray] = {}
    if model.objective not in LAWS and n_samples is not None:
        bounds = model.bounds(images, labels, n_samples=n_samples, seed=1000 + seed)
        figures |= bounds_columns(bounds)
    if model.space_.dim == 1 or model.objective in LAWS:
        arrays["log_prob"] = model.log_prob(images, labels)
        exact = arrays["log_prob"]
        figures["exact"] = float(exact.mean())
        if groups is not None:
            arrays["groups"] = np.asarray(groups)
        figures["exact_se"] = standard_error(exact, groups)
    error = np.abs(np.reshape(model.predict(images), recorded.shape) - recorded)
    figures["mae"] = float(error.mean())
    if model.space_.dim == 1:
        figures |= _calibration(model, images, labels[:, 0], arrays)
    return figures, arrays


def _calibration(
    model: ImageRegressor, images: Any, labels: torch.Tensor, arrays: dict[str, np.ndarray]
) -> dict[str, float]:
    pit, crps, width = [], [], []
    for start in range(0, len(labels), _ROWS):
        law: GridLaw = model.law(images[start : start + _ROWS])
        here = labels[start : start + _ROWS].to(law.grid)
        ends = law.central_interval(_LEVEL)
        pit.append(law.cdf_at(here))
        crps.append(law.crps(here))
        width.append(ends[:, 1] - ends[:, 0])
    arrays["pit"] = torch.cat(pit).cpu().numpy()
    return {
        "coverage": calibration.central_coverage(arrays["pit"], _LEVEL),
        "width": float(torch.cat(width).mean()),
        "pit_distance": calibration.pit_distance(arrays["pit"]),
        "crps": float(torch.cat(crps).mean()),
    }


def standard_error(values: np.ndarray, groups: np.ndarray | None = None) -> float:
    """Standard error of a mean over images, those of one group counting as one observation.

    For groups ``g`` with sums of deviations ``s_g``: ``sqrt(G / (G - 1) sum s_g^2) / n``.

    >>> round(standard_error(np.array([1.0, 1.0, 3.0, 3.0]), np.array([0, 0, 1, 1])), 4)
    1.0
    """
    deviations = values - values.mean()
    if groups is None:
        groups = np.arange(len(values))
    sums = np.bincount(np.unique(groups, return_inverse=True)[1], weights=deviations)
    n_groups = len(sums)
    if n_groups < 2:
        return float("nan")
    return float(np.sqrt(n_groups / (n_groups - 1) * np.sum(sums**2)) / len(values))


class Paired(NamedTuple):
    """Mean difference of two models' log-densities, and how sure it is.

    ``se`` is the larger of the standard errors over test images (``se_images``) and over seeds
    (``se_seeds``, ``None`` for a single one); ``by_seed`` holds each seed's mean difference.
    """

    difference: float
    se: float
    se_images: float
    se_seeds: float | None
    by_seed: tuple[float, ...]


def paired(
    first: list[np.ndarray],
    second: list[np.ndarray],
    groups: list[np.ndarray | None] | None = None,
) -> Paired:
    """Compare two models image by image.

    Each list holds one array of the test images' log-densities per seed; ``groups`` says which
    images belong together, and the error over images is over these groups within runs.

    >>> paired([np.array([1.0, 2.0])], [np.array([0.0, 1.0])])[:2]
    (1.0, 0.0)
    """
    differences = [a - b for a, b in zip(first, second, strict=True)]
    means = np.array([d.mean() for d in differences])
    together = groups or [None] * len(means)
    within = [standard_error(d, g) ** 2 for d, g in zip(differences, together, strict=True)]
    over_images = float(np.sqrt(np.sum(within)) / len(means))
    over_seeds = float(means.std(ddof=1) / np.sqrt(len(means))) if len(means) > 1 else None
    return Paired(
        float(means.mean()),
        max(over_images, over_seeds or 0.0),
        over_images,
        over_seeds,
        tuple(means.tolist()),
    )
