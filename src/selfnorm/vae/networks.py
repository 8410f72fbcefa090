"""Encoders and decoders: the convolutional ones of the paper's MNIST experiment, and dense ones."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

from selfnorm._saved import saved
from selfnorm.networks import perceptron

_SIDE = 28  # of the convolutional networks' images


@saved()
class ConvEncoder(nn.Module):
    """28x28 images to the mean and log-variance of the posterior: ``(n, 784) -> (n, 2 latent)``.

    Three 5x5 convolutions of stride 2 with ``2g, 4g, 8g`` channels (28 -> 14 -> 7 -> 4), leaky
    ReLU, one linear layer. The paper prints 16 outputs; a mean and a variance for 16 latent
    numbers need 32.
    """

    def __init__(self, latent: int = 16, ngf: int = 16, slope: float = 0.3) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for n_in, n_out in pairwise((1, 2 * ngf, 4 * ngf, 8 * ngf)):
            layers += [nn.Conv2d(n_in, n_out, 5, 2, 2), nn.LeakyReLU(slope)]
        self.layers = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * ngf * 16, 2 * latent))

    def forward(self, x: Tensor) -> Tensor:
        """Mean and log-variance side by side."""
        out: Tensor = self.layers(x.reshape(-1, 1, _SIDE, _SIDE))
        return out


@saved()
class ConvDecoder(nn.Module):
    """Latent vectors to the logits of 28x28 pixels: ``(n, latent) -> (n, 784)``.

    Four transposed convolutions (1 -> 4 -> 7 -> 14 -> 28) with ``8g, 4g, 2g, 1`` channels.
    """

    def __init__(self, latent: int = 16, ngf: int = 16, slope: float = 0.01) -> None:
        super().__init__()
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


@saved()
class DenseEncoder(_Dense):
    """A fully connected encoder ``(n, dim) -> (n, 2 latent)``."""

    def __init__(self, dim: int, latent: int, hidden: tuple[int, ...] = (128,)) -> None:
        super().__init__(dim, 2 * latent, tuple(hidden))


@saved()
class DenseDecoder(_Dense):
    """A fully connected decoder ``(n, latent) -> (n, n_out)``."""

    def __init__(self, latent: int, n_out: int, hidden: tuple[int, ...] = (128,)) -> None:
        super().__init__(latent, n_out, tuple(hidden))
