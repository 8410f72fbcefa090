"""EBM: log_prob, shapes, errors, sampling."""

import pytest
import torch

import selfnorm as sn
from selfnorm.errors import DataError, EnergyError
from tests.analytic.models import ANALYTIC, Potential


def test_log_prob_is_minus_energy_plus_base_minus_b():
    base = sn.Gaussian(torch.tensor([1.0]), scale=2.0)
    model = sn.EBM(Potential(lambda x: x.squeeze(-1) ** 2), base=base, log_norm=0.5)
    x = torch.tensor([[0.3], [-2.0]])
    expected = -(x.squeeze(-1) ** 2) + base.log_prob(x) - 0.5
    torch.testing.assert_close(model.log_prob(x), expected)
    torch.testing.assert_close(model(x), expected)


def test_density_with_base_integrates_to_one_at_the_learned_b():
    base = sn.StudentT(3.0, torch.zeros(2), scale=1.0)
    torch.manual_seed(0)
    model = sn.EBM(sn.MLP(2, (32, 32), saturate=10.0), base=base)
    x = base.sample((500,))
    sn.fit(model, x, max_epochs=5, seed=0, progress=False)
    total, _ = sn.exact_log_norm(lambda v: model.log_prob(v), 2, n_points=801)
    assert abs(total) < 0.01


def test_energy_of_shape_n_by_one_is_accepted():
    model = sn.EBM(torch.nn.Linear(2, 1))
    assert model.log_prob(torch.zeros(4, 2)).shape == (4,)


def test_vector_energy_is_refused():
    model = sn.EBM(torch.nn.Linear(2, 3))
    with pytest.raises(EnergyError, match=r"one scalar per row.*\(4, 3\)"):
        model.log_prob(torch.zeros(4, 2))


def test_wrong_width_is_refused():
    model = sn.EBM(sn.MLP(2), base=sn.Gaussian(torch.zeros(2), scale=1.0))
    with pytest.raises(DataError, match="2 columns"):
        model.log_prob(torch.zeros(4, 3))


def test_base_is_not_trained():
    zuko = pytest.importorskip("zuko")
    model = sn.EBM(sn.MLP(2), base=zuko.flows.MAF(2, transforms=1, hidden_features=(8,)))
    assert not any(p.requires_grad for p in model.base.parameters())


def test_samples_match_the_moments_of_a_skewed_mixture():
    case = ANALYTIC[0]
    drawn = case.ebm().sample(4000, proposal=case.proposal, generator=3)
    truth = case.sample(200_000)
    assert drawn.shape == (4000, 2)
    error = truth.std(0) / 4000**0.5
    assert ((drawn.mean(0) - truth.mean(0)).abs() < 6 * error).all()


def test_sampling_without_base_asks_for_a_proposal():
    with pytest.raises(DataError, match="proposal"):
        sn.EBM(sn.MLP(2)).sample(3)


def test_same_generator_same_sample():
    case = ANALYTIC[0]
    a = case.ebm().sample(10, proposal=case.proposal, generator=7)
    b = case.ebm().sample(10, proposal=case.proposal, generator=7)
    assert torch.equal(a, b)
