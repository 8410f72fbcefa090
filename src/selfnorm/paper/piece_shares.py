"""How many processes a piece gets, and where it runs: one budget for all pieces of a call.

Under NVIDIA's multi-process service five processes get 1.7 times as much out of an H200 as one, ten
no more than that, and each is slower the more there are. So it is the *sum* over all pieces that is
bounded, and the long pieces, which decide when a call ends, get most of it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from selfnorm.paper.pieces import Piece, Settings
from selfnorm.paper.pieces_page import progress_of

__all__ = ["begin_next", "budget", "left", "place", "shares"]

_ON_A_GPU = 8  # processes: the four longest pieces of a whole call, each with its share
_CORES_FOR_OTHERS = 2  # left alone: the system, the call itself
_FEWEST_CORES = 4  # with fewer a piece is not worth taking from the GPU
_MOST_CORES = 10


def budget(device: str, jobs: int | None, side_by_side: int | None) -> int:
    """Rows at once, over all pieces: as asked, else 8 on a GPU and elsewhere one for each piece.

    A process on a GPU keeps a processor core busy; half the cores are left to others.

    Example:
        >>> budget("cpu", None, 3), budget("cpu", 5, 3)
        (3, 5)
    """
    if jobs is not None:
        return jobs
    if torch.device(device).type == "cuda":
        return max(1, min(_ON_A_GPU, _cores() // 2))
    return side_by_side or 1


def _cores() -> int:
    return os.cpu_count() or 1


def place(piece: Piece, settings: Settings) -> Settings:
    """Device and budget of the pieces that run where this one does."""
    spare = _cores() - settings.jobs - _CORES_FOR_OTHERS
    on_gpu = torch.device(settings.device).type == "cuda"
    if piece.on_cpu and on_gpu and spare >= _FEWEST_CORES:
        return replace(settings, device="cpu", jobs=min(spare, _MOST_CORES))
    return settings


def left(piece: Piece, directory: Path) -> float:
    """Minutes a piece still takes, by the rows it has; a moment at least."""
    progress = progress_of(piece, directory)
    done = min(1.0, progress.rows / progress.asked) if progress.asked else 0.0
    return max(0.01, piece.minutes * (1 - done))


def shares(minutes: Mapping[Piece, float], jobs: int) -> dict[Piece, int]:
    """Processes for pieces that are to end together: the largest ``minutes / processes`` is least.

    One each, then one more for whichever would end last. Pieces of less than half a process wait
    for one that others no longer need, and are left out.

    Example:
        >>> long, short, tiny = (Piece("toy1d", name, 1) for name in "abc")
        >>> [shares({long: 20.0, short: 9.0, tiny: 0.1}, 3).get(p) for p in (long, short, tiny)]
        [2, 1, None]
    """
    least = sum(minutes.values()) / (2 * jobs)
    first, *others = sorted(minutes, key=lambda piece: -minutes[piece])[:jobs]
    given = {first: 1} | {piece: 1 for piece in others if minutes[piece] >= least}
    while sum(given.values()) < jobs:
        given[max(given, key=lambda piece: minutes[piece] / given[piece])] += 1
    return given


def begin_next(
    waiting: Sequence[Piece],
    running: Mapping[Piece, Settings],
    settings: Settings,
    directory: Path,
    side_by_side: int,
) -> tuple[Piece, Settings] | None:
    """The piece to begin now, with its part of the budget; ``None`` while there is no room.

    The longest first. It gets the part of its device's budget with which all there end as early as
    they can (:func:`shares`), at least one process and at most what nobody has.
    """
    unfinished = [piece for piece in (*waiting, *running) if not piece.long]
    time_left = {piece: left(piece, directory) for piece in (*waiting, *running)}
    for piece in sorted(waiting, key=lambda piece: -time_left[piece]):
        if piece.long and unfinished:
            continue
        here = place(piece, settings)
        company = [one for one, given in running.items() if given.device == here.device]
        room = here.jobs - sum(running[one].jobs for one in company)
        if room < 1 or len(company) >= side_by_side:
            continue
        rivals = [one for one in waiting if place(one, settings).device == here.device]
        alike = [one for one in (*rivals, *company) if one.long == piece.long]
        share = shares({one: time_left[one] for one in alike}, here.jobs).get(piece, 1)
        return piece, replace(here, jobs=min(share, room))
    return None
