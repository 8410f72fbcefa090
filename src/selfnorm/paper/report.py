"""Result files: one JSON row per run, one Markdown table of means beside the paper's numbers.

``DIR/TABLE.json`` holds ``table, recipe, command, commit, versions, hardware, seconds, rows``;
rows are never averaged. It is rewritten after every run, so that an interrupted table keeps what is
done, and a second call with the same settings only adds what is missing.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib import metadata, resources
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from selfnorm.errors import MissingDataError, SelfnormError
from selfnorm.evaluation import Bounds
from selfnorm.paper.commit import commit
from selfnorm.saving import json_safe
from selfnorm.training import History

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_LARGE = 1e6  # no figure of a sound model


class _Run(Protocol):
    def keys(self) -> dict[str, Any]:
        """What identifies the run in the result file."""


Run = TypeVar("Run", bound=_Run)


def check_choices(what: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Refuse what a table does not have, before anything is trained or written.

    Example:
        >>> check_choices("base", ["nope"], ("none", "standard_normal"))
        Traceback (most recent call last):
        ValueError: unknown base 'nope'; choose from none, standard_normal
    """
    for name in given:
        if name not in known:
            raise ValueError(f"unknown {what} {name!r}; choose from {', '.join(known)}")


def found_sets(
    names: Sequence[str], locate: Callable[..., Any], data_dir: str | Path | None
) -> tuple[list[str], dict[str, str]]:
    """The sets whose files are there, and what is missing of the others and where to get it."""
    missing = {}
    for name in names:
        try:
            locate(name, data_dir)
        except MissingDataError as error:  # noqa: PERF203 six at most
            missing[name] = str(error)
    return [name for name in names if name not in missing], missing


def paper_numbers() -> dict[str, Any]:
    """Every result table of the paper as data."""
    text = resources.files("selfnorm.paper").joinpath("paper.toml").read_text()
    return tomllib.loads(text)


def versions() -> dict[str, str]:
    """Versions of Python and of the packages results depend on."""
    found = {"python": platform.python_version()}
    installed = {d.metadata["Name"].lower(): d.version for d in metadata.distributions()}
    names = ("selfnorm", "torch", "numpy", "scikit-learn", "zuko")
    return found | {name: installed[name] for name in names if name in installed}


def hardware(device: torch.device | str = "cpu") -> dict[str, Any]:
    """What the figures were measured on."""
    info: dict[str, Any] = {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": str(device),
    }
    if torch.device(device).type == "cuda":
        info["gpu"] = torch.cuda.get_device_name(device)
    return info


@dataclass
class Table:
    """A table in progress, mirrored on disk.

    Example:
        >>> import tempfile
        >>> table = Table("demo", "paper", Path(tempfile.mkdtemp()))
        >>> table.add({"seed": 0, "lower": -1.0})
        >>> len(Table("demo", "paper", table.directory).rows)
        1
    """

    name: str
    recipe: str
    directory: Path
    device: str = "cpu"
    command: str = ""
    rows: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    asked: int | None = None

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
            self.asked = old.get("asked_rows")

    @property
    def path(self) -> Path:
        """The JSON file."""
        return self.directory / f"{self.name}.json"

    @property
    def progress(self) -> str:
        """``12 of 80 rows``."""
        if self.asked is None:
            return f"{len(self.rows)} rows" if self.rows else "nothing yet"
        return f"{min(len(self.rows), self.asked)} of {self.asked} rows"

    def has(self, **keys: Any) -> bool:
        """Whether a row with these values is there already."""
        return any(all(row.get(k) == v for k, v in keys.items()) for row in self.rows)

    def missing(self, asked: Sequence[Run]) -> list[Run]:
        """Of all the runs that the table is to have, those that have no row yet."""
        if len(asked) != self.asked:
            self.asked = len(asked)  # so that others can see how far it is
            if self.rows:  # a file of no rows would be no result
                self.write()
        return [run for run in asked if not self.has(**run.keys())]

    def add(self, row: dict[str, Any]) -> None:
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
            **({} if self.asked is None else {"asked_rows": self.asked}),
            "rows": self.rows,
        }
        part = self.path.with_suffix(".json.part")
        part.write_text(json.dumps(content, indent=1) + "\n")
        os.replace(part, self.path)

    def write_page(self, *sections: str) -> Path:
        """Write ``TABLE.md``: these sections, then the command and the time it took."""
        self.directory.mkdir(parents=True, exist_ok=True)
        page = self.path.with_suffix(".md")
        told = f"`{self.command}`, {self.seconds:.0f} s"
        page.write_text("\n\n".join([*sections, told]) + "\n")
        return page

    def groups(self, *keys: str) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
        """Rows by the values of ``keys``, in order of appearance."""
        grouped: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for row in self.rows:
            grouped.setdefault(tuple(row[k] for k in keys), []).append(row)
        return grouped


def paper_value(value: Any) -> str:
    """A number as the paper prints it, or a dash.

    Example:
        >>> paper_value({"mean": -1.9, "sd": 0.01}), paper_value("diverged"), paper_value(None)
        ('-1.900 ± 0.010', 'diverged', '–')
    """
    if isinstance(value, dict):
        return f"{value['mean']:.3f} ± {value['sd']:.3f}"
    return str(value) if value else "–"


def bounds_columns(bounds: Bounds) -> dict[str, Any]:
    """What a row of a table keeps of bounds."""
    names = ("lower", "upper", "gap", "ess", "pareto_k", "reliable")
    return {name: getattr(bounds, name) for name in names}


def history_columns(history: History) -> dict[str, Any]:
    """What a row of a table keeps of its training."""
    names = ("n_steps", "best_step", "skipped_steps", "rollbacks")
    figures = {name: getattr(history, name) for name in names}
    return {"diverged": history.stopped == "diverged", **figures}


def mean_sd(
    rows: Sequence[dict[str, Any]], key: str, digits: int = 3, *, minus: str | None = None
) -> str:
    """``mean ± sd`` of a column (``minus`` another), leaving out missing values (and saying so).

    Of values beyond a million, a bound by a ``b`` that was never learned, the order alone.

    Example:
        >>> mean_sd([{"a": 1.0}, {"a": 2.0}, {"a": None}], "a")
        '1.500 ± 0.707 (2 of 3)'
        >>> mean_sd([{"a": -1.0}, {"a": -4.2e13}], "a")
        '-2e+13'
    """
    needed = [key] if minus is None else [key, minus]
    whole = [r for r in rows if all(r.get(name) is not None for name in needed)]
    values = [float(r[key]) - (float(r[minus]) if minus else 0.0) for r in whole]
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
