"""A step asks nothing of the host, and is the plain step up to rounding."""

import math

import pytest
import torch

import selfnorm as sn
from selfnorm.density.model import DensityTask
from selfnorm.training import Stepper, TensorSource, TrainingOptions
from selfnorm.training.loop import Counters
from tests.fitting import weights


class Spoiled(DensityTask):
    """Losses of some steps are not finite; those of others long for a shorter gradient."""

    calls = 0

    def loss(self, batch):
        self.calls += 1
        value, metrics = super().loss(batch)
        if self.calls in (3, 4, 8):
            value = value * float("inf")
        return (100 * value if self.calls % 2 else value), metrics


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_lost_steps_are_none_of_the_optimisers_and_long_gradients_are_shortened(weight_decay):
    """Against a plain loop over torch's own optimiser that leaves the lost steps out."""
    torch.manual_seed(3)
    x = torch.randn(200, 2) * torch.tensor([1.0, 3.0]) + 1
    found = []
    for plain in (False, True):
        torch.manual_seed(0)
        model = sn.EBM(sn.MLP(2, hidden=(16,)), base=sn.Gaussian.fit_to(x))
        task = Spoiled(model, sn.StudentT.fit_to(x), n_samples=64)
        stepper = Stepper(
            task,
            TensorSource((x,)),
            TrainingOptions(clip_norm=0.5, ema=0.9, weight_decay=weight_decay),
        )
        for k in range(8):
            rows, lr = torch.arange(20 * k, 20 * k + 20), 1e-2 / (k + 1)
            if not plain:
                stepper.step(rows, lr, k)
                continue
            stepper.optimizer.zero_grad()
            for group, scale in zip(stepper.optimizer.param_groups, (1.0, 10.0), strict=True):
                group["lr"] = lr * scale
            loss, _ = task.loss((x[rows],))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            if torch.isfinite(loss):
                stepper.optimizer.step()
        found.append(weights(model))
        steps = {float(s["step"]) for s in stepper.optimizer.state.values()}
        assert steps == {5.0}
        if not plain:
            means = stepper.read()
            assert list(means) == ["loss", "grad_norm", "lower", "upper"]
            assert stepper.counters.counts[1:].tolist() == [3, 1]
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


def test_metrics_of_an_objective_do_not_hide_a_loss_that_is_not_finite():
    """Whatever an objective calls its metrics, the guard looks at the loss itself."""
    counters = Counters(torch.device("cpu"))
    fine = {"loss": torch.tensor(1.0), "grad_norm": torch.tensor(1.0)}
    bad = counters.observe(torch.tensor(math.nan), torch.tensor(1.0), fine)
    assert bool(bad)
    assert (float(counters.skipped), float(counters.taken)) == (1.0, 0.0)
