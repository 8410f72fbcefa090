"""``EnergyRegressor``: a full predictive density behind the scikit-learn contract."""

from __future__ import annotations

import math
import os
import warnings
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, RegressorMixin, _fit_context
from sklearn.utils import check_random_state
from sklearn.utils._param_validation import Interval, StrOptions
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor

from selfnorm import saving
from selfnorm._context import one_thread, seeded
from selfnorm._inputs import refuse_huge, refuse_repeated_names, refuse_text, refuse_text_target
from selfnorm.columns import label_step
from selfnorm.conditional import (
    MemberRows,
    PredictiveModel,
    build_ensemble,
    member_rows,
    train_ensemble,
)
from selfnorm.errors import DataError, SelfnormWarning
from selfnorm.networks import quantile_edges
from selfnorm.tables import regressor_files
from selfnorm.tables.predictive_methods import PredictiveMixin
from selfnorm.training import History, TrainingOptions

__all__ = ["EnergyRegressor"]

MINIMUM_ROWS = 5
_CHECKED_ROWS = (256, 128)  # inputs behind log_norm_error_: with one target, with several


class EnergyRegressor(PredictiveMixin, RegressorMixin, BaseEstimator):
    r"""The whole law of ``y`` given ``x``: multimodal, skewed, bounded, normalised for every ``x``.

    ``p(y|x) = mean_k q_k(y|x) exp(-E_k(x, y)) / Z_k(x)`` over ``n_members`` members: ``q_k`` a
    mixture density network, ``E_k`` an energy trained by SNL. For one target ``Z_k(x)`` comes from
    quadrature; ``log_prob(..., method="learned")`` uses the learned ``b_k(x)`` instead. Densities
    are with respect to Lebesgue measure in the units of ``y``.

    Parameters
    ----------
    n_members : int, default 5
        Networks in the ensemble; they train together, so five cost little more than two.
    n_components : int, default 5
        Gaussians in each mixture proposal.
    hidden, energy_hidden : int
        Width of the two-layer trunks, and of the energies.
    n_frequencies : int, default 3
        Waves ``sin, cos(2^j z)`` of the standardised label that the energy sees: more of them for
        laws with hard edges.
    input_bins, label_bins : int, default 16 and 0
        Piecewise linear features: how far each input, and the label, reaches into bins that hold
        equally many training rows. They let the law jump along ``x``, or have edges at labels that
        stay in place as ``x`` moves; some hundreds of rows per jump are needed to gain by it.
    bin_jitter : float, default 0
        Between 0 and 1: every member gets bins of its own, each inner edge moved at random by up to
        half this share of a bin, so that the mixture of members shows less of the bins.
    max_epochs, energy_epochs : int, default None
        Passes over the data for proposals and energies; ``None`` chooses by the number of rows.
        ``energy_epochs=0`` leaves the ensemble of mixture density networks.
    batch_size, n_samples : int, default None
        Rows per step, and labels drawn per row in the second stage; ``None`` chooses.
    learning_rate, energy_learning_rate, weight_decay : float
        Of AdamW, for the proposals, for the energies, and for both.
    dropout, energy_dropout : float
        In the trunk of the proposals and in that of the energies.
    input_noise : float, default 0
        Normal noise added to the standardised inputs at every step, in their deviations: smooths
        the law along ``x`` as a kernel of that width does.
    validation_fraction : float, default 0.1
        Share of the rows each member holds out to stop early; every member holds out other rows.
    patience : int, default 15
        Validations without improvement of any member before a stage ends.
    discrete : {"auto", None}
        Whether targets of few distinct (or heavily repeated) values are found and spread over the
        width of their step, with a warning: a density on integers can grow spikes without limit.
    device : str, default None
        Where to train, ``"cpu"`` if ``None``. The fitted model predicts on the CPU in float64.
    random_state : int, RandomState instance or None
        Same value, same bits on the CPU.
    verbose : bool, default False
        Show progress bars.

    Attributes
    ----------
    n_features_in_, feature_names_in_ : as in scikit-learn.
    n_outputs_ : int
        Number of targets.
    history_ : list of History
        Records of both stages.
    n_iter_ : int
        Optimiser steps taken.
    label_step_ : float
        Width over which discrete targets were spread; 0 for continuous ones.
    log_norm_error_ : float
        Mean distance of ``log`` mass under the learned ``b(x)`` from 0, over at most 256 training
        inputs evenly spaced in the table (128 with several targets).

    Examples
    --------
    >>> import numpy as np
    >>> from selfnorm import EnergyRegressor
    >>> rng = np.random.default_rng(0)
    >>> X = rng.uniform(-1, 1, (200, 1))
    >>> y = X[:, 0] + 0.1 * rng.standard_normal(200)
    >>> model = EnergyRegressor(n_members=2, max_epochs=5, energy_epochs=2, random_state=0)
    >>> model.fit(X, y).predict_quantiles(X[:3], [0.05, 0.5, 0.95]).shape
    (3, 3)
    """

    _parameter_constraints: dict[str, list[Any]] = {  # noqa: RUF012 sklearn's own name and form
        "n_members": [Interval(Integral, 1, None, closed="left")],
        "n_components": [Interval(Integral, 1, None, closed="left")],
        "hidden": [Interval(Integral, 1, None, closed="left")],
        "energy_hidden": [Interval(Integral, 1, None, closed="left")],
        "n_frequencies": [Interval(Integral, 0, 12, closed="both")],
        "input_bins": [Interval(Integral, 0, None, closed="left")],
        "label_bins": [Interval(Integral, 0, None, closed="left")],
        "bin_jitter": [Interval(Real, 0, 1, closed="both")],
        "max_epochs": [Interval(Integral, 1, None, closed="left"), None],
        "energy_epochs": [Interval(Integral, 0, None, closed="left"), None],
        "batch_size": [Interval(Integral, 1, None, closed="left"), None],
        "n_samples": [Interval(Integral, 1, None, closed="left"), None],
        "learning_rate": [Interval(Real, 0, None, closed="neither")],
        "energy_learning_rate": [Interval(Real, 0, None, closed="neither")],
        "weight_decay": [Interval(Real, 0, None, closed="left")],
        "dropout": [Interval(Real, 0, 1, closed="left")],
        "energy_dropout": [Interval(Real, 0, 1, closed="left")],
        "input_noise": [Interval(Real, 0, None, closed="left")],
        "validation_fraction": [Interval(Real, 0, 1, closed="neither")],
        "patience": [Interval(Integral, 1, None, closed="left"), None],
        "discrete": [StrOptions({"auto"}), None],
        "device": [str, None],
        "random_state": ["random_state"],
        "verbose": ["boolean"],
    }

    def __init__(
        self,
        *,
        n_members: int = 5,
        n_components: int = 5,
        hidden: int = 128,
        energy_hidden: int = 64,
        n_frequencies: int = 3,
        input_bins: int = 16,
        label_bins: int = 0,
        bin_jitter: float = 0.0,
        max_epochs: int | None = None,
        energy_epochs: int | None = None,
        batch_size: int | None = None,
        n_samples: int | None = None,
        learning_rate: float = 3e-3,
        energy_learning_rate: float = 1e-3,
        weight_decay: float = 0.03,
        dropout: float = 0.05,
        energy_dropout: float = 0.1,
        input_noise: float = 0.0,
        validation_fraction: float = 0.1,
        patience: int | None = 15,
        discrete: str | None = "auto",
        device: str | None = None,
        random_state: Any = None,
        verbose: bool = False,
    ) -> None:
        self.n_members = n_members
        self.n_components = n_components
        self.hidden = hidden
        self.energy_hidden = energy_hidden
        self.n_frequencies = n_frequencies
        self.input_bins = input_bins
        self.label_bins = label_bins
        self.bin_jitter = bin_jitter
        self.max_epochs = max_epochs
        self.energy_epochs = energy_epochs
        self.batch_size = batch_size
        self.n_samples = n_samples
        self.learning_rate = learning_rate
        self.energy_learning_rate = energy_learning_rate
        self.weight_decay = weight_decay
        self.dropout = dropout
        self.energy_dropout = energy_dropout
        self.input_noise = input_noise
        self.validation_fraction = validation_fraction
        self.patience = patience
        self.discrete = discrete
        self.device = device
        self.random_state = random_state
        self.verbose = verbose

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        # ``score`` is a mean log-density, not an R^2: it has no scale on which 0.5 is good.
        tags.regressor_tags.poor_score = True
        return tags

    @_fit_context(prefer_skip_nested_validation=True)
    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Any:
        """Fit to inputs ``X (n, d_x)`` and targets ``y (n,)`` or ``(n, d)``."""
        refuse_text(X)
        refuse_repeated_names(y, "y")
        refuse_text_target(y)
        checked: Any = validate_data(
            self, X, y, dtype=np.float64, multi_output=True, y_numeric=True
        )
        rows, labels = checked[0], np.asarray(checked[1], dtype=np.float64)
        refuse_huge(rows, "X")
        refuse_huge(labels, "y")
        self._flat_target = labels.ndim == 1
        self._fit_rows(rows, labels.reshape(len(labels), -1), sample_weight)
        return self

    def _fit_rows(self, X: np.ndarray, y: np.ndarray, sample_weight: ArrayLike | None) -> None:
        self._one_target = y.shape[1] == 1
        if len(X) < MINIMUM_ROWS:
            raise DataError(
                f"n_samples={len(X)}: a predictive density needs at least {MINIMUM_ROWS} rows "
                "(and some hundreds to be of use)"
            )
        weight = None
        if sample_weight is not None:
            weight = _check_sample_weight(
                sample_weight, X, dtype=np.float64, ensure_non_negative=True
            )
            X, y, weight = X[weight > 0], y[weight > 0], weight[weight > 0]
            if len(X) < MINIMUM_ROWS:
                raise DataError("fewer than five rows have a positive sample weight")
            weight = weight / weight.mean()
        if (np.ptp(y, axis=0) <= 1e-12 * np.abs(y).max(axis=0)).any():
            raise DataError(
                "the target is constant: there is no density to learn; check the column"
            )
        self._x_center, self._x_scale = _standardisation(X, weight)
        self._y_center, self._y_scale = _standardisation(y, weight)
        self.n_outputs_ = y.shape[1]
        steps = [label_step(column) if self.discrete else 0.0 for column in y.T]
        self.label_step_ = steps[0] if self.n_outputs_ == 1 else max(steps)
        if self.label_step_ > 0:
            warnings.warn(
                "the target has few distinct or heavily repeated values: it is spread evenly over "
                f"steps of width {self.label_step_:.4g}, so that the density of a value is its "
                "mass divided by the step (log_mass gives the mass). discrete=None switches this "
                "off, at the price of spikes without limit",
                SelfnormWarning,
                stacklevel=4,
            )
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        self._train(X, y, weight, np.asarray(steps) / self._y_scale, seed)

    def _train(
        self, X: np.ndarray, y: np.ndarray, weight: np.ndarray | None, jitter: np.ndarray, seed: int
    ) -> None:
        n = len(X)
        device = torch.device(self.device or "cpu")
        z = torch.from_numpy((X - self._x_center) / self._x_scale).float().to(device)
        t = torch.from_numpy((y - self._y_center) / self._y_scale).float().to(device)
        w = None if weight is None else torch.from_numpy(weight).float().to(device)
        # A member holds out at least twenty rows if that leaves four fifths for training.
        fraction = max(self.validation_fraction, min(0.2, 20 / n))
        batch = self.batch_size or _power_of_two(n / 16, 32, 128 if n < 20_000 else 256)
        with seeded(seed, device), one_thread():
            train, held_out = (r.to(device) for r in member_rows(n, self.n_members, fraction))
            rows = MemberRows(
                z, t, w, train, held_out, torch.from_numpy(jitter).float(), self.input_noise
            )
            model = build_ensemble(
                X.shape[1],
                y.shape[1],
                input_edges=self._edges(z, self.input_bins),
                label_edges=self._edges(t, self.label_bins),
                **self._architecture(),
            ).to(device)
            common: dict[str, Any] = {
                "batch_size": min(batch, len(train)),
                "weight_decay": self.weight_decay,
                "schedule": "one_cycle",
                "warmup": 0.05,
                "ema": 0.99,
                "patience": self.patience,
                "progress": self.verbose,
            }
            per_epoch = max(1, len(train) // common["batch_size"])
            epochs = self.max_epochs or int(np.clip(3000 / per_epoch, 40, 400))
            first = TrainingOptions(max_epochs=epochs, lr=self.learning_rate, **common)
            if self.energy_epochs is not None:
                epochs = self.energy_epochs
            else:
                epochs = int(np.clip(1200 / per_epoch, 15, 150))
            second = None
            if epochs > 0:
                second = TrainingOptions(max_epochs=epochs, lr=self.energy_learning_rate, **common)
            n_samples = self.n_samples or (8 if n > 5000 else 16)
            self.history_: list[History] = train_ensemble(
                model, rows, proposal_options=first, energy_options=second, n_samples=n_samples
            )
        self.n_iter_ = sum(h.n_steps for h in self.history_)
        z, t = z.cpu(), t.cpu()
        ranges = (z.amin(0), z.amax(0), t.amin(0), t.amax(0))
        self._predictive = PredictiveModel(model.cpu(), *ranges)
        with one_thread():
            # Rows from all over the table, which may be sorted.
            some = z[:: -(-n // _CHECKED_ROWS[not self._one_target])].double()
            error = self._predictive.log_norm_error(some)
        self.log_norm_error_ = float(error.abs().mean())

    def _edges(self, values: Tensor, bins: int) -> Tensor | None:
        """Edges of the bins of inputs or labels, for each member where they are jittered."""
        if not bins:
            return None
        members = self.n_members if self.bin_jitter > 0 else None
        return quantile_edges(values, bins, members=members, jitter=self.bin_jitter)

    def _architecture(self) -> dict[str, Any]:
        return {
            "members": self.n_members,
            "components": self.n_components,
            "width": self.hidden,
            "energy_width": self.energy_hidden,
            "dropout": (self.dropout, self.energy_dropout),
            "frequencies": [2.0**j for j in range(self.n_frequencies)],
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the fitted estimator to a folder (``model.safetensors``, ``config.json``)."""
        saving.save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> EnergyRegressor:
        """Read back what :meth:`save` wrote; a damaged folder is a ``ModelFileError``."""
        loaded: EnergyRegressor = saving.load(path, kind="EnergyRegressor")
        return loaded

    def to_folder(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Config and weights of a model folder."""
        check_is_fitted(self)
        return regressor_files.contents(self)

    @classmethod
    def from_folder(cls, config: dict[str, Any], tensors: dict[str, Tensor]) -> EnergyRegressor:
        """The fitted estimator of a folder's config and weights."""
        estimator = cls(**config["parameters"])
        estimator._validate_params()
        regressor_files.restore(estimator, config, tensors)
        return estimator


def _standardisation(a: np.ndarray, weight: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of the columns; 1 in place of the deviation of constant ones."""
    center = np.average(a, axis=0, weights=weight)
    scale = np.sqrt(np.average((a - center) ** 2, axis=0, weights=weight))
    flat = scale <= 1e-12 * np.maximum(np.abs(a).max(axis=0), 1e-300)
    return center, np.where(flat, 1.0, scale)


def _power_of_two(value: float, low: int, high: int) -> int:
    return int(np.clip(2 ** round(math.log2(max(value, 1.0))), low, high))
