"""The formula in ``functional`` is what runs: one training step of every family executes it."""

import sys

import pytest
import torch

from selfnorm import functional
from tests.golden import cases

FAMILIES = ("objective_snl", "energy_chunked", "energy_distributed", "many_same", "chain_one")
FAMILIES += ("conditional_network", "regressor", "image_snl", "vae_energy", "vae_chain")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_training_step_executes_the_formula(family):
    calls, code = [], functional.snl.__code__

    def look(frame, event, _):
        if event == "call" and frame.f_code is code:
            calls.append(torch.is_grad_enabled())

    before = sys.getprofile()
    sys.setprofile(look)  # sees the call by whatever name a module has imported it
    try:
        cases.run(cases.CASES[family])
    finally:
        sys.setprofile(before)
    assert any(calls)  # with a gradient: in training, not in validation alone
