"""Do tables of numbers lose by a schema? ``EnergyDensity`` on the six sets of ``density.py``.

    python benchmarks/continuous.py --data DIR --device cuda --out results/density

The table's chain scores whole numbers and repeated values by their mass, ``density.py`` spread them
out and scored a density. To compare, a mass is divided by the width that its value had there: the
step of the grid, or a hundredth of the deviation for a repeated value. The spread-out score is at
most that (Jensen's inequality), so that a small gain on grids is none. Rows, splits and units are
those of ``density.py``. Rows that the file has of other sets and seeds are kept.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tabular
from measuring import need, rows_in, write
from selfnorm import EnergyDensity, Schema
from selfnorm.chain import TableChain
from selfnorm.datasets import maf_benchmark
from selfnorm.paper.provenance import commit

SETS = ("california", "magic.gamma", "mammography", "shuttle", "power", "bsds300")


def rows_of(name: str, data: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Rows to fit, test rows, the deviation of every column, and the width of its steps (or 0)."""
    if name in tabular.NAMES:
        x = tabular.read_table(data / "tabular" / f"{name}.npz")
        shuffled = x[np.random.RandomState(42).permutation(len(x))]
        train, val, test = maf_benchmark.split_by_order(shuffled)
        parts = tabular.load(name, data)
        return np.concatenate([train, val]), test, parts.sd.numpy(), parts.columns.step.numpy()
    parts = tabular.load(name, data)
    fitted = torch.cat([parts.train, parts.val]).double().numpy()
    unit = np.ones(parts.dim)
    return fitted, parts.test.double().numpy(), unit, 0 * unit


def scored(model: EnergyDensity, coded: np.ndarray, device: str) -> np.ndarray:
    """``score_samples`` of coded rows, on the device: a CPU takes minutes for 63 columns."""
    assert isinstance(model.model_, TableChain)
    packed, slope = model.model_.columns.pack(torch.from_numpy(coded))
    log_p = model.model_.to(device).log_prob(packed.to(device))
    return (log_p.cpu() + slope.sum(-1)).numpy()


def measure(
    name: str, data: Path, device: str, seed: int, max_time: float | None = None
) -> dict[str, Any]:
    """One fit with defaults, and the test log-likelihood in the units of ``density.py``."""
    fitted, test, sd, step = rows_of(name, data)
    every = np.concatenate([fitted, test])
    schema = Schema.detect(every)
    if name not in tabular.NAMES:  # sets whose loaders leave nothing to dequantise
        schema = Schema.detect(every, {c.name: "continuous" for c in schema.columns})
    began = time.perf_counter()
    how: dict[str, Any] = {"device": device, "random_state": seed, "max_time": max_time}
    model = EnergyDensity(method="autoregressive", schema=schema, **how).fit(fitted)
    seconds = time.perf_counter() - began
    coded, _ = schema.encode(test)
    columns = [schema.columns.index(schema.modelled[part.column]) for part in schema.parts]
    n_codes = np.array([part.n_codes for part in schema.parts])
    has_cells = np.array([part.step > 0 for part in schema.parts])
    width = np.where(step > 0, step, 0.01)[columns]
    is_mass = (coded[..., 0] != n_codes) | has_cells
    change = np.where(is_mass, -np.log(width), np.log(sd[columns])).sum(1)
    log_p = scored(model, coded, device) + change
    return {
        "set": name,
        "seed": seed,
        "test": float(log_p.mean()),
        "test_se": float(log_p.std() / np.sqrt(len(log_p))),
        "seconds": seconds,
        "held_out": model.judgement_.score,
        "steps": model.n_iter_,
        "best_step": model.history_.best_step,
        "max_time": max_time,
        "threads": torch.get_num_threads(),
        "commit": commit(Path(__file__).parent),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sets", nargs="*", default=SETS, choices=SETS)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--max-time", type=float, default=None)
    parser.add_argument("--out", type=Path, default=Path("results/density"))
    given = parser.parse_args()
    need(given.device)
    path = given.out / f"continuous_{given.device}.json"
    rows = rows_in(path)
    for name in given.sets:
        for seed in range(given.first_seed, given.first_seed + given.seeds):
            row = measure(name, given.data, given.device, seed, given.max_time)
            print(json.dumps(row), flush=True)
            others = [other for other in rows if (other["set"], other["seed"]) != (name, seed)]
            rows = [*others, row]
            write(path, rows, given.device)


if __name__ == "__main__":
    main()
