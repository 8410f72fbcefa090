r"""The user's log-density, whichever way it is written, and the support that it has.

A density of ``x`` on its support is ``log p~(x(y)) + log |dx/dy|`` in unconstrained coordinates
``y``, with the same ``log Z``. Lebesgue measure throughout; on a simplex of ``d`` coordinates that
is Lebesgue measure of the first ``d - 1``, the convention of Stan, PyMC and SciPy's Dirichlet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from scipy.special import expit, log_expit, log_softmax

from selfnorm.errors import DataError
from selfnorm.evidence.draws import ParameterDraws, Rows

Interval = tuple[float | None, float | None]
LogDensity = Callable[..., object]  # of rows, or of parameters by name
CHUNK = 4096  # rows given to a batched density at once


# the types of rows that a density may take
CONVERT: tuple[Callable[[np.ndarray], Rows], ...] = (
    np.asarray,
    torch.from_numpy,
    lambda rows: torch.from_numpy(rows).float(),
)


class Target:
    """``log_density`` as a function of rows ``(n, d)`` in float64.

    A few draws show how to call it: with NumPy arrays or tensors (float64, then float32), with all
    rows at once or one after another. Draws of named parameters are given by name.

    Attributes:
        n_evaluations: rows evaluated so far.
    """

    def __init__(self, log_density: LogDensity, draws: ParameterDraws) -> None:
        self.log_density, self.draws = log_density, draws
        self.n_evaluations = 0
        self.first: np.ndarray  # values at the first draws
        self._convert, self._batched = self._find_out()

    def _find_out(self) -> tuple[Callable[[np.ndarray], Rows], bool]:
        d = self.draws.values.shape[2]
        # another number of rows than columns: a sum over the wrong axis has another length
        rows = np.ascontiguousarray(self.draws.values.reshape(-1, d)[: 2 if d != 2 else 3])
        errors: list[str] = []
        for batched in (True, False):
            for convert in CONVERT:
                try:
                    values = self._call(rows, convert, batched)
                except Exception as error:  # anything can come out of another's function
                    errors.append(f"{type(error).__name__}: {error}")
                    continue
                if values is None:
                    continue
                self.n_evaluations += len(rows)
                if batched and self._depends_on_others(rows, values, convert):
                    errors.append("the value of a row depends on the other rows")
                    continue
                self.first = values
                return convert, batched
        said = f" It said: {errors[0]}" if errors else ""
        raise DataError(
            "log_density must return one number for each row (or for one row) of draws, given as "
            f"a NumPy array or a tensor, by name where the draws have names.{said}"
        )

    def _depends_on_others(
        self, rows: np.ndarray, values: np.ndarray, convert: Callable[[np.ndarray], Rows]
    ) -> bool:
        """Whether the first row has another value among copies of itself: a density of one row.

        With named parameters a density of one row can return one number for each of several rows:
        it sums vectors over all of them, and adds the scalar of each row.
        """
        self.n_evaluations += len(rows)
        again = self._call(np.ascontiguousarray(rows[[0] * len(rows)]), convert, batched=True)
        return again is None or not np.allclose(again[0], values[0], 1e-3, 1e-3, equal_nan=True)

    def _call(
        self, rows: np.ndarray, convert: Callable[[np.ndarray], Rows], batched: bool
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
        values_by_chunk = []
        for start in range(0, len(rows), CHUNK):
            part = rows[start : start + CHUNK]
            try:
                values = self._call(part, self._convert, self._batched)
            except Exception as error:
                raise DataError(
                    f"log_density raised {type(error).__name__}: {error}. It is evaluated "
                    "around the draws too: let it return -inf where the density is zero"
                ) from error
            if values is None:
                raise DataError(f"log_density did not return {len(part)} numbers for as many rows")
            values_by_chunk.append(values)
        return np.concatenate(values_by_chunk) if values_by_chunk else np.zeros(0)


def _numbers(value: object) -> np.ndarray:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = (value if value.is_complex() else value.double()).numpy()
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":
        raise TypeError(f"it returned {type(value).__name__}, not real numbers")
    return array.astype(np.float64)


def stated_support(support: object, draws: ParameterDraws) -> list[tuple[slice, str | Interval]]:
    """One ``(columns, kind)`` per parameter or column, in order, from what the user stated."""
    d, shapes = draws.values.shape[2], draws.shapes
    if support is None:
        return [(slice(0, d), (None, None))]
    if shapes is not None:
        if not isinstance(support, Mapping) or not set(support) <= set(shapes):
            raise DataError(f"support must be a dict over the parameters {list(shapes)}")
        blocks, start = [], 0
        for name, shape in shapes.items():
            stop = start + int(np.prod(shape))
            blocks.append((slice(start, stop), _kind(support.get(name), name)))
            start = stop
        return blocks
    if isinstance(support, str) or not isinstance(support, Sequence) or len(support) != d:
        raise DataError(
            f"support must have an entry for each of the {d} columns: None, 'positive', 'simplex' "
            "(on consecutive columns) or (low, high)"
        )
    columns: list[tuple[slice, str | Interval]] = []
    for j, stated in enumerate(support):
        kind = _kind(stated, draws.names[j])
        if kind == "simplex" and columns and columns[-1][1] == "simplex":
            columns[-1] = (slice(columns[-1][0].start, j + 1), kind)
        else:
            columns.append((slice(j, j + 1), kind))
    return columns


def _kind(stated: object, name: str) -> str | Interval:
    if stated is None or stated == "real":
        return None, None
    if stated == "positive":
        return 0.0, None
    if stated == "simplex":
        return "simplex"
    if not isinstance(stated, str) and isinstance(stated, Sequence) and len(stated) == 2:
        low, high = (None if e is None or np.isinf(e) else float(e) for e in stated)
        if low is None or high is None or low < high:
            return low, high
    raise DataError(
        f"the support of {name!r} must be 'real', 'positive', 'simplex' or (low, high), "
        f"not {stated!r}"
    )


class Support:
    """The map between the user's coordinates ``x (n, d)`` and unconstrained ``y (n, k)``."""

    def __init__(self, support: object, draws: ParameterDraws) -> None:
        self.blocks = stated_support(support, draws)
        self.names = draws.names

    @property
    def free_names(self) -> list[str]:
        """Of the columns that the unconstrained coordinates stand for."""
        names: list[str] = []
        for columns, kind in self.blocks:
            names += self.names[columns][: -1 if kind == "simplex" else None]
        return names

    def unconstrained(self, x: np.ndarray) -> np.ndarray:
        """Coordinates ``y``, or an error where a draw is not inside the support."""
        parts = []
        for columns, kind in self.blocks:
            part = x[:, columns]
            if isinstance(kind, str):
                parts.append(self._log_ratios(part, columns))
                continue
            low, high = kind
            inside = np.ones(part.shape, bool)
            if low is not None:
                inside &= part > low
            if high is not None:
                inside &= part < high
            if not inside.all():
                j = columns.start + int(np.argwhere(~inside)[0][1])
                raise DataError(
                    f"{int((~inside).any(1).sum())} draws of {self.names[j]!r} are not inside its "
                    f"support {kind}: check the support, and drop draws on its boundary"
                )
            above = 0.0 * part if low is None else np.log(part - low)
            below = 0.0 * part if high is None else np.log(high - part)
            parts.append(part if low is None and high is None else above - below)
        return np.concatenate(parts, axis=1)

    def _log_ratios(self, part: np.ndarray, columns: slice) -> np.ndarray:
        named = self.names[columns.start]
        if part.shape[1] < 2:
            raise DataError(f"a simplex needs two columns at least; {named!r} has one")
        if not (part > 0).all() or np.abs(part.sum(1) - 1).max() > 1e-4:
            raise DataError(
                f"draws of the simplex that begins with {named!r} must be positive and add to 1: "
                "give all its coordinates, the last one too"
            )
        return np.log(part[:, :-1]) - np.log(part[:, -1:])

    def constrained(self, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The user's coordinates ``(n, d)`` of ``y``, and ``log |dx/dy|`` ``(n,)``."""
        parts, log_jacobian, start = [], np.zeros(len(y)), 0
        for columns, kind in self.blocks:
            width = columns.stop - columns.start - int(kind == "simplex")
            part, start = y[:, start : start + width], start + width
            if isinstance(kind, str):
                log_x = log_softmax(np.concatenate([part, np.zeros((len(y), 1))], 1), axis=1)
                parts.append(np.exp(log_x))
                log_jacobian = log_jacobian + log_x.sum(1)
                continue
            low, high = kind
            if low is not None and high is not None:
                parts.append(low + (high - low) * expit(part))
                log_jacobian = log_jacobian + (
                    np.log(high - low) + log_expit(part) + log_expit(-part)
                ).sum(1)
            elif low is not None or high is not None:
                parts.append(high - np.exp(-part) if low is None else low + np.exp(part))
                log_jacobian = log_jacobian + (-part if low is None else part).sum(1)
            else:
                parts.append(part)
        return np.concatenate(parts, axis=1), log_jacobian
