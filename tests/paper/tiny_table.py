"""A table in miniature, whose rows are kept at once; and whether processes have ended."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from selfnorm.errors import DataError
from selfnorm.paper.report import Table


@dataclass
class Seed:
    seed: int

    def keys(self):
        return {"seed": self.seed}


def run(*, recipe, out, seeds=None, fail_at=None, stop_at=None, **_):
    """One row a seed; for the tests, one fails, or is interrupted."""
    table = Table("tiny", recipe, Path(out))
    seeds = seeds or {"a": 3, "b": 2}[recipe]
    table.directory.mkdir(parents=True, exist_ok=True)
    for seed in (run.seed for run in table.missing([Seed(seed) for seed in range(seeds)])):
        if (recipe, seed) == fail_at:
            raise DataError("a broken file")
        if (recipe, seed) == stop_at:
            raise KeyboardInterrupt
        with (table.directory / "trained.txt").open("a") as file:
            file.write(f"{seed}\n")
        table.add({"seed": seed, "square": seed**2})
    table.write_page(f"# Tiny, recipe {recipe}", f"{len(table.rows)} rows")
    return table


def gone(pid):
    """Whether a process has ended, within a while."""
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False
