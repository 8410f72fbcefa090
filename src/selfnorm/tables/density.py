"""``EnergyDensity``: the density of a table behind the scikit-learn contract."""

from __future__ import annotations

import dataclasses
import math
import os
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, DensityMixin, OutlierMixin, _fit_context
from sklearn.utils import check_random_state
from sklearn.utils._param_validation import Interval, StrOptions
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from selfnorm import saving
from selfnorm._context import float32_on_cpu
from selfnorm._inputs import refuse_huge, refuse_text
from selfnorm.columns import Scaling, detect_step, log_cell_mass
from selfnorm.errors import DataError
from selfnorm.evaluation import Bounds
from selfnorm.tables.density_methods import METHODS, FitRequest, FittedDensity
from selfnorm.tables.table import refuse_constant
from selfnorm.training import History

__all__ = ["EnergyDensity"]

MINIMUM_ROWS = 5


class EnergyDensity(OutlierMixin, DensityMixin, BaseEstimator):
    r"""Normalised log-density of the rows of a table, with bounds on every log-likelihood.

    ``score_samples`` is ``log p(x)`` with respect to Lebesgue measure in the units of ``X``:
    multiplying a column by ``c`` lowers it by ``log c``. Columns that repeat values (integers,
    caps) are spread over the width of their step, so that the density around a value is its mass
    divided by the step (see :mod:`selfnorm.columns.columns`); the mass itself is ``log_mass``.

    Parameters
    ----------
    method : {"auto", "joint", "autoregressive"}
        ``"joint"``: one energy over all columns with a defensive proposal; ``"autoregressive"``: a
        chain of one-dimensional EBMs. ``"auto"`` takes the first up to two columns.
    max_steps, batch_size, learning_rate, weight_decay, hidden : int or float, default None
        Size of the training run and of the network; ``None`` chooses by the size of the table.
    n_init : int, default 1
        Number of restarts; the one with the best held-out lower bound is kept. The joint method
        trains them as one batched model, chains one after another.
    validation_fraction : float, default 0.1
        Share of the rows held out to choose the best state (none in tables of fewer than 200 rows).
    contamination : float, default 0.1
        Share of the training rows that ``predict`` calls outliers.
    discrete : {"auto", None}
        Whether repeated values are found and spread.
    device : str, default None
        Where to train, ``"cpu"`` if ``None``. The fitted model always scores on the CPU in float64.
    random_state : int, RandomState instance or None
        Same value, same bits on the CPU.
    verbose : bool, default False
        Show a progress bar with both bounds.

    Attributes
    ----------
    n_features_in_, feature_names_in_ : as in scikit-learn.
    history_ : History
        Record of the training run.
    lower_bound_ : float
        Lower bound ``l_SNL`` of the log-likelihood (nats per row, held-out rows where there are
        any), in the units of ``X``.
    n_iter_ : int
        Number of optimiser steps.
    offset_ : float
        Score below which a row is called an outlier.
    method_ : str
        The method that was used.

    Examples
    --------
    >>> import numpy as np
    >>> from selfnorm import EnergyDensity
    >>> X = np.random.default_rng(0).normal(size=(300, 2))
    >>> density = EnergyDensity(random_state=0, max_steps=50).fit(X)
    >>> density.score_samples(X[:3]).shape
    (3,)
    """

    _parameter_constraints: dict[str, list[Any]] = {  # noqa: RUF012 sklearn's own name and form
        "method": [StrOptions({"auto", *METHODS})],
        "max_steps": [Interval(Integral, 1, None, closed="left"), None],
        "batch_size": [Interval(Integral, 1, None, closed="left"), None],
        "learning_rate": [Interval(Real, 0, None, closed="neither"), None],
        "weight_decay": [Interval(Real, 0, None, closed="left"), None],
        "hidden": [Interval(Integral, 1, None, closed="left"), None],
        "n_init": [Interval(Integral, 1, None, closed="left")],
        "validation_fraction": [Interval(Real, 0, 1, closed="left")],
        "contamination": [Interval(Real, 0, 0.5, closed="right")],
        "discrete": [StrOptions({"auto"}), None],
        "device": [str, None],
        "random_state": ["random_state"],
        "verbose": ["boolean"],
    }

    def __init__(
        self,
        *,
        method: str = "auto",
        max_steps: int | None = None,
        batch_size: int | None = None,
        learning_rate: float | None = None,
        weight_decay: float | None = None,
        hidden: int | None = None,
        n_init: int = 1,
        validation_fraction: float = 0.1,
        contamination: float = 0.1,
        discrete: str | None = "auto",
        device: str | None = None,
        random_state: Any = None,
        verbose: bool = False,
    ) -> None:
        self.method = method
        self.max_steps = max_steps
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.hidden = hidden
        self.n_init = n_init
        self.validation_fraction = validation_fraction
        self.contamination = contamination
        self.discrete = discrete
        self.device = device
        self.random_state = random_state
        self.verbose = verbose

    @_fit_context(prefer_skip_nested_validation=True)
    def fit(self, X: ArrayLike, y: Any = None) -> EnergyDensity:  # noqa: ARG002 sklearn's signature
        """Fit the density to the rows of ``X (n, d)``; ``y`` is ignored."""
        X = self._rows(X, reset=True)
        if len(X) < MINIMUM_ROWS:
            raise DataError(
                f"X has {len(X)} sample(s); a density needs at least {MINIMUM_ROWS} rows "
                "(and some hundreds to be of use)"
            )
        refuse_huge(X, "X")
        refuse_constant(X, [self._name_of(j) for j in range(X.shape[1])])
        self._scaling = Scaling.fit_to(X)
        steps = [detect_step(column) if self.discrete else 0.0 for column in X.T]
        self._grid = np.array(steps), X.min(axis=0), X.max(axis=0)
        rows = self._scaling.forward(X)
        self.method_ = self.method
        if self.method == "auto":
            self.method_ = "joint" if X.shape[1] <= 2 else "autoregressive"
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        request = FitRequest(
            max_steps=self.max_steps,
            batch_size=self.batch_size,
            lr=self.learning_rate,
            weight_decay=self.weight_decay,
            hidden=self.hidden,
            validation_fraction=self.validation_fraction,
            discrete=self.discrete,
            device=self.device,
            seed=seed,
            progress=self.verbose,
            n_init=int(self.n_init),
        )
        with float32_on_cpu():
            fitted = METHODS[self.method_](torch.from_numpy(rows).float(), request)
        self._set_fitted(fitted)
        self.history_: History = fitted.history
        self.n_iter_: int = fitted.history.n_steps
        self.lower_bound_: float = self._lower_bound(fitted.history, rows)
        self.offset_: float = float(np.percentile(self._log_density(X), 100.0 * self.contamination))
        return self

    def score_samples(self, X: ArrayLike) -> np.ndarray:
        """Normalised log-density ``(n,)`` of the rows of ``X``, in the units of ``X``."""
        check_is_fitted(self)
        return self._log_density(self._rows(X, reset=False))

    def log_mass(self, X: ArrayLike, n_points: int = 64) -> np.ndarray:
        """Log-probability ``(n,)`` of rows whose columns on a grid (integers) take those values.

        The density integrated over one step around each such value, by ``n_points`` points; it
        stays a density in the other columns. ``score_samples`` plus ``log(step)`` is the one-point
        rule for it, right within a few per cent.
        """
        check_is_fitted(self)
        rows = torch.from_numpy(self._rows(X, reset=False))

        def density(x: Tensor) -> Tensor:
            return torch.from_numpy(self._log_density(x.numpy()))

        steps = torch.from_numpy(self._grid[0])
        return log_cell_mass(density, rows, steps, n_points=n_points).numpy()

    def score(self, X: ArrayLike, y: Any = None) -> float:  # noqa: ARG002 sklearn's signature
        """Mean log-density of the rows of ``X`` (nats per row)."""
        return float(np.mean(self.score_samples(X)))

    def decision_function(self, X: ArrayLike) -> np.ndarray:
        """``score_samples(X) - offset_``: negative for outliers."""
        return self.score_samples(X) - self.offset_

    def predict(self, X: ArrayLike) -> np.ndarray:
        """``1`` for inliers, ``-1`` for rows less likely than ``offset_``."""
        return np.where(self.decision_function(X) >= 0, 1, -1)

    def sample(self, n_samples: int = 1, random_state: Any = None) -> np.ndarray:
        """Draw ``(n_samples, d)`` rows in the units of the training table.

        Columns that lay on a grid (integers) come on that grid, within the range that was seen.
        """
        check_is_fitted(self)
        if n_samples < 1:
            raise DataError(f"n_samples must be at least 1, got {n_samples}")
        seed = int(check_random_state(random_state).randint(2**31 - 1))
        with float32_on_cpu():
            z = self._fitted.sample(int(n_samples), seed=seed)
        rows = self._scaling.inverse(z.double().numpy())
        # columns on a grid were spread over its steps to be fitted: back to the grid
        step, first, last = self._grid
        on_grid = first + np.round((rows - first) / np.where(step > 0, step, 1.0)) * step
        return np.where(step > 0, np.clip(on_grid, first, last), rows)

    def bounds(self, X: ArrayLike, n_samples: int = 20_000, random_state: Any = None) -> Bounds:
        """Lower and upper bound of the mean log-likelihood of ``X``, and whether to trust them.

        For a chain they enclose its exactly normalised density; ``score_samples`` takes the learned
        normalisers and is off by the ``learned_error`` (on average) that comes with the bounds.
        """
        check_is_fitted(self)
        X = self._rows(X, reset=False)
        z = torch.from_numpy(self._scaling.forward(X))
        seed = int(check_random_state(random_state).randint(2**31 - 1))
        with float32_on_cpu():
            bounds = self._fitted.bounds(z, n_samples, seed=seed)
        shift = self._scaling.log_jacobian
        return dataclasses.replace(bounds, lower=bounds.lower + shift, upper=bounds.upper + shift)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the fitted estimator to a folder (``model.safetensors``, ``config.json``)."""
        saving.save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> EnergyDensity:
        """Read back what :meth:`save` wrote; a damaged folder is a ``ModelFileError``."""
        loaded: EnergyDensity = saving.load(path, kind="EnergyDensity")
        return loaded

    def to_folder(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Config and weights of a model folder."""
        check_is_fitted(self)
        parameters = self.get_params()
        if not isinstance(self.random_state, int | None):
            parameters["random_state"] = None
        names = getattr(self, "feature_names_in_", None)
        config = {
            "parameters": {k: saving.plain_number(v) for k, v in parameters.items()},
            "columns": None if names is None else [str(name) for name in names],
            "n_features": int(self.n_features_in_),
            "method": self.method_,
            "offset": self.offset_,
            "lower_bound": self.lower_bound_ if math.isfinite(self.lower_bound_) else None,
            "model": saving.describe(self._fitted.model),
            "proposal": saving.describe(self._fitted.proposal),
            "training": self.history_.to_dict(),
        }
        return config, self._tensors()

    @classmethod
    def from_folder(cls, config: dict[str, Any], tensors: dict[str, Tensor]) -> EnergyDensity:
        """The fitted estimator of a folder's config and weights."""
        estimator = cls(**config["parameters"])
        estimator._validate_params()
        state: dict[str, dict[str, Tensor]] = {"model": {}, "proposal": {}}
        for name, tensor in tensors.items():
            part, _, rest = name.partition(".")
            if part in state:
                state[part][rest] = tensor
        model, proposal = (saving.build(config[part], state[part]) for part in state)
        history = History.from_dict(config["training"])
        estimator._scaling = Scaling(
            tensors["scaling.center"].numpy(), tensors["scaling.scale"].numpy()
        )
        step, first, last = (tensors[f"grid.{name}"].numpy() for name in ("step", "first", "last"))
        estimator._grid = step, first, last
        estimator._set_fitted(FittedDensity(model, proposal, history))
        estimator.n_features_in_ = int(config["n_features"])
        if config["columns"] is not None:
            estimator.feature_names_in_ = np.array(config["columns"], dtype=object)
        estimator.method_ = str(config["method"])
        estimator.offset_ = float(config["offset"])
        lower = config["lower_bound"]
        estimator.lower_bound_ = math.nan if lower is None else float(lower)
        estimator.history_, estimator.n_iter_ = history, history.n_steps
        return estimator

    def _log_density(self, X: np.ndarray) -> np.ndarray:
        z = torch.from_numpy(self._scaling.forward(X))
        with float32_on_cpu():
            return self._fitted.log_prob(z).numpy() + self._scaling.log_jacobian

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {
            "scaling.center": torch.from_numpy(self._scaling.center),
            "scaling.scale": torch.from_numpy(self._scaling.scale),
            "grid.step": torch.from_numpy(self._grid[0]),
            "grid.first": torch.from_numpy(self._grid[1]),
            "grid.last": torch.from_numpy(self._grid[2]),
        }
        parts = {"model": self._fitted.model, "proposal": self._fitted.proposal}
        for part, module in parts.items():
            state = {} if module is None else module.state_dict()
            tensors.update({f"{part}.{name}": tensor for name, tensor in state.items()})
        return tensors

    def _set_fitted(self, fitted: FittedDensity) -> None:
        # float64 from here on: a row's score must not depend on the rows it is scored with
        fitted.model = fitted.model.cpu().double().eval()
        if fitted.proposal is not None:
            fitted.proposal = fitted.proposal.cpu().double().eval()
        self._fitted = fitted

    def _lower_bound(self, history: History, rows: np.ndarray) -> float:
        kept = [r["lower"] for r in history.records if r["step"] == history.best_step]
        if kept and math.isfinite(kept[-1]):
            return kept[-1] + self._scaling.log_jacobian
        log_density = self._fitted.log_prob(torch.from_numpy(rows))
        return float(log_density.mean()) + self._scaling.log_jacobian

    def _rows(self, X: ArrayLike, *, reset: bool) -> np.ndarray:
        refuse_text(X)
        X = validate_data(
            self, X, reset=reset, dtype=np.float64, ensure_all_finite=False, ensure_min_samples=1
        )
        bad = ~np.isfinite(X)
        if bad.any():
            row, column = (int(i) for i in np.argwhere(bad)[0])
            raise DataError(
                f"X contains {int(bad.sum())} NaN or inf value(s), the first in row {row}, column "
                f"{self._name_of(column)!r}; remove those rows or fill the cells in"
            )
        return np.ascontiguousarray(X)

    def _name_of(self, column: int) -> str | int:
        names = getattr(self, "feature_names_in_", None)
        return column if names is None else str(names[column])
