"""An encoder trained on rows the model makes itself: exact posteriors, the model left alone."""

import math

import pytest
import torch
from torch import nn

from selfnorm.vae import AutoregressivePrior, EnergyPrior, EnergyVAE, MixturePrior
from selfnorm.vae.dreams import dreamt, held
from selfnorm.vae.likelihoods import GaussianNoise
from selfnorm.vae.networks import DenseDecoder, DenseEncoder
from tests.fitting import fit

SIGMA = 0.6
W = torch.tensor([[1.0, 0.3], [-0.5, 0.8], [0.2, -1.1]])
X = (torch.arange(60 * 6).reshape(60, 6) % 7 % 2).float()
OPTIONS = {"max_steps": 20, "max_epochs": 99, "batch_size": 20, "seed": 3, "progress": False}
PRIORS = {
    "mixture": lambda: MixturePrior(2, 3),
    "energy": lambda: EnergyPrior(dim=2, proposal="mixture", bound=5.0),
    "chain": lambda: AutoregressivePrior(
        2, hidden=16, components=3, context=4, energy_hidden=16, polish_steps=3
    ),
}


class Linear(nn.Module):
    """``x ~ N(W z, SIGMA^2)`` with the normal prior: the posterior is Gaussian, its mean linear."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(W.clone())

    def forward(self, z):
        return z @ self.weight.T


class LinearEncoder(nn.Module):
    """Means linear in ``x``, the variances learned: holds the exact posterior of ``Linear``
    where the columns of ``W`` are orthogonal, and nearly so here."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Linear(3, 2)
        self.log_variance = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        mean = self.gain(x)
        return mean, self.log_variance.expand_as(mean)


def test_an_encoder_finds_the_posterior_from_the_models_own_rows():
    torch.manual_seed(0)
    vae = EnergyVAE(LinearEncoder(), Linear(), 2, GaussianNoise(SIGMA, learned=False))
    x = torch.randn(300, 2) @ W.T + SIGMA * torch.randn(300, 3)
    law = torch.distributions.MultivariateNormal(torch.zeros(3), W @ W.T + SIGMA**2 * torch.eye(3))
    # The best diagonal Gaussian has the precisions of the posterior; its KL is what stays open.
    precision = torch.eye(2) + W.T @ W / SIGMA**2
    open_gap = 0.5 * float(torch.log(precision.diagonal()).sum() - torch.logdet(precision))
    best = float(law.log_prob(x).mean()) - open_gap
    before = float(vae.elbo(x, 200, seed=0).mean())
    fit(
        vae,
        x,
        max_steps=700,
        max_epochs=999,
        batch_size=100,
        lr=0.02,
        seed=1,
        progress=False,
        task_options={"train": "encoder"},
        weight_decay=0.0,
    )
    after = float(vae.elbo(x, 200, seed=0).mean())
    assert before < best - 1
    assert after == pytest.approx(best, abs=0.03)
    exact_gain = torch.linalg.solve(precision, W.T) / SIGMA**2
    torch.testing.assert_close(vae.encoder.gain.weight, exact_gain, atol=0.05, rtol=0)
    log_variance = -precision.diagonal().log()
    torch.testing.assert_close(vae.encoder.log_variance, log_variance, atol=0.1, rtol=0)


@pytest.mark.parametrize("kind", PRIORS)
def test_the_model_stays_as_it_is(kind):
    torch.manual_seed(0)
    vae = EnergyVAE(DenseEncoder(6, 2, (8,)), DenseDecoder(2, 6, (8,)), PRIORS[kind]())
    names = [n for n, _ in vae.named_parameters() if "norm" not in n]  # b is closed at the end
    before = {n: p.detach().clone() for n, p in vae.named_parameters()}
    modes = []
    vae.decoder.register_forward_hook(lambda m, _i, _o: modes.append(m.training))
    fit(vae, X, val_data=X[:20], **OPTIONS, task_options={"train": "encoder", "monitor": "off"})
    after = dict(vae.named_parameters())
    for name in names:
        trained = name.startswith("encoder")
        assert torch.equal(before[name], after[name]) != trained, name
        assert trained or after[name].grad is None, name
    assert all(p.requires_grad for p in vae.parameters())
    assert not any(modes)


def test_rows_follow_the_decoder_at_posterior_samples():
    torch.manual_seed(0)
    vae = EnergyVAE(LinearEncoder(), Linear(), 2, GaussianNoise(SIGMA, learned=False))
    with torch.no_grad():
        vae.encoder.gain.weight.zero_()
        vae.encoder.gain.bias.copy_(torch.tensor([0.7, -1.2]))
        vae.encoder.log_variance.fill_(math.log(0.25))
    rows = dreamt(vae, torch.zeros(40_000, 3))
    mean = vae.encoder.gain.bias.detach() @ W.T
    covariance = 0.25 * W @ W.T + SIGMA**2 * torch.eye(3)
    torch.testing.assert_close(rows.mean(0), mean, atol=0.03, rtol=0)
    torch.testing.assert_close(torch.cov(rows.T), covariance, atol=0.03, rtol=0)
    assert not rows.requires_grad


def test_rows_keep_the_shape_of_images():
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(6, 4))
    vae = EnergyVAE(encoder, DenseDecoder(2, 6, (8,)), 2)
    rows = dreamt(vae, X.reshape(60, 1, 2, 3))
    assert rows.shape == (60, 1, 2, 3)
    assert set(rows.unique().tolist()) <= {0.0, 1.0}


def test_parameters_are_free_again_after_an_error():
    layer = nn.Linear(2, 2)
    layer.bias.requires_grad_(False)
    free = []

    def fail():
        free.append(layer.weight.requires_grad)
        raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"), held(layer):
        fail()
    assert free == [False]
    assert layer.weight.requires_grad
    assert not layer.bias.requires_grad


def test_what_can_be_trained_is_named():
    vae = EnergyVAE(DenseEncoder(6, 2, (8,)), DenseDecoder(2, 6, (8,)), 2)
    with pytest.raises(ValueError, match="'all', 'prior', 'encoder'"):
        fit(vae, X, **OPTIONS, task_options={"train": "decoder"})
