"""SNL with its gradient written out is functional.snl under autograd."""

import math

import pytest
import torch

import selfnorm as sn
from selfnorm import functional as F
from selfnorm.density import objectives
from selfnorm.density.snl_loss import snl_loss, snl_losses


def by_autograd(terms, n, b, constant):
    value = F.snl(terms[:n] + constant, terms[n:], b)
    grads = torch.autograd.grad(-value, (terms, b))
    return -value.detach(), F.importance_ml(terms[:n] + constant, terms[n:]), grads


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("shift", "b"),
    [(0.0, 0.3), (200.0, 199.0), (-300.0, -301.0), (50.0, -45.0), (0.0, 60.0)],
    ids=["ordinary", "huge weights", "tiny weights", "beyond the cap", "b far above"],
)
def test_value_and_gradient_are_those_of_autograd(dtype, shift, b):
    torch.manual_seed(0)
    terms = (3 * torch.randn(7 + 50, dtype=dtype) + shift).requires_grad_()
    b = torch.tensor(b, dtype=dtype, requires_grad=True)
    constant = torch.tensor(-1.7, dtype=dtype)
    value, upper, grads = by_autograd(terms, 7, b, constant)
    loss, found_upper = snl_loss(terms, 7, b, constant)
    (2 * loss).backward()  # whatever comes after it must reach the gradient
    torch.testing.assert_close(loss.detach(), value, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found_upper, upper.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(terms.grad, 2 * grads[0], rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(b.grad, 2 * grads[1], rtol=1e-4, atol=1e-6)


def test_several_models_at_once_are_each_model():
    torch.manual_seed(0)
    shifts = torch.tensor([0.0, 200.0, -300.0, 50.0, 0.0])[:, None]
    terms = 3 * torch.randn(5, 7 + 50, dtype=torch.float64) + shifts
    terms[4, 7:] = -math.inf  # no sample saw any mass
    terms[0, 9] = -math.inf
    terms.requires_grad_()
    b = torch.tensor([0.3, 199.0, -301.0, -45.0, 0.2], dtype=torch.float64, requires_grad=True)
    losses, upper = snl_losses(terms, 7, b)
    (losses * torch.arange(1, 6)).sum().backward()
    for k in range(5):
        row = terms.detach()[k].clone().requires_grad_()
        own = b.detach()[k].clone().requires_grad_()
        loss, bound = snl_loss(row, 7, own)
        ((k + 1) * loss).backward()
        torch.testing.assert_close(losses[k].detach(), loss.detach(), rtol=1e-5, atol=1e-5)
        if k < 4:
            torch.testing.assert_close(upper[k], bound, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(terms.grad[k], row.grad, rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(b.grad[k], own.grad, rtol=1e-4, atol=1e-6)


def test_second_derivatives_of_several_models():
    torch.manual_seed(0)
    terms = torch.randn(2, 9, dtype=torch.float64, requires_grad=True)
    b = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda t, c: snl_losses(t, 3, c)[0], (terms, b))


def test_samples_of_zero_weight_have_no_pull():
    terms = torch.tensor([0.5, -math.inf, 1.0, -math.inf], requires_grad=True)
    b = torch.tensor(0.2, requires_grad=True)
    loss, _ = snl_loss(terms, 1, b)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(0.2 - 0.5 + math.exp(0.8) / 3 - 1, rel=1e-6)
    torch.testing.assert_close(terms.grad, torch.tensor([-1.0, 0.0, math.exp(0.8) / 3, 0.0]))


def test_all_weights_zero_is_a_finite_step():
    """No sample saw any mass: SNL is still defined, and pulls on the data and on b alone."""
    terms = torch.tensor([0.5, -math.inf, -math.inf], requires_grad=True)
    b = torch.tensor(0.2, requires_grad=True)
    loss, _ = snl_loss(terms, 1, b)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(0.2 - 0.5 - 1)
    assert terms.grad.tolist() == [-1.0, 0.0, 0.0]
    assert float(b.grad) == 1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_impossible_weight_shows_in_the_loss(bad):
    loss, _ = snl_loss(torch.tensor([0.0, 1.0, bad]), 1, torch.tensor(0.0))
    assert not math.isfinite(float(loss))


@pytest.mark.parametrize("own_proposal", [False, True])
def test_the_objective_is_functional_snl_of_the_model(own_proposal):
    torch.manual_seed(0)
    x = torch.randn(40, 2) * torch.tensor([1.0, 3.0]) + 1
    base = sn.Gaussian.fit_to(x)
    q = sn.StudentT.fit_to(x) if own_proposal else base
    model = sn.EBM(sn.MLP(2, hidden=(16,)), base=base, log_norm=0.4)
    params = list(model.parameters())
    torch.manual_seed(5)
    loss, metrics = objectives.get("snl").loss(model, model.base if q is base else q, x, 300)
    found = torch.autograd.grad(loss, params)
    torch.manual_seed(5)
    samples = q.sample((300,))
    log_w = model.log_unnormalized(samples) - q.log_prob(samples)
    value = F.snl(model.log_unnormalized(x), log_w, model.log_norm)
    torch.testing.assert_close(loss, -value)
    torch.testing.assert_close(metrics["lower"], value.detach())
    torch.testing.assert_close(
        metrics["upper"], F.importance_ml(model.log_unnormalized(x), log_w).detach()
    )
    for mine, theirs in zip(found, torch.autograd.grad(-value, params), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_second_derivatives_are_those_of_autograd():
    """A penalty on the gradient: the written-out one must not be taken for a constant."""
    raw = torch.randn(9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def penalty(loss_of):
        start, b = raw.clone().requires_grad_(), torch.tensor(0.2).double().requires_grad_()
        slopes = torch.autograd.grad(loss_of(torch.sin(start), b), (start, b), create_graph=True)
        return torch.autograd.grad(sum(s.square().sum() for s in slopes), (start, b))

    written = penalty(lambda t, b: snl_loss(t, 4, b, torch.tensor(-1.7))[0])
    expected = penalty(lambda t, b: -F.snl(t[:4], t[4:], b))
    for mine, theirs in zip(written, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_subclass_with_a_loss_of_its_own_keeps_to_the_protocol():
    class Weighted(objectives.WeightObjective):
        def loss(self, model, proposal, x, n_samples):
            loss, metrics = super().loss(model, proposal, x, n_samples)
            return 2 * loss, metrics

    snl = objectives.get("snl")
    own = Weighted(snl.value, learns_log_norm=True, needs_proposal_at_data=False)
    x = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
    model = sn.EBM(sn.MLP(2, hidden=(4,)), base=sn.Gaussian.fit_to(x))
    history = sn.fit(model, x, objective=own, n_samples=16, max_steps=2, seed=0, progress=False)
    assert history.n_steps == 2
