"""What a model of labels given images cannot answer, it refuses by name."""

import numpy as np
import pytest
import torch
from torch import nn

from selfnorm.errors import DataError, ModelFileError
from selfnorm.image_regression import ImageRegressor
from tests.image_models import Small, bright_images, small_model


@pytest.fixture(scope="module")
def fitted():
    x, y = bright_images(60)
    return small_model(max_epochs=1).fit(x, y)


def flat_model(*layers):
    return ImageRegressor(
        backbone=nn.Sequential(nn.Flatten(), *layers), max_epochs=1, n_samples=4, random_state=0
    )


@pytest.mark.parametrize("kind", [np.uint8, np.float32])
def test_no_images(fitted, kind):
    none = np.zeros((0, 3, 8, 8), kind)
    before = fitted.temperature_
    for call in (fitted.calibrate, fitted.log_prob, small_model().fit):
        with pytest.raises(DataError, match="no images"):
            call(none, [])
    with pytest.raises(DataError, match="no images"):
        fitted.predict(none)
    assert fitted.temperature_ == before


@pytest.mark.parametrize("n", [1, 2])
def test_too_few_images(n):
    x, y = bright_images(n)
    with pytest.raises(DataError, match=f"too few images: {n - 1} to train on and 1 held out"):
        small_model().fit(x, y)


def test_one_training_image_beside_held_out_ones():
    x, y = bright_images(6)
    with pytest.raises(DataError, match="too few images: 1 to train on and 5 held out"):
        small_model().fit(x[:1], y[:1], val=(x[1:], y[1:]))


def test_a_density_is_of_one_image(fitted):
    x, _ = bright_images(3, seed=1)
    expected = fitted.law(x[:1]).pdf[0].numpy()
    for one in (x[0], x[:1], torch.from_numpy(x[0]), torch.from_numpy(x[:1])):
        np.testing.assert_allclose(fitted.density(one)[1], expected)
    for several in (x[:2], torch.from_numpy(x[:2])):
        with pytest.raises(DataError, match="for one image, got 2"):
            fitted.density(several)


def test_a_folder_and_another_backbone(fitted, tmp_path):
    class Wider(Small):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 17), nn.ReLU())

    fitted.save(tmp_path / "model")
    for backbone in (Wider(), nn.Flatten()):
        with pytest.raises(ModelFileError, match="backbone do not fit together"):
            ImageRegressor.load(tmp_path / "model", backbone=backbone)
    assert ImageRegressor.load(tmp_path / "model", backbone=Small()).image_size_ == (8, 8)


@pytest.mark.parametrize("layers", [(), (nn.Linear(192, 8),)])
def test_images_of_a_size_that_the_backbone_cannot_take(layers, tmp_path):
    x, y = bright_images(40)
    model = flat_model(*layers).fit(x, y)
    model.save(tmp_path / "model")
    again = ImageRegressor.load(tmp_path / "model", backbone=model.backbone)
    for either in (model, again):
        with pytest.raises(DataError, match="4 x 6 pixels: this model was fitted on 8 x 8"):
            either.predict(x[:2, :, :4, :6])


def test_a_backbone_for_all_sizes_takes_them(fitted):
    x, _ = bright_images(4)
    assert fitted.predict(x[:, :, :4, :6]).shape == (4,)
