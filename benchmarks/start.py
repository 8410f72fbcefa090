"""How long until something happens? CPU seconds of imports and of the command line's short answers.

    python benchmarks/start.py --out results/defaults/start.json

Each command runs in a process of its own, once to warm the disk and then ``--repeats`` times; the
median of user and system time is told. ``used``: the package and a name of it that needs torch.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from measuring import write

CLI = ["-m", "selfnorm"]
COMMANDS = {
    "selfnorm --help": [*CLI, "--help"],
    "selfnorm --version": [*CLI, "--version"],
    "selfnorm fit, a missing file": [*CLI, "fit", "missing.csv", "-o", "model"],
    "selfnorm score, a missing model": [*CLI, "score", "missing", "missing.csv"],
    "import selfnorm": ["-c", "import selfnorm"],
    "import selfnorm, used": ["-c", "import selfnorm; selfnorm.EBM"],
    "import torch": ["-c", "import torch"],
}


def cpu_seconds(arguments: list[str], folder: str) -> float:
    """Of one process, its children included."""
    before = os.times()
    subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, check=False)
    after = os.times()
    return sum(after[2:4]) - sum(before[2:4])


def main() -> None:
    """Measure all commands in turns."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results/defaults/start.json"))
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    taken: dict[str, list[float]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.repeats + 1):
            for name, arguments in COMMANDS.items():
                taken[name].append(cpu_seconds(arguments, folder))
    rows = [
        {"command": name, "cpu_seconds": round(statistics.median(each[1:]), 3)}
        for name, each in taken.items()
    ]
    for row in rows:
        print(f"{row['cpu_seconds']:6.3f}  {row['command']}")
    write(args.out, rows)


if __name__ == "__main__":
    main()
