"""Draws in any of their formats (arrays, parameters by name, ArviZ) as ``(chains, n, d)``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy import stats

from selfnorm._inputs import as_rows, refuse_constant, refuse_huge
from selfnorm.errors import DataError
from selfnorm.sampling import correlation_time, r_hat

Rows = np.ndarray | torch.Tensor

MINIMUM_DRAWS = 20
MANY_CHAINS = 10  # so many are judged together: walkers of an ensemble may be short
WINDOW = 5  # autocorrelation times over which an autocorrelation is summed


@dataclass(frozen=True)
class ParameterDraws:
    """Draws of all parameters side by side.

    Attributes:
        values: ``(chains, n, d)`` in float64.
        shapes: parameter -> shape of one draw, in the order of the columns; ``None`` where the
            draws came as an array, and a density takes rows.
        names: of the columns.
    """

    values: np.ndarray
    shapes: dict[str, tuple[int, ...]] | None
    names: tuple[str, ...]

    def unpacked(self, rows: Rows) -> Rows | dict[str, Rows]:
        """Rows ``(n, d)`` (or one row ``(d,)``) as the caller's density takes them."""
        if self.shapes is None:
            return rows
        parameters, start = {}, 0
        for name, shape in self.shapes.items():
            width = math.prod(shape)
            part = rows[..., start : start + width]
            parameters[name] = part.reshape(tuple(rows.shape[:-1]) + shape)
            start += width
        return parameters


def read_draws(draws: object, chains: bool | None = None) -> ParameterDraws:
    """A table of draws, or an error that says what is wrong with them.

    Args:
        draws: an array ``(n,)``, ``(n, d)`` or ``(chains, n, d)``; a mapping of parameter to array
            ``(n, *shape)``; ArviZ's InferenceData or DataTree (their group ``posterior``), or an
            xarray Dataset, with dimensions ``(chain, draw, *shape)``.
        chains: whether the first dimension counts chains; by default it does in arrays of three
            dimensions and in ArviZ's objects.
    """
    named = _parameters(draws)
    if isinstance(draws, list | tuple) and len({np.shape(chain) for chain in draws}) > 1:
        raise DataError("the chains (or rows) must be of one length; cut the longer ones")
    if named is None:
        values = as_rows(draws, "draws", torch.float64).detach().cpu().numpy()
        by_chain = values.ndim == 3 if chains is None else chains
        if by_chain:
            values = values[..., None] if values.ndim == 2 else values
        else:
            values = values[:, None] if values.ndim == 1 else values
            values = values[None]
        if values.ndim != 3:
            raise DataError(
                "draws must have shape (n, d) or (chains, n, d), not "
                f"{np.asarray(draws).shape}: flatten the parameters, or name them in a dict"
            )
        names = tuple(getattr(draws, "columns", range(values.shape[2])))
        table = ParameterDraws(values, None, tuple(str(name) for name in names))
    else:
        mapping, has_chains = named
        table = _side_by_side(mapping, has_chains if chains is None else chains)
    _check(table)
    return table


def _parameters(draws: object) -> tuple[Mapping[str, ArrayLike], bool] | None:
    """Arrays by parameter, and whether their first dimension is the chain; ``None``: no names."""
    group = getattr(draws, "posterior", draws)
    arrays = getattr(group, "data_vars", None)
    if arrays is not None:
        ordered = {}
        for name, array in ((str(name), array) for name, array in arrays.items()):
            if not {"chain", "draw"} <= set(array.dims):
                raise DataError(f"parameter {name!r} has no dimensions 'chain' and 'draw'")
            ordered[name] = array.transpose("chain", "draw", ...).values
        return ordered, True
    if isinstance(draws, Mapping):
        return draws, False
    return None


def _side_by_side(parameters: Mapping[str, ArrayLike], has_chains: bool) -> ParameterDraws:
    lead, columns, names = 2 if has_chains else 1, [], []
    shapes: dict[str, tuple[int, ...]] = {}
    for name, values in parameters.items():
        array = np.asarray(values.detach().cpu() if isinstance(values, torch.Tensor) else values)
        if array.dtype.kind not in "biuf" or array.ndim < lead:
            raise DataError(
                f"parameter {name!r} must hold real numbers of shape "
                f"({'chains, ' if has_chains else ''}n, ...), not {array.dtype} {array.shape}"
            )
        array = array.astype(np.float64)
        array = array if has_chains else array[None]
        shapes[str(name)] = array.shape[2:]
        columns.append(array.reshape(*array.shape[:2], -1))
        places = np.ndindex(*array.shape[2:])
        names += [name + (f"[{','.join(map(str, p))}]" if p else "") for p in places]
    if not columns or len({column.shape[:2] for column in columns}) > 1:
        sizes = {name: np.shape(value) for name, value in parameters.items()}
        raise DataError(f"the parameters must have one number of draws; their shapes are {sizes}")
    return ParameterDraws(np.concatenate(columns, axis=2), shapes, tuple(names))


def _check(draws: ParameterDraws) -> None:
    chains, n, d = draws.values.shape
    if chains * n < MINIMUM_DRAWS or n < 4:
        raise DataError(
            f"{chains} chain(s) of {n} draws are too few: at least {MINIMUM_DRAWS} draws, and 4 "
            "in each chain, are needed (some thousands are better)"
        )
    if d == 0:
        raise DataError("the draws have no columns")
    bad = ~np.isfinite(draws.values)
    if bad.any():
        chain, row, column = (int(i) for i in np.argwhere(bad)[0])
        raise DataError(
            f"the draws hold {int(bad.sum())} NaN or infinite value(s), the first in chain {chain},"
            f" draw {row}, column {draws.names[column]!r}; drop those draws"
        )
    flat = draws.values.reshape(-1, d)
    refuse_huge(flat, "draws")
    refuse_constant(flat, draws.names, "draws")
    for name, values in zip(draws.names, flat.T, strict=True):
        _refuse_counts(name, values)
    distinct = len(np.unique(flat, axis=0))
    if distinct < MINIMUM_DRAWS:
        raise DataError(
            f"only {distinct} of {len(flat)} draws differ: the sampler hardly moved; at least "
            f"{MINIMUM_DRAWS} different draws are needed"
        )


def _refuse_counts(name: str, column: np.ndarray) -> None:
    """Numbers of chains or iterations, and discrete parameters: q is a continuous density."""
    if (column != np.round(column)).any():
        return
    n, values, steps = len(column), np.unique(column), np.diff(column)
    on = column[1:] != column[0]  # where the count does not begin again
    what = "" if len(values) > n // 4 else f"holds {len(values)} whole numbers only"
    if on.any() and steps[0] > 0 and (steps[on] == steps[0]).all():
        what = "counts the draws"
    if what:
        raise DataError(
            f"column {name!r} {what}: the number of a chain or of an iteration is no parameter "
            "(leave it out; tell chains apart by their own dimension, or by --chain), and over a "
            "discrete parameter the density must be summed"
        )


def walkers_in_turn(values: np.ndarray) -> int:
    """Number of walkers if draws ``(chains, n, d)`` hold all walkers of each step in turn, else 0.

    Ensemble samplers keep ``(steps, walkers, d)``, flattened or not. Rows of one walker are then
    more alike than rows that are closer to each other.
    """
    chains, n, d = values.shape
    total = chains * n
    rho = np.zeros(total)
    for column in values.reshape(total, d).T:
        covariances = _autocovariances(column[None])
        rho += covariances / covariances[0] / d
    lags = np.arange(4, total // 4 + 1) if chains == 1 else np.array([n])
    lags = lags[(total % lags == 0) & (lags >= 4) & (total // lags >= 4)]
    if not len(lags):
        return 0
    walkers = int(lags[rho[lags].argmax()])
    return walkers if rho[walkers] > rho[1:walkers].max() + 0.2 + 5 / math.sqrt(total) else 0


def by_walker(values: np.ndarray, walkers: int) -> np.ndarray:
    """``(walkers, steps, ...)`` of draws ``(chains, n, ...)`` in which the walkers take turns."""
    return values.reshape(-1, walkers, *values.shape[2:]).swapaxes(0, 1)


def effective_draws(values: np.ndarray) -> float:
    r"""Number of independent draws that the mean of ``values (chains, n)`` is worth.

    ``n chains / (1 + 2 sum_t rho_t)``: autocorrelations by Geyer's initial monotone sequence over
    split chains, so that chains which disagree count for little (Vehtari et al. 2021). At most the
    number of draws. Of many chains, :func:`_ensemble_time` is the autocorrelation time.
    """
    half, total = values.shape[1] // 2, values.size
    if len(values) >= MANY_CHAINS:
        time = _ensemble_time(values)
    else:
        split = np.concatenate([values[:, :half], values[:, -half:]])
        time = correlation_time(torch.from_numpy(split.T))
    if math.isinf(time):  # what never changes has no error
        return float(total)
    return float(min(total, total / max(time, 1e-12)))


def _autocovariances(values: np.ndarray) -> np.ndarray:
    """At lags ``0 .. n - 1``, of ``values (chains, n)`` less their mean, averaged over chains."""
    n = values.shape[1]
    spectrum = np.abs(np.fft.rfft(values - values.mean(), 2 * n, axis=1)) ** 2
    return np.fft.irfft(spectrum.mean(0))[:n] / np.arange(n, 0, -1)


def _ensemble_time(values: np.ndarray) -> float:
    r"""Autocorrelation time ``tau(m) = 1 + 2 sum_{t <= m} rho_t`` of walkers ``(walkers, n)``.

    ``rho`` belongs to the average of the walkers' autocovariances, and ``m`` is the least one with
    ``m >= 5 tau(m)`` (Sokal). Walkers that stay apart are correlated for as long as they run.
    """
    covariances = _autocovariances(values)
    if covariances[0] <= 0:
        return math.inf
    times = 2 * np.cumsum(covariances / covariances[0]) - 1
    enough = np.arange(len(times)) >= WINDOW * times
    return float(times[enough.argmax() if enough.any() else -1])


def disagreement(values: np.ndarray) -> float:
    """R-hat of the normal scores of ``values (chains, n, d)``, the worst column's.

    Few chains are split in halves. Many may be short, and their means differ by chance. What counts
    then is the covariance over the chains of the means of their first and their last quarters, less
    two standard errors: the variance between chains that stay where they are. The distance between
    both quarters of all chains together is added.
    """
    chains, n, d = values.shape
    ranks = stats.rankdata(values.reshape(-1, d), axis=0).reshape(values.shape)
    scores = stats.norm.ppf((ranks - 0.375) / (chains * n + 0.25))
    if chains < MANY_CHAINS:
        return r_hat(torch.from_numpy(scores).transpose(0, 1))
    quarter = -(-n // 4)
    first, last = scores[:, :quarter].mean(1), scores[:, -quarter:].mean(1)
    spread = first.std(0) * last.std(0)
    covariance = ((first - first.mean(0)) * (last - last.mean(0))).mean(0)
    correlation = covariance / spread.clip(1e-300)
    chance = 2 * (1 - correlation**2) / math.sqrt(chains) * spread
    between = (covariance - chance).clip(0) + (first.mean(0) - last.mean(0)) ** 2 / 2
    return float(np.sqrt(1 + between / scores.var((0, 1))).max())


def two_parts(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which draws belong to the first and to the second part: masks ``(chains, n)``.

    Every other chain where there are several, else contiguous halves with a gap of some
    autocorrelation times (a tenth of the chain at most) between them.
    """
    chains, n, d = values.shape
    first = np.zeros((chains, n), bool)
    second = first.copy()
    if chains > 1:
        first[::2], second[1::2] = True, True
        return first, second
    slowest = min(effective_draws(values[..., j]) for j in range(d))
    time = n / slowest
    gap = 0 if time < 1.5 else min(int(5 * time), n // 10)
    first[:, : (n - gap) // 2], second[:, (n + gap) // 2 :] = True, True
    return first, second


class Reach:
    """How far draws ``(chains, n, d)`` reach: along columns, along principal axes, from the middle.

    Attributes:
        expected: the mass beyond, times the number of independent draws.

    Example:
        >>> reach = Reach(np.random.default_rng(0).normal(size=(1, 500, 2)))
        >>> reach.beyond(np.array([[0.0, 0.0], [0.0, 9.0]]))
        array([False,  True])
    """

    def __init__(self, values: np.ndarray) -> None:
        rows = values.reshape(-1, values.shape[2])
        self.center, self.scale = np.median(rows, 0), rows.std(0)
        _, spread, axes = np.linalg.svd((rows - self.center) / self.scale, full_matrices=False)
        self.axes = axes.T / (spread + 1e-12 * spread[0])
        coordinates = self._coordinates(rows)
        self.low, self.high = coordinates.min(0), coordinates.max(0)
        self.low[-1] = -math.inf  # the distance from the middle has one end
        self.expected = 2 * coordinates.shape[1] - 1

    def _coordinates(self, rows: np.ndarray) -> np.ndarray:
        z = (rows - self.center) / self.scale
        along = z @ self.axes
        return np.column_stack([z, along, np.linalg.norm(along, axis=1)])

    def beyond(self, rows: np.ndarray) -> np.ndarray:
        """Which of the rows ``(n, d)`` lie beyond all draws in some direction."""
        coordinates = self._coordinates(rows)
        return ((coordinates < self.low) | (coordinates > self.high)).any(1)
