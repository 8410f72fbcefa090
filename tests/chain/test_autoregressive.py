"""Chains of one-dimensional EBMs: densities that integrate to one, bounds, samples, bad input."""

import math
import warnings

import numpy as np
import pandas as pd
import pytest
import torch

import selfnorm as sn
from selfnorm.chain import AutoregressiveEBM, default_options
from selfnorm.errors import DataError, SelfnormWarning
from selfnorm.functional import mixture_lower
from selfnorm.training import TrainingOptions, run

TINY = {"hidden": 24, "blocks": 1, "components": 3, "context": 8, "energy_hidden": 16}
TINY |= {"energy_blocks": 1, "discrete": None}


def crooked(n, seed=0):
    """Skewed, dependent, of different scales; nothing symmetric."""
    g = torch.Generator().manual_seed(seed)
    a = torch.randn(n, generator=g).exp()
    b = 20 + 3 * (a * torch.randn(n, generator=g).abs() + a)
    return torch.stack([a, b], 1)


def rough(dim=2, seed=0, **options):
    """A model with random, far from optimal energy and ``b``, scaled to the crooked data."""
    torch.manual_seed(seed)
    model = AutoregressiveEBM(dim, **{**TINY, **options})
    for layer in (model.energy.last, model.energy.norm_last):
        torch.nn.init.normal_(layer.weight, std=0.4)
    x = crooked(500)
    return model.set_scaling(x if dim == 2 else x[:, :1]).eval()


def fitted(x, steps=150, **options):
    torch.manual_seed(0)
    model = AutoregressiveEBM(x.shape[1], **{**TINY, **options})
    loop = {"batch_size": 256, "max_epochs": 10**6, "lr": 5e-3, "ema": 0.98, "seed": 0}
    task = model.training_task(n_samples=8, polish_steps=60)
    history = run(task, (x,), options=TrainingOptions(**loop, max_steps=steps, progress=False))
    return model.eval(), history


def test_changing_units_shifts_the_density_by_the_log_determinant():
    x = crooked(400)
    scale, shift = torch.tensor([10.0, 0.01]), torch.tensor([5.0, -3.0])
    torch.manual_seed(1)
    one = AutoregressiveEBM(2, **TINY).set_scaling(x)
    torch.manual_seed(1)
    other = AutoregressiveEBM(2, **TINY).set_scaling(x * scale + shift)
    difference = one.log_prob(x) - other.log_prob(x * scale + shift)
    assert torch.allclose(difference, scale.log().sum().expand(400), atol=2e-3)


def test_the_lower_bound_of_several_orderings_does_not_gain_by_noise():
    g = torch.Generator().manual_seed(0)
    exact = torch.randn(6, 50, generator=g)
    noisy = exact + 0.8 * torch.randn(2000, 6, 50, generator=g)  # unbiased for every ordering
    means = torch.stack([mixture_lower(lower, exact) for lower in noisy]).mean(0)
    truth = torch.logsumexp(exact, 0) - math.log(6)
    torch.testing.assert_close(means, truth, atol=0.07, rtol=0)
    naive = (torch.logsumexp(noisy, 1) - math.log(6)).mean(0)
    assert (naive > truth + 0.05).all()  # what a log-mean-exp of the noisy bounds would claim
    # shares by another density only lower it
    assert (mixture_lower(exact, torch.randn(6, 50, generator=g)) < truth).all()


def test_the_energy_makes_up_for_a_proposal_of_the_wrong_shape():
    x = torch.rand(4000, 1) ** 2 * 4  # a hard edge at 0, density 1 / (4 sqrt(x))
    model, _ = fitted(x, steps=300, components=1, family="gaussian", energy_hidden=32)
    fresh = torch.rand(4000, 1) ** 2 * 4
    score = model.training_task(n_samples=8).validate((fresh,))
    assert score["lower"] > score["proposal"] + 0.15
    truth = float((-torch.log(4 * fresh.sqrt())).mean())
    assert score["lower"] < truth + 0.05  # no better than the truth: the bound is a bound


def test_the_proposal_gets_no_gradient_from_snl():
    model = rough()
    terms = model.at_batch((crooked(64),), 8)
    b = model.log_norm(terms.factors)
    loss = sn.functional.snl(terms.minus_energy, terms.log_w, b)
    grads = torch.autograd.grad(loss, list(model.mixture_head.parameters()), allow_unused=True)
    assert all(g is None for g in grads)


def test_a_conditional_chain_follows_its_condition():
    g = torch.Generator().manual_seed(0)
    c = torch.rand(3000, 1, generator=g) * 2 - 1
    x = torch.stack([3 * c[:, 0], -3 * c[:, 0]], 1) + 0.3 * torch.randn(3000, 2, generator=g)
    torch.manual_seed(0)
    model = AutoregressiveEBM(2, condition_dim=1, **TINY)
    options = TrainingOptions(
        batch_size=256, max_epochs=100, max_steps=200, lr=5e-3, progress=False
    )
    run(model.training_task(n_samples=8, polish_steps=20), (x, c), options=options)
    model.eval()
    at = torch.tensor([[0.8], [-0.8]]).repeat_interleave(300, 0)
    samples = model.sample(600, at, seed=0)
    assert float(samples[:300, 0].median()) > 1.5
    assert float(samples[300:, 0].median()) < -1.5
    right, wrong = model.log_prob(x, c).mean(), model.log_prob(x, -c).mean()
    assert float(right - wrong) > 1
    assert model.bounds(x[:200], c[:200], n_samples=100, seed=0).gap < 0.1


def test_support_limits_are_respected():
    x = torch.stack([torch.rand(800) ** 3, torch.rand(800).exp()], 1)
    model, _ = fitted(x, steps=40, support=[(0.0, 1.0), (1.0, None)])
    outside = torch.tensor([[-0.1, 2.0], [0.5, 0.9], [1.1, 2.0]])
    assert torch.isinf(model.log_prob(outside)).all()
    samples = model.sample(500, seed=0)
    assert samples[:, 0].min() >= 0
    assert samples[:, 0].max() <= 1
    assert samples[:, 1].min() >= 1
    # in coordinates where the density is smooth: its edges may be steep
    s, t = torch.linspace(-26, 14, 141).double(), torch.linspace(-24, 8, 141).double()
    a, b = torch.sigmoid(s), 1 + torch.exp(t)
    grid = torch.cartesian_prod(a, b)
    p = model.double().log_prob(grid, normalizer="quadrature", n_nodes=96).exp().view(141, 141)
    inner = torch.trapezoid(p * torch.exp(t), t, dim=1)
    assert abs(float(torch.trapezoid(inner * a * (1 - a), s)) - 1) < 0.05


FIRST = torch.randn(400, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("copy", FIRST),
        ("constant", torch.full((400,), 7.0)),
        ("integers", torch.arange(400) % 5 * 1.0),
        ("cauchy", torch.randn(400) / torch.randn(400)),
        ("huge", torch.randn(400) * 1e12),
        ("two values", (torch.arange(400) % 2) * 1.0),
    ],
)
def test_awkward_columns_give_finite_fits(name, column):
    x = torch.stack([FIRST, column], 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SelfnormWarning)
        model, history = fitted(x, steps=30, discrete="auto")
    assert torch.isfinite(model.log_prob(x)).all(), name
    assert torch.isfinite(model.sample(50, seed=0)).all(), name
    assert history.stopped != "diverged"


def test_the_masses_of_grid_values_add_up_to_one_where_midpoints_do_not():
    share = torch.tensor([0.4, 0.05, 0.25, 0.2, 0.1])
    x = torch.multinomial(share, 4000, replacement=True).float().unsqueeze(1) * 3
    model, _ = fitted(x, steps=200, discrete="auto")
    values = 3 * torch.arange(-8.0, 13.0).unsqueeze(1)
    mass = model.log_mass(values, normalizer="quadrature").exp()
    assert abs(float(mass.sum()) - 1) < 2e-3
    assert (mass[8:13] - share).abs().max() < 0.06
    middle = 3 * model.log_prob(values, normalizer="quadrature").exp()  # the step is 3
    assert abs(float(middle.sum()) - 1) > 0.02
    assert torch.allclose(model.log_mass(values).exp().sum(), mass.sum(), atol=0.02)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: m.log_prob(torch.zeros(3, 4)), DataError, r"\(n, 2\)"),
        (lambda m: m.log_prob(torch.zeros(3, 2), normalizer="magic"), ValueError, "normalizer"),
        (lambda _: AutoregressiveEBM(0), DataError, "at least 1"),
        (lambda _: AutoregressiveEBM(2, orderings=0), DataError, "orderings must be at least 1"),
        (lambda _: AutoregressiveEBM(2, orderings=[[1, 1]]), ValueError, "permutation"),
        (lambda _: AutoregressiveEBM(2, family="cauchy"), ValueError, "family"),
        (lambda m: sn.fit(m, crooked(20) * torch.nan, progress=False), DataError, "NaN"),
        (lambda m: sn.fit(m, crooked(20), objective="nce"), ValueError, "'snl'"),
        (lambda m: m.bounds(crooked(5), n_samples=1), DataError, "at least 2"),
        (lambda m: m.bounds(crooked(0)), DataError, "at least one"),
        (lambda m: m.log_prob(crooked(3), torch.zeros(3, 1)), DataError, "takes no condition"),
    ],
)
def test_bad_calls_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call(rough())


def test_sizes_are_valid_and_larger_tables_get_more_rows_seen_on_a_cpu_and_tiny_ones_few():
    sizes = (20, 200, 1999, 2000, 5000, 15_000, 10**5, 10**6)
    for options in (default_options(n, 7, device) for n in sizes for device in ("cpu", "cuda")):
        AutoregressiveEBM(7, **options.model)
        TrainingOptions(**options.fit)
    fits = [default_options(n, 7).fit for n in sizes]
    seen = [fit["max_steps"] * fit["batch_size"] for fit in fits]
    assert seen == sorted(seen)
    assert fits[1]["max_steps"] < 100
    assert seen[-1] < 600_000


def test_a_double_precision_model_trains_samples_and_bounds_in_double(recwarn):
    x = crooked(200).double()
    model = AutoregressiveEBM(2, orderings=2, support=[(0.0, None), (None, None)], **TINY).double()
    history = sn.fit(
        model, x, max_steps=16, batch_size=50, progress=False, task_options={"polish_steps": 2}
    )
    drawn = model.sample(30, seed=0)
    for log_p in (model.log_prob(drawn), model.log_prob(drawn, normalizer="quadrature")):
        assert drawn.dtype == log_p.dtype == torch.float64
        assert torch.isfinite(log_p).all()
    assert math.isfinite(history.final["gap"])
    assert not [w for w in recwarn if "requires_grad" in str(w.message)]


def test_proposals_start_inside_the_interval_of_a_repeated_value():
    """Half of the rows share a value, spread over 1 % of a deviation: components fit in there."""
    x = torch.randn(4000, 1, generator=torch.Generator().manual_seed(0)).exp()
    x[:2000] = 0.7
    torch.manual_seed(0)
    model = AutoregressiveEBM(1, hidden=8, components=10, context=4, energy_hidden=8)
    with torch.no_grad():
        model.mixture_head.weight.zero_()  # the biases alone: the start at the marginal
    model.set_scaling(x)
    rows = model.columns.dequantise(x)
    spread = torch.distributions.LogNormal(0.0, 1.0).log_prob(x)
    narrow = -torch.log(model.columns.atom_width).expand_as(x)
    exact = math.log(0.5) + torch.where(x == 0.7, narrow, spread)
    assert float(model.log_prob(rows).mean()) > float(exact.mean()) - 0.3


# -- rows and conditions in every form ------------------------------------------------------------

ROWS = torch.randn(12, 2, generator=torch.Generator().manual_seed(0)).exp()
GIVEN = torch.linspace(-1, 1, 12)[:, None]


def chain(**options):
    torch.manual_seed(0)
    return AutoregressiveEBM(2, **TINY | {"discrete": "auto"}, **options).set_scaling(ROWS).eval()


@pytest.mark.parametrize(
    "form",
    [np.asarray, torch.Tensor.tolist, torch.Tensor.double, lambda x: pd.DataFrame(x.numpy())],
)
def test_rows_and_conditions_in_every_form_give_the_same_numbers(form):
    model, conditional = chain(orderings=np.int64(2)), chain(condition_dim=1)
    for ask in (model.log_prob, model.log_mass):
        assert torch.equal(ask(form(ROWS)), ask(ROWS))
    at_given = conditional.log_prob(ROWS, GIVEN)
    assert torch.equal(conditional.log_prob(form(ROWS), form(GIVEN)), at_given)
    drawn = conditional.sample(12, form(GIVEN), seed=0)
    assert torch.equal(drawn, conditional.sample(12, GIVEN, seed=0))
    expected = model.bounds(ROWS, n_samples=20, seed=0).lower
    assert sn.evaluate(model, form(ROWS), n_samples=20, seed=0).lower == expected
    expected = conditional.bounds(ROWS, GIVEN, n_samples=20, seed=0).lower
    pair = form(ROWS), form(GIVEN)
    assert sn.evaluate(conditional, pair, n_samples=20, seed=0).lower == expected


@pytest.mark.parametrize("count", [1, 6, 24])
def test_conditions_of_another_number_are_refused_however_rows_are_cut(count):
    model, given = chain(condition_dim=1), GIVEN.repeat(2, 1)[:count]
    with pytest.raises(DataError, match=r"expected a condition of shape \(12, 1\)"):
        model.log_prob(ROWS, given, chunk_size=6)
    with pytest.raises(DataError, match=r"expected a condition of shape \(12, 1\)"):
        model.bounds(ROWS, given, n_samples=20, chunk_size=6)
