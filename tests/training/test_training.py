"""fit: it learns, is reproducible, refuses bad input, survives trouble."""

import json
import math
import warnings
from functools import partial

import pytest
import torch
from torch import nn

import selfnorm as sn
from selfnorm.errors import CheckpointError, DataError, EnergyError, ProposalError
from selfnorm.training import History, Stepper, Task, TensorSource, TrainingOptions
from selfnorm.training.checkpoint import load_checkpoint, save_checkpoint
from selfnorm.training.task import lr_factor
from tests.fitting import Troubled, fit, skewed, weights


def small_model(x, seed=0):
    torch.manual_seed(seed)
    return sn.EBM(sn.MLP(2, (32, 32), saturate=10.0), base=sn.StudentT.fit_to(x))


def quick(model, x, **options):
    settings = {"max_epochs": 8, "batch_size": 128, "n_samples": 256, "lr": 5e-3, "seed": 1}
    return fit(model, x, progress=False, **{**settings, **options})


def test_a_bar_keeps_quiet_where_nobody_watches(capfd):
    fit(small_model(skewed(300)), skewed(300), max_epochs=1, seed=0, progress=True)
    assert capfd.readouterr() == ("", "")


def test_snl_learns_b_itself_before_the_closing_step():
    x = skewed(1500)
    model = small_model(x)
    history = quick(model, x, max_epochs=20)
    lz, _ = sn.exact_log_norm(model, 2, n_points=513)
    assert history.final["log_norm_learned"] == pytest.approx(lz, abs=0.1)


def test_gaussian_mean_by_sgd_reaches_the_closed_form_optimum():
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


@pytest.mark.parametrize(("last", "skipped", "rollbacks"), [(10, 2, 0), (14, None, 1)])
def test_single_bad_steps_are_skipped_and_a_run_of_them_rolls_back(last, skipped, rollbacks):
    x = skewed(600)
    model = sn.EBM(Troubled(8, last), base=sn.StudentT.fit_to(x))
    history = quick(model, x, max_epochs=5)
    assert history.rollbacks == rollbacks
    assert skipped in (None, history.skipped_steps)
    assert history.stopped == "max_epochs"
    assert torch.isfinite(weights(model)).all()


def test_hopeless_divergence_stops_with_the_best_state():
    x, val = skewed(600), skewed(200, seed=3)
    model = sn.EBM(Troubled(12), base=sn.StudentT.fit_to(x))
    with pytest.warns(sn.SelfnormWarning, match="roll-backs"):
        history = quick(model, x, val_data=val, max_epochs=40)
    assert history.stopped == "diverged"
    assert torch.isfinite(weights(model)).all()
    assert history.best_score is not None


def test_ctrl_c_keeps_the_best_state_and_a_normalised_model():
    x, val = skewed(600), skewed(200, seed=3)
    model = sn.EBM(Troubled(30, interrupts=True), base=sn.StudentT.fit_to(x))
    with pytest.warns(sn.SelfnormWarning, match="interrupted"):
        history = quick(model, x, val_data=val, max_epochs=50)
    assert history.stopped == "interrupted"
    assert history.best_step > 0
    lz, _ = sn.exact_log_norm(model, 2, n_points=513)
    assert float(model.log_norm.detach()) == pytest.approx(lz, abs=0.01)


X, BOX = skewed(100), sn.Uniform([-1, -1], [0, 0])
QUICKLY = {"max_steps": 1, "progress": False}


def several(model, x_train, **options):
    return sn.fit_many([model], x_train, **options)


def an_ebm(energy):
    return quick(sn.EBM(energy), X, proposal=sn.Gaussian.fit_to(X))


def a_chain(**options):
    return sn.fit(sn.AutoregressiveEBM(2), X, **QUICKLY, **options)


REFUSED = [
    # proposals
    (ProposalError, "3 numbers, the data have 2", {"proposal": sn.Gaussian(torch.zeros(3), 1.0)}),
    (ProposalError, "zero density at .* of 100 rows.*Defensive", {"proposal": BOX}),
    (ProposalError, "Defensive", lambda _: quick(sn.EBM(sn.MLP(2)), X)),
    (ProposalError, "rows of 3 numbers", lambda m: m.sample(4, proposal=sn.Gaussian([0] * 3, 1.0))),
    (DataError, "proposal", lambda _: sn.EBM(sn.MLP(2)).sample(3)),
    # data
    (DataError, "row 1, column 0", lambda m: quick(m, torch.tensor([[0.0], [math.nan]]) * X[:2])),
    (DataError, r"1 row\(s\)", lambda m: quick(m, X[:1])),
    (DataError, "column 1 .* constant", lambda m: quick(m, X * torch.tensor([1.0, 0.0]))),
    (DataError, r"x\[:, None\]", lambda m: quick(m, X[:, 0])),
    (DataError, "val_data has 3 columns", {"val_data": torch.zeros(5, 3)}),
    (DataError, "val_data", {"patience": 3}),
    (DataError, "tuple of 2 parts", lambda m: quick(m, (X, X[:, 0]))),
    (DataError, "val_data is a tuple of 2", {"val_data": (X, X)}),
    *((DataError, "between 0 and 1", {"val_data": share}) for share in (1.0, 2, -0.1)),
    (DataError, "not a DataLoader", lambda m: quick(m, torch.utils.data.DataLoader(X))),
    (DataError, r"flatten\(1\)", lambda m: quick(m, X.reshape(-1, 2, 1))),
    (DataError, "2 columns", lambda m: m.log_prob(torch.zeros(4, 3))),
    (DataError, "give val_data of a AutoregressiveEBM as rows", lambda _: a_chain(val_data=0.2)),
    (DataError, "not a share of them", lambda m: several(m, X, val_data=0.2, **QUICKLY)),
    # energies and models
    (EnergyError, "not finite at 100", lambda _: an_ebm(lambda v: v.sum(-1) * math.nan)),
    (EnergyError, r"one scalar per row.*\(100, 4\)", lambda _: an_ebm(nn.Linear(2, 4))),
    (EnergyError, "floating-point.*int64", lambda _: an_ebm(lambda v: v.round().long().sum(-1))),
    *((EnergyError, "a function of rows", lambda _, e=e: sn.EBM(e)) for e in (X, nn.Linear)),
    (TypeError, "training_task", lambda _: quick(nn.Linear(2, 1), X)),
    (TypeError, "a sequence of one or more", lambda m: sn.fit_many(m, X, **QUICKLY)),
    (TypeError, "not of AutoregressiveEBM", lambda m: sn.Ensemble([m, sn.AutoregressiveEBM(2)])),
    (DataError, "at least one", lambda _: sn.Ensemble([])),
    # options
    (ValueError, "ranking_nce", {"objective": "sml"}),
    (TypeError, "n_sampels", {"n_sampels": 3}),
    (ValueError, "n_samples must be at least 1, got 0", {"n_samples": 0}),
    *(
        (ValueError, f"{name} must be a whole number", {name: 1e1})
        for name in ("n_samples", "batch_size", "max_steps", "max_epochs")
    ),
    (ValueError, "log_norm_lr_scale must be positive", {"log_norm_lr_scale": 0.0}),
    *(
        (TypeError, "are no options of training", partial(train, x_train=X, momentum=1))
        for train in (sn.fit, sn.fit_distributed, several)
    ),
    *(
        (TypeError, words, partial(train, x_train=X, task_options={option: 1}))
        for train, option, words in (
            (sn.fit, "polish_steps", r"task_options \['polish_steps'\]"),
            (sn.fit_distributed, "polish_steps", r"task_options \['polish_steps'\]"),
            (several, "max_memory", r"task_options \['max_memory'\]"),
            (sn.fit_distributed, "max_memory", "max_memory is for one device"),
        )
    ),
    (TypeError, r"without \['max_memory'\]", lambda _: a_chain(task_options={"max_memory": 1})),
    *(
        (ValueError, name, lambda _, o=option: TrainingOptions(**o))
        for name, option in (
            ("optimizer", {"optimizer": "sgd"}), ("schedule", {"schedule": "x"}),
            ("lr", {"lr": -1}), ("ema", {"ema": 2}), ("batch_size", {"batch_size": 0}),
            ("max_steps", {"max_steps": 0}), ("patience", {"patience": -1}),
            ("validate_every", {"validate_every": -1}), ("clip_norm", {"clip_norm": 0.0}),
            ("weight_decay", {"weight_decay": -1.0}), ("max_time", {"max_time": "soon"}),
        )
    ),
    (ValueError, "every must be at least 1", lambda _: sn.Checkpoint("run.ckpt", every=0)),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:the energy has no parameter")
@pytest.mark.parametrize(("error", "words", "call"), REFUSED)
def test_what_cannot_be_trained_is_refused_by_name(error, words, call):
    model = small_model(X)
    with pytest.raises(error, match=words):
        quick(model, X, **call) if isinstance(call, dict) else call(model)


def test_a_network_hidden_in_a_function_is_told():
    network = nn.Sequential(nn.Linear(2, 8), nn.SiLU(), nn.Linear(8, 1))
    with pytest.warns(sn.SelfnormWarning, match="no parameter to train"):
        an_ebm(lambda rows: network(rows).squeeze(-1))
    with warnings.catch_warnings():
        warnings.simplefilter("error", sn.SelfnormWarning)
        an_ebm(network)


def test_a_run_that_loses_every_step_says_so():
    with pytest.warns(sn.SelfnormWarning, match="no loss or gradient was finite"):
        history = an_ebm(Troubled(1))
    assert history.skipped_steps == history.n_steps


@pytest.mark.parametrize("val_data", [None, 0.1])
def test_a_run_that_loses_many_steps_says_so(val_data):
    class Distance(nn.Module):
        """The norm has no gradient at zero: every batch with such a row is lost."""

        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))

        def forward(self, rows):
            return (rows * self.scale).square().sum(-1).sqrt()

    x = torch.randn(400, 2, generator=torch.Generator().manual_seed(0))
    x[:4] = 0
    model = sn.EBM(Distance(), base=sn.Gaussian.fit_to(x))
    options = {"batch_size": 40, "max_steps": 100, "seed": 0, "progress": False}
    with pytest.warns(sn.SelfnormWarning, match="steps were lost"):
        history = fit(model, x, val_data=val_data, patience=0, **options)
    assert 5 < history.skipped_steps < history.n_steps
    assert history.stopped != "diverged"


def test_history_is_plain_and_written_as_json(tmp_path):
    x = skewed(300)
    history = quick(small_model(x), x, max_epochs=3, val_data=skewed(100, seed=1))
    assert len(repr(history)) < 200
    assert f"{history.n_steps} steps" in repr(history)
    history.to_json(tmp_path / "h.json")
    loaded = History.from_dict(json.loads((tmp_path / "h.json").read_text()))
    assert loaded.curve("val_lower") == history.curve("val_lower")
    assert {"step", "loss", "val_upper", "val_ess"} <= set(history.records[0])


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
