"""Identities of the objectives and the diagnostics."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from selfnorm import functional as F

finite = st.floats(-30, 30)


def weights(n=400, m=900, seed=0):
    g = torch.Generator().manual_seed(seed)
    log_q_data = torch.randn(n, generator=g, dtype=torch.float64) - 1
    log_p_data = torch.randn(n, generator=g, dtype=torch.float64) * 2 + 0.5
    log_w = torch.randn(m, generator=g, dtype=torch.float64) * 1.5 - 0.7
    return log_p_data, log_q_data, log_w


def test_snl_is_a_member_of_the_bregman_family():
    log_p, log_q, log_w = weights()
    b, nu = 0.37, len(log_w) / len(log_p)
    member = F.bregman(log_p - log_q, log_w, b, family="snl")
    assert float(member) == pytest.approx(
        float(F.snl(log_p, log_w, b) - log_q.mean() - math.log(nu)), abs=1e-10
    )


def test_nce_is_a_member_of_the_bregman_family():
    log_p, log_q, log_w = weights()
    for nu in (None, 0.5, 7.0):
        member = F.bregman(log_p - log_q, log_w, -0.9, family="nce", nu=nu)
        assert float(member) == pytest.approx(
            float(F.nce(log_p - log_q, log_w, -0.9, nu=nu)), abs=1e-10
        )


@pytest.mark.parametrize("family", ["snl", "nce", "lsif", "reverse", "exponential"])
def test_every_bregman_member_is_stationary_in_b_at_the_truth(family):
    """p is its own model (b = 0): data and weighted noise balance, so d/db is zero in expectation.

    Exact expectations on a grid: p and q are discrete laws on 200 atoms.
    """
    g = torch.Generator().manual_seed(1)
    p = torch.rand(200, generator=g, dtype=torch.float64) ** 2 + 1e-3
    q = torch.rand(200, generator=g, dtype=torch.float64) + 0.1
    p, q = p / p.sum(), q / q.sum()
    n_data = torch.round(p * 200_000).long()
    n_noise = torch.round(q * 200_000).long()
    log_w = (p / q).log()
    b = torch.zeros((), dtype=torch.float64, requires_grad=True)
    value = F.bregman(
        log_w.repeat_interleave(n_data), log_w.repeat_interleave(n_noise), b, family=family
    )
    (slope,) = torch.autograd.grad(value, b)
    assert abs(float(slope)) < 0.01


def test_unknown_names_are_refused():
    log_p, log_q, log_w = weights()
    with pytest.raises(ValueError, match="lsif"):
        F.bregman(log_p - log_q, log_w, 0.0, family="typo")
    with pytest.raises(ValueError, match="reduction"):
        F.snl(log_p, log_w, 0.0, reduction="sum")


def test_snl_with_b_maximised_on_the_batch_is_importance_ml():
    log_p, _, log_w = weights()
    b = F.log_mean_exp(log_w)
    assert float(F.snl(log_p, log_w, b)) == pytest.approx(
        float(F.importance_ml(log_p, log_w)), abs=1e-12
    )


def test_snl_per_condition_uses_each_conditions_own_samples():
    log_p = torch.tensor([0.3, -1.0])
    log_w = torch.tensor([[0.0, 5.0], [1.0, 5.0]])
    b = torch.tensor([0.2, 5.0])
    terms = F.snl(log_p, log_w, b, reduction="none")
    by_hand = log_p - b - log_w.exp().mean(0) * torch.exp(-b) + 1
    torch.testing.assert_close(terms, by_hand)


def test_ranking_nce_is_the_mean_log_share_of_the_data():
    log_w_data, log_w = torch.randn(5), torch.randn(7, 5)
    shares = log_w_data.exp() / (log_w_data.exp() + log_w.exp().sum(0))
    assert torch.allclose(F.ranking_nce(log_w_data, log_w), shares.log().mean())


def test_ranking_nce_ignores_functions_of_the_condition_and_gives_b_no_gradient():
    log_w_data, log_w = torch.randn(6), torch.randn(4, 6)
    shift = torch.randn(6) * 5
    torch.testing.assert_close(
        F.ranking_nce(log_w_data + shift, log_w + shift), F.ranking_nce(log_w_data, log_w)
    )


def test_nce_matches_the_definition():
    log_w_data, log_w, b = torch.randn(50), torch.randn(150), torch.tensor(0.4)
    nu = 3.0
    u = lambda lw: lw - b - math.log(nu)  # noqa: E731
    by_hand = (
        torch.log(torch.sigmoid(u(log_w_data))).mean()
        + nu * torch.log(1 - torch.sigmoid(u(log_w))).mean()
    )
    torch.testing.assert_close(F.nce(log_w_data, log_w, b), by_hand, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("offset", [-200.0, 0.0, 200.0])
def test_no_overflow_at_extreme_energies(offset):
    log_p = torch.tensor([offset + 1.0, offset - 1.0], requires_grad=True)
    log_w = torch.full((8,), offset, requires_grad=True)
    b = torch.tensor(offset, requires_grad=True)
    for value in (
        F.snl(log_p, log_w, b),
        F.nce(log_p, log_w, b),
        F.importance_ml(log_p, log_w),
        F.ranking_nce(log_p, log_w),
    ):
        assert torch.isfinite(value)
        grads = torch.autograd.grad(value, [log_p, log_w], allow_unused=True)
        assert all(torch.isfinite(g).all() for g in grads if g is not None)
    assert float(F.snl(log_p, log_w, b).detach()) == pytest.approx(0.0, abs=1e-4)


def test_far_overflow_keeps_a_finite_gradient_of_the_right_sign():
    b = torch.tensor(0.0, requires_grad=True)
    value = F.snl(torch.zeros(2), torch.full((4,), 500.0), b)
    value.backward()
    assert math.isfinite(float(b.grad))
    assert float(b.grad) > 0  # raise b


@given(st.lists(finite, min_size=2, max_size=40), finite)
@settings(max_examples=60, deadline=None)
def test_gap_is_t_minus_one_minus_log_t(values, b):
    log_w = torch.tensor(values, dtype=torch.float64)
    log_p = torch.zeros(1, dtype=torch.float64)
    gap = F.importance_ml(log_p, log_w) - F.snl(log_p, log_w, b)
    closed = F.bound_gap(F.log_mean_exp(log_w) - b)
    assert float(gap) >= -1e-9
    assert float(gap) == pytest.approx(float(closed), rel=1e-6, abs=1e-7)


@given(st.lists(finite, min_size=1, max_size=40), finite)
@settings(max_examples=60, deadline=None)
def test_ess_is_a_fraction_and_ignores_scale(values, shift):
    log_w = torch.tensor(values, dtype=torch.float64)
    e = float(F.ess(log_w))
    assert 1 / len(values) - 1e-9 <= e <= 1 + 1e-9
    assert e == pytest.approx(float(F.ess(log_w + shift)), rel=1e-6)


def test_ess_of_one_dominating_weight():
    assert float(F.ess(torch.tensor([100.0, 0.0, 0.0, 0.0]))) == pytest.approx(0.25)


@pytest.mark.parametrize("k", [0.2, 0.5, 0.8, 1.5])
def test_pareto_k_recovers_the_tail_index(k):
    log_w = -k * torch.rand(50_000, generator=torch.Generator().manual_seed(0)).log()
    assert float(F.pareto_k(log_w)) == pytest.approx(k, abs=0.12)


def test_pareto_k_edge_cases():
    assert float(F.pareto_k(torch.full((1000,), 3.0))) == 0
    assert math.isinf(float(F.pareto_k(torch.randn(10))))
    assert math.isinf(float(F.pareto_k(torch.full((1000,), -math.inf))))
    assert float(F.pareto_k(torch.rand(5000).log())) < 0.3  # bounded weights have a light tail
    some_zero = torch.cat([torch.full((900,), -math.inf), torch.randn(100)])
    assert math.isfinite(float(F.pareto_k(some_zero)))


def test_pareto_k_of_a_batch_equals_one_by_one():
    log_w = torch.randn(2000, 3) * torch.tensor([0.5, 1.0, 3.0])
    together = F.pareto_k(log_w)
    alone = torch.stack([F.pareto_k(log_w[:, j]) for j in range(3)])
    torch.testing.assert_close(together, alone)
