"""Every proposal: shapes, normalisation, samples that follow the density, fit_to, errors."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import distributions as D

import selfnorm as sn
from selfnorm.errors import ProposalError

SKEW = torch.tensor([[1.0, 0.7], [0.7, 2.0]])


def mixture():
    return sn.GaussianMixture(
        torch.tensor([0.3, 0.7]),
        torch.tensor([[-2.0, 1.0], [1.5, -0.5]]),
        torch.stack([SKEW * 0.3, torch.eye(2) * 0.5]),
    )


PROPOSALS = {
    "gaussian_diagonal": lambda: sn.Gaussian(
        torch.tensor([1.0, -1.0]), scale=torch.tensor([0.5, 2.0])
    ),
    "gaussian_full": lambda: sn.Gaussian(torch.tensor([1.0, -1.0]), covariance=SKEW),
    "student": lambda: sn.StudentT(4.0, torch.tensor([0.5, 0.0]), covariance=SKEW),
    "uniform": lambda: sn.Uniform(torch.tensor([-1.0, 0.0]), torch.tensor([2.0, 0.5])),
    "mixture": mixture,
    "defensive": lambda: sn.Defensive(mixture(), weight=0.3),
    "torch": lambda: sn.as_proposal(D.Gamma(torch.tensor([2.0, 3.0]), torch.tensor([1.0, 2.0]))),
}
everyone = pytest.mark.parametrize("name", PROPOSALS)


@everyone
def test_integrates_to_one(name):
    q = PROPOSALS[name]()
    log_z, _ = sn.exact_log_norm(q.log_prob, 2, n_points=1201)
    # A uniform's or gamma's edges cut grid cells: the rule is then only good to a cell's width.
    tolerance = 0.03 if name in ("uniform", "torch") else 1e-3
    assert abs(log_z) < tolerance


@everyone
def test_samples_follow_the_density(name):
    """E_q[h / q] for a known h is 1: samples and log_prob belong together."""
    q = PROPOSALS[name]()
    torch.manual_seed(1)
    x = q.sample((60_000,))
    assert x.shape == (60_000, 2)
    box_low, box_high = x.quantile(0.2, 0), x.quantile(0.8, 0)
    inside = ((x > box_low) & (x < box_high)).all(-1)
    h = torch.where(inside, -(box_high - box_low).log().sum(), torch.tensor(-math.inf))
    ratio = torch.exp(h - q.log_prob(x))
    assert float(ratio.mean()) == pytest.approx(1.0, abs=5 * float(ratio.std()) / math.sqrt(60_000))


@everyone
def test_batch_shapes(name):
    q = PROPOSALS[name]()
    x = q.sample((3, 5))
    assert x.shape == (3, 5, 2)
    assert q.log_prob(x).shape == (3, 5)
    assert q.event_shape == (2,)


def skewed_data(n=4000):
    torch.manual_seed(2)
    return torch.randn(n, 2) @ torch.linalg.cholesky(SKEW).T + torch.tensor([3.0, -1.0])


@pytest.mark.parametrize(
    "fitted",
    [
        lambda x: sn.Gaussian.fit_to(x),
        lambda x: sn.Gaussian.fit_to(x, full=False),
        lambda x: sn.StudentT.fit_to(x),
        lambda x: sn.Uniform.fit_to(x),
        lambda x: sn.GaussianMixture.fit_to(x, n_components=3),
        lambda x: sn.Defensive.fit_to(x, n_components=3),
    ],
)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_fit_to_covers_the_data_at_any_scale(fitted, scale):
    x = skewed_data() * scale
    q = fitted(x)
    log_q = q.log_prob(x)
    assert torch.isfinite(log_q).all()
    entropy = 1 + math.log(2 * math.pi) + 0.5 * math.log(float(torch.det(SKEW)))
    # In the units of x, and not far below the truth: the Jacobian of the scale is in log_prob.
    assert (
        float(log_q.mean()) + 2 * math.log(scale) > -entropy - 2.0
    )  # the box of a Uniform is the widest
    assert float(log_q.mean()) + 2 * math.log(scale) < -entropy + 0.1


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


def test_any_torch_distribution_serves():
    one = sn.as_proposal(D.Normal(0.0, 1.0))
    assert one.dim == 1
    assert one.sample((4,)).shape == (4, 1)
    two = sn.as_proposal(D.MultivariateNormal(torch.zeros(2), torch.eye(2)))
    assert two.log_prob(torch.zeros(3, 2)).shape == (3,)
    box = sn.as_proposal(D.Uniform(torch.zeros(2), torch.ones(2)))
    torch.testing.assert_close(
        box.log_prob(torch.tensor([[0.5, 0.5], [2.0, 0.5]])), torch.tensor([0.0, -math.inf])
    )


def test_own_objects_and_flows_serve():
    class Mine:
        def sample(self, shape):
            return torch.rand(*shape, 3)

        def log_prob(self, x):
            return torch.zeros(x.shape[:-1])

    assert sn.as_proposal(Mine()).dim == 3
    zuko = pytest.importorskip("zuko")
    flow = sn.as_proposal(zuko.flows.MAF(2, transforms=1, hidden_features=(8,)))
    x = flow.sample((5,))
    assert flow.log_prob(x).shape == (5,)
    assert flow.trainable


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
        (lambda: sn.Gaussian.fit_to(torch.tensor([[1.0, math.nan], [0.0, 1.0]])), "finite"),
        (lambda: sn.Gaussian.fit_to(torch.ones(1, 2)), "two rows"),
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


def test_tiny_scales_are_not_widened():
    x = torch.randn(500, 2, generator=torch.Generator().manual_seed(0))
    for fit_to in (sn.Gaussian.fit_to, sn.StudentT.fit_to, sn.Uniform.fit_to):
        expected = fit_to(x).log_prob(x[:3]) + 2 * 16 * math.log(10)
        assert torch.allclose(fit_to(x * 1e-16).log_prob(x[:3] * 1e-16), expected, atol=1e-3)


def test_a_constant_column_gets_unit_scale_in_every_fit():
    x = torch.cat([torch.randn(50, 1), torch.ones(50, 1)], 1)
    for q in (sn.Gaussian.fit_to(x), sn.StudentT.fit_to(x)):
        assert float(q.scale_tril[1, 1]) == pytest.approx(1.0)


def test_a_mixture_names_the_component_that_is_no_covariance():
    with pytest.raises(ProposalError, match="component 1"):
        sn.GaussianMixture(
            torch.ones(2), torch.zeros(2, 2), torch.stack([torch.eye(2), -torch.eye(2)])
        )


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


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("model_type", [torch.float32, torch.float64])
def test_the_proposal_takes_the_type_of_the_model(family, model_type):
    """Data, base and proposal in any mixture of types: the model's type is used."""
    x = torch.randn(300, 2, dtype=torch.float64)
    other = torch.float64 if model_type == torch.float32 else torch.float32
    model = sn.EBM(sn.MLP(2, hidden=(8,)).to(model_type), base=sn.Gaussian.fit_to(x.to(other)))
    q = family.fit_to(x.to(other))
    sn.fit(model, x, proposal=q, max_steps=2, progress=False)
    assert math.isfinite(sn.evaluate(model, x, proposal=family.fit_to(x.to(other))).lower)
    assert model.sample(3, proposal=family.fit_to(x.to(other))).dtype == model_type
    sn.fit_many([model], x, proposal=family.fit_to(x.to(other)), max_steps=2, progress=False)
    assert model.log_prob(x).dtype == model_type


@pytest.mark.parametrize(
    ("made", "same"),
    [
        (lambda: sn.Gaussian([0, 1], 0.5), lambda: sn.Gaussian(torch.tensor([0.0, 1.0]), 0.5)),
        (
            lambda: sn.Gaussian(np.zeros(2), covariance=np.array([[2.0, 0.3], [0.3, 1.0]])),
            lambda: sn.Gaussian(torch.zeros(2), covariance=torch.tensor([[2.0, 0.3], [0.3, 1.0]])),
        ),
        (lambda: sn.StudentT(3, [0, 0], [1, 2]), lambda: sn.StudentT(3.0, [0.0, 0.0], [1.0, 2.0])),
        (
            lambda: sn.Uniform([-9, -9], np.array([9, 9])),
            lambda: sn.Uniform(torch.full((2,), -9.0), torch.full((2,), 9.0)),
        ),
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


def test_odd_scales_and_weights_are_refused_by_name():
    with pytest.raises(ProposalError, match="number or"):
        sn.Gaussian(torch.zeros(2), scale=torch.ones(3))
    with pytest.raises(ProposalError, match="must not be negative"):
        sn.GaussianMixture(torch.tensor([1.5, -0.5]), torch.zeros(2, 1), torch.ones(2, 1, 1))


def test_a_student_t_that_loads_other_degrees_of_freedom_is_normalised():
    saved = sn.StudentT(2.0, torch.zeros(1), scale=1.0)
    loaded = sn.StudentT(30.0, torch.zeros(1), scale=1.0)
    loaded.load_state_dict(saved.state_dict())
    x = torch.linspace(-3, 3, 7)[:, None]
    assert torch.equal(loaded.log_prob(x), saved.log_prob(x))
