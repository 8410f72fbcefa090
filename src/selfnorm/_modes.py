"""Training and evaluation mode of modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ["evaluating"]


@contextmanager
def evaluating(module: Any) -> Iterator[None]:
    """Evaluation mode within the block; afterwards every part has the mode it had.

    Dropout does not act, and batch normalisation neither depends on the other rows nor changes.
    Parts may differ in their mode (a frozen encoder inside a model that trains), so one flag for
    all is not enough to put them back. What is no module (a plain function) has no mode.

    Example:
        >>> net = nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 1).eval())
        >>> with evaluating(net):
        ...     [m.training for m in net]
        [False, False]
        >>> [m.training for m in net]
        [True, False]
    """
    if not isinstance(module, nn.Module):
        yield
        return
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode
