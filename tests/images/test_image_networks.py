"""Networks of image regression: ResNet, features once per image, heads, gradients."""

import shutil

import pytest
import torch
from torch import nn

from selfnorm.errors import DataError
from selfnorm.images.model import ImageEnergy, ImageFeatures
from selfnorm.images.regressor import OBJECTIVES
from selfnorm.images.task import ImageTask
from selfnorm.networks import resnet18
from selfnorm.networks.resnet import ResNet18
from tests.images.image_models import bright_images, fitted_model, small_model


@pytest.fixture(scope="module")
def fitted():
    return fitted_model()


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


def test_the_task_is_for_the_graph_and_owns_its_groups(fitted):
    task = fitted.task()
    assert isinstance(task, ImageTask)
    assert task.capturable
    decayed, plain = task.parameter_groups()
    assert all(p.ndim > 1 for p in decayed["params"])
    assert plain["weight_decay"] == 0.0
    assert len(decayed["params"]) + len(plain["params"]) == len(list(task.module.parameters()))


def test_rounded_layers_leave_the_energies_all_their_digits(monkeypatch):
    """Ranking NCE lets the level of the energy drift: at 100, bfloat16 knows steps of 0.5 only."""
    monkeypatch.setattr("selfnorm.images.model._BF16_DEVICES", ("cpu",))
    torch.manual_seed(0)
    energy = ImageEnergy(16, 3, hidden=(64, 64))
    h, y = torch.randn(50, 16), torch.randn(20, 50, 3)
    with torch.no_grad():
        energy.joint[-1].bias.fill_(100.0)
        error = (energy.train()(h, y) - energy.eval()(h, y)).abs().max()
    assert 1e-5 < float(error) < 0.02  # rounded inside, but not at the end


def test_weights_rounded_together_are_those_that_autocast_rounds(monkeypatch):
    torch.manual_seed(0)
    net = ImageFeatures(ResNet18(3, width=4), dropout=0.0).train()
    x = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8)

    def gradients(values):
        net.zero_grad(set_to_none=True)
        values.square().sum().backward()
        return [p.grad for p in net.parameters()]

    full = net(x)
    monkeypatch.setattr("selfnorm.images.model._BF16_DEVICES", ("cpu",))
    together = net(x)
    ours = gradients(together)
    assert not torch.equal(together, full)
    monkeypatch.setattr(ImageFeatures, "_rounded_weights", lambda *_: {})
    one_by_one = net(x)
    assert torch.equal(together, one_by_one)
    for mine, theirs in zip(ours, gradients(one_by_one), strict=True):
        assert mine.dtype == torch.float32
        assert torch.equal(mine, theirs)
        assert mine.stride() == theirs.stride()


class PartlyFull(nn.Module):
    """A backbone that leaves autocast for its last layer."""

    def __init__(self):
        super().__init__()
        self.convolution, self.last = nn.Conv2d(3, 4, 3), nn.Linear(4, 5)

    def forward(self, x):
        h = self.convolution(x).mean((2, 3))
        with torch.autocast("cpu", enabled=False):
            return self.last(h.float())


def test_a_backbone_of_others_gets_its_weights_as_they_are(monkeypatch):
    torch.manual_seed(0)
    net = ImageFeatures(PartlyFull()).train()
    x = torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8)
    full = net(x)
    monkeypatch.setattr("selfnorm.images.model._BF16_DEVICES", ("cpu",))
    rounded = net(x)
    rounded.sum().backward()
    assert not torch.equal(rounded, full)
    torch.testing.assert_close(rounded, full, rtol=0, atol=0.05)
    assert all(p.grad is not None for p in net.parameters())
