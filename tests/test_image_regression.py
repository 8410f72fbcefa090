"""Energies on images: exact against closed forms, one ResNet pass per image, files, refusals."""

import math
import shutil

import numpy as np
import pytest
import torch
from torch import nn

from selfnorm import calibration
from selfnorm.augmentation import Augmentation
from selfnorm.errors import DataError, ModelFileError, ProposalError, SelfnormWarning
from selfnorm.image_model import (
    FixedGaussian,
    ImageEBM,
    ImageFeatures,
    LawModel,
    MeanHead,
    make_proposal,
)
from selfnorm.image_predictive import GridLaw, label_grid, log_densities
from selfnorm.image_regression import LAWS, OBJECTIVES, ImageRegressor
from selfnorm.image_training import ImageTask, Presentation
from selfnorm.label_space import LabelSpace, StepFeatures, dequantised
from selfnorm.resnet import ResNet18, resnet18

SPACE = LabelSpace((30.0,), (10.0,), (0.5,), (60.5,), 1.0)


class Small(nn.Module):
    """Mean brightness of the four corners of an image."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.ReLU())
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.net(nn.functional.adaptive_avg_pool2d(x, 2).mean(1).flatten(1))


def bright_images(n, seed=0, dim=1):
    """Counts that follow the brightness, with a second mode far away for a third of them."""
    rng = np.random.default_rng(seed)
    level = rng.uniform(0, 1, n)
    x = np.clip(level[:, None, None, None] * 200 + rng.normal(0, 5, (n, 3, 8, 8)), 0, 255)
    y = np.round(10 + 20 * level + 15 * (rng.uniform(size=n) < 1 / 3))
    if dim == 3:
        y = np.stack([y, -y, 0.1 * y], axis=1) + rng.normal(0, 0.3, (n, 3))
    return x.astype(np.uint8), y


def small_model(objective="snl", proposal="mdn-4", **options):
    chosen = {"n_samples": 16, "batch_size": 64, "max_epochs": 30, "lr": 1e-2, "dropout": 0.0}
    return ImageRegressor(
        objective, proposal, backbone=Small(), random_state=0, ema=None, **{**chosen, **options}
    )


@pytest.fixture(scope="module")
def fitted():
    x, y = bright_images(600)
    torch.manual_seed(0)
    return small_model(max_epochs=20).fit(x[:500], y[:500], val=(x[500:], y[500:]))


# The networks


def test_resnet_has_the_layers_of_torchvision():
    network = ResNet18()
    shapes = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    assert sum(p.numel() for p in network.parameters()) == 11_689_512 - 513_000  # without fc
    assert shapes["conv1.weight"] == (64, 3, 7, 7)
    assert shapes["layer2.0.downsample.0.weight"] == (128, 64, 1, 1)
    assert shapes["layer4.1.bn2.running_var"] == (512,)
    assert len(shapes) == 120  # torchvision's 122 entries without fc.weight and fc.bias
    assert network.maxpool(network.conv1(torch.zeros(1, 3, 64, 64))).shape[-2:] == (16, 16)


def test_resnet18_with_other_channels_and_refusals():
    assert resnet18(1).eval()(torch.zeros(1, 1, 32, 32)).shape == (1, 512)
    with pytest.raises(DataError, match="pretrained weights come with torchvision"):
        resnet18(1, weights="IMAGENET1K_V1")


def test_bytes_and_numbers_give_the_same_features():
    net = ImageFeatures(nn.Flatten(), bf16=True).eval()
    x = torch.randint(0, 256, (4, 3, 5, 5), dtype=torch.uint8)
    torch.testing.assert_close(net(x), net(x / 255.0))
    # ImageNet's normalisation, channel by channel.
    expected = (x[0, 1, 0, 0] / 255.0 - 0.456) / 0.224
    torch.testing.assert_close(net(x)[0, 25], expected)
    with pytest.raises(DataError, match=r"expected images of shape \(n, 3, height, width\)"):
        net(torch.zeros(4, 1, 5, 5))


def test_the_backbone_runs_once_per_image_whatever_m():
    x, y = bright_images(32)
    for m in (4, 256):
        model = small_model(n_samples=m)
        model.prepare(torch.from_numpy(x), torch.from_numpy(y)[:, None])
        backbone = model.model_.features.backbone
        backbone.calls = 0
        z = model.space_.standardise(torch.from_numpy(y)[:, None]).float()
        model.task().loss((torch.from_numpy(x), z))[0].backward()
        assert backbone.calls == 1


def test_heads_on_features_are_the_whole_model():
    """The loss through the features computed apart is that of the model as one."""
    x, y = bright_images(48)
    for share in (True, False):
        model = small_model(share_gradient=share, dequantise=False, energy="paper", base=None)
        model.prepare(torch.from_numpy(x), torch.from_numpy(y)[:, None])
        task = model.task()
        batch = torch.from_numpy(x), model.space_.standardise(torch.from_numpy(y)[:, None]).float()
        found = []
        for loss in (task.loss, super(ImageTask, task).loss):
            torch.manual_seed(0)
            task.module.zero_grad()
            loss(batch)[0].backward()
            found.append(torch.cat([p.grad.flatten() for p in task.module.features.parameters()]))
        torch.testing.assert_close(*found)
        assert found[0].any()


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_heads_are_the_plain_ones_up_to_rounding():
    x, y = bright_images(48)
    model = small_model(n_samples=4)
    model.prepare(torch.from_numpy(x), torch.from_numpy(y)[:, None])
    batch = torch.from_numpy(x), model.space_.standardise(torch.from_numpy(y)[:, None]).float()
    values = []
    for compiled in (False, True):
        model.compile_heads = compiled
        torch.manual_seed(0)
        values.append(model.task().loss(batch)[0].detach())
    torch.testing.assert_close(*values, rtol=1e-4, atol=1e-5)


def gradients(model):
    x, y = bright_images(64)
    model.prepare(torch.from_numpy(x), torch.from_numpy(y)[:, None])
    z = model.space_.standardise(torch.from_numpy(y)[:, None]).float()
    torch.manual_seed(0)
    model.task().loss((torch.from_numpy(x), z))[0].backward()
    return model.model_


def test_features_learn_from_the_energy_alone_unless_shared():
    """The energy is zero at the start, and so is its gradient in the features."""
    apart = gradients(small_model(share_gradient=False))
    assert all(p.grad is None or not p.grad.any() for p in apart.features.parameters())
    assert any(p.grad.any() for p in apart.proposal.parameters())
    together = gradients(small_model(share_gradient=True))
    assert any(p.grad.any() for p in together.features.parameters())
    paper = gradients(small_model(energy="paper", base=None, share_gradient=False))
    assert any(p.grad.any() for p in paper.features.parameters())


def test_ranking_nce_gives_b_no_gradient_and_the_others_do():
    for objective in OBJECTIVES:
        model = gradients(small_model(objective, energy="paper", base=None))
        moved = any(p.grad is not None and p.grad.any() for p in model.log_norm_net.parameters())
        assert moved == (objective in ("snl", "nce")), objective


# Labels


def test_label_space_round_trip_and_range():
    y = torch.tensor([[1.0], [4.0], [10.0]])
    space = LabelSpace.of(y, step=1.0, high=[12.0])
    assert space.low == (0.5,)
    assert space.high == (12.5,)
    torch.testing.assert_close(space.restore(space.standardise(y)), y)
    assert LabelSpace.from_dict(space.to_dict()) == space
    with pytest.raises(DataError, match="constant"):
        LabelSpace.of(torch.ones(4, 1))


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


def test_presentation_mirrors_labels_in_their_units_and_copies():
    space = LabelSpace((0.3,), (2.0,), (-1.0,), (1.0,), 0.0)
    show = Presentation(space, Augmentation(flip=True, flip_signs=(-1.0,)))
    y = torch.full((200, 1), 0.8)
    z = space.standardise(y)
    kept = z.clone()
    torch.manual_seed(0)
    seen = space.restore(show(torch.zeros(200, 3, 4, 4), z)[1])
    assert torch.equal(z, kept)
    assert sorted({round(float(v), 4) for v in seen}) == [-0.8, 0.8]


def test_presentation_draws_noise_of_one_step():
    show = Presentation(SPACE, None)
    z = SPACE.standardise(torch.full((5000, 1), 26.0))
    seen = SPACE.restore(show(torch.zeros(5000, 1, 2, 2), z)[1])
    assert 25.5 <= float(seen.min()) < 25.52
    assert 26.48 < float(seen.max()) <= 26.5


# Exactness


class Quadratic(nn.Module):
    broadcasts = True

    def forward(self, h, y):
        return 0.5 * (y.squeeze(-1) - h[..., 0]) ** 2


def quadratic_model():
    """Base N(0, 1), energy (z - h)^2 / 2: p(z|h) = N(h / 2, 1 / 2)."""
    proposal = FixedGaussian(torch.zeros(1), torch.ones(1))
    return ImageEBM(Quadratic(), proposal, log_norm=nn.Linear(1, 1), base="proposal")


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
    reference = calibration.crps_from_cdf(at, (grid + width / 2).numpy(), law.cdf.numpy())
    np.testing.assert_allclose(law.crps(at).numpy(), reference, rtol=2e-2)


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


def test_uniform_labels_stay_in_the_range_and_are_spread():
    law = make_proposal("uniform", 3, SPACE)(torch.zeros(5, 3))
    drawn = SPACE.restore(law.stratified_sample(60))
    assert drawn.shape == (60, 5, 1)
    assert float(drawn.min()) > 0.49
    assert float(drawn.max()) < 60.51
    assert torch.equal((drawn[:, 0, 0] - 0.5).clamp(0, 59.99).long().unique(), torch.arange(60))
    expected = -math.log(60.0 * 1.0002 / 10.0)
    torch.testing.assert_close(
        law.log_prob(drawn[0]), torch.full((5,), expected), rtol=1e-4, atol=0
    )
    with pytest.raises(ProposalError, match="no proposal is called 'flow'"):
        make_proposal("flow", 3, SPACE)


# Learning


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
    assert drawn.shape == (400, 50)
    np.testing.assert_allclose(drawn.mean(0), fitted.predict(x[:50]), atol=1.5)


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
    assert model.sample(x[:4], 3, seed=0).shape == (3, 4, 3)
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
    monkeypatch.setattr("selfnorm.image_predictions._ROWS_AT_ONCE", 4096 * 25)
    parts = model.predict(x)
    assert sizes == [25, 25, 10]
    # Draws differ between chunks; the means agree to their Monte Carlo error.
    np.testing.assert_allclose(parts, whole, atol=1.5)


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


def test_temperature_is_the_one_that_was_bent_in():
    """Laws made too narrow by hand are widened again, and stay normalised."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 255, (800, 3, 4, 4), dtype=np.uint8)
    model = small_model()
    model.space_, model.flat_target_ = LabelSpace((30.0,), (4.0,), (0.5,), (60.5,), 1.0), True
    model.model_ = quadratic_model()
    model.model_.features = ImageFeatures(nn.Sequential(nn.Flatten(), nn.Linear(48, 1))).eval()
    h = model.features(x).double()[:, 0].numpy()
    y = 30.0 + 4.0 * (h / 2 + np.sqrt(0.5 * 1.4) * rng.normal(size=800))
    before = model.log_prob(x, y).mean()
    found = model.calibrate(x, y)
    assert 1.25 < found < 1.55
    truth = torch.distributions.Normal(30 + 2 * torch.from_numpy(h), 4 * math.sqrt(0.5 * found))
    expected = truth.log_prob(torch.from_numpy(y)).numpy()
    np.testing.assert_allclose(model.log_prob(x, y), expected, atol=2e-3)
    assert model.log_prob(x, y).mean() > before
    assert abs(calibration.central_coverage(model.pit(x, y), 0.9) - 0.9) < 0.03


def test_ranking_nce_draws_are_independent_the_others_stratified():
    x, y = bright_images(32)
    for objective in OBJECTIVES:
        model = small_model(objective)
        model.prepare(torch.from_numpy(x), torch.from_numpy(y)[:, None])
        assert model.task().stratified == (objective != "ranking_nce")


# Files and refusals


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
    with pytest.raises(DataError, match="not fitted yet"):
        small_model().predict(x)
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


def test_the_task_is_for_the_graph_and_owns_its_groups(fitted):
    task = fitted.task()
    assert isinstance(task, ImageTask)
    assert task.capturable
    decayed, plain = task.parameter_groups()
    assert all(p.ndim > 1 for p in decayed["params"])
    assert plain["weight_decay"] == 0.0
    assert len(decayed["params"]) + len(plain["params"]) == len(list(task.module.parameters()))
