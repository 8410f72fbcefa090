"""The masks: what a column's outputs may and may not depend on."""

import pytest
import torch

from selfnorm.networks import ChainLinear, ResMADE, draw_orderings


def dependence(net, head, dim, per_column=1, condition=None):
    """``(R, out column, in column)``: whether an output of one column moves with another."""
    stack = net.ranks.shape[0]
    x = torch.randn(stack, 4, dim * per_column, requires_grad=True)
    out = net.outputs(head, net(x, condition), 3)
    seen = torch.zeros(stack, dim, dim, dtype=torch.bool)
    for j in range(dim):
        (grad,) = torch.autograd.grad(out[:, :, j].square().sum(), x, retain_graph=True)
        seen[:, j] = grad.unflatten(-1, (dim, per_column)).abs().sum((1, 3)) > 0
    return seen


@pytest.mark.parametrize(("dim", "stack", "per_column"), [(5, 1, 1), (4, 3, 1), (3, 2, 4)])
def test_a_column_sees_exactly_the_columns_ranked_before_it(dim, stack, per_column):
    ranks = draw_orderings(dim, stack)
    net = ResMADE(ranks, per_column=per_column, hidden=64, blocks=2)
    seen = dependence(net, net.head(3), dim, per_column)
    expected = ranks[:, None, :] < ranks[:, :, None]
    assert torch.equal(seen, expected)


def test_orderings_are_permutations_and_the_first_two_are_natural_and_reversed():
    torch.manual_seed(1)
    ranks = draw_orderings(6, 5)
    assert torch.equal(ranks.sort(1).values, torch.arange(1, 7).expand(5, 6))
    assert ranks[0].tolist() == [1, 2, 3, 4, 5, 6]
    assert ranks[1].tolist() == [6, 5, 4, 3, 2, 1]


def test_a_condition_reaches_every_column_the_first_included():
    net = ResMADE(draw_orderings(3, 1), hidden=32, condition_dim=2)
    head = net.head(2)
    condition = torch.randn(1, 4, 2, requires_grad=True)
    out = net.outputs(head, net(torch.randn(1, 4, 3), condition), 2)
    for j in range(3):
        (grad,) = torch.autograd.grad(out[:, :, j].square().sum(), condition, retain_graph=True)
        assert (grad.abs() > 0).all()


def test_a_condition_of_the_first_rows_is_none_for_the_others():
    net = ResMADE(draw_orderings(3, 2), hidden=8, blocks=1, condition_dim=4)
    x, some = torch.randn(2, 5, 3), torch.randn(2, 2, 4)
    every = torch.cat([some, torch.zeros(2, 3, 4)], 1)
    torch.testing.assert_close(net(x, some), net(x, every))


def test_one_column_and_no_condition_gives_constants():
    net = ResMADE(draw_orderings(1, 1), hidden=8)
    out = net.outputs(net.head(2), net(torch.randn(1, 6, 1)), 2)
    assert torch.allclose(out, out[:, :1].expand_as(out))


@pytest.mark.parametrize("shape", [(6, 5), (2, 3, 5)], ids=["rows", "chunks"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("fixed", [True, False])
def test_gradients_of_stacked_maps_are_those_of_their_products(shape, bias, masked, fixed):
    mask = (torch.rand(3, 4, 5) < 0.5).double() if masked else None
    layer = ChainLinear(3, 5, 4, mask=mask, bias=bias).double()
    x = torch.randn(3, *shape, dtype=torch.float64, requires_grad=True)
    wanted = (x, *(() if fixed else layer.parameters()))
    weight = layer.weight if mask is None else layer.weight * mask
    by_hand = torch.einsum("r...i,roi->r...o", x, weight.detach() if fixed else weight)
    if bias:
        by_hand = by_hand + layer.bias.view(3, *[1] * (len(shape) - 1), 4)
    found = torch.autograd.grad(layer(x, fixed=fixed).sin().sum(), wanted)
    for one, other in zip(found, torch.autograd.grad(by_hand.sin().sum(), wanted), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("condition_dim", [0, 3])
def test_a_course_has_the_features_of_one_pass(condition_dim):
    ranks = draw_orderings(4, 3)
    net = ResMADE(ranks, per_column=2, hidden=19, condition_dim=condition_dim).eval()
    x = torch.randn(3, 5, 8)
    condition = torch.randn(3, 5, condition_dim) if condition_dim else None
    with torch.no_grad():
        whole, course = net(x, condition), net.course(5, condition)
        for rank in range(4):
            there = (ranks <= rank).repeat_interleave(2, 1).unsqueeze(1)
            found = course.features(rank, x.where(there, 7.0))
            known = net.degrees[0] <= rank
            assert torch.allclose(found[..., known], whole[..., known], atol=1e-5)
            assert not found[..., ~known].any()
    assert known.all()
