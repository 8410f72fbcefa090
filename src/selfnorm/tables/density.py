"""``EnergyDensity``: the density of a table behind the scikit-learn contract.

Rows are mapped once, by :class:`~selfnorm.columns.Columns` in float64; models see the mapped rows.

- *joint* (few columns): one energy over all columns on a heavy-tailed base, normalised by a sharp
  proposal with a heavy-tailed part mixed in.
- *autoregressive* (any number of columns): a chain of one-dimensional EBMs.
"""

from __future__ import annotations

import copy
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
from selfnorm._context import float32_on_cpu, on_cpu, seeded
from selfnorm._inputs import check_device, refuse_constant, refuse_huge, refuse_text
from selfnorm.chain import N_NODES, AutoregressiveEBM, default_options
from selfnorm.columns import Columns, log_cell_mass
from selfnorm.density import EBM, Recipe, fit, fit_many, joint_density, joint_energy
from selfnorm.distributions import Defensive, Proposal, StudentT
from selfnorm.errors import DataError
from selfnorm.evaluation import Bounds, evaluate
from selfnorm.networks import MLP
from selfnorm.training import History, TrainingOptions

MINIMUM_ROWS = 5
MAX_FACTOR_SAMPLES = 10_000_000  # some 20 s on one core
MIN_SAMPLES = 256  # per factor: enough for a verdict


class EnergyDensity(saving.Saved, OutlierMixin, DensityMixin, BaseEstimator):
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
    columns_ : Columns
        The map to the units of the model, in float64.
    model_, proposal_ : EBM or AutoregressiveEBM, and the proposal of the former
        The density of mapped rows.

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
        "method": [StrOptions({"auto", "joint", "autoregressive"})],
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
    def fit(
        self,
        X: ArrayLike,
        y: Any = None,  # noqa: ARG002 sklearn's signature
        *,
        checkpoint: str | os.PathLike[str] | None = None,
    ) -> EnergyDensity:
        """Fit the density to the rows of ``X (n, d)``; ``y`` is ignored.

        Progress is saved to the file ``checkpoint``, from which the same fit goes on after a kill.
        """
        check_device(self.device)
        X = self._rows(X, reset=True)
        if len(X) < MINIMUM_ROWS:
            raise DataError(
                f"X has {len(X)} sample(s); a density needs at least {MINIMUM_ROWS} rows "
                "(and some hundreds to be of use)"
            )
        refuse_constant(X, [self._name_of(j) for j in range(X.shape[1])])
        self._seen = X.min(axis=0), X.max(axis=0)
        self.method_ = self.method
        if self.method == "auto":
            self.method_ = "joint" if X.shape[1] <= 2 else "autoregressive"
        seed = _seed(self.random_state)
        train = self._fit_joint if self.method_ == "joint" else self._fit_chain
        with float32_on_cpu():
            models, proposal, histories = train(torch.from_numpy(X), seed, checkpoint)
        best = max(range(len(histories)), key=lambda k: _score(histories[k]))
        self.history_: History = histories[best]
        self.n_iter_: int = self.history_.n_steps
        # float64 from here on: a row's score must not depend on the rows it is scored with
        self.model_: EBM | AutoregressiveEBM = models[best].cpu().double().eval()
        self.proposal_: Any = None if proposal is None else proposal.cpu().double().eval()
        log_density = self._log_density(X)
        kept = [r["lower"] for r in self.history_.records if r["step"] == self.history_.best_step]
        self.lower_bound_: float = float(log_density.mean())
        if kept and math.isfinite(kept[-1]):
            self.lower_bound_ = kept[-1] + self.columns_.log_jacobian
        self.offset_: float = float(np.percentile(log_density, 100.0 * self.contamination))
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

        return log_cell_mass(density, rows, self.columns_.step, n_points=n_points).numpy()

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
        seed = _seed(random_state)
        with float32_on_cpu():
            if isinstance(self.model_, EBM):
                z = self.model_.sample(int(n_samples), proposal=self.proposal_, seed=seed)
            else:  # in float32: a few digits of a random number cost twice the time in float64
                z = copy.deepcopy(self.model_).float().sample(int(n_samples), seed=seed)
        rows = self.columns_.inverse(z.double()).numpy()
        # columns on a grid were spread over its steps to be fitted: back to the grid
        step, (first, last) = self.columns_.step.numpy(), self._seen
        on_grid = first + np.round((rows - first) / np.where(step > 0, step, 1.0)) * step
        return np.where(step > 0, np.clip(on_grid, first, last), rows)

    def bounds(self, X: ArrayLike, n_samples: int = 20_000, random_state: Any = None) -> Bounds:
        """Lower and upper bound of the mean log-likelihood of ``X``, and whether to trust them.

        For a chain they enclose its exactly normalised density; ``score_samples`` takes the learned
        normalisers and is off by the ``learned_error`` (on average) that comes with the bounds.
        """
        check_is_fitted(self)
        z = self.standardise(X)
        with float32_on_cpu():
            if isinstance(self.model_, EBM):
                options: dict[str, Any] = {"proposal": self.proposal_, "n_samples": n_samples}
                bounds = evaluate(self.model_, z, seed=_seed(random_state), **options)
            else:
                bounds = self._chain_bounds(self.model_, z, n_samples, _seed(random_state))
        return bounds.shifted(self.columns_.log_jacobian)

    def standardise(self, X: ArrayLike) -> Tensor:
        """The rows of ``X`` as ``model_`` sees them, ``(n, d)``."""
        check_is_fitted(self)
        z: Tensor = self.columns_(torch.from_numpy(self._rows(X, reset=False)))[0]
        return z

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
            "model": saving.describe(self.model_),
            "proposal": saving.describe(self.proposal_),
            "training": self.history_.to_dict(),
        }
        tensors = {
            "scaling.center": self.columns_.center,
            "scaling.scale": self.columns_.scale,
            "grid.step": self.columns_.step,
            "grid.first": torch.from_numpy(self._seen[0]),
            "grid.last": torch.from_numpy(self._seen[1]),
        }
        for part, module in (("model", self.model_), ("proposal", self.proposal_)):
            state = {} if module is None else module.state_dict()
            tensors |= {f"{part}.{name}": tensor for name, tensor in state.items()}
        return config, tensors

    @classmethod
    def from_folder(cls, config: dict[str, Any], tensors: dict[str, Tensor]) -> EnergyDensity:
        """The fitted estimator of a folder's config and weights."""
        saving.expect(
            config,
            parameters=dict,
            n_features=int,
            columns=list | None,
            method=str,
            offset=float | int,
            lower_bound=float | int | None,
            model=dict,
            proposal=dict | None,
        )
        estimator = cls(**config["parameters"])
        estimator._validate_params()
        state: dict[str, dict[str, Tensor]] = {"model": {}, "proposal": {}}
        for name, tensor in tensors.items():
            part, _, rest = name.partition(".")
            if part in state:
                state[part][rest] = tensor
        estimator.model_ = saving.build(config["model"], state["model"]).double()
        estimator.proposal_ = saving.build(config["proposal"], state["proposal"])
        estimator.n_features_in_ = int(config["n_features"])
        scale = (tensors[name] for name in ("scaling.center", "scaling.scale", "grid.step"))
        estimator.columns_ = Columns.of(*scale)
        estimator._seen = tensors["grid.first"].numpy(), tensors["grid.last"].numpy()
        if config["columns"] is not None:
            estimator.feature_names_in_ = np.array(config["columns"], dtype=object)
        estimator.method_ = str(config["method"])
        estimator.offset_ = float(config["offset"])
        lower = config["lower_bound"]
        estimator.lower_bound_ = math.nan if lower is None else float(lower)
        estimator.history_ = History.from_dict(config["training"])
        estimator.n_iter_ = estimator.history_.n_steps
        return estimator

    def _fit_joint(
        self, x: Tensor, seed: int, checkpoint: Any
    ) -> tuple[list[EBM], Proposal, list[History]]:
        """One energy over all columns; for one or two columns.

        The base is a Student-t fitted to the rows (polynomial tails, so ``Z`` exists for any
        bounded energy), the proposal a Gaussian mixture with a Student-t part; the energy starts at
        zero, that is, at the base. Tables of a thousand rows and more get the recipe of
        :func:`selfnorm.density.recipes.joint_density`, smaller ones a smaller network and fewer
        steps. Restarts differ in their energies alone.
        """
        n, d = x.shape
        with seeded(seed):
            columns = self.columns_ = Columns(d, discrete=self.discrete).double().fit(x)
            train, held_out = _split(x, self.validation_fraction)
            if bool((columns.step > 0).any() or (columns.atom_width > 0).any()):
                # fresh noise for each copy, so that the noise itself cannot be learned
                copies = max(1, min(8, 20_000 // len(train)))
                train = columns.dequantise(train.repeat(copies, 1))
                held_out = None if held_out is None else columns.dequantise(held_out)
            train = columns(train)[0].float()
            recipe = joint_density(train) if n >= 1000 else _small_joint(train)
            models = [recipe.model]
            if self.hidden is not None:
                models = [EBM(_energy_of(n, d, self.hidden), base=recipe.model.base)]
            models += [
                EBM(_energy_of(n, d, self.hidden), base=recipe.model.base)
                for _ in range(int(self.n_init) - 1)
            ]
        models = [model.to(self.device or "cpu") for model in models]
        options = recipe.options.given(**self._stated(seed), checkpoint=checkpoint)
        if options.validate_every is None and options.max_steps is not None:
            options = options.given(validate_every=max(25, options.max_steps // 20))
        common: dict[str, Any] = {"proposal": recipe.proposal, "n_samples": recipe.n_samples}
        common |= {"val_data": self._mapped(held_out), "options": options}
        if self.n_init == 1:
            return models, recipe.proposal, [fit(models[0], train, **common)]
        return models, recipe.proposal, fit_many(models, train, **common)

    def _fit_chain(
        self, x: Tensor, seed: int, checkpoint: Any
    ) -> tuple[list[AutoregressiveEBM], None, list[History]]:
        """A chain of one-dimensional EBMs, of the sizes that ``default_options`` recommends.

        Small tables get a narrower network and fewer steps.
        """
        n, d = x.shape
        device = self.device or "cpu"
        defaults = default_options(n, d, device)
        sizes, options = dict(defaults.model), dict(defaults.fit)
        if n < 2000:
            sizes |= {"orderings": 1 if n < 500 else 2, "hidden": 32 if n < 500 else 64}
            sizes |= {"components": 4, "context": 8, "energy_hidden": 16}
            options["max_steps"] = int(min(options["max_steps"], max(30, 8 * n**0.65)))
            options["validate_every"] = max(20, options["max_steps"] // 20)
            options |= {"ema": 0.98 if n < 500 else 0.99, "lr": 3e-3}
        if self.hidden is not None:
            sizes["hidden"] = self.hidden
        with seeded(seed):
            train, held_out = _split(x, self.validation_fraction)
            models = [
                AutoregressiveEBM(d, discrete=self.discrete, **sizes)
                for _ in range(int(self.n_init))
            ]
            columns = self.columns_ = Columns(d, discrete=self.discrete).double().fit(train)
        for model in models:
            model.set_columns(columns.standardised())
        options |= self._stated(seed)
        if held_out is None:
            options["patience"] = None
        task = dict(defaults.task)
        # a step for b alone draws many samples: no more than an eighth of the run
        task["polish_steps"] = min(task["polish_steps"], max(1, options["max_steps"] // 8))
        train = columns(train)[0].float()
        common: dict[str, Any] = {"n_samples": task.pop("n_samples"), "task_options": task}
        common |= {"val_data": self._mapped(held_out)}
        histories = []
        for k, model in enumerate(models):
            own = None if checkpoint is None else f"{os.fspath(checkpoint)}{f'.{k}' if k else ''}"
            how = TrainingOptions(**options, checkpoint=own)
            histories.append(fit(model.to(device), train, **common, options=how))
        return models, None, histories

    def _mapped(self, held_out: Tensor | None) -> Tensor | None:
        """Held-out rows as the model sees them."""
        return None if held_out is None else self.columns_(held_out)[0].float()

    def _stated(self, seed: int) -> dict[str, Any]:
        """Training options that the user stated."""
        stated = {
            "max_steps": self.max_steps,
            "batch_size": self.batch_size,
            "lr": self.learning_rate,
            "weight_decay": self.weight_decay,
            "seed": seed,
            "progress": self.verbose,
        }
        return {name: value for name, value in stated.items() if value is not None}

    def _log_density(self, X: np.ndarray) -> np.ndarray:
        log_p = self._of_mapped(self.columns_(torch.from_numpy(X))[0])
        return log_p.numpy() + self.columns_.log_jacobian

    @torch.no_grad()
    def _of_mapped(self, z: Tensor) -> Tensor:
        with on_cpu():
            return torch.cat([self.model_.log_prob(part) for part in z.split(16_384)])

    def _chain_bounds(
        self, model: AutoregressiveEBM, z: Tensor, n_samples: int, seed: int
    ) -> Bounds:
        """Bounds of a chain, whose samples are drawn for every factor of every row.

        A large table would take minutes. The distance of both bounds from the log-density by the
        learned ``b_i`` hardly differs between rows, so it is measured on as many rows as are
        affordable, and that log-density itself on all of them.
        """
        places = model.dim * model.n_orderings
        n_samples = min(n_samples, max(MIN_SAMPLES, MAX_FACTOR_SAMPLES // (len(z) * places)))
        n_rows = max(500, MAX_FACTOR_SAMPLES // ((n_samples + N_NODES) * places))
        if len(z) <= n_rows:
            return evaluate(model, z, n_samples=n_samples, seed=seed)
        with seeded(seed):
            chosen = torch.randperm(len(z))[:n_rows]
        part = model.bounds(z[chosen], n_samples=n_samples, seed=seed)
        own = self._of_mapped(z)
        shift = float(own.mean() - own[chosen].mean())
        chosen_rows = part.learned_rms / math.sqrt(n_rows)
        error = math.hypot(float(own.std()) / math.sqrt(len(z)), part.log_norm_se, chosen_rows)
        return dataclasses.replace(part.shifted(shift), lower_se=error, upper_se=error)

    def _rows(self, X: ArrayLike, *, reset: bool) -> np.ndarray:
        refuse_text(X)
        X = validate_data(
            self, X, reset=reset, dtype=np.float64, ensure_all_finite=False, ensure_min_samples=1
        )
        X = np.asarray(X)
        bad = ~np.isfinite(X)
        if bad.any():
            row, column = (int(i) for i in np.argwhere(bad)[0])
            raise DataError(
                f"X contains {int(bad.sum())} NaN or inf value(s), the first in row {row}, column "
                f"{self._name_of(column)!r}; remove those rows or fill the cells in"
            )
        refuse_huge(X, "X")
        return np.require(X, requirements=["C", "W"])  # a tensor shares it

    def _name_of(self, column: int) -> str | int:
        names = getattr(self, "feature_names_in_", None)
        return column if names is None else str(names[column])


def _seed(random_state: Any) -> int:
    return int(check_random_state(random_state).randint(2**31 - 1))


def _score(history: History) -> float:
    """What restarts are chosen by: held-out rows where there are any, else the training's."""
    if history.best_score is not None:
        return history.best_score
    return history.records[-1].get("lower", -math.inf) if history.records else -math.inf


def _energy_of(n: int, d: int, hidden: int | None) -> MLP:
    """The network for ``n`` rows of ``d`` columns, freshly initialised."""
    if hidden is not None:
        return MLP(d, hidden=(hidden,) * 3, saturate=8.0, zero_init=True)
    if n >= 1000:
        return joint_energy(d)
    return MLP(d, hidden=(32 if n < 200 else 64,) * 2, saturate=8.0, zero_init=True)


def _small_joint(x: Tensor) -> Recipe:
    """The joint recipe for tables of less than a thousand rows."""
    n, d = x.shape
    energy = _energy_of(n, d, None)
    proposal = Defensive.fit_to(x, n_components=max(1, min(20, n // 50)))
    options = TrainingOptions(
        batch_size=min(256, max(16, n // 4)),
        max_epochs=10**6,
        max_steps=int(min(900, max(50, 10 * n**0.65))),
        lr=2e-3,
        weight_decay=1e-2,
        ema=0.99,
    )
    model = EBM(energy, base=StudentT.fit_to(x, df=5.0))
    return Recipe(model, proposal, options, n_samples=256 if n < 200 else 512)


def _split(z: Tensor, fraction: float) -> tuple[Tensor, Tensor | None]:
    """Rows to train on and rows to choose the best state by; none are spared of a tiny table."""
    held_out = int(fraction * len(z))
    if held_out < 20:
        return z, None
    order = torch.randperm(len(z))
    return z[order[held_out:]], z[order[:held_out]]
