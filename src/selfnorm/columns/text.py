"""Numbers and gaps written as text: read, and written again in the same way."""

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
    matches = (_MARKED.fullmatch(text.strip()) for text in texts)
    return {(match[2].strip(), match[5].strip()) for match in matches if match}


def unmarked(
    texts: Sequence[str], *, grouped: bool = False, alike: bool = True
) -> tuple[list[str], dict[str, object]]:
    """Numbers without their marks, and these, where all have the same; else texts as they are.

    What is no number stays as it is. 1,250 alone may be a thousand or a little more than one: it is
    read only if the column has its thousands ``grouped``. The marks of a column of numbers need not
    be ``alike``.

    Example:
        >>> unmarked(["-$1,250.50", "$20.00", "none"])
        (['-1250.50', '20.00', 'none'], {'marks': ['$', ''], 'grouped': True})
        >>> unmarked(["1,250", "2,500"])
        (['1,250', '2,500'], {})
    """
    matches = [_MARKED.fullmatch(text.strip()) for text in texts]
    numbers = [match[4] for match in matches if match]
    marks = Counter((match[2], match[5]) for match in matches if match)
    alike = len(marks_of(texts)) == 1 or (not alike and bool(marks))
    open_ = not grouped and all(re.fullmatch(r"\d{1,3},\d{3}", number) for number in numbers)
    if open_ or not alike:
        return list(texts), {}
    plain = [
        match[1] + match[3] + match[4].replace(",", "") if match else text
        for match, text in zip(matches, texts, strict=True)
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
    integer, point, decimals = digits.partition(".")
    if form["grouped"] and integer.isdigit():
        integer = f"{int(integer):,}"
    before, after = form["marks"]
    return f"{sign}{before}{integer}{point}{decimals}{after}"


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
