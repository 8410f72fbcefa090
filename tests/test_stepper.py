"""The compiled step is the plain step up to rounding, and does without a compiler."""

import shutil

import pytest
import torch

import selfnorm as sn
from selfnorm.errors import SelfnormWarning


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


def test_without_a_compiler_training_goes_on(monkeypatch):
    def refuse(*_, **__):
        def broken(_batch):
            raise RuntimeError("no compiler here")

        return broken

    monkeypatch.setattr(torch, "compile", refuse)
    with pytest.warns(SelfnormWarning, match="no compiler here"):
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
