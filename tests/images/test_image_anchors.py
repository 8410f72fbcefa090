"""``b`` that sees the energy at a few anchors: its value, the bound's, and less noise."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from selfnorm import functional as F
from selfnorm.conditional import ConditionalTask
from selfnorm.errors import DataError, SelfnormWarning
from selfnorm.images import ImageRegressor, dequantised
from selfnorm.images.model import FixedUniform, ImageEBM
from tests.images.image_models import Quadratic, Small, bright_images, quadratic_model, small_model


def anchored(model, k):
    nn.init.zeros_(model.log_norm_net.weight)
    nn.init.zeros_(model.log_norm_net.bias)
    model.anchors = k
    return model


def log_z(h):
    """Of base ``N(0, 1)`` with the energy ``(z - h)^2 / 2``: ``sqrt(2 pi) N(h; 0, 2)``."""
    return -0.25 * h[:, 0] ** 2 - 0.5 * math.log(2.0)


def test_b_is_the_rule_and_what_the_head_adds():
    h = torch.linspace(-1.5, 1.5, 7)[:, None]
    model = anchored(quadratic_model(), 400)
    torch.testing.assert_close(model.b(h), log_z(h), atol=2e-3, rtol=0)
    torch.testing.assert_close(model.heads().log_norm(h), model.b(h))
    nn.init.constant_(model.log_norm_net.bias, 0.7)
    torch.testing.assert_close(model.b(h), log_z(h) + 0.7, atol=2e-3, rtol=0)
    model.anchors = 0
    torch.testing.assert_close(model.b(h), torch.full((7,), 0.7))


def test_anchors_of_a_uniform_proposal_with_and_without_a_base():
    h = torch.tensor([[-1.0], [0.5]])
    q = FixedUniform(torch.tensor([-5.0]), torch.tensor([3.0]))
    y = q(h).midpoints(4)
    assert y.shape == (4, 2, 1)
    assert y[:, 1, 0].tolist() == [-4.0, -2.0, 0.0, 2.0]
    root = torch.tensor(math.sqrt(2 * math.pi)).log()
    mass = torch.distributions.Normal(h, 1.0)
    inside = (mass.cdf(torch.tensor(3.0)) - mass.cdf(torch.tensor(-5.0)))[:, 0].log()
    for base, scale in (("proposal", math.log(8.0)), (None, 0.0)):
        model = ImageEBM(Quadratic(), q, log_norm=nn.Linear(1, 1), base=base)
        found = anchored(model, 500).b(h)
        torch.testing.assert_close(found, root + inside - scale, atol=1e-3, rtol=0)


def test_the_bound_stays_a_bound_and_the_draws_leave_the_level_alone():
    class Level(Quadratic):
        """The level of the energy, a function of the image, as a parameter."""

        def __init__(self):
            super().__init__()
            self.slope = nn.Parameter(torch.tensor(0.0))

        def forward(self, h, y):
            return super().forward(h, y) + self.slope * h[..., 0]

    torch.manual_seed(0)
    h, y = torch.randn(64, 1), 0.5 * torch.randn(64, 1)
    gap, noise = {}, {}
    for k in (0, 16):
        model = anchored(quadratic_model(), k)
        model.energy = Level()
        task = ConditionalTask(model, n_samples=4, proposal_loss="none", stratified=False)
        exact = (model.log_unnormalized(h, y) - log_z(h)).mean().detach()
        values, slopes = [], []
        for _ in range(300):
            loss = task.loss((h, y))[0]
            values.append(-loss.detach())
            slopes.append(torch.autograd.grad(loss, model.energy.slope)[0])
        found = torch.stack(values)
        gap[k], noise[k] = float(exact - found.mean()), float(torch.stack(slopes).std())
        assert gap[k] > -3 * float(found.std()) / 300**0.5
    assert abs(gap[16]) < 0.2 * gap[0]  # nearly tight before anything is learned
    assert noise[16] < 1e-5 < 1e-2 < noise[0]


def test_the_level_of_the_energy_does_not_matter():
    h, y = torch.randn(32, 1), torch.randn(32, 1)
    model = anchored(quadratic_model(), 16)
    values = []
    for level in (0.0, 7.0):
        model.energy.forward = lambda h, y, c=level: 0.5 * (y.squeeze(-1) - h[..., 0]) ** 2 + c
        torch.manual_seed(0)
        task = ConditionalTask(model, n_samples=8, proposal_loss="none")
        values.append(task.loss((h, y))[0].detach())
    torch.testing.assert_close(*values, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("proposal", ["uniform", "mdn-4"])
def test_learning_with_anchors_and_files(proposal, tmp_path):
    x, y = bright_images(360)
    torch.manual_seed(0)
    model = small_model("snl", proposal, anchors=16, max_epochs=6)
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
    np.testing.assert_array_equal(again.log_prob(x[300:], labels, method="learned"), learned)


def test_several_labels_have_none_and_are_told_so():
    x, y = bright_images(60, dim=3)
    with pytest.warns(SelfnormWarning, match="anchors are for one label only, here are 3"):
        model = small_model(anchors=8, max_epochs=1).fit(x, y)
    assert model.model_.anchors == 0


@pytest.mark.parametrize("anchors", [-1, True, 8.0, None, "8"])
def test_what_is_no_number_of_anchors_is_refused(anchors):
    with pytest.raises(DataError, match="anchors must be an int of at least 0"):
        ImageRegressor(anchors=anchors)
    x, y = bright_images(20)
    with pytest.raises(DataError, match="anchors must be an int of at least 0"):
        small_model().set_params(anchors=anchors).fit(x, y)


def test_log_mean_exp_of_one_anchor_is_its_weight():
    h = torch.randn(5, 1)
    model = anchored(quadratic_model(), 1)
    middle = torch.zeros(1, 5, 1)
    expected = F.log_mean_exp(model.minus_energy(h, middle, model.law(h, h)))
    torch.testing.assert_close(model.b(h), expected, atol=1e-6, rtol=0)


def test_numpy_numbers_of_a_grid_search_are_fitted_and_saved(tmp_path):
    x, y = bright_images(60)
    model = small_model(anchors=np.int64(8), n_samples=np.int64(16), max_epochs=1).fit(x, y)
    model.save(tmp_path / "model")
    again = ImageRegressor.load(tmp_path / "model", backbone=Small())
    assert (again.anchors, again.n_samples) == (8, 16)
