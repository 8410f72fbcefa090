"""One trial each: ``trial(rng)`` or ``trial(rng, folder)``; verdict, a word on it, some figures.

Verdicts: ``right``, ``clear error`` (an error of the library, one line at the command line),
``traceback`` (any other), ``silent wrong``, ``lost`` (neither the old nor the new model loads).
A trial that does not end is a ``hang``, see ``__main__``.
"""

import contextlib
import csv
import functools
import gc
import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from itertools import compress
from pathlib import Path

import joblib
import numpy as np
import sympy  # noqa: F401 torch imports it in a first fit, and it adds a filter of warnings
import torch
from scipy import stats
from sklearn.model_selection import GridSearchCV
from sklearn.utils._param_validation import InvalidParameterError

import selfnorm as sn
from selfnorm import saving
from selfnorm.errors import SelfnormError
from selfnorm.paper import toy2d
from selfnorm.tables import RegressorNetwork
from tests.campaign.tables import CONTINUOUS, frame, table
from tests.folders import with_tensor

TRIALS = {}
RUN, MODEL_FILES = "run.ckpt", (saving.MODEL_FILE,)
FRAMES = ("pandas", "polars", "pyarrow")
NEEDS = {"file": ("typer", *FRAMES), "raw_file": ("typer",)}
NEEDS |= dict.fromkeys(("density", "any_table", "unusual_table", "shape"), FRAMES)


def trial(share, limit=300.0):
    """Its share of a campaign, 0 where it runs only by name; seconds of computing it may take."""

    def register(function):
        TRIALS[function.__name__] = (share, limit, function)
        return function

    return register


def state():
    """What belongs to the process, and no call may leave changed."""
    name, key, *rest = np.random.get_state()  # noqa: NPY002
    torches = torch.get_default_dtype(), torch.get_num_threads(), torch.get_rng_state().tolist()
    return (*torches, name, key.tolist(), rest, list(warnings.filters), torch.is_grad_enabled())


@trial(0.10, limit=600.0)
def default(rng):
    """A small table at the settings a user gets without choosing, against a Gaussian."""
    only = CONTINUOUS if rng.random() < 0.5 else None
    x, kinds = table(rng, 300, 60, only)
    rng.shuffle(x)
    train, test = x[len(x) // 4 :], x[: len(x) // 4]
    told = f"{x.shape} {kinds}"
    try:
        fitted = sn.EnergyDensity(random_state=int(rng.integers(99))).fit(train)
        if not np.isfinite(test).all():  # what is to be refused may be here alone
            fitted.score(test)
    except SelfnormError as error:
        return "clear error", f"{told}: {error}"
    mean = float(fitted.score(test))
    bounds = fitted.bounds(test, random_state=0)
    if not np.isfinite(mean) or not bounds.lower <= bounds.upper + 1e-6:
        return "silent wrong", f"{told}: scores or bounds {bounds}"
    told += f", {mean:.3f} nats"
    figures = {"nats": round(mean, 4), "reliable": bool(bounds.reliable)}
    if only is not None:
        # in units of each column: SciPy leaves out what is a billion times narrower than the widest
        center, width = train.mean(0), train.std(0)
        z = (train - center) / width
        gaussian = stats.multivariate_normal(np.zeros(len(width)), z.T @ z / (len(z) - 1))
        other = float(np.mean(gaussian.logpdf((test - center) / width)) - np.log(width).sum())
        told += f", a Gaussian {other:.3f}"
        figures["above_gaussian"] = round(mean - other, 4)
        if mean < other - 1:
            return "silent wrong", f"{told}: worse than a Gaussian", figures
    return "right", told if bounds.reliable else f"{told}: {bounds.reasons}", figures


@trial(0.17)
def density(rng):
    x, kinds = table(rng, 300)
    options = {"max_steps": int(rng.integers(1, 40))}
    if rng.random() < 0.3:
        options["method"] = str(rng.choice(["joint", "autoregressive"]))
    if rng.random() < 0.2:
        options["sample_weight"] = rng.exponential(size=len(x))
    return answers_on(rng, x, f"{x.shape} {kinds} {list(options)}", **options)


@trial(0.06)
def any_table(rng):
    """A table of usual columns, as a dict of lists."""
    x, kinds = frame(rng)
    return answers_on(rng, x, f"{kinds}")


@trial(0.10)
def unusual_table(rng):
    """A table with a column, a name or a holder of a type that is seldom met."""
    from tests.campaign.unusual import unusual

    return answers_on(rng, *unusual(rng))


@trial(0.03, limit=600.0)
def shape(rng):
    """Fewer rows than columns, hundreds of columns, one or two; cells far from all others."""
    wide = np.exp(rng.uniform(np.log(200), np.log(1000)))
    kinds = {"few rows": (rng.integers(4, 20), rng.integers(20, 60)), "wide": (50, int(wide))}
    kinds |= {"one": (rng.integers(4, 300), 1), "two": (rng.integers(4, 300), 2)}
    kind = str(rng.choice(list(kinds), p=[0.4, 0.05, 0.25, 0.3]))
    n, d = kinds[kind]
    x = rng.normal(size=(n, 10)) @ rng.normal(size=(10, d)) + 0.5 * rng.normal(size=(n, d))
    power, gaps = int(rng.choice([0, -300, 20, 30, 100, 200, 300])), rng.random() < 0.3
    x[rng.integers(n), rng.integers(d)] *= 10.0**power
    x = np.where(rng.random((n, d)) < 0.1 * gaps, np.nan, x)
    method = str(rng.choice(["auto", "autoregressive"]))
    told = f"{kind}: {x.shape}, a cell times 1e{power}, gaps: {gaps}, {method}"
    return answers_on(rng, x, told, max_steps=2, method=method)


def is_clear(error):
    """Whether a person can act on an error: one of the library, or its words on an argument."""
    code = traceback.extract_tb(error.__traceback__)[-1]
    raised = (code.line or "").startswith("raise") and "selfnorm" in code.filename
    named = isinstance(error, ValueError | TypeError) and raised
    return isinstance(error, SelfnormError | InvalidParameterError) or named


def answers_on(rng, x, told, sample_weight=None, **options):
    """Every answer is finite and of the table's types; saved and loaded it is the same one."""
    from tests.columns.cells import cells_of, columns_of, equal, is_gap

    def cells(table):
        return [cells_of(column)[1] for column in columns_of(table)]

    def types_of(table):
        return [] if isinstance(table, dict) else [cells_of(c)[0] for c in columns_of(table)]

    options = {"max_steps": int(rng.integers(1, 40)), **options}
    before, told, stage = state(), f"{told}, {options}", "fit"
    try:
        fitted = sn.EnergyDensity(random_state=int(rng.integers(99)), **options)
        fitted.fit(x, sample_weight=sample_weight)
        stage, columns = "answers", fitted.schema_.columns
        n_drawn = max(3, 600 // len(columns))
        scores = fitted.score_samples(x)
        drawn = fitted.sample(n_drawn, random_state=0)
        drawn_scores = fitted.score_samples(drawn)
        bounds = fitted.bounds(x, n_samples=300, random_state=0)
        chain = fitted.method_ == "autoregressive"
        filled = fitted.impute(x, random_state=0) if chain else x
        why = fitted.explain(x) if chain and len(columns) < 30 else {}
        stage = "save"
        with tempfile.TemporaryDirectory() as folder:
            fitted.save(folder)
            stage = "load"
            loaded = sn.load(folder)
        scores_again = loaded.score_samples(x)
        drawn_again = loaded.sample(n_drawn, random_state=0)
    except Exception as error:
        if stage in ("fit", "save") and is_clear(error):
            return "clear error", f"{told}: {error}"
        traceback.print_exception(error)
        verdict = "lost" if stage == "load" else "traceback"
        return verdict, f"{told}, {stage}: {type(error).__name__}: {error}"
    pairs = [*zip(cells(drawn), cells(drawn_again), strict=True), (scores, scores_again)]
    types, array = [types_of(table) for table in (x, drawn, filled)], isinstance(x, np.ndarray)
    there = [
        column.modelled or column.kind in ("constant", "duplicate") or array for column in columns
    ]
    few, error = fitted.log_prob(x[:3], return_std=True) if array else (scores[:3], 0.0)
    wrong = {
        "torch is not as before": state() != before,
        "scores are not finite": not np.isfinite([scores.sum(), drawn_scores.sum()]).all(),
        f"bounds {bounds}": not bounds.lower <= bounds.upper + 1e-6,
        # where there are gaps, as many draws as all rows of a call have time for
        "a row's score hangs on the others": (np.abs(few - scores[:3]) > 1e-6 + 8 * error).any(),
        "others once loaded": not all(all(map(equal, *pair)) for pair in pairs),
        "an explanation is not finite": np.isinf(np.array(cells(why), dtype=float)).any(),
        f"types {types}": [*compress(types[0], there)] != types[1] or types[0] != types[2],
    }
    if any(wrong.values()):
        return "silent wrong", f"{told}: {', '.join(key for key in wrong if wrong[key])}"
    samples = iter(cells(drawn))
    for column, drawn_too, old, full in zip(columns, there, *map(cells, (x, filled)), strict=True):
        about = f"{told}: {column.name!r} is a {column.kind},"
        seen = [cell for cell in old if not is_gap(cell)]
        if column.modelled and any(map(is_gap, full)):
            return "silent wrong", f"{about} a gap is left"
        for cell, kept in zip(old, full, strict=True):
            if not is_gap(cell) and not equal(cell, kept):
                return "silent wrong", f"{about} impute writes {kept!r} for {cell!r}"
        for cell in next(samples) if drawn_too else ():
            if column.modelled and type(cell) not in map(type, seen):
                return "silent wrong", f"{about} the sample {cell!r} is no {type(seen[0])}"
            if column.kind == "category" and not any(equal(cell, value) for value in seen):
                return "silent wrong", f"{about} the sample {cell!r} is none of its values"
    return "right", told


@trial(0.20, limit=600.0)
def regressor(rng):
    default = rng.random() < 0.05
    x, kinds = table(rng, 200)
    y = x[:, 0]
    x = x[:, 1:] if x.shape[1] > 1 else rng.normal(size=(len(x), 2))
    options = {}
    if not default:
        network = RegressorNetwork(energy_epochs=int(rng.integers(0, 3)), energy_hidden=8)
        options = {"max_epochs": 2, "n_members": 2, "hidden": 16, "network": network}
    before, told = state(), f"{x.shape} {kinds} {'defaults' if default else 'short'}"
    try:
        fitted = sn.EnergyRegressor(random_state=0, **options).fit(x, y)
    except SelfnormError as error:
        return "clear error", f"{told}: {error}"
    quantiles = fitted.predict_quantiles(x[:20], [0.1, 0.5, 0.9])
    log_p = fitted.log_prob(x[:20], y[:20])
    if state() != before:
        return "silent wrong", f"{told}: torch is not as before"
    if not np.isfinite(log_p).all() or not (np.diff(quantiles, axis=1) >= 0).all():
        return "silent wrong", f"{told}: log_prob or quantiles"
    below, above = fitted.cdf(x[:20], quantiles[:, [0, 2]]).T
    if np.abs(above - below - 0.8).max() > 0.02:
        return "silent wrong", f"{told}: the law between its quantiles has no 0.8"
    return "right", told


def command(*arguments):
    """Exit code and stderr of a command, in this process."""
    from selfnorm.cli import main

    err, before = io.StringIO(), sys.argv
    sys.argv = ["selfnorm", *map(str, arguments)]
    try:
        with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
            main()
        return 0, err.getvalue()
    except SystemExit as stop:
        return stop.code or 0, err.getvalue()
    finally:
        sys.argv = before


@functools.lru_cache(maxsize=1)
def model():
    """A small fitted model in a folder, and its rows."""
    folder = Path(tempfile.mkdtemp(prefix="campaign-"))
    x = np.random.default_rng(0).gumbel(size=(80, 3))
    sn.EnergyDensity(max_steps=5, random_state=0).fit(x).save(folder / "m")
    return folder / "m", x


def flipped(rng, content):
    """One bit is another one."""
    content = bytearray(content)
    content[rng.integers(len(content))] ^= 1 << rng.integers(8)
    return bytes(content)


def damaged(rng, content):
    """Bits flipped, cut short, lengthened, or a piece replaced."""
    kind, start = rng.integers(5), int(rng.integers(len(content)))
    if kind <= 1:
        return functools.reduce(lambda c, _: flipped(rng, c), range(rng.integers(1, 4)), content)
    if kind == 2:
        return content[:start]
    if kind == 3:
        return content + rng.bytes(rng.integers(1, 99))
    return content[:start] + rng.bytes(16) + content[start + 16 :]


@trial(0.12)
def file(rng, folder):
    path, x = model()
    suffix = str(rng.choice([".csv", ".npy", ".npz", ".parquet"]))
    source = folder / f"t{suffix}"
    if suffix == ".npy":
        np.save(source, x)
    elif suffix == ".npz":
        np.savez(source, X=x, columns=np.array(list("abc")))
    else:
        import pandas as pd

        frame = pd.DataFrame(x, columns=list("abc"))
        frame.to_csv(source, index=False) if suffix == ".csv" else frame.to_parquet(source)
    source.write_bytes(damaged(rng, source.read_bytes()))
    return judged(suffix, command("score", path, source, "-o", folder / "s.csv"))


def judged(what, answer):
    """The verdict on a command."""
    code, err = answer
    if code == 0:
        return "right", what
    if code == 2 and "Traceback" not in err and "selfnorm: " in err:
        return "clear error", f"{what}: {err.strip()}"
    return "traceback", f"{what}: exit {code}, {err[-300:]}"


@trial(0.02)
def raw_file(rng, folder):
    """A CSV of columns of any kind, half of them damaged, through one command after another."""
    x, kinds = frame(rng, 150)
    source, path = folder / "t.csv", folder / "m"
    with source.open("w", newline="") as stream:
        writer = csv.writer(stream, delimiter=str(rng.choice([",", ";", "\t"])))
        writer.writerow(x)
        writer.writerows(zip(*x.values(), strict=True))
    if rng.random() < 0.5:
        source.write_bytes(damaged(rng, source.read_bytes()))
    asked = {
        "fit": (source, "-o", path, "--max-steps", 5, "--seed", 0),
        "score": (path, source, "-o", folder / "s.csv"),
        "evaluate": (path, source),
        "sample": (path, "-n", 20, "-o", folder / "d.csv"),
        "impute": (path, source, "-o", folder / "i.csv"),
        "report": (path, source, "-o", folder / "r.html"),
    }
    for name, arguments in asked.items():
        verdict, told = judged(f"{name} {kinds}", command(name, *arguments))
        if verdict == "traceback" or (name == "fit" and verdict != "right"):
            return verdict, told
    return "right", f"{kinds}"


def files(folder):
    """A model folder with a checkpoint."""
    shutil.copytree(model()[0], folder, dirs_exist_ok=True)
    (folder / RUN).write_bytes(half_trained()[0])


def opened(folder, told, place=None, same=True):
    """The verdict on such files as they lie there: a run that goes on, a model that scores."""
    path, x = model()
    end, expected = half_trained()[1], sn.load(path).score_samples(x)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (int(2**20 * (memory("VmSize") + 2048)), hard))
    try:
        fine = torch.equal(train(folder / RUN), end)
        scores = sn.load(*(place or [folder])).score_samples(x)
    except Exception as error:
        if is_clear(error) and "allocate" not in str(error):  # but by what the limit refuses
            return "clear error", f"{told}: {error}"
        traceback.print_exception(error)
        return "traceback", f"{told}: {type(error).__name__}: {error}"
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    fine &= np.array_equal(scores, expected) if same else bool(np.isfinite(scores).all())
    return ("right", told) if fine else ("silent wrong", f"{told}: other weights or scores")


def harmed(rng, folder, names, harm):
    files(folder)
    victim = folder / str(rng.choice(names))
    victim.write_bytes(harm(rng, victim.read_bytes()))
    return opened(folder, victim.name)


@trial(0.10)
def model_folder(rng, folder):
    return harmed(rng, folder, MODEL_FILES, damaged)


@trial(0.07)
def checkpoint(rng, folder):
    return harmed(rng, folder, [RUN], damaged)


@trial(0.05)
def flip(rng, folder):
    """One bit of a checkpoint or of a model folder."""
    return harmed(rng, folder, [RUN, RUN, *MODEL_FILES], flipped)


@trial(0.05, limit=120.0)
def strange_file(rng, folder):
    """A file of a stranger is no file, without end, or holds what no training gives."""
    files(folder)
    victim = folder / str(rng.choice([RUN, *MODEL_FILES]))
    instead = {
        "pipe": lambda: os.mkfifo(victim),
        "folder": lambda: victim.mkdir(),
        "zeros": lambda: victim.symlink_to("/dev/zero"),
        "noise": lambda: victim.symlink_to("/dev/urandom"),
        "loop": lambda: victim.symlink_to(victim),
        "holes": lambda: (victim.touch(), os.truncate(victim, 20 * 2**30)),
    }
    what = str(rng.choice([*instead, "NaN", "half", "path"]))
    if what == "path":
        places = (None, 3, b"m", "x" * 5000, "a\0b", folder / "none", victim)
        place = places[rng.integers(len(places))]
        return opened(folder, f"the path {place!r:.40}", [place])
    if what in ("NaN", "half"):
        name = str(rng.choice(sorted(saving.read_folder(folder).tensors)))
        with_tensor(folder, name, lambda was: was * np.nan if what == "NaN" else was.half())
        return opened(folder, f"{what} in {name}", same=False)
    victim.unlink()
    instead[what]()
    return opened(folder, f"{what} as {victim.name}")


def train(checkpoint=None, steps=24, interrupted=False):
    """The parameters after so many steps; or interrupted once a checkpoint was written."""
    torch.manual_seed(0)
    x = torch.randn(300, 2).exp()
    ebm = sn.EBM(sn.MLP(2, (16,), saturate=8.0), base=sn.StudentT.fit_to(x))
    options = sn.TrainingOptions(max_steps=steps, batch_size=64, seed=0, progress=False)
    if checkpoint is not None:
        options = options.given(checkpoint=sn.Checkpoint(checkpoint, every=8))

    def stop(*_):
        if interrupted and Path(checkpoint).exists():
            hook.remove()
            raise KeyboardInterrupt

    hook = ebm.energy.register_forward_pre_hook(stop)
    history = sn.fit(ebm, x, n_samples=64, options=options)
    assert (history.stopped == "interrupted") == interrupted
    return torch.cat([p.detach().flatten() for p in ebm.parameters()])


@functools.lru_cache(maxsize=1)
def half_trained():
    """A checkpoint of an interrupted run, and where the run ends."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder) / "run.ckpt"
        train(path, interrupted=True)
        content = path.read_bytes()
        assert torch.equal(train(path), train())
    return content, train()


SAVE = """
import sys, torch
from tests.campaign.trials import save_linear
print("ready", flush=True)
for k in range(10**6):
    save_linear(sys.argv[1].format(k), k)
"""
FIT = "import sys; from tests.campaign.trials import train; print('ready', flush=True); "
FIT += "train(sys.argv[1], 400)"
REPRODUCE = "import sys; from tests.campaign.trials import reproduce; print('ready', flush=True); "
REPRODUCE += "reproduce(sys.argv[1])"


def reproduce(out):
    """Two rows of a table of the paper, each of a few steps; figures where they can be drawn."""
    draw = toy2d._draw
    if find_spec("matplotlib") is None:
        toy2d._draw = lambda *_: None
    whole, sn.fit = sn.fit, lambda *given, **options: whole(*given, **options | {"max_steps": 60})
    try:
        toy2d.run(
            out=out,
            seeds=2,
            datasets=("four_circles",),
            bases=("standard_normal",),
            objectives=("snl",),
            progress=False,
        )
    finally:
        sn.fit, toy2d._draw = whole, draw
    rows = json.loads((Path(out) / "toy2d.json").read_text())["rows"]
    return [{key: value for key, value in row.items() if "seconds" not in key} for row in rows]


def killed(rng, code, argument, longest):
    """A process killed at a random moment after it began."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(argument)], stdout=subprocess.PIPE, text=True
    )
    with process:
        process.stdout.readline()
        time.sleep(rng.uniform(0, longest))
        process.send_signal(signal.SIGKILL)


@functools.lru_cache(maxsize=1)
def whole():
    return train(steps=400)


@functools.lru_cache(maxsize=1)
def whole_table():
    with tempfile.TemporaryDirectory() as folder:
        return reproduce(folder)


def save_linear(folder, number):
    """Write the model of a number."""
    model = torch.nn.Linear(300, 300, bias=False)
    torch.nn.init.constant_(model.weight, float(number))
    sn.save(model, folder, notes={"k": number})


def linear(folder):
    """The number of the model that is in a folder, which must be whole."""
    number = saving.read_folder(folder).notes["k"]
    assert bool((sn.load(folder).weight == float(number)).all()), "weights of another model"
    return number


@trial(0.03)
def kill(rng, folder):
    """One kill -9 at a random moment of a fit, a save, an overwriting or a table of the paper."""
    what = str(rng.choice(["fit", "save", "overwrite", "reproduce"]))
    if what == "fit":
        killed(rng, FIT, folder / "run.ckpt", 2.0)
        fine = torch.equal(train(folder / "run.ckpt", 400), whole())
        return ("right" if fine else "silent wrong"), f"{what}: resumed"
    if what == "reproduce":
        killed(rng, REPRODUCE, folder, 4.0)
        kept = (folder / "toy2d.json").exists()
        fine = reproduce(folder) == whole_table()
        return ("right" if fine else "silent wrong"), f"{what}: resumed, rows were kept: {kept}"
    if what == "save":
        killed(rng, SAVE, folder / "{}", 0.3)
        numbers = sorted(int(each.name) for each in folder.iterdir())
        for k in numbers[:-1]:
            if linear(folder / str(k)) != k:
                return "silent wrong", f"{what}: folder {k} holds another model"
        if numbers:  # the last one may have been begun only: no model, or the whole
            with contextlib.suppress(SelfnormError):
                linear(folder / str(numbers[-1]))
            sn.save(torch.nn.Linear(2, 2), folder / str(numbers[-1]))
            left = sorted(file.name for file in (folder / str(numbers[-1])).iterdir())
            if left != [saving.MODEL_FILE, saving.CARD_FILE]:
                return "silent wrong", f"{what}: left behind {left}"
        return "right", f"{what}: {len(numbers)} folders"
    save_linear(folder / "m", -1)
    killed(rng, SAVE, folder / "m", 0.3)
    try:
        return "right", f"{what}: up to model {linear(folder / 'm')}"
    except SelfnormError as error:
        return "lost", f"{what}: {error}"


def in_threads(rng, each):
    """Eight threads with ``each`` fits, draws and bounds, against one after another."""
    path, x = model()
    loaded = sn.load(path)

    def ask(seed):
        kind = seed % 3
        if kind == 0:
            return sn.EnergyDensity(max_steps=5, random_state=seed).fit(x).score_samples(x)
        if kind == 1:
            return loaded.sample(30, random_state=seed)
        return np.array([loaded.bounds(x, n_samples=300, random_state=seed).lower])

    seeds = [int(s) for s in rng.choice(10**6, size=each, replace=False)]
    before = state()
    expected = {seed: ask(seed) for seed in seeds}
    orders = [[int(s) for s in rng.permutation(seeds)] for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda order: [(seed, ask(seed)) for seed in order], orders))
    wrong = {s for own in found for s, answer in own if not np.array_equal(answer, expected[s])}
    if wrong or state() != before:
        return (
            "silent wrong",
            f"threads differ from one: {wrong or 'what the process is left with'}",
        )
    return "right", f"8 x {each} answers are those of one thread"


@trial(0.01)
def threads(rng):
    return in_threads(rng, 2)


@trial(0, limit=3600.0)
def many_threads(rng):
    return in_threads(rng, 50)


def memory(field="VmRSS"):
    """MiB of this process; ``VmHWM``: at its height."""
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{field}:")[1].split()[0]) / 1024


@trial(0, limit=3600.0)
def memory_of_fits(rng):
    """500 fits in this process; the first twenty have what is kept once."""
    network = RegressorNetwork(energy_epochs=1, energy_hidden=8)
    short = {"max_epochs": 1, "n_members": 2, "hidden": 16, "network": network}
    for k in range(500):
        if k == 20:
            gc.collect()
            before = memory()
        x = rng.gumbel(size=(200, 3))
        if k % 3 < 2:
            method = "joint" if k % 3 else "autoregressive"
            sn.EnergyDensity(max_steps=5, method=method, random_state=k).fit(x).score_samples(x)
        else:
            sn.EnergyRegressor(random_state=k, **short).fit(x[:, 1:], x[:, 0])
    gc.collect()
    growth = memory() / before - 1
    told = f"{before:.0f} MiB, {100 * growth:+.1f} %"
    return ("right" if growth < 0.05 else "silent wrong"), told


@trial(0, limit=7200.0)
def memory_of_scores(rng):
    """1,000,000 x 10: MiB beyond the data at the height of scoring, by models of every kind.

    A chain integrates the factor of each number of each row: minutes on several cores.
    """
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    x = rng.gumbel(size=(1_000_000, 10))
    x[:, 1:] += x[:, :1]
    told, most = [], 0.0
    for method, fitted_rows, rows in (
        ("joint", 2000, len(x)),
        ("autoregressive", 1000, 70_000),  # with simple densities beside it
        ("autoregressive", 6000, len(x)),
    ):
        model = sn.EnergyDensity(max_steps=5, random_state=0, method=method)
        model.fit(x[:fitted_rows]).score_samples(x[:1000])
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        before, start = memory(), time.perf_counter()
        scores = model.score_samples(x[:rows])
        beyond = memory("VmHWM") - before
        assert np.isfinite(scores).all()
        beside = sum(member.weight > 0 for member in model.members_)
        told.append(f"{method}, {beside} members, {rows} rows: {beyond:.0f} MiB")
        print(f"{told[-1]}, {time.perf_counter() - start:.0f} s", flush=True)
        most = max(most, beyond)
    return ("right" if most <= 500 else "silent wrong"), "; ".join(told)


def score_of(path, x):
    return sn.load(path).score_samples(x)


@trial(0.01)
def processes(rng):
    path, x = model()
    backend = str(rng.choice(["loky", "multiprocessing"]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = joblib.Parallel(2, backend=backend)(
            joblib.delayed(score_of)(path, x) for _ in range(3)
        )
        search = GridSearchCV(
            sn.EnergyDensity(random_state=0, method="joint"), {"max_steps": [1, 2]}, cv=2, n_jobs=2
        ).fit(x)
    same = all(np.array_equal(scores, score_of(path, x)) for scores in found)
    same = same and np.isfinite(search.best_score_)
    return ("right", backend) if same else ("silent wrong", f"{backend} differs")


def attempt(kind, seed):
    """One trial by its name and seed; one that wants a folder has an empty one."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 what a user's program may have drawn from
    function, rng = TRIALS[kind][-1], np.random.default_rng(seed)
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        folders = [Path(folder)][: function.__code__.co_argcount - 1]
        return function(rng, *folders)
