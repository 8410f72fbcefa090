"""Cases, skips and captured graphs, for pytest and for a machine without it."""

import os
import tempfile
import unittest
import warnings
from contextlib import contextmanager
from pathlib import Path

import torch

import selfnorm as sn
from selfnorm.training import Stepper

# Another name rehearses the tests where there is no GPU; those of graphs and memory then fail.
DEVICE = torch.device(os.environ.get("SELFNORM_GPU", "cuda"))


def each(*cases):
    """Run a test once for each of these arguments."""

    def mark(function):
        function.cases = cases
        return function

    return mark


def skip(reason):
    raise unittest.SkipTest(reason)


@contextmanager
def folder():
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@contextmanager
def raises(kind, words):
    told = None
    try:
        yield
    except kind as error:
        told = str(error)
    assert told is not None, f"no {kind.__name__}"
    assert words in told, f"{words!r} is not in {told}"


@contextmanager
def graphs(wanted):
    """Training with captured steps, which must be captured and stay so, or without."""
    captured = []
    begin, capture = Stepper.__init__, Stepper._try_capture

    def plain(self, *args):
        begin(self, *args)
        self.capture = False

    def counted(self, *args):
        capture(self, *args)
        captured.append(self.captured)

    with warnings.catch_warnings():
        warnings.simplefilter("error", sn.SelfnormWarning)  # a graph that is given up tells so
        if wanted:
            Stepper._try_capture = counted
        else:
            Stepper.__init__ = plain
        try:
            yield
        finally:
            Stepper.__init__, Stepper._try_capture = begin, capture
    if wanted and DEVICE.type == "cuda":
        assert captured, "no step was captured"
        assert all(captured), "a step could not be captured"


def flat(model):
    """All parameters as one vector on the CPU."""
    return torch.cat([p.detach().double().flatten().cpu() for p in model.parameters()])


def close(found, expected, tolerance=1e-3):
    distance = float((found - expected).norm() / expected.norm())
    assert distance <= tolerance, f"relative distance {distance:.2e} > {tolerance:.0e}"


def moved(model, before, least=1e-4):
    """Training has changed it, and to numbers."""
    now = flat(model)
    assert bool(now.isfinite().all())
    assert float((now - before).norm() / before.norm()) > least
