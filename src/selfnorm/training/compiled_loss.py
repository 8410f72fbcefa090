"""A task's loss through ``torch.compile``, with a way out where nothing can be compiled."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from selfnorm.errors import SelfnormWarning

__all__ = ["Loss", "compiled_loss"]

Loss = Callable[[tuple[Tensor, ...]], tuple[Tensor, dict[str, Tensor]]]


def compiled_loss(plain: Loss) -> Loss:
    """A task's loss through ``torch.compile``; without a working compiler the loss itself."""
    # Eager random numbers: a compiled run is then the plain run up to rounding.
    fused: Loss = torch.compile(plain, dynamic=False, options={"fallback_random": True})

    def loss(batch: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:
        nonlocal fused
        if fused is plain:
            return fused(batch)
        try:
            return fused(batch)
        except RuntimeError as error:  # an error of the loss itself comes again below
            first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
            warnings.warn(
                f"the training step could not be compiled ({first_line}); going on without, which "
                "is slower. torch.compile needs a C++ compiler (CPU) or Triton (CUDA)",
                SelfnormWarning,
                stacklevel=2,
            )
            fused = plain
            return fused(batch)

    return loss
