"""Networks of image regression: ResNet, features once per image, heads, gradients, anchors."""

import math

import pytest
import torch
from torch import nn

from selfnorm import functional as F
from selfnorm.conditional import ConditionalTask
from selfnorm.distributions import Uniform
from selfnorm.errors import DataError
from selfnorm.images import EnergyHead
from selfnorm.images.model import ImageEBM, ImageFeatures, ResNet18
from selfnorm.images.regressor import OBJECTIVES
from tests.images.image_models import Quadratic, prepared_task, quadratic_model, small_model


def test_resnet_has_the_layers_of_torchvision():
    network = ResNet18()
    shapes = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    assert sum(p.numel() for p in network.parameters()) == 11_689_512 - 513_000  # without fc
    assert shapes["conv1.weight"] == (64, 3, 7, 7)
    assert shapes["layer2.0.downsample.0.weight"] == (128, 64, 1, 1)
    assert shapes["layer4.1.bn2.running_var"] == (512,)
    assert len(shapes) == 120  # torchvision's 122 entries without fc.weight and fc.bias
    assert ResNet18(1).eval()(torch.zeros(1, 1, 32, 32)).shape == (1, 512)
    assert network.maxpool(network.conv1(torch.zeros(1, 3, 64, 64))).shape[-2:] == (16, 16)


def test_bytes_and_numbers_give_the_same_features():
    net = ImageFeatures(nn.Flatten()).eval()
    x = torch.randint(0, 256, (4, 3, 5, 5), dtype=torch.uint8)
    torch.testing.assert_close(net(x), net(x / 255.0))
    # ImageNet's normalisation, channel by channel.
    torch.testing.assert_close(net(x)[0, 25], (x[0, 1, 0, 0] / 255.0 - 0.456) / 0.224)
    with pytest.raises(DataError, match=r"expected images of shape \(n, 3, height, width\)"):
        net(torch.zeros(4, 1, 5, 5))


def test_the_backbone_runs_once_per_image_whatever_m():
    for m in (4, 256):
        task, batch = prepared_task(small_model(n_samples=m))
        backbone = task.module.features.backbone
        backbone.calls = 0
        task.loss(batch)[0].backward()
        assert backbone.calls == 1


def gradients(model):
    task, batch = prepared_task(model)
    torch.manual_seed(0)
    task.loss(batch)[0].backward()
    return model.model_


def moved(part):
    return any(p.grad is not None and p.grad.any() for p in part.parameters())


def test_features_learn_from_the_energy_alone_unless_shared():
    """The energy is zero at the start, and so is its gradient in the features."""
    apart = gradients(small_model(energy=EnergyHead(share_gradient=False)))
    assert not moved(apart.features)
    assert moved(apart.proposal)
    assert moved(gradients(small_model()).features)
    paper = EnergyHead("paper", base=None, share_gradient=False)
    assert moved(gradients(small_model(energy=paper)).features)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_who_learns_b_and_whose_draws_are_stratified(objective):
    model = small_model(objective, energy=EnergyHead("paper", base=None))
    assert moved(gradients(model).log_norm_net) == (objective in ("snl", "nce"))
    assert model.task().stratified == (objective != "ranking_nce")


def anchored(model, k):
    nn.init.zeros_(model.log_norm_net.weight)
    nn.init.zeros_(model.log_norm_net.bias)
    model.anchors = k
    return model


def log_z(h):
    """Of base ``N(0, 1)`` with the energy ``(z - h)^2 / 2``: ``sqrt(2 pi) N(h; 0, 2)``."""
    return -0.25 * h[:, 0] ** 2 - 0.5 * math.log(2.0)


def test_b_is_the_rule_of_anchors_and_what_the_head_adds():
    h = torch.linspace(-1.5, 1.5, 7)[:, None]
    model = anchored(quadratic_model(), 400)
    torch.testing.assert_close(model.b(h), log_z(h), atol=2e-3, rtol=0)
    torch.testing.assert_close(model.log_norm(h), model.b(h))
    nn.init.constant_(model.log_norm_net.bias, 0.7)
    torch.testing.assert_close(model.b(h), log_z(h) + 0.7, atol=2e-3, rtol=0)
    model.anchors = 0
    torch.testing.assert_close(model.b(h), torch.full((7,), 0.7))
    one = anchored(model, 1)
    expected = F.log_mean_exp(one.minus_energy(h, torch.zeros(1, 7, 1), one.proposal_at(h, h)))
    torch.testing.assert_close(one.b(h), expected, atol=1e-6, rtol=0)


def test_anchors_of_a_uniform_proposal_with_and_without_a_base():
    h = torch.tensor([[-1.0], [0.5]])
    q = Uniform(torch.tensor([-5.0]), torch.tensor([3.0]))
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


class Level(Quadratic):
    """The level of the energy, a function of the image, as a parameter."""

    def __init__(self):
        super().__init__()
        self.slope, self.level = nn.Parameter(torch.tensor(0.0)), 0.0

    def forward(self, h, y):
        return super().forward(h, y) + self.slope * h[..., 0] + self.level


def test_the_bound_stays_a_bound_and_the_draws_leave_the_level_alone():
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
    values = []
    for level in (0.0, 7.0):  # with anchors it is cancelled by b
        model.energy.level = level
        torch.manual_seed(0)
        values.append(task.loss((h, y))[0].detach())
    torch.testing.assert_close(*values, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("anchors", [-1, True, 8.0, None, "8"])
def test_what_is_no_number_of_anchors_is_refused(anchors):
    with pytest.raises(DataError, match="anchors must be an int of at least 0"):
        EnergyHead(anchors=anchors)


def test_an_energy_that_is_bounded_needs_a_base():
    with pytest.raises(DataError, match="no normaliser without a base"):
        EnergyHead(base=None)
