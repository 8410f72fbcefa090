"""What a call changes for its duration and puts back: random state, modes of modules, defaults.

All inner code draws from torch's *global* generator: that is the only stream which every
``torch.distributions`` object, every flow, dropout and a captured CUDA graph share. Public entry
points take a seed or a generator and wrap their work in :func:`seeded`, which leaves the caller's
own stream as it found it.

That generator, torch's default dtype and its number of threads belong to the whole process, as do
Python's filters of warnings. So a block that changes or uses one of them has its turn
(:func:`alone`): fits, draws and reports of several threads come one after another, each with the
numbers it has by itself. What scores rows needs none of them, and runs at any time.
"""

from __future__ import annotations

import functools
import operator
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import nn

Method = TypeVar("Method", bound=Callable[..., Any])
SeedLike = int | torch.Generator | None
# as they are when NumPy is imported
_NUMPY_ERRORS: Any = {"divide": "warn", "over": "warn", "under": "ignore", "invalid": "warn"}
_turn = threading.RLock()


def _without_threads() -> None:
    """A forked process has none of its parent's threads: who had the turn, who computed for torch.

    So the turn is free, and torch has one thread: it would wait for the others without end.
    """
    global _turn
    if not _turn._is_owned():  # type: ignore[attr-defined]  # noqa: SLF001
        _turn = threading.RLock()
    torch.set_num_threads(1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_without_threads)


@contextmanager
def alone() -> Iterator[None]:
    """Have the turn within the block: no other thread's random numbers or defaults come between.

    A thread that has its turn may take it again.
    """
    with _turn:
        yield


def seed_of(random_state: Any, checkpoint: Any = None) -> int:
    """The seed that a ``random_state`` gives a call: scikit-learn's, or a ``numpy`` generator.

    A generator moves on. With a checkpoint and no state it is the same each time, or a run could
    not go on.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> seed_of(rng) != seed_of(rng)
    True
    """
    from numpy.random import Generator
    from sklearn.utils import check_random_state

    if isinstance(random_state, Generator):
        return int(random_state.integers(2**31 - 1))
    if random_state is None and checkpoint is not None:
        random_state = 0
    return int(check_random_state(random_state).randint(2**31 - 1))


@contextmanager
def seeded(seed: SeedLike = None, device: torch.device | str | None = None) -> Iterator[None]:
    """Run a block under its own seed and restore the global random state afterwards.

    ``seed=None`` changes nothing: the block draws from the caller's stream and advances it. A
    ``torch.Generator`` gives one number as seed, so that successive calls with it differ. The block
    runs :func:`alone`.

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
        with alone():
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
    with alone(), torch.random.fork_rng(devices=cuda_devices):
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
    if not isinstance(module, nn.Module) or not any(part.training for part in module.modules()):
        yield
        return
    with alone():  # or two threads would each take the other's mode for the caller's
        modes = [(part, part.training) for part in module.modules()]
        module.eval()
        try:
            yield
        finally:
            for part, mode in modes:
                part.training = mode


@contextmanager
def without_gradient(*modules: nn.Module) -> Iterator[None]:
    """What is computed inside leaves the parameters of ``modules`` without gradient."""
    parameters = [p for m in modules for p in m.parameters() if p.requires_grad]
    for p in parameters:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in parameters:
            p.requires_grad_(True)


def whole_or_not_at_all(method: Method) -> Method:
    """A method whose error or interrupt leaves its object with the attributes it had.

    A second fit that fails half way would otherwise leave parts of two models. It runs
    :func:`alone`, so the time of a fit begins with its turn, and :func:`on_cpu`. It has gradients,
    also within ``torch.inference_mode()``, and NumPy's own handling of rounding to zero and to
    infinity, also within ``np.errstate(all="raise")``.

    >>> class Estimator:
    ...     @whole_or_not_at_all
    ...     def fit(self, x):
    ...         self.x_ = x
    ...         self.inverse_ = 1 / x
    >>> estimator = Estimator()
    >>> estimator.fit(2)
    >>> estimator.fit(0)
    Traceback (most recent call last):
    ZeroDivisionError: division by zero
    >>> estimator.x_
    2
    """

    @functools.wraps(method)
    def wrapped(self: Any, *args: Any, **options: Any) -> Any:
        with alone(), on_cpu(), torch.inference_mode(False), np.errstate(**_NUMPY_ERRORS):
            before = dict(vars(self))
            try:
                return method(self, *args, **options)
            except BaseException:
                vars(self).clear()
                vars(self).update(before)
                raise

    return cast(Method, wrapped)


@contextmanager
def on_cpu() -> Iterator[None]:
    """New tensors on the CPU, products in their own precision; in this thread alone.

    Whatever the caller's default device is, and within the caller's ``torch.autocast``.
    """
    # only where needed: a device context makes every torch call slower
    device = nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
    rounded = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    precise = torch.autocast("cpu", enabled=False) if rounded else nullcontext()
    precise_on_gpu = torch.autocast("cuda", enabled=False) if rounded else nullcontext()
    with device, precise, precise_on_gpu:
        yield


@contextmanager
def float32_on_cpu() -> Iterator[None]:
    """Build modules in float32 on the CPU, whatever the caller's default dtype and device are.

    A model loaded by a program that works in float64, or on a GPU by default, must be the model
    that was saved. The block runs :func:`alone`.

    >>> torch.set_default_dtype(torch.float64)
    >>> with float32_on_cpu():
    ...     torch.zeros(1).dtype
    torch.float32
    >>> torch.get_default_dtype()
    torch.float64
    >>> torch.set_default_dtype(torch.float32)
    """
    with alone(), on_cpu():
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread for torch's own work within the block, which runs :func:`alone`.

    Steps on small matrices gain nothing by a second thread, and lose a great deal on a busy machine
    where threads wait for one another.
    """
    with alone():
        before = _threads_of_process()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)


def _threads_of_process() -> int:
    """The number of threads that torch gives a new thread of Python.

    This thread's own number may be the 1 of another thread's block, during which it began.
    """
    found: list[int] = []
    asked = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    asked.start()
    asked.join()
    return found[0]
