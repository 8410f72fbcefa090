"""Seeds of a flow trained in one run know nothing of each other."""

import pytest
import torch

pytest.importorskip("zuko")
from seeds import FlowSeeds, FlowSeedsTask
from selfnorm.distributions import Flow
from selfnorm.training import TrainingOptions, run


def flow(seed, scale=1.0):
    torch.manual_seed(seed)
    made = Flow(2, kind="nsf", transforms=1, hidden=(8,))
    with torch.no_grad():
        for weight in made.parameters():
            weight.mul_(scale)
    return made


def rows(n, seed=0):
    x = torch.randn(n, 2, generator=torch.Generator().manual_seed(seed))
    return torch.stack([x[:, 0].exp(), x[:, 0] + 0.3 * x[:, 1]], 1)


def trained(flows, steps=12):
    module = FlowSeeds(flows)
    options = {"batch_size": 32 * len(flows), "max_epochs": 10**6, "max_steps": steps}
    options |= {"lr": 1e-2, "clip_norm": 0.5, "ema": 0.9, "validate_every": 3, "progress": False}
    task = FlowSeedsTask(module)
    run(task, (rows(400),), val_data=(rows(100, 1),), options=TrainingOptions(**options, seed=0))
    return module, task


def test_stacked_densities_are_those_of_the_flows():
    flows = [flow(0), flow(1)]
    x = rows(50)
    apart = torch.stack([one.log_prob(x) for one in flows]).detach()
    assert torch.allclose(FlowSeeds(flows).log_prob(x.expand(2, -1, -1)), apart, atol=1e-5)


def test_a_seed_does_not_depend_on_the_one_beside_it():
    beside_calm, beside_wild = (trained([flow(0), flow(1, s)])[0].split()[0] for s in (1.0, 9.0))
    for mine, again in zip(beside_calm.parameters(), beside_wild.parameters(), strict=True):
        assert torch.allclose(mine, again, atol=1e-6)


def test_every_seed_ends_in_its_own_best_state():
    module, task = trained([flow(0), flow(1)])
    best = torch.tensor(task.scores).amax(0)
    with torch.no_grad():
        reached = torch.stack([one.log_prob(rows(100, 1)).mean() for one in module.split()])
    assert torch.allclose(reached, best.float(), atol=1e-4)
