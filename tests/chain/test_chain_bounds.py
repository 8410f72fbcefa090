"""Bounds of a chain whose density is known: what they enclose, what the learned ``b`` costs."""

import math

import pytest
import torch
from torch import nn

from selfnorm.chain import AutoregressiveEBM, row_bounds
from selfnorm.distributions import Mixture1d

DIM = 5
# logits, places and log-scales of two logistic parts and a heavy tail: skewed, two modes
TARGET = Mixture1d.from_raw(torch.tensor([1.0, 0.0, -1.5, -0.7, 1.1, 0.4, -0.6, -1.2, 0.1]), 3)
LOG_Z = torch.linspace(-2, 3, DIM)  # of the factors


class KnownEnergy(nn.Module):
    """Factors ``exp(LOG_Z) target(y)``, whatever the proposal; ``b`` off by ``error`` in each."""

    def __init__(self, error=0.0):
        super().__init__()
        self.error = error

    def forward(self, y, at):
        return TARGET.log_prob(y) - at.proposal.log_prob(y) + LOG_Z

    def log_norm(self, context):
        return (LOG_Z + self.error).expand(context.shape[:3])


def known(error=0.0, orderings=1):
    """A model, rows, and their exact log-density."""
    torch.manual_seed(0)
    options = {"hidden": 16, "blocks": 1, "components": 4, "context": 4, "energy_hidden": 8}
    model = AutoregressiveEBM(DIM, orderings=orderings, discrete=None, **options)
    x = 10 + 3 * TARGET.from_uniform(torch.rand(400, DIM))
    model.set_scaling(x).eval()
    model.energy = KnownEnergy(error)
    z, log_det = model.columns(x)
    return model, x, (TARGET.log_prob(z).sum(-1) + log_det).double()


@pytest.mark.parametrize("orderings", [1, 3])
def test_the_bounds_enclose_the_known_density_closely(orderings):
    model, x, exact = known(error=0.1, orderings=orderings)
    bounds = model.bounds(x, n_samples=400, seed=0)
    truth, noise = float(exact.mean()), 4 * bounds.log_norm_se
    assert noise < 0.02
    assert bounds.lower - noise < truth < bounds.upper + noise
    assert abs(bounds.upper - truth) < 0.02
    assert abs(bounds.disagreement) < noise
    assert bounds.reliable, bounds.reasons
    # of the order of the variance of log Z: (1/ESS - 1) / 2M for each factor, twice that at most
    # for a mixture of orderings
    assert bounds.gap < (1.5 if orderings == 1 else 2.5) * DIM * (1 / bounds.ess - 1) / (2 * 400)
    # exp(-0.1) - 1 + 0.1 for each factor comes on top with the learned b
    of_b = DIM * (math.expm1(-0.1) + 0.1)
    assert bounds.learned_gap == pytest.approx(bounds.gap + of_b, abs=2e-3)


def test_a_wrong_b_shows_in_the_learned_figures_and_nowhere_else():
    right, x, exact = known()
    wrong, _, _ = known(error=-0.3)
    one, other = (model.bounds(x, n_samples=200, seed=0) for model in (right, wrong))
    assert (one.lower, one.upper, one.reasons) == (other.lower, other.upper, other.reasons)
    assert abs(one.learned_error) < 1e-3
    assert other.learned_error == pytest.approx(0.3 * DIM, abs=1e-3)
    assert other.learned_rms == pytest.approx(0.3 * DIM, abs=1e-3)
    assert other.learned_gap > one.learned_gap + 0.2
    promised = wrong.log_prob(x).double()
    assert float((promised - exact).mean()) == pytest.approx(other.learned_error, abs=1e-3)
    assert "log_prob off by +1.5" in str(other)
    assert other.to_dict()["learned_gap"] == other.learned_gap


def test_mass_that_only_the_b_of_a_factor_knows_of_is_a_reason():
    model, x, exact = known()
    plain = model.energy.forward

    def spiked(y, at):
        """30 % of the second factor in a spike that no sample, node or row hits; b includes it."""
        u = (y - at.mean) * at.inverse_sd  # a quadrature is in these units
        spike = torch.distributions.Normal(0.2347, 1e-6).log_prob(u) + at.inverse_sd.log()
        spike = spike - at.proposal.log_prob(y)
        both = torch.logaddexp(math.log(0.7) + plain(y, at), math.log(0.3) + spike + LOG_Z)
        return torch.where(torch.arange(DIM) == 1, both, plain(y, at))

    model.energy.forward = spiked
    bounds = model.bounds(x, n_samples=200, seed=0)
    assert bounds.lower > float(exact.mean()) - 0.01  # too high by 0.36, and so is not the verdict
    assert any("learned b of column 1" in reason for reason in bounds.reasons)


def test_nodes_that_are_too_few_widen_the_gap_and_are_named():
    model, x, exact = known()
    coarse = model.bounds(x, n_samples=400, n_nodes=2, seed=0)
    assert coarse.lower < float(exact.mean()) < coarse.upper + 0.02
    assert coarse.gap > 0.05
    assert any("raise n_nodes" in reason for reason in coarse.reasons)


def test_samples_and_quadrature_differ_by_their_standard_error():
    model, x, exact = known(orderings=2)
    x, exact = x[:60], exact[:60]
    linear, logarithmic = [], []
    for seed in range(50):
        torch.manual_seed(seed)
        rows = row_bounds(model, x, n_samples=16, n_nodes=128)
        se = float(rows["variance"].double().sum().sqrt()) / len(x)
        linear.append(float((exact - rows["lower"].double()).mean()) / se)
        logarithmic.append(float((rows["upper"].double() - exact).mean()) / se)
    scores = torch.tensor(linear)
    assert abs(float(scores.mean())) < 3 / math.sqrt(50)
    assert 0.7 < float(scores.std()) < 1.3
    # the logarithm of a mean is too low on average: l_IS is no fair partner for the comparison
    assert float(torch.tensor(logarithmic).mean()) > 1


def test_rows_whose_energy_is_nan_are_named():
    model, x, _ = known()
    whole = model.energy.forward
    model.energy.forward = lambda y, at: whole(y, at).masked_fill(y > 1.0, math.nan)
    bounds = model.bounds(x, n_samples=100, seed=0)
    assert math.isnan(bounds.lower)
    assert not bounds.reliable
    assert "NaN at" in bounds.reasons[0]
    assert not any("support" in reason for reason in bounds.reasons)
