"""What reports of all models share: names for the reader, likelihoods compared, sections."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from selfnorm.columns import BY_PLACE, Table, TableLike
from selfnorm.evaluation import Bounds
from selfnorm.report.figures import chosen_rows
from selfnorm.report.page import Page, in_python, in_shell


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

    def of_table(self, table: Table) -> About:
        """The same; rows of a pandas table that have names of their own are called by them."""
        if self.lines is not None or table.kind != "pandas":
            return self
        names = table.frame.index.tolist()
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

    def verdict(self) -> str:
        """Model against the peer that comes closest, in a sentence."""
        if not self.peers:
            return f"The mean log-likelihood is {self.model.mean():.2f} nats per row."
        name = min(self.peers, key=lambda name: self.difference(name)[0])
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

    def show(self, page: Page) -> None:
        """A table of all of them."""
        rows = [["this model", f"{self.model.mean():.3f} ± {two_errors(self.model):.3f}", ""]]
        others = self.peers | self.parts
        for name, scores in sorted(others.items(), key=lambda item: -item[1].mean()):
            gain, error = self.difference(name)
            shown = f"{scores.mean():.3f} ± {two_errors(scores):.3f}"
            rows.append([name, shown, f"{gain:+.3f} ± {2 * error:.3f}"])
        header = ["model", "mean log-likelihood, nats per row", "model ahead by"]
        caption = f"{len(self.model):,} rows; ± two standard errors; higher is better"
        page.table(caption, header, rows, numbers=(1, 2))


@dataclass(kw_only=True)
class Report:
    """A report on a fitted model: what is the same whatever the model is.

    Attributes:
        estimator: the model.
        table: rows, and what they are called.
        about: names for the reader.
        train: the table that the simple models are fitted to; ``None``: the rows, fold by fold.
        unseen: what is odd about the rows, such as levels that training had not.
        seed: for samples, folds and which rows of a large table are looked at.
        page: what is written.
        looked_at: the rows that are looked at.
        comparison: likelihoods of those that judge.
        few: which of these are checked.
        bounds: of those that judge, by the few.
    """

    estimator: Any
    table: Table
    about: About
    train: Any = None
    unseen: Sequence[str] = ()
    seed: int = 0
    page: Page = field(init=False)
    looked_at: np.ndarray = field(init=False)
    comparison: Comparison = field(init=False)
    few: np.ndarray = field(init=False)
    bounds: Bounds = field(init=False)

    def written(self, title: str, sections: Mapping[str, Callable[[], None]]) -> str:
        """The page, of sections by their headings."""
        from selfnorm.saving import __version__

        self.page = Page(
            self.about.title or title,
            f"{type(self.estimator).__name__} of selfnorm {__version__}: a normalised energy-based "
            "model, whose log-likelihoods can be compared with those of any other model of the "
            "same rows.",
        )
        for heading, write in sections.items():
            self.page.section(heading)
            write()
        return self.page.html()

    def check(
        self, rows: np.ndarray, most: int, n_samples: int, y: np.ndarray | None = None
    ) -> None:
        """Compute the bounds of the rows that judge, by those of ``most`` of them."""
        self.few = chosen_rows(len(rows), most, self.seed)
        own = rows[self.few]
        of_few = self.estimator.bounds(
            self.table.rows(own),
            *([] if y is None else [y[own]]),
            n_samples=n_samples,
            random_state=self.seed,
        )
        scores = self.comparison.model
        self.bounds = of_few.shifted(float(scores.mean() - scores[self.few].mean()))

    def show_verdict(self, calibrated: str = "") -> None:
        """Model against peers, whether its normaliser holds, and what is wrong."""
        bounds, comparison = self.bounds, self.comparison
        trusted = "Its normaliser is exact."
        if not bounds.reliable:
            trusted = "The check of its normaliser failed, so the figures are not to be trusted."
        elif math.isfinite(bounds.pareto_k):
            trusted = (
                f"Its normaliser was checked and holds: both bounds of the log-likelihood are "
                f"within {max(bounds.gap, 0.0):.2g} nats."
            )
        sentences = [comparison.verdict(), *([calibrated] if calibrated else []), trusted]
        self.page.words(" ".join(sentences), kind="verdict" if bounds.reliable else "warning")
        for words in (*bounds.reasons, *self.unseen):
            self.page.words(words, kind="warning")
        if not comparison.fair:
            self.page.words(comparison.words, kind="warning")

    def show_model(self, words: str, more: Mapping[str, str], histories: Sequence[Any]) -> None:
        """What was fitted, to what, for how long."""
        fitted_to = self.estimator.fitted_to_
        steps, seconds = sum(h.n_steps for h in histories), sum(h.seconds for h in histories)
        facts = {
            "model": f"{type(self.estimator).__name__}, {words}",
            **more,
            "fitted to": f"{fitted_to['rows']:,} rows" if fitted_to else "rows not recorded",
            "reported on": f"{self.table.n_rows:,} rows of {self.about.source}",
            "training": f"{steps:,} steps in {seconds:.1f} s",
        }
        if any(history.stopped == "interrupted" for history in histories):
            facts["interrupted"] = "the best state so far was kept"
        self.page.table("The model", ["what", "value"], [[*fact] for fact in facts.items()])

    def show_likelihood(self, own: Sequence[str], more: Sequence[list[str]]) -> None:
        """Likelihoods beside those of the peers, whether they hold, and what is ``own`` to them.

        The normaliser was checked at a few of the rows compared, and by ``more`` checks.
        """
        self.comparison.show(self.page)
        self.page.words(self.comparison.words)
        bounds = self.bounds
        rows = [
            ["lower and upper bound", f"{bounds.lower:.4f} and {bounds.upper:.4f} nats per row"],
            ["samples that count (ESS)", f"{100 * bounds.ess:.1f} %"],
            ["weight of a few of them (Pareto k)", f"{bounds.pareto_k:.2f}; good below 0.7"],
        ]
        if not math.isfinite(bounds.pareto_k):
            rows = [["normaliser", "exact: all columns are finite"], rows[0]]
        verdict = ["verdict", "reliable" if bounds.reliable else "not reliable"]
        checked = f"checked at {len(self.few):,} of {len(self.comparison.model):,} rows"
        caption = f"Can the number be trusted? ({checked})"
        self.page.table(caption, ["check", "found"], [*rows, *more, verdict])
        for words in own:
            self.page.words(words, kind="note")


def fewer_rows(n: int, fitted_to: dict[str, Any]) -> str:
    """What to say where simple models learn from ``n`` rows, the model from more."""
    if n >= fitted_to.get("rows", math.inf):
        return ""
    return (
        " The simple models learned from fewer rows than it did: give the training table (train=, "
        "--train) to compare them alike."
    )


def own_names(table: Table, names: Sequence[Hashable]) -> dict[Hashable, Hashable]:
    """What a table calls those of the named columns that it has; an array has all, in order."""
    if table.kind in BY_PLACE:
        return dict(zip(names, table.columns, strict=True))
    return {name: name for name in names if name in table.columns}


def cells_of(frame: TableLike, names: Sequence[Hashable]) -> dict[Hashable, list[str]]:
    """The cells of a few rows as text, by the names of columns."""
    table = Table.of(frame)
    columns = {name: table.columns[own] for name, own in own_names(table, names).items()}
    if table.kind == "arrow":
        columns = {name: column.column(0).to_pylist() for name, column in columns.items()}
    return {name: [_cell(v) for v in column] for name, column in columns.items()}


def _cell(value: Any) -> str:
    if value is None or value != value:  # NaN and NaT
        return "–"
    if isinstance(value, float | np.floating):
        return f"{float(value):.6g}"
    text = str(value)
    if len(text) > 9 and re.fullmatch(r"[-+]?\d*\.\d+(e[-+]?\d+)?", text.strip()):
        return f"{float(text):.6g}"
    return text if len(text) <= 40 else f"{text[:38]}…"


def show_loading(page: Page, about: About, name: str, code: str, command: str) -> None:
    """Python and a command that use the saved model, which the code calls by a ``name``."""
    folder = about.folder or "model"
    saved = "" if about.folder else f'{name}.save("{folder}")  # where it was fitted\n\n'
    loaded = f"import selfnorm\n\n{name} = selfnorm.load({in_python(folder)})\n"
    page.code(f"{saved}{about.reading[0]}\n{loaded}{code}", "Python code")
    verb, _, options = command.partition(" ")
    files = f"{in_shell(folder)} {in_shell(about.file)}"
    page.code(f"selfnorm {verb} {files} {options}\n", "Commands")


def two_errors(values: np.ndarray) -> float:
    """Two standard errors of the mean of values."""
    return 2 * float(values.std()) / math.sqrt(max(len(values) - 1, 1))
