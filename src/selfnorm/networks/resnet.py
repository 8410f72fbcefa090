"""ResNet-18 as a feature extractor: torchvision's where it imports, else the same layers here.

Both give 512 features per image and share the names and shapes of their parameters, so weights
saved from one load into the other (the classifier ``fc`` apart, which is left out).
"""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor, nn

from selfnorm.errors import DataError

__all__ = ["N_FEATURES", "ResNet18", "resnet18"]

N_FEATURES = 512


class _Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.downsample: nn.Module | None = None
        if stride != 1 or before != after:
            self.downsample = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            )

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(x + shortcut)


class ResNet18(nn.Module):
    """ResNet-18 (He et al. 2016) without its classifier: images ``(n, c, h, w)`` to ``(n, 512)``.

    Args:
        channels: colour channels of the images.
        width: channels of the first stage; 64 is ResNet-18, less is a smaller relative of it.

    >>> import torch
    >>> ResNet18().eval()(torch.zeros(2, 3, 64, 64)).shape
    torch.Size([2, 512])
    """

    def __init__(self, channels: int = 3, width: int = 64) -> None:
        super().__init__()
        self.channels, self.width = channels, width
        self.n_features = 8 * width
        self.conv1 = nn.Conv2d(channels, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = _stage(width, width, 1)
        self.layer2 = _stage(width, 2 * width, 2)
        self.layer3 = _stage(2 * width, 4 * width, 2)
        self.layer4 = _stage(4 * width, 8 * width, 2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Features ``(n, 8 * width)`` of images ``(n, c, h, w)``."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.avgpool(x).flatten(1)


def _stage(before: int, after: int, stride: int) -> nn.Sequential:
    return nn.Sequential(_Block(before, after, stride), _Block(after, after, 1))


def resnet18(
    channels: int = 3, *, weights: Any = None, torchvision: bool | None = None
) -> nn.Module:
    """ResNet-18 features from torchvision where it imports, else :class:`ResNet18`.

    Args:
        channels: colour channels; torchvision's network takes three, others use the package's own.
        weights: passed on to ``torchvision.models.resnet18``, e.g. ``"IMAGENET1K_V1"``.
        torchvision: insist on one of the two.

    >>> sum(p.numel() for p in resnet18(torchvision=False).parameters())
    11176512
    """
    wanted = channels == 3 if torchvision is None else torchvision
    models = _torchvision_models() if wanted else None
    if models is None:
        if weights is not None or torchvision:
            raise DataError(
                "pretrained weights come with torchvision, which does not import here (or does not "
                "take this number of channels): install it beside torch, or leave weights=None"
            )
        return ResNet18(channels)
    network = models.resnet18(weights=weights)
    network.fc = nn.Identity()
    network.n_features = N_FEATURES
    return network


def _torchvision_models() -> Any:
    # Beside a torch of another build it fails with RuntimeError or OSError, not ImportError.
    try:
        return importlib.import_module("torchvision.models")
    except (ImportError, RuntimeError, OSError, AttributeError):
        return None
