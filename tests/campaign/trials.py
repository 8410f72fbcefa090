"""One trial each: ``trial(rng)`` returns a verdict and a word on it.

Verdicts: ``right``, ``clear error`` (an error of the library, one line at the command line),
``traceback`` (any other), ``silent wrong``, ``lost`` (neither the old nor the new model loads).
A trial that does not end is a ``hang``, see ``__main__``.
"""

import contextlib
import functools
import io
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import joblib
import numpy as np
import torch
from sklearn.model_selection import GridSearchCV

import selfnorm as sn
from selfnorm import saving
from selfnorm.cli import app as cli
from selfnorm.errors import SelfnormError
from selfnorm.tables import RegressorNetwork
from tests.campaign.tables import table
from tests.worker import serve, told

TRIALS = {}


def trial(share):
    def register(function):
        TRIALS[function.__name__] = (share, function)
        return function

    return register


def in_folder(function):
    @functools.wraps(function)
    def wrapped(rng):
        with tempfile.TemporaryDirectory() as folder:
            return function(rng, Path(folder))

    return wrapped


def state():
    return (torch.get_default_dtype(), torch.get_num_threads(), torch.get_rng_state().tolist())


def _defaults(rng):
    """A tenth of the fits at the settings a user gets without choosing."""
    return rng.random() < 0.1


@trial(0.40)
def density(rng):
    default = _defaults(rng)
    x, kinds = table(rng, 300 if default else 600)
    options = {} if default else {"max_steps": int(rng.integers(1, 40))}
    if not default and rng.random() < 0.3:
        options["method"] = str(rng.choice(["joint", "autoregressive"]))
    before, told = state(), f"{x.shape} {kinds} {options or 'defaults'}"
    try:
        fitted = sn.EnergyDensity(random_state=int(rng.integers(99)), **options).fit(x)
    except (SelfnormError, ValueError) as error:
        return "clear error", f"{told}: {error}"
    scores = fitted.score_samples(x)
    drawn = fitted.sample(20, random_state=0)
    bounds = fitted.bounds(x[:100], n_samples=300, random_state=0)
    if state() != before:
        return "silent wrong", f"{told}: torch is not as before"
    if not np.isfinite(scores).all() or not np.isfinite(drawn).all():
        return "silent wrong", f"{told}: scores or samples are not finite"
    if not bounds.lower <= bounds.upper + 1e-6:
        return "silent wrong", f"{told}: bounds {bounds}"
    if not np.allclose(fitted.score_samples(x[:3]), scores[:3], rtol=1e-9):
        return "silent wrong", f"{told}: a row's score hangs on the others"
    if default and len(x) >= 100 and not bounds.reliable:
        return "right", f"UNRELIABLE {told}: {bounds.reasons}"
    return "right", told


@trial(0.22)
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
    except (SelfnormError, ValueError) as error:
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
    err, before = io.StringIO(), sys.argv
    sys.argv = ["selfnorm", *map(str, arguments)]
    try:
        with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
            cli.main()
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


def damaged(rng, content):
    """Bits flipped, cut short, lengthened, or a piece replaced."""
    content, kind = bytearray(content), rng.integers(5)
    if kind <= 1:
        for _ in range(rng.integers(1, 4)):
            content[rng.integers(len(content))] ^= 1 << rng.integers(8)
    elif kind == 2:
        content = content[: rng.integers(len(content))]
    elif kind == 3:
        content += rng.bytes(rng.integers(1, 99))
    else:
        start = rng.integers(len(content))
        content[start : start + 16] = rng.bytes(16)
    return bytes(content)


@trial(0.12)
@in_folder
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
    code, err = command("score", path, source, "-o", folder / "s.csv")
    if code == 0:
        return "right", suffix
    if code == 2 and len(err.strip().splitlines()) == 1:
        return "clear error", err.strip()
    return "traceback", f"{suffix}: exit {code}, {err[-300:]}"


@trial(0.10)
@in_folder
def model_folder(rng, folder):
    path, x = model()
    shutil.copytree(path, folder / "m")
    victim = folder / "m" / str(rng.choice([saving.CONFIG_FILE, saving.WEIGHTS_FILE]))
    victim.write_bytes(damaged(rng, victim.read_bytes()))
    try:
        scores = sn.load(folder / "m").score_samples(x)
    except SelfnormError as error:
        return "clear error", str(error)
    if not np.array_equal(scores, sn.load(path).score_samples(x)):
        return "silent wrong", f"{victim.name} loads with other scores"
    return "right", "no effect"


def train(checkpoint=None, steps=24):
    torch.manual_seed(0)
    x = torch.randn(300, 2).exp()
    ebm = sn.EBM(sn.MLP(2, (16,), saturate=8.0), base=sn.StudentT.fit_to(x))
    options = sn.TrainingOptions(max_steps=steps, batch_size=64, seed=0, progress=False)
    if checkpoint is not None:
        options = options.given(checkpoint=sn.Checkpoint(checkpoint, every=8))
    sn.fit(ebm, x, n_samples=64, options=options)
    return torch.cat([p.detach().flatten() for p in ebm.parameters()])


@trial(0.07)
@in_folder
def checkpoint(rng, folder):
    path, expected = folder / "run.ckpt", train()
    train(path)
    path.write_bytes(damaged(rng, path.read_bytes()))
    try:
        found = train(path)
    except SelfnormError as error:
        return "clear error", str(error)
    if torch.equal(found, expected):
        return "right", "no effect"
    return "silent wrong", "a damaged checkpoint ends in other weights"


OVERWRITE = """
import sys, torch
from selfnorm import saving
config = {"in_features": 300, "out_features": 300, "bias": False}
print("ready", flush=True)
for k in range(10**6):
    state = {"weight": torch.full((300, 300), float(k))}
    saving.save_folder(sys.argv[1], "Linear", config, state, {"k": k})
"""
FIT = "import sys; from tests.campaign.trials import train; print('ready', flush=True); "
FIT += "train(sys.argv[1], 400)"


def killed(rng, code, argument, longest):
    """A process killed at a random moment after it began."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(argument)], stdout=subprocess.PIPE, text=True
    )
    process.stdout.readline()
    time.sleep(rng.uniform(0, longest))
    process.send_signal(signal.SIGKILL)
    process.wait()


@trial(0.02)
@in_folder
def kill_while_saving(rng, folder):
    saving.save_folder(
        folder / "m",
        "Linear",
        {"in_features": 300, "out_features": 300, "bias": False},
        {"weight": torch.full((300, 300), -1.0)},
        {"k": -1},
    )
    for _ in range(5):
        killed(rng, OVERWRITE, folder / "m", 0.3)
        try:
            found = saving.read_folder(folder / "m")
            weight = sn.load(folder / "m").weight
        except SelfnormError as error:
            return "lost", str(error)
        if not bool((weight == float(found.notes["k"])).all()):
            return "silent wrong", "weights of another model"
    return "right", f"up to model {found.notes['k']}"


@functools.lru_cache(maxsize=1)
def whole():
    return train(steps=400)


@trial(0.01)
@in_folder
def kill_while_fitting(rng, folder):
    for _ in range(2):
        killed(rng, FIT, folder / "run.ckpt", 1.5)
    found = train(folder / "run.ckpt", 400)
    same = torch.equal(found, whole())
    return ("right", "") if same else ("silent wrong", "a resumed run ends in other weights")


@trial(0.03)
def threads(rng):
    path, x = model()
    loaded, seeds = sn.load(path), [int(s) for s in rng.integers(99, size=8)]

    def ask(seed):
        kind = seed % 3
        if kind == 0:
            return sn.EnergyDensity(max_steps=5, random_state=seed).fit(x).score_samples(x)
        if kind == 1:
            return loaded.sample(30, random_state=seed)
        return np.array([loaded.bounds(x, n_samples=300, random_state=seed).lower])

    before = state()
    expected = [ask(seed) for seed in seeds]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, seeds))
    if not all(map(np.array_equal, found, expected)) or state() != before:
        return "silent wrong", f"threads differ from one: {seeds}"
    return "right", ""


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


@trial(0.01)
@in_folder
def two_writers(rng, folder):
    path, x = model()
    loaded = [sn.load(path), sn.EnergyDensity(max_steps=2, random_state=1).fit(x)]
    expected = [each.score_samples(x) for each in loaded]

    def write(each):
        for _ in range(10):
            each.save(folder / "m")

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write, loaded))
    found = sn.load(folder / "m").score_samples(x)
    if any(np.array_equal(found, scores) for scores in expected):
        return "right", ""
    return "silent wrong", "neither of both models"


@trial(0.01)
@in_folder
def full_disk(rng, folder):
    """A limit on the size of files stands for a disk that is full."""
    path, x = model()
    expected = sn.load(path).score_samples(x)
    shutil.copytree(path, folder / "m")
    other = sn.EnergyDensity(max_steps=2, random_state=1).fit(x)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(rng.integers(1, 9000)), hard))
    try:
        other.save(folder / "m")
        return "right", "it fitted"
    except SelfnormError as error:
        told = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    names = sorted(file.name for file in (folder / "m").iterdir())
    if names != [saving.CONFIG_FILE, saving.WEIGHTS_FILE]:
        return "silent wrong", f"left behind: {names}"
    if not np.array_equal(sn.load(folder / "m").score_samples(x), expected):
        return "lost", "the old model is gone"
    return "clear error", told


def attempt(kind, seed):
    """One trial by its name and seed."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 what a user's program may have drawn from
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return TRIALS[kind][1](np.random.default_rng(seed))


def answer(asked):
    try:
        return attempt(*asked)
    except Exception as error:
        return "traceback", told(error)


if __name__ == "__main__":
    serve(answer)
