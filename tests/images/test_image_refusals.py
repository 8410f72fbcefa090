"""What a model of labels given images cannot answer, it refuses by name."""

import numpy as np
import pytest
import torch
from torch import nn

from selfnorm.errors import DataError, ModelFileError, ProposalError
from selfnorm.images import ImageRegressor
from tests.images.image_models import Small, bright_images, small_model


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


def test_labels_of_another_number(fitted):
    """One column for three labels was used for each of them without a word."""
    x, y = bright_images(60)
    three = np.stack([y, y, y], axis=1)
    for call in (fitted.log_prob, fitted.pit, fitted.bounds, fitted.calibrate, fitted.score):
        with pytest.raises(DataError, match=r"expected 1 label\(s\) for each image, got 3"):
            call(x, three)
    with pytest.raises(DataError, match=r"expected 3 label\(s\) for each image, got 1"):
        small_model().fit(x, three, val=(x, y))
    wide = small_model(max_epochs=1).fit(x, three + np.random.default_rng(0).normal(size=(60, 3)))
    with pytest.raises(DataError, match=r"expected 3 label\(s\) for each image, got 1"):
        wide.log_prob(x, y, method="learned")


def test_complex_labels():
    x, y = bright_images(6)
    for labels in (y + 1j, torch.tensor(y + 1j)):
        with pytest.raises(DataError, match="labels must be real numbers"):
            small_model().fit(x, labels)


class Both(nn.Module):
    def forward(self, x):
        return x.flatten(1), x


@pytest.mark.parametrize(
    "backbone",
    [nn.AdaptiveAvgPool2d(1), nn.Conv2d(3, 4, 3), nn.Sequential(nn.Flatten(0)), Both()],
)
def test_backbones_that_make_no_features(backbone):
    x, y = bright_images(6)
    with pytest.raises(DataError, match=r"map \(n, c, h, w\) to \(n, features\).*nn.Flatten"):
        ImageRegressor(backbone=backbone, max_epochs=1).fit(x, y)


def test_a_backbone_in_double_precision():
    x, y = bright_images(30)
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(192, 4))
    found = ImageRegressor(backbone=backbone, max_epochs=1, n_samples=4, random_state=0).fit(x, y)
    doubled = ImageRegressor(
        backbone=backbone.double(), max_epochs=1, n_samples=4, random_state=0
    ).fit(x, y)
    assert np.array_equal(found.predict(x), doubled.predict(x))
    assert backbone[1].weight.dtype == torch.float64  # it is the user's


@pytest.mark.parametrize("proposal", ["uniform", "gaussian"])
def test_a_law_alone_that_is_the_same_for_all_images(proposal):
    x, y = bright_images(6)
    with pytest.raises(ProposalError, match="objective 'mdn' fits a mixture to each image"):
        small_model("mdn", proposal).fit(x, y)
