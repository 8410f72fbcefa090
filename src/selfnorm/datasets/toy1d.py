"""The two one-dimensional regression sets of the paper, with their exact conditional densities.

``dataset1`` (Gustafsson et al.): ``x ~ U[-3, 3]``; for ``x < 0`` the label is
``0.8 N(sin x, 0.075^2) + 0.2 N(-sin x, 0.075^2)``, for ``x >= 0`` it is ``LogNormal(0, 0.25) - 1``.

``dataset2`` (Brando et al.): 3,800 points on a regular grid of ``[0, 1]`` in four zones: a scaled
``Beta(1/2, 1)``, a normal around a cosine, a widening uniform and a mixture of three uniforms.

Every density is with respect to Lebesgue measure on ``y``. ``LIMITS`` are the means of
``log p(y|x)`` under the truth: no model does better on average.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from selfnorm.datasets.directory import check_name, find_file
from selfnorm.errors import DataError

DATASETS = ("dataset1", "dataset2")

# ``E log p(y|x)`` under the truth, in nats: dataset1 over x ~ U[-3, 3]; dataset2 over its grid.
LIMITS = {"dataset1": 0.3266, "dataset2": -1.2534}

_LAST = 3799  # dataset2 puts its points at x = i / 3799
_ZONE_STARTS = (0, 800, 1800, 2300, 3800)  # first index of each zone of dataset2, and the end
_BARS = ((8.0, 8.5), (1.0, 4.0), (-4.5, -3.0))  # the three uniforms of its last zone
_FILES = {"dataset1": ("train",), "dataset2": ("train", "val", "test")}


@dataclass(frozen=True)
class Split:
    """Inputs ``x`` of shape ``(n, 1)`` and labels ``y`` of shape ``(n, 1)``, float64."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return self.x.shape[0]


@dataclass(frozen=True)
class Toy1d:
    """Train, validation and test parts of one set, and the truth's score on the test part."""

    name: str
    train: Split
    val: Split
    test: Split

    @property
    def limit(self) -> float:
        """Mean of the true ``log p(y|x)`` on this very test part."""
        return float(conditional_log_prob(self.name, self.test.x, self.test.y).mean())


def sample(name: str, n: int, *, generator: torch.Generator | None = None) -> Split:
    """Draw ``n`` labelled points. ``dataset2`` draws ``x`` uniformly from its grid of 3,800.

    >>> split = sample("dataset1", 5, generator=torch.Generator().manual_seed(0))
    >>> split.x.shape, split.y.shape
    (torch.Size([5, 1]), torch.Size([5, 1]))
    """
    check_name(name, DATASETS, "1-D regression set")
    seed = int(torch.randint(2**31 - 1, (1,), generator=generator))
    rng = np.random.default_rng(seed)
    if name == "dataset1":
        x = rng.uniform(-3.0, 3.0, n)
        y = _labels1(x, rng)
    else:
        index = rng.integers(0, _LAST + 1, n)
        x = index / _LAST
        y = _labels2(index, rng)
    return Split(torch.from_numpy(x)[:, None], torch.from_numpy(y)[:, None])


def _labels1(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    side = np.where(rng.uniform(size=x.shape) < 0.8, 1.0, -1.0)
    waves = side * np.sin(x) + 0.075 * rng.standard_normal(x.shape)
    skewed = rng.lognormal(0.0, 0.25, x.shape) - 1.0
    return np.where(x < 0, waves, skewed)


def _labels2(index: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    beta = 0.5 + 5.0 * rng.beta(0.5, 1.0, index.shape)
    mean, sd, low, high = (v.numpy() for v in _zone_parameters(torch.from_numpy(index).double()))
    normal = mean + sd * rng.standard_normal(index.shape)
    widening = low + (high - low) * rng.uniform(size=index.shape)
    bars = np.asarray(_BARS)[rng.integers(0, 3, index.shape)]
    mixture = bars[..., 0] + (bars[..., 1] - bars[..., 0]) * rng.uniform(size=index.shape)
    zone = np.searchsorted(_ZONE_STARTS[1:-1], index, side="right")
    return np.choose(zone, [beta, normal, widening, mixture])


def _zone_parameters(index: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean and sd of zone 2, ends of the uniform of zone 3, at (fractional) grid indices."""
    mean = 3.0 * torch.cos(5.0 * (index - 800.0) / 999.0) - 2.0
    step = ((index - 1800.0) / 499.0).clamp(0.0, 1.0)
    return mean, mean.abs() / 4.0, -2.0 - 2.5 * step, -0.5 + 9.5 * step


def conditional_log_prob(name: str, x: Tensor, y: Tensor) -> Tensor:
    """Exact ``log p(y|x)`` of the truth; ``-inf`` outside its support.

    ``x`` and ``y`` broadcast against each other; a last dimension of size one in both is dropped.

    >>> x, y = torch.tensor([1.0, 1.0]), torch.tensor([0.0, -2.0])
    >>> conditional_log_prob("dataset1", x, y).round(decimals=3)
    tensor([0.4670,   -inf])
    """
    check_name(name, DATASETS, "1-D regression set")
    if x.ndim > 1 and x.shape[-1] == 1 and y.shape[-1] == 1:
        x, y = x[..., 0], y[..., 0]
    x, y = torch.broadcast_tensors(x, y)
    return _log_prob1(x, y) if name == "dataset1" else _log_prob2(x, y)


def _normal(y: Tensor, mean: Tensor, sd: Tensor | float) -> Tensor:
    sd = torch.as_tensor(sd, dtype=y.dtype)
    return -0.5 * ((y - mean) / sd) ** 2 - sd.log() - 0.5 * math.log(2 * math.pi)


def _uniform(y: Tensor, low: Tensor | float, high: Tensor | float) -> Tensor:
    width = torch.as_tensor(high, dtype=y.dtype) - low
    inside = (y >= low) & (y <= high)
    return torch.where(inside, -width.log(), -math.inf)


def _log_prob1(x: Tensor, y: Tensor) -> Tensor:
    waves = torch.logaddexp(
        math.log(0.8) + _normal(y, torch.sin(x), 0.075),
        math.log(0.2) + _normal(y, -torch.sin(x), 0.075),
    )
    shifted = torch.where(y > -1, y + 1, 1.0)
    skewed = _normal(shifted.log(), torch.zeros_like(y), 0.25) - shifted.log()
    skewed = torch.where(y > -1, skewed, -math.inf)
    return torch.where(x < 0, waves, skewed)


def _log_prob2(x: Tensor, y: Tensor) -> Tensor:
    index = x * _LAST
    mean, sd, low, high = _zone_parameters(index)
    # Beta(1/2, 1) has density 1 / (2 sqrt(u)) on (0, 1); u = (y - 0.5) / 5.
    u = (y - 0.5) / 5.0
    inside = (u >= 0) & (u <= 1)
    # The density is infinite at u = 0, where nine printed digits put one of the authors' labels.
    beta = torch.where(inside, -0.5 * u.clamp(1e-10, 1.0).log() - math.log(10.0), -math.inf)
    bars = torch.stack([_uniform(y, a, b) for a, b in _BARS]).logsumexp(0) - math.log(3.0)
    # The authors' csv files keep nine digits of x: half an index decides the zone.
    zone = torch.bucketize(index, torch.tensor(_ZONE_STARTS[1:-1], dtype=index.dtype) - 0.5)
    choices = torch.stack(
        [beta, _normal(y, mean, sd.clamp_min(1e-12)), _uniform(y, low, high), bars]
    )
    return choices.gather(0, zone[None]).squeeze(0)


def load(
    name: str, *, seed: int = 0, data_dir: str | Path | None = None, n_test: int = 1000
) -> Toy1d:
    """One set, split: the authors' own draw from csv files in ``data_dir``, or a fresh one.

    The files are ``NAME_train.csv`` (for ``dataset2`` also ``_val`` and ``_test``) with columns
    ``x,y``. Parts that have no file are drawn from the generator with ``seed``: for ``dataset1``
    1,000 validation and ``n_test`` test points, as in the paper.

    >>> toy = load("dataset2", seed=1)
    >>> len(toy.train), len(toy.val), len(toy.test)
    (1710, 190, 1900)
    """
    check_name(name, DATASETS, "1-D regression set")
    sizes = {"train": 2000, "val": 1000, "test": n_test}
    if name == "dataset2":
        sizes = {"train": 1710, "val": 190, "test": 1900}
    parts: dict[str, Split] = {}
    if data_dir is not None:
        parts = {part: _read(data_dir, name, part) for part in _FILES[name]}
    for offset, (part, size) in enumerate(sizes.items()):
        if part not in parts:
            generator = torch.Generator().manual_seed(3 * seed + offset)
            parts[part] = sample(name, size, generator=generator)
    return Toy1d(name, **parts)


def _read(folder: str | Path, name: str, part: str) -> Split:
    file = f"{name}_{part}.csv"
    path = find_file((file, f"toy1d/{file}"), folder, "the authors of the sets; columns x,y")
    table = np.loadtxt(path, delimiter=",", skiprows=1, ndmin=2)
    if table.shape[1] != 2 or not np.isfinite(table).all():
        raise DataError(f"{path} must hold two finite numbers, x and y, on each line")
    return Split(torch.from_numpy(table[:, :1].copy()), torch.from_numpy(table[:, 1:].copy()))
