"""The rows of an image table, one after the other or side by side: data, files, figures."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from selfnorm.datasets import images
from selfnorm.errors import SelfnormError
from selfnorm.images import ImageRegressor
from selfnorm.paper.image_runs import Config, fit_and_judge
from selfnorm.paper.report import Table
from selfnorm.paper.runner import run_side_by_side

__all__ = ["Method", "run_all"]

Method = tuple[str, str]
_SETS_AT_HAND = 3


@dataclass(frozen=True)
class _Job:
    """A row, where its data are, where its files go, and whether to draw its densities."""

    config: Config
    data_dir: str | Path | None
    directory: Path
    draw: bool


def run_all(
    table: Table,
    configs: Iterable[Config],
    *,
    data_dir: str | Path | None = None,
    deadline: float | None = None,
    progress: bool = True,
    drawn: dict[str, Method] | None = None,
    jobs: int = 1,
) -> None:
    """Run what the table lacks; begin nothing ``deadline`` seconds after the call.

    Args:
        table: rows are added to it as they finish.
        configs: in the order in which to begin them.
        data_dir: data directory.
        deadline: in seconds.
        progress: print every run.
        drawn: objective and proposal, by set, of the run of seed 0 whose densities are drawn.
        jobs: rows at once, each in a process of its own; the data are then loaded in each.
    """
    began = time.perf_counter()

    def missing() -> Iterator[_Job]:
        for config in configs:
            late = deadline is not None and time.perf_counter() - began > deadline
            if late or table.has(**config.keys()):
                continue
            method = (drawn or {}).get(config.dataset)
            draw = config.seed == 0 and (config.objective, config.proposal) == method
            yield _Job(config, data_dir, table.directory, draw)

    # Closed at once when a row cannot be written: nobody is left training.
    with closing(_results(missing(), jobs)) as finished:
        for row in finished:
            table.add(row)
            if progress:
                print(_line(row), flush=True)


def _results(missing: Iterator[_Job], jobs: int) -> Generator[dict[str, Any], None, None]:
    try:
        for _, row in run_side_by_side(_work, missing, jobs):
            yield row
    finally:
        _loaded.clear()


_loaded: dict[tuple[str, int, str], images.ImageData] = {}


def _data(config: Config, data_dir: str | Path | None) -> images.ImageData:
    """A set under its split, loaded once while it is in use."""
    key = (config.dataset, config.seed, str(data_dir))
    if key not in _loaded:
        while len(_loaded) >= _SETS_AT_HAND:
            del _loaded[next(iter(_loaded))]
        _loaded[key] = images.load(config.dataset, seed=config.seed, data_dir=data_dir)
    return _loaded[key]


def _work(job: _Job) -> dict[str, Any]:
    """Train and judge; the files of a row are there before the row is."""
    data = _data(job.config, job.data_dir)
    row, arrays, model = fit_and_judge(job.config, data)
    _save_arrays(job.directory, job.config, arrays)
    if job.draw:
        _draw(model, data, arrays, job.directory)
    return row


def _save_arrays(directory: Path, config: Config, arrays: dict[str, np.ndarray]) -> None:
    """Each test image's figures, for paired comparisons: ``scores/KEYS.npz``."""
    name = "-".join(str(v) for v in list(config.keys().values())[:5])
    (directory / "scores").mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        directory / "scores" / f"{name}.npz",
        **{k: v.astype(np.float32) for k, v in arrays.items()},  # type: ignore[arg-type]
    )


def _draw(
    model: ImageRegressor, data: images.ImageData, arrays: dict[str, np.ndarray], out: Path
) -> None:
    if model.space_.dim != 1:
        return
    from selfnorm.plotting import density_panels, plot_panels, plot_reliability

    panels = density_panels(model, *data.test)
    np.savez_compressed(out / "scores" / f"densities_{data.name}.npz", **panels)  # type: ignore[arg-type]
    try:
        plot_panels(panels, out / f"densities_{data.name}.png")
        plot_reliability({"SNL": arrays["pit"]}, out / f"reliability_{data.name}.png")
    except SelfnormError as error:  # no matplotlib: the numbers are there, the figures can wait
        print(error)


def _line(row: dict[str, Any]) -> str:
    named = ", ".join(str(row[k]) for k in ("dataset", "objective", "proposal", "seed"))
    value = row.get("exact", row.get("upper"))
    lost = f", {row['skipped_steps']} steps lost" if row["skipped_steps"] else ""
    return (
        f"{named}, M = {row['n_samples']}: {value:.3f} nats, MAE {row['mae']:.3f}, best at "
        f"{row['best_step']} of {row['n_steps']}{lost}, {row['seconds']:.0f} s"
    )
