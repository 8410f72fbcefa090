"""What a decoder's output means: Bernoulli, Gaussian or categorical observations.

A likelihood maps decoder outputs ``(..., n_parameters)`` and rows ``(..., dim)`` to
``log p(x|z)``, summed over the row. Leading dimensions broadcast.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from selfnorm.errors import DataError

__all__ = ["Bernoulli", "Categorical", "GaussianNoise", "Likelihood", "as_likelihood"]


class Likelihood(nn.Module):
    """``p(x|z)`` given the decoder's output."""

    config: dict[str, Any]
    n_parameters = 1  # decoder outputs for each value of a row

    def flat(self, output: Any) -> Tensor:
        """A decoder's output ``(n, ...)`` as rows ``(n, n_parameters * dim)``."""
        if not isinstance(output, Tensor):
            raise DataError(
                f"the decoder must give one tensor, the parameters of the likelihood (logits or "
                f"means), not a {type(output).__name__}"
            )
        return output.flatten(1)

    def log_prob(self, output: Tensor, x: Tensor) -> Tensor:
        """``log p(x|z)``: ``(..., n_parameters), (..., dim) -> (...)``."""
        raise TypeError(f"{type(self).__name__} does not define log_prob() for {output.shape, x}")

    def mean(self, output: Tensor) -> Tensor:
        """Mean of ``x`` (probabilities for binary and categorical rows)."""
        raise TypeError(f"{type(self).__name__} does not define mean() for {output.shape}")

    def sample(self, output: Tensor) -> Tensor:
        """One draw of ``x`` per row."""
        raise TypeError(f"{type(self).__name__} does not define sample() for {output.shape}")

    def check(self, x: Tensor) -> None:
        """Refuse rows that the likelihood gives no probability."""


class Bernoulli(Likelihood):
    """Independent binary pixels; the decoder gives their logits. Counting measure.

    Example:
        >>> Bernoulli().log_prob(torch.zeros(1, 2), torch.tensor([[0.0, 1.0]]))
        tensor([-1.3863])
    """

    def __init__(self) -> None:
        super().__init__()
        self.config = {}

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
        return (-0.5 * e.square() - self.log_scale - 0.5 * math.log(2 * math.pi)).sum(-1)

    def mean(self, output: Tensor) -> Tensor:
        """The output itself."""
        return output

    def sample(self, output: Tensor) -> Tensor:
        """Output plus noise."""
        return output + self.log_scale.exp() * torch.randn_like(output)


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

    def flat(self, output: Any) -> Tensor:
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

    def _log_softmax(self, output: Tensor) -> Tensor:
        return torch.log_softmax(output.unflatten(-1, (-1, self.n_classes)), -1)

    def log_prob(self, output: Tensor, x: Tensor) -> Tensor:
        """Sum of the log-probabilities of the values."""
        log_p = self._log_softmax(output)
        shape = torch.broadcast_shapes(log_p.shape[:-1], x.shape)
        index = x.long().expand(shape).unsqueeze(-1)
        return log_p.expand(*shape, -1).gather(-1, index).squeeze(-1).sum(-1)

    def mean(self, output: Tensor) -> Tensor:
        """Probabilities ``(..., dim, n_classes)``."""
        return self._log_softmax(output).exp()

    def sample(self, output: Tensor) -> Tensor:
        """Values as floating-point numbers."""
        p = self.mean(output)
        drawn = torch.multinomial(p.reshape(-1, self.n_classes), 1)
        return drawn.reshape(p.shape[:-1]).to(output.dtype)

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
