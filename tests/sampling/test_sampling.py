import math

import pytest
import torch
from torch import distributions as td

import selfnorm as sn
from selfnorm import sampling
from selfnorm.errors import DataError, ProposalError


class SkewedMixture:
    """0.7 of a skewed part, 0.3 of a tilted Gaussian; exactly sampled, log Z = 3."""

    log_norm = 3.0

    def __init__(self):
        self.tilted = td.MultivariateNormal(
            torch.tensor([2.0, -1.5]), torch.tensor([[0.5, 0.35], [0.35, 0.6]])
        )
        self.skew = td.Gumbel(torch.tensor([-0.5, 0.3]), torch.tensor([0.6, 0.9]))

    def log_prob(self, x):
        a = math.log(0.7) + self.skew.log_prob(x).sum(-1)
        b = math.log(0.3) + self.tilted.log_prob(x)
        return torch.logaddexp(a, b)

    def log_unnormalized(self, x):
        return self.log_prob(x) + self.log_norm

    def sample(self, shape):
        n = shape[0]
        skewed = torch.rand(n, 1) < 0.7
        return torch.where(skewed, self.skew.sample((n,)), self.tilted.sample((n,)))


def wide_proposal():
    # off-centre and not symmetric about the target: a dropped -log q shows
    base = td.StudentT(4.0, torch.tensor([0.8, -0.2]), torch.tensor([2.0, 1.8]))
    return td.Independent(base, 1)


def energy_distance_test(x, y, n_permutations=199):
    """Two-sample energy distance ``2 E|X - Y| - E|X - X'| - E|Y - Y'|``, its permutation p-value.

    Zero iff both laws agree (Szekely and Rizzo 2013).
    """
    n, m = len(x), len(y)
    pooled = torch.cat([x, y]).float()
    pooled = (pooled - pooled.mean(0)) / pooled.std(0)
    generator = torch.Generator().manual_seed(0)
    # s'Ds with s = 1/n on one sample and -1/m on the other is minus the energy distance
    signs = torch.full((n + m, 1 + n_permutations), -1.0 / m)
    signs[:n, 0] = 1.0 / n
    for column in range(1, 1 + n_permutations):
        signs[torch.randperm(n + m, generator=generator)[:n], column] = 1.0 / n
    total = torch.zeros(1 + n_permutations, dtype=torch.float64)
    for rows, sign in zip(pooled.split(1000), signs.split(1000), strict=True):
        distances = torch.cdist(rows, pooled, compute_mode="donot_use_mm_for_euclid_dist")
        total -= ((distances @ signs).double() * sign.double()).sum(0)
    return float(total[0]), float((total >= total[0] - 1e-12).double().mean())


TARGET = SkewedMixture()
OPTIONS = {
    "sir": {"n_candidates": 100_000},
    "imh": {"n_steps": 60},
    "mala": {"n_chains": 5000, "thin": 60, "warmup": 60},
    "hmc": {"n_chains": 5000, "thin": 15, "warmup": 30},
    "smc": {"n_particles": 10_000},
}


@pytest.mark.parametrize("method", sorted(sampling.METHODS))
def test_every_sampler_matches_the_exact_sample(method):
    torch.manual_seed(1)
    exact = TARGET.sample((5000,))
    draws = sampling.draw(
        TARGET, 5000, proposal=wide_proposal(), method=method, seed=2, **OPTIONS[method]
    )
    assert draws.samples.shape == (5000, 2)
    assert not draws.samples.requires_grad
    distance, p_value = energy_distance_test(draws.samples, exact)
    assert p_value > 0.01, (method, distance, p_value)
    if method in ("mala", "hmc"):
        assert 0.4 < draws.acceptance < 0.95
        assert 2500 < draws.ess <= 5000


@pytest.mark.parametrize("method", sorted(sampling.METHODS))
def test_protocol(method):
    """Same seed, same draws; the caller's stream untouched; one sample possible; no in-place."""
    options = {**OPTIONS[method]}
    options.pop("n_particles", None)
    options.pop("n_chains", None)
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    a = sampling.draw(TARGET, 7, proposal=wide_proposal(), method=method, seed=3, **options)
    assert torch.equal(before, torch.random.get_rng_state())
    b = sampling.draw(TARGET, 7, proposal=wide_proposal(), method=method, seed=3, **options)
    c = sampling.draw(TARGET, 7, proposal=wide_proposal(), method=method, seed=4, **options)
    assert torch.equal(a.samples, b.samples)
    assert not torch.equal(a.samples, c.samples)
    one = sampling.draw(TARGET, 1, proposal=wide_proposal(), method=method, seed=3, **options)
    assert one.samples.shape == (1, 2)
    assert torch.isfinite(one.samples).all()


def test_steps_are_pure_and_return_state_and_info():
    log_density = sampling.as_log_density(TARGET)
    q = wide_proposal()
    places = {
        sampling.smc.step: sampling.smc.init(log_density, q, 50),
        **dict.fromkeys(
            (sampling.sir_step, sampling.imh_step), sampling.weighted_init(log_density, q, 50)
        ),
        **dict.fromkeys(
            (sampling.mala_step, sampling.hmc_step),
            sampling.gradient_init(log_density, q.sample((50,))),
        ),
    }
    options = {
        sampling.sir_step: {"n_candidates": 500},
        sampling.mala_step: {"step_size": 0.3},
        sampling.hmc_step: {"step_size": 0.3},
    }
    for step, state in places.items():
        arguments = () if hasattr(state, "gradient") else (q,)
        copy = [v.clone() if torch.is_tensor(v) else v for v in state]
        new, info = step(state, log_density, *arguments, **options.get(step, {}))
        assert type(new) is type(state)
        assert isinstance(info, tuple)
        assert new.positions.shape == state.positions.shape
        for old, kept in zip(state, copy, strict=True):
            assert torch.equal(torch.as_tensor(old), torch.as_tensor(kept))


def test_sir_and_smc_estimate_log_norm():
    for method, options in (("sir", {"n_candidates": 50_000}), ("smc", {"n_particles": 5000})):
        draws = sampling.draw(
            TARGET, 1000, proposal=wide_proposal(), method=method, seed=0, **options
        )
        assert draws.log_norm == pytest.approx(3.0, abs=0.06)


def test_smc_reaches_a_far_target():
    """The one-step estimate fails at this distance; the tempered one does not."""
    q = td.Independent(td.Normal(torch.zeros(2), torch.ones(2)), 1)
    far = td.Independent(td.Normal(torch.tensor([6.0, -5.0]), torch.tensor([0.3, 0.5])), 1)
    draws = sampling.draw(far, 4000, proposal=q, method="smc", seed=0, n_particles=4000)
    assert draws.log_norm == pytest.approx(0.0, abs=0.3)
    assert torch.allclose(draws.samples.mean(0), far.mean, atol=0.05)
    assert torch.allclose(draws.samples.std(0), torch.tensor([0.3, 0.5]), rtol=0.1)
    single = sampling.draw(far, 100, proposal=q, method="sir", seed=0)
    assert single.log_norm < -1.0


@pytest.mark.parametrize("method", ["mala", "hmc"])
def test_gradient_samplers_move_under_extreme_scales(method):
    scale = torch.tensor([1e-3, 1e3])
    target = td.Independent(td.Normal(torch.zeros(2), scale), 1)
    q = td.Independent(td.Normal(torch.zeros(2), 1.5 * scale), 1)
    draws = sampling.draw(target, 2000, proposal=q, method=method, seed=0)
    assert torch.allclose(draws.samples.std(0) / scale, torch.ones(2), atol=0.08)
    assert draws.acceptance > 0.4


def test_unknown_method_and_unknown_option_are_refused():
    q = wide_proposal()
    with pytest.raises(ValueError, match="unknown sampling method"):
        sampling.draw(TARGET, 5, proposal=q, method="gibbs")
    with pytest.raises(TypeError, match="no option 'steps'"):
        sampling.draw(TARGET, 5, proposal=q, method="imh", steps=5)
    with pytest.raises(TypeError, match="cannot sample"):
        sampling.draw(object(), 5, proposal=q)


@pytest.mark.parametrize("method", ["mala", "hmc"])
def test_gradient_samplers_refuse_laws_of_whole_numbers(method):
    coins = torch.distributions.Bernoulli(torch.tensor([0.3, 0.6]))
    model = sn.EBM(sn.ExponentialFamily(lambda x: x, 2, theta=torch.tensor([0.5, -1.0])))
    with pytest.raises(sn.SelfnormError, match=r"columns \[0, 1\].*'sir' or 'imh'"):
        model.sample(200, proposal=coins, method=method, seed=0)
    drawn = model.sample(200, proposal=coins, method="imh", seed=0)
    assert set(drawn.unique().tolist()) == {0.0, 1.0}


def test_no_overlap_is_a_clear_error():
    def nowhere(x):
        return torch.full(x.shape[:-1], -torch.inf)

    with pytest.raises(ProposalError, match="does not overlap"):
        sampling.draw(nowhere, 5, proposal=wide_proposal())


def test_bounded_support_is_respected():
    """A box proposal with -inf outside: no sample leaves the box, for every sampler."""

    class Box:
        def sample(self, shape):
            return torch.rand(*shape, 2) * 2 - 1

        def log_prob(self, x):
            inside = ((x > -1) & (x < 1)).all(-1)
            return torch.where(inside, -math.log(4.0), -math.inf)

    def target(x):
        inside = ((x > -1) & (x < 1)).all(-1)
        return torch.where(inside, x[..., 0], torch.tensor(-math.inf))

    for method in sorted(sampling.METHODS):
        draws = sampling.draw(target, 1000, proposal=Box(), method=method, seed=0)
        assert (draws.samples.abs() <= 1).all()
        # E[x] = coth(1) - 1 under exp(x) on [-1, 1]
        assert draws.samples[:, 0].mean() == pytest.approx(0.313, abs=0.08)


def test_chain_ess_on_an_autoregression():
    rho, chains, steps = 0.9, 20, 4000
    x = torch.zeros(steps, chains)
    x[0] = torch.randn(chains)
    for t in range(1, steps):
        x[t] = rho * x[t - 1] + math.sqrt(1 - rho**2) * torch.randn(chains)
    expected = steps * chains * (1 - rho) / (1 + rho)
    assert sampling.chain_ess(x.unsqueeze(-1)) == pytest.approx(expected, rel=0.2)
    stuck = torch.randn(1, 8, 1).expand(50, 8, 1)
    assert sampling.chain_ess(stuck) < 20
    assert sampling.r_hat(stuck + 1e-3 * torch.randn(50, 8, 1)) > 2


@pytest.mark.parametrize("method", ["sir", "imh", "hmc", "smc"])
def test_a_log_density_in_a_column_serves_and_one_of_each_coordinate_does_not(method):
    normal = torch.distributions.Normal(2.0, 0.5)
    q = sn.Gaussian(torch.zeros(1), scale=3.0)
    found = sampling.draw(normal, 1000, proposal=q, method=method, seed=0).samples
    assert found.shape == (1000, 1)
    assert abs(float(found.mean()) - 2.0) < 0.1
    with pytest.raises(DataError, match="one value a row"):
        sampling.draw(normal, 10, proposal=wide_proposal(), method=method)
