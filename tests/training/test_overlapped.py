"""An average that runs beside the next step is the average of the plain step."""

import numpy as np
import pytest
import torch

from selfnorm.images import ImageRegressor
from selfnorm.networks.resnet import ResNet18
from selfnorm.training import Stepper, loop, make_optimizer
from selfnorm.training.overlapped import OverlappedStepper, make_stepper


def regressor(**options):
    fixed = {"n_samples": 8, "batch_size": 8, "max_epochs": 3, "lr": 3e-3, "random_state": 0}
    torch.manual_seed(0)
    return ImageRegressor(backbone=ResNet18(3, width=2), **{**fixed, **options})


def pictures(n=48):
    rng = np.random.default_rng(0)
    level = rng.uniform(0, 1, n)
    noise = rng.integers(0, 60, (n, 3, 16, 16))
    return (190 * level[:, None, None, None] + noise).astype(np.uint8), np.round(30 * level)


class Spoiled:
    """A task whose losses are now and then not finite, or long for a shorter gradient."""

    def __init__(self, task):
        self.inner, self.module, self.calls = task, task.module, 0
        self.parameter_groups = task.parameter_groups

    def loss(self, batch):
        self.calls += 1
        value, metrics = self.inner.loss(batch)
        if self.calls in (3, 4, 9):
            value = value * float("inf")
        return (100 * value if self.calls % 2 else value), metrics


def stepped(kind, *, settle_at=(), **options):
    x, y = pictures()
    model = regressor(**options)
    model.prepare(torch.from_numpy(x), torch.from_numpy(y)[:, None])
    z = model.space_.standardise(torch.from_numpy(y)[:, None]).float()
    task = Spoiled(model.task())
    task.module.train()
    optimizer = make_optimizer(task, "adamw", 0.1)
    data = (torch.from_numpy(x), z)
    stepper = kind(task, optimizer, data, clip_norm=0.5, ema=0.9, capture=False)
    torch.manual_seed(1)
    for k in range(10):
        stepper.step(torch.arange(4 * k, 4 * k + 8), 1e-2 / (k + 1), k)
        if k in settle_at:
            stepper.settle()
    return stepper


@pytest.mark.parametrize("objective", ["snl", "mdn"])
def test_it_is_the_plain_step(objective):
    plain, late = (stepped(kind, objective=objective) for kind in (Stepper, OverlappedStepper))
    for mine, theirs in zip(late.params, plain.params, strict=True):
        assert torch.equal(mine, theirs)
    pairs = list(zip(late.average, plain.average, strict=True))
    assert not all(torch.equal(mine, theirs) for mine, theirs in pairs)  # one is outstanding
    late.settle()
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs)
    assert late.read() == plain.read()
    assert (late.skipped, late.bad_streak) == (plain.skipped, plain.bad_streak) == (3, 0)


def test_settling_in_between_changes_nothing_but_rounding():
    often = stepped(OverlappedStepper, settle_at=(0, 3, 4, 9))
    once = stepped(OverlappedStepper)
    once.settle()
    for mine, theirs in zip(often.average, once.average, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("patience", [None, 1])
def test_a_fit_with_it_is_the_plain_fit(monkeypatch, patience):
    """Validation, best state and the record see averages that are up to date."""
    x, y = pictures()
    plain = regressor(patience=patience).fit(x, y)
    monkeypatch.setattr(loop, "make_stepper", OverlappedStepper)
    late = regressor(patience=patience).fit(x, y)
    for name, value in late.model_.state_dict().items():
        torch.testing.assert_close(value, plain.model_.state_dict()[name], rtol=1e-4, atol=1e-6)
    assert late.history_.n_steps == plain.history_.n_steps
    for mine, theirs in zip(late.history_.records, plain.history_.records, strict=True):
        for name in ("lr", "loss", "grad_norm", "val_score"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4), name


def test_only_captured_steps_overlap():
    x, y = pictures()
    model = regressor()
    model.prepare(torch.from_numpy(x), torch.from_numpy(y)[:, None])
    task = model.task()
    optimizer = make_optimizer(task, "adamw", 0.0)
    options = {"clip_norm": 1.0, "ema": 0.9, "capture": True}
    stepper = make_stepper(task, optimizer, (torch.from_numpy(x),), **options)
    assert type(stepper) is Stepper  # no CUDA here
