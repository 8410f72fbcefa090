"""Cells of a column as numbers, moments or labels, and NumPy arrays and Python objects of them.

What a column of Python objects is goes by their types: :data:`_STORES` are those that become
numbers or moments; others are labels, if :func:`plain` knows their type.
"""

from __future__ import annotations

import base64
import datetime as dt
import math
import sys
import uuid
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from fractions import Fraction
from functools import cached_property, partial
from typing import Any, TypeAlias

import numpy as np

from selfnorm.columns.text import is_gap, numbers_from
from selfnorm.errors import DataError

Form: TypeAlias = dict[str, Any]  # a memo of how a column was stored, plain JSON
EXACT = 2**53  # whole numbers beyond are not all held by a float
_EPOCH = dt.datetime(1970, 1, 1)


@dataclass
class Cells:
    """The cells of one column.

    Attributes:
        kind: ``"number"``, ``"date"`` or ``"label"``.
        values: float64 numbers, int64 seconds since 1970 (UTC), or int64 places in ``labels``.
        missing: where there is a gap.
        labels: distinct labels, as Python values; empty for numbers and dates.
        form: how the column was stored, plain JSON; ``form["dtype"]`` is what a user calls it.
    """

    kind: str
    values: np.ndarray
    missing: np.ndarray
    labels: list[Any] = field(default_factory=list)
    form: Form = field(default_factory=dict)
    texts: Sequence[Any] | None = field(default=None, init=False, repr=False, compare=False)

    @classmethod
    def of_texts(
        cls,
        texts: Sequence[Any],
        missing: np.ndarray,
        form: Form,
        numbers: np.ndarray | None = None,
    ) -> Cells:
        """Cells of text and ``None``, whose labels are looked up when they are first used."""
        cells = cls.__new__(cls)
        cells.kind, cells.texts, cells.missing, cells.form = "label", texts, missing, form
        if numbers is not None:
            cells.numbers = numbers
        return cells

    def __getattr__(self, name: str) -> object:
        if name not in ("values", "labels") or self.texts is None:
            raise AttributeError(name)
        self.labels, self.values = distinct_of(list(self.texts), None)
        return self.__dict__[name]

    @cached_property
    def numbers(self) -> np.ndarray | None:
        """The numbers of a column of text, as :func:`numbers_from` reads them, names among them."""
        if self.texts is None:
            return None
        texts = ["" if text is None else text for text in self.texts]
        return numbers_from(texts, names=True)

    def __len__(self) -> int:
        return len(self.missing)

    def rows(self, which: slice) -> Cells:
        """Some of the rows; labels stay, whether they are among them or not."""
        return replace(self, values=self.values[which], missing=self.missing[which])

    @property
    def seen(self) -> np.ndarray:
        """The values without gaps."""
        return self.values[~self.missing]

    def without_gaps(self, missing: Collection[str]) -> Cells:
        """The same cells with texts that stand for a gap taken as one."""
        gaps = np.array([is_gap(label, missing) for label in self.labels] + [True])
        if not gaps[:-1].any():
            return self
        gone = gaps[self.values]
        values = np.where(gone, -1, self.values)
        form = self.form_with_gap(gaps[:-1])
        return replace(self, values=values, missing=self.missing | gone, form=form)

    def form_with_gap(self, gaps: np.ndarray) -> Form:
        """The form with the commonest of the labels that are ``gaps``, if all gaps are so."""
        if self.missing.any() or not gaps.any():
            return self.form
        counts = np.bincount(self.seen, minlength=len(self.labels))
        usual = max(np.flatnonzero(gaps), key=lambda i: counts[i])
        return self.form | {"gap": self.labels[usual]}

    @property
    def declared(self) -> bool:
        """Whether the table itself says that the column is a category."""
        return "categories" in self.form


# Labels and names as plain JSON


def _of_pandas(name: str, *arguments: object) -> Any:
    """An object of a class of pandas."""
    import pandas as pd

    return getattr(pd, name)(*arguments)


def _timestamp(memo: list[Any]) -> Any:
    moment = _of_pandas("Timestamp", memo[0])
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
        lambda v: _of_pandas("Interval", unplain(v[0]), unplain(v[1]), v[2]),
    ),
    "timestamp": (lambda v: [v.isoformat(), None if v.tz is None else str(v.tz)], _timestamp),
    "pandas timedelta": (lambda v: [v.value, "ns"], lambda v: _of_pandas("Timedelta", *v)),
    "period": (lambda v: [str(v), v.freqstr], lambda v: _of_pandas("Period", *v)),
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


# Reading


def cells_of_array(column: np.ndarray, missing: np.ndarray, form: Form) -> Cells:
    """Cells of an array of any type, whatever stands where there is a gap."""
    kind = column.dtype.kind
    if column.ndim != 1:
        raise DataError(f"expected one cell per row, got an array of shape {column.shape}")
    if kind == "b":
        places = np.where(missing, -1, column.astype(np.int64))
        return Cells("label", places, missing, [False, True], form)
    if kind in "iu" and len(column) and max(-int(column.min()), int(column.max())) >= EXACT:
        return _cells_of_objects(column.tolist(), missing, form)
    if kind in "iuf":
        wide = column.astype(np.float64)
        if column.dtype in (np.float16, np.float32):
            wide = _shortest(wide, column.dtype)
        values = np.where(missing, np.nan, wide)
        return Cells("number", values, np.isnan(values), [], form)
    if kind == "M":
        moments = column.astype("datetime64[us]")
        missing = missing | np.isnat(moments)
        years = column[~missing].astype("datetime64[Y]")  # microseconds may have overflown
        if (years < np.datetime64("0001")).any() or (years > np.datetime64("9999")).any():
            raise DataError(
                "dates before the year 1 or after 9999 cannot be modelled; give numbers"
            )
        micro = np.where(missing, 0, moments.astype(np.int64))
        if (micro % 10**6).any():
            form = form | {"finer": True}  # than a second: left out
        return Cells("date", micro // 10**6, missing, [], form)
    if kind == "m" and column.dtype != "m8":  # which has no unit
        spans = column.astype("timedelta64[us]")
        missing = missing | np.isnat(spans)
        seconds = np.where(missing, np.nan, spans.astype(np.int64) / 1e6)
        return Cells("number", seconds, missing, [], {"store": "duration"} | form)
    if kind not in "SUOT":
        raise DataError(f"values of type {column.dtype} cannot be modelled; turn them into numbers")
    column = column.astype(object)
    values = column.tolist()
    pandas = sys.modules.get("pandas")
    if {*map(type, values)} <= {str}:
        pass
    elif kind in "OT" and pandas is not None:  # knows pd.NA, which cannot be compared
        missing = missing | pandas.isna(column)
    elif kind in "OT":
        missing = missing | [value is None or value != value for value in values]
    return _cells_of_objects(values, missing, form)


def as_objects(values: Sequence[object]) -> np.ndarray:
    """An array of Python objects, tuples and lists among them."""
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


def _floats(values: Sequence[Any]) -> np.ndarray:
    return np.array([np.nan if v is None else float(v) for v in values], dtype=np.float64)


def _times(values: Sequence[Any]) -> np.ndarray:
    if any(v is not None and v.tzinfo is not None for v in values):
        raise DataError("times of day with a time zone cannot be modelled; give dates, or no zone")
    midnight = dt.date(1970, 1, 1)
    since = [v and (dt.datetime.combine(midnight, v) - _EPOCH).total_seconds() for v in values]
    return _floats(since)


def _in_zone(moment: dt.datetime, form: Form) -> dt.datetime:
    if "zone" not in form:
        return moment
    zone = _zone(form["zone"], form["offset"])
    return moment.replace(tzinfo=dt.timezone.utc).astimezone(zone)


_spans, _moments = partial(np.array, dtype="timedelta64[us]"), partial(np.array, dtype="M8[us]")


def _decimal(value: float, form: Form) -> Decimal:
    return Decimal(f"{Decimal(repr(value)):.{form['decimals']}f}")


def _time(value: float, _: Form) -> dt.time:
    return (_EPOCH + dt.timedelta(seconds=min(max(value, 0.0), 86_399.999999))).time()


# How Python objects of one type, by its :func:`type_name`, are kept: numbers, moments or durations
# of objects and ``None``; and the object of a number, or of a moment without a time zone, by the
# form of the column.
_STORES: dict[str, tuple[Callable[[Sequence[Any]], np.ndarray], Callable[[Any, Form], Any]]] = {
    "int": (_floats, lambda v, _: int(v) if v == round(v) else v),
    "float": (_floats, lambda v, _: v),
    "decimal": (_floats, _decimal),
    "time": (_times, _time),
    "duration": (_spans, lambda v, _: dt.timedelta(seconds=v)),
    "pandas timedelta": (_spans, lambda v, _: _of_pandas("Timedelta", dt.timedelta(seconds=v))),
    "date": (partial(np.array, dtype="datetime64[D]"), lambda v, _: v.date()),
    "datetime": (_moments, _in_zone),
    "timestamp": (_moments, lambda v, form: _of_pandas("Timestamp", _in_zone(v, form))),
}


def _cells_of_objects(values: Sequence[Any], missing: np.ndarray, form: Form) -> Cells:
    """Cells of Python objects: numbers, dates or labels by what they all are."""
    if missing.any():
        if type(values[int(missing.argmax())]) is float:
            form = form | {"nan": True}  # how gaps are written among objects; None otherwise
        values = [None if gap else v for v, gap in zip(values, missing.tolist(), strict=True)]
    types = set(map(type, values)) - {type(None)}
    if types == {str}:
        return Cells.of_texts(values, missing, form)
    if any(issubclass(t, np.generic) for t in types):
        values = [_python(v) if isinstance(v, np.generic) else v for v in values]
        types = set(map(type, values)) - {type(None)}
    names = {type_name(t) for t in types}
    if names == {"int", "float"}:
        names = {"float"}
    if names == {"timedelta"}:
        names = {"duration"}
    exact = not any(type(v) is int and abs(v) >= EXACT for v in values)
    if len(names) == 1 and names <= _STORES.keys() and exact:
        (store,) = names
        form = form | {"store": store} | _details(store, values)
        if "zone" in form:
            values = [v and v.astimezone(dt.timezone.utc).replace(tzinfo=None) for v in values]
        return cells_of_array(_STORES[store][0](values), missing, form)
    for value in {type(v): v for v in values}.values():
        plain(value)  # or refuse its type
    if len(types) <= 1:
        labels, places = distinct_of(values, None)
    else:  # 1, 1.0 and True are equal as keys: labels of several types differ by type as well
        keys, places = distinct_of([(type(v), v) for v in values], (type(None), None))
        labels = [label for _, label in keys]
    return Cells("label", places, missing, labels, form)


def distinct_of(values: Sequence[Hashable], gap: Hashable) -> tuple[list[Any], np.ndarray]:
    """Distinct values in the order in which they come, and the place of every value; gaps: -1."""
    distinct = dict.fromkeys(values)
    distinct.pop(gap, None)
    places = dict(zip(distinct, range(len(distinct)), strict=True))
    places[gap] = -1
    return list(distinct), np.fromiter(map(places.__getitem__, values), np.int64, len(values))


def _python(value: np.generic) -> object:
    """The Python object of a NumPy scalar; moments finer than it knows are cut."""
    kind = {"M": "datetime64[us]", "m": "timedelta64[us]"}.get(value.dtype.kind)
    return value.item() if kind is None else value.astype(kind).item()


def _details(store: str, values: Sequence[Any]) -> Form:
    """What a form says of decimals and of time zones."""
    if store == "decimal":
        exponents = [v.as_tuple().exponent for v in values if v is not None and v.is_finite()]
        return {"decimals": max([0, *(-exponent for exponent in exponents)])}
    if store not in ("datetime", "timestamp"):
        return {}
    zones = {v.tzinfo for v in values if v is not None}
    if zones == {None}:
        return {}
    if None in zones:
        raise DataError("moments with and without a time zone; give all of them one, or none")
    offsets = [v.utcoffset() or dt.timedelta(0) for v in values if v is not None]
    usual = max(set(offsets), key=offsets.count)
    zone = str(next(iter(zones))) if len(zones) == 1 else "UTC"
    return {"offset": int(usual.total_seconds()), "zone": zone}


def _shortest(wide: np.ndarray, single: np.dtype) -> np.ndarray:
    """The doubles of fewest digits that are the same in lower precision: 0.1, not 0.10000000149."""
    size = np.where(np.isfinite(wide) & (wide != 0), np.abs(wide), 1.0)
    exponent = np.floor(np.log10(size))
    shortest = wide
    for digits in (4, 3) if single == np.float16 else (8, 7, 6):
        unit = 10.0 ** np.clip(exponent - digits + 1, -300, 300)
        # 10^-3 is not exact, 10^3 is: divide by whole numbers where that can be
        inverse = 10.0 ** np.clip(digits - 1 - exponent, -300, 300)
        short = np.where(unit < 1, np.round(wide * inverse) / inverse, np.round(wide / unit) * unit)
        with np.errstate(over="ignore"):
            same = short.astype(single) == wide.astype(single)
        shortest = np.where(same, short, shortest)
    return shortest


# Writing


def objects_of(cells: Cells) -> np.ndarray:
    """Cells as Python objects, ``None`` (NaN if it was so) for a gap."""
    form = cells.form
    gap = np.nan if form.get("nan") else None
    if cells.kind == "label":
        labels = as_objects([*cells.labels, gap])
        return labels[np.where(cells.missing, len(cells.labels), cells.values)]
    column: list[Any] = np.nan_to_num(cells.values).tolist()
    if cells.kind == "date":
        column = [_EPOCH + dt.timedelta(seconds=s) for s in column]
    _, item = _STORES[form.get("store", "datetime" if cells.kind == "date" else "float")]
    objects = as_objects([item(value, form) for value in column])
    objects[cells.missing] = gap
    return objects


def _zone(name: str, offset: int) -> dt.tzinfo:
    import zoneinfo

    try:
        return dt.timezone.utc if name == "UTC" else zoneinfo.ZoneInfo(name)
    except (ValueError, zoneinfo.ZoneInfoNotFoundError):  # an offset rather than a place
        return dt.timezone(dt.timedelta(seconds=offset))


def ahead_of_utc(moments: np.ndarray, form: Form) -> np.ndarray:
    """Seconds by which the clocks of a column's time zone are ahead of UTC at moments (UTC).

    Example:
        >>> winter, summer = 1_704_067_200, 1_719_792_000
        >>> ahead_of_utc(np.array([winter, summer]), {"zone": "Europe/Berlin", "offset": 3600})
        array([3600, 7200])
    """
    zone, first = _zone(form["zone"], form["offset"]), _EPOCH.replace(tzinfo=dt.timezone.utc)
    half_hours = np.clip(moments // 1800, -(10**7), 10**7)  # at which clocks are set; 1400 to 2540
    distinct, places = np.unique(half_hours, return_inverse=True)
    there = [(first + dt.timedelta(seconds=1800 * k)).astimezone(zone) for k in distinct.tolist()]
    ahead = [(moment.utcoffset() or dt.timedelta(0)).total_seconds() for moment in there]
    return np.array(ahead, dtype=np.int64)[places].reshape(np.shape(moments))


def natural(cells: Cells) -> np.ndarray:
    """Moments, durations and plain numbers as NumPy's types (NaT, NaN for gaps), else objects."""
    store = cells.form.get("store")
    if cells.kind == "date" and store is None:
        moments = cells.values.astype("datetime64[s]").astype("datetime64[us]")
        return np.where(cells.missing, np.datetime64("NaT"), moments)
    if store == "duration" and cells.form["dtype"] != "object":
        spans = np.round(np.nan_to_num(cells.values) * 1e6).astype("timedelta64[us]")
        return np.where(cells.missing, np.timedelta64("NaT"), spans)
    if cells.kind == "number" and store is None:
        return np.where(cells.missing, np.nan, cells.values)
    return objects_of(cells)


def as_integers(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Numbers within the range of a type of whole numbers, 0 for gaps."""
    ends = np.iinfo(dtype)
    low, high = max(int(ends.min), -EXACT), min(int(ends.max), EXACT)
    return np.clip(np.round(np.nan_to_num(values)), low, high).astype(dtype)


def array_of(cells: Cells) -> np.ndarray:
    """Cells as an array of the type that their form names; a wider one where gaps need it."""
    array, gaps = natural(cells), bool(cells.missing.any())
    name = cells.form["dtype"]
    if name.startswith("StringDType"):
        option: dict[str, Any] = {"na_object": np.nan if "nan" in name else None}
        option = option if gaps or "na_object" in name else {}
        return array.astype(np.dtypes.StringDType(**option))  # type: ignore[attr-defined]
    dtype = np.dtype(name)
    if array.dtype.kind == "f" and dtype.kind in "iu" and not gaps:
        return as_integers(array, dtype)
    if dtype.kind in "SU" and not gaps:
        text = array.astype(dtype.kind)  # a longer text than any before must not be cut
        return text.astype(max(text.dtype, dtype))
    if gaps and dtype.kind in "iu":
        return array.astype(np.float64)
    return array if gaps and dtype.kind in "bSU" else array.astype(dtype)
