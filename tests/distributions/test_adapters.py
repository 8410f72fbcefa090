"""Other people's distributions as proposals and bases: types, numbers, supports."""

import math

import numpy as np
import pytest
import torch
from torch.distributions import Categorical, Independent, Normal

import selfnorm as sn


class NumpyNormal:
    """A user's own object that knows NumPy only: double precision throughout."""

    def __init__(self):
        self.rng = np.random.default_rng(0)

    def sample(self, shape):
        return self.rng.normal(scale=2.0, size=(*shape, 2))

    def log_prob(self, x):
        return -(np.asarray(x) ** 2).sum(-1) / 8 - math.log(8 * math.pi)


def double_normal():
    return Independent(Normal(torch.zeros(2).double(), 2.0), 1)


def tilted(dtype):
    """Standard Gaussian base tilted to mean (0.5, -0.5): log Z = 0.25."""
    energy = sn.ExponentialFamily(lambda v: v, 2, theta=torch.tensor([0.5, -0.5], dtype=dtype))
    return sn.EBM(energy, base=sn.Gaussian(torch.zeros(2), scale=1.0))


@pytest.mark.parametrize("make", [double_normal, NumpyNormal])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_samples_and_densities_follow_the_type_of_the_model(make, dtype):
    x = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
    model = tilted(dtype)
    bounds = sn.evaluate(model, x, proposal=make(), seed=0)
    assert bounds.log_norm == pytest.approx(0.25, abs=0.05)
    sn.fit(model, x, proposal=make(), max_steps=2, lr=1e-6, seed=0, progress=False)
    assert float(model.log_norm.detach()) == pytest.approx(0.25, abs=0.02)
    assert model.sample(3, proposal=make(), generator=0).dtype == dtype
    networks = [sn.EBM(sn.MLP(2, (8,)).to(dtype), base=make()) for _ in range(2)]
    sn.fit_many(networks, x, max_steps=2, seed=0, progress=False)
    assert networks[0].log_prob(x).dtype == dtype


def test_on_its_own_a_distribution_keeps_its_type():
    q = sn.as_proposal(double_normal())
    assert q.sample((3,)).dtype == q.log_prob(q.sample((3,))).dtype == torch.float64
    assert q.to(torch.float32).sample((3,)).dtype == torch.float32
    assert not q.state_dict()  # as before: nothing of it is saved with a model


def test_whole_numbers_reach_a_network_as_floats():
    """Counting measure: Z of E = -x over {0, 1, 2} is 1 + e + e^2."""
    q = Categorical(logits=torch.zeros(3))
    energy = sn.ExponentialFamily(lambda v: v, 1, theta=torch.ones(1))
    bounds = sn.evaluate(sn.EBM(energy), torch.tensor([[0.0], [2.0]]), proposal=q, seed=0)
    assert bounds.log_norm == pytest.approx(math.log(1 + math.e + math.e**2), abs=0.03)


def test_adapting_draws_nothing_from_the_callers_stream():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    sn.as_proposal(double_normal())
    assert torch.equal(before, torch.get_rng_state())


def test_a_defensive_mixture_takes_any_heavy_part_of_its_width():
    heavy = torch.distributions.StudentT(3.0, torch.zeros(2), 2.0)
    q = sn.Defensive(sn.Gaussian(torch.zeros(2), scale=0.5), heavy)
    log_z, _ = sn.exact_log_norm(q.log_prob, 2, n_points=513)
    assert log_z == pytest.approx(0.0, abs=1e-3)
    with pytest.raises(sn.SelfnormError, match="rows of 2 numbers"):
        sn.Defensive(sn.Gaussian(torch.zeros(1), scale=1.0), heavy)


def test_seeds_may_be_numpy_integers_and_nothing_odd():
    model = tilted(torch.float32)
    assert torch.equal(model.sample(4, generator=np.int64(7)), model.sample(4, generator=7))
    with pytest.raises(TypeError, match="a seed is a whole number"):
        model.sample(4, generator="seven")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_flow_as_distribution_that_says_nothing_of_its_support(dtype):
    zuko = pytest.importorskip("zuko")
    torch.manual_seed(0)
    flow = zuko.flows.MAF(2, transforms=1, hidden_features=(8,)).to(dtype)
    bounds = sn.evaluate(tilted(torch.float32), torch.zeros(3, 2), proposal=flow(), seed=0)
    assert bounds.log_norm == pytest.approx(0.25, abs=0.05)
