"""log Z of models where it is known, under proposals that do not match."""

import math

import pytest
import torch

import selfnorm as sn
from selfnorm import functional as F
from selfnorm.distributions import draw_log_weights
from tests.analytic.models import ANALYTIC

by_name = pytest.mark.parametrize("case", ANALYTIC, ids=lambda c: c.name)


@by_name
def test_log_norm_is_right_and_bounds_hold_the_true_log_likelihood(case):
    model = case.ebm()
    model.log_norm.data.fill_(case.log_norm + 0.3)  # b deliberately off
    x = case.sample(2000)
    bounds = sn.evaluate(model, x, proposal=case.proposal, n_samples=40_000, seed=2)
    assert bounds.log_norm_se < 0.02
    assert abs(bounds.log_norm - case.log_norm) < 4 * bounds.log_norm_se + 1e-6
    truth = float(case.log_density(x).mean())
    assert bounds.lower - 4 * bounds.log_norm_se < truth < bounds.upper + 4 * bounds.log_norm_se
    expected_gap = math.expm1(-0.3) + 0.3
    assert bounds.gap == pytest.approx(expected_gap, abs=6 * bounds.log_norm_se)


@by_name
def test_training_b_alone_finds_log_norm(case):
    """SNL with a frozen energy: the only parameter is b, and its optimum is log Z."""
    model = case.ebm()
    model.log_norm.data.fill_(case.log_norm - 2)
    q = sn.as_proposal(case.proposal)
    optimizer = torch.optim.SGD([model.log_norm], lr=0.2)
    x = case.sample(10)
    tail = []
    for step in range(400):
        log_w = draw_log_weights(model, q, 1024)
        value = F.snl(model.log_unnormalized(x).detach(), log_w, model.log_norm)
        optimizer.zero_grad()
        (-value).backward()
        optimizer.step()
        if step >= 200:
            tail.append(float(model.log_norm.detach()))
    assert sum(tail) / len(tail) == pytest.approx(case.log_norm, abs=0.03)


@pytest.mark.parametrize("chunk", [1, 7, 1000, 100_000])
def test_chunked_log_norm_equals_one_batch(chunk):
    log_w = torch.randn(5003) * 3
    parts = log_w.split(chunk)
    joined = F.combine_log_means([F.log_mean_exp(p) for p in parts], [len(p) for p in parts])
    assert float(joined) == pytest.approx(float(F.log_mean_exp(log_w)), abs=1e-5)
