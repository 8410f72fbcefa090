"""fit: it learns, is reproducible, refuses bad input, survives trouble."""

import json
import math
import warnings

import pytest
import torch
from torch import nn

import selfnorm as sn
from selfnorm.errors import CheckpointError, DataError, EnergyError, ProposalError
from selfnorm.training import History, Stepper, Task, TensorSource, TrainingOptions
from selfnorm.training.checkpoint import load_checkpoint, save_checkpoint
from selfnorm.training.schedule import lr_factor
from tests.fitting import fit


def skewed(n=1500, seed=0):
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(n, 2, generator=g)
    return torch.stack([z[:, 0].exp() - 1.5, 0.5 * z[:, 1] + 0.4 * z[:, 0] ** 2], -1)


def small_model(x, seed=0):
    torch.manual_seed(seed)
    return sn.EBM(sn.MLP(2, (32, 32), saturate=10.0), base=sn.StudentT.fit_to(x))


def quick(model, x, **options):
    settings = {"max_epochs": 8, "batch_size": 128, "n_samples": 256, "lr": 5e-3, "seed": 1}
    return fit(model, x, progress=False, **{**settings, **options})


def state(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_a_bar_keeps_quiet_where_nobody_watches(capfd):
    fit(small_model(skewed(300)), skewed(300), max_epochs=1, seed=0, progress=True)
    assert capfd.readouterr() == ("", "")


def test_snl_learns_b_itself_before_the_closing_step():
    x = skewed()
    model = small_model(x)
    history = quick(model, x, max_epochs=20)
    lz, _ = sn.exact_log_norm(model, 2, n_points=513)
    assert history.final["log_norm_learned"] == pytest.approx(lz, abs=0.1)


def test_gaussian_mean_by_sgd_reaches_the_closed_form_optimum():
    torch.manual_seed(0)
    x = torch.randn(2000, 1) + 0.8
    base = sn.Gaussian(torch.zeros(1), scale=1.0)
    model = sn.EBM(sn.ExponentialFamily(lambda v: v, 1), base=base)
    fit(model, x, max_epochs=30, lr=0.02, n_samples=2048, seed=0, progress=False)
    xbar = float(x.mean())
    assert float(model.energy.theta.detach()) == pytest.approx(xbar, abs=0.02)
    assert float(model.log_norm.detach()) == pytest.approx(xbar**2 / 2, abs=0.02)


def test_best_state_is_kept_and_early_stopping_stops():
    x, val = skewed(300), skewed(300, seed=5)
    model = small_model(x)
    history = quick(
        model,
        x,
        val_data=val,
        max_epochs=300,
        lr=3e-2,
        schedule="constant",
        patience=5,
        n_samples=1024,
    )
    assert history.stopped == "patience"
    steps, scores = history.curve("val_score")
    assert history.best_score == max(scores)
    assert history.best_step == steps[scores.index(max(scores))]
    kept = sn.evaluate(model, val, proposal=model.base, n_samples=50_000, seed=0).upper
    assert kept == pytest.approx(history.best_score, abs=0.1)


class Quadratic(Task):
    def __init__(self):
        self.module = nn.Linear(3, 1, bias=False).double()

    def loss(self, batch):
        return (self.module(batch[0]) - 1).square().mean(), {}


def test_the_moving_average_is_that_of_the_parameters():
    task, x = Quadratic(), torch.randn(40, 3, dtype=torch.float64)
    stepper = Stepper(task, TensorSource((x,)), TrainingOptions(ema=0.6))
    average = task.module.weight.detach().clone()
    for done in range(8):
        stepper.step(torch.arange(40), 0.1, done)
        keep = min(0.6, (1 + done) / (10 + done))  # a young average forgets faster
        average = keep * average + (1 - keep) * task.module.weight.detach()
        assert torch.allclose(stepper.average[0], average, atol=1e-7)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("one_cycle", [0.04, 1.0, 0.854, 0.5, 0.146]),
        ("cosine", [1.0, 0.905, 0.655, 0.345, 0.095]),
        ("constant", [1, 1, 1, 1, 1]),
        ("exponential", [1.0, 0.819, 0.670, 0.549, 0.449]),
    ],
)
def test_schedules(schedule, expected):
    found = [lr_factor(schedule, step, 50, warmup=0.2) for step in (0, 10, 20, 30, 40)]
    assert found == pytest.approx(expected, abs=1e-3)
    x = skewed(300)
    for optimizer in ("adam", "adamw"):
        history = quick(small_model(x), x, schedule=schedule, optimizer=optimizer, max_epochs=1)
        assert math.isfinite(history.records[-1]["loss"])


class SometimesNaN(nn.Module):
    """Finite in checks, NaN in a stretch of training calls."""

    def __init__(self, first, last):
        super().__init__()
        self.net = sn.MLP(2, (16,))
        self.first, self.last, self.calls = first, last, 0

    def forward(self, x):
        energy = self.net(x)
        if self.training:
            self.calls += 1
            if self.first <= self.calls < self.last:
                return energy * math.nan
        return energy


@pytest.mark.parametrize(("last", "skipped", "rollbacks"), [(10, 2, 0), (14, None, 1)])
def test_single_bad_steps_are_skipped_and_a_run_of_them_rolls_back(last, skipped, rollbacks):
    x = skewed(600)
    model = sn.EBM(SometimesNaN(8, last), base=sn.StudentT.fit_to(x))
    history = quick(model, x, max_epochs=5)
    assert history.rollbacks == rollbacks
    assert skipped in (None, history.skipped_steps)
    assert history.stopped == "max_epochs"
    assert torch.isfinite(state(model)).all()


def test_hopeless_divergence_stops_with_the_best_state():
    x, val = skewed(600), skewed(200, seed=3)
    model = sn.EBM(SometimesNaN(12, 10**9), base=sn.StudentT.fit_to(x))
    with pytest.warns(sn.SelfnormWarning, match="roll-backs"):
        history = quick(model, x, val_data=val, max_epochs=40)
    assert history.stopped == "diverged"
    assert torch.isfinite(state(model)).all()
    assert history.best_score is not None


def test_exploding_learning_rate_keeps_a_finite_model():
    x, val = skewed(600), skewed(200, seed=3)
    model = small_model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sn.SelfnormWarning)
        quick(model, x, val_data=val, lr=50.0, max_epochs=5, clip_norm=None)
    assert torch.isfinite(state(model)).all()


class Interrupting(nn.Module):
    def __init__(self, at):
        super().__init__()
        self.net, self.at, self.calls = sn.MLP(2, (16,), saturate=10.0), at, 0

    def forward(self, x):
        if self.training:
            self.calls += 1
            if self.calls == self.at:
                raise KeyboardInterrupt
        return self.net(x)


def test_ctrl_c_keeps_the_best_state_and_a_normalised_model():
    x, val = skewed(600), skewed(200, seed=3)
    model = sn.EBM(Interrupting(30), base=sn.StudentT.fit_to(x))
    with pytest.warns(sn.SelfnormWarning, match="interrupted"):
        history = quick(model, x, val_data=val, max_epochs=50)
    assert history.stopped == "interrupted"
    assert history.best_step > 0
    lz, _ = sn.exact_log_norm(model, 2, n_points=513)
    assert float(model.log_norm.detach()) == pytest.approx(lz, abs=0.01)


NAN_ROW = torch.tensor([[0.0, 1.0], [math.nan, 2.0], [1.0, 0.5]])


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (NAN_ROW, "row 1, column 0"),
        (torch.tensor([[0.0, 1.0], [1.0, math.inf]]), "infinite"),
        (torch.tensor([[0.0, 1.0]]), r"1 row\(s\)"),
        (torch.tensor([[0.0, 1.0], [2.0, 1.0], [3.0, 1.0]]), "column 1 .* constant"),
        (torch.zeros(5), r"x\[:, None\]"),
        (torch.zeros(5, 2, 2), "table"),
    ],
)
def test_bad_data_are_refused_before_training(x, words):
    model = small_model(skewed(100))
    before = state(model)
    with pytest.raises(DataError, match=words):
        quick(model, x)
    assert torch.equal(before, state(model))


def test_wrong_width_of_proposal_or_validation():
    x = skewed(100)
    with pytest.raises(ProposalError, match="3 numbers, the data have 2"):
        quick(small_model(x), x, proposal=sn.Gaussian(torch.zeros(3), scale=1.0))
    with pytest.raises(DataError, match="val_data has 3 columns"):
        quick(small_model(x), x, val_data=torch.zeros(5, 3))


def test_proposal_with_zero_density_on_data():
    x = skewed(100)
    box = sn.Uniform(torch.tensor([-1.0, -1.0]), torch.tensor([0.0, 0.0]))
    with pytest.raises(ProposalError, match=r"zero density at \d+ of 100 rows.*Defensive"):
        quick(sn.EBM(sn.MLP(2)), x, proposal=box)


def test_no_proposal_no_base():
    with pytest.raises(ProposalError, match="Defensive"):
        quick(sn.EBM(sn.MLP(2)), skewed(100))


def test_nan_energy_and_vector_energy():
    x = skewed(100)
    q = sn.Gaussian.fit_to(x)
    with pytest.raises(EnergyError, match="not finite at 100"):
        quick(sn.EBM(lambda v: v.sum(-1) * math.nan), x, proposal=q)
    with pytest.raises(EnergyError, match="one scalar per row"):
        quick(sn.EBM(nn.Linear(2, 4)), x, proposal=q)


def test_unknown_names_and_silly_options_are_refused():
    x = skewed(100)
    with pytest.raises(ValueError, match="ranking_nce"):
        quick(small_model(x), x, objective="sml")
    with pytest.raises(TypeError, match="n_sampels"):
        quick(small_model(x), x, n_sampels=3)
    with pytest.raises(TypeError, match="training_task"):
        quick(nn.Linear(2, 1), x)
    with pytest.raises(DataError, match="val_data"):
        quick(small_model(x), x, patience=3)
    with pytest.raises(ValueError, match="n_samples must be at least 1, got 0"):
        quick(small_model(x), x, n_samples=0)
    for bad in ({"optimizer": "sgd"}, {"schedule": "x"}, {"lr": -1}, {"ema": 2}, {"batch_size": 0}):
        with pytest.raises(ValueError):
            TrainingOptions(**bad)
    with pytest.raises(ValueError, match="every must be at least 1"):
        sn.Checkpoint("run.ckpt", every=0)
    counts = {"max_steps": 0, "patience": -1, "validate_every": -1}
    for name, value in {
        **counts,
        "clip_norm": 0.0,
        "weight_decay": -1.0,
        "max_time": "soon",
    }.items():
        with pytest.raises(ValueError, match=name):
            TrainingOptions(**{name: value})


def test_history_is_plain_and_written_as_json(tmp_path):
    x = skewed(300)
    history = quick(small_model(x), x, max_epochs=3, val_data=skewed(100, seed=1))
    assert len(repr(history)) < 200
    assert f"{history.n_steps} steps" in repr(history)
    history.to_json(tmp_path / "h.json")
    loaded = History.from_dict(json.loads((tmp_path / "h.json").read_text()))
    assert loaded.curve("val_lower") == history.curve("val_lower")
    assert {"step", "loss", "val_upper", "val_ess"} <= set(history.records[0])


def test_checkpoints_of_another_run_or_damaged_ones_are_refused(tmp_path):
    x = skewed(300)
    path = tmp_path / "run.ckpt"
    quick(small_model(x), x, checkpoint=path, max_epochs=2)
    with pytest.raises(CheckpointError, match=r"lr=0\.005"):
        quick(small_model(x), x, checkpoint=path, max_epochs=2, lr=1e-3)
    with pytest.raises(CheckpointError, match="other data"):
        quick(small_model(x), skewed(300, seed=8), checkpoint=path, max_epochs=2)
    with pytest.raises(CheckpointError, match="other data, of 300 rows"):
        quick(small_model(x), x[:280], checkpoint=path, max_epochs=2)
    with pytest.raises(CheckpointError, match="is a folder"):
        quick(small_model(x), x, checkpoint=tmp_path, max_epochs=2)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        quick(small_model(x), x, checkpoint=path, max_epochs=2)
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        quick(small_model(x), x, checkpoint=path, max_epochs=2)


def test_a_full_disk_leaves_the_last_checkpoint_and_the_run(tmp_path):
    x = skewed(300)
    path = tmp_path / "run.ckpt"
    save_checkpoint(path, {"step": 1})
    # The file a checkpoint is first written to leads to a device that is always full.
    (tmp_path / ".part-run.ckpt").symlink_to("/dev/full")
    with pytest.raises(CheckpointError, match="previous one is untouched"):
        save_checkpoint(path, {"step": 2})
    assert load_checkpoint(path)["step"] == 1
    (tmp_path / ".part-run.ckpt").symlink_to("/dev/full")
    afresh = sn.Checkpoint(path, resume=False)
    with pytest.warns(sn.SelfnormWarning, match="could not write.*training goes on"):
        history = quick(small_model(x), x, checkpoint=afresh, max_epochs=2)
    assert history.stopped == "max_epochs"


def test_a_run_keeps_its_time_and_its_schedule():
    x = torch.randn(2000, 2)
    model = sn.EBM(sn.MLP(2, hidden=(16,)), base=sn.Gaussian.fit_to(x))
    history = sn.fit(
        model,
        x,
        seed=0,
        n_samples=64,
        options=TrainingOptions(max_time="2s", max_epochs=10**6, patience=0, progress=False),
    )
    assert history.stopped == "max_time"
    rates = [record["lr"] for record in history.records]
    assert rates[-1] < 0.1 * max(rates)  # decayed, though most of the steps were not taken
    assert len(rates) > 2


def test_a_first_fit_holds_rows_out_and_stops_by_them():
    x = torch.randn(1000, 2)
    model = sn.EBM(sn.MLP(2, hidden=(8,)), base=sn.Gaussian.fit_to(x))
    history = sn.fit(model, x, seed=0, n_samples=64, progress=False)
    assert history.stopped == "patience"
    assert history.best_step < history.n_steps
    alone = sn.fit(model, x[:100], seed=0, n_samples=64, max_steps=3, progress=False)
    assert alone.best_score is None  # too few rows to spare some
