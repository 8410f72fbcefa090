"""Rows a VAE makes itself: as many as an encoder could wish for.

An encoder learns the posterior of the rows it has seen, and on others its ELBO is lower than the
model allows. The decoder's own rows, ``x -> z -> x'``, are like the data, never the same twice, and
their posterior under the model is what the encoder is to find.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from selfnorm.vae.model import EnergyVAE

__all__ = ["dreamt", "held"]


@torch.no_grad()
def dreamt(vae: EnergyVAE, x: Tensor) -> Tensor:
    """One row ``x' ~ p(x'|z)``, ``z ~ q(z|x)``, for each of ``x``; same shape.

    Example:
        >>> from selfnorm.vae.model import EnergyVAE
        >>> from selfnorm.vae.networks import DenseDecoder, DenseEncoder
        >>> vae = EnergyVAE(DenseEncoder(6, 2), DenseDecoder(2, 6), prior=2)
        >>> dreamt(vae, torch.zeros(5, 6)).shape
        torch.Size([5, 6])
    """
    z = vae.encode(x).sample(1)[0]
    rows: Tensor = vae.likelihood.sample(vae.decode(z))
    return rows.to(x.dtype).reshape(x.shape)


@contextmanager
def held(*modules: nn.Module) -> Iterator[None]:
    """What is computed inside leaves the parameters of ``modules`` without gradient.

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> with held(layer):
        ...     y = layer(torch.ones(1, 2, requires_grad=True))
        >>> y.sum().backward()
        >>> layer.weight.grad is None, layer.weight.requires_grad
        (True, True)
    """
    parameters = [p for m in modules for p in m.parameters() if p.requires_grad]
    for p in parameters:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in parameters:
            p.requires_grad_(True)
