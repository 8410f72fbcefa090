"""An update that runs beside the next forward pass is the update of the plain step."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from selfnorm import loop
from selfnorm.image_regression import ImageRegressor
from selfnorm.overlapped import OverlappedStepper, make_stepper
from selfnorm.resnet import ResNet18
from selfnorm.stepper import Stepper, make_optimizer


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

    capturable = True

    def __init__(self, task):
        self.inner, self.module, self.calls = task, task.module, 0
        self.parameter_groups, self.stages = task.parameter_groups, task.stages

    def loss(self, batch):
        self.calls += 1
        value, metrics = self.inner.loss(batch)
        if self.calls in (3, 4, 9):
            value = value * float("inf")
        return (100 * value if self.calls % 2 else value), metrics


def stepped(overlapped, *, settle_at=(), ema=0.9, clip_norm=0.5, **options):
    x, y = pictures()
    model = regressor(**options)
    model.prepare(torch.from_numpy(x), torch.from_numpy(y)[:, None])
    z = model.space_.standardise(torch.from_numpy(y)[:, None])
    task = Spoiled(model.task())
    task.module.double()  # Adam makes steps of rounding noise, which is to be small
    task.module.train()
    optimizer = make_optimizer(task, "adamw", 0.1)
    data, given = (torch.from_numpy(x), z), {"clip_norm": clip_norm, "ema": ema, "capture": False}
    if overlapped:
        stepper = OverlappedStepper(task, optimizer, data, task.stages(), **given)
    else:
        stepper = Stepper(task, optimizer, data, **given)
    torch.manual_seed(1)
    for k in range(10):
        stepper.step(torch.arange(4 * k, 4 * k + 8), 1e-2 / (k + 1), k)
        if k in settle_at:
            stepper.settle()
    return stepper


def assert_same(found, expected, without=()):
    assert set(found.state_dict()) == set(expected.state_dict())
    for name in set(found.state_dict()) - set(without):
        value = found.state_dict()[name]
        torch.testing.assert_close(value, expected.state_dict()[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("objective", ["snl", "ranking_nce", "mdn"])  # ranking: b has no gradient
@pytest.mark.parametrize("clip_norm", [0.5, None])
def test_it_is_the_plain_step(objective, clip_norm):
    options = {"objective": objective, "clip_norm": clip_norm}
    plain, late = stepped(False, **options), stepped(True, **options)
    before = copy.deepcopy(late.task.module)
    late.settle()
    # The last of the steps was outstanding. (The ninth is lost, the tenth is not.)
    moved = [not torch.equal(p, q) for p, q in zip(before.parameters(), late.params, strict=False)]
    assert any(moved)
    # Ranking does not see the energy's level: the gradient of its last bias is rounding noise.
    level = ["energy.joint.3.bias"] if objective == "ranking_nce" else []
    assert_same(late.task.module, plain.task.module, level)
    for p, mine, theirs in zip(late.params, late.average, plain.average, strict=True):
        if not level or p is not late.task.module.energy.joint[-1].bias:
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    steps = {float(s["step"]) for s in late.optimizer.state.values()}
    assert steps == {7.0}  # the lost steps are none of Adam's
    assert late.read() == pytest.approx(plain.read(), rel=1e-3)
    assert (late.skipped, late.bad_streak) == (plain.skipped, plain.bad_streak) == (3, 0)


def test_settling_in_between_changes_nothing():
    often, once = stepped(True, settle_at=(0, 3, 4, 9)), stepped(True)
    often.settle()
    once.settle()
    assert_same(often.task.module, once.task.module)
    assert often.read() == once.read()


def test_parameters_are_updated_before_their_stage_runs():
    """Each stage, when it runs, sees the parameters that the plain step would show it."""
    seen = {}

    def watch(stepper, name):
        layers = stepper.task.module.features.backbone
        for part in ("layer1", "layer3", "layer4"):
            getattr(layers, part).register_forward_pre_hook(
                lambda module, _: seen.setdefault(name, []).append(
                    float(sum(p.detach().abs().sum() for p in module.parameters()))
                )
            )

    for overlapped in (False, True):
        stepper = stepped(overlapped)
        watch(stepper, overlapped)
        for k in range(3):
            stepper.step(torch.arange(8), 1e-2, 10 + k)
    assert seen[True] == pytest.approx(seen[False], rel=1e-5)
    assert len(set(seen[True])) == 9


def test_stages_hold_every_parameter_once_and_hooks_do_not_stay():
    stepper = stepped(True)
    backbone, layer3, layer4 = stepper.task.stages()
    stage_of = stepper._stage_of
    assert {stage_of[id(p)] for p in layer3.parameters()} == {1}
    assert {stage_of[id(p)] for p in layer4.parameters()} == {2}
    assert {stage_of[id(p)] for p in backbone.layer1.parameters()} == {0}
    assert {stage_of[id(p)] for p in stepper.task.module.energy.parameters()} == {2}
    assert not any(m._forward_pre_hooks for m in stepper.task.module.modules())
    assert not any(p._post_accumulate_grad_hooks for p in stepper.params)


@pytest.mark.parametrize("patience", [None, 1])
def test_a_fit_with_it_is_the_plain_fit(monkeypatch, patience):
    """Validation, best state, averages and the record see parameters that are up to date."""
    x, y = pictures()

    def as_on_cuda(task, optimizer, *args, **options):  # else rounding differs
        for group in optimizer.param_groups:
            group["lr"] = torch.zeros(())
        stepper = Stepper(task, optimizer, *args, **options)
        stepper._waits = False
        return stepper

    monkeypatch.setattr(loop, "make_stepper", as_on_cuda)
    options = {"objective": "mdn", "patience": patience}  # no tiny gradients, all rounding
    plain = regressor(**options).fit(x, y)
    monkeypatch.setattr(
        loop, "make_stepper", lambda task, *a, **k: OverlappedStepper(task, *a, task.stages(), **k)
    )
    late = regressor(**options).fit(x, y)
    assert_same(late.model_, plain.model_)
    assert late.history_.n_steps == plain.history_.n_steps
    for mine, theirs in zip(late.history_.records, plain.history_.records, strict=True):
        for name in ("lr", "loss", "grad_norm", "val_score"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-3), name


def test_only_captured_steps_of_known_networks_overlap():
    x, y = pictures()
    for backbone, n_stages in ((ResNet18(3, width=2), 3), (nn.Flatten(), 0)):
        model = ImageRegressor(backbone=backbone, random_state=0)
        model.prepare(torch.from_numpy(x), torch.from_numpy(y)[:, None])
        task = model.task()
        assert len(task.stages()) == n_stages
        optimizer = make_optimizer(task, "adamw", 0.0)
        options = {"clip_norm": 1.0, "ema": None, "capture": True}
        stepper = make_stepper(task, optimizer, (torch.from_numpy(x),), **options)
        assert type(stepper) is Stepper  # no CUDA here
