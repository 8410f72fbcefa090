"""Rows as people bring them (tensors, arrays, data frames, lists) as tensors, once at the door.

And parameters: what they may be, and what a constructor was given.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, time, timedelta
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from selfnorm.errors import DataError, SelfnormError

# What scikit-learn calls a random state, or a generator of NumPy.
RandomState = int | np.random.RandomState | np.random.Generator | None


@dataclass(frozen=True)
class Number:
    """The numbers that a parameter may be; the ends of the range are part of it unless open.

    Example:
        >>> print(Number(0, open_low=True), "|", Number(1, whole=True))
        a number > 0 | a whole number >= 1
        >>> Number(0, 1, open_high=True).holds(1.0)
        False
    """

    low: float
    high: float = math.inf
    whole: bool = False
    open_low: bool = False
    open_high: bool = False

    def holds(self, value: object) -> bool:
        """Whether a value is such a number."""
        kind = Integral if self.whole else Real
        if not isinstance(value, kind) or isinstance(value, bool) or math.isnan(value):
            return False
        number = float(value)
        above = number > self.low if self.open_low else number >= self.low
        return above and (number < self.high if self.open_high else number <= self.high)

    def __str__(self) -> str:
        """In words, for an error."""
        what = "a whole number" if self.whole else "a number"
        bounds = [f"{'>' if self.open_low else '>='} {self.low:g}"]
        if self.high < math.inf:
            bounds.append(f"{'<' if self.open_high else '<='} {self.high:g}")
        return f"{what} {' and '.join(bounds)}"


def check_parameters(owner: object, allowed: Mapping[str, Sequence[object]]) -> None:
    """Refuse an attribute that is none of what is allowed: numbers, texts, types or ``None``.

    >>> class Model:
    ...     hidden = 0
    >>> check_parameters(Model(), {"hidden": [Number(1, whole=True), None]})
    Traceback (most recent call last):
    selfnorm.errors.DataError: 'hidden' of Model must be a whole number >= 1 or None, got 0
    """
    for name, choices in allowed.items():
        value, words = getattr(owner, name), []
        for choice in choices:
            if isinstance(choice, Number):
                fits, said = choice.holds(value), str(choice)
            elif isinstance(choice, type):
                fits, said = isinstance(value, choice), f"a {choice.__name__}"
            else:  # a text or None
                fits = value is choice or (isinstance(value, str) and value == choice)
                said = repr(choice)
            if fits:
                break
            words.append(said)
        else:
            raise DataError(
                f"{name!r} of {type(owner).__name__} must be {' or '.join(words)}, got {value!r}"
            )


def as_rows(x: object, name: str = "x", dtype: torch.dtype | None = None) -> Tensor:
    """A floating-point tensor of what ``x`` holds; a tensor of that type comes back as it is.

    Args:
        x: tensor, NumPy array, data frame of numbers, or nested lists.
        name: what to call it in an error.
        dtype: floating-point type wanted; by default that of ``x``, float32 where it is no
            tensor or holds whole numbers.
    """
    if not isinstance(x, Tensor):
        x = torch.as_tensor(_numbers(x, name), dtype=dtype or torch.float32)
    if x.is_complex():
        raise DataError(f"{name} holds complex numbers; give real and imaginary parts as columns")
    if not x.is_floating_point():
        x = x.float()
    return x if dtype is None else x.to(dtype)


def as_tensors(data: tuple[object, ...], name: str, device: torch.device) -> tuple[Tensor, ...]:
    """What people bring, as tensors on a device with one number of rows, at least one."""
    tensors = tuple(t if isinstance(t, Tensor) else as_rows(t, name) for t in data)
    lengths = sorted({len(t) for t in tensors})
    if lengths[0] < 1:
        raise DataError(f"{name} hold no rows")
    if len(lengths) > 1:
        raise DataError(f"the parts of {name} have different numbers of rows: {lengths}")
    # Detached: training would otherwise leave gradients in the caller's table.
    return tuple(t.detach().to(device) for t in tensors)


def _numbers(x: object, name: str) -> np.ndarray:
    refuse_masked(x, name)
    values = np.asarray(x)
    if values.dtype.kind == "O" and values.ndim == 0:  # a data loader, say
        raise DataError(
            f"{name} must be rows of numbers (a tensor, an array, a data frame), not a "
            f"{type(x).__name__}"
        )
    # An array of dates would become counts of nanoseconds, one of complex numbers lose a half.
    if values.dtype.kind not in "biufO":
        raise DataError(f"{name} must hold real numbers, not {values.dtype}; encode them first")
    try:
        return values.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{name} must hold real numbers only ({error}); drop text and dates, or encode them"
        ) from error


def one_per_row(
    values: object, shape: Sequence[int], whose: str, error: type[Exception] = DataError
) -> Tensor:
    """What a function of the user's gives, one value a row: ``(*shape,)``."""
    values = torch.as_tensor(values)
    if values.numel() != math.prod(shape):
        raise error(
            f"{whose} must return one value a row, shape {tuple(shape)}; got "
            f"{tuple(values.shape)}. Is a sum over the columns missing: .sum(-1)?"
        )
    return values.reshape(tuple(shape))


def check_rows(
    x: object,
    name: str,
    *,
    width: int | None = None,
    minimum: int = 2,
    constant_ok: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """A table of finite rows, or an error that says what is wrong and where."""
    x = as_rows(x, name, dtype)
    if x.dim() != 2:
        cure = "a single column needs x[:, None]" if x.dim() < 2 else "x.flatten(1) makes one"
        raise DataError(
            f"{name} must be a table of shape (rows, columns), got shape {tuple(x.shape)}; {cure}"
        )
    if width is not None and x.shape[1] != width:
        raise DataError(f"{name} has {x.shape[1]} columns, expected {width}")
    if x.shape[0] < minimum:
        raise DataError(f"{name} has {x.shape[0]} row(s); at least {minimum} are needed")
    finite = torch.isfinite(x)
    if not bool(finite.all()):
        row, column = (int(v) for v in (~finite).nonzero()[0])
        raise DataError(
            f"{name} holds {int((~finite).sum())} NaN or infinite value(s), the first in row "
            f"{row}, column {column}; drop or impute those rows"
        )
    if minimum > 1 and not constant_ok:
        flat = (x == x[0]).all(0)
        if bool(flat.any()):
            constant = f"column {int(flat.nonzero()[0])} of {name} is constant"
            raise DataError(f"{constant}: it has no density; drop the column")
    return x


_NO_NUMBERS = (str, date, time, timedelta)
_HUGE = 1e150  # squares of larger numbers are beyond double precision


def refuse_repeated_names(X: object, name: str = "X") -> None:
    """Refuse a data frame in which two columns share a name: nothing could be asked for by it."""
    columns = getattr(X, "columns", ())  # names in a data frame, whole columns in Arrow's tables
    times = Counter(str(column) for column in columns if isinstance(column, str | int | tuple))
    for column, n in times.items():
        if n > 1:
            raise DataError(
                f"{name}: column {column!r} appears {n} times; rename or drop all but one"
            )


def all_numbers(X: Any) -> bool:
    """Whether a table is one of numbers without gaps, which needs no schema.

    Example:
        >>> all_numbers([[1.0, 2.0]]), all_numbers([[1.0, None]]), all_numbers([["a", 1.0]])
        (True, False, False)
    """
    if hasattr(X, "toarray"):  # a sparse matrix (some are dicts), refused elsewhere
        return True
    if isinstance(X, Mapping) or np.ma.is_masked(X):
        return False
    columns = [np.asarray(X[name]) for name in X.columns] if _is_frame(X) else [np.asarray(X)]
    if any(values.dtype.kind == "c" for values in columns):
        return True  # refused elsewhere
    try:
        return not any(_holds_text(v) or np.isnan(v.astype(np.float64)).any() for v in columns)
    except (TypeError, ValueError):
        return False


def _is_frame(X: object) -> bool:
    """Whether it is a data frame of pandas or polars."""
    return hasattr(X, "dtypes") and hasattr(X, "columns")


def refuse_text(X: Any) -> None:
    """Name the columns of a data frame that hold text or dates, or that share a name.

    Other messages show a cell only, or those of another library. An array of dates is refused too:
    it would be read as counts of nanoseconds.
    """
    refuse_repeated_names(X)
    refuse_masked(X, "X")
    if not _is_frame(X):
        if getattr(getattr(X, "dtype", None), "kind", None) in ("M", "m"):
            raise DataError("X holds dates or durations: turn them into numbers first")
        return
    wrong = [repr(str(name)) for name in X.columns if _holds_text(X[name])]
    if wrong:
        raise DataError(
            f"column(s) {', '.join(wrong[:5])} hold text, categories or dates: encode them as "
            "numbers first, e.g. with sklearn.preprocessing.OneHotEncoder, or drop them"
        )


def _holds_text(column: object) -> bool:
    """Whether there are words or dates in an array, a list or a column of any type."""
    values = np.asarray(column)
    cells = values.ravel() if values.dtype.kind == "O" else ()
    return values.dtype.kind in "USTMm" or any(isinstance(cell, _NO_NUMBERS) for cell in cells)


def refuse_text_target(y: object) -> None:
    """Refuse a target of words or dates, in arrays, lists and columns of type object or category.

    >>> refuse_text_target(["low", "high"])
    Traceback (most recent call last):
    selfnorm.errors.DataError: y holds text or dates: turn it into numbers first
    """
    refuse_masked(y, "y")
    if _holds_text(y):
        raise DataError("y holds text or dates: turn it into numbers first")


def check_device(device: str | torch.device | None) -> torch.device:
    """A device that can compute here, or an error that says why not; ``None`` is the CPU.

    >>> check_device("meta")
    Traceback (most recent call last):
    selfnorm.errors.DataError: device 'meta' cannot be used here: it holds no numbers; use 'cpu'
    """
    if str(device).startswith("cuda") and not torch.cuda.is_available():
        raise DataError(f"device {str(device)!r}: no CUDA device is available here; use 'cpu'")
    try:
        usable = torch.device(device or "cpu")
        if usable.type == "meta":
            raise RuntimeError("it holds no numbers")
        float(torch.ones((), device=usable))
    except (RuntimeError, AssertionError, ValueError) as error:
        detail = str(error).splitlines()[0]
        raise DataError(
            f"device {str(device)!r} cannot be used here: {detail}; use 'cpu'"
        ) from error
    return usable


def refuse_masked(x: object, name: str) -> None:
    """Refuse an array with masked cells, whose numbers would count as if they were given.

    >>> refuse_masked(np.ma.masked_equal([1.0, -999.0], -999.0), "y")
    Traceback (most recent call last):
    selfnorm.errors.DataError: y has 1 masked cell(s): drop those rows or fill the cells in
    """
    if np.ma.is_masked(x):
        hidden = int(np.ma.count_masked(x))
        raise DataError(f"{name} has {hidden} masked cell(s): drop those rows or fill the cells in")


def refuse_gaps(values: np.ndarray, name: str) -> None:
    """Refuse numbers of which some are not known.

    >>> refuse_gaps(np.array([1.0, np.nan]), "y")
    Traceback (most recent call last):
    selfnorm.errors.DataError: y has no value in 1 row(s), the first is row 1: drop those rows
    """
    rows = np.flatnonzero(np.isnan(values).reshape(len(values), -1).any(1))
    if len(rows):
        raise DataError(
            f"{name} has no value in {len(rows)} row(s), the first is row {rows[0]}: drop those "
            "rows"
        )


def refuse_huge(values: np.ndarray, name: str) -> None:
    """Refuse numbers whose squares overflow: their spread could not be computed.

    >>> refuse_huge(np.array([1.0, 1e200]), "y")
    Traceback (most recent call last):
    selfnorm.errors.DataError: y holds numbers as large as 1e+200: give it in other units
    """
    largest = float(np.abs(values).max(initial=0.0))
    if largest > _HUGE:
        raise DataError(f"{name} holds numbers as large as {largest:.0e}: give it in other units")


def refuse_constant(x: np.ndarray, names: Sequence[object], source: str = "X") -> None:
    """An error that names the columns of ``x (n, d)`` which hold one value only.

    >>> refuse_constant(np.array([[1.0, 2.0], [1.0, 3.0]]), ["a", "b"])
    Traceback (most recent call last):
    selfnorm.errors.DataError: X: column 'a' is constant: a constant has no density; drop it
    """
    # a spread of rounding size is no spread: a column of 0.1 may vary in its last digit
    flat = np.flatnonzero(np.ptp(x, axis=0) <= 1e-12 * np.abs(x).max(axis=0))
    if len(flat):
        shown = ", ".join(repr(names[j]) for j in flat[:5])
        what, cure = f"columns {shown} are", "drop them"
        if len(flat) == 1:
            what, cure = f"column {shown} is", "drop it"
        raise DataError(f"{source}: {what} constant: a constant has no density; {cure}")


@contextmanager
def own_errors() -> Iterator[None]:
    """What scikit-learn refuses is a :class:`DataError`, in its words."""
    try:
        yield
    except SelfnormError:
        raise
    except ValueError as error:
        raise DataError(str(error)) from error


def checked_weights(sample_weight: ArrayLike, n: int) -> np.ndarray:
    """How much each of ``n`` rows counts ``(n,)``, 1 at most.

    Example:
        >>> checked_weights([1, 4], 2)
        array([0.25, 1.  ])
    """
    weights = np.asarray(sample_weight, dtype=np.float64)
    if weights.shape != (n,) or not np.isfinite(weights).all() or (weights < 0).any():
        raise DataError(
            f"sample_weight needs {n} numbers of zero or more, one for each row; got "
            f"shape {weights.shape}"
        )
    return weights / max(weights.max(), np.finfo(float).tiny)  # or sums may overflow


def digest(*arrays: np.ndarray) -> str:
    """A short name of arrays of numbers, the same for the same numbers in the same order.

    >>> digest(np.arange(3.0)) == digest(np.array([0.0, 1.0, 2.0])) != digest(np.zeros(3))
    True
    """
    content = hashlib.sha256()
    for array in arrays:
        content.update(np.ascontiguousarray(array, dtype=np.float64).data)
    return content.hexdigest()[:16]


def remembered(construct: Callable[..., None]) -> Callable[..., None]:
    """A constructor that keeps its arguments as ``config``, defaults included.

    Entries that it puts there itself, such as orders it has drawn, take the place of arguments.

    >>> class Box:
    ...     @remembered
    ...     def __init__(self, width, *, sides=(1, 2)):
    ...         self.area = width**2
    >>> Box(3).config
    {'width': 3, 'sides': [1, 2]}
    """
    signature = inspect.signature(construct)
    _, *names = signature.parameters

    @functools.wraps(construct)
    def remembering(self: Any, *args: Any, **options: Any) -> None:
        construct(self, *args, **options)
        given = signature.bind(self, *args, **options)
        given.apply_defaults()
        config = dict(zip(names, given.args[1:], strict=False)) | given.kwargs
        plain = {k: list(v) if isinstance(v, tuple) else v for k, v in config.items()}
        self.config = plain | vars(self).get("config", {})

    return remembering
