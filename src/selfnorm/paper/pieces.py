"""The paper in pieces: one table with one recipe each, run on its own and resumed on its own."""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from selfnorm.errors import MissingDataError, SelfnormError
from selfnorm.paper.report import Table

__all__ = ["PIECES", "Outcome", "Piece", "Settings", "chosen", "run_piece"]


@dataclass(frozen=True)
class Piece:
    """One table with one recipe.

    Attributes:
        table: name of the table, and of its result files.
        recipe: which set-up.
        seeds: how many repetitions its protocol asks.
        module: where the table's ``run`` is, if not among the library's own tables.
        minutes: of all its rows together, one after the other, as measured in a whole call (eight
            processes on one H200, three of others beside them): the longest pieces begin first and
            have the most processes.
        long: hours on one GPU: run only when named, and begun when all others have ended, so as not
            to slow them down.
        on_cpu: beside a GPU it is run by the processor cores that the other pieces leave idle.
    """

    table: str
    recipe: str
    seeds: int
    module: str = ""
    minutes: float = 1.0
    long: bool = False
    on_cpu: bool = False

    @property
    def name(self) -> str:
        """Folder of the result files below ``--out``."""
        return f"{self.table}/{self.recipe}"


# Quick ones first: whoever runs one after the other and stops early has the most tables.
# The steps of toy1d/paper are so small that a GPU spends them on launches. A row takes a processor
# core some 35 seconds: the cores that the GPU's pieces leave idle are done with its 120 rows before
# those are, and take nothing from them.
PIECES = (
    Piece("toy2d", "paper", 5, minutes=0.6),
    Piece("toy2d", "best", 5, minutes=0.5),
    Piece("uci", "paper", 3, minutes=11.5),
    Piece("toy1d", "best", 5, minutes=20.0),
    Piece("toy1d", "paper", 5, minutes=71.0, on_cpu=True),
    Piece("images", "best", 3, minutes=29.0),
    Piece("mnist", "best", 2, minutes=48.0),
    Piece("images", "paper", 3, minutes=300.0, long=True),
    Piece("mnist", "paper", 2, minutes=60.0, long=True),
)


@dataclass(frozen=True)
class Settings:
    """How pieces are run: ``jobs`` rows at once, ``options`` further ones by table name."""

    device: str = "cpu"
    seeds: int | None = None
    progress: bool = False
    data_dir: str | Path | None = None
    jobs: int = 1
    options: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """How a piece ended: ``"done"``, ``"no data"`` or ``"failed"``, why, and after how long."""

    state: str
    note: str = ""
    seconds: float = 0.0


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
    known = {piece.name for piece in pieces} | {piece.table for piece in pieces}
    for name in names:
        if name not in known:
            listed = ", ".join(piece.name for piece in pieces)
            raise SelfnormError(f"there is no piece {name!r}; choose from {listed}")
    return tuple(
        piece
        for piece in pieces
        if piece.name in names or (piece.table in names and not piece.long)
    )


def run_piece(piece: Piece, directory: Path, settings: Settings) -> Outcome:
    """Run what is missing of a piece; what goes wrong is told in the outcome, not raised."""
    began = time.perf_counter()
    module = import_module(piece.module or f"selfnorm.paper.{piece.table}")
    try:
        table: Table = module.run(
            recipe=piece.recipe,
            seeds=settings.seeds or piece.seeds,
            out=directory / piece.name,
            device=settings.device,
            progress=settings.progress,
            data_dir=settings.data_dir,
            jobs=settings.jobs,
            **settings.options.get(piece.table, {}),
        )
    except MissingDataError as error:
        return Outcome("no data", str(error), time.perf_counter() - began)
    except (SelfnormError, ValueError, RuntimeError, OSError) as error:
        traceback.print_exc()
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        return Outcome("failed", first_line, time.perf_counter() - began)
    nothing = table.asked == 0 and not table.rows
    state, note = ("no data", "none of its files found") if nothing else ("done", "")
    return Outcome(state, note, time.perf_counter() - began)
