"""Proposals: fit_to, types and numbers, errors; other people's distributions in their place."""

import copy
import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import distributions as D

import selfnorm as sn
from selfnorm.distributions import choose_component, mix_log_probs, mix_samples, pick_component
from selfnorm.errors import ProposalError
from tests.contract.test_densities import SKEW, mixture


def skewed_data(n=4000):
    torch.manual_seed(2)
    return torch.randn(n, 2) @ torch.linalg.cholesky(SKEW).T + torch.tensor([3.0, -1.0])


@pytest.mark.parametrize(
    ("family", "options"),
    [
        *((family, {}) for family in (sn.Gaussian, sn.StudentT, sn.Uniform)),
        *((family, {"n_components": 3}) for family in (sn.GaussianMixture, sn.Defensive)),
        (sn.Gaussian, {"full": False}),
    ],
)
@pytest.mark.parametrize("scale", [1e-16, 1.0, 1e4])
def test_fit_to_covers_the_data_at_any_scale(family, options, scale):
    x = skewed_data() * scale
    log_q = family.fit_to(x, **options).log_prob(x)
    assert torch.isfinite(log_q).all()
    entropy = 1 + math.log(2 * math.pi) + 0.5 * math.log(float(torch.det(SKEW)))
    # In the units of x, and not far below the truth: the Jacobian of the scale is in log_prob.
    # The box of a Uniform is the widest.
    assert -entropy - 2.0 < float(log_q.mean()) + 2 * math.log(scale) < -entropy + 0.1


def test_gaussian_fit_is_maximum_likelihood():
    x = skewed_data()
    q = sn.Gaussian.fit_to(x)
    torch.testing.assert_close(q.loc, x.mean(0))
    torch.testing.assert_close(
        q.scale_tril @ q.scale_tril.T, torch.cov(x.T, correction=0), atol=1e-4, rtol=1e-3
    )


def test_student_fit_resists_outliers():
    x = skewed_data()
    x[:20] = 1e4
    q = sn.StudentT.fit_to(x, df=3.0)
    assert float((q.loc - torch.tensor([3.0, -1.0])).abs().max()) < 0.2
    assert float(q.scale_tril.abs().max()) < 3


def test_defensive_bounds_the_weights():
    light = sn.Gaussian(torch.zeros(2), scale=0.3)
    heavy = sn.StudentT(3.0, torch.zeros(2), scale=1.0)
    q = sn.Defensive(light, heavy, weight=0.25)
    x = heavy.sample((5000,))
    assert float((heavy.log_prob(x) - q.log_prob(x)).max()) <= math.log(4) + 1e-5


def test_one_law_per_input_and_a_stack_of_laws_mix_as_one_law_does():
    """Weights (members, 1) and components of (members, K): each member by its own numbers."""
    weights, means = torch.softmax(torch.randn(3, 4), -1), torch.randn(3, 4, 2)
    u = torch.rand(3, 500)
    component, inner = choose_component(weights[:, None], u)
    assert float((inner - 0.5).abs().max()) <= 0.5 + 1e-5
    for k in range(3):
        alone, left = choose_component(weights[k], u[k])
        assert torch.equal(component[k], alone)
        assert torch.allclose(inner[k], left)
        chosen = pick_component(means[:, None], component, event_dims=1)[k]
        assert torch.equal(chosen, means[k][alone])
    never = choose_component(torch.tensor([0.0, 1.0, 0.0]), torch.tensor([0.0, 0.5, 1 - 1e-7]))[0]
    assert torch.equal(never, torch.ones(3, dtype=torch.long))
    share = torch.tensor([[0.2], [0.5], [0.8]])
    log_p = mix_log_probs(torch.zeros(3, 5), torch.full((3, 5), -1.0), share)
    torch.testing.assert_close(log_p.exp(), (1 - share + share / math.e).expand(3, 5))
    broad = mix_samples(torch.zeros(3, 20_000, 1), torch.ones(3, 20_000, 1), share)
    torch.testing.assert_close(broad.mean((1, 2)), share[:, 0], atol=0.02, rtol=0)


@pytest.mark.parametrize("width", [1, 2])
def test_a_log_prob_of_each_coordinate_is_refused(width):
    class Forgotten:
        def sample(self, shape):
            return torch.randn(*shape, width)

        def log_prob(self, x):
            return D.Normal(0.0, 1.0).log_prob(x)  # no .sum(-1)

    q, x = sn.as_proposal(Forgotten()), torch.zeros(5, width)
    if width == 1:
        assert q.log_prob(x).shape == (5,)
        return
    with pytest.raises(ProposalError, match=r"one value a row, shape \(5,\).*got \(5, 2\)"):
        q.log_prob(x)
    with pytest.raises(ProposalError, match="Forgotten"):
        sn.fit(sn.EBM(sn.MLP(2)), torch.randn(50, 2), proposal=q, max_steps=1, progress=False)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: sn.Gaussian(torch.zeros(2)), "exactly one"),
        (lambda: sn.Gaussian(torch.zeros(2), scale=torch.tensor([1.0, 0.0])), "positive"),
        (lambda: sn.Gaussian(torch.zeros(2), covariance=torch.eye(3)), "shape"),
        (lambda: sn.Gaussian(torch.zeros(2), covariance=-torch.eye(2)), "positive definite"),
        (lambda: sn.StudentT(0.0, torch.zeros(1), scale=1.0), "freedom"),
        (lambda: sn.Uniform(torch.ones(2), torch.zeros(2)), "low < high"),
        (lambda: sn.Defensive(mixture(), weight=1.5), "between 0 and 1"),
        (
            lambda: sn.Defensive(mixture(), D.StudentT(3.0, torch.zeros(3), 2.0)),
            "rows of 3 numbers",
        ),
        (lambda: sn.Gaussian.fit_to(torch.tensor([[1.0, math.nan], [0.0, 1.0]])), "finite"),
        (lambda: sn.Gaussian.fit_to(torch.ones(1, 2)), "two rows"),
        (lambda: sn.Gaussian(torch.zeros(2), scale=torch.ones(3)), "number or"),
        (
            lambda: sn.GaussianMixture([1.5, -0.5], torch.zeros(2, 1), torch.ones(2, 1, 1)),
            "must not be negative",
        ),
        (
            lambda: sn.GaussianMixture(
                torch.ones(2), torch.zeros(2, 2), torch.stack([torch.eye(2), -torch.eye(2)])
            ),
            "component 1",
        ),
        (lambda: sn.as_proposal("normal"), "sample"),
        (lambda: sn.as_proposal(sn.Gaussian(torch.zeros(2), scale=1.0), dim=5), "5 columns"),
        (lambda: sn.as_proposal(D.Normal(torch.zeros(2, 3), 1.0)), "batch shape"),
    ],
)
def test_bad_input_names_the_cause(build, words):
    with pytest.raises(ProposalError, match=words):
        build()


@pytest.mark.parametrize(
    "fit_to",
    [sn.Gaussian.fit_to, sn.StudentT.fit_to, sn.GaussianMixture.fit_to, sn.Defensive.fit_to],
)
def test_a_column_that_repeats_another_is_no_breakdown(fit_to):
    for seed in range(4):
        x = torch.randn(300, 1, generator=torch.Generator().manual_seed(seed)).repeat(1, 2)
        q = fit_to(x)
        # along the diagonal the two columns are one: the density there is far above its margin's
        one = sn.Gaussian.fit_to(x[:, :1])
        assert q.log_prob(x).mean() > one.log_prob(x[:, :1]).mean() + 2
        along, across = (q.sample((4000,)) @ torch.tensor([[1.0, 1.0], [1.0, -1.0]])).std(0)
        assert across < 0.05 * along


def test_a_constant_column_gets_unit_scale_in_every_fit():
    x = torch.cat([torch.randn(50, 1), torch.ones(50, 1)], 1)
    for q in (sn.Gaussian.fit_to(x), sn.StudentT.fit_to(x)):
        assert float(q.scale_tril[1, 1]) == pytest.approx(1.0)


FAMILIES = (sn.Gaussian, sn.StudentT, sn.Uniform, sn.GaussianMixture, sn.Defensive)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_double_table_gives_a_double_proposal(family):
    x = 1e4 + torch.randn(300, 2, dtype=torch.float64)
    q = family.fit_to(x)
    assert q.log_prob(x).dtype == q.sample((2,)).dtype == torch.float64
    # Far from the origin float32 cannot tell rows apart that double precision can.
    centred = family.fit_to(x - 1e4)
    assert torch.allclose(q.log_prob(x), centred.log_prob(x - 1e4), atol=1e-5)
    assert family.fit_to((x - 1e4).half()).sample((2,)).dtype == torch.float32


@pytest.mark.parametrize(
    ("made", "same"),
    [
        (lambda: sn.Gaussian([0, 1], 0.5), lambda: sn.Gaussian(torch.tensor([0.0, 1.0]), 0.5)),
        (lambda: sn.StudentT(3, [0, 0], [1, 2]), lambda: sn.StudentT(3.0, [0.0, 0.0], [1.0, 2.0])),
        (
            lambda: sn.GaussianMixture([1, 3], np.zeros((2, 2)), np.stack([np.eye(2)] * 2)),
            lambda: sn.GaussianMixture(
                torch.tensor([0.25, 0.75]), torch.zeros(2, 2), torch.eye(2).expand(2, 2, 2)
            ),
        ),
    ],
)
def test_numbers_may_be_lists_arrays_and_whole(made, same):
    x = torch.randn(20, 2)
    assert torch.allclose(made().log_prob(x).float(), same().log_prob(x), atol=1e-5)
    assert made().sample((3,)).is_floating_point()


def test_parameters_with_a_gradient_do_not_tie_a_proposal_to_their_graph():
    spread = torch.ones(2, requires_grad=True)
    for q in (
        sn.Gaussian(torch.zeros(2), scale=2 * spread),
        sn.StudentT(3.0, torch.zeros(2), covariance=torch.diag(spread)),
    ):
        assert not copy.deepcopy(q).log_prob(torch.zeros(1, 2)).requires_grad


def test_a_student_t_that_loads_other_degrees_of_freedom_is_normalised():
    saved = sn.StudentT(2.0, torch.zeros(1), scale=1.0)
    loaded = sn.StudentT(30.0, torch.zeros(1), scale=1.0)
    loaded.load_state_dict(saved.state_dict())
    x = torch.linspace(-3, 3, 7)[:, None]
    assert torch.equal(loaded.log_prob(x), saved.log_prob(x))


class NumpyNormal:
    """A user's own object that knows NumPy only: double precision throughout."""

    def __init__(self):
        self.rng = np.random.default_rng(0)

    def sample(self, shape):
        return self.rng.normal(scale=2.0, size=(*shape, 2))

    def log_prob(self, x):
        return -(np.asarray(x) ** 2).sum(-1) / 8 - math.log(8 * math.pi)


def double_normal():
    return D.Independent(D.Normal(torch.zeros(2).double(), 2.0), 1)


def tilted(dtype):
    """Standard Gaussian base tilted to mean (0.5, -0.5): log Z = 0.25."""
    energy = sn.ExponentialFamily(lambda v: v, 2, theta=torch.tensor([0.5, -0.5], dtype=dtype))
    return sn.EBM(energy, base=sn.Gaussian(torch.zeros(2), scale=1.0))


def autoregressive_flow():
    """A distribution of zuko's that says nothing of its support."""
    zuko = pytest.importorskip("zuko")
    torch.manual_seed(0)
    return zuko.flows.MAF(2, transforms=1, hidden_features=(8,)).double()()


@pytest.mark.parametrize("make", [*FAMILIES, double_normal, NumpyNormal, autoregressive_flow])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_proposal_takes_the_type_of_the_model(make, dtype):
    """Data, base and proposal in any mixture of types: the model's type is used."""
    other = torch.float64 if dtype == torch.float32 else torch.float32
    x = torch.randn(300, 2, dtype=other, generator=torch.Generator().manual_seed(0))
    fitted = partial(make.fit_to, x) if make in FAMILIES else make
    model = tilted(dtype)
    bounds = sn.evaluate(model, x, proposal=fitted(), seed=0)
    assert bounds.log_norm == pytest.approx(0.25, abs=0.05)
    sn.fit(model, x, proposal=fitted(), max_steps=2, lr=1e-6, seed=0, progress=False)
    assert float(model.log_norm.detach()) == pytest.approx(0.25, abs=0.05)
    assert model.sample(3, proposal=fitted(), seed=0).dtype == dtype
    networks = [sn.EBM(sn.MLP(2, (8,)).to(dtype), base=fitted()) for _ in range(2)]
    sn.fit_many(networks, x, seed=0, progress=False, options=sn.TrainingOptions(max_steps=2))
    assert networks[0].log_prob(x).dtype == dtype


def test_whole_numbers_reach_a_network_as_floats():
    """Counting measure: Z of E = -x over {0, 1, 2} is 1 + e + e^2."""
    q = D.Categorical(logits=torch.zeros(3))
    energy = sn.ExponentialFamily(lambda v: v, 1, theta=torch.ones(1))
    bounds = sn.evaluate(sn.EBM(energy), torch.tensor([[0.0], [2.0]]), proposal=q, seed=0)
    assert bounds.log_norm == pytest.approx(math.log(1 + math.e + math.e**2), abs=0.03)


def test_adapting_draws_nothing_from_the_callers_stream():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    sn.as_proposal(double_normal())
    assert torch.equal(before, torch.get_rng_state())


def test_seeds_may_be_numpy_integers_and_nothing_odd():
    model = tilted(torch.float32)
    assert torch.equal(model.sample(4, seed=np.int64(7)), model.sample(4, seed=7))
    with pytest.raises(TypeError, match="a seed is a whole number"):
        model.sample(4, seed="seven")


class Stated:
    """Samples of one distribution, the log-density of another."""

    def __init__(self, samples, density, plus=0.0):
        self.samples, self.density, self.plus = samples, density, plus

    def sample(self, shape):
        return self.samples.sample(shape)

    def log_prob(self, x):
        return self.density.log_prob(x) + self.plus


def normal(d, scale=1.0, loc=0.0):
    return D.Independent(D.Normal(torch.full((d,), loc), torch.full((d,), scale)), 1)


@pytest.mark.parametrize(
    "law",
    [
        Stated(normal(1), normal(1), plus=0.92),  # the constant was left out
        Stated(normal(1), normal(1), plus=1000.0),
        Stated(normal(2, 2.0), normal(2, 4.0)),  # variance and standard deviation confused
        Stated(normal(3), normal(3, loc=0.7)),
        sn.Defensive(Stated(normal(10), normal(10, 1.5))),
    ],
    ids=["constant", "large constant", "scale", "place", "part of a mixture"],
)
@pytest.mark.parametrize("use", [sn.evaluate, partial(sn.fit, max_steps=1, progress=False)])
def test_a_log_prob_that_is_not_that_of_the_samples_is_refused(law, use):
    d = sn.as_proposal(law).dim
    model, x = sn.EBM(sn.MLP(d, hidden=(8,))), torch.randn(50, d)
    with pytest.raises(ProposalError, match="not the log-density of its samples"):
        use(model, x, proposal=law, seed=0)


SPIKES = D.Normal(torch.linspace(-9.0, 9.0, 40)[:, None].expand(40, 2), 0.05)


@pytest.mark.parametrize(
    "law",
    [
        normal(30),
        D.Independent(D.Cauchy(torch.zeros(3), torch.ones(3)), 1),
        D.Independent(D.Exponential(torch.ones(5)), 1),
        D.Independent(D.Beta(torch.full((1,), 0.3), torch.full((1,), 0.3)), 1),
        D.MultivariateNormal(torch.zeros(2), torch.tensor([[1.0, 0.9999], [0.9999, 1.0]])),
        D.MixtureSameFamily(D.Categorical(torch.ones(40)), D.Independent(SPIKES, 1)),
        D.Independent(D.Poisson(torch.full((2,), 3.0)), 1),
    ],
    ids=["wide", "heavy", "cut", "poles", "narrow", "spikes", "counts"],
)
def test_an_own_proposal_that_says_what_it_does_is_taken(law):
    d = law.event_shape[0]
    adapted = sn.distributions.proposal_for(sn.EBM(sn.MLP(d)), Stated(law, law))
    assert adapted.dim == d
