"""The report of a regressor: likelihood, calibration, predictive densities, surprises."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from selfnorm.evaluation import Bounds, central_coverage
from selfnorm.plotting import (
    literal,
    plot_history,
    plot_predictive,
    plot_reliability,
    styled,
)
from selfnorm.report import figures, peers
from selfnorm.report.density import (
    About,
    Comparison,
    cells_of,
    fewer_rows,
    show_checks,
    show_verdict,
    subtitle,
)
from selfnorm.report.facts import input_names, shortened
from selfnorm.report.page import Page, in_python, in_shell
from selfnorm.report.panels import Panel, one_by_one

LEVELS = (0.5, 0.8, 0.9, 0.95)
N_SURPRISES = 10
_MAX_ROWS = 2000
_BOUND_ROWS = 500
_MAX_INPUTS = 12


@styled
def regressor_report(
    estimator: Any,
    X: Any,
    y: Any,
    *,
    train: Any = None,
    seen: bool = False,
    unseen: Sequence[str] = (),
    about: About,
    seed: int = 0,
) -> str:
    """The page, of a fitted :class:`~selfnorm.EnergyRegressor` and pairs.

    Args:
        estimator: the model.
        X: inputs, a table of any kind that it takes.
        y: targets ``(n,)``; of several, ``(n, d)``, only likelihoods and training are shown.
        train: ``(X, y)`` that the simple models are fitted to.
        seen: whether the model was fitted to these rows.
        unseen: what is odd about the rows, such as levels that training had not.
        about: names.
        seed: for folds, samples and which rows of a large table are looked at.
    """
    about = about.of_frame(X)
    y = np.asarray(y, dtype=np.float64)
    n = figures.n_rows(X)
    looked_at = figures.chosen_rows(n, _MAX_ROWS, seed)
    rows, labels = figures.rows_of(X, looked_at), y[looked_at]
    one = estimator.n_outputs_ == 1
    labels = labels.ravel() if one else labels
    seen = seen and train is None
    comparison = _compare(estimator, rows, labels, train, seen, seed)
    few = figures.chosen_rows(len(labels), _BOUND_ROWS, seed)
    of_few = estimator.bounds(
        figures.rows_of(rows, few), labels[few], n_samples=500, random_state=seed
    )
    bounds = comparison.bounds(of_few, few)
    page = Page(
        about.title or f"{about.target} given the other columns: {about.source}",
        subtitle(estimator),
    )
    calibrated = ""
    if one:
        pit, crps = estimator.pit_and_crps(rows, labels)
        calibrated = _calibrated(pit)
    page.section("Verdict")
    show_verdict(page, comparison, bounds, calibrated, unseen)
    _fitted(page, estimator, X, n, about)
    _likelihood(page, estimator, comparison, bounds, few)
    if one:
        page.section("Calibration")
        _calibration(page, estimator, rows, labels, pit, crps, about)
        page.section("Predictive densities")
        _examples(page, estimator, rows, labels, looked_at, about)
        page.section("Rows it did not expect")
        _surprises(page, estimator, rows, labels, looked_at, n, comparison.model, pit, about)
    _training(page, estimator)
    _load(page, about)
    return page.html()


def _compare(
    estimator: Any, X: Any, y: np.ndarray, train: Any, seen: bool, seed: int
) -> Comparison:
    """The model and simple models of the same targets."""
    step = float(estimator.label_step_) if estimator.n_outputs_ == 1 else 0.0
    log_prob = estimator.log_mass if step else estimator.log_prob
    words = (
        f"The simple models are fitted to four fifths of these rows and judged on the last, "
        f"{peers.N_FOLDS} times over. The model was fitted to another table; whether it shares "
        "rows with this one is not known here."
    )
    if seen:
        words = (
            "This is the table that the model was fitted to; each of its members held out a tenth "
            "of the rows, another one each. All figures flatter this model, and simple ones less. "
            "Rows that were not in it judge fairly."
        )
    elif train is not None:
        words = "The simple models are fitted to the training table that was given."
    comparison = Comparison(log_prob(X, y), words=words, fair=not seen)
    if train is None and not seen:
        comparison.hedge = fewer_rows(len(y), estimator.fitted_to_)
    if estimator.n_outputs_ > 1:
        return comparison
    rows = np.column_stack([_numbers(estimator, X), y])
    fits = {
        "linear regression with normal errors": partial(peers.linear_regression, step=step),
        "a Gaussian that ignores the inputs": partial(peers.gaussian_target, step=step),
    }
    pairs = None
    if train is not None:
        pairs = np.column_stack([_numbers(estimator, train[0]), np.asarray(train[1], float)])
    for name, fit in fits.items():
        if pairs is not None or seen:
            comparison.peers[name] = fit(rows if pairs is None else pairs)(rows)
        elif len(rows) > peers.N_FOLDS:
            comparison.peers[name] = peers.cross_fitted(fit, rows, seed)
    comparison.parts["the same networks without energies"] = getattr(
        estimator.without_energy(), "log_mass" if step else "log_prob"
    )(X, y)
    return comparison


def _numbers(estimator: Any, X: Any) -> np.ndarray:
    """Inputs as numbers, the way that the model reads them."""
    if estimator.inputs_ is not None:
        numbers: np.ndarray = estimator.inputs_.rows(X)
        return numbers
    return np.asarray(X, dtype=np.float64)


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


def _fitted(page: Page, estimator: Any, X: Any, n: int, about: About) -> None:
    page.section("What was fitted")
    fitted_to = estimator.fitted_to_
    histories = estimator.history_
    steps, seconds = sum(h.n_steps for h in histories), sum(h.seconds for h in histories)
    target = f"{about.target}, continuous"
    if estimator.label_step_ > 0:
        target = f"{about.target}, in steps of {estimator.label_step_:.4g}"
    facts = [
        [
            "model",
            f"{type(estimator).__name__}, {estimator.n_members} members: mixture density "
            "networks, each tilted by an energy",
        ],
        ["target", target if estimator.n_outputs_ == 1 else f"{estimator.n_outputs_} targets"],
        ["inputs", f"{estimator.n_features_in_}: {shortened(_input_names(estimator, X, about))}"],
        ["fitted to", f"{fitted_to['rows']:,} rows" if fitted_to else "rows not recorded"],
        ["reported on", f"{n:,} rows of {about.source}"],
        ["training", f"{steps:,} steps in {seconds:.1f} s"],
    ]
    page.table("The model", ["what", "value"], facts)


def _input_names(estimator: Any, X: Any, about: About) -> list[str]:
    if about.inputs:
        return list(about.inputs)
    names = input_names(estimator)
    if not names and hasattr(X, "columns"):
        names = [str(name) for name in X.columns]
    return names or [f"x{i}" for i in range(estimator.n_features_in_)]


def _likelihood(
    page: Page, estimator: Any, comparison: Comparison, bounds: Bounds, few: np.ndarray
) -> None:
    page.section("Likelihood against simple models")
    comparison.show(page)
    page.words(comparison.words)
    if estimator.n_outputs_ == 1 and estimator.label_step_ > 0:
        page.words(
            "The target has steps: all figures are logarithms of the probability of a step.",
            kind="note",
        )
    apart = ["learned against exact log Z", f"{estimator.log_norm_error_:.4f} nats apart"]
    show_checks(page, comparison, bounds, few, [apart])


def _calibration(
    page: Page,
    estimator: Any,
    X: Any,
    y: np.ndarray,
    pit: np.ndarray,
    crps: np.ndarray,
    about: About,
) -> None:
    tails = [(1 - level) / 2 for level in LEVELS]
    ends = estimator.predict_quantiles(X, [*tails, *(1 - t for t in tails)])
    widths = (ends[:, len(LEVELS) :] - ends[:, : len(LEVELS)]).mean(0)
    rows = []
    for level, width in zip(LEVELS, widths, strict=True):
        inside, error = central_coverage(pit, level), 2 * math.sqrt(level * (1 - level) / len(pit))
        shown = f"{100 * inside:.1f} ± {100 * error:.1f} %"
        rows.append([f"{100 * level:.0f} %", shown, f"{width:.4g}"])
    page.table(
        f"Central intervals, {len(y):,} rows",
        ["interval", "labels inside", f"mean width ({about.target})"],
        rows,
        numbers=(1, 2),
    )
    error = float(np.abs(np.asarray(estimator.predict(X)).ravel() - y).mean())
    page.words(
        f"In the units of {about.target}: mean absolute error of the mean {error:.4g}; mean CRPS, "
        f"the same for whole distributions, {crps.mean():.4g}."
    )
    words = "Reliability: " + ", ".join(
        f"{100 * np.mean(pit <= q):.0f} % of the labels below the {100 * q:.0f} % quantile"
        for q in (0.1, 0.5, 0.9)
    )
    panel = Panel(partial(plot_reliability, {"model": pit}), words, size=(5.6, 2.7), n_axes=2)
    page.figures(one_by_one([panel]), wide=True)
    page.words(
        "Left: of a calibrated model the dots lie on the diagonal. Right: the histogram is flat; a "
        "bowl is a sign of distributions that are too narrow, a hill of ones that are too wide."
    )


def _examples(
    page: Page, estimator: Any, X: Any, y: np.ndarray, looked_at: np.ndarray, about: About
) -> None:
    page.words(
        "The whole distribution of the target for some rows, lowest to highest prediction: "
        "shaded the central 90 %, dashed what was observed."
    )
    panels = []
    for row, example in figures.predictive_examples(estimator, X, y):
        name = about.row(int(looked_at[row]))
        low, high = example["interval"]
        words = (
            f"Predictive density of row {name}: 90 % between {low:.4g} and {high:.4g}, highest at "
            f"{example['grid'][np.argmax(example['density'])]:.4g}, observed {example['label']:.4g}"
        )
        title = literal(f"{about.row_heading.split(',')[0]} {name}")
        draw = partial(plot_predictive, **example, name=about.target)
        panels.append(Panel(draw, words, title, size=(3.1, 2.1)))
    page.figures(one_by_one(panels))


def _surprises(
    page: Page,
    estimator: Any,
    X: Any,
    y: np.ndarray,
    looked_at: np.ndarray,
    n: int,
    log_p: np.ndarray,
    pit: np.ndarray,
    about: About,
) -> None:
    order = np.argsort(log_p, kind="stable")[:N_SURPRISES]
    inputs = figures.rows_of(X, order)
    ends = estimator.predict_quantiles(inputs, [0.05, 0.5, 0.95])
    names = _input_names(estimator, X, about)
    cells = cells_of(inputs, names if not hasattr(X, "columns") else list(X.columns))
    rows = []
    for i, k in enumerate(order):
        low, middle, high = (f"{v:.4g}" for v in ends[i])
        shown = [cells[name][i] for name in list(cells)[:_MAX_INPUTS]]
        rows.append(
            [
                about.row(int(looked_at[k])),
                f"{y[k]:.4g}",
                f"{middle} ({low} to {high})",
                f"{100 * pit[k]:.3g} %",
                f"{log_p[k]:.2f}",
                *shown,
            ]
        )
    of = "" if len(looked_at) == n else f" {len(looked_at):,} of {n:,} rows were looked at."
    page.words(f"The labels that the model held least likely.{of}")
    header = [
        about.row_heading,
        f"{about.target} observed",
        "median (90 % interval)",
        "probability of a lower value",
        "log-likelihood",
        *map(str, list(cells)[:_MAX_INPUTS]),
    ]
    page.table("The least likely labels", header, rows, numbers=(1, 2, 3, 4))


def _training(page: Page, estimator: Any) -> None:
    page.section("Training")
    panels = []
    for stage, history in zip(("proposals", "energies"), estimator.history_, strict=False):
        if not history.records:
            continue
        words = f"Training of the {stage}: {history.n_steps:,} steps, kept is {history.best_step:,}"
        title = f"{stage}: bounds of the log-likelihood"
        panels.append(Panel(partial(plot_history, history), words, title, size=(4.2, 2.8)))
    page.figures(one_by_one(panels), wide=True)
    page.words(
        "In standardised units of the target, the mean over members. Each keeps the state that is "
        "best on the rows it held out; the dotted line is where the last of them found it."
    )


def _load(page: Page, about: About) -> None:
    page.section("How to load the model")
    folder = about.folder or "model"
    saved = "" if about.folder else f'regressor.save("{folder}")  # where it was fitted\n\n'
    imported, table = about.reading
    page.code(
        f"{saved}{imported}\nimport selfnorm\n\n"
        f"regressor = selfnorm.load({in_python(folder)})\n"
        f"X = {table}.drop(columns={in_python(about.target)})\n"
        "regressor.predict(X)                             # means\n"
        "regressor.predict_interval(X, 0.9)               # 90 % intervals\n"
        "regressor.predict_quantiles(X, [0.1, 0.5, 0.9])\n",
        "Python code",
    )
    command = f"selfnorm predict {in_shell(folder)} {in_shell(about.file)}"
    page.code(f"{command} -o predicted.csv\n", "Commands")
