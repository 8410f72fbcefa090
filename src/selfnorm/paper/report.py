"""Result files: one JSON row per run, one Markdown table of means beside the paper's numbers.

``DIR/TABLE.json`` holds ``table, recipe, command, commit, versions, hardware, seconds, rows``;
rows are never averaged. It is rewritten after every run, so that an interrupted table keeps what is
done, and a second call with the same settings only adds what is missing.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from selfnorm._files import atomic
from selfnorm.errors import MissingDataError, SelfnormError
from selfnorm.evaluation import Bounds
from selfnorm.paper.provenance import commit, hardware, versions
from selfnorm.saving import json_safe
from selfnorm.training import History

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_LARGE = 1e6  # no figure of a sound model


Row = dict[str, Any]  # of a result file


class Planned:
    """A run of a table before it is run.

    Attributes:
        identity: the fields that identify it.
    """

    identity: ClassVar[tuple[str, ...]]

    def keys(self) -> Row:
        """What identifies the run in the result file."""
        return {name: getattr(self, name) for name in self.identity}


Run = TypeVar("Run", bound=Planned)


def check_choices(what: str, given: Iterable[str], choices: Sequence[str]) -> None:
    """Refuse what a table does not have, before anything is trained or written.

    Example:
        >>> check_choices("base", ["nope"], ("none", "standard_normal"))
        Traceback (most recent call last):
        ValueError: unknown base 'nope'; choose from none, standard_normal
    """
    for name in given:
        if name not in choices:
            raise ValueError(f"unknown {what} {name!r}; choose from {', '.join(choices)}")


def sets_with_files(
    names: Sequence[str], locate: Callable[..., object], data_dir: str | Path | None
) -> tuple[list[str], dict[str, str]]:
    """The sets whose files are there; of the others, what is missing and where to get it."""
    missing = {}
    for name in names:
        try:
            locate(name, data_dir)
        except MissingDataError as error:  # noqa: PERF203 six at most
            missing[name] = str(error)
    return [name for name in names if name not in missing], missing


def paper_numbers() -> Row:
    """Every result table of the paper as data."""
    text = resources.files("selfnorm.paper").joinpath("paper.toml").read_text()
    return tomllib.loads(text)


@dataclass
class ResultTable:
    """A table in progress, mirrored on disk.

    Example:
        >>> import tempfile
        >>> table = ResultTable("demo", "paper", Path(tempfile.mkdtemp()))
        >>> table.add({"seed": 0, "lower": -1.0})
        >>> len(ResultTable("demo", "paper", table.directory).rows)
        1
    """

    name: str
    recipe: str
    directory: Path
    device: str = "cpu"
    command: str = ""
    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0
    planned: int | None = None  # rows, when it is complete

    def __post_init__(self) -> None:
        self.directory = Path(self.directory)
        self.command = self.command or " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
        self._began = time.perf_counter()
        if self.path.exists():
            try:
                old = json.loads(self.path.read_text())
                old_recipe, old_rows = old["recipe"], old["rows"]
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise SelfnormError(
                    f"{self.path} is not a result file of selfnorm ({error}); choose another --out"
                ) from error
            if old_recipe != self.recipe:
                raise SelfnormError(
                    f"{self.path} holds the recipe {old_recipe!r}, this is {self.recipe!r}; "
                    "choose another --out"
                )
            self.rows = old_rows
            self.seconds = float(old.get("seconds", 0.0))
            self.planned = old.get("asked_rows")

    @property
    def path(self) -> Path:
        """The JSON file."""
        return self.directory / f"{self.name}.json"

    @property
    def progress(self) -> str:
        """``12 of 80 rows``."""
        if self.planned is None:
            return f"{len(self.rows)} rows" if self.rows else "nothing yet"
        return f"{min(len(self.rows), self.planned)} of {self.planned} rows"

    def has(self, **keys: object) -> bool:
        """Whether a row with these values is there already."""
        return any(all(row.get(k) == v for k, v in keys.items()) for row in self.rows)

    def missing(self, runs: Sequence[Run]) -> list[Run]:
        """Of all the runs that the table is to have, those that have no row yet."""
        if len(runs) != self.planned:
            self.planned = len(runs)  # so that others can see how far it is
            if self.rows:  # a file of no rows would be no result
                self.write()
        return [run for run in runs if not self.has(**run.keys())]

    def add(self, row: Row) -> None:
        """Append one run and write the file."""
        self.rows.append(json_safe(row))
        self.write()

    def write(self) -> None:
        """Write the JSON file, atomically."""
        now = time.perf_counter()
        # Rounded here, so that a page made from the table and one made from its file agree.
        self.seconds = round(self.seconds + now - self._began, 2)
        self._began = now
        self.directory.mkdir(parents=True, exist_ok=True)
        content = {
            "table": self.name,
            "recipe": self.recipe,
            "command": self.command,
            "commit": commit(),
            "versions": versions(),
            "hardware": hardware(self.device),
            "seconds": self.seconds,
            **({} if self.planned is None else {"asked_rows": self.planned}),
            "rows": self.rows,
        }
        with atomic(self.path) as part:
            part.write_text(json.dumps(content, indent=1) + "\n")

    def write_page(self, *sections: str) -> Path:
        """Write ``TABLE.md``: these sections, then the command and the time it took."""
        self.directory.mkdir(parents=True, exist_ok=True)
        page = self.path.with_suffix(".md")
        made = f"`{self.command}`, {self.seconds:.0f} s"
        page.write_text("\n\n".join([*sections, made]) + "\n")
        return page

    def groups(self, *keys: str) -> dict[tuple[str, ...], list[Row]]:
        """Rows by the values of ``keys``, in order of appearance."""
        grouped: dict[tuple[str, ...], list[Row]] = {}
        for row in self.rows:
            grouped.setdefault(tuple(row[k] for k in keys), []).append(row)
        return grouped


def paper_value(value: Mapping[str, float] | str | None) -> str:
    """A number as the paper prints it, or a dash.

    Example:
        >>> paper_value({"mean": -1.9, "sd": 0.01}), paper_value("diverged"), paper_value(None)
        ('-1.900 ± 0.010', 'diverged', '–')
    """
    if isinstance(value, Mapping):
        return f"{value['mean']:.3f} ± {value['sd']:.3f}"
    return str(value) if value else "–"


def bounds_columns(bounds: Bounds) -> Row:
    """What a row of a table keeps of bounds."""
    names = ("lower", "upper", "gap", "ess", "pareto_k", "reliable")
    return {name: getattr(bounds, name) for name in names}


def history_columns(history: History) -> Row:
    """What a row of a table keeps of its training."""
    names = ("n_steps", "best_step", "skipped_steps", "rollbacks")
    figures = {name: getattr(history, name) for name in names}
    return {"diverged": history.stopped == "diverged", **figures}


def mean_sd(rows: Sequence[Row], key: str, digits: int = 3, *, minus: str | None = None) -> str:
    """``mean ± sd`` of a column (``minus`` another), leaving out missing values (and saying so).

    Of values beyond a million, a bound by a ``b`` that was never learned, the order alone.

    Example:
        >>> mean_sd([{"a": 1.0}, {"a": 2.0}, {"a": None}], "a")
        '1.500 ± 0.707 (2 of 3)'
        >>> mean_sd([{"a": -1.0}, {"a": -4.2e13}], "a")
        '-2e+13'
    """
    needed = [key] if minus is None else [key, minus]
    complete = [r for r in rows if all(r.get(name) is not None for name in needed)]
    values = [float(r[key]) - (float(r[minus]) if minus else 0.0) for r in complete]
    if not values:
        return "–"
    text = f"{statistics.fmean(values):.{digits}f}"
    if max(map(abs, values)) > _LARGE:
        text = f"{statistics.fmean(values):.0e}"
    elif len(values) > 1:  # one run has no spread to show
        text += f" ± {statistics.stdev(values):.{digits}f}"
    return text if len(values) == len(rows) else f"{text} ({len(values)} of {len(rows)})"


def markdown_table(header: list[str], body: Iterable[list[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(cells) + " |" for cells in body]
    return "\n".join(lines)
