"""VAEs whose evidence is known, and everything that must hold on them."""

import math

import pytest
import torch
from torch import nn

import selfnorm as sn
from selfnorm.functional import log_mean_exp
from selfnorm.vae import (
    EnergyPrior,
    EnergyVAE,
    MixturePrior,
    StandardNormal,
    evaluate_vae,
    latent_energy,
)
from selfnorm.vae.model import GaussianNoise
from tests.fitting import fit

SIGMA = 0.6
# Orthogonal columns make the exact posterior diagonal, so that a Gaussian encoder can be exact.
W = torch.tensor([[1.0, 0.3], [0.5, -1.0], [0.0, 0.4], [-0.4, 0.25]])
W[:, 1] -= W[:, 0] * (W[:, 0] @ W[:, 1]) / (W[:, 0] @ W[:, 0])
TILT = torch.tensor([0.8, -0.5])


class LinearDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(W.clone())

    def forward(self, z):
        return z @ self.weight.T


class LinearEncoder(nn.Module):
    """The exact posterior under the prior N(prior_mean, I), off by ``shift`` in its mean."""

    def __init__(self, prior_mean, shift=0.0):
        super().__init__()
        precision = 1 + W.square().sum(0) / SIGMA**2
        self.gain = nn.Parameter(W / SIGMA**2 / precision)
        self.offset = nn.Parameter(prior_mean / precision + shift)
        self.register_buffer("log_variance", -precision.log())

    def forward(self, x):
        mean = x @ self.gain + self.offset
        return mean, self.log_variance.expand_as(mean)


class LinearEnergy(nn.Module):
    """``E(z) = -a.z + c``: against N(0, I) the prior is N(a, I) and log Z = |a|^2/2 - c."""

    dim = 2

    def __init__(self, constant=0.0):
        super().__init__()
        self.a = nn.Parameter(TILT.clone())
        self.constant = constant

    def forward(self, z):
        return self.constant - z @ self.a


def linear_vae(b=None, shift=0.0, constant=0.0):
    prior = EnergyPrior(LinearEnergy(constant))
    exact = float(TILT @ TILT) / 2 - constant
    prior.log_norm.data.fill_(exact if b is None else b)
    noise = GaussianNoise(SIGMA, learned=False)
    return EnergyVAE(LinearEncoder(TILT, shift), LinearDecoder(), prior, noise), exact


def evidence(x, mean):
    covariance = W @ W.T + SIGMA**2 * torch.eye(4)
    return torch.distributions.MultivariateNormal(W @ mean, covariance).log_prob(x)


@pytest.fixture(scope="module")
def rows():
    torch.manual_seed(0)
    return (torch.randn(400, 2) + TILT) @ W.T + SIGMA * torch.randn(400, 4)


def test_exact_posterior_and_normaliser_give_the_evidence_itself(rows):
    vae, _ = linear_vae()
    truth = evidence(rows, TILT)
    assert torch.allclose(vae.elbo(rows, 3, seed=0), truth, atol=1e-4)
    assert torch.allclose(vae.log_prob(rows, 5, seed=0), truth, atol=1e-4)


@pytest.mark.parametrize(("off", "shift"), [(0.0, 0.0), (0.1, 0.2), (-0.5, 0.1)])
def test_the_chain_of_bounds_and_its_gaps(rows, off, shift):
    exact = float(TILT @ TILT) / 2 - 1.5
    vae, log_z = linear_vae(b=exact + off, shift=shift, constant=1.5)
    assert log_z == pytest.approx(exact)
    report = evaluate_vae(vae, rows, posterior_samples=200, n_prior_samples=100_000, seed=1)
    truth = float(evidence(rows, TILT).mean())
    precision = 1 + W.square().sum(0) / SIGMA**2
    divergence = float(0.5 * (shift**2 * precision).sum())  # KL(q || posterior)
    t = math.exp(-off)
    assert report.elbo == pytest.approx(truth - divergence, abs=0.03)
    assert report.elbo - report.snelbo == pytest.approx(t - 1 - math.log(t), abs=0.01)
    assert report.log_px == pytest.approx(truth, abs=0.03)
    assert report.snelbo <= report.elbo + 1e-9
    assert report.elbo <= report.log_px + 1e-9
    for name in ("base", "mixture", "smc"):
        assert report.log_norm[name].value == pytest.approx(exact, abs=0.03), name
    assert report.reliable, report.reasons
    assert report.active_units == 2
    assert report.reconstruction - report.kl == pytest.approx(report.elbo, abs=1e-6)


class MixtureEnergy(nn.Module):
    """A mixture of Gaussians written as an energy over N(0, I): ``E = log N - log mix - 0.7``."""

    dim = 2

    def __init__(self, mixture):
        super().__init__()
        self.mixture, self.base = mixture, StandardNormal(2)

    def forward(self, z):
        return self.base.log_prob(z) - self.mixture.log_prob(z) - 0.7


def test_a_mixture_prior_written_as_an_energy(rows):
    torch.manual_seed(3)
    mixture = MixturePrior(2, 3)
    with torch.no_grad():
        mixture.log_scales.fill_(-0.6)
    prior = EnergyPrior(MixtureEnergy(mixture))
    prior.log_norm.data.fill_(0.7)
    noise = GaussianNoise(SIGMA, learned=False)
    as_energy = EnergyVAE(LinearEncoder(torch.zeros(2)), LinearDecoder(), prior, noise)
    plain = EnergyVAE(LinearEncoder(torch.zeros(2)), LinearDecoder(), mixture, noise)
    options = {"posterior_samples": 300, "n_prior_samples": 100_000, "seed": 0}
    energy, direct = (evaluate_vae(vae, rows[:200], **options) for vae in (as_energy, plain))
    assert energy.log_norm["mixture"].value == pytest.approx(0.7, abs=0.02)
    assert energy.elbo == pytest.approx(direct.elbo, abs=0.02)
    assert energy.log_px == pytest.approx(direct.log_px, abs=0.02)
    assert energy.snelbo <= energy.elbo <= energy.log_px
    assert direct.snelbo == direct.elbo


def test_training_by_the_snelbo_finds_prior_and_normaliser(rows):
    torch.manual_seed(1)
    prior = EnergyPrior(latent_energy(2, (32,), activation="silu"), proposal="mixture")
    noise = GaussianNoise(SIGMA, learned=False)
    vae = EnergyVAE(LinearEncoder(torch.zeros(2)), LinearDecoder(), prior, noise)
    before = evaluate_vae(vae, rows, posterior_samples=20, n_prior_samples=50_000, seed=0)
    history = fit(
        vae, rows, objective="snelbo", max_steps=250, max_epochs=10**4, batch_size=100, lr=1e-2,
        n_samples=256, seed=0, progress=False,
    )  # fmt: skip
    after = evaluate_vae(vae, rows, posterior_samples=20, n_prior_samples=50_000, seed=0)
    truth = float(evidence(rows, TILT).mean())
    assert after.snelbo > before.snelbo + 0.2
    assert truth - 0.1 < after.snelbo < truth + 0.1  # the decoder may fit these rows a bit better
    assert after.reliable, after.reasons
    assert history.final["log_norm"] == pytest.approx(after.log_norm["mixture"].value, abs=0.03)


class LearnedEncoder(nn.Module):
    """Means linear in ``x``, the variances learned: it can hold the exact posterior."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Linear(4, 2)
        self.log_variance = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        mean = self.gain(x)
        return mean, self.log_variance.expand_as(mean)


def test_an_encoder_finds_the_posterior_from_the_models_own_rows():
    torch.manual_seed(0)
    vae = EnergyVAE(LearnedEncoder(), LinearDecoder(), 2, GaussianNoise(SIGMA, learned=False))
    x = torch.randn(300, 2) @ W.T + SIGMA * torch.randn(300, 4)
    best = float(evidence(x, torch.zeros(2)).mean())
    before = float(vae.elbo(x, 200, seed=0).mean())
    fit(
        vae, x, train="encoder", max_steps=700, max_epochs=999, batch_size=100, lr=0.02,
        weight_decay=0.0, seed=1, progress=False,
    )  # fmt: skip
    assert before < best - 1
    assert float(vae.elbo(x, 200, seed=0).mean()) == pytest.approx(best, abs=0.03)
    exact = LinearEncoder(torch.zeros(2))
    found = vae.encoder
    torch.testing.assert_close(found.gain.weight.T, exact.gain, atol=0.05, rtol=0)
    torch.testing.assert_close(found.log_variance, exact.log_variance, atol=0.1, rtol=0)


def log_weights(prior, n_samples):
    posterior = linear_vae()[0].encode(torch.randn(50, 4))
    return prior.weigh(torch.zeros(1, 2), posterior, n_samples)[1]


@pytest.mark.parametrize("proposal", ["base", "mixture"])
def test_the_normaliser_of_training_is_unbiased(proposal):
    torch.manual_seed(0)
    prior = EnergyPrior(LinearEnergy(0.4), proposal=proposal)
    log_w = log_weights(prior, 60_000)
    exact = float(TILT @ TILT) / 2 - 0.4
    assert float(log_w.detach().exp().mean().log()) == pytest.approx(exact, abs=0.02)
    (gradient,) = torch.autograd.grad(log_w.exp().mean().log(), prior.energy.a)
    assert torch.allclose(gradient, TILT, atol=0.05)  # d log Z / da = a


def test_a_bound_limits_the_energy():
    prior = EnergyPrior(LinearEnergy(), bound=0.3)
    assert float(prior.negative_energy(torch.randn(64, 2) * 3).detach().abs().max()) <= 0.3001


@pytest.mark.parametrize("proposal", ["base", "mixture"])
def test_the_gradient_reaches_a_learned_base(proposal):
    """d log Z of a mixture base tilted by a linear energy, against its closed form."""
    torch.manual_seed(2)
    base = MixturePrior(2, 2)
    prior = EnergyPrior(LinearEnergy(), base, proposal=proposal)
    tilted = base.means @ TILT + 0.5 * (base.log_scales.exp() * TILT).square().sum(-1)
    exact = torch.logsumexp(torch.log_softmax(base.logits, 0) + tilted, 0)
    wanted = torch.autograd.grad(exact, [base.means, base.logits])
    log_z = log_mean_exp(log_weights(prior, 200_000))
    assert float(log_z.detach()) == pytest.approx(float(exact.detach()), abs=0.02)
    for found, value in zip(
        torch.autograd.grad(log_z, [base.means, base.logits]), wanted, strict=True
    ):
        assert torch.allclose(found, value, atol=0.03)


# -- files and refusals --------------------------------------------------------------------------


def test_a_poor_encoder_gives_a_lower_bound_and_no_upper_one(rows):
    """Importance-weighted log p(x) is below the truth: never an upper bound, and it says so."""
    vae, log_z = linear_vae(shift=1.0)
    bounds = sn.evaluate(vae, rows, n_samples=20_000, seed=0)
    truth = float(evidence(rows, TILT).mean())
    assert bounds.lower < truth - 0.2
    assert bounds.upper == math.inf
    assert bounds.to_dict()["upper"] is None
    assert not bounds.reliable
    assert "posterior_samples" in bounds.reasons[-1]
    assert "no upper bound" in str(bounds)
    more = sn.evaluate(vae, rows[:50], n_samples=20_000, posterior_samples=20_000, seed=0)
    assert more.reliable, more.reasons
    assert more.lower == pytest.approx(float(evidence(rows[:50], TILT).mean()), abs=0.1)
    off = linear_vae(b=log_z - 0.3)[0]
    assert sn.evaluate(off, rows, seed=0).learned_error == pytest.approx(0.3, abs=0.02)
