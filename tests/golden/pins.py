"""Values that a change of the inside must leave as they are, bit for bit.

``python -m tests.golden.pins write FILE`` fits small models of every family, saves and loads them,
reads a corpus of text files and runs the command line; ``compare FILE`` does it again and prints
what moved, with exit code 1. ``--data DIR`` adds the schemas and coded rows of the tables in a data
directory, ``--within 1e-6`` lets numbers differ by so much, ``--only NAME`` takes the pins whose
names begin so. The bits depend on the machine and on torch: write the file where it is compared.
"""

import argparse
import base64
import contextlib
import hashlib
import io
import json
import os
import re
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pandas as pd
import torch

import selfnorm as sn
from selfnorm.cli import main
from selfnorm.cli.files import read_table
from selfnorm.tables import OutlierDetector
from tests.golden import cases
from tests.golden.heads import DONE, REFUSED, heads

KEPT_NUMBERS = 20_000  # of an array; of larger ones every so many, and the hash of all
KEPT_TEXTS = 30
CHOICES = re.compile(r"\{'[^{}]*'\}")  # a set in a message has no order
MEASURED = re.compile(r"\d+(\.\d+)? (s|min|h)\b|\d+ ms\b")  # times that a text mentions


# values as JSON


def pinned(value):
    """A value as JSON: arrays by their bits, tables by column, records by field."""
    if isinstance(value, torch.Tensor):
        value = value.detach().numpy()
    if isinstance(value, pd.DataFrame):
        value = {str(name): value[name].to_numpy() for name in value}
    if is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, dict):
        return {str(k): pinned(v) for k, v in value.items() if "seconds" not in str(k)}
    if isinstance(value, float | np.generic):
        value = np.asarray(value)
    if isinstance(value, list | tuple):
        if not value or not all(isinstance(v, int | float | str | None) for v in value):
            return {str(i): pinned(v) for i, v in enumerate(value)}
        value = np.array(value, dtype=object)
    if isinstance(value, np.ndarray):
        return texts(value) if value.dtype.kind in "OUSV" else numbers(value)
    if isinstance(value, str):
        value = CHOICES.sub(lambda match: "".join(sorted(match[0])), value)
        return MEASURED.sub("TIME", value)
    return value if isinstance(value, int | None) else repr(value)


def numbers(array):
    bits = np.ascontiguousarray(array)
    kind = f"{bits.dtype}{list(bits.shape)}"
    if bits.dtype.kind in "mM":
        bits = bits.view(np.int64)
    every = -(-bits.size // KEPT_NUMBERS) or 1
    kept = base64.b85encode(zlib.compress(bits.ravel()[::every].astype(np.float64).tobytes()))
    return {"kind": kind, "sha256": sha256(bits.tobytes()), "numbers": kept.decode()}


def texts(array):
    cells = [repr(cell) for cell in array.ravel().tolist()]
    shape = list(array.shape)
    return {
        "shape": shape,
        "sha256": sha256("\0".join(cells).encode()),
        "texts": cells[:KEPT_TEXTS],
    }


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def leaves(value, name=""):
    """Every pinned value by its path."""
    if isinstance(value, dict) and "sha256" not in value:
        return {k: v for key in value for k, v in leaves(value[key], f"{name}/{key}").items()}
    return {name[1:]: value}


def unpacked(leaf):
    return np.frombuffer(zlib.decompress(base64.b85decode(leaf["numbers"])))


def difference(new, old, within=0.0):
    """How a leaf moved, in words; nothing where it did not, or by no more than ``within``."""
    if new == old:
        return ""
    if not (isinstance(new, dict) and isinstance(old, dict) and "numbers" in new):
        return f"{shown(old)} became {shown(new)}"
    if new["kind"] != old["kind"]:
        return f"{old['kind']} became {new['kind']}"
    a, b = unpacked(new), unpacked(old)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    if same.all():
        return "numbers that are not kept moved, or the sign of a zero"
    with np.errstate(invalid="ignore"):
        apart = np.where(same, 0.0, np.abs(a - b))
        if (apart <= within * np.maximum(1.0, np.abs(b))).all():
            return ""
    at = int(np.argmax(np.nan_to_num(apart, nan=np.inf)))
    return f"{(~same).sum()} of {a.size} numbers, most by {apart[at]:.3g}: {b[at]} became {a[at]}"


def shown(leaf):
    text = repr(leaf.get("texts", leaf) if isinstance(leaf, dict) else leaf)
    return text if len(text) < 300 else text[:300] + " ..."


def answer(function, *args, **options):
    """What a call gives and warns of; of a refusal its words."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", sn.SelfnormWarning)
        try:
            value = pinned(function(*args, **options))
        except (sn.SelfnormError, ValueError, TypeError, RuntimeError) as error:
            value = f"{type(error).__name__}: {error}"
    words = [str(w.message) for w in seen if issubclass(w.category, sn.SelfnormWarning)]
    return {"value": value, "warnings": pinned("\n".join(words))} if words else value


# tables


def frame(n, seed=0):
    """Categories, booleans and numbers."""
    rng = np.random.default_rng(seed)
    kind = rng.choice(["a", "b", "c"], n, p=[0.6, 0.3, 0.1])
    size = rng.gumbel(size=n) + (kind == "a")
    flag = rng.random(n) < 1 / (1 + np.exp(-size))
    grade = pd.Categorical(rng.choice(["low", "high"], n), ["low", "high"], ordered=True)
    return pd.DataFrame({"kind": kind, "flag": flag, "size": size, "grade": grade})


def gaps(n, seed=0):
    rng = np.random.default_rng(seed)
    table = frame(n, seed)[["kind", "size"]].assign(other=rng.normal(size=n))
    table.loc[rng.random(n) < 0.3, "size"] = np.nan
    table.loc[rng.random(n) < 0.2, "kind"] = None
    return table


def cells(n, seed=0):
    """Whole numbers, cents, point masses and limits."""
    rng = np.random.default_rng(seed)
    zero = np.where(rng.random(n) < 0.3, 0.0, rng.gamma(2.0, size=n))
    price, share = np.round(rng.gamma(2.0, 20.0, n), 2), np.clip(rng.normal(0.5, 0.4, n), 0, 1)
    return {"count": rng.poisson(40.0, n), "price": price, "zero": zero, "share": share}


def dates(n, seed=0):
    rng = np.random.default_rng(seed)
    start = pd.Timestamp("2024-01-01") + pd.to_timedelta(rng.integers(0, 90 * 86_400, n), "s")
    end = start + pd.to_timedelta(60 * rng.gamma(2.0, 5.0, n).round(), "s")
    day = start.strftime("%d.%m.%Y")
    return pd.DataFrame({"start": start, "end": end, "day": day, "size": rng.normal(size=n)})


def plain(n, seed=0, dim=3):
    return cases.rows(n, dim, seed)


def blanked(table):
    """The table with a gap in a different column of every row."""
    if isinstance(table, np.ndarray):
        holes = table.copy()
        holes[np.arange(len(holes)), np.arange(len(holes)) % holes.shape[1]] = np.nan
        return holes
    names = list(table)
    holes = {name: np.array(table[name], dtype=object) for name in names}
    for i in range(len(table[names[0]])):
        holes[names[i % len(names)]][i] = None
    return pd.DataFrame(holes) if isinstance(table, pd.DataFrame) else holes


def given_of(table, names):
    if isinstance(table, np.ndarray):
        return {names[0]: float(table[0, 0])}
    columns = {name: np.asarray(table[name])[:3] for name in names}
    return pd.DataFrame(columns) if isinstance(table, pd.DataFrame) else columns


# estimators, refitted and then saved and loaded


def density_answers(model, table, given, levels):
    facts = ("offset_", "lower_bound_", "consistency_", "held_out_", "members_", "n_iter_")
    questions = {
        "score_samples": partial(model.score_samples, table),
        "log_mass": partial(model.log_mass, table),
        "log_prob": partial(model.log_prob, table, given=given),
        "decision": partial(model.decision_function, table),
        "predict": partial(model.predict, table),
        "bounds": partial(model.bounds, table, n_samples=200, random_state=0),
        "explain": partial(model.explain, table),
        "sample": partial(model.sample, 5, random_state=0),
        "sample_missing": partial(model.sample, 5, random_state=0, missing=True),
        "sample_given": partial(model.sample, 2, random_state=1, given=given_of(table, given)),
        "impute": partial(model.impute, blanked(table), random_state=0),
        "impute_twice": partial(model.impute, blanked(table), n_draws=2, random_state=1),
        "probabilities": partial(model.probabilities, table, levels),
        "marginal": lambda: model.marginal(given).score_samples(table),
        "marginal_sample": lambda: model.marginal(given).sample(3, random_state=0),
        "facts": model.facts,
        "judgement": lambda: model.judgement_,
        "history": model.history_.to_dict,
        "schema": lambda: [str(model.schema_), model.schema_.fingerprint],
        **{name: partial(getattr, model, name) for name in facts},
        "report": partial(page_of, model, table),
    }
    return {name: answer(question) for name, question in questions.items()}


def regressor_answers(model, x, y):
    single = model.n_outputs_ == 1
    grid = np.linspace(float(np.min(y)), float(np.max(y)), 9)
    questions = {
        "predict": partial(model.predict, x),
        "mode": partial(model.predict_mode, x),
        "log_prob": partial(model.log_prob, x, y),
        "learned": partial(model.log_prob, x, y, method="learned"),
        "log_mass": partial(model.log_mass, x, y),
        "sample": partial(model.sample, x, 3, random_state=0),
        "bounds": partial(model.bounds, x, y, n_samples=100, random_state=0),
        "without_energy": lambda: model.without_energy().log_prob(x, y),
        "score": partial(model.score, x, y),
        "facts": model.facts,
        "judgement": lambda: model.judgement_,
    }
    if single:
        questions |= {
            "quantiles": partial(model.predict_quantiles, x, (0.05, 0.5, 0.95)),
            "central": partial(model.predict_interval, x, 0.8),
            "shortest": partial(model.predict_interval, x, 0.8, kind="highest_density"),
            "regions": partial(model.highest_density_regions, x, 0.8),
            "pdf": partial(model.pdf, x, grid),
            "cdf": partial(model.cdf, x, grid),
            "pit_and_crps": partial(model.pit_and_crps, x, y),
            "report": partial(page_of, model, x, y),
        }
    return {name: answer(question) for name, question in questions.items()}


def page_of(model, *rows):
    """The words of a report, and the figures by their hash."""
    with tempfile.TemporaryDirectory() as folder:
        page = model.report(*rows, f"{folder}/report.html").read_text()
    return re.sub(
        r"\s+", " ", re.sub(r"<(style|svg|script).*?</\1>|<[^>]*>", " ", page, flags=re.S)
    )


def both(model, answers):
    """The answers of a model as it was fitted, and as it comes back from its folder."""
    fitted = answers(model)
    with tempfile.TemporaryDirectory() as folder:
        model.save(folder)
        loaded = answers(type(model).load(folder))
    return {"fitted": fitted, "loaded": loaded}


def density(make, given, levels, *, n=250, schema=None, weights=False, **options):
    options = {"max_steps": 8, "hidden": 8, "random_state": 0} | options
    table = make(n)
    weight = np.arange(n) % 3 if weights else None
    detected = schema and sn.Schema.detect(table, **schema)
    model = sn.EnergyDensity(schema=detected, **options).fit(table, sample_weight=weight)
    return both(model, partial(density_answers, table=make(6, 1), given=given, levels=levels))


def regressor(make, dim=1, **options):
    x, y = make(120)
    settings = {"n_members": 2, "hidden": 12, "n_components": 3, "max_epochs": 3, "random_state": 0}
    model = sn.EnergyRegressor(**settings | options).fit(x, y)
    x, y = make(6, 1)
    return both(model, partial(regressor_answers, x=x, y=y))


def numbers_target(n, seed=0):
    x = plain(n, seed)
    return x[:, :2], x[:, 2]


def grid_target(n, seed=0):
    table = frame(n, seed).assign(day=dates(n, seed)["start"])
    return table, np.random.default_rng(seed).poisson(3.0, n) + table["flag"]


def two_targets(n, seed=0):
    x = plain(n, seed, 4)
    return x[:, :2], x[:, 2:]


def detector():
    model = OutlierDetector(sn.EnergyDensity(max_steps=8, hidden=8, random_state=0))
    model.fit(frame(150)[["kind", "size"]])
    table = frame(6, 1)[["kind", "size"]]
    fitted = [model.decision_scores_, model.threshold_, model.views_]
    return {
        "fitted": pinned(fitted),
        "views": answer(model.views, table),
        "decision": answer(model.decision_function, table),
        "predict": answer(model.predict, table),
    }


# what the golden cases leave out


def usual():
    """``fit`` as a newcomer calls it."""
    torch.manual_seed(0)
    x = cases.table(400).float()
    model = sn.EBM(sn.MLP(2, (8, 8), saturate=4.0), base=sn.StudentT.fit_to(x))
    history = sn.fit(model, x, max_epochs=2, seed=0, progress=False)
    return {"history": pinned(history.to_dict()), **module_answers(model, x[:7])}


def conditional_chain():
    torch.manual_seed(0)
    x, condition = (v.float() for v in (cases.table(200, 3), cases.table(200, 2, 1)))
    model = sn.AutoregressiveEBM(3, condition_dim=2, blocks=1, **cases.TINY)
    cases.fit(model, (x, condition), **cases.QUICK | {"n_samples": 4, "max_steps": 10})
    rows = x[:7], condition[:7]
    return {
        "log_prob": answer(model.eval().log_prob, *rows),
        "quadrature": answer(model.log_prob, *rows, normalizer="quadrature", n_nodes=256),
        "log_mass": answer(model.log_mass, *rows),
        "sample": answer(model.sample, 7, rows[1], seed=0),
        "bounds": answer(model.bounds, *rows, n_samples=64, seed=0),
    }


def module_answers(model, x):
    def answers(module):
        with torch.no_grad():
            return {
                "log_prob": answer(module.log_prob, x),
                "log_norm": answer(lambda: module.log_norm),
                "sample": answer(module.sample, 5, seed=0),
                "bounds": answer(sn.evaluate, module, x, n_samples=500, seed=0),
            }

    with tempfile.TemporaryDirectory() as folder:
        sn.save(model, folder)
        return {"fitted": answers(model), "loaded": answers(sn.load(folder))}


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


MIXED = {"given": ["size"], "levels": "kind"}
MODELS = {
    "density/numbers": partial(density, plain, ["x0"], "x1", contamination=0.1),
    "density/weighted": partial(density, plain, ["x0"], "x1", weights=True),
    "density/mixed": partial(density, frame, **MIXED),
    "density/gaps": partial(density, gaps, schema={"model_gaps": True}, **MIXED),
    "density/gaps_left_out": partial(density, gaps, **MIXED),
    "density/cells": partial(
        density, cells, ["count"], "zero", schema={"support": {"share": (0, 1)}}
    ),
    "density/dates": partial(density, dates, ["start"], "day"),
    "density/held_out": partial(density, plain, ["x0"], "x1", n=2600, max_steps=4),
    "density/one_column": partial(
        density, partial(plain, dim=1), ["x0"], "x0", n=1000, max_steps=15
    ),
    "density/two_columns": partial(
        density, partial(plain, dim=2), ["x0"], "x1", n=1000, max_steps=15
    ),
    "regressor/numbers": partial(regressor, numbers_target),
    "regressor/grid": partial(regressor, grid_target),
    "regressor/two_targets": partial(regressor, two_targets),
    "detector": detector,
    "fit": usual,
    "conditional_chain": conditional_chain,
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
    facts |= {"columns": dict(table.columns), "cells": dict(table.cells)}
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
