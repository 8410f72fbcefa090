"""The user's log-density, whichever way it is written, counted and checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from selfnorm.errors import DataError
from selfnorm.evidence.draws import Draws

CHUNK = 4096  # rows given to a batched density at once


def _as_array(rows: np.ndarray) -> Any:
    return rows


def _as_double(rows: np.ndarray) -> Any:
    return torch.from_numpy(rows)


def _as_float(rows: np.ndarray) -> Any:
    return torch.from_numpy(rows).float()


class Target:
    """``log_density`` as a function of rows ``(n, d)`` in float64.

    How it wants to be called is found out on a few draws: NumPy arrays or tensors (float64, then
    float32), all rows at once or one after another. Draws of named parameters are given by name.

    Attributes:
        n_evaluations: rows evaluated so far.
    """

    def __init__(self, log_density: Callable[[Any], Any], draws: Draws) -> None:
        self.log_density, self.draws = log_density, draws
        self.n_evaluations = 0
        self._convert, self._batched = self._find_out()

    def _find_out(self) -> tuple[Callable[[np.ndarray], Any], bool]:
        d = self.draws.values.shape[2]
        # another number of rows than columns: a sum over the wrong axis has another length
        rows = np.ascontiguousarray(self.draws.values.reshape(-1, d)[: 2 if d != 2 else 3])
        errors: list[str] = []
        for batched in (True, False):
            for convert in (_as_array, _as_double, _as_float):
                try:
                    values = self._call(rows, convert, batched)
                except Exception as error:  # anything can come out of another's function
                    errors.append(f"{type(error).__name__}: {error}")
                    continue
                if values is not None:
                    self.n_evaluations += len(rows)
                    return convert, batched
        said = f" It said: {errors[0]}" if errors else ""
        raise DataError(
            "log_density must return one number for each row (or for one row) of draws, given as "
            f"a NumPy array or a tensor, by name where the draws have names.{said}"
        )

    def _call(
        self, rows: np.ndarray, convert: Callable[[np.ndarray], Any], batched: bool
    ) -> np.ndarray | None:
        """Values ``(n,)``; ``None`` if what came back has another shape."""
        with torch.no_grad(), np.errstate(all="ignore"):
            if batched:
                parts = [self.log_density(self.draws.unpacked(convert(rows)))]
            else:
                parts = [self.log_density(self.draws.unpacked(convert(row))) for row in rows]
        arrays = [_numbers(part) for part in parts]
        wanted = len(rows) if batched else 1
        if any(a.size != wanted or (batched and a.ndim == 0) for a in arrays):
            return None
        return np.concatenate([a.reshape(-1) for a in arrays])

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        """``log p~`` ``(n,)`` in float64; NaN and infinities as they come."""
        rows = np.ascontiguousarray(rows)
        self.n_evaluations += len(rows)
        found = []
        for start in range(0, len(rows), CHUNK):
            part = rows[start : start + CHUNK]
            values = self._call(part, self._convert, self._batched)
            if values is None:
                raise DataError(f"log_density did not return {len(part)} numbers for as many rows")
            found.append(values)
        return np.concatenate(found) if found else np.zeros(0)


def _numbers(value: Any) -> np.ndarray:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().double().numpy()
    return np.asarray(value, dtype=np.float64)
