"""Labels of categories and names of columns as plain JSON, and back with their types."""

from __future__ import annotations

import base64
import datetime as dt
import math
import uuid
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np

from selfnorm.errors import DataError


def _of_pandas(name: str) -> Callable[[list[object]], Any]:
    """A class of pandas, called with a list of arguments."""

    def make(arguments: list[object]) -> object:
        import pandas as pd

        return getattr(pd, name)(*arguments)

    return make


def _timestamp(memo: list[Any]) -> Any:
    moment = _of_pandas("Timestamp")(memo[:1])
    return moment if memo[1] is None else moment.tz_convert(memo[1])


# what JSON holds of a label, and the label again; by the name of its type
_MEMOS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "float": (str, float),
    "datetime": (dt.datetime.isoformat, dt.datetime.fromisoformat),
    "date": (dt.date.isoformat, dt.date.fromisoformat),
    "time": (dt.time.isoformat, dt.time.fromisoformat),
    "timedelta": (lambda v: [v.days, v.seconds, v.microseconds], lambda v: dt.timedelta(*v)),
    "decimal": (str, Decimal),
    "fraction": (lambda v: [v.numerator, v.denominator], lambda v: Fraction(*v)),
    "uuid": (str, uuid.UUID),
    "bytes": (lambda v: base64.b64encode(v).decode(), base64.b64decode),
    "tuple": (lambda v: [plain(item) for item in v], lambda v: tuple(map(unplain, v))),
    "interval": (
        lambda v: [plain(v.left), plain(v.right), v.closed],
        lambda v: _of_pandas("Interval")([unplain(v[0]), unplain(v[1]), v[2]]),
    ),
    "timestamp": (lambda v: [v.isoformat(), None if v.tz is None else str(v.tz)], _timestamp),
    "pandas timedelta": (lambda v: [v.value, "ns"], _of_pandas("Timedelta")),
    "period": (lambda v: [str(v), v.freqstr], _of_pandas("Period")),
}
_MODULES = ("builtins", "datetime", "decimal", "fractions", "uuid")


def type_name(kind: type) -> str:
    """The name of a type in :func:`plain`; that of a type from elsewhere has a dot.

    Example:
        >>> type_name(Decimal), type_name(np.ndarray)
        ('decimal', 'numpy.ndarray')
    """
    module, name = kind.__module__.split(".")[0], kind.__name__.lower()
    if module == "pandas":
        return "pandas timedelta" if name == "timedelta" else name
    return name if module in _MODULES else f"{module}.{kind.__name__}"


def plain(label: object) -> Any:
    """A label as JSON holds it; :func:`unplain` is its inverse.

    Example:
        >>> unplain(plain(dt.date(2020, 2, 29)))
        datetime.date(2020, 2, 29)
    """
    if isinstance(label, np.generic):
        label = label.item()
    if label is None or type(label) in (str, bool, int):
        return label
    if type(label) is float and math.isfinite(label):
        return label
    name = type_name(type(label))
    if name not in _MEMOS:
        raise DataError(
            f"values of type {type(label).__name__} cannot be modelled; turn them into numbers, "
            "dates or text (str)"
        )
    return {name: _MEMOS[name][0](label)}


def unplain(label: object) -> Any:
    """The label that :func:`plain` wrote."""
    if not isinstance(label, dict):
        return label
    ((name, memo),) = label.items()
    return _MEMOS[name][1](memo)
