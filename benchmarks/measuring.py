"""What the benchmarks share: variants timed in turns, work as CUDA graphs, the result file."""

from __future__ import annotations

import importlib
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from selfnorm.paper.report import commit, hardware, versions

Work = Callable[[], Any]


def provenance(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Where the figures of this process come from."""
    script = f"benchmarks/{Path(sys.argv[0]).name}"
    # where a folder outside of this tree lies is nobody's business
    paths = [(word, Path(word)) for word in sys.argv[1:]]
    words = [path.name if path.is_absolute() or ".." in path.parts else w for w, path in paths]
    return {
        "command": shlex.join(["python", script, *words]),
        "commit": commit(Path(__file__).parent),
        "versions": versions(),
        "hardware": hardware(device),
    }


def write(
    path: Path, rows: list[dict[str, Any]], device: torch.device | str = "cpu", **more: Any
) -> None:
    """A result file: one row a run, with its provenance; numbers that are not finite are null."""
    content = {"table": path.stem, **provenance(device), **more, "rows": rows}
    content = json.loads(json.dumps(content, default=float), parse_constant=lambda _: None)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def rows_in(path: Path) -> list[dict[str, Any]]:
    """The rows that a result file has; none where there is no file."""
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"] if path.exists() else []
    return rows


def need(device: str) -> None:
    """End with a message where there is no such device."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        sys.exit("there is no CUDA device here; a rehearsal on the CPU: --device cpu")


def peer(module: str) -> Any:
    """A module of another library, or the end with a message how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        sys.exit(f"{error}; the libraries compared with: pip install -e '.[all]' --group bench")


def synchronise(device: torch.device | str) -> None:
    """Wait until the device has done what it was given."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def captured(work: Work, device: str) -> Work:
    """``work`` as a CUDA graph, or as it is on a CPU.

    A graph holds addresses only: what it returns keeps alive everything that ``work`` refers to.
    """
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
    works: dict[str, Work], rounds: int, each: int, device: torch.device | str = "cpu"
) -> dict[str, list[float]]:
    """Milliseconds per call; the variants take turns, so that a busy machine slows all alike."""
    for work in works.values():  # warms up, compiles and captures
        for _ in range(10):
            work()
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            synchronise(device)
            began = time.perf_counter()
            for _ in range(each):
                work()
            synchronise(device)
            times[name].append(1e3 * (time.perf_counter() - began) / each)
    return times


def ratio(times: list[float], others: list[float]) -> float:
    """Median over rounds of one variant's time in another's."""
    return statistics.median(a / b for a, b in zip(times, others, strict=True))
