"""The prior beside the decoder in a captured step of a VAE: the same step as in line."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from selfnorm.training import LoopOptions, Stepper, make_optimizer
from selfnorm.vae import AutoregressivePrior, EnergyPrior, EnergyVAE, StandardNormal
from selfnorm.vae import task as vae_training
from selfnorm.vae.networks import DenseDecoder, DenseEncoder

PRIORS = {
    "normal": lambda: StandardNormal(4),
    "energy": lambda: EnergyPrior(dim=4, proposal="mixture", bound=5.0),
    "chain": lambda: AutoregressivePrior(4, hidden=16, components=3, context=5, energy_hidden=8),
}


class Written:
    """In the place of a side stream: writes down what happens."""

    def __init__(self, device):
        del device
        self.log = []
        Written.last = self

    @contextmanager
    def branch(self, *kept):
        self.kept = kept
        self.log.append("branch")
        yield
        self.log.append("main line")

    def join(self):
        self.log.append("join")


@pytest.mark.parametrize("kind", PRIORS)
def test_the_prior_is_beside_the_decoder_and_its_inputs_are_kept(kind, monkeypatch):
    torch.manual_seed(0)
    vae = EnergyVAE(DenseEncoder(12, 4), DenseDecoder(4, 12), PRIORS[kind]())
    x = (torch.rand(20, 12) < 0.3).float()
    torch.manual_seed(1)
    wanted, _ = vae.training_task(n_samples=16).loss((x,))
    monkeypatch.setattr(vae_training, "SideStream", Written)
    vae.decoder.register_forward_hook(lambda *_: Written.last.log.append("decoder"))
    objective = vae.prior.objective
    read = []

    def watched(z, posterior, n_samples):
        Written.last.log.append("prior")
        read.extend([z, posterior.mean, posterior.log_sd])
        return objective(z, posterior, n_samples)

    monkeypatch.setattr(vae.prior, "objective", watched)
    torch.manual_seed(1)
    found, _ = vae.training_task(n_samples=16).loss((x,))
    assert Written.last.log == ["branch", "prior", "main line", "decoder", "join"]
    kept = {t.untyped_storage().data_ptr() for t in Written.last.kept}
    assert {t.untyped_storage().data_ptr() for t in read} <= kept
    assert torch.equal(found, wanted)


def stepper(kind, x):
    torch.manual_seed(0)
    vae = EnergyVAE(DenseEncoder(12, 4), DenseDecoder(4, 12), PRIORS[kind]()).to(x.device)
    task = vae.training_task(n_samples=64)
    task.start((x,))
    task.module.train()
    options = LoopOptions(lr=1e-3)
    return Stepper(
        task, make_optimizer(task, options.optimizer, 0.01), (x,), clip_norm=options.clip_norm,
        ema=0.9, capture=True,
    )  # fmt: skip


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captured steps need a GPU")
@pytest.mark.parametrize("kind", PRIORS)
def test_a_captured_step_is_the_same_side_by_side(kind, monkeypatch):
    torch.manual_seed(1)
    x = (torch.rand(512, 12, device="cuda") < 0.3).float()
    found = []
    for in_line in (False, True):
        if in_line:
            monkeypatch.setattr(vae_training, "SideStream", Written)
        run = stepper(kind, x)
        torch.manual_seed(2)
        for i in range(60):
            run.step(torch.arange(64, device="cuda") + 7 * (i % 60), 1e-3, i)
        assert run.captured
        found.append(torch.cat([p.detach().flatten() for p in run.params]))
        run.release()
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
