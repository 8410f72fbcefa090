"""ImageRegressor: learning, baselines, repeatability, files, refusals."""

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import NotFittedError

from selfnorm.errors import DataError, ModelFileError, SelfnormWarning
from selfnorm.evaluation import calibration
from selfnorm.images import LAWS, GridLaw, ImageRegressor, dequantised
from selfnorm.images.grid_law import label_grid, log_densities
from selfnorm.images.model import LawModel, MeanHead
from tests.images.image_models import Small, bright_images, fitted_model, small_model


@pytest.fixture(scope="module")
def fitted():
    return fitted_model()


def test_snl_learns_both_modes_and_says_so(fitted):
    x, y = bright_images(200, seed=2)
    labels = dequantised(torch.from_numpy(y)[:, None], 1.0)
    exact = fitted.log_prob(x, labels)
    # The truth: the brightness gives 20 level, a coin of 1/3 the mode, rounding one step.
    assert exact.mean() > -1.6
    bounds = fitted.bounds(x, labels, n_samples=1000, seed=0)
    assert abs(bounds.upper - exact.mean()) < 0.03
    assert bounds.gap < 0.05
    # One image: mass near both modes, little between.
    dark = bright_images(1, seed=3)
    grid, density = fitted.density(dark[0][0])
    mass = np.sum(density) * (grid[1] - grid[0])
    assert abs(mass - 1) < 1e-6
    own, at = fitted.density(dark[0][0], grid[::7])
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


def test_scikit_learn_can_copy_and_score_it(fitted):
    again = clone(fitted)
    assert again.get_params().keys() == fitted.get_params().keys()
    assert again.max_epochs == fitted.max_epochs
    assert again.model_ is None
    x, y = bright_images(20, seed=2)
    assert fitted.score(x, y) == pytest.approx(float(np.mean(fitted.log_prob(x, y))))


@pytest.mark.parametrize("objective", LAWS)
def test_laws_without_energy(objective):
    x, y = bright_images(300)
    model = small_model(objective, max_epochs=15).fit(x[:240], y[:240], val=(x[240:], y[240:]))
    assert isinstance(model.model_, LawModel)
    exact = model.log_prob(x, y)
    h, heads = model.features(x), model.model_.heads()
    grid, width = label_grid(model.space_, margin=3.0)
    law = GridLaw.of(log_densities(heads, h, grid, model.space_), grid, width)
    assert float(law.log_norm.abs().max()) < 1e-3  # normalised already
    assert np.isfinite(exact).all()
    assert np.abs(model.predict(x) - y).mean() < 8.0
    with pytest.raises(DataError, match="nothing to bound"):
        model.bounds(x, y)


def test_l2_takes_its_deviation_from_the_held_out_residuals():
    x, y = bright_images(300)
    model = small_model("l2", max_epochs=15).fit(x[:200], y[:200], val=(x[200:], y[200:]))
    head = model.model_.proposal
    assert isinstance(head, MeanHead)
    noisy = dequantised(torch.from_numpy(y[200:])[:, None], 1.0)[:, 0].numpy()
    residual = np.sqrt(np.mean((model.predict(x[200:]) - noisy) ** 2))
    np.testing.assert_allclose(float(head.scale) * model.space_.scale[0], residual, rtol=0.02)


def test_literal_protocol_keeps_integers():
    x, y = bright_images(100)
    model = small_model(dequantise=False, max_epochs=1).fit(x, y)
    assert model.space_.step == 0.0
    assert small_model(max_epochs=1).fit(x, y).space_.step == 1.0
    assert small_model(max_epochs=1).fit(x, y + 0.25 * (y > 20)).space_.step == 0.0


def test_the_backbone_given_stays_as_it_was():
    x, y = bright_images(120)
    torch.manual_seed(0)
    backbone = Small()
    before = {k: v.clone() for k, v in backbone.state_dict().items()}
    options = {"backbone": backbone, "max_epochs": 2, "random_state": 0, "n_samples": 8}
    first = ImageRegressor(**options).fit(x, y)
    said = first.predict(x[:5])
    for name, value in backbone.state_dict().items():
        assert torch.equal(value, before[name]), name
    second = ImageRegressor(**options).fit(x, y)
    np.testing.assert_array_equal(first.predict(x[:5]), said)
    np.testing.assert_array_equal(second.predict(x[:5]), said)
    np.testing.assert_array_equal(second.fit(x, y).predict(x[:5]), said)


def _from(state):
    model = small_model(max_epochs=2)
    model.backbone.load_state_dict(state)
    return model


def test_same_seed_same_numbers():
    x, y = bright_images(120)
    torch.manual_seed(0)
    start = Small().state_dict()
    first, again = (_from(start).fit(x, y).predict(x[:5]) for _ in range(2))
    np.testing.assert_array_equal(first, again)


def test_save_and_load(tmp_path, fitted):
    x, y = bright_images(20, seed=9)
    fitted.save(tmp_path / "model")
    with pytest.raises(ModelFileError, match="backbone module of its own"):
        ImageRegressor.load(tmp_path / "model")
    again = ImageRegressor.load(tmp_path / "model", backbone=Small())
    np.testing.assert_array_equal(again.log_prob(x, y), fitted.log_prob(x, y))
    np.testing.assert_array_equal(again.predict(x), fitted.predict(x))
    with pytest.raises(ModelFileError):
        ImageRegressor.load(tmp_path)


def test_save_and_load_with_the_resnet(tmp_path):
    x = np.random.default_rng(0).integers(0, 255, (12, 1, 16, 16), dtype=np.uint8)
    y = np.arange(12) / 3.0
    model = ImageRegressor(max_epochs=1, batch_size=6, n_samples=4, random_state=0).fit(x, y)
    model.save(tmp_path / "model")
    again = ImageRegressor.load(tmp_path / "model")
    np.testing.assert_array_equal(again.log_prob(x, y), model.log_prob(x, y))
    with pytest.raises(ModelFileError, match="load it without backbone="):
        ImageRegressor.load(tmp_path / "model", backbone=Small())


def test_refusals():
    x, y = bright_images(40)
    with pytest.raises(DataError, match="objective must be one of"):
        ImageRegressor("flow")
    with pytest.raises(DataError, match="energy must be"):
        ImageRegressor(energy="big")
    with pytest.raises(DataError, match="no normaliser without a base"):
        ImageRegressor(base=None)
    with pytest.raises(DataError, match="n_samples must be at least 1"):
        ImageRegressor(n_samples=0)
    with pytest.raises(DataError, match="39 labels"):
        small_model().fit(x, y[:-1])
    with pytest.raises(DataError, match="1 or 3 channels"):
        small_model().fit(x.transpose(0, 2, 3, 1), y)
    with pytest.raises(DataError, match="between 0 and 1"):
        small_model().fit(x.astype(np.float32), y)
    with pytest.raises(DataError, match=r"a training label lies outside the given range \[0, 20\]"):
        small_model(label_range=(0.0, 20.0)).fit(x, y)
    with pytest.raises(DataError, match="not fitted yet") as told:
        small_model().predict(x)
    assert isinstance(told.value, NotFittedError)
    with pytest.raises(DataError, match="labels must be finite"):
        small_model().fit(x, np.where(y > 20, np.nan, y))


def test_refusals_of_a_fitted_model(fitted):
    x, y = bright_images(10)
    with pytest.raises(DataError, match="coverage"):
        fitted.predict_interval(x, 1.0)
    with pytest.raises(DataError, match="method must be"):
        fitted.log_prob(x, y, "guess")
    with pytest.raises(DataError, match="quantile levels"):
        fitted.predict_quantiles(x, (0.0,))


def test_lost_steps_are_told():
    class Sick(Small):
        """Finite where the model is judged, not where it is trained."""

        def forward(self, x):
            h = super().forward(x)
            return h * float("nan") if self.training else h

    x, y = bright_images(120)
    model = ImageRegressor(backbone=Sick(), max_epochs=8, batch_size=16, random_state=0)
    with pytest.warns(SelfnormWarning, match="training steps were left out"):
        model.fit(x, y)
