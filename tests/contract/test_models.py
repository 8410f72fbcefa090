"""Every model there is: saved, copied, seeded and asked wherever, it answers with the same bits."""

import copy
import functools
import pickle
import random
import warnings
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch._dynamo  # which torch's first optimiser would import, and sympy add a filter then
from torch import nn

import selfnorm as sn
from tests.contract.answers import answer
from tests.contract.specimens import SPECIMENS

REFITTED = ("density/numbers", "density/two_columns", "regressor/grid")  # in other surroundings


def asked(name, model, only=()):
    """What a model answers; its report is looked at elsewhere."""
    questions = SPECIMENS[name].questions(model)
    return {
        k: answer(ask) for k, ask in questions.items() if k in (only or {*questions} - {"report"})
    }


@functools.cache
def made(name):
    """Model and answers."""
    model = SPECIMENS[name].make()
    return model, asked(name, model)


@pytest.fixture(scope="module", params=SPECIMENS)
def specimen(request):
    """Name, model and answers."""
    return request.param, *made(request.param)


def state_of_the_process():
    return (
        *(torch.get_rng_state().tolist(), random.getstate(), list(warnings.filters)),
        *(np.random.get_state()[1].tolist(), np.geterr()),  # noqa: NPY002
        *(torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()),
    )


def modules_of(model):
    """The modules that a model is, or holds."""
    held = [model] if isinstance(model, nn.Module) else vars(model).values()
    return [inner for part in held if isinstance(part, nn.Module) for inner in part.modules()]


def state_of_the_model(model):
    modules = modules_of(model)
    tensors = [
        t for m in modules for t in (*m.parameters(recurse=False), *m.buffers(recurse=False))
    ]
    return (
        *([m.training for m in modules], [t.requires_grad for t in tensors]),
        str([t.detach().double().sum().item() for t in tensors]),  # NaN is NaN
    )


@contextmanager
def elsewhere(dtype=torch.float32, device="cpu"):
    """Where a program has set what it likes."""
    before = torch.get_rng_state()
    torch.manual_seed(99)
    torch.set_default_dtype(dtype)
    try:
        with torch.inference_mode(), torch.device(device):
            yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_rng_state(before)


def test_a_saved_model_answers_as_before_and_costs_no_random_numbers(specimen, tmp_path):
    name, model, answers = specimen
    if not SPECIMENS[name].saved:
        pytest.skip("is not saved")
    parts = SPECIMENS[name].parts()
    before = state_of_the_process()
    sn.save(model, tmp_path)
    loaded = sn.load(tmp_path, **parts)
    assert state_of_the_process() == before
    assert type(loaded) is type(model)
    assert asked(name, loaded) == answers
    if isinstance(model, nn.Module):
        kinds = [[(p.dtype, p.requires_grad) for p in m.parameters()] for m in (model, loaded)]
        assert kinds[0] == kinds[1]
        assert not any(m.training for m in loaded.modules())
    elif name.startswith(("density", "regressor")):
        assert loaded.get_params() == model.get_params()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_answers_as_the_model(specimen, copied):
    name, model, answers = specimen
    assert asked(name, copied(model)) == answers


def test_answers_are_the_same_wherever_they_are_asked_and_leave_all_as_it_was(specimen):
    name, model, answers = specimen
    before = state_of_the_process(), state_of_the_model(model)
    of_tables = name.startswith(("density", "regressor/", "detector"))
    dtype = torch.float64 if of_tables or name.startswith("proposal/") else torch.float32
    with elsewhere(dtype, "meta" if of_tables else "cpu"):
        found = asked(name, model)
    assert found == answers
    assert (state_of_the_process(), state_of_the_model(model)) == before


def test_samples_and_bounds_are_those_of_evaluation_mode(specimen):
    """Dropout and batch statistics of a model left in training mode are no part of it."""
    name, model, answers = specimen
    if not isinstance(model, nn.Module) or name.startswith("proposal"):
        pytest.skip("has no mode, or samples as it is")
    model = copy.deepcopy(model).train()
    before = state_of_the_model(model)
    for question, ask in SPECIMENS[name].questions(model).items():
        if question in ("sample", "bounds", "values"):
            assert answer(ask) == answers[question], question
    assert state_of_the_model(model) == before


@pytest.mark.parametrize("name", REFITTED)
def test_a_fit_is_the_same_wherever_it_is_called_and_leaves_all_as_it_was(name):
    (_, expected), before = made(name), state_of_the_process()
    with elsewhere(torch.float64):
        again = SPECIMENS[name].make()
    assert state_of_the_process() == before
    questions = ("score_samples", "predict", "quantiles", "sample", "bounds", "consistency_")
    for question, given in asked(name, again, questions).items():
        assert given == expected[question], question
