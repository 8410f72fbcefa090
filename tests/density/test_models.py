"""EBM and Ensemble: log_prob, shapes, errors, sampling."""

import math

import pytest
import torch

import selfnorm as sn
from selfnorm.errors import ProposalError
from tests.analytic.models import Potential
from tests.contract.test_densities import ensemble


def test_what_is_printed_names_the_base():
    based = sn.EBM(sn.MLP(2, (4,)), base=sn.StudentT(3.0, torch.zeros(2), 1.0))
    assert "(base): StudentT(dim=2, df=3)" in repr(based)
    assert "base=None" in repr(sn.EBM(sn.MLP(2, (4,))))


def test_log_prob_is_minus_energy_plus_base_minus_b():
    base = sn.Gaussian(torch.tensor([1.0]), scale=2.0)
    model = sn.EBM(Potential(lambda x: x.squeeze(-1) ** 2), base=base, log_norm=0.5)
    x = torch.tensor([[0.3], [-2.0]])
    expected = -(x.squeeze(-1) ** 2) + base.log_prob(x) - 0.5
    torch.testing.assert_close(model.log_prob(x), expected)
    torch.testing.assert_close(model(x), expected)


class BrokenAt:
    """A Gaussian whose log-density is NaN where ``broken`` says so."""

    def __init__(self, broken):
        self.law, self.broken = sn.Gaussian(torch.zeros(2), scale=1.0), broken

    def sample(self, shape=()):
        return self.law.sample(shape)

    def log_prob(self, x):
        return self.law.log_prob(x).masked_fill(self.broken(x), torch.nan)


@pytest.mark.parametrize(
    ("broken", "where"),
    [
        (lambda x: x[..., 0] > -9, r"\d+ of \d+ rows"),
        (lambda x: x[..., 0] > 2, "samples of its own"),
        (lambda x: x[..., 0] == 0.25, r"1 of \d+ rows"),
    ],
)
def test_nan_of_a_proposal_is_the_proposals(broken, where):
    x = torch.randn(50, 2).clamp(-1.5, 1.5)
    x[7] = 0.25
    q, model = BrokenAt(broken), sn.EBM(sn.MLP(2))
    with pytest.raises(ProposalError, match=f"proposal's log_prob is NaN at .*{where}"):
        sn.fit(model, x, proposal=q, max_steps=1, progress=False)
    model = sn.EBM(lambda v: v.square().sum(-1) / 2, log_norm=math.log(2 * math.pi))
    found = sn.evaluate(model, x, proposal=q, n_samples=1000, seed=0)
    assert not found.reliable
    assert "proposal's log_prob is NaN" in found.reasons[0]
    assert not any("energy" in reason or "integral" in reason for reason in found.reasons)


def test_base_is_not_trained():
    zuko = pytest.importorskip("zuko")
    model = sn.EBM(sn.MLP(2), base=zuko.flows.MAF(2, transforms=1, hidden_features=(8,)))
    assert not any(p.requires_grad for p in model.base.parameters())


def test_without_a_base_walking_samplers_stay_where_the_proposal_reaches():
    """E = 2x on the unit interval: an exponential law cut off at 1, of mean 0.3435."""
    box = sn.Uniform(torch.zeros(1), torch.ones(1))
    model = sn.EBM(lambda x: 2 * x.sum(-1))
    mean = 0.5 - math.exp(-2.0) / (1 - math.exp(-2.0))
    for method in ("sir", "smc", "mala", "hmc"):
        rows = model.sample(2000, proposal=box, method=method, seed=0)
        assert bool(((rows >= 0) & (rows <= 1)).all()), method
        assert float(rows.mean()) == pytest.approx(mean, abs=0.03), method


def test_b_has_the_precision_of_the_energy():
    """log Z = 12345.678: half a thousandth would be lost in float32, in every density."""
    theta = torch.tensor([12345.678], dtype=torch.float64)
    energy = sn.ExponentialFamily(lambda x: torch.ones_like(x), 1, theta=theta)
    model = sn.EBM(energy, base=sn.Gaussian(torch.zeros(1), scale=1.0))
    x = torch.linspace(-1, 1, 64)[:, None]
    sn.fit(model, x, proposal=model.base, max_steps=1, lr=1e-12, seed=0, progress=False)
    assert float(model.log_norm.detach()) == pytest.approx(12345.678, abs=1e-6)
    assert sn.EBM(sn.MLP(1).half()).log_norm.dtype == torch.float32


# -- ensembles: normalised mixtures of their members ---------------------------------------------


def test_the_density_of_an_ensemble_is_the_mixture():
    mixture = ensemble()
    x = torch.linspace(-5, 6, 23)[:, None]
    normal = torch.distributions.Normal(torch.tensor([-1.5, 2.75]), 1.0)
    expected = torch.logsumexp(normal.log_prob(x), 1) - math.log(2)
    torch.testing.assert_close(mixture.log_prob(x).detach(), expected, atol=1e-5, rtol=1e-5)


def test_bounds_of_an_ensemble_and_jensen():
    mixture = ensemble()
    x = torch.cat([torch.randn(300, 1) - 1.5, torch.randn(300, 1) + 2.75])
    q = sn.Defensive(sn.Gaussian.fit_to(x))
    bounds = sn.evaluate(mixture, x, proposal=q, n_samples=40_000, seed=0)
    exact = float(mixture.log_prob(x).detach().mean())
    assert bounds.reliable
    assert bounds.lower <= exact + 3 * bounds.log_norm_se
    assert bounds.upper == pytest.approx(exact, abs=4 * bounds.log_norm_se)
    assert exact > float(
        torch.stack([m.log_prob(x).detach().mean() for m in mixture.members]).mean()
    )


def test_rows_of_an_ensemble_come_in_no_order():
    x = ensemble().sample(4000, seed=0)
    assert float(x[:2000].mean()) == pytest.approx(float(x[2000:].mean()), abs=0.3)
