"""Dates written as text: how they are written, read, and written again in the same way."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

_DATES = ("YYYY-MM-DD", "YYYY/MM/DD", "YYYY.MM.DD", "DD.MM.YYYY", "DD/MM/YYYY", "MM/DD/YYYY")
_TIMES = ("", "{}hh:mm", "{}hh:mm:ss")
_FIELDS = "YMDhms"


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
    bare = _bare_fields(texts)
    if bare:
        template = date_template([_SINGLE.sub(r"0\1", text) for text in texts])
        if template is None or ("D" in bare and template.startswith("Y")):
            return None
        for letter in bare:
            template = template.replace(2 * letter, letter)
        return template
    if len({len(text) for text in texts}) > 1:
        return None
    fitting = [t for t in _templates(texts[0]) if dates_from(texts, t) is not None]
    return fitting[0] if len(fitting) == 1 else None


_SINGLE = re.compile(r"(?<!\d)(\d)(?=[/.:])")  # a digit alone: of a day, a month or an hour


def _bare_fields(texts: Sequence[str]) -> str:
    """Fields without a leading zero: of dates, of hours, where one is so and none has a zero."""
    marks = {"DM": "/.", "h": ":"}
    return "".join(
        letters
        for letters, after in marks.items()
        if any(re.search(rf"(?<![\d:])\d[{after}]", text) for text in texts)
        and not any(re.search(rf"(?<![\d:])0\d[{after}]", text) for text in texts)
    )


def padded(texts: Sequence[str], template: str) -> tuple[Sequence[str], str]:
    """Texts and their template with two digits for every field."""
    bare = [letter for letter in "DMh" if len(_places(template, letter)) == 1]
    for letter in bare:
        template = template.replace(letter, 2 * letter)
    return [_SINGLE.sub(r"0\1", text) for text in texts] if bare else texts, template


def _templates(text: str) -> list[str]:
    """What the text could be written as, by its digits and marks alone."""
    possible = []
    for date in _DATES:
        for time in _TIMES:
            template = date + time.format(text[10:11])
            head, tail = text[: len(template)], text[len(template) :]
            shape = "".join("#" if c in _FIELDS else c for c in template[:10])
            marks = template[10:].replace("h", "#").replace("m", "#").replace("s", "#")
            if re.sub(r"\d", "#", head) != shape + marks:
                continue
            if time and template[10] not in " T":
                continue
            fraction = re.match(r"\.(\d+)", tail) if "s" in template[10:] else None
            if fraction:
                template += "." + "f" * len(fraction[1])
                tail = tail[len(fraction[0]) :]
            if re.fullmatch(r"Z|[+-]\d\d:?\d\d|", tail):
                possible.append(template + tail)
    return possible


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
    digits = letters.view(np.uint32).astype(np.int64) - ord("0")
    fields = {}
    for letter in _FIELDS:
        value = np.zeros(len(texts), dtype=np.int64)
        for place in _places(template, letter):
            if ((digits[:, place] < 0) | (digits[:, place] > 9)).any():
                return None
            value = 10 * value + digits[:, place]
        fields[letter] = value
    month, day = fields["M"], fields["D"]
    if (month < 1).any() or (month > 12).any() or (day < 1).any() or (fields["Y"] < 1).any():
        return None
    if (fields["h"] > 23).any() or (fields["m"] > 59).any() or (fields["s"] > 59).any():
        return None
    months = ((fields["Y"] - 1970) * 12 + month - 1).astype("datetime64[M]")
    days = months.astype("datetime64[D]") + (day - 1)
    if (days.astype("datetime64[M]") != months).any():
        return None
    seconds = days.astype(np.int64) * 86_400 + fields["h"] * 3600 + fields["m"] * 60 + fields["s"]
    return seconds - (template_offset(template) or 0)


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
    days = (local // 86_400).astype("datetime64[D]")
    months = days.astype("datetime64[M]")
    within = local % 86_400
    fields = {
        "Y": months.astype(np.int64) // 12 + 1970,
        "M": months.astype(np.int64) % 12 + 1,
        "D": (days - months.astype("datetime64[D]")).astype(np.int64) + 1,
        "h": within // 3600,
        "m": within // 60 % 60,
        "s": within % 60,
    }
    letters = np.empty((len(local), len(template)), dtype=np.uint32)
    for place, mark in enumerate(template):
        letters[:, place] = ord("0") if mark == "f" else ord(mark)
    for letter, value in fields.items():
        for place in reversed(_places(template, letter)):
            letters[:, place] = ord("0") + value % 10
            value = value // 10
    return letters.view(f"U{len(template)}").ravel().tolist()
