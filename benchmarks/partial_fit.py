"""Half a table, then the other half by ``partial_fit``, against one fit of all.

    python benchmarks/partial_fit.py --data DATA --out results/partial_fit

Ten tables: at most 1,600 rows, three fifths of all, are trained on, 1,000 others are scored.
Defaults; one split each. Rows are written as they come; a second call adds what is missing.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import numpy as np

from measuring import Stopwatch, rows_in, write

TABLES = ("magic", "california", "shuttle", "mammography")  # of the folder tabular
ADBENCH = ("Cardiotocography", "Waveform", "thyroid", "yeast", "satimage", "vowels")
TRAINED, SCORED, CLOSE = 1600, 1000, 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("results/partial_fit"))
    args = parser.parse_args()
    import torch

    from selfnorm import EnergyDensity

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    path = args.out / "partial_fit.json"
    rows = {row["dataset"]: row for row in rows_in(path)}
    folders = [("tabular", name) for name in TABLES] + [("adbench", name) for name in ADBENCH]
    for folder, name in folders:
        file = next(iter((args.data / folder).glob(f"*{name}*.npz")), None)
        if name in rows or file is None:
            continue
        with np.load(file, allow_pickle=True) as content:
            table = content["X"].astype(float)
        table = table[np.random.default_rng(0).permutation(len(table))]
        trained = min(TRAINED, 3 * len(table) // 5)
        train, test = table[:trained], table[trained : trained + SCORED]
        half, clock = len(train) // 2, Stopwatch()
        # one schema, so that likelihoods are of one measure
        density = EnergyDensity(random_state=0, method="autoregressive").fit(train)
        schema = density.schema_
        part = EnergyDensity(random_state=0, method="autoregressive", schema=schema)
        part.fit(train[:half])
        first = part.score(test)
        part.partial_fit(train[half:])
        row = {"dataset": name, "all": density.score(test), "half": first}
        row |= {"halves": part.score(test), "columns": table.shape[1], **clock()}
        rows[name] = row | {"lost": row["all"] - row["halves"]}
        close = sum(row["lost"] <= CLOSE for row in rows.values())
        write(path, [*rows.values()], close=close)
        print(rows[name], flush=True)


if __name__ == "__main__":
    main()
