"""Priors over latent vectors: normalised, with the gradients of their bounds."""

import pytest
import torch

from selfnorm.functional import bound_gap, ess, log_mean_exp, snl
from selfnorm.vae import AutoregressivePrior


def chain(dim=2, tilt=1.5, **sizes):
    """A chain whose energies are far from zero and whose proposals depend on what came before."""
    torch.manual_seed(0)
    options = {"hidden": 16, "components": 3, "context": 4, "energy_hidden": 16, **sizes}
    prior = AutoregressivePrior(dim, **options)
    with torch.no_grad():
        prior.chain.energy.last.weight.normal_(0, tilt)
        prior.chain.mixture_head.weight.mul_(8)
        prior.chain.energy.norm_last.weight.normal_(0, 0.3)
    return prior


def test_a_chain_is_normalised_exactly():
    prior = chain(dim=1, tilt=0.2)
    axis = torch.sinh(torch.linspace(-9, 9, 4001)) / 3
    exact, learned, lower = prior.log_prob_exact(axis.unsqueeze(1))
    mass = torch.trapezoid(exact.double().exp(), axis.double())
    assert float(mass) == pytest.approx(1, abs=0.005)
    assert bool((lower <= exact + 1e-4).all())
    assert torch.allclose(learned, prior.log_prob(axis.unsqueeze(1)), atol=1e-4)
    assert float((learned - exact).abs().max()) > 0.01  # b is wrong here, and seen to be


@pytest.mark.parametrize("orderings", [1, 2])
def test_exact_values_are_those_of_the_autoregressive_model(orderings):
    prior = chain(dim=3, orderings=orderings)
    z = torch.randn(20, 3)
    exact, learned, _ = prior.log_prob_exact(z, 128)
    by_model = prior.chain.log_prob(z, normalizer="quadrature", n_nodes=128)
    assert torch.allclose(exact, by_model, atol=1e-4)
    assert torch.allclose(learned, prior.chain.log_prob(z, normalizer="learned"), atol=1e-4)


@pytest.mark.parametrize("family", ["gaussian", "logistic"])
@pytest.mark.parametrize("orderings", [1, 2])
def test_the_objective_of_a_chain_is_its_formula(orderings, family):
    prior = chain(3, orderings=orderings, family=family).double()
    z = torch.randn(30, 3, dtype=torch.float64)
    torch.manual_seed(1)
    value, in_training = prior.objective(z, None, 1)
    with torch.no_grad():
        torch.manual_seed(1)
        again, metrics = prior.objective(z, None, 1)
    model, n = prior.chain, prior.n_samples
    torch.manual_seed(1)
    u = (torch.rand(orderings, 30, 3, n, dtype=torch.float64) + torch.arange(n)) / n
    terms = model.at_rows(z)
    at, b = terms.factors, model.log_norm(terms.factors)
    log_w = model.energy(at.proposal.from_uniform(u.movedim(-1, 0)), at)
    tilt = snl(terms.minus_energy, log_w, b, reduction="none")
    wanted = (terms.log_q + tilt).sum(-1) + terms.log_det
    assert in_training == {}
    assert torch.equal(again, value)
    torch.testing.assert_close(value, log_mean_exp(wanted))
    gap = bound_gap(log_mean_exp(log_w) - b).sum(-1).mean()
    torch.testing.assert_close(metrics, {"gap": gap, "ess": ess(log_w).mean()})
