"""The report of a regressor: likelihood, calibration, predictive densities, surprises."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np

from selfnorm.columns import BY_PLACE, TableLike
from selfnorm.errors import shortened
from selfnorm.evaluation import central_coverage
from selfnorm.plotting import literal, plot_history, plot_predictive, plot_reliability, styled
from selfnorm.report import figures, peers
from selfnorm.report.page import Page, in_python
from selfnorm.report.panels import Panel
from selfnorm.report.sections import About, Comparison, Report, cells_of, fewer_rows, show_loading

LEVELS = (0.5, 0.8, 0.9, 0.95)
N_SURPRISES = 10
_MAX_ROWS = 2000
_BOUND_ROWS = 500
_MAX_INPUTS = 12


@dataclass(kw_only=True)
class RegressorReport(Report):
    """The page, of a fitted :class:`~selfnorm.EnergyRegressor` and pairs.

    Attributes:
        y: targets ``(n,)``; of several, ``(n, d)``, only likelihoods and training are shown.
        seen: whether the model was fitted to these rows.
        rows: inputs of the rows looked at.
        labels: their targets.
        pit: values of the distribution function at these, and ``crps`` their scores.
    """

    y: np.ndarray
    seen: bool
    rows: TableLike = field(init=False)
    labels: np.ndarray = field(init=False)
    pit: np.ndarray = field(init=False)
    crps: np.ndarray = field(init=False)

    @styled
    def html(self) -> str:
        """The page."""
        self.about = self.about.of_table(self.table)
        self.looked_at = figures.chosen_rows(self.table.n_rows, _MAX_ROWS, self.seed)
        self.rows, self.labels = self.table.rows(self.looked_at), self.y[self.looked_at]
        one = self.estimator.n_outputs_ == 1
        self.labels = self.labels.ravel() if one else self.labels
        self.comparison = self._compare()
        self.check(self.looked_at, _BOUND_ROWS, 500, self.y)
        calibrated = ""
        if one:
            self.pit, self.crps = self.estimator.pit_and_crps(self.rows, self.labels)
            calibrated = _calibrated(self.pit)
        sections = {
            "Verdict": lambda: self.show_verdict(calibrated),
            "What was fitted": self._fitted,
            "Likelihood against simple models": self._likelihood,
            "Calibration": self._calibration,
            "Predictive densities": self._examples,
            "Rows it did not expect": self._surprises,
            "Training": self._training,
            "How to load the model": lambda: _load(self.page, self.about),
        }
        for heading in () if one else list(sections)[3:6]:
            del sections[heading]
        target, source = self.about.target, self.about.source
        return self.written(f"{target} given the other columns: {source}", sections)

    @cached_property
    def _names(self) -> list[str]:
        """What the inputs are called."""
        names = list(self.about.inputs) or input_names(self.estimator)
        return names or [str(name) for name in self.table.columns]

    def _compare(self) -> Comparison:
        """The model and simple models of the same targets."""
        estimator, train, X, y = self.estimator, self.train, self.rows, self.labels
        seen = self.seen and train is None
        step = float(estimator.label_step_) if estimator.n_outputs_ == 1 else 0.0
        log_prob = estimator.log_mass if step else estimator.log_prob
        words = (
            f"The simple models are fitted to four fifths of these rows and judged on the last, "
            f"{peers.N_FOLDS} times over. The model was fitted to another table; whether it shares "
            "rows with this one is not known here."
        )
        if seen:
            words = (
                "This is the table that the model was fitted to; each of its members held out a "
                "tenth of the rows, another one each. All figures flatter this model, and simple "
                "ones less. Rows that were not in it judge fairly."
            )
        elif train is not None:
            words = "The simple models are fitted to the training table that was given."
        comparison = Comparison(log_prob(X, y), words=words, fair=not seen)
        if train is None and not seen:
            comparison.hedge = fewer_rows(len(y), estimator.fitted_to_)
        if estimator.n_outputs_ > 1:
            return comparison
        inputs = estimator.inputs_
        numbers = partial(np.asarray, dtype=np.float64) if inputs is None else inputs.rows
        rows = np.column_stack([numbers(X), y])
        fits = {
            "linear regression with normal errors": partial(peers.linear_regression, step=step),
            "a Gaussian that ignores the inputs": partial(peers.gaussian_target, step=step),
        }
        pairs = None
        if train is not None:
            pairs = np.column_stack([numbers(train[0]), np.asarray(train[1], float)])
        for name, fit in fits.items():
            if pairs is not None or seen:
                comparison.peers[name] = fit(rows if pairs is None else pairs)(rows)
            elif len(rows) > peers.N_FOLDS:
                comparison.peers[name] = peers.cross_fitted(fit, rows, self.seed)
        plain = estimator.without_energy()
        scores = (plain.log_mass if step else plain.log_prob)(X, y)
        comparison.parts["the same networks without energies"] = scores
        return comparison

    def _fitted(self) -> None:
        estimator, target = self.estimator, f"{self.about.target}, continuous"
        if estimator.label_step_ > 0:
            target = f"{self.about.target}, in steps of {estimator.label_step_:.4g}"
        facts = {
            "target": target if estimator.n_outputs_ == 1 else f"{estimator.n_outputs_} targets",
            "inputs": f"{estimator.n_features_in_}: {shortened(self._names)}",
        }
        members = f"{estimator.n_members} members: mixture density networks, each tilted by an "
        self.show_model(f"{members}energy", facts, estimator.history_)

    def _likelihood(self) -> None:
        own = []
        if self.estimator.n_outputs_ == 1 and self.estimator.label_step_ > 0:
            own = ["The target has steps: all figures are logarithms of the probability of a step."]
        error = f"{self.estimator.log_norm_error_:.4f} nats apart"
        self.show_likelihood(own, [["learned against exact log Z", error]])

    def _calibration(self) -> None:
        estimator, about, pit, y = self.estimator, self.about, self.pit, self.labels
        tails = [(1 - level) / 2 for level in LEVELS]
        ends = estimator.predict_quantiles(self.rows, [*tails, *(1 - t for t in tails)])
        widths = (ends[:, len(LEVELS) :] - ends[:, : len(LEVELS)]).mean(0)
        rows = []
        for level, width in zip(LEVELS, widths, strict=True):
            inside = central_coverage(pit, level)
            error = 2 * math.sqrt(level * (1 - level) / len(pit))
            shown = f"{100 * inside:.1f} ± {100 * error:.1f} %"
            rows.append([f"{100 * level:.0f} %", shown, f"{width:.4g}"])
        self.page.table(
            f"Central intervals, {len(y):,} rows",
            ["interval", "labels inside", f"mean width ({about.target})"],
            rows,
            numbers=(1, 2),
        )
        error = float(np.abs(np.asarray(estimator.predict(self.rows)).ravel() - y).mean())
        self.page.words(
            f"In the units of {about.target}: mean absolute error of the mean {error:.4g}; mean "
            f"CRPS, the same for whole distributions, {self.crps.mean():.4g}."
        )
        words = "Reliability: " + ", ".join(
            f"{100 * np.mean(pit <= q):.0f} % of the labels below the {100 * q:.0f} % quantile"
            for q in (0.1, 0.5, 0.9)
        )
        panel = Panel(partial(plot_reliability, {"model": pit}), words, size=(5.6, 2.7), n_axes=2)
        self.page.figures([panel], wide=True)
        self.page.words(
            "Left: of a calibrated model the dots lie on the diagonal. Right: the histogram is "
            "flat; a bowl is a sign of distributions that are too narrow, a hill of ones that are "
            "too wide."
        )

    def _examples(self) -> None:
        about = self.about
        self.page.words(
            "The whole distribution of the target for some rows, lowest to highest prediction: "
            "shaded the central 90 %, dashed what was observed."
        )
        panels = []
        for row, example in figures.predictive_examples(self.estimator, self.rows, self.labels):
            name = about.row(int(self.looked_at[row]))
            low, high = example["interval"]
            words = (
                f"Predictive density of row {name}: 90 % between {low:.4g} and {high:.4g}, "
                f"highest at {example['grid'][np.argmax(example['density'])]:.4g}, observed "
                f"{example['label']:.4g}"
            )
            title = literal(f"{about.row_heading.split(',')[0]} {name}")
            draw = partial(plot_predictive, **example, name=about.target)
            panels.append(Panel(draw, words, title, size=(3.1, 2.1)))
        self.page.figures(panels)

    def _surprises(self) -> None:
        about, looked_at, n, pit = self.about, self.looked_at, self.table.n_rows, self.pit
        log_p, y = self.comparison.model, self.labels
        order = np.argsort(log_p, kind="stable")[:N_SURPRISES]
        inputs = self.table.rows(looked_at[order])
        ends = self.estimator.predict_quantiles(inputs, [0.05, 0.5, 0.95])
        by_place = self.table.kind in BY_PLACE
        cells = cells_of(inputs, self._names if by_place else list(self.table.columns))
        rows = []
        for i, k in enumerate(order):
            low, middle, high = (f"{v:.4g}" for v in ends[i])
            own = f"{middle} ({low} to {high})", f"{100 * pit[k]:.3g} %", f"{log_p[k]:.2f}"
            shown = [cells[name][i] for name in list(cells)[:_MAX_INPUTS]]
            rows.append([about.row(int(looked_at[k])), f"{y[k]:.4g}", *own, *shown])
        of = "" if len(looked_at) == n else f" {len(looked_at):,} of {n:,} rows were looked at."
        self.page.words(f"The labels that the model held least likely.{of}")
        header = [
            about.row_heading,
            f"{about.target} observed",
            "median (90 % interval)",
            "probability of a lower value",
            "log-likelihood",
            *map(str, list(cells)[:_MAX_INPUTS]),
        ]
        self.page.table("The least likely labels", header, rows, numbers=(1, 2, 3, 4))

    def _training(self) -> None:
        panels = []
        for stage, history in zip(("proposals", "energies"), self.estimator.history_, strict=False):
            if not history.records:
                continue
            words = (
                f"Training of the {stage}: {history.n_steps:,} steps, kept is {history.best_step:,}"
            )
            title = f"{stage}: bounds of the log-likelihood"
            panels.append(Panel(partial(plot_history, history), words, title, size=(4.2, 2.8)))
        self.page.figures(panels, wide=True)
        self.page.words(
            "In standardised units of the target, the mean over members. Each keeps the state "
            "that is best on the rows it held out; the dotted line is where the last of them "
            "found it."
        )


def input_names(regressor: Any) -> list[str]:
    """Names of a fitted regressor's inputs; none where they were an array."""
    own = () if regressor.inputs_ is None else regressor.inputs_.schema.columns
    names = getattr(regressor, "feature_names_in_", [column.name for column in own])
    return [str(name) for name in names]


def _calibrated(pit: np.ndarray) -> str:
    """Whether intervals hold what they should, in a sentence."""
    inside = central_coverage(pit, 0.9)
    error = 2 * math.sqrt(0.09 / len(pit))
    words = f"Its 90 % intervals hold {100 * inside:.1f} % of the labels"
    if abs(inside - 0.9) <= error:
        return f"{words}, within chance of 90 % on {len(pit):,} rows."
    return (
        f"{words}, where {100 * (0.9 - error):.0f} to {100 * min(1, 0.9 + error):.0f} % would be "
        f"chance: they are too {'narrow' if inside < 0.9 else 'wide'}."
    )


def _load(page: Page, about: About) -> None:
    code = (
        f"X = {about.reading[1]}.drop(columns={in_python(about.target)})\n"
        "regressor.predict(X)                             # means\n"
        "regressor.predict_interval(X, 0.9)               # 90 % intervals\n"
        "regressor.predict_quantiles(X, [0.1, 0.5, 0.9])\n"
    )
    show_loading(page, about, "regressor", code, "predict -o predicted.csv")
