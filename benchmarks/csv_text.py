"""CPU time from a CSV file to coded rows, against ``pandas.read_csv`` of the same file.

Both take turns in one process; the least of many runs counts. The file has 40,000 rows of five
numbers, with all digits that doubles have and with four decimals.

    python benchmarks/csv_text.py [--runs 20] [--out results/speed]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from measuring import write
from selfnorm.cli.files import read_table
from selfnorm.columns import Schema

NAMES = list("abcde")


def coded_rows(path: Path) -> Any:
    """A file of text read, its columns detected, its rows encoded."""
    table = read_table(path).read(NAMES)
    return Schema.detect(table, missing=True).encode(table)


def seconds(function: Callable[[Path], Any], path: Path) -> float:
    """CPU time of one call."""
    begin = time.process_time()
    function(path)
    return time.process_time() - begin


def measured(path: Path, decimals: int | None, runs: int) -> dict[str, Any]:
    """The least times of both for one file."""
    values = np.random.default_rng(0).normal(size=(40_000, 5))
    frame = pd.DataFrame(values if decimals is None else values.round(decimals), columns=NAMES)
    frame.to_csv(path, index=False)
    pairs = [(seconds(coded_rows, path), seconds(pd.read_csv, path)) for _ in range(runs)]
    own, peer = (min(times) for times in zip(*pairs, strict=True))
    return {
        "cells": values.size,
        "decimals": decimals,
        "coded_rows_seconds": own,
        "read_csv_seconds": peer,
        "ratio": own / peer,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("results/speed"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "numbers.csv"
        rows = [measured(path, decimals, options.runs) for decimals in (None, 4)]
    for row in rows:
        print(f"{row['decimals'] or 'all'} decimals: {row['ratio']:.2f} x pandas.read_csv")
    write(options.out / "csv.json", rows)


if __name__ == "__main__":
    main()
