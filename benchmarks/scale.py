"""Tables of more rows than memory: peak memory, equal answers, cost by rows and columns, kills.

    python benchmarks/scale.py memory --rows 1e6,1e7 [--out results/scale]
    python benchmarks/scale.py same --rows 1e6
    python benchmarks/scale.py schemas --data-dir DATA
    python benchmarks/scale.py learned
    python benchmarks/scale.py cost --rows 1e4,1e5,1e6 --columns 5,20,80
    python benchmarks/scale.py ranks --rows 3e5 --steps 200
    python benchmarks/scale.py cluster --rows 1e6
    python benchmarks/scale.py kills --times 20

Tables are of ten mixed columns (four of continuous numbers, two of whole ones, two of labels, a
date, a truth value), a million rows a file; those of ``cost`` by columns are of numbers. Every case
runs in a process of its own. Memory is the peak of resident memory beyond what the process had
after the imports and a fit to a few rows. Seconds are those of the CPU, of one thread.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as parquet
import torch
from safetensors.torch import load_file

import selfnorm as sn
from measuring import Row, write
from selfnorm.columns import Scan, Shards
from selfnorm.tables.density import EnergyDensity

IN_FILE = 10**6
FIT: Row = {"random_state": 0, "max_steps": 1000, "hidden": 64}
TABLES = {
    "adult": "adult.data",
    "diamonds": "diamonds.csv",
    "german": "german.csv",
    "horse-colic": "horse-colic.csv",
    "magic": "magic04.data",
    "shoppers": "online_shoppers_intention.csv",
    "penguins": "penguins.csv",
    "taxis": "taxis.csv",
}


def mixed(n: int, seed: int) -> pa.Table:
    """Ten columns that depend on each other."""
    rng = np.random.default_rng(seed)
    z = rng.normal(size=n)
    kind = np.clip((1.2 * z + rng.normal(size=n) + 2.5).astype(int), 0, 4)
    days = np.datetime64("2020-01-01") + rng.integers(0, 1000, n)
    return pa.table(
        {
            "x0": z,
            "x1": 0.5 * z + rng.normal(size=n),
            "x2": np.exp(rng.normal(size=n)),
            "x3": np.sin(3 * z) + 0.3 * rng.standard_t(4, size=n),
            "age": rng.integers(18, 90, n),
            "count": rng.poisson(np.exp(1 + 0.5 * z)),
            "kind": np.array(list("abcde"))[kind],
            "place": np.array([f"p{k}" for k in range(40)])[
                np.minimum(rng.geometric(0.1, n), 40) - 1
            ],
            "day": days,
            "flag": z + rng.normal(size=n) > 0,
        }
    )


def numbers(n: int, p: int, seed: int) -> pa.Table:
    """Columns of numbers, each of which leans on the one before it."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, p)).cumsum(1) / np.sqrt(np.arange(1, p + 1))
    return pa.table({f"x{j}": x[:, j] for j in range(p)})


def make(folder: Path, rows: int, columns: int | None = None) -> None:
    """Parquet files of so many rows, a million each."""
    folder.mkdir(parents=True)
    for k, first in enumerate(range(0, rows, IN_FILE)):
        n = min(IN_FILE, rows - first)
        table = mixed(n, k) if columns is None else numbers(n, columns, k)
        parquet.write_table(table, folder / f"{k:03}.parquet", row_group_size=100_000)


# Memory


def resident(what: str) -> int:
    """``VmRSS`` or ``VmHWM`` of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(what))


def measured(work: Callable[[], Any]) -> Row:
    """Seconds and peak memory of a piece of work, beyond what there was before it."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from now on
    before, began, wall = resident("VmRSS"), time.process_time(), time.perf_counter()
    work()
    return {
        "over_mb": round((resident("VmHWM") - before) / 2**20, 1),
        "cpu_seconds": round(time.process_time() - began, 2),
        "seconds": round(time.perf_counter() - wall, 2),
    }


def case(options: argparse.Namespace) -> None:
    """One case, in this process: scan, fit, score, or a fit in memory; a line of JSON for each."""
    folder, torch_threads = Path(options.folder), torch.set_num_threads(1)
    del torch_threads
    rows = int(float(options.rows))
    columns = int(options.columns) if options.columns else None
    if not folder.exists():  # by another process, whose memory does not count
        maker = multiprocessing.get_context("spawn").Process(
            target=make, args=(folder, rows, columns)
        )
        maker.start()
        maker.join()
    few = mixed(400, 1) if columns is None else numbers(400, columns, 1)
    warm = EnergyDensity(random_state=0, max_steps=5).fit(few)
    warm.score_arrow(few, normalizer="learned")
    same = {"rows": rows, "columns": columns or 10}

    def done(what: str, work: Callable[[], Any]) -> None:
        print(json.dumps({"what": what, **same, **measured(work)}), flush=True)

    density = EnergyDensity(**FIT | {"max_steps": options.steps})
    if "scan" in options.what:
        done("scan", lambda: Scan.of(Shards.of(folder)))
    if "fit" in options.what:
        done(f"fit, {options.steps} steps", lambda: density.fit(folder))
    if "memory" in options.what:
        table = parquet.read_table(folder).to_pandas()
        same["frame_mb"] = round(table.memory_usage(deep=False).sum() / 2**20, 1)
        same["frame_deep_mb"] = round(table.memory_usage(deep=True).sum() / 2**20, 1)
        done(f"fit in memory, {options.steps} steps", lambda: density.fit(table))
        del same["frame_mb"], same["frame_deep_mb"]
    if "score" in options.what:
        scored = folder.with_name(f"{folder.name}-scored")
        done("score, learned", lambda: density.score_batches(folder, scored, normalizer="learned"))
    if "quadrature" in options.what:
        scored = folder.with_name(f"{folder.name}-exact")
        done("score, quadrature", lambda: density.score_batches(folder, scored))


def in_process(folder: Path, rows: int, what: str, steps: int, columns: int | None = None) -> Any:
    """The same in a process of its own."""
    command = [sys.executable, __file__, "case", "--folder", str(folder), "--rows", str(rows)]
    command += ["--what", what, "--steps", str(steps)] + (
        ["--columns", str(columns)] * bool(columns)
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def rows_of(processes: list[Any]) -> list[Row]:
    """What processes printed, when all have ended."""
    lines = [line for process in processes for line in process.communicate()[0].splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


def memory(options: argparse.Namespace, work: Path) -> list[Row]:
    processes = []
    for text in options.rows.split(","):
        rows = int(float(text))
        what = options.what or ("scan" if rows > 3 * 10**7 else "scan,fit,score")
        processes.append(in_process(work / f"rows{rows}", rows, what, options.steps))
    return rows_of(processes)


def cost(options: argparse.Namespace, work: Path) -> list[Row]:
    """Seconds and memory by rows, of ten mixed columns, and by columns, of 100,000 rows."""
    processes = []
    for text in options.rows.split(","):
        rows = int(float(text))
        processes.append(in_process(work / f"r{rows}", rows, "scan,fit,score", options.steps))
    for text in options.columns.split(","):
        what = "scan,fit,score"
        folder = work / f"c{text}"
        processes.append(in_process(folder, 300_000, what, options.steps, int(text)))
    found = rows_of(processes)
    slopes = []
    for what in {row["what"] for row in found}:
        for by in ("rows", "columns"):
            other = {"rows": "columns", "columns": "rows"}[by]
            usual = 10 if by == "rows" else 300_000
            of = [r for r in found if r["what"] == what and r[other] == usual]
            of = [r for r in of if by == "rows" or r["columns"] != 10]
            if len({r[by] for r in of}) > 1:
                log = np.log([[r[by], r["cpu_seconds"] + 1e-3] for r in of])
                slope = float(np.polyfit(*log.T, 1)[0])
                slopes.append({"what": f"slope of {what}", "by": by, "slope": round(slope, 3)})
    return found + slopes


# Answers


def same(options: argparse.Namespace, work: Path) -> list[Row]:
    """A streamed fit and one in memory, of one seed and as many steps, on rows of neither."""
    rows, test = int(float(options.rows)), mixed(5000, 10**6)
    make(work / "same", rows)
    how = FIT | {"max_steps": options.steps}
    streamed = EnergyDensity(**how).fit(work / "same")
    in_memory = EnergyDensity(**how).fit(parquet.read_table(work / "same"))
    other = EnergyDensity(**how | {"random_state": 1}).fit(work / "same")
    scores = [model.score_samples(test) for model in (streamed, in_memory, other)]
    off = scores[0] - scores[1]
    return [
        {
            "rows": rows,
            "steps": options.steps,
            "streamed": float(scores[0].mean()),
            "in_memory": float(scores[1].mean()),
            "streamed_by_another_seed": float(scores[2].mean()),
            "difference": float(off.mean()),
            "standard_error": float(off.std() / np.sqrt(len(off))),
            "equal_fingerprints": streamed.schema_.fingerprint == in_memory.schema_.fingerprint,
        }
    ]


def schemas(options: argparse.Namespace, work: Path) -> list[Row]:
    """Fingerprints of tables of mixed columns by a scan of a file and by ``detect``."""
    found = []
    for name, file in TABLES.items():
        path = options.data_dir / "mixed" / file
        mark = "\t" if "\t" in path.read_text()[:200] else ","
        parsing = csv.ParseOptions(delimiter=mark)
        table = csv.read_csv(path, parse_options=parsing)
        table = table.rename_columns([f"c{k}" for k in range(table.num_columns)])
        parquet.write_table(table, work / f"{name}.parquet", row_group_size=1000)
        scanned = sn.Schema.scan(work / f"{name}.parquet", missing=True)
        detected = sn.Schema.detect(table, missing=True)
        found.append(
            {
                "table": name,
                "rows": table.num_rows,
                "scan": scanned.fingerprint,
                "detect": detected.fingerprint,
                "equal": scanned.fingerprint == detected.fingerprint,
            }
        )
    return found


def learned(options: argparse.Namespace, work: Path) -> list[Row]:
    """Scores a second of one core by the learned normalisers and by quadrature, in turns."""
    del work
    torch.set_num_threads(1)
    density = EnergyDensity(random_state=0, max_steps=options.steps).fit(mixed(20_000, 0))
    table = mixed(4096, 1)
    ways = ("quadrature", "learned")
    scores = {way: density.score_samples(table, normalizer=way) for way in ways}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(5):
        for way in ways:
            began = time.process_time()
            density.score_samples(table, normalizer=way)
            seconds[way].append(time.process_time() - began)
    best = {way: min(times) for way, times in seconds.items()}
    off = scores["learned"] - scores["quadrature"]
    return [
        {
            "rows_a_second": {way: round(table.num_rows / best[way]) for way in ways},
            "ratio": best["quadrature"] / best["learned"],
            "mean_difference": float(off.mean()),
            "mean_distance": float(np.abs(off).mean()),
            "largest": float(np.abs(off).max()),
            "learned_error_": density.learned_error_,
        }
    ]


# Ranks


def rank(options: argparse.Namespace) -> None:
    """One process of a group: a streamed fit, the loss of every step."""
    from selfnorm.density import Ranks, launched
    from selfnorm.density.distributed import DistributedTask

    torch.set_num_threads(1)
    losses, loss = [], DistributedTask.loss

    def noted(self: DistributedTask, batch: tuple[torch.Tensor, ...]) -> Any:
        value, metrics = loss(self, batch)
        losses.append(float(value.detach()))
        return value, metrics

    DistributedTask.loss = noted  # type: ignore[method-assign]
    fabric = launched()
    pieces = options.times // fabric.world_size
    began = time.perf_counter()
    density = EnergyDensity(random_state=0, max_steps=options.steps, batch_size=256)
    density.fit(options.folder, fabric=Ranks(fabric, pieces, "per_piece"))
    seconds = round(time.perf_counter() - began, 1)
    if fabric.is_global_zero:
        steps = density.history_.seconds
        print(json.dumps({"losses": losses, "fit": seconds, "steps": steps}), flush=True)
    fabric.barrier()
    os._exit(0)


def ranks(options: argparse.Namespace, work: Path) -> list[Row]:
    """A fit by one process in four pieces, by two in two each, by four: losses of every step."""
    make(work / "rows", int(float(options.rows)))
    told = {}
    for count in (1, 2, 4):
        group = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
        command = [sys.executable, *group, __file__, "rank", "--folder", str(work / "rows")]
        command += ["--steps", str(options.steps), "--times", "4"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if not lines:
            raise RuntimeError(done.stderr[-2000:])
        told[count] = json.loads(lines[-1])
    first = np.array(told[1]["losses"][: options.steps])
    return [
        {
            "ranks": count,
            "steps": options.steps,
            "seconds_of_fit": run["fit"],
            "seconds_of_steps": run["steps"],
            "first_loss": first[0],
            "largest_difference_of_losses": float(np.abs(losses - first).max()),
            "largest_relative_difference": float(np.abs(losses / first - 1).max()),
        }
        for count, run in told.items()
        for losses in [np.array(run["losses"][: options.steps])]
    ]


def cluster(options: argparse.Namespace, work: Path) -> list[Row]:
    """``examples/cluster.py``: a fit by two processes, scores by two workers of Ray and by one."""
    example = Path(__file__).parents[1] / "examples" / "cluster.py"
    command = [sys.executable, "-W", "ignore", str(example), str(work), options.rows]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    return [json.loads(done.stdout.splitlines()[-1])]


# Kills


def kills(options: argparse.Namespace, work: Path) -> list[Row]:
    """Streamed fits and scores that are killed at random moments, and begun again, end alike."""
    make(work / "rows", 300_000)
    script = (
        "import sys; from pathlib import Path; from selfnorm import EnergyDensity\n"
        "w = Path(sys.argv[1])\n"
        "d = EnergyDensity(random_state=0, max_steps=150, hidden=16)\n"
        "d.fit(w.parent / 'rows', checkpoint=w / 'run.ckpt'); d.save(w / 'model')\n"
        "d.score_batches(w.parent / 'few', w / 'scored', normalizer='learned')\n"
    )
    (work / "few").mkdir()
    for k in range(8):
        parquet.write_table(mixed(3000, 100 + k), work / "few" / f"{k}.parquet")

    def run(folder: Path, moments: list[float]) -> int:
        """Kills that came before the end."""
        folder.mkdir()
        command = [sys.executable, "-W", "ignore", "-c", script, str(folder)]
        for count, moment in enumerate([*moments, 1e9]):
            process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
            try:
                process.wait(moment)
                if process.returncode:
                    raise RuntimeError(f"{folder} ended with {process.returncode}")
                return count
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.wait()
        return len(moments)

    def bytes_of(folder: Path) -> dict[str, bytes]:
        weights = load_file(folder / "model" / "model.safetensors")  # the header has seconds
        found = {name: weight.numpy().tobytes() for name, weight in weights.items()}
        return found | {path.name: path.read_bytes() for path in (folder / "scored").iterdir()}

    began = time.perf_counter()
    run(work / "alone", [])
    whole = time.perf_counter() - began
    expected, n_kills, n_runs, rng = bytes_of(work / "alone"), 0, 0, random.Random(0)
    while n_kills < options.times:
        folder = work / f"killed{n_runs}"
        n_kills += run(folder, [rng.uniform(0.15, 1.0) * whole for _ in range(4)])
        n_runs += 1
        if bytes_of(folder).keys() != expected.keys():
            raise AssertionError(f"{folder} has other files")
        differ = [n for n, b in bytes_of(folder).items() if b != expected[n]]
        if differ:
            return [{"kills": n_kills, "runs": n_runs, "equal": False, "differ": differ}]
    return [{"kills": n_kills, "runs": n_runs, "seconds_alone": round(whole, 1), "equal": True}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    ways = {f.__name__: f for f in (memory, same, schemas, learned, cost, ranks, cluster, kills)}
    parser.add_argument("way", choices=[*ways, "case", "rank"])
    parser.add_argument("--rows", default="1e6")
    parser.add_argument("--columns", default="")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--what", default="", help="scan, fit, score, quadrature, memory")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--work", type=Path, help="folder for tables; a temporary one by default")
    parser.add_argument("--name", help="of the file of results; by default the way")
    parser.add_argument("--out", type=Path, default=Path("results/scale"))
    options = parser.parse_args()
    warnings.simplefilter("ignore", sn.SelfnormWarning)
    if options.way in ("case", "rank"):
        (case if options.way == "case" else rank)(options)
        return
    work = Path(tempfile.mkdtemp(prefix="scale-", dir=options.work))
    try:
        found = ways[options.way](options, work)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    write(options.out / f"{options.name or options.way}.json", found)
    for row in found:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
