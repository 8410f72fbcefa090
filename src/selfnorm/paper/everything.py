"""The whole paper in one go: every table whose data are at hand, one results page.

Tables keep a row as soon as its run is done and never run it again, so a second call after a kill
goes on where the first one stopped, and one with more data files adds what was missing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from selfnorm.errors import SelfnormError
from selfnorm.paper.lifetime import end_when_asked
from selfnorm.paper.piece_processes import run_in_processes
from selfnorm.paper.piece_shares import budget, place
from selfnorm.paper.pieces import PIECES, Outcome, Piece, Settings, chosen, run_piece
from selfnorm.paper.pieces_page import View, page, progress_of

__all__ = ["PIECES", "Piece", "run"]


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
    side_by_side: int | None = None,
    options: dict[str, dict[str, Any]] | None = None,
) -> Path:
    """Run what is missing of every piece, and write ``all.md`` into ``out``.

    The page is written at the beginning and after every piece, so that a killed call leaves one.

    Args:
        out: directory; the table ``T`` of recipe ``R`` goes to ``out/T/R``.
        device: torch device.
        seeds: repetitions, for every table; by default what each table's protocol asks.
        progress: show one line per piece (one piece at a time: its own progress as well).
        data_dir: where data files are.
        jobs: rows at once, over all pieces, each in a process; on a GPU 8 (or half as many as there
            are processor cores), elsewhere as many as pieces.
        pieces: which tables, in which order.
        only: names of some of them, ``"toy2d/paper"`` or ``"toy2d"``; by default all but those that
            take hours.
        side_by_side: pieces at once, each in a process of its own; 1, on a GPU all, the longest
            first.
        options: further options by table name, passed to its ``run``.

    Returns:
        The results page.

    Raises:
        SelfnormError: a piece failed; raised when all others have had their turn.
        ValueError: ``jobs`` or ``side_by_side`` is less than 1: nothing would ever begin.
    """
    for name, value in (("jobs", jobs), ("side_by_side", side_by_side)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    directory = Path(out)
    known, pieces = pieces, chosen(only, pieces)
    on_gpu = torch.device(device).type == "cuda"
    at_once = min(side_by_side or (len(pieces) if on_gpu else 1), len(pieces))
    alone = at_once == 1
    jobs = budget(device, jobs, side_by_side)
    settings = Settings(device, seeds, progress and alone, data_dir, jobs, options or {})
    view = View(directory, pieces, progress)
    outcomes: dict[str, Outcome] = {}
    began = time.perf_counter()
    written = directory / "all.md"

    def write() -> None:
        directory.mkdir(parents=True, exist_ok=True)
        spent = time.perf_counter() - began
        part = written.with_suffix(".part")
        # Pieces of earlier calls stay on the page.
        others = [p for p in known if p not in pieces and progress_of(p, directory).rows]
        part.write_text(page(directory, (*pieces, *others), outcomes, device, spent))
        os.replace(part, written)

    def look(running: set[str]) -> None:
        view.show(running, outcomes)

    write()
    results = (
        _one_by_one(pieces, directory, settings, view, outcomes)
        if alone
        else run_in_processes(pieces, directory, settings, at_once, look)
    )
    try:
        with end_when_asked(), closing(results):
            for piece, outcome in results:
                outcomes[piece.name] = outcome
                write()
    except (KeyboardInterrupt, SystemExit):
        write()  # with the rows of the pieces that were under way
        raise
    view.show(set(), outcomes)
    failed = {name: outcome for name, outcome in outcomes.items() if outcome.state == "failed"}
    if failed:
        told = "; ".join(f"{name}: {outcome.note}" for name, outcome in failed.items())
        raise SelfnormError(f"{told} (the other pieces are in {written})")
    return written


def _one_by_one(
    pieces: Sequence[Piece],
    directory: Path,
    settings: Settings,
    view: View,
    outcomes: dict[str, Outcome],
) -> Generator[tuple[Piece, Outcome], None, None]:
    for piece in pieces:
        view.show({piece.name}, outcomes)
        yield piece, run_piece(piece, directory, place(piece, settings))
