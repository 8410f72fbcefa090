"""Flows as proposals: densities, training, adaptation to a model, tilting."""

import sys

import pytest
import torch

import selfnorm as sn
from selfnorm.distributions import FlowTask
from selfnorm.errors import DataError, ProposalError, SelfnormError

pytest.importorskip("zuko")
pytestmark = pytest.mark.usefixtures("few_closing_samples")
SMALL = {"transforms": 2, "hidden": (16, 16), "bins": 4}


def banana(n, seed=0):
    g = torch.Generator().manual_seed(seed)
    a = torch.randn(n, generator=g)
    return torch.stack([50 + 10 * a, a**2 + 0.5 * torch.randn(n, generator=g)], 1)


def test_a_conditional_flow_uses_its_condition():
    c = torch.randn(1500, 1)
    x = 2 * c + 0.2 * torch.randn(1500, 1)
    flow = sn.Flow(1, condition_dim=1, **SMALL)
    sn.fit(flow, (x, c), batch_size=256, max_steps=80, max_epochs=100, lr=1e-2, progress=False)
    with torch.no_grad():
        assert float((flow.log_prob(x, c) - flow.log_prob(x, -c)).mean()) > 0.5
        assert torch.equal(flow(c).log_prob(x), flow.log_prob(x, c))
        assert flow(c).sample((2,)).shape == (2, 1500, 1)


def test_tilting_starts_at_the_flow_and_leaves_it_alone():
    x = banana(800)
    flow = sn.Flow(2, **SMALL).set_scaling(x)
    before = {k: v.clone() for k, v in flow.state_dict().items()}
    model = sn.EBM(sn.MLP(2, hidden=(16,), zero_init=True), base=flow)
    assert torch.allclose(model.log_prob(x), flow.log_prob(x), atol=1e-5)
    start = float(flow.log_prob(x).mean())
    options = {"max_steps": 80, "max_epochs": 100, "lr": 3e-3, "seed": 0, "progress": False}
    sn.fit(model, x, proposal=flow, n_samples=512, **options)
    assert all(torch.equal(before[k], v) for k, v in flow.state_dict().items())
    bounds = sn.evaluate(model, x, proposal=flow, n_samples=20_000, seed=0)
    assert bounds.lower > start + 0.05


def test_the_kl_loss_moves_the_flow_towards_the_model_not_the_data():
    target = sn.Gaussian(torch.tensor([2.0, -1.0]), scale=0.7)
    model = sn.EBM(lambda x: torch.zeros(x.shape[:-1]), base=target)
    data = torch.randn(400, 2)  # elsewhere
    flow = sn.Flow(2, **SMALL).set_scaling(data)
    fresh = target.sample((2000,))
    before = float(flow.log_prob(fresh).mean())
    options = {"batch_size": 64, "max_epochs": 1000, "max_steps": 150, "lr": 5e-3, "seed": 0}
    how = {"progress": False, **options}
    sn.fit(flow, data, n_samples=256, task_options={"model": model, "loss": "kl"}, **how)
    assert float(flow.log_prob(fresh).mean()) > before + 0.5


def test_both_is_the_average_of_the_two_losses():
    x = torch.randn(50, 2)
    flow = sn.Flow(2, **SMALL)
    model = sn.EBM(sn.MLP(2, hidden=(8,)), base=sn.Gaussian.fit_to(x))
    values = {}
    for loss in ("data", "kl", "both"):
        torch.manual_seed(1)
        task = FlowTask(flow, model=model, loss=loss, n_samples=128)
        values[loss] = float(task.loss((x,))[0].detach())
    assert values["both"] == pytest.approx((values["data"] + values["kl"]) / 2, abs=1e-5)


def test_model_and_flow_train_together():
    x = banana(1000)
    model = sn.EBM(sn.MLP(2, hidden=(16,), zero_init=True), base=sn.StudentT.fit_to(x))
    flow = sn.Flow(2, **SMALL)
    how = {"max_epochs": 100, "max_steps": 60, "lr": 2e-3, "ema": 0, "seed": 0, "progress": False}
    options = {"val_data": banana(300, seed=1), "n_samples": 256, **how}
    history = sn.fit(model, x, proposal=flow, task_options={"proposal_loss": "both"}, **options)
    first, last = history.records[0], history.records[-1]
    assert last["flow"] > first["flow"]
    assert last["val_lower"] <= last["val_upper"] + 1e-4
    assert last["val_lower"] > -6
    assert last["val_ess"] > 0.02


def test_bad_settings_are_refused(monkeypatch):
    flow = sn.Flow(2, **SMALL)
    with pytest.raises(ValueError, match="kind"):
        sn.Flow(2, kind="glow")
    with pytest.raises(ValueError, match="loss"):
        FlowTask(flow, loss="other")
    model = sn.EBM(sn.MLP(2), base=sn.Gaussian(torch.zeros(2), scale=1.0))
    with pytest.raises(ProposalError, match="trains a Flow, not a Defensive"):
        sn.fit(model, banana(50), task_options={"proposal_loss": "data"})
    with pytest.raises(ValueError, match="needs the model"):
        FlowTask(flow, loss="kl")
    with pytest.raises(DataError, match="3 columns, expected 2"):
        flow.set_scaling(torch.zeros(4, 3))
    with pytest.raises(DataError, match="NaN"):
        flow.set_scaling(torch.full((4, 2), torch.nan))
    monkeypatch.setitem(sys.modules, "zuko", None)
    with pytest.raises(SelfnormError, match=r"selfnorm\[flows\]"):
        sn.Flow(2)


def test_rows_in_every_form_and_of_the_right_width():
    flow, x = sn.Flow(2, **SMALL).set_scaling(banana(50)), banana(5)
    for form in (x.numpy(), x.tolist(), x.double()):
        assert torch.allclose(flow.log_prob(form), flow.log_prob(x))
    with pytest.raises(DataError, match="rows of 2 columns"):
        flow.log_prob(x[:, :1])  # would be broadcast
    with torch.device("cpu"):  # a caller's default, whose device is not the flow's
        assert sn.Flow(2, **SMALL).to("meta").log_prob(x.to("meta")).device.type == "meta"
    options = {"max_epochs": 1, "progress": False}
    sn.fit(flow, banana(50).double(), **options)
    with pytest.raises(DataError, match="rows of 2 columns"):
        sn.fit(flow, banana(50), val_data=x[:, :1], **options)


def test_conditions_that_do_not_fit_are_refused():
    x, given = banana(50), torch.randn(50, 1)
    plain, conditional = sn.Flow(2, **SMALL), sn.Flow(2, condition_dim=1, **SMALL)
    options = {"max_epochs": 1, "progress": False}
    with pytest.raises(DataError, match=r"condition_dim=0: expected 1 tensors \(x\), got 2"):
        sn.fit(plain, (x, given), **options)
    with pytest.raises(DataError, match=r"condition_dim=1: expected 2 tensors"):
        sn.fit(conditional, x, **options)
    with pytest.raises(DataError, match="condition_dim=1, got 0 columns"):
        conditional.log_prob(x)
    with pytest.raises(DataError, match="condition_dim=0, got 1 columns"):
        plain.sample((3,), given)
    assert conditional.sample((), given.numpy()).shape == (50, 2)


def test_a_proposal_that_was_not_trained_is_told_of():
    x = banana(200)
    model = sn.EBM(sn.MLP(2, (8,)), base=sn.Gaussian.fit_to(x))
    options = {"max_epochs": 1, "seed": 0, "progress": False}
    with pytest.warns(sn.SelfnormWarning, match="a Flow that was not trained"):
        sn.fit(
            model, x, proposal=sn.Defensive(sn.Flow(2, **SMALL), sn.StudentT.fit_to(x)), **options
        )
