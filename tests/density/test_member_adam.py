"""Adam of models trained together: the way of a CPU is the way of a GPU, and that of each alone."""

from types import SimpleNamespace

import pytest
import torch

from selfnorm.density.member_adam import MemberAdam
from selfnorm.training.fused_adam import FusedAdam

RATES, DECAYS, FACTORS_B = [1.0, 0.5, 0.5, 0.1], [0.0, 0.2, 0.2, 0.3], [10.0, 10.0, 5.0, 1.0]


def together(decoupled):
    torch.manual_seed(0)
    members = SimpleNamespace(
        updating=torch.ones(4),
        lr_factor=torch.tensor(RATES),
        weight_decay=torch.tensor(DECAYS),
        log_norm_factor=torch.tensor(FACTORS_B),
    )
    weights, b = torch.nn.Parameter(torch.randn(4, 7)), torch.nn.Parameter(torch.randn(4))
    groups = [{"params": [weights]}, {"params": [b], "log_norm": True}]
    return MemberAdam(groups, members, decoupled=decoupled), members, [weights, b]


def stepped(decoupled, way):
    optimizer, members, params = together(decoupled)
    generator = torch.Generator().manual_seed(1)
    for k in range(6):
        members.updating[2] = float(k not in (1, 4))  # two steps of one member are lost
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator)
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (k + 1)
        with torch.no_grad():
            getattr(optimizer, way)()
    return [p.detach() for p in params], optimizer.state


@pytest.mark.parametrize("decoupled", [False, True])
def test_on_the_host_as_on_the_device(decoupled):
    found, state = stepped(decoupled, "_step_on_host")
    expected, other = stepped(decoupled, "_step_on_device")
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(state.values(), other.values(), strict=True):
        assert mine["step"].tolist() == theirs["step"].tolist() == [6.0, 6.0, 4.0, 6.0]
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(mine[name], theirs[name], rtol=1e-5, atol=1e-7)


def test_each_member_is_an_optimiser_of_its_own():
    (weights, b), _ = stepped(True, "step")
    for k in (0, 1, 3):
        _, _, params = together(True)
        mine = [torch.nn.Parameter(p.detach()[k].clone()) for p in params]
        groups = [
            {"params": mine[:1], "weight_decay": DECAYS[k]},
            {"params": mine[1:], "weight_decay": 0.0},
        ]
        alone = FusedAdam(groups, decoupled=True)
        generator = torch.Generator().manual_seed(1)
        for step in range(6):
            for p, all_of_them in zip(mine, params, strict=True):
                p.grad = torch.randn(all_of_them.shape, generator=generator)[k]
            for group, factor in zip(alone.param_groups, (1.0, FACTORS_B[k]), strict=True):
                group["lr"] = 0.1 / (step + 1) * RATES[k] * factor
            alone.step()
        torch.testing.assert_close(weights[k], mine[0].detach())
        torch.testing.assert_close(b[k], mine[1].detach())
