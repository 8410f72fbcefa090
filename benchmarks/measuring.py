"""What the benchmarks share: timing in turns, processes, result files and where they come from.

Nothing here needs more than the standard library before it is called: some peers stand in
environments without torch.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import shlex
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "src"))  # peers' environments have no selfnorm
from selfnorm.paper.provenance import commit, hardware, versions

Row = dict[str, Any]
Work = Callable[[], Any]
PACKAGES = ("selfnorm", "torch", "numpy", "scipy", "scikit-learn", "pandas", "zuko", "ngboost")
PACKAGES += ("xgboost", "sdmetrics", "arfpy", "miceforest", "lightgbm", "pyod", "shap")
PACKAGES += ("harmonic", "jax", "dynesty", "nautilus-sampler")


# Result files


def provenance(device: Any = "cpu") -> Row:
    """Where the figures of this process come from."""
    # where a folder outside of this tree lies is nobody's business
    paths = [(word, Path(word)) for word in sys.argv[1:]]
    words = [path.name if path.is_absolute() or ".." in path.parts else w for w, path in paths]
    return {
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *words]),
        "commit": commit(Path(__file__).parent),
        "versions": versions(PACKAGES),
        "hardware": hardware(device),
    }


def write_json(path: Path, content: Row) -> None:
    """Write a file whole, whenever the benchmark is killed; numbers not finite are null."""
    finite = json.loads(json.dumps(content, default=float), parse_constant=lambda _: None)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(finite, indent=1) + "\n")
    os.replace(part, path)


def write(path: Path, rows: list[Row], device: Any = "cpu", **more: Any) -> None:
    """A result file: one row a run, with its provenance."""
    write_json(path, {"table": path.stem, **provenance(device), **more, "rows": rows})


def rows_in(path: Path) -> list[Row]:
    """The rows that a result file has; none where there is no file."""
    rows: list[Row] = json.loads(path.read_text())["rows"] if path.exists() else []
    return rows


def mean_and_sd(values: list[float], digits: int = 3) -> str:
    """Mean and, of several values, standard deviation."""
    if not values:
        return "–"
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):,.{digits}f}{spread}"


class Results:
    """Rows of one part of a benchmark on disk; finished rows are kept by the next call.

    The methods run in environments and on machines of their own: ``made_by`` lists them, and each
    row says by number which one it comes from.
    """

    def __init__(self, path: Path, made_by: Row) -> None:
        self.path, self.content = path, {"table": path.stem, "made_by": [], "rows": []}
        if path.exists():
            self.content = json.loads(path.read_text())
        self.made_by = self._number(made_by)

    def _number(self, made_by: Row) -> int:
        listed = self.content["made_by"]
        if made_by not in listed:
            listed.append(made_by)
        return listed.index(made_by)

    @property
    def rows(self) -> list[Row]:
        """All rows so far."""
        return self.content["rows"]

    def has(self, keys: Row) -> bool:
        """Whether a row with these values is there."""
        return any(all(row.get(k) == v for k, v in keys.items()) for row in self.rows)

    def add(self, row: Row, **others: Row) -> None:
        """Add a row and write the file; ``others``: what else took part, by role."""
        numbers = {role: self._number(made_by) for role, made_by in others.items()}
        self.rows.append({**row, **numbers, "made_by": self.made_by})
        write_json(self.path, self.content)


# Processes and libraries


def in_processes(
    function: Callable[..., Any], calls: Sequence[tuple[Any, ...]], jobs: int
) -> Iterator[Any]:
    """``function(*call)`` for each call, as they end; ``jobs`` processes, or this one if 1."""
    if jobs == 1:
        for call in calls:
            yield function(*call)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        for done in as_completed([pool.submit(function, *call) for call in calls]):
            yield done.result()


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise ``TimeoutError`` after so many seconds of this process's processor time."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"did not end in {seconds:g} s of a core")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds or 0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def need(device: str) -> None:
    """End with a message where there is no such device."""
    import torch

    if device.startswith("cuda") and not torch.cuda.is_available():
        sys.exit("there is no CUDA device here; a rehearsal on the CPU: --device cpu")


def peer(module: str) -> Any:
    """A module of another library, or the end with a message how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        sys.exit(f"{error}; the libraries compared with: pip install -e '.[all]' --group bench")


# Times


class Stopwatch:
    """Seconds and CPU seconds since it was made."""

    def __init__(self) -> None:
        self.began, self.worked = time.perf_counter(), time.process_time()

    def __call__(self, digits: int = 2) -> dict[str, float]:
        seconds, worked = time.perf_counter() - self.began, time.process_time() - self.worked
        return {"seconds": round(seconds, digits), "cpu_seconds": round(worked, digits)}


def synchronise(device: Any) -> None:
    """Wait until the device has done what it was given."""
    import torch

    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def now(device: Any) -> float:
    """The clock, once the device has done what it was given."""
    synchronise(device)
    return time.perf_counter()


def captured(work: Work, device: str) -> Work:
    """``work`` as a CUDA graph, or as it is on a CPU.

    A graph holds addresses only: what it returns keeps alive everything that ``work`` refers to.
    """
    import torch

    if torch.device(device).type != "cuda":
        return work
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(4):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()

    def replay(_owner: Work = work) -> None:
        graph.replay()

    return replay


def in_turn(
    works: dict[str, Work], rounds: int, calls: int, device: Any = "cpu"
) -> dict[str, list[float]]:
    """Milliseconds per call; the variants take turns, so that a busy machine slows all alike."""
    for work in works.values():  # warms up, compiles and captures
        for _ in range(10):
            work()
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            began = now(device)
            for _ in range(calls):
                work()
            times[name].append(1e3 * (now(device) - began) / calls)
    return times


def ratio(times: list[float], others: list[float]) -> float:
    """Median over rounds of one variant's time in another's."""
    return statistics.median(a / b for a, b in zip(times, others, strict=True))
