"""Values that a change of the inside must leave as they are, bit for bit.

``python -m tests.golden.pins write FILE`` fits small models of every family, saves and loads them,
reads a corpus of text files and runs the command line; ``compare FILE`` does it again and prints
what moved, with exit code 1. ``--data DIR`` adds the schemas and coded rows of the tables in a data
directory, ``--within 1e-6`` lets numbers differ by so much, ``--only NAME`` takes the pins whose
names begin so. The bits depend on the machine and on torch: write the file where it is compared.
"""

import argparse
import contextlib
import io
import json
import os
import sys
import tempfile
import time
import traceback
import warnings
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pandas as pd
import torch

import selfnorm as sn
from selfnorm.cli import main
from selfnorm.cli.files import read_table
from tests.contract.answers import answer, difference, leaves, pinned
from tests.contract.specimens import SPECIMENS, frame, plain, usual
from tests.golden import cases
from tests.golden.heads import DONE, REFUSED, heads

# models


def asked(name, model):
    """What a model answers, as JSON."""
    with torch.no_grad():
        return {k: answer(ask) for k, ask in SPECIMENS[name].questions(model).items()}


def both(name):
    """The answers of a model as it was fitted, and as it comes back from its folder."""
    model = SPECIMENS[name].make()
    with tempfile.TemporaryDirectory() as folder:
        sn.save(model, folder)
        return {"fitted": asked(name, model), "loaded": asked(name, sn.load(folder))}


def detector():
    model = SPECIMENS["detector"].make()
    fitted = pinned([model.decision_scores_, model.threshold_, model.views_])
    return {"fitted": fitted, **asked("detector", model)}


def chain():
    return asked("conditional_chain", SPECIMENS["conditional_chain"].make())


def evidence(kind):
    rng = np.random.default_rng(0)
    draws = {"normal": rng.normal(size=(2, 300, 2)), "positive": rng.gamma(3.0, size=(500, 1))}[
        kind
    ]
    options = {"seed": 0, "max_steps": 20}
    if kind == "positive":
        options["support"] = ["positive"]
        log_density = lambda x: 2 * np.log(x[:, 0]) - x[:, 0]  # noqa: E731
    else:
        log_density = lambda x: -(x**2).sum(-1) / 2 - 0.1 * x[:, 0] ** 4  # noqa: E731
    values = log_density(draws.reshape(-1, draws.shape[-1])).reshape(draws.shape[:-1])
    return {
        "bridge": answer(sn.evidence, log_density, draws, **options),
        "reciprocal": answer(sn.evidence, None, draws, log_density_draws=values, **options),
    }


ESTIMATORS = [name for name in SPECIMENS if name.startswith(("density/", "regressor/"))]
MODELS = {
    **{name: partial(both, name) for name in ESTIMATORS},
    "detector": detector,
    "fit": lambda: {"history": pinned(usual()[1].to_dict()), **both("fit")},
    "conditional_chain": chain,
    "evidence/normal": partial(evidence, "normal"),
    "evidence/positive": partial(evidence, "positive"),
    **{
        f"case/{name}": lambda name=name: pinned(cases.run(cases.CASES[name]))
        for name in cases.CASES
    },
}


# files, tables and the command line


def schema_values(table, **options):
    """What a table was taken for, its coded rows, and the table back."""
    schema = sn.Schema.detect(table, **options)
    x, extra = schema.encode(table)
    back = schema.decode(x)
    again = schema.encode(back)[0]
    return {
        "fingerprint": schema.fingerprint,
        "schema": str(schema),
        "coded": x,
        "extra": extra,
        "decoded": back,
        "round_trip": bool(np.array_equal(again, x, equal_nan=True)),
    }


def table_values(name):
    """The cells of a file as they are read, and its schema."""
    table = read_table(name)
    facts = {"named": table.named, "style": table.style, "lines": table.lines}
    cells = {name: table.array(name) for name in table.names}
    numbers = {name: table.numbers(name) for name in table.names}
    columns = {name: cells[name] if of is None else of for name, of in numbers.items()}
    facts |= {"columns": columns, "cells": cells}
    return facts | {"table": answer(schema_values, table.frame(), missing=True)}


def corpus():
    """The files of the corpus, read in a folder of their own."""
    for name, content in heads().items():
        Path(name).write_bytes(content)
    return {name: answer(table_values, name) for name in heads()}


def run(line):
    """Exit code and words of a command line."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["selfnorm", *line.split()]),
        mock.patch.object(sys.modules["__main__"], "__package__", None),  # or usage names it
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = stop.code
        except Exception:  # a traceback is an answer, too
            code = traceback.format_exc().splitlines()[-1]
    return {"code": code, "out": pinned(out.getvalue()), "err": pinned(err.getvalue())}


def command_line():
    """Wrong lines and right ones, in a folder with two models."""
    for name, content in {"empty.csv": "", "suffix.dat": "a\n1\n", "two.csv": "a,b\n1,2\n"}.items():
        Path(name).write_text(content)
    Path("ragged.csv").write_text("a,b,c\n1,2\n1,x,2,3\n")
    Path("four.csv").write_text("a,b\n1,2\n3,4\n5,6\n7,8\n")
    Path("infinite.csv").write_text("a,b,c\n1,inf,2\n1,2,3\n")
    Path("gaps.csv").write_text("a,b,c\n1,,2\n,2,3\n0.5,1.5,\n")
    Path("folder").mkdir()
    for name, n, seed in (("train.csv", 200, 0), ("test.csv", 8, 1)):
        pd.DataFrame(plain(n, seed), columns=list("abc")).to_csv(name, index=False)
    frame(30).to_csv("mixed.csv", index=False)
    draws = np.random.default_rng(0).normal(size=(400, 2))
    carried = pd.DataFrame(draws, columns=["a", "b"]).assign(lp=-(draws**2).sum(1) / 2)
    carried.to_csv("draws.csv", index=False)
    fits = "-o model --max-steps 8", "-o regressor --target c --max-epochs 3"
    values = {f"fit {how}": run(f"fit train.csv {how} --no-progress") for how in fits}
    for line in DONE.strip().splitlines():
        written = [Path(name) for name in ("out.csv", "out.tsv") if name in line]
        values[line] = run(line) | {path.name: path.read_text() for path in map(Path, written)}
    return values | {line: run(line) for line in REFUSED.strip().splitlines()}


def rows_of(path, n_rows):
    """The first rows of a file of data: an array, or a text file as the command line reads it."""
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as arrays:
            return arrays["X" if "X" in arrays else "train"][:n_rows].astype(np.float64)
    if path.suffix == ".npy":
        return np.load(path, mmap_mode="r")[:n_rows].astype(np.float64)
    with path.open(encoding="utf-8") as stream:
        head = [line for _, line in zip(range(n_rows + 1), stream, strict=False)]
    if path.parent.name == "data":  # UCI: numbers between blanks
        return np.array([line.split() for line in head if line.strip()], dtype=np.float64)
    Path("head.csv").write_text("".join(head))
    return read_table("head.csv").frame()


DATA = (
    "mixed/*",
    "small/*.csv",
    "tabular/*.npz",
    "adbench/*.npz",
    "uci_regression/*/data/data.txt",
    "power/*.txt",
    "miniboone/*.npy",
    "toy1d/*.csv",
    "oddbench/*.npz",
)


def data_tables(directory, n_rows=2000):
    """A pin for every table of a data directory."""
    files = [path for pattern in DATA for path in sorted(directory.glob(pattern))]
    if not files:
        sys.exit(f"{directory} holds no table; --data names the folder with mixed/, tabular/, ...")

    def values(path):
        frame = rows_of(path, n_rows)
        return schema_values(frame, missing=not isinstance(frame, np.ndarray))

    return {f"data/{path.relative_to(directory)}": partial(answer, values, path) for path in files}


# the command


def in_folder(function):
    """Called in an empty folder, with a terminal of a fixed width, on one thread, quietly."""
    torch.set_num_threads(1)
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
        mock.patch.dict(os.environ, {"COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1"}),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        return function()


def measured(data=None, only=""):
    """All pins whose names begin with ``only``, as JSON by path; times go to the error stream."""
    tables = {} if data is None else data_tables(data.resolve())
    work = MODELS | {"corpus": corpus, "command_line": command_line} | tables
    values = {}
    for name, function in work.items():
        if not name.startswith(only):
            continue
        begin = time.process_time()
        values |= {f"{name}/{k}": v for k, v in leaves(in_folder(function)).items()}
        if (spent := time.process_time() - begin) > 2:
            print(f"{name}: {spent:.1f} s", file=sys.stderr)
    return values


def compare(new, old, within):
    """Print what moved; how many there are."""
    moved = {name: difference(new[name], old[name], within) for name in old if name in new}
    moved = {name: words for name, words in moved.items() if words}
    moved |= dict.fromkeys(old.keys() - new.keys(), "is gone")
    for name, words in sorted(moved.items()):
        print(f"{name}: {words}")
    added = sorted(new.keys() - old.keys())
    print(f"{len(moved)} of {len(old)} values moved; {len(added)} are new {added[:5]}")
    return len(moved)


def parsed():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=["write", "compare"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--within", type=float, default=0.0)
    parser.add_argument("--only", default="")
    return parser.parse_args()


def run_command():
    args = parsed()
    values = measured(args.data, args.only)
    if args.action == "write":
        args.file.write_text(json.dumps(values, indent=0, sort_keys=True) + "\n")
        print(f"{args.file}: {len(values)} values")
        return 0
    old = json.loads(args.file.read_text())
    old = {k: v for k, v in old.items() if k.startswith(args.only)}
    if args.data is None:
        old = {k: v for k, v in old.items() if not k.startswith("data/")}
    return int(compare(values, old, args.within) > 0)


if __name__ == "__main__":
    sys.exit(run_command())
