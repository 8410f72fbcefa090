"""POWER, GAS, HEPMASS, MINIBOONE and BSDS300 with the preprocessing of Papamakarios et al. (2017).

Each loader reads the official file (or the one the benchmark's authors made from it) and applies
their rules in their order, so that log-likelihoods compare with the published ones: which columns
are dropped, what noise is added, which rows are for testing, which rows' mean and deviation scale.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from selfnorm.datasets.directory import check_name, find_set, optional
from selfnorm.errors import DataError

TRUST = "SELFNORM_TRUST_PICKLE"  # set to 1, this variable allows pickles to be read


@dataclass(frozen=True)
class Splits:
    """Train, validation and test rows ``(n, d)``, float32."""

    train: Tensor
    val: Tensor
    test: Tensor

    @property
    def dim(self) -> int:
        """Number of columns."""
        return self.train.shape[1]


def load(name: str, data_dir: str | Path | None = None) -> Splits:
    """One of the five sets, from files below the data directory.

    Example:
        >>> from selfnorm.errors import MissingDataError
        >>> try:
        ...     load("power", "/nonexistent")
        ... except MissingDataError as error:
        ...     print("household_power_consumption.txt" in str(error))
        True
    """
    check_name(name, NAMES, "set of the benchmark")
    arrays = _LOADERS[name](*find_set(name, data_dir))
    parts = (np.ascontiguousarray(part, dtype=np.float32) for part in arrays)
    return Splits(*(torch.from_numpy(a) for a in parts))


Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]


def split_by_order(data: np.ndarray) -> Arrays:
    """Last 10 % for testing, last 10 % of the rest for validation."""
    n_test = int(0.1 * len(data))
    rest, test = data[:-n_test], data[-n_test:]
    n_val = int(0.1 * len(rest))
    return rest[:-n_val], rest[-n_val:], test


def scale_by_train_and_val(parts: Arrays) -> Arrays:
    """Zero mean and unit deviation over train and validation together."""
    rows = np.vstack(parts[:2])
    mean, sd = rows.mean(0), rows.std(0)
    return tuple((a - mean) / sd for a in parts)  # type: ignore[return-value]


def read_power(path: Path) -> np.ndarray:
    """``(n, 8)``: active and reactive power, voltage, intensity, three sub-meters, minute of day.

    Rows with a missing value (``?``) are left out.
    """
    if path.suffix == ".npy":
        return np.load(path)
    rows = []
    with path.open() as lines:
        header = next(lines, "").strip().split(";")
        if len(header) != 9:
            raise DataError(f"{path} is not the official ';'-separated table of 9 columns")
        for line in lines:
            cells = line.strip().split(";")
            if len(cells) != 9 or "?" in cells or "" in cells:
                continue
            hours, minutes, _ = cells[1].split(":")
            rows.append([*map(float, cells[2:]), 60 * int(hours) + int(minutes)])
    return np.asarray(rows, dtype=np.float64)


def _power(path: Path) -> Arrays:
    data = read_power(path)
    rng = np.random.RandomState(42)
    rng.shuffle(data)
    n = len(data)
    data = np.delete(data, [1, 3], axis=1)  # reactive power and intensity
    voltage = 0.01 * rng.rand(n, 1)
    active = 0.001 * rng.rand(n, 1)
    meters = rng.rand(n, 3)
    time = np.zeros((n, 1))
    return scale_by_train_and_val(split_by_order(data + np.hstack([active, voltage, meters, time])))


def _gas(path: Path) -> Arrays:
    """From the official text, or the benchmark's pandas pickle if the user trusts it."""
    if path.suffix == ".pickle" and os.environ.get(TRUST) != "1":
        if not path.with_suffix(".txt").exists():
            raise DataError(
                f"{path} is a pickle, which can run any code when it is read: use ethylene_CO.txt, "
                f"or set {TRUST}=1 if you trust the file"
            )
        path = path.with_suffix(".txt")
    if path.suffix == ".pickle":
        pandas = optional("pandas", "pandas (or use ethylene_CO.txt)", "frames")
        data = pandas.read_pickle(path).drop(columns=["Time", "Meth", "Eth"]).to_numpy(np.float64)
    else:
        data = np.loadtxt(path, skiprows=1)[:, 3:]  # without the time and two concentrations
    while True:  # drop the first column that correlates above 0.98 with another, then look again
        close = (np.corrcoef(data, rowvar=False) > 0.98).sum(1) > 1
        if not close.any():
            break
        data = np.delete(data, int(np.flatnonzero(close)[0]), axis=1)
    data = (data - data.mean(0)) / data.std(0, ddof=1)
    return split_by_order(data)


def lowest_value_recurs(data: np.ndarray) -> np.ndarray:
    """For every column, whether its smallest value is there more than five times."""
    return (data == data.min(0)).sum(0) > 5


def _hepmass(*paths: Path) -> Arrays:
    train, test = (np.loadtxt(path, delimiter=",", skiprows=1, ndmin=2) for path in paths)
    train, test = (a[a[:, 0] == 1][:, 1:] for a in (train, test))
    test = test[:, : train.shape[1]]  # the official test file has one column too many
    mean, sd = train.mean(0), train.std(0, ddof=1)
    train, test = (train - mean) / sd, (test - mean) / sd
    keep = ~lowest_value_recurs(train)
    train, test = train[:, keep], test[:, keep]
    n_val = int(0.1 * len(train))
    return train[:-n_val], train[-n_val:], test


def _miniboone(path: Path) -> Arrays:
    """From the benchmark's array, or the same made from the official text.

    From the text: the signal rows (the first number of the first line says how many), without the
    outliers whose first feature is below -100, without features whose lowest value recurs.
    """
    if path.suffix == ".npy":
        data = np.load(path)
    else:
        with path.open() as lines:
            n_signal = int(next(lines).split()[0])
            data = np.loadtxt(lines, max_rows=n_signal, ndmin=2)
        data = data[data[:, 0] >= -100]
        data = data[:, ~lowest_value_recurs(data)]
    return scale_by_train_and_val(split_by_order(data))


def _bsds300(path: Path) -> Arrays:
    with optional("h5py", "h5py").File(path, "r") as file:
        missing = [key for key in ("train", "validation", "test") if key not in file]
        if missing:
            raise DataError(f"{path} lacks {missing}: it is not the benchmark's file")
        return file["train"][:], file["validation"][:], file["test"][:]


_LOADERS: dict[str, Callable[..., Arrays]] = {
    "power": _power,
    "gas": _gas,
    "hepmass": _hepmass,
    "miniboone": _miniboone,
    "bsds300": _bsds300,
}
NAMES = tuple(_LOADERS)
