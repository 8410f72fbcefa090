"""The whole paper in one go: every table whose data are at hand, one results page.

The paper comes in pieces, one table with one recipe each. Tables keep a row as soon as its run is
done and never run it again, so a second call after a kill goes on where the first one stopped, and
one with more data files adds what was missing.
"""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import torch

from selfnorm._files import atomic
from selfnorm.errors import MissingDataError, SelfnormError
from selfnorm.paper.provenance import hardware
from selfnorm.paper.report import ResultTable, Row, markdown_table


@dataclass(frozen=True)
class Piece:
    """One table with one recipe.

    Attributes:
        table: name of the table, and of its result files.
        recipe: which set-up.
        long: hours on one GPU: run only when named.
        module: where the table's ``run`` is, if not among the library's own tables.
    """

    table: str
    recipe: str
    long: bool = False
    module: str = ""

    @property
    def name(self) -> str:
        """Folder of the result files below ``--out``."""
        return f"{self.table}/{self.recipe}"

    def so_far(self, directory: Path) -> ResultTable:
        """What its result file below this directory holds."""
        return ResultTable(self.table, self.recipe, directory / self.name)


# Quick ones first: a call that is stopped early leaves the most tables.
PIECES = (
    Piece("toy2d", "paper"),
    Piece("toy2d", "best"),
    Piece("uci", "paper"),
    Piece("toy1d", "best"),
    Piece("images", "best"),
    Piece("mnist", "best"),
    Piece("toy1d", "paper"),
    Piece("images", "paper", long=True),
    Piece("mnist", "paper", long=True),
)


def chosen(names: Sequence[str] | None, pieces: Sequence[Piece] = PIECES) -> tuple[Piece, ...]:
    """The pieces of these names, in the usual order; all of them without names.

    A table's name stands for all its recipes. Those that take hours must be named in full.

    Example:
        >>> [piece.name for piece in chosen(["toy1d", "toy2d/paper"])]
        ['toy2d/paper', 'toy1d/best', 'toy1d/paper']
        >>> [piece.name for piece in chosen(["images"])]
        ['images/best']
    """
    if not names:
        return tuple(piece for piece in pieces if not piece.long)
    choices = {piece.name for piece in pieces} | {piece.table for piece in pieces}
    if unknown := [name for name in names if name not in choices]:
        listed = ", ".join(piece.name for piece in pieces)
        raise SelfnormError(f"there is no piece {unknown[0]!r}; choose from {listed}")
    return tuple(p for p in pieces if p.name in names or (p.table in names and not p.long))


def run(
    *,
    out: str | Path = "out",
    device: str = "cpu",
    seeds: int | None = None,
    progress: bool = True,
    data_dir: str | Path | None = None,
    jobs: int | None = None,
    pieces: Sequence[Piece] = PIECES,
    only: Sequence[str] | None = None,
    options: Mapping[str, Row] | None = None,
) -> Path:
    """Run what is missing of every piece, and write ``all.md`` into ``out``.

    The page is written at the beginning and after every piece, so that a killed call leaves one.

    Args:
        out: directory; the table ``T`` of recipe ``R`` goes to ``out/T/R``.
        device: torch device.
        seeds: repetitions, for every table; by default what each table's protocol asks.
        progress: show how far it is.
        data_dir: where data files are.
        jobs: rows at once, each in a process; on a GPU 8 (or half as many as there are processor
            cores), elsewhere 1.
        pieces: which tables, in which order.
        only: names of some of them, ``"toy2d/paper"`` or ``"toy2d"``; by default all but those that
            take hours.
        options: further options by table name, passed to its ``run``.

    Returns:
        The results page.

    Raises:
        SelfnormError: a piece failed; raised when all others have had their turn.
    """
    directory, wanted = Path(out), chosen(only, pieces)
    if jobs is None:
        # A process on a GPU keeps a processor core busy; half the cores are left to others.
        on_gpu = torch.device(device).type == "cuda"
        jobs = max(1, min(8, (os.cpu_count() or 1) // 2)) if on_gpu else 1
    common = {"device": device, "progress": progress, "data_dir": data_dir, "jobs": jobs}
    if seeds is not None:
        common["seeds"] = seeds
    outcomes: dict[str, _Outcome] = {}

    def tell(piece: Piece, state: str) -> None:
        if progress:
            print(f"{piece.name}: {state}, {piece.so_far(directory).progress}", flush=True)

    def write() -> Path:
        # Pieces of earlier calls stay on the page.
        others = [p for p in pieces if p not in wanted and p.so_far(directory).rows]
        text = _page(directory, (*wanted, *others), outcomes, device)
        directory.mkdir(parents=True, exist_ok=True)
        with atomic(directory / "all.md") as part:
            part.write_text(text)
        return directory / "all.md"

    write()
    try:
        for piece in wanted:
            tell(piece, "begins")
            own = {**common, **(options or {}).get(piece.table, {})}
            outcomes[piece.name] = _run_piece(piece, out=directory / piece.name, **own)
            write()
            tell(piece, f"{outcomes[piece.name].state} {outcomes[piece.name].note}".strip())
    finally:
        page = write()  # with the rows of the piece that was under way
    failed = [f"{name}: {one.note}" for name, one in outcomes.items() if one.state == "failed"]
    if failed:
        raise SelfnormError(f"{'; '.join(failed)} (the other pieces are in {page})")
    return page


@dataclass(frozen=True)
class _Outcome:
    """How a piece ended, ``"done"``, ``"no data"`` or ``"failed"``, and why."""

    state: str = ""
    note: str = ""


def _run_piece(piece: Piece, **options: object) -> _Outcome:
    """Run what is missing of a piece; what goes wrong is in the outcome, not raised."""
    module = import_module(piece.module or f"selfnorm.paper.{piece.table}")
    try:
        table: ResultTable = module.run(recipe=piece.recipe, **options)
    except MissingDataError as error:
        return _Outcome("no data", str(error))
    except (SelfnormError, ValueError, RuntimeError, OSError) as error:
        traceback.print_exc()
        return _Outcome("failed", (str(error).strip() or type(error).__name__).splitlines()[0])
    if table.planned == 0 and not table.rows:
        return _Outcome("no data", "none of its files found")
    return _Outcome("done")


def _page(
    directory: Path, pieces: Sequence[Piece], outcomes: Mapping[str, _Outcome], device: str
) -> str:
    """An overview, then the table of every piece."""
    overview, sections = [], []
    for piece in pieces:
        table, outcome = piece.so_far(directory), outcomes.get(piece.name, _Outcome())
        state = "partly done" if table.rows else "missing"
        if table.planned and len(table.rows) >= table.planned:
            state = "complete"
        if outcome.state in ("failed", "no data"):
            state = outcome.state if state == "missing" else f"{state}, {outcome.state}"
        spent = f"{table.seconds:.0f}" if table.rows else "–"
        overview.append([piece.name, state, table.progress, spent, outcome.note])
        written = directory / piece.name / f"{piece.table}.md"
        if written.exists():
            sections.append(re.sub("^#", "##", written.read_text(), flags=re.MULTILINE))
    complete = sum(row[1] == "complete" for row in overview)
    note = (
        f"{complete} of {len(pieces)} pieces complete. `seconds` is what the rows of a piece took, "
        "over all calls. The tables below hold our values beside the paper's and, where it is "
        "known, the limit."
    )
    unasked = [piece.name for piece in PIECES if piece.long and piece not in pieces]
    if unasked:
        named = " ".join(f"--only {name}" for name in unasked)
        note += f" The literal protocols of the longest tables take hours: run them by `{named}`."
    machine = hardware(device)
    where = machine.get("gpu") or f"{machine['cores']} CPU cores"
    head = markdown_table(["piece", "state", "rows", "seconds", ""], overview)
    return "\n\n".join([f"# All tables ({where})", note, head, *sections])
