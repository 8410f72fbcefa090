"""The paper's two-dimensional sets: drawn, split, standardised, with the truth in their units."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from selfnorm.datasets.planes import (
    DENSITIES,
    NAMES,
    Checkerboard,
    FourCircles,
    Funnel,
    Pinwheel,
    PlaneDensity,
)
from selfnorm.errors import DataError

__all__ = [
    "DENSITIES",
    "NAMES",
    "SCALINGS",
    "Affine",
    "Checkerboard",
    "FourCircles",
    "Funnel",
    "Pinwheel",
    "PlaneDensity",
    "Scaling",
    "Split2D",
    "load",
]

Scaling = Literal["train", "population", "per_split"]
SCALINGS: tuple[str, ...] = ("train", "population", "per_split")


@dataclass(frozen=True)
class Affine:
    """Standardisation of a split: ``x_scaled = (x - shift) / scale``, per coordinate."""

    shift: tuple[float, float]
    scale: tuple[float, float]

    @classmethod
    def of(cls, x: Tensor) -> Affine:
        """Mean and (population-style) standard deviation of the rows of ``x``."""
        mean, sd = x.mean(dim=0).tolist(), x.std(dim=0, correction=0).tolist()
        return cls((mean[0], mean[1]), (sd[0], sd[1]))

    @property
    def log_scale(self) -> float:
        """Log-determinant of the inverse map: what the log-density gains by scaling."""
        return math.log(self.scale[0]) + math.log(self.scale[1])

    def scaled(self, x: Tensor) -> Tensor:
        """Raw points to scaled ones."""
        return (x - x.new_tensor(self.shift)) / x.new_tensor(self.scale)

    def raw(self, x: Tensor) -> Tensor:
        """Scaled points back to raw ones."""
        return x * x.new_tensor(self.scale) + x.new_tensor(self.shift)


@dataclass(frozen=True, eq=False)
class Split2D:
    """One draw of a two-dimensional set: three splits and the truth in their units.

    Attributes:
        name: name of the set.
        train, val, test: scaled points, float32 tensors of shape ``(n, 2)``.
        scaling: how they were scaled (see :func:`load`).
        transforms: the map applied to each split, by split name.
        density: the law of the raw points.
        seed: the seed of the draw.
    """

    name: str
    train: Tensor
    val: Tensor
    test: Tensor
    scaling: str
    transforms: Mapping[str, Affine]
    density: PlaneDensity = field(repr=False)
    seed: int | None = None

    @property
    def shift(self) -> tuple[float, float]:
        """Shift of the test split (that of all splits unless scaled one by one)."""
        return self.transforms["test"].shift

    @property
    def scale(self) -> tuple[float, float]:
        """Scale of the test split (that of all splits unless scaled one by one)."""
        return self.transforms["test"].scale

    @property
    def limit(self) -> float:
        """Largest expected log-likelihood in test-split units: ``-H + sum(log scale)``."""
        return -self.density.entropy + self.transforms["test"].log_scale

    @property
    def population_limit(self) -> float:
        """The same with the population standard deviations: one number per set."""
        return self.density.limit

    def log_density(self, x_scaled: Tensor) -> Tensor:
        """Exact log-density of *scaled* points, Jacobian included: ``(..., 2) -> (...)``, float64.

        ``log p_scaled(z) = log p(shift + scale z) + sum(log scale)``, in the units of the test
        split.
        """
        transform = self.transforms["test"]
        raw = transform.raw(torch.as_tensor(x_scaled).to(torch.float64))
        return self.density.log_density(raw) + transform.log_scale

    def draw(self, n: int, seed: int | np.random.Generator | None = None) -> Tensor:
        """Fresh points from the same law in the units of the test split, float32 ``(n, 2)``.

        A large draw removes the sampling noise of a 2,000-point test split from a comparison.
        """
        return self.transforms["test"].scaled(self.density.sample(n, seed)).to(torch.float32)


def load(
    name: str,
    seed: int | None = 0,
    n_train: int = 7000,
    n_val: int = 1000,
    n_test: int = 2000,
    scaling: Scaling = "train",
) -> Split2D:
    """Draw and standardise one of the four sets.

    Args:
        name: ``"funnel"``, ``"pinwheel"``, ``"checkerboard"`` or ``"four_circles"``.
        seed: seed of the draw. The splits use independent streams, so the training points do
            not depend on the sizes of the other splits.
        n_train, n_val, n_test: sizes of the splits, at least two points each.
        scaling: ``"train"`` standardises all splits by the training statistics;
            ``"population"`` by the exact mean and standard deviation of the law, so that the limit
            is the same number in every run; ``"per_split"`` each split by its own statistics
            (the literal set-up of the published table, which adds noise to every number).

    >>> split = load("four_circles", seed=0, scaling="population")
    >>> split.train.shape, round(split.limit, 3)
    (torch.Size([7000, 2]), -1.769)
    """
    if name not in DENSITIES:
        raise DataError(f"unknown two-dimensional set {name!r}: choose one of {', '.join(NAMES)}")
    if scaling not in SCALINGS:
        raise DataError(f"unknown scaling {scaling!r}: choose one of {', '.join(SCALINGS)}")
    sizes = {"train": n_train, "val": n_val, "test": n_test}
    for split_name, size in sizes.items():
        if size < 2:
            raise DataError(f"n_{split_name}={size}: a split needs at least 2 points to be scaled")
    density = DENSITIES[name]
    streams = np.random.SeedSequence(seed).spawn(len(sizes))
    raw = {
        split_name: density.sample(size, np.random.default_rng(stream))
        for (split_name, size), stream in zip(sizes.items(), streams, strict=True)
    }
    if scaling == "train":
        transforms = dict.fromkeys(sizes, Affine.of(raw["train"]))
    elif scaling == "population":
        transforms = dict.fromkeys(sizes, Affine(density.mean, density.sd))
    else:
        transforms = {split_name: Affine.of(points) for split_name, points in raw.items()}
    scaled = {key: transforms[key].scaled(points).to(torch.float32) for key, points in raw.items()}
    return Split2D(
        name=name,
        train=scaled["train"],
        val=scaled["val"],
        test=scaled["test"],
        scaling=scaling,
        transforms=transforms,
        density=density,
        seed=seed,
    )
