"""Dates: parts of a calendar, or the time since an earlier date; how they are written as text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np

from selfnorm.columns.cells import Cells, ahead_of_utc
from selfnorm.columns.kinds.base import Coded, Column, Draft, Kind, Part, Support, register
from selfnorm.columns.kinds.number import (
    decode_numbers,
    encode_numbers,
    number_part,
    numbers_within,
)
from selfnorm.columns.text import MISSING, is_gap
from selfnorm.columns.values import PartValues, Values

DAY, HOUR = 86_400, 3_600
_MONDAY = 3  # 1970-01-01 was a Thursday: its week began three days earlier
_NANOSECONDS = (-9_223_372_036, 9_223_372_036)  # 1677 to 2262, counted in 64 bits
_YEARS = (-62_135_596_800, 253_402_300_799)  # 1 to 9999
# as text
_DATES = ("YYYY-MM-DD", "YYYY/MM/DD", "YYYY.MM.DD", "DD.MM.YYYY", "DD/MM/YYYY", "MM/DD/YYYY")
_SHAPE = re.compile(
    r"(\d[\d./-]{8}\d)(?:([ T])\d\d:\d\d(?:(:)\d\d(?:\.(\d+))?)?)?(Z|[+-]\d\d:?\d\d|)"
)
_STANDARD, _FIELDS = "YYYY-MM-DDThh:mm:ss", "YMDhms"


@register("date")
class Date(Kind):
    """Moments: weeks, weekdays, hours and seconds, or months; or how long after another date."""

    holds: ClassVar[str | None] = "date"

    @classmethod
    def detect(cls, draft: Draft) -> tuple[Column, list[Part]]:
        """The column and its parts, as read off a draft."""
        column, cells = draft.column, draft.cells
        offset = cells.form.get("offset", 0)
        seen = int(cells.seen.min()), int(cells.seen.max())
        column = replace(column, kind="date", resolution="day", offset=offset, ends=seen)
        resolution = _resolution(to_clock(column, cells.seen), cells.seen + offset)
        column = replace(column, resolution=resolution)
        local = to_clock(column, cells.seen)
        unit = {"month": "M", "day": "D", "hour": "h", "second": "s"}[resolution]
        ends = np.array([local.min(), local.max()]).astype("datetime64[s]")
        span = " to ".join(str(e).replace("T", " ") for e in ends.astype(f"datetime64[{unit}]"))
        base = _base_of(draft, resolution)
        if base is not None:
            other, begun_at = draft.earlier[base][0].name, draft.earlier[base][1]
            both = ~(cells.missing | begun_at.missing)
            begun = to_clock(column, begun_at.values[both])
            between = (to_clock(column, cells.values[both]) - begun) / tie_unit(resolution)
            part = number_part(draft.place, f"{column.name} - {other}", between, 0)
            words = "days" if resolution == "day" else "seconds"
            summary = f"{words} from {other}, {between.min():g} to {between.max():g}"
            draft.notes.append(
                f"{column.name!r} is counted from {other!r}, which it follows closely"
            )
            return replace(column, base=base, summary=summary), [part]
        parts = []
        for what, values in calendar(local, resolution).items():
            name = f"{column.name} ({what})"
            if what in ("weekday", "hour"):
                levels = tuple(float(v) for v in range(7 if what == "weekday" else 24))
                parts.append(Part(draft.place, name, len(levels), values=levels))
            else:
                limits: Support = (0.0, HOUR - 1.0) if what == "second" else (None, None)
                parts.append(
                    number_part(draft.place, name, values, 0, kind="whole", support=limits)
                )
        return replace(column, summary=f"{resolution}s, {span}"), parts

    def encode(self, cells: Cells) -> list[Coded]:
        """Codes, and numbers beside them."""
        column, base = self.column, self.base
        offset = cells.form.get("offset")
        if (column.form.get("offset") is None) != (offset is None) and not cells.missing.all():
            what = "no time zone" if offset is None else "a time zone"
            self.surprises.append(f"{column.name!r} has {what} here: taken as UTC")
        local, missing = to_clock(column, cells.values), cells.missing
        if base is None:
            numbers = list(calendar(local, column.resolution).values())
            coarse = from_calendar(numbers, column.resolution) != local
            if (coarse & ~missing).any():
                self.surprises.append(f"{column.name!r} is taken to the {column.resolution}")
        else:
            numbers = [(local - to_clock(column, base.values)) / tie_unit(column.resolution)]
            missing = missing | base.missing
        return [encode_numbers(p, v, missing) for p, v in zip(self.parts, numbers, strict=True)]

    def decode(self, coded: Sequence[Coded]) -> Cells:
        """Cells of codes and numbers."""
        column, base = self.column, self.base
        pairs = zip(self.parts, coded, strict=True)
        numbers = np.stack([decode_numbers(part, of_part) for part, of_part in pairs])
        missing = np.isnan(numbers).any(0)
        numbers = np.where(missing, 0.0, numbers)
        if base is None:
            local = from_calendar(list(numbers), column.resolution)
        else:
            between = np.round(numbers[0] * tie_unit(column.resolution)).astype(np.int64)
            missing, local = missing | base.missing, to_clock(column, base.values) + between
        # a draw from a wide distribution of weeks is kept within what the type can hold
        ends = _NANOSECONDS if "[ns" in column.dtype or "zone" in column.form else _YEARS
        return Cells("date", np.clip(from_clock(column, local), *ends), missing, [], column.form)

    def within(self, values: Values) -> tuple[list[PartValues], bool]:
        """The weeks or months in which they are; all, of dates that are counted from others."""
        every, all_ = super().within(values)
        if all_ or self.column.base is not None:
            return every, all_
        moments = np.clip(np.array(values.intervals).reshape(-1), *_YEARS).astype(np.int64)
        local = to_clock(self.column, moments)
        first = next(iter(calendar(local, self.column.resolution).values()))
        weeks = Values.of(map(tuple, first.reshape(-1, 2).tolist()), values.gap)
        return [numbers_within(self.parts[0], weeks, 0), *every[1:]], False

    def coordinate(self, numbers: Sequence[np.ndarray]) -> np.ndarray:
        """Days since 1970, or how long after another date."""
        if self.column.base is not None:
            return numbers[0]
        if self.column.resolution == "month":
            there = ~np.isnan(numbers[0])
            months = np.where(there, numbers[0], 0).astype(int).astype("datetime64[M]")
            return np.where(there, months.astype("datetime64[D]").astype(float), np.nan)
        days = 7 * numbers[0] + numbers[1] - _MONDAY
        return days + numbers[2] / 24 if len(numbers) > 2 else days


def calendar(local: np.ndarray, resolution: str) -> dict[str, np.ndarray]:
    """The parts of moments (seconds on the clock modelled), each a whole number.

    Example:
        >>> {name: int(v[0]) for name, v in calendar(np.array([12 * 3600 + 5]), "second").items()}
        {'week': 0, 'weekday': 3, 'hour': 12, 'second': 5}
    """
    days = local // DAY
    if resolution == "month":
        return {"month": days.astype("datetime64[D]").astype("datetime64[M]").astype(np.float64)}
    parts = {"week": (days + _MONDAY) // 7, "weekday": (days + _MONDAY) % 7}
    if resolution in ("hour", "second"):
        parts["hour"] = local % DAY // HOUR
    if resolution == "second":
        parts["second"] = local % HOUR
    return {name: values.astype(np.float64) for name, values in parts.items()}


def from_calendar(parts: Sequence[np.ndarray], resolution: str) -> np.ndarray:
    """Seconds on the clock modelled, the inverse of :func:`calendar`."""
    first, *others = [np.round(values).astype(np.int64) for values in parts]
    if resolution == "month":
        return first.astype("datetime64[M]").astype("datetime64[D]").astype(np.int64) * DAY
    seconds = (7 * first - _MONDAY) * DAY
    for values, unit in zip(others, (DAY, HOUR, 1), strict=False):
        seconds = seconds + values * unit
    return seconds


def tie_unit(resolution: str) -> int:
    """Seconds in which the time between two dates is counted."""
    return DAY if resolution == "day" else 1


def to_clock(column: Column, moments: np.ndarray) -> np.ndarray:
    """Moments (UTC) on the clock modelled: that of the time zone for days, else one for all."""
    if column.resolution not in ("day", "month") or "zone" not in column.form:
        return moments + column.offset
    return moments + ahead_of_utc(moments, column.form)


def from_clock(column: Column, local: np.ndarray) -> np.ndarray:
    """Moments (UTC) from those on the clock modelled, the inverse of :func:`to_clock`."""
    about = local - column.offset
    return local - (to_clock(column, about) - about)


def _base_of(draft: Draft, resolution: str) -> int | None:
    """The earlier date that this one follows: their differences spread less than a tenth."""
    cells = draft.cells
    best, closest = None, 0.1 * cells.seen.std()
    for j, (column, other) in draft.earlier.items():
        if column.resolution != resolution or column.base is not None or resolution == "month":
            continue
        both = ~(cells.missing | other.missing)
        if both.sum() < max(10, 0.99 * len(cells.seen)):
            continue
        spread = (cells.values - other.values)[both].std()
        if 0 < spread < closest:
            best, closest = j, spread
    return best


def _resolution(local: np.ndarray, steady: np.ndarray) -> str:
    """Of moments by the clocks of their time zone; below days by one that is never set."""
    if (local % DAY).any():
        return "second" if (steady % HOUR).any() else "hour"
    days = (local // DAY).astype("datetime64[D]")
    first = len(days) >= 10 and (days == days.astype("datetime64[M]")).all()
    return "month" if first else "day"


# Cells of text as dates


def as_dates(cells: Cells, template: str) -> Cells:
    """Texts of a template as dates; as they are if one of them is no such date."""
    places = [i for i, text in enumerate(cells.labels) if not is_gap(text)]
    dates = [cells.labels[i] for i in places]
    moments = dates_from(dates, template)
    if moments is None:
        return cells
    cells = cells.without_gaps(MISSING)
    seconds = np.zeros(len(cells.labels) + 1, dtype=np.int64)
    seconds[places] = moments
    form = cells.form | {"template": template}
    offset = template_offset(template)
    if offset is not None:
        form["offset"] = offset
    shown, mask = padded(dates, template)
    fraction = slice(mask.find("f"), mask.rfind("f") + 1)
    if any(text[fraction].strip("0") for text in shown):
        form["finer"] = True
    return Cells("date", seconds[cells.values], cells.missing, [], form)


def date_template(texts: Sequence[str]) -> str | None:
    """How dates are written: ``YYYY-MM-DD hh:mm:ss`` and the like; ``None`` if not all are dates.

    What follows the date and is the same in all of them (``Z``, ``+02:00``) is part of it; a
    fraction of a second is ``f``. Days, months and hours may be written without a leading zero.
    Days and months that could be either (01/02/2020 alone) are no dates.

    Example:
        >>> date_template(["2020-02-29T12:00:00Z", "2021-01-01T00:30:00Z"])
        'YYYY-MM-DDThh:mm:ssZ'
        >>> date_template(["01/02/2020", "31/12/2020"]), date_template(["01/02/2020"])
        ('DD/MM/YYYY', None)
        >>> date_template(["1/31/2020 9:05", "12/1/2020 17:30"])
        'M/D/YYYY h:mm'
    """
    if len(texts) == 0 or not all(8 <= len(text) <= 40 for text in texts):
        return None
    bare = ""  # fields without a leading zero: where one is so and none has a zero
    for letters, after in {"DM": "/.", "h": ":"}.items():
        alone, zero = (rf"(?<![\d:]){digits}[{after}]" for digits in (r"\d", r"0\d"))
        if any(re.search(alone, t) for t in texts) and not any(re.search(zero, t) for t in texts):
            bare += letters
    texts = [_SINGLE.sub(r"0\1", text) for text in texts] if bare else texts
    if len({len(text) for text in texts}) > 1:
        return None
    fitting = [t for t in _templates(texts[0]) if dates_from(texts, t) is not None]
    if len(fitting) != 1 or ("D" in bare and fitting[0].startswith("Y")):
        return None
    return re.sub(rf"([{bare}])\1", r"\1", fitting[0]) if bare else fitting[0]


_SINGLE = re.compile(r"(?<!\d)(\d)(?=[/.:])")  # a digit alone: of a day, a month or an hour


def padded(texts: Sequence[str], template: str) -> tuple[Sequence[str], str]:
    """Texts and their template with two digits for every field."""
    bare = [letter for letter in "DMh" if len(_places(template, letter)) == 1]
    for letter in bare:
        template = template.replace(letter, 2 * letter)
    return [_SINGLE.sub(r"0\1", text) for text in texts] if bare else texts, template


def _templates(text: str) -> list[str]:
    """What the text could be written as, by its digits and marks alone."""
    match = _SHAPE.fullmatch(text)
    if match is None:
        return []
    date, between, seconds, fraction, suffix = match.groups()
    time = f"{between}hh:mm" if between else ""
    time += ":ss" if seconds else ""
    time += "." + "f" * len(fraction) if fraction else ""
    alike = [d for d in _DATES if re.sub(r"[YMD]", "#", d) == re.sub(r"\d", "#", date)]
    return [d + time + suffix for d in alike]


def _places(template: str, letter: str) -> list[int]:
    # D and M only within the date, m and s only within the time; a suffix Z holds none of them
    return [i for i, c in enumerate(template) if c == letter]


def dates_from(texts: Sequence[str], template: str) -> np.ndarray | None:
    """Seconds since 1970 (UTC where the text says how far from it); ``None`` if one is no date.

    Example:
        >>> dates_from(["1970-01-02 00:00:10"], "YYYY-MM-DD hh:mm:ss")
        array([86410])
    """
    texts, template = padded(texts, template)
    if any(len(text) != len(template) for text in texts):
        return None
    letters = np.array(texts, dtype=f"U{len(template)}").view("U1")
    letters = letters.reshape(len(texts), len(template))  # of no text, too
    marks = [i for i, c in enumerate(template) if c not in _FIELDS + "f"]
    if (letters[:, marks] != np.array([template[i] for i in marks])).any():
        return None
    standard = np.tile(np.array(list("0000-01-01T00:00:00")), (len(texts), 1))
    for letter in _FIELDS:
        digits = letters[:, _places(template, letter)]
        if ((digits < "0") | (digits > "9")).any():
            return None
        if digits.size:
            standard[:, _places(_STANDARD, letter)] = digits
    try:
        moments = standard.view("U19").ravel().astype("datetime64[s]")
    except ValueError:  # the 30th of February
        return None
    if (moments < np.datetime64("0001-01-01")).any():
        return None
    return moments.astype(np.int64) - (template_offset(template) or 0)


def template_offset(template: str) -> int | None:
    """How far from UTC, in seconds, the dates of a template are; ``None`` where it does not say.

    Example:
        >>> template_offset("YYYY-MM-DDThh:mm+02:00"), template_offset("YYYY-MM-DD")
        (7200, None)
    """
    offset = re.search(r"([+-])(\d\d):?(\d\d)$", template)
    if offset is None:
        return 0 if template.endswith("Z") else None
    return (1 if offset[1] == "+" else -1) * (3600 * int(offset[2]) + 60 * int(offset[3]))


def dates_as_text(seconds: np.ndarray, template: str) -> list[str]:
    """Moments written by a template, the inverse of :func:`dates_from`.

    Example:
        >>> dates_as_text(np.array([86410]), "DD.MM.YYYY hh:mm:ss")
        ['02.01.1970 00:00:10']
        >>> dates_as_text(np.array([86400 + 3600]), "M/D/YYYY h:mm")
        ['1/2/1970 1:00']
    """
    bare = [letter for letter in "DMh" if len(_places(template, letter)) == 1]
    if bare:
        written = dates_as_text(seconds, padded([], template)[1])
        after = ("/." if "D" in bare else "") + (":" if "h" in bare else "")
        zero = re.compile(rf"(?<![\d:])0(?=\d[{after}])")
        return [zero.sub("", text) for text in written]
    local = seconds + (template_offset(template) or 0)
    standard = np.datetime_as_string(local.astype("datetime64[s]")).astype("U19").view("U1")
    standard = standard.reshape(len(local), len(_STANDARD))
    letters = np.tile(np.array(list(template.replace("f", "0"))), (len(local), 1))
    for letter in _FIELDS:
        if places := _places(template, letter):
            letters[:, places] = standard[:, _places(_STANDARD, letter)]
    return letters.view(f"U{len(template)}").ravel().tolist()
