"""Where rows of a table are: coordinates in which they are near each other or far."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.special import ndtri
from torch import Tensor

from selfnorm.columns import GAP, Part


class Places:
    """Where rows are: numbers, and a number for each level, on scales of the training rows."""

    def __init__(self, parts: Sequence[Part], rows: Tensor) -> None:
        self.parts = parts
        numeric = [part.rest or bool(part.values) for part in parts]
        counts = [
            1 if is_one else part.n_codes for is_one, part in zip(numeric, parts, strict=True)
        ]
        self.of_part = np.repeat(np.arange(len(parts)), counts)
        self.of_level = np.where(np.array(numeric)[self.of_part], -1, self.of_part)
        places = self.numbers(rows)
        self.mean = np.nan_to_num(np.nanmean(places, 0))
        spread = np.nanstd(places, 0)
        for which in np.unique(self.of_level[self.of_level >= 0]):
            own = self.of_level == which  # the columns of one category share a unit
            spread[own] = np.sqrt(max(np.square(spread[own]).sum(), 1e-12))
        self.unit = np.where(spread > 0, spread, 1.0)
        self.sorted = [np.sort(place[~np.isnan(place)]) for place in places.T]

    def numbers(self, rows: Tensor) -> np.ndarray:
        """``(n, D)``: a column for each number and each level."""
        numbers = []
        for j, part in enumerate(self.parts):
            code, number = rows[:, j].numpy().T
            if part.rest or part.values:
                numbers.append(part.numbers(code, number))
            else:
                levels = range(part.n_codes)
                numbers += [np.where(code == GAP, np.nan, code == level) for level in levels]
        return np.stack(numbers, 1).astype(np.float64)

    def deviations(self, numbers: np.ndarray) -> np.ndarray:
        """In deviations from the mean.

        Two levels of a category are as far apart as two rows of a number are on average; what is
        missing is at the mean.
        """
        return np.nan_to_num((numbers - self.mean) / self.unit)

    def normal_scores(self, numbers: np.ndarray) -> np.ndarray:
        """The same, but for numbers: normal quantiles of the share of training rows below."""
        out = self.deviations(numbers)
        for j in np.flatnonzero(self.of_level < 0):
            seen, n = self.sorted[j], len(self.sorted[j])
            below = np.searchsorted(seen, numbers[:, j]) + np.searchsorted(
                seen, numbers[:, j], "right"
            )
            share = np.clip((below + 1) / (2 * n + 2), 0.5 / (n + 1), 1 - 0.5 / (n + 1))
            out[:, j] = np.where(np.isnan(numbers[:, j]), 0.0, ndtri(share))
        return out
