"""Threads: each call gives the numbers it gives alone, and leaves torch as it found it."""

import multiprocessing
import os
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch._dynamo  # which torch's first optimiser would import, and sympy add a filter then

import selfnorm as sn
from selfnorm._context import (
    alone,
    evaluating,
    one_thread,
    seeded,
)
from selfnorm.report import findings_of

X = np.random.default_rng(0).normal(size=(60, 4))


def _density(d):
    fitted = sn.EnergyDensity(max_steps=8, random_state=d).fit(X[:, :d])
    return fitted.score_samples(X[:, :d]), fitted.sample(20, random_state=1)


def _regressor():
    fitted = sn.EnergyRegressor(max_epochs=2, n_members=2, hidden=8, random_state=0)
    fitted.fit(X[:, :2], X[:, 2])
    return (fitted.predict_quantiles(X[:5, :2]),)


def _ebm():
    q = sn.Gaussian(torch.zeros(2, dtype=torch.float32), scale=1.0)
    with seeded(3):
        model = sn.EBM(sn.MLP(2, hidden=(16,)).float(), base=q)
    rows = torch.from_numpy(X[:, :2]).float()
    sn.fit(model, rows, max_steps=8, n_samples=64, seed=0, progress=False)
    return (model.sample(10, seed=0).numpy(), sn.evaluate(model, rows, seed=0).lower)


FITS = [lambda: _density(2), lambda: _density(4), _regressor, _ebm]


def _everywhere():
    """What belongs to the process, and what a new thread finds."""
    with ThreadPoolExecutor(1) as pool:
        seen = pool.submit(lambda: (torch.get_num_threads(), torch.get_default_dtype())).result()
    return (
        *(seen, torch.get_num_threads(), torch.get_default_dtype(), list(warnings.filters)),
        *(torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled()),
        torch.get_rng_state().tolist(),
    )


@contextmanager
def _unchanged(dtype=torch.float32, threads=1):
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)
    before = _everywhere()
    try:
        yield
        assert _everywhere() == before
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(1)


def _equal(found, expected):
    for mine, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fits_of_four_threads_are_those_of_one(dtype):
    with _unchanged(dtype):
        expected = [fit() for fit in FITS]
        with ThreadPoolExecutor(4) as pool:
            found = [each.result() for each in [pool.submit(fit) for fit in FITS]]
        for mine, other in zip(found, expected, strict=True):
            _equal(mine, other)


def test_draws_without_a_seed_do_not_reach_into_the_fit_of_another_thread():
    q = sn.Gaussian(torch.zeros(2), scale=1.0)
    model = sn.EBM(sn.MLP(2, hidden=(8,)), base=q).eval()
    expected, stop = _ebm(), threading.Event()

    def draw():
        while not stop.is_set():
            model.sample(5)

    other = threading.Thread(target=draw)
    other.start()
    try:
        _equal(_ebm(), expected)
    finally:
        stop.set()
        other.join()


def test_scores_wait_for_nobody():
    fitted = [
        sn.EnergyDensity(max_steps=5, random_state=0).fit(X[:, :d]).score_samples for d in (2, 3)
    ]
    regressor = sn.EnergyRegressor(max_epochs=1, n_members=2, hidden=8, random_state=0)
    regressor.fit(X[:, :2], X[:, 2])
    with alone(), ThreadPoolExecutor(1) as pool:
        for d, score in zip((2, 3), fitted, strict=True):
            assert len(pool.submit(score, X[:, :d]).result(timeout=60)) == len(X)
        pool.submit(regressor.log_prob, X[:, :2], X[:, 2]).result(timeout=60)
        pool.submit(regressor.predict, X[:, :2]).result(timeout=60)


def test_torch_is_as_before_after_a_failure():
    for failing in (
        lambda: sn.EnergyDensity(max_steps=2, device="no such device").fit(X),
        lambda: sn.EnergyRegressor(device="no such device").fit(X, X[:, 0]),
        lambda: sn.load("no such folder"),
    ):
        with _unchanged(torch.float64), pytest.raises((RuntimeError, sn.SelfnormError)):
            failing()
    with ThreadPoolExecutor(1) as pool:  # and the turn was given back
        pool.submit(_ebm).result(timeout=60)


def test_one_thread_leaves_the_number_of_the_process():
    """Also where a thread took its own number from within another one's block."""
    inside, asked = threading.Event(), threading.Event()

    def first():
        with one_thread():
            inside.set()
            asked.wait(10)

    def second():
        inside.wait(10)
        torch.ones(200_000).sum()  # begins with the 1 of the other thread's block
        asked.set()
        with one_thread():
            assert torch.get_num_threads() == 1
        return torch.get_num_threads()

    with _unchanged(threads=2), ThreadPoolExecutor(2) as pool:
        begun = pool.submit(first)
        assert pool.submit(second).result() == 2
        begun.result()


def test_modes_of_a_model_two_threads_look_at():
    net = torch.nn.Sequential(torch.nn.Dropout(0.5)).train()
    inside, seen = threading.Barrier(2), []

    def look():
        inside.wait(10)
        for _ in range(200):
            with evaluating(net):
                seen.append(net[0].training)

    with ThreadPoolExecutor(2) as pool:
        for each in [pool.submit(look) for _ in range(2)]:
            each.result()
    assert net.training
    assert net[0].training
    assert not any(seen)


def test_time_for_a_fit_begins_with_its_turn():
    fitted = sn.EnergyDensity(max_steps=2, max_time=600, random_state=0)
    fitting = threading.Thread(target=fitted.fit, args=(X[:40],))
    with alone():
        fitting.start()
        time.sleep(0.5)
        released = time.perf_counter()
    fitting.join()
    taken = time.perf_counter() - released
    assert fitted.judgement_.seconds < taken + 0.25


def test_filters_of_warnings_are_left_as_they_were_by_a_report_beside_a_fit():
    begun, ended = threading.Event(), threading.Event()

    def fit():
        begun.wait(10)
        with alone(), warnings.catch_warnings():  # as a fit does
            ended.wait(0.3)  # in vain, where the report has had its turn before

    before = list(warnings.filters)
    other = threading.Thread(target=fit)
    other.start()
    findings_of(lambda: begun.set() or time.sleep(0.2))
    ended.set()
    other.join()
    assert list(warnings.filters) == before


def _child(answer):
    answer.put(_ebm()[1])


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_does_not_wait_for_a_thread_it_does_not_have():
    expected = _ebm()[1]
    inside, over = threading.Event(), threading.Event()

    def hold():
        with alone():
            inside.set()
            over.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    inside.wait(10)
    try:
        fork = multiprocessing.get_context("fork")
        answer = fork.Queue()
        child = fork.Process(target=_child, args=(answer,), daemon=True)
        child.start()
        assert answer.get(timeout=30) == expected
        child.join(10)
    finally:
        over.set()
        holder.join()


_FORK = """
import os, sys, time, torch
import selfnorm._context
torch.set_num_threads(2)
torch.ones(10**6).sum()
child = os.fork()
if child == 0:
    os._exit(int(torch.ones(10**6).sum() != 10**6))
for _ in range(200):
    ended, status = os.waitpid(child, os.WNOHANG)
    if ended:
        sys.exit(status)
    time.sleep(0.1)
os.kill(child, 9)
sys.exit(1)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_process_computes_where_its_parent_had_two_threads():
    environment = {**os.environ, "PYTHONPATH": str(Path(sn.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", _FORK], env=environment, check=True, timeout=60)


MODES = {
    "inference": torch.inference_mode,
    "underflow is an error": partial(np.errstate, all="raise"),
    "bfloat16": partial(torch.autocast, "cpu", torch.bfloat16),
    "no gradients": torch.no_grad,
    "anomalies": torch.autograd.detect_anomaly,
    "another device": partial(torch.device, "meta"),
}


def in_a_program():
    rows = np.random.default_rng(0).normal(size=(100, 2))
    rows[:50] += 50  # two groups far beyond each other's reach
    density = sn.EnergyDensity(max_steps=2, random_state=0).fit(rows)
    return density.score_samples(rows), density.sample(9, random_state=0), *_regressor()


@pytest.fixture(scope="module")
def plainly():
    return in_a_program()


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("mode", MODES)
def test_fits_scores_and_samples_are_the_same_in_the_modes_of_a_program(mode, plainly):
    with MODES[mode]():
        _equal(in_a_program(), plainly)


def test_models_fitted_at_once_and_evidence_within_inference_mode():
    rows = torch.from_numpy(X[:, :2]).float()
    q = sn.Gaussian.fit_to(rows)
    models = [sn.EBM(sn.MLP(2, hidden=(8,)), base=q) for _ in "ab"]
    short = sn.TrainingOptions(max_steps=2, progress=False)
    with torch.inference_mode():
        sn.fit_many(models, rows, proposal=q, n_samples=16, options=short)
        assert abs(sn.evidence(lambda x: -0.5 * x.square().sum(-1), rows).log_z - 1.84) < 0.5


def test_a_generator_of_numpy_is_a_random_state():
    def numbers(seed):
        rng = np.random.default_rng(seed)
        density = sn.EnergyDensity(max_steps=1, random_state=rng).fit(X[:30, :1])
        regressor = sn.EnergyRegressor(max_epochs=1, n_members=1, hidden=4, random_state=rng)
        regressor.fit(X[:30, :2], X[:30, 2])
        images = torch.from_numpy(X[:20]).float().sigmoid().view(20, 1, 2, 2)
        of_images = sn.ImageRegressor(backbone=torch.nn.Flatten(), max_epochs=1, random_state=rng)
        return (
            density.sample(3, random_state=rng),
            density.sample(3, random_state=rng),
            regressor.sample(X[:2, :2], random_state=rng),
            of_images.fit(images, X[:20, 0]).predict(images),
        )

    first = numbers(0)
    _equal(first, numbers(0))
    assert not np.array_equal(first[0], first[1])
