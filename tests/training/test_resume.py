"""Checkpoints: a run goes on only as what it was, and with all that it remembered."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributions import Independent, Normal

import selfnorm as sn
from selfnorm.density.model import DensityTask, objective_named
from selfnorm.errors import CheckpointError
from selfnorm.training.checkpoint import entries_of_task, load_checkpoint, save_checkpoint
from tests.fitting import fit, fit_many, weights

SETTINGS = {"max_steps": 12, "batch_size": 64, "n_samples": 128, "seed": 0, "progress": False}


@pytest.fixture
def x():
    g = torch.Generator().manual_seed(0)
    return torch.randn(300, 2, generator=g) * torch.tensor([1.0, 0.5]) + 0.3


def model_on(base, activation="silu"):
    torch.manual_seed(0)
    return sn.EBM(sn.MLP(2, (8,), activation=activation), base=base)


def test_a_finished_run_does_not_answer_for_another_one(x, tmp_path):
    path = tmp_path / "run.ckpt"
    fit(model_on(sn.Gaussian.fit_to(x)), x, **SETTINGS, checkpoint=path)
    for change, words in (
        ({"objective": "nce"}, "objective='snl'"),
        ({"lr": 5e-3}, r"lr=0\.001"),
        ({"n_samples": 64}, "n_samples=128"),
        ({"log_norm_lr_scale": 1.0}, r"log_norm_lr_scale=10\.0"),
        ({"proposal": sn.Gaussian(torch.zeros(2), scale=3.0)}, "another energy, base or proposal"),
    ):
        with pytest.raises(CheckpointError, match=words):
            fit(model_on(sn.Gaussian.fit_to(x)), x, **SETTINGS | change, checkpoint=path)
    # How the samples go through the network is no part of what the run is.
    fit(model_on(sn.Gaussian.fit_to(x)), x, **SETTINGS, checkpoint=path, max_memory=1e6)
    path.write_bytes(b"junk")
    with pytest.raises(CheckpointError, match="not a readable checkpoint"):
        fit(model_on(sn.Gaussian.fit_to(x)), x, **SETTINGS, checkpoint=path)


def test_a_finished_run_is_trained_longer(x, tmp_path):
    path = tmp_path / "run.ckpt"
    model = model_on(sn.Gaussian.fit_to(x))
    fit(model, x, **SETTINGS, checkpoint=path)
    longer = model_on(sn.Gaussian.fit_to(x))
    history = fit(longer, x, **{**SETTINGS, "max_steps": 30}, checkpoint=path)
    assert history.n_steps == 30
    assert history.records[0]["step"] <= 12
    assert not torch.equal(weights(longer), weights(model))
    with pytest.raises(CheckpointError, match="trained for 30 steps, and 12 are asked for"):
        fit(model_on(sn.Gaussian.fit_to(x)), x, **SETTINGS, checkpoint=path)


def test_a_run_killed_as_it_stops_goes_on_from_any_checkpoint(x, tmp_path, monkeypatch):
    """Saved between its stop by patience and its best state, it came back in its last state."""
    path, kept = tmp_path / "run.ckpt", []
    options = {**SETTINGS, "max_steps": 200, "patience": 2, "validate_every": 2, "lr": 0.1}
    options |= {"val_data": x[200:], "checkpoint": sn.Checkpoint(path, every=2)}

    def saved(at, state):
        save_checkpoint(at, state)
        kept.append(at.read_bytes())

    monkeypatch.setattr("selfnorm.training.loop.save_checkpoint", saved)
    model = model_on(sn.Gaussian.fit_to(x))
    history = fit(model, x[:200], **options)
    assert history.stopped == "patience"
    assert history.best_step < history.n_steps
    for content in kept[-4:]:
        path.write_bytes(content)
        again = model_on(sn.Gaussian.fit_to(x))
        assert fit(again, x[:200], **options).stopped == "patience"
        assert torch.equal(weights(again), weights(model))


def interrupted(name):
    """An objective that is interrupted in its eighth step, and the steps it was asked for."""
    objective, taken = objective_named(name), []
    inner = objective.loss

    def loss(*args):
        taken.append(1)
        if len(taken) > 7:
            raise KeyboardInterrupt
        return inner(*args)

    objective.loss = loss
    return objective, taken


def test_a_run_of_limited_time_goes_on_whatever_time_is_left(x, tmp_path):
    stopping, taken = interrupted("snl")
    kept = {"checkpoint": sn.Checkpoint(tmp_path / "run.ckpt", every=1)}
    with pytest.warns(sn.SelfnormWarning, match="interrupted"):
        fit(model_on(sn.Gaussian.fit_to(x)), x, objective=stopping, **SETTINGS, **kept, max_time=60)
    history = fit(model_on(sn.Gaussian.fit_to(x)), x, **SETTINGS, **kept, max_time=55)
    assert history.n_steps == 12
    assert len(taken) == 8


def test_weights_are_not_read_into_another_network_of_their_shape(x, tmp_path):
    def normal(scale):
        return Independent(Normal(x.mean(0), scale * x.std(0)), 1)

    path = tmp_path / "run.ckpt"
    fit(model_on(normal(1.0)), x, **SETTINGS, checkpoint=path)
    for other in (model_on(normal(1.0), "relu"), model_on(normal(1.5))):
        before = weights(other)[1:]
        with pytest.raises(CheckpointError, match="another energy, base or proposal"):
            fit(other, x, **SETTINGS, checkpoint=path)
        assert torch.equal(weights(other)[1:], before)  # all but b, which every start sets


def test_chains_of_another_table_are_not_gone_on_with(x):
    objective = sn.mcmc_objectives.ContrastiveDivergence("buffer", n_steps=2)
    for table in (x, x[:, :1]):
        model = sn.EBM(sn.MLP(table.shape[1], (8,)), base=sn.Gaussian.fit_to(table))
        history = fit(model, table, objective=objective, **SETTINGS)
        assert history.skipped_steps == 0


@pytest.mark.parametrize("same_batches", [False, True])
def test_models_trained_together_are_resumed_as_what_they_were(x, tmp_path, same_batches):
    path = tmp_path / "many.ckpt"
    base = sn.Gaussian.fit_to(x)

    def train(**options):
        models = [model_on(base), model_on(base)]
        settings = {**SETTINGS, "lr": [1e-3, 5e-3], "same_batches": same_batches, **options}
        fit_many(models, settings.pop("rows", x), **settings, checkpoint=path)
        return weights(*models)

    assert torch.equal(train(), train())
    for change in (
        {"objective": ["snl", "nce"]},
        {"rows": 2 * x},
        {"lr": [2e-3, 5e-3]},
        {"proposal": sn.Gaussian.fit_to(x, inflate=2.0)},
        {"n_samples": 64},
        {"weight_decay": [0.0, 0.1]},
    ):
        with pytest.raises(CheckpointError):
            train(**change)


def test_numbers_of_numpy_and_torch_go_into_a_checkpoint_and_come_back(x, tmp_path):
    path = tmp_path / "run.ckpt"
    odd = {
        "lr": np.float64(1e-3),
        "max_steps": np.int64(6),
        "batch_size": np.int32(64),
        "n_samples": np.int64(128),
        "clip_norm": torch.tensor(10.0),
        "seed": np.int64(0),
        "progress": False,
    }
    first, again = model_on(sn.Gaussian.fit_to(x)), model_on(sn.Gaussian.fit_to(x))
    fit(first, x, **odd, checkpoint=path)
    plain = {**SETTINGS, "max_steps": 6, "lr": 1e-3}
    fit(again, x, **plain, checkpoint=path)
    assert torch.equal(weights(first), weights(again))


def test_writing_a_checkpoint_leaves_every_part_in_its_mode():
    """A frozen part in evaluation mode inside a model that trains stays there."""
    x = torch.randn(20, 2)
    energy = nn.Sequential(nn.Linear(2, 4).eval(), nn.Dropout(0.5), nn.Linear(4, 1))
    task = DensityTask(sn.EBM(energy), sn.Gaussian.fit_to(x), n_samples=8)
    first, second = (entries_of_task(task, (x,))["witness"] for _ in range(2))
    assert torch.equal(first, second)  # without dropout
    assert [part.training for part in energy] == [False, True, True]


def test_a_whole_file_with_a_malformed_state_is_refused(x, tmp_path):
    path = tmp_path / "run.ckpt"
    settings = {**SETTINGS, "val_data": x[:50], "checkpoint": path}
    fit(model_on(sn.Gaussian.fit_to(x)), x, **settings)
    state = load_checkpoint(path)
    for name, value in (
        ("step", "12"),
        ("keeper", {"state": {"energy": torch.zeros(1)}}),
        ("good", {}),
        ("training", {}),
        ("history", {"unknown": 1}),
        ("counters", (1,)),
        ("random", torch.zeros(3)),
    ):
        save_checkpoint(path, {**state, name: value})
        other = model_on(sn.Gaussian.fit_to(x))
        before = weights(other)[1:]
        with pytest.raises(CheckpointError, match="belongs to another model"):
            fit(other, x, **settings)
        assert torch.equal(weights(other)[1:], before)  # all but b, which every start sets
    save_checkpoint(path, {**state, "task": None})  # that this task keeps nothing is no fault
    fit(model_on(sn.Gaussian.fit_to(x)), x, **settings)


def test_two_writers_of_one_checkpoint_leave_a_whole_one(tmp_path):
    path = tmp_path / "run.ckpt"

    def write(number):
        for _ in range(15):
            save_checkpoint(path, {"all": torch.full((100_000,), float(number))})

    with ThreadPoolExecutor(2) as pool:
        writing = [pool.submit(write, number) for number in range(2)]
        while not all(each.done() for each in writing):
            if path.exists():
                found = load_checkpoint(path)["all"]
                assert bool((found == found[0]).all())
        for each in writing:
            each.result()
    assert [file.name for file in tmp_path.iterdir()] == ["run.ckpt"]
