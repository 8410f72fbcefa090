"""fit where people call it in odd ways: it does the right thing, or says what is wrong."""

import warnings

import pytest
import torch
from torch import nn

import selfnorm as sn
from selfnorm.errors import DataError, EnergyError
from tests.fitting import fit

SETTINGS = {"max_steps": 10, "batch_size": 64, "n_samples": 128, "seed": 0, "progress": False}


@pytest.fixture
def x():
    g = torch.Generator().manual_seed(0)
    return torch.randn(300, 2, generator=g) * torch.tensor([1.0, 0.5]) + 0.3


def small_model(x, seed=0):
    torch.manual_seed(seed)
    return sn.EBM(sn.MLP(2, (8,)), base=sn.Gaussian.fit_to(x))


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_weights_or_labels_beside_the_table_are_not_ignored(x):
    with pytest.raises(DataError, match="tuple of 2 parts"):
        fit(small_model(x), (x, torch.rand(len(x))), **SETTINGS)
    with pytest.raises(DataError, match="val_data is a tuple of 2"):
        fit(small_model(x), (x,), val_data=(x, x), **SETTINGS)


def test_a_network_hidden_in_a_function_is_told(x):
    network = nn.Sequential(nn.Linear(2, 8), nn.SiLU(), nn.Linear(8, 1))
    hidden = sn.EBM(lambda rows: network(rows).squeeze(-1), base=sn.Gaussian.fit_to(x))
    with pytest.warns(sn.SelfnormWarning, match="no parameter to train"):
        fit(hidden, x, **SETTINGS)
    with warnings.catch_warnings():
        warnings.simplefilter("error", sn.SelfnormWarning)
        fit(sn.EBM(network, base=sn.Gaussian.fit_to(x)), x, **SETTINGS)


def test_a_run_that_loses_every_step_says_so(x):
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.ones(()))

        def forward(self, rows):
            return rows.sum(-1) * (self.a * torch.nan if self.training else self.a)

    model = sn.EBM(Broken(), base=sn.Gaussian.fit_to(x))
    with pytest.warns(sn.SelfnormWarning, match="no loss or gradient was finite"):
        history = fit(model, x, **SETTINGS)
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


@pytest.mark.parametrize("share", [1.0, 2, -0.1])
def test_a_share_held_out_is_below_one(x, share):
    with pytest.raises(DataError, match="between 0 and 1"):
        fit(small_model(x), x, **{**SETTINGS, "val_data": share})


def test_a_share_that_a_model_does_not_take_is_not_passed_over(x):
    chain = sn.AutoregressiveEBM(x.shape[1], hidden=8, components=2, context=2, energy_hidden=4)
    with pytest.raises(DataError, match="give val_data of a AutoregressiveEBM as rows"):
        sn.fit(chain, x, val_data=0.2, max_steps=1, progress=False)
    with pytest.raises(DataError, match="not a share of them"):
        sn.fit_many([small_model(x)], x, val_data=0.2, max_epochs=1, progress=False)
    with pytest.raises(TypeError, match="a sequence of one or more"):
        sn.fit_many(small_model(x), x, max_epochs=1, progress=False)


@pytest.mark.parametrize("energy", [torch.zeros(2), nn.Linear])
def test_an_energy_that_is_no_function_is_refused(energy):
    with pytest.raises(EnergyError, match="a function of rows"):
        sn.EBM(energy)


def test_what_is_no_table_is_named(x):
    loader = torch.utils.data.DataLoader(x)
    for given, words in ((loader, "not a DataLoader"), (x.reshape(-1, 2, 1), r"flatten\(1\)")):
        with pytest.raises(DataError, match=words):
            fit(small_model(x), given, **SETTINGS)
    with pytest.raises(TypeError, match="not of AutoregressiveEBM"):
        sn.Ensemble([small_model(x), sn.AutoregressiveEBM(2)])


def test_unexpected_options_and_options_of_other_models_are_named():
    x = torch.randn(50, 2)
    model = sn.EBM(sn.MLP(2, hidden=(4,)), base=sn.Gaussian.fit_to(x))
    for train in (sn.fit, sn.fit_distributed, lambda m, *args, **o: sn.fit_many([m], *args, **o)):
        with pytest.raises(
            TypeError, match=r"\['momentum'\] are no options of training; these are"
        ):
            train(model, x, momentum=0.9)
    for train in (sn.fit, sn.fit_distributed):
        with pytest.raises(TypeError, match=r"task_options \['polish_steps'\]"):
            train(model, x, task_options={"polish_steps": 1})
    chain = sn.AutoregressiveEBM(2)
    for train, given, words in (
        (sn.fit, chain, r"trained without \['max_memory'\]"),
        (sn.fit_distributed, model, "max_memory is for one device"),
        (sn.fit_many, [model], r"task_options \['max_memory'\]"),
    ):
        with pytest.raises(TypeError, match=words):
            train(given, x, task_options={"max_memory": 1e6})
    with pytest.raises(ValueError, match="log_norm_lr_scale must be positive"):
        sn.fit(model, x, task_options={"log_norm_lr_scale": 0.0})
