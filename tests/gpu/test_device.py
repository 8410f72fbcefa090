"""Memory, devices and ranks, files, resumed runs, threads."""

import gc
import json
import os
import socket
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

import selfnorm as sn
from selfnorm.density.model import DensityTask
from tests.fitting import fit, fit_many
from tests.gpu.test_steps import QUICK, conditional, ebm, mixed, rows, vae
from tests.gpu.tools import DEVICE, close, each, flat, folder, graphs, raises, skip


def wide():
    torch.manual_seed(0)
    return ebm(sn.MLP(2, (256, 256), saturate=4.0))


def peak(train):
    """Bytes that a call takes at its height beyond what was there."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    train()
    return torch.cuda.max_memory_allocated() - before


def test_max_memory_is_kept_and_changes_nothing_else():
    options = QUICK | {"n_samples": 1_000_000, "max_steps": 8}
    whole, chunked = wide(), wide()
    plain = peak(lambda: fit(whole, rows(), **options))
    limit = plain // 8
    taken = peak(lambda: fit(chunked, rows(), **options, max_memory=limit))
    assert taken < 0.6 * plain, f"{taken} of {plain} bytes"
    # Chunks draw other samples than the whole: the same model up to their noise.
    close(flat(chunked), flat(whole), 2e-2)


def test_too_large_a_step_says_what_to_do_and_leaves_the_device_usable():
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, 2 * 2**30 / total))
    try:
        with raises(torch.cuda.OutOfMemoryError, "'max_memory': 0.5"):
            fit(wide(), rows(), **QUICK | {"n_samples": 4_000_000})
        gc.collect()
        torch.cuda.empty_cache()
        model = wide()
        fit(model, rows(), **QUICK)
        assert bool(flat(model).isfinite().all())
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


def test_models_trained_together_end_where_each_ends_alone():
    together, alone = ([ebm_of(k) for k in range(3)] for _ in "ab")
    same = {"same_batches": True, "same_samples": True}
    fit_many(together, rows(), **QUICK, **same)
    for mine, other in zip(together, alone, strict=True):
        fit(other, rows(), **QUICK)
        close(flat(mine), flat(other), 5e-3)


def ebm_of(seed):
    torch.manual_seed(seed)
    return ebm()


MODELS = {
    "ebm": lambda: (ebm(), rows()),
    "conditional": lambda: (conditional()[0], rows(), rows(dim=1, seed=2)),
    "vae": lambda: (vae("chain")[0].prior, rows(dim=2)),
}


@each(*MODELS)
def test_saved_on_the_device_and_loaded_on_the_cpu(kind):
    torch.manual_seed(0)
    model, *asked = MODELS[kind]()
    model.eval()
    with folder() as path, torch.no_grad():
        sn.save(model, path)
        twin = sn.load(path)
        assert all(p.device.type == "cpu" for p in twin.parameters())
        expected = model.log_prob(*asked).cpu()
        found = twin.log_prob(*(rows.cpu() for rows in asked))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_tables_fitted_on_the_device_are_saved_and_score_on_the_cpu():
    x = rows(600, 3).cpu().numpy()
    fitted = sn.EnergyDensity(max_steps=30, random_state=0, device=str(DEVICE)).fit(x)
    scores = fitted.score_samples(x)
    with folder() as path:
        fitted.save(path)
        loaded = sn.load(path)
    torch.set_default_device(DEVICE)  # a caller's default changes nothing
    try:
        assert np.array_equal(loaded.score_samples(x), scores)
        drawn = loaded.sample(5, random_state=0)
    finally:
        torch.set_default_device(None)
    assert np.array_equal(drawn, fitted.sample(5, random_state=0))


WAYS = {
    "folds": (600, {}),
    "rows held out": (2600, {}),
    "weights": (600, {"sample_weight": np.linspace(0, 2, 600)}),
    "restarts": (600, {"n_init": 2}),
    "limited time": (600, {"max_time": 3.0, "max_steps": None}),
    "joint restarts": (600, {"n_init": 2, "method": "joint"}),
    "joint, limited time": (600, {"max_time": 3.0, "max_steps": None, "method": "joint"}),
}


@each(*WAYS)
def test_every_way_to_fit_a_table_ends_on_the_cpu(way):
    n, options = WAYS[way]
    joint = options.get("method") == "joint"
    x = rows(n, 2).cpu().numpy() if joint else mixed(n)
    options = {"max_steps": 20, "hidden": 8, "random_state": 0, "device": str(DEVICE)} | options
    weights = options.pop("sample_weight", None)
    with folder() as path:
        fitted = sn.EnergyDensity(**options).fit(x, sample_weight=weights, checkpoint=path / "c")
    assert all(p.device.type == "cpu" for p in fitted.model_.parameters())
    few = x[:50] if joint else {name: cells[:50] for name, cells in x.items()}
    assert np.isfinite(fitted.score_samples(few)).all()
    assert fitted.bounds(few, n_samples=100, random_state=0).lower > -100
    fitted.sample(20, random_state=0)
    if not joint:
        fitted.impute(few, random_state=0)
        fitted.explain(few)


def test_a_regressor_of_limited_time_with_weights():
    x = rows(400, 3).cpu().numpy()
    model = sn.EnergyRegressor(n_members=2, max_time=4.0, random_state=0, device=str(DEVICE))
    model.fit(x[:, :2], x[:, 2], sample_weight=np.linspace(0, 2, 400))
    assert np.isfinite(model.log_prob(x[:, :2], x[:, 2])).all()


def interrupted(model, path, at, **options):
    """Train until a validation of this number begins."""
    plain, left = DensityTask.validate, [at]

    def validate(self, data):
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return plain(self, data)

    DensityTask.validate = validate
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", sn.SelfnormWarning)
            return fit(model, rows(), checkpoint=path, **options)
    finally:
        DensityTask.validate = plain


@each("device", "cpu")
def test_a_resumed_run_ends_where_one_never_stopped_ends(place):
    options = QUICK | {"val_data": rows(seed=1), "validate_every": 5, "ema": 0.9}
    whole, stopped = ebm_of(0), ebm_of(0)
    fit(whole, rows(), **options)
    with folder() as path:
        history = interrupted(stopped, path / "run.ckpt", 4, **options)
        assert history.stopped == "interrupted"
        again = ebm_of(0)
        if place == "cpu":  # a run of the device goes on where there is none, with other numbers
            again = again.cpu()
        history = fit(again, rows().to(again.device), checkpoint=path / "run.ckpt", **options)
    assert history.n_steps == QUICK["max_steps"]
    close(flat(again), flat(whole), 1e-4 if place == "device" else 5e-2)


def test_random_streams_of_the_caller_stay_as_they_are():
    model, x = ebm_of(0), rows()
    before = torch.get_rng_state(), torch.cuda.get_rng_state(DEVICE)
    fit(model, x, **QUICK)
    drawn = [model.sample(100, seed=5) for _ in range(2)]
    sn.evaluate(model, x, seed=0)
    assert torch.equal(*drawn)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.equal(torch.cuda.get_rng_state(DEVICE), before[1])


def test_fits_of_four_threads_are_those_of_one():
    def train(seed):
        x = rows(300, 2, seed).cpu().numpy()
        options = {"max_steps": 20, "random_state": seed, "device": str(DEVICE)}
        return sn.EnergyDensity(method="joint", **options).fit(x).score_samples(x)

    expected = [train(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for found, alone in zip(pool.map(train, range(4)), expected, strict=True):
            np.testing.assert_allclose(found, alone, rtol=1e-3)  # atomic sums have no fixed order


def test_scores_of_another_thread_leave_a_capture_alone():
    scored, done, failed = ebm_of(1), threading.Event(), []

    def score():
        n = 1000
        while not done.is_set():
            try:
                with torch.no_grad():  # ever more rows: memory that was not there before
                    assert bool(scored.log_prob(rows(n)).isfinite().all())
            except RuntimeError as error:
                failed.append(error)
                return
            n = (n + 5000) % 500_000

    other = threading.Thread(target=score)
    other.start()
    try:
        with graphs(True):
            for seed in range(8):
                fit(ebm_of(seed), rows(), **QUICK)
    finally:
        done.set()
        other.join()
    assert not failed, failed[0]


def test_two_ranks_end_where_one_process_ends():
    """On two devices where there are two, else both on the one."""
    if find_spec("lightning_fabric") is None:
        skip("no lightning_fabric")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with folder() as out:
        started = []
        for rank in range(2):
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": 2, "RANK": rank}
            place |= {"LOCAL_RANK": 0, "NODE_RANK": rank, "GROUP_RANK": rank}
            place |= {"LOCAL_WORLD_SIZE": 1, "TORCHELASTIC_RUN_ID": "test"}
            env = {**os.environ, **{name: str(value) for name, value in place.items()}}
            worker = Path(__file__).with_name("rank.py")
            command = [sys.executable, str(worker), str(out), json.dumps(QUICK)]
            started.append(
                subprocess.Popen(
                    command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
                )
            )
        try:
            until = time.monotonic() + 110  # both import torch first, on a busy machine for long
            outputs = [p.communicate(timeout=until - time.monotonic())[0] for p in started]
        finally:
            for process in started:
                process.kill()
        assert [process.returncode for process in started] == [0, 0], "\n".join(outputs)
        found = [torch.load(out / f"{rank}.pt", weights_only=True) for rank in range(2)]
    assert torch.equal(*found)
    model = ebm_of(0)
    fit(model, rows(), **QUICK)
    close(found[0], flat(model), 5e-3)
