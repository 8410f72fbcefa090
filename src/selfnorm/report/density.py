"""The report of a density: what was fitted, how good it is, what it shows, what is strange."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from selfnorm.columns import Schema, Table
from selfnorm.plotting import plot_history, plot_log_densities, styled
from selfnorm.report import figures, peers
from selfnorm.report.page import Page
from selfnorm.report.panels import Panel, column_panels, gap_panels
from selfnorm.report.sections import (
    About,
    Comparison,
    Report,
    cells_of,
    fewer_rows,
    own_names,
    show_loading,
    two_errors,
)

N_STRANGE = 10
_FACTORS = 40_000  # one-dimensional factors of rows that are scored: some seconds on one core
_BOUND_FACTORS = 4_000  # the same, for both bounds, which need many samples each
_BLAMED = 0.05  # probability above which a cell is not strange
_MAX_SHOWN = 20  # columns of rows shown in full
Scored = Callable[[Tensor, Tensor], tuple[np.ndarray, np.ndarray]]


@dataclass(kw_only=True)
class DensityReport(Report):
    """The page, of a fitted :class:`~selfnorm.EnergyDensity` and a table.

    Attributes:
        coded: its rows as the schema codes them ``(n, p, 2)``, and what codes leave open.
        scored: gives log-likelihoods and ordinariness (``decision_function``) of coded rows.
        held_out: rows of the table that training held out, where it is the training table.
        scores: log-likelihoods of the rows looked at.
        ordinary: their ordinariness.
        x_drawn: coded rows drawn from the model.
        of_drawn: log-likelihoods of some of them.
        judged: which of the rows looked at are compared.
    """

    coded: tuple[Tensor, Tensor]
    scored: Scored
    held_out: np.ndarray | None
    scores: np.ndarray = field(init=False)
    ordinary: np.ndarray = field(init=False)
    x_drawn: np.ndarray = field(init=False)
    of_drawn: np.ndarray = field(init=False)
    judged: np.ndarray = field(init=False)

    @styled
    def html(self) -> str:
        """The page."""
        self.about = self.about.of_table(self.table)
        distribution, schema = self.estimator.distribution_, self.schema
        cost = distribution.factors_per_row
        held_out = self.held_out = self.held_out if self.train is None else None
        rows = figures.chosen_rows(self.table.n_rows, max(200, _FACTORS // cost), self.seed)
        self.judged = np.ones(len(rows), dtype=bool)
        if held_out is not None and len(held_out):
            # those that no step has seen first, and of the others as many as there is time for
            others = np.setdiff1d(rows, held_out)[: max(0, len(rows) - len(held_out))]
            rows = np.sort(np.concatenate([held_out[: len(rows)], others]))
            self.judged = np.isin(rows, held_out)
        self.looked_at = rows
        self.scores, self.ordinary = self.scored(*(part[rows] for part in self.coded))
        self.comparison = self._compare()
        n_bounds = max(30, _BOUND_FACTORS // cost)
        self.check(rows[self.judged], n_bounds, distribution.bound_samples)
        n_drawn = min(max(len(rows), figures.N_DRAWN), figures.MAX_POINTS)
        drawn = self.estimator.sample(n_drawn, random_state=self.seed)
        self.x_drawn, open_ = schema.encode(drawn)
        coded = (torch.from_numpy(part[:500]) for part in (self.x_drawn, open_))
        self.of_drawn = self.scored(*coded)[0]
        sections = {
            "Verdict": self._verdict,
            "What was fitted": self._fitted,
            "Likelihood against simple models": self._likelihood,
            "Columns": self._columns,
            "Pairs of columns": self._pairs,
            "Strangest rows": self._strangest,
            "Log-likelihoods and training": self._training,
            "How to load the model": lambda: _load(self.page, self.about),
        }
        if len(schema.modelled) == 1:
            del sections["Pairs of columns"]
        return self.written(f"Density of {self.about.source}", sections)

    @property
    def schema(self) -> Schema:
        """What the columns are."""
        schema: Schema = self.estimator.schema_
        return schema

    def _compare(self) -> Comparison:
        """The model and simple models on rows that none of them has seen, where there are any."""
        estimator, parts, held_out = self.estimator, self.schema.parts, self.held_out
        x, open_ = (part.numpy() for part in self.coded)
        fitted_rows: np.ndarray | None = None
        fair = True
        if self.train is not None:
            fitted_rows = self.schema.encode(self.train)[0]
            words = "The simple models are fitted to the training table that was given."
        elif held_out is not None and len(held_out):
            fitted_rows = np.delete(x, held_out, axis=0)
            words = (
                "This is the table that the model was fitted to. The rows compared here are those "
                "that were held out: they chose the best state of training and moved no weight."
            )
        elif held_out is not None:
            fitted_rows, fair = x, False
            words = (
                "This is the table that the model was fitted to, and too small to hold rows out: "
                "all figures flatter this model, and simple ones less. Rows that were not in it "
                "judge fairly."
            )
            if np.isfinite(estimator.judgement_.score):
                words += f" When it was fitted it was judged so: {estimator.judgement_}."
        else:
            words = (
                "The model was fitted to another table; whether it shares rows with this one is "
                "not known here. Independent columns are those of the model's own training rows "
                "where it is a chain; other simple models are fitted to four fifths of this table "
                "and judged on the last, five times over."
            )
        rows, extra = (part[self.looked_at[self.judged]] for part in (x, open_.sum(-1)))
        alone = "independent columns" if len(parts) > 1 else "the quantiles of the column"
        fits: dict[str, Any] = {alone: partial(peers.independent_columns, parts)}
        columns = estimator.distribution_.marginal_columns
        if columns is not None:
            own = peers.marginals(columns)
            fits[alone] = lambda _: own
        if any(part.rest for part in parts):
            fits["a Gaussian of the numbers"] = partial(peers.gaussian, parts)
        comparison = Comparison(self.scores[self.judged], words=words, fair=fair)
        if fitted_rows is None:
            comparison.hedge = fewer_rows(len(self.looked_at), estimator.fitted_to_)
        for name, fit in fits.items():
            if fitted_rows is not None:
                comparison.peers[name] = fit(fitted_rows)(rows) + extra
            elif len(rows) > 1:
                comparison.peers[name] = peers.cross_fitted(fit, rows, self.seed) + extra
        return comparison

    def _verdict(self) -> None:
        self.show_verdict()
        scores = self.comparison.model
        mean, error = float(scores.mean()), two_errors(scores)
        in_training = self.estimator.lower_bound_
        known = self.comparison.fair and math.isfinite(in_training)
        if known and mean + 2 * error < in_training - 0.5:
            self.page.words(
                f"These rows are less likely ({mean:.2f} ± {error:.2f} nats) than those that were "
                f"held out in training ({in_training:.2f}): they may come from elsewhere, or hold "
                "values that were never seen.",
                kind="warning",
            )
        drift = float(self.of_drawn.mean() - mean)
        if drift > 2 * (error + two_errors(self.of_drawn)):
            self.page.words(
                f"Rows drawn from the model are {drift:.2f} nats more likely, on average, than "
                "these rows: it is surer of itself than it should be, as models of few rows are.",
                kind="note",
            )

    def _fitted(self) -> None:
        schema, page = self.schema, self.page
        columns = f"{len(schema.modelled)} modelled of {len(schema.columns)}"
        words = self.estimator.distribution_.words
        self.show_model(words, {"columns": columns}, [self.estimator.history_])
        header = ["column", "kind", "values", "gaps"]
        rows = [
            [str(c.name), c.kind, c.summary, f"{100 * c.gaps:.3g} %" if c.gaps else ""]
            for c in schema.columns
        ]
        if not any(column.gaps for column in schema.columns):
            header, rows = header[:3], [row[:3] for row in rows]
        page.table("What the columns are", header, rows, numbers=(3,))
        if any(column.kind == "cells" for column in schema.columns):
            page.words(
                "Cells: values on a grid of steps, each with a probability of its own.", kind="note"
            )
        for note in schema.notes:
            page.words(note, kind="note")

    def _likelihood(self) -> None:
        apart = []
        if self.estimator.consistency_:
            nats = f"{self.estimator.consistency_['conditionals']:.3g} nats from the whole model"
            apart.append(["some columns given others, in one pass", nats])
        words = "Likelihoods compare only where columns have the same kinds and steps: their "
        self.show_likelihood([f"{words}fingerprint is {self.schema.fingerprint}."], apart)

    @cached_property
    def _rows(self) -> figures.Rows:
        """Rows of the table and of the model as figures have them."""
        return figures.Rows.of(
            self.schema, self.x_drawn, self.coded[0].numpy()[self.looked_at], self.seed
        )

    def _columns(self) -> None:
        rows = self._rows
        self.page.words(
            f"Rows of the table (filled) and {len(rows.of_model):,} rows drawn from the model "
            "(line). The outermost half per cent on either side is out of sight."
        )
        self.page.figures(column_panels(rows.scales, rows.of_model, rows.of_data))
        self.page.figures(gap_panels(rows.scales, rows.gaps), wide=True)

    def _pairs(self) -> None:
        pairs, table = self._rows.pairs()
        several = len(self._rows.scales) > 2
        self.page.words(
            "The pairs that depend most on each other, as many points of the model as of the data; "
            "then the strength of dependence of all pairs (Cramér's V, columns cut into eighths)."
            if several
            else "As many points of the model as of the data."
        )
        self.page.figures(pairs, wide=True)
        if several:
            self.page.figures([table], wide=True)
            self.page.words(f"{table.words}.")

    def _strangest(self) -> None:
        estimator, ordinary, about, n = self.estimator, self.ordinary, self.about, self.table.n_rows
        scores, looked_at, page = self.scores, self.looked_at, self.page
        order = np.argsort(ordinary, kind="stable")[: min(N_STRANGE, len(ordinary))]
        strange = self.table.rows(looked_at[order])
        cells = cells_of(strange, [c.name for c in estimator.schema_.columns])
        modelled = [column.name for column in estimator.schema_.columns if column.modelled]
        explained = Table.of(estimator.explain(strange))
        names = own_names(explained, list(cells)).items()
        tails = {name: explained.cells(own).values for name, own in names if name in modelled}
        share = 100 * float((ordinary < 0).mean())
        of = "" if len(looked_at) == n else f" {len(looked_at):,} of {n:,} rows were looked at."
        rare = estimator.contamination
        whose = "1 % of rows not trained on are"
        if rare != "auto":
            whose = f"{100 * rare:.3g} % of the training rows are"
        page.words(
            "By score, the strangest first. The score is the log-likelihood with gaps and kinds "
            f"of columns made comparable, less a threshold: {share:.3g} % of the rows are below "
            f"0, where {whose} expected.{of} A cell is to blame if few draws would be as unusual, "
            "given the rest of its row."
        )
        listed, marked = [], []
        places = {name: j for j, name in enumerate(cells, 1)}
        for i in range(len(order)):
            p = {name: float(values[i]) for name, values in tails.items() if values[i] < _BLAMED}
            worst = sorted(p, key=p.__getitem__)[:3]
            blame = "; ".join(f"{name} = {cells[name][i]} ({_one_in(p[name])})" for name in worst)
            shown = f"{ordinary[order[i]]:+.2f}", f"{scores[order[i]]:.2f}"
            blame = blame or "no single column: the row as a whole"
            listed.append([about.row(int(looked_at[order[i]])), *shown, blame])
            marked += [(i, places[name]) for name in worst]
        header = [about.row_heading, "score", "log-likelihood", "columns to blame"]
        page.table("The strangest rows", header, listed, numbers=(1, 2))
        if len(cells) <= _MAX_SHOWN:
            full = [[row[0], *(own[i] for own in cells.values())] for i, row in enumerate(listed)]
            header = [about.row_heading, *map(str, cells)]
            page.table("The same rows in full, cells to blame marked", header, full, marked=marked)

    def _training(self) -> None:
        scores, of_drawn, history = self.scores, self.of_drawn, self.estimator.history_
        words = (
            f"Log-likelihoods: rows of the table have median {np.median(scores):.2f}, rows drawn "
            f"from the model {np.median(of_drawn):.2f} nats"
        )
        draw = partial(plot_log_densities, of_drawn, scores)
        panels = [Panel(draw, words, "log-likelihood of rows", size=(4.2, 2.8))]
        if history.records:
            words = f"Bounds of the log-likelihood in training; kept is step {history.best_step:,}"
            panels.append(Panel(partial(plot_history, history), words, size=(4.2, 2.8)))
        self.page.figures(panels, wide=True)
        self.page.words(
            "Rows of the table are as likely as rows drawn from a model that fits. In training the "
            "lower and the upper bound close in on each other; the dotted line is the state kept."
        )


def _one_in(p: float) -> str:
    return f"1 draw in {1 / p:,.0f}" if p >= 1e-6 else "less than 1 draw in a million"


def _load(page: Page, about: About) -> None:
    code = (
        f"table = {about.reading[1]}\n"
        "density.score_samples(table)              # log-likelihood of each row\n"
        "density.explain(table)                    # how ordinary each cell is\n"
        "density.sample(1000, random_state=0)      # synthetic rows\n"
    )
    show_loading(page, about, "density", code, "score --explain -o scored.csv")
