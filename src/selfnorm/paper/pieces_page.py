"""How far the pieces are, read from their result files, and the page that shows them together."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from selfnorm.paper.pieces import PIECES, Outcome, Piece
from selfnorm.paper.report import hardware, markdown_table

__all__ = ["Progress", "View", "page", "progress_of"]


@dataclass(frozen=True)
class Progress:
    """Rows a piece has, rows it was asked for (if known), and the time they took."""

    rows: int = 0
    asked: int | None = None
    seconds: float = 0.0

    @property
    def text(self) -> str:
        """``12 of 80 rows``."""
        if self.asked is None:
            return f"{self.rows} rows" if self.rows else "nothing yet"
        return f"{min(self.rows, self.asked)} of {self.asked} rows"

    @property
    def state(self) -> str:
        """``complete``, ``partly done`` or ``missing``."""
        if self.asked is not None and self.rows >= self.asked > 0:
            return "complete"
        return "partly done" if self.rows else "missing"


def progress_of(piece: Piece, directory: Path) -> Progress:
    """What the result file of a piece holds; a table writes it with its first row or before."""
    path = directory / piece.name / f"{piece.table}.json"
    if not path.exists():
        return Progress()
    content = json.loads(path.read_text())
    return Progress(len(content["rows"]), content.get("asked_rows"), content["seconds"])


def page(
    directory: Path,
    pieces: Sequence[Piece],
    outcomes: Mapping[str, Outcome],
    device: str,
    seconds: float,
) -> str:
    """An overview, then the table of every piece."""
    overview, sections = [], []
    for piece in pieces:
        progress = progress_of(piece, directory)
        outcome = outcomes.get(piece.name, Outcome(""))
        state = progress.state
        if outcome.state in ("failed", "no data"):
            state = outcome.state if progress.state == "missing" else f"{state}, {outcome.state}"
        spent = f"{progress.seconds:.0f}" if progress.rows else "–"
        overview.append([piece.name, state, progress.text, spent, outcome.note])
        written = directory / piece.name / f"{piece.table}.md"
        if written.exists():
            sections.append(re.sub("^#", "##", written.read_text(), flags=re.MULTILINE))
    place = hardware(device)
    where = place.get("gpu") or f"{place['cores']} CPU cores"
    complete = sum(row[1] == "complete" for row in overview)
    note = (
        f"{complete} of {len(pieces)} pieces complete, {seconds:.0f} s in this call. `seconds` is "
        "what the rows of a piece took, over all calls. The tables below hold our values beside "
        "the paper's and, where it is known, the limit."
    )
    unasked = [piece.name for piece in PIECES if piece.long and piece not in pieces]
    if unasked:
        named = " ".join(f"--only {name}" for name in unasked)
        note += f" The literal protocols of the longest tables take hours: run them by `{named}`."
    head = markdown_table(["piece", "state", "rows", "seconds", ""], overview)
    return "\n\n".join([f"# All tables ({where})", note, head, *sections])


class View:
    """One line per piece: redrawn in a terminal, elsewhere printed when it changes."""

    def __init__(
        self, directory: Path, pieces: Sequence[Piece], enabled: bool, stream: TextIO | None = None
    ) -> None:
        self.directory, self.pieces, self.enabled = directory, pieces, enabled
        self.stream = stream or sys.stdout
        self._shown: dict[str, str] = {}

    def show(self, running: set[str], outcomes: Mapping[str, Outcome]) -> None:
        """Bring the lines up to date."""
        if not self.enabled:
            return
        lines = {piece.name: self._line(piece, running, outcomes) for piece in self.pieces}
        if self.stream.isatty():
            up = f"\033[{len(self._shown)}A" if self._shown else ""
            self.stream.write(up + "".join(f"\033[2K{line}\n" for line in lines.values()))
        else:
            new = [line for name, line in lines.items() if self._shown.get(name) != line]
            self.stream.write("".join(f"{line}\n" for line in new))
        self.stream.flush()
        self._shown = lines

    def _line(self, piece: Piece, running: set[str], outcomes: Mapping[str, Outcome]) -> str:
        state, note = "waiting", ""
        if piece.name in running:
            state = "running"
        elif piece.name in outcomes:
            outcome = outcomes[piece.name]
            state, note = outcome.state, f"{outcome.seconds:.0f} s  {outcome.note}"
        rows = progress_of(piece, self.directory).text
        return f"{piece.name:<16} {state:<8} {rows:<18} {note}".rstrip()
