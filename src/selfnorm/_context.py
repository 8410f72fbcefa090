"""What a call changes for its duration and puts back: random state, modes of modules, defaults.

All inner code draws from torch's *global* generator: that is the only stream which every
``torch.distributions`` object, every flow, dropout and a captured CUDA graph share. Public entry
points take a seed or a generator and wrap their work in :func:`seeded`, which leaves the caller's
own stream as it found it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

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


@contextmanager
def float32_on_cpu() -> Iterator[None]:
    """Build modules in float32 on the CPU, whatever the caller's default dtype and device are.

    A model loaded by a program that works in float64, or on a GPU by default, must be the model
    that was saved.

    >>> torch.set_default_dtype(torch.float64)
    >>> with float32_on_cpu():
    ...     torch.zeros(1).dtype
    torch.float32
    >>> torch.get_default_dtype()
    torch.float64
    >>> torch.set_default_dtype(torch.float32)
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        # only where needed: a device context makes every torch call slower
        with nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread for torch's own work within the block.

    Steps on small matrices gain nothing by a second thread, and lose a great deal on a busy machine
    where threads wait for one another.

    >>> before = torch.get_num_threads()
    >>> with one_thread():
    ...     torch.get_num_threads()
    1
    >>> torch.get_num_threads() == before
    True
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
