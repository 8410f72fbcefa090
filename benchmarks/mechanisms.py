"""What is each special mechanism of table chains worth? Switched off in turn, on small tables.

    python benchmarks/mechanisms.py --data DIR                        # 16 small tables, then gaps
    python benchmarks/mechanisms.py --data DIR --tables adult magic   # and some larger ones

Each mechanism is switched off alone; all else, seeds included, stays as ``EnergyDensity()`` has it.
The figures are mean log-likelihoods with the mechanism minus those without, zero where a fit with
defaults does not use it: of held-out rows, and of the second half of their columns given the first
(``conditional``, 100 rows). *Small*: the 16 tables of
``defaults.py``, with its splits and units. *Gaps*: tables of ``tables.py gaps``, 600 training rows
with 40 % of their cells removed, complete test rows. *Large*: 4,000 training rows without gaps of
such tables, 16,000 of 17 columns drawn from a normal distribution (``normal``), and 10,000 of two
parameters and what is observed of them with one of two errors (``two scales``). ``consistency`` is
the disagreement of conditionals with the joint density. Runs that the file has are not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

import defaults
import table_frames as frames
from measuring import Row, Stopwatch, rows_in, write
from selfnorm import EnergyDensity, Schema
from selfnorm.chain import TableChain
from selfnorm.tables import members, training

GAPS = ("adult", "shoppers", "penguins", "california")
LARGE = ("adult", "shoppers", "magic", "california", "diamonds", "power", "normal")
LARGE += ("two scales",)
GAP_ROWS, GAP_SHARE, LARGE_ROWS, MOST_TESTED, CONDITIONED = 600, 0.4, 4000, 3000, 100
SCALES, OBSERVED_ROWS = (1.0, 0.1), 10_000
NORMAL_ROWS, NORMAL_COLUMNS, NORMAL_FACTORS, NORMAL_NOISE = 16_000, 17, 5, 0.3
ALL_ON = "all on"


# Switches: each puts something in place of what the library does


@contextmanager
def chains_without(option: str) -> Iterator[None]:
    """Chains that are built without an option."""
    build = TableChain.__init__

    def without(self: TableChain, parts: Any, **options: Any) -> None:
        build(self, parts, **options | {option: False})

    with mock.patch.object(TableChain, "__init__", without):
        yield


@contextmanager
def bent() -> Iterator[None]:
    """Numbers are always mapped to normal scores."""
    with mock.patch.object(training, "_straight_columns", return_value=False):
        yield


@contextmanager
def kinds(keep: Callable[[members.Kind], bool]) -> Iterator[None]:
    """Simple densities of some kinds alone."""
    every = members.kinds_for
    with mock.patch.object(members, "kinds_for", lambda *a, **o: filter(keep, every(*a, **o))):
        yield


@contextmanager
def alone() -> Iterator[None]:
    """No simple densities in the mixture; they still choose the coordinates."""
    mix = training._mix
    with mock.patch.object(training, "_mix", lambda first, _, *more: mix(first, {}, *more)):
        yield


@contextmanager
def not_completed() -> Iterator[None]:
    """Gaps are never drawn while training."""
    start = training._Runs.__init__
    with mock.patch.object(training._Runs, "__init__", lambda self, *a: start(self, *a[:-1], None)):
        yield


@contextmanager
def not_refitted() -> Iterator[None]:
    """Orders trained by folds do not go on with all rows."""

    def stay(self: Any, chain: Any, history: Any) -> tuple[str, int]:  # noqa: ARG001
        return history.stopped, history.n_steps

    with mock.patch.object(training._Runs, "last", stay):
        yield


@contextmanager
def no_folds() -> Iterator[None]:
    """A part of the rows is held out from all orders."""
    options = training.table_options
    with mock.patch.object(
        training, "table_options", lambda *a, **o: replace(options(*a, **o), orders_per_fold=0)
    ):
        yield


@contextmanager
def no_map_correction() -> Iterator[None]:
    """Scores of folds are not corrected for a map that has seen the rows."""
    with mock.patch.object(members, "by_another_map", lambda _, __, x: torch.zeros(len(x))):
        yield


def uses(name: str) -> Callable[[EnergyDensity], bool]:
    """Whether a member whose name holds a word has a weight."""
    return lambda fitted: any(name in m.name and m.weight > 0 for m in fitted.members_[1:])


def folded(fitted: EnergyDensity) -> bool:
    """Whether a table was judged by folds."""
    return "folds" in fitted.judgement_.how


def chain_of(fitted: EnergyDensity) -> TableChain:
    """The chain of a model."""
    assert isinstance(fitted.model_, TableChain)
    return fitted.model_


def straight(fitted: EnergyDensity) -> bool:
    """Whether the columns are used as they are."""
    return chain_of(fitted).columns.knots.shape[-1] == 2


# what is switched off: whether a fitted model uses it, and the switch
Switch = tuple[Callable[[EnergyDensity], bool], Callable[[], AbstractContextManager[None]]]
MECHANISMS: dict[str, Switch] = {
    "lines": (
        lambda fitted: chain_of(fitted).lines is not None,
        lambda: mock.patch.object(members, "has_ridge", return_value=False),
    ),
    "straight columns": (straight, bent),
    "ordered levels": (
        lambda fitted: len(chain_of(fitted).layout.ordered) > 0,
        lambda: chains_without("ordered"),
    ),
    "drawn gaps": (folded, not_completed),
    "folds": (folded, no_folds),
    "last run": (folded, not_refitted),
    "map correction": (
        lambda fitted: folded(fitted) and not straight(fitted), no_map_correction,
    ),
    "simple members": (lambda fitted: len([m for m in fitted.members_ if m.weight > 0]) > 1, alone),
    "kernels": (uses("kernels"), lambda: kinds(lambda kind: kind.components != 0)),
    "several Gaussians": (uses("Gaussians"), lambda: kinds(lambda kind: kind.components <= 1)),
}  # fmt: skip


# Tables


def small(name: str, split: int, data: Path) -> tuple[Any, Any, Schema]:
    """Rows of a table of ``defaults.py``."""
    x = defaults.spread(defaults.rows_of(name, data))
    x = x[np.random.default_rng(split).permutation(len(x))]
    train, test = x[: int(0.7 * len(x))], x[int(0.7 * len(x)) :]
    train, test = ((rows - train.mean(0)) / train.std(0) for rows in (train, test))
    names = [column.name for column in Schema.detect(train).columns]
    return train, test, Schema.detect(train, dict.fromkeys(names, "continuous"))


def mixed(name: str, split: int, data: Path, gaps: bool) -> tuple[Any, Any, Schema]:
    """Rows of a table of ``tables.py``, with or without gaps."""
    table = frames.complete(frames.read_raw(name, data))
    schema = Schema.detect(table)
    train, test = frames.split(table, split)
    train = frames.at_most(train, GAP_ROWS if gaps else LARGE_ROWS, split)
    if gaps:
        train = frames.remove_cells(train, frames.random_gaps(train, GAP_SHARE, split))
    return train, frames.at_most(test, MOST_TESTED, split), schema


def normal(split: int) -> tuple[Any, Any, Schema]:
    """Rows of a normal distribution: columns are sums of a few factors, and noise."""
    rng = np.random.default_rng(split)
    factors = rng.normal(size=(NORMAL_ROWS + MOST_TESTED, NORMAL_FACTORS))
    x = factors @ rng.normal(size=(NORMAL_FACTORS, NORMAL_COLUMNS))
    x = x + NORMAL_NOISE * rng.normal(size=x.shape)
    return x[:NORMAL_ROWS], x[NORMAL_ROWS:], Schema.detect(x)


def two_scales(split: int) -> tuple[Any, Any, Schema]:
    """Rows of two parameters, and of what is observed of them with a small or a large error."""
    rng = np.random.default_rng(split)
    n = OBSERVED_ROWS + MOST_TESTED
    parameters = rng.uniform(-10, 10, size=(n, 2))
    observed = parameters + rng.choice(SCALES, size=(n, 1)) * rng.normal(size=(n, 2))
    x = np.hstack([parameters, observed])
    return x[:OBSERVED_ROWS], x[OBSERVED_ROWS:], Schema.detect(x)


DRAWN = {"normal": normal, "two scales": two_scales}


def rows_for(name: str, split: int, data: Path) -> tuple[Any, Any, Schema]:
    """Training and test rows of a table by its name here, and their schema."""
    if name in defaults.REPORTED:
        return small(name, split, data)
    if name in DRAWN:
        return DRAWN[name](split)
    return mixed(name.removesuffix(", gaps"), split, data, name.endswith(", gaps"))


def fit(name: str, split: int, data: Path, mechanism: str) -> tuple[EnergyDensity, Row]:
    """One fit without a mechanism."""
    train, test, schema = rows_for(name, split, data)
    clock = Stopwatch()
    switch = MECHANISMS[mechanism][1]() if mechanism != ALL_ON else mock.patch.dict({})
    with warnings.catch_warnings(), switch:
        warnings.simplefilter("ignore")
        fitted = EnergyDensity(
            method="autoregressive", schema=schema, random_state=split
        ).fit(train)  # fmt: skip
        scores = fitted.score_samples(test)
        few = test[:CONDITIONED] if isinstance(test, np.ndarray) else None
        few = frames.at_most(test, CONDITIONED, split) if few is None else few
        names = [column.name for column in schema.columns]
        conditional = float(fitted.log_prob(few, given=names[: len(names) // 2]).mean())
    kept = {m.name: round(m.weight, 3) for m in fitted.members_ if m.weight > 0}
    row = {"table": name, "split": split, "mechanism": mechanism}
    row |= {"test": float(scores.mean()), "conditional": conditional}
    row |= {"consistency": fitted.consistency_["conditionals"]}
    return fitted, row | clock() | {"members": kept}


def used(fitted: EnergyDensity, name: str) -> list[str]:
    """The mechanisms that a fit with defaults used."""
    names = [m for m, (applies, _) in MECHANISMS.items() if applies(fitted)]
    return [m for m in names if m != "drawn gaps" or name.endswith(", gaps")]


KINDS: dict[str, Callable[[str], bool]] = {
    "small": lambda table: table in defaults.REPORTED,
    "gaps": lambda table: table.endswith(", gaps"),
    "large": lambda table: table in LARGE,
}


def summary(rows: list[Row]) -> list[Row]:
    """For each mechanism: what it earns on average, in nats, on each kind of table."""
    base = {(r["table"], r["split"]): r for r in rows if r["mechanism"] == ALL_ON}
    lines = []
    for mechanism in MECHANISMS:
        without = {(r["table"], r["split"]): r for r in rows if r["mechanism"] == mechanism}
        line: Row = {"mechanism": mechanism}
        for kind, belongs in KINDS.items():
            fits = [key for key in base if belongs(key[0])]
            unused = [key for key in fits if mechanism not in base[key]["used"]]
            compared = [*unused, *(key for key in fits if key in without)]
            if not compared:
                continue
            line[kind] = {"tables": len(compared), "used on": len(compared) - len(unused)}
            for figure in ("test", "conditional"):
                earned = [
                    (base[key][figure] - without.get(key, base[key])[figure], key[0])
                    for key in compared
                    if figure in base[key] and figure in without.get(key, base[key])
                ]
                if earned:
                    mean = float(np.mean([gain for gain, _ in earned]))
                    line[kind][figure] = {"mean": mean, "least": min(earned), "most": max(earned)}
        lines.append(line)
    return lines


def main() -> None:
    """Measure what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("results/defaults"))
    parser.add_argument("--splits", type=int, default=1)
    parser.add_argument("--mechanisms", nargs="*", choices=MECHANISMS, default=list(MECHANISMS))
    parser.add_argument("--tables", nargs="*", default=[])
    args = parser.parse_args()
    path = args.out / "mechanisms.json"
    rows = rows_in(path)
    tables = args.tables or [*defaults.REPORTED, *(f"{name}, gaps" for name in GAPS)]

    def add(row: Row) -> None:
        rows.append(row)
        write(path, rows, summary=summary(rows))
        print(json.dumps(row), flush=True)

    for split in range(args.splits):
        for name in tables:
            done = {r["mechanism"]: r for r in rows if (r["table"], r["split"]) == (name, split)}
            if ALL_ON not in done:
                fitted, row = fit(name, split, args.data, ALL_ON)
                done[ALL_ON] = row | {"used": used(fitted, name)}
                add(done[ALL_ON])
            for mechanism in args.mechanisms:
                if mechanism in done[ALL_ON]["used"] and mechanism not in done:
                    add(fit(name, split, args.data, mechanism)[1])
    for line in summary(rows):
        means = {kind: line[kind]["test"]["mean"] for kind in KINDS if kind in line}
        print(line["mechanism"], {kind: round(mean, 3) for kind, mean in means.items()})
    if not all(math.isfinite(row["test"]) for row in rows):
        print("some scores are not finite")


if __name__ == "__main__":
    main()
