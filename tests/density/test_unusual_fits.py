"""fit where people call it in odd ways: it does the right thing, or says what is wrong."""

import warnings

import pytest
import torch
from torch import nn

import selfnorm as sn
from selfnorm.density.flow_proposals import adapt
from selfnorm.errors import DataError

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


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("objective", ["snl", "nce", "pcd", "dsm", "ssm"])
def test_gradients_are_on_in_training_whatever_the_caller_has_set(x, around, objective):
    plain, inside = small_model(x), small_model(x)
    sn.fit(plain, x, objective=objective, **SETTINGS)
    with around():
        sn.fit(inside, x, objective=objective, **SETTINGS)
    assert torch.equal(weights(plain), weights(inside))


def test_models_trained_together_under_no_grad(x):
    models = [small_model(x, seed) for seed in (0, 1)]
    before = weights(models[1])
    with torch.no_grad():
        sn.fit_many(models, x, **SETTINGS)
    assert not torch.equal(before, weights(models[1]))


@pytest.mark.parametrize("objective", ["snl", "pcd", "dsm"])
def test_no_gradient_is_left_in_the_callers_table(x, objective):
    x.requires_grad_()
    sn.fit(small_model(x.detach()), x, objective=objective, val_data=x, **SETTINGS)
    assert x.grad is None


def test_weights_or_labels_beside_the_table_are_not_ignored(x):
    with pytest.raises(DataError, match="tuple of 2 parts"):
        sn.fit(small_model(x), (x, torch.rand(len(x))), **SETTINGS)
    with pytest.raises(DataError, match="val_data is a tuple of 2"):
        sn.fit(small_model(x), (x,), val_data=(x, x), **SETTINGS)


def test_a_network_hidden_in_a_function_is_told(x):
    network = nn.Sequential(nn.Linear(2, 8), nn.SiLU(), nn.Linear(8, 1))
    hidden = sn.EBM(lambda rows: network(rows).squeeze(-1), base=sn.Gaussian.fit_to(x))
    with pytest.warns(sn.SelfnormWarning, match="no parameter to train"):
        sn.fit(hidden, x, **SETTINGS)
    with warnings.catch_warnings():
        warnings.simplefilter("error", sn.SelfnormWarning)
        sn.fit(sn.EBM(network, base=sn.Gaussian.fit_to(x)), x, **SETTINGS)


@pytest.mark.parametrize("objective", ["cd", "pcd", "dsm", "ssm"])
def test_a_spread_is_not_taken_from_one_row(x, objective):
    with pytest.raises(DataError, match="raise batch_size"):
        sn.fit(small_model(x), x, objective=objective, **{**SETTINGS, "batch_size": 1})


def test_a_run_that_loses_every_step_says_so(x):
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.ones(()))

        def forward(self, rows):
            return rows.sum(-1) * (self.a * torch.nan if self.training else self.a)

    model = sn.EBM(Broken(), base=sn.Gaussian.fit_to(x))
    with pytest.warns(sn.SelfnormWarning, match="no loss or gradient was finite"):
        history = sn.fit(model, x, **SETTINGS)
    assert history.skipped_steps == history.n_steps


def test_unknown_options_are_named_by_the_function_that_was_called():
    x = torch.randn(50, 2)
    model = sn.EBM(sn.MLP(2, hidden=(4,)), base=sn.Gaussian.fit_to(x))
    with pytest.raises(TypeError, match=r"^fit_distributed\(\) does not take bf16$"):
        sn.fit_distributed(model, x, bf16=True)
    with pytest.raises(TypeError, match=r"^adapt\(\) does not take epochs$"):
        adapt(sn.Flow(2, transforms=1, hidden=(4,)), model, x, epochs=3)
