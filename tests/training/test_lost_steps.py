"""Steps that are not finite: what is lost, what is restored, and that the caller is told."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn

import selfnorm as sn
from selfnorm.errors import SelfnormWarning
from selfnorm.images import ImageRegressor
from selfnorm.training import TrainingOptions, loop, run
from tests.fitting import Deepens, Hole


class Hiccup(nn.Module):
    """Normalises its features by running averages; not finite in some training batches."""

    def __init__(self, first, last):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.first, self.last, self.calls = first, last, 0

    def forward(self, x):
        h = nn.functional.adaptive_avg_pool2d(x, 2).mean(1).flatten(1)
        if self.training:
            self.calls += 1
            if self.first <= self.calls < self.last:
                h = h * torch.nan
        return self.net(h)


def fitted_with(backbone, **options):
    rng = np.random.default_rng(0)
    level = rng.uniform(0, 1, 160)
    x = (255 * level[:, None, None, None] * np.ones((1, 3, 4, 4))).astype(np.uint8)
    fixed = {"n_samples": 8, "batch_size": 16, "random_state": 0, "max_epochs": 4}
    model = ImageRegressor(backbone=backbone, **{**fixed, **options})
    return x, model.fit(x, np.round(30 * level))


def test_one_bad_batch_does_not_stay_in_running_averages():
    x, model = fitted_with(Hiccup(3, 4))
    assert model.history_.skipped_steps == 1
    assert model.history_.rollbacks == 1
    assert np.isfinite(model.predict(x)).all()
    assert model.history_.best_score is not None


def test_a_fit_without_a_finite_score_is_told_and_ends_where_it_began():
    with pytest.warns(SelfnormWarning, match="no validation score was finite"):
        x, model = fitted_with(Hiccup(1, 10**9), max_epochs=8)
    assert model.history_.stopped == "diverged"
    assert model.history_.skipped_steps == model.history_.n_steps  # all were lost, and counted
    assert np.isfinite(model.predict(x)).all()


class Replays:
    """What stands for a captured graph: some of its steps are lost."""

    def __init__(self, owner, lost):
        self.owner, self.lost, self.calls = owner, lost, 0

    def replay(self):
        self.calls += 1
        if self.lost(self.calls):
            self.owner.counters.streak.add_(1)
            self.owner.counters.skipped.add_(1)
        else:
            self.owner._step_once(self.owner._static_rows)

    def reset(self):
        self.calls = 0


def trained(monkeypatch, lost):
    """A small fit whose steps are "captured" from the first one on."""
    plain = loop.Stepper.__init__

    def begin(self, *args, **options):
        plain(self, *args, **options)
        self.capture = lost is not None

    def capture(self, rows):
        self._static_rows, self._graph = rows.clone(), Replays(self, lost)

    monkeypatch.setattr(loop, "_WARMUP_STEPS", 0)
    monkeypatch.setattr(loop.Stepper, "__init__", begin)
    monkeypatch.setattr(loop.Stepper, "_try_capture", capture)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    torch.manual_seed(3)
    x = torch.randn(400, 2) * torch.tensor([1.0, 3.0]) + 1
    q = sn.StudentT.fit_to(x)
    torch.manual_seed(0)
    model = sn.EBM(sn.MLP(2, hidden=(16,), saturate=10.0), base=q)
    options = {"n_samples": 64, "batch_size": 20, "max_epochs": 5, "lr": 1e-2, "seed": 1}
    return sn.fit(model, x, proposal=q, val_data=x, progress=False, **options)


def test_a_graph_that_loses_steps_is_given_up(monkeypatch):
    with pytest.warns(SelfnormWarning, match="going on without the CUDA graph"):
        history = trained(monkeypatch, lambda _: True)
    assert history.skipped_steps == 5  # until they are seen, five in a row
    assert history.rollbacks == 0  # and the learning rate is what it was
    assert history.records[-1]["lr"] == trained(monkeypatch, None).records[-1]["lr"]
    assert history.best_step > 20


def test_a_graph_without_losses_is_kept(monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("error", SelfnormWarning)
        history = trained(monkeypatch, lambda _: False)
    assert history.skipped_steps == 0
    assert history.n_steps == 100


def test_a_gradient_whose_square_overflows_is_shortened_and_not_lost():
    x = torch.randn(600, 2)
    q = sn.Gaussian(torch.zeros(2), scale=1.0)
    model = sn.EBM(Hole(0.0), base=q)
    task = Deepens(model, q, n_samples=256)
    options = TrainingOptions(max_steps=10, lr=1e-2, batch_size=128, seed=0, progress=False)
    history = run(task, (x,), options=options)
    assert history.skipped_steps == 0
    assert float(model.energy.depth.detach()) < 60.0
