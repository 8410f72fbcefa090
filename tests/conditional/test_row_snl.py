"""SNL with samples of each row's own: value and gradients of the plain formula."""

import pytest
import torch

from selfnorm import functional as F
from selfnorm.conditional.row_snl import row_snl_loss


def inputs(batch=(5,), m=7, spread=3.0, **options):
    generator = torch.Generator().manual_seed(1)

    def normal(*shape):
        return spread * torch.randn(shape, generator=generator, dtype=torch.float64)

    values = normal(*batch) - 2, normal(m, *batch) + 1, normal(*batch)
    return [v.to(**options).requires_grad_() for v in values]


def gradients(loss, at):
    return torch.autograd.grad(loss, at)


@pytest.mark.parametrize("batch", [(5,), (2, 3)])
@pytest.mark.parametrize("shift", [0.0, 300.0, -300.0])  # b far above, and below the cap
def test_value_gradient_and_bound_are_those_of_the_formula(batch, shift):
    log_p, log_w, b = at = inputs(batch)
    shifted = b - shift
    loss, upper = row_snl_loss(log_p, log_w, shifted)
    expected = -F.snl(log_p, log_w, shifted)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(upper, F.importance_ml(log_p, log_w).detach())
    assert not upper.requires_grad
    for mine, theirs in zip(gradients(3 * loss, at), gradients(3 * expected, at), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_second_derivatives_are_those_of_the_formula():
    at = inputs((3,), m=2, spread=0.5)
    assert torch.autograd.gradgradcheck(lambda *a: row_snl_loss(*a)[0], at)


def test_a_row_without_any_weight_counts_as_z_of_zero():
    log_p, log_w, b = inputs(dtype=torch.float32)
    with torch.no_grad():
        log_w[:, 2] = -torch.inf
    loss, _ = row_snl_loss(log_p, log_w, b)
    torch.testing.assert_close(loss, -F.snl(log_p, log_w, b))
    found = gradients(loss, (log_p, log_w, b))
    assert all(g.isfinite().all() for g in found)
    assert float(found[1][:, 2].abs().max()) == 0.0
    assert float(found[2][2]) == pytest.approx(1 / 5)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_show_in_the_loss(bad):
    log_p, log_w, b = inputs(dtype=torch.float32)
    with torch.no_grad():
        log_w[1, 3] = bad
    assert not bool(row_snl_loss(log_p, log_w, b)[0].isfinite())
