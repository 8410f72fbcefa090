"""The whole paper in one go: every table whose data are at hand, one results page.

Tables keep a row as soon as its run is done and never run it again, so a second call after a kill
goes on where the first one stopped, and one with more data files adds what was missing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from selfnorm.errors import MissingDataError
from selfnorm.experiments.report import Table, hardware, markdown_table

__all__ = ["PIECES", "Piece", "run"]


@dataclass(frozen=True)
class Piece:
    """One table with one recipe; ``seeds`` is how many repetitions the paper's protocol asks."""

    table: str
    recipe: str
    seeds: int

    @property
    def name(self) -> str:
        """Folder of the result files below ``--out``."""
        return f"{self.table}/{self.recipe}"


# Quick tables first: whoever stops early has the most tables.
PIECES = (
    Piece("toy2d", "paper", 5),
    Piece("toy2d", "best", 5),
    Piece("toy1d", "paper", 5),
    Piece("toy1d", "best", 5),
    Piece("uci", "paper", 3),
    Piece("images", "best", 3),
    Piece("mnist", "best", 2),
    Piece("images", "paper", 3),
    Piece("mnist", "paper", 2),
)


def run(
    *,
    out: str | Path = "out",
    device: str = "cpu",
    seeds: int | None = None,
    progress: bool = True,
    data_dir: str | Path | None = None,
    jobs: int = 1,
    pieces: Sequence[Piece] = PIECES,
    options: dict[str, dict[str, Any]] | None = None,
) -> Path:
    """Run what is missing of every piece, and write ``all.md`` into ``out``.

    Args:
        out: directory; the table ``T`` of recipe ``R`` goes to ``out/T/R``.
        device: torch device.
        seeds: repetitions, for every table; by default what each table's protocol asks.
        progress: show which piece is running, and its own progress.
        data_dir: where data files are.
        jobs: runs side by side, for tables that can.
        pieces: which tables, in which order.
        options: further options by table name, passed to its ``run``.

    Returns:
        The results page.
    """
    directory = Path(out)
    notes: dict[str, str] = {}
    for number, piece in enumerate(pieces, 1):
        _say(progress, f"[{number}/{len(pieces)}] {piece.name}")
        began = time.perf_counter()
        module = import_module(f"selfnorm.experiments.{piece.table}")
        try:
            table: Table = module.run(
                recipe=piece.recipe,
                seeds=seeds or piece.seeds,
                out=directory / piece.name,
                device=device,
                progress=progress,
                data_dir=data_dir,
                jobs=jobs,
                **(options or {}).get(piece.table, {}),
            )
        except MissingDataError as error:
            notes[piece.name] = f"not run: {error}"
            _say(progress, notes[piece.name])
            continue
        seconds = time.perf_counter() - began
        _say(progress, f"{piece.name}: {len(table.rows)} rows, {seconds:.0f} s")
    page = directory / "all.md"
    directory.mkdir(parents=True, exist_ok=True)
    page.write_text(_page(directory, pieces, notes, device))
    return page


def _say(progress: bool, text: str) -> None:
    if progress:
        print(text, flush=True)


def _page(directory: Path, pieces: Sequence[Piece], notes: dict[str, str], device: str) -> str:
    """An overview, then the table of every piece."""
    overview, sections = [], []
    for piece in pieces:
        path = directory / piece.name / f"{piece.table}.json"
        rows, seconds = "0", "–"
        if path.exists():  # a table writes it with its first row
            content = json.loads(path.read_text())
            rows, seconds = str(len(content["rows"])), f"{content['seconds']:.0f}"
        overview.append([piece.name, rows, seconds, notes.get(piece.name, "done")])
        if path.with_suffix(".md").exists():
            sections.append(path.with_suffix(".md").read_text().replace("# ", "## ", 1))
    place = hardware(device)
    head = markdown_table(["table", "rows", "seconds", ""], overview)
    where = place.get("gpu") or f"{place['cores']} CPU cores"
    return "\n\n".join([f"# All tables ({where})", head, *sections])
