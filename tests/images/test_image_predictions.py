"""Laws of labels given images: exact against closed forms, grids, temperature, several labels."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from selfnorm.errors import DataError, SelfnormWarning
from selfnorm.evaluation import calibration
from selfnorm.images import GridLaw, ImageRegressor
from selfnorm.images.grid_law import label_grid, log_densities
from selfnorm.images.labels import LabelSpace
from selfnorm.images.model import ImageFeatures, LawModel, MeanHead
from tests.images.image_models import bright_images, fitted_model, quadratic_model, small_model


@pytest.fixture(scope="module")
def fitted():
    return fitted_model()


def test_grid_law_of_a_known_model():
    space = LabelSpace((30.0,), (4.0,), (0.5,), (60.5,), 1.0)
    h = torch.tensor([[-1.0], [0.0], [1.5]])
    grid, width = label_grid(space)
    law = GridLaw.of(log_densities(quadratic_model().heads(), h, grid, space), grid, width)
    truth = torch.distributions.Normal(30.0 + 4.0 * h.double() / 2, 4.0 / math.sqrt(2))
    torch.testing.assert_close(law.pdf, truth.log_prob(grid).exp(), atol=1e-7, rtol=1e-4)
    torch.testing.assert_close((law.pdf * width).sum(1), torch.ones(3, dtype=torch.float64))
    torch.testing.assert_close(law.mean, truth.mean[:, 0], atol=1e-4, rtol=0)
    # Z = integral of the Gaussian base times exp(-E): N(h; 0, 2) sqrt(2 pi).
    log_z = torch.distributions.Normal(0.0, math.sqrt(2)).log_prob(h[:, 0])
    expected = log_z.double() + 0.5 * math.log(2 * math.pi)
    torch.testing.assert_close(law.log_norm, expected, atol=1e-5, rtol=0)
    at = torch.tensor([27.0, 31.3, 36.2], dtype=torch.float64)
    cdf = truth.cdf(at[:, None])[:, 0]
    torch.testing.assert_close(law.cdf_at(at), cdf, atol=1e-4, rtol=0)
    torch.testing.assert_close(law.quantile(cdf[:, None])[:, 0], at, atol=1e-2, rtol=0)
    ends = law.central_interval(0.9)
    torch.testing.assert_close(
        ends[:, 1] - ends[:, 0],
        torch.full((3,), 2 * 1.64485 * 4 / math.sqrt(2)).double(),
        rtol=1e-3,
        atol=0,
    )
    reference = calibration.crps_from_cdf(at, grid + width / 2, law.cdf)
    torch.testing.assert_close(law.crps(at), reference, rtol=2e-2, atol=0)


def test_exact_is_the_closed_form_at_the_labels(fitted):
    """A regressor with the known energy inside: the Jacobian of the labels' scale included."""
    x, y = bright_images(50, seed=5)
    model = small_model()
    model.space_, model.flat_target_, model.channels_ = fitted.space_, True, 3
    model.model_ = quadratic_model()
    model.model_.features = ImageFeatures(nn.Sequential(nn.Flatten(), nn.Linear(192, 1))).eval()
    h = model.features(x).double()
    center, scale = model.space_.center[0], model.space_.scale[0]
    truth = torch.distributions.Normal(center + scale * h[:, 0] / 2, scale / math.sqrt(2))
    expected = truth.log_prob(torch.from_numpy(y)).detach().numpy()
    np.testing.assert_allclose(model.log_prob(x, y), expected, atol=1e-3)
    bounds = model.bounds(x, y, n_samples=20_000, seed=0)
    assert abs(bounds.upper - expected.mean()) < 0.02


def test_a_new_model_is_its_proposal():
    x, y = bright_images(60)
    model = small_model()
    model.prepare(torch.from_numpy(x), torch.from_numpy(y)[:, None])
    model.flat_target_ = True
    heads, h = model.model_.eval().heads(), model.features(x)
    z = model.space_.standardise(torch.from_numpy(y)[:, None]).float()
    alone = heads.law(h, h).log_prob(z).double() - model.space_.log_scale
    np.testing.assert_allclose(model.log_prob(x, y), alone.detach().numpy(), atol=1e-4)
    np.testing.assert_allclose(model.log_prob(x, y, "learned"), alone.detach().numpy(), atol=1e-5)


def test_refining_the_grid_changes_nothing(fitted):
    x, _ = bright_images(40, seed=7)
    h, heads = fitted.features(x), fitted.model_.heads()
    norms = []
    for refine in (1, 3):
        grid, width = fitted.grid(refine)
        norms.append(GridLaw.of(log_densities(heads, h, grid, fitted.space_), grid, width).log_norm)
    torch.testing.assert_close(norms[0], norms[1], atol=2e-4, rtol=0)


def narrow_law(scale):
    """N(30, (4 scale)^2) for every image, continuous labels between 0 and 60."""
    model = small_model("l2")
    model.space_, model.flat_target_ = LabelSpace((30.0,), (4.0,), (0.0,), (60.0,), 0.0), True
    head = MeanHead(1, 1)
    nn.init.zeros_(head.means.weight)
    nn.init.constant_(head.means.bias, 0.003)
    head.scale.fill_(scale)
    model.model_ = LawModel(ImageFeatures(nn.Sequential(nn.Flatten(), nn.Linear(12, 1))), head)
    return model


def test_the_grid_is_as_fine_as_the_laws_need():
    x = np.zeros((3, 3, 2, 2), dtype=np.uint8)
    wide, narrow = narrow_law(0.5), narrow_law(0.001)
    assert wide.refine_grid(x) < 1e-3
    assert wide.refine_ == 1
    assert abs(float(narrow.law(x).log_norm[0])) > 0.1  # the plain grid misses or doubles the peak
    narrow.refine_grid(x)
    assert narrow.refine_ > 4
    assert abs(float(narrow.law(x).log_norm[0])) < 1e-3
    with pytest.warns(SelfnormWarning, match="narrower than the finest quadrature grid"):
        narrow_law(1e-5).refine_grid(x)


def test_a_wide_label_range_does_not_coarsen_continuous_labels():
    rng = np.random.default_rng(0)
    level = rng.uniform(0, 1, 300)
    x = (255 * level[:, None, None, None] * np.ones((1, 3, 8, 8))).astype(np.uint8)
    y = 5 * level + rng.normal(0, 0.05, 300)
    torch.manual_seed(0)
    model = small_model(label_range=(-180.0, 180.0), max_epochs=15)
    model.fit(x[:240], y[:240], val=(x[240:], y[240:]))
    assert model.space_.high[0] < 6.5
    bounds = model.bounds(x, y, n_samples=1000, seed=0)
    assert abs(model.log_prob(x, y).mean() - bounds.upper) < 0.03


def test_outside_a_uniform_model_there_is_no_density():
    x, y = bright_images(80)
    model = small_model(proposal="uniform", max_epochs=1).fit(x, y)
    inside = model.log_prob(x[:2], [20.0, 500.0])
    assert np.isfinite(inside[0])
    assert inside[1] == -np.inf


def bent_model(temperature, seed=0):
    """A known law, N(h / 2, 1 / 2) in standardised units, and labels of its tempered form."""
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 255, (800, 3, 4, 4), dtype=np.uint8)
    model = small_model()
    model.space_, model.flat_target_ = LabelSpace((30.0,), (4.0,), (0.5,), (60.5,), 1.0), True
    model.model_ = quadratic_model()
    torch.manual_seed(0)
    model.model_.features = ImageFeatures(nn.Sequential(nn.Flatten(), nn.Linear(48, 1))).eval()
    h = model.features(x).double()[:, 0].numpy()
    y = 30.0 + 4.0 * (h / 2 + np.sqrt(0.5 * temperature) * rng.normal(size=800))
    return model, x, y, h


@pytest.mark.parametrize("bent", [0.5, 1.4, 2.5])
def test_temperature_is_the_one_that_was_bent_in(bent):
    """Laws made too narrow or too wide by hand are put right, and stay normalised."""
    model, x, y, h = bent_model(bent)
    before = model.log_prob(x, y).mean()
    found = model.calibrate(x, y)
    assert found == pytest.approx(bent, rel=0.12)
    truth = torch.distributions.Normal(30 + 2 * torch.from_numpy(h), 4 * math.sqrt(0.5 * found))
    expected = truth.log_prob(torch.from_numpy(y)).numpy()
    np.testing.assert_allclose(model.log_prob(x, y), expected, atol=2e-3)
    assert model.log_prob(x, y).mean() > before
    assert abs(calibration.central_coverage(model.pit(x, y), 0.9) - 0.9) < 0.03
    # No other temperature is better, and the law is one: its mass is 1.
    best = model.log_prob(x, y).mean()
    for other in (0.99 * found, 1.01 * found):
        model.temperature_ = other
        assert model.log_prob(x, y).mean() < best
    grid, density = model.density(x[0])
    assert abs(np.sum(density) * (grid[1] - grid[0]) - 1) < 1e-6


def test_a_temperature_needs_labels_with_a_density():
    x, y = bright_images(80)
    model = small_model(proposal="uniform", max_epochs=1).fit(x, y)
    with pytest.raises(DataError, match=r"label 1, \[500\.0\], has no density"):
        model.calibrate(x[:2], [20.0, 500.0])


@pytest.mark.parametrize("proposal", ["mdn-2", "gaussian", "uniform"])
def test_three_labels(proposal):
    x, y = bright_images(300, dim=3)
    model = small_model(proposal=proposal, max_epochs=3, n_samples=32)
    model.fit(x[:240], y[:240], val=(x[240:], y[240:]))
    assert model.predict(x[:7]).shape == (7, 3)
    assert model.predict_interval(x[:7]).shape == (7, 2, 3)
    assert (
        model.predict_quantiles(x[:5], (0.1, 0.9))[:, 0]
        < model.predict_quantiles(x[:5], (0.1, 0.9))[:, 1]
    ).all()
    bounds = model.bounds(x[:20], y[:20], n_samples=500, seed=0)
    assert bounds.lower <= bounds.upper + 1e-9
    assert model.sample(x[:4], 6, seed=0).shape == (4, 6, 3)
    with pytest.raises(DataError, match="quadrature needs one label"):
        model.law(x[:2])
    with pytest.raises(DataError, match="quadrature is for one label"):
        model.log_prob(x[:2], y[:2])
    assert np.isfinite(model.log_prob(x[:2], y[:2], "learned")).all()


def test_several_labels_are_predicted_in_chunks(monkeypatch):
    x, y = bright_images(60, dim=3)
    model = small_model(max_epochs=1).fit(x, y)
    whole = model.predict(x)
    sizes = []
    weighted = ImageRegressor._weighted
    monkeypatch.setattr(
        ImageRegressor, "_weighted", lambda self, h: (sizes.append(len(h)), weighted(self, h))[1]
    )
    monkeypatch.setattr("selfnorm.images.predictions._ROWS_AT_ONCE", 4096 * 25)
    parts = model.predict(x)
    assert sizes == [25, 25, 10]
    # Draws differ between chunks; the means agree to their Monte Carlo error.
    np.testing.assert_allclose(parts, whole, atol=1.5)


def test_a_law_on_the_range_has_no_density_outside_on_a_grid_of_ones_own():
    """Without a base an energy goes on outside of the uniform proposal's range."""
    x, y = bright_images(60)
    model = small_model(
        proposal="uniform", energy="paper", base=None, proposal_loss="both", max_epochs=1
    ).fit(x, y)
    grid = np.linspace(y.min() - 60.0, y.max() + 60.0, 20_001)
    density = model.density(x[0], grid=grid)[1]
    assert np.trapezoid(density, grid) == pytest.approx(1.0, abs=2e-3)
    low, high = model.space_.grid_range()
    assert not density[(grid < low) | (grid > high)].any()
