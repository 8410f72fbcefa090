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
