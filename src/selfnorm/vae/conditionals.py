"""The two conditionals of a VAE: the decoder's ``p(x|z)`` and the encoder's ``q(z|x)``.

A likelihood maps decoder outputs ``(..., n_parameters)`` and rows ``(..., dim)`` to
``log p(x|z)``, summed over the row. Leading dimensions broadcast. The posteriors of a batch are
Gaussian; their mixture is the aggregate posterior, where an encoder puts a data set. The encoders
and decoders are the convolutional ones of the paper's MNIST experiment, and dense ones.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from selfnorm._saved import saved
from selfnorm.distributions import Proposal, gaussian_log_prob, mixture_log_prob
from selfnorm.errors import DataError
from selfnorm.networks import perceptron

_LOG_2PI = math.log(2 * math.pi)
# Points times rows handled at once: on a CPU what fits its cache, on a GPU what fills it.
_PAIRS_AT_ONCE = {"cpu": 2**19, "cuda": 2**24}
_SIDE = 28  # of the convolutional networks' images
_LIMITS = (-7.0, 5.0)  # of log sd: values outside are numerical failures


class Likelihood(nn.Module, ABC):
    """``p(x|z)`` given the decoder's output."""

    config: dict[str, Any] = {}  # noqa: RUF012 what the constructor is given, if anything
    n_parameters = 1  # decoder outputs for each value of a row

    def flat(self, output: Tensor) -> Tensor:
        """A decoder's output ``(n, ...)`` as rows ``(n, n_parameters * dim)``."""
        if not isinstance(output, Tensor):
            raise DataError(
                f"the decoder must give one tensor, the parameters of the likelihood (logits or "
                f"means), not a {type(output).__name__}"
            )
        return output.flatten(1)

    @abstractmethod
    def log_prob(self, output: Tensor, x: Tensor) -> Tensor:
        """``log p(x|z)``: ``(..., n_parameters), (..., dim) -> (...)``."""

    @abstractmethod
    def mean(self, output: Tensor) -> Tensor:
        """Mean of ``x`` (probabilities for binary and categorical rows)."""

    @abstractmethod
    def sample(self, output: Tensor) -> Tensor:
        """One draw of ``x`` per row."""

    def check(self, x: Tensor) -> None:
        """Refuse rows that the likelihood gives no probability."""


@saved(arguments=lambda _: {})
class Bernoulli(Likelihood):
    """Independent binary pixels; the decoder gives their logits. Counting measure.

    Example:
        >>> Bernoulli().log_prob(torch.zeros(1, 2), torch.tensor([[0.0, 1.0]]))
        tensor([-1.3863])
    """

    def log_prob(self, output: Tensor, x: Tensor) -> Tensor:
        """``sum_j x_j l_j - log(1 + e^{l_j})``."""
        return (x * output - softplus(output)).sum(-1)

    def mean(self, output: Tensor) -> Tensor:
        """Probabilities of ones."""
        return torch.sigmoid(output)

    def sample(self, output: Tensor) -> Tensor:
        """Binary rows."""
        return torch.bernoulli(torch.sigmoid(output))

    def check(self, x: Tensor) -> None:
        """Only values in [0, 1] (grey values count as probabilities) are binary pixels."""
        if bool(((x < 0) | (x > 1)).any()):
            raise DataError(
                f"a Bernoulli likelihood needs values in [0, 1], got [{float(x.min()):.3g}, "
                f"{float(x.max()):.3g}]; binarise the data or use likelihood='gaussian'"
            )


@saved()
class GaussianNoise(Likelihood):
    """``x ~ N(output, scale^2)``, Lebesgue measure; ``scale`` is learned unless ``learned=False``.

    Example:
        >>> GaussianNoise(2.0, learned=False).log_prob(torch.zeros(1, 1), torch.zeros(1, 1))
        tensor([-1.6121])
    """

    log_scale: Tensor

    def __init__(self, scale: float = 1.0, *, learned: bool = True) -> None:
        super().__init__()
        if not 0 < scale < math.inf:
            raise ValueError(f"scale must be a positive number, got {scale}")
        self.config = {"scale": scale, "learned": learned}
        start = torch.tensor(math.log(scale))
        if learned:
            self.log_scale = nn.Parameter(start)
        else:
            self.register_buffer("log_scale", start)

    def log_prob(self, output: Tensor, x: Tensor) -> Tensor:
        """Sum of normal log-densities."""
        e = (x - output) * torch.exp(-self.log_scale)
        return gaussian_log_prob(e, e.shape[-1] * self.log_scale)

    def mean(self, output: Tensor) -> Tensor:
        """The output itself."""
        return output

    def sample(self, output: Tensor) -> Tensor:
        """Output plus noise."""
        return output + self.log_scale.exp() * torch.randn_like(output)


@saved("n_classes")
class Categorical(Likelihood):
    """Each of ``dim`` entries takes one of ``n_classes`` values ``0, 1, ...``; counting measure.

    The decoder gives ``dim * n_classes`` logits, those of one entry side by side: ``(n, dim *
    n_classes)`` or ``(n, ..., n_classes)``; or, as ``cross_entropy`` has them, with the classes
    before an image's height and width, ``(n, n_classes, ...)``.

    Example:
        >>> Categorical(4).log_prob(torch.zeros(1, 8), torch.tensor([[3.0, 0.0]]))
        tensor([-2.7726])
    """

    def __init__(self, n_classes: int) -> None:
        super().__init__()
        if n_classes < 2:
            raise ValueError(f"n_classes must be at least 2, got {n_classes}")
        self.config = {"n_classes": n_classes}
        self.n_classes = self.n_parameters = n_classes

    def flat(self, output: Tensor) -> Tensor:
        """Logits with those of one entry side by side, wherever the decoder has the classes."""
        if isinstance(output, Tensor) and output.dim() > 2:
            first, last = (output.shape[i] == self.n_classes for i in (1, -1))
            if first == last:
                raise DataError(
                    f"the decoder gives shape {tuple(output.shape)}, which does not tell where the "
                    f"logits of the {self.n_classes} classes are: give (n, dim * "
                    f"{self.n_classes}), those of one entry side by side"
                )
            output = output.movedim(1, -1) if first else output
        return super().flat(output)

    def _distribution(self, output: Tensor) -> torch.distributions.Categorical:
        logits = output.unflatten(-1, (-1, self.n_classes))
        return torch.distributions.Categorical(logits=logits, validate_args=False)

    def log_prob(self, output: Tensor, x: Tensor) -> Tensor:
        """Sum of the log-probabilities of the values."""
        return self._distribution(output).log_prob(x).sum(-1)

    def mean(self, output: Tensor) -> Tensor:
        """Probabilities ``(..., dim, n_classes)``."""
        return self._distribution(output).probs

    def sample(self, output: Tensor) -> Tensor:
        """Values as floating-point numbers."""
        return self._distribution(output).sample().to(output.dtype)

    def check(self, x: Tensor) -> None:
        """Only whole numbers below ``n_classes``."""
        if bool(((x < 0) | (x >= self.n_classes) | (x != x.round())).any()):
            raise DataError(
                f"a categorical likelihood with {self.n_classes} classes needs whole numbers "
                f"0..{self.n_classes - 1}, got values in [{float(x.min()):.3g}, "
                f"{float(x.max()):.3g}]"
            )


def as_likelihood(likelihood: str | Likelihood) -> Likelihood:
    """``"bernoulli"``, ``"gaussian"``, ``"categorical:K"`` or a :class:`Likelihood`."""
    if isinstance(likelihood, Likelihood):
        return likelihood
    name, _, classes = likelihood.partition(":")
    if name == "bernoulli":
        return Bernoulli()
    if name == "gaussian":
        return GaussianNoise()
    if name == "categorical" and classes.isdigit():
        return Categorical(int(classes))
    raise ValueError(
        f"likelihood must be 'bernoulli', 'gaussian', 'categorical:K' or a Likelihood, not "
        f"{likelihood!r}"
    )


@dataclass(frozen=True)
class GaussianPosterior:
    """``q(z|x) = N(mean, diag(exp(log_sd))^2)`` for each row: ``mean``, ``log_sd`` ``(n, d)``."""

    mean: Tensor
    log_sd: Tensor

    @classmethod
    def from_output(cls, output: Tensor | Sequence[Tensor]) -> GaussianPosterior:
        """From an encoder's mean and log-variance: a pair, or one tensor ``(n, 2 d)``."""
        pair = output.chunk(2, -1) if isinstance(output, Tensor) else output
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            given = f"{len(pair)} parts" if isinstance(pair, tuple | list) else type(pair).__name__
            raise DataError(
                "the encoder must give a mean and a log-variance: a pair of (n, d), or one tensor "
                f"(n, 2 d); it gives {given}"
            )
        mean, log_variance = pair
        return cls(mean, (0.5 * log_variance).clamp(*_LIMITS))

    def __getitem__(self, rows: Tensor | slice) -> GaussianPosterior:
        """The posteriors of some rows."""
        return GaussianPosterior(self.mean[rows], self.log_sd[rows])

    def sample(self, n: int = 1) -> Tensor:
        """``(n, batch, d)`` reparametrised samples: gradients reach mean and scale."""
        noise = torch.randn((n, *self.mean.shape), dtype=self.mean.dtype, device=self.mean.device)
        return self.mean + self.log_sd.exp() * noise

    def log_prob(self, z: Tensor) -> Tensor:
        """``log q(z|x)``: ``(..., batch, d) -> (..., batch)``."""
        e = (z - self.mean) * torch.exp(-self.log_sd)
        return gaussian_log_prob(e, self.log_sd.sum(-1))

    def entropy(self) -> Tensor:
        """``(batch,)``, in closed form."""
        return (self.log_sd + 0.5 * (1 + _LOG_2PI)).sum(-1)

    def aggregate(self) -> AggregatePosterior:
        """The equal mixture of the batch's posteriors, without gradient."""
        return AggregatePosterior(self.mean.detach(), self.log_sd.detach())


class AggregatePosterior(Proposal):
    """``(1/n) sum_i q(z|x_i)``: where an encoder puts a data set.

    ``log_prob`` costs ``n`` Gaussians a point, and works through the points in chunks.
    """

    mean: Tensor
    log_sd: Tensor

    def __init__(self, mean: Tensor, log_sd: Tensor) -> None:
        super().__init__()
        self.dim = mean.shape[1]
        self.register_buffer("mean", mean)
        self.register_buffer("log_sd", log_sd)

    def sample(self, shape: Sequence[int] = ()) -> Tensor:
        """``(*shape, d)``, each from the posterior of a random row."""
        row = torch.randint(len(self.mean), tuple(shape), device=self.mean.device)
        mean = self.mean[row]
        return mean + self.log_sd[row].exp() * torch.randn_like(mean)

    def log_prob(self, x: Tensor) -> Tensor:
        """Log-density of the mixture."""
        # |(z - m)/s|^2 = z^2/s^2 - 2 z m/s^2 + m^2/s^2: two matrix products instead of an
        # (points, rows, d) tensor. Float64, because the terms cancel where a scale is small.
        mean, log_sd = self.mean.double(), self.log_sd.double()
        precision = torch.exp(-2 * log_sd)
        scaled = mean * precision
        constant = gaussian_log_prob(mean * torch.exp(-log_sd), log_sd.sum(-1))
        constant -= math.log(len(mean))
        size = max(1, _PAIRS_AT_ONCE.get(x.device.type, 2**19) // len(mean))
        parts = [
            mixture_log_prob(constant, (z @ scaled.T).addmm_(z.square(), precision.T, alpha=-0.5))
            for z in x.reshape(-1, self.dim).double().split(size)
        ]
        return torch.cat(parts).reshape(x.shape[:-1]).to(x.dtype)


@saved()
class ConvEncoder(nn.Module):
    """28x28 images to the mean and log-variance of the posterior: ``(n, 784) -> (n, 2 latent)``.

    Three 5x5 convolutions of stride 2 with ``2g, 4g, 8g`` channels (28 -> 14 -> 7 -> 4), leaky
    ReLU, one linear layer. The paper prints 16 outputs; a mean and a variance for 16 latent
    numbers need 32.
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


@saved()
class ConvDecoder(nn.Module):
    """Latent vectors to the logits of 28x28 pixels: ``(n, latent) -> (n, 784)``.

    Four transposed convolutions (1 -> 4 -> 7 -> 14 -> 28) with ``8g, 4g, 2g, 1`` channels.
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


@saved()
class DenseEncoder(_Dense):
    """A fully connected encoder ``(n, dim) -> (n, 2 latent)``."""

    def __init__(self, dim: int, latent: int, hidden: tuple[int, ...] = (128,)) -> None:
        super().__init__(dim, 2 * latent, tuple(hidden))
        self.config: dict[str, Any] = {"dim": dim, "latent": latent, "hidden": list(hidden)}


@saved()
class DenseDecoder(_Dense):
    """A fully connected decoder ``(n, latent) -> (n, n_out)``."""

    def __init__(self, latent: int, n_out: int, hidden: tuple[int, ...] = (128,)) -> None:
        super().__init__(latent, n_out, tuple(hidden))
        self.config: dict[str, Any] = {"latent": latent, "n_out": n_out, "hidden": list(hidden)}
