"""The report of a density: what was fitted, how good it is, what it shows, what is strange."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from selfnorm.columns import Schema
from selfnorm.evaluation import Bounds
from selfnorm.plotting import (
    Scale,
    plot_history,
    plot_log_densities,
    styled,
)
from selfnorm.report import figures, peers
from selfnorm.report.page import Page, in_python, in_shell
from selfnorm.report.panels import (
    Panel,
    column_panels,
    dependence_panel,
    gap_panels,
    one_by_one,
    pair_panels,
)

N_STRANGE = 10
_FACTORS = 40_000  # one-dimensional factors of rows that are scored: some seconds on one core
_BOUND_FACTORS = 4_000  # the same, for both bounds, which need many samples each
_BLAMED = 0.05  # probability above which a cell is not strange
_MAX_SHOWN = 20  # columns of rows shown in full
Scored = Callable[[Tensor, Tensor], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class About:
    """What a reader should know of where model and rows come from.

    Attributes:
        source: name of the table.
        folder: of the model, where it was saved.
        title: of the report; ``None`` makes one.
        lines: names of the rows (lines of a file); their numbers, from 0, by default.
        target: name of a regressor's target, and ``inputs`` those of its inputs.
        row_word: what ``lines`` are.
        read: Python that reads the table: an import, and an expression.
    """

    source: str = "the table"
    folder: str | None = None
    title: str | None = None
    lines: Sequence[Any] | np.ndarray | None = None
    target: str = "y"
    inputs: tuple[str, ...] = ()
    row_word: str = "line"
    read: tuple[str, str] | None = None

    def of_frame(self, X: Any) -> About:
        """The same; rows of a pandas table that have names of their own are called by them."""
        if self.lines is not None or not hasattr(X, "iloc"):
            return self
        names = X.index.tolist()
        own = names != list(range(len(names)))
        return replace(self, lines=names, row_word="row") if own else self

    def row(self, i: int) -> str:
        """What to call a row."""
        return f"{i}" if self.lines is None else f"{self.lines[i]}"

    @property
    def row_heading(self) -> str:
        """Above the names of rows."""
        return "row, from 0" if self.lines is None else self.row_word

    @property
    def file(self) -> str:
        """A file to read the table from, in examples."""
        return self.source if "." in self.source else "table.csv"

    @property
    def reading(self) -> tuple[str, str]:
        """``read``, of pandas by default."""
        return self.read or ("import pandas as pd", f"pd.read_csv({in_python(self.file)})")


@dataclass
class Comparison:
    """Log-likelihoods of the same rows under a model and under simple models.

    Attributes:
        model: ``(n,)``.
        peers: by name, ``(n,)`` each.
        parts: the same of what the model is made of, which are no peers.
        words: what the rows are, in a sentence.
        fair: whether none has seen the rows.
        hedge: what to know before a lead of the model is believed.
    """

    model: np.ndarray
    peers: dict[str, np.ndarray] = field(default_factory=dict)
    parts: dict[str, np.ndarray] = field(default_factory=dict)
    words: str = ""
    fair: bool = True
    hedge: str = ""

    def difference(self, name: str) -> tuple[float, float]:
        """Mean of model less peer, and its standard error."""
        ahead = self.model - (self.peers | self.parts)[name]
        return float(ahead.mean()), float(ahead.std()) / math.sqrt(max(len(ahead) - 1, 1))

    def bounds(self, of_few: Bounds, few: np.ndarray) -> Bounds:
        """Bounds of all rows, by those ``of_few`` for a few of them."""
        return of_few.shifted(float(self.model.mean() - self.model[few].mean()))

    @property
    def best(self) -> str | None:
        """The peer that comes closest."""
        return min(self.peers, key=lambda name: self.difference(name)[0], default=None)

    def verdict(self) -> str:
        """Model against the best peer, in a sentence."""
        name = self.best
        if name is None:
            return f"The mean log-likelihood is {self.model.mean():.2f} nats per row."
        gain, error = self.difference(name)
        rows = "these rows" if self.fair else "the rows it was fitted to"
        if gain > 2 * error and gain > 0:
            times = f", {math.exp(gain):.3g} times the likelihood" if gain < 14 else ""
            return (
                f"The model describes {rows} better than {name}: by {gain:.2f} ± {2 * error:.2f} "
                f"nats per row{times}.{self.hedge}"
            )
        if gain < -2 * error:
            return (
                f"{name[0].upper()}{name[1:]} describe{'s' if name[-1] != 's' else ''} {rows} "
                f"better than the model, by {-gain:.2f} ± {2 * error:.2f} nats per row: more rows, "
                "a longer fit or the simpler model are the remedies."
            )
        return (
            f"On {rows} the model and {name} cannot be told apart ({gain:+.2f} ± {2 * error:.2f} "
            "nats per row): the simpler one does as well."
        )

    def show(self, page: Page, what: str = "nats per row") -> None:
        """A table of all of them."""
        rows = [["this model", f"{self.model.mean():.3f} ± {_error(self.model):.3f}", ""]]
        for name, scores in sorted(
            (self.peers | self.parts).items(), key=lambda item: -item[1].mean()
        ):
            gain, error = self.difference(name)
            shown = f"{scores.mean():.3f} ± {_error(scores):.3f}"
            rows.append([name, shown, f"{gain:+.3f} ± {2 * error:.3f}"])
        header = ["model", f"mean log-likelihood, {what}", "model ahead by"]
        page.table(
            f"{len(self.model):,} rows; ± two standard errors; higher is better",
            header,
            rows,
            numbers=(1, 2),
        )


@styled
def density_report(
    estimator: Any,
    X: Any,
    coded: tuple[Tensor, Tensor],
    scored: Scored,
    *,
    train: Any = None,
    held_out: np.ndarray | None = None,
    unseen: Sequence[str] = (),
    about: About,
    seed: int = 0,
) -> str:
    """The page, of a fitted :class:`~selfnorm.EnergyDensity` and a table.

    Args:
        estimator: the model.
        X: a table of any kind.
        coded: its rows as the schema codes them ``(n, p, 2)``, and what codes leave open.
        scored: gives log-likelihoods and ordinariness (``decision_function``) of coded rows.
        train: the table that the simple models are fitted to.
        held_out: rows of ``X`` that training held out, where it is the training table.
        unseen: what is odd about the rows, such as levels that training had not.
        about: names.
        seed: for samples, folds and which rows of a large table are looked at.
    """
    about = about.of_frame(X)
    schema: Schema = estimator.schema_
    n = figures.n_rows(X)
    distribution = estimator.distribution_
    cost = distribution.factors_per_row
    looked_at = figures.chosen_rows(n, max(200, _FACTORS // cost), seed)
    held_out = held_out if train is None else None
    if held_out is not None and len(held_out):
        # those that no step has seen first, and of the others as many as there is time for
        others = np.setdiff1d(looked_at, held_out)[: max(0, len(looked_at) - len(held_out))]
        looked_at = np.sort(np.concatenate([held_out[: len(looked_at)], others]))
    rows = figures.rows_of(X, looked_at)
    x, open_ = (part[looked_at] for part in coded)
    scores, ordinary = scored(x, open_)
    comparison = _compare(estimator, coded, looked_at, scores, train, held_out, seed)
    judged = looked_at
    if held_out is not None and len(held_out):
        judged = looked_at[np.isin(looked_at, held_out)]
    few = figures.chosen_rows(len(judged), max(30, _BOUND_FACTORS // cost), seed)
    of_few = estimator.bounds(
        figures.rows_of(X, judged[few]), n_samples=distribution.bound_samples, random_state=seed
    )
    bounds = comparison.bounds(of_few, few)
    n_drawn = min(max(len(looked_at), figures.N_DRAWN), figures.MAX_POINTS)
    drawn = estimator.sample(n_drawn, random_state=seed)
    x_drawn, open_drawn = map(torch.from_numpy, schema.encode(drawn))
    of_drawn = scored(x_drawn[:500], open_drawn[:500])[0]

    page = Page(about.title or f"Density of {about.source}", subtitle(estimator))
    page.section("Verdict")
    _verdict(page, estimator, comparison, bounds, of_drawn, unseen)
    page.section("What was fitted")
    _fitted(page, estimator, schema, n, about)
    page.section("Likelihood against simple models")
    _likelihood(page, estimator, comparison, bounds, few)
    of_data = figures.coordinates(schema, x.numpy())
    shown = figures.chosen_rows(len(of_data), figures.MAX_POINTS, seed)
    of_model = figures.coordinates(schema, x_drawn.numpy())
    scales = figures.scales_of(schema)
    page.section("Columns")
    _columns(page, scales, of_data[shown], of_model, figures.gap_shares(schema, x.numpy()))
    if len(scales) > 1:
        page.section("Pairs of columns")
        _pairs(page, scales, of_data[shown], of_model)
    page.section("Strangest rows")
    _strangest(page, estimator, rows, looked_at, n, scores, ordinary, about)
    page.section("Log-likelihoods and training")
    _training(page, estimator, scores, of_drawn)
    page.section("How to load the model")
    _load(page, about)
    return page.html()


def _error(values: np.ndarray) -> float:
    return 2 * float(values.std()) / math.sqrt(max(len(values) - 1, 1))


def subtitle(estimator: Any) -> str:
    """What kind of model the page is about."""
    from selfnorm.saving import __version__

    return (
        f"{type(estimator).__name__} of selfnorm {__version__}: a normalised energy-based model, "
        "whose log-likelihoods can be compared with those of any other model of the same rows."
    )


def _compare(
    estimator: Any,
    coded: tuple[Tensor, Tensor],
    looked_at: np.ndarray,
    scores: np.ndarray,
    train: Any,
    held_out: np.ndarray | None,
    seed: int,
) -> Comparison:
    """The model and simple models on rows that none of them has seen, where there are any."""
    schema: Schema = estimator.schema_
    parts = schema.parts
    x, open_ = (part.numpy() for part in coded)
    judged = np.arange(len(looked_at))
    fitted_rows: np.ndarray | None = None
    fair = True
    if train is not None:
        fitted_rows = schema.encode(train)[0]
        words = "The simple models are fitted to the training table that was given."
    elif held_out is not None and len(held_out):
        judged = np.flatnonzero(np.isin(looked_at, held_out))
        fitted_rows = np.delete(x, held_out, axis=0)
        words = (
            "This is the table that the model was fitted to. The rows compared here are those that "
            "were held out: they chose the best state of training and moved no weight."
        )
    elif held_out is not None:
        fitted_rows, fair = x, False
        words = (
            "This is the table that the model was fitted to, and too small to hold rows out: all "
            "figures flatter this model, and simple ones less. Rows that were not in it judge "
            "fairly."
        )
        if np.isfinite(estimator.judgement_.score):
            words += f" When it was fitted it was judged so: {estimator.judgement_}."
    else:
        words = (
            "The model was fitted to another table; whether it shares rows with this one is not "
            "known here. Independent columns are those of the model's own training rows where it "
            "is a chain; other simple models are fitted to four fifths of this table and judged on "
            "the last, five times over."
        )
    rows = x[looked_at[judged]]
    extra = open_[looked_at[judged]].sum(-1)
    alone = "independent columns" if len(parts) > 1 else "the quantiles of the column"
    fits: dict[str, Any] = {alone: partial(peers.independent_columns, parts)}
    columns = estimator.distribution_.marginal_columns
    if columns is not None:
        own = peers.marginals(columns)
        fits[alone] = lambda _: own
    if any(part.rest for part in parts):
        fits["a Gaussian of the numbers"] = partial(peers.gaussian, parts)
    comparison = Comparison(scores[judged], words=words, fair=fair)
    if fitted_rows is None:
        comparison.hedge = fewer_rows(len(looked_at), estimator.fitted_to_)
    for name, fit in fits.items():
        if fitted_rows is None:
            log_p = peers.cross_fitted(fit, rows, seed) if len(rows) > 1 else None
        else:
            log_p = fit(fitted_rows)(rows)
        if log_p is not None:
            comparison.peers[name] = log_p + extra
    return comparison


def show_verdict(
    page: Page,
    comparison: Comparison,
    bounds: Bounds,
    calibrated: str = "",
    unseen: Sequence[str] = (),
) -> None:
    """Model against peers, whether its normaliser holds, and what is wrong."""
    trusted = "Its normaliser is exact."
    if not bounds.reliable:
        trusted = "The check of its normaliser failed, so the figures are not to be trusted."
    elif math.isfinite(bounds.pareto_k):
        trusted = (
            f"Its normaliser was checked and holds: both bounds of the log-likelihood are within "
            f"{max(bounds.gap, 0.0):.2g} nats."
        )
    sentences = [comparison.verdict(), *([calibrated] if calibrated else []), trusted]
    page.words(" ".join(sentences), kind="verdict" if bounds.reliable else "warning")
    for words in (*bounds.reasons, *unseen):
        page.words(words, kind="warning")
    if not comparison.fair:
        page.words(comparison.words, kind="warning")


def fewer_rows(n: int, fitted_to: dict[str, Any]) -> str:
    """What to say where simple models learn from ``n`` rows, the model from more."""
    if n >= fitted_to.get("rows", math.inf):
        return ""
    return (
        " The simple models learned from fewer rows than it did: give the training table (train=, "
        "--train) to compare them alike."
    )


def show_checks(
    page: Page, comparison: Comparison, bounds: Bounds, few: np.ndarray, more: Sequence[list[str]]
) -> None:
    """What was found when the normaliser was checked at a few of the rows compared."""
    rows = [
        ["lower and upper bound", f"{bounds.lower:.4f} and {bounds.upper:.4f} nats per row"],
        ["samples that count (ESS)", f"{100 * bounds.ess:.1f} %"],
        ["weight of a few of them (Pareto k)", f"{bounds.pareto_k:.2f}; good below 0.7"],
    ]
    if not math.isfinite(bounds.pareto_k):
        rows = [["normaliser", "exact: all columns are finite"], rows[0]]
    verdict = ["verdict", "reliable" if bounds.reliable else "not reliable"]
    checked = f"checked at {len(few):,} of {len(comparison.model):,} rows"
    caption = f"Can the number be trusted? ({checked})"
    page.table(caption, ["check", "found"], [*rows, *more, verdict])


def _verdict(
    page: Page,
    estimator: Any,
    comparison: Comparison,
    bounds: Bounds,
    of_drawn: np.ndarray,
    unseen: Sequence[str],
) -> None:
    show_verdict(page, comparison, bounds, unseen=unseen)
    mean, error = float(comparison.model.mean()), _error(comparison.model)
    in_training = estimator.lower_bound_
    if comparison.fair and math.isfinite(in_training) and mean + 2 * error < in_training - 0.5:
        page.words(
            f"These rows are less likely ({mean:.2f} ± {error:.2f} nats) than those that were "
            f"held out in training ({in_training:.2f}): they may come from elsewhere, or hold "
            "values that were never seen.",
            kind="warning",
        )
    drift = float(of_drawn.mean() - comparison.model.mean())
    if drift > 2 * (error + _error(of_drawn)):
        page.words(
            f"Rows drawn from the model are {drift:.2f} nats more likely, on average, than these "
            "rows: it is surer of itself than it should be, as models of few rows are.",
            kind="note",
        )


def _fitted(page: Page, estimator: Any, schema: Schema, n: int, about: About) -> None:
    history = estimator.history_
    fitted_to = estimator.fitted_to_
    facts = [
        ["model", f"{type(estimator).__name__}, {estimator.distribution_.words}"],
        ["fitted to", f"{fitted_to['rows']:,} rows" if fitted_to else "rows not recorded"],
        ["reported on", f"{n:,} rows of {about.source}"],
        ["columns", f"{len(schema.modelled)} modelled of {len(schema.columns)}"],
        ["training", f"{history.n_steps:,} steps in {history.seconds:.1f} s"],
    ]
    if history.stopped == "interrupted":
        facts.append(["interrupted", "the best state so far was kept"])
    page.table("The model", ["what", "value"], facts)
    header, rows = (
        ["column", "kind", "values"],
        [[str(c.name), c.kind, c.summary] for c in schema.columns],
    )
    if any(column.gaps for column in schema.columns):
        header.append("gaps")
        rows = [
            [*r, f"{100 * c.gaps:.3g} %" if c.gaps else ""]
            for r, c in zip(rows, schema.columns, strict=True)
        ]
    page.table("What the columns are", header, rows, numbers=(3,))
    if any(column.kind == "cells" for column in schema.columns):
        page.words(
            "Cells: values on a grid of steps, each with a probability of its own.", kind="note"
        )
    for note in schema.notes:
        page.words(note, kind="note")


def _likelihood(
    page: Page, estimator: Any, comparison: Comparison, bounds: Bounds, few: np.ndarray
) -> None:
    schema = estimator.schema_
    comparison.show(page)
    page.words(comparison.words)
    apart = []
    if estimator.consistency_:
        nats = estimator.consistency_["conditionals"]
        apart.append(
            ["some columns given others (impute, given=)", f"{nats:.3g} nats from the whole model"]
        )
    show_checks(page, comparison, bounds, few, apart)
    page.words(
        "Likelihoods compare only where columns have the same kinds and steps: their fingerprint "
        f"is {schema.fingerprint}.",
        kind="note",
    )


def _columns(
    page: Page, scales: Sequence[Scale], of_data: np.ndarray, of_model: np.ndarray, gaps: np.ndarray
) -> None:
    page.words(
        f"Rows of the table (filled) and {len(of_model):,} rows drawn from the model (line). The "
        "outermost half per cent on either side is out of sight."
    )
    page.figures(one_by_one(column_panels(scales, of_model, of_data)))
    page.figures(one_by_one(gap_panels(scales, gaps)), wide=True)


def _pairs(page: Page, scales: Sequence[Scale], of_data: np.ndarray, of_model: np.ndarray) -> None:
    of_model = of_model[: len(of_data)]  # chance makes few rows depend more
    strength = figures.dependence(scales, of_data, of_model)
    page.words(
        "The pairs that depend most on each other, as many points of the model as of the data; "
        "then the strength of dependence of all pairs (Cramér's V, columns cut into eighths)."
        if len(scales) > 2
        else "As many points of the model as of the data."
    )
    page.figures(one_by_one(pair_panels(scales, of_model, of_data, strength)), wide=True)
    if len(scales) > 2:
        panel = dependence_panel(scales, strength)
        page.figures(one_by_one([panel]), wide=True)
        page.words(f"{panel.words}.")


def _strangest(
    page: Page,
    estimator: Any,
    rows: Any,
    looked_at: np.ndarray,
    n: int,
    scores: np.ndarray,
    ordinary: np.ndarray,
    about: About,
) -> None:
    order = np.argsort(ordinary, kind="stable")[: min(N_STRANGE, len(ordinary))]
    strange = figures.rows_of(rows, order)
    cells = cells_of(strange, [c.name for c in estimator.schema_.columns])
    modelled = [column.name for column in estimator.schema_.columns if column.modelled]
    tails = _by_name(estimator.explain(strange), list(cells))
    tails = {name: values for name, values in tails.items() if name in modelled}
    share = 100 * float((ordinary < 0).mean())
    of = "" if len(looked_at) == n else f" {len(looked_at):,} of {n:,} rows were looked at."
    rare = estimator.contamination
    whose = "1 % of rows not trained on are"
    if rare != "auto":
        whose = f"{100 * rare:.3g} % of the training rows are"
    page.words(
        f"By score, the strangest first. The score is the log-likelihood with gaps and kinds of "
        f"columns made comparable, less a threshold: {share:.3g} % of the rows are below 0, where "
        f"{whose} expected.{of} A cell is to blame if few draws would be as unusual, given the "
        "rest of its row."
    )
    listed, marked = [], []
    names = list(cells)
    for i in range(len(order)):
        p = {name: float(values[i]) for name, values in tails.items() if values[i] < _BLAMED}
        worst = sorted(p, key=p.__getitem__)[:3]
        blame = "; ".join(f"{name} = {cells[name][i]} ({_one_in(p[name])})" for name in worst)
        listed.append(
            [
                about.row(int(looked_at[order[i]])),
                f"{ordinary[order[i]]:+.2f}",
                f"{scores[order[i]]:.2f}",
                blame or "no single column: the row as a whole",
            ]
        )
        marked += [(i, 1 + names.index(name)) for name in worst if name in names]
    header = [about.row_heading, "score", "log-likelihood", "columns to blame"]
    page.table("The strangest rows", header, listed, numbers=(1, 2))
    if len(names) <= _MAX_SHOWN:
        full = [[row[0], *(cells[name][i] for name in names)] for i, row in enumerate(listed)]
        header = [about.row_heading, *map(str, names)]
        page.table("The same rows in full, cells to blame marked", header, full, marked=marked)


def cells_of(frame: Any, names: Sequence[Any]) -> dict[Any, list[str]]:
    """The cells of a few rows as text."""
    return {name: [_cell(v) for v in values] for name, values in _by_name(frame, names).items()}


def _by_name(frame: Any, names: Sequence[Any]) -> dict[Any, list[Any]]:
    """The columns of a few rows by the schema's names; those of arrays by position."""
    if isinstance(frame, np.ndarray):
        columns = dict(zip(names, frame.T, strict=True))
    elif isinstance(frame, list):
        columns = dict(zip(names, np.asarray(frame, dtype=object).T, strict=True))
    else:
        there = frame if isinstance(frame, dict) else getattr(frame, "column_names", frame.columns)
        columns = {name: frame[name] for name in names if name in there}
    return {name: _values(column) for name, column in columns.items()}


def _values(column: Any) -> list[Any]:
    if hasattr(column, "to_pylist"):
        return list(column.to_pylist())
    return list(column)


def _cell(value: Any) -> str:
    if value is None or value != value:  # NaN and NaT
        return "–"
    if isinstance(value, float | np.floating):
        return f"{float(value):.6g}"
    text = str(value)
    if len(text) > 9 and re.fullmatch(r"[-+]?\d*\.\d+(e[-+]?\d+)?", text.strip()):
        return f"{float(text):.6g}"
    return text if len(text) <= 40 else f"{text[:38]}…"


def _one_in(p: float) -> str:
    return f"1 draw in {1 / p:,.0f}" if p >= 1e-6 else "less than 1 draw in a million"


def _training(page: Page, estimator: Any, scores: np.ndarray, of_drawn: np.ndarray) -> None:
    words = (
        f"Log-likelihoods: rows of the table have median {np.median(scores):.2f}, rows drawn from "
        f"the model {np.median(of_drawn):.2f} nats"
    )
    draw = partial(plot_log_densities, of_drawn, scores)
    panels = [Panel(draw, words, "log-likelihood of rows", size=(4.2, 2.8))]
    history = estimator.history_
    if history.records:
        words = f"Bounds of the log-likelihood in training; kept is step {history.best_step:,}"
        panels.append(Panel(partial(plot_history, history), words, size=(4.2, 2.8)))
    page.figures(one_by_one(panels), wide=True)
    page.words(
        "Rows of the table are as likely as rows drawn from a model that fits. In training the "
        "lower and the upper bound close in on each other; the dotted line is the state kept."
    )


def _load(page: Page, about: About) -> None:
    folder = about.folder or "model"
    saved = "" if about.folder else f'density.save("{folder}")  # where it was fitted\n\n'
    command = f"selfnorm score {in_shell(folder)} {in_shell(about.file)}"
    imported, table = about.reading
    page.code(
        f"{saved}{imported}\nimport selfnorm\n\n"
        f"density = selfnorm.load({in_python(folder)})\ntable = {table}\n"
        "density.score_samples(table)              # log-likelihood of each row\n"
        "density.explain(table)                    # how ordinary each cell is\n"
        "density.sample(1000, random_state=0)      # synthetic rows\n",
        "Python code",
    )
    page.code(f"{command} --explain -o scored.csv\n", "Commands")
