"""Networks of images: ResNet-18, and encoders and decoders of small ones.

Names and shapes of ResNet-18's parameters are those of torchvision's, so weights saved from one
load into the other (the classifier ``fc`` apart, which is left out). The convolutional encoder and
decoder are those of the paper's MNIST experiment.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from selfnorm.networks.perceptrons import perceptron

_SIDE = 28


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

    >>> import torch
    >>> ResNet18().eval()(torch.zeros(2, 3, 64, 64)).shape
    torch.Size([2, 512])
    """

    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = _stage(64, 64, 1)
        self.layer2 = _stage(64, 128, 2)
        self.layer3 = _stage(128, 256, 2)
        self.layer4 = _stage(256, 512, 2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Features ``(n, 512)`` of images ``(n, c, h, w)``."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.avgpool(x).flatten(1)


def _stage(before: int, after: int, stride: int) -> nn.Sequential:
    return nn.Sequential(_Block(before, after, stride), _Block(after, after, 1))


class ConvEncoder(nn.Module):
    """28x28 images to the mean and log-variance of the posterior: ``(n, 784) -> (n, 2 latent)``.

    Three 5x5 convolutions of stride 2 with ``2g, 4g, 8g`` channels (28 -> 14 -> 7 -> 4), leaky
    ReLU, one linear layer. The paper prints 16 outputs; a mean and a variance for 16 latent
    numbers need 32.

    Example:
        >>> import torch
        >>> ConvEncoder()(torch.zeros(3, 784)).shape
        torch.Size([3, 32])
    """

    def __init__(self, latent: int = 16, ngf: int = 16, slope: float = 0.3) -> None:
        super().__init__()
        self.config: dict[str, Any] = {"latent": latent, "ngf": ngf, "slope": slope}
        layers: list[nn.Module] = []
        for n_in, n_out in pairwise((1, 2 * ngf, 4 * ngf, 8 * ngf)):
            layers += [nn.Conv2d(n_in, n_out, 5, 2, 2), nn.LeakyReLU(slope)]
        self.layers = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * ngf * 16, 2 * latent))

    def forward(self, x: Tensor) -> Tensor:
        """Mean and log-variance side by side."""
        out: Tensor = self.layers(x.reshape(-1, 1, _SIDE, _SIDE))
        return out


class ConvDecoder(nn.Module):
    """Latent vectors to the logits of 28x28 pixels: ``(n, latent) -> (n, 784)``.

    Four transposed convolutions (1 -> 4 -> 7 -> 14 -> 28) with ``8g, 4g, 2g, 1`` channels.

    Example:
        >>> import torch
        >>> ConvDecoder()(torch.zeros(3, 16)).shape
        torch.Size([3, 784])
    """

    def __init__(self, latent: int = 16, ngf: int = 16, slope: float = 0.01) -> None:
        super().__init__()
        self.config: dict[str, Any] = {"latent": latent, "ngf": ngf, "slope": slope}
        # The first transposed convolution acts on a 1x1 image: it is a linear layer.
        self.first = nn.Linear(latent, 8 * ngf * 16)
        self.shape = (8 * ngf, 4, 4)
        self.layers = nn.Sequential(
            nn.LeakyReLU(slope),
            nn.ConvTranspose2d(8 * ngf, 4 * ngf, 3, 2, 1),
            nn.LeakyReLU(slope),
            nn.ConvTranspose2d(4 * ngf, 2 * ngf, 4, 2, 1),
            nn.LeakyReLU(slope),
            nn.ConvTranspose2d(2 * ngf, 1, 4, 2, 1),
        )

    def forward(self, z: Tensor) -> Tensor:
        """Logits of the pixels."""
        out: Tensor = self.layers(self.first(z).unflatten(-1, self.shape))
        return out.flatten(1)


class _Dense(nn.Module):
    def __init__(self, n_in: int, n_out: int, hidden: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = perceptron(None, n_in, hidden, n_out)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layers to flattened rows."""
        out: Tensor = self.layers(x.flatten(1))
        return out


class DenseEncoder(_Dense):
    """A fully connected encoder ``(n, dim) -> (n, 2 latent)``.

    Example:
        >>> import torch
        >>> DenseEncoder(64, 4)(torch.zeros(3, 64)).shape
        torch.Size([3, 8])
    """

    def __init__(self, dim: int, latent: int, hidden: tuple[int, ...] = (128,)) -> None:
        super().__init__(dim, 2 * latent, tuple(hidden))
        self.config: dict[str, Any] = {"dim": dim, "latent": latent, "hidden": list(hidden)}


class DenseDecoder(_Dense):
    """A fully connected decoder ``(n, latent) -> (n, n_out)``.

    Example:
        >>> import torch
        >>> DenseDecoder(4, 64)(torch.zeros(3, 4)).shape
        torch.Size([3, 64])
    """

    def __init__(self, latent: int, n_out: int, hidden: tuple[int, ...] = (128,)) -> None:
        super().__init__(latent, n_out, tuple(hidden))
        self.config: dict[str, Any] = {"latent": latent, "n_out": n_out, "hidden": list(hidden)}
