"""Shared set-up: one thread and one seed, so that every run of the tests sees the same numbers."""

import os

# Before anything is imported that counts processors: a second thread of every worker only waits.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

from selfnorm import functional

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # scripts that are tested, too
# The examples of a property are the same in every run, and a slow machine is no failure.
settings.register_profile(
    "repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")


def begin():
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _deterministic_torch():
    begin()


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef):
    """What serves a whole module must not depend on which tests ran before in this process."""
    if fixturedef.scope != "function":
        begin()


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture
def few_closing_samples(monkeypatch):
    """``b`` is set from some thousand samples, not from a million: for tests of other things."""
    few = partial(functional.adaptive_log_mean, max_samples=2**15)
    monkeypatch.setattr(functional, "adaptive_log_mean", few)
