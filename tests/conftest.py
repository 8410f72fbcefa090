"""Shared set-up: one thread, so that every figure is the same on every machine's CPU."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _deterministic_torch():
    torch.set_num_threads(1)
    torch.manual_seed(0)
