"""``EnergyRegressor``: a full predictive density behind the scikit-learn contract."""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils import Tags, check_X_y
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from selfnorm import saving
from selfnorm._context import (
    float32_on_cpu,
    on_cpu,
    one_thread,
    seed_of,
    seeded,
    whole_or_not_at_all,
)
from selfnorm._inputs import (
    Number,
    RandomState,
    all_numbers,
    check_device,
    check_parameters,
    checked_weights,
    digest,
    own_errors,
    refuse_gaps,
    refuse_huge,
    refuse_masked,
    refuse_repeated_names,
    refuse_text,
    refuse_text_target,
)
from selfnorm._saved import saved
from selfnorm.columns import Columns, Schema, Table, label_step
from selfnorm.conditional import ConditionalEBM
from selfnorm.distribution1d import Distribution1d, PredictsDistributions
from selfnorm.errors import DataError, SelfnormWarning, shortened
from selfnorm.evaluation import Bounds
from selfnorm.report import (
    About,
    Facts,
    RegressorReport,
    input_names,
    write_report,
)
from selfnorm.tables._ensemble import (
    LabelCells,
    MemberRows,
    build_ensemble,
    likelier_unmarked,
    quantile_edges,
    train_ensemble,
    unseen_scores,
)
from selfnorm.tables._predictive import PredictiveModel
from selfnorm.tables.inputs import TableInputs, only_lacks_asides
from selfnorm.training import Clock, History, Judgement, State, TrainingOptions

MINIMUM_ROWS = 5
_JUDGED_ROWS = 1000  # by all members together
# shares of the time that may be taken: after all training, for one validation
_CLOSING_SHARE, _LOOK_SHARE = 0.05, 0.01
_TIMED_ROWS = 10  # by which it is known what these take
_SMALLEST_SPREAD = 1e-300  # of a target: densities are up to one over it
_CHECKED_ROWS = (256, 128)  # inputs behind log_norm_error_: with one target, with several
_COUNT, _POSITIVE_COUNT = Number(0, whole=True), Number(1, whole=True)
_NOT_NEGATIVE, _POSITIVE = Number(0), Number(0, open_low=True)
_SHARE = Number(0, 1, open_high=True)
_PARAMETERS: dict[str, list[Any]] = {
    "n_members": [_POSITIVE_COUNT],
    "n_components": [_POSITIVE_COUNT],
    "hidden": [_POSITIVE_COUNT],
    "max_epochs": [_POSITIVE_COUNT, None],
    "max_time": [_POSITIVE, str, None],
    "batch_size": [_POSITIVE_COUNT, None],
    "learning_rate": [_POSITIVE],
    "weight_decay": [_NOT_NEGATIVE],
    "validation_fraction": [Number(0, 1, open_low=True, open_high=True)],
    "patience": [_POSITIVE_COUNT, None],
    "discrete": ["auto", None],
    "device": [str, None],
    "verbose": [bool, np.bool_],
}
_OF_NETWORK: dict[str, list[Any]] = {
    "energy_hidden": [_POSITIVE_COUNT],
    "dropout": [_SHARE],
    "energy_dropout": [_SHARE],
    "energy_epochs": [_COUNT, None],
    "energy_learning_rate": [_POSITIVE],
    "n_samples": [_POSITIVE_COUNT, None],
    "n_frequencies": [Number(0, 12, whole=True)],
    "input_bins": [_COUNT],
    "label_bins": [_COUNT],
    "bin_jitter": [Number(0, 1)],
    "input_noise": [_NOT_NEGATIVE],
    "schema": [Schema, None],
}


@saved()
@dataclasses.dataclass(frozen=True)
class RegressorNetwork:
    """What an :class:`EnergyRegressor` sees of inputs and labels, and how its energies train.

    Parameters
    ----------
    energy_hidden : int, default 64
        Width of the energies.
    dropout, energy_dropout : float, default 0.05 and 0.1
        In the trunk of the proposals, and in that of the energies.
    energy_epochs : int, default None
        Passes over the data for the energies; ``None`` chooses by the number of rows, 0 leaves the
        ensemble of mixture density networks.
    energy_learning_rate, n_samples : float and int
        Learning rate of the energies, and labels drawn per row at each of their steps (``None``
        chooses).
    n_frequencies : int, default 3
        Waves ``sin, cos(2^j z)`` of the standardised label that the energy sees: more of them for
        distributions with hard edges.
    input_bins, label_bins : int, default 16 and 0
        Piecewise linear features: how far each input, and the label, reaches into bins that hold
        equally many training rows. They let the density jump along ``x``, or have edges at labels
        that stay in place as ``x`` moves; some hundreds of rows per jump are needed to gain by it.
    bin_jitter : float, default 0
        Between 0 and 1: every member gets bins of its own, each inner edge moved at random by up to
        half this share of a bin, so that the mixture of members shows less of the bins.
    input_noise : float, default 0
        Normal noise added to the standardised inputs at every step, in their deviations: smooths
        the distribution along ``x`` as a kernel of that width does.
    schema : Schema, default None
        What the columns of the inputs are, the same for all folds; ``None`` reads it off a table
        that has more than numbers.
    """

    energy_hidden: int = 64
    dropout: float = 0.05
    energy_dropout: float = 0.1
    energy_epochs: int | None = None
    energy_learning_rate: float = 1e-3
    n_samples: int | None = None
    n_frequencies: int = 3
    input_bins: int = 16
    label_bins: int = 0
    bin_jitter: float = 0.0
    input_noise: float = 0.0
    schema: Schema | None = None

    def __post_init__(self) -> None:
        check_parameters(self, _OF_NETWORK)


@saved(
    fitted={
        "n_features_in_": int,
        "feature_names_in_": np.ndarray,
        "n_outputs_": int,
        "inputs_": TableInputs | None,
        "label_step_": float,
        "label_grid_": LabelCells | None,
        "log_norm_error_": float,
        "fitted_to_": dict[str, int | str],
        "history_": list[History],
        "judgement_": Judgement,
        "flat_target_": bool,
        "_predictive": PredictiveModel,
        "_x_columns": Columns,
        "_y_columns": Columns,
    }
)
class EnergyRegressor(saving.Saved, Facts, PredictsDistributions, RegressorMixin, BaseEstimator):
    r"""The distribution of ``y`` given ``x``: multimodal, skewed, bounded, normalised.


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
    hidden : int, default 128
        Width of the two-layer trunks.
    network : RegressorNetwork, default None
        What is seldom tuned: the energies' width, epochs and learning rate, bins and waves.
    max_epochs : int, default None
        Passes over the data for the proposals; ``None`` chooses by the number of rows.
    max_time : float or str, default None
        Seconds that a fit may take, or a text such as ``"90s"`` or ``"5min"``; the learning rate
        falls with the time. The numbers then depend on the machine.
    batch_size : int, default None
        Rows per step; ``None`` chooses.
    learning_rate, weight_decay : float
        Of AdamW: of the proposals, and of both stages.
    validation_fraction : float, default 0.1
        Share of the rows each member holds out to stop early; every member holds out other rows.
    patience : int, default 15
        Validations without improvement of any member before a stage ends.
    discrete : {"auto", None}
        Whether targets of few distinct (or heavily repeated) values have cells as wide as their
        step, with a warning: a density on integers can grow spikes without limit.
    device : str, default None
        Where to train, ``"cpu"`` if ``None``. The fitted model predicts on the CPU in float64.
    random_state : int, RandomState, Generator or None
        Same value, same bits on the CPU.
    verbose : bool, default False
        Show progress bars, and what the fit came to.

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
        Width of the cells of discrete targets; 0 for continuous ones.
    label_grid_ : LabelCells or None
        Of whole-number targets (all values on a grid of that step): the cells whose masses
        ``log_prob``, ``score``, ``bounds`` and ``sample`` are of. Quantiles, intervals, ``pdf`` and
        ``cdf`` are those of the distribution that is spread over the cells.
    fitted_to_ : dict
        Number of ``rows`` of the training table and a ``digest``, by which it is known again.
    judgement_ : Judgement
        What the fit came to: rows used, log-likelihood of rows not seen with its standard error,
        each member on those that it held out, what the energies add to the mixtures, seconds. Its
        text closes a ``verbose`` fit.
    log_norm_error_ : float
        Mean distance of ``log`` mass under the learned ``b(x)`` from 0, over at most 256 training
        inputs evenly spaced in the table (128 with several targets).

    Examples
    --------
    >>> import numpy as np
    >>> from selfnorm import EnergyRegressor
    >>> from selfnorm.tables import RegressorNetwork
    >>> rng = np.random.default_rng(0)
    >>> X = rng.uniform(-1, 1, (200, 1))
    >>> y = X[:, 0] + 0.1 * rng.standard_normal(200)
    >>> short = RegressorNetwork(energy_epochs=2)
    >>> model = EnergyRegressor(n_members=2, max_epochs=5, network=short, random_state=0)
    >>> model.fit(X, y).predict_quantiles(X[:3], [0.05, 0.5, 0.95]).shape
    (3, 3)
    """

    judgement_: Judgement

    def __init__(
        self,
        *,
        n_members: int = 5,
        n_components: int = 5,
        hidden: int = 128,
        network: RegressorNetwork | None = None,
        max_epochs: int | None = None,
        max_time: float | str | None = None,
        batch_size: int | None = None,
        learning_rate: float = 3e-3,
        weight_decay: float = 0.03,
        validation_fraction: float = 0.1,
        patience: int | None = 15,
        discrete: str | None = "auto",
        device: str | None = None,
        random_state: RandomState = None,
        verbose: bool = False,
    ) -> None:
        self.n_members = n_members
        self.n_components = n_components
        self.hidden = hidden
        self.network = network
        self.max_epochs = max_epochs
        self.max_time = max_time
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.validation_fraction = validation_fraction
        self.patience = patience
        self.discrete = discrete
        self.device = device
        self.random_state = random_state
        self.verbose = verbose

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        tags.input_tags.allow_nan = True
        tags.input_tags.categorical = True
        tags.input_tags.string = True
        # ``score`` is a mean log-density, not an R^2: it has no scale on which 0.5 is good.
        tags.regressor_tags.poor_score = True
        return tags

    @whole_or_not_at_all
    def fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        sample_weight: ArrayLike | None = None,
        *,
        checkpoint: str | os.PathLike[str] | None = None,
    ) -> EnergyRegressor:
        """Fit to inputs ``X (n, d_x)`` and targets ``y (n,)`` or ``(n, d)``.

        ``X`` may be a table with text, categories, dates and gaps, read by a
        :class:`~selfnorm.Schema`: ``inputs_.schema``.

        Progress is saved to the file ``checkpoint`` (and for the energies to one beside it), from
        which the same fit goes on after a kill; ``random_state=None`` is 0 then.
        """
        check_parameters(self, {"network": [RegressorNetwork, None], **_PARAMETERS})
        check_device(self.device)
        clock = Clock(self.max_time)
        rows, labels = self._checked_table(X, y)
        self.flat_target_ = labels.ndim == 1
        labels = labels.reshape(len(labels), -1)
        table, weight = (rows, labels), None
        if sample_weight is not None:
            weight = checked_weights(sample_weight, len(rows))
            rows, labels, weight = rows[weight > 0], labels[weight > 0], weight[weight > 0]
        if len(rows) < MINIMUM_ROWS:
            weighted = "" if weight is None else " whose sample_weight is not zero"
            raise DataError(
                f"n_samples={len(rows)}: a predictive density needs at least {MINIMUM_ROWS} rows"
                f"{weighted} (and some hundreds to be of use)"
            )
        weight = None if weight is None else weight / weight.mean()
        saved = None if checkpoint is None else os.fspath(checkpoint)
        self._fit_rows(rows, labels, weight, saved, clock)
        if self.inputs_ is not None and self.inputs_.mark == 0:
            table[0][:, -1] = 0.0
        self.fitted_to_: dict[str, Any] = {"rows": len(table[0]), "digest": digest(*table)}
        self.judgement_ = dataclasses.replace(self.judgement_, seconds=clock.gone)
        if self.verbose:
            print(self.judgement_)
        return self

    def _checked_table(self, X: ArrayLike, y: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets of a training table as numbers."""
        refuse_repeated_names(X)
        refuse_repeated_names(y, "y")
        refuse_text_target(y)
        self.inputs_: TableInputs | None = None
        how: dict[str, Any] = {"dtype": np.float64, "multi_output": True, "y_numeric": True}
        schema = None if self.network is None else self.network.schema
        if schema is None and all_numbers(X):
            with own_errors():
                rows, y = validate_data(self, X, y, **how)
        else:
            self.inputs_ = TableInputs.of(X, schema)
            with own_errors():
                rows, y = check_X_y(self._read(X, reset=True), y, **how)
        labels = np.asarray(y, dtype=np.float64)
        refuse_gaps(labels, "y")
        refuse_huge(rows, "X")
        refuse_huge(labels, "y")
        return rows, labels

    def _fit_rows(
        self,
        X: np.ndarray,
        y: np.ndarray,
        weight: np.ndarray | None,
        checkpoint: str | None,
        clock: Clock,
    ) -> None:
        if (np.ptp(y, axis=0) <= 1e-12 * np.abs(y).max(axis=0)).any():
            raise DataError(
                "the target is constant: there is no density to learn; check the column"
            )
        self._x_columns, self._y_columns = _standard_units(X, weight), _standard_units(y, weight)
        if (self._y_columns.scale < _SMALLEST_SPREAD).any():
            raise DataError("the target varies by less than 1e-300: give it in other units")
        self.n_outputs_ = y.shape[1]
        steps = [label_step(column) if self.discrete else 0.0 for column in y.T]
        self.label_step_ = steps[0] if self.n_outputs_ == 1 else max(steps)
        if self.label_step_ > 0:
            warnings.warn(
                "the target has few distinct or heavily repeated values: each stands for a step of "
                f"width {self.label_step_:.4g}, and its density is its mass divided by the step "
                "(log_mass gives the mass). discrete=None switches this off, at the price of "
                "spikes without limit",
                SelfnormWarning,
                stacklevel=5,
            )
        seed = seed_of(self.random_state, checkpoint)
        self.label_grid_ = LabelCells.of(y[:, 0], steps[0]) if self.n_outputs_ == 1 else None
        jitter = np.asarray(steps) / self._y_columns.scale.numpy()
        jitter = np.zeros(1) if self.label_grid_ is not None else jitter
        device = torch.device(self.device or "cpu")
        with float32_on_cpu():
            with seeded(seed, device), one_thread():
                rows = self._member_rows(X, y, weight, jitter, device)
                checked = self._train(rows, checkpoint, clock)
            with one_thread():
                error = self._predictive.log_norm_error(checked)
        self.log_norm_error_ = float(error.abs().mean())

    def _member_rows(
        self,
        X: np.ndarray,
        y: np.ndarray,
        weight: np.ndarray | None,
        jitter: np.ndarray,
        device: torch.device,
    ) -> MemberRows:
        """The standardised table, and which of its rows each member trains on."""
        blank = None
        if self.inputs_ is not None and self.inputs_.mark:
            cells, value = self.inputs_.blank(X)
            filled = _mapped(value[None], self._x_columns)[0].float()
            if cells.any():  # in rows that count
                blank = torch.from_numpy(cells).to(device), filled.to(device)
        return MemberRows(
            _mapped(X, self._x_columns).float().to(device),
            self._scaled(y).float().to(device),
            None if weight is None else torch.from_numpy(weight).float().to(device),
            members=self.n_members,
            # A member holds out at least twenty rows if that leaves four fifths for training.
            fraction=max(self.validation_fraction, min(0.2, 20 / len(X))),
            jitter=torch.from_numpy(jitter),
            input_noise=(self.network or RegressorNetwork()).input_noise,
            blank=blank,
        )

    def _train(self, rows: MemberRows, checkpoint: str | None, clock: Clock) -> Tensor:
        """Both stages; returns the inputs that closing figures are of."""
        z, t = rows.x, rows.y
        model = self._untrained(z, t).to(z.device)
        ranges = [end.cpu() for values in (z, t) for end in (values.amin(0), values.amax(0))]
        closing, n_checked = self._closing(model, rows, ranges, clock)
        self.history_: list[History] = train_ensemble(
            model, rows, **self._plan(rows, checkpoint), clock=clock, closing=closing
        )
        if rows.blank is not None and likelier_unmarked(model, rows, rows.blank[1][-1]):
            assert self.inputs_ is not None
            self.inputs_ = dataclasses.replace(self.inputs_, mark=0)
            z[:, -1] = rows.blank[1][-1]  # the rows' own, too
        self._judge(model, rows)
        self._predictive = PredictiveModel(model.cpu(), *ranges, cells=self._scaled_cells())
        # Rows from all over the table, which may be sorted.
        return z[:: -(-len(z) // n_checked)].cpu().double()

    def _plan(self, rows: MemberRows, checkpoint: str | None) -> State:
        """How long both stages train, and by what steps."""
        network = self.network or RegressorNetwork()
        n, n_train = len(rows.x), len(rows)
        batch = self.batch_size or _power_of_two(n / 16, 32, 128 if n < 20_000 else 256)
        batch = min(batch, n_train)
        per_epoch = max(1, n_train // batch)
        energy_epochs = network.energy_epochs
        if energy_epochs is None:
            energy_epochs = int(np.clip(1200 / per_epoch, 7, 150))
        options = TrainingOptions(
            batch_size=batch,
            max_epochs=self.max_epochs or int(np.clip(3000 / per_epoch, 16, 400)),
            lr=self.learning_rate,
            weight_decay=self.weight_decay,
            schedule=("one_cycle", 0.05),
            ema=0.99,
            patience=self.patience,
            progress=self.verbose,
            checkpoint=checkpoint,
        )
        stages = [options]
        if energy_epochs:
            rate = network.energy_learning_rate
            stages.append(options.given(max_epochs=energy_epochs, lr=rate))
        return {"stages": stages, "n_samples": network.n_samples or (8 if n > 5000 else 16)}

    def _closing(
        self, model: ConditionalEBM, rows: MemberRows, ranges: Sequence[Tensor], clock: Clock
    ) -> tuple[float, int]:
        """Seconds that are left to closing figures, and the number of inputs in the last of them.

        Where the time is limited, a few rows tell how many these may be, and how many to stop by.
        """
        most = _CHECKED_ROWS[self.n_outputs_ > 1]
        if math.isinf(clock.total):
            return 0.0, most
        untrained = PredictiveModel(copy.deepcopy(model).cpu(), *ranges, cells=self._scaled_cells())
        inputs = rows.x[:_TIMED_ROWS].cpu().double()
        judging = _seconds(lambda: unseen_scores(model, rows, len(inputs))) / len(inputs)
        checking = _seconds(lambda: untrained.log_norm_error(inputs)) / len(inputs)
        validated = int(_LOOK_SHARE * clock.left / judging)
        rows.held_out.rows = rows.held_out.rows[: max(_TIMED_ROWS, validated)]
        n_checked = min(most, max(_TIMED_ROWS, int(_CLOSING_SHARE * clock.left / checking)))
        return judging * _JUDGED_ROWS / self.n_members + checking * n_checked, n_checked

    def _judge(self, model: ConditionalEBM, rows: MemberRows) -> None:
        """What the fit came to, by rows that each member has held out."""
        log_q, log_p, weight = (
            values.double().flatten().cpu().numpy()
            for values in unseen_scores(model, rows, _JUDGED_ROWS // self.n_members)
        )
        how = "each member on rows that it held out"
        scores = log_p - float(self._y_columns.scale.log().sum())
        self.judgement_ = Judgement.of(len(rows.x), how, scores, log_p - log_q, weight)

    def _untrained(self, z: Tensor, t: Tensor) -> ConditionalEBM:
        """The ensemble with bins of its own for inputs and labels, if there are any."""
        network = self.network or RegressorNetwork()
        own = self.n_members if network.bin_jitter > 0 else None
        edges = [
            quantile_edges(values, bins, members=own, jitter=network.bin_jitter) if bins else None
            for values, bins in ((z, network.input_bins), (t, network.label_bins))
        ]
        return build_ensemble(
            z.shape[1],
            t.shape[1],
            members=self.n_members,
            components=self.n_components,
            width=self.hidden,
            energy_width=network.energy_hidden,
            dropout=(network.dropout, network.energy_dropout),
            frequencies=[2.0**j for j in range(network.n_frequencies)],
            input_edges=edges[0],
            label_edges=edges[1],
            cells=self._scaled_cells(),
        )

    @property
    def n_iter_(self) -> int:
        """Optimiser steps of both stages."""
        return sum(history.n_steps for history in self.history_)

    @property
    def _dim(self) -> int:
        check_is_fitted(self)
        return self.n_outputs_

    def _distributions(self, inputs: Tensor) -> Iterator[tuple[slice, Distribution1d]]:
        return self._predictive.distributions(inputs)

    def _mean_of_several(self, inputs: Tensor) -> Tensor:
        return self._predictive.mean_of_several(inputs)

    def _log_density(self, inputs: Tensor, labels: Tensor, *, learned: bool = False) -> Tensor:
        log_p = self._predictive.log_prob(inputs, labels, learned=learned)
        return log_p + self._y_columns.log_jacobian

    @on_cpu()
    def log_mass(self, X: ArrayLike, y: ArrayLike) -> np.ndarray:
        """Log-probability of the step around ``y`` for discrete targets, ``(n,)``.

        The masses of all values of a whole-number target add up to one, and :meth:`sample` draws
        by them; of values beyond those of the training rows see :attr:`label_grid_`.
        """
        if self._dim != 1:
            raise self._not_one_label("log_mass")
        if not self.label_step_ > 0:
            raise DataError("the target is continuous: it has a density (log_prob), no mass")
        if self.label_grid_ is not None:
            return self.log_prob(X, y) + math.log(self.label_step_)
        values = np.asarray(y, dtype=np.float64).reshape(-1)
        ends = values[:, None] + 0.5 * self.label_step_ * np.array([-1.0, 1.0])
        below, above = self.cdf(X, ends).T
        return np.log(np.maximum(above - below, 1e-300))

    def without_energy(self) -> EnergyRegressor:
        """A copy with all energies at zero: the ensemble of mixture density networks alone."""
        check_is_fitted(self)
        twin = copy.deepcopy(self)
        twin._predictive.drop_energy()  # noqa: SLF001 its own
        return twin

    @on_cpu()
    def sample(self, X: ArrayLike, n: int = 1, random_state: RandomState = None) -> np.ndarray:
        """``(n_rows, n)`` labels drawn from ``p(y|x)``; ``(n_rows, n, d)`` for several targets."""
        if n < 1:
            raise DataError(f"n must be at least 1, got {n}")
        z = self._encoded(X)
        with seeded(seed_of(random_state)):
            if self.n_outputs_ > 1:
                return self._in_units(self._predictive.sample_of_several(z, n))
            drawn = self._in_units(self._drawn(z, n).unsqueeze(-1))
            if self.label_grid_ is not None:
                drawn = self.label_grid_.nearest(torch.from_numpy(drawn)).numpy()
        return drawn[..., 0]

    @on_cpu()
    def bounds(
        self, X: ArrayLike, y: ArrayLike, n_samples: int = 2000, random_state: RandomState = None
    ) -> Bounds:
        """Lower and upper bound of :meth:`score`: ``Z_k(x)`` by samples, the learned ``b_k(x)``."""
        z, t = self._pairs(X, y)
        with seeded(seed_of(random_state)):
            bounds = self._predictive.bounds(z, t, n_samples)
        return bounds.shifted(self._y_columns.log_jacobian)

    @on_cpu()
    def report(
        self,
        X: ArrayLike,
        y: ArrayLike,
        path: str | os.PathLike[str],
        *,
        train: tuple[ArrayLike, ArrayLike] | None = None,
        about: About | None = None,
        random_state: RandomState = 0,
    ) -> Path:
        """Write a report on the model and the pairs: one HTML file that needs no network.

        A verdict, what was fitted, the likelihood against simple models, calibration, predictive
        densities, the labels it did not expect, training. Needs matplotlib.

        Parameters
        ----------
        X, y : inputs and targets
            Rows that were not trained on judge fairly; the training table is known again.
        path : str or path
            File to write, ``.html``.
        train : pair of inputs and targets, default None
            What the simple models are fitted to; by default the rest of ``X``, fold by fold.
        about : About, default None
            Names for the reader: ``selfnorm.report.About(source=, target=, folder=, title=)``.
        random_state : int, RandomState, Generator or None
            For samples and folds.
        """

        def page(_: tuple[Tensor, Tensor], unseen: list[str]) -> str:
            labels = np.asarray(y, dtype=np.float64)
            rows = self._input_rows(X), labels.reshape(len(labels), -1)
            return RegressorReport(
                estimator=self,
                table=Table.of(X),
                y=labels,
                train=train,
                seen=self.fitted_to_.get("digest") == digest(*rows),
                unseen=unseen,
                about=about or About(),
                seed=seed_of(random_state),
            ).html()

        return write_report(path, lambda: self._pairs(X, y), page)

    def facts(self) -> dict[str, str]:
        """What was fitted, in words; empty before the fit."""
        if "history_" not in vars(self):
            return {}
        rows = f"{self.fitted_to_['rows']:,} rows"
        values = f"in steps of {self.label_step_:.4g}" if self.label_step_ > 0 else "continuous"
        facts = {
            "fitted to": f"{rows} of {self.n_features_in_} inputs",
            "target": values if self.n_outputs_ == 1 else f"{self.n_outputs_} targets, {values}",
            "judged": str(self.judgement_),
            "inputs": shortened(input_names(self)),
            "members": f"{self.n_members} mixture density networks, each tilted by an energy",
            "training": f"{self.n_iter_:,} steps in {sum(h.seconds for h in self.history_):.1f} s",
        }
        return {name: words for name, words in facts.items() if words}

    def _loaded(self) -> None:
        """Refuse what no fit gives."""
        check_parameters(self, {"network": [RegressorNetwork, None], **_PARAMETERS})

    def _encoded(self, X: ArrayLike) -> Tensor:
        return _mapped(self._input_rows(X), self._x_columns)

    def _input_rows(self, X: ArrayLike) -> np.ndarray:
        """Inputs as numbers."""
        check_is_fitted(self)
        if self.inputs_ is not None:
            return self._read(X, reset=False)
        refuse_text(X)
        with own_errors():
            return np.asarray(validate_data(self, X, reset=False, dtype=np.float64))

    def _read(self, X: ArrayLike, *, reset: bool) -> np.ndarray:
        """Rows of a table of any kind as numbers."""
        assert self.inputs_ is not None
        schema = self.inputs_.schema
        if isinstance(X, Mapping) or (hasattr(type(X), "num_rows") and not reset):  # by name
            self.n_features_in_ = len(schema.columns)
        elif reset or not hasattr(X, "columns") or not only_lacks_asides(X, schema):
            with own_errors():
                validate_data(self, X, reset=reset, skip_check_array=True)
        return self.inputs_.rows(X)

    def _pairs(self, X: ArrayLike, y: ArrayLike) -> tuple[Tensor, Tensor]:
        """Inputs and as many targets, standardised."""
        z, t = self._encoded(X), self._targets(y)
        if len(z) != len(t):
            raise DataError(f"X has {len(z)} rows but y has {len(t)}")
        return z, t

    def _targets(self, y: ArrayLike) -> Tensor:
        refuse_masked(y, "y")
        y = np.asarray(y, dtype=np.float64)
        if y.ndim == 0:
            raise DataError("y must hold one target per row of X: write [y] for a single row")
        y = y.reshape(len(y), -1)
        if y.shape[1] != self.n_outputs_:
            raise DataError(
                f"y has {y.shape[1]} columns, the model was fitted to {self.n_outputs_}"
            )
        if not np.isfinite(y).all():
            raise DataError("y holds NaN or infinite values: drop those rows")
        t = _mapped(y, self._y_columns)
        refuse_huge(np.maximum(np.abs(y), t.abs().numpy()), "y")
        return t

    def _scaled_cells(self) -> LabelCells | None:
        """Cells of the targets in standardised units."""
        columns = self._y_columns
        return self.label_grid_ and self.label_grid_.standardised(
            float(columns.center[0]), float(columns.scale[0])
        )

    def _scaled(self, y: np.ndarray) -> Tensor:
        return _mapped(y, self._y_columns)

    def _in_units(self, labels: Tensor | np.ndarray) -> np.ndarray:
        values: np.ndarray = self._y_columns.inverse(torch.as_tensor(labels)).numpy()
        return values

    @property
    def _unit(self) -> float:
        return float(self._y_columns.scale[0])


def _standard_units(x: np.ndarray, weight: np.ndarray | None) -> Columns:
    """The map to mean 0 and deviation 1; constant columns keep their unit."""
    center = np.average(x, axis=0, weights=weight)
    # in units of a power of two, which changes no digit: squares of 1e-200 would all be zero
    unit = np.ldexp(1.0, np.frexp(np.abs(x - center).max(axis=0))[1])
    scale = unit * np.sqrt(np.average(((x - center) / unit) ** 2, axis=0, weights=weight))
    flat = scale <= 1e-12 * np.abs(x).max(axis=0)
    return Columns.of(torch.from_numpy(center), torch.from_numpy(np.where(flat, 1.0, scale)))


def _seconds(work: Callable[[], object]) -> float:
    """Time that work takes, once it is warm."""
    work()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _mapped(values: np.ndarray, columns: Columns) -> Tensor:
    z: Tensor = columns(torch.from_numpy(np.array(values)))[0]  # a copy: arrays may be read-only
    return z


def _power_of_two(value: float, low: int, high: int) -> int:
    return int(np.clip(2 ** round(math.log2(max(value, 1.0))), low, high))
