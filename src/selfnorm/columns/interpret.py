"""Cells of text as what they say (numbers, dates, labels), and these as text again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from selfnorm.columns.cells import Cells
from selfnorm.columns.text import (
    FEWEST_NUMBERS,
    MISSING,
    are_slips,
    date_template,
    dates_as_text,
    dates_from,
    holds_names,
    is_gap,
    marked,
    numbers_as_text,
    numbers_from,
    padded,
    template_offset,
    text_decimals,
    unmarked,
    without_slips,
)


def interpreted(cells: Cells, missing: Collection[str], asked: str | None = None) -> Cells:
    """Text as what it says: gaps, numbers, dates; cells of other kinds as they are.

    What the table itself declares a category, or a caller ``asked`` to be one, stays text.
    """
    if cells.texts is None and (cells.kind != "label" or {*map(type, cells.labels)} != {str}):
        return cells
    if asked == "category" or cells.declared:
        return without_gaps(cells, missing)
    numbers = _as_numbers(cells, asked in ("continuous", "cells"))
    if numbers is not None:
        return numbers
    template = date_template([t for t in cells.labels if not is_gap(t)])
    return without_gaps(cells, missing) if template is None else as_dates(cells, template)


def _as_numbers(cells: Cells, names: bool) -> Cells | None:
    """Texts as numbers, without their marks; ``None`` if they are something else.

    A few cells that are none among many numbers are slips of a pen: gaps, told as ``form["odd"]``.
    """
    if cells.numbers is not None:
        texts = cells.texts or []
        if cells.missing.any():
            texts = [text for text in texts if text is not None]
        if names or not holds_names(texts, cells.numbers):
            return _plain_numbers(cells, texts, cells.numbers)
    texts, memo = unmarked(cells.labels)
    texts, odd = without_slips(texts)
    rows = int(np.isin(cells.values, odd).sum())
    if not are_slips(rows, len(cells)) or (odd and len(texts) - len(odd) < FEWEST_NUMBERS):
        return None
    memo |= {"odd": odd} if odd else {}
    numbers = numbers_from(texts, names=names)
    if numbers is None:
        return None
    gaps = np.isnan(numbers)
    gaps[odd] = False
    form = _with_gap(cells, gaps) | {"text": True, "text_decimals": text_decimals(texts)} | memo
    values = np.append(numbers, np.nan)[cells.values]
    return Cells("number", values, np.isnan(values), [], form)


def _plain_numbers(cells: Cells, texts: Sequence[str], numbers: np.ndarray) -> Cells:
    """Cells of the ``numbers`` that ``texts`` hold as they stand."""
    missing = np.isnan(numbers)
    form = cells.form | {"text": True, "text_decimals": text_decimals(texts)}
    if missing.any() and not cells.missing.any():
        gaps = Counter(texts[i] for i in np.flatnonzero(missing).tolist())
        form["gap"] = gaps.most_common(1)[0][0]
    return Cells("number", numbers, missing, [], form)


def as_dates(cells: Cells, template: str) -> Cells:
    """Texts of a template as dates; as they are if one of them is no such date."""
    dates = [t for t in cells.labels if not is_gap(t)]
    moments = dates_from(dates, template)
    if moments is None:
        return cells
    cells = without_gaps(cells, MISSING)
    seconds = np.zeros(len(cells.labels) + 1, dtype=np.int64)
    seconds[[i for i, t in enumerate(cells.labels) if not is_gap(t)]] = moments
    form = cells.form | {"template": template}
    offset = template_offset(template)
    if offset is not None:
        form["offset"] = offset
    shown, mask = padded(dates, template)
    fraction = slice(mask.find("f"), mask.rfind("f") + 1)
    if any(text[fraction].strip("0") for text in shown):
        form["finer"] = True
    return Cells("date", seconds[cells.values], cells.missing, [], form)


def without_gaps(cells: Cells, missing: Collection[str]) -> Cells:
    """The same cells with texts that stand for a gap taken as one."""
    gaps = np.array([is_gap(label, missing) for label in cells.labels] + [True])
    if not gaps[:-1].any():
        return cells
    gone = gaps[cells.values]
    values = np.where(gone, -1, cells.values)
    form = _with_gap(cells, gaps[:-1])
    return replace(cells, values=values, missing=cells.missing | gone, form=form)


def _with_gap(cells: Cells, gaps: np.ndarray) -> dict[str, Any]:
    """The memo of cells with the commonest of the labels that are ``gaps``, if all gaps are so."""
    if cells.missing.any() or not gaps.any():
        return cells.form
    counts = np.bincount(cells.seen, minlength=len(cells.labels))
    usual = max(np.flatnonzero(gaps), key=lambda i: counts[i])
    return cells.form | {"gap": cells.labels[usual]}


def as_read(cells: Cells) -> Cells:
    """Numbers and dates that the table keeps as text, of the types that they are."""
    form = cells.form
    if cells.kind == "number" and "text" in form:
        return replace(cells, form={"dtype": "int64" if form["text_decimals"] == 0 else "float64"})
    if cells.kind == "date" and "template" in form:
        return replace(cells, form={"dtype": "datetime64[s]"})
    return cells


def as_written(cells: Cells) -> Cells:
    """Numbers and dates that the table keeps as text, as text again; gaps as it writes them."""
    form = cells.form
    if cells.kind != "label" and ("text" in form or "template" in form):
        distinct, places = np.unique(cells.values, return_inverse=True)
        if "text" in form:
            labels = numbers_as_text(np.nan_to_num(distinct), form["text_decimals"])
            labels = [marked(label, form) for label in labels]
        else:
            labels = dates_as_text(distinct, form["template"])
        cells = Cells("label", np.where(cells.missing, -1, places), cells.missing, labels, form)
    if cells.kind == "label" and "gap" in form and cells.missing.any():
        places = np.where(cells.missing, len(cells.labels), cells.values)
        none = np.zeros(len(cells), dtype=bool)
        return Cells("label", places, none, [*cells.labels, form["gap"]], form)
    return cells
