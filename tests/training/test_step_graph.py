"""Several steps at once: on which rows, and the halves of a step they are made of."""

from dataclasses import replace

import pytest
import torch

import selfnorm as sn
from selfnorm.density.fit import DensityTask
from selfnorm.training import LoopOptions, Stepper, make_optimizer, run
from selfnorm.training.step_graph import run_ahead


def density_task(proposal_is_base=True, **options):
    torch.manual_seed(3)
    x = torch.randn(90, 2) * torch.tensor([1.0, 3.0]) + 1
    torch.manual_seed(0)
    model = sn.EBM(sn.MLP(2, hidden=(16,), **options), base=sn.Gaussian.fit_to(x))
    proposal = None if proposal_is_base else sn.StudentT.fit_to(x)
    return DensityTask(model, proposal, n_samples=64), x


@pytest.mark.parametrize("proposal_is_base", [True, False])
def test_the_halves_of_a_step_are_the_step(proposal_is_base):
    task, x = density_task(proposal_is_base)
    assert task.draws_ahead
    batch = (x[:10], *(c[:10] for c in task.data_columns((x,))))
    torch.manual_seed(1)
    whole, metrics = task.loss(batch)
    torch.manual_seed(1)
    halves, same_metrics = task.loss_of_drawn(task.draw(batch))
    assert torch.equal(whole, halves)
    assert {k: float(v) for k, v in metrics.items()} == {
        k: float(v) for k, v in same_metrics.items()
    }


def test_who_draws_ahead():
    assert not density_task(dropout=0.5)[0].draws_ahead  # its network draws in between
    task, _ = density_task()
    task.proposal.loc = torch.nn.Parameter(task.proposal._buffers.pop("loc"))
    assert not task.draws_ahead

    class Own(DensityTask):
        def loss(self, batch):
            return super().loss(batch)

    task, _ = density_task()
    assert not Own(task.module, None).draws_ahead


class Uncaptured:
    """What a graph of several steps does, without one."""

    def __init__(self, rows, n_steps, n_controls, draw, take):
        self.n_steps = n_steps
        self.controls = torch.zeros(n_steps, n_controls)
        self.draw, self.take = draw, take

    def replay(self, rows, controls):
        self.controls.copy_(controls)
        run_ahead(rows.view(self.n_steps, -1), self.controls, self.draw, self.take)


def stepped(at_once, monkeypatch):
    monkeypatch.setattr("selfnorm.training.step.StepGraph", Uncaptured)
    task, x = density_task()
    optimizer = make_optimizer(task, "adamw", 0.1)
    stepper = Stepper(task, optimizer, (x,), clip_norm=0.5, ema=0.9, capture=False)
    stepper._draw, stepper._loss = task.draw, task.loss_of_drawn  # as on a GPU
    stepper._waits = False
    rates = [1e-2 / (k + 1) for k in range(11)]
    rows = torch.arange(88).view(11, 8)
    torch.manual_seed(1)
    for k in range(3):
        stepper.step(rows[k], rates[k], k)
    stepper._n_several = at_once
    for k in range(3, 11, at_once):
        stepper.steps(rows[k : k + at_once].flatten(), rates[k : k + at_once], k)
    rate = float(optimizer.param_groups[1]["lr"])
    return task.module, stepper.average, stepper.read(), rate


def test_steps_taken_together_are_those_taken_one_by_one(monkeypatch):
    model, average, means, rate = stepped(4, monkeypatch)
    plain, plain_average, expected, plain_rate = stepped(1, monkeypatch)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    for mine, theirs in zip(average, plain_average, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert means == pytest.approx(expected)
    assert rate == pytest.approx(plain_rate)  # that of the last step, for the record
    assert rate == pytest.approx(10 * 1e-2 / 11)


def test_the_loop_groups_steps_between_looks_and_loses_none(monkeypatch):
    groups = []

    class Grouping(Stepper):
        @property
        def steps_at_once(self):
            return 4 if len(groups) >= 3 else 1

        def step(self, rows, lr, n_done):
            groups.append((n_done, 1))
            super().step(rows, lr, n_done)

        def steps(self, rows, rates, n_done):
            groups.append((n_done, len(rates)))
            for k, (part, lr) in enumerate(zip(rows.chunk(len(rates)), rates, strict=True)):
                super().step(part, lr, n_done + k)

    monkeypatch.setattr("selfnorm.training.loop.make_stepper", Grouping)
    task, x = density_task()
    options = LoopOptions(batch_size=10, max_steps=40, validate_every=15, progress=False, seed=0)
    history = run(task, (x,), options=replace(options, cuda_graph=4))
    assert sum(n for _, n in groups) == history.n_steps == 40
    begins = [sum(n for _, n in groups[:k]) for k in range(len(groups))]
    assert [start for start, _ in groups] == begins
    assert {n for _, n in groups} == {1, 4}
    for start, n in groups:  # nobody looks in the middle of a group
        assert start // 15 == (start + n - 1) // 15
    assert [r["step"] for r in history.records] == [15, 30, 40]


@pytest.mark.parametrize("value", [-1, 2.5, "yes", None, [4]])
def test_what_is_no_number_of_steps_is_refused(value):
    with pytest.raises(ValueError, match="cuda_graph must be true, false or a number of steps"):
        LoopOptions(cuda_graph=value)
