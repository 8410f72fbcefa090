"""One place for seeds.

All inner code draws from torch's *global* generator: that is the only stream which every
``torch.distributions`` object, every flow, dropout and a captured CUDA graph share. Public entry
points take a seed or a generator and wrap their work in :func:`seeded`, which leaves the caller's
own stream as it found it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["SeedLike", "random_state", "seeded", "set_random_state"]

SeedLike = int | torch.Generator | None


@contextmanager
def seeded(seed: SeedLike = None, device: torch.device | str | None = None) -> Iterator[None]:
    """Run a block under its own seed and restore the global random state afterwards.

    ``seed=None`` changes nothing: the block draws from the caller's stream and advances it. A
    ``torch.Generator`` gives one number as seed, so that successive calls with it differ.

    Example:
        >>> import torch
        >>> with seeded(0):
        ...     a = torch.randn(2)
        >>> with seeded(0):
        ...     b = torch.randn(2)
        >>> torch.equal(a, b)
        True
    """
    if seed is None:
        yield
        return
    if isinstance(seed, torch.Generator):
        seed = int(torch.randint(2**62, (), generator=seed, device=seed.device))
    try:
        seed = operator.index(seed)  # NumPy's integers too
    except TypeError as error:
        raise TypeError(
            f"a seed is a whole number, a torch.Generator or None, not {seed!r}"
        ) from error
    target = torch.device(device) if device is not None else torch.device("cpu")
    cuda_devices = []
    if target.type == "cuda":
        cuda_devices = [torch.cuda.current_device() if target.index is None else target.index]
    with torch.random.fork_rng(devices=cuda_devices):
        # Not torch.manual_seed: that would reseed every GPU, and only the forked one is restored.
        torch.default_generator.manual_seed(seed)
        for index in cuda_devices:
            torch.cuda.default_generators[index].manual_seed(seed)
        yield


def random_state(device: torch.device) -> torch.Tensor:
    """State of the stream that draws on ``device``, to return to with :func:`set_random_state`."""
    on_cuda = device.type == "cuda"
    return torch.cuda.get_rng_state(device) if on_cuda else torch.get_rng_state()


def set_random_state(state: torch.Tensor, device: torch.device) -> None:
    """Return the stream of ``device`` to an earlier state."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
