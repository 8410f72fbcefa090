"""Every kind of step is the plain step up to rounding: compiled, in bf16, without host waits."""

import math
import shutil

import pytest
import torch

import selfnorm as sn
from selfnorm.density.fit import DensityTask
from selfnorm.errors import SelfnormWarning
from selfnorm.training import Stepper, make_optimizer
from selfnorm.training.counters import Counters


def trained(**options):
    torch.manual_seed(3)
    x = torch.randn(300, 2) * torch.tensor([1.0, 3.0]) + 1
    q = sn.Gaussian.fit_to(x)
    torch.manual_seed(0)
    model = sn.EBM(sn.MLP(2, hidden=(16,)), base=q)
    proposal = sn.StudentT.fit_to(x)
    fixed = {"n_samples": 64, "batch_size": 50, "max_steps": 12, "lr": 1e-2}
    sn.fit(model, x, proposal=proposal, seed=1, progress=False, **fixed, **options)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_run_is_the_plain_run_up_to_rounding():
    plain, fused = trained(), trained(compile_step=True)
    assert not torch.equal(plain, trained(ema=0.9))  # the comparison can fail
    torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("error", "told"),
    [(RuntimeError("no compiler here"), "no compiler here"), (RuntimeError(), "RuntimeError")],
    ids=["said", "unsaid"],
)
def test_without_a_compiler_training_goes_on(monkeypatch, error, told):
    def refuse(*_, **__):
        def broken(_batch):
            raise error

        return broken

    monkeypatch.setattr(torch, "compile", refuse)
    with pytest.warns(SelfnormWarning, match=told):
        fused = trained(compile_step=True)
    assert torch.equal(fused, trained())


def test_bf16_rounds_the_training_energy_alone():
    torch.manual_seed(3)
    x = torch.randn(400, 2) * torch.tensor([1.0, 3.0]) + 1
    torch.manual_seed(0)
    model = sn.EBM(sn.MLP(2, hidden=(64, 64)), base=sn.Gaussian.fit_to(x))
    full = model.train().log_unnormalized(x)
    model.bf16 = True
    rounded = model.log_unnormalized(x)
    error = (rounded - full).abs().max()
    assert rounded.dtype == torch.float32
    assert 1e-5 < error < 2e-2  # rounded, but the base and the last sum are not
    assert torch.equal(model.eval().log_unnormalized(x), full)


def test_bf16_training_ends_where_full_precision_ends():
    torch.manual_seed(3)
    z = torch.randn(2000, 2)
    x = torch.stack([z[:, 0].exp() - 1.5, 0.5 * z[:, 1] + 0.4 * z[:, 0] ** 2], -1)
    q = sn.StudentT.fit_to(x)
    found = []
    for bf16 in (False, True):
        torch.manual_seed(0)
        model = sn.EBM(sn.MLP(2, hidden=(64, 64), saturate=10.0), base=q)
        options = {"n_samples": 512, "batch_size": 256, "max_steps": 150, "lr": 3e-3}
        history = sn.fit(model, x, proposal=q, seed=1, progress=False, bf16=bf16, **options)
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert history.stopped != "diverged"
        found.append(sn.evaluate(model, x, proposal=q, n_samples=50_000, seed=2))
    plain, rounded = found
    start = float(q.log_prob(x).mean())
    assert plain.upper > start + 0.1  # something was learned
    assert 0 < abs(rounded.upper - plain.upper) < 0.03
    assert rounded.gap < 0.01


class Spoiled(DensityTask):
    """Losses of some steps are not finite; those of others long for a shorter gradient."""

    calls = 0

    def loss(self, batch):
        self.calls += 1
        value, metrics = super().loss(batch)
        if self.calls in (3, 4, 8):
            value = value * float("inf")
        return (100 * value if self.calls % 2 else value), metrics


def stepped(*, waits, weight_decay=0.0, own_proposal=False):
    torch.manual_seed(3)
    x = torch.randn(200, 2) * torch.tensor([1.0, 3.0]) + 1
    q = sn.Gaussian.fit_to(x)
    torch.manual_seed(0)
    model = sn.EBM(sn.MLP(2, hidden=(16,)), base=q)
    task = Spoiled(model, sn.StudentT.fit_to(x) if own_proposal else None, n_samples=64)
    optimizer = make_optimizer(task, "adamw", weight_decay)
    stepper = Stepper(task, optimizer, (x,), clip_norm=0.5, ema=0.9, capture=False)
    stepper._waits = waits
    for k in range(8):
        stepper.step(torch.arange(20 * k, 20 * k + 20), 1e-2 / (k + 1), k)
    return torch.cat([p.detach().flatten() for p in model.parameters()]), stepper


@pytest.mark.parametrize("own_proposal", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_a_step_that_never_asks_the_host_is_the_step_that_does(weight_decay, own_proposal):
    options = {"weight_decay": weight_decay, "own_proposal": own_proposal}
    plain, asked = stepped(waits=True, **options)
    free, unasked = stepped(waits=False, **options)
    torch.testing.assert_close(free, plain, rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(unasked.average, asked.average, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    steps = {float(s["step"]) for s in unasked.optimizer.state.values()}
    assert steps == {5.0}  # the lost steps are none of Adam's
    means, expected = unasked.read(), asked.read()
    assert means == pytest.approx(expected, rel=1e-4)
    assert list(means) == ["loss", "grad_norm", "lower", "upper"]
    assert (unasked.skipped, unasked.bad_streak) == (asked.skipped, asked.bad_streak) == (3, 1)


def test_counts_and_sums_survive_a_restart():
    device = torch.device("cpu")
    counters = Counters(device)
    for loss in (1.0, float("nan"), 2.0, float("inf"), float("nan")):
        counters.observe(torch.tensor(loss), torch.tensor(0.5), {"lower": torch.tensor(-loss)})
    again = Counters(device)
    counts = [counters.good, counters.streak, counters.skipped]
    again.restore(counts, counters.names, counters.totals)
    bad = again.observe(torch.tensor(5.0), torch.tensor(1.0), {"lower": torch.tensor(-4.0)})
    assert not bool(bad)
    assert (float(again.good), float(again.streak), float(again.skipped)) == (3.0, 0.0, 3.0)
    assert again.totals.tolist() == [8.0, 2.0, -7.0]


def test_the_base_density_at_the_data_is_computed_once(monkeypatch):
    """It is constant over the run: only its gathering belongs into a step."""
    calls = []
    plain = sn.Gaussian.log_prob
    monkeypatch.setattr(
        sn.Gaussian, "log_prob", lambda self, x: (calls.append(len(x)), plain(self, x))[1]
    )
    x = torch.randn(200, 2)
    model = sn.EBM(sn.MLP(2, hidden=(16,)), base=sn.Gaussian.fit_to(x))
    sn.fit(model, x, n_samples=64, batch_size=20, max_steps=7, seed=0, progress=False)
    assert 20 not in calls


@pytest.mark.parametrize("observe", ["observe", "observe_on_host"])
def test_metrics_of_an_objective_do_not_hide_a_loss_that_is_not_finite(observe):
    """Whatever an objective calls its metrics, the guard looks at the loss itself."""
    counters = Counters(torch.device("cpu"))
    fine = {"loss": torch.tensor(1.0), "grad_norm": torch.tensor(1.0)}
    bad = getattr(counters, observe)(torch.tensor(math.nan), torch.tensor(1.0), fine)
    assert bool(bad)
    assert (float(counters.skipped), float(counters.good)) == (1.0, 0.0)
