"""ImageRegressor: learning, laws against closed forms, temperature, several labels, files."""

import math

import numpy as np
import pytest
import torch
from sklearn.exceptions import NotFittedError
from torch import nn

from selfnorm.errors import DataError, ModelFileError, ProposalError, SelfnormWarning
from selfnorm.evaluation import calibration
from selfnorm.images import WITHOUT_ENERGY, EnergyHead, ImageRegressor, dequantised
from selfnorm.images.labels import LabelSpace
from selfnorm.images.model import GaussianHead, ImageEBM, NoEnergy
from tests.images.image_models import (
    Small,
    bright_images,
    fitted_model,
    prepared_task,
    quadratic_model,
    small_model,
    with_inner_model,
)

COUNTS = LabelSpace((30.0,), (4.0,), (0.5,), (60.5,), 1.0)


class Both(nn.Module):
    def forward(self, x):
        return x.flatten(1), x


@pytest.fixture(scope="module")
def fitted():
    return fitted_model()


def test_snl_learns_both_modes_and_says_so(fitted):
    x, y = bright_images(100, seed=2)
    labels = dequantised(torch.from_numpy(y)[:, None], 1.0)
    exact = fitted.log_prob(x, labels)
    # The truth: the brightness gives 20 level, a coin of 1/3 the mode, rounding one step.
    assert exact.mean() > -1.6
    bounds = fitted.bounds(x, labels, n_samples=1000, seed=0)
    assert abs(bounds.upper - exact.mean()) < 0.03
    assert bounds.gap < 0.05
    # One image: mass near both modes, little between.
    dark = bright_images(1, seed=3)[0][0]
    grid, density = fitted.density(dark)
    assert abs(np.sum(density) * (grid[1] - grid[0]) - 1) < 1e-6
    own, at = fitted.density(dark, grid[::7])
    np.testing.assert_allclose(at, density[::7], rtol=1e-4, atol=1e-7)
    assert own.shape == at.shape
    pit = fitted.pit(x, labels)
    assert abs(calibration.central_coverage(pit, 0.9) - 0.9) < 0.06
    ends = fitted.predict_interval(x, 0.9)
    inside = (labels[:, 0].numpy() >= ends[:, 0]) & (labels[:, 0].numpy() <= ends[:, 1])
    assert abs(inside.mean() - calibration.central_coverage(pit, 0.9)) < 1e-6
    drawn = fitted.sample(x[:50], 400, seed=0)
    assert drawn.shape == (50, 400)
    np.testing.assert_allclose(drawn.mean(1), fitted.predict(x[:50]), atol=1.5)
    assert fitted.score(x, y) == pytest.approx(float(np.mean(fitted.log_prob(x, y))))


@pytest.mark.parametrize("objective", WITHOUT_ENERGY)
def test_laws_without_energy(objective):
    x, y = bright_images(300)
    model = small_model(objective, max_epochs=15).fit(x[:240], y[:240], val=(x[240:], y[240:]))
    assert isinstance(model.model_.energy, NoEnergy)
    assert np.isfinite(model.log_prob(x, y)).all()
    law = model.distribution(x)
    assert float(law.log_norm.abs().max()) < 1e-3  # normalised already
    assert np.abs(model.predict(x) - y).mean() < 8.0
    with pytest.raises(DataError, match="nothing to bound"):
        model.bounds(x, y)
    if objective == "l2":  # the deviation is that of the held-out residuals
        noisy = dequantised(torch.from_numpy(y[240:])[:, None], 1.0)[:, 0].numpy()
        residual = np.sqrt(np.mean((model.predict(x[240:]) - noisy) ** 2))
        found = float(model.model_.proposal.scale) * model.space_.scale[0]
        np.testing.assert_allclose(found, residual, rtol=0.02)


def test_the_backbone_given_stays_as_it_was_and_a_second_fit_begins_anew():
    x, y = bright_images(120)
    backbone = Small()
    before = {k: v.clone() for k, v in backbone.state_dict().items()}
    model = ImageRegressor(backbone=backbone, max_epochs=2, random_state=0, n_samples=8).fit(x, y)
    said = model.predict(x[:5])
    for name, value in backbone.state_dict().items():
        assert torch.equal(value, before[name]), name
    np.testing.assert_array_equal(model.fit(x, y).predict(x[:5]), said)


def test_a_backbone_in_double_precision():
    x, y = bright_images(30)
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(192, 4))
    found = small_model(backbone=backbone, max_epochs=1).fit(x, y)
    doubled = small_model(backbone=backbone.double(), max_epochs=1).fit(x, y)
    assert np.array_equal(found.predict(x), doubled.predict(x))
    assert backbone[1].weight.dtype == torch.float64  # it is the user's


@pytest.mark.parametrize("proposal", ["uniform", "mdn-4"])
def test_learning_with_anchors_and_files(proposal, tmp_path):
    x, y = bright_images(360)
    torch.manual_seed(0)
    # numbers of a grid search are saved as Python's own
    head = EnergyHead(anchors=np.int64(16))
    model = small_model("snl", proposal, energy=head, n_samples=np.int64(16), max_epochs=6)
    model.fit(x[:300], y[:300], val=(x[300:], y[300:]))
    labels = dequantised(torch.from_numpy(y[300:])[:, None], 1.0)
    exact = model.log_prob(x[300:], labels)
    bounds = model.bounds(x[300:], labels, n_samples=2000, seed=0)
    assert abs(bounds.upper - exact.mean()) < 0.02
    assert bounds.gap < 0.02
    learned = model.log_prob(x[300:], labels, method="learned")
    assert abs(learned - exact).max() < 0.5
    model.save(tmp_path / "model")
    again = ImageRegressor.load(tmp_path / "model", backbone=Small())
    assert (again.energy, again.n_samples) == (EnergyHead(anchors=16), 16)
    np.testing.assert_array_equal(again.log_prob(x[300:], labels, method="learned"), learned)


def test_a_folder_wants_the_backbone_it_was_saved_with(tmp_path, fitted):
    fitted.save(tmp_path / "own")
    with pytest.raises(ModelFileError, match="pass backbone="):
        ImageRegressor.load(tmp_path / "own")
    x, y = np.zeros((6, 1, 16, 16), dtype=np.uint8), np.arange(6) / 3.0
    resnet = ImageRegressor(max_epochs=1, n_samples=4, random_state=0).fit(x, y)
    resnet.save(tmp_path / "resnet")
    again = ImageRegressor.load(tmp_path / "resnet")
    np.testing.assert_array_equal(again.log_prob(x, y), resnet.log_prob(x, y))
    for name, backbone in (("own", Small(17)), ("own", nn.Flatten()), ("resnet", Small())):
        with pytest.raises(ModelFileError, match="do not fit together"):
            ImageRegressor.load(tmp_path / name, backbone=backbone)


def test_law_on_the_grid_of_a_known_model():
    model = with_inner_model(quadratic_model(), COUNTS, 48)
    x = np.random.default_rng(0).integers(0, 255, (3, 3, 4, 4), dtype=np.uint8)
    h, law = model.features(x), model.distribution(x)
    truth = torch.distributions.Normal(30.0 + 4.0 * h.double() / 2, 4.0 / math.sqrt(2))
    expected = truth.log_prob(law.middle).exp()
    torch.testing.assert_close(law.pdf, expected, atol=1e-7, rtol=1e-4)
    torch.testing.assert_close(law.mean, truth.mean[:, 0], atol=1e-4, rtol=0)
    # Z = integral of the Gaussian base times exp(-E): N(h; 0, 2) sqrt(2 pi).
    log_z = torch.distributions.Normal(0.0, math.sqrt(2)).log_prob(h[:, 0])
    expected = log_z.double() + 0.5 * math.log(2 * math.pi)
    torch.testing.assert_close(law.log_norm, expected, atol=1e-5, rtol=0)
    at = torch.tensor([27.0, 31.3, 36.2], dtype=torch.float64)
    cdf = truth.cdf(at[:, None])[:, 0]
    np.testing.assert_allclose(model.pit(x, at), cdf, atol=1e-4)
    torch.testing.assert_close(law.quantile(cdf[:, None])[:, 0], at, atol=1e-2, rtol=0)
    width = np.diff(model.predict_interval(x, 0.9))
    np.testing.assert_allclose(width, 2 * 1.64485 * 4 / math.sqrt(2), rtol=1e-3)
    exact = truth.log_prob(at[:, None])[:, 0].detach().numpy()
    np.testing.assert_allclose(model.log_prob(x, at), exact, atol=1e-3)
    assert abs(model.bounds(x, at, n_samples=20_000, seed=0).upper - exact.mean()) < 0.05


def test_a_new_model_is_its_proposal():
    x, y = bright_images(48)
    model = small_model()
    z = prepared_task(model)[1][1]
    model.flat_target_ = True
    h = model.features(x)
    alone = model.model_.proposal_at(h, h).log_prob(z).double() - model.space_.log_scale
    np.testing.assert_allclose(model.log_prob(x, y), alone.detach().numpy(), atol=1e-4)
    np.testing.assert_allclose(model.log_prob(x, y, "learned"), alone.detach().numpy(), atol=1e-5)


def narrow_law(scale):
    """N(30, (4 scale)^2) for every image, continuous labels between 0 and 60."""
    head = GaussianHead(1, 1)
    nn.init.zeros_(head.means.weight)
    nn.init.constant_(head.means.bias, 0.003)
    head.scale.fill_(scale)
    inner = ImageEBM(NoEnergy(), head, base="proposal")
    return with_inner_model(inner, LabelSpace((30.0,), (4.0,), (0.0,), (60.0,), 0.0), 12, "l2")


def test_the_grid_is_as_fine_as_the_laws_need():
    x = np.zeros((3, 3, 2, 2), dtype=np.uint8)
    wide, narrow = narrow_law(0.5), narrow_law(0.001)
    assert wide.refine_grid(x) < 1e-3
    assert wide.refine_ == 1
    assert (
        abs(float(narrow.distribution(x).log_norm[0])) > 0.1
    )  # the plain grid misses or doubles the peak
    narrow.refine_grid(x)
    assert narrow.refine_ > 4
    assert abs(float(narrow.distribution(x).log_norm[0])) < 1e-3
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
    some = x[:80], y[:80]
    bounds = model.bounds(*some, n_samples=1000, seed=0)
    assert abs(model.log_prob(*some).mean() - bounds.upper) < 0.03


@pytest.mark.parametrize(
    "energy", ["steps", EnergyHead("paper", base=None, proposal_loss="both")], ids=str
)
def test_outside_a_uniform_model_there_is_no_density(energy):
    """Without a base an energy goes on outside of the uniform proposal's range."""
    x, y = bright_images(80)
    model = small_model(proposal="uniform", energy=energy, max_epochs=1).fit(x, y)
    inside = model.log_prob(x[:2], [20.0, 500.0])
    assert np.isfinite(inside[0])
    assert inside[1] == -np.inf
    grid = np.linspace(y.min() - 60.0, y.max() + 60.0, 20_001)
    density = model.density(x[0], grid=grid)[1]
    assert np.trapezoid(density, grid) == pytest.approx(1.0, abs=2e-3)
    low, high = model.space_.grid_range()
    assert not density[(grid < low) | (grid > high)].any()
    if energy == "steps":
        with pytest.raises(DataError, match=r"label 1, \[500\.0\], has no density"):
            model.calibrate(x[:2], [20.0, 500.0])


@pytest.mark.parametrize("bent", [0.5, 1.4, 2.5])
def test_temperature_is_the_one_that_was_bent_in(bent):
    """Laws made too narrow or too wide by hand are put right, and stay normalised."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 255, (800, 3, 4, 4), dtype=np.uint8)
    model = with_inner_model(quadratic_model(), COUNTS, 48)
    h = model.features(x).double()[:, 0].numpy()
    y = 30.0 + 4.0 * (h / 2 + np.sqrt(0.5 * bent) * rng.normal(size=800))
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


def test_a_temperature_out_of_reach_is_told():
    rng = np.random.default_rng(0)
    x = rng.integers(0, 255, (200, 3, 4, 4), dtype=np.uint8)
    for bent, end in ((0.1, 0.25), (9.0, 4.0)):
        model = with_inner_model(quadratic_model(), COUNTS, 48)
        h = model.features(x).double()[:, 0].numpy()
        y = 30.0 + 4.0 * (h / 2 + np.sqrt(0.5 * bent) * rng.normal(size=200))
        with pytest.warns(SelfnormWarning, match="the best temperature lies beyond"):
            assert model.calibrate(x, y.clip(1, 59)) == pytest.approx(end, rel=0.002)


@pytest.mark.parametrize("proposal", ["mdn-2", "gaussian", "uniform"])
def test_three_labels(proposal):
    x, y = bright_images(300, dim=3)
    model = small_model(proposal=proposal, max_epochs=3, n_samples=32)
    model.fit(x[:240], y[:240], val=(x[240:], y[240:]))
    assert model.predict(x[:7]).shape == (7, 3)
    assert model.predict_interval(x[:7]).shape == (7, 2, 3)
    low, high = np.moveaxis(model.predict_quantiles(x[:5], (0.1, 0.9)), 1, 0)
    assert (low < high).all()
    bounds = model.bounds(x[:20], y[:20], n_samples=500, seed=0)
    assert bounds.lower <= bounds.upper + 1e-9
    drawn = model.sample(x[:4], 600, seed=0)
    assert drawn.shape == (4, 600, 3)
    error = np.abs(drawn.mean(1) - model.predict(x[:4])) / drawn.std(1)
    assert error.max() < 0.3  # at most a few standard errors of so many weighted draws
    with pytest.raises(DataError, match="quadrature needs one label"):
        model.distribution(x[:2])
    with pytest.raises(DataError, match="quadrature is for one label"):
        model.log_prob(x[:2], y[:2])
    assert np.isfinite(model.log_prob(x[:2], y[:2], "learned")).all()


def test_several_labels_are_predicted_in_chunks_and_have_no_anchors(monkeypatch):
    x, y = bright_images(60, dim=3)
    with pytest.warns(SelfnormWarning, match="anchors are for one label only, here are 3"):
        model = small_model(energy=EnergyHead(anchors=8), max_epochs=1).fit(x, y)
    assert model.model_.anchors == 0
    whole = model.predict(x)
    monkeypatch.setattr("selfnorm.images.regressor._DRAWN_AT_ONCE", 25)
    # Draws differ between chunks; the means agree to their Monte Carlo error.
    np.testing.assert_allclose(model.predict(x), whole, atol=1.5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"objective": "flow"}, "objective must be one of"),
        ({"energy": "big"}, "energy must be"),
        ({"n_samples": 0}, "n_samples must be at least 1"),
        ({"backbone": "vit"}, "backbone must be 'resnet18' or a module"),
        ({"objective": "mdn", "proposal": "uniform"}, "fits a mixture to each"),
        ({"proposal": "flow"}, "no proposal is called 'flow'"),
        *(
            ({"backbone": part}, r"map \(n, c, h, w\) to \(n, features\).*nn.Flatten")
            for part in (nn.AdaptiveAvgPool2d(1), nn.Sequential(nn.Flatten(0)), Both())
        ),
    ],
)
def test_refusals_of_parameters(options, words):
    with pytest.raises((DataError, ProposalError), match=words):
        small_model(**options).fit(*bright_images(6))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x, y: (x, y[:-1]), "40 images but 39 labels"),
        (lambda x, y: (x.transpose(0, 2, 3, 1), y), "1 or 3 channels"),
        (lambda x, y: (x.astype(np.float32), y), "between 0 and 1"),
        (lambda x, y: (x, np.where(y > 20, np.nan, y)), "the labels holds .* NaN"),
        (lambda x, y: (x, y + 1j), "the labels must hold real numbers"),
        (lambda x, y: (x[:1], y[:1]), "too few images: 0 to train on and 1 held out"),
        (lambda x, y: (x[:2], y[:2]), "too few images: 1 to train on and 1 held out"),
        (lambda x, _: (x[:0], []), "no images"),
    ],
)
def test_refusals_of_data(change, words):
    with pytest.raises(DataError, match=words):
        small_model().fit(*change(*bright_images(40)))


def test_labels_outside_the_range_given():
    x, y = bright_images(40)
    model, told = small_model(label_range=(0.0, 20.0)), r"lies outside the given range \[0, 20\]"
    with pytest.raises(DataError, match=f"training label .*{told}"):
        model.fit(x, y)
    dark = y <= 20
    with pytest.raises(DataError, match=f"held-out label .*{told}"):
        model.fit(x[dark], y[dark], val=(x, y))


def test_refusals_of_a_fitted_model(fitted):
    x, y = bright_images(10)
    with pytest.raises(DataError, match="coverage"):
        fitted.predict_interval(x, 1.0)
    with pytest.raises(DataError, match="method must be"):
        fitted.log_prob(x, y, "guess")
    with pytest.raises(DataError, match="quantile levels"):
        fitted.predict_quantiles(x, (0.0,))
    for call in (fitted.calibrate, fitted.log_prob):
        with pytest.raises(DataError, match="no images"):
            call(x[:0], [])
    for call in (small_model().predict, small_model().save):
        with pytest.raises(NotFittedError, match="not fitted yet"):
            call(x)
    with pytest.raises(NotFittedError, match="not fitted yet"):
        small_model().log_prob(x, y)


def test_a_density_is_of_one_image(fitted):
    x, _ = bright_images(3, seed=1)
    expected = fitted.distribution(x[:1]).pdf[0].numpy()
    for one in (x[0], x[:1], torch.from_numpy(x[0]), torch.from_numpy(x[:1])):
        np.testing.assert_allclose(fitted.density(one)[1], expected)
    with pytest.raises(DataError, match="for one image, got 2"):
        fitted.density(x[:2])


@pytest.mark.parametrize("layers", [(), (nn.Linear(192, 8),)])
def test_images_of_a_size_that_the_backbone_cannot_take(layers, fitted):
    x, y = bright_images(40)
    model = small_model(backbone=nn.Sequential(nn.Flatten(), *layers), max_epochs=1).fit(x, y)
    with pytest.raises(DataError, match="4 x 6 pixels: this model was fitted on 8 x 8"):
        model.predict(x[:2, :, :4, :6])
    assert fitted.predict(x[:, :, :4, :6]).shape == (40,)  # it takes all sizes


def test_labels_of_another_number(fitted):
    """One column for three labels was used for each of them without a word."""
    x, y = bright_images(60)
    three = np.stack([y, y, y], axis=1)
    for call in (fitted.log_prob, fitted.pit, fitted.bounds, fitted.calibrate, fitted.score):
        with pytest.raises(DataError, match="the labels has 3 columns, expected 1"):
            call(x, three)
    with pytest.raises(DataError, match="the labels has 1 columns, expected 3"):
        small_model().fit(x, three, val=(x, y))
