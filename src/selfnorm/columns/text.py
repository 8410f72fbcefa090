"""Numbers, dates and gaps written as text: read, and written again in the same way."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import chain
from typing import Any

import numpy as np

# Cells that stand for "not known" in files; among numbers and dates nothing else can be meant.
MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?", "-"})

_NUMBER = re.compile(r"(?ai)[+-]?((\d+\.?\d*|\.\d+)(e[+-]?\d+)?|inf|infinity)")
# an amount or a share as people write it: -$1,250.50, 12 %
_MARKED = re.compile(
    r"([+-]?)([$€£¥₹]?\s?)([+-]?)"
    r"((?a:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+\.?\d*|\.\d+))(\s?[%$€£¥₹]?)"
)
_DATES = ("YYYY-MM-DD", "YYYY/MM/DD", "YYYY.MM.DD", "DD.MM.YYYY", "DD/MM/YYYY", "MM/DD/YYYY")
_TIMES = ("", "{}hh:mm", "{}hh:mm:ss")
_FIELDS = "YMDhms"
_NAME = re.compile(r"\n\s*[+-]?(0\d+|\d{16,})\s*\n")  # a line that is no amount: 007
SLIPS, FEWEST_NUMBERS = 0.005, 20  # share of cells that are no numbers, beside so many that are


def is_gap(text: object, missing: Collection[str] = MISSING) -> bool:
    """Whether a cell of text is a gap, whatever its case and the blanks around it.

    Example:
        >>> is_gap(" NA "), is_gap("Namibia")
        (True, False)
    """
    return isinstance(text, str) and text.strip().lower() in missing


def numbers_from(texts: Sequence[str], *, names: bool = False) -> np.ndarray | None:
    """The numbers that texts hold, NaN for a gap; ``None`` unless every other text is a number.

    Whole numbers with leading zeros, or too long for a float, are names (007) rather than amounts:
    they are read only if ``names`` are wanted, too.

    Example:
        >>> numbers_from(["1.5", "?", "-2"])
        array([ 1.5,  nan, -2. ])
        >>> numbers_from(["007", "012"]) is None
        True
    """
    column = np.array(texts, dtype=object)
    try:
        numbers = column.astype(np.float64)
    except ValueError:
        gaps = {text for text in set(texts) if is_gap(text)}
        try:
            numbers = np.where([t in gaps for t in texts], np.nan, column).astype(np.float64)
        except ValueError:
            return None
    nan = np.isnan(numbers)
    joined = "".join(texts)
    # float() reads 1_000, +nan and digits of other scripts, too
    odd = "_" in joined or (not joined.isascii() and re.search(r"(?![0-9])\d", joined))
    if nan.all() or odd or not all(map(is_gap, column[nan])):
        return None
    return None if not names and holds_names(texts, numbers) else numbers


def holds_names(texts: Sequence[str], numbers: np.ndarray) -> bool:
    """Whether some of the whole numbers that texts hold are written as names are."""
    rows = np.flatnonzero(numbers == np.round(numbers)).tolist()
    if 20 * len(rows) < len(texts):
        texts = [texts[row] for row in rows]
    return bool(rows) and _NAME.search("\n".join(["", *texts, ""])) is not None


def marks_of(texts: Sequence[str]) -> set[tuple[str, str]]:
    """What stands before and after the numbers among texts.

    Example:
        >>> sorted(marks_of(["$5", "7 €", "-$1,250.50", "none"]))
        [('', '€'), ('$', '')]
    """
    found = (_MARKED.fullmatch(text.strip()) for text in texts)
    return {(match[2].strip(), match[5].strip()) for match in found if match}


def unmarked(
    texts: Sequence[str], *, grouped: bool = False, alike: bool = True
) -> tuple[list[str], dict[str, Any]]:
    """Numbers without their marks, and these, where all have the same; else texts as they are.

    What is no number stays as it is. Whether 1,250 alone is a thousand cannot be told, unless the
    column is known to have its thousands ``grouped``. Of a column known to hold numbers the marks
    need not be ``alike``.

    Example:
        >>> unmarked(["-$1,250.50", "$20.00", "none"])
        (['-1250.50', '20.00', 'none'], {'marks': ['$', ''], 'grouped': True})
        >>> unmarked(["1,250", "2,500"])
        (['1,250', '2,500'], {})
    """
    found = [_MARKED.fullmatch(text.strip()) for text in texts]
    numbers = [match[4] for match in found if match]
    marks = Counter((match[2], match[5]) for match in found if match)
    alike = len(marks_of(texts)) == 1 or (not alike and bool(marks))
    open_ = not grouped and all(re.fullmatch(r"\d{1,3},\d{3}", number) for number in numbers)
    if open_ or not alike:
        return list(texts), {}
    plain = [
        match[1] + match[3] + match[4].replace(",", "") if match else text
        for match, text in zip(found, texts, strict=True)
    ]
    (usual, _), *_ = marks.most_common(1)
    has_groups = any("," in number for number in numbers)
    form = {"marks": list(usual), "grouped": has_groups}
    return plain, form if any(usual) or has_groups else {}


def without_slips(texts: Sequence[str]) -> tuple[list[str], list[int]]:
    """Texts, of which those that are neither numbers nor gaps are emptied, and where these stand.

    Example:
        >>> without_slips(["1.5", "?", "12..5", "007"])
        (['1.5', '?', '', '007'], [2])
    """
    odd = [k for k, t in enumerate(texts) if not is_gap(t) and not _NUMBER.fullmatch(t.strip())]
    emptied = list(texts)
    for k in odd:
        emptied[k] = ""
    return emptied, odd


def are_slips(rows: int, n: int) -> bool:
    """Whether cells that are no numbers are few enough among ``n`` to be slips of a pen."""
    return rows <= max(1, SLIPS * n)


def marked(number: str, form: dict[str, Any]) -> str:
    """A number as text with the marks of its column.

    Example:
        >>> marked("-1250.50", {"marks": ["$", ""], "grouped": True})
        '-$1,250.50'
    """
    if "marks" not in form:
        return number
    sign, digits = ("-", number[1:]) if number.startswith("-") else ("", number)
    whole, point, decimals = digits.partition(".")
    if form["grouped"] and whole.isdigit():
        whole = f"{int(whole):,}"
    before, after = form["marks"]
    return f"{sign}{before}{whole}{point}{decimals}{after}"


def text_decimals(texts: Sequence[str]) -> int | None:
    """The number of decimals that all texts are written with; ``None`` where they differ.

    Example:
        >>> text_decimals(["1.50", "20.25"]), text_decimals(["1.5", "2"])
        (2, None)
    """
    lengths = set()
    for text in chain((texts[k] for k in range(min(len(texts), 100))), texts):
        if not is_gap(text):
            lengths.add(len(text.strip().partition(".")[2]))
            if len(lengths) > 1 or "e" in text.lower():
                return None
    return lengths.pop() if lengths else None


def numbers_as_text(numbers: np.ndarray, decimals: int | None) -> list[str]:
    """Numbers as text, with that many decimals or as few as tell them apart.

    Example:
        >>> numbers_as_text(np.array([1.5, 2.0]), 2), numbers_as_text(np.array([1.5, 2.0]), None)
        (['1.50', '2.00'], ['1.5', '2'])
    """
    if decimals is not None:
        return [f"{v:.{decimals}f}" for v in numbers.tolist()]
    return [f"{v:.0f}" if v.is_integer() and abs(v) < 1e15 else repr(v) for v in numbers.tolist()]


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
    found = [t for t in _templates(texts[0]) if dates_from(texts, t) is not None]
    return found[0] if len(found) == 1 else None


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
    found = re.search(r"([+-])(\d\d):?(\d\d)$", template)
    if found is None:
        return 0 if template.endswith("Z") else None
    return (1 if found[1] == "+" else -1) * (3600 * int(found[2]) + 60 * int(found[3]))


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
