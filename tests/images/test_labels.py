"""Labels of images: scale, steps, grids, noise, fixed proposals; augmentation with its labels."""

import math

import pytest
import torch

from selfnorm.errors import DataError
from selfnorm.images import Augmentation, dequantised
from selfnorm.images.labels import LabelSpace, StepFeatures
from selfnorm.images.model import ImageTask, make_proposal
from tests.images.image_models import SPACE, quadratic_model


def test_label_space_round_trip_and_range():
    y = torch.tensor([[1.0], [4.0], [10.0]])
    space = LabelSpace.of(y, held_out=torch.tensor([[11.0]]))
    assert (space.low, space.high, space.step) == ((0.5,), (11.5,), 1.0)
    assert space.center == (5.0,)  # the held-out label is not part of the scale
    torch.testing.assert_close(space.restore(space.standardise(y)), y)
    assert LabelSpace.of(y, label_range=(0.0, 12.0)).high == (12.5,)
    assert LabelSpace.of(y + 0.25).step == 0.0
    with pytest.raises(DataError, match="constant"):
        LabelSpace.of(torch.ones(4, 1))
    for step in (-1.0, math.nan, math.inf):
        with pytest.raises(DataError, match="the step of labels must be a number of at least 0"):
            LabelSpace.of(y, step=step)


def test_step_features_are_constant_but_for_the_waves_within_a_step():
    features = StepFeatures(SPACE)
    y = SPACE.standardise(torch.tensor([[25.6], [26.4], [26.6], [-3.0], [99.0]]))
    bins = features(y)[:, -62:]
    assert torch.equal(bins[0], bins[1])
    assert not torch.equal(bins[1], bins[2])
    assert bins.sum(1).tolist() == [1.0] * 5
    assert bins[3].argmax() == 0
    assert bins[4].argmax() == 61
    far = features(SPACE.standardise(torch.tensor([[61.0], [1e6]])))
    assert torch.equal(far[0], far[1])  # what is bounded cannot move mass to infinity


def test_dequantised_noise_is_uniform_and_repeatable():
    y = torch.arange(20_000.0)[:, None]
    noisy = dequantised(y, 0.5)
    assert torch.equal(noisy, dequantised(y, 0.5))
    offset = (noisy - y).flatten()
    assert float(offset.abs().max()) <= 0.25
    assert abs(float(offset.std()) - 0.5 / math.sqrt(12)) < 0.01  # float32 labels of 20,000
    assert torch.equal(dequantised(y, 0.0), y)


def test_training_mirrors_labels_in_their_units_and_copies():
    space = LabelSpace((0.3, 0.0), (2.0, 1.0), (-1.0, -1.0), (1.0, 1.0), 0.0)
    mirror = Augmentation(flip=True, flip_signs=(-1.0, 1.0))
    task = ImageTask(quadratic_model(), space, mirror)
    z = space.standardise(torch.tensor([[0.8, 0.5]]).repeat(200, 1))
    kept = z.clone()
    torch.manual_seed(0)
    seen = space.restore(task.present(torch.zeros(200, 3, 4, 4), z)[1])
    assert torch.equal(z, kept)
    assert sorted({round(float(v), 4) for v in seen[:, 0]}) == [-0.8, 0.8]
    torch.testing.assert_close(seen[:, 1], torch.full((200,), 0.5))


def test_training_draws_noise_of_one_step():
    task = ImageTask(quadratic_model(), SPACE)
    z = SPACE.standardise(torch.full((5000, 1), 26.0))
    seen = SPACE.restore(task.present(torch.zeros(5000, 1, 2, 2), z)[1])
    assert 25.5 <= float(seen.min()) < 25.52
    assert 26.48 < float(seen.max()) <= 26.5


@pytest.mark.parametrize("signs", [(-1.0,), (-1.0, 1.0, 1.0)])
def test_signs_for_another_number_of_labels(signs):
    """One sign was used for all labels without a word."""
    space = LabelSpace((0.0,) * 2, (1.0,) * 2, (-1.0,) * 2, (1.0,) * 2)
    with pytest.raises(DataError, match=f"flip_signs for {len(signs)} label.*here are 2"):
        ImageTask(quadratic_model(), space, Augmentation(flip=True, flip_signs=signs))


def test_uniform_labels_stay_in_the_range_and_are_spread():
    law = make_proposal("uniform", 3, SPACE)(torch.zeros(5, 3))
    drawn = SPACE.restore(law.stratified_sample(60))
    assert drawn.shape == (60, 5, 1)
    assert float(drawn.min()) > 0.49
    assert float(drawn.max()) < 60.51
    assert torch.equal((drawn[:, 0, 0] - 0.5).clamp(0, 59.99).long().unique(), torch.arange(60))
    expected = torch.full((5,), -math.log(60.0 * 1.0002 / 10.0))
    torch.testing.assert_close(law.log_prob(drawn[0]), expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("offset", [0.0, 1e6, 1e9])
def test_labels_far_from_zero_keep_their_bins_and_their_range(offset):
    """Identity numbers and times in seconds: float32 has no fractions of them."""
    y = offset + torch.arange(8.0, dtype=torch.float64)[:, None]
    space = LabelSpace.of(y)
    z = space.standardise(y).float()
    assert StepFeatures(space)(z)[:, -10:].argmax(1).tolist() == list(range(1, 9))
    found = make_proposal("uniform", 4, space)(torch.zeros(8, 4)).log_prob(z)
    torch.testing.assert_close(found, torch.full((8,), math.log(2.449 / 8)), rtol=1e-3, atol=1e-3)


def test_a_million_steps_do_not_make_sixteen_million_cells():
    """Prices in whole dollars are whole numbers too."""
    few, many = (LabelSpace((0.0,), (1.0,), (0.0,), (high,), 1.0) for high in (1000.0, 1e6))
    assert len(few.grid(margin=0.0)[0]) == 16_000
    grid, width = many.grid(margin=0.0)
    assert len(grid) * width == pytest.approx(1e6)
    assert len(grid) == 1024
    assert len(many.grid(margin=0.0, refine=4)[0]) == 4096


def test_augmentation_moves_the_pixels_it_says():
    torch.manual_seed(0)
    x = torch.arange(2 * 25, dtype=torch.uint8).view(2, 1, 5, 5).repeat(40, 1, 1, 1)
    y = torch.zeros(80, 1)
    flipped = Augmentation(flip=True)(x, y)[0]
    mirrored = (flipped == x.flip(-1)).flatten(1).all(1)
    same = (flipped == x).flatten(1).all(1)
    assert bool((mirrored | same).all())
    assert 15 < int(mirrored.sum()) < 65
    turned = Augmentation(dihedral=True)(x, y)[0]
    assert torch.equal(turned.flatten(1).sort(1).values, x.flatten(1).sort(1).values)
    assert len({tuple(t.flatten().tolist()) for t in turned[::2]}) == 8
    shifted = Augmentation(shift=1)(x, y)[0]
    assert len({int(v) for v in shifted[::2, 0, 2, 2]}) == 9
    assert Augmentation()(x, y)[0] is x


def test_augmentation_refuses_what_makes_no_sense():
    with pytest.raises(DataError, match="only square images"):
        Augmentation(dihedral=True)(torch.zeros(1, 1, 4, 5), torch.zeros(1, 1))
    with pytest.raises(DataError, match="flip_signs"):
        Augmentation(flip_signs=(-1.0,))
    with pytest.raises(DataError, match="shift must not be negative"):
        Augmentation(shift=-1)
