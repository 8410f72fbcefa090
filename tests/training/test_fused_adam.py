"""The lean optimiser is torch's own, number for number."""

import copy

import pytest
import torch

from selfnorm.training.fused_adam import FusedAdam
from selfnorm.training.wide_adam import WideAdam


def parameters():
    torch.manual_seed(0)
    shapes = [((4, 3), torch.float32), ((5,), torch.float64), ((), torch.float32)]
    return [torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for shape, dtype in shapes]


def groups(params):
    return [{"params": params[:2], "lr": 0.1, "weight_decay": 0.2}, {"params": params[2:], "lr": 1}]


def give_gradients(params, k, without=()):
    generator = torch.Generator().manual_seed(k)
    for i, p in enumerate(params):
        g = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        p.grad = None if i in without else g


@pytest.mark.parametrize("decoupled", [False, True])
def test_it_is_torchs_adam(decoupled):
    mine, theirs = parameters(), parameters()
    optimizer = FusedAdam(groups(mine), decoupled=decoupled)
    cls = torch.optim.AdamW if decoupled else torch.optim.Adam
    reference = cls(groups(theirs), weight_decay=0.0, fused=True)
    for k in range(6):
        without = (2,) if k in (0, 3) else ()  # one begins later, and pauses
        give_gradients(mine, k, without)
        give_gradients(theirs, k, without)
        optimizer.step()
        reference.step()
    for p, q in zip(mine, theirs, strict=True):
        assert torch.equal(p, q)
        assert torch.equal(optimizer.state[p]["step"], reference.state[q]["step"])
        assert torch.equal(optimizer.state[p]["exp_avg_sq"], reference.state[q]["exp_avg_sq"])
    assert float(optimizer.state[mine[2]]["step"]) == 4.0


def test_gradients_are_divided_and_bad_steps_are_none():
    mine, theirs = parameters(), parameters()
    optimizer, reference = (FusedAdam(groups(p), decoupled=True) for p in (mine, theirs))
    give_gradients(theirs, 0)
    reference.step()
    give_gradients(mine, 0)
    for p in mine:
        p.grad *= 4
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(0.0)
    optimizer.step()
    for p, q in zip(mine, theirs, strict=True):
        torch.testing.assert_close(p, q)
    before = copy.deepcopy([p.detach() for p in mine])
    mine[0].grad.fill_(float("nan"))
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    for p, old in zip(mine, before, strict=True):
        assert torch.equal(p, old)
        assert float(optimizer.state[p]["step"]) == 1.0


def test_a_loaded_state_goes_on_as_if_nothing_had_been():
    mine, theirs = parameters(), parameters()
    optimizer, reference = (FusedAdam(groups(p), decoupled=False) for p in (mine, theirs))
    for k in range(3):
        give_gradients(mine, k)
        give_gradients(theirs, k)
        optimizer.step()
        reference.step()
    again = FusedAdam(groups(mine), decoupled=False)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    give_gradients(mine, 3)
    give_gradients(theirs, 3)
    again.step()
    reference.step()
    assert all(torch.equal(p, q) for p, q in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("decoupled", [False, True])
def test_pieces_side_by_side_are_the_whole(decoupled):
    """Also of channels-last weights, and where a step is skipped or its gradient divided."""
    torch.manual_seed(0)
    shapes = [(4, 3, 3, 3), (4, 3, 1, 1), (50,), (), (7, 6)]
    mine = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    for p in mine[:2]:
        p.data = p.data.to(memory_format=torch.channels_last)
    theirs = copy.deepcopy(mine)
    optimizer = WideAdam(groups(mine), decoupled=decoupled, piece=8)
    reference = FusedAdam(groups(theirs), decoupled=decoupled)
    for k in range(6):
        for params in (mine, theirs):
            give_gradients(params, k, without=(2,) if k in (0, 3) else ())
            params[0].grad = params[0].grad.to(memory_format=torch.channels_last)
        for it in (optimizer, reference):
            it.grad_scale, it.found_inf = torch.tensor(1.0 + k), torch.tensor(float(k == 2))
            it.step()
    for p, q in zip(mine, theirs, strict=True):
        assert p.stride() == q.stride()
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
        for name, value in reference.state[q].items():
            torch.testing.assert_close(optimizer.state[p][name], value, rtol=1e-6, atol=1e-7)
    assert float(optimizer.state[mine[2]]["step"]) == 3.0
    again = WideAdam(groups(mine), decoupled=decoupled)
    again.load_state_dict(optimizer.state_dict())
    assert torch.equal(again.state[mine[0]]["exp_avg"], optimizer.state[mine[0]]["exp_avg"])
